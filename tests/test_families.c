/* Layout tables against their schema and against stored names of real checkpoints; configuration
 * dialects against real configurations, each other, and what they must refuse.
 *
 * Length: expectation tables, one row a tensor. */
#include "families/hybrid.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"
#include "le.h"

#define HF ckpt_layout_hf_kimi_linear
#define FLA ckpt_layout_fla_kda
#define MEG ckpt_layout_megatron_hybrid
#define GPT ckpt_layout_megatron_gpt

/* ---- inputs ---------------------------------------------------------------------------------- */

/* Arguments of fixtures/mcore/legacy_tp2 as their common state has them. */
/* clang-format off */
static const char mcore_args[] =
    "{\"hidden_size\":64,\"num_layers\":8,\"hybrid_layer_pattern\":\"K-K-KE+E\","
    "\"num_attention_heads\":4,\"kv_channels\":32,\"ffn_hidden_size\":96,\"padded_vocab_size\":320,"
    "\"vocab_size\":320,\"make_vocab_size_divisible_by\":128,\"multi_latent_attention\":true,"
    "\"q_lora_rank\":48,\"kv_lora_rank\":32,\"qk_head_dim\":32,\"qk_pos_emb_head_dim\":16,"
    "\"v_head_dim\":24,\"rotary_base\":10000,\"rope_type\":\"rope\",\"qk_layernorm\":true,"
    "\"num_experts\":4,\"moe_ffn_hidden_size\":32,\"moe_router_topk\":2,"
    "\"moe_router_score_function\":\"sigmoid\",\"moe_router_enable_expert_bias\":true,"
    "\"moe_shared_expert_intermediate_size\":32,\"moe_router_topk_scaling_factor\":2.5,"
    "\"linear_conv_kernel_dim\":4,\"linear_key_head_dim\":32,\"linear_value_head_dim\":32,"
    "\"linear_num_key_heads\":4,\"linear_num_value_heads\":4,\"kda_safe_gate\":true,"
    "\"kda_lower_bound\":-5.0,\"kda_f_lora_rank\":null,\"kda_gate_lora_rank\":null,"
    "\"normalization\":\"RMSNorm\",\"norm_epsilon\":1e-06,\"swiglu\":true,\"add_bias_linear\":false,"
    "\"params_dtype\":\"torch.float32\",\"tensor_model_parallel_size\":2,"
    "\"pipeline_model_parallel_size\":1,\"context_parallel_size\":1,"
    "\"expert_model_parallel_size\":1,\"position_embedding_type\":\"rope\","
    "\"untie_embeddings_and_output_weights\":true,\"seq_length\":128,"
    "\"consumed_train_samples\":800}";
/* clang-format on */

/* config.json of the published 48B model (hf-layouts-linear.md section 1.1). */
/* clang-format off */
static const char published[] =
    "{\"architectures\":[\"KimiLinearForCausalLM\"],\"auto_map\":{\"AutoConfig\":"
    "\"configuration_kimi.KimiLinearConfig\"},\"bos_token_id\":163584,\"dtype\":\"bfloat16\","
    "\"eos_token_id\":163586,\"first_k_dense_replace\":1,\"head_dim\":72,\"hidden_act\":\"silu\","
    "\"hidden_size\":2304,\"initializer_range\":0.02,\"intermediate_size\":9216,"
    "\"kv_lora_rank\":512,\"linear_attn_config\":{\"full_attn_layers\":[4,8,12,16,20,24,27],"
    "\"head_dim\":128,\"kda_layers\":[1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21,22,23,25,26],"
    "\"num_heads\":32,\"short_conv_kernel_size\":4},\"mla_use_nope\":true,"
    "\"model_max_length\":1048576,\"model_type\":\"kimi_linear\",\"moe_intermediate_size\":1024,"
    "\"moe_layer_freq\":1,\"moe_renormalize\":true,\"moe_router_activation_func\":\"sigmoid\","
    "\"num_attention_heads\":32,\"num_expert_group\":1,\"num_experts\":256,"
    "\"num_experts_per_token\":8,\"num_hidden_layers\":27,\"num_key_value_heads\":32,"
    "\"num_nextn_predict_layers\":0,\"num_shared_experts\":1,\"pad_token_id\":163839,"
    "\"q_lora_rank\":null,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,"
    "\"rms_norm_eps\":1e-05,\"rope_scaling\":null,\"rope_theta\":10000.0,"
    "\"routed_scaling_factor\":2.446,\"tie_word_embeddings\":false,\"topk_group\":1,"
    "\"use_cache\":true,\"use_grouped_topk\":true,\"v_head_dim\":128,\"vocab_size\":163840}";
/* clang-format on */

static ckpt_json *parse(const char *text)
{
    ckpt_err err = {0};
    ckpt_json *j = NULL;
    ck_assert_msg(ckpt_json_parse(text, strlen(text), &j, &err) == CKPT_OK, "%s: %s", text,
                  err.text);
    return j;
}

static ckpt_json *load(const char *path)
{
    ckpt_buf buf = {0};
    ckpt_err err = {0};
    ckpt_json *j = NULL;
    ck_assert_msg(ckpt_read_file(path, 1 << 20, &buf, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(ckpt_json_parse((const char *)buf.data, buf.len, &j, &err) == CKPT_OK, "%s",
                  err.text);
    ckpt_buf_release(&buf);
    return j;
}

static char *text_of(const ckpt_json *j)
{
    ckpt_buf buf = {0};
    ck_assert(ckpt_json_print(j, 0, true, &buf));
    char *text = strdup((const char *)buf.data);
    ckpt_buf_release(&buf);
    return text;
}

static void expect_equal(const ckpt_json *a, const ckpt_json *b)
{
    char *x = text_of(a), *y = text_of(b);
    ck_assert_str_eq(x, y);
    free(x);
    free(y);
}

static ckpt_json *canon_of(const ckpt_layout *layout, const ckpt_json *stored)
{
    ckpt_err err = {0};
    ckpt_json *canon = ckpt_json_new_object();
    ck_assert_msg(layout->config_read(stored, canon, &err) == CKPT_OK, "%s: %s", layout->name,
                  err.text);
    return canon;
}

static ckpt_json *stored_of(const ckpt_layout *layout, const ckpt_json *canon,
                            const ckpt_json *foreign, const ckpt_mesh *mesh)
{
    ckpt_err err = {0};
    ckpt_json *out = NULL;
    ck_assert_msg(layout->config_write(canon, foreign, mesh, &out, &err) == CKPT_OK, "%s: %s",
                  layout->name, err.text);
    return out;
}

static ckpt_json *source(int i)
{
    return i == 0   ? load(CKPT_FIXTURES "/hf/kimi_linear_tiny/config.json")
           : i == 1 ? load(CKPT_FIXTURES "/fla/kda_trained/config.json")
           : i == 2 ? parse(mcore_args)
                    : parse(published);
}

static const ckpt_layout *const source_layout[] = {&HF, &FLA, &MEG, &HF};
#define N_SOURCES 4

/* Apply "path=json" (json "-" deletes a top-level key). */
static void patch(ckpt_json *j, const char *text)
{
    ckpt_err err = {0};
    char path[128];
    const char *eq = strchr(text, '=');
    snprintf(path, sizeof path, "%.*s", (int)(eq - text), text);
    if (strcmp(eq + 1, "-") == 0)
        ckpt_json_delete(j, path);
    else
        ck_assert_msg(ckpt_field_put_text(j, path, eq + 1, &err) == CKPT_OK, "%s", err.text);
}

/* ---- tables ---------------------------------------------------------------------------------- */

START_TEST(layout_tables_pass_their_check)
{
    ckpt_err err = {0};
    for (int i = 0; ckpt_layouts[i] != NULL; i++)
        ck_assert_msg(ckpt_layout_check(ckpt_layouts[i], &err) == CKPT_OK, "%s", err.text);
}
END_TEST

/* The canonical pattern of a row with its first index replaced by {b}. */
static void schema_name(const char *canon, char out[128])
{
    const char *open = strchr(canon, '{'), *dot = strchr(canon, '.');
    if (open == NULL || dot == NULL || open != dot + 1 ||
        (strncmp(canon, "blocks.", 7) != 0 && strncmp(canon, "mtp.", 4) != 0)) {
        snprintf(out, 128, "%s", canon);
        return;
    }
    snprintf(out, 128, "%.*s{b}%s", (int)(open - canon), canon, strchr(open, '}') + 1);
}

START_TEST(schema_names_are_unique_and_each_is_stored_somewhere)
{
    for (size_t i = 0; i < CKPT_HYBRID_SCHEMA_LEN; i++) {
        int stored = 0;
        ck_assert_ptr_nonnull(ckpt_hybrid_schema[i].canon);
        for (size_t k = 0; k < i; k++)
            ck_assert_str_ne(ckpt_hybrid_schema[i].canon, ckpt_hybrid_schema[k].canon);
        for (int l = 0; ckpt_layouts[l] != NULL; l++)
            for (size_t r = 0; r < ckpt_layouts[l]->n_rows; r++) {
                char name[128];
                schema_name(ckpt_layouts[l]->rows[r].canon, name);
                stored += strcmp(name, ckpt_hybrid_schema[i].canon) == 0;
            }
        ck_assert_msg(stored > 0, "%s is in no layout", ckpt_hybrid_schema[i].canon);
    }
}
END_TEST

/* Rows for one canonical name that the default choices and a configuration leave. */
static int chosen_rows(const ckpt_layout *a, const char *canon, const char *config)
{
    int chosen = 0;
    ckpt_buf words = {0};
    ckpt_json *j = parse(config);
    if (a->choices != NULL)
        a->choices(j, &words);
    ckpt_buf_printf(&words, ",%s", a->default_tags);
    for (size_t k = 0; k < a->n_rows; k++)
        if (strcmp(a->rows[k].canon, canon) == 0)
            chosen += ckpt_tag_verdict((const char *)words.data, a->rows[k].tag) != 0;
    ckpt_json_free(j);
    ckpt_buf_release(&words);
    return chosen;
}

START_TEST(default_tags_choose_one_row_a_tensor)
{
    static const char *const configs[] = {
        "{}", "{\"activation\":\"relu2\",\"attn_gate\":true,\"norm_zero_centered\":true}"};
    for (int l = 0; ckpt_layouts[l] != NULL; l++) {
        const ckpt_layout *a = ckpt_layouts[l];
        bool megatron = strcmp(a->group, "megatron") == 0;
        for (size_t r = 0; r < a->n_rows; r++) {
            const char *canon = a->rows[r].canon;
            int one = chosen_rows(a, canon, configs[0]), two = chosen_rows(a, canon, configs[1]);
            /* low rank KDA is chosen by the tensors, a copy never without being asked for */
            bool other = strstr(canon, ".f_") != NULL || strstr(canon, ".g_") != NULL ||
                         ckpt_row_copy_of(&a->rows[r]) != NULL;
            ck_assert_msg(one <= 1 && two <= 1, "%s: %s: %d and %d rows", a->name, canon, one, two);
            ck_assert_msg(one + two > 0 || other, "%s: %s: no row", a->name, canon);
            ck_assert(megatron || one == 1 || other);
        }
    }
}
END_TEST

/* Every view, with sizes bound, has the element count of the schema row times the fused parts. */
START_TEST(views_have_the_shape_of_the_schema)
{
    static const struct {
        const char *name;
        int64_t v;
    } sizes[] = {
        {"V",  11},
        {"VP", 13},
        {"H",  17},
        {"NK", 2 },
        {"A",  3 },
        {"B",  5 },
        {"W",  4 },
        {"RF", 7 },
        {"RG", 19},
        {"N",  4 },
        {"R",  2 },
        {"L",  3 },
        {"MN", 6 },
        {"MD", 4 },
        {"MG", 2 },
        {"MT", 5 },
        {"MW", 4 },
        {"DN", 3 },
        {"DR", 2 },
        {"DV", 5 },
        {"RQ", 7 },
        {"RK", 11},
        {"F",  23},
        {"E",  3 },
        {"FE", 5 },
        {"FS", 6 },
        {"GM", 4 },
        {"G",  2 },
        {"D",  4 },
        {"GK", 2 },
        {"GV", 6 },
        {"U",  3 },
        {"GA", 5 },
        {"GB", 7 },
        {"GW", 4 },
    };
    ckpt_symtab syms = {0};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        ck_assert(ckpt_sym_set(&syms, sizes[i].name, sizes[i].v));
    for (int l = 0; ckpt_layouts[l] != NULL; l++)
        for (size_t r = 0; r < ckpt_layouts[l]->n_rows; r++) {
            const ckpt_row *row = &ckpt_layouts[l]->rows[r];
            if (ckpt_row_copy_of(row) != NULL)
                continue; /* has the shape of what it repeats */
            ckpt_arena arena = {0};
            ckpt_err err = {0};
            ckpt_view_out out = {0};
            ckpt_view_in in = {.view = row->view, .e = 1, .l = 2, .syms = &syms};
            if (ckpt_row_copy_of(row) != NULL)
                continue;
            ck_assert_msg(ckpt_view_build(&in, &arena, &out, &err) == CKPT_OK, "%s: %s",
                          row->stored, err.text);
            int64_t box = 1, want = 1, d;
            for (int a = 0; a < out.map.n; a++)
                box *= out.map.axis[a].len;
            char name[128];
            size_t s = 0;
            schema_name(row->canon, name);
            while (strcmp(ckpt_hybrid_schema[s].canon, name) != 0)
                s++;
            for (const char *p = ckpt_hybrid_schema[s].dims; *p != '\0';) {
                size_t n = strcspn(p, ",");
                ck_assert(ckpt_expr_eval(&syms, p, n, &d));
                want *= d;
                p += n + (p[n] == ',');
            }
            ck_assert_msg(box == want, "%s: %s: box %lld, schema %lld", ckpt_layouts[l]->name,
                          row->stored, (long long)box, (long long)want);
            ckpt_arena_free(&arena);
        }
}
END_TEST

static int rows_matching(const ckpt_layout *layout, const char *name)
{
    int n = 0;
    ckpt_index at;
    for (size_t r = 0; r < layout->n_rows; r++)
        n += ckpt_pattern_match(layout->rows[r].stored, name, NULL, &at);
    return n;
}

static void match_index(const ckpt_layout *layout, const char *path, int names)
{
    ckpt_json *index = load(path);
    int n = 0;
    for (const ckpt_json *c = ckpt_json_child(ckpt_json_get(index, "weight_map")); c != NULL;
         c = ckpt_json_next(c), n++)
        ck_assert_msg(rows_matching(layout, ckpt_json_key(c)) > 0, "%s", ckpt_json_key(c));
    ck_assert_int_eq(n, names);
    ckpt_json_free(index);
}

START_TEST(rows_match_every_tensor_of_the_fixtures)
{
    match_index(&HF, CKPT_FIXTURES "/hf/kimi_linear_tiny/model.safetensors.index.json", 151);
    match_index(&FLA, CKPT_FIXTURES "/fla/kda_trained/model.safetensors.index.json", 66);
}
END_TEST

static const char *const plain[] = {"legacy", "lowrank_f_tp2", "lowrank_fg_tp2"};

START_TEST(rows_match_every_tensor_of_megatron)
{
    char path[256];
    ckpt_buf buf = {0};
    ckpt_err err = {0};
    ckpt_json *header = NULL;
    int n = 0;
    snprintf(path, sizeof path, CKPT_FIXTURES "/mcore/%s.plain.safetensors", plain[_i]);
    ck_assert_int_eq(ckpt_read_file(path, 1 << 24, &buf, &err), CKPT_OK);
    uint64_t len = ckpt_get_u64(buf.data);
    ck_assert_int_eq(ckpt_json_parse((const char *)buf.data + 8, len, &header, &err), CKPT_OK);
    for (const ckpt_json *c = ckpt_json_child(header); c != NULL; c = ckpt_json_next(c)) {
        if (strcmp(ckpt_json_key(c), "__metadata__") == 0)
            continue;
        ck_assert_msg(rows_matching(&MEG, ckpt_json_key(c)) > 0, "%s", ckpt_json_key(c));
        n++;
    }
    ck_assert_int_gt(n, 30);
    ckpt_json_free(header);
    ckpt_buf_release(&buf);
}
END_TEST

START_TEST(claims_know_their_own_configuration_only)
{
    for (int i = 0; i < N_SOURCES; i++) {
        ckpt_json *j = source(i);
        for (int l = 0; ckpt_layouts[l] != NULL; l++) {
            int claim = ckpt_layouts[l]->claims(j);
            if (ckpt_layouts[l] == source_layout[i])
                ck_assert_int_eq(claim, 1);
            else if (ckpt_layouts[l]->config_kind == source_layout[i]->config_kind)
                ck_assert_int_eq(claim, -1);
            else
                ck_assert_int_le(claim, 0);
            ck_assert_int_eq(ckpt_layouts[l]->claims(NULL), 0);
        }
        ckpt_json_free(j);
    }
    ckpt_json *gpt = parse("{\"num_layers\":4,\"hybrid_layer_pattern\":null}");
    ckpt_json *other = parse("{\"architectures\":[\"LlamaForCausalLM\"]}");
    ck_assert_int_eq(MEG.claims(gpt), -1);
    ck_assert_int_eq(HF.claims(other), -1);
    ck_assert_int_eq(FLA.claims(other), -1);
    ckpt_json_free(gpt);
    ckpt_json_free(other);
}
END_TEST

/* ---- reading --------------------------------------------------------------------------------- */

/* clang-format off */
static const char *const canonical[N_SOURCES] = {
    "{\"activation\":\"silu\",\"expert_ffn_size\":32,\"experts\":8,\"experts_per_token\":2,"
    "\"ffn_size\":96,\"heads\":4,\"hidden_size\":64,\"init_std\":0.08,\"kda_conv\":4,"
    "\"kda_f_rank\":32,\"kda_gate_rank\":32,\"kda_heads\":2,\"kda_key_dim\":32,"
    "\"kda_safe_gate\":false,\"kda_value_dim\":32,\"kv_lora_rank\":32,\"latent_norm\":true,"
    "\"mla_nope\":true,\"norm_eps\":1e-05,\"pattern\":\"K-KEKE+E\",\"qk_nope_dim\":32,"
    "\"qk_rope_dim\":16,\"router_bias\":true,\"router_normalize\":true,\"router_scale\":2.446,"
    "\"router_score\":\"sigmoid\",\"shared_ffn_size\":32,\"tied\":false,\"v_head_dim\":24,"
    "\"vocab_size\":320}",
    "{\"activation\":\"silu\",\"ffn_size\":256,\"hidden_size\":128,\"init_std\":0.02,"
    "\"kda_conv\":4,\"kda_f_rank\":64,\"kda_gate_rank\":64,\"kda_heads\":2,\"kda_key_dim\":64,"
    "\"kda_safe_gate\":false,\"kda_value_dim\":64,\"norm_eps\":1e-06,\"pattern\":\"K-K-K-\","
    "\"tied\":false,\"vocab_size\":256}",
    "{\"activation\":\"silu\",\"expert_ffn_size\":32,\"experts\":4,\"experts_per_token\":2,"
    "\"ffn_size\":96,\"heads\":4,\"hidden_size\":64,\"init_std\":0.02,\"kda_conv\":4,"
    "\"kda_heads\":4,\"kda_key_dim\":32,\"kda_lower_bound\":-5,\"kda_safe_gate\":true,"
    "\"kda_value_dim\":32,\"kv_lora_rank\":32,\"latent_norm\":true,\"mla_nope\":false,"
    "\"norm_eps\":1e-06,\"pattern\":\"K-K-KE+E\",\"q_lora_rank\":48,\"qk_nope_dim\":32,"
    "\"qk_rope_dim\":16,\"rope_theta\":10000,\"rope_type\":\"rope\",\"router_bias\":true,"
    "\"router_normalize\":true,\"router_scale\":2.5,\"router_score\":\"sigmoid\","
    "\"shared_ffn_size\":32,\"tied\":false,\"v_head_dim\":24,\"vocab_size\":320}",
    "{\"activation\":\"silu\",\"expert_ffn_size\":1024,\"experts\":256,\"experts_per_token\":8,"
    "\"ffn_size\":9216,\"heads\":32,\"hidden_size\":2304,\"init_std\":0.02,\"kda_conv\":4,"
    "\"kda_f_rank\":128,\"kda_gate_rank\":128,\"kda_heads\":32,\"kda_key_dim\":128,"
    "\"kda_safe_gate\":false,\"kda_value_dim\":128,\"kv_lora_rank\":512,\"latent_norm\":true,"
    "\"mla_nope\":true,\"norm_eps\":1e-05,"
    "\"pattern\":\"K-KEKE+EKEKEKE+EKEKEKE+EKEKEKE+EKEKEKE+EKEKEKE+EKEKE+E\","
    "\"qk_nope_dim\":128,\"qk_rope_dim\":64,\"router_bias\":true,\"router_normalize\":true,"
    "\"router_scale\":2.446,\"router_score\":\"sigmoid\",\"shared_ffn_size\":1024,"
    "\"tied\":false,\"v_head_dim\":128,\"vocab_size\":163840}",
};
/* clang-format on */

START_TEST(read_gives_the_canonical_configuration)
{
    ckpt_json *j = source(_i), *canon = canon_of(source_layout[_i], j);
    ckpt_buf unsorted = {0};
    char *text = text_of(canon);
    ck_assert_str_eq(text, canonical[_i]);
    ck_assert(ckpt_json_print(canon, 0, false, &unsorted));
    ck_assert_str_eq(text, (const char *)unsorted.data);
    free(text);
    ckpt_buf_release(&unsorted);
    ckpt_json_free(canon);
    ckpt_json_free(j);
}
END_TEST

/* Patches to a source that read as the same or another canonical value of one key. */
/* clang-format off */
static const struct {
    int source;
    const char *patches[3], *key, *value; /* value NULL: key absent */
} reads[] = {
    {0, {"layer_types=-"}, "pattern", "\"K-KEKE+E\""},
    {0, {"linear_attn_config.kda_layers=null", "linear_attn_config.full_attn_layers=null"},
     "pattern", "\"K-KEKE+E\""},
    {0, {"mlp_layer_types=-", "first_k_dense_replace=0"}, "pattern", "\"KEKEKE+E\""},
    {0, {"mlp_layer_types=-", "first_k_dense_replace=9"}, "pattern", "\"K-K-K-+-\""},
    {0, {"mlp_layer_types=-", "first_k_dense_replace=-"}, "pattern", "\"K-KEKE+E\""},
    {0, {"mlp_layer_types=-", "num_experts=null"}, "pattern", "\"K-K-K-+-\""},
    {0, {"first_k_dense_replace=-"}, "pattern", "\"K-KEKE+E\""},
    {0, {"mla_use_nope=false"}, "mla_nope", "true"},
    {0, {"mla_use_nope=-"}, "mla_nope", "true"},
    {0, {"num_shared_experts=2"}, "shared_ffn_size", "64"},
    {0, {"num_shared_experts=0"}, "shared_ffn_size", NULL},
    {0, {"num_expert_group=2"}, "router_groups", "2"},
    {0, {"q_lora_rank=48"}, "q_lora_rank", "48"},
    {0, {"hidden_act=\"swish\""}, "activation", "\"silu\""},
    {1, {"intermediate_size=null"}, "ffn_size", "512"},
    {1, {"intermediate_size=null", "hidden_ratio=null"}, "ffn_size", "512"},
    {1, {"expand_v=2"}, "kda_value_dim", "128"},
    {1, {"expand_v=2"}, "kda_f_rank", "128"},
    {1, {"num_v_heads=2"}, "kda_heads", "2"},
    {1, {"lower_bound=-4"}, "kda_lower_bound", NULL},
    {1, {"lower_bound=-4", "safe_gate=true"}, "kda_lower_bound", "-4"},
    {2, {"hybrid_layer_pattern=\"K-K-|KE+E\""}, "pattern", "\"K-K-KE+E\""},
    {2, {"hybrid_layer_pattern=null", "hybrid_override_pattern=\"K-K-KE+E\""}, "pattern",
     "\"K-K-KE+E\""},
    {2, {"num_layers=null"}, "pattern", "\"K-K-KE+E\""},
    {2, {"hybrid_layer_pattern=\"K-K-KE+E/+E/+E\""}, "pattern", "\"K-K-KE+E+E+E\""},
    {2, {"hybrid_layer_pattern=\"K-K-KE+E/+E/+E\""}, "mtp_layers", "2"},
    {2, {"hybrid_layer_pattern=\"K-K-|KE+E/+E/+E\""}, "mtp_blocks", "4"},
    {2, {"hybrid_layer_pattern=\"M-K-KE+E\""}, "mamba_heads", "2"},
    {2, {"hybrid_layer_pattern=\"M-K-KE+E\"", "mamba_num_heads=8"}, "mamba_heads", "8"},
    {2, {"apply_layernorm_1p=true"}, "norm_zero_centered", "true"},
    {2, {"layernorm_zero_centered_gamma=true"}, "norm_zero_centered", "true"},
    {2, {"apply_layernorm_1p=false"}, "norm_zero_centered", NULL},
    {2, {"swiglu=false", "squared_relu=true"}, "activation", "\"relu2\""},
    {2, {"kda_safe_gate=false"}, "kda_lower_bound", NULL},
    {2, {"no_rope_freq=1"}, "mla_nope", "true"},
    {2, {"no_rope_freq=1"}, "rope_theta", NULL},
    {2, {"no_rope_freq=4"}, "mla_nope", "false"},
    {2, {"no_rope_freq=[0,0,0,0,0,0,1,0]"}, "mla_nope", "true"},
    {2, {"no_rope_freq=[1,1,1,1,1,1,0,1]"}, "mla_nope", "false"},
    {2, {"no_rope_freq=[]"}, "mla_nope", "false"},
    {2, {"no_rope_freq=[true,true,true,true,true,true,true,true]"}, "mla_nope", "true"},
    {2, {"rope_type=\"yarn\""}, "rope_type", "\"rope\""},
    {2, {"rope_type=null", "rotary_scaling_factor=40"}, "rope_type", "\"yarn\""},
    {2, {"rope_type=\"yarn\"", "rotary_scaling_factor=40.0", "mscale=0.5"}, "rope_scaling",
     "{\"beta_fast\":32,\"beta_slow\":1,\"factor\":40,\"mscale\":0.5,\"mscale_all_dim\":0,"
     "\"original_max_position_embeddings\":4096}"},
    {2, {"rotary_percent=1.0"}, "rope_theta", "10000"},
    {2, {"attention_output_gate=true"}, "mla_gate", "\"elementwise\""},
    {2, {"attention_output_gate=true", "gated_attention_proj_granularity=\"headwise\""},
     "mla_gate", "\"headwise\""},
    {2, {"gated_attention_proj_granularity=\"headwise\""}, "mla_gate", NULL},
    {2, {"moe_router_topk_scaling_factor=null"}, "router_scale", "1"},
    {2, {"moe_ffn_hidden_size=null"}, "expert_ffn_size", "96"},
    {2, {"moe_router_topk=1"}, "router_normalize", "false"},
    {2, {"moe_router_num_groups=2", "moe_router_group_topk=1"}, "router_groups", "2"},
    {2, {"moe_router_num_groups=1", "moe_router_group_topk=1"}, "router_groups", NULL},
    {2, {"moe_router_num_groups=2", "moe_router_group_topk=1"}, "router_group_best", NULL},
    {2, {"moe_router_num_groups=2", "moe_router_group_topk=2"}, "router_group_best", "1"},
    {2, {"moe_router_score_function=\"softmax\"", "moe_router_enable_expert_bias=false"},
     "router_normalize", "true"},
    {2, {"moe_router_score_function=\"softmax\"", "moe_router_enable_expert_bias=false",
         "moe_router_pre_softmax=true"}, "router_normalize", "false"},
    {2, {"moe_shared_expert_gate=true"}, "shared_gate", "true"},
    {2, {"vocab_size=null"}, "vocab_size", NULL},
    {2, {"norm_epsilon=-", "layernorm_epsilon=1e-07"}, "norm_eps", "1e-07"},
    {2, {"untie_embeddings_and_output_weights=false"}, "tied", "true"},
    {2, {"hybrid_layer_pattern=\"K-K-K-K-\""}, "heads", NULL},
    {2, {"hybrid_layer_pattern=\"K-K-K-K-\""}, "experts", NULL},
};
/* clang-format on */

START_TEST(read_variant_gives_the_expected_value)
{
    ckpt_json *j = source(reads[_i].source);
    for (int p = 0; p < 3 && reads[_i].patches[p] != NULL; p++)
        patch(j, reads[_i].patches[p]);
    ckpt_json *canon = canon_of(source_layout[reads[_i].source], j);
    const ckpt_json *v = ckpt_json_get(canon, reads[_i].key);
    if (reads[_i].value == NULL) {
        ck_assert_ptr_null(v);
    } else {
        ck_assert_ptr_nonnull(v);
        char *text = text_of(v);
        ck_assert_str_eq(text, reads[_i].value);
        free(text);
    }
    /* Whatever a dialect can read it can write back: unchanged over itself, and from nothing. */
    if (ckpt_json_get(canon, "vocab_size") != NULL) {
        ckpt_json *again = stored_of(source_layout[reads[_i].source], canon, j, NULL);
        expect_equal(again, j);
        ckpt_json_free(again);
        ckpt_json *fresh = stored_of(source_layout[reads[_i].source], canon, NULL, NULL);
        ckpt_json *back = canon_of(source_layout[reads[_i].source], fresh);
        expect_equal(back, canon);
        ckpt_json_free(fresh);
        ckpt_json_free(back);
    }
    ckpt_json_free(canon);
    ckpt_json_free(j);
}
END_TEST

/* ---- refusals -------------------------------------------------------------------------------- */

/* clang-format off */
static const struct {
    int source;
    const char *patches[3];
    ckpt_status status;
    const char *message;
} refused[] = {
    /* Kimi-Linear */
    {0, {"num_hidden_layers=-"}, CKPT_E_FORMAT, "num_hidden_layers"},
    {0, {"num_hidden_layers=0"}, CKPT_E_FORMAT, "num_hidden_layers"},
    {0, {"num_hidden_layers=1e15"}, CKPT_E_FORMAT, "num_hidden_layers"},
    {0, {"num_hidden_layers=3"}, CKPT_E_FORMAT, "full_attn_layers': found layer 4"},
    {0, {"num_hidden_layers=5"}, CKPT_E_FORMAT, "layer 5 is in neither"},
    {0, {"linear_attn_config.kda_layers=[0,1,2]"}, CKPT_E_FORMAT, "kda_layers': found layer 0"},
    {0, {"linear_attn_config.kda_layers=[1,2]"}, CKPT_E_FORMAT, "layer 3 is in neither"},
    {0, {"linear_attn_config.kda_layers=[1,2,3,4]"}, CKPT_E_FORMAT,
     "layer 4 is listed in kda_layers and in full_attn_layers"},
    {0, {"linear_attn_config.kda_layers=[1,2,3,3]"}, CKPT_E_FORMAT, "layer 3 is listed twice"},
    {0, {"linear_attn_config.kda_layers=[1,2,\"3\"]"}, CKPT_E_FORMAT, "kda_layers"},
    {0, {"linear_attn_config.kda_layers=[1,2,2.5]"}, CKPT_E_FORMAT, "kda_layers"},
    {0, {"linear_attn_config.kda_layers=3"}, CKPT_E_FORMAT, "kda_layers"},
    {0, {"linear_attn_config.kda_layers=null"}, CKPT_E_FORMAT, "layer 1 is in neither"},
    {0, {"linear_attn_config=null", "layer_types=null"}, CKPT_E_FORMAT, "kda_layers' is missing"},
    {0, {"layer_types=[\"linear_attention\"]"}, CKPT_E_FORMAT, "layer_types"},
    {0, {"layer_types=[\"linear_attention\",\"linear_attention\",\"full_attention\","
         "\"full_attention\"]"}, CKPT_E_FORMAT, "layer 3 is full_attention"},
    {0, {"layer_types=[\"linear_attention\",\"linear_attention\",\"mamba\",\"full_attention\"]"},
     CKPT_E_FORMAT, "layer 3 is neither"},
    {0, {"mlp_layer_types=[\"dense\",\"dense\",\"sparse\",\"sparse\"]"}, CKPT_E_FORMAT,
     "layer 2 is dense"},
    {0, {"first_k_dense_replace=-1"}, CKPT_E_FORMAT, "first_k_dense_replace"},
    {0, {"linear_head_dim=64"}, CKPT_E_FORMAT, "linear_attn_config.head_dim"},
    {0, {"hidden_size=0"}, CKPT_E_FORMAT, "hidden_size"},
    {0, {"hidden_size=\"64\""}, CKPT_E_FORMAT, "hidden_size"},
    {0, {"q_lora_rank=0"}, CKPT_E_FORMAT, "q_lora_rank"},
    {0, {"rms_norm_eps=\"x\""}, CKPT_E_FORMAT, "rms_norm_eps"},
    {0, {"rms_norm_eps=0"}, CKPT_E_FORMAT, "norm_eps"},
    {0, {"num_key_value_heads=2"}, CKPT_E_UNSUPPORTED, "num_key_value_heads"},
    {0, {"attention_bias=true"}, CKPT_E_UNSUPPORTED, "attention_bias"},
    {0, {"hidden_act=\"situ\""}, CKPT_E_UNSUPPORTED, "hidden_act"},
    {0, {"moe_router_activation_func=\"softmax\""}, CKPT_E_UNSUPPORTED,
     "moe_router_activation_func"},
    {0, {"num_nextn_predict_layers=1"}, CKPT_E_UNSUPPORTED, "num_nextn_predict_layers"},
    {0, {"moe_layer_freq=2"}, CKPT_E_UNSUPPORTED, "moe_layer_freq"},
    {0, {"topk_group=2"}, CKPT_E_FORMAT, "topk_group"},
    {0, {"num_expert_group=2", "use_grouped_topk=false"}, CKPT_E_UNSUPPORTED, "use_grouped_topk"},
    {0, {"num_expert_group=3"}, CKPT_E_FORMAT, "router_groups"},
    {0, {"num_experts_per_token=9"}, CKPT_E_FORMAT, "experts_per_token"},
    /* FLA */
    {1, {"num_v_heads=4"}, CKPT_E_UNSUPPORTED, "num_v_heads"},
    {1, {"allow_neg_eigval=true"}, CKPT_E_UNSUPPORTED, "allow_neg_eigval"},
    {1, {"use_short_conv=false"}, CKPT_E_UNSUPPORTED, "use_short_conv"},
    {1, {"attn={\"layers\":[1],\"num_heads\":2}"}, CKPT_E_UNSUPPORTED, "attn"},
    {1, {"attnres_block_size=2"}, CKPT_E_UNSUPPORTED, "attnres_block_size"},
    {1, {"expand_v=0.3"}, CKPT_E_FORMAT, "expand_v"},
    {1, {"expand_v=0"}, CKPT_E_FORMAT, "expand_v"},
    {1, {"expand_v=-1"}, CKPT_E_FORMAT, "expand_v"},
    {1, {"expand_v=1e300"}, CKPT_E_FORMAT, "expand_v"},
    {1, {"intermediate_size=null", "hidden_ratio=1e300"}, CKPT_E_FORMAT, "hidden_ratio"},
    {1, {"safe_gate=true"}, CKPT_E_FORMAT, "kda_lower_bound"},
    {1, {"safe_gate=true", "lower_bound=-6"}, CKPT_E_FORMAT, "kda_lower_bound"},
    {1, {"num_hidden_layers=99999999"}, CKPT_E_FORMAT, "num_hidden_layers"},
    /* Megatron */
    {2, {"hybrid_layer_pattern=\"K-K-KE+X\""}, CKPT_E_FORMAT, "layer 7 is 'X'"},
    {2, {"hybrid_layer_pattern=\"K-K-|KE+x\""}, CKPT_E_FORMAT, "layer 7 is 'x'"},
    {2, {"hybrid_layer_pattern=\"D-K-KE+E\""}, CKPT_E_UNSUPPORTED, "layer 0 is 'D'"},
    {2, {"hybrid_layer_pattern=\"*-K-KE+E\""}, CKPT_E_UNSUPPORTED, "multi_latent_attention"},
    {2, {"hybrid_layer_pattern=\"*-K-KE+E\"", "multi_latent_attention=null"}, CKPT_E_UNSUPPORTED,
     "beside MLA"},
    {2, {"hybrid_layer_pattern=\"G-K-KE+E\"", "experimental_attention_variant=\"kda\""},
     CKPT_E_UNSUPPORTED, "experimental_attention_variant"},
    {2, {"hybrid_layer_pattern=\"K-K-KE+E/+E/K-\""}, CKPT_E_UNSUPPORTED, "depths"},
    {2, {"hybrid_layer_pattern=\"K-K-KE+E//\""}, CKPT_E_UNSUPPORTED, "depths"},
    {2, {"hybrid_layer_pattern=\"/K-K-KE+E\""}, CKPT_E_FORMAT, "starts with '/'"},
    {2, {"hybrid_layer_pattern=\"K-K-KE+E/+E\"", "mtp_num_layers=2"}, CKPT_E_FORMAT,
     "mtp_num_layers"},
    {2, {"hybrid_layer_pattern=\"\""}, CKPT_E_FORMAT, "hybrid_layer_pattern"},
    {2, {"hybrid_layer_pattern=\"|\""}, CKPT_E_FORMAT, "hybrid_layer_pattern"},
    {2, {"hybrid_layer_pattern=null"}, CKPT_E_FORMAT, "hybrid_layer_pattern"},
    {2, {"hybrid_layer_pattern=7"}, CKPT_E_FORMAT, "hybrid_layer_pattern"},
    {2, {"num_layers=7"}, CKPT_E_FORMAT, "num_layers"},
    {2, {"kda_f_lora_rank=0"}, CKPT_E_FORMAT, "kda_f_lora_rank"},
    {2, {"kda_gate_lora_rank=-3"}, CKPT_E_FORMAT, "kda_gate_lora_rank"},
    {2, {"kda_lower_bound=-5.5"}, CKPT_E_FORMAT, "kda_lower_bound"},
    {2, {"kda_lower_bound=0"}, CKPT_E_FORMAT, "kda_lower_bound"},
    {2, {"kda_lower_bound=null"}, CKPT_E_FORMAT, "kda_lower_bound"},
    {2, {"linear_num_value_heads=8"}, CKPT_E_FORMAT, "linear_num_value_heads"},
    {2, {"linear_value_head_dim=64"}, CKPT_E_FORMAT, "linear_value_head_dim"},
    {2, {"context_parallel_size=8", "linear_cp_mode=\"headwise\""}, CKPT_E_FORMAT,
     "'linear_num_key_heads'"},
    {2, {"context_parallel_size=8", "linear_cp_mode=\"chunkwise\""}, CKPT_OK, NULL},
    {2, {"context_parallel_size=2", "linear_cp_mode=\"headwise\""}, CKPT_OK, NULL},
    {2, {"context_parallel_size=4", "linear_cp_mode=\"headwise\""}, CKPT_E_FORMAT,
     "expected a multiple of tensor_model_parallel_size * context_parallel_size 8"},
    {2, {"fp8=\"e4m3\"", "fp8_recipe=\"mxfp8\"", "kda_f_lora_rank=48"}, CKPT_E_FORMAT,
     "'kda_f_lora_rank': found 48, under FP8 expected a multiple of 32"},
    {2, {"fp8=\"e4m3\"", "fp8_recipe=\"delayed\"", "kda_f_lora_rank=48"}, CKPT_OK, NULL},
    {2, {"fp8=\"hybrid\"", "kda_gate_lora_rank=24"}, CKPT_E_FORMAT, "'kda_gate_lora_rank'"},
    {2, {"fp8=null", "kda_gate_lora_rank=24"}, CKPT_OK, NULL},
    {2, {"fp8=\"hybrid\"", "linear_key_head_dim=33", "linear_value_head_dim=33"}, CKPT_E_FORMAT,
     "'linear_key_head_dim': KDA's in_proj has rows 660"},
    {2, {"cache_mla_latents=true"}, CKPT_OK, NULL},
    {2, {"cache_mla_latents=true", "no_rope_freq=1"}, CKPT_E_FORMAT, "'cache_mla_latents'"},
    {2, {"mla_down_proj_fusion=true"}, CKPT_OK, NULL},
    {2, {"mla_down_proj_fusion=true", "attention_output_gate=true"}, CKPT_E_FORMAT,
     "'mla_down_proj_fusion'"},
    {2, {"no_rope_freq=3"}, CKPT_E_FORMAT, "no_rope_freq"},
    {2, {"no_rope_freq=-1"}, CKPT_E_FORMAT, "no_rope_freq"},
    {2, {"no_rope_freq=\"1\""}, CKPT_E_FORMAT, "no_rope_freq"},
    {2, {"no_rope_freq=[1]"}, CKPT_E_FORMAT, "no_rope_freq"},
    {2, {"no_rope_freq=[1,1,1,1,1,1,2,1]"}, CKPT_E_FORMAT, "no_rope_freq"},
    {2, {"no_rope_freq=4", "hybrid_layer_pattern=\"K-+-KE+E\"", "num_layers=8"}, CKPT_OK, NULL},
    {2, {"no_rope_freq=[1,1,1,1,1,1,0,1]", "hybrid_layer_pattern=\"K-+-KE+E\""},
     CKPT_E_UNSUPPORTED, "no_rope_freq"},
    {2, {"rope_type=\"dynamic\""}, CKPT_E_UNSUPPORTED, "rope_type"},
    {2, {"use_rope_scaling=true"}, CKPT_E_UNSUPPORTED, "use_rope_scaling"},
    {2, {"rotary_percent=0.5"}, CKPT_E_UNSUPPORTED, "rotary_percent"},
    {2, {"position_embedding_type=\"mrope\""}, CKPT_E_UNSUPPORTED, "position_embedding_type"},
    {2, {"normalization=\"LayerNorm\""}, CKPT_E_UNSUPPORTED, "normalization"},
    {2, {"swiglu=false"}, CKPT_E_UNSUPPORTED, "swiglu"},
    {2, {"add_bias_linear=true"}, CKPT_E_UNSUPPORTED, "add_bias_linear"},
    {2, {"add_qkv_bias=true"}, CKPT_E_UNSUPPORTED, "add_qkv_bias"},
    {2, {"swiglu=true", "squared_relu=true"}, CKPT_E_UNSUPPORTED, "swiglu"},
    {2, {"mtp_use_repeated_layer=true"}, CKPT_E_UNSUPPORTED, "mtp_use_repeated_layer"},
    {2, {"activation_func_clamp_value=7.0"}, CKPT_E_UNSUPPORTED, "activation_func_clamp_value"},
    {2, {"mtp_num_layers=1"}, CKPT_E_FORMAT, "mtp_num_layers"},
    {2, {"moe_latent_size=16"}, CKPT_E_UNSUPPORTED, "moe_latent_size"},
    {2, {"multi_latent_attention=false"}, CKPT_E_UNSUPPORTED, "multi_latent_attention"},
    {2, {"moe_router_score_function=\"softmax\""}, CKPT_E_UNSUPPORTED,
     "moe_router_enable_expert_bias"},
    {2, {"moe_router_num_groups=4", "moe_router_group_topk=3"}, CKPT_E_UNSUPPORTED,
     "moe_router_group_topk"},
    {2, {"moe_router_num_groups=2"}, CKPT_E_FORMAT, "moe_router_group_topk"},
    {2, {"moe_router_num_groups=2", "moe_router_group_topk=3"}, CKPT_E_FORMAT,
     "moe_router_group_topk"},
    {2, {"gated_attention_proj_granularity=3", "attention_output_gate=true"}, CKPT_E_FORMAT,
     "gated_attention_proj_granularity"},
};
/* clang-format on */

START_TEST(read_refusal_names_the_field)
{
    ckpt_err err = {0};
    ckpt_json *j = source(refused[_i].source), *canon = ckpt_json_new_object();
    for (int p = 0; p < 3 && refused[_i].patches[p] != NULL; p++)
        patch(j, refused[_i].patches[p]);
    ckpt_status status = source_layout[refused[_i].source]->config_read(j, canon, &err);
    ck_assert_msg(status == refused[_i].status, "%s: status %d: %s", refused[_i].patches[0], status,
                  err.text);
    if (refused[_i].message != NULL)
        ck_assert_msg(strstr(err.text, refused[_i].message) != NULL, "%s: %s",
                      refused[_i].patches[0], err.text);
    ckpt_json_free(canon);
    ckpt_json_free(j);
}
END_TEST

/* Canonical configurations that a dialect cannot say: canonical form of a source, then patches. */
/* clang-format off */
static const struct {
    int source;
    const char *patches[3];
    const ckpt_layout *target;
    const char *message;
} unsayable[] = {
    {0, {"kda_f_rank=16"}, &HF, "linear_attn_config.head_dim"},
    {0, {"kda_f_rank=-"}, &HF, "kda_f_rank"},
    {0, {"kda_gate_rank=-"}, &HF, "kda_gate_rank"},
    {0, {"kda_value_dim=64"}, &HF, "kda_value_dim"},
    {0, {"kda_safe_gate=true", "kda_lower_bound=-5"}, &HF, "kda_safe_gate"},
    {0, {"mla_nope=false", "rope_theta=10000", "rope_type=\"rope\""}, &HF, "mla_nope"},
    {0, {"latent_norm=false"}, &HF, "latent_norm"},
    {0, {"router_bias=false"}, &HF, "router_bias"},
    {0, {"router_score=\"softmax\""}, &HF, "moe_router_activation_func"},
    {0, {"mla_gate=\"headwise\""}, &HF, "mla_gate"},
    {0, {"shared_gate=true"}, &HF, "shared_gate"},
    {0, {"shared_ffn_size=48"}, &HF, "num_shared_experts"},
    {0, {"pattern=\"K-KEKE+\""}, &HF, "pattern"},
    {0, {"pattern=\"K-K+KE+E\""}, &HF, "pattern"},
    {0, {"pattern=\"K-KEK-+E\""}, &HF, "first_k_dense_replace"},
    {0, {"pattern=\"G-KEKE+E\""}, &HF, "pattern"},
    {0, {"hidden_size=-"}, &HF, "hidden_size"},
    {0, {"norm_eps=-"}, &HF, "norm_eps"},
    {0, {"experts_per_token=-"}, &HF, "experts_per_token"},
    {0, {"q_lora_rank=48"}, &FLA, "pattern"},
    {1, {"kda_f_rank=-"}, &FLA, "kda_f_rank"},
    {1, {"kda_gate_rank=8"}, &FLA, "kda_gate_rank"},
    {1, {"kda_value_dim=32"}, &FLA, "kda_f_rank"},
    {1, {"kda_value_dim=128", "kda_f_rank=128", "kda_gate_rank=128"}, &MEG,
     "linear_value_head_dim"},
    {0, {"pattern=\"*-KEKE+E\""}, &MEG, "head_dim"},
    {0, {"pattern=\"*-KEKE+E\"", "head_dim=16", "qk_norm=false"}, &MEG, "beside MLA"},
    {0, {"pattern=\"G-gEKE+E\""}, &MEG, "gdn"},
    {0, {"pattern=\"K-KEKE+E+EKE\"", "mtp_layers=2", "mtp_blocks=4"}, &MEG, "equal"},
    {0, {"pattern=\"M-KEKE+E\""}, &GPT, "mamba"},
    {0, {"pattern=\"K-KEKE+EKE\"", "mtp_layers=1", "mtp_blocks=2"}, &GPT, "like the last layer"},
    {0, {"pattern=\"KKEE+E\""}, &GPT, "pattern"},
    {0, {"router_normalize=false"}, &MEG, "router_normalize"},
    {0, {"experts_per_token=1"}, &MEG, "router_normalize"},
    {0, {"router_groups=4", "router_group_topk=2"}, &MEG, "moe_router_group_topk"},
    {0, {"router_score=\"softmax\""}, &MEG, "moe_router_enable_expert_bias"},
    {0, {"vocab_size=-"}, &MEG, "vocab_size"},
    {0, {"mla_nope=-"}, &MEG, "mla_nope"},
    {2, {"rope_theta=-"}, &MEG, "rope_theta"},
    {2, {"rope_type=\"yarn\"", "rope_scaling={\"factor\":4,\"alpha\":1}"}, &MEG,
     "rope_scaling.alpha"},
    {2, {"rope_type=\"yarn\"", "rope_scaling={\"factor\":4}"}, &MEG, "rope_scaling"},
};
/* clang-format on */

START_TEST(write_refuses_what_the_dialect_cannot_say)
{
    for (int own = 0; own < 2; own++) {
        ckpt_err err = {0};
        ckpt_json *j = source(unsayable[_i].source), *out = NULL;
        ckpt_json *canon = canon_of(source_layout[unsayable[_i].source], j);
        for (int p = 0; p < 3 && unsayable[_i].patches[p] != NULL; p++)
            patch(canon, unsayable[_i].patches[p]);
        ckpt_status status =
            unsayable[_i].target->config_write(canon, own ? j : NULL, NULL, &out, &err);
        ck_assert_msg(status == CKPT_E_UNSUPPORTED, "%s: status %d: %s", unsayable[_i].patches[0],
                      status, err.text);
        ck_assert_int_eq(err.code, CKPT_E_UNSUPPORTED);
        ck_assert_msg(strstr(err.text, unsayable[_i].message) != NULL, "%s: %s",
                      unsayable[_i].patches[0], err.text);
        ck_assert_ptr_null(out);
        ckpt_json_free(canon);
        ckpt_json_free(j);
    }
}
END_TEST

/* ---- writing --------------------------------------------------------------------------------- */

START_TEST(write_over_the_original_changes_nothing)
{
    ckpt_json *j = source(_i), *canon = canon_of(source_layout[_i], j);
    ckpt_buf a = {0}, b = {0};
    ckpt_json *out = stored_of(source_layout[_i], canon, j, NULL);
    ck_assert(ckpt_json_print(j, 2, false, &a));
    ck_assert(ckpt_json_print(out, 2, false, &b));
    ck_assert_str_eq((const char *)a.data, (const char *)b.data);
    ckpt_buf_release(&a);
    ckpt_buf_release(&b);
    ckpt_json_free(out);
    ckpt_json_free(canon);
    ckpt_json_free(j);
}
END_TEST

START_TEST(write_over_a_changed_model_touches_only_that)
{
    ckpt_json *j = source(0), *canon = canon_of(&HF, j), *want = ckpt_json_dup(j);
    patch(canon, "vocab_size=512");
    patch(canon, "pattern=\"K-KE+EKE\"");
    patch(want, "vocab_size=512");
    patch(want, "linear_attn_config.kda_layers=[1,2,4]");
    patch(want, "linear_attn_config.full_attn_layers=[3]");
    patch(want, "layer_types=[\"linear_attention\",\"linear_attention\",\"full_attention\","
                "\"linear_attention\"]");
    ckpt_json *out = stored_of(&HF, canon, j, NULL);
    expect_equal(out, want);
    ckpt_json_free(out);
    ckpt_json_free(want);
    ckpt_json_free(canon);
    ckpt_json_free(j);
}
END_TEST

/* Same model in every dialect that can say it: one digest. */
START_TEST(conversions_keep_the_digest)
{
    static const struct {
        int source;
        const ckpt_layout *path[3];
    } ways[] = {
        {0, {&MEG, &HF, NULL} },
        {0, {&HF, &MEG, &HF}  },
        {1, {&MEG, &FLA, NULL}},
        {1, {&MEG, &HF, &FLA} },
        {1, {&HF, &MEG, &FLA} },
        {2, {&MEG, &MEG, NULL}},
        {3, {&MEG, &HF, &MEG} },
    };
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        uint8_t before[CKPT_SHA256_LEN], after[CKPT_SHA256_LEN];
        ckpt_err err = {0};
        ckpt_json *j = source(ways[i].source);
        ckpt_json *canon = canon_of(source_layout[ways[i].source], j);
        ck_assert_int_eq(ckpt_config_digest(canon, before, &err), CKPT_OK);
        for (int s = 0; s < 3 && ways[i].path[s] != NULL; s++) {
            ckpt_mesh mesh = {.tp = 2, .pp = 1, .ep = 2, .etp = 1, .cp = 1, .dp = 1};
            ckpt_json *stored = stored_of(ways[i].path[s], canon, NULL, &mesh);
            ck_assert_int_eq(ways[i].path[s]->claims(stored), 1);
            ckpt_json_free(canon);
            canon = canon_of(ways[i].path[s], stored);
            ckpt_json_free(stored);
            ck_assert_int_eq(ckpt_config_digest(canon, after, &err), CKPT_OK);
            ck_assert_mem_eq(before, after, sizeof before);
        }
        ckpt_json_free(canon);
        ckpt_json_free(j);
    }
}
END_TEST

START_TEST(megatron_arguments_of_kimi_linear_are_complete)
{
    ckpt_json *j = source(3), *canon = canon_of(&HF, j);
    ckpt_mesh mesh = {.tp = 8, .pp = 2, .ep = 4, .etp = 0, .cp = 1, .dp = 1};
    static const char *const want[] = {
        "num_layers=54",
        "hidden_size=2304",
        "ffn_hidden_size=9216",
        "num_attention_heads=32",
        "kv_channels=128",
        "vocab_size=163840",
        "padded_vocab_size=163840",
        "make_vocab_size_divisible_by=128",
        "untie_embeddings_and_output_weights=true",
        "norm_epsilon=1e-05",
        "normalization=\"RMSNorm\"",
        "swiglu=true",
        "add_bias_linear=false",
        "init_method_std=0.02",
        "multi_latent_attention=true",
        "q_lora_rank=null",
        "kv_lora_rank=512",
        "qk_head_dim=128",
        "qk_pos_emb_head_dim=64",
        "v_head_dim=128",
        "qk_layernorm=true",
        "position_embedding_type=\"none\"",
        "num_experts=256",
        "moe_ffn_hidden_size=1024",
        "moe_shared_expert_intermediate_size=1024",
        "moe_router_topk=8",
        "moe_router_score_function=\"sigmoid\"",
        "moe_router_enable_expert_bias=true",
        "moe_router_topk_scaling_factor=2.446",
        "moe_grouped_gemm=true",
        "linear_num_key_heads=32",
        "linear_num_value_heads=32",
        "linear_key_head_dim=128",
        "linear_value_head_dim=128",
        "linear_conv_kernel_dim=4",
        "kda_f_lora_rank=128",
        "kda_gate_lora_rank=128",
        "kda_safe_gate=false",
        "tensor_model_parallel_size=8",
        "pipeline_model_parallel_size=2",
        "expert_model_parallel_size=4",
        "expert_tensor_parallel_size=8",
        "context_parallel_size=1",
    };
    ckpt_json *args = stored_of(&MEG, canon, NULL, &mesh), *copy = ckpt_json_dup(args);
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        patch(copy, want[i]);
        expect_equal(args, copy);
    }
    ck_assert_int_eq(ckpt_json_size(ckpt_json_get(args, "no_rope_freq")), 54);
    ckpt_json_free(copy);
    ckpt_json_free(args);
    ckpt_json_free(canon);
    ckpt_json_free(j);
}
END_TEST

/* clang-format off */
static const struct {
    const char *patches[3];
    int tp, pp; /* 0: no mesh given */
    const char *key, *value;
} meshes[] = {
    {{NULL}, 2, 1, "padded_vocab_size", "320"}, /* as stored */
    {{NULL}, 0, 1, "padded_vocab_size", "320"},
    {{NULL}, 1, 1, "padded_vocab_size", "320"},
    {{NULL}, 3, 1, "padded_vocab_size", "384"},
    {{"vocab_size=65535", "padded_vocab_size=65536"}, 2, 1, "padded_vocab_size", "65536"},
    {{"vocab_size=32008", "padded_vocab_size=32128"}, 8, 1, "padded_vocab_size", "32128"},
    {{"vocab_size=32008", "padded_vocab_size=-"}, 8, 1, "padded_vocab_size", "32768"},
    {{"make_vocab_size_divisible_by=64"}, 1, 1, "padded_vocab_size", "320"},
    {{"padded_vocab_size=null"}, 2, 1, "padded_vocab_size", "512"},
    {{NULL}, 1, 1, "tensor_model_parallel_size", "1"},
    {{"tensor_model_parallel_size=-"}, 1, 1, "tensor_model_parallel_size", NULL},
    {{"pipeline_model_parallel_size=2", "hybrid_layer_pattern=\"K-K-|KE+E\""}, 2, 2,
     "hybrid_layer_pattern", "\"K-K-|KE+E\""},
    {{"pipeline_model_parallel_size=2", "hybrid_layer_pattern=\"K-K-|KE+E\""}, 2, 1,
     "hybrid_layer_pattern", "\"K-K-KE+E\""},
    {{"pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"}, 2, 1,
     "virtual_pipeline_model_parallel_size", "null"},
};
/* clang-format on */

START_TEST(megatron_mesh_fields_follow_the_mesh)
{
    ckpt_json *j = source(2);
    for (int p = 0; p < 3 && meshes[_i].patches[p] != NULL; p++)
        patch(j, meshes[_i].patches[p]);
    ckpt_json *canon = canon_of(&MEG, j);
    ckpt_mesh mesh = {.tp = meshes[_i].tp, .pp = meshes[_i].pp, .ep = 1, .cp = 1, .dp = 1};
    ckpt_json *out = stored_of(&MEG, canon, j, meshes[_i].tp == 0 ? NULL : &mesh);
    const ckpt_json *v = ckpt_json_get(out, meshes[_i].key);
    if (meshes[_i].value == NULL) {
        ck_assert_ptr_null(v);
    } else {
        ck_assert_ptr_nonnull(v);
        char *text = text_of(v);
        ck_assert_str_eq(text, meshes[_i].value);
        free(text);
    }
    ckpt_json_free(out);
    ckpt_json_free(canon);
    ckpt_json_free(j);
}
END_TEST

/* ---- any value in any field ------------------------------------------------------------------ */

static const char *const odd[] = {
    "null",
    "true",
    "false",
    "0",
    "1",
    "-1",
    "2",
    "1.5",
    "1e300",
    "9007199254740993e0",
    "\"\"",
    "\"x\"",
    "\"K\"",
    "\"/|\"",
    "[]",
    "{}",
    "[null]",
    "[[1]]",
    "[1,2,3,4,5,6,7,8]",
    "{\"head_dim\":0}",
};

/* One mutated configuration: refused with one line, or a canonical form that is stable under
 * writing over the original and from nothing. */
static int try_mutant(const ckpt_layout *layout, const ckpt_json *j)
{
    ckpt_err err = {0};
    ckpt_json *canon = ckpt_json_new_object(), *out = NULL;
    ckpt_status status = layout->config_read(j, canon, &err);
    if (status != CKPT_OK) {
        ck_assert(status == CKPT_E_FORMAT || status == CKPT_E_UNSUPPORTED);
        ck_assert(err.code == status && err.text[0] != '\0' && strchr(err.text, '\n') == NULL);
        ckpt_json_free(canon);
        return 0;
    }
    for (int own = 0; own < 2; own++) {
        status = layout->config_write(canon, own ? j : NULL, NULL, &out, &err);
        if (status != CKPT_OK) {
            ck_assert_msg(status == CKPT_E_UNSUPPORTED, "%s", err.text);
            ck_assert_msg(strstr(err.text, "not known") != NULL, "%s", err.text);
            continue;
        }
        ckpt_json *back = canon_of(layout, out);
        expect_equal(back, canon);
        if (own && layout->claims(j) > 0 && layout != &MEG)
            expect_equal(out, j);
        ckpt_json_free(back);
        ckpt_json_free(out);
        out = NULL;
    }
    ckpt_json_free(canon);
    return 1;
}

static int mutate_members(const ckpt_layout *layout, ckpt_json *root, const char *prefix)
{
    int read = 0;
    char keys[128][64];
    int n = 0;
    ckpt_json *object = prefix[0] != '\0' ? ckpt_json_get(root, prefix) : root;
    for (const ckpt_json *c = ckpt_json_child(object); c != NULL && n < 128; c = ckpt_json_next(c))
        snprintf(keys[n++], sizeof keys[0], "%s", ckpt_json_key(c));
    for (int k = 0; k < n; k++)
        for (size_t v = 0; v < sizeof odd / sizeof odd[0]; v++) {
            ckpt_json *copy = ckpt_json_dup(root), *value = NULL;
            ckpt_err err = {0};
            if (ckpt_json_parse(odd[v], strlen(odd[v]), &value, &err) == CKPT_OK) {
                ck_assert(ckpt_json_set(prefix[0] != '\0' ? ckpt_json_get(copy, prefix) : copy,
                                        keys[k], value));
                read += try_mutant(layout, copy);
            }
            ckpt_json_free(copy);
        }
    return read;
}

START_TEST(any_value_in_any_field_is_refused_or_stable)
{
    ckpt_json *j = source(_i);
    int read = mutate_members(source_layout[_i], j, "");
    if (_i == 0 || _i == 3)
        read += mutate_members(source_layout[_i], j, "linear_attn_config");
    ck_assert_int_gt(read, 50);
    ckpt_json_free(j);
}
END_TEST

Suite *suite_families(void);
Suite *suite_families(void)
{
    Suite *s = suite_create("families");
    TCase *t = tcase_create("tables");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, layout_tables_pass_their_check);
    tcase_add_test(t, schema_names_are_unique_and_each_is_stored_somewhere);
    tcase_add_test(t, default_tags_choose_one_row_a_tensor);
    tcase_add_test(t, views_have_the_shape_of_the_schema);
    tcase_add_test(t, rows_match_every_tensor_of_the_fixtures);
    tcase_add_loop_test(t, rows_match_every_tensor_of_megatron, 0, 3);
    tcase_add_test(t, claims_know_their_own_configuration_only);
    suite_add_tcase(s, t);
    t = tcase_create("configurations");
    tcase_set_timeout(t, 30);
    tcase_add_loop_test(t, read_gives_the_canonical_configuration, 0, N_SOURCES);
    tcase_add_loop_test(t, read_variant_gives_the_expected_value, 0,
                        sizeof reads / sizeof reads[0]);
    tcase_add_loop_test(t, read_refusal_names_the_field, 0, sizeof refused / sizeof refused[0]);
    tcase_add_loop_test(t, write_refuses_what_the_dialect_cannot_say, 0,
                        sizeof unsayable / sizeof unsayable[0]);
    tcase_add_loop_test(t, write_over_the_original_changes_nothing, 0, N_SOURCES);
    tcase_add_test(t, write_over_a_changed_model_touches_only_that);
    tcase_add_test(t, conversions_keep_the_digest);
    tcase_add_test(t, megatron_arguments_of_kimi_linear_are_complete);
    tcase_add_loop_test(t, megatron_mesh_fields_follow_the_mesh, 0,
                        sizeof meshes / sizeof meshes[0]);
    tcase_add_loop_test(t, any_value_in_any_field_is_refused_or_stable, 0, N_SOURCES);
    suite_add_tcase(s, t);
    return s;
}
