/* The executor. One list of work items, taken in order by all workers:
 *
 *   piece   the same range of every file of a lane (mostly one file): gather, then pass the lane's
 *           turnstile (CRC, literals, file digests, in file order), then write; with leaves, which
 *           are hashed beside the file: a second stream is nearly free on the SHA unit
 *   leaves  sixteen Merkle leaves of canonical tensors: gather from the source, hash side by side
 *
 * Files that a sink lets advance together share a lane if there are enough of them for their digests
 * to run in the wide kernel, which is worth half a second of a gigabyte's one. Pieces of up to
 * LANES_IN_FLIGHT lanes are interleaved so that their serial digests run in
 * parallel, and leaves are merged in by progress, so that both readings of a source region come
 * close together and the second is served by the page cache. A worker that waits at a turnstile
 * waits for an item that was handed out earlier, so the lowest item in flight never waits. */
#define _GNU_SOURCE /* O_DIRECT */
#include "checked.h"
#include "crc.h"
#include "gather.h"
#include "hole.h"
#include "job.h"
#include "journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LANES_IN_FLIGHT 8
#define WAVE_MAX ((uint64_t)16 << 20)     /* bytes of a piece of a lane of several files */
#define WAVE_FILE_MIN ((uint64_t)1 << 20) /* smaller files have a lane of their own */
#define DIRECT_MIN ((uint64_t)64 << 20)   /* files from this size on are written with O_DIRECT */
#define PAGE 4096
#define OPEN_MAX_FILES 256 /* more are closed after they are created, until their turn */

/* ---- converting -------------------------------------------------------------------------------- */

/* State of one output file. */
typedef struct out_file {
    const char *path;
    int fd, direct_fd;
    atomic_ullong written;
    ckpt_sha256_stream whole, rest;
    uint32_t crc; /* of the payload segment in progress or just ended */
} out_file;

/* Neighbouring files that are written in step. */
typedef struct lane {
    uint32_t first, n; /* files */
    uint64_t step;     /* bytes of each file that one piece covers */
    uint64_t size;     /* of the longest file that this run writes */
    uint64_t passed;   /* bytes of each that went through the turnstile */
    pthread_mutex_t lock;
    pthread_cond_t turn;
} lane;

#define NO_LANE UINT32_MAX
typedef struct item {
    uint64_t offset; /* of the piece in the files */
    uint32_t lane;   /* NO_LANE: leaves alone */
    uint32_t n_leaves;
    size_t first_leaf;
} item;

typedef struct convert_job {
    ckpt_plan *plan;
    ckpt_arena *arena;
    const char *dir;
    ckpt_journal *journal; /* files that are done already, and where to enter others; or NULL */
    out_file *files;
    lane *lanes;
    size_t n_lanes;
    ckpt_leaf_list leaves;
    item *items;
    size_t n_items;
    pthread_mutex_t open_lock;
    bool sparse; /* the source has holes: what is zero becomes one */
    const ckpt_share *share;
    int *owner;     /* rank that writes each file; NULL: this process, all */
    bool beside;    /* a worker's buffer holds a piece and as many bytes of leaves */
    uint64_t piece; /* bytes of a piece, at most */
} convert_job;

static void wake_all(ckpt_job *j)
{
    convert_job *c = j->self;
    for (size_t i = 0; i < c->n_lanes; i++) {
        pthread_mutex_lock(&c->lanes[i].lock);
        pthread_cond_broadcast(&c->lanes[i].turn);
        pthread_mutex_unlock(&c->lanes[i].lock);
    }
}

static bool is_done(const convert_job *c, size_t f)
{
    return c->journal != NULL && c->journal->files[f].done;
}

static bool is_mine(const convert_job *c, size_t f)
{
    return c->owner == NULL || c->owner[f] == c->share->rank;
}

/* Bytes of a file that this run writes. */
static uint64_t size_to_do(const convert_job *c, size_t f)
{
    return is_done(c, f) || !is_mine(c, f) ? 0 : c->plan->sink.files[f].size;
}

/* First segment that ends after `offset`. */
static size_t seg_at(const ckpt_out_file *file, uint64_t offset)
{
    size_t lo = 0, hi = file->n_segs;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (file->segs[mid].offset + file->segs[mid].len <= offset)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static ckpt_status fill_object(const convert_job *c, const ckpt_seg *seg, uint64_t skip, size_t n,
                               uint8_t *out, ckpt_err *err)
{
    const ckpt_out_object *o = &c->plan->out.objects[seg->a];
    if (o->data != NULL) {
        memcpy(out, o->data + skip, n);
        return CKPT_OK;
    }
    ckpt_status status =
        ckpt_source_read(c->plan->model->src, o->src_file, out, n, o->src_offset + skip, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "object '%s'", o->name);
    return status;
}

/* Payload parts of the piece; literals come later, in file order. */
static ckpt_status fill_payload(ckpt_worker *w, const convert_job *c, uint32_t f, uint8_t *buf,
                                uint64_t lo, uint64_t hi, ckpt_err *err)
{
    const ckpt_out_file *file = &c->plan->sink.files[f];
    for (size_t s = seg_at(file, lo); s < file->n_segs && file->segs[s].offset < hi; s++) {
        const ckpt_seg *seg = &file->segs[s];
        uint64_t a = ckpt_max_u64(seg->offset, lo), b = ckpt_min_u64(seg->offset + seg->len, hi);
        uint8_t *out = buf + (a - lo);
        ckpt_status status = CKPT_OK;
        if (seg->kind == CKPT_SEG_CHUNK) {
            w->now = c->plan->out.tensors[seg->a].name;
            status = ckpt_gather_run(c->plan->model->src, &c->plan->chunks[seg->a][seg->b],
                                     a - seg->offset, (size_t)(b - a), out, &w->scratch, err);
            if (status != CKPT_OK)
                ckpt_err_frame(err, "tensor '%s'", c->plan->out.tensors[seg->a].name);
        } else if (seg->kind == CKPT_SEG_OBJECT) {
            status = fill_object(c, seg, a - seg->offset, (size_t)(b - a), out, err);
        }
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* Holes of a padded chunk, in written bytes, into the digest of non-tensor bytes. */
typedef struct hole_feed {
    ckpt_sha256_stream *rest;
    const uint8_t *data; /* bytes [lo, hi) of the chunk as written */
    uint64_t lo, hi;     /* written bytes */
    uint64_t from, to;   /* element sizes: planned, written */
} hole_feed;

static ckpt_status feed_hole(void *self, uint64_t offset, uint64_t len, ckpt_err *err)
{
    hole_feed *h = self;
    (void)err;
    uint64_t a = ckpt_max_u64(offset / h->from * h->to, h->lo);
    uint64_t b = ckpt_min_u64((offset + len) / h->from * h->to, h->hi);
    if (a < b)
        ckpt_sha256_stream_update2(h->rest, h->data + (a - h->lo), (size_t)(b - a), NULL, NULL, 0);
    return CKPT_OK;
}

static ckpt_status rest_of_chunk(const convert_job *c, out_file *of, const ckpt_seg *seg,
                                 uint64_t skip, const uint8_t *data, uint64_t n, ckpt_err *err)
{
    const ckpt_gather *g = &c->plan->chunks[seg->a][seg->b];
    if (g->pad == 0)
        return CKPT_OK;
    uint64_t from = (uint64_t)ckpt_dtype_get(g->from)->bits / 8;
    uint64_t to = (uint64_t)ckpt_dtype_get(g->to)->bits / 8;
    uint64_t first = skip / to, last = (skip + n + to - 1) / to; /* elements touched */
    hole_feed h = {&of->rest, data, skip, skip + n, from, to};
    return ckpt_gather_holes(g, first * from, (last - first) * from, feed_hole, &h, err);
}

static ckpt_status emit_literal(const convert_job *c, uint32_t f, const ckpt_seg *seg, uint64_t a,
                                uint64_t b, uint32_t crc, uint8_t *out, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    if (a == seg->offset && b == seg->offset + seg->len) {
        if (sink->literal(sink, f, seg, crc, out))
            return CKPT_OK;
    } else {
        uint8_t *whole = malloc((size_t)seg->len);
        bool made = whole != NULL && sink->literal(sink, f, seg, crc, whole);
        if (made)
            memcpy(out, whole + (a - seg->offset), (size_t)(b - a));
        free(whole);
        if (made)
            return CKPT_OK;
    }
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %llu bytes of header",
                     (unsigned long long)seg->len);
}

/* In file order: checksums, literals, the digest of what is no tensor. */
static ckpt_status fill_literals(convert_job *c, uint32_t f, uint8_t *buf, uint64_t lo, uint64_t hi,
                                 ckpt_err *err)
{
    const ckpt_out_file *file = &c->plan->sink.files[f];
    out_file *of = &c->files[f];
    ckpt_status status = CKPT_OK;
    for (size_t s = seg_at(file, lo);
         status == CKPT_OK && s < file->n_segs && file->segs[s].offset < hi; s++) {
        const ckpt_seg *seg = &file->segs[s];
        uint64_t a = ckpt_max_u64(seg->offset, lo), b = ckpt_min_u64(seg->offset + seg->len, hi);
        uint8_t *at = buf + (a - lo);
        if (seg->kind == CKPT_SEG_LITERAL) {
            status = emit_literal(c, f, seg, a, b, of->crc, at, err);
            ckpt_sha256_stream_update2(&of->rest, at, (size_t)(b - a), NULL, NULL, 0);
            continue;
        }
        if (a == seg->offset && !seg->more)
            of->crc = 0;
        if (seg->crc)
            of->crc = ckpt_crc32(of->crc, at, (size_t)(b - a));
        if (seg->kind == CKPT_SEG_OBJECT || seg->copy)
            ckpt_sha256_stream_update2(&of->rest, at, (size_t)(b - a), NULL, NULL, 0);
        else
            status = rest_of_chunk(c, of, seg, a - seg->offset, at, b - a, err);
    }
    return status;
}

static ckpt_journal_entry file_digests(const out_file *of)
{
    ckpt_journal_entry e = {.done = true};
    ckpt_sha256_stream whole = of->whole, rest = of->rest;
    ckpt_sha256_stream_final(&whole, e.sha256);
    ckpt_sha256_stream_final(&rest, e.rest);
    return e;
}

/* All bytes of a file are written. */
static ckpt_status finish_file(convert_job *c, uint32_t f, ckpt_err *err)
{
    out_file *of = &c->files[f];
    ckpt_status status = CKPT_OK;
    if (ckpt_sync_fd(of->fd) != 0)
        status = ckpt_fail_errno(err, errno, "%s: fsync", of->path);
    if (of->direct_fd >= 0)
        close(of->direct_fd);
    of->direct_fd = -1;
    if (close(of->fd) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s: close", of->path);
    of->fd = -1;
    if (status == CKPT_OK && c->journal != NULL) {
        ckpt_journal_entry e = file_digests(of);
        status = ckpt_journal_done(c->journal, f, &e, err);
    }
    return status;
}

static int open_direct(const char *path, uint64_t size, bool sparse)
{
    return size >= DIRECT_MIN && !sparse ? open(path, O_WRONLY | O_DIRECT | O_CLOEXEC) : -1;
}

/* A file that was closed after it had been created is opened by its first piece. */
static ckpt_status ensure_open(convert_job *c, uint32_t f, ckpt_err *err)
{
    out_file *of = &c->files[f];
    ckpt_status status = CKPT_OK;
    if (c->plan->sink.n_files <= OPEN_MAX_FILES)
        return CKPT_OK;
    pthread_mutex_lock(&c->open_lock);
    if (of->fd < 0) {
        of->direct_fd = open_direct(of->path, c->plan->sink.files[f].size, c->sparse);
        of->fd = open(of->path, O_WRONLY | O_CLOEXEC);
        if (of->fd < 0)
            status = ckpt_fail_errno(err, errno, "%s", of->path);
    }
    pthread_mutex_unlock(&c->open_lock);
    return status;
}

/* Buffered, without pages that are zero. */
static ckpt_status write_around_holes(const out_file *of, const uint8_t *buf, uint64_t lo,
                                      uint64_t hi, ckpt_err *err)
{
    uint64_t from = lo; /* [from, at) is to be written */
    for (uint64_t at = lo, end; at <= hi; at = end) {
        end = at < hi ? ckpt_min_u64((at / PAGE + 1) * PAGE, hi) : hi + 1;
        bool hole = at == hi || ckpt_all_zero(buf + (at - lo), (size_t)(end - at));
        if (!hole)
            continue;
        ckpt_status status =
            from < at ? ckpt_pwrite_full(of->fd, buf + (from - lo), (size_t)(at - from), from, err)
                      : CKPT_OK;
        if (status != CKPT_OK)
            return status;
        from = end;
    }
    return CKPT_OK;
}

static ckpt_status write_piece(convert_job *c, uint32_t f, const uint8_t *buf, uint64_t lo,
                               uint64_t hi, ckpt_err *err)
{
    out_file *of = &c->files[f];
    ckpt_status status = ensure_open(c, f, err);
    uint64_t n = hi - lo, direct = of->direct_fd >= 0 ? n / PAGE * PAGE : 0;
    if (status != CKPT_OK)
        return status;
    if (direct > 0 && pwrite(of->direct_fd, buf, direct, (off_t)lo) != (ssize_t)direct)
        direct = 0; /* the file system has second thoughts: buffered does everything */
    if (c->sparse)
        CKPT_TRY(write_around_holes(of, buf, lo, hi, err), "%s", of->path);
    else if (n > direct)
        CKPT_TRY(ckpt_pwrite_full(of->fd, buf + direct, (size_t)(n - direct), lo + direct, err),
                 "%s", of->path);
    if (atomic_fetch_add(&of->written, n) + n == c->plan->sink.files[f].size)
        status = finish_file(c, f, err);
done:
    return status;
}

/* What an item holds of one file; step apart in the worker's buffer. */
typedef struct part {
    uint32_t file;
    uint64_t lo, hi;
    uint8_t *buf;
} part;

static int list_parts(const ckpt_worker *w, const convert_job *c, const item *it,
                      part parts[CKPT_SHA256_LANES])
{
    const lane *l = &c->lanes[it->lane];
    int n = 0;
    for (uint32_t f = l->first; f < l->first + l->n; f++) {
        uint64_t size = size_to_do(c, f);
        if (it->offset >= size)
            continue;
        parts[n] = (part){.file = f,
                          .lo = it->offset,
                          .hi = ckpt_min_u64(it->offset + l->step, size),
                          .buf = w->buf + (uint64_t)n * l->step};
        n++;
    }
    return n;
}

/* The next piece of one file and, beside it, leaves that lie one after the other in `data`. */
static void hash_beside(const convert_job *c, const part *p, const item *it, const uint8_t *data)
{
    ckpt_sha256_stream *whole = &c->files[p->file].whole;
    const uint8_t *at = p->buf, *end = p->buf + (p->hi - p->lo);
    for (uint32_t i = 0; i < it->n_leaves; i++) {
        const ckpt_leaf *leaf = &c->leaves.leaves[it->first_leaf + i];
        ckpt_sha256_stream s;
        ckpt_sha256_stream_init(&s);
        ckpt_sha256_stream_update2(&s, "", 1, NULL, NULL, 0); /* RFC 6962: a leaf starts with 0 */
        size_t n = (size_t)ckpt_min_u64((uint64_t)(end - at), leaf->bytes);
        ckpt_sha256_stream_update2(&s, data, leaf->bytes, whole, at, n);
        ckpt_sha256_stream_final(&s, leaf->out);
        data += leaf->bytes;
        at += n;
    }
    if (at < end)
        ckpt_sha256_stream_update2(whole, at, (size_t)(end - at), NULL, NULL, 0);
}

static ckpt_status pass_turnstile(ckpt_worker *w, convert_job *c, const item *it, const part *parts,
                                  int n, ckpt_err *err)
{
    ckpt_sha256_stream *streams[CKPT_SHA256_LANES];
    const void *data[CKPT_SHA256_LANES];
    size_t len[CKPT_SHA256_LANES];
    for (int i = 0; i < n; i++) {
        const part *p = &parts[i];
        ckpt_status status = fill_literals(c, p->file, p->buf, p->lo, p->hi, err);
        if (status != CKPT_OK)
            return status;
        streams[i] = &c->files[p->file].whole;
        data[i] = p->buf;
        len[i] = (size_t)(p->hi - p->lo);
    }
    if (n == 1 && it->n_leaves > 0)
        hash_beside(c, parts, it, w->buf + c->piece);
    else
        ckpt_sha256_stream_update_many(streams, data, len, n);
    return CKPT_OK;
}

/* The bytes of a piece's leaves, behind the piece. */
static ckpt_status fill_leaves(ckpt_worker *w, const convert_job *c, const item *it, ckpt_err *err)
{
    uint8_t *out = w->buf + c->piece;
    for (uint32_t i = 0; i < it->n_leaves; i++) {
        const ckpt_leaf *leaf = &c->leaves.leaves[it->first_leaf + i];
        ckpt_status status =
            ckpt_gather_run(c->plan->model->src, leaf->gather, leaf->index * CKPT_LEAF_BYTES,
                            leaf->bytes, out, &w->scratch, err);
        if (status != CKPT_OK)
            return status;
        out += leaf->bytes;
        ckpt_job_advance(w, leaf->bytes);
    }
    return CKPT_OK;
}

static ckpt_status do_piece(ckpt_worker *w, convert_job *c, const item *it, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    lane *l = &c->lanes[it->lane];
    part parts[CKPT_SHA256_LANES];
    int n = list_parts(w, c, it, parts);
    for (int i = 0; i < n; i++)
        CKPT_CHECK(fill_payload(w, c, parts[i].file, parts[i].buf, parts[i].lo, parts[i].hi, err));
    CKPT_CHECK(fill_leaves(w, c, it, err));
    pthread_mutex_lock(&l->lock);
    while (l->passed != it->offset && !atomic_load(&w->job->stop))
        pthread_cond_wait(&l->turn, &l->lock);
    bool stopped = l->passed != it->offset;
    pthread_mutex_unlock(&l->lock);
    if (stopped)
        return CKPT_OK; /* somebody else reports the reason */
    CKPT_CHECK(pass_turnstile(w, c, it, parts, n, err));
    pthread_mutex_lock(&l->lock);
    l->passed = it->offset + l->step;
    pthread_cond_broadcast(&l->turn);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < n; i++) {
        const part *p = &parts[i];
        CKPT_CHECK(write_piece(c, p->file, p->buf, p->lo, p->hi, err));
        ckpt_job_advance(w, p->hi - p->lo);
    }
done:
    return status;
}

static ckpt_status convert_item(ckpt_worker *w, size_t index, ckpt_err *err)
{
    convert_job *c = w->job->self;
    const item *it = &c->items[index];
    if (it->lane == NO_LANE)
        return ckpt_hash_leaves(w, c->plan->model->src, c->leaves.leaves + it->first_leaf,
                                (int)it->n_leaves, err);
    return do_piece(w, c, it, err);
}

static ckpt_status open_file(const convert_job *c, size_t f, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_out_file *file = &c->plan->sink.files[f];
    out_file *of = &c->files[f];
    ckpt_arena *arena = c->arena;
    const char *dir = c->dir;
    bool whole_dir = !c->plan->out.single_file, sparse = c->sparse;
    of->fd = of->direct_fd = -1;
    char *path = whole_dir ? ckpt_path_join(arena, dir, file->name) : ckpt_arena_strdup(arena, dir);
    if (path == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    of->path = path;
    char *slash = strrchr(path, '/');
    if (whole_dir && slash != NULL) {
        *slash = '\0';
        CKPT_CHECK(ckpt_mkdirs(path, err));
        *slash = '/';
    }
    of->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (of->fd < 0)
        return ckpt_fail_errno(err, errno, "%s: create", path);
    if (sparse && ftruncate(of->fd, (off_t)file->size) != 0)
        return ckpt_fail_errno(err, errno, "%s: %llu bytes", path, (unsigned long long)file->size);
    int rc = file->size > 0 && !sparse ? posix_fallocate(of->fd, 0, (off_t)file->size) : 0;
    if (rc == ENOSPC || rc == EFBIG || rc == EDQUOT)
        return ckpt_fail_errno(err, rc, "%s: %llu bytes", path, (unsigned long long)file->size);
    if (file->size == 0 && ckpt_sync_fd(of->fd) != 0) /* no piece will come by */
        return ckpt_fail_errno(err, errno, "%s: fsync", path);
    if (file->size == 0 || c->plan->sink.n_files > OPEN_MAX_FILES) {
        int rc_close = close(of->fd);
        of->fd = -1;
        if (rc_close != 0)
            return ckpt_fail_errno(err, errno, "%s: close", path);
        return CKPT_OK;
    }
    of->direct_fd = open_direct(path, file->size, sparse);
done:
    return status;
}

static ckpt_status open_files(convert_job *c, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    c->files = calloc(sink->n_files + 1, sizeof *c->files);
    if (c->files == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t f = 0; f < sink->n_files; f++) {
        c->files[f].fd = c->files[f].direct_fd = -1;
        ckpt_sha256_stream_init(&c->files[f].whole);
        ckpt_sha256_stream_init(&c->files[f].rest);
    }
    for (size_t f = 0; f < sink->n_files; f++) {
        if (is_done(c, f) || !is_mine(c, f))
            continue;
        ckpt_status status = open_file(c, f, err);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static void close_files(convert_job *c)
{
    for (size_t f = 0; c->files != NULL && f < c->plan->sink.n_files; f++) {
        if (c->files[f].fd >= 0)
            close(c->files[f].fd);
        if (c->files[f].direct_fd >= 0)
            close(c->files[f].direct_fd);
    }
    free(c->files);
    for (size_t i = 0; i < c->n_lanes; i++) {
        pthread_mutex_destroy(&c->lanes[i].lock);
        pthread_cond_destroy(&c->lanes[i].turn);
    }
    free(c->lanes);
    free(c->owner);
}

/* ---- ordering the items ------------------------------------------------------------------------ */

/* How many files from f on share a lane. */
static uint32_t lane_files(const convert_job *c, size_t f)
{
    const ckpt_sink *sink = &c->plan->sink;
    uint32_t n = 0;
    while (sink->together && n < CKPT_SHA256_LANES && f + n < sink->n_files &&
           sink->files[f + n].is_data && sink->files[f + n].size >= WAVE_FILE_MIN &&
           (c->owner == NULL || c->owner[f + n] == c->owner[f]))
        n++;
    return ckpt_sha256_stream_wide((int)n) ? n : 1;
}

static ckpt_status make_lanes(convert_job *c, bool *waves, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    c->lanes = calloc(sink->n_files + 1, sizeof *c->lanes);
    if (c->lanes == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t f = 0; f < sink->n_files; f += c->lanes[c->n_lanes - 1].n) {
        lane *l = &c->lanes[c->n_lanes++];
        l->first = (uint32_t)f;
        l->n = lane_files(c, f);
        for (uint32_t i = 0; i < l->n; i++)
            l->size = ckpt_max_u64(l->size, size_to_do(c, f + i));
        *waves = *waves || l->n > 1;
        pthread_mutex_init(&l->lock, NULL);
        pthread_cond_init(&l->turn, NULL);
    }
    return CKPT_OK;
}

/* Steps of all lanes, and the most items there can be. */
static ckpt_status count_items(convert_job *c, uint64_t piece, size_t *n, ckpt_err *err)
{
    *n = c->leaves.n;
    for (size_t i = 0; i < c->n_lanes; i++) {
        lane *l = &c->lanes[i];
        l->step = l->n == 1 ? ckpt_min_u64(c->piece, CKPT_PIECE_MAX) : piece / l->n / PAGE * PAGE;
        uint64_t pieces = (l->size + l->step - 1) / l->step;
        if (pieces > UINT32_MAX)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is too large",
                             c->plan->sink.files[l->first].name);
        *n += (size_t)pieces;
    }
    return CKPT_OK;
}

/* Bytes of a lane's piece at `at`. */
static double piece_bytes(const convert_job *c, const lane *l, uint64_t at)
{
    double sum = 0;
    for (uint32_t f = l->first; f < l->first + l->n; f++) {
        uint64_t size = size_to_do(c, f);
        sum += size > at ? (double)ckpt_min_u64(l->step, size - at) : 0;
    }
    return sum;
}

/* Where the leaves stand while items are ordered. */
typedef struct leaf_pace {
    size_t next;
    double done, total; /* bytes */
} leaf_pace;

/* Leaves that are due at a share of the pieces: beside the piece just listed, as many as there is
 * room for, else in groups of their own. */
static void add_leaf_items(convert_job *c, leaf_pace *pace, double share, item *piece)
{
    const ckpt_leaf_list *list = &c->leaves;
    if (piece != NULL && c->beside) {
        uint64_t room = c->piece;
        piece->first_leaf = pace->next;
        while (pace->next < list->n && pace->done < pace->total * share &&
               list->leaves[pace->next].bytes <= room && piece->n_leaves < UINT32_MAX) {
            room -= list->leaves[pace->next].bytes;
            pace->done += (double)list->leaves[pace->next++].bytes;
            piece->n_leaves++;
        }
        return; /* what did not fit comes beside the next */
    }
    while (pace->next < list->n && pace->done < pace->total * share) {
        size_t n = ckpt_min_u64(CKPT_LEAF_GROUP, list->n - pace->next);
        c->items[c->n_items++] =
            (item){.lane = NO_LANE, .first_leaf = pace->next, .n_leaves = (uint32_t)n};
        for (size_t i = 0; i < n; i++)
            pace->done += (double)list->leaves[pace->next++].bytes;
    }
}

/* The lane of [begin, end) that is least far; NULL if all are through. */
static lane *least_far(const convert_job *c, size_t begin, size_t end)
{
    lane *next = NULL;
    for (size_t i = begin; i < end; i++) {
        lane *l = &c->lanes[i];
        if (l->passed < l->size && (next == NULL || l->passed < next->passed))
            next = l;
    }
    return next;
}

/* Pieces in groups of lanes, the lane that is least far first; leaves wherever their share of
 * all leaf bytes has been reached by the pieces. */
static ckpt_status order_items(convert_job *c, uint64_t piece, ckpt_err *err)
{
    size_t n;
    leaf_pace pace = {.total = 1};
    double piece_total = 1, piece_done = 0;
    ckpt_status status = count_items(c, piece, &n, err);
    if (status != CKPT_OK)
        return status;
    c->items = malloc((n + 1) * sizeof *c->items);
    if (c->items == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu work items", n);
    for (size_t f = 0; f < c->plan->sink.n_files; f++)
        piece_total += (double)size_to_do(c, f);
    for (size_t i = 0; i < c->leaves.n; i++)
        pace.total += (double)c->leaves.leaves[i].bytes;
    for (size_t group = 0; group < c->n_lanes; group += LANES_IN_FLIGHT) {
        size_t end = ckpt_min_u64(group + LANES_IN_FLIGHT, c->n_lanes);
        for (lane *l; (l = least_far(c, group, end)) != NULL; l->passed += l->step) {
            item *it = &c->items[c->n_items++];
            *it = (item){.offset = l->passed, .lane = (uint32_t)(l - c->lanes)};
            piece_done += piece_bytes(c, l, l->passed);
            add_leaf_items(c, &pace, piece_done / piece_total, l->n == 1 ? it : NULL);
        }
    }
    add_leaf_items(c, &pace, 2, NULL); /* all the rest */
    for (size_t i = 0; i < c->n_lanes; i++)
        c->lanes[i].passed = 0; /* from here on it counts what was done */
    return CKPT_OK;
}

/* ---- the job ------------------------------------------------------------------------------------ */

/* Which rank writes which file. */
static ckpt_status divide_files(convert_job *c, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    uint64_t total = 0, at = 0;
    if (ckpt_share_alone(c->share))
        return CKPT_OK;
    c->owner = calloc(sink->n_files + 1, sizeof *c->owner);
    if (c->owner == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t f = 0; f < sink->n_files; f++)
        total += sink->files[f].size;
    for (size_t f = 0; f < sink->n_files; at += sink->files[f++].size)
        c->owner[f] = ckpt_share_of(c->share, at, sink->files[f].size, total);
    return CKPT_OK;
}

static ckpt_status collect_files(const convert_job *c, ckpt_convert_result *out, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    for (size_t f = 0; f < sink->n_files; f++) {
        ckpt_journal_entry e = is_done(c, f) ? c->journal->files[f] : file_digests(&c->files[f]);
        memcpy(out->files[f].sha256, e.sha256, sizeof e.sha256);
        memcpy(out->files[f].rest, e.rest, sizeof e.rest);
        out->files[f].size = sink->files[f].size;
    }
    if (c->owner == NULL)
        return CKPT_OK;
    return ckpt_share_table(c->share, out->files, sink->n_files, sizeof *out->files, c->owner, err);
}

/* Buffers: a piece and its leaves, unless files advance in waves or memory is short. */
static ckpt_status open_buffers(convert_job *c, ckpt_job *j, bool waves,
                                const ckpt_stream_opts *opts, ckpt_err *err)
{
    int beside = waves ? -1 : opts->beside;
    if (beside == 0)
        beside = ckpt_sha256_stream_pairs() ? 1 : -1;
    j->piece = waves ? WAVE_MAX : beside > 0 ? 2 * CKPT_PIECE_MAX : CKPT_PIECE_MAX;
    ckpt_status status = ckpt_job_open(j, opts, err);
    c->piece = waves ? j->piece : ckpt_min_u64(j->piece, CKPT_PIECE_MAX);
    c->beside = beside > 0 && j->piece >= c->piece + CKPT_LEAF_BYTES;
    if (c->beside)
        c->piece = ckpt_min_u64(c->piece, j->piece - c->piece);
    return status;
}

/* This process's share of the work: its files and leaves. */
static ckpt_status run_share(convert_job *c, ckpt_job *j, const ckpt_stream_opts *opts,
                             ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool waves = false;
    const ckpt_source *src = c->plan->model->src;
    for (size_t f = 0; f < src->n_files; f++)
        c->sparse = c->sparse || src->files[f].sparse;
    CKPT_CHECK(divide_files(c, err));
    CKPT_CHECK(open_files(c, err));
    CKPT_CHECK(make_lanes(c, &waves, err));
    CKPT_CHECK(open_buffers(c, j, waves, opts, err));
    CKPT_CHECK(order_items(c, j->piece, err));
    j->n_items = c->n_items;
    for (size_t f = 0; f < c->plan->sink.n_files; f++)
        j->total_bytes += size_to_do(c, f);
    for (size_t i = 0; i < c->leaves.n; i++)
        j->total_bytes += c->leaves.leaves[i].bytes;
    CKPT_CHECK(ckpt_job_run(j));
done:
    return status;
}

ckpt_status ckpt_stream_convert(ckpt_plan *plan, const char *dir, const ckpt_stream_opts *opts,
                                ckpt_arena *arena, ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    convert_job c = {
        .plan = plan, .arena = arena, .dir = dir, .journal = opts->journal, .share = opts->share};
    ckpt_job j = {.run = convert_item, .give_up = wake_all, .self = &c};
    ckpt_leaf_shares shares = {0};
    *out = (ckpt_convert_result){0};
    if (plan->sink.serial != NULL) { /* one file that is made in order: nothing to divide */
        if (ckpt_share_alone(c.share) || c.share->rank == 0)
            status = ckpt_stream_serial(plan, dir, opts, arena, out, err);
        return ckpt_share_agree(c.share, status, err);
    }
    pthread_mutex_init(&c.open_lock, NULL);
    ckpt_tensor_hash *originals = calloc(plan->n_results + 1, sizeof *originals);
    out->tensors = ckpt_arena_array(arena, plan->n_results, sizeof *out->tensors);
    out->files = ckpt_arena_array(arena, plan->sink.n_files, sizeof *out->files);
    if (originals == NULL || out->tensors == NULL || out->files == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (status == CKPT_OK)
        status = ckpt_list_results(plan, &c.leaves, arena, out->tensors, originals, err);
    if (status == CKPT_OK)
        status = ckpt_leaves_divide(&c.leaves, c.share, &shares, err);
    if (status == CKPT_OK)
        status = run_share(&c, &j, opts, err);
    CKPT_CHECK(ckpt_share_agree(c.share, status, err));
    CKPT_CHECK(collect_files(&c, out, err));
    CKPT_CHECK(ckpt_leaves_collect(&shares, c.share, err));
    CKPT_CHECK(ckpt_finish_results(plan, &j.workers[0].sha, originals, out, err));
    out->bytes = plan->total_bytes;
    out->buffer_bytes = j.arena_bytes;
done:
    ckpt_job_close(&j);
    close_files(&c);
    ckpt_leaf_shares_free(&shares);
    pthread_mutex_destroy(&c.open_lock);
    free(c.leaves.leaves);
    free(c.items);
    free(originals);
    return status;
}
