/* Patterns, expressions, views, and how a mesh cuts what they describe. */
#include "layout.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

static ckpt_symtab symbols(void)
{
    ckpt_symtab t = {0};
    ck_assert(ckpt_sym_set(&t, "F", 6));
    ck_assert(ckpt_sym_set(&t, "H", 5));
    ck_assert(ckpt_sym_set(&t, "E", 4));
    ck_assert(ckpt_sym_set(&t, "V", 10));
    ck_assert(ckpt_sym_set(&t, "G", 2));
    ck_assert(ckpt_sym_set(&t, "R", 3));
    ck_assert(ckpt_sym_set(&t, "D", 2));
    return t;
}

START_TEST(expression_sums_and_products_evaluate)
{
    static const struct {
        const char *text;
        int64_t want; /* -1: refused */
    } rows[] = {
        {"7",                                 7 },
        {"F",                                 6 },
        {"2*F",                               12},
        {"R+2",                               5 },
        {"2*F+R*D",                           18},
        {"X",                                 -1},
        {"2*",                                -1},
        {"",                                  -1},
        {"F-1",                               -1},
        {"9223372036854775807*F",             -1},
        {"99999999999999999999",              -1},
        {"9223372036854775807+9223372036854", -1},
    };
    ckpt_symtab t = symbols();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        int64_t v = -1;
        bool ok = ckpt_expr_eval(&t, rows[i].text, strlen(rows[i].text), &v);
        ck_assert_msg(ok == (rows[i].want >= 0), "%s", rows[i].text);
        if (ok)
            ck_assert_int_eq(v, rows[i].want);
    }
}
END_TEST

START_TEST(pattern_indices_match_and_format)
{
    static const struct {
        const char *pattern, *name;
        int64_t l, e; /* l = -2: no match */
    } rows[] = {
        {"a.weight",        "a.weight",            -1, -1},
        {"layers.{l}.w",    "layers.12.w",         12, -1},
        {"layers.{l}.w",    "layers.012.w",        -2, -1},
        {"layers.{l}.w",    "layers..w",           -2, -1},
        {"layers.{l}.w",    "layers.-1.w",         -2, -1},
        {"layers.{l}.w",    "layers.1.wx",         -2, -1},
        {"layers.{l}.w",    "layers.9999999999.w", -2, -1},
        {"blocks.{2l+1}.x", "blocks.7.x",          3,  -1},
        {"blocks.{2l+1}.x", "blocks.6.x",          -2, -1},
        {"blocks.{2l}.x",   "blocks.6.x",          3,  -1},
        {"l.{l}.e.{e}.up",  "l.3.e.41.up",         3,  41},
        {"l.{l}.again.{l}", "l.3.again.4",         -2, -1},
        {"l.{l}.again.{l}", "l.3.again.3",         3,  -1},
    };
    ckpt_arena arena = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_index at;
        bool hit = ckpt_pattern_match(rows[i].pattern, rows[i].name, NULL, &at);
        ck_assert_msg(hit == (rows[i].l != -2), "%s ~ %s", rows[i].pattern, rows[i].name);
        if (!hit)
            continue;
        ck_assert_int_eq(at.l, rows[i].l);
        ck_assert_int_eq(at.e, rows[i].e);
        ck_assert_str_eq(ckpt_pattern_format(&arena, rows[i].pattern, NULL, &at), rows[i].name);
    }
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(pattern_holes_with_symbols_are_solved_both_ways)
{
    static const struct {
        const char *pattern, *name;
        ckpt_index at;
        bool match;
    } rows[] = {
        {"mtp.{2l+P}.norm",          "mtp.14.norm",        {1, -1, -1},  true },
        {"mtp.{2l+P}.norm",          "mtp.13.norm",        {0, 0, 0},    false},
        {"mtp.{2l+P}.norm",          "mtp.10.norm",        {0, 0, 0},    false},
        {"blocks.{2l+P+1}.x",        "blocks.15.x",        {1, -1, -1},  true },
        {"blocks.{P+Q*l+j}.x",       "blocks.19.x",        {2, 1, -1},   true },
        {"blocks.{P+Q*l+j}.x",       "blocks.12.x",        {0, 0, -1},   true },
        {"blocks.{l<P}.x",           "blocks.11.x",        {11, -1, -1}, true },
        {"blocks.{l<P}.x",           "blocks.12.x",        {0, 0, 0},    false},
        {"blocks.{2l+1<P}.x",        "blocks.11.x",        {5, -1, -1},  true },
        {"blocks.{2l+1<P}.x",        "blocks.13.x",        {0, 0, 0},    false},
        {"mtp.{P}.norm",             "mtp.12.norm",        {-1, -1, -1}, true },
        {"mtp.{P}.norm",             "mtp.11.norm",        {0, 0, 0},    false},
        {"mtp.{X*l}.norm",           "mtp.11.norm",        {0, 0, 0},    false},
        {"d.{l}.layers.{j}.e.{e}.x", "d.1.layers.2.e.3.x", {1, 2, 3},    true },
    };
    ckpt_arena arena = {0};
    ckpt_symtab syms = {0};
    int64_t v;
    ck_assert(ckpt_sym_set(&syms, "P", 12) && ckpt_sym_set(&syms, "Q", 3));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_index at;
        bool hit = ckpt_pattern_match(rows[i].pattern, rows[i].name, &syms, &at);
        ck_assert_msg(hit == rows[i].match, "%s ~ %s", rows[i].pattern, rows[i].name);
        if (!hit)
            continue;
        ck_assert_int_eq(at.l, rows[i].at.l);
        ck_assert_int_eq(at.j, rows[i].at.j);
        ck_assert_int_eq(at.e, rows[i].at.e);
        ck_assert_str_eq(ckpt_pattern_format(&arena, rows[i].pattern, &syms, &at), rows[i].name);
        ck_assert_uint_eq(ckpt_pattern_hash(rows[i].pattern), ckpt_pattern_hash(rows[i].name));
    }
    /* the depth ends before the next one starts */
    ck_assert(!ckpt_pattern_first("blocks.{P+Q*l+j}.x", &syms, &(ckpt_index){0, 3, -1}, &v));
    ck_assert(ckpt_pattern_first("blocks.{P+Q*l+j}.x", &syms, &(ckpt_index){1, 2, -1}, &v));
    ck_assert_int_eq(v, 17);
    ck_assert(!ckpt_pattern_match("mtp.{2l+P}.norm", "mtp.14.norm", NULL, &(ckpt_index){0}));
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(tags_are_decided_by_every_choice_they_name)
{
    static const struct {
        const char *choices, *tag;
        int verdict;
    } rows[] = {
        {"kda=fused",               "kda=fused",               1 },
        {"kda=fused",               "kda=split",               0 },
        {"kda=fused",               "mlp=gated",               -1},
        {"",                        "mlp=gated",               -1},
        {NULL,                      "mlp=gated",               -1},
        {"kda=fused",               NULL,                      1 },
        {"kda=fused",               "",                        1 },
        {"layers=stacked,mlp=gate", "layers=stacked mlp=gate", 1 },
        {"layers=stacked",          "layers=stacked mlp=gate", -1},
        {"layers=stacked",          "layers=single mlp=gate",  0 },
        {"mlp=gate,layers=stacked", "layers=single mlp=gate",  0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        ck_assert_msg(ckpt_tag_verdict(rows[i].choices, rows[i].tag) == rows[i].verdict, "%zu", i);
}
END_TEST

static ckpt_status build(const char *view, int64_t e, int rank, const int64_t *dims,
                         ckpt_symtab *syms, ckpt_arena *arena, ckpt_view_out *out, ckpt_err *err)
{
    ckpt_view_in in = {.view = view, .e = e, .rank = rank, .dims = dims, .syms = syms};
    return ckpt_view_build(&in, arena, out, err);
}

START_TEST(view_written_has_the_expected_shape_and_box)
{
    static const struct {
        const char *view;
        int rank;
        int64_t dims[4];
        int axis; /* the axis to look at */
        int64_t lo, len;
    } rows[] = {
        {"F | H",                       2, {6, 5},       0, 0, 6 },
        {"2=1@unit F@tp | H",           2, {12, 5},      0, 1, 1 },
        {"E=e@ep | 2=0@unit F@etp | H", 3, {4, 12, 5},   0, 3, 1 },
        {"V<16@tp | H",                 2, {16, 5},      0, 0, 10},
        {"V<VP@tp | H",                 2, {10, 5},      0, 0, 10},
        {"G R+2[0:R] D | H",            2, {20, 5},      1, 0, 3 },
        {"G R+2[R:R+1] D | H",          2, {20, 5},      1, 3, 1 },
        {"1 | 1 | G | 1",               4, {1, 1, 2, 1}, 2, 0, 2 },
    };
    ckpt_arena arena = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_symtab t = symbols();
        ckpt_view_out out;
        ckpt_err err = {0};
        ck_assert_msg(build(rows[i].view, 3, 0, NULL, &t, &arena, &out, &err) == CKPT_OK, "%s: %s",
                      rows[i].view, err.text);
        ck_assert_int_eq(out.rank, rows[i].rank);
        for (int d = 0; d < out.rank; d++)
            ck_assert_int_eq(out.dims[d], rows[i].dims[d]);
        ck_assert_int_eq(out.map.axis[rows[i].axis].lo, rows[i].lo);
        ck_assert_int_eq(out.map.axis[rows[i].axis].len, rows[i].len);
        ck_assert_int_eq(ckpt_view_rank(rows[i].view), out.rank);
    }
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(view_read_binds_what_a_shape_determines)
{
    ckpt_arena arena = {0};
    ckpt_err err = {0};
    ckpt_symtab t = {0};
    ckpt_view_out out;
    int64_t fc1[] = {192, 64}, heads[] = {128, 64}, a_log[] = {4}, bad[] = {130, 64};
    ck_assert_int_eq(build("2=0 F | H", -1, 2, fc1, &t, &arena, &out, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_sym_get(&t, "F", 1), 96);
    ck_assert_int_eq(ckpt_sym_get(&t, "H", 1), 64);
    /* two unknown whole factors merge into one axis that keeps the first one's cut */
    ck_assert_int_eq(build("NK@tp A | H", -1, 2, heads, &t, &arena, &out, &err), CKPT_OK);
    ck_assert_int_eq(out.map.n, 2);
    ck_assert_int_eq(out.map.axis[0].size, 128);
    ck_assert_int_eq(out.map.axis[0].cut, CKPT_CUT_TP);
    ck_assert_int_eq(ckpt_sym_get(&t, "A", 1), 0);
    ck_assert_int_eq(build("NK@tp", -1, 1, a_log, &t, &arena, &out, &err), CKPT_OK);
    ck_assert_int_eq(build("NK@tp A | H", -1, 2, heads, &t, &arena, &out, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_sym_get(&t, "A", 1), 32);
    ck_assert_int_eq(out.map.n, 3);
    ck_assert_int_eq(build("NK A | H", -1, 2, bad, &t, &arena, &out, &err), CKPT_E_FORMAT);
    /* what is written has no extents to take an unknown size from */
    ck_assert_int_eq(build("ZZ<YY | H", -1, 0, NULL, &t, &arena, &out, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, "the size 'ZZ' is not known") != NULL, "%s", err.text);
    ck_assert_int_ne(build("0 X | H", -1, 2, heads, &t, &arena, &out, &err), CKPT_OK);
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(view_that_does_not_parse_is_refused)
{
    static const char *const bad[] = {"",      "|",     "F |",     "F | | H", "F@xx",
                                      "F[0:2", "F[:2]", "F[0]",    "F=",      "F<",
                                      "@tp F", "F @ep", "F=9 | H", "F[4:2]",  "F[0:99]"};
    ckpt_arena arena = {0};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ckpt_symtab t = symbols();
        ckpt_view_out out;
        ckpt_err err = {0};
        ck_assert_msg(build(bad[i], 0, 0, NULL, &t, &arena, &out, &err) != CKPT_OK, "'%s'", bad[i]);
        ck_assert(err.text[0] != '\0');
    }
    ckpt_arena_free(&arena);
}
END_TEST

START_TEST(layout_check_refuses_rows_that_cannot_work)
{
    static const struct {
        ckpt_row row;
        bool good;
    } rows[] = {
        {{"blocks.{l}.mlp.up.weight", "w.{l}.up", "F | H", NULL},    true },
        {{"blocks.{2l+1}.mlp.up.weight", "w.{l}.up", "F | H", NULL}, true },
        {{"b.{l}.e.{e}", "w.{l}", "E=e | F", NULL},                  true },
        {{"b.{l}.e.{e}", "w.{l}", "E | F", NULL},                    false},
        {{"b.{2l+1}.e.{e}", "w", "L=l@pp | E=e | F", NULL},          true },
        {{"b.{l}", "w", "L=l@pp 2=0 | F", NULL},                     false},
        {{"b.{l}", "w.{l}", "F ; -1", NULL},                         true },
        {{"b.{l}", "w.{l}", "F ; -2", NULL},                         false},
        {{"b.{l}", "w.{l}", "F ; -1 | H", NULL},                     false},
        {{"b.{P+Q*l+j}", "w.{l}.x.{j}", "F", NULL},                  true },
        {{"b.{P+Q*l}", "w.{l}.x.{j}", "F", NULL},                    false},
        {{"b.{2l+P<P", "w.{l}", "F", NULL},                          false},
        {{"b.{P}", "w", "F", "a=b c=d"},                             true },
        {{"b.{P}", "w", "F", "a=b c"},                               false},
        {{"b.{e}=b", "w.{e}", "F", "a=b"},                           true },
        {{"b.{l}", "w", "F", NULL},                                  false},
        {{"b", "w.{l}", "F", NULL},                                  false},
        {{"b.{l}", "w*.l}", "F", NULL},                              false},
        {{"b.{l}", "w.{x}", "F", NULL},                              false},
        {{"b.{l}", "w.{e}", "F", NULL},                              false},
        {{"b", "w", "18446744073709551617 | F", NULL},               false},
        {{"b", "w", "F | ]", NULL},                                  false},
        {{"b", "w", "F", "notag"},                                   false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_layout layout = {.name = "t", .rows = &rows[i].row, .n_rows = 1};
        ckpt_err err = {0};
        ckpt_status status = ckpt_layout_check(&layout, &err);
        ck_assert_msg((status == CKPT_OK) == rows[i].good, "%s -> %s: %s", rows[i].row.stored,
                      rows[i].row.canon, err.text);
    }
}
END_TEST

/* ---- cutting ----------------------------------------------------------------------------------- */

static ckpt_mesh mesh(int tp, int pp, int ep, int etp)
{
    ckpt_mesh m = {tp, pp, ep, etp, 1, 1};
    ck_assert_int_eq(ckpt_mesh_resolve(&m, NULL), CKPT_OK);
    return m;
}

typedef struct cut_row {
    const char *view;
    int tp, ep, etp;
    int n;
    int chunk; /* to look at */
    int64_t lo[3], len[3];
    int owner;
} cut_row;

START_TEST(cut_chunks_lie_where_megatron_puts_them)
{
    static const cut_row rows[] = {
        {"F@tp | H",                    2, 1, 0, 2,  1,  {3, 0},    {3, 5},    1},
        {"H | F@tp",                    3, 1, 0, 3,  2,  {0, 4},    {5, 2},    2},
        {"F | H",                       2, 1, 0, 1,  0,  {0, 0},    {6, 5},    0},
        {"2=0@unit F@tp | H",           2, 1, 0, 4,  2,  {6, 0},    {3, 5},    0},
        {"2=0@unit F@tp | H",           2, 1, 0, 4,  3,  {9, 0},    {3, 5},    1},
        {"E=e@ep | 2=0@unit F@etp | H", 2, 2, 0, 16, 15, {3, 9, 0}, {1, 3, 5}, 3},
        {"E=e@ep | 2=0@unit F@etp | H", 1, 4, 1, 8,  5,  {2, 6, 0}, {1, 6, 5}, 2},
        {"E=e@ep | H | F@etp",          2, 2, 1, 4,  3,  {3, 0, 0}, {1, 5, 6}, 1},
        {"E=l@pp | F@tp | H",           2, 1, 0, 8,  5,  {2, 3, 0}, {1, 3, 5}, 1},
        {"G R+2[0:R] D @tp | H",        4, 1, 0, 4,  1,  {5, 0},    {5, 5},    1},
        {"G@tp R+2[0:R] D | H",         2, 1, 0, 2,  1,  {10, 0},   {10, 5},   1},
        {"G@head D | H",                2, 1, 0, 2,  1,  {2, 0},    {2, 5},    1},
        {"G@head D | H",                4, 1, 0, 4,  3,  {3, 0},    {1, 5},    3},
        {"G@head | H",                  4, 1, 0, 1,  0,  {0, 0},    {2, 5},    0},
        {"G@group R+2[0:R] D | H",      4, 1, 0, 4,  2,  {10, 0},   {5, 5},    2},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const cut_row *r = &rows[i];
        ckpt_arena arena = {0};
        ckpt_symtab t = symbols();
        ckpt_err err = {0};
        ckpt_view_out out;
        ckpt_out_chunk *chunks;
        size_t n;
        ckpt_mesh m = mesh(r->tp, 1, r->ep, r->etp);
        ck_assert_int_eq(build(r->view, 0, 0, NULL, &t, &arena, &out, &err), CKPT_OK);
        ckpt_status status =
            ckpt_shard_cut(&m, 0, out.rank, out.dims, &out.map, &arena, &chunks, &n, NULL, &err);
        ck_assert_msg(status == CKPT_OK, "%s: %s", r->view, err.text);
        ck_assert_msg((int)n == r->n, "%s: %zu chunks", r->view, n);
        for (int d = 0; d < out.rank; d++) {
            ck_assert_msg(chunks[r->chunk].lo[d] == r->lo[d], "%s: lo[%d] %lld", r->view, d,
                          (long long)chunks[r->chunk].lo[d]);
            ck_assert_int_eq(chunks[r->chunk].len[d], r->len[d]);
        }
        ck_assert_msg(chunks[r->chunk].owner == r->owner, "%s: owner %d", r->view,
                      chunks[r->chunk].owner);
        ckpt_arena_free(&arena);
    }
}
END_TEST

START_TEST(cut_of_stacked_layers_puts_each_on_its_stage)
{
    static const struct {
        int tp, pp, ep;
        size_t chunk;
        int owner;
    } rows[] = {
        {1, 2, 1, 0,          0 }, /* layer 0 */
        {1, 2, 1, 24,         1 }, /* layer 2 */
        {2, 4, 2, 47 * 2 + 1, 15}, /* layer 3, expert 3, up, second half */
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_arena arena = {0};
        ckpt_symtab t = symbols();
        ckpt_view_out out;
        ckpt_out_chunk *chunks;
        size_t n;
        ckpt_err err = {0};
        ckpt_mesh m = mesh(rows[i].tp, rows[i].pp, rows[i].ep, 0), odd = mesh(1, 3, 1, 0);
        ck_assert(ckpt_sym_set(&t, "L", 4) && ckpt_sym_set(&t, "E", 6));
        m.ep = rows[i].ep;
        ck_assert_int_eq(
            build("L=l@pp | E=e@ep | 2=1@unit F@etp | H", 3, 0, NULL, &t, &arena, &out, &err),
            CKPT_OK);
        ck_assert_int_eq(
            ckpt_shard_cut(&m, 0, out.rank, out.dims, &out.map, &arena, &chunks, &n, NULL, &err),
            CKPT_OK);
        ck_assert_int_eq(n, 4 * 6 * 2 * (size_t)rows[i].tp);
        ck_assert_int_eq(chunks[rows[i].chunk].owner, rows[i].owner);
        ck_assert_int_eq(
            ckpt_shard_cut(&odd, 0, out.rank, out.dims, &out.map, &arena, &chunks, &n, NULL, &err),
            CKPT_E_USAGE);
        ck_assert_str_eq(err.text, "layers 4 is not divisible by PP 3");
        ckpt_arena_free(&arena);
    }
}
END_TEST

START_TEST(cut_indivisible_sizes_name_the_size_and_the_group)
{
    static const struct {
        const char *view;
        int tp, ep, etp;
        const char *text;
    } rows[] = {
        {"F@tp | H",             4, 1, 0, "gate/up dim 6 is not divisible by TP 4"     },
        {"2=0@unit F@tp | H",    5, 1, 0, "gate/up dim 6 is not divisible by TP 5"     },
        {"E=e@ep | H",           1, 3, 0, "experts 4 is not divisible by EP 3"         },
        {"E=e@ep | H | F@etp",   1, 1, 4, "gate/up dim 6 is not divisible by ETP 4"    },
        {"G R+2[0:R] D @tp | H", 3, 1, 0, "key/value heads 20 is not divisible by TP 3"},
        {"G@head D | H",         3, 1, 0, "key/value heads 2 is not divisible by TP 3" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_arena arena = {0};
        ckpt_symtab t = symbols();
        ckpt_err err = {0};
        ckpt_view_out out;
        ckpt_out_chunk *chunks;
        size_t n;
        ckpt_mesh m = mesh(rows[i].tp, 1, rows[i].ep, rows[i].etp);
        ck_assert_int_eq(build(rows[i].view, 0, 0, NULL, &t, &arena, &out, &err), CKPT_OK);
        ck_assert_int_eq(
            ckpt_shard_cut(&m, 0, out.rank, out.dims, &out.map, &arena, &chunks, &n, NULL, &err),
            CKPT_E_USAGE);
        ck_assert_str_eq(err.text, rows[i].text);
        ckpt_arena_free(&arena);
    }
}
END_TEST

/* A rank of fused in_proj holds its part of every section, not a contiguous part of the whole: of
 * sections Q K V Z B A (4 4 4 4 2 2 rows) at TP 2, rank 0 has these rows. */
START_TEST(cut_sections_give_each_rank_its_part_of_every_section)
{
    static const int sizes[] = {4, 4, 4, 4, 2, 2};
    static const int want[2][10] = {
        {0, 1, 4, 5, 8,  9,  12, 13, 16, 18},
        {2, 3, 6, 7, 10, 11, 14, 15, 17, 19}
    };
    ckpt_mesh m = mesh(2, 1, 1, 0);
    for (int rank = 0; rank < 2; rank++) {
        int row = 0, n = 0;
        for (int s = 0; s < 6; s++) {
            ckpt_arena arena = {0};
            ckpt_symtab t = {0};
            ckpt_view_out out;
            ckpt_out_chunk *chunks;
            size_t n_chunks;
            int64_t dims[] = {sizes[s], 8};
            ck_assert_int_eq(build("X@tp | H", -1, 2, dims, &t, &arena, &out, NULL), CKPT_OK);
            ck_assert_int_eq(
                ckpt_shard_cut(&m, 0, 2, dims, &out.map, &arena, &chunks, &n_chunks, NULL, NULL),
                CKPT_OK);
            for (int64_t i = 0; i < chunks[rank].len[0]; i++)
                ck_assert_int_eq(row + chunks[rank].lo[0] + i, want[rank][n++]);
            row += sizes[s];
            ckpt_arena_free(&arena);
        }
        ck_assert_int_eq(n, 10);
    }
}
END_TEST

START_TEST(mesh_ranks_and_stages_count_as_megatron_counts)
{
    static const struct {
        int tp, pp, ep, etp, world;
    } rows[] = {
        {1, 1, 1, 0, 1 },
        {2, 1, 2, 0, 4 },
        {2, 2, 1, 0, 4 },
        {4, 1, 2, 1, 4 },
        {2, 1, 3, 1, 6 },
        {2, 3, 4, 2, 24},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ckpt_mesh m = mesh(rows[i].tp, rows[i].pp, rows[i].ep, rows[i].etp);
        ck_assert_int_eq(ckpt_mesh_world(&m), rows[i].world);
    }
    ckpt_mesh m = mesh(1, 2, 1, 0), bad = {0, 1, 1, 1, 1, 1};
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_mesh_stage(&m, 3, 8), 0);
    ck_assert_int_eq(ckpt_mesh_stage(&m, 4, 8), 1);
    ck_assert_int_eq(ckpt_mesh_stage(&m, 9, 8), 1); /* multi-token prediction */
    ck_assert_int_eq(ckpt_mesh_check_blocks(&m, 7, "blocks", &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "7 blocks are not divisible by PP 2");
    ck_assert_int_eq(ckpt_mesh_resolve(&bad, &err), CKPT_E_USAGE);
    ck_assert_str_eq(err.text, "TP is 0, must be at least 1");
}
END_TEST

START_TEST(sequence_cuts_cover_every_token_once)
{
    for (int n = 1; n <= 4; n++)
        for (int zigzag = 0; zigzag < 2; zigzag++) {
            int seen[48] = {0};
            for (int r = 0; r < n; r++) {
                ckpt_span span[2];
                int spans;
                ck_assert_int_eq(ckpt_shard_sequence(48, r, n, zigzag, span, &spans, NULL),
                                 CKPT_OK);
                for (int k = 0; k < spans; k++)
                    for (int64_t i = 0; i < span[k].len; i++)
                        seen[span[k].lo + i]++;
            }
            for (int i = 0; i < 48; i++)
                ck_assert_int_eq(seen[i], 1);
        }
    ckpt_span span[2];
    int spans;
    ck_assert_int_eq(ckpt_shard_sequence(48, 1, 4, true, span, &spans, NULL), CKPT_OK);
    ck_assert_int_eq(span[0].lo, 6);
    ck_assert_int_eq(span[1].lo, 36);
    ck_assert_int_eq(ckpt_shard_sequence(50, 0, 4, true, span, &spans, NULL), CKPT_E_USAGE);
}
END_TEST

Suite *suite_layout(void)
{
    Suite *s = suite_create("layout");
    TCase *c = tcase_create("tables");
    tcase_set_timeout(c, 30);
    tcase_add_test(c, expression_sums_and_products_evaluate);
    tcase_add_test(c, pattern_indices_match_and_format);
    tcase_add_test(c, pattern_holes_with_symbols_are_solved_both_ways);
    tcase_add_test(c, tags_are_decided_by_every_choice_they_name);
    tcase_add_test(c, cut_of_stacked_layers_puts_each_on_its_stage);
    tcase_add_test(c, view_written_has_the_expected_shape_and_box);
    tcase_add_test(c, view_read_binds_what_a_shape_determines);
    tcase_add_test(c, view_that_does_not_parse_is_refused);
    tcase_add_test(c, layout_check_refuses_rows_that_cannot_work);
    tcase_add_test(c, cut_chunks_lie_where_megatron_puts_them);
    tcase_add_test(c, cut_indivisible_sizes_name_the_size_and_the_group);
    tcase_add_test(c, cut_sections_give_each_rank_its_part_of_every_section);
    tcase_add_test(c, mesh_ranks_and_stages_count_as_megatron_counts);
    tcase_add_test(c, sequence_cuts_cover_every_token_once);
    suite_add_tcase(s, c);
    return s;
}
