/* ckpt gather: one checkpoint from the parts of it that lie on several nodes, as a save to local disks
 * leaves them. A file that is in several parts must be the same in all. What an index, a .metadata or
 * a manifest names and no part has is listed with the part that has other files of its rank, before
 * anything is written. */
#include "convert.h"
#include "dcp_meta.h"
#include "io.h"
#include "json.h"
#include "manifest.h"
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEPTH_MAX 8
#define INDEX_LIMIT ((uint64_t)1 << 30) /* bytes of an index or .metadata */
#define BLOCK ((size_t)1 << 20)

typedef struct gather_opts {
    const char *out;
    bool force, partial;
} gather_opts;

/* clang-format off */
#define AT(field) offsetof(gather_opts, field)
static const ckpt_opt rows[] = {
    {"out",     CKPT_OPT_STRING, AT(out),     "OUT", "the directory to make", 0, 0},
    {"force",   CKPT_OPT_FLAG,   AT(force),   NULL,  "replace an existing OUT", 0, 0},
    {"partial", CKPT_OPT_FLAG,   AT(partial), NULL,  "write OUT although shards are missing", 0, 0},
    {NULL,      CKPT_OPT_FLAG,   0,           NULL,  NULL, 0, 0},
};
#undef AT
/* clang-format on */

typedef struct found {
    const char *name; /* below its part */
    const char *path;
    size_t part;
    uint64_t size;
    const char *manifest; /* which says what it must be, or NULL */
    uint8_t sha256[CKPT_SHA256_LEN];
} found;

typedef struct gathering {
    ckpt_tool *tool;
    const gather_opts *o;
    found *files; /* by name, then part */
    size_t n, cap;
    size_t *per_part;     /* files of each part */
    ckpt_strings missing; /* lines */
    uint64_t bytes;
    size_t n_unique;
    ckpt_commit commit;
} gathering;

/* ---- what there is ------------------------------------------------------------------------------ */

static ckpt_status add_file(gathering *g, size_t part, const char *path, const char *name,
                            ckpt_err *err)
{
    void *p = g->files;
    int fd = -1;
    uint64_t size = 0;
    ckpt_status status = ckpt_open_read(path, &fd, &size, err);
    if (status != CKPT_OK)
        return status;
    close(fd);
    status = ckpt_grow(&p, &g->cap, g->n + 1, sizeof *g->files, err);
    g->files = p;
    if (status == CKPT_OK) {
        g->files[g->n++] = (found){.name = name, .path = path, .part = part, .size = size};
        g->per_part[part]++;
    }
    return status;
}

static ckpt_status walk(gathering *g, size_t part, const char *dir, const char *below, int depth,
                        ckpt_err *err)
{
    ckpt_status status;
    char **names;
    size_t n;
    ckpt_arena *arena = &g->tool->arena;
    CKPT_CHECK(ckpt_list_dir(dir, arena, &names, &n, err));
    for (size_t i = 0; i < n; i++) {
        ckpt_entry what;
        if (strstr(names[i], ".ckpt-tmp.") != NULL) /* somebody's unfinished output */
            continue;
        const char *path = ckpt_path_join(arena, dir, names[i]);
        const char *name = ckpt_path_join(arena, below, names[i]);
        if (path == NULL || name == NULL)
            return ckpt_tool_no_memory(err);
        CKPT_CHECK(ckpt_look(path, &what, err));
        if (what == CKPT_ENTRY_DIR && depth == DEPTH_MAX)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: directories nested deeper than %d", path,
                             DEPTH_MAX);
        if (what == CKPT_ENTRY_DIR)
            CKPT_CHECK(walk(g, part, path, name, depth + 1, err));
        else
            CKPT_CHECK(add_file(g, part, path, name, err));
    }
done:
    return status;
}

static int by_name(const void *a, const void *b)
{
    const found *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : x->part < y->part ? -1 : x->part > y->part;
}

static found *find(const gathering *g, const char *name)
{
    size_t lo = 0, hi = g->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(g->files[mid].name, name) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < g->n && strcmp(g->files[lo].name, name) == 0 ? &g->files[lo] : NULL;
}

/* The same bytes in two parts? */
static ckpt_status compare(const found *a, const found *b, uint8_t *buf, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int fa = -1, fb = -1;
    uint64_t na, nb;
    bool equal = a->size == b->size;
    CKPT_CHECK(ckpt_open_read(a->path, &fa, &na, err));
    CKPT_CHECK(ckpt_open_read(b->path, &fb, &nb, err));
    for (uint64_t at = 0; equal && at < a->size; at += BLOCK) {
        size_t n = a->size - at < BLOCK ? (size_t)(a->size - at) : BLOCK;
        CKPT_TRY(ckpt_pread_full(fa, buf, n, at, err), "%s", a->path);
        CKPT_TRY(ckpt_pread_full(fb, buf + BLOCK, n, at, err), "%s", b->path);
        equal = memcmp(buf, buf + BLOCK, n) == 0;
        CKPT_CHECK(ckpt_check_interrupted(err));
    }
    if (!equal)
        status = ckpt_fail(err, CKPT_E_MISMATCH, "%s and %s differ", a->path, b->path);
done:
    if (fa >= 0)
        close(fa);
    if (fb >= 0)
        close(fb);
    return status;
}

/* ---- what there should be ----------------------------------------------------------------------- */

/* "__3_" of "__3_0.distcp" and the like: a rank's files lie on its node. */
static size_t rank_prefix(const char *base)
{
    size_t digits = strncmp(base, "__", 2) == 0 ? strspn(base + 2, "0123456789") : 0;
    return digits > 0 && base[2 + digits] == '_' ? digits + 3 : 0;
}

static ckpt_status miss(gathering *g, const char *name, const char *wanted_by, ckpt_err *err)
{
    const char *base = ckpt_basename(name), *part = NULL;
    size_t dir = (size_t)(base - name), prefix = rank_prefix(base);
    for (size_t i = 0; i < g->n && prefix > 0 && part == NULL; i++)
        if (strncmp(g->files[i].name, name, dir + prefix) == 0)
            part = g->tool->operands.items[g->files[i].part];
    const char *line =
        part != NULL
            ? ckpt_arena_printf(&g->tool->arena, "%s: %s is missing, named by %s", part, name,
                                wanted_by)
            : ckpt_arena_printf(&g->tool->arena, "no part has %s, named by %s", name, wanted_by);
    const char *by = line != NULL ? strstr(line, ", named by ") : NULL;
    for (size_t i = 0; by != NULL && i < g->missing.n; i++) /* once, whoever else names it */
        if (strncmp(g->missing.items[i], line, (size_t)(by - line)) == 0)
            return CKPT_OK;
    return line != NULL ? ckpt_strings_push(&g->missing, line, err) : ckpt_tool_no_memory(err);
}

/* `name` beside the file that names it. *out (or NULL): the one that is taken, NULL if it is missing. */
static ckpt_status want(gathering *g, const found *by, const char *name, found **out, ckpt_err *err)
{
    size_t dir = (size_t)(ckpt_basename(by->name) - by->name);
    const char *full = ckpt_arena_printf(&g->tool->arena, "%.*s%s", (int)dir, by->name, name);
    if (full == NULL)
        return ckpt_tool_no_memory(err);
    found *there = find(g, full);
    if (out != NULL)
        *out = there;
    return there != NULL ? CKPT_OK : miss(g, full, by->name, err);
}

static ckpt_status want_index(gathering *g, const found *f, const ckpt_buf *text, ckpt_err *err)
{
    ckpt_status status;
    ckpt_json *json = NULL;
    const char *last = NULL;
    CKPT_TRY(ckpt_json_parse((const char *)text->data, text->len, &json, err), "%s", f->path);
    for (const ckpt_json *e = ckpt_json_child(ckpt_json_get(json, "weight_map")); e != NULL;
         e = ckpt_json_next(e)) {
        const char *name = ckpt_json_string(e);
        if (name == NULL || (last != NULL && strcmp(last, name) == 0))
            continue;
        last = name;
        CKPT_CHECK(want(g, f, name, NULL, err));
    }
done:
    ckpt_json_free(json);
    return status;
}

static ckpt_status want_metadata(gathering *g, const found *f, const ckpt_buf *text, ckpt_err *err)
{
    ckpt_status status;
    ckpt_arena arena = {0};
    ckpt_dcp_meta meta = {0};
    CKPT_TRY(ckpt_dcp_meta_parse(text->data, text->len, &arena, &meta, err), "%s", f->path);
    for (size_t i = 0; i < meta.n_paths; i++)
        CKPT_CHECK(want(g, f, meta.paths[i], NULL, err));
done:
    ckpt_json_free(meta.policy);
    ckpt_arena_free(&arena);
    return status;
}

static ckpt_status want_manifest(gathering *g, const found *f, ckpt_err *err)
{
    ckpt_status status;
    ckpt_manifest m = {0};
    CKPT_TRY(ckpt_manifest_read(f->path, &m, err), "%s", f->path);
    for (size_t i = 0; i < m.n_files; i++) {
        const ckpt_manifest_file *said = &m.files[i];
        found *there;
        CKPT_CHECK(want(g, f, said->name, &there, err));
        if (there == NULL)
            continue;
        if (there->size != said->size) {
            status =
                ckpt_fail(err, CKPT_E_MISMATCH, "%s: %llu bytes, %s says %llu", there->path,
                          (unsigned long long)there->size, f->path, (unsigned long long)said->size);
            goto done;
        }
        if (said->has_sha256) { /* compared while it is copied */
            there->manifest = f->path;
            memcpy(there->sha256, said->sha256, CKPT_SHA256_LEN);
        }
    }
done:
    ckpt_manifest_release(&m);
    return status;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

static ckpt_status list_missing(gathering *g, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf text = {0};
    for (size_t i = 0; i < g->n; i++) {
        const found *f = &g->files[i];
        const char *base = ckpt_basename(f->name);
        bool metadata = strcmp(base, ".metadata") == 0, index = ends_with(base, ".index.json");
        if (i > 0 && strcmp(f->name, g->files[i - 1].name) == 0)
            continue;
        if (strcmp(base, CKPT_MANIFEST_NAME) == 0)
            CKPT_CHECK(want_manifest(g, f, err));
        if (!metadata && !index)
            continue;
        CKPT_CHECK(ckpt_read_file(f->path, INDEX_LIMIT, &text, err));
        CKPT_CHECK(index ? want_index(g, f, &text, err) : want_metadata(g, f, &text, err));
    }
done:
    ckpt_buf_release(&text);
    return status;
}

/* ---- writing ------------------------------------------------------------------------------------ */

/* to -1: for the digest alone; digest NULL: none is wanted. */
static ckpt_status copy_bytes(int from, int to, uint64_t size, uint8_t *buf, uint8_t *digest,
                              ckpt_err *err)
{
    ckpt_sha256_stream sha;
    ckpt_sha256_stream_init(&sha);
    for (uint64_t at = 0; at < size;) {
        size_t n = size - at < BLOCK ? (size_t)(size - at) : BLOCK;
        ckpt_status status = ckpt_pread_full(from, buf, n, at, err);
        if (status == CKPT_OK && to >= 0)
            status = ckpt_pwrite_full(to, buf, n, at, err);
        if (status == CKPT_OK)
            status = ckpt_check_interrupted(err);
        if (status != CKPT_OK)
            return status;
        if (digest != NULL)
            ckpt_sha256_stream_update2(&sha, buf, n, NULL, NULL, 0);
        at += n;
    }
    if (digest != NULL)
        ckpt_sha256_stream_final(&sha, digest);
    return CKPT_OK;
}

/* Its blocks are shared where the file system can; what is digested is what `to` then holds. */
static ckpt_status fill_file(int from, int to, uint64_t size, uint8_t *buf, uint8_t *digest,
                             ckpt_err *err)
{
    struct stat st;
    if (ioctl(to, FICLONE, from) != 0)
        return copy_bytes(from, to, size, buf, digest, err);
    if (fstat(to, &st) != 0 || (uint64_t)st.st_size != size)
        return ckpt_fail(err, CKPT_E_IO, "changed while it was being read");
    return digest != NULL ? copy_bytes(to, -1, size, buf, digest, err) : CKPT_OK;
}

static ckpt_status copy_file(gathering *g, const found *f, uint8_t *buf, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int from = -1, to = -1;
    uint64_t size = 0;
    char *path = ckpt_path_join(&g->tool->arena, g->commit.temp_path, f->name);
    char *slash = path != NULL ? strrchr(path, '/') : NULL;
    if (slash == NULL)
        return ckpt_tool_no_memory(err);
    *slash = '\0';
    CKPT_CHECK(ckpt_mkdirs(path, err));
    *slash = '/';
    CKPT_CHECK(ckpt_open_read(f->path, &from, &size, err));
    if (size != f->size) {
        status = ckpt_fail(err, CKPT_E_IO, "%s: changed while it was being read", f->path);
        goto done;
    }
    to = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (to < 0) {
        status = ckpt_fail_errno(err, errno, "%s", path);
        goto done;
    }
    uint8_t digest[CKPT_SHA256_LEN], *wanted = f->manifest != NULL ? digest : NULL;
    CKPT_TRY(fill_file(from, to, size, buf, wanted, err), "%s to %s", f->path, path);
    if (f->manifest != NULL && memcmp(digest, f->sha256, sizeof digest) != 0) {
        status = ckpt_fail(err, CKPT_E_MISMATCH, "%s: contradicts its digest in %s", f->path,
                           f->manifest);
        goto done;
    }
    if (ckpt_sync_fd(to) != 0)
        status = ckpt_fail_errno(err, errno, "%s: fsync", path);
done:
    if (from >= 0)
        close(from);
    if (to >= 0 && close(to) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s: close", path);
    return status;
}

/* What was merged must open as a checkpoint. */
static ckpt_status check_out(const gathering *g, ckpt_err *err)
{
    const ckpt_open_opts newest = {.iteration = -1};
    ckpt_source src = {0};
    ckpt_status status;
    CKPT_TRY(ckpt_source_open(&src, g->commit.temp_path, &newest, err), "the parts together");
done:
    ckpt_source_close(&src);
    return status;
}

static ckpt_status write_out(gathering *g, uint8_t *buf, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_commit_begin(&g->commit, g->o->out, true, g->o->force, err));
    for (size_t i = 0; i < g->n; i++) {
        const found *f = &g->files[i];
        if (i > 0 && strcmp(f->name, g->files[i - 1].name) == 0)
            continue;
        CKPT_CHECK(copy_file(g, f, buf, err));
        g->bytes += f->size;
        g->n_unique++;
    }
    if (g->missing.n == 0)
        CKPT_CHECK(check_out(g, err));
    CKPT_CHECK(ckpt_commit_finish(&g->commit, err));
done:
    return status;
}

/* ---- the command -------------------------------------------------------------------------------- */

static ckpt_status gather(gathering *g, uint8_t *buf, ckpt_err *err)
{
    ckpt_status status;
    const ckpt_strings *parts = &g->tool->operands;
    if (g->o->out == NULL)
        return ckpt_fail(err, CKPT_E_USAGE, "--out OUT is required");
    for (size_t i = 0; i < parts->n; i++)
        CKPT_CHECK(ckpt_convert_apart(parts->items[i], g->o->out, err));
    for (size_t i = 0; i < parts->n; i++)
        CKPT_CHECK(walk(g, i, parts->items[i], "", 0, err));
    if (g->n > 1)
        qsort(g->files, g->n, sizeof *g->files, by_name);
    CKPT_CHECK(list_missing(g, err));
    if (g->missing.n > 0 && !g->o->partial) {
        for (size_t i = 0; i < g->missing.n; i++)
            ckpt_tool_note(g->tool, "%s", g->missing.items[i]);
        return ckpt_fail(err, CKPT_E_FORMAT, "%zu file%s missing, the first: %s", g->missing.n,
                         g->missing.n == 1 ? "" : "s", g->missing.items[0]);
    }
    for (size_t i = 1; i < g->n; i++)
        if (strcmp(g->files[i].name, g->files[i - 1].name) == 0)
            CKPT_CHECK(compare(&g->files[i - 1], &g->files[i], buf, err));
    CKPT_CHECK(write_out(g, buf, err));
done:
    return status;
}

static void report(gathering *g)
{
    ckpt_tool *tool = g->tool;
    if (tool->g.json) {
        ckpt_jw_string(&tool->json, "destination", g->o->out);
        ckpt_jw_u64(&tool->json, "files", g->n_unique);
        ckpt_jw_u64(&tool->json, "bytes", g->bytes);
        ckpt_jw_lines(&tool->json, "missing", g->missing.items, g->missing.n);
        ckpt_jw_open(&tool->json, "parts", '[');
        for (size_t i = 0; i < tool->operands.n; i++) {
            ckpt_jw_open(&tool->json, NULL, '{');
            ckpt_jw_string(&tool->json, "path", tool->operands.items[i]);
            ckpt_jw_u64(&tool->json, "files", g->per_part[i]);
            ckpt_jw_close(&tool->json, '}');
        }
        ckpt_jw_close(&tool->json, ']');
        return;
    }
    if (!ckpt_tool_text(tool))
        return;
    for (size_t i = 0; i < g->missing.n; i++)
        printf("%s\n", g->missing.items[i]);
    for (size_t i = 0; i < tool->operands.n; i++)
        printf("%s: %zu file%s\n", tool->operands.items[i], g->per_part[i],
               g->per_part[i] == 1 ? "" : "s");
    printf("%s: %zu files, %s, %zu missing\n", g->o->out, g->n_unique,
           ckpt_human(&tool->arena, g->bytes), g->missing.n);
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    gathering g = {.tool = tool, .o = opts};
    uint8_t *buf = malloc(2 * BLOCK);
    g.per_part = calloc(tool->operands.n + 1, sizeof *g.per_part);
    ckpt_status status =
        buf != NULL && g.per_part != NULL ? gather(&g, buf, err) : ckpt_tool_no_memory(err);
    if (status == CKPT_OK)
        report(&g);
    ckpt_commit_discard(&g.commit, err);
    ckpt_strings_release(&g.missing);
    free(g.per_part);
    free(g.files);
    free(buf);
    return status;
}

const ckpt_command ckpt_cmd_gather = {
    .name = "gather",
    .synopsis = "DIR...",
    .what = "merge the parts of a checkpoint that several nodes hold",
    .opts = rows,
    .opts_size = sizeof(gather_opts),
    .min_operands = 1,
    .max_operands = SIZE_MAX,
    .writes = true,
    .run = run,
    .notes =
        "A file that several parts have must be the same in all. Files that an index, a .metadata\n"
        "or a manifest names and no part has are listed, each with the part whose rank it is\n"
        "of, and nothing is written without --partial. A file that contradicts its digest in the\n"
        "manifest of the parts is an error.\n",
};
