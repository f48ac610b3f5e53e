/* The executor. One list of work items, taken in order by all workers:
 *
 *   piece   the same range of every file of a lane (mostly one file): gather into a slot of the window,
 *           offer it at the lane's turnstile (CRC, literals, file digests, in file order), write; with
 *           leaves, which are hashed beside the file: a second stream is nearly free on the SHA unit
 *   leaves  sixteen Merkle leaves of canonical tensors, hashed side by side
 *
 * A plan that is in place has nothing to write: its files are those of the source, verified.
 *
 * Every source byte is read once. Leaves are hashed from the pieces in the window, where their bytes
 * are going to be written or were just written from, and what has left the window is read back from
 * the output: whatever becomes of the source meanwhile, digests are those of the output. Only a cast
 * reads twice, for the digest of what was before.
 *
 * Neighbouring files share a lane if there are enough of them for their digests to run in the wide
 * kernel, which halves that work, and few enough processors not to be kept waiting by it. Pieces of
 * several lanes are interleaved so that their serial digests run in parallel (stream_order.c). Who
 * offers a piece while nobody serves the turnstile does so for all pieces that are there: the digest
 * of one file is the longest chain of a run, and never waits for somebody to wake up. A worker waits,
 * at a turnstile for the literals of its piece and for the pieces of its leaves, only for items that
 * were handed out earlier, so the lowest item in flight never waits. */
#include "cache.h"
#include "checked.h"
#include "crc.h"
#include "gather.h"
#include "stream_internal.h"

#include <stdlib.h>
#include <string.h>

#define WAVE_MAX ((uint64_t)8 << 20) /* bytes of a piece of a lane of several files */
#define WAVE_KEEP 4 /* slots beside the workers': a leaf of neighbouring files lies in few waves */
#define LANE_KEEP 2 /* pieces of every lane that advances, of lanes of one file */

/* ---- converting -------------------------------------------------------------------------------- */

static void wake_all(ckpt_job *j)
{
    ckpt_stream_job *c = j->self;
    for (size_t i = 0; i < c->n_lanes; i++) {
        pthread_mutex_lock(&c->lanes[i].lock);
        pthread_cond_broadcast(&c->lanes[i].turn);
        pthread_mutex_unlock(&c->lanes[i].lock);
    }
    ckpt_window_wake(&c->written.window);
}

static ckpt_status fill_object(const ckpt_stream_job *c, const ckpt_seg *seg, uint64_t skip,
                               size_t n, uint8_t *out, ckpt_err *err)
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

/* Bytes [lo, hi) of the file, which lie in one chunk: what is shared is read where it went. */
static ckpt_status fill_chunk(ckpt_worker *w, ckpt_stream_job *c, uint32_t f, const ckpt_seg *seg,
                              const ckpt_range *shared, uint64_t lo, uint64_t hi, uint8_t *out,
                              ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_gather *g = &c->plan->chunks[seg->a][seg->b];
    uint64_t a = ckpt_min_u64(ckpt_max_u64(shared->lo, lo), hi);
    uint64_t b = ckpt_min_u64(ckpt_max_u64(shared->hi, a), hi);
    ckpt_source *src = c->plan->model->src;
    w->now = c->plan->out.tensors[seg->a].name;
    if (a < b)
        CKPT_CHECK(ckpt_stream_read_back(c, f, out + (a - lo), (size_t)(b - a), a, err));
    else
        b = a = hi;
    if (lo < a)
        CKPT_CHECK(
            ckpt_gather_run(src, g, lo - seg->offset, (size_t)(a - lo), out, &w->scratch, err));
    if (b < hi)
        CKPT_CHECK(ckpt_gather_run(src, g, b - seg->offset, (size_t)(hi - b), out + (b - lo),
                                   &w->scratch, err));
done:
    if (status != CKPT_OK)
        ckpt_err_frame(err, "tensor '%s'", w->now);
    return status;
}

/* Payload parts of the piece; literals come later, in file order. */
static ckpt_status fill_payload(ckpt_worker *w, ckpt_stream_job *c, uint32_t f, uint8_t *buf,
                                uint64_t lo, uint64_t hi, const ckpt_range *shared, ckpt_err *err)
{
    const ckpt_out_file *file = &c->plan->sink.files[f];
    for (size_t s = ckpt_stream_seg(file, lo); s < file->n_segs && file->segs[s].offset < hi; s++) {
        const ckpt_seg *seg = &file->segs[s];
        uint64_t a = ckpt_max_u64(seg->offset, lo), b = ckpt_min_u64(seg->offset + seg->len, hi);
        uint8_t *out = buf + (a - lo);
        ckpt_status status = CKPT_OK;
        if (seg->kind == CKPT_SEG_CHUNK)
            status = fill_chunk(w, c, f, seg, shared, a, b, out, err);
        else if (seg->kind == CKPT_SEG_OBJECT)
            status = fill_object(c, seg, a - seg->offset, (size_t)(b - a), out, err);
        else if (seg->kind == CKPT_SEG_SOURCE)
            status = ckpt_source_read_real(c->plan->model->src, f, out, (size_t)(b - a), a, err);
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

static ckpt_status rest_of_chunk(const ckpt_stream_job *c, ckpt_stream_file *of,
                                 const ckpt_seg *seg, uint64_t skip, const uint8_t *data,
                                 uint64_t n, ckpt_err *err)
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

static ckpt_status emit_literal(const ckpt_stream_job *c, uint32_t f, const ckpt_seg *seg,
                                uint64_t a, uint64_t b, uint32_t crc, uint8_t *out, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    /* A .metadata of hundreds of megabytes is written in many pieces by several workers. */
    const uint8_t *stored = sink->stored != NULL ? sink->stored(sink, seg) : NULL;
    if (stored != NULL) {
        memcpy(out, stored + (a - seg->offset), (size_t)(b - a));
        return CKPT_OK;
    }
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
static ckpt_status fill_literals(ckpt_stream_job *c, uint32_t f, uint8_t *buf, uint64_t lo,
                                 uint64_t hi, ckpt_err *err)
{
    const ckpt_out_file *file = &c->plan->sink.files[f];
    ckpt_stream_file *of = &c->files[f];
    ckpt_status status = CKPT_OK;
    for (size_t s = ckpt_stream_seg(file, lo);
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
        else if (seg->kind == CKPT_SEG_CHUNK)
            status = rest_of_chunk(c, of, seg, a - seg->offset, at, b - a, err);
    }
    return status;
}

/* What an item holds of one file; step apart in its slot. */
typedef struct part {
    uint32_t file;
    uint64_t lo, hi;
    uint8_t *buf;
    ckpt_range shared;
} part;

static int list_parts(const ckpt_stream_job *c, const ckpt_item_of_work *it, uint8_t *buf,
                      part parts[CKPT_SHA256_LANES])
{
    const ckpt_lane *l = &c->lanes[it->lane];
    int n = 0;
    for (uint32_t f = l->first; f < l->first + l->n; f++) {
        uint64_t size = ckpt_stream_size(c, f);
        if (it->offset >= size)
            continue;
        parts[n] = (part){.file = f,
                          .lo = it->offset,
                          .hi = ckpt_min_u64(it->offset + l->step, size),
                          .buf = buf + (f - l->first) * l->step};
        n++;
    }
    return n;
}

/* The next piece of one file and, beside it, leaves. */
static ckpt_status hash_beside(ckpt_worker *w, ckpt_stream_job *c, const part *p,
                               const ckpt_item_of_work *it, ckpt_err *err)
{
    ckpt_sha256_stream *whole = &c->files[p->file].whole;
    const uint8_t *at = p->buf, *end = p->buf + (p->hi - p->lo);
    for (uint32_t i = 0; i < it->n_leaves; i++) {
        const ckpt_leaf *leaf = &c->leaves.leaves[it->first_leaf + i];
        ckpt_sha256_stream s;
        ckpt_sha256_stream_init(&s);
        ckpt_sha256_stream_update2(&s, "", 1, NULL, NULL, 0); /* RFC 6962: a leaf starts with 0 */
        for (uint64_t done = 0; done < leaf->bytes;) {
            size_t n = (size_t)ckpt_min_u64(leaf->bytes - done, w->job->piece);
            size_t beside = ckpt_min_u64((uint64_t)(end - at), n);
            const uint8_t *data;
            ckpt_slot *pin;
            ckpt_status status = ckpt_leaf_bytes(w, NULL, leaf, done, n, w->buf, &data, &pin, err);
            if (status != CKPT_OK)
                return status;
            ckpt_sha256_stream_update2(&s, data, n, whole, at, beside);
            if (pin != NULL)
                ckpt_window_unpin(&c->written.window, pin);
            done += n;
            at += beside;
        }
        ckpt_sha256_stream_final(&s, leaf->out);
    }
    if (at < end)
        ckpt_sha256_stream_update2(whole, at, (size_t)(end - at), NULL, NULL, 0);
    return CKPT_OK;
}

static ckpt_status pass_turnstile(ckpt_worker *w, ckpt_stream_job *c, const ckpt_item_of_work *it,
                                  const part *parts, int n, ckpt_err *err)
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
        return hash_beside(w, c, parts, it, err);
    ckpt_sha256_stream_update_many(streams, data, len, n);
    return CKPT_OK;
}

/* The pieces that these leaves are made of are in the window, or were. */
static bool wait_for_leaves(ckpt_stream_job *c, const ckpt_item_of_work *it)
{
    uint32_t due = 0;
    bool any = false;
    for (uint32_t i = 0; i < it->n_leaves; i++) {
        const ckpt_leaf *leaf = &c->leaves.leaves[it->first_leaf + i];
        any = any || leaf->first != CKPT_NO_ITEM;
        due = leaf->first != CKPT_NO_ITEM && leaf->due > due ? leaf->due : due;
    }
    return !any || ckpt_window_wait(&c->written.window, due);
}

static bool has_literal(const ckpt_stream_job *c, const part *p)
{
    const ckpt_out_file *file = &c->plan->sink.files[p->file];
    for (size_t s = ckpt_stream_seg(file, p->lo); s < file->n_segs && file->segs[s].offset < p->hi;
         s++)
        if (file->segs[s].kind == CKPT_SEG_LITERAL)
            return true;
    return false;
}

/* Written or digested; after both the slot may be reused. */
static void let_slot_go(ckpt_stream_job *c, ckpt_offer *o)
{
    if (atomic_fetch_sub(&o->left, 1) == 1)
        ckpt_window_written(&c->written.window, o->slot);
}

static ckpt_status pass_offer(ckpt_worker *w, ckpt_stream_job *c, ckpt_offer *o, ckpt_err *err)
{
    part parts[CKPT_SHA256_LANES];
    int n = list_parts(c, o->item, o->slot->data, parts);
    ckpt_status status = pass_turnstile(w, c, o->item, parts, n, err);
    for (int i = 0; i < n && status == CKPT_OK; i++)
        status = ckpt_stream_count(c, parts[i].file, parts[i].hi - parts[i].lo, err);
    return status;
}

/* With the lane's lock: pass what was offered, in order, unless somebody is at it. */
static ckpt_status serve(ckpt_worker *w, ckpt_stream_job *c, ckpt_lane *l, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (l->served)
        return CKPT_OK;
    l->served = true;
    while (status == CKPT_OK && l->passed < l->size && !atomic_load(&w->job->stop)) {
        ckpt_offer *o = &c->offers[c->seqs[l->first_seq + l->passed / l->step]];
        if (o->slot == NULL)
            break;
        pthread_mutex_unlock(&l->lock);
        status = pass_offer(w, c, o, err);
        pthread_mutex_lock(&l->lock);
        if (status == CKPT_OK) {
            l->passed += l->step;
            let_slot_go(c, o);
            if (l->waiting > 0)
                pthread_cond_broadcast(&l->turn);
        }
    }
    l->served = false;
    return status;
}

/* Offer a piece, and wait for its literals if it has some; *go_on: it can be written. */
static ckpt_status offer(ckpt_worker *w, ckpt_stream_job *c, const ckpt_item_of_work *it,
                         ckpt_slot *slot, bool literal, bool *go_on, ckpt_err *err)
{
    ckpt_lane *l = &c->lanes[it->lane];
    ckpt_offer *o = &c->offers[it->seq];
    pthread_mutex_lock(&l->lock);
    o->item = it;
    o->slot = slot;
    atomic_store(&o->left, 2);
    ckpt_status status = serve(w, c, l, err);
    l->waiting++;
    while (literal && l->passed <= it->offset && status == CKPT_OK && !atomic_load(&w->job->stop))
        pthread_cond_wait(&l->turn, &l->lock);
    l->waiting--;
    *go_on = !literal || l->passed > it->offset;
    pthread_mutex_unlock(&l->lock);
    return status;
}

/* A run that was stopped ends without an error here: somebody else reports the reason. */
static ckpt_status do_piece(ckpt_worker *w, ckpt_stream_job *c, const ckpt_item_of_work *it,
                            ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_lane *l = &c->lanes[it->lane];
    ckpt_window *window = &c->written.window;
    part parts[CKPT_SHA256_LANES];
    bool literal = false, go_on = false;
    const ckpt_slot want = {.seq = it->seq,
                            .at = it->offset,
                            .len = l->step,
                            .step = l->step,
                            .first = l->first,
                            .n = l->n};
    ckpt_slot *slot = ckpt_window_take(window, &want);
    if (slot == NULL)
        return CKPT_OK;
    int n = list_parts(c, it, slot->data, parts);
    for (int i = 0; i < n; i++) {
        part *p = &parts[i];
        CKPT_CHECK(ckpt_stream_share(c, p->file, p->lo, p->hi, &p->shared, err));
        CKPT_CHECK(fill_payload(w, c, p->file, p->buf, p->lo, p->hi, &p->shared, err));
        literal = literal || has_literal(c, p);
    }
    ckpt_window_filled(window, slot);
    if (!wait_for_leaves(c, it))
        return CKPT_OK;
    CKPT_CHECK(offer(w, c, it, slot, literal, &go_on, err));
    if (!go_on)
        return CKPT_OK;
    for (int i = 0; i < n; i++) {
        const part *p = &parts[i];
        CKPT_CHECK(ckpt_stream_write(c, p->file, p->buf, p->lo, p->hi, &p->shared, err));
        ckpt_job_advance(w, p->hi - p->lo);
    }
    let_slot_go(c, &c->offers[it->seq]);
done:
    return status;
}

static ckpt_status convert_item(ckpt_worker *w, size_t index, ckpt_err *err)
{
    ckpt_stream_job *c = w->job->self;
    const ckpt_item_of_work *it = &c->items[index];
    if (it->lane != CKPT_NO_LANE)
        return do_piece(w, c, it, err);
    if (!wait_for_leaves(c, it))
        return CKPT_OK;
    return ckpt_hash_leaves(w, c->plan->model->src, c->leaves.leaves + it->first_leaf,
                            (int)it->n_leaves, err);
}

static uint64_t step_of(const void *self, uint32_t f)
{
    const ckpt_stream_job *c = self;
    return ckpt_stream_size(c, f) > 0 ? c->lanes[c->lane_of[f]].step : 0;
}

/* ---- the job ------------------------------------------------------------------------------------ */

/* Which rank writes which file. */
static ckpt_status divide_files(ckpt_stream_job *c, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    uint64_t total = 0, at = 0;
    if (ckpt_share_alone(c->share))
        return CKPT_OK;
    c->owner = calloc(sink->n_files + 1, sizeof *c->owner);
    if (c->owner == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t f = 0; f < sink->n_files; f++)
        total += ckpt_stream_is_done(c, f) ? 0 : sink->files[f].size;
    for (size_t f = 0; f < sink->n_files; f++) {
        uint64_t size = ckpt_stream_is_done(c, f) ? 0 : sink->files[f].size;
        c->owner[f] = ckpt_share_of(c->share, at, size, total);
        at += size;
    }
    return CKPT_OK;
}

static ckpt_status collect_files(const ckpt_stream_job *c, ckpt_convert_result *out, ckpt_err *err)
{
    const ckpt_sink *sink = &c->plan->sink;
    for (size_t f = 0; f < sink->n_files; f++) {
        ckpt_journal_entry e = ckpt_stream_is_done(c, f) ? c->journal->files[f]
                                                         : ckpt_stream_file_digests(&c->files[f]);
        memcpy(out->files[f].sha256, e.sha256, sizeof e.sha256);
        memcpy(out->files[f].rest, e.rest, sizeof e.rest);
        out->files[f].size = sink->files[f].size;
    }
    if (c->owner == NULL)
        return CKPT_OK;
    return ckpt_share_table(c->share, out->files, sink->n_files, sizeof *out->files, c->owner, err);
}

/* Buffers and the window. */
static ckpt_status open_buffers(ckpt_stream_job *c, ckpt_job *j, bool waves,
                                const ckpt_stream_opts *opts, ckpt_err *err)
{
    bool cast =
        false; /* originals come from the source, which is not to be read at the turnstile */
    for (size_t i = 0; i < c->leaves.n; i++)
        cast = cast || c->leaves.leaves[i].written == NULL;
    c->beside =
        !waves && !cast && (opts->beside > 0 || (opts->beside == 0 && ckpt_sha256_stream_pairs()));
    j->piece = CKPT_LEAF_BYTES;
    j->slot = waves ? WAVE_MAX : CKPT_PIECE_MAX;
    j->keep = waves ? WAVE_KEEP : LANE_KEEP * c->side_by_side;
    return ckpt_job_open(j, opts, err);
}

/* This process's share of the work: its files and leaves. */
static ckpt_status run_share(ckpt_stream_job *c, ckpt_job *j, const ckpt_stream_opts *opts,
                             ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool waves = false;
    int cores = ckpt_job_cores(opts);
    const ckpt_source *src = c->plan->model->src;
    for (size_t f = 0; f < src->n_files; f++)
        c->sparse = c->sparse || src->files[f].sparse;
    CKPT_CHECK(divide_files(c, err));
    CKPT_CHECK(ckpt_stream_open_files(c, err));
    CKPT_CHECK(ckpt_stream_lanes(c, cores, &waves, err));
    CKPT_CHECK(open_buffers(c, j, waves, opts, err));
    CKPT_CHECK(ckpt_stream_order(c, j->slot, j->n_workers, cores, err));
    CKPT_CHECK(ckpt_window_open(&c->written.window, j->slots, (size_t)j->n_workers + j->keep,
                                j->slot, c->n_pieces, &j->stop, err));
    j->n_items = c->n_items;
    for (size_t f = 0; f < c->plan->sink.n_files; f++)
        j->total_bytes += ckpt_stream_size(c, f);
    for (size_t i = 0; i < c->leaves.n; i++) /* originals are read for themselves */
        j->total_bytes += c->leaves.leaves[i].written == NULL ? c->leaves.leaves[i].bytes : 0;
    CKPT_CHECK(ckpt_job_run(j));
done:
    return status;
}

static void free_order(ckpt_stream_job *c)
{
    for (size_t i = 0; i < c->n_lanes; i++) {
        pthread_mutex_destroy(&c->lanes[i].lock);
        pthread_cond_destroy(&c->lanes[i].turn);
    }
    free(c->lanes);
    free(c->lane_of);
    free(c->seqs);
    free(c->offers);
    free(c->owner);
}

/* Everything is written, by all processes: the digests that are left, and those that must agree. */
static ckpt_status finish(ckpt_stream_job *c, const ckpt_stream_opts *opts,
                          const ckpt_tensor_hash *twins, ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(collect_files(c, out, err));
    status = ckpt_hash_all(c->plan->model->src, &c->late, opts, err);
    CKPT_CHECK(ckpt_share_agree(c->share, status, err));
    CKPT_CHECK(ckpt_leaves_collect(&c->shares, c->share, err));
    CKPT_CHECK(ckpt_compare_twins(&c->written, out->tensors, twins, err));
done:
    return status;
}

static ckpt_status convert_files(ckpt_stream_job *c, const ckpt_stream_opts *opts,
                                 ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status;
    ckpt_plan *plan = c->plan;
    ckpt_job j = {.run = convert_item, .give_up = wake_all, .self = c};
    ckpt_tensor_hash *originals = calloc(plan->n_results + 1, sizeof *originals), *twins = NULL;
    out->tensors = ckpt_arena_array(c->arena, plan->n_results, sizeof *out->tensors);
    out->files = ckpt_arena_array(c->arena, plan->sink.n_files, sizeof *out->files);
    status = ckpt_written_open(&c->written, plan, err);
    c->written.step = step_of;
    c->written.fetch = ckpt_stream_read_back;
    c->written.self = c;
    if (status == CKPT_OK)
        twins = calloc(2 * c->written.n_twins + 1, sizeof *twins);
    if (status == CKPT_OK &&
        (originals == NULL || out->tensors == NULL || out->files == NULL || twins == NULL))
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (status == CKPT_OK)
        status = ckpt_list_results(plan, &c->written, &c->leaves, c->arena, out->tensors, originals,
                                   twins, err);
    if (status == CKPT_OK)
        status = run_share(c, &j, opts, err);
    CKPT_CHECK(ckpt_share_agree(c->share, status, err));
    CKPT_CHECK(finish(c, opts, twins, out, err));
    CKPT_CHECK(ckpt_finish_results(plan, &j.workers[0].sha, originals, out, err));
    out->bytes = plan->total_bytes;
    out->buffer_bytes = j.arena_bytes;
done:
    ckpt_job_close(&j);
    free(originals);
    free(twins);
    return status;
}

ckpt_status ckpt_stream_convert(ckpt_plan *plan, const char *dir, const ckpt_stream_opts *opts,
                                ckpt_arena *arena, ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_stream_job c = {
        .plan = plan, .arena = arena, .dir = dir, .journal = opts->journal, .share = opts->share};
    *out = (ckpt_convert_result){0};
    ckpt_cache_stream(plan->model->src, 0);
    if (plan->sink.serial != NULL) { /* one file that is made in order: nothing to divide */
        if (ckpt_share_alone(c.share) || c.share->rank == 0)
            status = ckpt_stream_serial(plan, dir, opts, arena, out, err);
        return ckpt_share_agree(c.share, status, err);
    }
    pthread_mutex_init(&c.open_lock, NULL);
    status = convert_files(&c, opts, out, err);
    ckpt_stream_close_files(&c);
    free_order(&c);
    ckpt_leaf_shares_free(&c.shares);
    ckpt_written_close(&c.written);
    pthread_mutex_destroy(&c.open_lock);
    free(c.leaves.leaves);
    free(c.late.leaves);
    free(c.items);
    return status;
}
