/* Flattened tensors of old Megatron-Core (up to 0.15): optimizer state that was first cut into
 * blocks and then, over data-parallel ranks, by ranges of each block's row-major flattening.
 *
 * A tensor of shape G, cut into f_a equal parts on each axis a, is stored with shape (f..., n), where
 * n is the number of elements of a block, of shape G / f. Its chunk at offset (i..., s) with sizes
 * (1, ..., 1, k) holds elements s to s + k of the block at i. G is in .metadata as
 * mcore_data[name]["nd_reformulated_orig_global_shape"]. A range of a row-major block is at most
 * 2 * rank - 1 boxes, each contiguous in the range, so the tensor appears here with its true shape.
 * Source: megatron-dist-ckpt.md section 2.6; megatron/core/dist_checkpointing/strategies/
 * resharding.py of core_r0.13.0. */
#include "dcp_internal.h"

#include "checked.h"
#include "flat.h"

#include <string.h>

ckpt_status ckpt_dcp_flat_check(const ckpt_dcp_tensor *t, ckpt_err *err)
{
    int rank = t->rank - 1;
    int64_t n = 1;
    if (t->flat_rank != rank)
        return ckpt_fail(err, CKPT_E_FORMAT, "original shape has %d dims, stored shape %d",
                         t->flat_rank, t->rank);
    for (int a = 0; a < rank; a++) {
        if (t->dims[a] <= 0 || t->flat[a] % t->dims[a] != 0)
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "original extent %lld on axis %d is not a multiple of its %lld parts",
                             (long long)t->flat[a], a, (long long)t->dims[a]);
        if (!ckpt_mul_i64(n, t->flat[a] / t->dims[a], &n))
            return ckpt_fail(err, CKPT_E_FORMAT, "elements of a block overflow");
    }
    if (n != t->dims[rank])
        return ckpt_fail(err, CKPT_E_FORMAT, "a block has %lld elements, stored are %lld",
                         (long long)n, (long long)t->dims[rank]);
    for (size_t i = 0; i < t->n_pieces; i++) {
        const ckpt_dcp_piece *p = &t->pieces[i];
        for (int a = 0; a <= rank; a++) {
            if (p->lo[a] > t->dims[a] || p->len[a] > t->dims[a] - p->lo[a])
                return ckpt_fail(
                    err, CKPT_E_FORMAT, "chunk of %lld at %lld on axis %d outside extent %lld",
                    (long long)p->len[a], (long long)p->lo[a], a, (long long)t->dims[a]);
            if (a < rank && p->len[a] > 1)
                return ckpt_fail(err, CKPT_E_FORMAT,
                                 "chunk %zu spans %lld blocks on axis %d, expected 1", i,
                                 (long long)p->len[a], a);
        }
    }
    return CKPT_OK;
}

ckpt_status ckpt_dcp_flat_chunks(ckpt_dcp_opener *o, const ckpt_dcp_job *j,
                                 const ckpt_pt_tensor *item)
{
    const ckpt_dcp_tensor *meta = &o->meta.tensors[j->owner];
    const ckpt_dcp_piece *piece = &meta->pieces[j->piece];
    ckpt_tensor *t = &o->src->tensors[j->owner];
    int rank = meta->rank - 1;
    size_t row = (size_t)rank;
    int64_t block[CKPT_MAX_RANK], lo[CKPT_FLAT_BOXES(CKPT_MAX_RANK) * CKPT_MAX_RANK],
        len[CKPT_FLAT_BOXES(CKPT_MAX_RANK) * CKPT_MAX_RANK];
    /* Writers flatten before they cut, so a stride other than 1 never occurs. */
    if (item->stride && piece->len[rank] > 1 && item->stride[rank] != 1)
        return ckpt_fail(o->err, CKPT_E_UNSUPPORTED, "flattened range with stride %lld",
                         (long long)item->stride[rank]);
    for (int a = 0; a < rank; a++)
        block[a] = meta->flat[a] / meta->dims[a];
    size_t boxes = ckpt_flat_split(rank, block, piece->lo[rank], piece->len[rank], lo, len);
    int64_t *keep = ckpt_arena_array(&o->src->arena, 2 * boxes * row + 1, sizeof *keep);
    if (!keep)
        return ckpt_fail(o->err, CKPT_E_NOMEM, "out of memory");
    uint64_t offset = item->offset, bytes;
    for (size_t i = 0; i < boxes; i++) {
        int64_t *at = keep + 2 * i * row, *size = at + row, n;
        memcpy(size, len + i * row, row * sizeof *size);
        for (int a = 0; a < rank; a++)
            at[a] = piece->lo[a] * block[a] + lo[i * row + (size_t)a];
        if (!ckpt_numel(rank, size, &n) || !ckpt_dtype_bytes(t->dtype, n, &bytes))
            return ckpt_fail(o->err, CKPT_E_UNSUPPORTED, "flattened %s cut inside a byte",
                             ckpt_dtype_get(t->dtype)->name);
        t->chunks[t->n_chunks++] =
            (ckpt_chunk){.lo = at, .len = size, .offset = offset, .file = j->file};
        offset += bytes;
    }
    return CKPT_OK;
}
