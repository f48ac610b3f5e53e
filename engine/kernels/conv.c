/* Causal depthwise convolution + SiLU on one block of channels, all sequences in order. */
#include "kernels.h"
#include "math.h"

#define BLOCK CKPT_ENG_CONV_BLOCK
#define SIMD _Pragma("omp simd")

typedef struct taps {
    real w[CKPT_ENG_CONV_MAX][BLOCK], bias[BLOCK]; /* transposed: a tap is a vector of channels */
} taps;

static void load_taps(const ENG(conv_task) * t, taps *k)
{
    for (int64_t c = 0; c < t->n; c++) {
        for (int64_t j = 0; j < t->W; j++)
            k->w[j][c] = t->w[(t->lo + c) * t->W + j];
        k->bias[c] = t->bias ? t->bias[t->lo + c] : 0;
    }
}

/* Row `i` of a sequence's input, i in -(W-1) .. length-1; NULL where it is zeros. */
static const real *row(const ENG(conv_task) * t, int64_t seq, int64_t start, int64_t i)
{
    if (i >= 0)
        return t->x + (start + i) * t->C + t->lo;
    if (!t->history)
        return NULL;
    return t->history + (seq * (t->W - 1) + t->W - 1 + i) * t->C + t->lo;
}

static void pre_activation(const ENG(conv_task) * t, const taps *k, int64_t seq, int64_t start,
                           int64_t i, real *p)
{
    const int64_t n = t->n;
    SIMD for (int64_t c = 0; c < n; c++) p[c] = k->bias[c];
    for (int64_t j = 0; j < t->W; j++) {
        const real *x = row(t, seq, start, i - t->W + 1 + j), *w = k->w[j];
        if (x) {
            SIMD for (int64_t c = 0; c < n; c++) p[c] += w[c] * x[c];
        }
    }
}

void ENGK(conv)(const ENG(conv_task) * t)
{
    taps k;
    real p[BLOCK];
    load_taps(t, &k);
    for (int64_t s = 0; s < t->seq->n; s++) {
        int64_t start = t->seq->cu[s], length = t->seq->cu[s + 1] - start;
        for (int64_t i = 0; i < length; i++) {
            pre_activation(t, &k, s, start, i, p);
            real *y = t->y + (start + i) * t->C + t->lo;
            const int64_t n = t->n;
            SIMD for (int64_t c = 0; c < n; c++) y[c] = p[c] * k_sigmoid(p[c]);
        }
    }
}

/* Gradient row that matches row(): NULL where nobody wants it. */
static real *grad_row(const ENG(conv_task) * t, int64_t seq, int64_t start, int64_t i)
{
    if (i >= 0)
        return t->dx + (start + i) * t->C + t->lo;
    if (!t->dhistory)
        return NULL;
    return t->dhistory + (seq * (t->W - 1) + t->W - 1 + i) * t->C + t->lo;
}

void ENGK(conv_bwd)(const ENG(conv_task) * t)
{
    taps k, d = {0};
    real p[BLOCK];
    const int64_t n = t->n, W = t->W;
    load_taps(t, &k);
    for (int64_t s = 0; s < t->seq->n; s++) {
        int64_t start = t->seq->cu[s], length = t->seq->cu[s + 1] - start;
        for (int64_t i = 1 - W; i < 0 && t->dhistory; i++) {
            real *g = grad_row(t, s, start, i);
            SIMD for (int64_t c = 0; c < n; c++) g[c] = 0;
        }
        for (int64_t i = 0; i < length; i++) {
            const real *dy = t->dy + (start + i) * t->C + t->lo;
            pre_activation(t, &k, s, start, i, p);
            SIMD for (int64_t c = 0; c < n; c++)
            {
                p[c] = dy[c] * k_silu_slope(p[c], k_sigmoid(p[c]));
                d.bias[c] += p[c];
            }
            real *own = grad_row(t, s, start, i);
            SIMD for (int64_t c = 0; c < n; c++) own[c] = 0;
            for (int64_t j = 0; j < W; j++) {
                const real *x = row(t, s, start, i - W + 1 + j), *w = k.w[j];
                real *g = grad_row(t, s, start, i - W + 1 + j), *dw = d.w[j];
                if (x) {
                    SIMD for (int64_t c = 0; c < n; c++) dw[c] += p[c] * x[c];
                }
                if (g) {
                    SIMD for (int64_t c = 0; c < n; c++) g[c] += w[c] * p[c];
                }
            }
        }
    }
    for (int64_t c = 0; c < n; c++) {
        for (int64_t j = 0; t->dw && j < W; j++)
            t->dw[(t->lo + c) * W + j] += d.w[j][c];
        if (t->dbias)
            t->dbias[t->lo + c] += d.bias[c];
    }
}
