/* torch_dist container, writing: what is laid out reads back, and common states survive. With
 * CKPT_TEST_KEEP=DIR the written checkpoints and their expected tensors stay in DIR for
 * tests/peers/dcp_load.py. */
#include "dcp_test.h"

Suite *suite_dcp_write(void);

/* ---- writing --------------------------------------------------------------------------------- */

#define MAX_TENSORS 64

/* A destination under construction. */
typedef struct target {
    ckpt_out out;
    ckpt_out_tensor tensors[MAX_TENSORS];
    ckpt_out_object objects[8];
    uint8_t *whole[MAX_TENSORS];
    ckpt_arena arena;
} target;

/* Add a tensor cut into parts[a] pieces along axis a (uneven where it does not divide; pieces past
 * the end are empty), owners dealt round robin from `owner`. */
static void add_tensor(target *t, const char *name, ckpt_dtype dtype, int rank, const int64_t *dims,
                       const int64_t *parts, int owner)
{
    ckpt_out_tensor *o = &t->tensors[t->out.n_tensors];
    int64_t at[CKPT_MAX_RANK] = {0}, n = 1;
    int unit = dtype == CKPT_F4 ? 2 : 1;
    for (int a = 0; a < rank; a++)
        n *= parts[a];
    *o = (ckpt_out_tensor){.name = name, .dims = dims, .dtype = dtype, .rank = rank};
    o->chunks = ckpt_arena_array(&t->arena, (size_t)n, sizeof *o->chunks);
    for (o->n_chunks = 0; o->n_chunks < (size_t)n; o->n_chunks++) {
        int64_t *lo = ckpt_arena_array(&t->arena, CKPT_MAX_RANK, sizeof *lo);
        int64_t *len = ckpt_arena_array(&t->arena, CKPT_MAX_RANK, sizeof *len);
        for (int a = 0; a < rank; a++) {
            int64_t k = a == rank - 1 ? unit : 1, size = dims[a] / k;
            int64_t each = (size + parts[a] - 1) / parts[a];
            lo[a] = k * ckpt_min_i64(at[a] * each, size);
            len[a] = k * ckpt_min_i64(each, size - lo[a] / k);
        }
        o->chunks[o->n_chunks] =
            (ckpt_out_chunk){.lo = lo,
                             .len = len,
                             .owner = (int)((owner + (int)o->n_chunks) % t->out.world),
                             .file = 999};
        step(rank, parts, at);
    }
    size_t bytes = tensor_bytes(dtype, rank, dims);
    uint8_t *p = ckpt_arena_alloc(&t->arena, bytes + 1);
    uint64_t seed = 1000 + t->out.n_tensors;
    for (size_t i = 0; i < bytes; i++)
        p[i] = dtype == CKPT_BOOL ? (uint8_t)(rng(&seed) >> 40 & 1) : (uint8_t)(rng(&seed) >> 40);
    t->whole[t->out.n_tensors++] = p;
}

static void add_object(target *t, const char *name, int owner, const char *json)
{
    ckpt_json *j = NULL;
    ckpt_err err = {0};
    ckpt_buf p = {0}, zip = {0};
    ck_assert(ckpt_json_parse(json, strlen(json), &j, &err) == CKPT_OK);
    ckpt_pkl_begin(&p);
    ckpt_buf_puts(&p, "](");
    ckpt_pkl_put_json(&p, j);
    ckpt_buf_puts(&p, "e");
    ckpt_pkl_end(&p);
    ckpt_zip_object(&zip, p.data, p.len);
    t->objects[t->out.n_objects++] =
        (ckpt_out_object){.name = name,
                          .owner = owner,
                          .data = ckpt_arena_memdup(&t->arena, zip.data, zip.len),
                          .length = zip.len};
    ckpt_buf_release(&p);
    ckpt_buf_release(&zip);
    ckpt_json_free(j);
}

static const struct {
    const char *name;
    ckpt_dtype dtype;
    int rank;
    int64_t dims[4], parts[4];
} shapes[] = {
    {"a.f32",                               CKPT_F32,     2, {8, 6},       {2, 3}      },
    {"a.bf16",                              CKPT_BF16,    3, {3, 5, 7},    {3, 1, 2}   },
    {"a.f16",                               CKPT_F16,     1, {1000},       {4}         },
    {"a.f64",                               CKPT_F64,     2, {1, 65},      {1, 1}      },
    {"a.i64",                               CKPT_I64,     0, {0},          {0}         },
    {"a.scalar",                            CKPT_F32,     0, {0},          {0}         },
    {"a.empty",                             CKPT_F32,     2, {0, 4},       {2, 1}      },
    {"a.uneven",                            CKPT_F32,     2, {5, 3},       {4, 1}      },
    {"a.few",                               CKPT_F32,     1, {2},          {4}         }, /* more ranks than rows: two empty chunks */
    {"a.u8",                                CKPT_U8,      1, {7},          {1}         },
    {"a.i8",                                CKPT_I8,      4, {2, 1, 2, 3}, {1, 1, 2, 1}},
    {"a.bool",                              CKPT_BOOL,    1, {9},          {2}         },
    {"a.c64",                               CKPT_C64,     1, {3},          {1}         },
    {"a.f8e4m3",                            CKPT_F8_E4M3, 2, {4, 4},       {1, 2}      },
    {"a.f8e5m2",                            CKPT_F8_E5M2, 1, {8},          {1}         },
    {"a.e8m0",                              CKPT_F8_E8M0, 1, {8},          {1}         },
    {"a.f4",                                CKPT_F4,      2, {4, 12},      {2, 3}      },
    {"a.u16",                               CKPT_U16,     1, {5},          {1}         },
    {"a.u32",                               CKPT_U32,     1, {5},          {1}         },
    {"a.u64",                               CKPT_U64,     1, {5},          {1}         },
    {"a.big",                               CKPT_F32,     2, {300, 500},   {2, 1}      },
    {"n\xc3\xa4me with spaces, (and) dots", CKPT_I32,     2, {2, 2},       {1, 1}      },
};

static void fill_target(target *t, int world)
{
    *t = (target){
        .out = {.world = world, .iteration = -1}
    };
    t->out.tensors = t->tensors;
    t->out.objects = t->objects;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        add_tensor(t, shapes[i].name, shapes[i].dtype, shapes[i].rank, shapes[i].dims,
                   shapes[i].parts, (int)i % world);
    add_object(t, "rng_state/shard_0.0_1.1", 0, "{\"seed\":1}");
    add_object(t, "other/shard_0_1", world - 1, "[1,2.5,\"x\",null,true]");
}

static void lay_out(target *t, ckpt_sink *sink)
{
    ckpt_err err = {0};
    *sink = (ckpt_sink){0};
    ckpt_status status = ckpt_torch_dist.layout(&t->out, sink, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);
}

static void expect_tensors(ckpt_source *src, const target *t)
{
    ck_assert_uint_eq(src->n_tensors, t->out.n_tensors);
    for (size_t i = 0; i < t->out.n_tensors; i++) {
        const ckpt_out_tensor *o = &t->tensors[i];
        int64_t k = ckpt_source_find(src, o->name);
        ck_assert_msg(k >= 0, "%s", o->name);
        const ckpt_tensor *have = &src->tensors[k];
        size_t n;
        ck_assert_int_eq(have->dtype, o->dtype);
        ck_assert_int_eq(have->rank, o->rank);
        for (int a = 0; a < o->rank; a++)
            ck_assert_int_eq(have->dims[a], o->dims[a]);
        uint8_t *p = read_tensor(src, have, &n);
        ck_assert_msg(memcmp(p, t->whole[i], n) == 0, "%s differs", o->name);
        free(p);
    }
}

/* Where written checkpoints go: the scratch directory, or what CKPT_TEST_KEEP names. */
static const char *kept(const char *name)
{
    static char paths[4][1024];
    static int next;
    char *path = paths[next++ % 4];
    const char *keep = getenv("CKPT_TEST_KEEP");
    snprintf(path, sizeof paths[0], "%s/%s", keep ? keep : scratch, name);
    ckpt_remove_tree(path);
    return path;
}

/* The same tensors, each in one piece, as one safetensors file. */
static void keep_expected(const target *t)
{
    static const int64_t zeros[CKPT_MAX_RANK];
    static ckpt_out_tensor tensors[MAX_TENSORS];
    static ckpt_out_chunk chunks[MAX_TENSORS];
    ckpt_sink sink = {0};
    ckpt_err err = {0};
    ckpt_out out = {.tensors = tensors, .n_tensors = t->out.n_tensors, .world = 1};
    if (!getenv("CKPT_TEST_KEEP"))
        return;
    for (size_t i = 0; i < out.n_tensors; i++) {
        tensors[i] = t->tensors[i];
        tensors[i].chunks = &chunks[i];
        tensors[i].n_chunks = 1;
        chunks[i] = (ckpt_out_chunk){.lo = zeros, .len = tensors[i].dims};
    }
    ck_assert_msg(ckpt_safetensors.layout(&out, &sink, &err) == CKPT_OK, "%s", err.text);
    execute(&out, &sink, kept("expected"), t->whole, NULL);
    ckpt_arena_free(&sink.arena);
}

static ckpt_json *parse_json(const char *text)
{
    ckpt_json *j = NULL;
    ckpt_err err = {0};
    ck_assert_msg(ckpt_json_parse(text, strlen(text), &j, &err) == CKPT_OK, "%s", err.text);
    return j;
}

START_TEST(write_plain_dcp_reads_back)
{
    target t;
    ckpt_sink sink;
    ckpt_source src;
    static const int worlds[] = {1, 3, 40};
    fill_target(&t, worlds[_i]);
    ckpt_json *config = parse_json("{\"model_type\":\"x\"}");
    t.out.config = config;
    t.out.config_kind = CKPT_CONFIG_HF;
    lay_out(&t, &sink);
    ck_assert_str_eq(sink.manifest_dir, "");
    const char *dir = kept(_i == 1 ? "plain" : "plain_other");
    execute(&t.out, &sink, dir, t.whole, NULL);
    expect_open(&src, dir, CKPT_OK, NULL);
    ck_assert_uint_eq(src.n_warnings, 0);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_HF);
    ck_assert(ckpt_json_equal(src.config, config));
    ck_assert_str_eq(object(&src, "other/shard_0_1")->text, "[[1,2.5,\"x\",null,true]]");
    expect_tensors(&src, &t);
    ckpt_source_close(&src);
    ckpt_json_free(config);
    ckpt_arena_free(&sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

START_TEST(write_megatron_reads_back)
{
    target t;
    ckpt_sink sink;
    ckpt_source src;
    int64_t v;
    fill_target(&t, 3);
    ckpt_json *args = parse_json("{\"hidden_size\":64,\"params_dtype\":\"torch.bfloat16\","
                                 "\"attention_backend\":{\"$enum\":\"os.system\",\"value\":5},"
                                 "\"eps\":1e-6,\"pattern\":\"K-+\",\"none\":null,\"list\":[1,2]}");
    t.out.config = args;
    t.out.config_kind = CKPT_CONFIG_MEGATRON;
    t.out.iteration = _i == 0 ? 1234 : -1;
    lay_out(&t, &sink);
    ck_assert_str_eq(sink.manifest_dir, _i == 0 ? "iter_0001234" : "release");
    ck_assert_str_eq(sink.files[sink.n_files - 1].name, CKPT_DCP_TRACKER);
    const char *dir = kept(_i == 0 ? "mcore" : "mcore_release");
    execute(&t.out, &sink, dir, t.whole, NULL);
    keep_expected(&t);
    open_plain(&src, dir);
    ck_assert_uint_eq(src.n_warnings, 0);
    ck_assert_int_eq(src.iteration, t.out.iteration);
    ck_assert_int_eq(src.config_kind, CKPT_CONFIG_MEGATRON);
    ck_assert_str_eq(ckpt_json_string(ckpt_json_get(src.config, "params_dtype")), "torch.bfloat16");
    ck_assert(ckpt_json_int(ckpt_json_get(src.config, "attention_backend"), &v) && v == 5);
    ck_assert(ckpt_json_int(ckpt_json_get(src.common, "iteration"), &v));
    ck_assert_int_eq(v, _i == 0 ? 1234 : 0);
    ck_assert_uint_eq(src.n_objects, 3);
    ck_assert_ptr_null(object(&src, CKPT_DCP_COMMON_OBJECT)->unknown_global);
    expect_tensors(&src, &t);
    ckpt_source_close(&src);
    ckpt_json_free(args);
    ckpt_arena_free(&sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

START_TEST(write_twice_is_byte_identical)
{
    target t;
    ckpt_sink sink;
    for (int i = 0; i < 2; i++) {
        fill_target(&t, 3);
        t.out.config_kind = CKPT_CONFIG_MEGATRON;
        t.out.iteration = 5;
        lay_out(&t, &sink);
        execute(&t.out, &sink, in_scratch(i ? "b" : "a"), t.whole, NULL);
        for (uint32_t f = 0; i && f < sink.n_files; f++) {
            char a[600], b[600];
            ckpt_buf x = {0}, y = {0};
            snprintf(a, sizeof a, "%s/a/%s", scratch, sink.files[f].name);
            snprintf(b, sizeof b, "%s/b/%s", scratch, sink.files[f].name);
            get_file(a, &x);
            get_file(b, &y);
            ck_assert_uint_eq(x.len, y.len);
            ck_assert_mem_eq(x.data, y.data, x.len);
            ckpt_buf_release(&x);
            ckpt_buf_release(&y);
        }
        ckpt_arena_free(&sink.arena);
        ckpt_arena_free(&t.arena);
    }
}
END_TEST

START_TEST(write_refuses_what_torch_cannot_hold)
{
    static const int64_t four[] = {4}, one[] = {1};
    target t = {.out = {.world = 1}};
    ckpt_sink sink = {0};
    ckpt_err err = {0};
    t.out.tensors = t.tensors;
    add_tensor(&t, "x", CKPT_F6_E2M3, 1, four, one, 0);
    ck_assert_int_eq(ckpt_torch_dist.layout(&t.out, &sink, &err), CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "tensor 'x': torch has no dtype for F6_E2M3"));
    ckpt_arena_free(&sink.arena);
    sink = (ckpt_sink){0};
    t.out.single_file = true;
    ck_assert_int_eq(ckpt_torch_dist.layout(&t.out, &sink, &err), CKPT_E_USAGE);
    ckpt_arena_free(&sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

/* ---- common state ---------------------------------------------------------------------------- */

START_TEST(common_with_args_keeps_the_rest)
{
    ckpt_source src;
    ckpt_err err = {0};
    ckpt_buf payload = {0};
    target t;
    ckpt_sink sink;
    open_plain(&src, MCORE "lowrank_fg_tp2");
    ckpt_json *args = ckpt_json_dup(src.config);
    ck_assert(ckpt_json_set(args, "hidden_size", ckpt_json_new_int(128)));
    ck_assert(ckpt_json_set(args, "brand_new", ckpt_json_new_string("torch.float16")));
    ckpt_status status = ckpt_dcp_common_with_args(&src, args, &payload, &err);
    ck_assert_msg(status == CKPT_OK, "%s", err.text);

    fill_target(&t, 2);
    t.objects[t.out.n_objects++] = (ckpt_out_object){
        .name = CKPT_DCP_COMMON_OBJECT, .data = payload.data, .length = payload.len};
    t.out.config = args;
    t.out.config_kind = CKPT_CONFIG_MEGATRON;
    t.out.iteration = 100;
    lay_out(&t, &sink);
    const char *dir = kept("mcore_carried");
    execute(&t.out, &sink, dir, t.whole, &src);

    ckpt_source back;
    open_plain(&back, dir); /* common.pt wins */
    ckpt_json *want = ckpt_json_dup(src.common), *have = ckpt_json_dup(back.common);
    ck_assert(ckpt_json_equal(back.config, args));
    ckpt_json_delete(want, "args");
    ckpt_json_delete(have, "args");
    ck_assert(ckpt_json_equal(want, have));
    ckpt_json_free(want);
    ckpt_json_free(have);
    const ckpt_object *o = object(&back, CKPT_DCP_COMMON_OBJECT);
    ck_assert_uint_eq(o->length, payload.len);
    ckpt_source_close(&back);

    char path[1200]; /* and the object alone says the same */
    snprintf(path, sizeof path, "%s/" ITER "/" CKPT_DCP_COMMON_FILE, dir);
    ck_assert_int_eq(unlink(path), 0);
    open_plain(&back, dir);
    ck_assert(ckpt_json_equal(back.config, args));
    ckpt_source_close(&back);
    if (getenv("CKPT_TEST_KEEP"))
        execute(&t.out, &sink, dir, t.whole, &src);

    ckpt_json_free(args);
    ckpt_source_close(&src);
    ckpt_buf_release(&payload);
    ckpt_arena_free(&sink.arena);
    ckpt_arena_free(&t.arena);
}
END_TEST

START_TEST(common_without_change_is_stable)
{
    ckpt_source src;
    ckpt_err err = {0};
    ckpt_buf once = {0}, twice = {0};
    open_plain(&src, MCORE "legacy_tp2");
    ck_assert(ckpt_dcp_common_with_args(&src, NULL, &once, &err) == CKPT_OK);
    ck_assert(ckpt_dcp_repack_bytes(once.data, once.len, true, NULL, &twice, &err) == CKPT_OK);
    ck_assert_uint_eq(once.len, twice.len);
    ck_assert_mem_eq(once.data, twice.data, once.len);
    ckpt_source_close(&src);
    ckpt_buf_release(&once);
    ckpt_buf_release(&twice);
}
END_TEST

START_TEST(common_with_tensor_keeps_its_storage)
{
    static const int64_t one[] = {1};
    ckpt_buf item = {0}, out = {0};
    ckpt_err err = {0};
    float scale = 65536.0F;
    ckpt_zip_tensor_head(&item, CKPT_F32, 1, one);
    ckpt_buf_append(&item, &scale, sizeof scale);
    ckpt_zip_tensor_tail(&item, CKPT_F32, 1, one, ckpt_crc32(0, &scale, sizeof scale));
    /* A bare tensor is no common state. */
    ck_assert_int_eq(ckpt_dcp_repack_bytes(item.data, item.len, true, NULL, &out, &err),
                     CKPT_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(err.text, "common state is not a dict"));
    ckpt_buf_release(&item);
    ckpt_buf_release(&out);

    ckpt_buf real = {0};
    get_file("tests/data/common_tensor.pt", &real);
    ck_assert_msg(ckpt_dcp_repack_bytes(real.data, real.len, true, NULL, &out, &err) == CKPT_OK,
                  "%s", err.text);
    ckpt_buf_release(&real);
    crafted c = {0};
    ckpt_buf_append(&c.data, out.data, out.len);
    craft_bytes(&c, CKPT_DCP_COMMON_OBJECT);
    craft_entry(&c, CKPT_DCP_COMMON_OBJECT, -1, NULL, "__0_0.distcp", 0, (int64_t)out.len, NULL);
    const char *dir = kept("common_tensor");
    craft_write(&c, dir);
    ckpt_source src;
    expect_open(&src, dir, CKPT_OK, NULL);
    ck_assert_int_eq(src.iteration, 3);
    ck_assert_ptr_nonnull(ckpt_json_path(src.common, "optimizer.grad_scaler.scale"));
    ckpt_source_close(&src);
    ckpt_buf_release(&out);
}
END_TEST

START_TEST(layout_refuses_common_state_by_range)
{
    target t = {
        .out = {.world = 1, .config_kind = CKPT_CONFIG_MEGATRON}
    };
    ckpt_sink sink = {0};
    ckpt_err err = {0};
    t.out.objects = t.objects;
    t.out.n_objects = 1;
    t.objects[0] = (ckpt_out_object){.name = CKPT_DCP_COMMON_OBJECT, .length = 10};
    ck_assert_int_eq(ckpt_torch_dist.layout(&t.out, &sink, &err), CKPT_E_INTERNAL);
    ckpt_arena_free(&sink.arena);
}
END_TEST

/* ---- buckets --------------------------------------------------------------------------------- */

#define MIB ((uint64_t)1 << 20)

static const struct {
    int ranks;    /* that own anything, of eight */
    uint64_t mib; /* each */
    int want;
} bucket_cases[] = {
    {1, 100,  1},
    {1, 128,  2},
    {1, 1000, 4},
    {4, 256,  4},
    {4, 192,  3},
    {4, 127,  1},
    {5, 999,  3},
    {8, 999,  2},
    {8, 127,  1},
};

/* Items of 1 MiB, dealt over the ranks: all files of a rank get the same number, in order. */
START_TEST(buckets_are_even_and_not_too_small)
{
    int ranks = bucket_cases[_i].ranks, buckets = 0;
    size_t n = (size_t)bucket_cases[_i].mib * (size_t)ranks;
    uint64_t *bytes = calloc(n + 1, sizeof *bytes);
    int *slot = calloc(n + 1, sizeof *slot), fill[32] = {0};
    for (size_t i = 0; i < n; i++) {
        bytes[i] = MIB;
        slot[i] = (int)(i % (size_t)ranks);
    }
    slot[n] = ranks - 1; /* an object */
    ck_assert_int_eq(ckpt_dcp_buckets(8, bytes, slot, n + 1, &buckets, NULL), CKPT_OK);
    ck_assert_int_eq(buckets, bucket_cases[_i].want);
    ck_assert_int_eq(slot[n], (ranks - 1) * buckets);
    for (size_t i = 0; i < n; i++) {
        ck_assert_int_eq(slot[i] / buckets, (int)(i % (size_t)ranks));
        ck_assert_int_eq(slot[i] % buckets, (int)(i / (size_t)ranks % (size_t)buckets));
        fill[slot[i]]++;
    }
    for (int s = 0; s < ranks * buckets; s++)
        ck_assert_int_ge(fill[s], (int)bucket_cases[_i].mib / buckets);
    free(bytes);
    free(slot);
}
END_TEST

/* ---- suite ----------------------------------------------------------------------------------- */

Suite *suite_dcp_write(void)
{
    Suite *s = suite_create("dcp_write");
    TCase *t = make_case(s, "write", 30);
    tcase_add_loop_test(t, write_plain_dcp_reads_back, 0, 3);
    tcase_add_loop_test(t, write_megatron_reads_back, 0, 2);
    tcase_add_test(t, write_twice_is_byte_identical);
    tcase_add_test(t, write_refuses_what_torch_cannot_hold);

    t = make_case(s, "common", 30);
    tcase_add_test(t, common_with_args_keeps_the_rest);
    tcase_add_test(t, common_without_change_is_stable);
    tcase_add_test(t, common_with_tensor_keeps_its_storage);
    tcase_add_test(t, layout_refuses_common_state_by_range);

    t = make_case(s, "buckets", 30);
    tcase_add_loop_test(t, buckets_are_even_and_not_too_small, 0,
                        sizeof bucket_cases / sizeof bucket_cases[0]);
    return s;
}
