/* Policies: rules to handles, what is refused and how it is named, the stored text and back. The oracle's
 * checks of policies, one by one, and every error that policy.h promises. */
#include "policy.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Suite *suite_policy(void);

#define FP8 "{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1,2]}"
#define NVFP4_BLOCKS "\"block_sizes\":{\"-1\":16,\"type\":\"dynamic\",\"scale_bits\":[4,3]}"
#define NVFP4 "{\"num_bits\":[2,1],\"type\":\"dynamic\"," NVFP4_BLOCKS "}"
#define STATE "{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1]}"
#define MATMUL "\"linear_attention\":[{\"module_name\":\"*\",\"cfg\":{\"backend\":\"matmul\"}}]"

static ckpt_policy policy;
static ckpt_model model;
static ckpt_err error;

/* Two KDA layers and an attention layer between them. */
static void set_up(void)
{
    static const char config[] = "{\"pattern\":\"K-*-KE\"}";
    memset(&model, 0, sizeof model);
    ck_assert_int_eq(ckpt_json_parse(config, strlen(config), &model.config, &error), CKPT_OK);
    ck_assert_int_eq(ckpt_policy_open(&policy, &model, &error), CKPT_OK);
}

static void tear_down(void)
{
    ckpt_policy_release(&policy);
    ckpt_json_free(model.config);
}

static ckpt_status resolve(const char *rules)
{
    ckpt_json *j = NULL;
    ck_assert_msg(ckpt_json_parse(rules, strlen(rules), &j, &error) == CKPT_OK, "%s", error.text);
    ckpt_status status = ckpt_policy_resolve(&policy, j, &error);
    ckpt_json_free(j);
    return status;
}

static void resolved(const char *rules)
{
    ck_assert_msg(resolve(rules) == CKPT_OK, "%s: %s", rules, error.text);
}

static void preset(const char *name)
{
    ckpt_json *j = ckpt_policy_preset(name);
    ck_assert_ptr_nonnull(j);
    ck_assert_msg(ckpt_policy_resolve(&policy, j, &error) == CKPT_OK, "%s", error.text);
    ckpt_json_free(j);
}

static ckpt_quant_kind kind_of(const char *handle)
{
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++)
        if (strcmp(ckpt_handle_names[h], handle) == 0)
            return policy.modules[0].q.kind[h];
    ck_abort_msg("no handle %s", handle);
}

/* ---- modules, handles ------------------------------------------------------------------------- */

START_TEST(modules_are_the_kda_blocks_all_disabled)
{
    ck_assert_uint_eq(policy.n, 2);
    ck_assert_str_eq(policy.modules[0].name, "blocks.0.kda");
    ck_assert_str_eq(policy.modules[1].name, "blocks.4.kda");
    ck_assert_str_eq(policy.modules[1].alias[1], "model.layers.2.self_attn");
    ck_assert_int_eq(CKPT_HANDLE_COUNT, 17);
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++)
        ck_assert_int_eq(policy.modules[1].q.kind[h], CKPT_QUANT_OFF);
    for (int s = 0, sites = 0; s < CKPT_SITE_COUNT; s++)
        for (int side = 0; side < 2; side++) {
            ckpt_quant_handle h = ckpt_handle_of((ckpt_quant_site)s, side);
            if (h != CKPT_HANDLE_W)
                ck_assert_int_eq(h, sites++); /* in order, without the lhs of state_read */
        }
    preset("off");
    ck_assert(!policy.enabled && ckpt_policy_of(&policy, 2) == NULL);
    ck_assert_ptr_null(ckpt_policy_preset("fp9_operands"));
}
END_TEST

START_TEST(presets_enable_what_their_names_say)
{
    static const struct {
        const char *name;
        int fp8, nvfp4, state, schedules;
        bool enabled;
    } rows[] = {
        {"off",               0,  0,  0, 0, false},
        {"exact_matmul",      0,  0,  0, 0, true },
        {"fp8_operands",      16, 0,  0, 0, true },
        {"nvfp4_operands",    0,  16, 0, 0, true },
        {"fp8_with_state",    16, 0,  1, 0, true },
        {"fp16_accumulation", 0,  0,  0, 8, true },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int count[5] = {0}, schedules = 0;
        preset(rows[i].name);
        const ckpt_quant *q = ckpt_policy_of(&policy, 4);
        for (int h = 0; h < CKPT_HANDLE_COUNT; h++)
            count[q->kind[h]]++;
        for (int s = 0; s < CKPT_SITE_COUNT; s++)
            schedules += q->accumulator[s] == CKPT_QUANT_F16 && q->block[s] == 16;
        ck_assert_int_eq(count[CKPT_QUANT_FP8], rows[i].fp8);
        ck_assert_int_eq(count[CKPT_QUANT_NVFP4], rows[i].nvfp4);
        ck_assert_int_eq(count[CKPT_QUANT_STATE_E4M3], rows[i].state);
        ck_assert_int_eq(schedules, rows[i].schedules);
        ck_assert_int_eq(policy.enabled, rows[i].enabled);
        ck_assert_int_eq(q->kind[CKPT_HANDLE_STATE] != CKPT_QUANT_OFF, rows[i].state);
    }
}
END_TEST

START_TEST(later_rules_win)
{
    resolved("{\"quant_cfg\":[{\"quantizer_name\":\"*\",\"enable\":false},"
             "{\"quantizer_name\":\"*linear_attn_sites.*\",\"cfg\":" FP8 "},"
             "{\"quantizer_name\":\"*wy_*.rhs_quantizer\",\"enable\":false},"
             "{\"quantizer_name\":\"*output_score.lhs*\",\"cfg\":" NVFP4 "}]," MATMUL "}");
    ck_assert_int_eq(kind_of("linear_attn_sites.wy_key.rhs_quantizer"), CKPT_QUANT_OFF);
    ck_assert_int_eq(kind_of("linear_attn_sites.wy_key.lhs_quantizer"), CKPT_QUANT_FP8);
    ck_assert_int_eq(kind_of("linear_attn_sites.output_score.lhs_quantizer"), CKPT_QUANT_NVFP4);
    ck_assert_int_eq(kind_of("kda_w_quantizer"), CKPT_QUANT_OFF);
    /* to enable alone keeps the attributes, also those that were set while disabled */
    resolved("{\"quant_cfg\":[{\"quantizer_name\":\"*linear_attn_sites.*\",\"cfg\":" FP8
             ",\"enable\":false},"
             "{\"quantizer_name\":\"*wy_*.rhs_quantizer\",\"enable\":true}]," MATMUL "}");
    ck_assert_int_eq(kind_of("linear_attn_sites.wy_key.rhs_quantizer"), CKPT_QUANT_FP8);
    ck_assert_int_eq(kind_of("linear_attn_sites.wy_key.lhs_quantizer"), CKPT_QUANT_OFF);
}
END_TEST

/* By any of its names, one module of two. */
START_TEST(rules_reach_single_modules)
{
    static const char *const names[] = {"blocks.4.kda", "model.layers.2.self_attn",
                                        "model.layers.2.attn", "*.layers.[2-9].self_attn"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char rules[512];
        snprintf(rules, sizeof rules,
                 "{\"quant_cfg\":[{\"quantizer_name\":\"%s%s\",\"cfg\":" FP8
                 "}],\"linear_attention\":[{\"module_name\":\"%s\",\"cfg\":{\"backend\":\"matmul\","
                 "\"state\":{\"block_v\":32}}}]}",
                 names[i], ".*_w_quantizer", names[i]);
        resolved(rules);
        ck_assert_int_eq(policy.modules[0].q.kind[CKPT_HANDLE_W], CKPT_QUANT_OFF);
        ck_assert_int_eq(policy.modules[1].q.kind[CKPT_HANDLE_W], CKPT_QUANT_FP8);
        ck_assert_int_eq(policy.modules[0].q.block_v, 64);
        ck_assert_int_eq(policy.modules[1].q.block_v, 32);
        ck_assert(policy.enabled && !policy.modules[0].q.enabled && policy.modules[1].q.enabled);
    }
    /* the last execution wins whole */
    resolved("{\"linear_attention\":[{\"module_name\":\"*\",\"cfg\":{\"backend\":\"matmul\","
             "\"elementwise\":{\"gate_exp\":\"float16\"}}},"
             "{\"module_name\":\"*.2.self_attn\",\"cfg\":{\"state\":{\"block_v\":128}}}]}");
    ck_assert(policy.modules[0].q.enabled && !policy.modules[1].q.enabled);
    ck_assert_int_eq(policy.modules[1].q.block_v, 128);
    ck_assert_int_eq(policy.modules[0].q.rounding[CKPT_BOUNDARY_GATE_EXP], CKPT_QUANT_F16);
}
END_TEST

/* ---- refusals --------------------------------------------------------------------------------- */

typedef struct refusal {
    const char *text;  /* the part that is wrong */
    const char *error; /* part of the message */
} refusal;

static void refused(const char *rules, ckpt_status code, const char *message)
{
    ckpt_status status = resolve(rules);
    ck_assert_msg(status == code, "%s: status %d, %s", rules, (int)status,
                  status != CKPT_OK ? error.text : "accepted");
    ck_assert_msg(strstr(error.text, message) != NULL, "%s: '%s' has no '%s'", rules, error.text,
                  message);
}

/* cfg of kda_w_quantizer. */
static const refusal formats[] = {
    {"{\"num_bits\":[4,3],\"type\":\"static\",\"axis\":[0,1,2]}",                             "static scales"        },
    {"{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":null}",                               "dynamic E4M3 a row"   },
    {"{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1]}",                              "dynamic E4M3 a row"   },
    {"{\"num_bits\":[5,2],\"type\":\"dynamic\",\"axis\":[0,1,2]}",                            "\"num_bits\":[5,2]"   },
    {"{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1,2],\"pass_through_bwd\":false}",
     "pass_through_bwd false"                                                                                        },
    {"{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1,2],\"rotate\":true}",            "rotation"             },
    {"{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1,2],\"fake_quant\":false}",
     "real quantisation"                                                                                             },
    {"{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1,2],\"bias\":{\"-1\":1}}",        "'bias'"               },
    {"{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1,2],\"backend\":\"mine\"}",
     "'backend'"                                                                                                     },
    {"{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1,2],\"use_constant_amax\":true}",
     "use_constant_amax"                                                                                             },
    {"{\"num_bits\":8,\"type\":\"dynamic\",\"axis\":[0,1,2]}",                                "\"num_bits\":8"       },
    {"{\"num_bits\":[2,1],\"type\":\"dynamic\",\"block_sizes\":{\"-1\":32,\"type\":\"dynamic\","
     "\"scale_bits\":[4,3]}}",                                                           "NVFP4 in blocks of 16"},
    {"{\"num_bits\":[2,1],\"type\":\"dynamic\",\"block_sizes\":{\"-1\":16,\"type\":\"dynamic\","
     "\"scale_bits\":[8,0]}}",                                                           "NVFP4 in blocks of 16"},
    {"{\"num_bits\":[2,1],\"type\":\"dynamic\",\"axis\":[0]," NVFP4_BLOCKS "}",               "exclude"              },
    {"{}",                                                                                    "'cfg' is empty"       },
    {"{\"bits\":4}",                                                                          "unknown field 'bits'" },
    {"{\"type\":\"sometimes\"}",                                                              "'type'"               },
};

START_TEST(operand_formats_are_refused_by_name)
{
    char rules[640];
    snprintf(rules, sizeof rules,
             "{\"quant_cfg\":[{\"quantizer_name\":\"*kda_w_quantizer\",\"cfg\":%s}]," MATMUL "}",
             formats[_i].text);
    refused(rules, CKPT_E_UNSUPPORTED, formats[_i].error);
}
END_TEST

/* Execution of every module. */
static const refusal executions[] = {
    {"\"solve\":{\"method\":\"neumann\"}",                                                "found 'neumann', expected method 'exact'"},
    {"\"chunk_size\":32",                                                                 "chunk_size is not 64"                    },
    {"\"state\":{\"block_v\":48}",                                                        "block_v is not"                          },
    {"\"state\":{\"mode\":\"token\"}",                                                    "mode is not"                             },
    {"\"state\":{\"quantize_initial\":false}",                                            "quantize_initial"                        },
    {"\"state\":{\"tile\":1}",                                                            "unknown field 'tile'"                    },
    {"\"matmul\":{\"wy_key\":{\"accumulator_dtype\":\"float16\"}}",
     "'wy_key': accumulator_dtype without reduction_block"                                                                          },
    {"\"matmul\":{\"wy_key\":{\"reduction_block\":16}}",
     "'wy_key': reduction_block without accumulator_dtype"                                                                          },
    {"\"matmul\":{\"wy_key\":{\"accumulator_dtype\":\"float8\",\"reduction_block\":16}}",
     "accumulator_dtype is not"                                                                                                     },
    {"\"matmul\":{\"wy_key\":{\"accumulator_dtype\":\"float16\",\"reduction_block\":0}}",
     "reduction_block is no positive number"                                                                                        },
    {"\"matmul\":{\"qk\":{}}",                                                            "unknown product 'qk'"                    },
    {"\"elementwise\":{\"gate_exp\":\"float8\"}",                                         "'gate_exp' is not"                       },
    {"\"elementwise\":{\"gate\":\"float16\"}",                                            "'gate' is unknown"                       },
    {"\"decode\":{}",                                                                     "unknown field 'decode'"                  },
    {"\"schema_version\":2",                                                              "schema_version is not 1"                 },
};

START_TEST(executions_are_refused_by_name)
{
    char rules[512];
    snprintf(rules, sizeof rules,
             "{\"linear_attention\":[{\"module_name\":\"*\",\"cfg\":{\"backend\":\"matmul\",%s}}]}",
             executions[_i].text);
    refused(rules, CKPT_E_UNSUPPORTED, executions[_i].error);
}
END_TEST

START_TEST(whole_policies_are_refused_by_name)
{
    static const struct {
        const char *rules;
        ckpt_status code;
        const char *error;
    } rows[] = {
        {"{\"quant_cfg\":[{\"quantizer_name\":\"*kda_state_quantizer\",\"cfg\":" NVFP4 "}]," MATMUL
         "}",                                                                                CKPT_E_UNSUPPORTED, "kda_state_quantizer: found"                 },
        {"{\"quant_cfg\":[{\"quantizer_name\":\"*kda_w_quantizer\",\"cfg\":" FP8 "}]}",
         CKPT_E_UNSUPPORTED,                                                                                              "needs backend 'matmul'"                     },
        {"{\"quant_cfg\":[{\"quantizer_name\":\"*kda_w_quantizer\",\"cfg\":" FP8
         "}],\"linear_attention\":[{\"module_name\":\"*\",\"cfg\":{\"backend\":\"fla\"}}]}", CKPT_E_UNSUPPORTED, "needs backend 'matmul'"                     },
        {"{\"linear_attention\":[{\"module_name\":\"*\",\"cfg\":{\"elementwise\":{\"gate_exp\":"
         "\"bfloat16\"}}}]}",                                                                CKPT_E_UNSUPPORTED, "need backend 'matmul'"                      },
        {"{\"quant_cfg\":[{\"quantizer_name\":\"*.kda_u_quantizer\",\"cfg\":" FP8 "}]," MATMUL "}",
         CKPT_E_UNSUPPORTED,                                                                                              "quant_cfg[0]: no handle '*.kda_u_quantizer'"},
        {"{\"quant_cfg\":[{\"quantizer_name\":\"blocks.0.kda.w\",\"enable\":false}]}",
         CKPT_E_UNSUPPORTED,                                                                                              "no handle 'blocks.0.kda.w'"                 },
        {"{\"linear_attention\":[{\"module_name\":\"model.layers.7.*\",\"cfg\":{}}]}",
         CKPT_E_UNSUPPORTED,                                                                                              "no KDA module 'model.layers.7.*'"           },
        {"{\"quant_cfg\":[{\"quantizer_name\":\"*\"}]}",                                              CKPT_E_UNSUPPORTED,
         "needs 'cfg' or 'enable'"                                                                                                                                     },
        {"{\"quant_cfg\":[{\"quantizer_name\":\"*\",\"enable\":1}]}",                                 CKPT_E_FORMAT,      "'enable'"                                   },
        {"{\"quant_cfg\":[{\"enable\":false}]}",                                                      CKPT_E_FORMAT,      "'quantizer_name' is no string"              },
        {"{\"quant_cfg\":[{\"quantizer_name\":\"*\",\"enable\":false,\"parent_class\":\"x\"}]}",
         CKPT_E_UNSUPPORTED,                                                                                              "unknown field 'parent_class'"               },
        {"{\"quant_cfg\":{}}",                                                                        CKPT_E_FORMAT,      "'quant_cfg' is no list"                     },
        {"{\"quant_cfg\":[3]}",                                                                       CKPT_E_FORMAT,      "found no object"                            },
        {"{\"algorithm\":\"max\"}",                                                                   CKPT_E_UNSUPPORTED, "'algorithm' is not null"                    },
        {"{\"quant\":[]}",                                                                            CKPT_E_UNSUPPORTED, "unknown field 'quant'"                      },
        {"[]",                                                                                        CKPT_E_FORMAT,      "found no object"                            },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        refused(rows[i].rules, rows[i].code, rows[i].error);
    /* to disable by pattern what is not there is fine */
    resolved("{\"quant_cfg\":[{\"quantizer_name\":\"*weight_quantizer\",\"enable\":false}]}");
}
END_TEST

START_TEST(int8_states_are_signed_and_narrow)
{
    resolved("{\"quant_cfg\":[{\"quantizer_name\":\"*kda_state_quantizer\",\"cfg\":{\"num_bits\":8,"
             "\"type\":\"dynamic\",\"axis\":[0,1],\"narrow_range\":true}}]," MATMUL "}");
    ck_assert_int_eq(kind_of("kda_state_quantizer"), CKPT_QUANT_STATE_INT8);
    refused("{\"quant_cfg\":[{\"quantizer_name\":\"*kda_state_quantizer\",\"cfg\":{\"num_bits\":8,"
            "\"type\":\"dynamic\",\"axis\":[0,1]}}]," MATMUL "}",
            CKPT_E_UNSUPPORTED, "signed narrow INT8");
    resolved("{\"quant_cfg\":[{\"quantizer_name\":\"*kda_state_quantizer\",\"cfg\":" STATE
             "}]," MATMUL "}");
    ck_assert_int_eq(kind_of("kda_state_quantizer"), CKPT_QUANT_STATE_E4M3);
}
END_TEST

START_TEST(ranks_are_multiples_of_the_recipes_alignment)
{
    static const struct {
        const char *precision, *recipe;
        int64_t rank;
        bool ok;
    } rows[] = {
        {"fp8", "mxfp8",     48,  false},
        {"fp4", "nvfp4",     64,  false},
        {"fp8", "nvfp4",     64,  false},
        {"fp8", "delayed",   100, false},
        {"fp8", "blockwise", 48,  true },
        {"fp8", "blockwise", 0,   true },
        {"fp8", "mxfp8",     64,  true },
        {"fp4", "custom",    256, true },
        {"fp8", "custom",    -16, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int gate = 0; gate < 2; gate++)
            ck_assert_int_eq(ckpt_policy_check_rank(rows[i].precision, rows[i].recipe,
                                                    gate ? "kda_gate_lora_rank" : "kda_f_lora_rank",
                                                    rows[i].rank, &error),
                             rows[i].ok ? CKPT_OK : CKPT_E_UNSUPPORTED);
    ck_assert_int_eq(ckpt_policy_check_rank("fp8", "mxfp8", "kda_f_lora_rank", 48, &error),
                     CKPT_E_UNSUPPORTED);
    ck_assert_str_eq(error.text,
                     "KDA requires kda_f_lora_rank to be a multiple of 32 under FP8, got 48.");
}
END_TEST

/* ---- stored text ------------------------------------------------------------------------------- */

START_TEST(stored_text_restores_every_preset)
{
    static const char *const names[] = {
        "off",           "exact_matmul", "fp8_operands", "fp16_accumulation", "nvfp4_operands",
        "fp8_with_state"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ckpt_policy copy = {.n = 0};
        preset(names[i]);
        ck_assert_int_eq(ckpt_policy_open(&copy, &model, &error), CKPT_OK);
        ck_assert_msg(ckpt_policy_restore(&copy, policy.text, policy.digest, &error) == CKPT_OK,
                      "%s", error.text);
        ck_assert_str_eq(copy.text, policy.text);
        ck_assert_str_eq(copy.digest, policy.digest);
        ck_assert_int_eq(copy.enabled, policy.enabled);
        for (size_t m = 0; m < policy.n; m++)
            ck_assert_mem_eq(copy.modules[m].q.kind, policy.modules[m].q.kind,
                             sizeof copy.modules[m].q.kind);
        ckpt_policy_release(&copy);
    }
    preset("off");
    ck_assert_ptr_nonnull(strstr(
        policy.text, "{\"modules\":{\"blocks.0.kda\":{\"execution\":{\"backend\":\"fla\",\"chunk_"
                     "size\":64,\"elementwise\":{},\"matmul\":{},\"schema_version\":1,\"solve\":{"
                     "\"method\":\"exact\"},\"state\":{\"block_v\":64,\"mode\":\"chunk\","
                     "\"quantize_initial\":true}},\"quantizers\":{\"kda_state_quantizer\":{\"enable"
                     "\":false},"));
}
END_TEST

START_TEST(stored_text_that_does_not_fit_is_refused)
{
    static const struct {
        const char *text;
        ckpt_status code;
        const char *error;
    } rows[] = {
        {"{\"schema\":2,\"modules\":{}}",                                                        CKPT_E_UNSUPPORTED, "'schema' is not 1"                      },
        {"{\"schema\":1,\"modules\":[]}",                                                        CKPT_E_FORMAT,      "'modules' is no object"                 },
        {"{\"schema\":1,\"modules\":{}}",                                                        CKPT_E_FORMAT,      "module blocks.0.kda of the model"       },
        {"{\"schema\":1,\"modules\":{\"blocks.0.kda\":{\"execution\":{},\"quantizers\":{}},"
         "\"blocks.4.kda\":{\"execution\":{},\"quantizers\":{}},\"blocks.6.kda\":{}}}", CKPT_E_FORMAT,      "module blocks.6.kda is not in the model"},
        {"{\"schema\":1,\"modules\":{},\"more\":0}",                                             CKPT_E_UNSUPPORTED, "unknown field 'more'"                   },
        {"{\"schema\":1,\"modules\":{\"blocks.0.kda\":{\"execution\":{},\"quantizers\":{\"kda_u\":"
         "{\"enable\":false}}}}}",                                                      CKPT_E_UNSUPPORTED, "no handle 'kda_u'"                      },
        {"{\"schema\":1,\"modules\":{\"blocks.0.kda\":{\"execution\":{},\"quantizers\":{\"kda_w_"
         "quantizer\":{}}}}}",                                                          CKPT_E_FORMAT,      "kda_w_quantizer: 'enable'"              },
        {"{\"schema\":1,\"modules\":{\"blocks.0.kda\":{\"execution\":{},\"quantizers\":{\"kda_w_"
         "quantizer\":{\"enable\":true,\"num_bits\":8}}}}}",                            CKPT_E_UNSUPPORTED, "static scales"                          },
        {"{\"schema\":1,\"modules\":{\"blocks.0.kda\":{\"execution\":{}}}}",                     CKPT_E_FORMAT,
         "'quantizers' is no object"                                                                                                                          },
        {"{",                                                                                    CKPT_E_FORMAT,      "stored quantisation policy"             },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ckpt_status status = ckpt_policy_restore(&policy, rows[i].text, NULL, &error);
        ck_assert_msg(status == rows[i].code && strstr(error.text, rows[i].error) != NULL,
                      "%s: status %d, %s", rows[i].text, (int)status, error.text);
    }
    /* handles that are not stored are disabled */
    ck_assert_int_eq(
        ckpt_policy_restore(&policy,
                            "{\"schema\":1,\"modules\":{\"blocks.0.kda\":{\"execution\":{},"
                            "\"quantizers\":{}},\"blocks.4.kda\":{\"execution\":{},"
                            "\"quantizers\":{}}}}",
                            NULL, &error),
        CKPT_OK);
    ck_assert(!policy.enabled);
    preset("fp8_operands");
    char *text = strdup(policy.text);
    ck_assert_int_eq(ckpt_policy_restore(&policy, text, policy.digest + 1, &error), CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(error.text, "its SHA-256 is"));
    free(text);
}
END_TEST

Suite *suite_policy(void)
{
    Suite *s = suite_create("policy");
    TCase *t = tcase_create("policy");
    tcase_set_timeout(t, 30);
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_test(t, modules_are_the_kda_blocks_all_disabled);
    tcase_add_test(t, presets_enable_what_their_names_say);
    tcase_add_test(t, later_rules_win);
    tcase_add_test(t, rules_reach_single_modules);
    tcase_add_loop_test(t, operand_formats_are_refused_by_name, 0,
                        (int)(sizeof formats / sizeof *formats));
    tcase_add_loop_test(t, executions_are_refused_by_name, 0,
                        (int)(sizeof executions / sizeof *executions));
    tcase_add_test(t, whole_policies_are_refused_by_name);
    tcase_add_test(t, int8_states_are_signed_and_narrow);
    tcase_add_test(t, ranks_are_multiples_of_the_recipes_alignment);
    tcase_add_test(t, stored_text_restores_every_preset);
    tcase_add_test(t, stored_text_that_does_not_fit_is_refused);
    suite_add_tcase(s, t);
    return s;
}
