/* Copies of one chunk in the files of several ranks: equal, or somebody's training went wrong. */
#include "checked.h"
#include "gather.h"
#include "io.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK ((size_t)1 << 20)

static ckpt_status whole_chunk(const ckpt_source *src, const ckpt_replica *r, const ckpt_chunk *at,
                               ckpt_arena *arena, ckpt_gather *out, ckpt_err *err)
{
    int64_t lo[CKPT_MAX_RANK] = {0};
    ckpt_axis axis[CKPT_MAX_RANK];
    ckpt_chunk chunk = *at;
    chunk.lo = lo;
    for (int a = 0; a < r->rank; a++)
        axis[a] = (ckpt_axis){.size = at->len[a], .len = at->len[a], .dim = a};
    ckpt_tensor t = {.name = r->name,
                     .dims = at->len,
                     .chunks = &chunk,
                     .n_chunks = 1,
                     .dtype = r->dtype,
                     .rank = r->rank};
    ckpt_source one = *src; /* the same files, one tensor */
    one.tensors = &t;
    one.n_tensors = 1;
    int64_t numel = 0;
    uint64_t bytes = 0;
    if (!ckpt_numel(r->rank, at->len, &numel) || !ckpt_dtype_bytes(r->dtype, numel, &bytes))
        return ckpt_fail(err, CKPT_E_FORMAT, "size overflows");
    ckpt_canon c = {
        .name = r->name,
        .dims = at->len,
        .rank = r->rank,
        .dtype = r->dtype,
        .bytes = bytes,
        .map = {axis, r->rank}
    };
    return ckpt_gather_canon(&one, &c, arena, out, err);
}

static ckpt_status compare(ckpt_source *src, const ckpt_replica *r, uint8_t *buf, bool *equal,
                           ckpt_err *err)
{
    ckpt_status status;
    ckpt_arena arena = {0};
    ckpt_gather a, b;
    ckpt_scratch scratch = {0};
    *equal = true;
    CKPT_CHECK(whole_chunk(src, r, &r->first, &arena, &a, err));
    CKPT_CHECK(whole_chunk(src, r, &r->other, &arena, &b, err));
    for (uint64_t at = 0; at < a.bytes && *equal; at += BLOCK) {
        size_t n = (size_t)ckpt_min_u64(BLOCK, a.bytes - at);
        CKPT_CHECK(ckpt_check_interrupted(err));
        CKPT_CHECK(ckpt_gather_run(src, &a, at, n, buf, &scratch, err));
        CKPT_CHECK(ckpt_gather_run(src, &b, at, n, buf + BLOCK, &scratch, err));
        *equal = memcmp(buf, buf + BLOCK, n) == 0;
    }
done:
    ckpt_arena_free(&arena);
    return status;
}

ckpt_status ckpt_replicas_compare(ckpt_source *src,
                                  ckpt_status (*differs)(void *self, const ckpt_replica *r,
                                                         ckpt_err *err),
                                  void *self, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint8_t *buf = malloc(2 * BLOCK);
    if (buf == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < src->n_replicas; i++) {
        const ckpt_replica *r = &src->replicas[i];
        bool equal;
        CKPT_TRY(compare(src, r, buf, &equal, err), "tensor '%.300s'", r->name);
        if (!equal)
            CKPT_CHECK(differs(self, r, err));
    }
done:
    free(buf);
    return status;
}
