/* The executor. One list of work items, taken in order by all workers:
 *
 *   piece   a contiguous range of one output file: gather, then pass the file's turnstile (CRC,
 *           literals, file digest, in file order), then write
 *   leaves  up to 4 MiB of one canonical tensor: gather from the source, hash its Merkle leaves
 *
 * Pieces of up to FILES_IN_FLIGHT files are interleaved so that their serial digests run in
 * parallel, and leaf runs are merged in by progress, so that both readings of a source region come
 * close together and the second is served by the page cache. A worker that waits at a turnstile
 * waits for an item that was handed out earlier, so the lowest item in flight never waits. */
#define _GNU_SOURCE /* O_DIRECT */
#include "stream.h"
#include "checked.h"
#include "crc.h"
#include "gather.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIECE_MAX ((uint64_t)4 << 20)
#define PIECE_MIN ((uint64_t)64 << 10)
#define SCRATCH_MAX ((uint64_t)1 << 20)
#define FILES_IN_FLIGHT 8
#define DIRECT_MIN ((uint64_t)64 << 20) /* files from this size on are written with O_DIRECT */
#define PAGE 4096

/* ---- workers ----------------------------------------------------------------------------------- */

typedef struct job job;

typedef struct worker {
    job *job;
    uint8_t *buf; /* piece_size bytes, page-aligned */
    ckpt_scratch scratch;
    ckpt_sha256 sha;
    int index;
    ckpt_err err;
    pthread_t thread;
} worker;

struct job {
    ckpt_status (*run)(worker *w, size_t item, ckpt_err *err);
    void (*give_up)(job *j); /* wake everybody who may be waiting */
    void *self;
    size_t n_items;
    uint64_t piece; /* bytes */
    int n_workers;
    worker *workers;
    uint8_t *arena;
    uint64_t arena_bytes;
    atomic_size_t next;
    atomic_bool stop;
    atomic_ullong done_bytes;
    uint64_t total_bytes;
    const ckpt_progress *progress;
    pthread_mutex_t lock;
    ckpt_status status; /* first failure, under lock */
    ckpt_err *err;
};

static int default_threads(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long n = cores > 0 ? 2 * cores : 4;
    return (int)(n < 4 ? 4 : n > 16 ? 16 : n);
}

/* Choose workers and piece size so that all buffers fit `memory`, allocate them at once. */
static ckpt_status job_open(job *j, const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint64_t memory = opts != NULL && opts->memory > 0 ? opts->memory : (uint64_t)1 << 30;
    int n = opts != NULL && opts->threads > 0 ? opts->threads : default_threads();
    uint64_t piece = PIECE_MAX, scratch = SCRATCH_MAX;
    while ((uint64_t)n * (piece + scratch) > memory && (n > 2 || piece > PIECE_MIN)) {
        if (n > 2) {
            n = (n + 1) / 2;
        } else {
            piece /= 2;
            scratch = piece / 4 < PIECE_MIN ? PIECE_MIN : piece / 4;
        }
    }
    j->piece = piece;
    j->n_workers = n;
    j->progress = opts != NULL ? opts->progress : NULL;
    j->err = err;
    j->arena_bytes = (uint64_t)n * (piece + scratch);
    void *arena = mmap(NULL, j->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0);
    j->workers = calloc((size_t)n, sizeof *j->workers);
    if (arena == MAP_FAILED || j->workers == NULL) {
        if (arena != MAP_FAILED)
            munmap(arena, j->arena_bytes);
        free(j->workers);
        j->workers = NULL;
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d buffers", n);
    }
    (void)madvise(arena, j->arena_bytes, MADV_HUGEPAGE);
    j->arena = arena;
    pthread_mutex_init(&j->lock, NULL);
    for (int i = 0; i < n; i++) {
        worker *w = &j->workers[i];
        w->job = j;
        w->index = i;
        w->buf = j->arena + (uint64_t)i * piece;
        w->scratch.buf = j->arena + (uint64_t)n * piece + (uint64_t)i * scratch;
        w->scratch.cap = scratch;
        CKPT_CHECK(ckpt_sha256_init(&w->sha, err));
    }
done:
    return status;
}

static void job_close(job *j)
{
    if (j->workers == NULL)
        return;
    for (int i = 0; i < j->n_workers; i++)
        ckpt_sha256_release(&j->workers[i].sha);
    munmap(j->arena, j->arena_bytes);
    pthread_mutex_destroy(&j->lock);
    free(j->workers);
    j->workers = NULL;
}

static void job_fail(job *j, ckpt_status status, const ckpt_err *err)
{
    pthread_mutex_lock(&j->lock);
    if (j->status == CKPT_OK) {
        j->status = status;
        if (j->err != NULL)
            *j->err = *err;
    }
    pthread_mutex_unlock(&j->lock);
    atomic_store(&j->stop, true);
    if (j->give_up != NULL)
        j->give_up(j);
}

static void job_advance(worker *w, uint64_t bytes)
{
    job *j = w->job;
    uint64_t done = atomic_fetch_add(&j->done_bytes, bytes) + bytes;
    if (w->index == 0 && j->progress != NULL)
        j->progress->tick(j->progress->self, done, j->total_bytes);
}

static void *work(void *arg)
{
    worker *w = arg;
    job *j = w->job;
    while (!atomic_load(&j->stop)) {
        ckpt_status status = CKPT_OK;
        if (ckpt_interrupted)
            status = ckpt_fail(&w->err, CKPT_E_INTERRUPTED, "interrupted");
        size_t item = status == CKPT_OK ? atomic_fetch_add(&j->next, 1) : 0;
        if (status == CKPT_OK && item >= j->n_items)
            break;
        if (status == CKPT_OK)
            status = j->run(w, item, &w->err);
        if (status != CKPT_OK) {
            job_fail(j, status, &w->err);
            break;
        }
    }
    return NULL;
}

static ckpt_status job_run(job *j, ckpt_err *err)
{
    int started = 1;
    for (; started < j->n_workers; started++)
        if (pthread_create(&j->workers[started].thread, NULL, work, &j->workers[started]) != 0)
            break; /* fewer workers do the same work */
    work(&j->workers[0]);
    for (int i = 1; i < started; i++)
        pthread_join(j->workers[i].thread, NULL);
    (void)err;
    return j->status;
}

/* ---- leaves ------------------------------------------------------------------------------------ */

/* A run of consecutive leaves of one tensor. */
typedef struct leaf_run {
    const ckpt_gather *gather;
    uint64_t bytes; /* of the whole tensor in the hashed dtype */
    uint64_t first; /* leaf */
    uint32_t count;
    uint8_t *out; /* hash of leaf `first` */
} leaf_run;

/* Gather and hash. A leaf larger than the buffer is fed in parts. */
static ckpt_status hash_big_leaf(worker *w, ckpt_source *src, const leaf_run *run, uint64_t leaf,
                                 ckpt_err *err)
{
    uint64_t lo = leaf * CKPT_LEAF_BYTES, hi = ckpt_min_u64(lo + CKPT_LEAF_BYTES, run->bytes);
    ckpt_sha256_update(&w->sha, "", 1);
    while (lo < hi) {
        size_t n = (size_t)ckpt_min_u64(hi - lo, w->job->piece);
        ckpt_status status =
            ckpt_gather_run(src, run->gather, lo, n, w->buf, &w->scratch, err);
        if (status != CKPT_OK)
            return status;
        ckpt_sha256_update(&w->sha, w->buf, n);
        lo += n;
    }
    ckpt_sha256_final(&w->sha, run->out + (leaf - run->first) * CKPT_SHA256_LEN);
    return CKPT_OK;
}

static ckpt_status hash_leaves(worker *w, ckpt_source *src, const leaf_run *run, ckpt_err *err)
{
    uint64_t lo = run->first * CKPT_LEAF_BYTES;
    uint64_t n = ckpt_min_u64((uint64_t)run->count * CKPT_LEAF_BYTES, run->bytes - lo);
    if (w->job->piece < n) {
        for (uint64_t i = 0; i < run->count; i++) {
            ckpt_status status = hash_big_leaf(w, src, run, run->first + i, err);
            if (status != CKPT_OK)
                return status;
        }
        job_advance(w, n);
        return CKPT_OK;
    }
    ckpt_status status = ckpt_gather_run(src, run->gather, lo, (size_t)n, w->buf, &w->scratch, err);
    if (status != CKPT_OK)
        return status;
    for (uint32_t i = 0; i < run->count; i += 2) {
        const uint8_t *a = w->buf + i * CKPT_LEAF_BYTES, *b = a + CKPT_LEAF_BYTES;
        uint8_t *out = run->out + i * CKPT_SHA256_LEN;
        uint64_t na = ckpt_min_u64(n - i * CKPT_LEAF_BYTES, CKPT_LEAF_BYTES);
        if (i + 1 == run->count) {
            ckpt_merkle_leaf(&w->sha, a, (size_t)na, out);
            break;
        }
        uint64_t nb = ckpt_min_u64(n - (i + 1) * CKPT_LEAF_BYTES, CKPT_LEAF_BYTES);
        ckpt_merkle_leaf2(&w->sha, a, (size_t)na, out, b, (size_t)nb, out + CKPT_SHA256_LEN);
    }
    job_advance(w, n);
    return CKPT_OK;
}

static uint64_t gather_out_bytes(const ckpt_gather *g)
{
    uint64_t from = (uint64_t)ckpt_dtype_get(g->from)->bits;
    return g->bytes / from * (uint64_t)ckpt_dtype_get(g->to)->bits +
           (g->from == g->to ? g->bytes % from : 0);
}

/* Growable list of leaf runs. */
typedef struct leaf_list {
    leaf_run *runs;
    size_t n, cap;
} leaf_list;

/* Room for the tensor's leaf hashes and its runs. */
static ckpt_status add_leaves(leaf_list *list, const ckpt_gather *g, ckpt_arena *arena,
                              ckpt_tensor_hash *out, ckpt_err *err)
{
    uint64_t bytes = g->from == g->to ? g->bytes : gather_out_bytes(g);
    uint64_t n = ckpt_leaf_count(bytes), per_run = PIECE_MAX / CKPT_LEAF_BYTES;
    out->n_leaves = n;
    out->leaves = ckpt_arena_alloc(arena, (size_t)n * CKPT_SHA256_LEN + 1);
    if (out->leaves == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for leaf hashes");
    for (uint64_t first = 0; first < n; first += per_run) {
        void *p = list->runs;
        ckpt_status status = ckpt_grow(&p, &list->cap, list->n + 1, sizeof *list->runs, err);
        list->runs = p;
        if (status != CKPT_OK)
            return status;
        list->runs[list->n++] = (leaf_run){.gather = g, .bytes = bytes, .first = first,
                                           .count = (uint32_t)ckpt_min_u64(per_run, n - first),
                                           .out = out->leaves + first * CKPT_SHA256_LEN};
    }
    return CKPT_OK;
}

static uint64_t run_bytes(const leaf_run *r)
{
    uint64_t lo = r->first * CKPT_LEAF_BYTES;
    return ckpt_min_u64((uint64_t)r->count * CKPT_LEAF_BYTES, r->bytes - lo);
}

/* ---- digesting a model ------------------------------------------------------------------------- */

typedef struct digest_job {
    ckpt_source *src;
    leaf_list list;
} digest_job;

static ckpt_status digest_item(worker *w, size_t item, ckpt_err *err)
{
    digest_job *d = w->job->self;
    return hash_leaves(w, d->src, &d->list.runs[item], err);
}

static ckpt_status finish_root(const ckpt_tensor_hash *hashes, const char *const *names, size_t n,
                               uint8_t root[CKPT_SHA256_LEN], ckpt_err *err)
{
    uint8_t *all = malloc(n * CKPT_SHA256_LEN + 1);
    if (all == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < n; i++)
        memcpy(all + i * CKPT_SHA256_LEN, hashes[i].digest, CKPT_SHA256_LEN);
    ckpt_status status = ckpt_root_digest(names, all, n, root, err);
    free(all);
    return status;
}

ckpt_status ckpt_stream_digest(const ckpt_model *model, const ckpt_stream_opts *opts,
                               ckpt_arena *arena, ckpt_tensor_hash *out,
                               uint8_t root[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    digest_job d = {.src = model->src};
    job j = {.run = digest_item, .self = &d};
    size_t n = model->n_tensors;
    ckpt_gather *gathers = ckpt_arena_array(&scratch, n, sizeof *gathers);
    const char **names = ckpt_arena_array(&scratch, n, sizeof *names);
    if (gathers == NULL || names == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        names[i] = model->tensors[i].name;
        CKPT_CHECK(ckpt_plan_canon(model, i, &scratch, &gathers[i], err));
        CKPT_CHECK(add_leaves(&d.list, &gathers[i], arena, &out[i], err));
        j.total_bytes += model->tensors[i].bytes;
    }
    CKPT_CHECK(job_open(&j, opts, err));
    j.n_items = d.list.n;
    CKPT_CHECK(job_run(&j, err));
    for (size_t i = 0; i < n; i++)
        ckpt_tensor_digest(&j.workers[0].sha, model->tensors[i].dtype, model->tensors[i].rank,
                           model->tensors[i].dims, out[i].leaves, out[i].n_leaves, out[i].digest);
    if (root != NULL)
        CKPT_CHECK(finish_root(out, names, n, root, err));
done:
    job_close(&j);
    free(d.list.runs);
    ckpt_arena_free(&scratch);
    return status;
}

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
    uint64_t offset;  /* piece: in the file */
    uint32_t index;   /* file, or leaf run */
    uint32_t is_leaf;
} item;

typedef struct convert_job {
    ckpt_plan *plan;
    ckpt_arena *arena;
    const char *dir;
    out_file *files;
    leaf_list leaves;
    item *items;
    size_t n_items;
} convert_job;

static void wake_all(job *j)
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
    ckpt_status status = ckpt_source_read(c->plan->model->src, o->src_file, out, n,
                                          o->src_offset + skip, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "object '%s'", o->name);
    return status;
}

/* Payload parts of the piece; literals come later, in file order. */
static ckpt_status fill_payload(worker *w, const convert_job *c, uint32_t f, uint64_t lo,
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
    const uint8_t *data;   /* bytes [lo, hi) of the chunk as written */
    uint64_t lo, hi;       /* written bytes */
    uint64_t from, to;     /* element sizes: planned, written */
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
static ckpt_status pass_turnstile(worker *w, convert_job *c, uint32_t f, uint64_t lo, uint64_t hi,
                                  ckpt_err *err)
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

static ckpt_status write_piece(const worker *w, out_file *of, uint64_t size, uint64_t lo,
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

static ckpt_status do_piece(worker *w, convert_job *c, const item *it, ckpt_err *err)
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
    job_advance(w, hi - lo);
done:
    return status;
}

static ckpt_status convert_item(worker *w, size_t index, ckpt_err *err)
{
    convert_job *c = w->job->self;
    const item *it = &c->items[index];
    if (it->is_leaf)
        return hash_leaves(w, c->plan->model->src, &c->leaves.runs[it->index], err);
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
    *n = c->leaves.n;
    for (size_t f = 0; f < c->plan->sink.n_files; f++) {
        uint64_t pieces = (c->plan->sink.files[f].size + piece - 1) / piece;
        if (pieces > UINT32_MAX)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is too large",
                             c->plan->sink.files[f].name);
        *n += (size_t)pieces;
    }
    return CKPT_OK;
}

/* Pieces in groups of files, round-robin inside a group; leaf runs wherever their share of all leaf
 * bytes has been reached by the pieces. */
static ckpt_status order_items(convert_job *c, uint64_t piece, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    size_t n, leaf = 0;
    double piece_total = 1, leaf_total = 1, piece_done = 0, leaf_done = 0;
    ckpt_status status = count_items(c, piece, &n, err);
    if (status != CKPT_OK)
        return status;
    c->items = malloc((n + 1) * sizeof *c->items);
    if (c->items == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu work items", n);
    for (size_t f = 0; f < sink->n_files; f++)
        piece_total += (double)sink->files[f].size;
    for (size_t i = 0; i < c->leaves.n; i++)
        leaf_total += (double)run_bytes(&c->leaves.runs[i]);
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
                while (leaf < c->leaves.n && leaf_done / leaf_total < piece_done / piece_total) {
                    leaf_done += (double)run_bytes(&c->leaves.runs[leaf]);
                    c->items[c->n_items++] = (item){.index = (uint32_t)leaf++, .is_leaf = 1};
                }
            }
        }
    }
    while (leaf < c->leaves.n)
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
        CKPT_CHECK(add_leaves(&c->leaves, &plan->results[at].gather, c->arena, &hashes[at], err));
        if (plan->results[at].original.n_copies > 0)
            CKPT_CHECK(add_leaves(&c->leaves, &plan->results[at].original, c->arena,
                                  &originals[at], err));
    }
done:
    free(order);
    return status;
}

/* ---- after the run ----------------------------------------------------------------------------- */

/* Tensor digests, the root of what was written, and the root of what it was made from. The source
 * root covers the converted tensors as they were; a folded one has no counterpart and is left out,
 * so then the roots differ, as they must. */
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
    CKPT_CHECK(finish_root(out->tensors, names, plan->n_results, out->root, err));
    for (size_t i = 0; i < plan->n_results; i++) {
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
    CKPT_CHECK(finish_root(originals, names, n, out->source_root, err));
done:
    free(names);
    return status;
}

ckpt_status ckpt_stream_convert(ckpt_plan *plan, const char *dir, const ckpt_stream_opts *opts,
                                ckpt_arena *arena, ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    convert_job c = {.plan = plan, .arena = arena, .dir = dir};
    job j = {.run = convert_item, .give_up = wake_all, .self = &c};
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
    CKPT_CHECK(job_open(&j, opts, err));
    CKPT_CHECK(order_items(&c, j.piece, err));
    j.n_items = c.n_items;
    j.total_bytes = plan->total_bytes;
    for (size_t i = 0; i < c.leaves.n; i++)
        j.total_bytes += run_bytes(&c.leaves.runs[i]);
    CKPT_CHECK(job_run(&j, err));
    for (size_t f = 0; f < plan->sink.n_files; f++) {
        ckpt_sha256_stream_final(&c.files[f].whole, out->files[f].sha256);
        ckpt_sha256_stream_final(&c.files[f].rest, out->files[f].rest);
        out->files[f].size = plan->sink.files[f].size;
    }
    CKPT_CHECK(finish_tensors(&c, &j.workers[0].sha, originals, out, err));
    out->bytes = plan->total_bytes;
    out->buffer_bytes = j.arena_bytes;
done:
    job_close(&j);
    close_files(&c);
    free(c.leaves.runs);
    free(c.items);
    free(originals);
    return status;
}

/* ---- file digests of a source ------------------------------------------------------------------ */

typedef struct span_list {
    uint64_t (*span)[2];
    size_t n, cap;
} span_list;

static ckpt_status add_span(void *self, uint64_t offset, uint64_t len, ckpt_err *err)
{
    span_list *list = self;
    if (list->n > 0 && list->span[list->n - 1][1] == offset) {
        list->span[list->n - 1][1] += len;
        return CKPT_OK;
    }
    void *p = list->span;
    ckpt_status status = ckpt_grow(&p, &list->cap, list->n + 1, sizeof *list->span, err);
    list->span = p;
    if (status == CKPT_OK) {
        list->span[list->n][0] = offset;
        list->span[list->n++][1] = offset + len;
    }
    return status;
}

static int span_order(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return x[0] < y[0] ? -1 : x[0] > y[0];
}

typedef struct files_job {
    const ckpt_model *model;
    bool whole;
    span_list *covered; /* per file: bytes of canonical tensors */
    ckpt_file_hash *out;
} files_job;

static ckpt_status cover_files(files_job *f, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    for (size_t i = 0; i < f->model->n_tensors; i++) {
        ckpt_gather g;
        CKPT_CHECK(ckpt_plan_canon(f->model, i, &arena, &g, err));
        int bits = ckpt_dtype_get(g.from)->bits;
        for (size_t k = 0; k < g.n_copies; k++)
            CKPT_CHECK(ckpt_copy_src_runs(&g.copies[k], bits % 8 == 0 ? bits / 8 : 1, add_span,
                                          &f->covered[g.copies[k].file], err));
    }
    for (size_t i = 0; i < f->model->src->n_files; i++)
        if (f->covered[i].n > 1)
            qsort(f->covered[i].span, f->covered[i].n, sizeof *f->covered[i].span, span_order);
done:
    ckpt_arena_free(&arena);
    return status;
}

static ckpt_status feed_range(worker *w, int fd, ckpt_sha256_stream *s, uint64_t lo, uint64_t hi,
                              ckpt_err *err)
{
    while (lo < hi) {
        size_t n = (size_t)ckpt_min_u64(hi - lo, w->job->piece);
        ckpt_status status = ckpt_pread_full(fd, w->buf, n, lo, err);
        if (status != CKPT_OK)
            return status;
        ckpt_sha256_stream_update2(s, w->buf, n, NULL, NULL, 0);
        lo += n;
        if (ckpt_interrupted)
            return ckpt_fail(err, CKPT_E_INTERRUPTED, "interrupted");
    }
    return CKPT_OK;
}

static ckpt_status file_item(worker *w, size_t index, ckpt_err *err)
{
    files_job *f = w->job->self;
    const ckpt_file *file = &f->model->src->files[index];
    const span_list *covered = &f->covered[index];
    ckpt_status status = CKPT_OK;
    ckpt_sha256_stream s;
    uint64_t size = file->size, at = 0;
    int fd = file->fd, own = -1;
    if (fd < 0) {
        CKPT_CHECK(ckpt_open_read(file->path, &own, &size, err));
        fd = own;
    }
    f->out[index].size = size;
    ckpt_sha256_stream_init(&s);
    for (size_t i = 0; i <= covered->n; i++) {
        uint64_t next = i < covered->n ? covered->span[i][0] : size;
        if (next > at)
            CKPT_TRY(feed_range(w, fd, &s, at, next, err), "%s", file->name);
        if (i < covered->n)
            at = ckpt_max_u64(at, covered->span[i][1]);
    }
    ckpt_sha256_stream_final(&s, f->out[index].rest);
    if (f->whole) {
        ckpt_sha256_stream_init(&s);
        CKPT_TRY(feed_range(w, fd, &s, 0, size, err), "%s", file->name);
        ckpt_sha256_stream_final(&s, f->out[index].sha256);
        job_advance(w, size);
    }
done:
    if (own >= 0)
        close(own);
    return status;
}

ckpt_status ckpt_stream_files(const ckpt_model *model, bool whole, const ckpt_stream_opts *opts,
                              ckpt_arena *arena, ckpt_file_hash *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t n = model->src->n_files;
    (void)arena;
    files_job f = {.model = model, .whole = whole, .out = out,
                   .covered = calloc(n + 1, sizeof *f.covered)};
    job j = {.run = file_item, .self = &f, .n_items = n};
    if (f.covered == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(cover_files(&f, err));
    CKPT_CHECK(job_open(&j, opts, err));
    for (size_t i = 0; i < n; i++)
        j.total_bytes += model->src->files[i].size;
    CKPT_CHECK(job_run(&j, err));
done:
    job_close(&j);
    for (size_t i = 0; i < n; i++)
        free(f.covered[i].span);
    free(f.covered);
    return status;
}

/* ---- visiting ---------------------------------------------------------------------------------- */

typedef struct visit_job {
    const ckpt_model *a, *b;
    const int64_t *other;
    const bool *select;
    ckpt_gather *ga, *gb;
    ckpt_visit_fn fn;
    void *self;
} visit_job;

static ckpt_status visit_item(worker *w, size_t i, ckpt_err *err)
{
    visit_job *v = w->job->self;
    if (v->select != NULL && !v->select[i])
        return CKPT_OK;
    if (v->b != NULL && v->other[i] < 0)
        return CKPT_OK;
    uint64_t bytes = v->ga[i].bytes;
    size_t half = (size_t)(w->job->piece / 2 / 4096 * 4096);
    size_t step = v->b != NULL ? half : (size_t)w->job->piece;
    for (uint64_t lo = 0; lo < bytes; lo += step) {
        size_t n = (size_t)ckpt_min_u64(step, bytes - lo);
        uint8_t *second = v->b != NULL ? w->buf + half : NULL;
        ckpt_status status =
            ckpt_gather_run(v->a->src, &v->ga[i], lo, n, w->buf, &w->scratch, err);
        if (status == CKPT_OK && second != NULL)
            status = ckpt_gather_run(v->b->src, &v->gb[i], lo, n, second, &w->scratch, err);
        if (status == CKPT_OK)
            status = v->fn(v->self, i, lo, w->buf, second, n, err);
        if (status == CKPT_OK && ckpt_interrupted)
            status = ckpt_fail(err, CKPT_E_INTERRUPTED, "interrupted");
        if (status != CKPT_OK)
            return status;
        job_advance(w, n);
    }
    return CKPT_OK;
}

ckpt_status ckpt_stream_visit(const ckpt_model *model, const ckpt_model *other,
                              const int64_t *other_index, const bool *select,
                              const ckpt_stream_opts *opts, ckpt_visit_fn fn, void *self,
                              ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    size_t n = model->n_tensors;
    visit_job v = {.a = model, .b = other, .other = other_index, .select = select, .fn = fn,
                   .self = self};
    job j = {.run = visit_item, .self = &v, .n_items = n};
    v.ga = ckpt_arena_array(&arena, n, sizeof *v.ga);
    v.gb = ckpt_arena_array(&arena, n, sizeof *v.gb);
    if (v.ga == NULL || v.gb == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        if ((select != NULL && !select[i]) || (other != NULL && other_index[i] < 0))
            continue;
        CKPT_CHECK(ckpt_plan_canon(model, i, &arena, &v.ga[i], err));
        if (other != NULL)
            CKPT_CHECK(ckpt_plan_canon(other, (size_t)other_index[i], &arena, &v.gb[i], err));
        j.total_bytes += v.ga[i].bytes;
    }
    CKPT_CHECK(job_open(&j, opts, err));
    CKPT_CHECK(job_run(&j, err));
done:
    job_close(&j);
    ckpt_arena_free(&arena);
    return status;
}
