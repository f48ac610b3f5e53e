/* A checkpoint in memory: the tensors of a model that something (training) changes, with the optimizer
 * state that belongs to them, as a source and a bound model that plans and conversions take.
 *
 * Opening lays the tensors out one after the other in one buffer, each in canonical row-major order, and
 * allocates it; whoever owns the live values copies them in, at data + tensors[i].offset. The one file
 * of the source is virtual: its bytes come from the buffer, from any thread. Objects of the base (pickled
 * extra state, up to 64 MiB of them) are read at once and lie in a second virtual file. */
#ifndef CKPT_SNAPSHOT_H
#define CKPT_SNAPSHOT_H

#include "model.h"

typedef struct ckpt_snapshot_tensor {
    size_t param;      /* index of the parameter in the base model */
    const char *state; /* canonical word of its optimizer state (optim_names.h), or NULL: itself */
    ckpt_dtype dtype;
    uint64_t offset, bytes; /* set by ckpt_snapshot_open */
} ckpt_snapshot_tensor;

typedef struct ckpt_snapshot {
    ckpt_source src;
    ckpt_model model;
    ckpt_snapshot_tensor *tensors; /* in the order given */
    size_t n;
    uint8_t *data;
    uint64_t bytes;
    size_t mapped;    /* bytes of the mapping that data begins; 0: it is malloc'd */
    int64_t *shared;  /* numbers after it, which all who share it see */
    uint8_t *objects; /* payloads of the base's objects, which are carried unchanged */
    uint64_t object_bytes;
} ckpt_snapshot;

/* base: the bound checkpoint that the parameters came from; it must outlive the snapshot. Errors:
 * CKPT_E_NOMEM; CKPT_E_UNSUPPORTED a type that does not fill whole bytes. */
ckpt_status ckpt_snapshot_open(ckpt_snapshot *s, const ckpt_model *base,
                               const ckpt_snapshot_tensor *tensors, size_t n,
                               ckpt_err *err) CKPT_MUST_USE;
/* Puts the buffer, in which nothing is yet, and `numbers` numbers into a file that several processes have open, each
 * with a snapshot of the same tensors. One of them does it first, with `first`: the file then has its size and is
 * zero throughout. Errors: CKPT_E_IO, CKPT_E_NOMEM. */
ckpt_status ckpt_snapshot_share(ckpt_snapshot *s, int fd, size_t numbers, bool first,
                                ckpt_err *err) CKPT_MUST_USE;
/* Has the kernel give the next piece of the memory its pages now, where it can, so that the first copy does not
 * wait for them; *at, 0 before the first: bytes that have been through this. false: there is no more to do.
 * By any thread, also while the memory is written. */
bool ckpt_snapshot_populate(const ckpt_snapshot *s, uint64_t *at);
/* Safe on a zeroed structure. */
void ckpt_snapshot_close(ckpt_snapshot *s);

#endif
