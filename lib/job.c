#include "job.h"
#include "checked.h"
#include "gather.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PIECE_MIN ((uint64_t)64 << 10)
#define SCRATCH_MAX ((uint64_t)1 << 20)
#define SLOT_FAIR ((uint64_t)2 << 20)

static int online(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 2 : n > INT_MAX ? INT_MAX : (int)n;
}

static int default_threads(void)
{
    int n = online();
    return n < 4 ? 8 : n > 8 ? 16 : 2 * n;
}

int ckpt_job_cores(const ckpt_stream_opts *opts)
{
    int threads = opts != NULL && opts->threads > 0 ? opts->threads : default_threads();
    return threads < online() ? threads : online();
}

typedef struct sizes {
    int n;                         /* workers */
    uint64_t piece, scratch, slot; /* bytes */
    size_t keep;
} sizes;

static uint64_t total(const sizes *s)
{
    return (uint64_t)s->n * (s->piece + s->scratch + s->slot) + s->keep * s->slot;
}

/* One step towards less memory; false: there is none. Large slots first, then what is kept beside the
 * workers', then workers, then everything. */
static bool shrink(sizes *s)
{
    if (s->slot > SLOT_FAIR) {
        s->slot /= 2;
    } else if (s->slot > 0 && s->keep > (size_t)s->n) {
        s->keep /= 2;
    } else if (s->n > 2) {
        s->n = (s->n + 1) / 2;
    } else if (s->piece > PIECE_MIN || s->slot > PIECE_MIN) {
        s->piece = ckpt_max_u64(s->piece / 2, PIECE_MIN);
        s->slot = s->slot > 0 ? ckpt_max_u64(s->slot / 2, PIECE_MIN) : 0;
        s->scratch = ckpt_max_u64(s->piece / 4, PIECE_MIN);
    } else if (s->slot > 0 && s->keep > 0) {
        s->keep = 0;
    } else {
        return false;
    }
    return true;
}

static void *get_memory(const sizes *s)
{
    return mmap(NULL, total(s), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

ckpt_status ckpt_job_open(ckpt_job *j, const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint64_t memory = opts != NULL && opts->memory > 0 ? opts->memory : (uint64_t)1 << 30;
    int n = opts != NULL && opts->threads > 0 ? opts->threads : default_threads();
    sizes s = {n, j->piece > 0 ? j->piece : CKPT_PIECE_MAX, SCRATCH_MAX, j->slot, j->keep};
    while (total(&s) > memory && shrink(&s))
        ;
    void *arena = get_memory(&s); /* what the system does not give is not needed: less will do */
    while (arena == MAP_FAILED && shrink(&s))
        arena = get_memory(&s);
    n = s.n;
    uint64_t piece = s.piece, scratch = s.scratch;
    j->piece = piece;
    j->slot = s.slot;
    j->keep = s.keep;
    j->n_workers = n;
    j->progress = opts != NULL ? opts->progress : NULL;
    j->err = err;
    j->arena_bytes = total(&s);
    j->workers = calloc((size_t)n, sizeof *j->workers);
    if (arena == MAP_FAILED || j->workers == NULL) {
        if (arena != MAP_FAILED)
            munmap(arena, j->arena_bytes);
        free(j->workers);
        j->workers = NULL;
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d buffers", n);
    }
    ckpt_large_pages(arena, j->arena_bytes);
    j->arena = arena;
    j->slots = j->arena + (uint64_t)n * (piece + scratch);
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

ckpt_status ckpt_leaf_bytes(ckpt_worker *w, ckpt_source *src, const ckpt_leaf *leaf, uint64_t done,
                            size_t n, uint8_t *buf, const uint8_t **at, ckpt_slot **pin,
                            ckpt_err *err)
{
    uint64_t lo = leaf->index * CKPT_LEAF_BYTES + done;
    *pin = NULL;
    *at = leaf->written != NULL ? ckpt_written_pin(leaf->written, leaf->gather, lo, n, pin) : NULL;
    if (*at != NULL)
        return CKPT_OK;
    *at = buf;
    if (leaf->written != NULL)
        src = &leaf->written->src;
    return ckpt_gather_run(src, leaf->gather, lo, n, buf, &w->scratch, err);
}

/* `count` leaves side by side, `slice` bytes of each at a time: get the next bytes of every leaf, then
 * advance all hashes together. */
static ckpt_status hash_some(ckpt_worker *w, ckpt_source *src, const ckpt_leaf *leaf, int count,
                             uint64_t slice, ckpt_err *err)
{
    ckpt_sha256_stream state[CKPT_LEAF_GROUP], *s[CKPT_LEAF_GROUP];
    ckpt_status status = CKPT_OK;
    bool more = true;
    for (int i = 0; i < count; i++) {
        s[i] = &state[i];
        ckpt_sha256_stream_init(s[i]);
        ckpt_sha256_stream_update2(s[i], "", 1, NULL, NULL, 0); /* RFC 6962: a leaf starts with 0 */
    }
    for (uint64_t done = 0; more && status == CKPT_OK; done += slice) {
        const void *p[CKPT_LEAF_GROUP];
        ckpt_slot *pin[CKPT_LEAF_GROUP] = {NULL};
        size_t n[CKPT_LEAF_GROUP] = {0};
        more = false;
        for (int i = 0; i < count && status == CKPT_OK; i++) {
            const uint8_t *at = w->buf + (uint64_t)i * slice;
            n[i] = done < leaf[i].bytes ? (size_t)ckpt_min_u64(slice, leaf[i].bytes - done) : 0;
            if (n[i] > 0)
                status = ckpt_leaf_bytes(w, src, &leaf[i], done, n[i], w->buf + (uint64_t)i * slice,
                                         &at, &pin[i], err);
            p[i] = at;
            more = more || n[i] > 0;
        }
        if (more && status == CKPT_OK)
            ckpt_sha256_stream_update_many(s, p, n, count);
        for (int i = 0; i < count; i++)
            if (pin[i] != NULL)
                ckpt_window_unpin(&leaf[i].written->window, pin[i]);
    }
    for (int i = 0; i < count && status == CKPT_OK; i++)
        ckpt_sha256_stream_final(s[i], leaf[i].out);
    return status;
}

/* A source that decodes chunks keeps a few: leaves one after the other meet each chunk once, sixteen
 * side by side would have it decoded again for every slice of them. */
ckpt_status ckpt_hash_leaves(ckpt_worker *w, ckpt_source *src, const ckpt_leaf *leaf, int count,
                             ckpt_err *err)
{
    bool decodes = false;
    w->now = leaf->gather->name;
    for (int i = 0; i < count; i++)
        decodes = decodes || (leaf[i].written == NULL && src->n_virtual > 0);
    int lanes = decodes ? 1 : CKPT_LEAF_GROUP;
    uint64_t piece = w->job->piece, slice = ckpt_min_u64(piece / CKPT_LEAF_GROUP, SLICE_MAX);
    slice = lanes == 1 ? ckpt_min_u64(piece, CKPT_LEAF_BYTES) : slice;
    for (int i = 0; i < count; i += lanes) {
        ckpt_status status =
            hash_some(w, src, leaf + i, count - i < lanes ? count - i : lanes, slice, err);
        if (status != CKPT_OK)
            return status;
    }
    for (int i = 0; i < count; i++)
        if (leaf[i].written == NULL) /* else it is the pieces that count */
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

typedef struct all_leaves {
    ckpt_source *src;
    const ckpt_leaf_list *list;
} all_leaves;

static ckpt_status hash_item(ckpt_worker *w, size_t item, ckpt_err *err)
{
    const all_leaves *a = w->job->self;
    return ckpt_hash_leaf_group(w, a->src, a->list, item, err);
}

ckpt_status ckpt_hash_all(ckpt_source *src, const ckpt_leaf_list *list,
                          const ckpt_stream_opts *opts, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    all_leaves a = {src, list};
    ckpt_job j = {.run = hash_item, .self = &a, .n_items = ckpt_leaf_groups(list)};
    if (list->n == 0)
        return CKPT_OK;
    for (size_t i = 0; i < list->n; i++)
        j.total_bytes += list->leaves[i].bytes;
    CKPT_CHECK(ckpt_job_open(&j, opts, err));
    CKPT_CHECK(ckpt_job_run(&j));
done:
    ckpt_job_close(&j);
    return status;
}

ckpt_status ckpt_leaves_by_due(ckpt_leaf_list *list, uint32_t n_items, ckpt_err *err)
{
    size_t *at = calloc((size_t)n_items + 1, sizeof *at);
    ckpt_leaf *sorted = malloc((list->n + 1) * sizeof *sorted);
    ckpt_status status = CKPT_OK;
    if (at == NULL || sorted == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for leaf hashes");
        goto done;
    }
    for (size_t i = 0; i < list->n; i++)
        at[list->leaves[i].due + 1]++;
    for (uint32_t k = 0; k < n_items; k++)
        at[k + 1] += at[k];
    for (size_t i = 0; i < list->n; i++)
        sorted[at[list->leaves[i].due]++] = list->leaves[i];
    free(list->leaves);
    list->leaves = sorted;
    list->cap = list->n + 1;
    sorted = NULL;
done:
    free(at);
    free(sorted);
    return status;
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

ckpt_status ckpt_add_leaves(ckpt_leaf_list *list, const ckpt_gather *g, ckpt_written *written,
                            ckpt_arena *arena, ckpt_tensor_hash *out, ckpt_err *err)
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
            .written = written,
            .index = i,
            .first = CKPT_NO_ITEM,
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
