/* What the operations of a device share. A launch failure is the operation's error; what happens later on
 * the device is seen at the end of a run. */
#ifndef CKPT_ENGINE_DEVICE_CONTEXT_H
#define CKPT_ENGINE_DEVICE_CONTEXT_H

#include "checked.h"
#include "device.h"
#include "real.h"

static inline const ckpt_cuda_plugin *api_of(const ckpt_eng *e)
{
    return e->device->api;
}

/* The context of a call that needs no workspace. */
static inline ckpt_cuda plain(const ckpt_eng *e)
{
    return (ckpt_cuda){.type = CKPT_REAL == 116 ? CKPT_CUDA_BF16 : CKPT_CUDA_F32,
                       .stream = e->device->card.stream,
                       .gemm = e->device->card.gemm};
}

/* Return what `call`, which needs no workspace, says of context c. */
#define WITHOUT(e, call)                                                                           \
    do {                                                                                           \
        const ckpt_cuda c = plain(e);                                                              \
        return (e)->dry ? CKPT_OK : (call);                                                        \
    } while (0)

/* A context with `bytes` of the arena; the caller marks and drops. */
static inline ckpt_status with_work(ckpt_eng *e, size_t bytes, ckpt_cuda *c, ckpt_err *err)
{
    *c = plain(e);
    c->work = ckpt_eng_take(e, (int64_t)bytes, 1);
    c->bytes = bytes;
    return ckpt_eng_check(e, err);
}

/* Offsets of the sequences that the newest bring_seq brought, or of the batch that they are a cut of. */
static inline ckpt_status seq_of(const ckpt_eng *e, const ckpt_eng_seq *seq, ckpt_cuda_seq *out,
                                 ckpt_err *err)
{
    const ckpt_eng_device *d = e->device;
    const bool whole = d->whole_cu != NULL && seq->cu == d->whole_cu;
    *out = (ckpt_cuda_seq){
        .n = seq->n, .tokens = ckpt_eng_tokens(seq), .cu = whole ? d->whole : d->on_device};
    if (seq->cu != d->cu && !whole)
        return ckpt_fail(err, CKPT_E_INTERNAL, "sequences that are not on the device");
    return CKPT_OK;
}

#endif
