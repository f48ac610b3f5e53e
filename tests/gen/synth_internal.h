/* Between synth.c and synth_gpt.c. */
#ifndef CKPT_TESTS_SYNTH_INTERNAL_H
#define CKPT_TESTS_SYNTH_INTERNAL_H

#include "synth.h"

typedef struct dims4 {
    int rank;
    int64_t d[4];
} dims4;

static inline dims4 make_dims(int rank, int64_t a, int64_t b, int64_t c, int64_t d)
{
    dims4 dims = {
        rank, {a, b, c, d}
    };
    return dims;
}

#define D1(a) make_dims(1, (a), 0, 0, 0)
#define D2(a, b) make_dims(2, (a), (b), 0, 0)
#define D3(a, b, c) make_dims(3, (a), (b), (c), 0)
#define D4(a, b, c, d) make_dims(4, (a), (b), (c), (d))

/* Append a tensor with a printf-style name. */
void synth_add(synth_model *m, const char *dtype, dims4 dims, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

typedef struct text {
    char *s;
    size_t n, cap;
} text;

void synth_put(text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* "key":value, with null for 0. */
void synth_put_int(text *t, const char *key, int64_t value);

int64_t synth_gcd(int64_t a, int64_t b);
synth_sizes synth_draw_sizes(synth_rng *rng);
/* What a mesh must divide, from the pattern. */
void synth_set_units(synth_model *m, const synth_sizes *s);
/* Kimi-Linear of these sizes, every fourth layer MLA. */
/* Those of Kimi-Linear-48B as published, without layers and experts. */
synth_sizes synth_kimi_sizes(void);
void synth_kimi_sized(synth_model *m, const synth_sizes *s, uint64_t seed);
void synth_random_gpt(synth_model *m, synth_rng *rng);

#endif
