/* Names, sizes and views of layout tables. The grammar is in layout.h. */
#include "layout.h"
#include "checked.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- symbols and expressions ----------------------------------------------------------------- */

static int sym_index(const ckpt_symtab *t, const char *name, size_t n)
{
    for (int i = 0; i < t->n; i++)
        if (strlen(t->s[i].name) == n && memcmp(t->s[i].name, name, n) == 0)
            return i;
    return -1;
}

int64_t ckpt_sym_get(const ckpt_symtab *t, const char *name, size_t n)
{
    int i = sym_index(t, name, n);
    return i < 0 ? 0 : t->s[i].value;
}

bool ckpt_sym_set(ckpt_symtab *t, const char *name, int64_t value)
{
    int i = sym_index(t, name, strlen(name));
    if (i < 0) {
        if (t->n == (int)(sizeof t->s / sizeof t->s[0]))
            return false;
        i = t->n++;
        t->s[i].name = name;
    }
    t->s[i].value = value;
    return true;
}

static size_t word_len(const char *p, size_t n)
{
    size_t i = 0;
    while (i < n && (isalnum((unsigned char)p[i]) || p[i] == '_'))
        i++;
    return i;
}

/* One factor of a product: an integer or a symbol. */
static bool eval_word(const ckpt_symtab *t, const char *p, size_t n, int64_t *out)
{
    if (n == 0)
        return false;
    if (!isdigit((unsigned char)p[0])) {
        *out = ckpt_sym_get(t, p, n);
        return *out > 0;
    }
    int64_t v = 0;
    for (size_t i = 0; i < n; i++)
        if (!isdigit((unsigned char)p[i]) || !ckpt_mul_i64(v, 10, &v) ||
            !ckpt_add_i64(v, p[i] - '0', &v))
            return false;
    *out = v;
    return true;
}

bool ckpt_expr_eval(const ckpt_symtab *t, const char *expr, size_t n, int64_t *out)
{
    int64_t sum = 0, product = 1;
    for (size_t i = 0;;) {
        size_t len = word_len(expr + i, n - i);
        int64_t v;
        if (!eval_word(t, expr + i, len, &v) || !ckpt_mul_i64(product, v, &product))
            return false;
        i += len;
        if (i < n && expr[i] == '*') {
            i++;
            continue;
        }
        if (!ckpt_add_i64(sum, product, &sum))
            return false;
        product = 1;
        if (i == n)
            break;
        if (expr[i++] != '+')
            return false;
    }
    *out = sum;
    return true;
}

/* The first unbound symbol of an expression, and how many there are (each occurrence counts). */
static int expr_unbound(const ckpt_symtab *t, const char *expr, size_t n, const char **name,
                        size_t *len)
{
    int count = 0;
    for (size_t i = 0; i < n;) {
        size_t w = word_len(expr + i, n - i);
        if (w > 0 && !isdigit((unsigned char)expr[i]) && ckpt_sym_get(t, expr + i, w) == 0 &&
            count++ == 0) {
            *name = expr + i;
            *len = w;
        }
        i += w + 1;
    }
    return count;
}

/* ---- views ----------------------------------------------------------------------------------- */

typedef enum factor_kind { FACTOR_WHOLE, FACTOR_INDEX, FACTOR_RANGE, FACTOR_PAD } factor_kind;

/* One parsed factor; text points into the view. */
typedef struct factor {
    const char *size, *a, *b; /* EXPR; index or range start or EXPR2; range end */
    size_t size_n, a_n, b_n;
    factor_kind kind;
    ckpt_cut cut;
    int dim;
} factor;

#define MAX_FACTORS 24

typedef struct parsed_view {
    factor f[MAX_FACTORS];
    int n, rank, shift;
} parsed_view;

static bool parse_cut(const char *p, size_t n, ckpt_cut *out)
{
    static const struct {
        const char *text;
        ckpt_cut cut;
    } cuts[] = {
        {"tp",    CKPT_CUT_TP   },
        {"etp",   CKPT_CUT_ETP  },
        {"ep",    CKPT_CUT_EP   },
        {"unit",  CKPT_CUT_UNIT },
        {"head",  CKPT_CUT_HEAD },
        {"group", CKPT_CUT_GROUP},
        {"pp",    CKPT_CUT_PP   },
    };
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++)
        if (strlen(cuts[i].text) == n && memcmp(cuts[i].text, p, n) == 0) {
            *out = cuts[i].cut;
            return true;
        }
    return false;
}

static size_t span_until(const char *p, size_t n, const char *stop)
{
    size_t i = 0;
    while (i < n && strchr(stop, p[i]) == NULL)
        i++;
    return i;
}

#define MAX_DIGITS 18 /* of a number: any fits int64 */

/* Words joined by single + or *. */
static bool expr_parses(const char *p, size_t n)
{
    for (size_t i = 0;;) {
        size_t word = word_len(p + i, n - i);
        if (word == 0 || (isdigit((unsigned char)p[i]) && word > MAX_DIGITS))
            return false;
        i += word;
        if (i == n)
            return true;
        if (p[i] != '+' && p[i] != '*')
            return false;
        i++;
    }
}

/* Parse one blank-free token into a factor. */
static bool parse_factor(const char *p, size_t n, factor *f)
{
    size_t at = span_until(p, n, "@");
    if (at < n && !parse_cut(p + at + 1, n - at - 1, &f->cut))
        return false;
    n = at;
    f->size = p;
    f->size_n = span_until(p, n, "=[<");
    size_t i = f->size_n;
    if (!expr_parses(p, i))
        return false;
    if (i == n)
        return true;
    f->a = p + i + 1;
    if (p[i] == '[') {
        f->kind = FACTOR_RANGE;
        if (p[n - 1] != ']')
            return false;
        f->a_n = span_until(f->a, n - i - 2, ":");
        if (f->a_n + i + 2 >= n)
            return false;
        f->b = f->a + f->a_n + 1;
        f->b_n = (size_t)(p + n - 1 - f->b);
        return expr_parses(f->a, f->a_n) && expr_parses(f->b, f->b_n);
    }
    f->kind = p[i] == '=' ? FACTOR_INDEX : FACTOR_PAD;
    f->a_n = n - i - 1;
    return expr_parses(f->a, f->a_n);
}

/* "; -1" or "; +1" at the end. */
static bool parse_shift(const char *p, int *out)
{
    p += strspn(p, "; ");
    if ((*p != '-' && *p != '+') || p[1] != '1' || p[2] != '\0')
        return false;
    *out = *p == '-' ? -1 : 1;
    return true;
}

static bool parse_view(const char *view, parsed_view *out)
{
    out->n = out->shift = 0;
    int dim = 0, first = 0;
    for (const char *p = view;;) {
        while (*p == ' ')
            p++;
        size_t n = strcspn(p, " |;");
        if (n > 1 && p[0] == '@') {
            ckpt_cut cut;
            if (!parse_cut(p + 1, n - 1, &cut) || cut != CKPT_CUT_TP || out->n == first)
                return false;
            out->f[first].cut = CKPT_CUT_TP_DIM;
        } else if (n > 0) {
            if (out->n == MAX_FACTORS)
                return false;
            factor *f = &out->f[out->n++];
            *f = (factor){.dim = dim};
            if (!parse_factor(p, n, f))
                return false;
        }
        p += n;
        while (*p == ' ')
            p++;
        if (*p == '|' || *p == ';' || *p == '\0') {
            if (out->n == first || dim == CKPT_MAX_RANK - 1)
                return false;
            dim++;
            first = out->n;
            if (*p == ';' && !parse_shift(p, &out->shift))
                return false;
            if (*p++ != '|')
                break;
        }
    }
    out->rank = dim;
    return true;
}

int ckpt_view_rank(const char *view)
{
    int n = 1;
    for (; *view != '\0'; view++)
        n += *view == '|';
    return n;
}

int ckpt_view_shift(const char *view)
{
    parsed_view v;
    const char *semicolon = strchr(view, ';');
    return semicolon != NULL && parse_view(view, &v) ? v.shift : 0;
}

/* The factor whose index is `var`, or -1. */
static int indexed_factor(const parsed_view *v, char var)
{
    for (int i = 0; i < v->n; i++)
        if (v->f[i].kind == FACTOR_INDEX && v->f[i].a_n == 1 && v->f[i].a[0] == var)
            return i;
    return -1;
}

bool ckpt_view_expands(const char *view, char var, const char **symbol, size_t *len)
{
    parsed_view v;
    int i = strchr(view, '=') != NULL && parse_view(view, &v) ? indexed_factor(&v, var) : -1;
    if (i < 0)
        return false;
    *symbol = v.f[i].size;
    *len = v.f[i].size_n;
    return true;
}

int ckpt_view_stack(const char *view)
{
    parsed_view v;
    int i = strchr(view, '=') != NULL && parse_view(view, &v) ? indexed_factor(&v, 'l') : -1;
    if (i < 0 || (i > 0 && v.f[i - 1].dim == v.f[i].dim) ||
        (i + 1 < v.n && v.f[i + 1].dim == v.f[i].dim))
        return -1;
    return v.f[i].dim;
}

/* Copy a symbol name so that it outlives the view text (user tables). */
static const char *intern(ckpt_arena *arena, const char *s, size_t n)
{
    return ckpt_arena_strndup(arena, s, n);
}

static ckpt_status bad_dim(const ckpt_view_in *in, int d, int64_t want, ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_FORMAT, "dimension %d is %lld, expected %lld (view '%s')", d,
                     (long long)in->dims[d], (long long)want, in->view);
}

/* Size of factor f if its symbols are bound. */
static bool factor_size(const ckpt_symtab *syms, const factor *f, int64_t *out)
{
    if (f->kind == FACTOR_PAD)
        return ckpt_expr_eval(syms, f->a, f->a_n, out);
    return ckpt_expr_eval(syms, f->size, f->size_n, out);
}

/* In a dimension of known extent, bind the only unbound symbol if it stands alone as a factor and
 * the rest divides. Returns false when the bound value contradicts the extent. */
static ckpt_status bind_dim(const ckpt_view_in *in, const parsed_view *v, int first, int last,
                            int64_t extent, ckpt_arena *arena, ckpt_err *err)
{
    int64_t known = 1;
    int open = -1;
    for (int i = first; i < last; i++) {
        int64_t size;
        if (factor_size(in->syms, &v->f[i], &size)) {
            if (!ckpt_mul_i64(known, size, &known))
                return ckpt_fail(err, CKPT_E_FORMAT, "view '%s' overflows", in->view);
        } else if (open >= 0 || v->f[i].kind == FACTOR_PAD) {
            return CKPT_OK;
        } else {
            open = i;
        }
    }
    if (open < 0)
        return CKPT_OK;
    const factor *f = &v->f[open];
    /* 2*X or X*2+Y with one unbound X: solve only the product form. */
    const char *name = NULL;
    size_t len = 0;
    if (expr_unbound(in->syms, f->size, f->size_n, &name, &len) != 1 ||
        memchr(f->size, '+', f->size_n) != NULL)
        return CKPT_OK;
    ckpt_symtab trial = *in->syms;
    const char *kept = intern(arena, name, len);
    if (kept == NULL || !ckpt_sym_set(&trial, kept, 1))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory binding sizes");
    int64_t unit;
    if (!ckpt_expr_eval(&trial, f->size, f->size_n, &unit) || !ckpt_mul_i64(unit, known, &unit) ||
        unit <= 0)
        return CKPT_OK;
    if (extent == 0 || extent % unit != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "extent %lld is not a multiple of %lld (view '%s')",
                         (long long)extent, (long long)unit, in->view);
    if (!ckpt_sym_set(in->syms, kept, extent / unit))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "too many size symbols");
    return CKPT_OK;
}

/* Box of one factor on its axis of `size`. */
static ckpt_status factor_box(const ckpt_view_in *in, const factor *f, ckpt_axis *axis,
                              ckpt_err *err)
{
    int64_t lo = 0, hi = axis->size;
    bool ok = true;
    switch (f->kind) {
    case FACTOR_WHOLE:
        break;
    case FACTOR_INDEX:
        if (f->a_n == 1 && f->a[0] == 'e')
            lo = in->e;
        else if (f->a_n == 1 && f->a[0] == 'l')
            lo = in->l;
        else
            ok = ckpt_expr_eval(in->syms, f->a, f->a_n, &lo);
        hi = lo + 1;
        break;
    case FACTOR_RANGE:
        ok = ckpt_expr_eval(in->syms, f->b, f->b_n, &hi) &&
             ckpt_expr_eval(in->syms, f->a, f->a_n, &lo);
        break;
    case FACTOR_PAD:
        if (!ckpt_expr_eval(in->syms, f->size, f->size_n, &hi))
            hi = axis->size;
        break;
    }
    if (!ok)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "a size in view '%s' is not determined",
                         in->view);
    if (lo < 0 || hi > axis->size || lo >= hi)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%.*s': range %lld..%lld is outside 0..%lld",
                         (int)f->size_n, f->size, (long long)lo, (long long)hi,
                         (long long)axis->size);
    axis->lo = lo;
    axis->len = hi - lo;
    return CKPT_OK;
}

/* Axes of one dimension. Unbound whole factors merge into one axis when the extent is known. */
static ckpt_status build_dim(const ckpt_view_in *in, const parsed_view *v, int first, int last,
                             int64_t extent, ckpt_arena *arena, ckpt_axis *axis, int *n,
                             int64_t *product, ckpt_err *err)
{
    int64_t known = 1;
    int open = 0, pad = -1;
    for (int i = first; i < last; i++) {
        int64_t size;
        bool bound = factor_size(in->syms, &v->f[i], &size);
        if (v->f[i].kind == FACTOR_PAD && in->dims != NULL)
            pad = i; /* the stored extent decides */
        else if (bound && !ckpt_mul_i64(known, size, &known))
            return ckpt_fail(err, CKPT_E_FORMAT, "view '%s' overflows", in->view);
        else if (!bound && v->f[i].kind == FACTOR_PAD)
            pad = i;
        else if (!bound && v->f[i].kind != FACTOR_WHOLE)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "size '%.*s' is not determined",
                             (int)v->f[i].size_n, v->f[i].size);
        else
            open += !bound;
    }
    if ((open > 0 || (pad >= 0 && in->dims != NULL)) &&
        (extent < 0 || known == 0 || extent % known != 0))
        return ckpt_fail(err, extent < 0 ? CKPT_E_UNSUPPORTED : CKPT_E_FORMAT,
                         extent < 0 ? "a size in view '%s' is not determined"
                                    : "extent contradicts view '%s'",
                         in->view);
    int64_t rest = open > 0 || (pad >= 0 && in->dims != NULL) ? extent / known : 1;
    bool merged = false;
    for (int i = first; i < last; i++) {
        const factor *f = &v->f[i];
        ckpt_axis *a = &axis[*n];
        *a = (ckpt_axis){.dim = f->dim, .cut = f->cut};
        a->symbol = intern(arena, f->size, f->size_n);
        if (a->symbol == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory building a view");
        bool bound = factor_size(in->syms, f, &a->size);
        if (f->kind == FACTOR_PAD && in->dims != NULL)
            a->size = rest;
        else if (f->kind == FACTOR_PAD && !bound &&
                 !ckpt_expr_eval(in->syms, f->size, f->size_n, &a->size))
            return ckpt_fail(err, CKPT_E_FORMAT, "view '%s': the size '%.*s' is not known",
                             in->view, (int)f->size_n, f->size);
        else if (f->kind != FACTOR_PAD && !bound) {
            if (merged)
                continue;
            merged = true;
            a->size = rest;
        }
        ckpt_status status = factor_box(in, f, a, err);
        if (status != CKPT_OK)
            return status;
        if (!ckpt_mul_i64(*product, a->size, product))
            return ckpt_fail(err, CKPT_E_FORMAT, "view '%s' overflows", in->view);
        (*n)++;
    }
    return CKPT_OK;
}

ckpt_status ckpt_view_build(const ckpt_view_in *in, ckpt_arena *arena, ckpt_view_out *out,
                            ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    parsed_view v;
    if (!parse_view(in->view, &v))
        return ckpt_fail(err, CKPT_E_FORMAT, "view '%s' does not parse", in->view);
    if (in->dims != NULL && in->rank != v.rank)
        return ckpt_fail(err, CKPT_E_FORMAT, "rank is %d, view '%s' has %d", in->rank, in->view,
                         v.rank);
    ckpt_axis axis[MAX_FACTORS];
    int n = 0;
    *out = (ckpt_view_out){.rank = v.rank, .complete = true};
    for (int d = 0, first = 0, last = 0; d < v.rank; d++, first = last) {
        while (last < v.n && v.f[last].dim == d)
            last++;
        if (in->dims != NULL)
            CKPT_CHECK(bind_dim(in, &v, first, last, in->dims[d], arena, err));
        if (in->bind_only) {
            for (int i = first; i < last; i++) {
                int64_t size;
                out->complete = out->complete && factor_size(in->syms, &v.f[i], &size);
            }
            continue;
        }
        int64_t extent = in->dims != NULL ? in->dims[d] : -1;
        if (in->dims == NULL && in->hint != NULL && in->rank == v.rank)
            extent = in->hint[d];
        int64_t product = 1;
        CKPT_CHECK(build_dim(in, &v, first, last, extent, arena, axis, &n, &product, err));
        if (in->dims != NULL && product != in->dims[d])
            return bad_dim(in, d, product, err);
        out->dims[d] = product;
    }
    if (!in->bind_only) {
        out->map.n = n;
        out->map.axis = ckpt_arena_memdup(arena, axis, (size_t)n * sizeof axis[0]);
        if (out->map.axis == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory building a view");
    }
done:
    return status;
}

/* ---- table check ----------------------------------------------------------------------------- */

bool ckpt_row_has_index(const ckpt_row *row, char var)
{
    const char text[] = {var, '\0'}, *symbol;
    size_t len;
    return ckpt_pattern_has(row->stored, text) || ckpt_view_expands(row->view, var, &symbol, &len);
}

const char *ckpt_row_copy_of(const ckpt_row *row)
{
    const char *eq = strchr(row->canon, '=');
    return eq != NULL ? eq + 1 : NULL;
}

static bool in_schema(const ckpt_layout *layout, const char *name, size_t n)
{
    char text[256];
    if (n >= sizeof text)
        return false;
    memcpy(text, name, n);
    text[n] = '\0';
    for (size_t i = 0; i < layout->n_schema; i++) {
        ckpt_index at;
        if (ckpt_pattern_match(layout->schema[i].canon, text, NULL, &at))
            return true;
    }
    return layout->n_schema == 0;
}

/* Every tensor that a row names; of a copy these are the tensors it may be a copy of. */
static bool names_in_schema(const ckpt_layout *layout, const ckpt_row *row, const char *canon)
{
    const char *copy = ckpt_row_copy_of(row);
    if (copy == NULL)
        return in_schema(layout, canon, strlen(canon));
    for (size_t n; *copy != '\0'; copy += n + (copy[n] == '|')) {
        n = strcspn(copy, "|");
        if (!in_schema(layout, copy, n))
            return false;
    }
    return true;
}

static bool tags_parse(const char *tag)
{
    for (size_t n; tag != NULL && *tag != '\0'; tag += n + strspn(tag + n, " ")) {
        n = strcspn(tag, " ");
        const char *eq = memchr(tag, '=', n);
        if (eq == NULL || eq == tag || eq + 1 == tag + n)
            return false;
    }
    return true;
}

static bool same_indices(const ckpt_row *row)
{
    return ckpt_pattern_has(row->canon, "l") == ckpt_row_has_index(row, 'l') &&
           ckpt_pattern_has(row->canon, "j") == ckpt_row_has_index(row, 'j') &&
           ckpt_pattern_has(row->canon, "e") == ckpt_row_has_index(row, 'e');
}

static ckpt_status check_row(const ckpt_layout *layout, const ckpt_row *row,
                             const ckpt_symtab *syms, ckpt_arena *arena, ckpt_err *err)
{
    const ckpt_index sample = {.l = 3, .j = 1, .e = 2};
    parsed_view v;
    ckpt_index at;
    char *canon = ckpt_pattern_format(arena, row->canon, syms, &sample);
    char *stored = ckpt_pattern_format(arena, row->stored, syms, &sample);
    if (canon == NULL || stored == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory checking a layout");
    if (!ckpt_pattern_parses(row->canon) || !ckpt_pattern_parses(row->stored) ||
        !parse_view(row->view, &v))
        return ckpt_fail(err, CKPT_E_FORMAT, "row '%s' does not parse", row->stored);
    if (!ckpt_pattern_match(row->stored, stored, syms, &at) ||
        !ckpt_pattern_match(row->canon, canon, syms, &at))
        return ckpt_fail(err, CKPT_E_FORMAT, "row '%s' does not match its own name", row->stored);
    if (!same_indices(row))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' and '%s' do not have the same indices",
                         row->canon, row->stored);
    if (indexed_factor(&v, 'l') >= 0 && ckpt_view_stack(row->view) < 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "row '%s': layers share a dimension (view '%s')",
                         row->stored, row->view);
    if (!names_in_schema(layout, row, canon))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not in the schema", row->canon);
    if (!tags_parse(row->tag))
        return ckpt_fail(err, CKPT_E_FORMAT, "tag '%s' has no '='", row->tag);
    return CKPT_OK;
}

ckpt_status ckpt_layout_check(const ckpt_layout *layout, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena arena = {0};
    ckpt_symtab syms = {0};
    (void)(ckpt_sym_set(&syms, "P", 16) && ckpt_sym_set(&syms, "Q", 2));
    for (size_t i = 0; i < layout->n_rows; i++)
        CKPT_TRY(check_row(layout, &layout->rows[i], &syms, &arena, err), "layout %s: row %zu",
                 layout->name, i + 1);
done:
    ckpt_arena_free(&arena);
    return status;
}
