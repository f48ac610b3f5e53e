/* Reading what torch.save wrote: a zip archive (torch >= 1.6) or the legacy stream, whole file or
 * embedded in a .distcp item. */
#ifndef CKPT_TORCH_SAVE_H
#define CKPT_TORCH_SAVE_H

#include "pickle.h"
#include "source.h"
#include "zip.h"

/* A tensor found inside a pickle, resolved to bytes of a source file. */
typedef struct ckpt_pt_tensor {
    ckpt_dtype dtype;
    int rank;
    const int64_t *dims;
    const int64_t *stride; /* elements; NULL when row-major */
    uint64_t offset;       /* absolute byte in the source file of element (0,...,0) */
    uint64_t storage_end;  /* absolute end of its storage */
    bool big_endian;
} ckpt_pt_tensor;

typedef struct ckpt_pt {
    ckpt_pkl *root;
    uint64_t pickle_offset, pickle_length; /* of the root pickle as stored, absolute in the file */
    uint32_t n_nodes;
    bool legacy;
    bool big_endian;
    void *self; /* storage table */
} ckpt_pt;

/* Open an item at [base, base+length) of files[file]: parse its pickle and storage table, reading
 * no payload. Everything lives in the arena. Errors: CKPT_E_FORMAT; CKPT_E_UNSUPPORTED for deflated
 * storages, TorchScript archives and the tar format that preceded the legacy stream. */
ckpt_status ckpt_pt_open(ckpt_source *src, uint32_t file, uint64_t base, uint64_t length,
                         ckpt_arena *arena, ckpt_pt *pt, ckpt_err *err) CKPT_MUST_USE;
/* If node is a plain strided tensor (also Parameter and attributed wrappers around one), resolve
 * and validate it: bounds offset + sum((size-1)*stride) < numel, and the storage's numel * itemsize
 * equal to the record's size (a rest smaller than one element is allowed).
 * torch's float4_e2m1fn_x2 counts pairs; F4 dims and strides here count elements.
 * *is_tensor false: not a tensor, or one of a kind that is not decoded (sparse, quantised,
 * nested, meta); *what then names the kind or is NULL. */
ckpt_status ckpt_pt_tensor_of(const ckpt_pt *pt, const ckpt_pkl *node, ckpt_arena *arena,
                              ckpt_pt_tensor *out, bool *is_tensor, const char **what,
                              ckpt_err *err) CKPT_MUST_USE;

#endif
