/* Block-quantised weights: pairs of weight and scale, their values against torch's, every window of a
 * read, and what is refused. */
#include "derive.h"
#include "model.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "le.h"

#define FP8 CKPT_FIXTURES "/hf/deepseek_fp8_tiny"

static void open_model(const char *path, bool raw, ckpt_source *src, ckpt_model *m)
{
    ckpt_err err = {0};
    ckpt_model_opts opts = {.fp8_raw = raw};
    ck_assert_msg(ckpt_source_open(src, path, NULL, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(ckpt_model_bind(m, src, &opts, &err) == CKPT_OK, "%s", err.text);
}

static void close_model(ckpt_source *src, ckpt_model *m)
{
    ckpt_model_release(m);
    ckpt_source_close(src);
}

START_TEST(values_are_those_of_torch_bit_for_bit)
{
    ckpt_source src = {0}, want = {0};
    ckpt_model m = {0};
    ckpt_err err = {0};
    size_t seen = 0;
    open_model(FP8, false, &src, &m);
    ck_assert_msg(ckpt_source_open(&want, FP8 ".dequantised.safetensors", NULL, &err) == CKPT_OK,
                  "%s", err.text);
    ck_assert_uint_eq(m.n_fp8, 22);
    for (size_t i = 0; i < m.n_tensors; i++) {
        const ckpt_canon *c = &m.tensors[i];
        if (c->derived == NULL)
            continue;
        int64_t at = ckpt_source_find(&want, src.tensors[c->stored].name);
        ck_assert_int_ge(at, 0);
        ck_assert_int_eq(c->dtype, CKPT_BF16);
        const ckpt_tensor *t = &want.tensors[at];
        uint8_t *got = malloc(c->bytes), *expected = malloc(c->bytes);
        ck_assert_int_eq(ckpt_model_read(&m, i, 0, c->bytes, got, &err), CKPT_OK);
        ck_assert_int_eq(ckpt_source_read(&want, t->chunks[0].file, expected, c->bytes,
                                          t->chunks[0].offset, &err),
                         CKPT_OK);
        ck_assert_msg(memcmp(got, expected, c->bytes) == 0, "%s", c->name);
        free(got);
        free(expected);
        seen++;
    }
    ck_assert_uint_eq(seen, 22);
    close_model(&src, &m);
    ckpt_source_close(&want);
}
END_TEST

START_TEST(any_window_gives_the_same_bytes)
{
    ckpt_source src = {0};
    ckpt_model m = {0};
    ckpt_err err = {0};
    open_model(FP8, false, &src, &m);
    int64_t at =
        ckpt_model_find(&m, "blocks.0.mla.kv_a.weight"); /* [144, 192]: partial both ways */
    ck_assert_int_ge(at, 0);
    uint64_t bytes = m.tensors[at].bytes;
    ck_assert_uint_eq(bytes, 144 * 192 * 2);
    uint8_t *all = malloc(bytes), *part = malloc(bytes);
    ck_assert_int_eq(ckpt_model_read(&m, (size_t)at, 0, bytes, all, &err), CKPT_OK);
    static const uint64_t from[] = {0, 1, 2, 255, 256, 257, 383, 384, 49151, 49152, 49153, 55294};
    static const uint64_t lens[] = {1, 2, 3, 128, 257, 8191, 8192, 8193, 55296};
    for (size_t i = 0; i < sizeof from / sizeof from[0]; i++)
        for (size_t k = 0; k < sizeof lens / sizeof lens[0]; k++) {
            uint64_t n = lens[k] < bytes - from[i] ? lens[k] : bytes - from[i];
            memset(part, 0x5a, bytes);
            ck_assert_int_eq(ckpt_model_read(&m, (size_t)at, from[i], n, part, &err), CKPT_OK);
            ck_assert_msg(memcmp(part, all + from[i], n) == 0, "%d+%d", (int)from[i], (int)n);
            ck_assert(n == bytes || part[n] == 0x5a);
        }
    free(all);
    free(part);
    close_model(&src, &m);
}
END_TEST

START_TEST(raw_keeps_weight_and_scale_as_stored)
{
    ckpt_source src = {0};
    ckpt_model m = {0};
    open_model(FP8, true, &src, &m);
    size_t weights = 0, scales = 0;
    for (size_t i = 0; i < m.n_tensors; i++) {
        ck_assert_ptr_null(m.tensors[i].derived);
        weights += m.tensors[i].dtype == CKPT_F8_E4M3;
        scales += strstr(m.tensors[i].name, ".weight_scale_inv") != NULL;
    }
    ck_assert_uint_eq(m.n_tensors, 57);
    ck_assert_uint_eq(weights, 22);
    ck_assert_uint_eq(scales, 22);
    ck_assert_uint_eq(m.n_extras, 0);
    close_model(&src, &m);
}
END_TEST

/* ---- refusals --------------------------------------------------------------------------------- */

typedef struct entry {
    const char *name, *dtype;
    int64_t rows, cols; /* cols 0: one dimension */
} entry;

/* A safetensors file of zeros with a Llama configuration beside it. */
static void write_model(const char *dir, const entry *extra, int n)
{
    static const entry base[] = {
        {"model.embed_tokens.weight",                      "BF16", 8,   16 },
        {"lm_head.weight",                                 "BF16", 8,   16 },
        {"model.norm.weight",                              "BF16", 16,  0  },
        {"model.layers.0.input_layernorm.weight",          "BF16", 16,  0  },
        {"model.layers.0.self_attn.q_proj.weight",         "BF16", 16,  16 },
        {"model.layers.0.self_attn.k_proj.weight",         "BF16", 8,   16 },
        {"model.layers.0.self_attn.v_proj.weight",         "BF16", 8,   16 },
        {"model.layers.0.self_attn.o_proj.weight",         "BF16", 16,  16 },
        {"model.layers.0.post_attention_layernorm.weight", "BF16", 16,  0  },
        {"model.layers.0.mlp.up_proj.weight",              "BF16", 200, 16 },
        {"model.layers.0.mlp.down_proj.weight",            "BF16", 16,  200},
    };
    static const char config[] =
        "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":16,\"vocab_size\":8,"
        "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":200,"
        "\"num_hidden_layers\":1}";
    char path[300];
    ckpt_buf header = {0};
    uint64_t at = 0;
    for (int i = 0; i < 11 + n; i++) {
        const entry *e = i < 11 ? &base[i] : &extra[i - 11];
        uint64_t size = strcmp(e->dtype, "F32") == 0 ? 4 : strcmp(e->dtype, "BF16") == 0 ? 2 : 1;
        uint64_t end = at + size * (uint64_t)e->rows * (uint64_t)(e->cols > 0 ? e->cols : 1);
        ckpt_buf_printf(&header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld", i > 0 ? "," : "{",
                        e->name, e->dtype, (long long)e->rows);
        if (e->cols > 0)
            ckpt_buf_printf(&header, ",%lld", (long long)e->cols);
        ckpt_buf_printf(&header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                        (unsigned long long)end);
        at = end;
    }
    ckpt_buf_putc(&header, '}');
    uint8_t len[8];
    ckpt_put_u64(len, header.len);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    fwrite(len, 1, 8, f);
    fwrite(header.data, 1, header.len, f);
    for (uint64_t i = 0; i < at; i++)
        fputc(0, f);
    fclose(f);
    snprintf(path, sizeof path, "%s/config.json", dir);
    f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    fputs(config, f);
    fclose(f);
    ckpt_buf_release(&header);
}

#define GATE "model.layers.0.mlp.gate_proj.weight"

static const struct {
    entry extra[2];
    int n;
    const char *word; /* NULL: accepted */
} cases[] = {
    {{{GATE, "F8_E4M3", 200, 16}, {GATE "_scale_inv", "F32", 2, 1}},  2, NULL                             },
    {{{GATE, "F8_E4M3", 200, 16}, {"", "", 0, 0}},                    1, "F8 tensor '" GATE "' has no"    },
    {{{GATE, "BF16", 200, 16}, {GATE "_scale_inv", "F32", 2, 1}},     2, "expected F8_E4M3"               },
    {{{GATE, "F8_E4M3", 200, 16}, {GATE "_scale_inv", "F32", 4, 1}},  2, "[4, 1], expected [2, 1]"        },
    {{{GATE, "F8_E4M3", 200, 16}, {GATE "_scale_inv", "F32", 2, 0}},
     2,                                                                  "1 dimensions, expected F32 of 2"},
    {{{GATE, "F8_E4M3", 200, 16}, {GATE "_scale_inv", "BF16", 2, 1}}, 2, "BF16 of 2 dimensions"           },
    {{{GATE, "BF16", 200, 16}, {"x.weight_scale_inv", "F32", 2, 1}},
     2,                                                                  "'x.weight_scale_inv' has no F8" },
};

START_TEST(half_a_pair_is_refused_by_name)
{
    char dir[] = "/tmp/ckpt-fp8-XXXXXX", path[300];
    ckpt_source src = {0};
    ckpt_model m = {0};
    ckpt_err err = {0};
    ck_assert_ptr_nonnull(mkdtemp(dir));
    write_model(dir, cases[_i].extra, cases[_i].n);
    ck_assert_msg(ckpt_source_open(&src, dir, NULL, &err) == CKPT_OK, "%s", err.text);
    ckpt_status status = ckpt_model_bind(&m, &src, NULL, &err);
    if (cases[_i].word == NULL) {
        ck_assert_msg(status == CKPT_OK, "%s", err.text);
    } else {
        ck_assert_int_eq(status, CKPT_E_FORMAT);
        ck_assert_msg(strstr(err.text, cases[_i].word) != NULL, "%s", err.text);
        /* what only shows a checkpoint shows this one, too */
        ckpt_model_opts lenient = {.lenient = true};
        ck_assert_int_eq(ckpt_model_bind(&m, &src, &lenient, &err), CKPT_OK);
        ck_assert_uint_ge(m.n_notes, 1);
    }
    close_model(&src, &m);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}
END_TEST

Suite *suite_fp8(void);
Suite *suite_fp8(void)
{
    Suite *s = suite_create("fp8");
    TCase *t = tcase_create("blocks");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, values_are_those_of_torch_bit_for_bit);
    tcase_add_test(t, any_window_gives_the_same_bytes);
    tcase_add_test(t, raw_keeps_weight_and_scale_as_stored);
    tcase_add_loop_test(t, half_a_pair_is_refused_by_name, 0,
                        (int)(sizeof cases / sizeof cases[0]));
    suite_add_tcase(s, t);
    return s;
}
