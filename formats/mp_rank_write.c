#include "mp_rank.h"
ckpt_status ckpt_mp_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err)
{
    (void)out; (void)sink;
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "not built yet");
}
