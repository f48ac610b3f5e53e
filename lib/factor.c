#define _GNU_SOURCE /* O_TMPFILE */
#include "factor.h"
#include "checked.h"
#include "gather.h"
#include "job.h"
#include "svd.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- preparing --------------------------------------------------------------------------------- */

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static void describe(ckpt_factor *f, ckpt_derived *d, int64_t *dims, int64_t rows, int64_t cols)
{
    dims[0] = rows;
    dims[1] = cols;
    d->kind = CKPT_DERIVE_FACTOR;
    d->factor = f;
    d->rows = rows;
    d->cols = cols;
    d->chunk = (ckpt_chunk){.lo = dims + 2, .len = dims, .file = CKPT_DERIVED_FILE};
    d->tensor = (ckpt_tensor){.name = f->name,
                              .dims = dims,
                              .chunks = &d->chunk,
                              .n_chunks = 1,
                              .dtype = f->dtype,
                              .rank = 2};
}

static ckpt_status new_factor(const char *name, int64_t rows, int64_t cols, int64_t rank,
                              ckpt_dtype dtype, ckpt_arena *arena, ckpt_factor **out, ckpt_err *err)
{
    ckpt_factor *f = ckpt_arena_alloc(arena, sizeof *f);
    int64_t *dims = ckpt_arena_array(arena, 8, sizeof *dims); /* each: dims, then zeros for lo */
    uint64_t bytes;
    if (f == NULL || dims == NULL)
        return no_memory(err);
    if (rank > ckpt_min_i64(rows, cols))
        return ckpt_fail(err, CKPT_E_USAGE, "'%s' is [%lld, %lld]: rank %lld exceeds it", name,
                         (long long)rows, (long long)cols, (long long)rank);
    ckpt_status status = ckpt_svd_ready(err);
    if (status != CKPT_OK)
        return status;
    if (ckpt_svd_bytes(rows, cols) == UINT64_MAX || !ckpt_dtype_bytes(dtype, rows * rank, &bytes) ||
        !ckpt_dtype_bytes(dtype, rank * cols, &bytes))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is too large for an SVD", name);
    *f = (ckpt_factor){
        .name = name, .rows = rows, .cols = cols, .rank = rank, .dtype = dtype, .fd = -1};
    describe(f, &f->a, dims, rank, cols);
    describe(f, &f->b, dims + 4, rows, rank);
    *out = f;
    return CKPT_OK;
}

ckpt_status ckpt_factor_prepare(const ckpt_model *model, const ckpt_canon *full, int64_t rank,
                                ckpt_arena *arena, ckpt_factor **out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (full->rank != 2 || !ckpt_dtype_castable(full->dtype, CKPT_F64))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s' is no matrix of floating-point numbers",
                         full->name);
    CKPT_CHECK(
        new_factor(full->name, full->dims[0], full->dims[1], rank, full->dtype, arena, out, err));
    CKPT_CHECK(ckpt_gather_canon(model->src, full, arena, &(*out)->full, err));
    (*out)->full.to = CKPT_F64;
done:
    return status;
}

ckpt_status ckpt_factor_product(const ckpt_model *model, const ckpt_canon *low,
                                const ckpt_canon *high, const char *name, int64_t rank,
                                ckpt_arena *arena, ckpt_factor **out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_derived *d;
    CKPT_CHECK(ckpt_derive_fold(model, low, high, name, arena, &d, err));
    d->tensor.dtype = CKPT_F64; /* not rounded in between */
    CKPT_CHECK(new_factor(name, d->rows, d->cols, rank, low->dtype, arena, out, err));
    (*out)->product = d;
done:
    return status;
}

/* ---- computing --------------------------------------------------------------------------------- */

typedef struct run {
    ckpt_source *src;
    ckpt_factor **factors;
    int fd;
} run;

static ckpt_status read_full(const run *r, const ckpt_factor *f, double *w, ckpt_scratch *scratch,
                             ckpt_err *err)
{
    size_t bytes = (size_t)(f->rows * f->cols) * sizeof *w;
    ckpt_status status =
        f->product != NULL
            ? ckpt_derived_read(r->src, f->product, w, bytes, 0, err)
            : ckpt_gather_run(r->src, &f->full, 0, bytes, (uint8_t *)w, scratch, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "'%s'", f->name);
    return status;
}

/* Round n values to dtype, keep the bytes at offset `at` of the file, and widen them again. */
static ckpt_status keep(const run *r, const ckpt_factor *f, double *x, int64_t n, uint64_t at,
                        uint8_t *narrow, ckpt_err *err)
{
    uint64_t bytes = 0;
    ckpt_dtype_cast(f->dtype, narrow, CKPT_F64, x, (size_t)n);
    (void)ckpt_dtype_bytes(f->dtype, n, &bytes);
    ckpt_status status = ckpt_pwrite_full(r->fd, narrow, (size_t)bytes, at, err);
    if (status != CKPT_OK)
        ckpt_err_frame(err, "factors of '%s'", f->name);
    ckpt_dtype_cast(CKPT_F64, x, f->dtype, narrow, (size_t)n);
    return status;
}

static uint64_t a_bytes(const ckpt_factor *f)
{
    uint64_t bytes = 0;
    (void)ckpt_dtype_bytes(f->dtype, f->rank * f->cols, &bytes);
    return bytes;
}

static ckpt_status compute(ckpt_worker *worker, size_t item, ckpt_err *err)
{
    const run *r = worker->job->self;
    ckpt_factor *f = r->factors[item];
    ckpt_status status = CKPT_OK;
    size_t n_a = (size_t)(f->rank * f->cols), n_b = (size_t)(f->rows * f->rank);
    size_t n_w = (size_t)(f->rows * f->cols);
    double *w = malloc(n_w * sizeof *w), *a = malloc((n_a + n_b) * sizeof *a);
    uint8_t *narrow = malloc((n_a > n_b ? n_a : n_b) * sizeof *a);
    if (w == NULL || a == NULL || narrow == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for the SVD of '%s'", f->name);
        goto done;
    }
    double *b = a + n_a;
    CKPT_CHECK(read_full(r, f, w, &worker->scratch, err));
    CKPT_TRY(ckpt_svd_factor(w, f->rows, f->cols, f->rank, a, b, &f->tail, err), "'%s'", f->name);
    CKPT_CHECK(keep(r, f, a, (int64_t)n_a, f->at, narrow, err));
    CKPT_CHECK(keep(r, f, b, (int64_t)n_b, f->at + a_bytes(f), narrow, err));
    CKPT_CHECK(read_full(r, f, w, &worker->scratch, err));
    f->error = ckpt_svd_error(w, f->rows, f->cols, f->rank, a, b);
    ckpt_job_advance(worker, n_w * sizeof *w);
done:
    free(w);
    free(a);
    free(narrow);
    return status;
}

/* An unnamed file in dir: nothing to clean up, whatever happens. */
static ckpt_status open_unnamed(const char *dir, ckpt_arena *arena, int *fd, ckpt_err *err)
{
    *fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (*fd >= 0)
        return CKPT_OK;
    char *path = ckpt_arena_printf(arena, "%s/.ckpt-factors.XXXXXX", dir);
    if (path == NULL)
        return no_memory(err);
    *fd = mkstemp(path);
    if (*fd < 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    (void)unlink(path);
    return CKPT_OK;
}

/* A matrix of that rank but for the rounding of its elements loses nothing else. */
static ckpt_status say_error(ckpt_plan *plan, const ckpt_factor *f, ckpt_err *err)
{
    double roundoff = ldexp(1, -1 - ckpt_dtype_get(f->dtype)->man_bits);
    const char *line =
        ckpt_arena_printf(&plan->arena, "%s, relative Frobenius error %.3e%s", plan->lossy[f->line],
                          f->error, f->tail < roundoff ? " (no more than rounding)" : "");
    if (line == NULL)
        return no_memory(err);
    plan->lossy[f->line] = line;
    return CKPT_OK;
}

/* Places in the file, and the largest work space of one. */
static uint64_t place_all(ckpt_plan *plan, run *r, size_t *n, uint64_t *total)
{
    uint64_t at = 0, most = 0;
    *n = 0;
    *total = 0;
    for (ckpt_factor *f = plan->factors; f != NULL; f = f->next) {
        uint64_t b = 0, matrix = 8 * (uint64_t)(f->rows * f->cols);
        (void)ckpt_dtype_bytes(f->dtype, f->rows * f->rank, &b);
        f->at = at;
        at += a_bytes(f) + b;
        *total += matrix;
        most = ckpt_max_u64(most, 2 * matrix + ckpt_svd_bytes(f->rows, f->cols));
        r->factors[(*n)++] = f;
    }
    return most;
}

ckpt_status ckpt_factor_run(ckpt_plan *plan, const char *dir, const ckpt_stream_opts *opts,
                            ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    run r = {.src = plan->model->src, .fd = -1};
    ckpt_job j = {.run = compute, .self = &r, .piece = 4096};
    size_t n = 0;
    if (plan->factors == NULL)
        return CKPT_OK;
    for (const ckpt_factor *f = plan->factors; f != NULL; f = f->next)
        n++;
    r.factors = ckpt_arena_array(&plan->arena, n, sizeof *r.factors);
    if (r.factors == NULL)
        return no_memory(err);
    CKPT_CHECK(open_unnamed(dir, &plan->arena, &r.fd, err));
    uint64_t most = place_all(plan, &r, &j.n_items, &j.total_bytes);
    uint64_t fit = ckpt_max_u64(opts->memory / most, 1);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t threads =
        opts->threads > 0 ? (uint64_t)opts->threads : (uint64_t)(cores > 0 ? cores : 1);
    ckpt_stream_opts own = {.threads = (int)ckpt_min_u64(ckpt_min_u64(fit, threads), n),
                            .progress = opts->progress};
    CKPT_CHECK(ckpt_job_open(&j, &own, err));
    int before = ckpt_svd_begin();
    status = ckpt_job_run(&j);
    ckpt_svd_end(before);
    for (ckpt_factor *f = plan->factors; status == CKPT_OK && f != NULL; f = f->next) {
        f->fd = r.fd;
        status = say_error(plan, f, err);
    }
    if (status == CKPT_OK) {
        plan->factor_fd = r.fd;
        r.fd = -1;
    }
done:
    ckpt_job_close(&j);
    if (r.fd >= 0)
        close(r.fd);
    return status;
}

ckpt_status ckpt_factor_read(const ckpt_derived *d, void *buf, size_t n, uint64_t offset,
                             ckpt_err *err)
{
    const ckpt_factor *f = d->factor;
    if (f->fd < 0)
        return ckpt_fail(err, CKPT_E_INTERNAL, "factors of '%s' are not computed yet", f->name);
    return ckpt_pread_full(f->fd, buf, n, f->at + (d == &f->b ? a_bytes(f) : 0) + offset, err);
}
