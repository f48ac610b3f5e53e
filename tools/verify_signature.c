/* verify --signature: is the model what the holder of a key signed? Nothing of the model is parsed
 * before that is known. */
#include "io.h"
#include "statement.h"
#include "verify.h"

#include <string.h>

static const char *string_at(const ckpt_json *j, const char *path)
{
    return ckpt_json_string(ckpt_json_path(j, path));
}

/* The envelope of the bundle, opened with the key. *good false: a problem was reported. */
static ckpt_status open_envelope(verification *v, const char *file, const ckpt_json *doc,
                                 ckpt_buf *payload, bool *good, ckpt_err *err)
{
    const char *text = string_at(doc, "dsseEnvelope.payload");
    const char *type = string_at(doc, "dsseEnvelope.payloadType");
    const char *hint = string_at(doc, "verificationMaterial.publicKey.hint");
    const ckpt_json *list = ckpt_json_path(doc, "dsseEnvelope.signatures");
    const char *sig = string_at(ckpt_json_child(list), "sig");
    char own[CKPT_HINT_LEN];
    ckpt_buf raw = {0};
    ckpt_status status = CKPT_OK;
    *good = false;
    if (text == NULL || type == NULL || sig == NULL || !ckpt_unbase64(text, payload) ||
        !ckpt_unbase64(sig, &raw)) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: no DSSE envelope with a signature", file);
        goto done;
    }
    if (strcmp(type, CKPT_STATEMENT_TYPE) != 0) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "%s: expected payload " CKPT_STATEMENT_TYPE ", found '%s'", file, type);
        goto done;
    }
    CKPT_CHECK(ckpt_sign_check(v->o->signature, type, payload->data, payload->len, raw.data,
                               raw.len, good, own, err));
    if (hint != NULL && hint[0] != '\0' && strcmp(hint, own) != 0) {
        ckpt_verify_problem(v, "%s: made with key %.12s, not with %.12s of %s", file, hint, own,
                            v->o->signature);
        *good = false;
    } else if (!*good) {
        ckpt_verify_problem(v,
                            "%s: the signature is not valid for %s: statement or signature "
                            "altered",
                            file, v->o->signature);
    }
done:
    ckpt_buf_release(&raw);
    return status;
}

static const ckpt_resource *find(const ckpt_statement *s, const char *name)
{
    for (size_t i = 0; i < s->n_files; i++)
        if (strcmp(s->files[i].name, name) == 0)
            return &s->files[i];
    return NULL;
}

/* What is there against what was signed. Both lists have one order unless somebody else signed. */
static ckpt_status compare(verification *v, const ckpt_statement *is, const ckpt_statement *was,
                           ckpt_err *err)
{
    for (size_t i = 0; i < is->n_files; i++) {
        ckpt_resource file = is->files[i];
        const ckpt_resource *then = i < was->n_files && strcmp(was->files[i].name, file.name) == 0
                                        ? &was->files[i]
                                        : find(was, file.name);
        if (then == NULL) {
            ckpt_verify_problem(v, "%s: was not signed", file.name);
            continue;
        }
        ckpt_status status = ckpt_statement_digest(v->path, &file, err);
        if (status != CKPT_OK)
            return status;
        if (memcmp(file.sha256, then->sha256, sizeof file.sha256) != 0)
            ckpt_verify_problem(v, "%s: differs from the signed digest",
                                strcmp(file.name, ".") == 0 ? v->path : file.name);
    }
    for (size_t i = 0; i < was->n_files; i++) {
        const char *name = was->files[i].name;
        bool there =
            (i < is->n_files && strcmp(is->files[i].name, name) == 0) || find(is, name) != NULL;
        if (!there)
            ckpt_verify_problem(v, "%s: was signed and is missing", name);
    }
    return CKPT_OK;
}

/* ---- what is left out ------------------------------------------------------------------------ */

#define NAMED 3 /* the rest is counted */

/* What no signature of a model covers: git's own files, and itself. */
static bool is_usual(const ckpt_statement *own, const char *name)
{
    for (size_t i = 0; i < own->n_ignored; i++)
        if (strcmp(own->ignored[i], name) == 0)
            return true;
    return strcmp(name, CKPT_SIGNATURE_NAME) == 0;
}

static ckpt_status keep_unsigned(verification *v, const ckpt_statement *was, const char *file,
                                 ckpt_err *err)
{
    ckpt_statement own = {0};
    ckpt_arena *arena = &v->tool->arena;
    ckpt_status status;
    CKPT_CHECK(ckpt_statement_ignore_git(&own, err));
    CKPT_CHECK(ckpt_statement_ignore_signature(&own, v->path, file, err));
    v->unsigned_names = ckpt_arena_array(arena, was->n_ignored + 1, sizeof *v->unsigned_names);
    if (v->unsigned_names == NULL)
        status = ckpt_tool_no_memory(err);
    for (size_t i = 0; status == CKPT_OK && i < was->n_ignored; i++) {
        if (is_usual(&own, was->ignored[i]))
            continue;
        const char *name = ckpt_arena_strdup(arena, was->ignored[i]);
        if (name == NULL)
            status = ckpt_tool_no_memory(err);
        else
            v->unsigned_names[v->n_unsigned++] = name;
    }
done:
    ckpt_statement_release(&own);
    return status;
}

/* "a, b, c and 4 more" */
static const char *some_names(verification *v, const char *const *names, size_t n)
{
    const char *text = "";
    for (size_t i = 0; i < n && i < NAMED && text != NULL; i++)
        text = ckpt_arena_printf(&v->tool->arena, "%s%s%s", text, i > 0 ? ", " : "", names[i]);
    return n > NAMED && text != NULL
               ? ckpt_arena_printf(&v->tool->arena, "%s and %zu more", text, n - NAMED)
               : text;
}

/* A file's name below PATH, as the statement has it; NULL: it does not lie there. */
static const char *name_below(const verification *v, const char *path)
{
    size_t n = strlen(v->path);
    while (n > 1 && v->path[n - 1] == '/')
        n--;
    if (strncmp(path, v->path, n) != 0 || path[n] != '/')
        return NULL;
    path += n;
    return path + strspn(path, "/");
}

ckpt_status ckpt_verify_unsigned(verification *v, ckpt_err *err)
{
    ckpt_statement left_out = {.ignored = v->unsigned_names, .n_ignored = v->n_unsigned};
    size_t n_files = v->src.n_files, n = 0;
    if (v->n_unsigned == 0)
        return CKPT_OK;
    const char **names = ckpt_arena_array(&v->tool->arena, n_files + 1, sizeof *names);
    if (names == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n_files; i++) {
        const char *name = name_below(v, v->src.files[i].path);
        if (name != NULL && ckpt_statement_ignores(&left_out, name))
            names[n++] = name;
    }
    const char *text = some_names(v, names, n);
    if (text == NULL)
        return ckpt_tool_no_memory(err);
    if (n > 0)
        ckpt_verify_warning(v, "the signature does not cover what the checkpoint is read from: %s",
                            text);
    return CKPT_OK;
}

void ckpt_verify_signature_json(const verification *v, ckpt_jw *w)
{
    ckpt_jw_open(w, "signature", '{');
    ckpt_jw_bool(w, "good", v->good_signature);
    ckpt_jw_string(w, "file", v->signature);
    ckpt_jw_u64(w, "files", v->n_signed);
    ckpt_jw_lines(w, "ignored", v->unsigned_names, v->n_unsigned);
    ckpt_jw_close(w, '}');
}

const char *ckpt_verify_unsigned_text(verification *v)
{
    const char *names = some_names(v, v->unsigned_names, v->n_unsigned);
    if (names == NULL || v->n_unsigned == 0)
        return names;
    return ckpt_arena_printf(&v->tool->arena, "; the signature leaves out %s", names);
}

/* ---- the signature --------------------------------------------------------------------------- */

ckpt_status ckpt_verify_signature(verification *v, ckpt_err *err)
{
    ckpt_statement is = {0}, was = {0};
    ckpt_buf text = {0}, payload = {0};
    ckpt_json *doc = NULL;
    bool good;
    ckpt_status status;
    const char *file = v->o->signature_file;
    if (file == NULL)
        CKPT_CHECK(ckpt_signature_path(&v->tool->arena, v->path, &file, err));
    v->signature = file;
    CKPT_TRY(ckpt_read_file(file, CKPT_BUNDLE_MAX, &text, err), "no signature");
    CKPT_TRY(ckpt_json_parse((const char *)text.data, text.len, &doc, err), "%s", file);
    CKPT_CHECK(open_envelope(v, file, doc, &payload, &good, err));
    if (!good)
        goto done;
    CKPT_TRY(ckpt_statement_parse(&was, (const char *)payload.data, payload.len, err), "%s", file);
    CKPT_CHECK(keep_unsigned(v, &was, file, err));
    is.allow_symlinks = was.allow_symlinks;
    is.ignored = was.ignored;
    is.n_ignored = was.n_ignored;
    CKPT_CHECK(ckpt_statement_ignore_signature(&is, v->path, file, err));
    CKPT_CHECK(ckpt_statement_list(&is, v->path, err));
    CKPT_CHECK(compare(v, &is, &was, err));
    v->n_signed = was.n_files;
    v->good_signature = v->problems.n == 0;
done:
    ckpt_json_free(doc);
    ckpt_buf_release(&text);
    ckpt_buf_release(&payload);
    ckpt_statement_release(&is);
    ckpt_statement_release(&was);
    return status;
}
