/* dp_reshardable -> fully_reshardable.
 *
 * Megatron-Core's distributed optimizer keeps, per model-parallel rank m and parameter dtype, one
 * flat buffer of all parameters of that rank, last module first, each starting at a multiple of 64
 * elements; the buffer is cut into buckets, each stored without its last padding as the 1-D tensor
 *   optimizer.distributed.dp_group_idx_M.gbuf_idx_B.dtype_(PARAM, GRAD).bucket_idx_K.STATE
 * STATE = param (the f32 master copy), exp_avg, exp_avg_sq. Which parameter lies where is not
 * stored. It is found, and proved, by values: the master copy rounded to the parameter's dtype is the
 * parameter, so at every position of a bucket the chunk of a stored weight is sought that equals it
 * in all elements. A rank's parameter is one chunk, or several in a row where it is stored in
 * sections or halves. Where chunks of equal values fit, the module order decides: later layers first,
 * within one tensor in storage order; what that does not tell apart is refused. Copies of one
 * parameter on several tensor-parallel ranks are stored once; the first is taken.
 * Source: megatron/core/distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py of
 * core_r0.16.1; megatron-dist-ckpt.md section 5.1. */
#include "rescue.h"

#include "checked.h"
#include "flat.h"
#include "optim_names.h"

#include <stdlib.h>
#include <string.h>

#define MARKER "optimizer.distributed.dp_group_idx_"
#define ALIGN 64   /* elements: start of a parameter */
#define FRONT 4    /* elements by which candidates are found */
#define BLOCK 4096 /* elements compared at once */
#define MAX_STATES 8
#define NONE SIZE_MAX

/* One chunk of a stored weight. */
typedef struct piece {
    uint32_t tensor, chunk;
    int64_t n;     /* elements */
    size_t next;   /* in its bucket of the table */
    int64_t group; /* dp_group_idx in which it was found last, or -1 */
    /* where it was found first: */
    size_t bucket; /* index into run->buckets, or NONE */
    int64_t at;
} piece;

/* The states of one flat bucket: src->tensors[first .. first + n). */
typedef struct bucket {
    size_t first, n, master;
    int64_t group;
    ckpt_dtype dtype; /* of its parameters */
} bucket;

typedef struct run {
    ckpt_source *src;
    piece *pieces;
    size_t n_pieces, cap_pieces;
    size_t *table; /* heads of pieces by the hash of their front */
    size_t table_size;
    bucket *buckets;
    size_t n_buckets, cap_buckets;
    uint8_t a[BLOCK * 8], b[BLOCK * 8], c[BLOCK * 8];
} run;

bool ckpt_rescue_needed(const ckpt_source *src)
{
    for (size_t i = 0; i < src->n_tensors; i++)
        if (strstr(src->tensors[i].name, MARKER) != NULL)
            return true;
    return false;
}

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* ---- buckets ----------------------------------------------------------------------------------- */

static const char *state_word(const ckpt_tensor *t)
{
    const char *dot = strrchr(t->name, '.');
    return dot != NULL ? dot + 1 : t->name;
}

/* "…dp_group_idx_M.…dtype_(torch.bfloat16, torch.float32).…" */
static ckpt_status parse_bucket(const ckpt_tensor *t, bucket *b, ckpt_err *err)
{
    const char *at = strstr(t->name, MARKER), *type = strstr(t->name, "dtype_(torch.");
    char *end;
    b->group = strtoll(at + sizeof MARKER - 1, &end, 10);
    size_t n = type != NULL ? strcspn(type + 13, ",") : 0;
    char name[32] = "";
    if (n > 0 && n < sizeof name)
        memcpy(name, type + 13, n);
    if (*end != '.' || b->group < 0 || !ckpt_dtype_from_torch(name, &b->dtype))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is no dp_reshardable bucket", t->name);
    if (!ckpt_dtype_castable(CKPT_F32, b->dtype) || ckpt_dtype_get(b->dtype)->bits < 16)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "'%s': parameters of dtype %s are not their rounded master copy", t->name,
                         ckpt_dtype_get(b->dtype)->name);
    return CKPT_OK;
}

/* States of one bucket are neighbours in name order: equal up to the last dot. */
static ckpt_status find_buckets(run *r, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_source *src = r->src;
    for (size_t i = 0; i < src->n_tensors;) {
        const ckpt_tensor *t = &src->tensors[i];
        size_t stem = (size_t)(state_word(t) - t->name), n = 1;
        bucket b = {.first = i, .master = NONE};
        if (strstr(t->name, MARKER) == NULL) {
            i++;
            continue;
        }
        CKPT_CHECK(parse_bucket(t, &b, err));
        while (i + n < src->n_tensors && strncmp(src->tensors[i + n].name, t->name, stem) == 0 &&
               state_word(&src->tensors[i + n]) == src->tensors[i + n].name + stem)
            n++;
        b.n = n;
        for (size_t k = i; k < i + n; k++) {
            const ckpt_tensor *s = &src->tensors[k];
            if (s->rank != 1 || s->dims[0] != t->dims[0] || n > MAX_STATES)
                return ckpt_fail(err, CKPT_E_FORMAT,
                                 "tensor '%s': not a state of the bucket of '%s'", s->name,
                                 t->name);
            if (strcmp(state_word(s), "param") == 0 && s->dtype == CKPT_F32 && !s->big_endian)
                b.master = k;
        }
        if (b.master == NONE)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s': no f32 master copy beside it, so its parameters cannot be told",
                             t->name);
        void *p = r->buckets;
        status = ckpt_grow(&p, &r->cap_buckets, r->n_buckets + 1, sizeof b, err);
        r->buckets = p;
        if (status != CKPT_OK)
            goto done;
        r->buckets[r->n_buckets++] = b;
        i += n;
    }
done:
    return status;
}

/* n elements from `at` of a flat tensor whose chunks are in order. */
static ckpt_status read_flat(run *r, const ckpt_tensor *t, int64_t at, int64_t n, uint8_t *out,
                             ckpt_err *err)
{
    size_t lo = 0, hi = t->n_chunks;
    uint64_t elem = (uint64_t)ckpt_dtype_get(t->dtype)->bits / 8;
    while (lo + 1 < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (t->chunks[mid].lo[0] <= at)
            lo = mid;
        else
            hi = mid;
    }
    for (; n > 0 && lo < t->n_chunks; lo++) {
        const ckpt_chunk *c = &t->chunks[lo];
        int64_t skip = at - c->lo[0], take = ckpt_min_i64(n, c->len[0] - skip);
        if (c->stride != NULL && c->len[0] > 1 && c->stride[0] != 1)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is stored with gaps", t->name);
        ckpt_status status = ckpt_source_read(r->src, c->file, out, (size_t)take * (size_t)elem,
                                              c->offset + (uint64_t)skip * elem, err);
        if (status != CKPT_OK)
            return status;
        out += (uint64_t)take * elem;
        at += take;
        n -= take;
    }
    return CKPT_OK;
}

/* ---- pieces ------------------------------------------------------------------------------------ */

static bool row_major(const ckpt_tensor *t, const ckpt_chunk *c)
{
    int64_t want = 1;
    for (int d = t->rank; c->stride != NULL && d-- > 0; want *= c->len[d])
        if (c->len[d] > 1 && c->stride[d] != want)
            return false;
    return true;
}

static ckpt_status read_piece(run *r, const piece *p, int64_t at, int64_t n, uint8_t *out,
                              ckpt_err *err)
{
    const ckpt_tensor *t = &r->src->tensors[p->tensor];
    const ckpt_chunk *c = &t->chunks[p->chunk];
    uint64_t elem = (uint64_t)ckpt_dtype_get(t->dtype)->bits / 8;
    return ckpt_source_read(r->src, c->file, out, (size_t)n * (size_t)elem,
                            c->offset + (uint64_t)at * elem, err);
}

/* FNV-1a over the front of a piece or bucket in the parameters' dtype; its length counts. */
static uint64_t front_hash(const uint8_t *p, size_t elem, int64_t n, ckpt_dtype dtype)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325) ^ ((uint64_t)dtype << 8) ^ (uint64_t)n;
    for (size_t i = 0; i < elem * (size_t)n; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h ^ h >> 29;
}

static ckpt_status add_pieces(run *r, size_t tensor, ckpt_err *err)
{
    const ckpt_tensor *t = &r->src->tensors[tensor];
    const ckpt_dtype_info *info = ckpt_dtype_get(t->dtype);
    if (info->kind != CKPT_KIND_FLOAT || info->bits < 16 || t->big_endian)
        return CKPT_OK;
    for (size_t c = 0; c < t->n_chunks; c++) {
        piece p = {.tensor = (uint32_t)tensor, .chunk = (uint32_t)c, .group = -1, .bucket = NONE};
        if (!ckpt_numel(t->rank, t->chunks[c].len, &p.n) || p.n == 0)
            continue;
        if (!row_major(t, &t->chunks[c]))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is not stored row by row", t->name);
        void *grown = r->pieces;
        ckpt_status status = ckpt_grow(&grown, &r->cap_pieces, r->n_pieces + 1, sizeof p, err);
        r->pieces = grown;
        if (status != CKPT_OK)
            return status;
        r->pieces[r->n_pieces++] = p;
    }
    return CKPT_OK;
}

static ckpt_status index_pieces(run *r, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_state_ref ref;
    for (size_t i = 0; i < r->src->n_tensors; i++) {
        ckpt_state_parse(r->src, r->src->tensors[i].name, &ref);
        if (ref.kind == CKPT_STATE_NONE)
            CKPT_CHECK(add_pieces(r, i, err));
    }
    for (r->table_size = 64; r->table_size < 2 * r->n_pieces;)
        r->table_size *= 2;
    r->table = malloc(r->table_size * sizeof *r->table);
    if (r->table == NULL)
        return no_memory(err);
    for (size_t i = 0; i < r->table_size; i++)
        r->table[i] = NONE;
    for (size_t i = r->n_pieces; i-- > 0;) {
        piece *p = &r->pieces[i];
        ckpt_dtype dtype = r->src->tensors[p->tensor].dtype;
        int64_t n = ckpt_min_i64(p->n, FRONT);
        CKPT_CHECK(read_piece(r, p, 0, n, r->a, err));
        size_t h = front_hash(r->a, (size_t)ckpt_dtype_get(dtype)->bits / 8, n, dtype) &
                   (r->table_size - 1);
        p->next = r->table[h];
        r->table[h] = i;
    }
done:
    return status;
}

/* ---- the walk ---------------------------------------------------------------------------------- */

/* n elements of the master copy from `at`, rounded to the parameters' dtype, into r->b. */
static ckpt_status read_rounded(run *r, const bucket *b, int64_t at, int64_t n, ckpt_err *err)
{
    ckpt_status status = read_flat(r, &r->src->tensors[b->master], at, n, r->a, err);
    if (status != CKPT_OK)
        return status;
    if (b->dtype == CKPT_F32)
        memcpy(r->b, r->a, (size_t)n * 4);
    else
        ckpt_dtype_cast(b->dtype, r->b, CKPT_F32, r->a, (size_t)n);
    return CKPT_OK;
}

static ckpt_status equals(run *r, const bucket *b, int64_t at, const piece *p, bool *equal,
                          ckpt_err *err)
{
    size_t elem = (size_t)ckpt_dtype_get(b->dtype)->bits / 8;
    *equal = true;
    for (int64_t done = 0, n; done < p->n && *equal; done += n) {
        n = ckpt_min_i64(p->n - done, BLOCK);
        ckpt_status status = read_rounded(r, b, at + done, n, err);
        if (status == CKPT_OK)
            status = read_piece(r, p, done, n, r->c, err);
        if (status != CKPT_OK)
            return status;
        *equal = memcmp(r->b, r->c, (size_t)n * elem) == 0;
    }
    return CKPT_OK;
}

/* The first number of a name or of a chunk's place in a stack of layers; -1 without layers. */
static int64_t layer_of(const run *r, const piece *p, size_t *skip)
{
    const ckpt_tensor *t = &r->src->tensors[p->tensor];
    const char *at = strstr(t->name, "layers.");
    *skip = 0;
    if (at == NULL)
        return -1;
    at += strlen("layers.");
    size_t digits = strspn(at, "0123456789");
    *skip = (size_t)(at - t->name) + digits;
    return digits > 0 && digits < 10 ? strtoll(at, NULL, 10) : t->chunks[p->chunk].lo[0];
}

/* Of two pieces with equal values: -1 if x comes first in the buffer, 1 if y does, 0 if that cannot
 * be told. */
static int in_order(const run *r, const piece *x, const piece *y)
{
    const ckpt_tensor *a = &r->src->tensors[x->tensor], *b = &r->src->tensors[y->tensor];
    size_t rest_a, rest_b;
    if ((x->bucket == NONE) != (y->bucket == NONE))
        return x->bucket == NONE ? -1 : 1; /* the other's own rank has it already */
    int64_t layer_a = layer_of(r, x, &rest_a), layer_b = layer_of(r, y, &rest_b);
    bool twins = strcmp(a->name + rest_a, b->name + rest_b) == 0 && a->rank == b->rank;
    if (twins && layer_a != layer_b)
        return layer_a > layer_b ? -1 : 1;
    if (x->tensor == y->tensor)
        return x->chunk < y->chunk ? -1 : 1;
    return layer_a != layer_b && layer_a >= 0 && layer_b >= 0 ? (layer_a > layer_b ? -1 : 1) : 0;
}

/* Chunks of one parameter in a row: halves of one tensor, or sections NAME.x, NAME.y. */
static bool continues(const run *r, const piece *before, const piece *p)
{
    const char *a = r->src->tensors[before->tensor].name, *b = r->src->tensors[p->tensor].name;
    if (before->tensor == p->tensor)
        return true;
    const char *dot = strrchr(a, '.');
    size_t stem = dot != NULL ? (size_t)(dot - a) + 1 : 0;
    return stem > 0 && strncmp(a, b, stem) == 0 && strchr(b + stem, '.') == NULL;
}

typedef struct search {
    const bucket *b;
    int64_t at;
    const piece *after; /* only what continues it, or NULL */
    size_t best;
    size_t rival; /* fits as well, and nothing tells the two apart */
} search;

static ckpt_status search_length(run *r, search *s, int64_t front, ckpt_err *err)
{
    const bucket *b = s->b;
    ckpt_status status = read_rounded(r, b, s->at, front, err);
    if (status != CKPT_OK)
        return status;
    int64_t left = r->src->tensors[b->master].dims[0] - s->at;
    size_t elem = (size_t)ckpt_dtype_get(b->dtype)->bits / 8;
    size_t h = front_hash(r->b, elem, front, b->dtype) & (r->table_size - 1);
    for (size_t i = r->table[h]; i != NONE; i = r->pieces[i].next) {
        const piece *p = &r->pieces[i];
        bool equal;
        if (r->src->tensors[p->tensor].dtype != b->dtype || ckpt_min_i64(p->n, FRONT) != front ||
            p->n > left || p->group == b->group || (s->after != NULL && !continues(r, s->after, p)))
            continue;
        status = equals(r, b, s->at, p, &equal, err);
        if (status != CKPT_OK)
            return status;
        if (!equal)
            continue;
        int order = s->best == NONE ? 1 : in_order(r, &r->pieces[s->best], p);
        if (order == 0 && s->rival == NONE)
            s->rival = i;
        else if (order > 0)
            s->best = i;
    }
    return CKPT_OK;
}

/* The piece that lies at `at`; NONE if there is none. */
static ckpt_status piece_at(run *r, const bucket *b, int64_t at, const piece *after, size_t *found,
                            ckpt_err *err)
{
    search s = {.b = b, .at = at, .after = after, .best = NONE, .rival = NONE};
    int64_t left = r->src->tensors[b->master].dims[0] - at;
    for (int64_t front = ckpt_min_i64(left, FRONT); front > 0; front--) {
        ckpt_status status = search_length(r, &s, front, err);
        if (status != CKPT_OK)
            return status;
    }
    *found = s.best;
    if (s.rival == NONE)
        return CKPT_OK;
    const ckpt_tensor *t = r->src->tensors;
    return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                     "'%s', element %lld: '%s' and '%s' have equal values, and nothing says which "
                     "of them lies there",
                     t[b->master].name, (long long)at, t[r->pieces[s.best].tensor].name,
                     t[r->pieces[s.rival].tensor].name);
}

static ckpt_status walk(run *r, size_t index, ckpt_err *err)
{
    const bucket *b = &r->buckets[index];
    const ckpt_tensor *master = &r->src->tensors[b->master];
    int64_t at = 0, end = master->dims[0];
    const piece *before = NULL;
    while (at < end) {
        int64_t aligned = (at + ALIGN - 1) / ALIGN * ALIGN;
        size_t found = NONE;
        ckpt_status status = CKPT_OK;
        if (before != NULL)
            status = piece_at(r, b, at, before, &found, err);
        if (status == CKPT_OK && found == NONE && aligned < end)
            status = piece_at(r, b, at = aligned, NULL, &found, err);
        if (status != CKPT_OK)
            return status;
        if (found == NONE && aligned >= end)
            break; /* padding in front of a bucket of its own */
        if (found == NONE)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "'%s': no stored weight equals the rounded master copy from element "
                             "%lld of %lld on, so the order of parameters is not proved",
                             master->name, (long long)at, (long long)end);
        piece *p = &r->pieces[found];
        p->group = b->group;
        if (p->bucket == NONE) {
            p->bucket = index;
            p->at = at;
        }
        at += p->n;
        before = p;
    }
    return CKPT_OK;
}

/* ---- the result -------------------------------------------------------------------------------- */

/* Chunks of state `t` of the piece p: where its range of the flat tensor lies. */
static ckpt_status add_chunks(run *r, const piece *p, const ckpt_tensor *flat, ckpt_tensor *t,
                              size_t *cap, ckpt_err *err)
{
    const ckpt_chunk *box = &r->src->tensors[p->tensor].chunks[p->chunk];
    int rank = t->rank;
    size_t row = (size_t)rank, boxes;
    int64_t lo[CKPT_FLAT_BOXES(CKPT_MAX_RANK) * CKPT_MAX_RANK],
        len[CKPT_FLAT_BOXES(CKPT_MAX_RANK) * CKPT_MAX_RANK];
    uint64_t elem = (uint64_t)ckpt_dtype_get(flat->dtype)->bits / 8;
    for (size_t i = 0; i < flat->n_chunks; i++) {
        const ckpt_chunk *c = &flat->chunks[i];
        int64_t from = ckpt_max_i64(c->lo[0], p->at);
        int64_t to = ckpt_min_i64(c->lo[0] + c->len[0], p->at + p->n);
        if (from >= to)
            continue;
        boxes = ckpt_flat_split(rank, box->len, from - p->at, to - from, lo, len);
        uint64_t offset = c->offset + (uint64_t)(from - c->lo[0]) * elem;
        int64_t *keep = ckpt_arena_array(&r->src->arena, 2 * boxes * row + 1, sizeof *keep);
        void *grown = t->chunks;
        ckpt_status status = ckpt_grow(&grown, cap, t->n_chunks + boxes, sizeof *t->chunks, err);
        t->chunks = grown;
        if (status != CKPT_OK || keep == NULL)
            return no_memory(err);
        for (size_t k = 0; k < boxes; k++) {
            int64_t *at = keep + 2 * k * row, n = 1;
            for (int d = 0; d < rank; d++) {
                at[d] = box->lo[d] + lo[k * row + (size_t)d];
                at[row + (size_t)d] = len[k * row + (size_t)d];
                n *= len[k * row + (size_t)d];
            }
            t->chunks[t->n_chunks++] =
                (ckpt_chunk){.lo = at, .len = at + row, .offset = offset, .file = c->file};
            offset += (uint64_t)n * elem;
        }
    }
    return CKPT_OK;
}

/* One state of one weight, whose pieces are pieces[first .. last). */
static ckpt_status make_state(run *r, size_t first, size_t last, size_t k, ckpt_tensor *out,
                              ckpt_err *err)
{
    ckpt_source *src = r->src;
    const bucket *b = &r->buckets[r->pieces[first].bucket];
    const ckpt_tensor *w = &src->tensors[r->pieces[first].tensor];
    const ckpt_tensor *flat = &src->tensors[b->first + k];
    size_t cap = 0;
    ckpt_status status = CKPT_OK;
    *out = (ckpt_tensor){.rank = w->rank, .dims = w->dims, .dtype = flat->dtype};
    out->name = ckpt_arena_printf(&src->arena, "optimizer.state.%s.%s", state_word(flat), w->name);
    if (out->name == NULL)
        return no_memory(err);
    for (size_t i = first; i < last; i++) {
        const bucket *of = &r->buckets[r->pieces[i].bucket];
        if (k >= of->n || strcmp(state_word(&src->tensors[of->first + k]), state_word(flat)) != 0) {
            status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                               "parts of '%s' lie in buckets with other states", w->name);
            goto done;
        }
        CKPT_CHECK(add_chunks(r, &r->pieces[i], &src->tensors[of->first + k], out, &cap, err));
    }
    ckpt_chunk *kept = ckpt_arena_memdup(&src->arena, out->chunks, out->n_chunks * sizeof *kept);
    free(out->chunks);
    out->chunks = kept;
    if (kept == NULL)
        return no_memory(err);
    return ckpt_tensor_check(src, out, err);
done:
    free(out->chunks);
    return status;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

/* How many of the pieces from `first` on belong to its tensor, and whether they were all found. */
static size_t one_tensor(const run *r, size_t first, size_t *found)
{
    size_t last = first;
    for (*found = 0; last < r->n_pieces && r->pieces[last].tensor == r->pieces[first].tensor;
         last++)
        *found += r->pieces[last].bucket != NONE;
    return last;
}

static ckpt_status replace(run *r, ckpt_err *err)
{
    ckpt_source *src = r->src;
    size_t n = 0, found;
    ckpt_status status = CKPT_OK;
    size_t most = src->n_tensors + MAX_STATES * r->n_pieces;
    ckpt_tensor *all = ckpt_arena_array(&src->arena, most + 1, sizeof *all);
    if (all == NULL)
        return no_memory(err);
    for (size_t i = 0; i < src->n_tensors; i++)
        if (strstr(src->tensors[i].name, MARKER) == NULL)
            all[n++] = src->tensors[i];
    for (size_t i = 0, last; i < r->n_pieces; i = last) {
        last = one_tensor(r, i, &found);
        if (found == 0)
            continue; /* not trained */
        if (found < last - i)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "only %zu of %zu parts of '%s' are in the optimizer's buckets", found,
                             last - i, src->tensors[r->pieces[i].tensor].name);
        for (size_t k = 0; k < r->buckets[r->pieces[i].bucket].n; k++)
            CKPT_CHECK(make_state(r, i, last, k, &all[n++], err));
    }
    qsort(all, n, sizeof *all, by_name);
    src->tensors = all;
    src->n_tensors = n;
done:
    return status;
}

ckpt_status ckpt_rescue(ckpt_source *src, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    run *r = calloc(1, sizeof *r);
    if (r == NULL)
        return no_memory(err);
    r->src = src;
    CKPT_CHECK(find_buckets(r, err));
    CKPT_CHECK(index_pieces(r, err));
    for (size_t i = 0; i < r->n_buckets; i++)
        CKPT_CHECK(walk(r, i, err));
    CKPT_CHECK(replace(r, err));
done:
    free(r->pieces);
    free(r->table);
    free(r->buckets);
    free(r);
    return status;
}
