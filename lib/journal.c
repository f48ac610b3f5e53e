#define _GNU_SOURCE /* flock */
#include "journal.h"
#include "checked.h"
#include "derive.h"
#include "factor.h"
#include "job.h"
#include "le.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC "ckpt-journal 1 "
#define JOURNAL_MAX ((uint64_t)64 << 20)
#define READ_BYTES ((size_t)1 << 20)
#define DERIVED_DEPTH 4

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* ---- digest of a plan -------------------------------------------------------------------------- */

static void put_u64(ckpt_sha256 *sha, uint64_t v)
{
    uint8_t raw[8];
    ckpt_put_u64(raw, v);
    ckpt_sha256_update(sha, raw, sizeof raw);
}

static void put_text(ckpt_sha256 *sha, const char *s)
{
    size_t n = s != NULL ? strlen(s) : 0;
    put_u64(sha, n);
    ckpt_sha256_update(sha, s, n);
}

static void put_dims(ckpt_sha256 *sha, int rank, const int64_t *dims)
{
    put_u64(sha, (uint64_t)rank);
    for (int i = 0; i < rank; i++)
        put_u64(sha, (uint64_t)dims[i]);
}

static void put_derived(ckpt_sha256 *sha, const ckpt_derived *d, int depth);

/* depth: derivations may still be nested so far (a factor of a fold of dequantised tensors is 3). */
static void put_gather(ckpt_sha256 *sha, const ckpt_gather *g, int depth)
{
    put_u64(sha, g->bytes);
    put_u64(sha, g->pad);
    put_u64(sha, (uint64_t)g->from << 32 | (uint64_t)g->to << 1 | g->swap);
    put_u64(sha, (uint64_t)(uint8_t)g->add_from << 16 | (uint64_t)(uint8_t)g->add_to << 8 |
                     (uint8_t)g->add_back);
    put_u64(sha, g->n_copies);
    for (size_t i = 0; i < g->n_copies; i++) {
        const ckpt_copy *c = &g->copies[i];
        put_u64(sha, c->src);
        put_u64(sha, c->dst);
        put_u64(sha, (uint64_t)c->file << 32 | (uint64_t)c->n_loops);
        for (int k = 0; k < c->n_loops; k++) {
            put_u64(sha, (uint64_t)c->loop[k].n);
            put_u64(sha, (uint64_t)c->loop[k].src);
            put_u64(sha, (uint64_t)c->loop[k].dst);
        }
        if (c->file >= CKPT_DERIVED_FILE && depth > 0)
            put_derived(sha, c->derived, depth - 1);
    }
}

static void put_derived(ckpt_sha256 *sha, const ckpt_derived *d, int depth)
{
    put_u64(sha, (uint64_t)d->kind);
    put_text(sha, d->tensor.name);
    put_dims(sha, d->tensor.rank, d->tensor.dims);
    if (d->kind != CKPT_DERIVE_FACTOR) {
        put_gather(sha, &d->a, depth);
        put_gather(sha, &d->b, depth);
        put_gather(sha, &d->g, depth);
        return;
    }
    put_u64(sha, d == &d->factor->a);
    put_u64(sha, (uint64_t)d->factor->rank);
    if (d->factor->product != NULL)
        put_derived(sha, d->factor->product, depth);
    else
        put_gather(sha, &d->factor->full, depth);
}

static ckpt_status put_files(ckpt_sha256 *sha, const ckpt_sink *sink, ckpt_err *err)
{
    put_u64(sha, sink->n_files);
    for (size_t f = 0; f < sink->n_files; f++) {
        const ckpt_out_file *file = &sink->files[f];
        put_text(sha, file->name);
        put_u64(sha, file->size);
        for (size_t i = 0; i < file->n_segs; i++) {
            const ckpt_seg *s = &file->segs[i];
            put_u64(sha, s->offset);
            put_u64(sha, s->len);
            put_u64(sha, (uint64_t)s->a << 32 | s->b);
            put_u64(sha, (uint64_t)s->kind << 1 | s->crc);
            if (s->kind != CKPT_SEG_LITERAL)
                continue;
            const uint8_t *stored = sink->stored != NULL ? sink->stored(sink, s) : NULL;
            if (stored != NULL) {
                ckpt_sha256_update(sha, stored, (size_t)s->len);
                continue;
            }
            uint8_t *bytes = malloc((size_t)s->len + 1);
            if (bytes == NULL || !sink->literal(sink, (uint32_t)f, s, 0, bytes)) {
                free(bytes);
                return no_memory(err);
            }
            ckpt_sha256_update(sha, bytes, (size_t)s->len);
            free(bytes);
        }
    }
    return CKPT_OK;
}

static ckpt_status put_objects(ckpt_sha256 *sha, const ckpt_out *out)
{
    put_u64(sha, out->n_objects);
    for (size_t i = 0; i < out->n_objects; i++) {
        const ckpt_out_object *o = &out->objects[i];
        put_text(sha, o->name);
        put_u64(sha, o->length);
        if (o->data != NULL) {
            ckpt_sha256_update(sha, o->data, (size_t)o->length);
            continue;
        }
        put_u64(sha, o->src_file);
        put_u64(sha, o->src_offset);
    }
    return CKPT_OK;
}

static ckpt_status put_source(ckpt_sha256 *sha, const ckpt_source *src, ckpt_err *err)
{
    put_u64(sha, src->n_files);
    for (size_t i = 0; i < ckpt_source_n_real(src); i++) {
        const ckpt_file *f = &src->files[i];
        struct stat st;
        if ((f->fd >= 0 ? fstat(f->fd, &st) : stat(f->path, &st)) != 0)
            return ckpt_fail_errno(err, errno, "%s", f->path);
        put_text(sha, f->name);
        put_u64(sha, (uint64_t)st.st_size);
        put_u64(sha, (uint64_t)st.st_mtim.tv_sec);
        put_u64(sha, (uint64_t)st.st_mtim.tv_nsec);
    }
    return CKPT_OK;
}

ckpt_status ckpt_plan_digest(const ckpt_plan *plan, uint8_t out[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_sha256 sha = {0};
    ckpt_status status;
    CKPT_CHECK(ckpt_sha256_init(&sha, err));
    put_text(&sha, CKPT_VERSION);
    CKPT_CHECK(put_source(&sha, plan->model->src, err));
    put_u64(&sha, plan->out.n_tensors);
    for (size_t t = 0; t < plan->out.n_tensors; t++) {
        const ckpt_out_tensor *o = &plan->out.tensors[t];
        put_text(&sha, o->name);
        put_u64(&sha, (uint64_t)o->dtype);
        put_dims(&sha, o->rank, o->dims);
        for (size_t c = 0; c < o->n_chunks; c++) {
            put_dims(&sha, o->rank, o->chunks[c].lo);
            put_dims(&sha, o->rank, o->chunks[c].len);
            put_gather(&sha, &plan->chunks[t][c], DERIVED_DEPTH);
        }
    }
    CKPT_CHECK(put_objects(&sha, &plan->out));
    CKPT_CHECK(put_files(&sha, &plan->sink, err));
    ckpt_sha256_final(&sha, out);
done:
    ckpt_sha256_release(&sha);
    return status;
}

/* ---- lines ------------------------------------------------------------------------------------- */

static ckpt_status note(ckpt_journal *j, ckpt_err *err, const char *fmt, ...) CKPT_PRINTF(3, 4);
static ckpt_status note(ckpt_journal *j, ckpt_err *err, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    void *p = j->notes;
    ckpt_status status = ckpt_grow(&p, &j->cap_notes, j->n_notes + 1, sizeof *j->notes, err);
    j->notes = p;
    const char *kept = ckpt_arena_strdup(&j->arena, text);
    if (status == CKPT_OK && kept == NULL)
        status = no_memory(err);
    if (status == CKPT_OK)
        j->notes[j->n_notes++] = kept;
    return status;
}

static void put_line(const ckpt_journal *j, size_t index, const ckpt_journal_entry *e,
                     ckpt_buf *out)
{
    char sha[2 * CKPT_SHA256_LEN + 1], rest[2 * CKPT_SHA256_LEN + 1];
    ckpt_hex(e->sha256, sha);
    ckpt_hex(e->rest, rest);
    ckpt_buf_printf(out, "file %zu %" PRIu64 " %s %s\n", index, j->sink->files[index].size, sha,
                    rest);
}

/* One line of another run's journal; false for a torn or strange one. */
static bool read_line(const ckpt_journal *j, const char *line, size_t *index,
                      ckpt_journal_entry *entry)
{
    char sha[2 * CKPT_SHA256_LEN + 1], rest[2 * CKPT_SHA256_LEN + 1];
    uint64_t size;
    int end = 0;
    if (sscanf(line, "file %zu %" SCNu64 " %64[0-9a-f] %64[0-9a-f]%n", index, &size, sha, rest,
               &end) != 4 ||
        line[end] != '\n' || *index >= j->sink->n_files || size != j->sink->files[*index].size)
        return false;
    *entry = (ckpt_journal_entry){.done = true};
    return ckpt_unhex(sha, entry->sha256) && ckpt_unhex(rest, entry->rest);
}

static ckpt_status append(ckpt_journal *j, const ckpt_buf *text, ckpt_err *err)
{
    if (text->failed)
        return no_memory(err);
    for (size_t at = 0; at < text->len;) {
        ssize_t n = write(j->fd, text->data + at, text->len - at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ckpt_fail_errno(err, errno, "%s", j->path);
        at += (size_t)n;
    }
    return ckpt_sync_fd(j->fd) == 0 ? CKPT_OK : ckpt_fail_errno(err, errno, "%s: fsync", j->path);
}

ckpt_status ckpt_journal_done(ckpt_journal *j, size_t index, const ckpt_journal_entry *entry,
                              ckpt_err *err)
{
    ckpt_buf line = {0};
    put_line(j, index, entry, &line);
    pthread_mutex_lock(&j->lock);
    ckpt_status status = append(j, &line, err);
    pthread_mutex_unlock(&j->lock);
    ckpt_buf_release(&line);
    return status;
}

/* ---- taking over ------------------------------------------------------------------------------- */

/* What a dead run of the same plan finished. */
typedef struct leftover {
    ckpt_journal *j;
    const char *dir;
    int fd;                    /* of its journal, locked */
    ckpt_journal_entry *found; /* by sink file */
    bool *good, *bad;          /* found as listed; found, but different */
} leftover;

static ckpt_status hash_file(ckpt_worker *w, const char *path, uint64_t size,
                             uint8_t out[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int fd;
    uint64_t have;
    CKPT_CHECK(ckpt_open_read(path, &fd, &have, err));
    if (have != size)
        status = ckpt_fail(err, CKPT_E_MISMATCH, "%s: %" PRIu64 " bytes", path, have);
    for (uint64_t at = 0; status == CKPT_OK && at < size;) {
        size_t n = (size_t)ckpt_min_u64(size - at, w->job->piece);
        status = ckpt_check_interrupted(err);
        if (status == CKPT_OK)
            status = ckpt_pread_full(fd, w->buf, n, at, err);
        ckpt_sha256_update(&w->sha, w->buf, n);
        at += n;
    }
    ckpt_sha256_final(&w->sha, out);
    close(fd);
done:
    return status;
}

/* A file that cannot be read or differs is simply written again. */
static ckpt_status verify_item(ckpt_worker *w, size_t f, ckpt_err *err)
{
    leftover *l = w->job->self;
    const ckpt_out_file *file = &l->j->sink->files[f];
    uint8_t sha[CKPT_SHA256_LEN];
    char path[4096];
    struct stat st;
    if (!l->found[f].done || l->j->files[f].done)
        return CKPT_OK;
    int n = snprintf(path, sizeof path, "%s/%s", l->dir, file->name);
    if (n < 0 || (size_t)n >= sizeof path || lstat(path, &st) != 0 || !S_ISREG(st.st_mode))
        return CKPT_OK;
    ckpt_status status = hash_file(w, path, file->size, sha, err);
    if (status == CKPT_E_INTERRUPTED)
        return status;
    l->good[f] = status == CKPT_OK && memcmp(sha, l->found[f].sha256, sizeof sha) == 0;
    l->bad[f] = !l->good[f];
    ckpt_job_advance(w, file->size);
    return CKPT_OK;
}

static ckpt_status verify_all(leftover *l, const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status;
    ckpt_job job = {.run = verify_item, .self = l, .n_items = l->j->sink->n_files};
    job.piece = READ_BYTES;
    for (size_t f = 0; f < job.n_items; f++)
        job.total_bytes += l->found[f].done ? l->j->sink->files[f].size : 0;
    CKPT_CHECK(ckpt_job_open(&job, opts, err));
    status = ckpt_job_run(&job);
done:
    ckpt_job_close(&job);
    return status;
}

/* Move the good files to `to` and enter them in the new journal. */
static ckpt_status move_files(leftover *l, const char *to, ckpt_err *err)
{
    ckpt_journal *j = l->j;
    ckpt_arena arena = {0};
    ckpt_buf lines = {0};
    ckpt_status status = CKPT_OK;
    for (size_t f = 0; f < j->sink->n_files; f++) {
        char *from_path = ckpt_path_join(&arena, l->dir, j->sink->files[f].name);
        char *to_path = ckpt_path_join(&arena, to, j->sink->files[f].name);
        if (!l->good[f])
            continue;
        if (from_path == NULL || to_path == NULL) {
            status = no_memory(err);
            goto done;
        }
        char *slash = strrchr(to_path, '/');
        *slash = '\0';
        CKPT_CHECK(ckpt_mkdirs(to_path, err));
        *slash = '/';
        if (rename(from_path, to_path) != 0) {
            status = ckpt_fail_errno(err, errno, "rename of %s to %s", from_path, to_path);
            goto done;
        }
        j->files[f] = l->found[f];
        j->n_resumed++;
        j->resumed_bytes += j->sink->files[f].size;
        put_line(j, f, &j->files[f], &lines);
    }
    status = append(j, &lines, err);
done:
    ckpt_arena_free(&arena);
    ckpt_buf_release(&lines);
    return status;
}

/* The journal last: whoever dies in between leaves something that is still recognised. */
static ckpt_status remove_leftover(const char *dir, ckpt_arena *arena, ckpt_err *err)
{
    char **names = NULL;
    size_t n = 0;
    ckpt_status status = ckpt_list_dir(dir, arena, &names, &n, err);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        char *path = ckpt_path_join(arena, dir, names[i]);
        if (path == NULL)
            status = no_memory(err);
        else if (strcmp(names[i], CKPT_JOURNAL_NAME) != 0)
            ckpt_remove_tree(path);
    }
    ckpt_remove_tree(dir);
    return status;
}

/* Later lines of the text as far as they are whole. */
static void read_lines(leftover *l, const char *text)
{
    for (const char *at = strchr(text, '\n'); at != NULL && at[1] != '\0';
         at = strchr(at + 1, '\n')) {
        size_t f;
        ckpt_journal_entry e;
        if (!read_line(l->j, at + 1, &f, &e))
            break;
        l->found[f] = e;
    }
}

static ckpt_status take_over(leftover *l, const char *text, const ckpt_commit *commit,
                             const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_journal *j = l->j;
    ckpt_status status = CKPT_OK;
    size_t damaged = 0, n = j->sink->n_files;
    l->found = calloc(n + 1, sizeof *l->found);
    l->good = calloc(n + 1, sizeof *l->good);
    l->bad = calloc(n + 1, sizeof *l->bad);
    if (l->found == NULL || l->good == NULL || l->bad == NULL) {
        status = no_memory(err);
        goto done;
    }
    read_lines(l, text);
    CKPT_CHECK(verify_all(l, opts, err));
    CKPT_CHECK(move_files(l, commit->temp_path, err));
    for (size_t f = 0; f < n; f++)
        damaged += l->bad[f];
    if (damaged > 0)
        CKPT_CHECK(note(j, err, "%zu finished file%s of %s damaged: written again", damaged,
                        damaged == 1 ? "" : "s", l->dir));
    CKPT_CHECK(remove_leftover(l->dir, &j->arena, err));
done:
    free(l->found);
    free(l->good);
    free(l->bad);
    return status;
}

/* ---- what earlier runs left --------------------------------------------------------------------- */

static bool is_ours(const char *dir)
{
    struct stat st;
    return lstat(dir, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid();
}

/* The journal's text if nobody holds it; *fd is then locked, else -1. *orphan: no journal, killed
 * before it was written or after it was removed. A run that lives is a rival for the same output,
 * and refused: CKPT_E_UNSUPPORTED. */
static ckpt_status open_leftover(const char *dir, ckpt_arena *arena, int *fd, bool *orphan,
                                 ckpt_buf *text, ckpt_err *err)
{
    const char *path = ckpt_path_join(arena, dir, CKPT_JOURNAL_NAME);
    *fd = -1;
    if (path == NULL)
        return no_memory(err);
    int f = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    bool missing = f < 0 && errno == ENOENT, live = missing && ckpt_commit_is_live(dir);
    *orphan = missing && !live;
    if (f >= 0 && flock(f, LOCK_EX | LOCK_NB) != 0)
        live = errno == EWOULDBLOCK;
    else if (f >= 0 && ckpt_read_file(path, JOURNAL_MAX, text, NULL) == CKPT_OK)
        *fd = f;
    if (f >= 0 && *fd < 0)
        close(f);
    return live ? ckpt_fail(err, CKPT_E_UNSUPPORTED, "another run is writing this output, in %s",
                            dir)
                : CKPT_OK;
}

static bool same_plan(const ckpt_journal *j, const ckpt_buf *text)
{
    char want[sizeof MAGIC + 2 * CKPT_SHA256_LEN + 1] = MAGIC;
    ckpt_hex(j->plan, want + sizeof MAGIC - 1);
    size_t n = strlen(want);
    return text->len > n && memcmp(text->data, want, n) == 0 && text->data[n] == '\n';
}

static ckpt_status look_at(ckpt_journal *j, const char *dir, const ckpt_commit *commit, bool resume,
                           const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_buf text = {0};
    leftover l = {.j = j, .dir = dir, .fd = -1};
    ckpt_status status = CKPT_OK;
    bool orphan = false;
    if (!is_ours(dir))
        return CKPT_OK;
    CKPT_CHECK(open_leftover(dir, &j->arena, &l.fd, &orphan, &text, err));
    if (orphan && (!resume || rmdir(dir) != 0)) /* an empty one is no loss */
        status = note(j, err, "%s was left by an interrupted run: remove it by hand", dir);
    if (l.fd < 0)
        goto done;
    if (!same_plan(j, &text))
        status = note(j, err,
                      "%s was left by an interrupted run with other options or another source: "
                      "remove it by hand",
                      dir);
    else if (!resume)
        status = note(j, err, "%s was left by an interrupted run: --resume continues it", dir);
    else
        status = take_over(&l, (const char *)text.data, commit, opts, err);
done:
    if (l.fd >= 0)
        close(l.fd);
    ckpt_buf_release(&text);
    return status;
}

/* ---- the journal -------------------------------------------------------------------------------- */

static ckpt_status create(ckpt_journal *j, const char *dir, ckpt_err *err)
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_buf head = {0};
    j->path = ckpt_path_join(&j->arena, dir, CKPT_JOURNAL_NAME);
    if (j->path == NULL)
        return no_memory(err);
    j->fd = open(j->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600);
    if (j->fd < 0)
        return ckpt_fail_errno(err, errno, "%s", j->path);
    if (flock(j->fd, LOCK_EX | LOCK_NB) != 0)
        return ckpt_fail_errno(err, errno, "lock of %s", j->path);
    ckpt_hex(j->plan, hex);
    ckpt_buf_printf(&head, MAGIC "%s\n", hex);
    ckpt_status status = append(j, &head, err);
    ckpt_buf_release(&head);
    return status;
}

ckpt_status ckpt_journal_prepare(ckpt_journal *j, const ckpt_plan *plan, ckpt_err *err)
{
    *j = (ckpt_journal){.active = true, .fd = -1, .sink = &plan->sink};
    pthread_mutex_init(&j->lock, NULL);
    j->files = calloc(plan->sink.n_files + 1, sizeof *j->files);
    return j->files != NULL ? ckpt_plan_digest(plan, j->plan, err) : no_memory(err);
}

ckpt_status ckpt_journal_begin(ckpt_journal *j, ckpt_commit *commit, bool resume,
                               const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    char **dirs;
    size_t n;
    CKPT_CHECK(create(j, commit->temp_path, err));
    commit->scratch = j->path;
    CKPT_CHECK(ckpt_commit_leftovers(commit, &j->arena, &dirs, &n, err));
    for (size_t i = 0; i < n; i++)
        CKPT_CHECK(look_at(j, dirs[i], commit, resume, opts, err));
done:
    return status;
}

size_t ckpt_journal_count(const ckpt_journal *j)
{
    ckpt_buf text = {0};
    size_t n = 0;
    if (j->active && ckpt_read_file(j->path, JOURNAL_MAX, &text, NULL) == CKPT_OK)
        for (size_t i = 0; i < text.len; i++)
            n += text.data[i] == '\n';
    ckpt_buf_release(&text);
    return n > 0 ? n - 1 : 0; /* without the head */
}

static ckpt_status open_joined(ckpt_journal *j, const ckpt_plan *plan, const char *dir,
                               ckpt_err *err)
{
    *j = (ckpt_journal){.active = true, .fd = -1, .sink = &plan->sink};
    pthread_mutex_init(&j->lock, NULL);
    j->files = calloc(plan->sink.n_files + 1, sizeof *j->files);
    j->path = ckpt_path_join(&j->arena, dir, CKPT_JOURNAL_NAME);
    if (j->files == NULL || j->path == NULL)
        return no_memory(err);
    j->fd = open(j->path, O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC);
    return j->fd >= 0 ? CKPT_OK : ckpt_fail_errno(err, errno, "%s", j->path);
}

ckpt_status ckpt_journal_join(ckpt_journal *j, const ckpt_plan *plan, const char *dir,
                              const ckpt_share *share, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int *owner = NULL;
    if (ckpt_share_alone(share))
        return CKPT_OK;
    if (share->rank != 0)
        status = open_joined(j, plan, dir, err);
    owner = calloc(plan->sink.n_files + 1, sizeof *owner); /* rank 0's, all of them */
    if (status == CKPT_OK && owner == NULL)
        status = no_memory(err);
    CKPT_CHECK(ckpt_share_agree(share, status, err));
    CKPT_CHECK(ckpt_share_table(share, j->files, plan->sink.n_files, sizeof *j->files, owner, err));
done:
    free(owner);
    return status;
}

void ckpt_journal_release(ckpt_journal *j)
{
    if (!j->active)
        return;
    if (j->fd >= 0)
        close(j->fd);
    pthread_mutex_destroy(&j->lock);
    free(j->files);
    free(j->notes);
    ckpt_arena_free(&j->arena);
    *j = (ckpt_journal){0};
}
