/* Which parts of sequences a context-parallel rank has (cut.h). */
#include "cut.h"

#include <stdlib.h>

#include "checked.h"

static void fill(const ckpt_eng_par *par, const ckpt_eng_seq *whole, ckpt_eng_cut *c, int64_t *own,
                 int64_t *keys)
{
    int64_t T = ckpt_eng_tokens(whole), n = 0, hi = c->lo + c->n;
    for (int i = 0; i <= par->cp; i++) {
        c->at[i] = ckpt_part_at(T, par->cp, i);
        c->link[i] = false;
    }
    c->key_lo = hi;
    own[0] = keys[0] = 0;
    for (int64_t s = 0; s < whole->n; s++) {
        int64_t a = whole->cu[s], b = whole->cu[s + 1];
        for (int i = 1; i < par->cp; i++)
            c->link[i] = c->link[i] || (a < c->at[i] && c->at[i] < b);
        int64_t from = ckpt_max_i64(a, c->lo), to = ckpt_min_i64(b, hi);
        if (from >= to)
            continue;
        c->key_lo = ckpt_min_i64(c->key_lo, a);
        n++;
        own[n] = to - c->lo;
        keys[n] = to - c->key_lo;
    }
    c->own = (ckpt_eng_seq){.n = n, .cu = own};
    c->keys = (ckpt_eng_seq){.n = n, .cu = keys};
}

ckpt_status ckpt_eng_cut_of(const ckpt_eng *e, const ckpt_eng_seq *whole, ckpt_eng_cut *c,
                            ckpt_err *err)
{
    const ckpt_eng_par *par = e->par;
    int64_t T = ckpt_eng_tokens(whole);
    size_t ranks = (size_t)par->cp + 1, sequences = (size_t)whole->n + 1;
    *c = (ckpt_eng_cut){.whole = whole};
    if (T < par->cp)
        return ckpt_fail(err, CKPT_E_USAGE, "%lld tokens cannot be cut over %d ranks", (long long)T,
                         par->cp);
    c->lo = ckpt_part_at(T, par->cp, par->c);
    c->n = ckpt_part_at(T, par->cp, par->c + 1) - c->lo;
    c->at = calloc(2 * (ranks + sequences), sizeof *c->at);
    c->link = calloc(ranks, sizeof *c->link);
    if (c->at == NULL || c->link == NULL) {
        ckpt_eng_cut_free(c);
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu sequences", sequences);
    }
    c->counts = c->at + ranks;
    fill(par, whole, c, c->counts + ranks, c->counts + ranks + sequences);
    return CKPT_OK;
}

void ckpt_eng_cut_free(ckpt_eng_cut *c)
{
    free(c->at);
    free(c->link);
    *c = (ckpt_eng_cut){0};
}
