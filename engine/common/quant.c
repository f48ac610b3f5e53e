/* What a quantised prefill calls, whatever computes it. */
#include "quant/kda_quant.h"

#include "checked.h"

#include <math.h>

ckpt_quant_stage ckpt_quant_stage_of(int handle)
{
    if (handle == CKPT_HANDLE_KEY_INTERACTION_LHS || handle == CKPT_HANDLE_KEY_INTERACTION_RHS ||
        handle == CKPT_HANDLE_OUTPUT_SCORE_LHS || handle == CKPT_HANDLE_OUTPUT_SCORE_RHS)
        return CKPT_QUANT_IN_TILES;
    if (handle >= CKPT_HANDLE_WY_VALUE_LHS && handle <= CKPT_HANDLE_WY_KEY_RHS)
        return CKPT_QUANT_IN_SOLVE;
    return handle == CKPT_HANDLE_STATE ? CKPT_QUANT_IN_STATE : CKPT_QUANT_IN_WALK;
}

void ckpt_quant_count(const ckpt_quant *q, const ckpt_eng_seq *seq, ckpt_quant_report *r)
{
    int64_t steps = 0;
    for (int64_t n = 0; n < seq->n; n++)
        steps = ckpt_max_i64(steps, (seq->cu[n + 1] - seq->cu[n] + CKPT_QUANT_CHUNK - 1) /
                                        CKPT_QUANT_CHUNK);
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++) {
        const ckpt_quant_stage at = ckpt_quant_stage_of(h);
        const int64_t calls = at == CKPT_QUANT_IN_TILES   ? CKPT_QUANT_CHUNK / CKPT_QUANT_TILE
                              : at == CKPT_QUANT_IN_SOLVE ? 1
                              : at == CKPT_QUANT_IN_WALK  ? steps
                                                          : steps + 1;
        r->calls[h] += q->kind[h] != CKPT_QUANT_OFF ? calls : 0;
    }
}

static double worse(double a, double b)
{
    return isnan(a) || a >= b ? a : b;
}

void ckpt_quant_worst(const double errors[2], ckpt_quant_report *r)
{
    r->inverse_error = worse(r->inverse_error, errors[0]);
    r->inverse_residual = worse(r->inverse_residual, errors[1]);
}
