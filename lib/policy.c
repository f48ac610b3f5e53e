/* Rules to one resolved policy a module. Form and refusals: policy.h, quant-emulation.md sections 4, 5. */
#include "policy.h"

#include "hash.h"
#include "io.h"
#include "policy_internal.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#define RULES_LIMIT ((uint64_t)16 << 20) /* bytes of a file of rules */

const char *const ckpt_site_names[CKPT_SITE_COUNT] = {
    "key_interaction", "wy_value",     "wy_key",       "state_read",
    "state_update",    "output_state", "output_score", "output_value",
};

#define SITE(name) "linear_attn_sites." name "_quantizer"
const char *const ckpt_handle_names[CKPT_HANDLE_COUNT] = {
    SITE("key_interaction.lhs"), SITE("key_interaction.rhs"), SITE("wy_value.lhs"),
    SITE("wy_value.rhs"),        SITE("wy_key.lhs"),          SITE("wy_key.rhs"),
    SITE("state_read.rhs"),      SITE("state_update.lhs"),    SITE("state_update.rhs"),
    SITE("output_state.lhs"),    SITE("output_state.rhs"),    SITE("output_score.lhs"),
    SITE("output_score.rhs"),    SITE("output_value.lhs"),    SITE("output_value.rhs"),
    "kda_w_quantizer",           "kda_state_quantizer",
};

const char *const ckpt_boundary_names[CKPT_BOUNDARY_COUNT] = {
    "gate_prefix", "gate_exp", "value_residual", "state_decay", "state_add", "output_add",
};

ckpt_quant_handle ckpt_handle_of(ckpt_quant_site site, int side)
{
    static const uint8_t at[CKPT_SITE_COUNT][2] = {
        {CKPT_HANDLE_KEY_INTERACTION_LHS, CKPT_HANDLE_KEY_INTERACTION_RHS},
        {CKPT_HANDLE_WY_VALUE_LHS,        CKPT_HANDLE_WY_VALUE_RHS       },
        {CKPT_HANDLE_WY_KEY_LHS,          CKPT_HANDLE_WY_KEY_RHS         },
        {CKPT_HANDLE_W,                   CKPT_HANDLE_STATE_READ_RHS     },
        {CKPT_HANDLE_STATE_UPDATE_LHS,    CKPT_HANDLE_STATE_UPDATE_RHS   },
        {CKPT_HANDLE_OUTPUT_STATE_LHS,    CKPT_HANDLE_OUTPUT_STATE_RHS   },
        {CKPT_HANDLE_OUTPUT_SCORE_LHS,    CKPT_HANDLE_OUTPUT_SCORE_RHS   },
        {CKPT_HANDLE_OUTPUT_VALUE_LHS,    CKPT_HANDLE_OUTPUT_VALUE_RHS   },
    };
    return (ckpt_quant_handle)at[site][side];
}

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a policy");
}

/* ---- modules --------------------------------------------------------------------------------- */

/* Stored name of a tensor that every KDA module has, without its end: the module's name there. A
 * stacked tensor holds all layers, and names none. */
static const char *stored_name(ckpt_policy *p, const ckpt_model *model, int block)
{
    char name[64];
    snprintf(name, sizeof name, "blocks.%d.kda.A_log", block);
    int64_t at = ckpt_model_find(model, name);
    if (at < 0 || model->src == NULL)
        return NULL;
    const char *stored = model->src->tensors[model->tensors[at].stored].name;
    size_t n = strlen(stored);
    bool digits = strpbrk(stored, "0123456789") != NULL;
    return n > 6 && digits && strcmp(stored + n - 6, ".A_log") == 0
               ? ckpt_arena_strndup(&p->arena, stored, n - 6)
               : NULL;
}

/* Hugging Face counts a mixer and its channel mixer as one layer. */
static bool alternates(const char *pattern)
{
    for (size_t i = 0; pattern[i] != '\0'; i++)
        if ((strchr("-E", pattern[i]) != NULL) != (i % 2 == 1))
            return false;
    return true;
}

ckpt_status ckpt_policy_open(ckpt_policy *p, const ckpt_model *model, ckpt_err *err)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(model->config, "pattern"));
    size_t n = 0, len = pattern != NULL ? strlen(pattern) : 0;
    if (len > INT32_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'pattern' is too long");
    for (size_t i = 0; i < len; i++)
        n += pattern[i] == 'K';
    p->modules = ckpt_arena_array(&p->arena, n + 1, sizeof *p->modules);
    if (p->modules == NULL)
        return no_memory(err);
    for (size_t i = 0; i < len; i++) {
        if (pattern[i] != 'K')
            continue;
        ckpt_policy_module *m = &p->modules[p->n++];
        *m = (ckpt_policy_module){.block = (int)i, .q = {.block_v = 64}};
        m->name = ckpt_arena_printf(&p->arena, "blocks.%zu.kda", i);
        m->alias[0] = stored_name(p, model, (int)i);
        if (alternates(pattern)) {
            m->alias[1] = ckpt_arena_printf(&p->arena, "model.layers.%zu.self_attn", i / 2);
            m->alias[2] = ckpt_arena_printf(&p->arena, "model.layers.%zu.attn", i / 2);
        }
        if (m->name == NULL)
            return no_memory(err);
    }
    return ckpt_policy_print(p, err);
}

const ckpt_quant *ckpt_policy_of(const ckpt_policy *p, int block)
{
    for (size_t i = 0; p != NULL && i < p->n; i++)
        if (p->modules[i].block == block)
            return &p->modules[i].q;
    return NULL;
}

void ckpt_policy_release(ckpt_policy *p)
{
    ckpt_arena_free(&p->arena);
    *p = (ckpt_policy){0};
}

/* ---- rules ----------------------------------------------------------------------------------- */

/* What rules have said of a handle so far. cfg NULL: the defaults. */
typedef struct setting {
    bool enable;
    const ckpt_json *cfg;
    int rule;
} setting;

/* Python's fnmatch: no escapes, * crosses dots. */
static bool matches(const char *pattern, const char *name)
{
    return strcmp(pattern, name) == 0 || fnmatch(pattern, name, FNM_NOESCAPE) == 0;
}

static bool matches_module(const char *pattern, const ckpt_policy_module *m)
{
    bool any = matches(pattern, m->name);
    for (int i = 0; i < CKPT_POLICY_ALIASES; i++)
        any = any || (m->alias[i] != NULL && matches(pattern, m->alias[i]));
    return any;
}

static bool matches_handle(const char *pattern, const ckpt_policy_module *m, int handle)
{
    char full[320];
    for (int i = -1; i < CKPT_POLICY_ALIASES; i++) {
        const char *name = i < 0 ? m->name : m->alias[i];
        int n = name != NULL ? snprintf(full, sizeof full, "%s.%s", name, ckpt_handle_names[handle])
                             : 0;
        if (n > 0 && n < (int)sizeof full && matches(pattern, full))
            return true;
    }
    return false;
}

/* One rule of quant_cfg. */
typedef struct rule {
    const char *pattern;
    const ckpt_json *cfg; /* NULL: no attributes */
    bool enable;
} rule;

static ckpt_status read_rule(const ckpt_json *j, rule *out, ckpt_err *err)
{
    static const char *const known[] = {"quantizer_name", "cfg", "enable", NULL};
    ckpt_status status = ckpt_policy_fields(j, known, err);
    const ckpt_json *enable = ckpt_json_get(j, "enable"), *cfg = ckpt_json_get(j, "cfg");
    if (status != CKPT_OK)
        return status;
    *out = (rule){.pattern = ckpt_json_string(ckpt_json_get(j, "quantizer_name")), .enable = true};
    if (out->pattern == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "'quantizer_name' is no string");
    if (enable != NULL && !ckpt_json_bool(enable, &out->enable))
        return ckpt_fail(err, CKPT_E_FORMAT, "'enable' is neither true nor false");
    if (cfg != NULL && !ckpt_json_is_null(cfg)) {
        if (!ckpt_json_is_object(cfg))
            return ckpt_fail(err, CKPT_E_FORMAT, "'cfg' is no object");
        if (ckpt_json_child(cfg) != NULL)
            out->cfg = cfg;
        else if (out->enable)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'cfg' is empty");
    }
    if (enable == NULL && out->cfg == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "needs 'cfg' or 'enable'");
    return out->cfg != NULL ? ckpt_policy_attributes(out->cfg, err) : CKPT_OK;
}

static ckpt_status apply_rule(ckpt_policy *p, const rule *r, int index, setting *settings,
                              ckpt_err *err)
{
    bool any = false;
    for (size_t i = 0; i < p->n; i++) {
        for (int h = 0; h < CKPT_HANDLE_COUNT; h++) {
            setting *s = &settings[i * CKPT_HANDLE_COUNT + (size_t)h];
            if (!matches_handle(r->pattern, &p->modules[i], h))
                continue;
            any = true;
            s->enable = r->enable;
            s->rule = index;
            if (r->cfg != NULL)
                s->cfg = r->cfg;
        }
    }
    /* To disable by a pattern what is not there is no mistake: rules of whole models do. */
    if (any || (!r->enable && strpbrk(r->pattern, "*?[") != NULL))
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no handle '%s'", r->pattern);
}

static ckpt_status resolve_handles(ckpt_policy *p, const ckpt_json *list, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    setting *settings = ckpt_arena_array(&p->arena, p->n * CKPT_HANDLE_COUNT + 1, sizeof *settings);
    int index = 0;
    if (settings == NULL)
        return no_memory(err);
    if (list != NULL && !ckpt_json_is_array(list))
        return ckpt_fail(err, CKPT_E_FORMAT, "'quant_cfg' is no list");
    for (const ckpt_json *j = ckpt_json_child(list); j != NULL; j = ckpt_json_next(j), index++) {
        rule r;
        CKPT_TRY(read_rule(j, &r, err), "quant_cfg[%d]", index);
        CKPT_TRY(apply_rule(p, &r, index, settings, err), "quant_cfg[%d]", index);
    }
    for (size_t i = 0; i < p->n; i++) {
        for (int h = 0; h < CKPT_HANDLE_COUNT; h++) {
            const setting *s = &settings[i * CKPT_HANDLE_COUNT + (size_t)h];
            ckpt_quant_kind *kind = &p->modules[i].q.kind[h];
            *kind = CKPT_QUANT_OFF;
            if (s->enable)
                CKPT_TRY(ckpt_policy_classify(h, s->cfg, kind, err), "quant_cfg[%d]: %s.%s",
                         s->rule, p->modules[i].name, ckpt_handle_names[h]);
        }
    }
done:
    return status;
}

static ckpt_status resolve_execution(ckpt_policy *p, const ckpt_json *list, ckpt_err *err)
{
    static const char *const known[] = {"module_name", "cfg", NULL};
    ckpt_status status = CKPT_OK;
    int index = 0;
    if (list != NULL && !ckpt_json_is_array(list))
        return ckpt_fail(err, CKPT_E_FORMAT, "'linear_attention' is no list");
    for (size_t i = 0; i < p->n; i++)
        CKPT_CHECK(ckpt_policy_execution(NULL, &p->modules[i].q, err));
    for (const ckpt_json *j = ckpt_json_child(list); j != NULL; j = ckpt_json_next(j), index++) {
        const char *pattern = ckpt_json_string(ckpt_json_get(j, "module_name"));
        bool any = false;
        CKPT_TRY(ckpt_policy_fields(j, known, err), "linear_attention[%d]", index);
        for (size_t i = 0; pattern != NULL && i < p->n; i++) {
            if (!matches_module(pattern, &p->modules[i]))
                continue;
            any = true;
            CKPT_TRY(ckpt_policy_execution(ckpt_json_get(j, "cfg"), &p->modules[i].q, err),
                     "linear_attention[%d]: %s", index, p->modules[i].name);
        }
        if (pattern == NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "linear_attention[%d]: 'module_name' is no string",
                             index);
        if (!any)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "linear_attention[%d]: no KDA module '%s' in this model", index,
                             pattern);
    }
done:
    return status;
}

/* With handles and execution known: is the module emulated, and may it be? */
static ckpt_status settle(ckpt_policy *p, ckpt_err *err)
{
    p->enabled = false;
    for (size_t i = 0; i < p->n; i++) {
        ckpt_quant *q = &p->modules[i].q;
        q->enabled = false;
        for (int h = 0; h < CKPT_HANDLE_COUNT; h++)
            q->enabled = q->enabled || q->kind[h] != CKPT_QUANT_OFF;
        for (int s = 0; s < CKPT_SITE_COUNT; s++)
            q->enabled = q->enabled || q->accumulator[s] != CKPT_QUANT_NO_ROUNDING;
        for (int b = 0; b < CKPT_BOUNDARY_COUNT; b++)
            q->enabled = q->enabled || q->rounding[b] != CKPT_QUANT_NO_ROUNDING;
        if (q->enabled && !q->matmul)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "%s: quantisation emulation needs backend 'matmul', found 'fla'",
                             p->modules[i].name);
        p->enabled = p->enabled || q->enabled;
    }
    return ckpt_policy_print(p, err);
}

ckpt_status ckpt_policy_resolve(ckpt_policy *p, const ckpt_json *rules, ckpt_err *err)
{
    static const char *const known[] = {"quant_cfg", "linear_attention", "algorithm", NULL};
    ckpt_status status;
    const ckpt_json *algorithm = ckpt_json_get(rules, "algorithm");
    CKPT_CHECK(ckpt_policy_fields(rules, known, err));
    if (algorithm != NULL && !ckpt_json_is_null(algorithm))
        return ckpt_fail(
            err, CKPT_E_UNSUPPORTED,
            "'algorithm' is not null: scales are dynamic, there is nothing to calibrate");
    CKPT_CHECK(resolve_handles(p, ckpt_json_get(rules, "quant_cfg"), err));
    CKPT_CHECK(resolve_execution(p, ckpt_json_get(rules, "linear_attention"), err));
    CKPT_CHECK(settle(p, err));
done:
    return status;
}

ckpt_status ckpt_policy_load(ckpt_policy *p, const char *path, ckpt_err *err)
{
    ckpt_buf text = {0};
    ckpt_json *rules = NULL;
    ckpt_status status;
    CKPT_CHECK(ckpt_read_file(path, RULES_LIMIT, &text, err));
    CKPT_TRY(ckpt_json_parse((const char *)text.data, text.len, &rules, err), "%s", path);
    CKPT_TRY(ckpt_policy_resolve(p, rules, err), "%s", path);
done:
    ckpt_json_free(rules);
    ckpt_buf_release(&text);
    return status;
}

/* ---- stored text ------------------------------------------------------------------------------ */

static ckpt_status restore_handle(const ckpt_json *j, int handle, ckpt_quant *q, ckpt_err *err)
{
    bool enable = false;
    if (!ckpt_json_is_object(j) || !ckpt_json_bool(ckpt_json_get(j, "enable"), &enable))
        return ckpt_fail(err, CKPT_E_FORMAT, "'enable' is neither true nor false");
    ckpt_json *cfg = ckpt_json_dup(j);
    if (cfg == NULL)
        return no_memory(err);
    ckpt_json_delete(cfg, "enable");
    ckpt_status status = ckpt_policy_attributes(cfg, err);
    if (status == CKPT_OK && enable)
        status = ckpt_policy_classify(handle, cfg, &q->kind[handle], err);
    ckpt_json_free(cfg);
    return status;
}

static ckpt_status restore_module(ckpt_policy_module *m, const ckpt_json *j, ckpt_err *err)
{
    static const char *const known[] = {"execution", "quantizers", NULL};
    ckpt_status status;
    const ckpt_json *list = ckpt_json_get(j, "quantizers");
    CKPT_CHECK(ckpt_policy_fields(j, known, err));
    for (int h = 0; h < CKPT_HANDLE_COUNT; h++)
        m->q.kind[h] = CKPT_QUANT_OFF; /* what is not stored is disabled */
    CKPT_CHECK(ckpt_policy_execution(ckpt_json_get(j, "execution"), &m->q, err));
    if (!ckpt_json_is_object(list))
        return ckpt_fail(err, CKPT_E_FORMAT, "'quantizers' is no object");
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c)) {
        int h = ckpt_policy_index(ckpt_handle_names, CKPT_HANDLE_COUNT, ckpt_json_key(c));
        if (h < 0)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no handle '%s'", ckpt_json_key(c));
        CKPT_TRY(restore_handle(c, h, &m->q, err), "%s", ckpt_json_key(c));
    }
done:
    return status;
}

static ckpt_status restore_modules(ckpt_policy *p, const ckpt_json *doc, ckpt_err *err)
{
    static const char *const known[] = {"schema", "modules", NULL};
    int64_t schema = 0;
    ckpt_status status;
    const ckpt_json *list = ckpt_json_get(doc, "modules");
    CKPT_CHECK(ckpt_policy_fields(doc, known, err));
    if (!ckpt_json_int(ckpt_json_get(doc, "schema"), &schema) || schema != 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'schema' is not 1");
    if (!ckpt_json_is_object(list))
        return ckpt_fail(err, CKPT_E_FORMAT, "'modules' is no object");
    for (size_t i = 0; i < p->n; i++) {
        const ckpt_json *j = ckpt_json_get(list, p->modules[i].name);
        if (j == NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "module %s of the model is missing",
                             p->modules[i].name);
        CKPT_TRY(restore_module(&p->modules[i], j, err), "%s", p->modules[i].name);
    }
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c)) {
        bool there = false;
        for (size_t i = 0; i < p->n && !there; i++)
            there = strcmp(p->modules[i].name, ckpt_json_key(c)) == 0;
        if (!there)
            return ckpt_fail(err, CKPT_E_FORMAT, "module %s is not in the model", ckpt_json_key(c));
    }
    CKPT_CHECK(settle(p, err));
done:
    return status;
}

ckpt_status ckpt_policy_restore(ckpt_policy *p, const char *text, const char *digest, ckpt_err *err)
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_json *doc = NULL;
    ckpt_status status;
    ckpt_policy_digest(text, hex);
    if (digest != NULL && strcmp(digest, hex) != 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "stored quantisation policy: its SHA-256 is %s, expected %.80s", hex,
                         digest);
    CKPT_TRY(ckpt_json_parse(text, strlen(text), &doc, err), "stored quantisation policy");
    CKPT_TRY(restore_modules(p, doc, err), "stored quantisation policy");
done:
    ckpt_json_free(doc);
    return status;
}
