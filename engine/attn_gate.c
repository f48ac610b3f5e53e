/* Output gates of the attention blocks. */
#include "move.h"

#include "checked.h"
#include "real_math.h"

#define ROWS 64 /* an item */

typedef struct gate_job {
    int64_t T, N, D, per;
    const real *o, *g, *dy;
    real *y, *dg; /* y: result, or gradient of o */
} gate_job;

static void gate_item(void *arg, int64_t item, int worker)
{
    const gate_job *j = arg;
    int64_t rows = j->T * j->N, hi = ckpt_min_i64((item + 1) * ROWS, rows);
    (void)worker;
    for (int64_t r = item * ROWS; r < hi; r++)
        for (int64_t c = 0; c < j->D; c++)
            j->y[r * j->D + c] =
                j->o[r * j->D + c] * ENG(logistic)(j->g[r * j->per + (j->per == 1 ? 0 : c)]);
}

ckpt_status ENG(gate_heads)(ckpt_eng *e, int64_t T, int64_t N, int64_t D, int64_t per,
                            const real *o, const real *g, real *y, ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(e, (T * N + ROWS - 1) / ROWS, gate_item,
                          &(gate_job){T, N, D, per, o, g, NULL, y, NULL});
    return CKPT_OK;
}

static void gate_bwd_item(void *arg, int64_t item, int worker)
{
    const gate_job *j = arg;
    int64_t rows = j->T * j->N, hi = ckpt_min_i64((item + 1) * ROWS, rows);
    (void)worker;
    for (int64_t r = item * ROWS; r < hi; r++) {
        real sum = 0;
        for (int64_t c = 0; c < j->D; c++) {
            real s = ENG(logistic)(j->g[r * j->per + (j->per == 1 ? 0 : c)]);
            real dy = j->dy[r * j->D + c], ds = dy * j->o[r * j->D + c];
            j->y[r * j->D + c] = dy * s;
            if (j->per != 1)
                j->dg[r * j->per + c] = ds * s * (1 - s);
            sum += ds;
        }
        if (j->per == 1) {
            real s = ENG(logistic)(j->g[r]);
            j->dg[r] = sum * s * (1 - s);
        }
    }
}

ckpt_status ENG(gate_heads_bwd)(ckpt_eng *e, int64_t T, int64_t N, int64_t D, int64_t per,
                                const real *o, const real *g, const real *dy, real *d_o, real *dg,
                                ckpt_err *err)
{
    (void)err;
    if (!e->dry)
        ckpt_eng_parallel(e, (T * N + ROWS - 1) / ROWS, gate_bwd_item,
                          &(gate_job){T, N, D, per, o, g, dy, d_o, dg});
    return CKPT_OK;
}
