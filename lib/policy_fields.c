/* Fields of a policy: what each may say, presets, and the canonical text. */
#include "policy_internal.h"

#include "hash.h"

#include <stdio.h>
#include <string.h>

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a policy");
}

/* ---- looking at JSON -------------------------------------------------------------------------- */

ckpt_status ckpt_policy_fields(const ckpt_json *j, const char *const *known, ckpt_err *err)
{
    if (!ckpt_json_is_object(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "found no object where one is expected");
    for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c)) {
        size_t i = 0;
        while (known[i] != NULL && strcmp(known[i], ckpt_json_key(c)) != 0)
            i++;
        if (known[i] == NULL)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "unknown field '%s'", ckpt_json_key(c));
    }
    return CKPT_OK;
}

/* Absent or null. */
static bool unset(const ckpt_json *j)
{
    return j == NULL || ckpt_json_is_null(j);
}

static bool is_list(const ckpt_json *j, int n, const int *values)
{
    const ckpt_json *c = ckpt_json_child(j);
    if (!ckpt_json_is_array(j))
        return false;
    for (int i = 0; i < n; i++, c = ckpt_json_next(c)) {
        int64_t v;
        if (c == NULL || !ckpt_json_int(c, &v) || v != values[i])
            return false;
    }
    return c == NULL;
}

static bool is_pair(const ckpt_json *j, int a, int b)
{
    return is_list(j, 2, (const int[]){a, b});
}

static bool says(const ckpt_json *j, const char *text)
{
    const char *s = ckpt_json_string(j);
    return s != NULL && strcmp(s, text) == 0;
}

static bool flag_or(const ckpt_json *cfg, const char *key, bool absent)
{
    bool v = absent;
    (void)ckpt_json_bool(ckpt_json_get(cfg, key), &v);
    return v;
}

/* ---- quantisers ------------------------------------------------------------------------------- */

ckpt_status ckpt_policy_attributes(const ckpt_json *cfg, ckpt_err *err)
{
    static const char *const known[] = {
        "num_bits",   "axis",   "type",    "block_sizes", "unsigned",          "narrow_range",
        "fake_quant", "rotate", "backend", "bias",        "use_constant_amax", "pass_through_bwd",
        NULL};
    static const char *const flags[] = {"unsigned", "narrow_range", "fake_quant",
                                        "pass_through_bwd", "use_constant_amax"};
    ckpt_status status = ckpt_policy_fields(cfg, known, err);
    const ckpt_json *type = ckpt_json_get(cfg, "type");
    if (status != CKPT_OK)
        return status;
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        const ckpt_json *j = ckpt_json_get(cfg, flags[i]);
        if (j != NULL && !ckpt_json_is_bool(j))
            return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is neither true nor false", flags[i]);
    }
    if (type != NULL && !says(type, "static") && !says(type, "dynamic"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'type' is neither \"static\" nor \"dynamic\"");
    if (!unset(ckpt_json_get(cfg, "axis")) && !unset(ckpt_json_get(cfg, "block_sizes")))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'axis' and 'block_sizes' exclude each other");
    return CKPT_OK;
}

/* The attribute that no handle can have, or NULL. */
static const char *not_plain(const ckpt_json *cfg)
{
    bool rotate = false;
    const ckpt_json *r = ckpt_json_get(cfg, "rotate");
    if (!says(ckpt_json_get(cfg, "type"), "dynamic"))
        return "static scales (type must be \"dynamic\")";
    if (!flag_or(cfg, "fake_quant", true))
        return "real quantisation (fake_quant false)";
    if (!flag_or(cfg, "pass_through_bwd", true))
        return "pass_through_bwd false";
    if (!unset(r) && (!ckpt_json_bool(r, &rotate) || rotate))
        return "rotation ('rotate')";
    if (!unset(ckpt_json_get(cfg, "backend")))
        return "a quantiser 'backend'";
    if (!unset(ckpt_json_get(cfg, "bias")))
        return "'bias'";
    if (flag_or(cfg, "use_constant_amax", false))
        return "use_constant_amax";
    return NULL;
}

static bool is_nvfp4_blocks(const ckpt_json *j)
{
    int64_t n = 0;
    return ckpt_json_is_object(j) && ckpt_json_size(j) == 3 &&
           ckpt_json_int(ckpt_json_get(j, "-1"), &n) && n == 16 &&
           says(ckpt_json_get(j, "type"), "dynamic") &&
           is_pair(ckpt_json_get(j, "scale_bits"), 4, 3);
}

static ckpt_status refuse_format(const ckpt_json *cfg, const char *only, ckpt_err *err)
{
    ckpt_buf text = {0};
    if (cfg == NULL || !ckpt_json_print(cfg, 0, true, &text) || text.failed)
        ckpt_buf_clear(&text);
    ckpt_status status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "found %.300s, expected %s",
                                   text.len > 0 ? (const char *)text.data : "no attributes", only);
    ckpt_buf_release(&text);
    return status;
}

ckpt_status ckpt_policy_classify(int handle, const ckpt_json *cfg, ckpt_quant_kind *kind,
                                 ckpt_err *err)
{
    static const int row[] = {0, 1, 2}, tile[] = {0, 1};
    const ckpt_json *bits = ckpt_json_get(cfg, "num_bits"), *axis = ckpt_json_get(cfg, "axis"),
                    *blocks = ckpt_json_get(cfg, "block_sizes");
    const char *why = not_plain(cfg);
    int64_t n = 8;
    if (why != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is refused", why);
    if (bits != NULL && !ckpt_json_int(bits, &n))
        n = 0;
    if (handle == CKPT_HANDLE_STATE) {
        bool tiles = unset(blocks) && is_list(axis, 2, tile);
        bool narrow = flag_or(cfg, "narrow_range", false) && !flag_or(cfg, "unsigned", false);
        *kind = tiles && is_pair(bits, 4, 3) ? CKPT_QUANT_STATE_E4M3
                : tiles && n == 8 && narrow  ? CKPT_QUANT_STATE_INT8
                                             : CKPT_QUANT_OFF;
        return *kind != CKPT_QUANT_OFF
                   ? CKPT_OK
                   : refuse_format(cfg, "dynamic E4M3 or signed narrow INT8 with axis [0,1]", err);
    }
    *kind = CKPT_QUANT_OFF;
    if (is_pair(bits, 4, 3) && is_list(axis, 3, row) && unset(blocks))
        *kind = CKPT_QUANT_FP8;
    else if (is_pair(bits, 2, 1) && unset(axis) && is_nvfp4_blocks(blocks))
        *kind = CKPT_QUANT_NVFP4;
    return *kind != CKPT_QUANT_OFF
               ? CKPT_OK
               : refuse_format(cfg,
                               "dynamic E4M3 a row (axis [0,1,2]) or dynamic NVFP4 in blocks of 16",
                               err);
}

/* ---- execution -------------------------------------------------------------------------------- */

static const char *const dtype_names[] = {NULL, "float32", "float16", "bfloat16"};

static ckpt_quant_dtype read_dtype(const ckpt_json *j)
{
    for (int i = CKPT_QUANT_F32; i <= CKPT_QUANT_BF16; i++)
        if (says(j, dtype_names[i]))
            return (ckpt_quant_dtype)i;
    return CKPT_QUANT_NO_ROUNDING;
}

int ckpt_policy_index(const char *const *names, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    return -1;
}

static ckpt_status read_schedule(const ckpt_json *j, ckpt_quant *q, ckpt_err *err)
{
    static const char *const known[] = {"accumulator_dtype", "reduction_block", NULL};
    int site = ckpt_policy_index(ckpt_site_names, CKPT_SITE_COUNT, ckpt_json_key(j));
    if (site < 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "unknown product '%s'", ckpt_json_key(j));
    ckpt_status status = ckpt_policy_fields(j, known, err);
    const ckpt_json *dtype = ckpt_json_get(j, known[0]), *block = ckpt_json_get(j, known[1]);
    if (status != CKPT_OK || (unset(dtype) && unset(block)))
        return status;
    if (unset(dtype) || unset(block))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s': %s without %s", ckpt_site_names[site],
                         known[unset(dtype)], known[!unset(dtype)]);
    q->accumulator[site] = read_dtype(dtype);
    if (q->accumulator[site] == CKPT_QUANT_NO_ROUNDING)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "'%s': accumulator_dtype is not float32, float16 or bfloat16",
                         ckpt_site_names[site]);
    if (!ckpt_json_int(block, &q->block[site]) || q->block[site] < 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%s': reduction_block is no positive number",
                         ckpt_site_names[site]);
    return CKPT_OK;
}

static ckpt_status read_state(const ckpt_json *j, ckpt_quant *q, ckpt_err *err)
{
    static const char *const known[] = {"mode", "block_v", "quantize_initial", NULL};
    ckpt_status status = ckpt_policy_fields(j, known, err);
    const ckpt_json *mode = ckpt_json_get(j, "mode"), *block = ckpt_json_get(j, "block_v"),
                    *initial = ckpt_json_get(j, "quantize_initial");
    bool yes = true;
    if (status != CKPT_OK)
        return status;
    if (mode != NULL && !says(mode, "chunk"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "mode is not \"chunk\"");
    if (initial != NULL && (!ckpt_json_bool(initial, &yes) || !yes))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "quantize_initial is not true");
    if (block != NULL &&
        (!ckpt_json_int(block, &q->block_v) ||
         (q->block_v != 16 && q->block_v != 32 && q->block_v != 64 && q->block_v != 128)))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "block_v is not 16, 32, 64 or 128");
    return CKPT_OK;
}

/* Members that have one value. */
static ckpt_status read_fixed(const ckpt_json *cfg, ckpt_quant *q, ckpt_err *err)
{
    const ckpt_json *version = ckpt_json_get(cfg, "schema_version"),
                    *chunk = ckpt_json_get(cfg, "chunk_size"), *solve = ckpt_json_get(cfg, "solve"),
                    *backend = ckpt_json_get(cfg, "backend");
    const char *method = ckpt_json_string(ckpt_json_get(solve, "method"));
    int64_t n = 0;
    if (version != NULL && (!ckpt_json_int(version, &n) || n != 1))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "schema_version is not 1");
    if (chunk != NULL && (!ckpt_json_int(chunk, &n) || n != 64))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "chunk_size is not 64");
    if (solve != NULL &&
        (!ckpt_json_is_object(solve) || ckpt_json_size(solve) > 1 ||
         (ckpt_json_size(solve) == 1 && !says(ckpt_json_get(solve, "method"), "exact"))))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "solve: found '%s', expected method 'exact'",
                         method != NULL ? method : "?");
    if (backend != NULL && !says(backend, "fla") && !says(backend, "matmul"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "backend is neither 'fla' nor 'matmul'");
    q->matmul = says(backend, "matmul");
    return CKPT_OK;
}

ckpt_status ckpt_policy_execution(const ckpt_json *cfg, ckpt_quant *q, ckpt_err *err)
{
    static const char *const known[] = {"schema_version", "backend", "chunk_size",  "state",
                                        "solve",          "matmul",  "elementwise", NULL};
    ckpt_status status = CKPT_OK;
    memset(q->accumulator, 0, sizeof q->accumulator);
    memset(q->block, 0, sizeof q->block);
    memset(q->rounding, 0, sizeof q->rounding);
    q->block_v = 64;
    q->matmul = false;
    if (cfg == NULL)
        return CKPT_OK;
    const ckpt_json *state = ckpt_json_get(cfg, "state"), *matmul = ckpt_json_get(cfg, "matmul"),
                    *elementwise = ckpt_json_get(cfg, "elementwise");
    CKPT_CHECK(ckpt_policy_fields(cfg, known, err));
    CKPT_CHECK(read_fixed(cfg, q, err));
    if (state != NULL)
        CKPT_TRY(read_state(state, q, err), "state");
    if ((matmul != NULL && !ckpt_json_is_object(matmul)) ||
        (elementwise != NULL && !ckpt_json_is_object(elementwise)))
        return ckpt_fail(err, CKPT_E_FORMAT, "'matmul' and 'elementwise' are objects");
    for (const ckpt_json *c = ckpt_json_child(matmul); c != NULL; c = ckpt_json_next(c))
        CKPT_TRY(read_schedule(c, q, err), "matmul");
    for (const ckpt_json *c = ckpt_json_child(elementwise); c != NULL; c = ckpt_json_next(c)) {
        int b = ckpt_policy_index(ckpt_boundary_names, CKPT_BOUNDARY_COUNT, ckpt_json_key(c));
        if (b < 0 || read_dtype(c) == CKPT_QUANT_NO_ROUNDING)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "elementwise: '%s' is %s", ckpt_json_key(c),
                             b < 0 ? "unknown" : "not float32, float16 or bfloat16");
        q->rounding[b] = read_dtype(c);
    }
    if (!q->matmul && (ckpt_json_child(matmul) != NULL || ckpt_json_child(elementwise) != NULL))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "'matmul' and 'elementwise' need backend 'matmul', found 'fla'");
done:
    return status;
}

/* ---- canonical text --------------------------------------------------------------------------- */

static void print_handles(ckpt_buf *b, const ckpt_quant *q)
{
    static const char *const attributes[] = {
        [CKPT_QUANT_OFF] = "{\"enable\":false}",
        [CKPT_QUANT_FP8] =
            "{\"axis\":[0,1,2],\"enable\":true,\"num_bits\":[4,3],\"type\":\"dynamic\"}",
        [CKPT_QUANT_NVFP4] =
            "{\"block_sizes\":{\"-1\":16,\"scale_bits\":[4,3],\"type\":\"dynamic\"},"
            "\"enable\":true,\"num_bits\":[2,1],\"type\":\"dynamic\"}",
        [CKPT_QUANT_STATE_E4M3] =
            "{\"axis\":[0,1],\"enable\":true,\"num_bits\":[4,3],\"type\":\"dynamic\"}",
        [CKPT_QUANT_STATE_INT8] =
            "{\"axis\":[0,1],\"enable\":true,\"narrow_range\":true,\"num_bits\":8,"
            "\"type\":\"dynamic\"}",
    };
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++)
        ckpt_buf_printf(b, "%s\"%s\":%s", h > 0 ? "," : "", ckpt_handle_names[h],
                        attributes[q->kind[h]]);
}

static void print_module(ckpt_buf *b, const ckpt_policy_module *m)
{
    const ckpt_quant *q = &m->q;
    const char *comma = "";
    ckpt_buf_printf(b,
                    "\"%s\":{\"execution\":{\"backend\":\"%s\",\"chunk_size\":64,"
                    "\"elementwise\":{",
                    m->name, q->matmul ? "matmul" : "fla");
    for (int i = 0; i < CKPT_BOUNDARY_COUNT; i++) {
        if (q->rounding[i] == CKPT_QUANT_NO_ROUNDING)
            continue;
        ckpt_buf_printf(b, "%s\"%s\":\"%s\"", comma, ckpt_boundary_names[i],
                        dtype_names[q->rounding[i]]);
        comma = ",";
    }
    ckpt_buf_puts(b, "},\"matmul\":{");
    comma = "";
    for (int i = 0; i < CKPT_SITE_COUNT; i++) {
        if (q->accumulator[i] == CKPT_QUANT_NO_ROUNDING)
            continue;
        ckpt_buf_printf(b, "%s\"%s\":{\"accumulator_dtype\":\"%s\",\"reduction_block\":%lld}",
                        comma, ckpt_site_names[i], dtype_names[q->accumulator[i]],
                        (long long)q->block[i]);
        comma = ",";
    }
    ckpt_buf_printf(b,
                    "},\"schema_version\":1,\"solve\":{\"method\":\"exact\"},\"state\":{"
                    "\"block_v\":%lld,\"mode\":\"chunk\",\"quantize_initial\":true}},"
                    "\"quantizers\":{",
                    (long long)q->block_v);
    print_handles(b, q);
    ckpt_buf_puts(b, "}}");
}

void ckpt_policy_digest(const char *text, char hex[65])
{
    ckpt_sha256_stream s;
    uint8_t digest[CKPT_SHA256_LEN];
    ckpt_sha256_stream_init(&s);
    ckpt_sha256_stream_update2(&s, text, strlen(text), NULL, NULL, 0);
    ckpt_sha256_stream_final(&s, digest);
    ckpt_hex(digest, hex);
}

ckpt_status ckpt_policy_note(ckpt_json **metadata, const char *key, const ckpt_json *value,
                             ckpt_err *err)
{
    const char *before = ckpt_json_string(ckpt_json_get(*metadata, key));
    const char *text = ckpt_json_string(value);
    if (before != NULL && text != NULL && strcmp(before, text) == 0)
        return CKPT_OK;
    if (before != NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is another than that of a file before it", key);
    if (*metadata == NULL)
        *metadata = ckpt_json_new_object();
    if (*metadata == NULL || !ckpt_json_set(*metadata, key, ckpt_json_dup(value)))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    return CKPT_OK;
}

/* Written loosely, then sorted and printed once more by json.c: one definition of the canonical form. */
ckpt_status ckpt_policy_print(ckpt_policy *p, ckpt_err *err)
{
    ckpt_buf loose = {0}, sorted = {0};
    ckpt_json *doc = NULL;
    ckpt_status status;
    ckpt_buf_puts(&loose, "{\"schema\":1,\"modules\":{");
    for (size_t i = 0; i < p->n; i++) {
        if (i > 0)
            ckpt_buf_putc(&loose, ',');
        print_module(&loose, &p->modules[i]);
    }
    ckpt_buf_puts(&loose, "}}");
    if (loose.failed)
        status = no_memory(err);
    else
        status = ckpt_json_parse((const char *)loose.data, loose.len, &doc, err);
    if (status == CKPT_OK && (!ckpt_json_print(doc, 0, true, &sorted) || sorted.failed))
        status = no_memory(err);
    if (status == CKPT_OK) {
        p->text = ckpt_arena_strdup(&p->arena, (const char *)sorted.data);
        if (p->text == NULL)
            status = no_memory(err);
        else
            ckpt_policy_digest(p->text, p->digest);
    }
    ckpt_json_free(doc);
    ckpt_buf_release(&loose);
    ckpt_buf_release(&sorted);
    return status;
}

/* ---- presets, ranks --------------------------------------------------------------------------- */

#define OFF "{\"quantizer_name\":\"*\",\"enable\":false}"
#define OPERANDS(cfg)                                                                              \
    ",{\"quantizer_name\":\"*linear_attn_sites.*\",\"cfg\":" cfg                                   \
    "},{\"quantizer_name\":\"*kda_w_quantizer\",\"cfg\":" cfg "}"
#define FP8 "{\"num_bits\":[4,3],\"type\":\"dynamic\",\"axis\":[0,1,2]}"
#define NVFP4                                                                                      \
    "{\"num_bits\":[2,1],\"type\":\"dynamic\",\"block_sizes\":{\"-1\":16,\"type\":\"dynamic\","    \
    "\"scale_bits\":[4,3]}}"
#define STATE                                                                                      \
    ",{\"quantizer_name\":\"*kda_state_quantizer\",\"cfg\":{\"num_bits\":[4,3],"                   \
    "\"type\":\"dynamic\",\"axis\":[0,1]}}"
#define F16(site) "\"" site "\":{\"accumulator_dtype\":\"float16\",\"reduction_block\":16}"
#define RULES(handles, execution)                                                                  \
    "{\"quant_cfg\":[" OFF handles                                                                 \
    "],\"algorithm\":null,\"linear_attention\":[{\"module_name\":\"*\",\"cfg\":{" execution "}}]}"
#define MATMUL "\"backend\":\"matmul\""

ckpt_json *ckpt_policy_preset(const char *name)
{
    static const struct {
        const char *name, *rules;
    } presets[] = {
        {"off",               RULES("",                  "")                                                          },
        {"exact_matmul",      RULES("",                  MATMUL ",\"elementwise\":{\"output_add\":\"float32\"}")      },
        {"fp8_operands",      RULES(OPERANDS(FP8),       MATMUL)                                                      },
        {"nvfp4_operands",    RULES(OPERANDS(NVFP4),     MATMUL)                                                      },
        {"fp16_accumulation",
         RULES(
             "",                                         MATMUL
             ",\"matmul\":{" F16("key_interaction") "," F16("wy_value") "," F16("wy_key") "," F16("state_read") "," F16(
                 "state_update") "," F16("output_state") "," F16("output_score") "," F16("output_"
                                                                                         "value") "}")},
        {"fp8_with_state",    RULES(OPERANDS(FP8) STATE, MATMUL)                                                      },
    };
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        ckpt_json *out = NULL;
        if (strcmp(presets[i].name, name) == 0)
            return ckpt_json_parse(presets[i].rules, strlen(presets[i].rules), &out, NULL) ==
                           CKPT_OK
                       ? out
                       : NULL;
    }
    return NULL;
}

ckpt_status ckpt_policy_check_rank(const char *precision, const char *recipe, const char *field,
                                   int64_t rank, ckpt_err *err)
{
    static const struct {
        const char *precision, *recipe;
        int64_t align;
    } rows[] = {
        {"fp8", "delayed",    16 },
        {"fp8", "tensorwise", 16 },
        {"fp8", "blockwise",  16 },
        {"fp8", "custom",     16 },
        {"fp8", "mxfp8",      32 },
        {"fp4", "nvfp4",      128},
        {"fp4", "custom",     128},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].precision, precision) != 0 || strcmp(rows[i].recipe, recipe) != 0)
            continue;
        if (rank == 0 || (rank > 0 && rank % rows[i].align == 0))
            return CKPT_OK;
        return ckpt_fail(
            err, CKPT_E_UNSUPPORTED, "KDA requires %s to be a multiple of %lld under %s, got %lld.",
            field, (long long)rows[i].align, precision[2] == '8' ? "FP8" : "FP4", (long long)rank);
    }
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "unknown recipe '%s' of '%s'", recipe, precision);
}
