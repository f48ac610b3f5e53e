/* Canonical configuration: symbols, completion, checks, digest, dtype of stored forms. */
#include "config.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ckpt_json *parse(const char *text)
{
    ckpt_err err = {0};
    ckpt_json *j = NULL;
    ck_assert_msg(ckpt_json_parse(text, strlen(text), &j, &err) == CKPT_OK, "%s: %s", text,
                  err.text);
    return j;
}

static void expect_text(const ckpt_json *j, const char *text)
{
    ckpt_buf buf = {0};
    ck_assert(ckpt_json_print(j, 0, true, &buf));
    ck_assert_str_eq((const char *)buf.data, text);
    ckpt_buf_release(&buf);
}

static int64_t sym(const ckpt_symtab *t, const char *name)
{
    return ckpt_sym_get(t, name, strlen(name));
}

static const char mla[] = "{\"pattern\":\"K-+E\",\"hidden_size\":64,\"heads\":4,\"v_head_dim\":24,"
                          "\"kda_heads\":2,\"kda_key_dim\":32,\"mla_gate\":\"%s\"}";

START_TEST(symbols_of_a_configuration_are_bound)
{
    static const struct {
        const char *gate;
        int64_t rows;
    } cases[] = {
        {"headwise",    4 },
        {"elementwise", 96}
    };
    for (size_t i = 0; i < 2; i++) {
        char text[512];
        ckpt_symtab syms = {0};
        ckpt_err err = {0};
        snprintf(text, sizeof text, mla, cases[i].gate);
        ckpt_json *c = parse(text);
        ck_assert_int_eq(ckpt_config_symbols(c, &syms, &err), CKPT_OK);
        ck_assert_int_eq(sym(&syms, "H"), 64);
        ck_assert_int_eq(sym(&syms, "N"), 4);
        ck_assert_int_eq(sym(&syms, "NK"), 2);
        ck_assert_int_eq(sym(&syms, "A"), 32);
        ck_assert_int_eq(sym(&syms, "GM"), cases[i].rows);
        ck_assert_int_eq(sym(&syms, "RF"), 0);
        ckpt_json_free(c);
    }
}
END_TEST

START_TEST(complete_fills_applicable_keys_and_never_overrides)
{
    ckpt_symtab syms = {0};
    ckpt_err err = {0};
    ckpt_json *c = parse("{\"hidden_size\":64}");
    ckpt_sym_set(&syms, "H", 65);
    ckpt_sym_set(&syms, "V", 320);
    ckpt_sym_set(&syms, "RF", 16);
    ckpt_sym_set(&syms, "RK", 32);
    ckpt_sym_set(&syms, "VP", 512);
    ck_assert_int_eq(ckpt_config_complete(c, &syms, "K-", true, &err), CKPT_OK);
    expect_text(c, "{\"hidden_size\":64,\"kda_f_rank\":16,\"pattern\":\"K-\",\"tied\":true,"
                   "\"vocab_size\":320}");
    ck_assert_int_eq(ckpt_config_complete(c, &syms, "+E", false, &err), CKPT_OK);
    expect_text(c, "{\"hidden_size\":64,\"kda_f_rank\":16,\"pattern\":\"K-\",\"tied\":true,"
                   "\"vocab_size\":320}");
    ckpt_json_free(c);
}
END_TEST

START_TEST(complete_names_the_gate_by_its_rows)
{
    static const struct {
        int64_t rows;
        const char *gate;
    } cases[] = {
        {4,  "headwise"   },
        {96, "elementwise"},
        {5,  NULL         },
        {0,  NULL         }
    };
    for (size_t i = 0; i < 4; i++) {
        ckpt_symtab syms = {0};
        ckpt_err err = {0};
        ckpt_json *c = parse("{\"pattern\":\"+-\"}");
        ckpt_sym_set(&syms, "N", 4);
        ckpt_sym_set(&syms, "DV", 24);
        ckpt_sym_set(&syms, "GM", cases[i].rows);
        ck_assert_int_eq(ckpt_config_complete(c, &syms, NULL, false, &err), CKPT_OK);
        const char *gate = ckpt_json_string(ckpt_json_get(c, "mla_gate"));
        ck_assert(cases[i].gate == NULL ? gate == NULL
                                        : gate != NULL && strcmp(gate, cases[i].gate) == 0);
        ckpt_json_free(c);
    }
}
END_TEST

/* clang-format off */
static const struct {
    const char *text, *key;
} bad[] = {
    {"[]", "not an object"},
    {"{\"hidden_sizes\":1}", "'hidden_sizes'"},
    {"{\"hidden_size\":0}", "'hidden_size'"},
    {"{\"hidden_size\":-4}", "'hidden_size'"},
    {"{\"hidden_size\":1.5}", "'hidden_size'"},
    {"{\"hidden_size\":\"64\"}", "'hidden_size'"},
    {"{\"kda_f_rank\":0}", "'kda_f_rank'"},
    {"{\"kda_gate_rank\":-1}", "'kda_gate_rank'"},
    {"{\"pattern\":\"\"}", "'pattern'"},
    {"{\"pattern\":\"K-X\"}", "block 2 is 'X'"},
    {"{\"pattern\":\"K|-\"}", "block 1 is '|'"},
    {"{\"norm_eps\":0}", "'norm_eps'"},
    {"{\"tied\":1}", "'tied'"},
    {"{\"activation\":\"gelu\"}", "'activation'"},
    {"{\"activation\":\"sil\"}", "'activation'"},
    {"{\"activation\":\"\"}", "'activation'"},
    {"{\"router_score\":\"sigmoid|softmax\"}", "'router_score'"},
    {"{\"rope_scaling\":1}", "'rope_scaling'"},
    {"{\"kda_safe_gate\":true}", "'kda_lower_bound'"},
    {"{\"kda_safe_gate\":true,\"kda_lower_bound\":0}", "'kda_lower_bound'"},
    {"{\"kda_safe_gate\":true,\"kda_lower_bound\":-5.001}", "'kda_lower_bound'"},
    {"{\"kda_safe_gate\":true,\"kda_lower_bound\":1}", "'kda_lower_bound'"},
    {"{\"kda_safe_gate\":false,\"kda_lower_bound\":-5}", "'kda_lower_bound'"},
    {"{\"kda_lower_bound\":-5}", "'kda_lower_bound'"},
    {"{\"experts\":4,\"experts_per_token\":5}", "'experts_per_token'"},
    {"{\"experts\":6,\"router_groups\":4}", "'router_groups'"},
    {"{\"router_groups\":4,\"router_group_topk\":5}", "'router_group_topk'"},
    {"{\"experts\":8,\"router_groups\":4,\"router_group_best\":3}", "'router_group_best'"},
    {"{\"experts\":8,\"experts_per_token\":5,\"router_groups\":4,\"router_group_topk\":2}",
     "'router_group_topk'"},
};
/* clang-format on */

START_TEST(check_bad_value_names_the_key)
{
    ckpt_err err = {0};
    ckpt_json *c = parse(bad[_i].text);
    ck_assert_int_eq(ckpt_config_check(c, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, bad[_i].key) != NULL, "%s: %s", bad[_i].text, err.text);
    ckpt_json_free(c);
}
END_TEST

START_TEST(check_bounds_of_the_safe_gate_are_accepted)
{
    static const char *const good[] = {
        "{}",
        "{\"kda_safe_gate\":true,\"kda_lower_bound\":-5}",
        "{\"kda_safe_gate\":true,\"kda_lower_bound\":-1e-9}",
        "{\"kda_safe_gate\":false}",
        "{\"pattern\":\"K-+E*-GE\"}",
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        ckpt_err err = {0};
        ckpt_json *c = parse(good[i]);
        ck_assert_msg(ckpt_config_check(c, &err) == CKPT_OK, "%s: %s", good[i], err.text);
        ckpt_json_free(c);
    }
}
END_TEST

START_TEST(digest_ignores_key_order_only)
{
    uint8_t a[CKPT_SHA256_LEN], b[CKPT_SHA256_LEN], c[CKPT_SHA256_LEN];
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_err err = {0};
    ckpt_json *x = parse("{\"hidden_size\":64,\"tied\":false}");
    ckpt_json *y = parse("{ \"tied\" : false, \"hidden_size\" : 64 }");
    ckpt_json *z = parse("{\"hidden_size\":65,\"tied\":false}");
    ck_assert_int_eq(ckpt_config_digest(x, a, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_config_digest(y, b, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_config_digest(z, c, &err), CKPT_OK);
    ck_assert_mem_eq(a, b, sizeof a);
    ck_assert_mem_ne(a, c, sizeof a);
    ckpt_hex(a, hex);
    /* printf '{"hidden_size":64,"tied":false}' | sha256sum */
    ck_assert_str_eq(hex, "bccb0bda6ed9ed3f457a1f00029320ad465cd2f23dd01a17d6ab862bf6ecbd37");
    ckpt_json_free(x);
    ckpt_json_free(y);
    ckpt_json_free(z);
}
END_TEST

/* clang-format off */
static const struct {
    ckpt_config_kind kind;
    const char *before, *dtype, *after;
} dtypes[] = {
    {CKPT_CONFIG_HF, "{}", "bfloat16", "{\"dtype\":\"bfloat16\"}"},
    {CKPT_CONFIG_HF, "{\"dtype\":\"float32\"}", "float32", "{\"dtype\":\"float32\"}"},
    {CKPT_CONFIG_HF, "{\"torch_dtype\":\"bfloat16\"}", "float32", "{\"torch_dtype\":\"float32\"}"},
    {CKPT_CONFIG_HF, "{\"dtype\":\"bfloat16\",\"torch_dtype\":\"bfloat16\"}", "float16",
     "{\"dtype\":\"float16\",\"torch_dtype\":\"float16\"}"},
    {CKPT_CONFIG_MEGATRON, "{}", "bfloat16",
     "{\"bf16\":true,\"params_dtype\":{\"$torch\":\"bfloat16\"}}"},
    {CKPT_CONFIG_MEGATRON, "{\"params_dtype\":\"torch.float32\"}", "float32",
     "{\"params_dtype\":\"torch.float32\"}"},
    {CKPT_CONFIG_MEGATRON, "{\"bf16\":true,\"params_dtype\":\"torch.bfloat16\"}", "float32",
     "{\"bf16\":false,\"params_dtype\":{\"$torch\":\"float32\"}}"},
    {CKPT_CONFIG_NONE, "{}", "float32", "{}"},
};
/* clang-format on */

START_TEST(set_dtype_changes_only_what_says_otherwise)
{
    ckpt_err err = {0};
    ckpt_json *c = parse(dtypes[_i].before);
    ck_assert_int_eq(ckpt_config_set_dtype(c, dtypes[_i].kind, dtypes[_i].dtype, &err), CKPT_OK);
    expect_text(c, dtypes[_i].after);
    ckpt_json_free(c);
}
END_TEST

START_TEST(padded_vocab_is_bound_from_arguments)
{
    ckpt_symtab syms = {0};
    ckpt_err err = {0};
    ckpt_json *c = parse("{\"padded_vocab_size\":512}");
    ckpt_json *none = parse("{\"padded_vocab_size\":null}");
    ckpt_json *wrong = parse("{\"padded_vocab_size\":-1}");
    ck_assert_int_eq(ckpt_config_padded_vocab(none, &syms, &err), CKPT_OK);
    ck_assert_int_eq(sym(&syms, "VP"), 0);
    ck_assert_int_eq(ckpt_config_padded_vocab(c, &syms, &err), CKPT_OK);
    ck_assert_int_eq(sym(&syms, "VP"), 512);
    ck_assert_int_eq(ckpt_config_padded_vocab(wrong, &syms, &err), CKPT_E_FORMAT);
    ckpt_json_free(c);
    ckpt_json_free(none);
    ckpt_json_free(wrong);
}
END_TEST

Suite *suite_config(void);
Suite *suite_config(void)
{
    Suite *s = suite_create("config");
    TCase *t = tcase_create("canonical");
    tcase_set_timeout(t, 20);
    tcase_add_test(t, symbols_of_a_configuration_are_bound);
    tcase_add_test(t, complete_fills_applicable_keys_and_never_overrides);
    tcase_add_test(t, complete_names_the_gate_by_its_rows);
    tcase_add_loop_test(t, check_bad_value_names_the_key, 0, sizeof bad / sizeof bad[0]);
    tcase_add_test(t, check_bounds_of_the_safe_gate_are_accepted);
    tcase_add_test(t, digest_ignores_key_order_only);
    tcase_add_loop_test(t, set_dtype_changes_only_what_says_otherwise, 0,
                        sizeof dtypes / sizeof dtypes[0]);
    tcase_add_test(t, padded_vocab_is_bound_from_arguments);
    suite_add_tcase(s, t);
    return s;
}
