/* Which parts of sequences a context-parallel rank has, and whose queries it works on (cut.h). */
#include "cut.h"

#include <stdlib.h>

#include "checked.h"

static void fill(const ckpt_eng_par *par, const ckpt_eng_seq *whole, ckpt_eng_cut *c, int64_t *own)
{
    int64_t T = ckpt_eng_tokens(whole), n = 0, hi = c->lo + c->n;
    for (int i = 0; i <= par->cp; i++) {
        c->at[i] = ckpt_part_at(T, par->cp, i);
        c->link[i] = false;
    }
    own[0] = 0;
    for (int64_t s = 0; s < whole->n; s++) {
        int64_t a = whole->cu[s], b = whole->cu[s + 1];
        for (int i = 1; i < par->cp; i++)
            c->link[i] = c->link[i] || (a < c->at[i] && c->at[i] < b);
        int64_t from = ckpt_max_i64(a, c->lo), to = ckpt_min_i64(b, hi);
        if (from >= to)
            continue;
        n++;
        own[n] = to - c->lo;
    }
    c->own = (ckpt_eng_seq){.n = n, .cu = own};
}

/* ---- queries --------------------------------------------------------------------------------- */

/* Working memory of dealing out pieces. */
typedef struct deal {
    int cp;
    int64_t *load;  /* [cp] pairs of every rank */
    int64_t *owner; /* [2 cp] of the pieces of one sequence */
    int64_t *whose; /* [n] the rank that works on each of this rank's tokens */
} deal;

static int64_t pairs_of(int64_t len, int cp, int64_t i)
{
    int64_t lo = ckpt_part_at(len, 2 * cp, i), hi = ckpt_part_at(len, 2 * cp, i + 1);
    return (hi - lo) * (lo + 1) + (hi - lo) * (hi - lo - 1) / 2; /* token t has t + 1 keys */
}

/* Owners of the pieces of a sequence of `len` tokens. */
static void deal_sequence(deal *d, int64_t len)
{
    for (int k = 0; k < d->cp; k++) {
        int64_t pairs = pairs_of(len, d->cp, k) + pairs_of(len, d->cp, 2 * d->cp - 1 - k);
        int least = 0;
        for (int r = 1; pairs > 0 && r < d->cp; r++)
            least = d->load[r] < d->load[least] ? r : least;
        d->load[least] += pairs;
        d->owner[k] = d->owner[2 * d->cp - 1 - k] = least;
    }
}

/* Tokens [lo, hi) of sequence s, which starts at token `base`, are rank `owner`'s work. */
static void give(const ckpt_eng_par *par, ckpt_eng_cut *c, const deal *d, int64_t s, int64_t base,
                 int64_t lo, int64_t hi, int64_t owner)
{
    for (int64_t t = ckpt_max_i64(base + lo, c->lo); t < ckpt_min_i64(base + hi, c->lo + c->n); t++)
        d->whose[t - c->lo] = owner;
    if (owner != par->c)
        return;
    for (int r = 0; r < par->cp; r++)
        c->in[r] += ckpt_max_i64(0, ckpt_min_i64(base + hi, c->at[r + 1]) -
                                        ckpt_max_i64(base + lo, c->at[r]));
    ckpt_eng_part *last = c->n_parts > 0 ? &c->parts[c->n_parts - 1] : NULL;
    if (last && last->seq == s && last->lo + last->n == lo)
        last->n += hi - lo;
    else
        c->parts[c->n_parts++] = (ckpt_eng_part){s, lo, hi - lo, c->rows};
    c->rows += hi - lo;
}

static void deal_out(const ckpt_eng_par *par, const ckpt_eng_seq *whole, ckpt_eng_cut *c, deal *d)
{
    for (int64_t s = 0; s < whole->n; s++) {
        int64_t base = whole->cu[s], len = whole->cu[s + 1] - base;
        if (len == 0)
            continue;
        deal_sequence(d, len);
        for (int i = 0; i < 2 * par->cp; i++) {
            int64_t lo = ckpt_part_at(len, 2 * par->cp, i),
                    hi = ckpt_part_at(len, 2 * par->cp, i + 1);
            if (lo < hi)
                give(par, c, d, s, base, lo, hi, d->owner[i]);
        }
    }
    c->pairs = d->load[par->c];
    int64_t n = 0;
    for (int r = 0; r < par->cp; r++) {
        c->out[r] = -n;
        for (int64_t t = 0; t < c->n; t++)
            if (d->whose[t] == r)
                c->order[n++] = t;
        c->out[r] += n;
    }
}

/* Pieces that are not empty, of all ranks. */
static int64_t pieces_of(const ckpt_eng_seq *whole, int cp)
{
    int64_t n = 0;
    for (int64_t s = 0; s < whole->n; s++)
        n += ckpt_min_i64(2 * cp, whole->cu[s + 1] - whole->cu[s]);
    return n;
}

ckpt_status ckpt_eng_cut_of(const ckpt_eng *e, const ckpt_eng_seq *whole, ckpt_eng_cut *c,
                            ckpt_err *err)
{
    const ckpt_eng_par *par = e->par;
    int64_t T = ckpt_eng_tokens(whole);
    size_t ranks = (size_t)par->cp, sequences = (size_t)whole->n + 1;
    *c = (ckpt_eng_cut){.whole = whole};
    if (T < par->cp)
        return ckpt_fail(err, CKPT_E_USAGE, "%lld tokens cannot be cut over %d ranks", (long long)T,
                         par->cp);
    c->lo = ckpt_part_at(T, par->cp, par->c);
    c->n = ckpt_part_at(T, par->cp, par->c + 1) - c->lo;
    /* at, own, counts, out, in, load, owner; order, whose */
    c->at = calloc(ranks + 1 + sequences + 7 * ranks + 2 * (size_t)c->n, sizeof *c->at);
    c->link = calloc(ranks + 1, sizeof *c->link);
    c->parts = calloc((size_t)pieces_of(whole, par->cp), sizeof *c->parts);
    if (c->at == NULL || c->link == NULL || c->parts == NULL) {
        ckpt_eng_cut_free(c);
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu sequences", sequences);
    }
    int64_t *own = c->at + ranks + 1;
    c->counts = own + sequences;
    c->out = c->counts + 2 * ranks;
    c->in = c->out + ranks;
    deal d = {.cp = par->cp, .load = c->in + ranks};
    d.owner = d.load + ranks;
    c->order = d.owner + 2 * ranks;
    d.whose = c->order + c->n;
    fill(par, whole, c, own);
    deal_out(par, whole, c, &d);
    return CKPT_OK;
}

void ckpt_eng_cut_free(ckpt_eng_cut *c)
{
    free(c->at);
    free(c->link);
    free(c->parts);
    *c = (ckpt_eng_cut){0};
}
