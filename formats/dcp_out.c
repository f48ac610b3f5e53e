/* What is written: whether DCP can hold it, and which of a rank's data files an item goes to.
 *
 * Megatron-Core and PyTorch write one file a rank or several ("buckets", one a writer thread), and
 * read any number. Several let the file digests of one rank advance side by side: up to sixteen
 * files in all, each of 64 MiB or more. An item goes to the emptiest bucket of its rank, so all of
 * them advance through the model together. The choice depends on sizes alone. */
#include "checked.h"
#include "dcp.h"
#include "dcp_meta.h"
#include "hash.h"

#include <stdlib.h>
#include <string.h>

#define BUCKET_MIN ((uint64_t)64 << 20) /* bytes; smaller files are not worth their number */

/* ---- checks --------------------------------------------------------------------------------- */

static ckpt_status check_tensor(const ckpt_out *out, const ckpt_out_tensor *t, ckpt_err *err)
{
    const ckpt_dtype_info *info = ckpt_dtype_get(t->dtype);
    size_t name = strlen(t->name);
    if (name == 0 || name > CKPT_DCP_NAME_LIMIT)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "tensor '%.100s': a name of %zu bytes, torch_dist takes 1 to %d", t->name,
                         name, CKPT_DCP_NAME_LIMIT);
    if (!info->torch)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%.300s': torch has no dtype for %s",
                         t->name, info->name);
    if (t->dtype == CKPT_F4 && t->rank == 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "tensor '%.300s': a single float4 element",
                         t->name);
    for (size_t i = 0; i < t->n_chunks; i++) {
        const ckpt_out_chunk *c = &t->chunks[i];
        if (c->owner < 0 || c->owner >= out->world)
            return ckpt_fail(err, CKPT_E_INTERNAL, "tensor '%.300s': owner %d of %d ranks", t->name,
                             c->owner, out->world);
        if (t->dtype == CKPT_F4 && ((c->lo[t->rank - 1] | c->len[t->rank - 1]) & 1))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "tensor '%.300s': a cut between the two float4 elements of a byte",
                             t->name);
    }
    return CKPT_OK;
}

ckpt_status ckpt_dcp_check_out(const ckpt_out *out, ckpt_err *err)
{
    if (out->single_file)
        return ckpt_fail(err, CKPT_E_USAGE, "torch_dist is a directory, not a single file");
    if (out->world < 1 || out->n_tensors >= (UINT32_MAX >> 1))
        return ckpt_fail(err, CKPT_E_INTERNAL, "%d ranks, %zu tensors", out->world, out->n_tensors);
    for (size_t i = 0; i < out->n_tensors; i++) {
        ckpt_status status = check_tensor(out, &out->tensors[i], err);
        if (status != CKPT_OK)
            return status;
    }
    for (size_t i = 0; i < out->n_objects; i++)
        if (out->objects[i].owner < 0 || out->objects[i].owner >= out->world)
            return ckpt_fail(err, CKPT_E_INTERNAL, "object '%.300s': owner %d of %d ranks",
                             out->objects[i].name, out->objects[i].owner, out->world);
    return CKPT_OK;
}

/* ---- buckets -------------------------------------------------------------------------------- */

static uint64_t add_capped(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return ckpt_add_u64(a, b, &sum) ? sum : UINT64_MAX;
}

static int count_buckets(const uint64_t *load, int world)
{
    uint64_t owners = 0, total = 0;
    for (int r = 0; r < world; r++) {
        owners += load[r] > 0;
        total = add_capped(total, load[r]);
    }
    if (owners == 0)
        return 1;
    uint64_t n = ckpt_min_u64(CKPT_SHA256_LANES / owners, CKPT_DCP_BUCKETS);
    while (n > 1 && total / owners / n < BUCKET_MIN)
        n--;
    return n > 1 ? (int)n : 1;
}

ckpt_status ckpt_dcp_buckets(int world, const uint64_t *bytes, int *slot, size_t n, int *buckets,
                             ckpt_err *err)
{
    uint64_t *load = calloc((size_t)world * CKPT_DCP_BUCKETS + 1, sizeof *load);
    if (load == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d ranks", world);
    for (size_t i = 0; i < n; i++)
        load[slot[i]] = add_capped(load[slot[i]], bytes[i]);
    *buckets = count_buckets(load, world);
    memset(load, 0, (size_t)world * CKPT_DCP_BUCKETS * sizeof *load);
    for (size_t i = 0; i < n; i++) {
        int best = slot[i] * *buckets;
        for (int b = best; b < (slot[i] + 1) * *buckets && bytes[i] > 0; b++)
            if (load[b] < load[best])
                best = b;
        load[best] = add_capped(load[best], bytes[i]);
        slot[i] = best;
    }
    free(load);
    return CKPT_OK;
}
