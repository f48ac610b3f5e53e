/* Converting into a file that a library makes (source.h, ckpt_serial). Workers gather and compress parts
 * and hash leaves in parallel; two turnstiles then take the parts in order: one for the SHA-256 of each
 * tensor's bytes, one for the library, so that hashing a part overlaps putting the one before. A
 * worker waits only for parts that were handed out earlier, so the lowest in flight never waits.
 *
 * Parts stay in a window for a while, and leaves are hashed from there; those whose bytes lie too far
 * apart for it are read back from the finished file.
 *
 * A part's size does not depend on --memory, for the file must not: with little memory there are
 * fewer workers, at least one. */
#include "checked.h"
#include "gather.h"
#include "job.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define READ_BYTES ((size_t)1 << 20)
#define PARTS_KEPT 24 /* beside one a worker */

typedef struct turnstile {
    pthread_cond_t turn;
    uint64_t passed; /* parts */
} turnstile;

/* A part, or leaves. */
typedef struct serial_item {
    size_t first_leaf;
    uint32_t part, n_leaves; /* n_leaves 0: the part */
} serial_item;

typedef struct serial_job {
    ckpt_plan *plan;
    const ckpt_serial *calls;
    const char *path;
    ckpt_leaf_list leaves;
    ckpt_leaf_list late; /* leaves that were not in the window; under lock */
    ckpt_written written;
    uint32_t n_parts;
    size_t part_bytes, room_bytes, keep;
    uint8_t *parts;  /* the window's memory */
    uint8_t **rooms; /* per worker, to encode a part; allocated when first used */
    struct serial_item *items;
    size_t n_items;
    pthread_mutex_t lock;
    turnstile hash, put;
    ckpt_sha256_stream stream; /* of the tensor in progress */
    uint8_t *sha256;           /* per tensor */
} serial_job;

static void wake_all(ckpt_job *j)
{
    serial_job *s = j->self;
    pthread_mutex_lock(&s->lock);
    pthread_cond_broadcast(&s->hash.turn);
    pthread_cond_broadcast(&s->put.turn);
    pthread_mutex_unlock(&s->lock);
    ckpt_window_wake(&s->written.window);
}

/* False if the run was stopped meanwhile; somebody else reports the reason. */
static bool wait_turn(const ckpt_worker *w, serial_job *s, turnstile *t, uint64_t part)
{
    pthread_mutex_lock(&s->lock);
    while (t->passed != part && !atomic_load(&w->job->stop))
        pthread_cond_wait(&t->turn, &s->lock);
    bool mine = t->passed == part;
    pthread_mutex_unlock(&s->lock);
    return mine;
}

static void pass(serial_job *s, turnstile *t)
{
    pthread_mutex_lock(&s->lock);
    t->passed++;
    pthread_cond_broadcast(&t->turn);
    pthread_mutex_unlock(&s->lock);
}

/* In order: the digest of the tensor's bytes as they would be in a plain file. */
static void hash_part(serial_job *s, const ckpt_part *part, const uint8_t *data)
{
    if (part->lo == 0)
        ckpt_sha256_stream_init(&s->stream);
    ckpt_sha256_stream_update2(&s->stream, data, part->len, NULL, NULL, 0);
    const ckpt_out_tensor *t = &s->plan->out.tensors[part->tensor];
    int64_t numel = 0;
    uint64_t bytes = 0;
    if (ckpt_numel(t->rank, t->dims, &numel) && ckpt_dtype_bytes(t->dtype, numel, &bytes) &&
        part->lo + part->len == bytes)
        ckpt_sha256_stream_final(&s->stream, s->sha256 + (size_t)part->tensor * CKPT_SHA256_LEN);
}

static ckpt_status gather_part(ckpt_worker *w, serial_job *s, const ckpt_part *part, uint8_t *out,
                               ckpt_err *err)
{
    ckpt_plan *plan = s->plan;
    ckpt_status status = ckpt_gather_run(plan->model->src, &plan->chunks[part->tensor][0], part->lo,
                                         part->len, out, &w->scratch, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "tensor '%s'", plan->out.tensors[part->tensor].name);
    return status;
}

static ckpt_status do_part(ckpt_worker *w, serial_job *s, uint32_t index, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_sink *sink = &s->plan->sink;
    uint8_t **room = &s->rooms[w->index];
    ckpt_part part;
    ckpt_encoded encoded;
    if (*room == NULL)
        *room = malloc(s->room_bytes + 1);
    if (*room == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for buffers");
    s->calls->part(sink, index, &part);
    const ckpt_slot want = {
        .seq = index, .at = part.lo, .len = part.len, .first = part.tensor, .n = 1};
    ckpt_slot *slot = ckpt_window_take(&s->written.window, &want);
    if (slot == NULL)
        return CKPT_OK;
    CKPT_CHECK(gather_part(w, s, &part, slot->data, err));
    ckpt_window_filled(&s->written.window, slot);
    CKPT_CHECK(s->calls->encode(sink, index, slot->data, *room, &encoded, err));
    if (!wait_turn(w, s, &s->hash, index))
        goto done;
    hash_part(s, &part, slot->data);
    pass(s, &s->hash);
    if (!wait_turn(w, s, &s->put, index))
        goto done;
    CKPT_TRY(s->calls->put(sink, index, &encoded, err), "%s", ckpt_basename(s->path));
    pass(s, &s->put);
    ckpt_window_written(&s->written.window, slot);
    ckpt_job_advance(w, part.len);
done:
    return status;
}

static ckpt_status be_late(serial_job *s, const ckpt_leaf *leaf, ckpt_err *err)
{
    pthread_mutex_lock(&s->lock);
    void *p = s->late.leaves;
    ckpt_status status = ckpt_grow(&p, &s->late.cap, s->late.n + 1, sizeof *s->late.leaves, err);
    s->late.leaves = p;
    if (status == CKPT_OK)
        s->late.leaves[s->late.n++] = *leaf;
    pthread_mutex_unlock(&s->lock);
    return status;
}

static ckpt_status do_leaves(ckpt_worker *w, serial_job *s, const serial_item *it, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_window *window = &s->written.window;
    ckpt_leaf held[CKPT_LEAF_GROUP];
    int n = 0;
    for (uint32_t i = 0; i < it->n_leaves; i++) {
        const ckpt_leaf *leaf = &s->leaves.leaves[it->first_leaf + i];
        if (leaf->written != NULL && !ckpt_window_wait(window, leaf->due))
            return CKPT_OK;
    }
    for (uint32_t i = 0; i < it->n_leaves && status == CKPT_OK; i++) {
        const ckpt_leaf *leaf = &s->leaves.leaves[it->first_leaf + i];
        if (leaf->written == NULL || ckpt_window_hold(window, leaf->first, leaf->due))
            held[n++] = *leaf;
        else
            status = be_late(s, leaf, err);
    }
    if (status == CKPT_OK && n > 0)
        status = ckpt_hash_leaves(w, s->plan->model->src, held, n, err);
    for (int i = 0; i < n; i++)
        if (held[i].written != NULL)
            ckpt_window_let_go(window, held[i].first, held[i].due);
    return status;
}

static ckpt_status serial_step(ckpt_worker *w, size_t index, ckpt_err *err)
{
    serial_job *s = w->job->self;
    const serial_item *it = &s->items[index];
    return it->n_leaves > 0 ? do_leaves(w, s, it, err) : do_part(w, s, it->part, err);
}

/* ---- order of work ----------------------------------------------------------------------------- */

/* The part that holds byte `at` of a tensor. */
static uint32_t part_with(const serial_job *s, uint32_t tensor, uint64_t at)
{
    uint32_t lo = 0, hi = s->n_parts;
    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;
        ckpt_part p;
        s->calls->part(&s->plan->sink, mid, &p);
        if (p.tensor < tensor || (p.tensor == tensor && p.lo <= at))
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

typedef struct gather_leaves {
    const serial_job *s;
    ckpt_leaf *leaf;
    uint64_t n;
} gather_leaves;

static void need(void *self, uint64_t index, uint32_t tensor, uint64_t lo, uint64_t hi)
{
    gather_leaves *g = self;
    if (index >= g->n || lo >= hi)
        return;
    ckpt_leaf *leaf = &g->leaf[index];
    uint32_t first = part_with(g->s, tensor, lo), last = part_with(g->s, tensor, hi - 1);
    if (leaf->first == CKPT_NO_ITEM || first < leaf->first)
        leaf->first = first;
    if (last > leaf->due)
        leaf->due = last;
}

/* Parts, and leaves in groups as soon as their parts are there. */
static ckpt_status order_items(serial_job *s, ckpt_err *err)
{
    ckpt_leaf_list *list = &s->leaves;
    for (size_t i = 0, next; i < list->n; i = next) {
        for (next = i + 1; next < list->n && list->leaves[next].gather == list->leaves[i].gather;)
            next++;
        gather_leaves g = {s, list->leaves + i, next - i};
        if (list->leaves[i].written != NULL)
            ckpt_written_needs(&s->written, list->leaves[i].gather, need, &g);
    }
    ckpt_pace_originals(list);
    ckpt_status status = ckpt_leaves_by_due(list, s->n_parts + 1, err);
    if (status != CKPT_OK)
        return status;
    s->items = malloc((s->n_parts + list->n + 1) * sizeof *s->items);
    if (s->items == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for work items");
    size_t next = 0;
    for (uint32_t p = 0; p <= s->n_parts; p++) {
        if (p < s->n_parts)
            s->items[s->n_items++] = (serial_item){.part = p};
        for (;;) {
            uint32_t n = 0;
            while (n < CKPT_LEAF_GROUP && next + n < list->n && list->leaves[next + n].due <= p)
                n++;
            if (n == 0 || (p < s->n_parts && n < CKPT_LEAF_GROUP))
                break;
            s->items[s->n_items++] = (serial_item){.first_leaf = next, .n_leaves = n};
            next += n;
        }
    }
    return CKPT_OK;
}

/* As many workers as the memory has buffers for, and parts kept beside theirs. */
static ckpt_stream_opts fit(serial_job *s, const ckpt_stream_opts *opts)
{
    ckpt_stream_opts o = opts != NULL ? *opts : (ckpt_stream_opts){0};
    uint64_t memory = o.memory > 0 ? o.memory : (uint64_t)1 << 30;
    uint64_t each = s->part_bytes + s->room_bytes + 2 * CKPT_LEAF_BYTES;
    uint64_t n = memory / each < 1 ? 1 : memory / each;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (o.threads <= 0)
        o.threads = cores > 0 && cores < 16 ? (int)cores + 1 : 16;
    o.threads = (int)ckpt_min_u64((uint64_t)o.threads, n);
    uint64_t used = (uint64_t)o.threads * each;
    uint64_t left = memory > used ? memory - used : 0;
    s->keep = (size_t)ckpt_min_u64(left / (s->part_bytes + 1), PARTS_KEPT);
    uint64_t ours = (uint64_t)o.threads * (s->part_bytes + s->room_bytes) + s->keep * s->part_bytes;
    o.memory = memory > ours ? memory - ours : 1;
    return o;
}

static ckpt_status prepare(serial_job *s, ckpt_job *j, const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint64_t n = s->calls->n_parts(&s->plan->sink);
    s->calls->sizes(&s->plan->sink, &s->part_bytes, &s->room_bytes);
    ckpt_stream_opts fitted = fit(s, opts);
    j->piece = CKPT_LEAF_BYTES;
    CKPT_CHECK(ckpt_job_open(j, &fitted, err));
    if (n >= CKPT_NO_ITEM - 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s: too many parts", ckpt_basename(s->path));
    s->n_parts = (uint32_t)n;
    CKPT_CHECK(order_items(s, err));
    size_t slots = (size_t)j->n_workers + s->keep;
    s->rooms = calloc((size_t)j->n_workers, sizeof *s->rooms);
    s->parts = malloc(slots * s->part_bytes + 1);
    s->sha256 = calloc(s->plan->out.n_tensors + 1, CKPT_SHA256_LEN);
    if (s->rooms == NULL || s->parts == NULL || s->sha256 == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(ckpt_window_open(&s->written.window, s->parts, slots, s->part_bytes, s->n_parts,
                                &j->stop, err));
    ckpt_sha256_stream_init(&s->stream);
    ckpt_sha256_stream empty = s->stream; /* of tensors that have no parts */
    ckpt_sha256_stream_final(&empty, s->sha256);
    for (size_t i = 1; i < s->plan->out.n_tensors; i++)
        memcpy(s->sha256 + i * CKPT_SHA256_LEN, s->sha256, CKPT_SHA256_LEN);
    j->n_items = s->n_items;
    j->total_bytes = s->plan->payload_bytes;
    for (size_t i = 0; i < s->leaves.n; i++)
        j->total_bytes += s->leaves.leaves[i].written == NULL ? s->leaves.leaves[i].bytes : 0;
done:
    return status;
}

/* ---- reading back ------------------------------------------------------------------------------ */

/* What a leaf's gather is of. */
static const ckpt_result_tensor *tensor_of(const serial_job *s, const ckpt_gather *g)
{
    const ckpt_written *w = &s->written;
    for (size_t i = 0; i < w->n_twins; i++)
        if (g == &w->twins[i].b)
            return w->twins[i].repeat;
    return &s->plan->results[g - w->results];
}

/* Late leaves by the gathers of the finished file. Those of one tensor mostly follow each other. */
static ckpt_status find_late(serial_job *s, const ckpt_source *src, ckpt_arena *arena,
                             ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_gather *last = NULL;
    ckpt_gather *again = NULL;
    for (size_t i = 0; i < s->late.n; i++) {
        ckpt_leaf *leaf = &s->late.leaves[i];
        if (leaf->gather != last) {
            const ckpt_result_tensor *r = tensor_of(s, leaf->gather);
            int64_t stored = ckpt_source_find(src, s->plan->out.tensors[r->out_tensor].name);
            ckpt_canon canon;
            last = leaf->gather;
            if (stored < 0)
                return ckpt_fail(err, CKPT_E_IO, "tensor '%s' is not in what was written",
                                 r->stored);
            again = ckpt_arena_alloc(arena, sizeof *again);
            if (again == NULL)
                return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
            CKPT_CHECK(ckpt_written_canon(r, (uint32_t)stored, &canon, err));
            CKPT_CHECK(ckpt_gather_canon(src, &canon, arena, again, err));
        }
        leaf->gather = again;
        leaf->written = NULL;
    }
done:
    return status;
}

static ckpt_status hash_late(serial_job *s, const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_source src = {0};
    ckpt_arena arena = {0};
    const ckpt_open_opts open_opts = {.iteration = -1, .container = "hdf5"};
    if (s->late.n == 0)
        return CKPT_OK;
    CKPT_CHECK(ckpt_source_open(&src, s->path, &open_opts, err));
    CKPT_CHECK(find_late(s, &src, &arena, err));
    CKPT_CHECK(ckpt_hash_all(&src, &s->late, opts, err));
done:
    ckpt_source_close(&src);
    ckpt_arena_free(&arena);
    return status;
}

/* ---- the job ------------------------------------------------------------------------------------ */

static void release(serial_job *s, ckpt_job *j)
{
    for (int i = 0; s->rooms != NULL && i < j->n_workers; i++)
        free(s->rooms[i]);
    ckpt_written_close(&s->written);
    ckpt_job_close(j);
    free(s->rooms);
    free(s->parts);
    free(s->items);
    free(s->sha256);
    free(s->leaves.leaves);
    free(s->late.leaves);
    pthread_cond_destroy(&s->hash.turn);
    pthread_cond_destroy(&s->put.turn);
    pthread_mutex_destroy(&s->lock);
}

/* Not asked for: leaves hold all their parts while they are read. */
static uint64_t no_step(const void *self, uint32_t file)
{
    (void)self;
    (void)file;
    return 0;
}

static ckpt_status no_fetch(void *self, uint32_t file, void *buf, size_t n, uint64_t offset,
                            ckpt_err *err)
{
    (void)self;
    (void)buf;
    return ckpt_fail(err, CKPT_E_INTERNAL, "%zu bytes at %llu of tensor %u left the window", n,
                     (unsigned long long)offset, (unsigned)file);
}

ckpt_status ckpt_stream_serial(ckpt_plan *plan, const char *path, const ckpt_stream_opts *opts,
                               ckpt_arena *arena, ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    serial_job s = {.plan = plan, .calls = plan->sink.serial, .path = path};
    ckpt_job j = {.run = serial_step, .give_up = wake_all, .self = &s};
    bool opened = false;
    *out = (ckpt_convert_result){0};
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.hash.turn, NULL);
    pthread_cond_init(&s.put.turn, NULL);
    ckpt_tensor_hash *originals = calloc(plan->n_results + 1, sizeof *originals), *twins = NULL;
    out->tensors = ckpt_arena_array(arena, plan->n_results, sizeof *out->tensors);
    out->files = ckpt_arena_array(arena, 1, sizeof *out->files);
    CKPT_CHECK(ckpt_written_open(&s.written, plan, err));
    s.written.step = no_step;
    s.written.fetch = no_fetch;
    twins = calloc(2 * s.written.n_twins + 1, sizeof *twins);
    if (originals == NULL || twins == NULL || out->tensors == NULL || out->files == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    CKPT_CHECK(
        ckpt_list_results(plan, &s.written, &s.leaves, arena, out->tensors, originals, twins, err));
    CKPT_CHECK(prepare(&s, &j, opts, err));
    opened = true; /* also after a failure there may be something to give up */
    CKPT_TRY(s.calls->open(&plan->sink, path, err), "%s", ckpt_basename(path));
    CKPT_CHECK(ckpt_job_run(&j));
    opened = false;
    CKPT_TRY(s.calls->finish(&plan->sink, s.sha256, err), "%s", ckpt_basename(path));
    CKPT_CHECK(hash_late(&s, opts, err));
    CKPT_CHECK(ckpt_compare_twins(&s.written, out->tensors, twins, err));
    CKPT_CHECK(ckpt_finish_results(plan, &j.workers[0].sha, originals, out, err));
    out->bytes = plan->total_bytes;
    out->buffer_bytes = j.arena_bytes + (uint64_t)j.n_workers * (s.part_bytes + s.room_bytes) +
                        s.keep * s.part_bytes;
done:
    if (opened)
        s.calls->give_up(&plan->sink);
    free(originals);
    free(twins);
    release(&s, &j);
    return status;
}

/* ---- after the last byte ------------------------------------------------------------------------ */

static ckpt_status digest_file(int fd, uint64_t size, uint8_t out[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_sha256_stream stream;
    uint8_t *buf = malloc(READ_BYTES);
    if (buf == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    ckpt_sha256_stream_init(&stream);
    for (uint64_t at = 0; at < size;) {
        size_t n = (size_t)ckpt_min_u64(READ_BYTES, size - at);
        CKPT_CHECK(ckpt_pread_full(fd, buf, n, at, err));
        ckpt_sha256_stream_update2(&stream, buf, n, NULL, NULL, 0);
        at += n;
        CKPT_CHECK(ckpt_check_interrupted(err));
    }
    ckpt_sha256_stream_final(&stream, out);
done:
    free(buf);
    return status;
}

ckpt_status ckpt_stream_seal(ckpt_plan *plan, const char *path, const char *manifest, size_t n,
                             ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    char root[2 * CKPT_SHA256_LEN + 1];
    int fd = -1;
    if (plan->sink.serial == NULL)
        return CKPT_OK;
    ckpt_hex(out->root, root);
    CKPT_TRY(plan->sink.serial->seal(&plan->sink, path, root, manifest, n, err), "%s",
             ckpt_basename(path));
    ckpt_file_hash *file = &out->files[0];
    CKPT_CHECK(ckpt_open_read(path, &fd, &file->size, err));
    if (ckpt_sync_fd(fd) != 0) {
        status = ckpt_fail_errno(err, errno, "%s: fsync", path);
        goto done;
    }
    CKPT_TRY(digest_file(fd, file->size, file->sha256, err), "%s", path);
    /* No tensor's bytes lie in it as they are: everything counts. */
    memcpy(file->rest, file->sha256, CKPT_SHA256_LEN);
    out->bytes = file->size;
done:
    if (fd >= 0)
        close(fd);
    return status;
}
