/* Canonical configuration: keys, symbols, checks, digest. Dialects are in families/. */
#include "config.h"

#include <math.h>
#include <string.h>

#include "checked.h"

typedef enum key_type { SIZE, POSITIVE, NUMBER, BOOL, STRING, OBJECT } key_type;

typedef struct key_row {
    const char *key;
    key_type type;
    const char *symbol;
    const char *kinds;   /* pattern letters the key belongs to; NULL = all models */
    const char *allowed; /* STRING: accepted values between '|' */
} key_row;

/* clang-format off */
static const key_row keys[] = {
    {"activation",          STRING,   NULL, NULL,     "silu|relu2"},
    {"attn_bias",           BOOL,     NULL, "*",      NULL},
    {"attn_gate",           BOOL,     NULL, "*",      NULL},
    {"attn_nope",           BOOL,     NULL, "*",      NULL},
    {"expert_ffn_size",   SIZE,     "FE", "E",     NULL},
    {"experts",           SIZE,     "E",  "E",     NULL},
    {"experts_per_token", SIZE,     NULL, "E",     NULL},
    {"ffn_size",          SIZE,     "F",  "-",     NULL},
    {"gdn_conv",            SIZE,     "GW", "Gg",     NULL},
    {"gdn_key_dim",         SIZE,     "GA", "Gg",     NULL},
    {"gdn_key_heads",       SIZE,     "GK", "Gg",     NULL},
    {"gdn_value_dim",       SIZE,     "GB", "Gg",     NULL},
    {"gdn_value_heads",     SIZE,     "GV", "Gg",     NULL},
    {"head_dim",            SIZE,     "D",  "*",      NULL},
    {"heads",               SIZE,     "N",  "+*",     NULL},
    {"hidden_size",       SIZE,     "H",  NULL,    NULL},
    {"init_std",          NUMBER,   NULL, NULL,    NULL},
    {"kda_conv",          SIZE,     "W",  "K",     NULL},
    {"kda_f_rank",        SIZE,     "RF", "K",     NULL},
    {"kda_gate_rank",     SIZE,     "RG", "K",     NULL},
    {"kda_heads",         SIZE,     "NK", "K",     NULL},
    {"kda_key_dim",       SIZE,     "A",  "K",     NULL},
    {"kda_lower_bound",   NUMBER,   NULL, "K",     NULL},
    {"kda_safe_gate",     BOOL,     NULL, "K",     NULL},
    {"kda_value_dim",     SIZE,     "B",  "K",     NULL},
    {"kv_heads",            SIZE,     "G",  "*",      NULL},
    {"kv_lora_rank",      SIZE,     "RK", "+",     NULL},
    {"latent_norm",       BOOL,     NULL, "+",     NULL},
    {"mamba_conv",          SIZE,     "MW", "M",      NULL},
    {"mamba_groups",        SIZE,     "MG", "M",      NULL},
    {"mamba_head_dim",      SIZE,     "MD", "M",      NULL},
    {"mamba_heads",         SIZE,     "MN", "M",      NULL},
    {"mamba_state",         SIZE,     "MT", "M",      NULL},
    {"mla_gate",          STRING,   NULL, "+",     "headwise|elementwise"},
    {"mla_nope",          BOOL,     NULL, "+",     NULL},
    {"mtp_blocks",          SIZE,     NULL, NULL,     NULL},
    {"mtp_layers",          SIZE,     NULL, NULL,     NULL},
    {"norm_eps",          POSITIVE, NULL, NULL,    NULL},
    {"norm_zero_centered",  BOOL,     NULL, NULL,     NULL},
    {"pattern",           STRING,   NULL, NULL,    NULL},
    {"q_lora_rank",       SIZE,     "RQ", "+",     NULL},
    {"qk_nope_dim",       SIZE,     "DN", "+",     NULL},
    {"qk_norm",             BOOL,     NULL, "*",      NULL},
    {"qk_rope_dim",       SIZE,     "DR", "+",     NULL},
    {"rope_percent",        POSITIVE, NULL, "*",      NULL},
    {"rope_scaling",      OBJECT,   NULL, "+*",    NULL},
    {"rope_theta",        POSITIVE, NULL, "+*",    NULL},
    {"rope_type",           STRING,   NULL, "+*",     "rope|yarn|llama3"},
    {"router_bias",       BOOL,     NULL, "E",     NULL},
    {"router_group_best", SIZE,     NULL, "E",     NULL},
    {"router_group_topk", SIZE,     NULL, "E",     NULL},
    {"router_groups",     SIZE,     NULL, "E",     NULL},
    {"router_normalize",  BOOL,     NULL, "E",     NULL},
    {"router_scale",      POSITIVE, NULL, "E",     NULL},
    {"router_score",      STRING,   NULL, "E",     "sigmoid|softmax"},
    {"shared_ffn_size",   SIZE,     "FS", "E",     NULL},
    {"shared_gate",       BOOL,     NULL, "E",     NULL},
    {"tied",              BOOL,     NULL, NULL,    NULL},
    {"v_head_dim",        SIZE,     "DV", "+",     NULL},
    {"vocab_size",        SIZE,     "V",  NULL,    NULL},
};
/* clang-format on */
#define N_KEYS (sizeof keys / sizeof keys[0])

static const key_row *find_key(const char *key)
{
    for (size_t i = 0; i < N_KEYS; i++)
        if (strcmp(keys[i].key, key) == 0)
            return &keys[i];
    return NULL;
}

static int64_t int_of(const ckpt_json *canon, const char *key)
{
    int64_t v = 0;
    return ckpt_json_int(ckpt_json_get(canon, key), &v) ? v : 0;
}

static bool applies(const key_row *row, const char *pattern)
{
    return row->kinds == NULL || (pattern != NULL && strpbrk(pattern, row->kinds) != NULL);
}

/* ---- checks ---------------------------------------------------------------------------------- */

static ckpt_status bad(const char *key, const ckpt_json *found, const char *expected, ckpt_err *err)
{
    ckpt_buf buf = {0};
    bool ok = ckpt_json_print(found, 0, true, &buf) && buf.data != NULL;
    ckpt_status status = ckpt_fail(err, CKPT_E_FORMAT, "'%s': found %.64s, expected %s", key,
                                   ok ? (const char *)buf.data : "?", expected);
    ckpt_buf_release(&buf);
    return status;
}

static bool listed(const char *allowed, const char *value)
{
    for (size_t n; *allowed != '\0'; allowed += n + (allowed[n] == '|')) {
        n = strcspn(allowed, "|");
        if (strlen(value) == n && memcmp(allowed, value, n) == 0)
            return true;
    }
    return false;
}

static ckpt_status check_value(const key_row *row, const ckpt_json *j, ckpt_err *err)
{
    int64_t i = 0;
    double v = 0;
    const char *s = ckpt_json_string(j);
    switch (row->type) {
    case SIZE:
        return ckpt_json_int(j, &i) && i > 0 ? CKPT_OK : bad(row->key, j, "an integer > 0", err);
    case POSITIVE:
        return ckpt_json_double(j, &v) && v > 0 && isfinite(v)
                   ? CKPT_OK
                   : bad(row->key, j, "a number > 0", err);
    case NUMBER:
        return ckpt_json_double(j, &v) && isfinite(v) ? CKPT_OK : bad(row->key, j, "a number", err);
    case BOOL:
        return ckpt_json_is_bool(j) ? CKPT_OK : bad(row->key, j, "true or false", err);
    case STRING:
        if (s == NULL || (row->allowed != NULL && !listed(row->allowed, s)))
            return bad(row->key, j, row->allowed != NULL ? row->allowed : "a string", err);
        return CKPT_OK;
    case OBJECT:
        return ckpt_json_is_object(j) ? CKPT_OK : bad(row->key, j, "an object", err);
    }
    return ckpt_fail(err, CKPT_E_INTERNAL, "key '%s' has no type", row->key);
}

static ckpt_status check_pattern(const char *pattern, ckpt_err *err)
{
    if (*pattern == '\0')
        return ckpt_fail(err, CKPT_E_FORMAT, "'pattern': empty, expected one letter a block");
    for (size_t i = 0; pattern[i] != '\0'; i++)
        if (!strchr("K+*Gg-EM", pattern[i]))
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "'pattern': block %zu is '%c', expected one of K + * G g - E M", i,
                             pattern[i]);
    return CKPT_OK;
}

static ckpt_status check_gate_bound(const ckpt_json *canon, ckpt_err *err)
{
    bool safe = false;
    double bound = 0;
    const ckpt_json *j = ckpt_json_get(canon, "kda_lower_bound");
    safe = ckpt_json_bool(ckpt_json_get(canon, "kda_safe_gate"), &safe) && safe;
    if (!safe)
        return j == NULL ? CKPT_OK
                         : bad("kda_lower_bound", j, "nothing without 'kda_safe_gate'", err);
    if (j == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "'kda_lower_bound': missing, but 'kda_safe_gate' needs -5 <= bound < 0");
    if (!ckpt_json_double(j, &bound) || bound < -5 || bound >= 0)
        return bad("kda_lower_bound", j, "-5 <= bound < 0", err);
    return CKPT_OK;
}

static ckpt_status check_router(const ckpt_json *canon, ckpt_err *err)
{
    int64_t experts = int_of(canon, "experts"), topk = int_of(canon, "experts_per_token");
    int64_t groups = int_of(canon, "router_groups"), limit = int_of(canon, "router_group_topk");
    if (experts > 0 && topk > experts)
        return bad("experts_per_token", ckpt_json_get(canon, "experts_per_token"),
                   "at most 'experts'", err);
    if (experts > 0 && groups > 0 && experts % groups != 0)
        return bad("router_groups", ckpt_json_get(canon, "router_groups"), "a divisor of 'experts'",
                   err);
    if (groups > 0 && limit > groups)
        return bad("router_group_topk", ckpt_json_get(canon, "router_group_topk"),
                   "at most 'router_groups'", err);
    if (experts > 0 && groups > 0 && int_of(canon, "router_group_best") > experts / groups)
        return bad("router_group_best", ckpt_json_get(canon, "router_group_best"),
                   "at most the experts of a group", err);
    /* The chosen groups must hold as many experts as are chosen. */
    if (experts > 0 && groups > 0 && limit > 0 && topk > experts / groups * limit)
        return bad("router_group_topk", ckpt_json_get(canon, "router_group_topk"),
                   "groups that hold 'experts_per_token' experts", err);
    return CKPT_OK;
}

static ckpt_status check_multiple(const ckpt_json *canon, const char *key, const char *of,
                                  ckpt_err *err)
{
    int64_t n = int_of(canon, key), m = int_of(canon, of);
    if (n > 0 && m > 0 && n % m != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s': found %lld, expected a multiple of '%s' %lld",
                         key, (long long)n, of, (long long)m);
    return CKPT_OK;
}

/* The depths of multi-token prediction have equally many blocks, and a main stack precedes them. */
static ckpt_status check_mtp(const ckpt_json *canon, ckpt_err *err)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    int64_t depths = int_of(canon, "mtp_layers"), blocks = int_of(canon, "mtp_blocks");
    if ((depths > 0) != (blocks > 0))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s': missing beside '%s'",
                         depths > 0 ? "mtp_blocks" : "mtp_layers",
                         depths > 0 ? "mtp_layers" : "mtp_blocks");
    if (pattern != NULL && blocks > 0 && (uint64_t)blocks >= strlen(pattern))
        return ckpt_fail(err, CKPT_E_FORMAT, "'mtp_blocks': found %lld of %zu blocks",
                         (long long)blocks, strlen(pattern));
    return check_multiple(canon, "mtp_blocks", "mtp_layers", err);
}

ckpt_status ckpt_config_check(const ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (!ckpt_json_is_object(canon))
        return ckpt_fail(err, CKPT_E_FORMAT, "the canonical configuration is not an object");
    for (const ckpt_json *c = ckpt_json_child(canon); c != NULL; c = ckpt_json_next(c)) {
        const key_row *row = find_key(ckpt_json_key(c));
        if (row == NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "'%s': unknown canonical key", ckpt_json_key(c));
        CKPT_CHECK(check_value(row, c, err));
    }
    const char *pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    if (pattern != NULL)
        CKPT_CHECK(check_pattern(pattern, err));
    CKPT_CHECK(check_gate_bound(canon, err));
    CKPT_CHECK(check_router(canon, err));
    CKPT_CHECK(check_multiple(canon, "heads", "kv_heads", err));
    CKPT_CHECK(check_multiple(canon, "gdn_value_heads", "gdn_key_heads", err));
    CKPT_CHECK(check_mtp(canon, err));
done:
    return status;
}

/* ---- symbols --------------------------------------------------------------------------------- */

static ckpt_status bind(ckpt_symtab *syms, const char *name, int64_t v, ckpt_err *err)
{
    return ckpt_sym_set(syms, name, v) ? CKPT_OK
                                       : ckpt_fail(err, CKPT_E_INTERNAL, "too many symbols");
}

static int64_t symbol(const ckpt_symtab *syms, const char *name)
{
    return ckpt_sym_get(syms, name, strlen(name));
}

/* Sizes that follow from others; the divisions are exact by ckpt_config_check. */
static ckpt_status bind_derived(const ckpt_json *canon, ckpt_symtab *syms, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t heads = int_of(canon, "heads"), groups = int_of(canon, "kv_heads");
    int64_t values = int_of(canon, "gdn_value_heads"), keys_ = int_of(canon, "gdn_key_heads");
    int64_t depths = int_of(canon, "mtp_layers"), blocks = int_of(canon, "mtp_blocks");
    const char *pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    if (heads > 0 && groups > 0)
        CKPT_CHECK(bind(syms, "R", heads / groups, err));
    if (values > 0 && keys_ > 0)
        CKPT_CHECK(bind(syms, "U", values / keys_, err));
    if (pattern != NULL)
        CKPT_CHECK(bind(syms, "P", (int64_t)strlen(pattern) - blocks, err));
    if (depths > 0)
        CKPT_CHECK(bind(syms, "Q", blocks / depths, err));
done:
    return status;
}

ckpt_status ckpt_config_symbols(const ckpt_json *canon, ckpt_symtab *syms, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_config_check(canon, err));
    for (size_t i = 0; i < N_KEYS; i++) {
        int64_t v = keys[i].symbol != NULL ? int_of(canon, keys[i].key) : 0;
        if (v > 0)
            CKPT_CHECK(bind(syms, keys[i].symbol, v, err));
    }
    CKPT_CHECK(bind_derived(canon, syms, err));
    const char *gate = ckpt_json_string(ckpt_json_get(canon, "mla_gate"));
    int64_t rows = int_of(canon, "heads"), dv = int_of(canon, "v_head_dim");
    if (gate != NULL && strcmp(gate, "elementwise") == 0 && !ckpt_mul_i64(rows, dv, &rows))
        return ckpt_fail(err, CKPT_E_FORMAT, "'heads' times 'v_head_dim' overflows");
    if (gate != NULL && rows > 0)
        status = bind(syms, "GM", rows, err);
done:
    return status;
}

static ckpt_status fill(ckpt_json *canon, const char *key, ckpt_json *value, ckpt_err *err)
{
    if (value == NULL || !ckpt_json_set(canon, key, value))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory completing a configuration");
    return CKPT_OK;
}

/* One row a head or one a value column; with one value column a head the two are the same gate. */
static const char *gate_of_rows(const ckpt_symtab *syms)
{
    int64_t gm = symbol(syms, "GM"), n = symbol(syms, "N"), all;
    if (gm == 0 || n == 0)
        return NULL;
    if (gm == n)
        return "headwise";
    return ckpt_mul_i64(n, symbol(syms, "DV"), &all) && gm == all ? "elementwise" : NULL;
}

ckpt_status ckpt_config_complete(ckpt_json *canon, const ckpt_symtab *syms, const char *pattern,
                                 bool tied, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (pattern != NULL && ckpt_json_get(canon, "pattern") == NULL)
        CKPT_CHECK(fill(canon, "pattern", ckpt_json_new_string(pattern), err));
    pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    for (size_t i = 0; i < N_KEYS; i++) {
        int64_t v = keys[i].symbol != NULL ? symbol(syms, keys[i].symbol) : 0;
        if (v > 0 && applies(&keys[i], pattern) && ckpt_json_get(canon, keys[i].key) == NULL)
            CKPT_CHECK(fill(canon, keys[i].key, ckpt_json_new_int(v), err));
    }
    const char *gate = gate_of_rows(syms);
    if (gate != NULL && pattern != NULL && strchr(pattern, '+') != NULL &&
        ckpt_json_get(canon, "mla_gate") == NULL)
        CKPT_CHECK(fill(canon, "mla_gate", ckpt_json_new_string(gate), err));
    if (ckpt_json_get(canon, "tied") == NULL)
        CKPT_CHECK(fill(canon, "tied", ckpt_json_new_bool(tied), err));
done:
    return status;
}

ckpt_status ckpt_config_digest(const ckpt_json *canon, uint8_t out[CKPT_SHA256_LEN], ckpt_err *err)
{
    ckpt_buf buf = {0};
    ckpt_sha256 ctx = {0};
    ckpt_status status;
    if (!ckpt_json_print(canon, 0, true, &buf)) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory printing a configuration");
        goto done;
    }
    CKPT_CHECK(ckpt_sha256_init(&ctx, err));
    ckpt_sha256_update(&ctx, buf.data, buf.len);
    ckpt_sha256_final(&ctx, out);
done:
    ckpt_sha256_release(&ctx);
    ckpt_buf_release(&buf);
    return status;
}

/* ---- stored configurations ------------------------------------------------------------------- */

ckpt_status ckpt_config_padded_vocab(const ckpt_json *stored, ckpt_symtab *syms, ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(stored, "padded_vocab_size");
    int64_t v = 0;
    if (j == NULL || ckpt_json_is_null(j))
        return CKPT_OK;
    if (!ckpt_json_int(j, &v) || v <= 0)
        return bad("padded_vocab_size", j, "an integer > 0", err);
    return bind(syms, "VP", v, err);
}

/* "torch.float32", "float32" and {"$torch":"float32"} are spellings of one type. */
static bool says_dtype(const ckpt_json *j, const char *dtype)
{
    const char *s = ckpt_json_string(ckpt_json_is_object(j) ? ckpt_json_get(j, "$torch") : j);
    if (s != NULL && strncmp(s, "torch.", 6) == 0)
        s += 6;
    return s != NULL && strcmp(s, dtype) == 0;
}

static ckpt_status set_flag(ckpt_json *stored, const char *key, bool value, ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(stored, key);
    bool now = false;
    if (j == NULL ? !value : ckpt_json_bool(j, &now) && now == value)
        return CKPT_OK;
    return fill(stored, key, ckpt_json_new_bool(value), err);
}

ckpt_status ckpt_config_set_dtype(ckpt_json *stored, ckpt_config_kind kind, const char *dtype,
                                  ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (kind == CKPT_CONFIG_MEGATRON) {
        if (!says_dtype(ckpt_json_get(stored, "params_dtype"), dtype)) {
            ckpt_json *tag = ckpt_json_new_object();
            CKPT_CHECK(fill(stored, "params_dtype", tag, err));
            CKPT_CHECK(fill(tag, "$torch", ckpt_json_new_string(dtype), err));
        }
        CKPT_CHECK(set_flag(stored, "bf16", strcmp(dtype, "bfloat16") == 0, err));
        CKPT_CHECK(set_flag(stored, "fp16", strcmp(dtype, "float16") == 0, err));
    } else if (kind == CKPT_CONFIG_HF) {
        const ckpt_json *old = ckpt_json_get(stored, "torch_dtype");
        if (old != NULL && !says_dtype(old, dtype))
            CKPT_CHECK(fill(stored, "torch_dtype", ckpt_json_new_string(dtype), err));
        const ckpt_json *now = ckpt_json_get(stored, "dtype");
        if ((now != NULL || old == NULL) && !says_dtype(now, dtype))
            CKPT_CHECK(fill(stored, "dtype", ckpt_json_new_string(dtype), err));
    }
done:
    return status;
}

/* ---- groups of experts ----------------------------------------------------------------------- */

int64_t ckpt_config_group_best(const ckpt_json *canon, ckpt_config_kind kind)
{
    int64_t limit = int_of(canon, "router_group_topk");
    if (limit <= 0)
        return 0;
    return kind == CKPT_CONFIG_MEGATRON ? int_of(canon, "experts_per_token") / limit : 2;
}

ckpt_status ckpt_config_approach(ckpt_json *canon, ckpt_config_kind kind, ckpt_arena *arena,
                                 const char **line, ckpt_err *err)
{
    int64_t want = ckpt_config_group_best(canon, kind), now = int_of(canon, "router_group_best");
    *line = NULL;
    now = now == 0 ? 2 : now;
    if (want == 0 || want == now)
        return CKPT_OK;
    if (want == 2)
        ckpt_json_delete(canon, "router_group_best");
    else if (!ckpt_json_set(canon, "router_group_best", ckpt_json_new_int(want)))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    *line = ckpt_arena_printf(
        arena,
        "routing: a group of experts is scored by the sum of its best %lld, in the source by its "
        "best %lld: other experts may be chosen; the weights are exact",
        (long long)want, (long long)now);
    return *line != NULL ? CKPT_OK : ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}
