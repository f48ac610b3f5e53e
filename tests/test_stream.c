/* Plans and the executor on real fixtures: bytes and digests do not depend on threads or memory,
 * digests say what files hold, casts and folds have the right values, refusals are refusals. */
#include "derive.h"
#include "manifest.h"
#include "stream_internal.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KIMI CKPT_FIXTURES "/hf/kimi_linear_tiny"
#define LEGACY CKPT_FIXTURES "/mcore/legacy_tp2"
#define FLA CKPT_FIXTURES "/fla/kda_trained"

static char base[40];

static void make_base(void)
{
    snprintf(base, sizeof base, "/tmp/ckpt-stream-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(base));
}

static void drop_base(void)
{
    ckpt_remove_tree(base);
}

typedef struct opened {
    ckpt_source src;
    ckpt_model model;
} opened;

static void open_model(opened *o, const char *path)
{
    ckpt_err err = {0};
    ckpt_open_opts opts = {.iteration = -1};
    ck_assert_msg(ckpt_source_open(&o->src, path, &opts, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(ckpt_model_bind(&o->model, &o->src, NULL, &err) == CKPT_OK, "%s", err.text);
}

static void close_model(opened *o)
{
    ckpt_model_release(&o->model);
    ckpt_source_close(&o->src);
}

static const ckpt_layout *layout_of(const char *group)
{
    for (size_t i = 0; ckpt_layouts[i] != NULL; i++)
        if (strcmp(ckpt_layouts[i]->group, group) == 0)
            return ckpt_layouts[i];
    return NULL;
}

static ckpt_convert_opts options(const char *container, const char *group, int tp, int ep)
{
    ckpt_convert_opts o = {
        .container = ckpt_container_find(container),
        .layout = layout_of(group),
        .mesh = {tp, 1, ep, 0, 1, 1}
    };
    ck_assert_ptr_nonnull(o.container);
    ck_assert_int_eq(ckpt_mesh_resolve(&o.mesh, NULL), CKPT_OK);
    o.sharded = strcmp(container, "torch_dist") == 0;
    return o;
}

/* Convert into base/name; digests of the files, one after another, into all[n*32]. */
static size_t convert(const char *src, const char *name, const ckpt_convert_opts *opts,
                      const ckpt_stream_opts *stream, uint8_t root[32], uint8_t *all)
{
    opened o;
    ckpt_plan plan;
    ckpt_arena arena = {0};
    ckpt_convert_result result;
    ckpt_err err = {0};
    char dir[128];
    open_model(&o, src);
    snprintf(dir, sizeof dir, "%s/%s", base, name);
    ck_assert_int_eq(ckpt_mkdirs(dir, &err), CKPT_OK);
    ck_assert_msg(ckpt_plan_convert(&plan, &o.model, opts, &err) == CKPT_OK, "%s", err.text);
    ckpt_status status = ckpt_stream_convert(&plan, dir, stream, &arena, &result, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);
    memcpy(root, result.root, 32);
    size_t n = plan.sink.n_files;
    for (size_t f = 0; f < n && all != NULL; f++)
        memcpy(all + 32 * f, result.files[f].sha256, 32);
    if (opts->cast == CKPT_CAST_KEEP && !opts->fold_f)
        ck_assert_mem_eq(result.root, result.source_root, 32);
    else
        ck_assert_mem_ne(result.root, result.source_root, 32);
    ck_assert_uint_le(result.buffer_bytes, stream->memory);
    ckpt_plan_release(&plan);
    close_model(&o);
    ckpt_arena_free(&arena);
    return n;
}

static const ckpt_stream_opts plain_stream = {.threads = 2, .memory = (uint64_t)64 << 20};

START_TEST(convert_bytes_do_not_depend_on_threads_or_memory)
{
    static const ckpt_stream_opts ways[] = {
        {.threads = 1, .memory = (uint64_t)1 << 30,  .beside = 0 },
        {.threads = 2, .memory = (uint64_t)8 << 20,  .beside = 0 },
        {.threads = 7, .memory = (uint64_t)64 << 20, .beside = 0 },
        {.threads = 3, .memory = (uint64_t)1 << 19,  .beside = 0 },
        {.threads = 3, .memory = (uint64_t)64 << 20, .beside = 1 },
        {.threads = 2, .memory = (uint64_t)8 << 20,  .beside = 1 },
        {.threads = 4, .memory = (uint64_t)64 << 20, .beside = -1}
    };
    ckpt_convert_opts o = options("torch_dist", "megatron", 2, 2);
    uint8_t first[32 * 32], again[32 * 32], root[32], root2[32];
    make_base();
    size_t n = convert(KIMI, "0", &o, &ways[0], root, first);
    ck_assert_uint_lt(n, 32);
    for (size_t i = 1; i < sizeof ways / sizeof *ways; i++) {
        char name[16];
        snprintf(name, sizeof name, "%zu", i);
        ck_assert_uint_eq(convert(KIMI, name, &o, &ways[i], root2, again), n);
        ck_assert_mem_eq(first, again, 32 * n);
        ck_assert_mem_eq(root, root2, 32);
    }
    drop_base();
}
END_TEST

START_TEST(convert_digests_say_what_the_files_hold)
{
    opened src, out;
    ckpt_plan plan;
    ckpt_arena arena = {0};
    ckpt_convert_result result;
    ckpt_err err = {0};
    uint8_t root[32];
    make_base();
    ckpt_convert_opts o = options("torch_dist", "megatron", 2, 1);
    open_model(&src, KIMI); /* 320 rows become 512: padding belongs to `rest` */
    ck_assert_msg(ckpt_plan_convert(&plan, &src.model, &o, &err) == CKPT_OK, "%s", err.text);
    ck_assert_int_eq(ckpt_stream_convert(&plan, base, &plain_stream, &arena, &result, &err),
                     CKPT_OK);
    open_model(&out, base);
    ckpt_tensor_hash *hashes = calloc(out.model.n_tensors, sizeof *hashes);
    ckpt_file_hash *files = calloc(out.src.n_files, sizeof *files);
    ckpt_file_hash *rest = calloc(out.src.n_files, sizeof *rest);
    ck_assert_int_eq(ckpt_stream_digest(&out.model, &plain_stream, &arena, hashes, root, &err),
                     CKPT_OK);
    ck_assert_mem_eq(root, result.root, 32);
    memset(root, 0, sizeof root);
    memset(hashes, 0, out.model.n_tensors * sizeof *hashes);
    ck_assert_int_eq(ckpt_stream_rest(&out.model, &plain_stream, rest, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_stream_verify(&out.model, 0, out.model.n_tensors, &plain_stream, &arena,
                                        hashes, files, root, &err),
                     CKPT_OK);
    ck_assert_mem_eq(root, result.root, 32);
    ck_assert_uint_eq(out.model.n_tensors, plan.n_results);
    for (size_t i = 0; i < plan.n_results; i++)
        ck_assert_mem_eq(hashes[i].digest, result.tensors[i].digest, 32);
    int seen = 0;
    for (size_t i = 0; i < out.src.n_files; i++)
        for (size_t f = 0; f < plan.sink.n_files; f++) {
            const char *name = strrchr(plan.sink.files[f].name, '/');
            if (strcmp(out.src.files[i].name, name != NULL ? name + 1 : plan.sink.files[f].name))
                continue;
            ck_assert_mem_eq(files[i].sha256, result.files[f].sha256, 32);
            ck_assert_mem_eq(files[i].rest, result.files[f].rest, 32);
            ck_assert_mem_eq(rest[i].rest, result.files[f].rest, 32);
            ck_assert_uint_eq(rest[i].size, files[i].size);
            seen++;
        }
    ck_assert_int_ge(seen, 4);
    free(hashes);
    free(files);
    free(rest);
    ckpt_plan_release(&plan);
    close_model(&src);
    close_model(&out);
    ckpt_arena_free(&arena);
    drop_base();
}
END_TEST

static float element(const opened *o, const char *name, int64_t i)
{
    ckpt_err err = {0};
    uint8_t raw[8];
    int64_t t = ckpt_model_find(&o->model, name);
    ck_assert_msg(t >= 0, "%s", name);
    ckpt_dtype dtype = o->model.tensors[t].dtype;
    size_t size = (size_t)ckpt_dtype_get(dtype)->bits / 8;
    ck_assert_int_eq(ckpt_model_read(&o->model, (size_t)t, (uint64_t)i * size, size, raw, &err),
                     CKPT_OK);
    return (float)ckpt_dtype_load(dtype, raw, 0);
}

START_TEST(convert_cast_rounds_weights_and_keeps_the_keep_list)
{
    opened src, out;
    ckpt_convert_opts o = options("safetensors", "hf", 1, 1);
    uint8_t root[32];
    char path[128];
    make_base();
    o.cast = CKPT_CAST_TO;
    o.dtype = CKPT_BF16;
    convert(KIMI, "bf16", &o, &plain_stream, root, NULL);
    snprintf(path, sizeof path, "%s/bf16", base);
    open_model(&src, KIMI);
    open_model(&out, path);
    for (size_t i = 0; i < out.model.n_tensors; i++) {
        const ckpt_canon *c = &out.model.tensors[i];
        bool kept = (c->flags & CKPT_SCHEMA_KEEP_F32) != 0;
        ck_assert_msg(c->dtype == (kept ? CKPT_F32 : CKPT_BF16), "%s", c->name);
    }
    for (int64_t i = 0; i < 50; i++) {
        float want = element(&src, "blocks.0.kda.q.weight", i);
        float got = element(&out, "blocks.0.kda.q.weight", i);
        ck_assert_float_le(fabsf(want - got), fabsf(want) / 256);
        ck_assert_float_eq(element(&src, "blocks.0.kda.dt_bias", i),
                           element(&out, "blocks.0.kda.dt_bias", i));
    }
    close_model(&src);
    close_model(&out);
    drop_base();
}
END_TEST

START_TEST(convert_fold_is_the_product)
{
    opened src, out;
    ckpt_convert_opts o = options("torch_dist", "megatron", 2, 1);
    uint8_t root[32];
    char path[128];
    make_base();
    o.approximate = o.fold_f = o.fold_g = true;
    convert(KIMI, "fold", &o, &plain_stream, root, NULL);
    snprintf(path, sizeof path, "%s/fold", base);
    open_model(&src, KIMI);
    open_model(&out, path);
    ck_assert_int_lt(ckpt_model_find(&out.model, "blocks.0.kda.f_a.weight"), 0);
    ck_assert_int_ge(ckpt_source_find(&out.src, "decoder.layers.0.self_attention.in_proj.weight.g"),
                     0);
    for (int row = 0; row < 64; row += 21)
        for (int col = 0; col < 64; col += 13) {
            double sum = 0;
            for (int k = 0; k < 32; k++)
                sum += (double)element(&src, "blocks.0.kda.f_b.weight", row * 32 + k) *
                       (double)element(&src, "blocks.0.kda.f_a.weight", k * 64 + col);
            ck_assert_float_eq(element(&out, "blocks.0.kda.f.weight", row * 64 + col), (float)sum);
        }
    ckpt_json *f_rank = ckpt_json_get(out.model.config, "kda_f_rank");
    ck_assert_ptr_null(f_rank);
    close_model(&src);
    close_model(&out);
    drop_base();
}
END_TEST

typedef struct refusal {
    const char *src, *group;
    int tp, ep;
    int what; /* 1 fold without --approximate, 2 rank of a full matrix, 3 another rank */
    ckpt_status status;
    const char *text;
} refusal;

static const refusal refusals[] = {
    {FLA,    "megatron", 1, 1, 0, CKPT_E_UNSUPPORTED, "'model.layers.0.attn.g_proj.1.bias'"},
    {LEGACY, "hf",       1, 1, 0, CKPT_E_UNSUPPORTED, "configuration"                      },
    {KIMI,   "megatron", 3, 1, 0, CKPT_E_USAGE,       "is not divisible by TP 3"           },
    {KIMI,   "megatron", 1, 3, 0, CKPT_E_USAGE,       "experts 8 is not divisible by EP 3" },
    {KIMI,   "megatron", 1, 1, 1, CKPT_E_UNSUPPORTED, "--approximate permits it"           },
    {LEGACY, "megatron", 1, 1, 2, CKPT_E_UNSUPPORTED, "is full rank: cutting it to rank 16"},
    {KIMI,   "megatron", 1, 1, 3, CKPT_E_UNSUPPORTED, "has rank 32"                        },
};

START_TEST(convert_what_cannot_be_said_is_refused_by_name)
{
    const refusal *r = &refusals[_i];
    opened o;
    ckpt_plan plan;
    ckpt_err err = {0};
    ckpt_convert_opts opts = options("torch_dist", r->group, r->tp, r->ep);
    opts.fold_f = r->what == 1;
    opts.f_rank = r->what == 2 ? 16 : r->what == 3 ? 8 : 0;
    open_model(&o, r->src);
    ckpt_status status = ckpt_plan_convert(&plan, &o.model, &opts, &err);
    ck_assert_msg(status == r->status, "%d: %s", status, err.text);
    ck_assert_msg(strstr(err.text, r->text) != NULL, "%s", err.text);
    close_model(&o);
}
END_TEST

/* A Megatron checkpoint whose padding rows are not zero: they are dropped with a warning. */
START_TEST(convert_nonzero_padding_is_reported)
{
    opened o;
    ckpt_plan plan;
    ckpt_err err = {0};
    uint8_t root[32];
    char path[128];
    ckpt_convert_opts opts = options("safetensors", "megatron", 1, 1);
    make_base();
    convert(KIMI, "m", &opts, &plain_stream, root, NULL);
    snprintf(path, sizeof path, "%s/m", base);
    open_model(&o, path);
    int64_t t = ckpt_source_find(&o.src, "output_layer.weight");
    ck_assert_int_ge(t, 0);
    ck_assert_int_eq(o.src.tensors[t].dims[0], 384);
    snprintf(path, sizeof path, "%s", o.src.files[o.src.tensors[t].chunks[0].file].path);
    uint64_t at = o.src.tensors[t].chunks[0].offset + 4 * (383 * 64 + 5);
    close_model(&o);
    FILE *f = fopen(path, "r+b");
    float v = -0.5f;
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fseek(f, (long)at, SEEK_SET), 0);
    ck_assert_uint_eq(fwrite(&v, 4, 1, f), 1);
    fclose(f);
    snprintf(path, sizeof path, "%s/m", base);
    open_model(&o, path);
    opts = options("safetensors", "hf", 1, 1);
    ck_assert_msg(ckpt_plan_convert(&plan, &o.model, &opts, &err) == CKPT_OK, "%s", err.text);
    ck_assert_uint_eq(plan.n_warnings, 1);
    ck_assert_str_eq(plan.warnings[0], "'output_layer.weight': padding rows 320 to 383 hold 1 "
                                       "non-zero values (max abs 0.5); they are dropped");
    ckpt_plan_release(&plan);
    close_model(&o);
    drop_base();
}
END_TEST

/* The fixture with another vocabulary; only shapes matter to a plan. */
START_TEST(convert_vocabulary_pads_by_megatrons_rule)
{
    static const struct {
        int64_t vocab;
        int tp;
        int64_t padded;
    } rows[] = {
        {65535, 2, 65536},
        {32008, 2, 32256},
        {320,   1, 384  },
        {320,   8, 1024 }
    };
    static const char *const names[] = {"model.embed_tokens.weight", "lm_head.weight"};
    int64_t dims[2] = {rows[_i].vocab, 64};
    opened o;
    ckpt_plan plan;
    ckpt_err err = {0};
    ckpt_open_opts open_opts = {.iteration = -1};
    ck_assert_int_eq(ckpt_source_open(&o.src, KIMI, &open_opts, &err), CKPT_OK);
    for (int i = 0; i < 2; i++) {
        ckpt_tensor *t = &o.src.tensors[ckpt_source_find(&o.src, names[i])];
        t->dims = t->chunks[0].len = dims;
    }
    ck_assert(ckpt_json_set(o.src.config, "vocab_size", ckpt_json_new_int(rows[_i].vocab)));
    ck_assert_msg(ckpt_model_bind(&o.model, &o.src, NULL, &err) == CKPT_OK, "%s", err.text);
    ckpt_convert_opts opts = options("torch_dist", "megatron", rows[_i].tp, 1);
    ck_assert_msg(ckpt_plan_convert(&plan, &o.model, &opts, &err) == CKPT_OK, "%s", err.text);
    int seen = 0;
    for (size_t i = 0; i < plan.out.n_tensors; i++) {
        const ckpt_out_tensor *t = &plan.out.tensors[i];
        if (strcmp(t->name, "embedding.word_embeddings.weight") != 0 &&
            strcmp(t->name, "output_layer.weight") != 0)
            continue;
        ck_assert_int_eq(t->dims[0], rows[_i].padded);
        ck_assert_uint_eq(t->n_chunks, (size_t)rows[_i].tp);
        seen++;
    }
    ck_assert_int_eq(seen, 2);
    int64_t embed = ckpt_model_find(&o.model, "embed.weight");
    ck_assert_int_eq(o.model.tensors[embed].dims[0], rows[_i].vocab);
    ckpt_plan_release(&plan);
    close_model(&o);
}
END_TEST

START_TEST(convert_interrupted_says_so)
{
    opened o;
    ckpt_plan plan;
    ckpt_arena arena = {0};
    ckpt_convert_result result;
    ckpt_err err = {0};
    ckpt_convert_opts opts = options("torch_dist", "megatron", 1, 1);
    make_base();
    open_model(&o, KIMI);
    ck_assert_int_eq(ckpt_plan_convert(&plan, &o.model, &opts, &err), CKPT_OK);
    ckpt_interrupted = 1;
    ck_assert_int_eq(ckpt_stream_convert(&plan, base, &plain_stream, &arena, &result, &err),
                     CKPT_E_INTERRUPTED);
    ckpt_interrupted = 0;
    ckpt_plan_release(&plan);
    close_model(&o);
    ckpt_arena_free(&arena);
    drop_base();
}
END_TEST

/* ---- a source that changes --------------------------------------------------------------------- */

/* Every read of it gives other values than the one before. */
static atomic_uint n_reads;

static ckpt_status read_shifting(ckpt_source *src, uint32_t file, void *buf, size_t n,
                                 uint64_t offset, ckpt_err *err)
{
    ckpt_status status = ckpt_file_read(&src->files[file], buf, n, offset, err);
    uint8_t shift = (uint8_t)atomic_fetch_add(&n_reads, 1);
    for (size_t i = 0; i < n; i++)
        ((uint8_t *)buf)[i] ^= (offset + i) % 2 == 0 ? shift : 0;
    return status;
}

/* Tensors of several leaves and of several pieces, of no known family. */
static void write_plain(const char *path)
{
    static const char head[] =
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1300,1000],\"data_offsets\":[0,5200000]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[700,3001],\"data_offsets\":[5200000,9401400]},"
        "\"c\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[9401400,9401404]}}      ";
    uint8_t size[8] = {(uint8_t)(sizeof head - 1)};
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(size, 1, 8, f), 8);
    ck_assert_uint_eq(fwrite(head, 1, sizeof head - 1, f), sizeof head - 1);
    for (uint32_t i = 0; i < 9401404; i++)
        putc((int)(i * 2654435761u >> 24 & 0x3f), f);
    ck_assert_int_eq(fclose(f), 0);
}

typedef struct shifting {
    const char *container, *group; /* group NULL: the plain file */
    ckpt_mesh mesh;
    bool cast, twice; /* twice: some tensors are written twice, so that the change is seen */
} shifting;

static const shifting shiftings[] = {
    {"safetensors",      "hf",       {1, 1, 1, 0, 1, 1}, false, false},
    {"torch_dist",       "megatron", {2, 1, 2, 0, 1, 1}, false, false},
    {"torch_dist",       "megatron", {2, 2, 1, 0, 1, 1}, false, false},
    {"torch",            "hf",       {1, 1, 1, 0, 1, 1}, false, false},
    {"hdf5",             "hf",       {1, 1, 1, 0, 1, 1}, false, false},
    {"hdf5",             "megatron", {1, 1, 1, 0, 1, 1}, false, false},
    {"mp_rank",          "megatron", {1, 1, 1, 0, 1, 1}, false, false},
    {"mp_rank",          "megatron", {2, 1, 1, 0, 1, 1}, false, true },
    {"rank_safetensors", "hf",       {2, 1, 1, 0, 1, 1}, false, true },
    {"safetensors",      "hf",       {1, 1, 1, 0, 1, 1}, true,  false},
    {"safetensors",      NULL,       {1, 1, 1, 0, 1, 1}, false, false},
    {"torch_dist",       NULL,       {1, 1, 1, 0, 1, 1}, false, false},
    {"hdf5",             NULL,       {1, 1, 1, 0, 1, 1}, false, false},
};

/* What was written is what the digests say. */
static void check_written(const char *path, const ckpt_plan *plan, const ckpt_convert_result *r)
{
    ckpt_err err = {0};
    ckpt_arena arena = {0};
    opened out;
    uint8_t root[32];
    ckpt_open_opts open_opts = {.iteration = -1};
    ckpt_model_opts bind = {.allow_unknown = true};
    ck_assert_msg(ckpt_source_open(&out.src, path, &open_opts, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(ckpt_model_bind(&out.model, &out.src, &bind, &err) == CKPT_OK, "%s", err.text);
    ck_assert_uint_eq(out.model.n_tensors, plan->n_results);
    ckpt_tensor_hash *hashes = calloc(out.model.n_tensors, sizeof *hashes);
    ck_assert_int_eq(ckpt_stream_digest(&out.model, &plain_stream, &arena, hashes, root, &err),
                     CKPT_OK);
    for (size_t i = 0; i < plan->n_results; i++)
        ck_assert_msg(memcmp(hashes[i].digest, r->tensors[i].digest, 32) == 0, "%s",
                      plan->results[i].name);
    ck_assert_mem_eq(root, r->root, 32);
    free(hashes);
    close_model(&out);
    ckpt_arena_free(&arena);
}

static void convert_shifting(const shifting *s, const ckpt_stream_opts *stream)
{
    opened o;
    ckpt_plan plan;
    ckpt_arena arena = {0};
    ckpt_convert_result result;
    ckpt_err err = {0};
    char plain[80], out[80];
    ckpt_open_opts open_opts = {.iteration = -1};
    ckpt_model_opts bind = {.allow_unknown = s->group == NULL};
    make_base();
    snprintf(plain, sizeof plain, "%s/plain.safetensors", base);
    snprintf(out, sizeof out, "%s/out%s", base, strcmp(s->container, "hdf5") == 0 ? ".h5" : "");
    if (s->group == NULL)
        write_plain(plain);
    const char *from = s->group == NULL ? plain : KIMI;
    ck_assert_msg(ckpt_source_open(&o.src, from, &open_opts, &err) == CKPT_OK, "%s", err.text);
    ck_assert_msg(ckpt_model_bind(&o.model, &o.src, &bind, &err) == CKPT_OK, "%s", err.text);
    ckpt_convert_opts opts = {.container = ckpt_container_find(s->container),
                              .layout = s->group != NULL ? layout_of(s->group) : NULL,
                              .mesh = s->mesh,
                              .allow_unknown = true,
                              .cast = s->cast ? CKPT_CAST_TO : CKPT_CAST_KEEP,
                              .dtype = CKPT_BF16};
    ck_assert_int_eq(ckpt_mesh_resolve(&opts.mesh, NULL), CKPT_OK);
    opts.sharded = opts.container->sharded;
    opts.single_file = strcmp(s->container, "hdf5") == 0;
    if (!opts.single_file)
        ck_assert_int_eq(ckpt_mkdirs(out, &err), CKPT_OK);
    ck_assert_msg(ckpt_plan_convert(&plan, &o.model, &opts, &err) == CKPT_OK, "%s", err.text);
    o.src.read_at = read_shifting; /* from here on */
    ckpt_status status = ckpt_stream_convert(&plan, out, stream, &arena, &result, &err);
    if (s->twice) {
        ck_assert_int_eq(status, CKPT_E_IO);
        ck_assert_msg(strstr(err.text, "the source changed while it was being read") != NULL, "%s",
                      err.text);
    } else {
        ck_assert_msg(status == CKPT_OK, "%s", err.text);
        check_written(out, &plan, &result);
    }
    ckpt_plan_release(&plan);
    close_model(&o);
    ckpt_arena_free(&arena);
    drop_base();
}

START_TEST(convert_from_a_changing_source_says_what_it_wrote)
{
    static const ckpt_stream_opts ways[] = {
        {.threads = 3, .memory = (uint64_t)64 << 20, .beside = 1 },
        {.threads = 2, .memory = (uint64_t)1 << 19,  .beside = -1},
        {.threads = 2, .memory = (uint64_t)2 << 20,  .beside = 1 },
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        convert_shifting(&shiftings[_i], &ways[i]);
}
END_TEST

/* ---- blocks that are shared ---------------------------------------------------------------------- */

/* The unit tests' ioctl. A file system that shares blocks, or one that says that it does not. */
static enum { CLONE_REAL, CLONE_COPIES, CLONE_REFUSED } clones;
static atomic_ullong clone_calls, clone_bytes;
static int clone_victim = -1; /* written over once blocks of it are shared */

static int clone_range(int to, const struct file_clone_range *r)
{
    uint8_t *buf = malloc(r->src_length);
    atomic_fetch_add(&clone_calls, 1);
    ck_assert_uint_eq(r->src_offset % 4096 + r->dest_offset % 4096 + r->src_length % 4096, 0);
    if (clones == CLONE_REFUSED) {
        free(buf);
        errno = EOPNOTSUPP;
        return -1;
    }
    ck_assert_int_eq(pread((int)r->src_fd, buf, r->src_length, (off_t)r->src_offset),
                     (ssize_t)r->src_length);
    ck_assert_int_eq(pwrite(to, buf, r->src_length, (off_t)r->dest_offset), (ssize_t)r->src_length);
    memset(buf, 0xa5, r->src_length);
    if (clone_victim >= 0)
        ck_assert_int_eq(pwrite(clone_victim, buf, r->src_length, (off_t)r->src_offset),
                         (ssize_t)r->src_length);
    atomic_fetch_add(&clone_bytes, r->src_length);
    free(buf);
    return 0;
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list ap;
    va_start(ap, request);
    void *arg = va_arg(ap, void *);
    va_end(ap);
    if (request == FICLONERANGE && clones != CLONE_REAL)
        return clone_range(fd, arg);
    return (int)syscall(SYS_ioctl, fd, request, arg);
}

#define SHARED_TENSOR ((uint64_t)3 << 20) /* bytes of each of two */

static void write_two_tensors(const char *path)
{
    char header[512];
    FILE *f = fopen(path, "wb");
    int n = snprintf(header, sizeof header,
                     "{\"a\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]},"
                     "\"b\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}}",
                     (unsigned long long)SHARED_TENSOR, (unsigned long long)SHARED_TENSOR,
                     (unsigned long long)SHARED_TENSOR, (unsigned long long)SHARED_TENSOR,
                     (unsigned long long)(2 * SHARED_TENSOR));
    uint64_t len = (uint64_t)n;
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(&len, 8, 1, f) + fwrite(header, 1, (size_t)n, f), 1 + (size_t)n);
    for (uint64_t i = 0; i < 2 * SHARED_TENSOR / 8; i++) {
        uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
        ck_assert_uint_eq(fwrite(&x, 8, 1, f), 1);
    }
    ck_assert_int_eq(fclose(f), 0);
}

static bool same_bytes(const char *a, const char *b)
{
    ckpt_err err = {0};
    ckpt_buf x = {0}, y = {0};
    ck_assert_int_eq(ckpt_read_file(a, (uint64_t)1 << 30, &x, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_read_file(b, (uint64_t)1 << 30, &y, &err), CKPT_OK);
    bool same = x.len == y.len && memcmp(x.data, y.data, x.len) == 0;
    ckpt_buf_release(&x);
    ckpt_buf_release(&y);
    return same;
}

START_TEST(convert_shares_blocks_where_it_can)
{
    ckpt_convert_opts o = options("safetensors", "plain", 1, 1);
    uint8_t want[32 * 4], got[32 * 4], root[32], root2[32];
    char raw[80], first[96], second[96];
    make_base();
    snprintf(raw, sizeof raw, "%s/raw.safetensors", base);
    write_two_tensors(raw);
    ck_assert_uint_eq(convert(raw, "first", &o, &plain_stream, root, want), 1);
    snprintf(first, sizeof first, "%s/first/model.safetensors", base);
    /* asked for none of the later pieces: each worker may be at one when the answer comes */
    clones = CLONE_REFUSED;
    ck_assert_uint_eq(convert(first, "refused", &o, &plain_stream, root2, got), 1);
    ck_assert_uint_ge(atomic_load(&clone_calls), 1);
    ck_assert_uint_le(atomic_load(&clone_calls), (unsigned)plain_stream.threads);
    ck_assert_mem_eq(want, got, 32);
    /* most is shared; that the source changes afterwards is of no matter, to bytes and digests */
    clones = CLONE_COPIES;
    clone_victim = open(first, O_WRONLY);
    ck_assert_int_eq(convert(first, "second", &o, &plain_stream, root2, got), 1);
    close(clone_victim);
    clones = CLONE_REAL;
    clone_victim = -1;
    ck_assert_uint_ge(atomic_load(&clone_bytes), SHARED_TENSOR);
    ck_assert_mem_eq(want, got, 32);
    ck_assert_mem_eq(root, root2, 32);
    snprintf(first, sizeof first, "%s/refused/model.safetensors", base);
    snprintf(second, sizeof second, "%s/second/model.safetensors", base);
    ck_assert(same_bytes(first, second));
    drop_base();
}
END_TEST

/* Sixteen files share a lane where the work they save is not paid for by processors that wait. */
START_TEST(lanes_suit_the_processors)
{
    enum { FILES = 41 };
    static const struct {
        int cores;
        size_t wide, narrow; /* lanes where the wide kernel is there, and where it is not */
        uint32_t side_by_side;
    } want[] = {
        {1,  11, FILES, 8 },
        {6,  11, FILES, 8 },
        {7,  41, FILES, 8 },
        {16, 41, FILES, 16}
    };
    ckpt_err err = {0};
    ckpt_out_file files[FILES];
    ckpt_model model = {0};
    for (size_t f = 0; f < FILES; f++) /* the last holds no tensors */
        files[f] = (ckpt_out_file){.size = (uint64_t)2 << 20, .is_data = f + 1 < FILES};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        ckpt_plan plan = {
            .model = &model, .sink = {.files = files, .n_files = FILES}
        };
        ckpt_stream_job c = {.plan = &plan};
        bool waves = false;
        ck_assert_int_eq(ckpt_stream_lanes(&c, want[i].cores, &waves, &err), CKPT_OK);
        size_t lanes = ckpt_sha256_stream_wide(16) ? want[i].wide : want[i].narrow;
        ck_assert_uint_eq(c.n_lanes, lanes);
        ck_assert(waves == (lanes < FILES));
        ck_assert_uint_eq(c.side_by_side, want[i].side_by_side);
        for (size_t l = 0; l < c.n_lanes; l++) {
            pthread_mutex_destroy(&c.lanes[l].lock);
            pthread_cond_destroy(&c.lanes[l].turn);
        }
        free(c.lanes);
        free(c.lane_of);
    }
}
END_TEST

Suite *suite_stream(void)
{
    Suite *s = suite_create("stream");
    TCase *c = tcase_create("convert");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, convert_bytes_do_not_depend_on_threads_or_memory);
    tcase_add_test(c, convert_digests_say_what_the_files_hold);
    tcase_add_test(c, convert_cast_rounds_weights_and_keeps_the_keep_list);
    tcase_add_test(c, convert_fold_is_the_product);
    tcase_add_loop_test(c, convert_what_cannot_be_said_is_refused_by_name, 0,
                        (int)(sizeof refusals / sizeof refusals[0]));
    tcase_add_test(c, convert_nonzero_padding_is_reported);
    tcase_add_loop_test(c, convert_vocabulary_pads_by_megatrons_rule, 0, 4);
    tcase_add_test(c, convert_interrupted_says_so);
    tcase_add_test(c, lanes_suit_the_processors);
    tcase_add_loop_test(c, convert_from_a_changing_source_says_what_it_wrote, 0,
                        (int)(sizeof shiftings / sizeof *shiftings));
    tcase_add_test(c, convert_shares_blocks_where_it_can);
    suite_add_tcase(s, c);
    return s;
}
