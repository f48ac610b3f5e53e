#include "spans.h"

#include "checked.h"

#include <stdlib.h>

ckpt_status ckpt_spans_add(void *self, uint64_t offset, uint64_t len, ckpt_err *err)
{
    ckpt_spans *s = self;
    if (s->n > 0 && s->span[s->n - 1][1] == offset) {
        s->span[s->n - 1][1] += len;
        return CKPT_OK;
    }
    void *p = s->span;
    ckpt_status status = ckpt_grow(&p, &s->cap, s->n + 1, sizeof *s->span, err);
    s->span = p;
    if (status == CKPT_OK) {
        s->span[s->n][0] = offset;
        s->span[s->n++][1] = offset + len;
    }
    return status;
}

static int by_start(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return x[0] < y[0] ? -1 : x[0] > y[0];
}

void ckpt_spans_settle(ckpt_spans *s)
{
    size_t n = 0;
    if (s->n > 1)
        qsort(s->span, s->n, sizeof *s->span, by_start);
    for (size_t i = 0; i < s->n; i++)
        if (n > 0 && s->span[i][0] <= s->span[n - 1][1]) {
            s->span[n - 1][1] = ckpt_max_u64(s->span[n - 1][1], s->span[i][1]);
        } else {
            s->span[n][0] = s->span[i][0];
            s->span[n++][1] = s->span[i][1];
        }
    s->n = n;
}

ckpt_status ckpt_spans_gaps(const ckpt_spans *s, uint64_t lo, uint64_t hi, ckpt_run_fn fn,
                            void *self, ckpt_err *err)
{
    for (size_t i = 0; i <= s->n; i++) {
        uint64_t next = i < s->n ? s->span[i][0] : hi;
        ckpt_status status = next > lo ? fn(self, lo, next - lo, err) : CKPT_OK;
        if (status != CKPT_OK)
            return status;
        lo = i < s->n ? s->span[i][1] : hi;
    }
    return CKPT_OK;
}
