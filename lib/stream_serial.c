/* Converting into a file that a library makes (source.h, ckpt_serial). Workers gather, compress and
 * hash leaves in parallel; two turnstiles then take the parts in order: one for the SHA-256 of each
 * tensor's bytes, one for the library, so that hashing a part overlaps putting the one before. A
 * worker waits only for parts that were handed out earlier, so the lowest in flight never waits.
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

typedef struct turnstile {
    pthread_cond_t turn;
    uint64_t passed; /* parts */
} turnstile;

typedef struct serial_job {
    ckpt_plan *plan;
    const ckpt_serial *calls;
    const char *path;
    ckpt_leaf_list leaves;
    uint64_t n_parts;
    size_t part_bytes, room_bytes;
    uint8_t **buffers; /* per worker: a part, then room to encode it; allocated when first used */
    /* Items in order: parts, with groups of leaves merged in by progress. Item numbers of the groups
     * are computed, not stored: after part p, groups up to the share of p in all parts are due. */
    size_t n_groups;
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

static ckpt_status do_part(ckpt_worker *w, serial_job *s, uint64_t index, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_sink *sink = &s->plan->sink;
    uint8_t **buffer = &s->buffers[w->index];
    ckpt_part part;
    ckpt_encoded encoded;
    if (*buffer == NULL)
        *buffer = malloc(s->part_bytes + s->room_bytes + 1);
    if (*buffer == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for buffers");
    s->calls->part(sink, index, &part);
    CKPT_CHECK(gather_part(w, s, &part, *buffer, err));
    CKPT_CHECK(s->calls->encode(sink, index, *buffer, *buffer + s->part_bytes, &encoded, err));
    if (!wait_turn(w, s, &s->hash, index))
        goto done;
    hash_part(s, &part, *buffer);
    pass(s, &s->hash);
    if (!wait_turn(w, s, &s->put, index))
        goto done;
    CKPT_TRY(s->calls->put(sink, index, &encoded, err), "%s", ckpt_basename(s->path));
    pass(s, &s->put);
    ckpt_job_advance(w, part.len);
done:
    return status;
}

/* Groups that are due before part p. */
static uint64_t groups_before(const serial_job *s, uint64_t p)
{
    unsigned __int128 due = (unsigned __int128)p * s->n_groups;
    return s->n_parts > 0 ? (uint64_t)(due / s->n_parts) : 0;
}

static ckpt_status serial_item(ckpt_worker *w, size_t index, ckpt_err *err)
{
    serial_job *s = w->job->self;
    /* Part p is item p + groups_before(p), which grows with p. */
    uint64_t lo = 0, hi = s->n_parts;
    while (lo < hi) {
        uint64_t mid = lo + (hi - lo) / 2;
        if (mid + groups_before(s, mid) < index)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo < s->n_parts && lo + groups_before(s, lo) == index)
        return do_part(w, s, lo, err);
    return ckpt_hash_leaf_group(w, s->plan->model->src, &s->leaves, index - (size_t)lo, err);
}

/* As many workers as the memory has buffers for. */
static ckpt_stream_opts fit(const serial_job *s, const ckpt_stream_opts *opts)
{
    ckpt_stream_opts o = opts != NULL ? *opts : (ckpt_stream_opts){0};
    uint64_t memory = o.memory > 0 ? o.memory : (uint64_t)1 << 30;
    uint64_t each = s->part_bytes + s->room_bytes + 2 * CKPT_PIECE_MAX;
    uint64_t n = memory / each < 1 ? 1 : memory / each;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (o.threads <= 0)
        o.threads = cores > 0 && cores < 16 ? (int)cores + 1 : 16;
    o.threads = (int)ckpt_min_u64((uint64_t)o.threads, n);
    uint64_t ours = (uint64_t)o.threads * (s->part_bytes + s->room_bytes);
    o.memory = memory > 2 * ours ? memory - ours : memory / 2;
    return o;
}

static ckpt_status prepare(serial_job *s, ckpt_job *j, const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    s->calls->sizes(&s->plan->sink, &s->part_bytes, &s->room_bytes);
    ckpt_stream_opts fitted = fit(s, opts);
    CKPT_CHECK(ckpt_job_open(j, &fitted, err));
    s->n_parts = s->calls->n_parts(&s->plan->sink);
    s->n_groups = ckpt_leaf_groups(&s->leaves);
    s->buffers = calloc((size_t)j->n_workers, sizeof *s->buffers);
    s->sha256 = calloc(s->plan->out.n_tensors + 1, CKPT_SHA256_LEN);
    if (s->buffers == NULL || s->sha256 == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    ckpt_sha256_stream_init(&s->stream);
    ckpt_sha256_stream empty = s->stream; /* of tensors that have no parts */
    ckpt_sha256_stream_final(&empty, s->sha256);
    for (size_t i = 1; i < s->plan->out.n_tensors; i++)
        memcpy(s->sha256 + i * CKPT_SHA256_LEN, s->sha256, CKPT_SHA256_LEN);
    j->n_items = (size_t)s->n_parts + s->n_groups;
    j->total_bytes = s->plan->payload_bytes;
    for (size_t i = 0; i < s->n_groups; i++)
        j->total_bytes += ckpt_leaf_group_bytes(&s->leaves, i);
done:
    return status;
}

ckpt_status ckpt_stream_serial(ckpt_plan *plan, const char *path, const ckpt_stream_opts *opts,
                               ckpt_arena *arena, ckpt_convert_result *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    serial_job s = {.plan = plan, .calls = plan->sink.serial, .path = path};
    ckpt_job j = {.run = serial_item, .give_up = wake_all, .self = &s};
    bool opened = false;
    *out = (ckpt_convert_result){0};
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.hash.turn, NULL);
    pthread_cond_init(&s.put.turn, NULL);
    ckpt_tensor_hash *originals = calloc(plan->n_results + 1, sizeof *originals);
    out->tensors = ckpt_arena_array(arena, plan->n_results, sizeof *out->tensors);
    out->files = ckpt_arena_array(arena, 1, sizeof *out->files);
    if (originals == NULL || out->tensors == NULL || out->files == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    CKPT_CHECK(ckpt_list_results(plan, &s.leaves, arena, out->tensors, originals, err));
    CKPT_CHECK(prepare(&s, &j, opts, err));
    opened = true; /* also after a failure there may be something to give up */
    CKPT_TRY(s.calls->open(&plan->sink, path, err), "%s", ckpt_basename(path));
    CKPT_CHECK(ckpt_job_run(&j));
    CKPT_CHECK(ckpt_finish_results(plan, &j.workers[0].sha, originals, out, err));
    opened = false;
    CKPT_TRY(s.calls->finish(&plan->sink, s.sha256, err), "%s", ckpt_basename(path));
    out->bytes = plan->total_bytes;
    out->buffer_bytes = j.arena_bytes + (uint64_t)j.n_workers * (s.part_bytes + s.room_bytes);
done:
    if (opened)
        s.calls->give_up(&plan->sink);
    for (int i = 0; s.buffers != NULL && i < j.n_workers; i++)
        free(s.buffers[i]);
    ckpt_job_close(&j);
    free(s.buffers);
    free(s.sha256);
    free(s.leaves.leaves);
    free(originals);
    pthread_cond_destroy(&s.hash.turn);
    pthread_cond_destroy(&s.put.turn);
    pthread_mutex_destroy(&s.lock);
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
