#include "job.h"
#include "checked.h"
#include "gather.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PIECE_MIN ((uint64_t)64 << 10)
#define SCRATCH_MAX ((uint64_t)1 << 20)

static int default_threads(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long n = cores > 0 ? 2 * cores : 4;
    return (int)(n < 4 ? 4 : n > 16 ? 16 : n);
}

ckpt_status ckpt_job_open(ckpt_job *j, const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint64_t memory = opts != NULL && opts->memory > 0 ? opts->memory : (uint64_t)1 << 30;
    int n = opts != NULL && opts->threads > 0 ? opts->threads : default_threads();
    uint64_t piece = j->piece > 0 ? j->piece : CKPT_PIECE_MAX, scratch = SCRATCH_MAX;
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
    void *arena =
        mmap(NULL, j->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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
        ckpt_worker *w = &j->workers[i];
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

void ckpt_job_close(ckpt_job *j)
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

static void job_fail(ckpt_job *j, ckpt_status status, const ckpt_err *err)
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

void ckpt_job_advance(ckpt_worker *w, uint64_t bytes)
{
    ckpt_job *j = w->job;
    uint64_t done = atomic_fetch_add(&j->done_bytes, bytes) + bytes;
    if (w->index == 0 && j->progress != NULL)
        j->progress->tick(j->progress->self, done, j->total_bytes, w->now);
}

static void *work(void *arg)
{
    ckpt_worker *w = arg;
    ckpt_job *j = w->job;
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

ckpt_status ckpt_job_run(ckpt_job *j)
{
    int started = 1;
    for (; started < j->n_workers; started++)
        if (pthread_create(&j->workers[started].thread, NULL, work, &j->workers[started]) != 0)
            break; /* fewer workers do the same work */
    work(&j->workers[0]);
    for (int i = 1; i < started; i++)
        pthread_join(j->workers[i].thread, NULL);
    return j->status;
}

/* ---- leaves ------------------------------------------------------------------------------------ */

#define SLICE_MAX ((uint64_t)64 << 10) /* of one leaf: a group's slices together fit the L2 cache */

size_t ckpt_leaf_groups(const ckpt_leaf_list *list)
{
    return (list->n + CKPT_LEAF_GROUP - 1) / CKPT_LEAF_GROUP;
}

static size_t group_end(const ckpt_leaf_list *list, size_t group)
{
    return ckpt_min_u64((group + 1) * CKPT_LEAF_GROUP, list->n);
}

uint64_t ckpt_leaf_group_bytes(const ckpt_leaf_list *list, size_t group)
{
    uint64_t sum = 0;
    for (size_t i = group * CKPT_LEAF_GROUP; i < group_end(list, group); i++)
        sum += list->leaves[i].bytes;
    return sum;
}

/* Slice by slice: gather the next bytes of every leaf, then advance all hashes together. */
/* `count` leaves side by side, `slice` bytes of each at a time. */
static ckpt_status hash_some(ckpt_worker *w, ckpt_source *src, const ckpt_leaf *leaf, int count,
                             uint64_t slice, ckpt_err *err)
{
    uint64_t done = 0;
    ckpt_sha256_stream streams[CKPT_LEAF_GROUP], *s[CKPT_LEAF_GROUP];
    const void *p[CKPT_LEAF_GROUP];
    size_t n[CKPT_LEAF_GROUP];
    for (int i = 0; i < count; i++) {
        s[i] = &streams[i];
        ckpt_sha256_stream_init(s[i]);
        p[i] = ""; /* RFC 6962: a leaf's hash starts with a zero byte */
        n[i] = 1;
    }
    ckpt_sha256_stream_update_many(s, p, n, count);
    for (bool more = true; more; done += slice) {
        more = false;
        for (int i = 0; i < count; i++) {
            uint8_t *at = w->buf + (uint64_t)i * slice;
            n[i] = done < leaf[i].bytes ? (size_t)ckpt_min_u64(slice, leaf[i].bytes - done) : 0;
            p[i] = at;
            if (n[i] == 0)
                continue;
            more = true;
            ckpt_status status =
                ckpt_gather_run(src, leaf[i].gather, leaf[i].index * CKPT_LEAF_BYTES + done, n[i],
                                at, &w->scratch, err);
            if (status != CKPT_OK)
                return status;
        }
        ckpt_sha256_stream_update_many(s, p, n, count);
    }
    for (int i = 0; i < count; i++)
        ckpt_sha256_stream_final(s[i], leaf[i].out);
    return CKPT_OK;
}

/* A source that decodes chunks keeps a few: leaves one after the other meet each chunk once, sixteen
 * side by side would have it decoded again for every slice of them. */
ckpt_status ckpt_hash_leaves(ckpt_worker *w, ckpt_source *src, const ckpt_leaf *leaf, int count,
                             ckpt_err *err)
{
    int lanes = src->n_virtual > 0 ? 1 : CKPT_LEAF_GROUP;
    uint64_t piece = w->job->piece, slice = ckpt_min_u64(piece / CKPT_LEAF_GROUP, SLICE_MAX);
    slice = lanes == 1 ? ckpt_min_u64(piece, CKPT_LEAF_BYTES) : slice;
    w->now = leaf->gather->name;
    for (int i = 0; i < count; i += lanes) {
        ckpt_status status =
            hash_some(w, src, leaf + i, count - i < lanes ? count - i : lanes, slice, err);
        if (status != CKPT_OK)
            return status;
    }
    for (int i = 0; i < count; i++)
        ckpt_job_advance(w, leaf[i].bytes);
    return CKPT_OK;
}

ckpt_status ckpt_hash_leaf_group(ckpt_worker *w, ckpt_source *src, const ckpt_leaf_list *list,
                                 size_t group, ckpt_err *err)
{
    size_t first = group * CKPT_LEAF_GROUP;
    return ckpt_hash_leaves(w, src, list->leaves + first, (int)(group_end(list, group) - first),
                            err);
}

ckpt_status ckpt_leaves_divide(ckpt_leaf_list *list, const ckpt_share *share, ckpt_leaf_shares *out,
                               ckpt_err *err)
{
    uint64_t total = 0, at = 0;
    size_t kept = 0;
    if (ckpt_share_alone(share))
        return CKPT_OK;
    out->n = list->n;
    out->owner = calloc(list->n + 1, sizeof *out->owner);
    out->all = calloc(list->n + 1, sizeof *out->all);
    if (out->owner == NULL || out->all == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < list->n; i++)
        total += list->leaves[i].bytes;
    for (size_t i = 0; i < out->n; at += out->all[i++].bytes) {
        out->all[i] = list->leaves[i];
        out->owner[i] = ckpt_share_of(share, at, out->all[i].bytes, total);
        if (out->owner[i] == share->rank)
            list->leaves[kept++] = out->all[i];
    }
    list->n = kept;
    return CKPT_OK;
}

ckpt_status ckpt_leaves_collect(const ckpt_leaf_shares *shares, const ckpt_share *share,
                                ckpt_err *err)
{
    if (ckpt_share_alone(share))
        return CKPT_OK;
    uint8_t *table = malloc(shares->n * CKPT_SHA256_LEN + 1);
    if (table == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for leaf hashes");
    for (size_t i = 0; i < shares->n; i++)
        memcpy(table + i * CKPT_SHA256_LEN, shares->all[i].out, CKPT_SHA256_LEN);
    ckpt_status status =
        ckpt_share_table(share, table, shares->n, CKPT_SHA256_LEN, shares->owner, err);
    for (size_t i = 0; status == CKPT_OK && i < shares->n; i++)
        memcpy(shares->all[i].out, table + i * CKPT_SHA256_LEN, CKPT_SHA256_LEN);
    free(table);
    return status;
}

void ckpt_leaf_shares_free(ckpt_leaf_shares *shares)
{
    free(shares->all);
    free(shares->owner);
    *shares = (ckpt_leaf_shares){0};
}

/* Of the elements: a tensor's bytes need not be a multiple of 8 elements. */
static uint64_t written_bytes(const ckpt_gather *g)
{
    if (g->from == g->to)
        return g->bytes;
    uint64_t from = (uint64_t)ckpt_dtype_get(g->from)->bits / 8;
    uint64_t to = (uint64_t)ckpt_dtype_get(g->to)->bits / 8; /* what casts has whole bytes */
    return g->bytes / from * to;
}

ckpt_status ckpt_add_leaves(ckpt_leaf_list *list, const ckpt_gather *g, ckpt_arena *arena,
                            ckpt_tensor_hash *out, ckpt_err *err)
{
    uint64_t bytes = written_bytes(g), n = ckpt_leaf_count(bytes);
    out->n_leaves = n;
    out->leaves = ckpt_arena_alloc(arena, (size_t)n * CKPT_SHA256_LEN + 1);
    if (out->leaves == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for leaf hashes");
    for (uint64_t i = 0; i < n; i++) {
        void *p = list->leaves;
        ckpt_status status = ckpt_grow(&p, &list->cap, list->n + 1, sizeof *list->leaves, err);
        list->leaves = p;
        if (status != CKPT_OK)
            return status;
        list->leaves[list->n++] = (ckpt_leaf){
            .gather = g,
            .index = i,
            .bytes = (uint32_t)ckpt_min_u64(CKPT_LEAF_BYTES, bytes - i * CKPT_LEAF_BYTES),
            .out = out->leaves + i * CKPT_SHA256_LEN};
    }
    return CKPT_OK;
}

ckpt_status ckpt_finish_root(const ckpt_tensor_hash *hashes, const char *const *names, size_t n,
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
