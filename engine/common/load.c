/* Reading and sending pieces of tensors (load.h). */
#include "load.h"

#include <stdlib.h>

#include "checked.h"
#include "hash.h"

/* Two leaves side by side hash faster than one after the other; without digests less is pinned
 * (tests/gpu/LOAD_NOTES.md). */
#define PIECE ((uint64_t)1 << 20)
#define PIECE_HASHED (2 * CKPT_LEAF_BYTES)
#define SCRATCH ((uint64_t)1 << 20)
#define LEAVES_AT_ONCE 16

typedef struct load_job {
    const ckpt_cuda_plugin *api;
    ckpt_source *src;
    const ckpt_eng_load_item *items;
    uint64_t *first; /* [n + 1] number of an item's first piece; that of all */
    size_t n;
    uint64_t piece;
    ckpt_cuda_pipe **pipes; /* one a worker, and so below */
    uint8_t *scratch;
    ckpt_err *errs;
    ckpt_status *status;
} load_job;

/* RFC 6962: the hash of a leaf starts with a zero byte. */
static void hash_leaves(const uint8_t *p, size_t n, uint8_t *out)
{
    ckpt_sha256_stream streams[LEAVES_AT_ONCE], *s[LEAVES_AT_ONCE];
    const void *at[LEAVES_AT_ONCE];
    size_t len[LEAVES_AT_ONCE];
    while (n > 0) {
        int count = 0;
        for (; count < LEAVES_AT_ONCE && n > 0; count++) {
            s[count] = &streams[count];
            ckpt_sha256_stream_init(s[count]);
            ckpt_sha256_stream_update2(s[count], "", 1, NULL, NULL, 0);
            at[count] = p;
            len[count] = (size_t)ckpt_min_u64(n, CKPT_LEAF_BYTES);
            p += len[count];
            n -= len[count];
        }
        ckpt_sha256_stream_update_many(s, at, len, count);
        for (int i = 0; i < count; i++, out += CKPT_SHA256_LEN)
            ckpt_sha256_stream_final(s[i], out);
    }
}

/* The item that piece `number` belongs to. */
static size_t item_of(const load_job *j, uint64_t number)
{
    size_t lo = 0, hi = j->n;
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (j->first[mid] <= number)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static ckpt_status load(const load_job *j, const ckpt_eng_load_item *item, uint64_t at, int worker,
                        ckpt_err *err)
{
    ckpt_cuda_pipe *pipe = j->pipes[worker];
    ckpt_scratch scratch = {.buf = j->scratch + (uint64_t)worker * SCRATCH, .cap = SCRATCH};
    size_t n = (size_t)ckpt_min_u64(j->piece, item->bytes - at);
    void *buffer = NULL;
    ckpt_status status;
    CKPT_CHECK(j->api->pipe_next(pipe, &buffer, err));
    CKPT_CHECK(ckpt_gather_run(j->src, item->gather, item->from + at, n, buffer, &scratch, err));
    if (item->leaves != NULL)
        hash_leaves(buffer, n, item->leaves + at / CKPT_LEAF_BYTES * CKPT_SHA256_LEN);
    if (item->widen)
        status = j->api->pipe_widen(pipe, (float *)item->to + at / 2, (int64_t)(n / 2), err);
    else
        status = j->api->pipe_send(pipe, (uint8_t *)item->to + at, n, err);
done:
    return status;
}

static void load_piece(void *arg, int64_t number, int worker)
{
    const load_job *j = arg;
    if (j->status[worker] != CKPT_OK)
        return;
    size_t i = item_of(j, (uint64_t)number);
    const ckpt_eng_load_item *item = &j->items[i];
    uint64_t at = ((uint64_t)number - j->first[i]) * j->piece;
    j->status[worker] = load(j, item, at, worker, &j->errs[worker]);
    if (j->status[worker] != CKPT_OK)
        ckpt_err_frame(&j->errs[worker], "tensor %s", item->name);
}

/* An item of no bytes has no piece. */
static void count_pieces(load_job *j)
{
    uint64_t all = 0;
    for (size_t i = 0; i < j->n; i++) {
        j->first[i] = all;
        all += j->items[i].bytes / j->piece + (j->items[i].bytes % j->piece != 0);
    }
    j->first[j->n] = all;
}

static ckpt_status run(const ckpt_eng *e, load_job *j, ckpt_err *err)
{
    const ckpt_cuda_card *card = &e->device->card;
    ckpt_status status;
    for (int i = 0; i < e->threads; i++)
        CKPT_CHECK(j->api->pipe_open(card, (size_t)j->piece, &j->pipes[i], err));
    CKPT_CHECK(j->api->wait(card, err)); /* zeros come before what is sent */
    ckpt_eng_parallel(e, (int64_t)j->first[j->n], load_piece, j);
    for (int i = 0; i < e->threads; i++) {
        if (j->status[i] != CKPT_OK) {
            if (err != NULL)
                *err = j->errs[i];
            status = j->status[i];
            goto done;
        }
        CKPT_CHECK(j->api->pipe_wait(j->pipes[i], err));
    }
done:
    for (int i = 0; i < e->threads; i++)
        j->api->pipe_close(j->pipes[i]);
    return status;
}

ckpt_status ckpt_eng_load(const ckpt_eng *e, ckpt_source *src, const ckpt_eng_load_item *items,
                          size_t n, const ckpt_eng_load_opts *opts, ckpt_err *err)
{
    ckpt_eng with = *e;
    ckpt_status status;
    if (opts != NULL && opts->threads > 0)
        with.threads = opts->threads;
    const size_t threads = (size_t)with.threads;
    load_job j = {.api = e->device->api, .src = src, .items = items, .n = n, .piece = PIECE};
    for (size_t i = 0; i < n; i++)
        if (items[i].leaves != NULL)
            j.piece = PIECE_HASHED;
    if (opts != NULL && opts->piece > 0)
        j.piece = opts->piece / CKPT_LEAF_BYTES * CKPT_LEAF_BYTES;
    if (j.piece == 0)
        return ckpt_fail(err, CKPT_E_USAGE, "pieces of %zu bytes, expected at least %llu",
                         opts->piece, (unsigned long long)CKPT_LEAF_BYTES);
    j.first = calloc(n + 1, sizeof *j.first);
    j.pipes = calloc(threads, sizeof(ckpt_cuda_pipe *));
    j.errs = calloc(threads, sizeof *j.errs);
    j.status = calloc(threads, sizeof *j.status);
    j.scratch = malloc(threads * SCRATCH);
    if (!j.first || !j.pipes || !j.errs || !j.status || !j.scratch) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading tensors");
        goto done;
    }
    count_pieces(&j);
    status = run(&with, &j, err);
done:
    free(j.first);
    free(j.pipes);
    free(j.errs);
    free(j.status);
    free(j.scratch);
    return status;
}
