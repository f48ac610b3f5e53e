/* Statistics of one tensor and differences between two, fed block by block in order.
 * Everything accumulates in double. A complex number counts as two values, real and imaginary. */
#ifndef CKPT_NUMBERS_H
#define CKPT_NUMBERS_H

#include "dtype.h"

/* What the values of a dtype are: itself, or the parts of a complex type (*parts = 2). */
ckpt_dtype ckpt_component(ckpt_dtype dtype, int *parts);
/* n values as doubles. index 0 is data[0]; not for complex types. */
void ckpt_decode(ckpt_dtype dtype, const uint8_t *data, size_t n, double *out);

typedef struct ckpt_stats {
    int64_t n, nan, inf, zero; /* inf: either sign */
    int64_t finite;
    int64_t first_bad; /* element of the first NaN or infinity, -1 none */
    double min, max;   /* of finite values */
    double mean, m2;   /* of finite values; m2 = sum of squared deviations */
} ckpt_stats;

void ckpt_stats_init(ckpt_stats *s);
void ckpt_stats_feed(ckpt_stats *s, ckpt_dtype dtype, const uint8_t *data, size_t bytes);
double ckpt_stats_std(const ckpt_stats *s); /* population; nan when there is no finite value */

#define CKPT_LANES 4 /* sums that go side by side: value i of a tensor is in lane i % 4 */

typedef struct ckpt_delta {
    double atol, rtol;
    int64_t n, changed;        /* values; changed: by their bits */
    int64_t beyond;            /* values outside |a-b| <= atol + rtol*|b| */
    int64_t first;             /* first changed element of the tensor, -1 none */
    double max_abs, max_rel;   /* rel: |a-b| / max(|a|,|b|); nan against a number counts as inf */
    double sum_sq[CKPT_LANES]; /* of a-b over finite pairs */
    double dot[CKPT_LANES], aa[CKPT_LANES], bb[CKPT_LANES];
    uint64_t max_ulp; /* representable values between; 0 for integers */
} ckpt_delta;

void ckpt_delta_init(ckpt_delta *d, double atol, double rtol);
void ckpt_delta_feed(ckpt_delta *d, ckpt_dtype dtype, const uint8_t *a, const uint8_t *b,
                     size_t bytes);
double ckpt_delta_rms(const ckpt_delta *d);
/* In [-1, 1]; 1 when both are zero, nan when only one is or a value is not finite. */
double ckpt_delta_cosine(const ckpt_delta *d);

#endif
