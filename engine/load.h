/* Tensors of a checkpoint into a device's memory.
 *
 * All threads of the context read pieces of tensors, in order of the items, each through a pipe of its own
 * (cuda/memory.h): one pinned buffer is filled from the files while the other is on its way. What is stored
 * in bf16 and wanted in f32 is sent as it is stored and widened on the device, which halves what the bus
 * carries and leaves the processors to reading. Digests are taken of a buffer between reading and sending.
 *
 * Limits as measured (tests/gpu/LOAD_NOTES.md): PCIe 5.0 x16 carries 54 GB/s, sixteen threads read 70 GB/s
 * out of the page cache; pinning 32 MiB takes 23 ms, as long as sending 1.2 GB. */
#ifndef CKPT_ENGINE_LOAD_H
#define CKPT_ENGINE_LOAD_H

#include "device.h"
#include "plan.h"

typedef struct ckpt_eng_load_item {
    const char *name; /* for errors */
    ckpt_gather *gather;
    uint64_t
        from; /* bytes of what it makes, of gather->to, that come before; 0 where leaves are wanted */
    uint64_t bytes; /* from there on */
    void *to;       /* on the device; [bytes], or [2 bytes] when widened */
    bool widen;     /* gather->to is BF16, `to` an array of f32 */
    uint8_t
        *leaves; /* out: hashes of the 1 MiB leaves of those bytes (hash.h), 32 each; NULL: none */
} ckpt_eng_load_item;

/* How; zeros: what is best. */
typedef struct ckpt_eng_load_opts {
    int threads;  /* 0: the context's */
    size_t piece; /* bytes of a buffer, a multiple of CKPT_LEAF_BYTES; every thread pins two */
} ckpt_eng_load_opts;

/* Returns when all has arrived. What the device's stream was asked for before comes first. opts may be
 * NULL. Errors: of reading (CKPT_E_IO, CKPT_E_FORMAT) naming the tensor, CKPT_E_NOMEM, of the device. */
ckpt_status ckpt_eng_load(const ckpt_eng *e, ckpt_source *src, const ckpt_eng_load_item *items,
                          size_t n, const ckpt_eng_load_opts *opts, ckpt_err *err) CKPT_MUST_USE;

#endif
