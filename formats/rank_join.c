#include "rank_join.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHAPE_TEXT 256

ckpt_status ckpt_join_add(ckpt_join *join, const ckpt_piece *piece, ckpt_err *err)
{
    ckpt_status status =
        ckpt_grow((void **)&join->pieces, &join->cap, join->n + 1, sizeof *join->pieces, err);
    if (status != CKPT_OK)
        return status;
    join->pieces[join->n] = *piece;
    join->pieces[join->n].seq = join->n;
    join->n++;
    return CKPT_OK;
}

void ckpt_join_release(ckpt_join *join)
{
    free(join->pieces);
    *join = (ckpt_join){0};
}

static int compare_box(const ckpt_piece *x, const ckpt_piece *y)
{
    for (int a = 0; a < x->rank && a < y->rank; a++)
        if (x->lo[a] != y->lo[a])
            return x->lo[a] < y->lo[a] ? -1 : 1;
    for (int a = 0; a < x->rank && a < y->rank; a++)
        if (x->len[a] != y->len[a])
            return x->len[a] < y->len[a] ? -1 : 1;
    return 0;
}

static int by_name_and_box(const void *a, const void *b)
{
    const ckpt_piece *x = a, *y = b;
    int c = strcmp(x->name, y->name);
    if (c == 0)
        c = compare_box(x, y);
    return c != 0 ? c : x->seq < y->seq ? -1 : x->seq > y->seq;
}

static const char *shape_text(char out[SHAPE_TEXT], const ckpt_piece *p)
{
    size_t n = (size_t)snprintf(out, SHAPE_TEXT, "%s [", ckpt_dtype_get(p->dtype)->name);
    for (int a = 0; a < p->rank && n < SHAPE_TEXT - 32; a++)
        n += (size_t)snprintf(out + n, SHAPE_TEXT - n, "%s%lld", a > 0 ? ", " : "",
                              (long long)p->dims[a]);
    snprintf(out + n, SHAPE_TEXT - n, "]%s", p->big_endian ? " big-endian" : "");
    return out;
}

/* Every piece of one tensor against the piece that was added first. */
static ckpt_status check_equal(const ckpt_source *src, const ckpt_piece *p, size_t n, ckpt_err *err)
{
    const ckpt_piece *first = p;
    char found[SHAPE_TEXT], want[SHAPE_TEXT];
    for (size_t i = 1; i < n; i++)
        if (p[i].seq < first->seq)
            first = &p[i];
    for (size_t i = 0; i < n; i++) {
        if (p[i].rank == first->rank && p[i].dtype == first->dtype &&
            p[i].big_endian == first->big_endian &&
            memcmp(p[i].dims, first->dims, (size_t)first->rank * sizeof first->dims[0]) == 0)
            continue;
        return ckpt_fail(err, CKPT_E_FORMAT, "%s: tensor '%.300s' makes %s in all, but %s in %s",
                         src->files[p[i].file].name, p[i].name, shape_text(found, &p[i]),
                         shape_text(want, first), src->files[first->file].name);
    }
    return CKPT_OK;
}

static bool keep_chunk(ckpt_arena *arena, const ckpt_piece *p, ckpt_chunk *out)
{
    size_t rank = (size_t)p->rank;
    int64_t *box = ckpt_arena_array(arena, 3 * rank + 1, sizeof *box);
    if (box == NULL)
        return false;
    memcpy(box, p->lo, rank * sizeof *box);
    memcpy(box + rank, p->len, rank * sizeof *box);
    memcpy(box + 2 * rank, p->stride, rank * sizeof *box);
    *out = (ckpt_chunk){.lo = box,
                        .len = box + rank,
                        .stride = p->strided ? box + 2 * rank : NULL,
                        .offset = p->offset,
                        .file = p->file};
    return true;
}

static ckpt_status join_one(ckpt_source *src, const ckpt_piece *p, size_t n, ckpt_tensor *out,
                            ckpt_err *err)
{
    ckpt_arena *arena = &src->arena;
    size_t kept = 0;
    ckpt_chunk *chunks = ckpt_arena_array(arena, n, sizeof *chunks);
    int64_t *dims = ckpt_arena_memdup(arena, p->dims, (size_t)p->rank * sizeof *dims + 1);
    if (chunks == NULL || dims == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    *out = (ckpt_tensor){.name = p->name,
                         .dims = dims,
                         .chunks = chunks,
                         .dtype = p->dtype,
                         .rank = p->rank,
                         .big_endian = p->big_endian};
    for (size_t i = 0; i < n; i++) {
        bool copy = i > 0 && compare_box(&p[i - 1], &p[i]) == 0;
        if (!copy) {
            if (!keep_chunk(arena, &p[i], &chunks[kept++]))
                return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
            continue;
        }
        ckpt_replica *r = &src->replicas[src->n_replicas++];
        r->name = p->name;
        r->rank = p->rank;
        r->dtype = p->dtype;
        r->first = chunks[kept - 1];
        if (!keep_chunk(arena, &p[i], &r->other))
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    }
    out->n_chunks = kept;
    return CKPT_OK;
}

ckpt_status ckpt_join_finish(ckpt_join *join, ckpt_source *src, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (join->n == 0)
        return CKPT_OK;
    qsort(join->pieces, join->n, sizeof *join->pieces, by_name_and_box);
    src->tensors = ckpt_arena_array(&src->arena, join->n, sizeof *src->tensors);
    src->replicas = ckpt_arena_array(&src->arena, join->n, sizeof *src->replicas);
    if (src->tensors == NULL || src->replicas == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0, next; i < join->n; i = next) {
        const ckpt_piece *p = &join->pieces[i];
        for (next = i + 1; next < join->n; next++)
            if (strcmp(join->pieces[next].name, p->name) != 0)
                break;
        CKPT_CHECK(check_equal(src, p, next - i, err));
        CKPT_CHECK(join_one(src, p, next - i, &src->tensors[src->n_tensors], err));
        src->n_tensors++;
    }
done:
    return status;
}
