/* Decoded chunks of HDF5 datasets, kept as long as there is room: a tensor is read in slices, in
 * several windows and by several threads, and must not be decompressed for each. One thread decodes a
 * chunk while others wait for it or decode other chunks. */
#include "hdf5_file.h"

#include "checked.h"
#include "io.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_BYTES ((uint64_t)128 << 20)
enum { MIN_SLOTS = 4, MAX_SLOTS = 512 };

typedef struct slot {
    const ckpt_hdf5_virtual *dataset; /* NULL: empty */
    uint64_t chunk;
    uint8_t *data;    /* chunk_max bytes, allocated when first used */
    unsigned reading; /* of the source that it was decoded in */
    uint64_t used;    /* time of last use */
    int readers;      /* while > 0 the slot stays */
    bool ready;       /* else its first reader is decoding */
} slot;

struct ckpt_hdf5_cache {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    slot slots[MAX_SLOTS];
    int n; /* 0 before the first use */
    uint64_t clock;
};

ckpt_hdf5_cache *ckpt_hdf5_cache_new(void)
{
    ckpt_hdf5_cache *c = calloc(1, sizeof *c);
    if (c != NULL) {
        pthread_mutex_init(&c->lock, NULL);
        pthread_cond_init(&c->changed, NULL);
    }
    return c;
}

void ckpt_hdf5_cache_free(ckpt_hdf5_cache *c)
{
    if (c == NULL)
        return;
    for (int i = 0; i < MAX_SLOTS; i++)
        free(c->slots[i].data);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* ---- one chunk ---------------------------------------------------------------------------------- */

static ckpt_status decode(const ckpt_source *src, const ckpt_hdf5_virtual *v, uint64_t chunk,
                          uint8_t *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_hdf5_chunk *c = &v->chunks[chunk];
    uint8_t *stored = malloc((size_t)c->size + 1);
    if (stored == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a chunk of %u bytes", c->size);
    CKPT_CHECK(ckpt_pread_full(src->files[0].fd, stored, c->size, c->offset, err));
    CKPT_TRY(
        ckpt_hdf5_decode(&v->pipeline, c->mask, stored, c->size, out, (size_t)v->chunk_bytes, err),
        "dataset '%s': chunk %llu at offset %llu", v->name, (unsigned long long)chunk,
        (unsigned long long)c->offset);
done:
    free(stored);
    return status;
}

/* ---- slots -------------------------------------------------------------------------------------- */

static bool holds(const slot *s, const ckpt_source *src, const ckpt_hdf5_virtual *v, uint64_t chunk)
{
    return s->dataset == v && s->chunk == chunk && s->reading == src->reading;
}

/* The slot that has the chunk, or one that may be used for it, or NULL when all are being read. */
static slot *choose(ckpt_hdf5_cache *c, const ckpt_source *src, const ckpt_hdf5_virtual *v,
                    uint64_t chunk)
{
    slot *oldest = NULL;
    for (int i = 0; i < c->n; i++) {
        slot *s = &c->slots[i];
        if (holds(s, src, v, chunk))
            return s;
        if (s->readers == 0 && (oldest == NULL || s->used < oldest->used))
            oldest = s;
    }
    return oldest;
}

static void size_cache(ckpt_hdf5_cache *c, const ckpt_source *src)
{
    const ckpt_hdf5_file *f = src->self;
    uint64_t bytes = src->cache_bytes > 0 ? src->cache_bytes : DEFAULT_BYTES;
    uint64_t n = bytes / (f->chunk_max > 0 ? f->chunk_max : 1);
    c->n = n < MIN_SLOTS ? MIN_SLOTS : n > MAX_SLOTS ? MAX_SLOTS : (int)n;
}

/* Decode into a slot that was just taken; the lock is held before and after, not during. */
static ckpt_status fill(ckpt_source *src, slot *s, ckpt_err *err)
{
    const ckpt_hdf5_file *f = src->self;
    ckpt_status status = CKPT_OK;
    pthread_mutex_unlock(&f->cache->lock);
    if (s->data == NULL)
        s->data = malloc(f->chunk_max);
    if (s->data == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a chunk");
    else
        status = decode(src, s->dataset, s->chunk, s->data, err);
    pthread_mutex_lock(&f->cache->lock);
    s->ready = status == CKPT_OK;
    if (status != CKPT_OK) {
        s->dataset = NULL;
        s->readers = 0;
    }
    pthread_cond_broadcast(&f->cache->changed);
    return status;
}

/* Pin the decoded chunk; the caller unpins it. */
static ckpt_status acquire(ckpt_source *src, const ckpt_hdf5_virtual *v, uint64_t chunk, slot **out,
                           ckpt_err *err)
{
    const ckpt_hdf5_file *f = src->self;
    ckpt_hdf5_cache *c = f->cache;
    ckpt_status status = CKPT_OK;
    pthread_mutex_lock(&c->lock);
    if (c->n == 0)
        size_cache(c, src);
    for (;;) {
        slot *s = choose(c, src, v, chunk);
        bool found = s != NULL && holds(s, src, v, chunk);
        if (s == NULL || (found && !s->ready)) {
            pthread_cond_wait(&c->changed, &c->lock);
            continue;
        }
        if (!found) {
            *s = (slot){.dataset = v,
                        .chunk = chunk,
                        .reading = src->reading,
                        .data = s->data,
                        .readers = 1};
            status = fill(src, s, err);
        } else {
            s->readers++;
        }
        s->used = ++c->clock;
        *out = s;
        break;
    }
    pthread_mutex_unlock(&c->lock);
    return status;
}

static void release(ckpt_hdf5_cache *c, slot *s)
{
    pthread_mutex_lock(&c->lock);
    if (--s->readers == 0)
        pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* ---- reading ------------------------------------------------------------------------------------ */

static const ckpt_hdf5_virtual *dataset_at(const ckpt_hdf5_file *f, uint64_t offset)
{
    size_t lo = 0, hi = f->n_virtuals;
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (f->virtuals[mid].base <= offset)
            lo = mid;
        else
            hi = mid;
    }
    return &f->virtuals[lo];
}

/* Copy up to n bytes at `at` of a dataset, those that lie in one chunk; *took tells how many. */
static ckpt_status read_part(ckpt_source *src, const ckpt_hdf5_virtual *v, uint64_t at, size_t n,
                             uint8_t *out, size_t *took, ckpt_err *err)
{
    const ckpt_hdf5_file *f = src->self;
    slot *s;
    if (v->inline_bytes != NULL) {
        *took = (size_t)ckpt_min_u64(n, v->bytes - at);
        memcpy(out, v->inline_bytes + at, *took);
        return CKPT_OK;
    }
    uint64_t block = at / v->block, rest = at % v->block;
    uint64_t in_block = rest / v->chunk_bytes, skip = rest % v->chunk_bytes;
    uint64_t room = ckpt_min_u64(v->chunk_bytes - skip, v->block - rest);
    *took = (size_t)ckpt_min_u64(n, room);
    ckpt_status status = acquire(src, v, block * v->per_block + in_block, &s, err);
    if (status != CKPT_OK)
        return status;
    memcpy(out, s->data + skip, *took);
    release(f->cache, s);
    return CKPT_OK;
}

ckpt_status ckpt_hdf5_read_at(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                              ckpt_err *err)
{
    const ckpt_hdf5_file *f = src->self;
    uint8_t *out = buf;
    if (file == 0)
        return ckpt_pread_full(src->files[0].fd, buf, n, offset, err);
    while (n > 0) { /* inside the file's size, so inside some dataset */
        const ckpt_hdf5_virtual *v = dataset_at(f, offset);
        size_t took = 0;
        ckpt_status status = read_part(src, v, offset - v->base, n, out, &took, err);
        if (status != CKPT_OK)
            return status;
        out += took;
        offset += took;
        n -= took;
    }
    return CKPT_OK;
}
