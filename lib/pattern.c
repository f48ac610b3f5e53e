/* Name patterns of layout tables: holes in braces whose value is linear in the row's indices. The
 * grammar is in layout.h. */
#include "checked.h"
#include "layout.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "{P+Q*l+j<P}": value = l * index l + j * index j + e * index e + add, below limit. */
typedef struct hole {
    int64_t l, j, e, add;
    int64_t limit; /* 0: none */
    bool known;    /* every symbol is bound */
    const char *end;
} hole;

static bool parse_number(const char **p, int64_t *out)
{
    int64_t v = 0;
    int digits = 0;
    for (; isdigit((unsigned char)**p) && digits < 9; digits++)
        v = v * 10 + (*(*p)++ - '0');
    *out = v;
    return digits > 0 && !isdigit((unsigned char)**p);
}

/* An upper-case word. Unbound symbols parse, but leave the hole unknown. */
static bool parse_symbol(const char **p, const ckpt_symtab *syms, int64_t *out, bool *known)
{
    size_t n = 0;
    while (isupper((unsigned char)(*p)[n]) || (n > 0 && isdigit((unsigned char)(*p)[n])))
        n++;
    *out = n > 0 && syms != NULL ? ckpt_sym_get(syms, *p, n) : 0;
    *known = *known && *out > 0;
    *p += n;
    return n > 0;
}

static int64_t *slot_of(hole *h, char var)
{
    return var == 'l' || var == 'b' ? &h->l : var == 'j' ? &h->j : var == 'e' ? &h->e : NULL;
}

/* One term: 2l, l, Q*l, P, 1. */
static bool parse_term(const char **p, const ckpt_symtab *syms, hole *h)
{
    int64_t factor = 1;
    bool number = isdigit((unsigned char)**p), symbol = isupper((unsigned char)**p);
    if (number && !parse_number(p, &factor))
        return false;
    if (symbol && !parse_symbol(p, syms, &factor, &h->known))
        return false;
    if (symbol && **p == '*')
        (*p)++;
    else if (symbol)
        return ckpt_add_i64(h->add, factor, &h->add);
    int64_t *slot = slot_of(h, **p);
    if (slot == NULL)
        return number && ckpt_add_i64(h->add, factor, &h->add);
    (*p)++;
    bool first = *slot == 0 && (factor > 0 || !h->known);
    *slot = factor > 0 ? factor : 1;
    return first;
}

static bool parse_hole(const char *p, const ckpt_symtab *syms, hole *out)
{
    *out = (hole){.known = true};
    do {
        p++;
        if (!parse_term(&p, syms, out))
            return false;
    } while (*p == '+');
    if (*p == '<') {
        bool bound = true; /* an unknown limit is none */
        p++;
        if (!parse_symbol(&p, syms, &out->limit, &bound))
            return false;
    }
    if (*p != '}' || (out->e != 0 && (out->l != 0 || out->j != 0)) || (out->l != 0 && out->j > 1))
        return false;
    out->end = p + 1;
    return true;
}

static bool hole_value(const hole *h, const ckpt_index *at, int64_t *out)
{
    const int64_t factor[] = {h->l, h->j, h->e}, index[] = {at->l, at->j, at->e};
    int64_t sum = h->add, part;
    if (!h->known || (h->l != 0 && h->j != 0 && at->j >= h->l))
        return false;
    for (int i = 0; i < 3; i++)
        if (factor[i] != 0 && (index[i] < 0 || !ckpt_mul_i64(factor[i], index[i], &part) ||
                               !ckpt_add_i64(sum, part, &sum)))
            return false;
    *out = sum;
    return true;
}

static bool settle(int64_t *slot, int64_t v)
{
    if (*slot >= 0 && *slot != v)
        return false;
    *slot = v;
    return true;
}

/* The indices that give a hole this value. */
static bool hole_solve(const hole *h, int64_t v, ckpt_index *at)
{
    if (!h->known || (h->limit > 0 && v >= h->limit))
        return false;
    v -= h->add;
    if (v < 0)
        return false;
    if (h->l != 0 && h->j != 0) /* j runs inside l */
        return settle(&at->l, v / h->l) && settle(&at->j, v % h->l);
    if (h->l != 0)
        return v % h->l == 0 && settle(&at->l, v / h->l);
    if (h->j != 0)
        return v % h->j == 0 && settle(&at->j, v / h->j);
    if (h->e != 0)
        return v % h->e == 0 && settle(&at->e, v / h->e);
    return v == 0;
}

static bool parse_index(const char **name, int64_t *out)
{
    const char *p = *name;
    if (!isdigit((unsigned char)*p) || (*p == '0' && isdigit((unsigned char)p[1])))
        return false;
    int64_t v = 0;
    while (isdigit((unsigned char)*p)) {
        v = v * 10 + (*p++ - '0');
        if (v > INT32_MAX)
            return false;
    }
    *name = p;
    *out = v;
    return true;
}

bool ckpt_pattern_match(const char *pattern, const char *name, const ckpt_symtab *syms,
                        ckpt_index *at)
{
    *at = CKPT_NO_INDEX;
    while (*pattern != '\0') {
        if (*pattern != '{') {
            if (*pattern++ != *name++)
                return false;
            continue;
        }
        hole h;
        int64_t v;
        if (!parse_hole(pattern, syms, &h) || !parse_index(&name, &v) || !hole_solve(&h, v, at))
            return false;
        pattern = h.end;
    }
    return *name == '\0';
}

char *ckpt_pattern_format(ckpt_arena *arena, const char *pattern, const ckpt_symtab *syms,
                          const ckpt_index *at)
{
    char text[1024];
    size_t n = 0;
    while (*pattern != '\0' && n < sizeof text - 24) {
        hole h;
        int64_t v;
        if (*pattern != '{' || !parse_hole(pattern, syms, &h) || !hole_value(&h, at, &v)) {
            text[n++] = *pattern++;
            continue;
        }
        n += (size_t)snprintf(text + n, sizeof text - n, "%lld", (long long)v);
        pattern = h.end;
    }
    return ckpt_arena_strndup(arena, text, n);
}

bool ckpt_pattern_first(const char *pattern, const ckpt_symtab *syms, const ckpt_index *at,
                        int64_t *out)
{
    hole h;
    const char *open = strchr(pattern, '{');
    return open != NULL && parse_hole(open, syms, &h) && hole_value(&h, at, out);
}

bool ckpt_pattern_has(const char *pattern, const char *vars)
{
    for (const char *p = strchr(pattern, '{'); p != NULL; p = strchr(p + 1, '{')) {
        hole h;
        if (!parse_hole(p, NULL, &h))
            continue;
        for (const char *v = vars; *v != '\0'; v++) {
            const int64_t *slot = slot_of(&h, *v);
            if (slot != NULL && *slot != 0)
                return true;
        }
    }
    return false;
}

bool ckpt_pattern_parses(const char *pattern)
{
    for (; *pattern != '\0'; pattern++) {
        hole h;
        if (*pattern == '}')
            return false;
        if (*pattern != '{')
            continue;
        if (!parse_hole(pattern, NULL, &h))
            return false;
        pattern = h.end - 1;
    }
    return true;
}

uint32_t ckpt_pattern_hash(const char *s)
{
    uint32_t h = 2166136261u;
    while (*s != '\0') {
        char c = *s;
        if (c == '{') {
            c = '#';
            s += strcspn(s, "}");
            s += *s == '}';
        } else if (c >= '0' && c <= '9') {
            c = '#';
            s += strspn(s, "0123456789");
        } else {
            s++;
        }
        h = (h ^ (uint8_t)c) * 16777619u;
    }
    return h;
}

/* ---- rows by name ---------------------------------------------------------------------------- */

ckpt_status ckpt_row_index_build(ckpt_row_index *x, const ckpt_layout *layout, bool canon,
                                 ckpt_err *err)
{
    x->next = malloc((layout->n_rows + 1) * sizeof *x->next);
    if (x->next == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (int i = 0; i < CKPT_ROW_BUCKETS; i++)
        x->head[i] = -1;
    for (size_t r = layout->n_rows; r-- > 0;) {
        const ckpt_row *row = &layout->rows[r];
        uint32_t h = ckpt_pattern_hash(canon ? row->canon : row->stored) % CKPT_ROW_BUCKETS;
        x->next[r] = x->head[h];
        x->head[h] = (int32_t)r;
    }
    return CKPT_OK;
}

int32_t ckpt_row_index_first(const ckpt_row_index *x, const char *name)
{
    return x->head[ckpt_pattern_hash(name) % CKPT_ROW_BUCKETS];
}

void ckpt_row_index_free(ckpt_row_index *x)
{
    free(x->next);
    x->next = NULL;
}

/* ---- choices --------------------------------------------------------------------------------- */

/* One "group=choice" of n bytes. */
static int choice_verdict(const char *choices, const char *tag, size_t n)
{
    size_t group = strcspn(tag, "=") + 1;
    for (const char *t = choices; t != NULL && *t != '\0';) {
        size_t len = strcspn(t, ",");
        if (len >= group && memcmp(t, tag, group) == 0)
            return len == n && memcmp(t, tag, n) == 0;
        t += len + (t[len] == ',');
    }
    return -1;
}

int ckpt_tag_verdict(const char *choices, const char *tag)
{
    int verdict = 1;
    for (size_t n; tag != NULL && *tag != '\0'; tag += n + strspn(tag + n, " ")) {
        n = strcspn(tag, " ");
        int one = choice_verdict(choices, tag, n);
        if (one == 0)
            return 0;
        verdict = one < verdict ? one : verdict;
    }
    return verdict;
}

int ckpt_tags_decide(const char *const *words, size_t n, const char *tag)
{
    int verdict = 1;
    for (size_t len; tag != NULL && *tag != '\0'; tag += len + strspn(tag + len, " ")) {
        char one[64];
        int now = -1;
        len = strcspn(tag, " ");
        if (len >= sizeof one)
            return -1;
        memcpy(one, tag, len);
        one[len] = '\0';
        for (size_t i = 0; i < n && now < 0; i++)
            now = ckpt_tag_verdict(words[i], one);
        if (now == 0)
            return 0;
        verdict = now < verdict ? now : verdict;
    }
    return verdict;
}
