/* ckpt.manifest.json: reading, writing and filling. The format is in manifest.h. */
#include "manifest.h"

#include "checked.h"
#include "shard.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define MANIFEST_VERSION 1
#define MANIFEST_MAX_BYTES ((uint64_t)4 << 30)

/* ---- names and places ------------------------------------------------------------------------ */

bool ckpt_manifest_single(const ckpt_source *src)
{
    size_t n = strlen(src->path);
    if (src->is_dir)
        return false;
    return n < 5 || strcmp(src->path + n - 5, ".json") != 0;
}

char *ckpt_manifest_path(const ckpt_source *src, ckpt_arena *arena)
{
    if (ckpt_manifest_single(src))
        return ckpt_arena_printf(arena, "%s%s", src->path, CKPT_MANIFEST_SUFFIX);
    return ckpt_path_join(arena, src->root, CKPT_MANIFEST_NAME);
}

static ckpt_status epoch_of(const ckpt_source *src, time_t *out, bool *known, ckpt_err *err)
{
    const char *epoch = getenv("SOURCE_DATE_EPOCH");
    if (epoch != NULL && *epoch != '\0') {
        char *end = NULL;
        long long v = strtoll(epoch, &end, 10);
        if (*end == '\0' && v >= 0) {
            *out = (time_t)v;
            *known = true;
            return CKPT_OK;
        }
    }
    *known = false;
    for (size_t i = 0; i < ckpt_source_n_real(src); i++) {
        struct stat st;
        if (stat(src->files[i].path, &st) != 0) {
            if (errno == ENOENT || errno == ENOTDIR)
                continue;
            return ckpt_fail_errno(err, errno, "%s", src->files[i].path);
        }
        if (!*known || st.st_mtime > *out)
            *out = st.st_mtime;
        *known = true;
    }
    return CKPT_OK;
}

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

ckpt_status ckpt_manifest_created(const ckpt_source *src, ckpt_arena *arena, const char **created,
                                  ckpt_err *err)
{
    time_t t = 0;
    struct tm tm;
    char text[32];
    bool known;
    *created = NULL;
    ckpt_status status = epoch_of(src, &t, &known, err);
    if (status != CKPT_OK || !known || gmtime_r(&t, &tm) == NULL ||
        strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &tm) == 0)
        return status;
    *created = ckpt_arena_strdup(arena, text);
    return *created != NULL ? CKPT_OK : no_memory(err);
}

/* ---- parsing --------------------------------------------------------------------------------- */

static ckpt_status parse_hex(const ckpt_json *object, const char *key, bool required, bool *has,
                             uint8_t out[CKPT_SHA256_LEN], ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(object, key);
    *has = j != NULL;
    if (j == NULL && !required)
        return CKPT_OK;
    const char *hex = ckpt_json_string(j);
    if (hex == NULL || !ckpt_unhex(hex, out))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not 64 lower-case hexadecimal digits", key);
    return CKPT_OK;
}

static ckpt_status parse_text(ckpt_manifest *m, const ckpt_json *object, const char *key,
                              const char **out, ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(object, key);
    *out = NULL;
    if (j == NULL || ckpt_json_is_null(j))
        return CKPT_OK;
    if (!ckpt_json_is_string(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not a string", key);
    *out = ckpt_arena_strdup(&m->arena, ckpt_json_string(j));
    return *out != NULL ? CKPT_OK : no_memory(err);
}

static ckpt_status parse_mesh(ckpt_manifest *m, const ckpt_json *doc, ckpt_err *err)
{
    const ckpt_json *mesh = ckpt_json_get(doc, "mesh");
    for (int i = 0; i < CKPT_MESH_AXES; i++) {
        const ckpt_json *j = ckpt_json_get(mesh, ckpt_mesh_axes[i]);
        int64_t v = 1;
        if (j != NULL && (!ckpt_json_int(j, &v) || v < 1 || v > 1 << 20))
            return ckpt_fail(err, CKPT_E_FORMAT, "mesh: '%s' is not a size of at least 1",
                             ckpt_mesh_axes[i]);
        *ckpt_mesh_size(&m->mesh, i) = (int)v;
    }
    return CKPT_OK;
}

static ckpt_status parse_file(ckpt_manifest *m, const ckpt_json *j, ckpt_manifest_file *out,
                              ckpt_err *err)
{
    ckpt_status status;
    int64_t size = 0;
    const char *name = ckpt_json_key(j);
    if (!ckpt_name_is_safe(name, true))
        return ckpt_fail(err, CKPT_E_FORMAT, "the name leaves the checkpoint's directory");
    if (!ckpt_json_int(ckpt_json_get(j, "size"), &size) || size < 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "'size' is not a byte count");
    out->size = (uint64_t)size;
    CKPT_CHECK(parse_hex(j, "sha256", false, &out->has_sha256, out->sha256, err));
    CKPT_CHECK(parse_hex(j, "rest", false, &out->has_rest, out->rest, err));
    out->name = ckpt_arena_strdup(&m->arena, name);
    if (out->name == NULL)
        status = no_memory(err);
done:
    return status;
}

static ckpt_status parse_leaves(ckpt_manifest *m, const ckpt_json *j, ckpt_manifest_tensor *out,
                                uint64_t expected, ckpt_sha256 *sha, ckpt_err *err)
{
    uint64_t n = 0;
    if (j == NULL)
        return CKPT_OK;
    if (!ckpt_json_is_array(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "'leaves' is not an array");
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c))
        n++;
    if (n != expected)
        return ckpt_fail(err, CKPT_E_FORMAT, "%llu leaves, expected %llu", (unsigned long long)n,
                         (unsigned long long)expected);
    out->hash.leaves = ckpt_arena_array(&m->arena, (size_t)n, CKPT_SHA256_LEN);
    if (out->hash.leaves == NULL && n > 0)
        return no_memory(err);
    uint8_t *p = out->hash.leaves;
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c)) {
        const char *hex = ckpt_json_string(c);
        if (hex == NULL || !ckpt_unhex(hex, p))
            return ckpt_fail(err, CKPT_E_FORMAT, "leaf %llu is not 64 hexadecimal digits",
                             (unsigned long long)(uint64_t)(p - out->hash.leaves) /
                                 CKPT_SHA256_LEN);
        p += CKPT_SHA256_LEN;
    }
    out->hash.n_leaves = n;
    uint8_t digest[CKPT_SHA256_LEN];
    ckpt_tensor_digest(sha, out->dtype, out->rank, out->dims, out->hash.leaves, (size_t)n, digest);
    if (memcmp(digest, out->hash.digest, sizeof digest) != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "the digest contradicts its leaves");
    return CKPT_OK;
}

static ckpt_status parse_shape(ckpt_manifest *m, const ckpt_json *j, ckpt_manifest_tensor *out,
                               ckpt_err *err)
{
    int64_t dims[CKPT_MAX_RANK];
    int rank = 0;
    if (!ckpt_json_is_array(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "'shape' is not an array");
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c)) {
        if (rank == CKPT_MAX_RANK)
            return ckpt_fail(err, CKPT_E_FORMAT, "more than %d dimensions", CKPT_MAX_RANK);
        if (!ckpt_json_int(c, &dims[rank]) || dims[rank] < 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "dimension %d is not a size", rank);
        rank++;
    }
    int64_t *copy = ckpt_arena_array(&m->arena, (size_t)rank + 1, sizeof *copy);
    if (copy == NULL)
        return no_memory(err);
    memcpy(copy, dims, (size_t)rank * sizeof *copy);
    out->dims = copy;
    out->rank = rank;
    return CKPT_OK;
}

static ckpt_status parse_tensor(ckpt_manifest *m, const ckpt_json *j, ckpt_manifest_tensor *out,
                                ckpt_sha256 *sha, ckpt_err *err)
{
    ckpt_status status;
    bool has = false;
    int64_t numel = 0;
    uint64_t bytes = 0;
    const char *dtype = ckpt_json_string(ckpt_json_get(j, "dtype"));
    if (dtype == NULL || !ckpt_dtype_from_name(dtype, strlen(dtype), &out->dtype))
        return ckpt_fail(err, CKPT_E_FORMAT, "unknown dtype '%s'", dtype != NULL ? dtype : "");
    CKPT_CHECK(parse_shape(m, ckpt_json_get(j, "shape"), out, err));
    if (!ckpt_numel(out->rank, out->dims, &numel) || !ckpt_dtype_bytes(out->dtype, numel, &bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "the size overflows");
    CKPT_CHECK(parse_hex(j, "digest", true, &has, out->hash.digest, err));
    CKPT_CHECK(parse_leaves(m, ckpt_json_get(j, "leaves"), out, ckpt_leaf_count(bytes), sha, err));
    out->name = ckpt_arena_strdup(&m->arena, ckpt_json_key(j));
    if (out->name == NULL)
        status = no_memory(err);
done:
    return status;
}

static int by_tensor_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_manifest_tensor *)a)->name, ((const ckpt_manifest_tensor *)b)->name);
}

static int by_file_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_manifest_file *)a)->name, ((const ckpt_manifest_file *)b)->name);
}

static void sort_entries(ckpt_manifest *m)
{
    if (m->n_tensors > 1)
        qsort(m->tensors, m->n_tensors, sizeof *m->tensors, by_tensor_name);
    if (m->n_files > 1)
        qsort(m->files, m->n_files, sizeof *m->files, by_file_name);
}

static size_t count_children(const ckpt_json *j)
{
    size_t n = 0;
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c))
        n++;
    return n;
}

static ckpt_status parse_entries(ckpt_manifest *m, const ckpt_json *doc, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_sha256 sha = {0};
    const ckpt_json *files = ckpt_json_get(doc, "files");
    const ckpt_json *tensors = ckpt_json_get(doc, "tensors");
    if (!ckpt_json_is_object(files) || !ckpt_json_is_object(tensors))
        return ckpt_fail(err, CKPT_E_FORMAT, "'files' and 'tensors' are not both objects");
    CKPT_CHECK(ckpt_sha256_init(&sha, err));
    m->files = ckpt_arena_array(&m->arena, count_children(files) + 1, sizeof *m->files);
    m->tensors = ckpt_arena_array(&m->arena, count_children(tensors) + 1, sizeof *m->tensors);
    if (m->files == NULL || m->tensors == NULL) {
        status = no_memory(err);
        goto done;
    }
    for (const ckpt_json *c = ckpt_json_child(files); c != NULL; c = ckpt_json_next(c)) {
        CKPT_TRY(parse_file(m, c, &m->files[m->n_files], err), "file '%s'", ckpt_json_key(c));
        m->n_files++;
    }
    for (const ckpt_json *c = ckpt_json_child(tensors); c != NULL; c = ckpt_json_next(c)) {
        CKPT_TRY(parse_tensor(m, c, &m->tensors[m->n_tensors], &sha, err), "tensor '%s'",
                 ckpt_json_key(c));
        m->n_tensors++;
    }
    sort_entries(m);
done:
    ckpt_sha256_release(&sha);
    return status;
}

/* The root a manifest states must follow from its own tensor digests: otherwise it was edited. */
static ckpt_status root_of(const ckpt_manifest *m, uint8_t out[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    const char **names = ckpt_arena_array(&scratch, m->n_tensors + 1, sizeof *names);
    uint8_t *digests = ckpt_arena_array(&scratch, m->n_tensors + 1, CKPT_SHA256_LEN);
    if (names == NULL || digests == NULL) {
        status = no_memory(err);
        goto done;
    }
    for (size_t i = 0; i < m->n_tensors; i++) {
        names[i] = m->tensors[i].name;
        memcpy(digests + i * CKPT_SHA256_LEN, m->tensors[i].hash.digest, CKPT_SHA256_LEN);
    }
    CKPT_CHECK(ckpt_root_digest(names, digests, m->n_tensors, out, err));
done:
    ckpt_arena_free(&scratch);
    return status;
}

static ckpt_status parse_lossy(ckpt_manifest *m, const ckpt_json *j, ckpt_err *err)
{
    if (j == NULL)
        return CKPT_OK;
    if (!ckpt_json_is_array(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "'lossy' is not an array");
    m->lossy = ckpt_arena_array(&m->arena, count_children(j) + 1, sizeof *m->lossy);
    if (m->lossy == NULL)
        return no_memory(err);
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c)) {
        const char *text = ckpt_json_string(c);
        if (text == NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "'lossy' holds something that is not a string");
        m->lossy[m->n_lossy] = ckpt_arena_strdup(&m->arena, text);
        if (m->lossy[m->n_lossy++] == NULL)
            return no_memory(err);
    }
    return CKPT_OK;
}

static ckpt_status parse_object(const ckpt_json *doc, const char *key, ckpt_json **out,
                                ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(doc, key);
    if (j == NULL)
        return CKPT_OK;
    if (!ckpt_json_is_object(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not an object", key);
    *out = ckpt_json_dup(j);
    return *out != NULL ? CKPT_OK : no_memory(err);
}

/* The configuration's own digest guards it as the root guards the tensors. */
static ckpt_status check_config(const ckpt_manifest *m, const ckpt_json *doc, ckpt_err *err)
{
    ckpt_status status;
    bool has = false;
    uint8_t stated[CKPT_SHA256_LEN], actual[CKPT_SHA256_LEN];
    CKPT_CHECK(parse_hex(doc, "config_digest", false, &has, stated, err));
    if (!has || m->config == NULL)
        goto done;
    CKPT_CHECK(ckpt_config_digest(m->config, actual, err));
    if (memcmp(stated, actual, sizeof stated) != 0)
        status = ckpt_fail(err, CKPT_E_FORMAT, "config_digest contradicts config");
done:
    return status;
}

static ckpt_status parse_doc(ckpt_manifest *m, const ckpt_json *doc, ckpt_err *err)
{
    ckpt_status status;
    bool has = false;
    int64_t version = 0;
    uint8_t root[CKPT_SHA256_LEN];
    if (!ckpt_json_int(ckpt_json_get(doc, "manifest_version"), &version))
        return ckpt_fail(err, CKPT_E_FORMAT, "no 'manifest_version': not a ckpt manifest");
    if (version != MANIFEST_VERSION)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "manifest_version %lld, expected %d",
                         (long long)version, MANIFEST_VERSION);
    CKPT_CHECK(parse_text(m, doc, "family", &m->family, err));
    CKPT_CHECK(parse_text(m, doc, "layout", &m->layout, err));
    CKPT_CHECK(parse_text(m, doc, "container", &m->container, err));
    CKPT_CHECK(parse_text(m, doc, "created", &m->created, err));
    CKPT_CHECK(parse_mesh(m, doc, err));
    CKPT_CHECK(parse_object(doc, "config", &m->config, err));
    CKPT_CHECK(parse_object(doc, "foreign", &m->foreign, err));
    CKPT_CHECK(parse_object(doc, "training", &m->training, err));
    CKPT_CHECK(parse_text(m, doc, "quant_policy", &m->quant_policy, err));
    CKPT_CHECK(check_config(m, doc, err));
    CKPT_CHECK(parse_lossy(m, ckpt_json_get(doc, "lossy"), err));
    CKPT_CHECK(parse_hex(doc, "root", true, &has, m->root, err));
    CKPT_CHECK(parse_hex(doc, "source_root", false, &m->has_source_root, m->source_root, err));
    CKPT_CHECK(parse_entries(m, doc, err));
    CKPT_CHECK(root_of(m, root, err));
    if (memcmp(root, m->root, sizeof root) != 0)
        status = ckpt_fail(err, CKPT_E_FORMAT, "the root contradicts the tensor digests");
done:
    return status;
}

ckpt_status ckpt_manifest_parse(const char *text, size_t n, ckpt_manifest *out, ckpt_err *err)
{
    ckpt_status status;
    ckpt_json *doc = NULL;
    memset(out, 0, sizeof *out);
    CKPT_CHECK(ckpt_json_parse(text, n, &doc, err));
    CKPT_CHECK(parse_doc(out, doc, err));
done:
    ckpt_json_free(doc);
    if (status != CKPT_OK)
        ckpt_manifest_release(out);
    return status;
}

ckpt_status ckpt_manifest_read(const char *path, ckpt_manifest *out, ckpt_err *err)
{
    ckpt_status status;
    ckpt_buf text = {0};
    memset(out, 0, sizeof *out);
    CKPT_CHECK(ckpt_read_file(path, MANIFEST_MAX_BYTES, &text, err));
    CKPT_TRY(ckpt_manifest_parse((const char *)text.data, text.len, out, err), "%s", path);
done:
    ckpt_buf_release(&text);
    return status;
}

ckpt_status ckpt_manifest_load(const ckpt_source *src, ckpt_manifest *out, bool *found,
                               ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    memset(out, 0, sizeof *out);
    char *path = ckpt_manifest_path(src, &scratch);
    *found = path != NULL && ckpt_exists(path);
    if (path == NULL)
        status = no_memory(err);
    else if (*found)
        status = ckpt_manifest_read(path, out, err);
    else if ((*found = src->manifest != NULL))
        CKPT_TRY(ckpt_manifest_parse(src->manifest, src->manifest_len, out, err),
                 "%s: manifest inside", src->path);
done:
    ckpt_arena_free(&scratch);
    return status;
}

void ckpt_manifest_release(ckpt_manifest *m)
{
    ckpt_json_free(m->config);
    ckpt_json_free(m->foreign);
    ckpt_json_free(m->training);
    ckpt_arena_free(&m->arena);
    memset(m, 0, sizeof *m);
}

/* ---- lookup ---------------------------------------------------------------------------------- */

int64_t ckpt_manifest_find_tensor(const ckpt_manifest *m, const char *name)
{
    ckpt_manifest_tensor key = {.name = name};
    if (m->n_tensors == 0)
        return -1;
    const ckpt_manifest_tensor *hit =
        bsearch(&key, m->tensors, m->n_tensors, sizeof *m->tensors, by_tensor_name);
    return hit != NULL ? hit - m->tensors : -1;
}

int64_t ckpt_manifest_find_file(const ckpt_manifest *m, const char *name)
{
    ckpt_manifest_file key = {.name = name};
    if (m->n_files == 0)
        return -1;
    const ckpt_manifest_file *hit =
        bsearch(&key, m->files, m->n_files, sizeof *m->files, by_file_name);
    return hit != NULL ? hit - m->files : -1;
}

/* ---- printing -------------------------------------------------------------------------------- */

static void put_string(ckpt_buf *b, const char *s)
{
    if (s == NULL)
        ckpt_buf_puts(b, "null");
    else
        ckpt_json_quote(b, s, strlen(s));
}

static void put_hex(ckpt_buf *b, const uint8_t digest[CKPT_SHA256_LEN])
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_hex(digest, hex);
    ckpt_buf_printf(b, "\"%s\"", hex);
}

static void put_member_hex(ckpt_buf *b, const char *key, const uint8_t digest[CKPT_SHA256_LEN])
{
    ckpt_buf_printf(b, ",\"%s\":", key);
    put_hex(b, digest);
}

static void put_files(const ckpt_manifest *m, ckpt_buf *b)
{
    ckpt_buf_puts(b, ",\n\"files\":{");
    for (size_t i = 0; i < m->n_files; i++) {
        const ckpt_manifest_file *f = &m->files[i];
        ckpt_buf_puts(b, i > 0 ? ",\n" : "\n");
        put_string(b, f->name);
        ckpt_buf_printf(b, ":{\"size\":%llu", (unsigned long long)f->size);
        if (f->has_sha256)
            put_member_hex(b, "sha256", f->sha256);
        if (f->has_rest)
            put_member_hex(b, "rest", f->rest);
        ckpt_buf_putc(b, '}');
    }
    ckpt_buf_puts(b, "}");
}

static void put_tensors(const ckpt_manifest *m, ckpt_buf *b)
{
    ckpt_buf_puts(b, ",\n\"tensors\":{");
    for (size_t i = 0; i < m->n_tensors; i++) {
        const ckpt_manifest_tensor *t = &m->tensors[i];
        ckpt_buf_puts(b, i > 0 ? ",\n" : "\n");
        put_string(b, t->name);
        ckpt_buf_printf(b, ":{\"dtype\":\"%s\",\"shape\":[", ckpt_dtype_get(t->dtype)->name);
        for (int d = 0; d < t->rank; d++)
            ckpt_buf_printf(b, "%s%lld", d > 0 ? "," : "", (long long)t->dims[d]);
        ckpt_buf_putc(b, ']');
        put_member_hex(b, "digest", t->hash.digest);
        if (t->hash.leaves != NULL && t->hash.n_leaves > 1) {
            ckpt_buf_puts(b, ",\"leaves\":[");
            for (uint64_t k = 0; k < t->hash.n_leaves; k++) {
                if (k > 0)
                    ckpt_buf_putc(b, ',');
                put_hex(b, t->hash.leaves + k * CKPT_SHA256_LEN);
            }
            ckpt_buf_putc(b, ']');
        }
        ckpt_buf_putc(b, '}');
    }
    ckpt_buf_puts(b, "}");
}

static ckpt_status put_configs(const ckpt_manifest *m, ckpt_buf *b, ckpt_err *err)
{
    if (m->config != NULL) {
        uint8_t digest[CKPT_SHA256_LEN];
        ckpt_status status = ckpt_config_digest(m->config, digest, err);
        if (status != CKPT_OK)
            return status;
        ckpt_buf_putc(b, ',');
        ckpt_buf_puts(b, "\n\"config_digest\":");
        put_hex(b, digest);
        ckpt_buf_puts(b, ",\n\"config\":");
        if (!ckpt_json_print(m->config, 0, true, b))
            return no_memory(err);
    }
    if (m->foreign != NULL) {
        ckpt_buf_puts(b, ",\n\"foreign\":");
        if (!ckpt_json_print(m->foreign, 0, false, b))
            return no_memory(err);
    }
    if (m->training != NULL) {
        ckpt_buf_puts(b, ",\n\"training\":");
        if (!ckpt_json_print(m->training, 0, true, b))
            return no_memory(err);
    }
    if (m->quant_policy != NULL) {
        ckpt_buf_puts(b, ",\n\"quant_policy\":");
        ckpt_json_quote(b, m->quant_policy, strlen(m->quant_policy));
    }
    return CKPT_OK;
}

ckpt_status ckpt_manifest_print(ckpt_manifest *m, ckpt_buf *out, ckpt_err *err)
{
    sort_entries(m);
    ckpt_buf_printf(out, "{\"manifest_version\":%d,\"tool\":\"ckpt %s\"", MANIFEST_VERSION,
                    CKPT_VERSION);
    if (m->created != NULL) {
        ckpt_buf_puts(out, ",\"created\":");
        put_string(out, m->created);
    }
    ckpt_buf_puts(out, ",\n\"family\":");
    put_string(out, m->family);
    ckpt_buf_puts(out, ",\"layout\":");
    put_string(out, m->layout);
    ckpt_buf_puts(out, ",\"container\":");
    put_string(out, m->container);
    ckpt_buf_printf(out, ",\"mesh\":{\"tp\":%d,\"pp\":%d,\"ep\":%d,\"etp\":%d,\"cp\":%d}",
                    m->mesh.tp, m->mesh.pp, m->mesh.ep, m->mesh.etp, m->mesh.cp);
    ckpt_status status = put_configs(m, out, err);
    if (status != CKPT_OK)
        return status;
    put_files(m, out);
    put_tensors(m, out);
    ckpt_buf_puts(out, ",\n\"root\":");
    put_hex(out, m->root);
    if (m->has_source_root)
        put_member_hex(out, "source_root", m->source_root);
    ckpt_buf_puts(out, ",\"lossy\":[");
    for (size_t i = 0; i < m->n_lossy; i++) {
        if (i > 0)
            ckpt_buf_putc(out, ',');
        put_string(out, m->lossy[i]);
    }
    ckpt_buf_puts(out, "]}\n");
    return out->failed ? no_memory(err) : CKPT_OK;
}

/* ---- filling --------------------------------------------------------------------------------- */

static ckpt_status reserve(ckpt_manifest *m, size_t n_tensors, size_t n_files, ckpt_err *err)
{
    m->tensors = ckpt_arena_array(&m->arena, n_tensors + 1, sizeof *m->tensors);
    m->files = ckpt_arena_array(&m->arena, n_files + 1, sizeof *m->files);
    return m->tensors != NULL && m->files != NULL ? CKPT_OK : no_memory(err);
}

static ckpt_status describe(ckpt_manifest *m, const ckpt_layout *layout, const ckpt_json *config,
                            ckpt_err *err)
{
    m->family = layout != NULL ? layout->family : NULL;
    m->layout = layout != NULL ? layout->name : NULL;
    if (config == NULL)
        return CKPT_OK;
    m->config = ckpt_json_dup(config);
    return m->config != NULL ? CKPT_OK : no_memory(err);
}

static void put_file(ckpt_manifest *m, const char *name, const ckpt_file_hash *hash)
{
    ckpt_manifest_file *f = &m->files[m->n_files++];
    f->name = name;
    f->size = hash->size;
    f->has_sha256 = f->has_rest = true;
    memcpy(f->sha256, hash->sha256, CKPT_SHA256_LEN);
    memcpy(f->rest, hash->rest, CKPT_SHA256_LEN);
}

ckpt_status ckpt_manifest_of_plan(ckpt_manifest *m, const ckpt_plan *plan,
                                  const ckpt_convert_result *result, const char *single_name,
                                  ckpt_err *err)
{
    ckpt_status status;
    const char *dir = plan->sink.manifest_dir != NULL ? plan->sink.manifest_dir : "";
    size_t skip = strlen(dir);
    CKPT_CHECK(reserve(m, plan->n_results, plan->sink.n_files, err));
    for (size_t i = 0; i < plan->n_results; i++) {
        const ckpt_result_tensor *t = &plan->results[i];
        m->tensors[i] =
            (ckpt_manifest_tensor){t->name, t->dtype, t->rank, t->dims, result->tensors[i]};
    }
    m->n_tensors = plan->n_results;
    for (size_t i = 0; i < plan->sink.n_files; i++) {
        const char *name = plan->sink.files[i].name;
        if (single_name != NULL)
            name = single_name;
        else if (skip > 0 && strncmp(name, dir, skip) == 0 && name[skip] == '/')
            name += skip + 1;
        else if (skip > 0)
            continue; /* the tracker beside the iteration directory changes with later saves */
        put_file(m, name, &result->files[i]);
    }
    CKPT_CHECK(describe(m, plan->model->layout, plan->canon_config, err));
    memcpy(m->root, result->root, CKPT_SHA256_LEN);
    memcpy(m->source_root, result->source_root, CKPT_SHA256_LEN);
    m->has_source_root = result->has_source_root;
    m->lossy = plan->lossy;
    m->n_lossy = plan->n_lossy;
done:
    return status;
}

ckpt_status ckpt_manifest_of_model(ckpt_manifest *m, const ckpt_model *model,
                                   const ckpt_tensor_hash *tensors, const ckpt_file_hash *files,
                                   const uint8_t root[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_status status;
    const ckpt_source *src = model->src;
    CKPT_CHECK(reserve(m, model->n_tensors, src->n_files, err));
    for (size_t i = 0; i < model->n_tensors; i++) {
        const ckpt_canon *t = &model->tensors[i];
        m->tensors[i] = (ckpt_manifest_tensor){t->name, t->dtype, t->rank, t->dims, tensors[i]};
    }
    m->n_tensors = model->n_tensors;
    for (size_t i = 0; i < ckpt_source_n_real(src); i++)
        if (ckpt_name_is_safe(src->files[i].name, true))
            put_file(m, src->files[i].name, &files[i]);
    CKPT_CHECK(describe(m, model->layout, model->config, err));
    m->container = src->container->name;
    m->mesh = model->mesh;
    memcpy(m->root, root, CKPT_SHA256_LEN);
done:
    return status;
}

ckpt_status ckpt_manifest_add_file(ckpt_manifest *m, const char *name, uint64_t size,
                                   const uint8_t sha256[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_manifest_file *grown = ckpt_arena_array(&m->arena, m->n_files + 1, sizeof *grown);
    char *copy = ckpt_arena_strdup(&m->arena, name);
    if (grown == NULL || copy == NULL)
        return no_memory(err);
    if (m->n_files > 0)
        memcpy(grown, m->files, m->n_files * sizeof *grown);
    ckpt_manifest_file *f = &grown[m->n_files++];
    f->name = copy;
    f->size = size;
    f->has_sha256 = f->has_rest = true;
    memcpy(f->sha256, sha256, CKPT_SHA256_LEN);
    memcpy(f->rest, sha256, CKPT_SHA256_LEN);
    m->files = grown;
    return CKPT_OK;
}
