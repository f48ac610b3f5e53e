/* ckpt sign: a signature over the digest of every file of a model (statement.h says in what form). */
#include "io.h"
#include "statement.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

typedef struct sign_opts {
    const char *key, *signature;
    ckpt_strings ignore;
    bool allow_symlinks, force;
} sign_opts;

/* clang-format off */
#define AT(field) offsetof(sign_opts, field)
static const ckpt_opt rows[] = {
    {"key",            CKPT_OPT_STRING, AT(key),            "FILE", "private key in PEM: Ed25519, or ECDSA P-256, P-384, P-521", 0, 0},
    {"signature",      CKPT_OPT_STRING, AT(signature),      "FILE", "where to write it (default PATH/model.sig, or PATH.sig)", 0, 0},
    {"ignore",         CKPT_OPT_LIST,   AT(ignore),         "NAME", "leave out a file or directory below PATH", 0, 0},
    {"allow-symlinks", CKPT_OPT_FLAG,   AT(allow_symlinks), NULL,   "sign what symbolic links lead to", 0, 0},
    {"force",          CKPT_OPT_FLAG,   AT(force),          NULL,   "replace an existing signature", 0, 0},
    {NULL,             CKPT_OPT_FLAG,   0,                  NULL,   NULL, 0, 0},
};
#undef AT
/* clang-format on */

/* Misspelt, it would be signed. */
static ckpt_status warn_absent(ckpt_tool *tool, const char *model, const char *name, ckpt_err *err)
{
    ckpt_entry what;
    char *path = ckpt_path_join(&tool->arena, model, name);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_status status = ckpt_look(path, &what, err);
    if (status == CKPT_OK && what == CKPT_ENTRY_NONE)
        ckpt_tool_warn(tool, "--ignore %s: %s holds nothing of that name", name, model);
    return status;
}

/* The signature itself and what git keeps are no part of the model, as in OpenSSF model signing. */
static ckpt_status ignore_usual(ckpt_tool *tool, ckpt_statement *s, const char *model,
                                const char *signature, const sign_opts *o, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    CKPT_CHECK(ckpt_statement_ignore_signature(s, model, signature, err));
    CKPT_CHECK(ckpt_statement_ignore_git(s, err));
    for (size_t i = 0; i < o->ignore.n; i++) {
        if (!ckpt_name_is_safe(o->ignore.items[i], true))
            return ckpt_fail(err, CKPT_E_USAGE, "--ignore: '%s' is no path below the model",
                             o->ignore.items[i]);
        CKPT_CHECK(ckpt_statement_ignore(s, o->ignore.items[i], err));
        CKPT_CHECK(warn_absent(tool, model, o->ignore.items[i], err));
    }
done:
    return status;
}

/* The statement is JSON. */
static ckpt_status check_utf8(ckpt_tool *tool, const char *what, const char *name, ckpt_err *err)
{
    size_t n = strlen(name), i = 0, step = 1;
    for (; i < n && step > 0; i += step)
        step = ckpt_utf8_len(name + i, n - i);
    if (step > 0)
        return CKPT_OK;
    const char *shown = ckpt_tool_clean(tool, name);
    return ckpt_fail(err, CKPT_E_FORMAT, "%s '%s' is not UTF-8, so no statement can name it", what,
                     shown);
}

static ckpt_status check_names(ckpt_tool *tool, const ckpt_statement *s, const char *model,
                               ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(check_utf8(tool, "model", model, err));
    for (size_t i = 0; i < s->n_ignored; i++)
        CKPT_CHECK(check_utf8(tool, "--ignore", s->ignored[i], err));
    for (size_t i = 0; i < s->n_files; i++)
        CKPT_CHECK(check_utf8(tool, "file", s->files[i].name, err));
done:
    return status;
}

static ckpt_status refuse_existing(const char *file, ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_USAGE, "%s: exists already (--force replaces it)", file);
}

/* What --force may replace is a signature, and no key that was named by mistake. */
static ckpt_status check_target(const char *file, bool force, ckpt_err *err)
{
    struct stat st;
    ckpt_buf text = {0};
    ckpt_json *doc = NULL;
    ckpt_err why = {0};
    if (lstat(file, &st) != 0)
        return errno == ENOENT || errno == ENOTDIR || force
                   ? CKPT_OK /* with force, writing says what is wrong */
                   : ckpt_fail_errno(err, errno, "%s", file);
    if (!force)
        return refuse_existing(file, err);
    if (S_ISLNK(st.st_mode))
        return ckpt_fail(err, CKPT_E_USAGE, "%s: is a symbolic link: --force does not replace it",
                         file);
    bool ours = S_ISREG(st.st_mode) &&
                ckpt_read_file(file, CKPT_BUNDLE_MAX, &text, &why) == CKPT_OK &&
                ckpt_json_parse((const char *)text.data, text.len, &doc, &why) == CKPT_OK &&
                ckpt_json_string(ckpt_json_path(doc, "dsseEnvelope.payload")) != NULL;
    ckpt_json_free(doc);
    ckpt_buf_release(&text);
    return ours ? CKPT_OK
                : ckpt_fail(err, CKPT_E_USAGE,
                            "%s: exists and is no signature: --force does not replace it", file);
}

/* Another run may have signed since check_target looked. */
static ckpt_status write_bundle(const char *file, const ckpt_buf *bundle, bool force, ckpt_err *err)
{
    if (force)
        return ckpt_tool_write_file(file, bundle->data, bundle->len, err);
    ckpt_status status = ckpt_tool_create_file(file, bundle->data, bundle->len, err);
    return status == CKPT_E_USAGE ? refuse_existing(file, err) : status;
}

/* The root that the manifest tells; its file is signed with the others. */
static ckpt_status find_root(ckpt_statement *s, const char *model, ckpt_err *err)
{
    ckpt_manifest m = {0};
    char hex[2 * CKPT_SHA256_LEN + 1];
    const char *path = ckpt_path_join(&s->arena, model, CKPT_MANIFEST_NAME);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_entry what; /* beside a single file lies no manifest of its own name */
    ckpt_status status = ckpt_look(model, &what, err);
    if (status == CKPT_OK && what == CKPT_ENTRY_DIR)
        status = ckpt_look(path, &what, err);
    else
        what = CKPT_ENTRY_NONE;
    if (status != CKPT_OK || what == CKPT_ENTRY_NONE)
        return status;
    status = ckpt_manifest_read(path, &m, err);
    if (status == CKPT_OK) {
        ckpt_hex(m.root, hex);
        s->root = ckpt_arena_strdup(&s->arena, hex);
    }
    ckpt_manifest_release(&m);
    return status;
}

/* What `ckpt verify` cannot tell from another checkpoint, or knows no container for, it never verifies. */
static ckpt_status check_model(const char *model, ckpt_err *err)
{
    const ckpt_container *container;
    ckpt_err why = {0};
    ckpt_status status = ckpt_source_probe(model, &container, &why);
    if (status == CKPT_E_USAGE || status == CKPT_E_FORMAT)
        return ckpt_fail(err, status, "%s; nothing could verify a signature of it", why.text);
    if (status != CKPT_OK && err != NULL)
        *err = why;
    return status;
}

static const char *model_name(ckpt_arena *arena, const char *path)
{
    const char *base = ckpt_basename(path);
    return ckpt_arena_strndup(arena, base, strcspn(base, "/"));
}

static void put_bundle(ckpt_buf *out, const ckpt_buf *payload, const ckpt_buf *sig,
                       const char *hint)
{
    ckpt_buf_printf(out,
                    "{\"mediaType\":\"application/vnd.dev.sigstore.bundle.v0.3+json\","
                    "\"verificationMaterial\":{\"publicKey\":{\"hint\":\"%s\"},\"tlogEntries\":[]},"
                    "\"dsseEnvelope\":{\"payload\":\"",
                    hint);
    ckpt_base64(out, payload->data, payload->len);
    ckpt_buf_puts(out,
                  "\",\"payloadType\":\"" CKPT_STATEMENT_TYPE "\",\"signatures\":[{\"sig\":\"");
    ckpt_base64(out, sig->data, sig->len);
    ckpt_buf_puts(out, "\",\"keyid\":\"\"}]}}\n");
}

static void report(ckpt_tool *tool, const ckpt_statement *s, const char *file, const char *hint)
{
    if (ckpt_tool_text(tool))
        printf("%zu file%s signed in %s, key %s\n", s->n_files, ckpt_tool_plural(s->n_files),
               ckpt_tool_clean(tool, file), hint);
    if (tool->g.json) {
        ckpt_jw_string(&tool->json, "signature", file);
        ckpt_jw_string(&tool->json, "key", hint);
        ckpt_jw_string(&tool->json, "root", s->root);
        ckpt_jw_u64(&tool->json, "files", s->n_files);
    }
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    const sign_opts *o = opts;
    const char *model = tool->operands.items[0];
    const char *file = o->signature;
    const char *name = model_name(&tool->arena, model);
    ckpt_statement s = {.allow_symlinks = o->allow_symlinks};
    ckpt_buf payload = {0}, sig = {0}, bundle = {0};
    char hint[CKPT_HINT_LEN];
    ckpt_status status = CKPT_OK;
    if (o->key == NULL)
        return ckpt_fail(err, CKPT_E_USAGE, "--key FILE is missing");
    if (name == NULL)
        return ckpt_tool_no_memory(err);
    if (file == NULL)
        CKPT_CHECK(ckpt_signature_path(&tool->arena, model, &file, err));
    CKPT_CHECK(check_target(file, o->force, err));
    CKPT_CHECK(check_model(model, err));
    CKPT_CHECK(ignore_usual(tool, &s, model, file, o, err));
    CKPT_CHECK(ckpt_statement_list(&s, model, err));
    CKPT_CHECK(check_names(tool, &s, name, err));
    for (size_t i = 0; i < s.n_files; i++)
        CKPT_CHECK(ckpt_statement_digest(model, &s.files[i], err));
    CKPT_CHECK(find_root(&s, model, err));
    CKPT_CHECK(ckpt_statement_print(&s, name, &payload, err));
    CKPT_CHECK(ckpt_sign(o->key, CKPT_STATEMENT_TYPE, payload.data, payload.len, &sig, hint, err));
    put_bundle(&bundle, &payload, &sig, hint);
    if (bundle.failed) {
        status = ckpt_tool_no_memory(err);
        goto done;
    }
    CKPT_CHECK(write_bundle(file, &bundle, o->force, err));
    report(tool, &s, file, hint);
done:
    ckpt_buf_release(&payload);
    ckpt_buf_release(&sig);
    ckpt_buf_release(&bundle);
    ckpt_statement_release(&s);
    return status;
}

const ckpt_command ckpt_cmd_sign = {
    .name = "sign",
    .synopsis = "PATH",
    .what = "sign the digests of a model's files",
    .opts = rows,
    .opts_size = sizeof(sign_opts),
    .min_operands = 1,
    .max_operands = 1,
    .writes = true,
    .run = run,
    .examples = "  ckpt sign kimi/ --key private.pem\n"
                "  ckpt verify kimi/ --signature public.pem\n",
    .notes =
        "The signature is a DSSE envelope over an in-toto statement in a Sigstore bundle, as\n"
        "`model_signing verify key` reads it (ECDSA keys). `ckpt verify --signature PUBLIC-KEY`\n"
        "checks it. Encrypted keys are not read.\n",
};
