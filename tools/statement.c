#include "statement.h"

#include "io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PREDICATE "https://model_signing/signature/v1.0"
#define STATEMENT "https://in-toto.io/Statement/v1"
#define DEPTH_MAX 64
#define LINKED_MAX (1 << 17)

ckpt_status ckpt_signature_path(ckpt_arena *arena, const char *model, const char **path,
                                ckpt_err *err)
{
    ckpt_entry what;
    ckpt_status status = ckpt_look(model, &what, err);
    if (status != CKPT_OK)
        return status;
    *path = what == CKPT_ENTRY_DIR ? ckpt_path_join(arena, model, CKPT_SIGNATURE_NAME)
                                   : ckpt_arena_printf(arena, "%s" CKPT_SIGNATURE_SUFFIX, model);
    return *path != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

/* ---- files ------------------------------------------------------------------------------------- */

ckpt_status ckpt_statement_ignore(ckpt_statement *s, const char *path, ckpt_err *err)
{
    const char **grown = ckpt_arena_array(&s->arena, s->n_ignored + 1, sizeof *grown);
    const char *copy = ckpt_arena_strdup(&s->arena, path);
    if (grown == NULL || copy == NULL)
        return ckpt_tool_no_memory(err);
    if (s->n_ignored > 0)
        memcpy(grown, s->ignored, s->n_ignored * sizeof *grown);
    grown[s->n_ignored++] = copy;
    s->ignored = grown;
    return CKPT_OK;
}

ckpt_status ckpt_statement_ignore_git(ckpt_statement *s, ckpt_err *err)
{
    static const char *const git[] = {".git", ".gitattributes", ".github", ".gitignore"};
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; i < sizeof git / sizeof git[0] && status == CKPT_OK; i++)
        status = ckpt_statement_ignore(s, git[i], err);
    return status;
}

ckpt_status ckpt_statement_ignore_signature(ckpt_statement *s, const char *model, const char *file,
                                            ckpt_err *err)
{
    size_t n = strlen(model);
    while (n > 1 && model[n - 1] == '/')
        n--;
    if (strncmp(file, model, n) != 0 || file[n] != '/')
        return CKPT_OK;
    file += n;
    while (*file == '/')
        file++;
    return ckpt_statement_ignore(s, file, err);
}

bool ckpt_statement_ignores(const ckpt_statement *s, const char *name)
{
    for (size_t i = 0; i < s->n_ignored; i++) {
        size_t n = strlen(s->ignored[i]);
        if (strncmp(name, s->ignored[i], n) == 0 && (name[n] == '\0' || name[n] == '/'))
            return true;
    }
    return false;
}

/* The list doubles in the arena. */
static ckpt_status add(ckpt_statement *s, const char *name, ckpt_err *err)
{
    size_t n = s->n_files;
    if ((n & (n - 1)) == 0) {
        ckpt_resource *grown = ckpt_arena_array(&s->arena, n == 0 ? 1 : 2 * n, sizeof *grown);
        if (grown == NULL)
            return ckpt_tool_no_memory(err);
        if (n > 0)
            memcpy(grown, s->files, n * sizeof *grown);
        s->files = grown;
    }
    s->files[s->n_files++] = (ckpt_resource){.name = name};
    return CKPT_OK;
}

/* The directories that lead to one, so that a link back to them is seen. */
typedef struct above {
    const struct above *up;
    dev_t dev;
    ino_t ino;
    int depth;
    bool linked; /* by a symbolic link on the way */
} above;

static bool leads_back(const above *up, const struct stat *st)
{
    for (; up != NULL; up = up->up)
        if (up->dev == st->st_dev && up->ino == st->st_ino)
            return true;
    return false;
}

static ckpt_status walk(ckpt_statement *s, const char *dir, const char *below, const above *up,
                        bool linked, ckpt_err *err);

static ckpt_status take_entry(ckpt_statement *s, const char *path, const char *name,
                              const above *here, ckpt_err *err)
{
    struct stat st;
    if (ckpt_statement_ignores(s, name))
        return CKPT_OK;
    if (lstat(path, &st) != 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    const bool link = S_ISLNK(st.st_mode);
    /* links may lead to the same files on very many ways */
    if ((link || here->linked) && ++s->n_linked > LINKED_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s: symbolic links lead to more than %d files and directories", path,
                         LINKED_MAX);
    if (link && s->allow_symlinks && stat(path, &st) != 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    if (link && S_ISDIR(st.st_mode) && leads_back(here, &st))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s: a symbolic link back to a directory above it, a loop", path);
    if (S_ISDIR(st.st_mode))
        return walk(s, path, name, here, link, err);
    if (S_ISREG(st.st_mode))
        return add(s, name, err);
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: %s cannot be signed", path,
                     link ? "a symbolic link" : "a special file");
}

/* Recursion is bounded by DEPTH_MAX. */
static ckpt_status walk(ckpt_statement *s, const char *dir, const char *below, const above *up,
                        bool linked, ckpt_err *err)
{
    ckpt_status status;
    char **names;
    size_t n;
    struct stat st;
    if (stat(dir, &st) != 0)
        return ckpt_fail_errno(err, errno, "%s", dir);
    const above here = {.up = up,
                        .dev = st.st_dev,
                        .ino = st.st_ino,
                        .depth = up != NULL ? up->depth + 1 : 0,
                        .linked = linked || (up != NULL && up->linked)};
    if (here.depth > DEPTH_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: more than %d directories deep", dir,
                         DEPTH_MAX);
    CKPT_CHECK(ckpt_list_dir(dir, &s->arena, &names, &n, err));
    for (size_t i = 0; i < n; i++) {
        char *path = ckpt_path_join(&s->arena, dir, names[i]);
        char *name = ckpt_path_join(&s->arena, below, names[i]);
        if (path == NULL || name == NULL)
            return ckpt_tool_no_memory(err);
        CKPT_CHECK(take_entry(s, path, name, &here, err));
    }
done:
    return status;
}

/* As Python compares paths: by components. */
static int by_parts(const void *x, const void *y)
{
    const char *a = ((const ckpt_resource *)x)->name, *b = ((const ckpt_resource *)y)->name;
    while (*a != '\0' && *a == *b)
        a++, b++;
    int ca = *a == '/' ? 1 : (unsigned char)*a + (*a != '\0'),
        cb = *b == '/' ? 1 : (unsigned char)*b + (*b != '\0');
    return ca - cb;
}

ckpt_status ckpt_statement_list(ckpt_statement *s, const char *model, ckpt_err *err)
{
    ckpt_entry what;
    ckpt_status status = ckpt_look(model, &what, err);
    if (status == CKPT_OK)
        status = what == CKPT_ENTRY_DIR ? walk(s, model, "", NULL, false, err) : add(s, ".", err);
    if (status == CKPT_OK && s->n_files == 0)
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: no files", model);
    if (status == CKPT_OK)
        qsort(s->files, s->n_files, sizeof *s->files, by_parts);
    return status;
}

ckpt_status ckpt_statement_digest(const char *model, ckpt_resource *file, ckpt_err *err)
{
    ckpt_arena scratch = {0};
    uint64_t size;
    bool single = strcmp(file->name, ".") == 0;
    const char *path = single ? model : ckpt_path_join(&scratch, model, file->name);
    ckpt_status status = path != NULL ? ckpt_tool_file_digest(path, file->sha256, &size, err)
                                      : ckpt_tool_no_memory(err);
    ckpt_arena_free(&scratch);
    return status;
}

void ckpt_statement_release(ckpt_statement *s)
{
    ckpt_arena_free(&s->arena);
    *s = (ckpt_statement){0};
}

/* ---- text -------------------------------------------------------------------------------------- */

/* Over the digests in the order of the list. */
static void subject_digest(const ckpt_statement *s, char hex[2 * CKPT_SHA256_LEN + 1])
{
    ckpt_sha256_stream all;
    uint8_t digest[CKPT_SHA256_LEN];
    ckpt_sha256_stream_init(&all);
    for (size_t i = 0; i < s->n_files; i++)
        ckpt_sha256_stream_update2(&all, s->files[i].sha256, CKPT_SHA256_LEN, NULL, NULL, 0);
    ckpt_sha256_stream_final(&all, digest);
    ckpt_hex(digest, hex);
}

ckpt_status ckpt_statement_print(const ckpt_statement *s, const char *name, ckpt_buf *out,
                                 ckpt_err *err)
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    subject_digest(s, hex);
    ckpt_buf_puts(out, "{\"_type\":\"" STATEMENT "\",\"subject\":[{\"name\":");
    ckpt_json_quote(out, name, strlen(name));
    ckpt_buf_printf(out,
                    ",\"digest\":{\"sha256\":\"%s\"}}],\"predicateType\":\"" PREDICATE
                    "\",\"predicate\":{\"serialization\":{\"method\":\"files\",\"hash_type\":"
                    "\"sha256\",\"allow_symlinks\":%s,\"ignore_paths\":[",
                    hex, s->allow_symlinks ? "true" : "false");
    for (size_t i = 0; i < s->n_ignored; i++) {
        ckpt_buf_puts(out, i > 0 ? "," : "");
        ckpt_json_quote(out, s->ignored[i], strlen(s->ignored[i]));
    }
    ckpt_buf_puts(out, "]},\"resources\":[");
    for (size_t i = 0; i < s->n_files; i++) {
        ckpt_hex(s->files[i].sha256, hex);
        ckpt_buf_puts(out, i > 0 ? ",{\"name\":" : "{\"name\":");
        ckpt_json_quote(out, s->files[i].name, strlen(s->files[i].name));
        ckpt_buf_printf(out, ",\"algorithm\":\"sha256\",\"digest\":\"%s\"}", hex);
    }
    ckpt_buf_puts(out, "]");
    if (s->root != NULL)
        ckpt_buf_printf(out, ",\"ckpt\":{\"root\":\"%s\"}", s->root);
    ckpt_buf_puts(out, "}}");
    return out->failed ? ckpt_tool_no_memory(err) : CKPT_OK;
}

static const char *text_at(const ckpt_json *j, const char *key)
{
    const char *text = ckpt_json_string(ckpt_json_get(j, key));
    return text != NULL ? text : "";
}

static ckpt_status parse_files(ckpt_statement *s, const ckpt_json *predicate, ckpt_err *err)
{
    const ckpt_json *list = ckpt_json_get(predicate, "resources");
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c)) {
        const char *name = text_at(c, "name");
        if (strcmp(text_at(c, "algorithm"), "sha256") != 0)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s': expected a sha256 digest, found %s",
                             name, text_at(c, "algorithm"));
        if (strcmp(name, ".") != 0 && !ckpt_name_is_safe(name, true))
            return ckpt_fail(err, CKPT_E_FORMAT, "unsafe file name '%s'", name);
        ckpt_status status = add(s, ckpt_arena_strdup(&s->arena, name), err);
        if (status == CKPT_OK && s->files[s->n_files - 1].name == NULL)
            status = ckpt_tool_no_memory(err);
        if (status != CKPT_OK)
            return status;
        if (!ckpt_unhex(text_at(c, "digest"), s->files[s->n_files - 1].sha256))
            return ckpt_fail(err, CKPT_E_FORMAT, "'%s': no digest", name);
    }
    return CKPT_OK;
}

static ckpt_status parse_serialization(ckpt_statement *s, const ckpt_json *how, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (strcmp(text_at(how, "method"), "files") != 0 ||
        strcmp(text_at(how, "hash_type"), "sha256") != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "expected whole files by sha256, found method '%s', hash '%s'",
                         text_at(how, "method"), text_at(how, "hash_type"));
    (void)ckpt_json_bool(ckpt_json_get(how, "allow_symlinks"), &s->allow_symlinks);
    const ckpt_json *list = ckpt_json_get(how, "ignore_paths");
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL && status == CKPT_OK;
         c = ckpt_json_next(c))
        if (ckpt_json_string(c) != NULL)
            status = ckpt_statement_ignore(s, ckpt_json_string(c), err);
    return status;
}

ckpt_status ckpt_statement_parse(ckpt_statement *s, const char *text, size_t n, ckpt_err *err)
{
    ckpt_json *doc = NULL;
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_status status;
    CKPT_TRY(ckpt_json_parse(text, n, &doc, err), "signed statement");
    const ckpt_json *predicate = ckpt_json_get(doc, "predicate");
    if (strcmp(text_at(doc, "_type"), STATEMENT) != 0 ||
        strcmp(text_at(doc, "predicateType"), PREDICATE) != 0) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "signed statement: expected predicate " PREDICATE ", found '%s'",
                           text_at(doc, "predicateType"));
        goto done;
    }
    CKPT_TRY(parse_serialization(s, ckpt_json_get(predicate, "serialization"), err),
             "signed statement");
    CKPT_TRY(parse_files(s, predicate, err), "signed statement");
    subject_digest(s, hex);
    const ckpt_json *subject = ckpt_json_child(ckpt_json_get(doc, "subject"));
    if (strcmp(text_at(ckpt_json_get(subject, "digest"), "sha256"), hex) != 0) {
        status = ckpt_fail(err, CKPT_E_FORMAT,
                           "signed statement: its subject is not the digest of its resources");
        goto done;
    }
    s->root = ckpt_arena_strdup(&s->arena, text_at(ckpt_json_get(predicate, "ckpt"), "root"));
    if (s->root == NULL)
        status = ckpt_tool_no_memory(err);
done:
    ckpt_json_free(doc);
    return status;
}
