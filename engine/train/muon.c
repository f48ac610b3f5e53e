/* Muon: momentum, orthogonalisation by Newton-Schulz iterations, scaled update (optim.h).
 *
 * Matrices are worked on in batches whose scratch is bounded; inside a batch every product of every
 * matrix is cut into square tiles, which are the items of one parallel round, so that few large and
 * many small matrices both use all threads. Batches and tiles follow from sizes alone. A = X X^T and
 * B = b A + c A^2 are symmetric: only tiles on and below the diagonal are computed, and mirrored.
 *
 * Coefficients: emerging_optimizers 0.3 orthogonalized_optimizers/muon_utils.py, which names their
 * sources. */
#include "optim.h"

#include <math.h>
#include <string.h>

#include "checked.h"
#include "elementwise.h"
#include "kernels/kernels.h"
#include "optim_device.h"

#define TILE 192 /* a multiple of every register tile (12, 16, 32) */
#define BLOCK_K 256
#define SCRATCH CKPT_ENG_GEMM_SCRATCH(TILE, TILE, BLOCK_K)
#define BATCH_MATRICES 64
#define BATCH_ELEMENTS ((int64_t)1 << 22)
#define PIECE 65536

typedef struct coefficients {
    float a, b, c;
} coefficients;

typedef struct coefficient_set {
    const char *name;
    bool cycle; /* start again after the last row, else repeat it */
    int n;
    coefficients row[10];
} coefficient_set;

/* clang-format off */
static const coefficient_set sets[CKPT_MUON_SET_COUNT] = {
    [CKPT_MUON_QUINTIC] = {"quintic", true, 5,
        {{4.0848F, -6.8946F, 2.9270F}, {3.9505F, -6.3029F, 2.6377F}, {3.7418F, -5.5913F, 2.3037F},
         {2.8769F, -3.1427F, 1.2046F}, {2.8366F, -3.0525F, 1.2012F}}},
    [CKPT_MUON_SIMPLE] = {"simple", true, 1, {{3.4445F, -4.7750F, 2.0315F}}},
    [CKPT_MUON_POLAR_EXPRESS] = {"polar_express", false, 8,
        {{8.2051F, -22.9019F, 16.4607F}, {4.0664F, -2.8612F, 0.5184F}, {3.9096F, -2.8234F, 0.5250F},
         {3.2856F, -2.4153F, 0.4853F}, {2.2779F, -1.6198F, 0.3985F}, {1.8726F, -1.2307F, 0.3585F},
         {1.8564F, -1.2132F, 0.3568F}, {1.8750F, -1.2500F, 0.3750F}}},
    [CKPT_MUON_CANS] = {"cans", false, 5,
        {{8.4703F, -25.1081F, 18.6293F}, {4.1828F, -3.1087F, 0.5806F}, {3.9619F, -2.9541F, 0.5630F},
         {3.2866F, -2.4647F, 0.5074F}, {2.2737F, -1.6447F, 0.4162F}}},
    [CKPT_MUON_AOL] = {"aol", true, 4,
        {{4.0098F, -7.0585F, 2.4635F}, {3.4585F, -5.5479F, 2.5959F}, {2.7573F, -3.2939F, 1.4254F},
         {2.7215F, -3.0494F, 1.3169F}}},
    [CKPT_MUON_DEEPSEEK_V4] = {"deepseekv4", false, 10,
        {{3.4445F, -4.7750F, 2.0315F}, {3.4445F, -4.7750F, 2.0315F}, {3.4445F, -4.7750F, 2.0315F},
         {3.4445F, -4.7750F, 2.0315F}, {3.4445F, -4.7750F, 2.0315F}, {3.4445F, -4.7750F, 2.0315F},
         {3.4445F, -4.7750F, 2.0315F}, {3.4445F, -4.7750F, 2.0315F}, {2.0F, -1.5F, 0.5F},
         {2.0F, -1.5F, 0.5F}}},
};
/* clang-format on */

static const char *const scale_names[] = {"spectral", "shape_scaling", "unit_rms_norm"};
_Static_assert(sizeof scale_names / sizeof *scale_names == CKPT_MUON_SCALE_COUNT, "a name each");

bool ckpt_muon_set_parse(const char *name, ckpt_muon_set *out)
{
    for (int i = 0; i < CKPT_MUON_SET_COUNT; i++)
        if (strcmp(sets[i].name, name) == 0) {
            *out = (ckpt_muon_set)i;
            return true;
        }
    return false;
}

bool ckpt_muon_scale_parse(const char *name, ckpt_muon_scale *out)
{
    for (int i = 0; i < CKPT_MUON_SCALE_COUNT; i++)
        if (strcmp(scale_names[i], name) == 0) {
            *out = (ckpt_muon_scale)i;
            return true;
        }
    return false;
}

const char *ckpt_muon_set_name(ckpt_muon_set set)
{
    return (unsigned)set < CKPT_MUON_SET_COUNT ? sets[set].name : NULL;
}

const char *ckpt_muon_scale_name(ckpt_muon_scale scale)
{
    return (unsigned)scale < CKPT_MUON_SCALE_COUNT ? scale_names[scale] : NULL;
}

static const coefficients *row_of(ckpt_muon_set which, int step)
{
    const coefficient_set *set = &sets[which];
    return &set->row[step < set->n ? step : set->cycle ? step % set->n : set->n - 1];
}

void ckpt_muon_coefficients(ckpt_muon_set set, int step, float k[3])
{
    const coefficients *row = row_of(set, step);
    k[0] = row->a;
    k[1] = row->b;
    k[2] = row->c;
}

double ckpt_muon_factor(const ckpt_optim_config *c, int64_t rows, int64_t cols)
{
    const double r = (double)rows, k = (double)cols;
    double scale = sqrt(r > k ? r : k);
    if (c->scale == CKPT_MUON_SHAPE_SCALING)
        scale = sqrt(r > k ? r / k : 1);
    else if (c->scale == CKPT_MUON_UNIT_RMS_NORM)
        scale = sqrt(r / k);
    return scale * c->extra;
}

/* ---- orthogonalisation ------------------------------------------------------------------------ */

/* One matrix of a batch, the shorter side as rows. */
typedef struct work {
    const ckpt_muon_matrix *of;
    int64_t r, c, tiles_r, tiles_c;
    float *x, *y; /* [r, c]: X and the next X */
    float *a, *b; /* [r, r] */
} work;

typedef struct batch {
    const ENG(kernels) * kernels;
    const ckpt_elementwise *loops;
    work w[BATCH_MATRICES];
    int64_t begin[BATCH_MATRICES + 1]; /* first item of every matrix in the round that runs */
    int n;
    bool bf16;
    coefficients k;
    float *scratch; /* SCRATCH a thread */
} batch;

static const work *item_of(const batch *t, int64_t *item)
{
    int i = 0;
    while (t->begin[i + 1] <= *item)
        i++;
    *item -= t->begin[i];
    return &t->w[i];
}

/* Tile number `item` of the lower triangle, row by row. */
static void triangle(int64_t item, int64_t *i, int64_t *j)
{
    int64_t row = 0;
    while ((row + 1) * (row + 2) / 2 <= item)
        row++;
    *i = row;
    *j = item - row * (row + 1) / 2;
}

static void round_tile(const batch *t, int64_t m, int64_t n, float *c, int64_t ld)
{
    if (t->bf16)
        for (int64_t i = 0; i < m; i++)
            t->loops->round_bf16(n, c + i * ld, c + i * ld, NULL);
}

/* X = matrix / max(|matrix|, 1e-7), turned so that rows <= cols. */
static void load_matrix(void *arg, int64_t item, int worker)
{
    const batch *t = arg;
    const work *w = &t->w[item];
    const int64_t rows = w->of->rows, cols = w->of->cols;
    (void)worker;
    const float norm = (float)sqrt(t->loops->sumsq(rows * cols, w->of->x));
    const float divisor = norm < 1e-7F ? 1e-7F : norm; /* a NaN stays */
    if (rows <= cols)
        for (int64_t i = 0; i < rows * cols; i++)
            w->x[i] = w->of->x[i] / divisor;
    else
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++)
                w->x[j * rows + i] = w->of->x[i * cols + j] / divisor;
    round_tile(t, w->r, w->c, w->x, w->c);
}

static void store_matrix(void *arg, int64_t item, int worker)
{
    const batch *t = arg;
    const work *w = &t->w[item];
    const int64_t rows = w->of->rows, cols = w->of->cols;
    (void)worker;
    if (rows <= cols)
        memcpy(w->of->x, w->x, (size_t)(rows * cols) * sizeof *w->x);
    else
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++)
                w->of->x[i * cols + j] = w->x[j * rows + i];
}

/* C = alpha op(A) op(B) + beta C on this thread; B transposed if tb. */
static void product(const batch *t, int worker, bool tb, int64_t m, int64_t n, int64_t k,
                    float alpha, const float *a, int64_t lda, const float *b, int64_t ldb,
                    float beta, float *c, int64_t ldc)
{
    t->kernels->gemm(&(ENG(gemm_task)){.tb = tb,
                                       .m = m,
                                       .n = n,
                                       .k = k,
                                       .lda = lda,
                                       .ldb = ldb,
                                       .ldc = ldc,
                                       .mc = TILE,
                                       .nc = TILE,
                                       .kc = BLOCK_K,
                                       .alpha = alpha,
                                       .beta = beta,
                                       .a = a,
                                       .b = b,
                                       .c = c},
                     t->scratch + worker * (int64_t)SCRATCH);
}

/* A tile of a symmetric matrix, on or below the diagonal. */
typedef struct tile {
    const work *w;
    int64_t i, j, m, n; /* first row, first column, rows, columns */
} tile;

static tile tile_of(const batch *t, int64_t item)
{
    tile q = {.w = item_of(t, &item)};
    triangle(item, &q.i, &q.j);
    q.i *= TILE;
    q.j *= TILE;
    q.m = ckpt_min_i64(TILE, q.w->r - q.i);
    q.n = ckpt_min_i64(TILE, q.w->r - q.j);
    return q;
}

/* A computed tile, rounded, and its mirror image; c is the whole matrix. */
static void finish_tile(const batch *t, const tile *q, float *c)
{
    const int64_t ld = q->w->r;
    round_tile(t, q->m, q->n, c + q->i * ld + q->j, ld);
    for (int64_t a = 0; a < q->m; a++)
        for (int64_t b = 0; b < (q->i == q->j ? a : q->n); b++)
            c[(q->j + b) * ld + q->i + a] = c[(q->i + a) * ld + q->j + b];
}

/* A tile of A = X X^T. */
static void gram_tile(void *arg, int64_t item, int worker)
{
    const batch *t = arg;
    const tile q = tile_of(t, item);
    const work *w = q.w;
    product(t, worker, true, q.m, q.n, w->c, 1, w->x + q.i * w->c, w->c, w->x + q.j * w->c, w->c, 0,
            w->a + q.i * w->r + q.j, w->r);
    finish_tile(t, &q, w->a);
}

/* A tile of B = b A + c A A. */
static void square_tile(void *arg, int64_t item, int worker)
{
    const batch *t = arg;
    const tile q = tile_of(t, item);
    const work *w = q.w;
    const float *a = w->a + q.i * w->r + q.j;
    float *b = w->b + q.i * w->r + q.j;
    for (int64_t i = 0; i < q.m; i++)
        for (int64_t j = 0; j < q.n; j++)
            b[i * w->r + j] = t->k.b * a[i * w->r + j];
    product(t, worker, true, q.m, q.n, w->r, t->k.c, w->a + q.i * w->r, w->r, w->a + q.j * w->r,
            w->r, 1, b, w->r);
    finish_tile(t, &q, w->b);
}

/* A tile of Y = a X + B X. */
static void update_tile(void *arg, int64_t item, int worker)
{
    const batch *t = arg;
    const work *w = item_of(t, &item);
    const int64_t i = item / w->tiles_c * TILE, j = item % w->tiles_c * TILE;
    const int64_t m = ckpt_min_i64(TILE, w->r - i), n = ckpt_min_i64(TILE, w->c - j);
    const float *x = w->x + i * w->c + j;
    float *c = w->y + i * w->c + j;
    for (int64_t p = 0; p < m; p++)
        for (int64_t q = 0; q < n; q++)
            c[p * w->c + q] = t->k.a * x[p * w->c + q];
    product(t, worker, false, m, n, w->r, 1, w->b + i * w->r, w->r, w->x + j, w->c, 1, c, w->c);
    round_tile(t, m, n, c, w->c);
}

static int64_t count_items(batch *t, bool square)
{
    t->begin[0] = 0;
    for (int i = 0; i < t->n; i++) {
        const work *w = &t->w[i];
        t->begin[i + 1] =
            t->begin[i] + (square ? w->tiles_r * (w->tiles_r + 1) / 2 : w->tiles_r * w->tiles_c);
    }
    return t->begin[t->n];
}

static void iterate(const ckpt_eng *e, batch *t, const ckpt_optim_config *c)
{
    ckpt_eng_parallel(e, t->n, load_matrix, t);
    for (int s = 0; s < c->steps; s++) {
        t->k = *row_of(c->set, s);
        const int64_t items = count_items(t, true);
        ckpt_eng_parallel(e, items, gram_tile, t);
        ckpt_eng_parallel(e, items, square_tile, t);
        ckpt_eng_parallel(e, count_items(t, false), update_tile, t);
        for (int i = 0; i < t->n; i++) {
            float *x = t->w[i].x;
            t->w[i].x = t->w[i].y;
            t->w[i].y = x;
        }
    }
    ckpt_eng_parallel(e, t->n, store_matrix, t);
}

static void add_matrix(ckpt_eng *e, batch *t, const ckpt_muon_matrix *of)
{
    work *w = &t->w[t->n++];
    *w = (work){
        .of = of, .r = ckpt_min_i64(of->rows, of->cols), .c = ckpt_max_i64(of->rows, of->cols)};
    w->tiles_r = (w->r + TILE - 1) / TILE;
    w->tiles_c = (w->c + TILE - 1) / TILE;
    w->x = ckpt_eng_take(e, w->r * w->c, sizeof *w->x);
    w->y = ckpt_eng_take(e, w->r * w->c, sizeof *w->y);
    w->a = ckpt_eng_take(e, w->r * w->r, sizeof *w->a);
    w->b = ckpt_eng_take(e, w->r * w->r, sizeof *w->b);
}

static ckpt_status check_matrix(const ckpt_muon_matrix *m, ckpt_err *err)
{
    if (m->rows < 0 || m->cols < 0 || m->rows > INT32_MAX || m->cols > INT32_MAX)
        return ckpt_fail(err, CKPT_E_USAGE, "muon: a matrix of %lld x %lld", (long long)m->rows,
                         (long long)m->cols);
    return CKPT_OK;
}

ckpt_status ckpt_muon_orthogonalise(ckpt_eng *e, const ckpt_optim_config *c,
                                    const ckpt_muon_matrix *matrices, size_t n, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const size_t mark = ckpt_eng_mark(e);
    size_t i = 0;
    while (status == CKPT_OK && i < n) {
        batch t = {.kernels = ENG(kernels_for)(e->isa),
                   .loops = ckpt_elementwise_for(e->isa),
                   .bf16 = c->muon_bf16};
        int64_t elements = 0;
        t.scratch = ckpt_eng_take(e, (int64_t)SCRATCH * e->threads, sizeof *t.scratch);
        for (; i < n && t.n < BATCH_MATRICES && elements < BATCH_ELEMENTS; i++) {
            CKPT_CHECK(check_matrix(&matrices[i], err));
            if (matrices[i].rows == 0 || matrices[i].cols == 0)
                continue;
            add_matrix(e, &t, &matrices[i]);
            elements += matrices[i].rows * matrices[i].cols;
        }
        status = ckpt_eng_check(e, err);
        if (status == CKPT_OK && !e->dry)
            iterate(e, &t, c);
        ckpt_eng_drop(e, mark);
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}

/* ---- the rest of a step ----------------------------------------------------------------------- */

typedef struct vector_job {
    const ckpt_elementwise *k;
    int64_t n;
    float scale, rise, decay, negative, factor;
    bool nesterov;
    const float *g, *x;
    float *m, *d, *w;
} vector_job;

static void direction_piece(void *arg, int64_t item, int worker)
{
    const vector_job *j = arg;
    (void)worker;
    const int64_t lo = item * PIECE, n = ckpt_min_i64(PIECE, j->n - lo);
    j->k->direction(n, j->scale, j->rise, j->nesterov, j->g + lo, j->m + lo, j->d + lo);
}

static void apply_piece(void *arg, int64_t item, int worker)
{
    const vector_job *j = arg;
    (void)worker;
    const int64_t lo = item * PIECE, n = ckpt_min_i64(PIECE, j->n - lo);
    j->k->apply(n, j->decay, j->negative, j->factor, j->x + lo, j->w + lo);
}

void ckpt_muon_direction(const ckpt_eng *e, const ckpt_optim_config *c, const ckpt_optim_step *s,
                         int64_t n, const float *g, float *m, float *d)
{
    if (e->dry)
        return;
    ckpt_eng_parallel(e, (n + PIECE - 1) / PIECE, direction_piece,
                      &(vector_job){.k = ckpt_elementwise_for(e->isa),
                                    .n = n,
                                    .scale = (float)s->grad_scale,
                                    .rise = (float)(1 - c->momentum),
                                    .nesterov = c->nesterov,
                                    .g = g,
                                    .m = m,
                                    .d = d});
}

void ckpt_muon_apply(const ckpt_eng *e, int64_t n, double lr, double wd, double factor,
                     const float *x, float *w)
{
    if (e->dry)
        return;
    ckpt_eng_parallel(e, (n + PIECE - 1) / PIECE, apply_piece,
                      &(vector_job){.k = ckpt_elementwise_for(e->isa),
                                    .n = n,
                                    .decay = (float)(1 - lr * wd),
                                    .negative = (float)-lr,
                                    .factor = (float)factor,
                                    .x = x,
                                    .w = w});
}

/* The slots of one batch: taken from *next on, which is moved behind them. */
static int take_batch(ckpt_eng *e, const ckpt_optim *o, size_t *next, size_t last,
                      const ckpt_optim_slot **slots, ckpt_muon_matrix *matrices)
{
    int n = 0;
    int64_t elements = 0;
    for (; *next < last && n < BATCH_MATRICES && elements < BATCH_ELEMENTS; ++*next) {
        const ckpt_optim_slot *s = &o->slots[*next];
        if (!s->muon || s->n == 0)
            continue;
        matrices[n] = (ckpt_muon_matrix){.rows = s->rows, .cols = s->cols};
        matrices[n].x = ckpt_eng_take(e, s->n, sizeof(float));
        elements += s->n;
        slots[n++] = s;
    }
    return n;
}

ckpt_status ckpt_optim_muon(ckpt_eng *e, const ckpt_optim *o, const ckpt_optim_step *s,
                            size_t first, size_t last, float *w, float *m, const float *g,
                            ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const size_t mark = ckpt_eng_mark(e);
    size_t next = first;
    while (status == CKPT_OK && next < last) {
        const ckpt_optim_slot *slots[BATCH_MATRICES];
        ckpt_muon_matrix matrices[BATCH_MATRICES];
        const int n = take_batch(e, o, &next, last, slots, matrices);
        CKPT_CHECK(ckpt_eng_check(e, err));
        for (int i = 0; i < n && !e->dry; i++)
            ckpt_muon_direction(e, &o->config, s, slots[i]->n, g + slots[i]->at, m + slots[i]->at,
                                matrices[i].x);
        CKPT_CHECK(ckpt_muon_orthogonalise(e, &o->config, matrices, (size_t)n, err));
        for (int i = 0; i < n && !e->dry; i++)
            ckpt_muon_apply(e, slots[i]->n, s->lr, slots[i]->decay ? s->wd : 0,
                            ckpt_muon_factor(&o->config, slots[i]->rows, slots[i]->cols),
                            matrices[i].x, w + slots[i]->at);
        ckpt_eng_drop(e, mark);
    }
done:
    ckpt_eng_drop(e, mark);
    return status;
}
