/* Box intersection against brute force: random views, chunkings, strides and windows; every element
 * of the source carries its canonical index. */
#include "gather.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_BYTES (1 << 20)

static uint64_t rng_state;

static uint32_t rnd(uint32_t n)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33) % n;
}

/* A random axis list whose box holds `numel` elements given as factors f[0..n): consecutive factors
 * group into axes, axes group into dims, boxes sit inside larger axes. */
typedef struct view {
    ckpt_axis axis[12];
    ckpt_map map;
    int rank;
    int64_t dims[CKPT_MAX_RANK];
} view;

static void random_view(view *v, const int64_t *f, int n)
{
    int dim = 0;
    v->map = (ckpt_map){v->axis, 0};
    v->dims[0] = 1;
    for (int i = 0; i < n;) {
        int64_t len = f[i++];
        while (i < n && rnd(3) == 0)
            len *= f[i++];
        ckpt_axis *a = &v->axis[v->map.n++];
        int64_t lo = rnd(4) == 0 ? rnd(3) : 0, tail = rnd(4) == 0 ? rnd(3) : 0;
        *a = (ckpt_axis){.size = lo + len + tail, .lo = lo, .len = len, .dim = dim};
        v->dims[dim] *= a->size;
        if (i < n && rnd(2) == 0)
            v->dims[++dim] = 1;
    }
    v->rank = dim + 1;
}

/* Canonical index of a stored coordinate, or -1 outside the box. */
static int64_t canon_of(const view *v, const int64_t *at)
{
    int64_t index = 0;
    for (int i = 0; i < v->map.n; i++) {
        const ckpt_axis *a = &v->axis[i];
        int64_t inner = 1;
        for (int k = i + 1; k < v->map.n && v->axis[k].dim == a->dim; k++)
            inner *= v->axis[k].size;
        int64_t x = at[a->dim] / inner % a->size - a->lo;
        if (x < 0 || x >= a->len)
            return -1;
        index = index * a->len + x;
    }
    return index;
}

static bool step(int rank, const int64_t *lo, const int64_t *len, int64_t *at)
{
    for (int d = rank - 1; d >= 0; d--) {
        if (++at[d] < lo[d] + len[d])
            return true;
        at[d] = lo[d];
    }
    return false;
}

/* Split a box at random until small or bored; leaves become chunks. */
static void random_tiling(int rank, const int64_t *lo, const int64_t *len, ckpt_chunk *chunks,
                          size_t *n, ckpt_arena *arena)
{
    int d = (int)rnd((uint32_t)rank);
    if (*n < 40 && len[d] > 1 && rnd(3) != 0) {
        int64_t cut = 1 + rnd((uint32_t)(len[d] - 1)), a[CKPT_MAX_RANK], b[CKPT_MAX_RANK];
        memcpy(a, len, (size_t)rank * sizeof a[0]);
        a[d] = cut;
        random_tiling(rank, lo, a, chunks, n, arena);
        memcpy(b, lo, (size_t)rank * sizeof b[0]);
        b[d] += cut;
        a[d] = len[d] - cut;
        random_tiling(rank, b, a, chunks, n, arena);
        return;
    }
    chunks[(*n)++] = (ckpt_chunk){.lo = ckpt_arena_memdup(arena, lo, (size_t)rank * sizeof *lo),
                                  .len = ckpt_arena_memdup(arena, len, (size_t)rank * sizeof *len)};
}

static uint8_t *memory;

static ckpt_status read_memory(ckpt_source *src, uint32_t file, void *buf, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    (void)src;
    (void)file;
    (void)err;
    ck_assert_uint_le(offset + n, MAX_BYTES);
    memcpy(buf, memory + offset, n);
    return CKPT_OK;
}

static void put(uint64_t offset, int64_t value, int elem)
{
    uint64_t v = (uint64_t)value;
    memcpy(memory + offset, &v, (size_t)elem);
}

/* Lay the chunks out one after another, axes in random order, with the canonical index as value. */
static void store_chunks(const view *v, ckpt_chunk *chunks, size_t n, int elem, ckpt_arena *arena)
{
    uint64_t offset = 0;
    for (size_t c = 0; c < n; c++) {
        int64_t *stride = ckpt_arena_array(arena, CKPT_MAX_RANK, sizeof *stride), s = 1;
        int order[CKPT_MAX_RANK];
        for (int d = 0; d < v->rank; d++)
            order[d] = d;
        bool plain = rnd(2) == 0;
        for (int d = v->rank - 1; d > 0 && !plain; d--) {
            int k = (int)rnd((uint32_t)d + 1), t = order[d];
            order[d] = order[k];
            order[k] = t;
        }
        for (int d = v->rank - 1; d >= 0; d--) {
            stride[order[d]] = s;
            s *= chunks[c].len[order[d]];
        }
        chunks[c].stride = plain ? NULL : stride;
        chunks[c].offset = offset;
        int64_t at[CKPT_MAX_RANK];
        memcpy(at, chunks[c].lo, sizeof at[0] * (size_t)v->rank);
        do {
            int64_t where = 0;
            for (int d = 0; d < v->rank; d++)
                where += (at[d] - chunks[c].lo[d]) * stride[d];
            put(offset + (uint64_t)(where * elem), canon_of(v, at) + 1, elem);
        } while (step(v->rank, chunks[c].lo, chunks[c].len, at));
        offset += (uint64_t)(s * elem);
    }
    ck_assert_uint_le(offset, MAX_BYTES);
}

static int chunk_order(const void *a, const void *b)
{
    const ckpt_chunk *x = a, *y = b;
    return x->lo[0] < y->lo[0] ? -1 : x->lo[0] > y->lo[0];
}

static void check_windows(ckpt_source *src, const ckpt_gather *g, const uint8_t *want, int elem)
{
    ckpt_err err = {0};
    uint8_t stage[512];
    ckpt_scratch scratch = {stage, 64 + rnd(448)};
    (void)elem;
    for (int k = 0; k < 6; k++) {
        uint64_t lo = k == 0 ? 0 : rnd((uint32_t)g->bytes);
        size_t n = k == 0 ? (size_t)g->bytes : 1 + rnd((uint32_t)(g->bytes - lo));
        uint8_t *got = malloc(n);
        memset(got, 0xee, n);
        ckpt_status status = ckpt_gather_run(src, g, lo, n, got, &scratch, &err);
        ck_assert_msg(status == CKPT_OK, "%s", err.text);
        ck_assert_mem_eq(got, want + lo, n);
        free(got);
    }
}

typedef struct hole_sum {
    const uint8_t *want;
    uint64_t bytes, last;
} hole_sum;

static ckpt_status count_hole(void *self, uint64_t offset, uint64_t len, ckpt_err *err)
{
    hole_sum *h = self;
    (void)err;
    ck_assert_uint_ge(offset, h->last);
    for (uint64_t i = 0; i < len; i++)
        ck_assert_uint_eq(h->want[offset + i], 0);
    h->bytes += len;
    h->last = offset + len;
    return CKPT_OK;
}

static ckpt_status count_run(void *self, uint64_t offset, uint64_t len, ckpt_err *err)
{
    (void)offset;
    (void)err;
    *(uint64_t *)self += len;
    return CKPT_OK;
}

/* The destination box of one trial, as it must come out: canonical index + 1, or 0 outside. */
static uint64_t expected(const view *target, const ckpt_dst *dst, int elem, uint8_t *want)
{
    int64_t at[CKPT_MAX_RANK], i = 0;
    uint64_t covered = 0;
    memcpy(at, dst->lo, sizeof at[0] * (size_t)dst->rank);
    do {
        uint64_t v = (uint64_t)(canon_of(target, at) + 1);
        covered += v != 0 ? (uint64_t)elem : 0;
        memcpy(want + i++ * elem, &v, (size_t)elem);
    } while (step(dst->rank, dst->lo, dst->len, at));
    return covered;
}

static void trial(uint64_t seed)
{
    static const ckpt_dtype dtypes[] = {CKPT_U16, CKPT_U32, CKPT_I64};
    ckpt_arena arena = {0};
    ckpt_err err = {0};
    rng_state = seed * 2654435761u + 12345;
    int n = 1 + (int)rnd(4);
    int64_t f[4];
    for (int i = 0; i < n; i++)
        f[i] = 1 + rnd(6);
    ckpt_dtype dtype = dtypes[rnd(3)];
    int elem = ckpt_dtype_get(dtype)->bits / 8;
    view source, target;
    random_view(&source, f, n);
    random_view(&target, f, n);
    ckpt_chunk *chunks = ckpt_arena_array(&arena, 64, sizeof *chunks);
    int64_t zero[CKPT_MAX_RANK] = {0};
    ckpt_tensor t = {
        .name = "t", .dims = source.dims, .chunks = chunks, .dtype = dtype, .rank = source.rank};
    random_tiling(source.rank, zero, source.dims, chunks, &t.n_chunks, &arena);
    store_chunks(&source, chunks, t.n_chunks, elem, &arena);
    qsort(chunks, t.n_chunks, sizeof *chunks, chunk_order);
    ckpt_file file = {.name = "f", .path = "f", .size = MAX_BYTES, .fd = -1};
    ckpt_source src = {
        .files = &file, .n_files = 1, .tensors = &t, .n_tensors = 1, .read_at = read_memory};
    ckpt_canon c = {.name = "c", .dtype = dtype, .map = source.map};

    int64_t lo[CKPT_MAX_RANK], len[CKPT_MAX_RANK], numel = 1, volume;
    for (int d = 0; d < target.rank; d++) {
        lo[d] = rnd(2) == 0 ? 0 : rnd((uint32_t)target.dims[d]);
        len[d] = rnd(2) == 0 ? target.dims[d] - lo[d] : 1 + rnd((uint32_t)(target.dims[d] - lo[d]));
        numel *= len[d];
    }
    ckpt_dst dst = {&target.map, target.rank, target.dims, lo, len};
    uint8_t *want = malloc((size_t)(numel * elem) + 8);
    uint64_t covered = expected(&target, &dst, elem, want), bytes, runs = 0;
    ckpt_copies copies = {0};
    ckpt_gather g = {.bytes = (uint64_t)(numel * elem), .from = dtype, .to = dtype};
    ck_assert_msg(ckpt_gather_add(&src, &c, &dst, &arena, &copies, &bytes, &err) == CKPT_OK, "%s",
                  err.text);
    ck_assert_uint_eq(bytes, covered);
    ck_assert_int_eq(ckpt_box_volume(&target.map, &dst, &volume, &err), CKPT_OK);
    ck_assert_uint_eq((uint64_t)(volume * elem), covered);
    g.pad = g.bytes - covered;
    ck_assert_int_eq(ckpt_gather_seal(&copies, &arena, &g, &err), CKPT_OK);
    check_windows(&src, &g, want, elem);
    hole_sum h = {.want = want};
    ck_assert_int_eq(ckpt_gather_holes(&g, 0, g.bytes, count_hole, &h, &err), CKPT_OK);
    ck_assert_uint_eq(h.bytes, g.pad);
    for (size_t i = 0; i < g.n_copies; i++)
        ck_assert_int_eq(ckpt_copy_src_runs(&g.copies[i], elem, count_run, &runs, &err), CKPT_OK);
    ck_assert_uint_eq(runs, covered);
    free(want);
    ckpt_arena_free(&arena);
}

START_TEST(gather_random_views_match_brute_force)
{
    memory = malloc(MAX_BYTES);
    for (uint64_t seed = 0; seed < 4000; seed++)
        trial(seed + (uint64_t)_i * 100000);
    free(memory);
}
END_TEST

/* Rows long enough to be read straight to their places: parts of a matrix cut by columns, in one file
 * with whatever lies between them. */
typedef struct rows {
    ckpt_loop loop[4][2];
    ckpt_copy copy[4];
    ckpt_gather g;
    uint8_t *data, *want;
    uint64_t bytes; /* of the file */
} rows;

static void make_rows(rows *r)
{
    int parts = 1 + (int)rnd(4);
    int64_t n = 1 + rnd(600), len[4], row = 0;
    *r = (rows){
        .g = {.copies = r->copy, .n_copies = (size_t)parts, .from = CKPT_U16, .to = CKPT_U16}
    };
    for (int p = 0; p < parts; p++)
        row += len[p] = 2 * (rnd(4) == 0 ? 1 + rnd(1000) : 1000 + rnd(2000));
    for (int64_t p = 0, at = 0; p < parts; at += len[p++]) {
        int64_t gap = rnd(2) == 0 ? 0 : 2 * rnd(rnd(2) == 0 ? 400 : 40000);
        ckpt_loop *loop = r->loop[p];
        loop[0] = (ckpt_loop){n, len[p] + gap, row};
        loop[1] = (ckpt_loop){len[p] / 2, 2, 2};
        r->copy[p] = (ckpt_copy){.loop = loop,
                                 .n_loops = 2,
                                 .src = r->bytes,
                                 .dst = (uint64_t)at,
                                 .last = (uint64_t)(at + (n - 1) * row + len[p] - 2)};
        r->bytes += (uint64_t)((n - 1) * (len[p] + gap) + len[p]);
    }
    r->g.bytes = (uint64_t)(n * row);
    r->data = malloc(r->bytes);
    r->want = malloc(r->g.bytes);
    for (uint64_t i = 0; i < r->bytes; i++)
        r->data[i] = (uint8_t)(i * 31 + (i >> 8) * 7);
    for (int p = 0; p < parts; p++)
        for (int64_t i = 0; i < n; i++)
            memcpy(r->want + r->copy[p].dst + (uint64_t)(i * row),
                   r->data + r->copy[p].src + (uint64_t)(i * r->loop[p][0].src), (size_t)len[p]);
}

START_TEST(gather_of_long_rows_from_a_file)
{
    for (uint64_t seed = 0; seed < 40; seed++) {
        rows r;
        rng_state = seed * 2654435761u + 99;
        make_rows(&r);
        FILE *f = tmpfile();
        ck_assert_ptr_nonnull(f);
        ck_assert_uint_eq(fwrite(r.data, 1, r.bytes, f), r.bytes);
        ck_assert_int_eq(fflush(f), 0);
        ckpt_file file = {.name = "f", .path = "f", .size = r.bytes, .fd = fileno(f)};
        ckpt_source src = {.files = &file, .n_files = 1};
        ck_assert(ckpt_source_vectored(&src, 0));
        check_windows(&src, &r.g, r.want, 2);
        uint8_t *all = malloc(r.g.bytes), *stage = malloc(1 << 20);
        ckpt_scratch scratch = {stage, 1 << 20};
        ckpt_err err = {0};
        ck_assert_int_eq(ckpt_gather_run(&src, &r.g, 0, r.g.bytes, all, &scratch, &err), CKPT_OK);
        ck_assert_mem_eq(all, r.want, r.g.bytes);
        /* the file lost its end after it was opened; it was shorter than a copy says */
        ck_assert_int_eq(ftruncate(fileno(f), (off_t)r.bytes - 1), 0);
        ck_assert_int_eq(ckpt_gather_run(&src, &r.g, 0, r.g.bytes, all, &scratch, &err), CKPT_E_IO);
        ck_assert_ptr_nonnull(strstr(err.text, "unexpected end of file"));
        file.size--;
        ck_assert_int_eq(ckpt_gather_run(&src, &r.g, 0, r.g.bytes, all, &scratch, &err),
                         CKPT_E_FORMAT);
        ck_assert_ptr_nonnull(strstr(err.text, "past end"));
        free(all);
        free(stage);
        free(r.data);
        free(r.want);
        fclose(f);
    }
}
END_TEST

START_TEST(gather_views_without_common_factors_are_refused)
{
    int64_t dims = 6, lo = 0;
    ckpt_axis a[2] = {
        {.size = 2, .len = 2},
        {.size = 3, .len = 3}
    };
    ckpt_axis c[2] = {
        {.size = 5, .lo = 1, .len = 3},
        {.size = 3,         .len = 2       }
    };
    ckpt_map ma = {a, 2}, mc = {c, 2};
    ckpt_chunk chunk = {.lo = &lo, .len = &dims};
    ckpt_tensor t = {
        .name = "t", .dims = &dims, .chunks = &chunk, .n_chunks = 1, .dtype = CKPT_U8, .rank = 1};
    ckpt_source src = {.tensors = &t, .n_tensors = 1};
    ckpt_canon canon = {.dtype = CKPT_U8, .map = ma};
    ckpt_arena arena = {0};
    ckpt_copies copies = {0};
    ckpt_err err = {0};
    uint64_t bytes;
    int64_t wide = 15;
    ckpt_dst dst = {&mc, 1, &wide, &lo, &wide};
    ck_assert_int_eq(ckpt_gather_add(&src, &canon, &dst, &arena, &copies, &bytes, &err),
                     CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "no common factors"));
    free(copies.copies);
    ckpt_arena_free(&arena);
}
END_TEST

Suite *suite_gather(void)
{
    Suite *s = suite_create("gather");
    TCase *c = tcase_create("brute force");
    tcase_set_timeout(c, 120);
    tcase_add_loop_test(c, gather_random_views_match_brute_force, 0, 4);
    tcase_add_test(c, gather_of_long_rows_from_a_file);
    tcase_add_test(c, gather_views_without_common_factors_are_refused);
    suite_add_tcase(s, c);
    return s;
}
