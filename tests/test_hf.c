/* Hugging Face dialects: every fixture is bound whole, its configuration survives every way of
 * writing it, and what cannot be represented is refused with the field named. */
#include "families/hybrid.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"
#include "model.h"

typedef struct fixture {
    const char *name, *layout, *pattern;
    int depths; /* of multi-token prediction, stored */
    const char *tags;
    size_t tensors; /* canonical */
} fixture;

/* clang-format off */
static const fixture fixtures[] = {
    {"kimi_linear_tiny",     "hf:kimi_linear",    "K-KEKE+E", 0, "dense_mlp=block_sparse_moe,a_log=4d",   151},
    {"qwen3_next_tiny",      "hf:qwen3_next",     "GEGEGE*E", 0, "gdn=packed,experts=each",               173},
    {"qwen3_5_tiny",         "hf:qwen3_next",     "G-*-",     0, "gdn=flat",                              33 },
    {"qwen3_next_mtp_tiny",  "hf:qwen3_next",     "GE*E*E",   1, "gdn=packed,experts=each",               91 },
    {"llama_tiny_tied",      "hf:llama",          "*-*-",     0, "",                                      20 },
    {"llama3_tiny",          "hf:llama",          "*-*-",     0, "",                                      21 },
    {"qwen2_tiny",           "hf:qwen2",          "*-*-",     0, "",                                      27 },
    {"qwen3_tiny",           "hf:qwen3",          "*-*-",     0, "",                                      24 },
    {"qwen3_moe_tiny",       "hf:qwen3_moe",      "*E*-*E*E", 0, "experts=each",                          77 },
    {"qwen3_moe_joint_tiny", "hf:qwen3_moe",      "*E*E",     0, "experts=joint",                         45 },
    {"moonlight_tiny",       "hf:deepseek_v3",    "+-+E+E+E", 0, "experts=each",                          85 },
    {"kimi_k2_tiny",         "hf:deepseek_v3",    "+-+E",     0, "experts=each",                          41 },
    {"deepseek_mtp_tiny",    "hf:deepseek_v3",    "+-+E+E",   1, "experts=each,mtp_copies=stored",        71 },
    {"bailing_hybrid_tiny",  "hf:bailing_hybrid", "K-+E",     0, "a_log=1d,kda_out=dense,experts=each",   48 },
    {"bailing_moe_tiny",     "hf:bailing_moe",    "*-*E*E",   1, "experts=each",                          68 },
    {"arcee_kda_tiny",       "hf:arcee_kda",      "K-K-K-*-", 0, "",                                      68 },
};
/* clang-format on */
#define N_FIXTURES (int)(sizeof fixtures / sizeof fixtures[0])

static const ckpt_layout *layout_named(const char *name)
{
    for (int i = 0; ckpt_layouts[i] != NULL; i++)
        if (strcmp(ckpt_layouts[i]->name, name) == 0)
            return ckpt_layouts[i];
    ck_abort_msg("no layout %s", name);
    return NULL;
}

static void path_of(const fixture *f, const char *tail, char out[256])
{
    snprintf(out, 256, CKPT_FIXTURES "/hf/%s%s", f->name, tail);
}

static ckpt_json *config_of(const char *name)
{
    char path[256];
    ckpt_buf buf = {0};
    ckpt_err err = {0};
    ckpt_json *j = NULL;
    snprintf(path, sizeof path, CKPT_FIXTURES "/hf/%s/config.json", name);
    ck_assert_msg(ckpt_read_file(path, 1 << 20, &buf, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(ckpt_json_parse((const char *)buf.data, buf.len, &j, &err) == CKPT_OK, "%s",
                  err.text);
    ckpt_buf_release(&buf);
    return j;
}

static void expect_equal(const char *what, const ckpt_json *a, const ckpt_json *b)
{
    ckpt_buf x = {0}, y = {0};
    ck_assert(ckpt_json_print(a, 0, true, &x) && ckpt_json_print(b, 0, true, &y));
    ck_assert_msg(strcmp((char *)x.data, (char *)y.data) == 0, "%s:\n%s\n%s", what, x.data, y.data);
    ckpt_buf_release(&x);
    ckpt_buf_release(&y);
}

/* Apply "path=json" (json "-" deletes a top-level key); several, separated by ';'. */
static void patch(ckpt_json *j, const char *text)
{
    for (; *text != '\0'; text += strcspn(text, ";"), text += *text == ';') {
        ckpt_err err = {0};
        char path[128], value[256];
        size_t eq = strcspn(text, "="), end = strcspn(text, ";");
        snprintf(path, sizeof path, "%.*s", (int)eq, text);
        snprintf(value, sizeof value, "%.*s", (int)(end - eq - 1), text + eq + 1);
        if (strcmp(value, "-") == 0)
            ckpt_json_delete(j, path);
        else
            ck_assert_msg(ckpt_field_put_text(j, path, value, &err) == CKPT_OK, "%s", err.text);
    }
}

/* ---- binding ---------------------------------------------------------------------------------- */

START_TEST(fixture_is_bound_whole)
{
    const fixture *f = &fixtures[_i];
    char path[256];
    ckpt_source src = {0};
    ckpt_model m = {0};
    ckpt_err err = {0};
    path_of(f, "", path);
    ck_assert_msg(ckpt_source_open(&src, path, NULL, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(ckpt_model_bind(&m, &src, NULL, &err) == CKPT_OK, "%s: %s", f->name, err.text);
    ck_assert_str_eq(m.layout->name, f->layout);
    ck_assert_str_eq(m.tags, f->tags);
    ck_assert_uint_eq(m.n_tensors, f->tensors);
    ck_assert_uint_eq(m.n_extras, 0);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(m.config, "pattern")), f->pattern);
    ck_assert_int_eq((int)ckpt_canon_int(m.config, "mtp_layers"), f->depths);
    /* a depth that no field mentions is noted */
    ck_assert_uint_eq(m.n_notes, strcmp(f->name, "qwen3_next_mtp_tiny") == 0);
    ck_assert_uint_eq(m.n_copies, strstr(f->tags, "mtp_copies") != NULL ? 2 : 0);
    ckpt_model_release(&m);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(fixture_is_claimed_by_one_dialect)
{
    ckpt_json *config = config_of(fixtures[_i].name);
    for (int i = 0; ckpt_layouts[i] != NULL; i++)
        if (ckpt_layouts[i]->config_kind == CKPT_CONFIG_HF)
            ck_assert_msg((ckpt_layouts[i]->claims(config) > 0) ==
                              (strcmp(ckpt_layouts[i]->name, fixtures[_i].layout) == 0),
                          "%s: %s", fixtures[_i].name, ckpt_layouts[i]->name);
    ckpt_json_free(config);
}
END_TEST

/* ---- configurations --------------------------------------------------------------------------- */

START_TEST(configuration_survives_every_way_of_writing)
{
    const fixture *f = &fixtures[_i];
    const ckpt_layout *layout = layout_named(f->layout);
    ckpt_err err = {0};
    ckpt_json *stored = config_of(f->name), *out = NULL;
    ckpt_json *canon = ckpt_json_new_object(), *back = ckpt_json_new_object();
    ck_assert_msg(layout->config_read(stored, canon, &err) == CKPT_OK, "%s", err.text);
    /* over itself nothing changes */
    ck_assert_msg(layout->config_write(canon, stored, NULL, &out, &err) == CKPT_OK, "%s: %s",
                  f->name, err.text);
    expect_equal(f->name, stored, out);
    ckpt_json_free(out);
    /* written anew it means the same */
    ck_assert_msg(layout->config_write(canon, NULL, NULL, &out, &err) == CKPT_OK, "%s: %s", f->name,
                  err.text);
    ck_assert_int_eq(layout->claims(out), 1);
    ck_assert_msg(layout->config_read(out, back, &err) == CKPT_OK, "%s", err.text);
    expect_equal(f->name, canon, back);
    ckpt_json_free(out);
    ckpt_json_free(back);
    ckpt_json_free(canon);
    ckpt_json_free(stored);
}
END_TEST

/* Writing one fixture's model over the configuration of another of the same dialect. */
START_TEST(configuration_is_written_over_another_model)
{
    static const char *const pairs[][2] = {
        {"llama_tiny_tied", "llama3_tiny"     },
        {"llama3_tiny",     "llama_tiny_tied" },
        {"qwen3_5_tiny",    "qwen3_next_tiny" },
        {"moonlight_tiny",  "deepseek_v3_tiny"},
    };
    const char *const *pair = pairs[_i];
    ckpt_err err = {0};
    ckpt_json *stored = config_of(pair[0]), *other = config_of(pair[1]), *out = NULL;
    ckpt_json *canon = ckpt_json_new_object(), *back = ckpt_json_new_object();
    const ckpt_layout *layout = NULL;
    for (int i = 0; ckpt_layouts[i] != NULL; i++)
        if (ckpt_layouts[i]->config_kind == CKPT_CONFIG_HF && ckpt_layouts[i]->claims(stored) > 0)
            layout = ckpt_layouts[i];
    ck_assert_ptr_nonnull(layout);
    ck_assert_msg(layout->config_read(stored, canon, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(layout->config_write(canon, other, NULL, &out, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(layout->config_read(out, back, &err) == CKPT_OK, "%s", err.text);
    expect_equal(pair[0], canon, back);
    ckpt_json_free(out);
    ckpt_json_free(back);
    ckpt_json_free(canon);
    ckpt_json_free(other);
    ckpt_json_free(stored);
}
END_TEST

typedef struct variant {
    const char *fixture, *patch, *key, *value; /* canonical key; NULL value: absent */
} variant;

/* clang-format off */
static const variant variants[] = {
    {"llama_tiny_tied",  "rope_parameters=-",                                    "rope_theta",    "10000"},
    {"llama_tiny_tied",  "rope_parameters=-;rope_theta=50000.0;rope_scaling=null", "rope_theta",  "50000"},
    {"llama_tiny_tied",  "rope_parameters=-;rope_scaling={\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":512}",
     "rope_scaling", "{\"beta_fast\":32,\"beta_slow\":1,\"factor\":4,\"mscale\":1,\"mscale_all_dim\":0,\"original_max_position_embeddings\":512}"},
    {"llama_tiny_tied",  "rope_parameters=-;rope_scaling={\"type\":\"yarn\",\"factor\":1.0}", "rope_type", "\"rope\""},
    {"llama3_tiny",      "",                                                     "rope_type",     "\"llama3\""},
    {"llama3_tiny",      "",                                                     "rope_scaling",
     "{\"factor\":8,\"high_freq_factor\":4,\"low_freq_factor\":1,\"original_max_position_embeddings\":8192}"},
    {"llama_tiny_tied",  "head_dim=-",                                           "head_dim",      "16"},
    {"llama_tiny_tied",  "num_key_value_heads=-",                                "kv_heads",      "4"},
    {"qwen2_tiny",       "",                                                     "attn_bias",     "true"},
    {"qwen3_tiny",       "head_dim=-",                                           "head_dim",      "128"},
    {"qwen3_moe_tiny",   "decoder_sparse_step=2;mlp_only_layers=[]",             "pattern",       "\"*-*E*-*E\""},
    {"qwen3_moe_tiny",   "",                                                     "router_score",  "\"softmax\""},
    {"qwen3_moe_tiny",   "norm_topk_prob=false",                                 "router_normalize", "false"},
    {"qwen3_next_tiny",  "layer_types=-;full_attention_interval=2",              "pattern",       "\"GE*EGE*E\""},
    {"qwen3_next_tiny",  "",                                                     "rope_percent",  "0.25"},
    {"qwen3_next_tiny",  "",                                                     "norm_zero_centered", "true"},
    {"qwen3_next_tiny",  "",                                                     "shared_gate",   "true"},
    {"deepseek_v3_tiny", "",                                                     "pattern",       "\"+-+E+E+E\""},
    {"deepseek_v3_tiny", "num_nextn_predict_layers=0",                           "pattern",       "\"+-+E+E\""},
    {"deepseek_v3_tiny", "num_nextn_predict_layers=0",                           "mtp_layers",    NULL},
    {"deepseek_v3_tiny", "",                                                     "router_groups", "4"},
    {"deepseek_v3_tiny", "n_group=1;topk_group=1",                               "router_groups", NULL},
    {"deepseek_v3_tiny", "architectures=-;model_type=\"kimi_k2\"",               "latent_norm",   "true"},
    {"moonlight_tiny",   "",                                                     "q_lora_rank",   NULL},
    {"moonlight_tiny",   "",                                                     "shared_ffn_size", "64"},
    {"moonlight_tiny",   "quantization_config={\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"weight_block_size\":[128,128]}", "heads", "4"},
    {"bailing_hybrid_tiny", "layer_types=-",                                     "pattern",       "\"K-+E\""},
    {"bailing_hybrid_tiny", "",                                                  "kda_key_dim",   "32"},
    {"bailing_hybrid_tiny", "linear_head_dim=-;head_dim=32",                     "kda_value_dim", "32"},
    {"bailing_hybrid_tiny", "",                                                  "mla_gate",      "\"headwise\""},
    {"bailing_hybrid_tiny", "gated_attention_proj_granularity_type=\"element_wise\"", "mla_gate", "\"elementwise\""},
    {"bailing_hybrid_tiny", "architectures=[\"BailingMoeV3ForCausalLM\"]",       "kda_lower_bound", "-5"},
    {"bailing_hybrid_tiny", "kda_safe_gate=false",                               "kda_lower_bound", NULL},
    {"bailing_moe_tiny", "",                                                     "rope_percent",  "0.5"},
    {"bailing_moe_tiny", "",                                                     "mtp_blocks",    "2"},
    {"arcee_kda_tiny",   "",                                                     "activation",    "\"relu2\""},
    {"arcee_kda_tiny",   "attn=-",                                               "pattern",       "\"K-K-K-K-\""},
    {"arcee_kda_tiny",   "attn=-;layer_types=[\"full_attention\",\"linear_attention\",\"linear_attention\",\"linear_attention\"]", "pattern", "\"*-K-K-K-\""},
};
/* clang-format on */

static const ckpt_layout *claimant(const ckpt_json *config)
{
    for (int i = 0; ckpt_layouts[i] != NULL; i++)
        if (ckpt_layouts[i]->config_kind == CKPT_CONFIG_HF && ckpt_layouts[i]->claims(config) > 0)
            return ckpt_layouts[i];
    return NULL;
}

START_TEST(variant_is_read_as_expected)
{
    const variant *v = &variants[_i];
    ckpt_err err = {0};
    ckpt_json *stored = config_of(v->fixture), *canon = ckpt_json_new_object(), *want = NULL;
    patch(stored, v->patch);
    const ckpt_layout *layout = claimant(stored);
    ck_assert_ptr_nonnull(layout);
    ck_assert_msg(layout->config_read(stored, canon, &err) == CKPT_OK, "%s %s: %s", v->fixture,
                  v->patch, err.text);
    const ckpt_json *got = ckpt_json_get(canon, v->key);
    if (v->value == NULL) {
        ck_assert_ptr_null(got);
    } else {
        ck_assert_msg(got != NULL, "%s %s: no %s", v->fixture, v->patch, v->key);
        ck_assert_int_eq(ckpt_json_parse(v->value, strlen(v->value), &want, &err), CKPT_OK);
        expect_equal(v->key, want, got);
    }
    ckpt_json_free(want);
    ckpt_json_free(canon);
    ckpt_json_free(stored);
}
END_TEST

typedef struct refusal {
    const char *fixture, *patch;
    ckpt_status code;
    const char *word;
} refusal;

/* conversion-maps.md section 10, as far as a configuration of Hugging Face can ask for it. */
/* clang-format off */
static const refusal refusals[] = {
    {"llama_tiny_tied",  "hidden_act=\"gelu\"",                                    CKPT_E_UNSUPPORTED, "'hidden_act'"},
    {"llama_tiny_tied",  "attention_bias=true",                                    CKPT_E_UNSUPPORTED, "'attention_bias'"},
    {"llama_tiny_tied",  "mlp_bias=true",                                          CKPT_E_UNSUPPORTED, "'mlp_bias'"},
    {"llama_tiny_tied",  "rope_parameters.rope_type=\"dynamic\"",                  CKPT_E_UNSUPPORTED, "rope_type"},
    {"llama_tiny_tied",  "rope_parameters.partial_rotary_factor=0.5",              CKPT_E_UNSUPPORTED, "partial_rotary_factor"},
    {"llama_tiny_tied",  "rope_theta=5000.0",                                      CKPT_E_FORMAT,      "rope_theta"},
    {"llama_tiny_tied",  "rope_parameters={\"rope_type\":\"yarn\",\"rope_theta\":1.0,\"factor\":4.0,\"attention_factor\":2.0}", CKPT_E_UNSUPPORTED, "attention_factor"},
    {"llama_tiny_tied",  "rope_parameters={\"rope_type\":\"yarn\",\"rope_theta\":1.0,\"factor\":4.0,\"mscale_all_dim\":0.7}", CKPT_E_UNSUPPORTED, "mscale_all_dim"},
    {"llama_tiny_tied",  "rope_parameters={\"rope_type\":\"yarn\",\"rope_theta\":1.0}", CKPT_E_FORMAT, "factor"},
    {"llama_tiny_tied",  "rope_parameters={\"rope_type\":\"yarn\",\"rope_theta\":1.0,\"factor\":4.0,\"short_factor\":1.0}", CKPT_E_UNSUPPORTED, "short_factor"},
    {"llama_tiny_tied",  "rope_parameters={\"full_attention\":{\"rope_type\":\"default\"}}", CKPT_E_UNSUPPORTED, "full_attention"},
    {"llama_tiny_tied",  "num_hidden_layers=0",                                    CKPT_E_FORMAT,      "num_hidden_layers"},
    {"llama_tiny_tied",  "num_hidden_layers=1000000000",                           CKPT_E_FORMAT,      "num_hidden_layers"},
    {"llama_tiny_tied",  "quantization_config={\"quant_method\":\"compressed-tensors\"}", CKPT_E_UNSUPPORTED, "quant_method"},
    {"llama_tiny_tied",  "quantization_config={\"quant_method\":\"fp8\",\"weight_block_size\":[64,64]}", CKPT_E_UNSUPPORTED, "weight_block_size"},
    {"qwen2_tiny",       "use_sliding_window=true",                                CKPT_E_UNSUPPORTED, "use_sliding_window"},
    {"qwen2_tiny",       "layer_types=[\"full_attention\",\"sliding_attention\"]", CKPT_E_UNSUPPORTED, "layer_types"},
    {"qwen2_tiny",       "layer_types=[\"full_attention\"]",                       CKPT_E_FORMAT,      "layer_types"},
    {"qwen3_tiny",       "attention_bias=true",                                    CKPT_E_UNSUPPORTED, "attention_bias"},
    {"qwen3_tiny",       "rope_parameters.rope_type=\"llama3\"",                   CKPT_E_UNSUPPORTED, "rope_type"},
    {"qwen3_moe_tiny",   "mlp_only_layers=[7]",                                    CKPT_E_FORMAT,      "mlp_only_layers"},
    {"qwen3_next_tiny",  "layer_types=[\"linear_attention\",\"x\",\"x\",\"x\"]",   CKPT_E_FORMAT,      "layer_types"},
    {"qwen3_next_tiny",  "linear_num_value_heads=3",                               CKPT_E_FORMAT,      "gdn_value_heads"},
    {"deepseek_v3_tiny", "attention_bias=true",                                    CKPT_E_UNSUPPORTED, "attention_bias"},
    {"deepseek_v3_tiny", "rope_interleave=false",                                  CKPT_E_UNSUPPORTED, "rope_interleave"},
    {"deepseek_v3_tiny", "scoring_func=\"softmax\"",                               CKPT_E_UNSUPPORTED, "scoring_func"},
    {"deepseek_v3_tiny", "topk_method=\"greedy\"",                                 CKPT_E_UNSUPPORTED, "topk_method"},
    {"deepseek_v3_tiny", "num_key_value_heads=2",                                  CKPT_E_UNSUPPORTED, "num_key_value_heads"},
    {"deepseek_v3_tiny", "topk_group=5",                                           CKPT_E_FORMAT,      "topk_group"},
    {"deepseek_v3_tiny", "rope_parameters.rope_type=\"llama3\"",                   CKPT_E_UNSUPPORTED, "rope_type"},
    {"deepseek_v3_tiny", "mla_use_nope=true",                                      CKPT_E_UNSUPPORTED, "mla_use_nope"},
    {"deepseek_v3_tiny", "hidden_act=\"situ\"",                                    CKPT_E_UNSUPPORTED, "hidden_act"},
    {"bailing_hybrid_tiny", "architectures=[\"BailingMoeV2_5ForCausalLM\"]",       CKPT_E_UNSUPPORTED, "BailingMoeV2_5ForCausalLM"},
    {"bailing_hybrid_tiny", "architectures=-;kda_safe_gate=-",                     CKPT_E_UNSUPPORTED, "architectures"},
    {"bailing_hybrid_tiny", "layer_types=-;layer_group_size=3",                    CKPT_E_UNSUPPORTED, "layer_group_size"},
    {"bailing_hybrid_tiny", "use_mla_nope=true",                                   CKPT_E_UNSUPPORTED, "use_mla_nope"},
    {"bailing_hybrid_tiny", "no_kda_lora=false",                                   CKPT_E_UNSUPPORTED, "no_kda_lora"},
    {"bailing_hybrid_tiny", "use_qkv_bias=true;attention_bias=true",               CKPT_E_UNSUPPORTED, "attention_bias"},
    {"bailing_hybrid_tiny", "expert_swiglu_limit_list=[0,7.0]",                    CKPT_E_UNSUPPORTED, "expert_swiglu_limit_list"},
    {"bailing_hybrid_tiny", "kda_lower_bound=-6.0",                                CKPT_E_FORMAT,      "kda_lower_bound"},
    {"bailing_hybrid_tiny", "kda_lower_bound=0.0",                                 CKPT_E_FORMAT,      "kda_lower_bound"},
    {"bailing_moe_tiny", "score_function=\"softmax\"",                             CKPT_E_UNSUPPORTED, "score_function"},
    {"bailing_moe_tiny", "use_qkv_bias=true",                                      CKPT_E_UNSUPPORTED, "use_qkv_bias"},
    {"arcee_kda_tiny",   "hidden_act=\"silu\"",                                    CKPT_E_UNSUPPORTED, "hidden_act"},
    {"arcee_kda_tiny",   "attn={\"layers\":[4]}",                                  CKPT_E_FORMAT,      "attn.layers"},
};
/* clang-format on */

START_TEST(refusal_names_the_field)
{
    const refusal *r = &refusals[_i];
    ckpt_err err = {0};
    ckpt_json *stored = config_of(r->fixture), *canon = ckpt_json_new_object();
    patch(stored, r->patch);
    const ckpt_layout *layout = claimant(stored);
    ck_assert_ptr_nonnull(layout);
    ckpt_status status = layout->config_read(stored, canon, &err);
    ck_assert_msg(status == r->code, "%s %s: %d %s", r->fixture, r->patch, (int)status, err.text);
    ck_assert_msg(strstr(err.text, r->word) != NULL, "%s %s: %s", r->fixture, r->patch, err.text);
    ckpt_json_free(canon);
    ckpt_json_free(stored);
}
END_TEST

/* A model of one dialect in the words of another that cannot say it. */
static const struct {
    const char *fixture, *target, *word;
} foreign[] = {
    {"qwen2_tiny",          "hf:llama",       "attn_bias" },
    {"qwen3_tiny",          "hf:llama",       "qk_norm"   },
    {"llama3_tiny",         "hf:qwen2",       "attn_bias" },
    {"llama_tiny_tied",     "hf:qwen3",       "qk_norm"   },
    {"qwen3_moe_tiny",      "hf:qwen3",       "pattern"   },
    {"moonlight_tiny",      "hf:kimi_linear", "mla_nope"  },
    {"bailing_hybrid_tiny", "hf:kimi_linear", "mla_gate"  },
    {"bailing_moe_tiny",    "hf:qwen3_moe",   "mtp_layers"},
    {"qwen3_next_tiny",     "hf:qwen3_moe",   "pattern"   },
    {"arcee_kda_tiny",      "fla:kda",        "pattern"   },
    {"kimi_linear_tiny",    "hf:deepseek_v3", "pattern"   },
};

START_TEST(dialect_refuses_a_model_it_cannot_say)
{
    ckpt_err err = {0};
    ckpt_json *stored = config_of(foreign[_i].fixture), *canon = ckpt_json_new_object();
    ckpt_json *out = NULL;
    ck_assert_int_eq(claimant(stored)->config_read(stored, canon, &err), CKPT_OK);
    const ckpt_layout *target = layout_named(foreign[_i].target);
    ck_assert_int_eq(target->config_write(canon, NULL, NULL, &out, &err), CKPT_E_UNSUPPORTED);
    ck_assert_msg(strstr(err.text, foreign[_i].word) != NULL, "%s", err.text);
    ck_assert_ptr_null(out);
    ckpt_json_free(canon);
    ckpt_json_free(stored);
}
END_TEST

/* ---- any value in any field ------------------------------------------------------------------- */

static const char *const odd[] = {
    "null",
    "true",
    "false",
    "0",
    "1",
    "-1",
    "2",
    "0.5",
    "1e300",
    "\"\"",
    "\"x\"",
    "[]",
    "{}",
    "[null]",
    "[0]",
    "[[1]]",
    "[9,9]",
    "{\"rope_type\":\"yarn\",\"factor\":2}",
    "{\"type\":\"llama3\"}",
    "{\"layers\":[0]}",
};

/* One changed configuration: refused in one line, or read into something that is stable when it is
 * written over that configuration and from nothing. */
static int try_mutant(const ckpt_layout *layout, const ckpt_json *j)
{
    ckpt_err err = {0};
    ckpt_json *canon = ckpt_json_new_object();
    ckpt_status status = layout->config_read(j, canon, &err);
    if (status != CKPT_OK) {
        ck_assert(status == CKPT_E_FORMAT || status == CKPT_E_UNSUPPORTED);
        ck_assert(err.text[0] != '\0' && strchr(err.text, '\n') == NULL);
    }
    for (int own = 0; own < 2 && status == CKPT_OK; own++) {
        ckpt_json *out = NULL, *back = ckpt_json_new_object();
        ckpt_status written = layout->config_write(canon, own ? j : NULL, NULL, &out, &err);
        if (written == CKPT_OK) {
            ck_assert_msg(layout->config_read(out, back, &err) == CKPT_OK, "%s", err.text);
            expect_equal(layout->name, canon, back);
            if (own && layout->claims(j) > 0)
                expect_equal(layout->name, j, out);
        } else { /* a size that only the tensors know */
            ck_assert_msg(written == CKPT_E_UNSUPPORTED && strstr(err.text, "not known") != NULL,
                          "%s", err.text);
        }
        ckpt_json_free(back);
        ckpt_json_free(out);
    }
    ckpt_json_free(canon);
    return status == CKPT_OK;
}

static int mutate(const ckpt_layout *layout, const ckpt_json *root, const char *prefix)
{
    int read = 0;
    const ckpt_json *object = prefix[0] != '\0' ? ckpt_json_get(root, prefix) : root;
    for (const ckpt_json *c = ckpt_json_child(object); c != NULL; c = ckpt_json_next(c))
        for (size_t v = 0; v < sizeof odd / sizeof odd[0]; v++) {
            ckpt_json *copy = ckpt_json_dup(root), *value = NULL;
            ckpt_err err = {0};
            ck_assert_int_eq(ckpt_json_parse(odd[v], strlen(odd[v]), &value, &err), CKPT_OK);
            ck_assert(ckpt_json_set(prefix[0] != '\0' ? ckpt_json_get(copy, prefix) : copy,
                                    ckpt_json_key(c), value));
            read += try_mutant(layout, copy);
            ckpt_json_free(copy);
        }
    return read;
}

START_TEST(any_value_in_any_field_is_refused_or_stable)
{
    const fixture *f = &fixtures[_i];
    ckpt_json *config = config_of(f->name);
    int read = mutate(layout_named(f->layout), config, "");
    read += mutate(layout_named(f->layout), config, "rope_parameters");
    read += mutate(layout_named(f->layout), config, "attn");
    ck_assert_int_gt(read, 50);
    ckpt_json_free(config);
}
END_TEST

#define COUNT(a) (int)(sizeof(a) / sizeof(a)[0])

Suite *suite_hf(void);
Suite *suite_hf(void)
{
    Suite *s = suite_create("hf");
    TCase *t = tcase_create("fixtures");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, fixture_is_bound_whole, 0, N_FIXTURES);
    tcase_add_loop_test(t, fixture_is_claimed_by_one_dialect, 0, N_FIXTURES);
    suite_add_tcase(s, t);
    t = tcase_create("configurations");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, configuration_survives_every_way_of_writing, 0, N_FIXTURES);
    tcase_add_loop_test(t, configuration_is_written_over_another_model, 0, 4);
    tcase_add_loop_test(t, variant_is_read_as_expected, 0, COUNT(variants));
    tcase_add_loop_test(t, refusal_names_the_field, 0, COUNT(refusals));
    tcase_add_loop_test(t, any_value_in_any_field_is_refused_or_stable, 0, N_FIXTURES);
    tcase_add_loop_test(t, dialect_refuses_a_model_it_cannot_say, 0, COUNT(foreign));
    suite_add_tcase(s, t);
    return s;
}
