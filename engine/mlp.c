/* The dense MLP block (mla-moe-math.md section 3). */
#include "blocks.h"

#include "checked.h"

ckpt_status ENG(mlp_save)(ckpt_eng *e, const ckpt_eng_mlp *m, int64_t T, ENG(mlp_saved) * saved,
                          ckpt_err *err)
{
    int64_t n;
    if (m->H <= 0 || m->F <= 0 || T < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "mlp: %lld tokens, hidden %lld, inner %lld",
                         (long long)T, (long long)m->H, (long long)m->F);
    if (!ckpt_mul_i64(T, m->F, &n))
        return ckpt_fail(err, CKPT_E_NOMEM, "mlp: %lld tokens of %lld", (long long)T,
                         (long long)m->F);
    saved->gate = m->gated ? ckpt_eng_take(e, n, sizeof(real)) : NULL;
    saved->up = ckpt_eng_take(e, n, sizeof(real));
    return ckpt_eng_check(e, err);
}

/* a = the activation, from the saved pre-activations. */
static ckpt_status activate(ckpt_eng *e, const ckpt_eng_mlp *m, int64_t T, const ENG(mlp_saved) * s,
                            real *a, ckpt_err *err)
{
    if (m->gated)
        return ENG(swiglu)(e, T, m->F, s->gate, s->up, m->F, m->clamp, a, m->F, err);
    return ENG(relu2)(e, T * m->F, s->up, a, err);
}

ckpt_status ENG(mlp)(ckpt_eng *e, const ckpt_eng_mlp *m, int64_t T, const ENG(mlp_params) * p,
                     const real *x, bool add, real *y, const ENG(mlp_saved) * saved, ckpt_err *err)
{
    const int64_t H = m->H, F = m->F;
    const size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *a = ckpt_eng_take(e, T * F, sizeof(real));
    CKPT_CHECK(ckpt_eng_check(e, err));
    if (m->gated)
        CKPT_CHECK(ENG(linear)(e, T, H, F, x, H, p->gate, NULL, false, saved->gate, F, err));
    CKPT_CHECK(ENG(linear)(e, T, H, F, x, H, p->up, NULL, false, saved->up, F, err));
    CKPT_CHECK(activate(e, m, T, saved, a, err));
    CKPT_CHECK(ENG(linear)(e, T, F, H, a, F, p->down, NULL, add, y, H, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}

ckpt_status ENG(mlp_bwd)(ckpt_eng *e, const ckpt_eng_mlp *m, int64_t T, const ENG(mlp_params) * p,
                         const ENG(mlp_saved) * saved, const real *x, const real *dy, bool add,
                         real *dx, const ENG(mlp_params) * grads, ckpt_err *err)
{
    const int64_t H = m->H, F = m->F;
    const size_t mark = ckpt_eng_mark(e);
    ckpt_status status;
    real *a = ckpt_eng_take(e, T * F, sizeof(real)), *da = ckpt_eng_take(e, T * F, sizeof(real));
    real *dgate = a, *dup = da; /* a is done with when dgate is written, da read before dup is */
    CKPT_CHECK(ckpt_eng_check(e, err));
    CKPT_CHECK(activate(e, m, T, saved, a, err));
    CKPT_CHECK(ENG(linear_dw)(e, T, F, H, dy, H, a, F, grads->down, NULL, err));
    CKPT_CHECK(ENG(linear_dx)(e, T, F, H, dy, H, p->down, false, da, F, err));
    if (m->gated) {
        CKPT_CHECK(
            ENG(swiglu_bwd)(e, T, F, saved->gate, saved->up, F, m->clamp, da, F, dgate, dup, err));
        CKPT_CHECK(ENG(linear_dw)(e, T, H, F, dgate, F, x, H, grads->gate, NULL, err));
        CKPT_CHECK(ENG(linear_dx)(e, T, H, F, dgate, F, p->gate, add, dx, H, err));
    } else {
        CKPT_CHECK(ENG(relu2_bwd)(e, T * F, saved->up, da, dup, err));
    }
    CKPT_CHECK(ENG(linear_dw)(e, T, H, F, dup, F, x, H, grads->up, NULL, err));
    CKPT_CHECK(ENG(linear_dx)(e, T, H, F, dup, F, p->up, add || m->gated, dx, H, err));
done:
    ckpt_eng_drop(e, mark);
    return status;
}
