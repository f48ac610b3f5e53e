/* Megatron layouts by value: what lies where in stacked, grouped, fused and shifted tensors, read from
 * checkpoints of real Megatron-Core and from memory. */
#include "families/hybrid.h"
#include "checked.h"
#include "gather.h"
#include "plan.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct opened {
    ckpt_source src, plain;
    ckpt_model model;
} opened;

static void open_fixture(opened *o, const char *name)
{
    char path[256];
    ckpt_err err = {0};
    snprintf(path, sizeof path, CKPT_FIXTURES "/mcore/%s", name);
    ck_assert_msg(ckpt_source_open(&o->src, path, NULL, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(ckpt_model_bind(&o->model, &o->src, NULL, &err) == CKPT_OK, "%s", err.text);
    snprintf(path, sizeof path, CKPT_FIXTURES "/mcore/%s.plain.safetensors", name);
    ck_assert_msg(ckpt_source_open(&o->plain, path, NULL, &err) == CKPT_OK, "%s", err.text);
}

static void close_fixture(opened *o)
{
    ckpt_model_release(&o->model);
    ckpt_source_close(&o->src);
    ckpt_source_close(&o->plain);
}

static float *canonical(const opened *o, const char *name, size_t *n)
{
    ckpt_err err = {0};
    int64_t i = ckpt_model_find(&o->model, name);
    ck_assert_msg(i >= 0, "%s is missing", name);
    size_t bytes = (size_t)o->model.tensors[i].bytes;
    float *v = malloc(bytes);
    ck_assert_ptr_nonnull(v);
    ck_assert_int_eq(ckpt_model_read(&o->model, (size_t)i, 0, bytes, v, &err), CKPT_OK);
    *n = bytes / sizeof *v;
    return v;
}

static float *stored(opened *o, const char *name)
{
    ckpt_err err = {0};
    int64_t i = ckpt_source_find(&o->plain, name), numel;
    ck_assert_msg(i >= 0, "%s is missing", name);
    const ckpt_tensor *t = &o->plain.tensors[i];
    ck_assert(ckpt_numel(t->rank, t->dims, &numel));
    float *v = malloc((size_t)numel * sizeof *v);
    ck_assert_ptr_nonnull(v);
    ck_assert_int_eq(ckpt_source_read(&o->plain, t->chunks[0].file, v, (size_t)numel * sizeof *v,
                                      t->chunks[0].offset, &err),
                     CKPT_OK);
    return v;
}

/* ---- fixtures -------------------------------------------------------------------------------- */

static const struct {
    const char *name, *layout, *pattern;
    size_t tensors;
    int n_main;
} models[] = {
    {"gpt_dense",   "megatron:gpt",    "*-*-*-",     36,  6},
    {"gpt_relu2",   "megatron:gpt",    "*-*-*-",     35,  6},
    {"gpt_moe",     "megatron:gpt",    "*-*E*E",     56,  6},
    {"gpt_moe_all", "megatron:gpt",    "*E*E*E",     69,  6},
    {"gpt_mla_mtp", "megatron:gpt",    "+-+E+E+E+E", 127, 6},
    {"hybrid_attn", "megatron:hybrid", "M*-M",       46,  4},
};

START_TEST(fixture_binds_with_its_layers)
{
    opened o = {0};
    open_fixture(&o, models[_i].name);
    ck_assert_str_eq(o.model.layout->name, models[_i].layout);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(o.model.config, "pattern")),
                     models[_i].pattern);
    ck_assert_uint_eq(o.model.n_tensors, models[_i].tensors);
    ck_assert_int_eq(o.model.n_main, models[_i].n_main);
    ck_assert_int_eq(o.model.n_blocks, (int)strlen(models[_i].pattern));
    close_fixture(&o);
}
END_TEST

/* Layer l of a stacked linear_qkv [L, (n + 2g) d, H]: group a holds r query heads, a key and a value
 * head (conversion-maps.md section 2, qkv). */
START_TEST(stacked_queries_keys_and_values_lie_by_group)
{
    enum { L = 3, G = 2, R = 2, D = 8, H = 32 };
    opened o = {0};
    open_fixture(&o, "gpt_dense");
    float *all = stored(&o, "decoder.layers.self_attention.linear_qkv.weight");
    for (int l = 0; l < L; l++) {
        const float *w = all + (size_t)l * G * (R + 2) * D * H;
        const char *const part[] = {"q", "k", "v"};
        for (int p = 0; p < 3; p++) {
            char name[64];
            size_t n;
            int heads = p == 0 ? R : 1, first = p == 0 ? 0 : R + p - 1;
            snprintf(name, sizeof name, "blocks.%d.attn.%s.weight", 2 * l, part[p]);
            float *v = canonical(&o, name, &n);
            ck_assert_uint_eq(n, (size_t)G * (size_t)heads * D * H);
            for (int a = 0; a < G; a++)
                ck_assert_mem_eq(v + (size_t)a * (size_t)heads * D * H,
                                 w + (size_t)(a * (R + 2) + first) * D * H,
                                 (size_t)heads * D * H * sizeof *v);
            free(v);
        }
    }
    free(all);
    close_fixture(&o);
}
END_TEST

/* Expert e of layer l in [L, E, 2F, H]: gate rows, then up rows. */
START_TEST(stacked_experts_lie_by_layer_and_expert)
{
    enum { L = 3, E = 4, F = 16, H = 32 };
    opened o = {0};
    open_fixture(&o, "gpt_moe_all");
    float *fc1 = stored(&o, "decoder.layers.mlp.experts.experts.linear_fc1.weight");
    float *fc2 = stored(&o, "decoder.layers.mlp.experts.experts.linear_fc2.weight");
    for (int l = 0; l < L; l++)
        for (int e = 0; e < E; e++)
            for (int p = 0; p < 3; p++) {
                const char *const part[] = {"gate", "up", "down"};
                char name[64];
                size_t n, at = (size_t)(l * E + e) * F * H;
                snprintf(name, sizeof name, "blocks.%d.moe.experts.%d.%s.weight", 2 * l + 1, e,
                         part[p]);
                float *v = canonical(&o, name, &n);
                ck_assert_uint_eq(n, F * H);
                const float *want = p < 2 ? fc1 + 2 * at + (size_t)p * F * H : fc2 + at;
                ck_assert_mem_eq(v, want, F * H * sizeof *v);
                free(v);
            }
    free(fc1);
    free(fc2);
    close_fixture(&o);
}
END_TEST

/* ---- shifted values -------------------------------------------------------------------------- */

/* A source in memory with one file of floats. */
typedef struct shifted {
    float values[8];
    ckpt_file file;
    ckpt_tensor tensor;
    ckpt_chunk chunk;
    int64_t dims[1], lo[1];
    ckpt_source src;
} shifted;

static ckpt_status read_values(ckpt_source *src, uint32_t file, void *buf, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    const shifted *s = src->self;
    (void)file;
    (void)err;
    memcpy(buf, (const uint8_t *)s->values + offset, n);
    return CKPT_OK;
}

START_TEST(shifted_value_is_read_plain_at_any_window)
{
    const float want[] = {1.0f, 1.5f, 0.75f, 3.0f, 0.0f, 1.0f + 0x1p-20f, -2.0f, 8.0f};
    shifted s = {.dims = {8}};
    for (int i = 0; i < 8; i++)
        s.values[i] = want[i] - 1;
    s.file = (ckpt_file){.name = "x", .path = "x", .size = sizeof s.values, .fd = -1};
    s.chunk = (ckpt_chunk){.lo = s.lo, .len = s.dims};
    s.tensor = (ckpt_tensor){.name = "x",
                             .dims = s.dims,
                             .chunks = &s.chunk,
                             .n_chunks = 1,
                             .dtype = CKPT_F32,
                             .rank = 1};
    s.src = (ckpt_source){.files = &s.file,
                          .n_files = 1,
                          .tensors = &s.tensor,
                          .n_tensors = 1,
                          .read_at = read_values,
                          .self = &s};
    ckpt_axis axis = {.size = 8, .len = 8};
    ckpt_canon c = {
        .name = "x",
        .dims = s.dims,
        .rank = 1,
        .dtype = CKPT_F32,
        .bytes = sizeof want,
        .map = {&axis, 1},
        .block = -1,
        .shift = ckpt_view_shift("B ; -1")
    };
    ckpt_arena arena = {0};
    ckpt_gather g;
    ckpt_err err = {0};
    uint8_t out[sizeof want], room[4096];
    ckpt_scratch scratch = {room, sizeof room};
    ck_assert_int_eq(ckpt_gather_canon(&s.src, &c, &arena, &g, &err), CKPT_OK);
    for (size_t lo = 0; lo < sizeof want; lo++)
        for (size_t n = 1; lo + n <= sizeof want; n++) {
            ck_assert_int_eq(ckpt_gather_run(&s.src, &g, lo, n, out, &scratch, &err), CKPT_OK);
            ck_assert_mem_eq(out, (const uint8_t *)want + lo, n);
        }
    g.add_to = -1; /* and stored again */
    ck_assert_int_eq(ckpt_gather_run(&s.src, &g, 0, sizeof out, out, &scratch, &err), CKPT_OK);
    ck_assert_mem_eq(out, s.values, sizeof out);
    g.to = CKPT_BF16; /* cast, then shifted in the new type */
    ck_assert_int_eq(ckpt_gather_run(&s.src, &g, 0, 16, out, &scratch, &err), CKPT_OK);
    for (int i = 0; i < 8; i++)
        ck_assert(ckpt_dtype_load(CKPT_BF16, out, i) == (i == 5 ? 0.0 : (double)want[i] - 1));
    ckpt_arena_free(&arena);
}
END_TEST

/* ---- arguments ------------------------------------------------------------------------------- */

/* clang-format off */
static const char base[] =
    "{\"num_layers\":4,\"hidden_size\":32,\"num_attention_heads\":4,\"ffn_hidden_size\":48,"
    "\"vocab_size\":64,\"padded_vocab_size\":64,\"swiglu\":true,\"normalization\":\"RMSNorm\","
    "\"untie_embeddings_and_output_weights\":true";
static const struct {
    const char *more, *key, *value, *tags; /* value NULL: refused, tags is part of the message */
} args[] = {
    {"", "pattern", "\"*-*-*-*-\"", "layers=stacked"},
    {"", "kv_heads", "4", "layers=stacked"},
    {"", "head_dim", "8", "layers=stacked"},
    {",\"num_query_groups\":1,\"group_query_attention\":false", "kv_heads", "4", "layers=stacked"},
    {",\"num_query_groups\":2,\"group_query_attention\":true", "kv_heads", "2", "layers=stacked"},
    {",\"num_experts\":4,\"moe_router_topk\":2", "pattern", "\"*E*E*E*E\"", "layers=stacked"},
    {",\"num_experts\":4,\"moe_layer_freq\":2", "pattern", "\"*E*-*E*-\"", "layers=single"},
    {",\"num_experts\":4,\"moe_layer_freq\":[1,1,1,1]", "pattern", "\"*E*E*E*E\"", "layers=single"},
    {",\"num_experts\":4,\"moe_layer_freq\":[0,1,1]", "pattern", NULL, "3 entries for 4 layers"},
    {",\"num_experts\":4,\"moe_layer_freq\":[0,1,1,2]", "pattern", NULL, "neither 0 nor 1"},
    {",\"num_experts\":4,\"moe_layer_freq\":0", "pattern", NULL, "moe_layer_freq"},
    {",\"experimental_attention_variant\":\"gated_delta_net\",\"linear_attention_freq\":4,"
     "\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,\"linear_key_head_dim\":8,"
     "\"linear_value_head_dim\":8", "pattern", "\"G-G-G-*-\"", "layers=single"},
    {",\"experimental_attention_variant\":\"gdn\",\"linear_attention_freq\":[1,0,0,1],"
     "\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,\"linear_key_head_dim\":8,"
     "\"linear_value_head_dim\":8", "pattern", "\"G-*-*-G-\"", "layers=single"},
    {",\"experimental_attention_variant\":\"gdn\"", "pattern", NULL, "linear_attention_freq"},
    {",\"experimental_attention_variant\":\"dsa\"", "pattern", NULL, "dsa"},
    {",\"mtp_num_layers\":2,\"num_experts\":4,\"moe_layer_freq\":[0,1,1,1]", "pattern",
     "\"*-*E*E*E*E*E\"", "layers=single"},
    {",\"use_rope_scaling\":true", "rope_type", "\"llama3\"", "layers=stacked"},
    {",\"use_rope_scaling\":true,\"rope_scaling_factor\":32", "rope_scaling",
     "{\"factor\":32,\"high_freq_factor\":4,\"low_freq_factor\":1,"
     "\"original_max_position_embeddings\":8192}", "layers=stacked"},
    {",\"rotary_percent\":0.25", "rope_percent", "0.25", "layers=stacked"},
    {",\"position_embedding_type\":\"none\"", "attn_nope", "true", "layers=stacked"},
    {",\"no_rope_freq\":[1,0,0,0]", "attn_nope", NULL, "no_rope_freq"},
    {",\"add_qkv_bias\":true", "attn_bias", "true", "layers=stacked"},
    {",\"add_qkv_bias\":true,\"attention_output_gate\":true", "attn_bias", NULL, "add_qkv_bias"},
    {",\"attention_output_gate\":true", "attn_gate", "true", "layers=stacked"},
    {",\"window_size\":[128,0]", "pattern", NULL, "window_size"},
    {",\"rotary_interleaved\":true", "pattern", NULL, "rotary_interleaved"},
};
/* clang-format on */

START_TEST(arguments_are_read_and_written_back)
{
    char text[2048], *value = NULL;
    ckpt_err err = {0};
    ckpt_json *j = NULL, *canon = ckpt_json_new_object(), *out = NULL, *again;
    const ckpt_layout *gpt = &ckpt_layout_megatron_gpt;
    snprintf(text, sizeof text, "%s%s}", base, args[_i].more);
    ck_assert_int_eq(ckpt_json_parse(text, strlen(text), &j, &err), CKPT_OK);
    ckpt_status status = gpt->config_read(j, canon, &err);
    if (args[_i].value == NULL) {
        ck_assert_int_ne(status, CKPT_OK);
        ck_assert_msg(strstr(err.text, args[_i].tags) != NULL, "%s", err.text);
        ckpt_json_free(canon);
        ckpt_json_free(j);
        return;
    }
    ck_assert_msg(status == CKPT_OK, "%s: %s", args[_i].more, err.text);
    ckpt_buf buf = {0}, tags = {0};
    ck_assert(ckpt_json_print(ckpt_json_get(canon, args[_i].key), 0, true, &buf));
    value = (char *)buf.data;
    ck_assert_str_eq(value, args[_i].value);
    gpt->choices_written(j, &tags);
    ck_assert_str_eq((char *)tags.data, args[_i].tags);
    /* over itself nothing changes; from nothing it means the same */
    ckpt_json_set(canon, "init_std", ckpt_json_new_double(0.02));
    for (int own = 0; own < 2; own++) {
        status = gpt->config_write(canon, own ? j : NULL, NULL, &out, &err);
        ck_assert_msg(status == CKPT_OK, "%s: %s", args[_i].more, err.text);
        again = ckpt_json_new_object();
        ck_assert_int_eq(gpt->config_read(out, again, &err), CKPT_OK);
        ck_assert(ckpt_json_equal(again, canon));
        ck_assert(!own || ckpt_json_equal(out, j));
        ckpt_json_free(again);
        ckpt_json_free(out);
    }
    ckpt_buf_release(&buf);
    ckpt_buf_release(&tags);
    ckpt_json_free(canon);
    ckpt_json_free(j);
}
END_TEST

Suite *suite_megatron(void);
Suite *suite_megatron(void)
{
    Suite *s = suite_create("megatron");
    TCase *t = tcase_create("values");
    tcase_set_timeout(t, 30);
    tcase_add_loop_test(t, fixture_binds_with_its_layers, 0, sizeof models / sizeof models[0]);
    tcase_add_test(t, stacked_queries_keys_and_values_lie_by_group);
    tcase_add_test(t, stacked_experts_lie_by_layer_and_expert);
    tcase_add_test(t, shifted_value_is_read_plain_at_any_window);
    suite_add_tcase(s, t);
    t = tcase_create("arguments");
    tcase_add_loop_test(t, arguments_are_read_and_written_back, 0, sizeof args / sizeof args[0]);
    suite_add_tcase(s, t);
    return s;
}
