/* The memo of a pickle: values by index. */
#include "pickle_vm.h"

/* Real picklers number the memo densely. Indexes far above the count go to a small sorted table. */
#define MEMO_SLACK ((uint64_t)4096)
#define MEMO_SPARSE_MAX ((size_t)16384)

/* Position of index in the sparse table, or where it belongs. */
static size_t sparse_find(const ckpt_vm *v, uint64_t index)
{
    size_t lo = 0, hi = v->n_sparse;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (v->sparse[mid].index < index)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static ckpt_pkl **memo_slot(ckpt_vm *v, uint64_t index)
{
    if (index < v->dense_n && v->dense[index])
        return &v->dense[index];
    size_t at = sparse_find(v, index);
    return at < v->n_sparse && v->sparse[at].index == index ? &v->sparse[at].node : NULL;
}

static ckpt_status memo_put_dense(ckpt_vm *v, uint64_t index, ckpt_pkl *node)
{
    ckpt_status status =
        ckpt_grow((void **)&v->dense, &v->dense_cap, (size_t)index + 1, sizeof *v->dense, v->err);
    if (status != CKPT_OK)
        return status;
    /* Only what is used is touched: the table of a large pickle is hundreds of megabytes. */
    if (index > v->dense_n)
        memset(v->dense + v->dense_n, 0, (size_t)(index - v->dense_n) * sizeof *v->dense);
    if (index >= v->dense_n)
        v->dense_n = (size_t)index + 1;
    v->dense[index] = node;
    return CKPT_OK;
}

static ckpt_status memo_put_sparse(ckpt_vm *v, uint64_t index, ckpt_pkl *node)
{
    if (v->n_sparse >= MEMO_SPARSE_MAX)
        return VM_FAIL(v, "memo index %llu and %zu others far above the memo size",
                       (unsigned long long)index, v->n_sparse);
    ckpt_status status =
        ckpt_grow((void **)&v->sparse, &v->sparse_cap, v->n_sparse + 1, sizeof *v->sparse, v->err);
    if (status != CKPT_OK)
        return status;
    size_t at = sparse_find(v, index);
    memmove(v->sparse + at + 1, v->sparse + at, (v->n_sparse - at) * sizeof *v->sparse);
    v->sparse[at] = (ckpt_vm_sparse){index, node};
    v->n_sparse++;
    return CKPT_OK;
}

ckpt_status ckpt_vm_memo_put(ckpt_vm *v, uint64_t index)
{
    ckpt_status status = ckpt_vm_need(v, 1);
    if (status != CKPT_OK)
        return status;
    ckpt_pkl *node = v->stack[v->sp - 1];
    ckpt_pkl **slot = memo_slot(v, index);
    if (slot) {
        *slot = node;
        return CKPT_OK;
    }
    v->memo_count++;
    if (index < v->dense_cap || index < 2 * v->memo_count + MEMO_SLACK)
        return memo_put_dense(v, index, node);
    return memo_put_sparse(v, index, node);
}

ckpt_status ckpt_vm_memo_get(ckpt_vm *v, uint64_t index)
{
    ckpt_pkl **slot = memo_slot(v, index);
    if (!slot)
        return VM_FAIL(v, "memo index %llu was never stored", (unsigned long long)index);
    if (*slot == &v->gone)
        return VM_FAIL(v, "memo index %llu is part of what was taken", (unsigned long long)index);
    return ckpt_vm_push(v, *slot);
}
