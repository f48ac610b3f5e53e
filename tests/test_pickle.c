/* The data-only unpickler: every opcode, every refusal, and graphs meant to hurt. Expected values
 * come from CPython's pickle module.
 *
 * Length: one case an opcode. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"
#include "pickle.h"

Suite *suite_pickle(void);

#define B(s) s, sizeof(s) - 1

typedef struct parsed {
    ckpt_arena arena;
    ckpt_pkl *root;
    uint32_t n_nodes;
    size_t used;
    ckpt_err err;
    ckpt_status status;
} parsed;

static void parse(parsed *p, const void *bytes, size_t n)
{
    /* Exactly sized, so that a sanitizer sees any step past the end. */
    uint8_t *copy = malloc(n ? n : 1);
    ck_assert_ptr_nonnull(copy);
    memcpy(copy, bytes, n);
    memset(p, 0, sizeof *p);
    p->status = ckpt_pkl_parse(copy, n, &p->arena, NULL, &p->root, &p->used, &p->n_nodes, &p->err);
    free(copy);
}

static void parse_ok(parsed *p, const void *bytes, size_t n)
{
    parse(p, bytes, n);
    ck_assert_msg(p->status == CKPT_OK, "%s", p->err.text);
}

static void release(parsed *p)
{
    ckpt_arena_free(&p->arena);
}

static void json_text(const ckpt_pkl *p, ckpt_buf *out)
{
    ckpt_json *j = ckpt_pkl_to_json(p);
    ck_assert_ptr_nonnull(j);
    ck_assert(ckpt_json_print(j, 0, false, out));
    ckpt_json_free(j);
}

static void reemit(const parsed *p, ckpt_buf *out)
{
    ckpt_err err = {0};
    ckpt_pkl_begin(out);
    ck_assert_msg(ckpt_pkl_put_node(out, p->root, p->n_nodes, &err) == CKPT_OK, "%s", err.text);
    ckpt_pkl_end(out);
    ck_assert(!out->failed);
}

/* ---- values ----------------------------------------------------------------------------------- */

typedef struct value_row {
    const char *bytes;
    size_t n;
    const char *json;
} value_row;

/* clang-format off */
static const value_row values[] = {
    {B("\x80\x02N."), "null"},
    {B("\x80\x05\x88."), "true"},
    {B("\x89."), "false"},
    {B("K\xff."), "255"},
    {B("M\xff\xff."), "65535"},
    {B("J\xff\xff\xff\xff."), "-1"},
    {B("J\x00\x00\x00\x80."), "-2147483648"},
    {B("\x8a\x00."), "0"},
    {B("\x8a\x01\xff."), "-1"},
    {B("\x8a\x02\xff\x00."), "255"},
    {B("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f."), "9223372036854775807"},
    {B("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80."), "-9223372036854775808"},
    {B("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00."), "{\"$int\":\"9223372036854775808\"}"},
    {B("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xff."), "{\"$int\":\"-18446744073709551616\"}"},
    {B("\x8a\x0a\x05\x00\x00\x00\x00\x00\x00\x00\x00\x00."), "5"},
    {B("\x8b\x02\x00\x00\x00\x00\x01."), "256"},
    {B("G\x3f\xf8\x00\x00\x00\x00\x00\x00."), "1.5"},
    {B("G\x7f\xf0\x00\x00\x00\x00\x00\x00."), "{\"$float\":\"inf\"}"},
    {B("G\x7f\xf8\x00\x00\x00\x00\x00\x00."), "{\"$float\":\"nan\"}"},
    {B("I01\n."), "true"},
    {B("I00\n."), "false"},
    {B("I-17\n."), "-17"},
    {B("I1\n."), "1"},
    {B("L36893488147419103232L\n."), "{\"$int\":\"36893488147419103232\"}"},
    {B("L-5L\n."), "-5"},
    {B("L-9223372036854775808L\n."), "-9223372036854775808"},
    {B("F-2.5\n."), "-2.5"},
    {B("X\x03\x00\x00\x00""abc."), "\"abc\""},
    {B("\x8c\x02\xc3\xa9."), "\"\xc3\xa9\""},
    {B("\x8d\x01\x00\x00\x00\x00\x00\x00\x00z."), "\"z\""},
    {B("X\x03\x00\x00\x00\xed\xa0\x80."), "\"\\ufffd\\ufffd\\ufffd\""},
    {B("X\x03\x00\x00\x00""a\x00""b."), "\"a\xe2\x90\x80""b\""},
    {B("U\x02hi."), "\"hi\""},
    {B("T\x02\x00\x00\x00hi."), "\"hi\""},
    {B("U\x02\xff\xfe."), "{\"$bytes\":2}"},
    {B("S'a\\n\\x41\\'\\102'\n."), "\"a\\nA'B\""},
    {B("Vna\\u00efve \\U0001f600\n."), "\"na\xc3\xafve \xf0\x9f\x98\x80\""},
    {B("V\xe9\n."), "\"\xc3\xa9\""},
    {B("C\x02\x00\xff."), "{\"$bytes\":2}"},
    {B("B\x00\x00\x00\x00."), "{\"$bytes\":0}"},
    {B("\x8e\x01\x00\x00\x00\x00\x00\x00\x00z."), "{\"$bytes\":1}"},
    {B("\x96\x01\x00\x00\x00\x00\x00\x00\x00z."), "{\"$bytes\":1}"},
    {B(")."), "[]"},
    {B("K\x01\x85."), "[1]"},
    {B("K\x01K\x02\x86."), "[1,2]"},
    {B("K\x01K\x02K\x03\x87."), "[1,2,3]"},
    {B("(t."), "[]"},
    {B("(K\x01K\x02K\x03K\x04t."), "[1,2,3,4]"},
    {B("]K\x01""a."), "[1]"},
    {B("](K\x01K\x02""e."), "[1,2]"},
    {B("](e."), "[]"},
    {B("(K\x01K\x02l."), "[1,2]"},
    {B("}X\x01\x00\x00\x00kK\x01s."), "{\"k\":1}"},
    {B("}(X\x01\x00\x00\x00kK\x01X\x01\x00\x00\x00jK\x02u."), "{\"k\":1,\"j\":2}"},
    {B("}(X\x01\x00\x00\x00kK\x01X\x01\x00\x00\x00kK\x02u."), "{\"k\":2}"},
    {B("(X\x01\x00\x00\x00kK\x01""d."), "{\"k\":1}"},
    {B("}(K\x05K\x01K\x01K\x02\x86NNN\x88NG\x3f\xe0\x00\x00\x00\x00\x00\x00Nu."),
     "{\"5\":1,\"(1, 2)\":null,\"None\":null,\"True\":null,\"0.5\":null}"},
    {B("\x8f(K\x01K\x02\x90."), "{\"$set\":[1,2]}"},
    {B("(K\x01\x91."), "{\"$set\":[1]}"},
    {B("]q\x05K\x01""ah\x05\x86."), "[[1],[1]]"},
    {B("K\x07r\xff\xff\xff\xffj\xff\xff\xff\xff\x86."), "[7,7]"},
    {B("K\x07p123456789012\ng123456789012\n\x86."), "[7,7]"},
    {B("K\x07q\x00""0K\x08q\x00h\x00\x86."), "[8,8]"},
    {B("\x8c\x01""a\x94K\x01\x94\x86h\x00\x86."), "[[\"a\",1],\"a\"]"},
    {B("K\x01(K\x02K\x03""1."), "1"},
    {B("K\x01(0."), "1"},
    {B("K\x01""2\x86."), "[1,1]"},
    {B("\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00N."), "null"},
    {B("N.trailing junk"), "null"},
    {B("]q\x00h\x00""a."), "[{\"$elided\":\"cycle\"}]"},
    {B("ctorch\nfloat32\n."), "\"torch.float32\""},
    {B("\x8c\x05torch\x8c\x07""float16\x93."), "\"torch.float16\""},
    {B("cos\nsystem\n."), "{\"$global\":\"os.system\"}"},
    {B("cargparse\nNamespace\n)\x81}X\x01\x00\x00\x00xK\x01sb."), "{\"x\":1}"},
    {B("ctypes\nSimpleNamespace\n)R}X\x01\x00\x00\x00xK\x01sb."), "{\"x\":1}"},
    {B("ccollections\nOrderedDict\n)R(X\x01\x00\x00\x00xK\x01u."), "{\"x\":1}"},
    {B("ccollections\nOrderedDict\n]](U\x01xK\x01""ea\x85R."), "{\"x\":1}"},
    {B("ccollections\nCounter\n}U\x01xK\x03s\x85R."), "{\"x\":3}"},
    {B("ctorch\nSize\n((K\x02K\x04ttR."), "[2,4]"},
    {B("ctorch.serialization\n_get_layout\nX\x0d\x00\x00\x00torch.strided\x85R."), "\"torch.strided\""},
    {B("ctorch\ndevice\nX\x04\x00\x00\x00""cudaK\x01\x86R."), "\"cuda:1\""},
    {B("cpathlib\nPosixPath\n(X\x01\x00\x00\x00/X\x03\x00\x00\x00tmpX\x01\x00\x00\x00xtR."), "\"/tmp/x\""},
    {B("cmegatron.core.transformer.enums\nAttnBackend\nK\x05\x85R."),
     "{\"$enum\":\"megatron.core.transformer.enums.AttnBackend\",\"value\":5}"},
    {B("c_codecs\nencode\nX\x03\x00\x00\x00""a\xc3\xbfX\x06\x00\x00\x00latin1\x86R."), "{\"$bytes\":2}"},
    {B("c__builtin__\nbytes\n)R."), "{\"$bytes\":0}"},
    {B("c__builtin__\nset\n](K\x01K\x02""e\x85R."), "{\"$set\":[1,2]}"},
    {B("cdatetime\ntimedelta\nK\x01K\x02K\x03\x87R."), "{\"$timedelta\":\"1d 2s 3us\"}"},
    {B("(cm\nC\nK\x01K\x02o."), "{\"$object\":\"m.C\",\"args\":[1,2]}"},
    {B("(K\x01im\nC\n}X\x01\x00\x00\x00xK\x02sb."), "{\"$object\":\"m.C\",\"args\":[1],\"state\":{\"x\":2}}"},
    {B("cm\nC\nK\x01\x85}X\x01\x00\x00\x00kK\x02s\x92."), "{\"$object\":\"m.C\",\"args\":[1],\"kwargs\":{\"k\":2}}"},
    {B("cm\nC\n)\x81(K\x01""e(X\x01\x00\x00\x00kK\x02u."), "{\"$object\":\"m.C\",\"items\":[1],\"pairs\":{\"k\":2}}"},
    {B("(X\x07\x00\x00\x00storageK\x03tQ."), "{\"$persid\":[\"storage\",3]}"},
    {B("Pabc\n."), "{\"$persid\":\"abc\"}"},
};
/* clang-format on */

START_TEST(pickle_value_reads_as_python_does)
{
    const value_row *row = &values[_i];
    parsed p;
    ckpt_buf text = {0};
    parse_ok(&p, row->bytes, row->n);
    json_text(p.root, &text);
    ck_assert_str_eq((const char *)text.data, row->json);
    ck_assert_uint_le(p.used, row->n);
    ckpt_buf_release(&text);
    release(&p);
}
END_TEST

START_TEST(pickle_value_survives_reemission)
{
    const value_row *row = &values[_i];
    parsed p, q;
    ckpt_buf before = {0}, bytes = {0}, after = {0};
    parse_ok(&p, row->bytes, row->n);
    json_text(p.root, &before);
    reemit(&p, &bytes);
    parse_ok(&q, bytes.data, bytes.len);
    ck_assert_uint_eq(q.used, bytes.len);
    json_text(q.root, &after);
    ck_assert_str_eq((const char *)after.data, (const char *)before.data);
    ckpt_buf_release(&before);
    ckpt_buf_release(&bytes);
    ckpt_buf_release(&after);
    release(&q);
    release(&p);
}
END_TEST

START_TEST(pickle_value_cut_anywhere_is_refused)
{
    const value_row *row = &values[_i];
    parsed p;
    parse_ok(&p, row->bytes, row->n);
    size_t used = p.used;
    release(&p);
    for (size_t n = 0; n < used; n++) {
        parse(&p, row->bytes, n);
        ck_assert_msg(p.status == CKPT_E_FORMAT, "row %d cut at %zu: %d", _i, n, p.status);
        release(&p);
    }
}
END_TEST

/* ---- refusals --------------------------------------------------------------------------------- */

typedef struct error_row {
    const char *bytes;
    size_t n;
    ckpt_status status;
    const char *text;
} error_row;

/* clang-format off */
static const error_row errors[] = {
    {B(""), CKPT_E_FORMAT, "no STOP in 0 bytes"},
    {B("N"), CKPT_E_FORMAT, "no STOP in 1 bytes"},
    {B("."), CKPT_E_FORMAT, "opcode 0x2e at byte 0: needs 1 values"},
    {B("\x80\x06N."), CKPT_E_FORMAT, "protocol 6, expected at most 5"},
    {B("\xfeN."), CKPT_E_FORMAT, "unknown opcode"},
    {B("vN."), CKPT_E_FORMAT, "pickle opcode 0x76 at byte 0: unknown opcode"},
    {B("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"), CKPT_E_FORMAT, "Git LFS pointer, not the file itself (oid sha256:4d7a, size 9)"},
    {B("\n<!doctype html>"), CKPT_E_FORMAT, "HTML page saved as a checkpoint's file"},
    {B("\x00N."), CKPT_E_FORMAT, "unknown opcode"},
    {B("\x95\xff\xff\xff\xff\xff\xff\xff\xffN."), CKPT_E_FORMAT, "frame of 18446744073709551615 bytes"},
    {B("\x8b\xff\xff\xff\x7f."), CKPT_E_FORMAT, "argument of 2147483647 bytes, 1 left"},
    {B("\x8b\xff\xff\xff\xff."), CKPT_E_FORMAT, "negative integer length"},
    {B("X\xff\xff\xff\xff."), CKPT_E_FORMAT, "argument of 4294967295 bytes"},
    {B("\x8d\xff\xff\xff\xff\xff\xff\xff\xff."), CKPT_E_FORMAT, "argument of 18446744073709551615 bytes"},
    {B("\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."), CKPT_E_FORMAT, "argument of"},
    {B("T\xff\xff\xff\xff."), CKPT_E_FORMAT, "argument of"},
    {B("X\x01\x00\x00\x00\xff."), CKPT_E_FORMAT, "not UTF-8"},
    {B("X\x02\x00\x00\x00\xc0\x80."), CKPT_E_FORMAT, "not UTF-8"},
    {B("X\x04\x00\x00\x00\xf4\x90\x80\x80."), CKPT_E_FORMAT, "not UTF-8"},
    {B("0."), CKPT_E_FORMAT, "needs 1 values"},
    {B("2."), CKPT_E_FORMAT, "needs 1 values"},
    {B("1."), CKPT_E_FORMAT, "no mark"},
    {B("t."), CKPT_E_FORMAT, "no mark"},
    {B("]e."), CKPT_E_FORMAT, "no mark"},
    {B("K\x01\x86."), CKPT_E_FORMAT, "needs 2 values, stack has 1 above the mark"},
    {B("K\x01(\x85."), CKPT_E_FORMAT, "needs 1 values, stack has 0 above the mark"},
    {B("}(K\x01u."), CKPT_E_FORMAT, "odd number of items (1) for a dict"},
    {B("(K\x01""d."), CKPT_E_FORMAT, "odd number of items"},
    {B("]K\x01K\x02s."), CKPT_E_FORMAT, "cannot set items of a list"},
    {B("K\x00(K\x01K\x02u."), CKPT_E_FORMAT, "cannot set items of a int"},
    {B("}K\x01""a."), CKPT_E_FORMAT, "cannot add items to a dict"},
    {B(")K\x01""a."), CKPT_E_FORMAT, "cannot add items to a tuple"},
    {B("](K\x01\x90."), CKPT_E_FORMAT, "cannot add items to a list"},
    {B("(K\x01\x91(K\x01\x90."), CKPT_E_FORMAT, "frozenset"},
    {B("]}b."), CKPT_E_FORMAT, "state given to a list"},
    {B("cm\nC\n}b."), CKPT_E_FORMAT, "state given to a global"},
    {B("cm\nC\n)R}b}b."), CKPT_E_FORMAT, "object built twice"},
    {B("cm\nC\n]R."), CKPT_E_FORMAT, "arguments are a list, not a tuple"},
    {B("cm\nC\n)N\x92."), CKPT_E_FORMAT, "keyword arguments are a None"},
    {B("(o."), CKPT_E_FORMAT, "no class above the mark"},
    {B("h\x00."), CKPT_E_FORMAT, "memo index 0 was never stored"},
    {B("j\xff\xff\xff\xff."), CKPT_E_FORMAT, "memo index 4294967295 was never stored"},
    {B("q\x00."), CKPT_E_FORMAT, "needs 1 values"},
    {B("Np-1\n."), CKPT_E_FORMAT, "bad memo index"},
    {B("Np99999999999999999999999\n."), CKPT_E_FORMAT, "bad memo index"},
    {B("Np\n."), CKPT_E_FORMAT, "empty memo index"},
    {B("I\n."), CKPT_E_FORMAT, "bad integer text"},
    {B("I1x\n."), CKPT_E_FORMAT, "bad integer text"},
    {B("F1.5x\n."), CKPT_E_FORMAT, "bad float text"},
    {B("F\n."), CKPT_E_FORMAT, "bad float text"},
    {B("Sabc\n."), CKPT_E_FORMAT, "not quoted"},
    {B("S'\n."), CKPT_E_FORMAT, "not quoted"},
    {B("S'\\x4'\n."), CKPT_E_FORMAT, "bad escape"},
    {B("S'\\'\n."), CKPT_E_FORMAT, "bad escape"},
    {B("V\\u12\n."), CKPT_E_FORMAT, "bad escape"},
    {B("V\\U00110000\n."), CKPT_E_FORMAT, "bad escape"},
    {B("Vabc"), CKPT_E_FORMAT, "without newline"},
    {B("c\n\n."), CKPT_E_FORMAT, "ill-formed global name"},
    {B("ctorch\nfloat32\x00\n."), CKPT_E_FORMAT, "ill-formed global name"},
    {B("ctorch\nSize\nctorch\nSize\x00longer than what the cache holds\n."), CKPT_E_FORMAT, "ill-formed global name"},
    {B("K\x01K\x02\x93."), CKPT_E_FORMAT, "global named by a int and a int"},
    {B("\x82\x01."), CKPT_E_UNSUPPORTED, "an extension code is refused"},
    {B("\x97."), CKPT_E_UNSUPPORTED, "an out-of-band buffer is refused"},
    {B("ccollections\nOrderedDict\n]K\x01""a\x85R."), CKPT_E_FORMAT, "items that are not pairs"},
    {B("ccollections\nCounter\n}q\x00\x85R0ccollections\nCounter\nh\x00\x85R."), CKPT_E_FORMAT, "two dictionaries made from one argument"},
};
/* clang-format on */

START_TEST(pickle_malformed_is_refused)
{
    const error_row *row = &errors[_i];
    parsed p;
    parse(&p, row->bytes, row->n);
    ck_assert_int_eq(p.status, row->status);
    ck_assert_msg(strstr(p.err.text, row->text), "'%s' lacks '%s'", p.err.text, row->text);
    ck_assert_ptr_null(p.root);
    release(&p);
}
END_TEST

/* ---- graphs meant to hurt --------------------------------------------------------------------- */

/* prefix, then unit repeated, then suffix. */
static void repeat(ckpt_buf *b, const char *prefix, size_t n_prefix, const char *unit,
                   size_t n_unit, size_t times, const char *suffix)
{
    ckpt_buf_append(b, prefix, n_prefix);
    for (size_t i = 0; i < times; i++)
        ckpt_buf_append(b, unit, n_unit);
    ckpt_buf_puts(b, suffix);
    ck_assert(!b->failed);
}

static void check_all_walkers(parsed *p)
{
    ckpt_buf text = {0}, bytes = {0};
    parsed q;
    json_text(p->root, &text);
    ck_assert_uint_lt(text.len, (size_t)64 << 20);
    ck_assert_ptr_null(ckpt_pkl_unknown_global(p->root, p->n_nodes, &p->arena, &p->err));
    reemit(p, &bytes);
    parse_ok(&q, bytes.data, bytes.len);
    release(&q);
    ckpt_buf_release(&text);
    ckpt_buf_release(&bytes);
}

/* clang-format off */
static const struct {
    const char *prefix; size_t n_prefix;
    const char *unit; size_t n_unit;
    size_t times;
    const char *suffix;
} graphs[] = {
    {B(")"), B("\x85"), 1000000, "."},                 /* a million nested tuples */
    {B("N"), B("\x85"), 1000000, "."},
    {B("]"), B("\x85"), 1000000, "."},
    {B("K\x01"), B("2\x86"), 100, "."},                /* 2^100 paths through shared tuples */
    {B("]"), B("2\x86"), 100000, "."},
    {B("]("), B("N"), 1000000, "e."},
    {B("}("), B("K\x01N"), 500000, "u."},
    {B("]"), B("K\x01""a"), 1000000, "."},             /* one APPEND each: growth must not be quadratic */
    {B("}"), B("K\x01K\x02s"), 500000, "."},
    {B("]q\x00"), B("h\x00""a"), 300000, "."},         /* a list holding itself */
    {B("]q\x00"), B("h\x00\x85q\x01""ah\x00"), 100000, "."},
    {B("ccollections\nOrderedDict\n)R"), B("K\x01K\x02s"), 300000, "."},
};
/* clang-format on */

START_TEST(pickle_large_graph_is_linear)
{
    parsed p;
    ckpt_buf b = {0};
    repeat(&b, graphs[_i].prefix, graphs[_i].n_prefix, graphs[_i].unit, graphs[_i].n_unit,
           graphs[_i].times, graphs[_i].suffix);
    parse_ok(&p, b.data, b.len);
    check_all_walkers(&p);
    release(&p);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(pickle_too_many_marks_is_refused)
{
    parsed p;
    ckpt_buf b = {0};
    repeat(&b, "", 0, "(", 1, 1100000, "N.");
    parse(&p, b.data, b.len);
    ck_assert_int_eq(p.status, CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(p.err.text, "more than 1048576 marks"));
    release(&p);
    ckpt_buf_clear(&b);
    repeat(&b, "", 0, "N", 1, 1100000, "N.");
    parse(&p, b.data, b.len);
    ck_assert_int_eq(p.status, CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(p.err.text, "stack deeper than 1048576"));
    release(&p);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(pickle_sparse_memo_is_bounded)
{
    parsed p;
    ckpt_buf b = {0};
    ckpt_buf_putc(&b, 'N');
    for (uint32_t i = 0; i < 20000; i++) {
        uint32_t index = 0xffffffffu - i * 1000u;
        ckpt_buf_putc(&b, 'r');
        ckpt_buf_append(&b, &index, sizeof index);
    }
    ckpt_buf_putc(&b, '.');
    parse(&p, b.data, b.len);
    ck_assert_int_eq(p.status, CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(p.err.text, "far above the memo size"));
    ck_assert_uint_lt(p.arena.total, 1 << 20);
    release(&p);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(pickle_node_limit_is_enforced)
{
    ckpt_arena arena = {0};
    ckpt_err err = {0};
    ckpt_pkl *root;
    ckpt_pkl_limits limits = {.max_nodes = 3, .max_depth = 3};
    ck_assert_int_eq(
        ckpt_pkl_parse((const uint8_t *)"]]]]t.", 6, &arena, &limits, &root, NULL, NULL, &err),
        CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "more than 3 nodes"));
    ck_assert_int_eq(
        ckpt_pkl_parse((const uint8_t *)"NNNN.", 5, &arena, &limits, &root, NULL, NULL, &err),
        CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "stack deeper than 3"));
    ckpt_arena_free(&arena);
}
END_TEST

/* ---- globals ---------------------------------------------------------------------------------- */

static const struct {
    const char *module, *name;
    bool known;
} globals[] = {
    {"torch",                                    "float32",                 true },
    {"torch",                                    "float8_e4m3fn",           true },
    {"torch",                                    "BFloat16Storage",         true },
    {"torch",                                    "Size",                    true },
    {"torch._utils",                             "_rebuild_tensor_v2",      true },
    {"collections",                              "OrderedDict",             true },
    {"argparse",                                 "Namespace",               true },
    {"builtins",                                 "set",                     true },
    {"__builtin__",                              "long",                    true },
    {"pathlib",                                  "PosixPath",               true },
    {"pathlib._local",                           "PosixPath",               true },
    {"numpy._core.multiarray",                   "_reconstruct",            true },
    {"numpy.dtypes",                             "UInt32DType",             true },
    {"_codecs",                                  "encode",                  true },
    {"_io",                                      "BytesIO",                 true },
    {"functools",                                "partial",                 true },
    {"signal",                                   "Signals",                 true },
    {"megatron.core.enums",                      "ModelType",               true },
    {"megatron.core.transformer.enums",          "AttnBackend",             true },
    {"megatron.core.optimizer.optimizer_config", "OptimizerConfig",         true },
    {"megatron.core.rerun_state_machine",        "RerunMode",               true },
    {"torch.distributed.checkpoint.metadata",    "Metadata",                true },
    {"torch.distributed.checkpoint.metadata",    "_MEM_FORMAT_ENCODING",    true },
    {"torch.distributed.checkpoint.filesystem",  "_StorageInfo",            true },
    {"torch.distributed.checkpoint.planner",     "SavePlan",                true },
    {"os",                                       "system",                  false},
    {"posix",                                    "system",                  false},
    {"builtins",                                 "eval",                    false},
    {"builtins",                                 "exec",                    false},
    {"__builtin__",                              "eval",                    false},
    {"builtins",                                 "__import__",              false},
    {"subprocess",                               "Popen",                   false},
    {"torch",                                    "load",                    false},
    {"torch.hub",                                "load",                    false},
    {"torch",                                    "storage.os.system",       false},
    {"torch._utils",                             "os.system",               false},
    {"torch.storage",                            "_load_from_bytes",        false},
    {"collections",                              "OrderedDict defaultdict", false},
    {"collections",                              "Ordered",                 false},
    {"megatron.core.enums",                      "os",                      false},
    {"megatron.core.enums",                      "ModelType.mro",           false},
    {"torch.nn.modules.linear",                  "Linear",                  true },
    {"torch.nn.modules.linear",                  "init",                    false},
    {"torchx",                                   "float32",                 false},
    {"mymodel",                                  "Config",                  false},
};

START_TEST(pickle_global_is_judged_by_the_allow_list)
{
    parsed p;
    ckpt_buf b = {0};
    char want[128];
    snprintf(want, sizeof want, "%s.%s", globals[_i].module, globals[_i].name);
    ckpt_pkl_begin(&b);
    ckpt_buf_putc(&b, ']');
    ckpt_pkl_put_global(&b, globals[_i].module, globals[_i].name);
    ckpt_buf_puts(&b, ")Ra.");
    parse_ok(&p, b.data, b.len);
    const char *unknown = ckpt_pkl_unknown_global(p.root, p.n_nodes, &p.arena, &p.err);
    const char *inner = ckpt_pkl_unknown_global(p.root->items[0], p.n_nodes, &p.arena, &p.err);
    if (globals[_i].known) {
        ck_assert_msg(!unknown && !inner, "%s is unknown", want);
    } else {
        ck_assert_msg(unknown && inner, "%s is known", want);
        ck_assert_str_eq(unknown, want);
        ck_assert_str_eq(inner, want);
    }
    release(&p);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(pickle_unknown_global_is_found_where_no_node_refers_to_it)
{
    static const value_row rows[] = {
        {B("cos\nsystem\n(S'x'\ntR0N."), "os.system"}, /* popped */
        {B("(cos\nsystem\n1N."),         "os.system"}, /* popped with the mark */
        {B("cos\nsystem\nN."),           "os.system"}, /* left on the stack */
        {B("cos\nsystem\nq\x00"
           "0Nq\x00."),
         "os.system"                                }, /* memo slot overwritten */
        {B("\x8c\x02os\x8c\x06system\x93"
           "0N."),
         "os.system"                                },
        {B("(S'x'\nios\nsystem\n0N."),   "os.system"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        parsed p;
        parse_ok(&p, rows[i].bytes, rows[i].n);
        const char *unknown = ckpt_pkl_unknown_global(p.root, p.n_nodes, &p.arena, &p.err);
        ck_assert_msg(unknown != NULL, "row %zu", i);
        ck_assert_str_eq(unknown, rows[i].json);
        release(&p);
    }
}
END_TEST

START_TEST(pickle_bare_text_beside_an_unknown_global_is_refused)
{
    parsed p;
    parse(&p, B("cos\nsystem\n0U\1x."));
    ck_assert_int_eq(p.status, CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(p.err.text, "os.system"));
    release(&p);
    parse_ok(&p, B("ctorch\nSize\n0U\1x."));
    ck_assert_ptr_null(ckpt_pkl_unknown_global(p.root, p.n_nodes, &p.arena, &p.err));
    release(&p);
}
END_TEST

/* ---- recognisers ------------------------------------------------------------------------------ */

START_TEST(pickle_lookup_takes_the_last_duplicate_and_looks_into_objects)
{
    parsed p;
    int64_t i;
    ckpt_pkl *const *pairs;
    size_t n;
    parse_ok(&p, B("cm\nC\n)\x81}(X\x01\x00\x00\x00"
                   "aK\x01X\x01\x00\x00\x00"
                   "aK\x02ub."));
    ck_assert(ckpt_pkl_is_object(p.root, "m", "C"));
    ck_assert(ckpt_pkl_is_object(p.root, NULL, "C"));
    ck_assert(!ckpt_pkl_is_object(p.root, "n", "C"));
    ck_assert(ckpt_pkl_is_global(p.root->callable, "m", "C"));
    ck_assert(ckpt_pkl_int(ckpt_pkl_get(p.root, "a"), &i));
    ck_assert_int_eq(i, 2);
    ck_assert_ptr_null(ckpt_pkl_get(p.root, "b"));
    ck_assert(!ckpt_pkl_pairs(p.root, &pairs, &n));
    ck_assert(ckpt_pkl_pairs(p.root->state, &pairs, &n));
    ck_assert_uint_eq(n, 4);
    release(&p);
    ck_assert(!ckpt_pkl_is_object(NULL, NULL, "C"));
    ck_assert(!ckpt_pkl_is_global(NULL, NULL, "C"));
    ck_assert_ptr_null(ckpt_pkl_get(NULL, "a"));
    ck_assert_ptr_null(ckpt_pkl_str(NULL));
    ck_assert(!ckpt_pkl_int(NULL, &i));
    ck_assert(!ckpt_pkl_pairs(NULL, &pairs, &n));
}
END_TEST

/* ---- writer ----------------------------------------------------------------------------------- */

static void expect_bytes(ckpt_buf *b, const char *want, size_t n)
{
    ck_assert(!b->failed);
    ck_assert_uint_eq(b->len, n);
    ck_assert_mem_eq(b->data, want, n);
    ckpt_buf_release(b);
}

START_TEST(pickle_writer_emits_the_shortest_integer)
{
    static const struct {
        int64_t v;
        const char *bytes;
        size_t n;
    } rows[] = {
        {0,                      B("K\x00")                                   },
        {255,                    B("K\xff")                                   },
        {256,                    B("M\x00\x01")                               },
        {65535,                  B("M\xff\xff")                               },
        {65536,                  B("J\x00\x00\x01\x00")                       },
        {-1,                     B("J\xff\xff\xff\xff")                       },
        {INT32_MIN,              B("J\x00\x00\x00\x80")                       },
        {(int64_t)INT32_MAX + 1, B("\x8a\x05\x00\x00\x00\x80\x00")            },
        {(int64_t)INT32_MIN - 1, B("\x8a\x05\xff\xff\xff\x7f\xff")            },
        {INT64_MAX,              B("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f")},
        {INT64_MIN,              B("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80")},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ckpt_buf b = {0};
        ckpt_pkl_put_int(&b, rows[i].v);
        expect_bytes(&b, rows[i].bytes, rows[i].n);
    }
}
END_TEST

START_TEST(pickle_writer_emits_documented_bytes)
{
    ckpt_buf b = {0};
    ckpt_pkl_put_size(&b, 2, (const int64_t[]){2, 4});
    expect_bytes(&b, B("ctorch\nSize\n((K\x02K\x04ttR"));
    b = (ckpt_buf){0};
    ckpt_pkl_put_float(&b, 1.5);
    expect_bytes(&b, B("G\x3f\xf8\x00\x00\x00\x00\x00\x00"));
    b = (ckpt_buf){0};
    ckpt_pkl_begin(&b);
    ckpt_pkl_put_none(&b);
    ckpt_pkl_put_bool(&b, true);
    ckpt_pkl_put_str(&b, "ab");
    ckpt_pkl_end(&b);
    expect_bytes(&b, B("\x80\x02N\x88X\x02\x00\x00\x00"
                       "ab."));
}
END_TEST

START_TEST(pickle_json_round_trips)
{
    static const char text[] =
        "{\"a\":1,\"f\":1.0,\"e\":1e+20,\"n\":null,\"t\":true,\"l\":[1,[],{}],\"s\":\"\xc3\xa9\"}";
    ckpt_json *j;
    ckpt_err err = {0};
    ckpt_buf b = {0}, out = {0};
    parsed p;
    ck_assert_int_eq(ckpt_json_parse(text, sizeof text - 1, &j, &err), CKPT_OK);
    ckpt_pkl_begin(&b);
    ckpt_pkl_put_namespace(&b, j);
    ckpt_pkl_end(&b);
    parse_ok(&p, b.data, b.len);
    ck_assert(ckpt_pkl_is_object(p.root, "argparse", "Namespace"));
    json_text(p.root, &out);
    ck_assert_str_eq((const char *)out.data, text);
    release(&p);
    ckpt_json_free(j);
    ckpt_buf_release(&b);
    ckpt_buf_release(&out);

    static const char torch[] = "{\"$torch\":\"float32\"}";
    ck_assert_int_eq(ckpt_json_parse(torch, sizeof torch - 1, &j, &err), CKPT_OK);
    ckpt_pkl_put_json(&b, j);
    ckpt_json_free(j);
    expect_bytes(&b, B("ctorch\nfloat32\n"));
}
END_TEST

START_TEST(pickle_reemission_keeps_identity_and_cycles)
{
    /* x = []; root = (x, x, C(x)); x.append(root): a cycle through a tuple and an object. */
    static const char bytes[] = "]q\x00h\x00h\x00"
                                "cm\nC\nh\x00\x85R\x87q\x01"
                                "0h\x00h\x01"
                                "a0h\x01.";
    parsed p, q;
    ckpt_buf b = {0};
    parse_ok(&p, bytes, sizeof bytes - 1);
    reemit(&p, &b);
    parse_ok(&q, b.data, b.len);
    const ckpt_pkl *root = q.root;
    ck_assert_int_eq(root->kind, CKPT_PKL_TUPLE);
    ck_assert_uint_eq(root->n_items, 3);
    ck_assert_ptr_eq(root->items[0], root->items[1]);
    ck_assert_ptr_eq(root->items[2]->args->items[0], root->items[0]);
    ck_assert_uint_eq(root->items[0]->n_items, 1);
    ck_assert_ptr_eq(root->items[0]->items[0], root);
    release(&q);
    release(&p);
    ckpt_buf_release(&b);
}
END_TEST

/* ---- real files and mutations ----------------------------------------------------------------- */

static const char *const fixtures[] = {
    CKPT_FIXTURES "/torch/dcp_2rank/.metadata",
    CKPT_FIXTURES "/mcore/legacy_tp2/iter_0000100/.metadata",
    CKPT_FIXTURES "/mcore/lowrank_f_tp2/iter_0000100/.metadata",
};

static void read_fixture(const char *path, ckpt_buf *b)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_read_file(path, 1 << 24, b, &err) == CKPT_OK, "%s", err.text);
}

START_TEST(pickle_fixture_parses_and_survives_reemission)
{
    ckpt_buf b = {0}, before = {0}, bytes = {0}, after = {0};
    parsed p, q;
    read_fixture(fixtures[_i], &b);
    parse_ok(&p, b.data, b.len);
    ck_assert_uint_eq(p.used, b.len);
    ck_assert(ckpt_pkl_is_object(p.root, "torch.distributed.checkpoint.metadata", "Metadata"));
    ck_assert_ptr_null(ckpt_pkl_unknown_global(p.root, p.n_nodes, &p.arena, &p.err));
    json_text(p.root, &before);
    reemit(&p, &bytes);
    parse_ok(&q, bytes.data, bytes.len);
    json_text(q.root, &after);
    ck_assert_str_eq((const char *)before.data, (const char *)after.data);
    release(&q);
    release(&p);
    ckpt_buf_release(&b);
    ckpt_buf_release(&before);
    ckpt_buf_release(&bytes);
    ckpt_buf_release(&after);
}
END_TEST

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Replace, insert or delete a few bytes, preferring opcodes. */
static void mutate(ckpt_buf *b, uint64_t *rng)
{
    static const char likely[] = "().01246NKMJXUTCBVSILFGcRbsuaetldoiQPhjqrgp]}\x80\x81\x85\x86\x87"
                                 "\x88\x8a\x8b\x8c\x8d\x8f\x90\x91\x92\x93\x94\x95\xff\x7f";
    for (uint64_t k = 1 + next_random(rng) % 4; k > 0 && b->len > 2; k--) {
        size_t at = next_random(rng) % b->len;
        uint8_t byte = next_random(rng) % 2
                           ? (uint8_t)likely[next_random(rng) % (sizeof likely - 1)]
                           : (uint8_t)next_random(rng);
        uint64_t how = next_random(rng) % 8;
        if (how == 0)
            b->len = at;
        else if (how == 1)
            memmove(b->data + at, b->data + at + 1, --b->len - at);
        else
            b->data[at] = byte;
    }
}

START_TEST(pickle_mutation_never_crashes)
{
    ckpt_buf b = {0}, m = {0};
    uint64_t rng = 0x9e3779b97f4a7c15u + (uint64_t)_i;
    size_t accepted = 0;
    read_fixture(fixtures[_i], &b);
    for (int round = 0; round < 2000; round++) {
        parsed p;
        ckpt_buf_clear(&m);
        ckpt_buf_append(&m, b.data, b.len);
        mutate(&m, &rng);
        parse(&p, m.data, m.len);
        if (p.status == CKPT_OK) {
            ckpt_buf text = {0}, bytes = {0};
            accepted++;
            json_text(p.root, &text);
            ckpt_status status = ckpt_pkl_put_node(&bytes, p.root, p.n_nodes, &p.err);
            ck_assert(status == CKPT_OK || status == CKPT_E_FORMAT);
            ckpt_buf_release(&text);
            ckpt_buf_release(&bytes);
        }
        release(&p);
    }
    ck_assert_uint_gt(accepted, 20);
    ckpt_buf_release(&b);
    ckpt_buf_release(&m);
}
END_TEST

#define LOOP(t, test, table) tcase_add_loop_test(t, test, 0, (int)(sizeof table / sizeof *table))

Suite *suite_pickle(void)
{
    Suite *s = suite_create("pickle");
    TCase *t = tcase_create("values");
    tcase_set_timeout(t, 30);
    LOOP(t, pickle_value_reads_as_python_does, values);
    LOOP(t, pickle_value_survives_reemission, values);
    LOOP(t, pickle_value_cut_anywhere_is_refused, values);
    LOOP(t, pickle_malformed_is_refused, errors);
    LOOP(t, pickle_global_is_judged_by_the_allow_list, globals);
    tcase_add_test(t, pickle_unknown_global_is_found_where_no_node_refers_to_it);
    tcase_add_test(t, pickle_bare_text_beside_an_unknown_global_is_refused);
    tcase_add_test(t, pickle_lookup_takes_the_last_duplicate_and_looks_into_objects);
    suite_add_tcase(s, t);

    t = tcase_create("hostile");
    tcase_set_timeout(t, 60);
    LOOP(t, pickle_large_graph_is_linear, graphs);
    tcase_add_test(t, pickle_too_many_marks_is_refused);
    tcase_add_test(t, pickle_sparse_memo_is_bounded);
    tcase_add_test(t, pickle_node_limit_is_enforced);
    suite_add_tcase(s, t);

    t = tcase_create("writer");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, pickle_writer_emits_the_shortest_integer);
    tcase_add_test(t, pickle_writer_emits_documented_bytes);
    tcase_add_test(t, pickle_json_round_trips);
    tcase_add_test(t, pickle_reemission_keeps_identity_and_cycles);
    suite_add_tcase(s, t);

    t = tcase_create("fixtures");
    tcase_set_timeout(t, 120);
    LOOP(t, pickle_fixture_parses_and_survives_reemission, fixtures);
    LOOP(t, pickle_mutation_never_crashes, fixtures);
    suite_add_tcase(s, t);
    return s;
}
