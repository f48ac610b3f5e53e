/* See flat.h. A range is a tail of the first row it touches, whole rows, and a head of the last, on
 * every axis: at most 2 * rank - 1 boxes. */
#include "flat.h"

#include "checked.h"
#include "source.h"

#include <string.h>

size_t ckpt_flat_split(int rank, const int64_t *block, int64_t lo, int64_t n, int64_t *lo_out,
                       int64_t *len_out)
{
    int64_t weight[CKPT_MAX_RANK]; /* elements behind one step of an axis */
    size_t count = 0;
    for (int64_t a = rank, w = 1; a-- > 0; w *= block[a])
        weight[a] = w;
    while (n > 0) {
        int64_t *at = lo_out + count * (size_t)rank, *len = len_out + count * (size_t)rank;
        int64_t rest = lo, take = 1;
        int axis = 0;
        for (int a = 0; a < rank; a++) {
            at[a] = rest / weight[a];
            rest %= weight[a];
            len[a] = 1;
        }
        /* The outermost axis on which the range starts at a boundary and fills at least one step. */
        while (axis < rank && (lo % weight[axis] != 0 || n < weight[axis]))
            axis++;
        if (axis < rank) {
            len[axis] = ckpt_min_i64(n / weight[axis], block[axis] - at[axis]);
            take = len[axis] * weight[axis];
            memcpy(len + axis + 1, block + axis + 1, (size_t)(rank - axis - 1) * sizeof *len);
        }
        lo += take;
        n -= take;
        count++;
    }
    return count;
}
