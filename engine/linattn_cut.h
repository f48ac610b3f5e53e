/* Between linattn.c and linattn_cut.c: linear attention whose sequences run over several ranks (cut.h). */
#ifndef CKPT_ENGINE_LINATTN_CUT_H
#define CKPT_ENGINE_LINATTN_CUT_H

#include "cut.h"

/* Room for what comes before this rank's tokens; NULLs without a cut. Also asks ckpt_eng_check. */
ckpt_status ENG(linattn_cut_save)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                  ENG(linattn_saved) * s, ckpt_err *err) CKPT_MUST_USE;
/* Histories of the convolutions, from pre_q, pre_k, pre_v of this rank and the ones before. */
ckpt_status ENG(linattn_cut_rows)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                  const ENG(linattn_saved) * s, ckpt_err *err) CKPT_MUST_USE;
/* dhistory [N, W-1, n] of the rank after this one comes to dpre [T, n], and this rank's goes on. */
ckpt_status ENG(linattn_cut_rows_bwd)(ckpt_eng *e, const ckpt_eng_seq *seq, int64_t n, int64_t W,
                                      real *dpre, real *dhistory, ckpt_err *err) CKPT_MUST_USE;
/* The recurrence between the state that comes in and the one that goes on; s->o, s->states, s->state0. */
ckpt_status ENG(linattn_cut_delta)(ckpt_eng *e, const ckpt_eng_linattn *b, const ckpt_eng_seq *seq,
                                   const ENG(delta_in) * in, const ENG(linattn_saved) * s,
                                   ckpt_err *err) CKPT_MUST_USE;
ckpt_status ENG(linattn_cut_delta_bwd)(ckpt_eng *e, const ckpt_eng_linattn *b,
                                       const ckpt_eng_seq *seq, const ENG(delta_in) * in,
                                       const ENG(linattn_saved) * s, const real *d_o,
                                       const ENG(delta_grad) * grad, ckpt_err *err) CKPT_MUST_USE;

#endif
