#include "share.h"

#include "checked.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int ckpt_share_of(const ckpt_share *s, uint64_t at, uint64_t bytes, uint64_t total)
{
    if (ckpt_share_alone(s) || total == 0)
        return 0;
    unsigned __int128 twice = 2 * (unsigned __int128)at + bytes;
    unsigned __int128 r = twice * (unsigned)s->size / (2 * (unsigned __int128)total);
    return r < (unsigned)s->size ? (int)r : s->size - 1;
}

/* What a rank says. */
typedef struct word {
    int32_t status;
    char text[252];
} word;

ckpt_status ckpt_share_agree(const ckpt_share *s, ckpt_status mine, ckpt_err *err)
{
    if (ckpt_share_alone(s))
        return mine;
    ckpt_status status = CKPT_OK;
    word own = {.status = (int32_t)mine};
    int64_t *counts = calloc((size_t)s->size, sizeof *counts);
    word *all = calloc((size_t)s->size, sizeof *all);
    if (counts == NULL || all == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    if (mine != CKPT_OK)
        (void)snprintf(own.text, sizeof own.text, "%.250s",
                       err != NULL && err->text[0] != '\0' ? err->text : ckpt_status_text(mine));
    for (int r = 0; r < s->size; r++)
        counts[r] = sizeof own;
    ckpt_err of_gather = {0};
    status = s->allgather(s->self, &own, counts, all, &of_gather);
    if (mine != CKPT_OK) { /* err has its reason already */
        status = mine;
        goto done;
    }
    if (status != CKPT_OK) {
        status = ckpt_fail(err, status, "%s", of_gather.text);
        goto done;
    }
    for (int r = 0; r < s->size && status == CKPT_OK; r++)
        if (all[r].status != CKPT_OK)
            status = ckpt_fail(err, (ckpt_status)all[r].status, "rank %d of %d: %.250s", r, s->size,
                               all[r].text);
done:
    free(counts);
    free(all);
    return status;
}

ckpt_status ckpt_share_tell(const ckpt_share *s, ckpt_arena *arena, const char **text,
                            ckpt_err *err)
{
    if (ckpt_share_alone(s))
        return CKPT_OK;
    ckpt_status status = CKPT_OK;
    const size_t ranks = (size_t)s->size;
    int64_t bytes = *text != NULL ? (int64_t)strlen(*text) + 1 : 0;
    int64_t *counts = ckpt_arena_array(arena, ranks, sizeof *counts);
    int64_t *sizes = ckpt_arena_array(arena, ranks, sizeof *sizes);
    if (counts == NULL || sizes == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t r = 0; r < ranks; r++)
        counts[r] = sizeof bytes;
    CKPT_CHECK(s->allgather(s->self, &bytes, counts, sizes, err));
    for (size_t r = 1; r < ranks; r++)
        sizes[r] = 0;
    char *copy = sizes[0] > 0 ? ckpt_arena_alloc(arena, (size_t)sizes[0]) : NULL;
    if (sizes[0] > 0 && copy == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    if (sizes[0] > 0)
        CKPT_CHECK(s->allgather(s->self, *text, sizes, copy, err));
    *text = copy;
done:
    return status;
}

ckpt_status ckpt_share_table(const ckpt_share *s, void *table, size_t n, size_t elem,
                             const int *owner, ckpt_err *err)
{
    if (ckpt_share_alone(s) || n == 0)
        return CKPT_OK;
    ckpt_status status = CKPT_OK;
    uint8_t *rows = table, *mine = NULL, *all = NULL;
    size_t n_mine = 0, bytes;
    int64_t *counts = calloc((size_t)s->size, sizeof *counts);
    size_t *next = calloc((size_t)s->size, sizeof *next);
    if (!ckpt_mul_size(n, elem, &bytes) || bytes > INT64_MAX || counts == NULL || next == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    mine = malloc(bytes);
    all = malloc(bytes);
    if (mine == NULL || all == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for the results of %d ranks", s->size);
        goto done;
    }
    for (size_t i = 0; i < n; i++) {
        counts[owner[i]] += (int64_t)elem;
        if (owner[i] == s->rank)
            memcpy(mine + elem * n_mine++, rows + elem * i, elem);
    }
    CKPT_CHECK(s->allgather(s->self, mine, counts, all, err));
    for (int r = 1; r < s->size; r++)
        next[r] = next[r - 1] + (size_t)counts[r - 1];
    for (size_t i = 0; i < n; i++, next[owner[i - 1]] += elem)
        memcpy(rows + elem * i, all + next[owner[i]], elem);
done:
    free(counts);
    free(next);
    free(mine);
    free(all);
    return status;
}
