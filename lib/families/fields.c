/* Table-driven configuration dialects: see fields.h. */
#include "fields.h"

#include <math.h>
#include <string.h>

#include "checked.h"

#define MAX_SIZE ((int64_t)1 << 40) /* no size of a model is larger; keeps later products small */
#define MAX_PATH 128

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory in a configuration");
}

/* ---- small helpers --------------------------------------------------------------------------- */

void ckpt_field_text(const ckpt_json *j, char *out, size_t cap)
{
    ckpt_buf buf = {0};
    size_t n = 0;
    if (j == NULL)
        ckpt_buf_puts(&buf, "nothing");
    else if (!ckpt_json_print(j, 0, true, &buf))
        ckpt_buf_clear(&buf);
    if (buf.data != NULL) {
        n = buf.len < cap - 1 ? buf.len : cap - 1;
        memcpy(out, buf.data, n);
        if (n < buf.len && n >= 3)
            memcpy(out + n - 3, "...", 3);
    }
    out[n] = '\0';
    ckpt_buf_release(&buf);
}

ckpt_json *ckpt_field_number(double v)
{
    const double exact = 9007199254740992.0;
    if (v == floor(v) && fabs(v) <= exact)
        return ckpt_json_new_int((int64_t)v);
    return ckpt_json_new_double(v);
}

bool ckpt_field_applies(const ckpt_json *canon, const char *kinds)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    return kinds == NULL || (pattern != NULL && strpbrk(pattern, kinds) != NULL);
}

int64_t ckpt_canon_int(const ckpt_json *canon, const char *key)
{
    int64_t v = 0;
    return ckpt_json_int(ckpt_json_get(canon, key), &v) ? v : 0;
}

bool ckpt_canon_bool(const ckpt_json *canon, const char *key)
{
    bool v = false;
    return ckpt_json_bool(ckpt_json_get(canon, key), &v) && v;
}

/* Take the next piece of `list` up to `sep` into `out`; NULL at the end. */
static const char *next_piece(const char *list, char sep, char out[MAX_PATH])
{
    if (list == NULL || *list == '\0')
        return NULL;
    const char *end = strchr(list, sep);
    size_t n = end != NULL ? (size_t)(end - list) : strlen(list);
    if (n >= MAX_PATH)
        return NULL;
    memcpy(out, list, n);
    out[n] = '\0';
    return end != NULL ? end + 1 : list + n;
}

ckpt_status ckpt_field_find(const ckpt_json *stored, const char *path, const ckpt_json **value,
                            ckpt_err *err)
{
    char one[MAX_PATH], first[MAX_PATH] = "";
    *value = NULL;
    for (const char *p = path; (p = next_piece(p, '|', one)) != NULL;) {
        const ckpt_json *j = ckpt_json_path(stored, one);
        if (j == NULL || ckpt_json_is_null(j))
            continue;
        if (*value == NULL) {
            *value = j;
            memcpy(first, one, sizeof first);
        } else if (!ckpt_json_equal(*value, j)) {
            char a[64], b[64];
            ckpt_field_text(*value, a, sizeof a);
            ckpt_field_text(j, b, sizeof b);
            return ckpt_fail(err, CKPT_E_FORMAT, "field '%s' is %s, but '%s' is %s", first, a, one,
                             b);
        }
    }
    return CKPT_OK;
}

ckpt_status ckpt_field_put(ckpt_json *object, const char *path, ckpt_json *value, ckpt_err *err)
{
    char one[MAX_PATH];
    const char *p = path;
    if (value == NULL)
        return no_memory(err);
    for (;;) {
        p = next_piece(p, '.', one);
        if (p == NULL) {
            ckpt_json_free(value);
            return ckpt_fail(err, CKPT_E_INTERNAL, "bad field path '%s'", path);
        }
        if (*p == '\0')
            return ckpt_json_set(object, one, value) ? CKPT_OK : no_memory(err);
        ckpt_json *inner = ckpt_json_get(object, one);
        if (!ckpt_json_is_object(inner)) {
            inner = ckpt_json_new_object();
            if (inner == NULL || !ckpt_json_set(object, one, inner)) {
                ckpt_json_free(value);
                return no_memory(err);
            }
        }
        object = inner;
    }
}

ckpt_status ckpt_field_put_text(ckpt_json *object, const char *path, const char *json,
                                ckpt_err *err)
{
    ckpt_json *value = NULL;
    ckpt_status status = ckpt_json_parse(json, strlen(json), &value, err);
    return status != CKPT_OK ? status : ckpt_field_put(object, path, value, err);
}

static bool same(const ckpt_json *a, const ckpt_json *b)
{
    return a == NULL || b == NULL ? a == b : ckpt_json_equal(a, b);
}

bool ckpt_field_changed(const ckpt_field_write *w, const char *keys)
{
    char key[MAX_PATH];
    if (w->was == NULL)
        return true;
    for (const char *p = keys; (p = next_piece(p, ',', key)) != NULL;)
        if (!same(ckpt_json_get(w->canon, key), ckpt_json_get(w->was, key)))
            return true;
    return false;
}

static ckpt_status bad_value(const char *path, const ckpt_json *found, const char *expected,
                             ckpt_err *err)
{
    char text[64], one[MAX_PATH];
    ckpt_field_text(found, text, sizeof text);
    if (next_piece(path, '|', one) == NULL)
        one[0] = '\0';
    return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': found %s, expected %s", one, text, expected);
}

ckpt_status ckpt_field_bool(const ckpt_json *stored, const char *path, bool absent, bool *out,
                            ckpt_err *err)
{
    const ckpt_json *j;
    ckpt_status status = ckpt_field_find(stored, path, &j, err);
    *out = absent;
    if (status == CKPT_OK && j != NULL && !ckpt_json_bool(j, out))
        status = bad_value(path, j, "true or false", err);
    return status;
}

ckpt_status ckpt_field_size(const ckpt_json *stored, const char *path, bool zero, int64_t *out,
                            ckpt_err *err)
{
    const ckpt_json *j;
    int64_t v = 0;
    ckpt_status status = ckpt_field_find(stored, path, &j, err);
    *out = 0;
    if (status != CKPT_OK || j == NULL)
        return status;
    if (!ckpt_json_int(j, &v) || v < (zero ? 0 : 1) || v > MAX_SIZE)
        return bad_value(path, j, zero ? "an integer >= 0" : "an integer > 0", err);
    *out = v;
    return CKPT_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

static ckpt_json *copy_value(const ckpt_field *f, const ckpt_json *j)
{
    double v;
    bool b;
    if (ckpt_json_is_number(j) && ckpt_json_double(j, &v))
        return ckpt_field_number(v);
    if (ckpt_json_bool(j, &b))
        return ckpt_json_new_bool((f->flags & CKPT_FIELD_NOT) ? !b : b);
    return ckpt_json_dup(j);
}

static ckpt_status check_type(const ckpt_field *f, const ckpt_json *j, ckpt_err *err)
{
    int64_t v = 0;
    switch (f->type) {
    case CKPT_FIELD_SIZE:
        if (!ckpt_json_int(j, &v) || v <= 0 || v > MAX_SIZE)
            return bad_value(f->path, j, "an integer > 0", err);
        return CKPT_OK;
    case CKPT_FIELD_REAL:
    case CKPT_FIELD_NUMBER:
        return ckpt_json_is_number(j) ? CKPT_OK : bad_value(f->path, j, "a number", err);
    case CKPT_FIELD_BOOL:
        return ckpt_json_is_bool(j) ? CKPT_OK : bad_value(f->path, j, "true or false", err);
    case CKPT_FIELD_STRING:
        return ckpt_json_is_string(j) ? CKPT_OK : bad_value(f->path, j, "a string", err);
    }
    return ckpt_fail(err, CKPT_E_INTERNAL, "field '%s' has no type", f->key);
}

static ckpt_status read_field(const ckpt_field *f, const ckpt_json *stored, ckpt_json *canon,
                              ckpt_err *err)
{
    const ckpt_json *j = NULL;
    ckpt_json *fallback = NULL;
    ckpt_status status = CKPT_OK;
    if (f->path != NULL)
        CKPT_CHECK(ckpt_field_find(stored, f->path, &j, err));
    if (j != NULL) {
        CKPT_CHECK(check_type(f, j, err));
    } else {
        if (f->absent == NULL)
            goto done;
        CKPT_CHECK(ckpt_json_parse(f->absent, strlen(f->absent), &fallback, err));
        j = fallback;
    }
    ckpt_json *copy = copy_value(f, j);
    if (copy == NULL || !ckpt_json_set(canon, f->key, copy))
        status = no_memory(err);
done:
    ckpt_json_free(fallback);
    return status;
}

static ckpt_status check_constant(const ckpt_constant *c, const ckpt_json *stored, ckpt_err *err)
{
    const ckpt_json *j;
    ckpt_json *allowed = NULL;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_find(stored, c->path, &j, err));
    if (j == NULL)
        return CKPT_OK;
    CKPT_CHECK(ckpt_json_parse(c->allowed, strlen(c->allowed), &allowed, err));
    for (const ckpt_json *a = ckpt_json_child(allowed); a != NULL; a = ckpt_json_next(a))
        if (ckpt_json_equal(a, j))
            goto done;
    char text[64], one[MAX_PATH];
    ckpt_field_text(j, text, sizeof text);
    if (next_piece(c->path, '|', one) == NULL)
        one[0] = '\0';
    status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "field '%s': found %s, supported are %s (%s)", one,
                       text, c->allowed, c->why);
done:
    ckpt_json_free(allowed);
    return status;
}

/* Rebuild in byte order of keys, so that the canonical object prints the same everywhere. */
static ckpt_status sort_keys(ckpt_json *canon, ckpt_err *err)
{
    ckpt_buf buf = {0};
    ckpt_json *sorted = NULL;
    ckpt_status status = CKPT_OK;
    if (!ckpt_json_print(canon, 0, true, &buf))
        CKPT_CHECK(no_memory(err));
    CKPT_CHECK(ckpt_json_parse((const char *)buf.data, buf.len, &sorted, err));
    for (const ckpt_json *c = ckpt_json_child(sorted); c != NULL; c = ckpt_json_next(c)) {
        ckpt_json_delete(canon, ckpt_json_key(c));
        ckpt_json *copy = ckpt_json_dup(c);
        if (copy == NULL || !ckpt_json_set(canon, ckpt_json_key(c), copy))
            CKPT_CHECK(no_memory(err));
    }
done:
    ckpt_json_free(sorted);
    ckpt_buf_release(&buf);
    return status;
}

ckpt_status ckpt_dialect_read(const ckpt_dialect *d, const ckpt_json *stored, ckpt_json *canon,
                              ckpt_err *err)
{
    ckpt_status status;
    if (!ckpt_json_is_object(stored))
        return ckpt_fail(err, CKPT_E_FORMAT, "%s configuration is not an object", d->name);
    CKPT_CHECK(d->read_pattern(stored, canon, err));
    for (size_t i = 0; i < d->n_constants; i++)
        if (ckpt_field_applies(canon, d->constants[i].kinds))
            CKPT_CHECK(check_constant(&d->constants[i], stored, err));
    for (size_t i = 0; i < d->n_fields; i++)
        if (ckpt_field_applies(canon, d->fields[i].kinds))
            CKPT_CHECK(read_field(&d->fields[i], stored, canon, err));
    CKPT_CHECK(d->read_rest(stored, canon, err));
    CKPT_CHECK(ckpt_config_check(canon, err));
    CKPT_CHECK(sort_keys(canon, err));
done:
    return status;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Null or a value in every spelling that is there already, else in the first one. */
static ckpt_status put_spellings(ckpt_json *out, const char *path, const ckpt_json *value,
                                 ckpt_err *err)
{
    char one[MAX_PATH];
    int found = 0;
    ckpt_status status = CKPT_OK;
    for (const char *p = path; (p = next_piece(p, '|', one)) != NULL;) {
        if (ckpt_json_path(out, one) == NULL)
            continue;
        found++;
        CKPT_CHECK(ckpt_field_put(out, one, ckpt_json_dup(value), err));
    }
    if (found == 0 && next_piece(path, '|', one) != NULL)
        status = ckpt_field_put(out, one, ckpt_json_dup(value), err);
done:
    return status;
}

static ckpt_json *stored_value(const ckpt_field *f, const ckpt_json *value)
{
    double v = 0;
    bool b = false;
    if (value == NULL)
        return ckpt_json_new_null();
    if (f->type == CKPT_FIELD_REAL && ckpt_json_double(value, &v))
        return ckpt_json_new_double(v);
    if ((f->flags & CKPT_FIELD_NOT) && ckpt_json_bool(value, &b))
        return ckpt_json_new_bool(!b);
    return ckpt_json_dup(value);
}

static ckpt_status write_field(const ckpt_field *f, const ckpt_field_write *w, ckpt_err *err)
{
    const ckpt_json *value = ckpt_json_get(w->canon, f->key);
    bool settled = (f->flags & (CKPT_FIELD_NULLABLE | CKPT_FIELD_OPTIONAL)) != 0;
    if (value == NULL && !settled)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is not known, but the configuration needs it",
                         f->key);
    if (f->path == NULL || (f->flags & CKPT_FIELD_READ) || !ckpt_field_changed(w, f->key))
        return CKPT_OK;
    if (value == NULL && (f->flags & CKPT_FIELD_OPTIONAL) && w->was == NULL)
        return CKPT_OK;
    ckpt_json *stored = stored_value(f, value);
    if (stored == NULL)
        return no_memory(err);
    ckpt_status status = put_spellings(w->out, f->path, stored, err);
    ckpt_json_free(stored);
    return status;
}

static ckpt_status write_constant(const ckpt_constant *c, const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status;
    const ckpt_json *j;
    ckpt_json *allowed = NULL;
    CKPT_CHECK(ckpt_field_find(w->out, c->path, &j, err));
    if (j != NULL || w->foreign != NULL)
        return CKPT_OK;
    CKPT_CHECK(ckpt_json_parse(c->allowed, strlen(c->allowed), &allowed, err));
    status = put_spellings(w->out, c->path, ckpt_json_child(allowed), err);
done:
    ckpt_json_free(allowed);
    return status;
}

static const ckpt_field *field_of_key(const ckpt_dialect *d, const char *key)
{
    for (size_t i = 0; i < d->n_fields; i++)
        if (strcmp(d->fields[i].key, key) == 0 && d->fields[i].path != NULL)
            return &d->fields[i];
    return NULL;
}

static ckpt_status cannot_say(const ckpt_dialect *d, const char *key, const ckpt_json *want,
                              const ckpt_json *back, ckpt_err *err)
{
    char a[64], b[64], path[MAX_PATH];
    const ckpt_field *f = field_of_key(d, key);
    ckpt_field_text(want, a, sizeof a);
    ckpt_field_text(back, b, sizeof b);
    if (f == NULL || next_piece(f->path, '|', path) == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s cannot say %s %s: it means %s", d->name, key,
                         a, b);
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s cannot say %s %s: field '%s' would mean %s",
                     d->name, key, a, path, b);
}

/* The written configuration must mean what was asked for, whatever the earlier one carried. */
static ckpt_status check_back(const ckpt_dialect *d, const ckpt_json *canon, const ckpt_json *out,
                              ckpt_err *err)
{
    ckpt_status status;
    ckpt_json *back = ckpt_json_new_object();
    if (back == NULL)
        return no_memory(err);
    CKPT_TRY(ckpt_dialect_read(d, out, back, err), "%s cannot say this model", d->name);
    for (const ckpt_json *c = ckpt_json_child(canon); c != NULL; c = ckpt_json_next(c)) {
        const ckpt_json *b = ckpt_json_get(back, ckpt_json_key(c));
        if (!same(c, b))
            CKPT_CHECK(cannot_say(d, ckpt_json_key(c), c, b, err));
    }
    for (const ckpt_json *b = ckpt_json_child(back); b != NULL; b = ckpt_json_next(b))
        if (ckpt_json_get(canon, ckpt_json_key(b)) == NULL)
            CKPT_CHECK(cannot_say(d, ckpt_json_key(b), NULL, b, err));
done:
    ckpt_json_free(back);
    if (status == CKPT_E_FORMAT) { /* our own output: a limit of the dialect, not bad input */
        status = CKPT_E_UNSUPPORTED;
        if (err != NULL)
            err->code = status;
    }
    return status;
}

/* Canonical reading of the earlier configuration, or none when it is of another dialect or says
 * something unsupported: then every field is written anew and check_back decides. */
static ckpt_status read_earlier(const ckpt_dialect *d, const ckpt_json *foreign, ckpt_json **out,
                                ckpt_err *err)
{
    ckpt_json *was = ckpt_json_new_object();
    ckpt_status status = was != NULL ? ckpt_dialect_read(d, foreign, was, NULL) : CKPT_E_NOMEM;
    if (status != CKPT_OK) {
        ckpt_json_free(was);
        was = NULL;
    }
    *out = was;
    return status == CKPT_E_NOMEM ? no_memory(err) : CKPT_OK;
}

/* An earlier configuration may name depths of multi-token prediction whose tensors were never stored
 * (transformers drops them when it saves); the model then has none, but what the configuration says
 * stays. *out is the canonical configuration with them, or NULL. */
static ckpt_status keep_depths(const ckpt_json *canon, const ckpt_json *was, ckpt_json **out,
                               ckpt_err *err)
{
    static const char *const keys[] = {"pattern", "mtp_layers", "mtp_blocks"};
    const char *now = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    const char *before = ckpt_json_string(ckpt_json_get(was, "pattern"));
    int64_t blocks = ckpt_canon_int(was, "mtp_blocks");
    if (now == NULL || before == NULL || blocks == 0 || ckpt_canon_int(canon, "mtp_blocks") != 0 ||
        strlen(before) != strlen(now) + (size_t)blocks || strncmp(before, now, strlen(now)) != 0)
        return CKPT_OK;
    for (const ckpt_json *c = ckpt_json_child(canon); c != NULL; c = ckpt_json_next(c))
        if (strcmp(ckpt_json_key(c), "pattern") != 0 &&
            !same(c, ckpt_json_get(was, ckpt_json_key(c))))
            return CKPT_OK; /* another model */
    *out = ckpt_json_dup(canon);
    for (size_t i = 0; *out != NULL && i < 3; i++) {
        ckpt_json *value = ckpt_json_dup(ckpt_json_get(was, keys[i]));
        if (value == NULL || !ckpt_json_set(*out, keys[i], value))
            return no_memory(err);
    }
    return *out != NULL ? CKPT_OK : no_memory(err);
}

ckpt_status ckpt_dialect_write(const ckpt_dialect *d, const ckpt_json *canon,
                               const ckpt_json *foreign, const ckpt_mesh *mesh, ckpt_json **out,
                               ckpt_err *err)
{
    ckpt_status status;
    ckpt_json *was = NULL;
    ckpt_json *longer = NULL;
    ckpt_field_write w = {
        .name = d->name, .canon = canon, .mesh = {1, 1, 1, 1, 1, 1}
    };
    *out = NULL;
    CKPT_CHECK(ckpt_config_check(canon, err));
    w.has_mesh = mesh != NULL;
    if (mesh != NULL)
        w.mesh = *mesh;
    if (w.mesh.etp == 0)
        w.mesh.etp = w.mesh.tp;
    if (w.mesh.tp < 1 || w.mesh.pp < 1 || w.mesh.ep < 1 || w.mesh.etp < 1 || w.mesh.cp < 1)
        CKPT_CHECK(ckpt_fail(err, CKPT_E_USAGE, "parallel sizes must be at least 1"));
    if (ckpt_json_is_object(foreign) && d->claims(foreign) > 0) {
        w.foreign = foreign;
        CKPT_CHECK(read_earlier(d, foreign, &was, err));
        w.was = was;
        CKPT_CHECK(keep_depths(canon, was, &longer, err));
        w.canon = canon = longer != NULL ? longer : canon;
    }
    w.out = w.foreign != NULL ? ckpt_json_dup(foreign) : ckpt_json_new_object();
    if (w.out == NULL)
        CKPT_CHECK(no_memory(err));
    for (size_t i = 0; i < d->n_constants; i++)
        if (d->constants[i].write && ckpt_field_applies(canon, d->constants[i].kinds))
            CKPT_CHECK(write_constant(&d->constants[i], &w, err));
    for (size_t i = 0; i < d->n_fields; i++)
        if (ckpt_field_applies(canon, d->fields[i].kinds))
            CKPT_CHECK(write_field(&d->fields[i], &w, err));
    CKPT_CHECK(d->write_rest(&w, err));
    CKPT_CHECK(check_back(d, canon, w.out, err));
    *out = w.out;
    w.out = NULL;
done:
    ckpt_json_free(longer);
    ckpt_json_free(was);
    ckpt_json_free(w.out);
    return status;
}
