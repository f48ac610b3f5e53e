/* Tables of rotary embeddings on a device: made by this process, once for a run. */
#include "attn.h"

#include <stdlib.h>

#include "context.h"

/* The f32 build's function, which is linked too. */
ckpt_status ckpt_eng_rope_table_f32(ckpt_eng *e, const ckpt_eng_rope *r, const ckpt_eng_seq *seq,
                                    const int64_t *offset, float *cos, float *sin, ckpt_err *err);

ckpt_status ENG(rope_table)(ckpt_eng *e, const ckpt_eng_rope *r, const ckpt_eng_seq *seq,
                            const int64_t *offset, wreal *cos, wreal *sin, ckpt_err *err)
{
    int64_t n = ckpt_eng_tokens(seq) * (r->dim / 2);
    ckpt_eng here = {.threads = e->threads, .isa = e->isa};
    ckpt_status status;
    float *x = NULL;
    if (e->dry)
        return CKPT_OK;
    x = malloc(2 * (size_t)n * sizeof *x + 1);
    if (x == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for rotary tables");
    CKPT_CHECK(ckpt_eng_rope_table_f32(&here, r, seq, offset, x, x + n, err));
    CKPT_CHECK(ckpt_eng_put(e, cos, x, (size_t)n * sizeof *x, err));
    CKPT_CHECK(ckpt_eng_put(e, sin, x + n, (size_t)n * sizeof *x, err));
done:
    free(x);
    return status;
}
