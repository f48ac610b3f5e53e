/* The executor. One list of work items, taken in order by all workers:
 *
 *   piece   a contiguous range of one output file: gather, then pass the file's turnstile (CRC,
 *           literals, file digest, in file order), then write
 *   leaves  sixteen Merkle leaves of canonical tensors: gather from the source, hash side by side
 *
 * Pieces of up to FILES_IN_FLIGHT files are interleaved so that their serial digests run in
 * parallel, and leaf groups are merged in by progress, so that both readings of a source region come
 * close together and the second is served by the page cache. A worker that waits at a turnstile
 * waits for an item that was handed out earlier, so the lowest item in flight never waits. */
#define _GNU_SOURCE /* O_DIRECT */
#include "checked.h"
#include "crc.h"
#include "gather.h"
#include "job.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILES_IN_FLIGHT 8
#define DIRECT_MIN ((uint64_t)64 << 20) /* files from this size on are written with O_DIRECT */
#define PAGE 4096

/* ---- converting -------------------------------------------------------------------------------- */

/* State of one output file. */
typedef struct out_file {
    const char *path;
    int fd, direct_fd;
    pthread_mutex_t lock;
    pthread_cond_t turn;
    uint64_t passed; /* bytes that went through the turnstile */
    atomic_ullong written;
    ckpt_sha256_stream whole, rest;
    uint32_t crc; /* of the payload segment in progress or just ended */
    bool ready;   /* lock and condition exist */
} out_file;

typedef struct item {
    uint64_t offset; /* piece: in the file */
    uint32_t index;  /* file, or group of leaves */
    uint32_t is_leaf;
} item;

typedef struct convert_job {
    ckpt_plan *plan;
    ckpt_arena *arena;
    const char *dir;
    out_file *files;
    ckpt_leaf_list leaves;
    item *items;
    size_t n_items;
} convert_job;

static void wake_all(ckpt_job *j)
{
    convert_job *c = j->self;
    for (size_t f = 0; f < c->plan->sink.n_files; f++) {
        pthread_mutex_lock(&c->files[f].lock);
        pthread_cond_broadcast(&c->files[f].turn);
        pthread_mutex_unlock(&c->files[f].lock);
    }
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
static ckpt_status fill_payload(ckpt_worker *w, const convert_job *c, uint32_t f, uint64_t lo,
                                uint64_t hi, ckpt_err *err)
{
    const ckpt_out_file *file = &c->plan->sink.files[f];
    for (size_t s = seg_at(file, lo); s < file->n_segs && file->segs[s].offset < hi; s++) {
        const ckpt_seg *seg = &file->segs[s];
        uint64_t a = ckpt_max_u64(seg->offset, lo), b = ckpt_min_u64(seg->offset + seg->len, hi);
        uint8_t *out = w->buf + (a - lo);
        ckpt_status status = CKPT_OK;
        if (seg->kind == CKPT_SEG_CHUNK) {
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
        sink->literal(sink, f, seg, crc, out);
        return CKPT_OK;
    }
    uint8_t *whole = malloc((size_t)seg->len);
    if (whole == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %llu bytes of header",
                         (unsigned long long)seg->len);
    sink->literal(sink, f, seg, crc, whole);
    memcpy(out, whole + (a - seg->offset), (size_t)(b - a));
    free(whole);
    return CKPT_OK;
}

/* In file order: checksums, literals, the digests of the file. */
static ckpt_status pass_turnstile(ckpt_worker *w, convert_job *c, uint32_t f, uint64_t lo,
                                  uint64_t hi, ckpt_err *err)
{
    const ckpt_out_file *file = &c->plan->sink.files[f];
    out_file *of = &c->files[f];
    ckpt_status status = CKPT_OK;
    for (size_t s = seg_at(file, lo);
         status == CKPT_OK && s < file->n_segs && file->segs[s].offset < hi; s++) {
        const ckpt_seg *seg = &file->segs[s];
        uint64_t a = ckpt_max_u64(seg->offset, lo), b = ckpt_min_u64(seg->offset + seg->len, hi);
        uint8_t *at = w->buf + (a - lo);
        if (seg->kind == CKPT_SEG_LITERAL) {
            status = emit_literal(c, f, seg, a, b, of->crc, at, err);
            ckpt_sha256_stream_update2(&of->rest, at, (size_t)(b - a), NULL, NULL, 0);
            continue;
        }
        if (a == seg->offset)
            of->crc = 0;
        if (seg->crc)
            of->crc = ckpt_crc32(of->crc, at, (size_t)(b - a));
        if (seg->kind == CKPT_SEG_OBJECT)
            ckpt_sha256_stream_update2(&of->rest, at, (size_t)(b - a), NULL, NULL, 0);
        else
            status = rest_of_chunk(c, of, seg, a - seg->offset, at, b - a, err);
    }
    if (status == CKPT_OK)
        ckpt_sha256_stream_update2(&of->whole, w->buf, (size_t)(hi - lo), NULL, NULL, 0);
    return status;
}

static ckpt_status write_piece(const ckpt_worker *w, out_file *of, uint64_t size, uint64_t lo,
                               uint64_t hi, ckpt_err *err)
{
    uint64_t n = hi - lo, direct = of->direct_fd >= 0 ? n / PAGE * PAGE : 0;
    ckpt_status status = CKPT_OK;
    if (direct > 0 && pwrite(of->direct_fd, w->buf, direct, (off_t)lo) != (ssize_t)direct)
        direct = 0; /* the file system has second thoughts: buffered does everything */
    if (n > direct)
        CKPT_TRY(ckpt_pwrite_full(of->fd, w->buf + direct, (size_t)(n - direct), lo + direct, err),
                 "%s", of->path);
    if (atomic_fetch_add(&of->written, n) + n == size) {
        if (fsync(of->fd) != 0)
            status = ckpt_fail_errno(err, errno, "%s: fsync", of->path);
        if (of->direct_fd >= 0)
            close(of->direct_fd);
        of->direct_fd = -1;
        if (close(of->fd) != 0 && status == CKPT_OK)
            status = ckpt_fail_errno(err, errno, "%s: close", of->path);
        of->fd = -1;
    }
done:
    return status;
}

static ckpt_status do_piece(ckpt_worker *w, convert_job *c, const item *it, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_out_file *file = &c->plan->sink.files[it->index];
    out_file *of = &c->files[it->index];
    uint64_t lo = it->offset, hi = ckpt_min_u64(lo + w->job->piece, file->size);
    CKPT_CHECK(fill_payload(w, c, it->index, lo, hi, err));
    pthread_mutex_lock(&of->lock);
    while (of->passed != lo && !atomic_load(&w->job->stop))
        pthread_cond_wait(&of->turn, &of->lock);
    bool stopped = of->passed != lo;
    pthread_mutex_unlock(&of->lock);
    if (stopped)
        return CKPT_OK; /* somebody else reports the reason */
    CKPT_CHECK(pass_turnstile(w, c, it->index, lo, hi, err));
    pthread_mutex_lock(&of->lock);
    of->passed = hi;
    pthread_cond_broadcast(&of->turn);
    pthread_mutex_unlock(&of->lock);
    CKPT_CHECK(write_piece(w, of, file->size, lo, hi, err));
    ckpt_job_advance(w, hi - lo);
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
        if (fsync(of->fd) != 0)
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
        pthread_mutex_init(&c->files[f].lock, NULL);
        pthread_cond_init(&c->files[f].turn, NULL);
        c->files[f].ready = true;
        ckpt_sha256_stream_init(&c->files[f].whole);
        ckpt_sha256_stream_init(&c->files[f].rest);
    }
    for (size_t f = 0; f < sink->n_files; f++) {
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
        if (!c->files[f].ready)
            continue;
        if (c->files[f].fd >= 0)
            close(c->files[f].fd);
        if (c->files[f].direct_fd >= 0)
            close(c->files[f].direct_fd);
        pthread_mutex_destroy(&c->files[f].lock);
        pthread_cond_destroy(&c->files[f].turn);
    }
    free(c->files);
}

/* ---- ordering the items ------------------------------------------------------------------------ */

static ckpt_status count_items(convert_job *c, uint64_t piece, size_t *n, ckpt_err *err)
{
    *n = ckpt_leaf_groups(&c->leaves);
    for (size_t f = 0; f < c->plan->sink.n_files; f++) {
        uint64_t pieces = (c->plan->sink.files[f].size + piece - 1) / piece;
        if (pieces > UINT32_MAX)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is too large",
                             c->plan->sink.files[f].name);
        *n += (size_t)pieces;
    }
    return CKPT_OK;
}

/* Pieces in groups of files, round-robin inside a group; leaf groups wherever their share of all leaf
 * bytes has been reached by the pieces. */
static ckpt_status order_items(convert_job *c, uint64_t piece, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    size_t n, leaf = 0, n_groups = ckpt_leaf_groups(&c->leaves);
    double piece_total = 1, leaf_total = 1, piece_done = 0, leaf_done = 0;
    ckpt_status status = count_items(c, piece, &n, err);
    if (status != CKPT_OK)
        return status;
    c->items = malloc((n + 1) * sizeof *c->items);
    if (c->items == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu work items", n);
    for (size_t f = 0; f < sink->n_files; f++)
        piece_total += (double)sink->files[f].size;
    for (size_t i = 0; i < n_groups; i++)
        leaf_total += (double)ckpt_leaf_group_bytes(&c->leaves, i);
    for (size_t group = 0; group < sink->n_files; group += FILES_IN_FLIGHT) {
        size_t end = ckpt_min_u64(group + FILES_IN_FLIGHT, sink->n_files);
        bool more = true;
        for (uint64_t at = 0; more; at += piece) {
            more = false;
            for (size_t f = group; f < end; f++) {
                if (at >= sink->files[f].size)
                    continue;
                more = true;
                c->items[c->n_items++] = (item){.offset = at, .index = (uint32_t)f};
                piece_done += (double)ckpt_min_u64(piece, sink->files[f].size - at);
                while (leaf < n_groups && leaf_done / leaf_total < piece_done / piece_total) {
                    leaf_done += (double)ckpt_leaf_group_bytes(&c->leaves, leaf);
                    c->items[c->n_items++] = (item){.index = (uint32_t)leaf++, .is_leaf = 1};
                }
            }
        }
    }
    while (leaf < n_groups)
        c->items[c->n_items++] = (item){.index = (uint32_t)leaf++, .is_leaf = 1};
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

static ckpt_status list_leaves(convert_job *c, ckpt_tensor_hash *hashes,
                               ckpt_tensor_hash *originals, ckpt_err *err)
{
    ckpt_plan *plan = c->plan;
    ckpt_status status = CKPT_OK;
    const ckpt_result_tensor **order = malloc((plan->n_results + 1) * sizeof *order);
    if (order == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < plan->n_results; i++)
        order[i] = &plan->results[i];
    qsort(order, plan->n_results, sizeof *order, write_order);
    for (size_t i = 0; i < plan->n_results; i++) {
        size_t at = (size_t)(order[i] - plan->results);
        CKPT_CHECK(
            ckpt_add_leaves(&c->leaves, &plan->results[at].gather, c->arena, &hashes[at], err));
        if (plan->results[at].original.n_copies > 0)
            CKPT_CHECK(ckpt_add_leaves(&c->leaves, &plan->results[at].original, c->arena,
                                       &originals[at], err));
    }
done:
    free(order);
    return status;
}

/* ---- after the run ----------------------------------------------------------------------------- */

/* Tensor digests, the root of what was written, and the root of what it was made from: of the whole
 * source model as it was. When tensors were left out or folded their digests are not known, and
 * there is no source root: the root of a part would pass for that of the whole. */
static ckpt_status finish_tensors(convert_job *c, ckpt_sha256 *sha, ckpt_tensor_hash *originals,
                                  ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_plan *plan = c->plan;
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
        if (r->original.n_copies > 0)
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
    convert_job c = {.plan = plan, .arena = arena, .dir = dir};
    ckpt_job j = {.run = convert_item, .give_up = wake_all, .self = &c};
    *out = (ckpt_convert_result){0};
    ckpt_tensor_hash *originals = calloc(plan->n_results + 1, sizeof *originals);
    out->tensors = ckpt_arena_array(arena, plan->n_results, sizeof *out->tensors);
    out->files = ckpt_arena_array(arena, plan->sink.n_files, sizeof *out->files);
    if (originals == NULL || out->tensors == NULL || out->files == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    CKPT_CHECK(list_leaves(&c, out->tensors, originals, err));
    CKPT_CHECK(open_files(&c, err));
    CKPT_CHECK(ckpt_job_open(&j, opts, err));
    CKPT_CHECK(order_items(&c, j.piece, err));
    j.n_items = c.n_items;
    j.total_bytes = plan->total_bytes;
    for (size_t i = 0; i < ckpt_leaf_groups(&c.leaves); i++)
        j.total_bytes += ckpt_leaf_group_bytes(&c.leaves, i);
    CKPT_CHECK(ckpt_job_run(&j));
    for (size_t f = 0; f < plan->sink.n_files; f++) {
        ckpt_sha256_stream_final(&c.files[f].whole, out->files[f].sha256);
        ckpt_sha256_stream_final(&c.files[f].rest, out->files[f].rest);
        out->files[f].size = plan->sink.files[f].size;
    }
    CKPT_CHECK(finish_tensors(&c, &j.workers[0].sha, originals, out, err));
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
