/* The executor. One list of work items, taken in order by all workers:
 *
 *   piece   the same range of every file of a lane (mostly one file): gather, then pass the lane's
 *           turnstile (CRC, literals, file digests, in file order), then write
 *   leaves  sixteen Merkle leaves of canonical tensors: gather from the source, hash side by side
 *
 * Files that a sink lets advance together share a lane if there are enough of them for their digests
 * to run in the wide kernel, which is worth half a second of a gigabyte's one. Pieces of up to
 * LANES_IN_FLIGHT lanes are interleaved so that their serial digests run in
 * parallel, and leaf groups are merged in by progress, so that both readings of a source region come
 * close together and the second is served by the page cache. A worker that waits at a turnstile
 * waits for an item that was handed out earlier, so the lowest item in flight never waits. */
#define _GNU_SOURCE /* O_DIRECT */
#include "checked.h"
#include "crc.h"
#include "gather.h"
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
    uint64_t size;     /* of the longest file */
    uint64_t passed;   /* bytes of each that went through the turnstile */
    pthread_mutex_t lock;
    pthread_cond_t turn;
} lane;

typedef struct item {
    uint64_t offset; /* piece: in the files */
    uint32_t index;  /* lane, or group of leaves */
    uint32_t is_leaf;
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

/* Bytes of a file that this run writes. */
static uint64_t size_to_do(const convert_job *c, size_t f)
{
    return is_done(c, f) ? 0 : c->plan->sink.files[f].size;
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

static ckpt_status write_piece(convert_job *c, uint32_t f, const uint8_t *buf, uint64_t lo,
                               uint64_t hi, ckpt_err *err)
{
    out_file *of = &c->files[f];
    uint64_t n = hi - lo, direct = of->direct_fd >= 0 ? n / PAGE * PAGE : 0;
    ckpt_status status = CKPT_OK;
    if (direct > 0 && pwrite(of->direct_fd, buf, direct, (off_t)lo) != (ssize_t)direct)
        direct = 0; /* the file system has second thoughts: buffered does everything */
    if (n > direct)
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
    const lane *l = &c->lanes[it->index];
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

static ckpt_status pass_turnstile(convert_job *c, const part *parts, int n, ckpt_err *err)
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
    ckpt_sha256_stream_update_many(streams, data, len, n);
    return CKPT_OK;
}

static ckpt_status do_piece(ckpt_worker *w, convert_job *c, const item *it, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    lane *l = &c->lanes[it->index];
    part parts[CKPT_SHA256_LANES];
    int n = list_parts(w, c, it, parts);
    for (int i = 0; i < n; i++)
        CKPT_CHECK(fill_payload(w, c, parts[i].file, parts[i].buf, parts[i].lo, parts[i].hi, err));
    pthread_mutex_lock(&l->lock);
    while (l->passed != it->offset && !atomic_load(&w->job->stop))
        pthread_cond_wait(&l->turn, &l->lock);
    bool stopped = l->passed != it->offset;
    pthread_mutex_unlock(&l->lock);
    if (stopped)
        return CKPT_OK; /* somebody else reports the reason */
    CKPT_CHECK(pass_turnstile(c, parts, n, err));
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
    if (it->is_leaf)
        return ckpt_hash_leaves(w, c->plan->model->src, &c->leaves, it->index, err);
    return do_piece(w, c, it, err);
}

static ckpt_status open_file(out_file *of, const ckpt_out_file *file, const char *dir,
                             ckpt_arena *arena, bool whole_dir, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
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
    int rc = file->size > 0 ? posix_fallocate(of->fd, 0, (off_t)file->size) : 0;
    if (rc == ENOSPC || rc == EFBIG || rc == EDQUOT)
        return ckpt_fail_errno(err, rc, "%s: %llu bytes", path, (unsigned long long)file->size);
    if (file->size >= DIRECT_MIN)
        of->direct_fd = open(path, O_WRONLY | O_DIRECT | O_CLOEXEC);
    if (file->size == 0) { /* no piece will come by */
        if (ckpt_sync_fd(of->fd) != 0)
            return ckpt_fail_errno(err, errno, "%s: fsync", path);
        close(of->fd);
        of->fd = -1;
    }
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
        if (is_done(c, f))
            continue;
        ckpt_status status = open_file(&c->files[f], &sink->files[f], c->dir, c->arena,
                                       !c->plan->out.single_file, err);
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
}

/* ---- ordering the items ------------------------------------------------------------------------ */

/* How many files from f on share a lane. */
static uint32_t lane_files(const ckpt_sink *sink, size_t f)
{
    uint32_t n = 0;
    while (sink->together && n < CKPT_SHA256_LANES && f + n < sink->n_files &&
           sink->files[f + n].is_data && sink->files[f + n].size >= WAVE_FILE_MIN)
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
        l->n = lane_files(sink, f);
        for (uint32_t i = 0; i < l->n; i++)
            l->size = ckpt_max_u64(l->size, size_to_do(c, f + i));
        *waves = *waves || l->n > 1;
        pthread_mutex_init(&l->lock, NULL);
        pthread_cond_init(&l->turn, NULL);
    }
    return CKPT_OK;
}

/* Steps of all lanes for buffers of `piece` bytes, and the number of items. */
static ckpt_status count_items(convert_job *c, uint64_t piece, size_t *n, ckpt_err *err)
{
    *n = ckpt_leaf_groups(&c->leaves);
    for (size_t i = 0; i < c->n_lanes; i++) {
        lane *l = &c->lanes[i];
        l->step = l->n == 1 ? ckpt_min_u64(piece, CKPT_PIECE_MAX) : piece / l->n / PAGE * PAGE;
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

/* Pieces in groups of lanes, the lane that is least far first; leaf groups wherever their share of
 * all leaf bytes has been reached by the pieces. */
static ckpt_status order_items(convert_job *c, uint64_t piece, ckpt_err *err)
{
    size_t n, leaf = 0, n_groups = ckpt_leaf_groups(&c->leaves);
    double piece_total = 1, leaf_total = 1, piece_done = 0, leaf_done = 0;
    ckpt_status status = count_items(c, piece, &n, err);
    if (status != CKPT_OK)
        return status;
    c->items = malloc((n + 1) * sizeof *c->items);
    if (c->items == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu work items", n);
    for (size_t f = 0; f < c->plan->sink.n_files; f++)
        piece_total += (double)size_to_do(c, f);
    for (size_t i = 0; i < n_groups; i++)
        leaf_total += (double)ckpt_leaf_group_bytes(&c->leaves, i);
    for (size_t group = 0; group < c->n_lanes; group += LANES_IN_FLIGHT) {
        size_t end = ckpt_min_u64(group + LANES_IN_FLIGHT, c->n_lanes);
        for (;;) {
            lane *next = NULL;
            for (size_t i = group; i < end; i++) {
                lane *l = &c->lanes[i];
                if (l->passed < l->size && (next == NULL || l->passed < next->passed))
                    next = l;
            }
            if (next == NULL)
                break;
            c->items[c->n_items++] =
                (item){.offset = next->passed, .index = (uint32_t)(next - c->lanes)};
            piece_done += piece_bytes(c, next, next->passed);
            next->passed += next->step;
            while (leaf < n_groups && leaf_done / leaf_total < piece_done / piece_total) {
                leaf_done += (double)ckpt_leaf_group_bytes(&c->leaves, leaf);
                c->items[c->n_items++] = (item){.index = (uint32_t)leaf++, .is_leaf = 1};
            }
        }
    }
    while (leaf < n_groups)
        c->items[c->n_items++] = (item){.index = (uint32_t)leaf++, .is_leaf = 1};
    for (size_t i = 0; i < c->n_lanes; i++)
        c->lanes[i].passed = 0; /* from here on it counts what was done */
    return CKPT_OK;
}

/* Result indices in the order in which their target tensors are written. */
static int write_order(const void *a, const void *b)
{
    const ckpt_result_tensor *x = *(const ckpt_result_tensor *const *)a;
    const ckpt_result_tensor *y = *(const ckpt_result_tensor *const *)b;
    if (x->out_tensor != y->out_tensor)
        return x->out_tensor < y->out_tensor ? -1 : 1;
    return x < y ? -1 : x > y;
}

ckpt_status ckpt_list_results(ckpt_plan *plan, ckpt_leaf_list *leaves, ckpt_arena *arena,
                              ckpt_tensor_hash *hashes, ckpt_tensor_hash *originals, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_result_tensor **order = malloc((plan->n_results + 1) * sizeof *order);
    if (order == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < plan->n_results; i++)
        order[i] = &plan->results[i];
    qsort(order, plan->n_results, sizeof *order, write_order);
    for (size_t i = 0; i < plan->n_results; i++) {
        size_t at = (size_t)(order[i] - plan->results);
        CKPT_CHECK(ckpt_add_leaves(leaves, &plan->results[at].gather, arena, &hashes[at], err));
        if (plan->results[at].changed)
            CKPT_CHECK(
                ckpt_add_leaves(leaves, &plan->results[at].original, arena, &originals[at], err));
    }
done:
    free(order);
    return status;
}

/* ---- after the run ----------------------------------------------------------------------------- */

/* Tensor digests, the root of what was written, and the root of what it was made from: of the whole
 * source model as it was. When tensors were left out or folded their digests are not known, and
 * there is no source root: the root of a part would pass for that of the whole. */
ckpt_status ckpt_finish_results(const ckpt_plan *plan, ckpt_sha256 *sha,
                                ckpt_tensor_hash *originals, ckpt_convert_result *out,
                                ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char **names = malloc((plan->n_results + 1) * sizeof *names);
    if (names == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    size_t n = 0;
    for (size_t i = 0; i < plan->n_results; i++) {
        const ckpt_result_tensor *r = &plan->results[i];
        ckpt_tensor_hash *h = &out->tensors[i];
        ckpt_tensor_digest(sha, r->dtype, r->rank, r->dims, h->leaves, h->n_leaves, h->digest);
        names[i] = r->name;
    }
    CKPT_CHECK(ckpt_finish_root(out->tensors, names, plan->n_results, out->root, err));
    for (size_t i = 0; i < plan->n_results; i++)
        n += plan->results[i].model_tensor >= 0;
    out->has_source_root = n == plan->model->n_tensors;
    n = 0;
    for (size_t i = 0; out->has_source_root && i < plan->n_results; i++) {
        const ckpt_result_tensor *r = &plan->results[i];
        if (r->model_tensor < 0)
            continue;
        ckpt_tensor_hash *o = &originals[i];
        if (r->changed)
            ckpt_tensor_digest(sha, r->original.from, r->rank, r->dims, o->leaves, o->n_leaves,
                               o->digest);
        else
            *o = out->tensors[i];
        names[n] = r->name;
        originals[n++] = *o;
    }
    if (out->has_source_root)
        CKPT_CHECK(ckpt_finish_root(originals, names, n, out->source_root, err));
done:
    free(names);
    return status;
}

ckpt_status ckpt_stream_convert(ckpt_plan *plan, const char *dir, const ckpt_stream_opts *opts,
                                ckpt_arena *arena, ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool waves = false;
    convert_job c = {.plan = plan, .arena = arena, .dir = dir, .journal = opts->journal};
    ckpt_job j = {.run = convert_item, .give_up = wake_all, .self = &c};
    if (plan->sink.serial != NULL)
        return ckpt_stream_serial(plan, dir, opts, arena, out, err);
    *out = (ckpt_convert_result){0};
    ckpt_tensor_hash *originals = calloc(plan->n_results + 1, sizeof *originals);
    out->tensors = ckpt_arena_array(arena, plan->n_results, sizeof *out->tensors);
    out->files = ckpt_arena_array(arena, plan->sink.n_files, sizeof *out->files);
    if (originals == NULL || out->tensors == NULL || out->files == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    CKPT_CHECK(ckpt_list_results(plan, &c.leaves, arena, out->tensors, originals, err));
    CKPT_CHECK(open_files(&c, err));
    CKPT_CHECK(make_lanes(&c, &waves, err));
    j.piece = waves ? WAVE_MAX : CKPT_PIECE_MAX;
    CKPT_CHECK(ckpt_job_open(&j, opts, err));
    CKPT_CHECK(order_items(&c, j.piece, err));
    j.n_items = c.n_items;
    j.total_bytes = plan->total_bytes;
    for (size_t i = 0; i < ckpt_leaf_groups(&c.leaves); i++)
        j.total_bytes += ckpt_leaf_group_bytes(&c.leaves, i);
    CKPT_CHECK(ckpt_job_run(&j));
    for (size_t f = 0; f < plan->sink.n_files; f++) {
        ckpt_journal_entry e = is_done(&c, f) ? c.journal->files[f] : file_digests(&c.files[f]);
        memcpy(out->files[f].sha256, e.sha256, sizeof e.sha256);
        memcpy(out->files[f].rest, e.rest, sizeof e.rest);
        out->files[f].size = plan->sink.files[f].size;
    }
    CKPT_CHECK(ckpt_finish_results(plan, &j.workers[0].sha, originals, out, err));
    out->bytes = plan->total_bytes;
    out->buffer_bytes = j.arena_bytes;
done:
    ckpt_job_close(&j);
    close_files(&c);
    free(c.leaves.leaves);
    free(c.items);
    free(originals);
    return status;
}
