/* Initial values of parameters (init.h). */
#include "init.h"

#include <math.h>
#include <string.h>

#include "checked.h"
#include "philox.h"

#define PIECE                                                                                      \
    16384 /* elements a thread takes at a time; even, so that pairs of normals stay whole */

typedef enum rule {
    RULE_NONE,
    RULE_ZERO,
    RULE_ONE,
    RULE_A_LOG,
    RULE_DT_BIAS,
    RULE_CONV,
    RULE_SCALED,
    RULE_NORMAL
} rule;

static bool ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), k = strlen(end);
    return n >= k && strcmp(name + n - k, end) == 0;
}

/* The word after the n-th dot. */
static bool kind_is(const char *name, const char *kind)
{
    size_t k = strlen(kind);
    if (strncmp(name, "blocks.", 7) != 0)
        return false;
    const char *dot = strchr(name + 7, '.');
    return dot != NULL && strncmp(dot + 1, kind, k) == 0 && dot[1 + k] == '.';
}

static rule rule_of_vector(const ckpt_init_config *c, const char *name)
{
    if (ends_in(name, ".A_log"))
        return c->zero_A_log && kind_is(name, "kda") ? RULE_ZERO : RULE_A_LOG;
    if (ends_in(name, ".dt_bias"))
        return kind_is(name, "gdn") || kind_is(name, "gdn2") ? RULE_ONE : RULE_DT_BIAS;
    if (ends_in(name, ".D"))
        return RULE_ONE;
    if (ends_in(name, ".bias"))
        return RULE_ZERO;
    if (ends_in(name, ".o_norm.weight"))
        return RULE_ONE;
    if (ends_in(name, "norm.weight"))
        return c->centered ? RULE_ZERO : RULE_ONE;
    return RULE_NONE;
}

static rule rule_of(const ckpt_init_config *c, const char *name, int rank)
{
    if (rank == 1)
        return rule_of_vector(c, name);
    if (rank == 3 && strstr(name, ".conv_") != NULL)
        return c->conv_normal ? RULE_NORMAL : RULE_CONV;
    if (rank != 2 || !ends_in(name, ".weight"))
        return RULE_NONE;
    if (c->scaled && c->blocks > 0 && (ends_in(name, ".o.weight") || ends_in(name, ".down.weight")))
        return RULE_SCALED;
    return RULE_NORMAL;
}

const char *ckpt_init_rule(const ckpt_init_config *c, const char *name, int rank)
{
    switch (rule_of(c, name, rank)) {
    case RULE_ZERO:
        return "0";
    case RULE_ONE:
        return "1";
    case RULE_A_LOG:
        return "ln U(1, 16)";
    case RULE_DT_BIAS:
        return "inverse softplus of exp U(ln 0.001, ln 0.1)";
    case RULE_CONV:
        return "U(-1/sqrt(width), 1/sqrt(width))";
    case RULE_SCALED:
        return "normal(0, std / sqrt(blocks))";
    case RULE_NORMAL:
        return "normal(0, std)";
    case RULE_NONE:
        break;
    }
    return NULL;
}

/* FNV-1a, 64 bits: the stream of a name. */
static uint64_t hash_name(const char *name)
{
    uint64_t h = UINT64_C(0xCBF29CE484222325);
    for (; *name != '\0'; name++)
        h = (h ^ (uint8_t)*name) * UINT64_C(0x100000001B3);
    return h;
}

typedef struct job {
    rule rule;
    ckpt_philox_stream stream;
    double scale; /* standard deviation, or half width */
    int64_t lo, hi;
    float *out;
} job;

static double value(const job *j, uint64_t i)
{
    switch (j->rule) {
    case RULE_A_LOG:
        return log(1 + 15 * ckpt_philox_uniform(&j->stream, i));
    case RULE_DT_BIAS: {
        const double u = ckpt_philox_uniform(&j->stream, i);
        const double dt = exp(u * (log(0.1) - log(1e-3)) + log(1e-3));
        const double at_least = dt > 1e-4 ? dt : 1e-4;
        return at_least + log(-expm1(-at_least));
    }
    case RULE_CONV:
        return j->scale * (2 * ckpt_philox_uniform(&j->stream, i) - 1);
    case RULE_SCALED:
    case RULE_NORMAL:
        return j->scale * ckpt_philox_normal(&j->stream, i);
    case RULE_ONE:
        return 1;
    case RULE_ZERO:
    case RULE_NONE:
        break;
    }
    return 0;
}

static void fill_piece(void *arg, int64_t item, int worker)
{
    const job *j = arg;
    (void)worker;
    const int64_t from = j->lo + item * PIECE, to = ckpt_min_i64(from + PIECE, j->hi);
    for (int64_t i = from; i < to; i++)
        j->out[i - j->lo] = (float)value(j, (uint64_t)i);
}

ckpt_status ckpt_init_range(const ckpt_eng *e, const ckpt_init_config *c, const char *name,
                            int rank, const int64_t *dims, int64_t lo, int64_t hi, float *out,
                            ckpt_err *err)
{
    int64_t n;
    if (!ckpt_numel(rank, dims, &n) || lo < 0 || hi < lo || hi > n)
        return ckpt_fail(err, CKPT_E_USAGE, "initialise %s: elements %lld to %lld", name,
                         (long long)lo, (long long)hi);
    job j = {
        .rule = rule_of(c, name, rank),
        .stream = {.seed = c->seed, .stream = hash_name(name), .use = CKPT_PHILOX_INIT},
        .scale = c->std,
        .lo = lo,
        .hi = hi,
        .out = out
    };
    if (j.rule == RULE_NONE)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no initial values are known for tensor '%s'",
                         name);
    if (j.rule == RULE_CONV)
        j.scale = 1 / sqrt((double)dims[rank - 1]);
    else if (j.rule == RULE_SCALED)
        j.scale = c->std / sqrt((double)c->blocks);
    ckpt_eng_parallel(e, (hi - lo + PIECE - 1) / PIECE, fill_piece, &j);
    return CKPT_OK;
}
