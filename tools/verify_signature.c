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
    CKPT_TRY(ckpt_read_file(file, CKPT_BUNDLE_MAX, &text, err), "no signature");
    CKPT_TRY(ckpt_json_parse((const char *)text.data, text.len, &doc, err), "%s", file);
    CKPT_CHECK(open_envelope(v, file, doc, &payload, &good, err));
    if (!good)
        goto done;
    CKPT_TRY(ckpt_statement_parse(&was, (const char *)payload.data, payload.len, err), "%s", file);
    is.allow_symlinks = was.allow_symlinks;
    is.ignored = was.ignored;
    is.n_ignored = was.n_ignored;
    CKPT_CHECK(ckpt_statement_ignore_signature(&is, v->path, file, err));
    CKPT_CHECK(ckpt_statement_list(&is, v->path, err));
    CKPT_CHECK(compare(v, &is, &was, err));
    v->n_signed = was.n_files;
done:
    ckpt_json_free(doc);
    ckpt_buf_release(&text);
    ckpt_buf_release(&payload);
    ckpt_statement_release(&is);
    ckpt_statement_release(&was);
    return status;
}
