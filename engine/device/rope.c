/* Tables of rotary embeddings on a device: frequencies from this process, in double as everywhere, angles
 * and their cosines there, from f32 as engine/rope.c has them. */
#include "attn.h"

#include "context.h"

/* The f32 build's function, which is linked too. */
ckpt_status ckpt_eng_rope_freqs_f32(const ckpt_eng_rope *r, float *freq, float *scale,
                                    ckpt_err *err) CKPT_MUST_USE;

ckpt_status ENG(rope_table)(ckpt_eng *e, const ckpt_eng_rope *r, const ckpt_eng_seq *seq,
                            const int64_t *offset, wreal *cos, wreal *sin, ckpt_err *err)
{
    const size_t mark = ckpt_eng_mark(e);
    const ckpt_cuda c = plain(e);
    float freq[CKPT_ENG_ROPE_MAX / 2], scale;
    ckpt_cuda_seq s;
    ckpt_status status = ckpt_eng_rope_freqs_f32(r, freq, &scale, err);
    if (status != CKPT_OK)
        return status;
    const int64_t half = r->dim / 2;
    float *there = ckpt_eng_take(e, half, sizeof *there);
    int64_t *first = offset != NULL ? ckpt_eng_take(e, seq->n, sizeof *first) : NULL;
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (e->dry)
        goto done;
    CKPT_CHECK(seq_of(e, seq, &s, err));
    CKPT_CHECK(ckpt_eng_put(e, there, freq, (size_t)half * sizeof *freq, err));
    if (offset != NULL)
        CKPT_CHECK(ckpt_eng_put(e, first, offset, (size_t)seq->n * sizeof *first, err));
    CKPT_CHECK(api_of(e)->rope_table(&c, &s, first, half, there, scale, cos, sin, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
