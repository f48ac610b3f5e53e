/* Is what was bound a whole model, and does it agree with its configuration? */
#include "checked.h"
#include "model_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const ckpt_kind ckpt_kinds[CKPT_N_KINDS] = {
    {"kda",   'K'},
    {"mla",   '+'},
    {"attn",  '*'},
    {"gdn",   'G'},
    {"mlp",   '-'},
    {"moe",   'E'},
    {"mamba", 'M'},
    {"gdn2",  'g'},
};

int ckpt_kind_of(const char *name, size_t n)
{
    for (int k = 0; k < CKPT_N_KINDS; k++)
        if (strlen(ckpt_kinds[k].name) == n && memcmp(ckpt_kinds[k].name, name, n) == 0)
            return k;
    return CKPT_NO_KIND;
}

ckpt_status ckpt_bind_note(ckpt_binder *b, ckpt_err *err, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    void *notes = b->m->notes;
    ckpt_status status =
        ckpt_grow(&notes, &b->cap_notes, b->m->n_notes + 1, sizeof *b->m->notes, err);
    b->m->notes = notes;
    if (status != CKPT_OK)
        return status;
    const char *kept = ckpt_arena_strdup(&b->m->arena, text);
    if (kept == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    b->m->notes[b->m->n_notes++] = kept;
    return CKPT_OK;
}

/* ---- completeness ------------------------------------------------------------------------------ */

/* Is `word` (a canonical suffix, with {e} expanded over E) present below prefix? */
static bool have_tensor(const ckpt_binder *b, const char *prefix, const char *word, size_t n,
                        char *missing, size_t missing_size)
{
    char pattern[256], name[320];
    snprintf(pattern, sizeof pattern, "%s%.*s", prefix, (int)n, word);
    int64_t count = strstr(pattern, "{e}") != NULL ? ckpt_sym_get(&b->m->syms, "E", 1) : 1;
    for (int64_t e = 0; e < (count > 0 ? count : 1); e++) {
        const char *hole = strstr(pattern, "{e}");
        if (hole != NULL)
            snprintf(name, sizeof name, "%.*s%lld%s", (int)(hole - pattern), pattern, (long long)e,
                     hole + 3);
        else
            snprintf(name, sizeof name, "%s", pattern);
        if (ckpt_model_find(b->m, name) < 0) {
            snprintf(missing, missing_size, "%s", name);
            return false;
        }
    }
    return true;
}

/* One requirement "a/b+c": some alternative whole. */
static bool have_group(const ckpt_binder *b, const char *prefix, const char *group, size_t n,
                       char *missing, size_t missing_size)
{
    const char *end = group + n;
    char first[320] = "";
    while (group < end) {
        size_t alt = 0;
        bool all = true;
        while (group + alt < end && group[alt] != '/')
            alt++;
        for (size_t i = 0; i < alt && all;) {
            size_t word = 0;
            while (i + word < alt && group[i + word] != '+')
                word++;
            all = have_tensor(b, prefix, group + i, word, missing, missing_size);
            i += word + 1;
        }
        if (all)
            return true;
        if (first[0] == '\0')
            snprintf(first, sizeof first, "%s", missing);
        group += alt + 1;
    }
    snprintf(missing, missing_size, "%s", first);
    return false;
}

/* A word may start with a condition: "gated:" where MLPs have a gate, "KEY:" where the configuration
 * says that KEY is true. Steps over it; false if the word does not apply. */
static bool condition_holds(const ckpt_binder *b, const char **word, size_t *n)
{
    char key[32];
    const char *colon = memchr(*word, ':', *n);
    if (colon == NULL)
        return true;
    size_t len = (size_t)(colon - *word);
    snprintf(key, sizeof key, "%.*s", (int)len, *word);
    *word += len + 1;
    *n -= len + 1;
    bool value = false;
    const char *activation = ckpt_json_string(ckpt_json_get(b->m->config, "activation"));
    if (strcmp(key, "gated") == 0)
        return activation == NULL || strcmp(activation, "relu2") != 0;
    return ckpt_json_bool(ckpt_json_get(b->m->config, key), &value) && value;
}

/* Check one "kind: words" section for one prefix. */
static ckpt_status check_words(ckpt_binder *b, const char *prefix, const char *words, size_t n,
                               ckpt_err *err)
{
    for (size_t i = 0; i < n;) {
        size_t word = 0;
        char missing[320];
        while (i + word < n && words[i + word] != ' ')
            word++;
        const char *text = words + i;
        size_t n_text = word;
        if (word > 0 && condition_holds(b, &text, &n_text) &&
            !have_group(b, prefix, text, n_text, missing, sizeof missing)) {
            if (!b->opts->lenient)
                return ckpt_fail(err, CKPT_E_FORMAT, "missing tensor %s (layout %s)", missing,
                                 b->layout->name);
            ckpt_status status = ckpt_bind_note(b, err, "missing tensor %s", missing);
            if (status != CKPT_OK)
                return status;
        }
        i += word + 1;
    }
    return CKPT_OK;
}

/* First block and number of blocks of every depth of multi-token prediction, as far as blocks go. */
static ckpt_status check_depths(ckpt_binder *b, const char *words, size_t n, ckpt_err *err)
{
    int64_t at = ckpt_sym_get(&b->m->syms, "P", 1), step = ckpt_sym_get(&b->m->syms, "Q", 1);
    for (; at > 0 && (uint64_t)at < b->n_blocks; at += step) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "mtp.%lld.", (long long)at);
        ckpt_status status = check_words(b, prefix, words, n, err);
        if (status != CKPT_OK || step == 0)
            return status;
    }
    return CKPT_OK;
}

ckpt_status ckpt_bind_complete(ckpt_binder *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (const char *p = b->layout->required; p != NULL && *p != '\0';) {
        while (*p == ' ')
            p++;
        size_t n = strcspn(p, ";");
        const char *colon = memchr(p, ':', n);
        if (colon == NULL)
            break;
        const char *words = colon + 1;
        size_t n_words = n - (size_t)(words - p);
        int kind = ckpt_kind_of(p, (size_t)(colon - p));
        if (strncmp(p, "mtp:", 4) == 0)
            CKPT_CHECK(check_depths(b, words, n_words, err));
        else if (kind == CKPT_NO_KIND)
            CKPT_CHECK(check_words(b, "", words, n_words, err));
        for (size_t i = 0; kind != CKPT_NO_KIND && i < b->n_blocks; i++) {
            char prefix[64];
            snprintf(prefix, sizeof prefix, "blocks.%zu.%s.", i, ckpt_kinds[kind].name);
            if (b->block_kind[i] == kind)
                CKPT_CHECK(check_words(b, prefix, words, n_words, err));
        }
        p += n + (p[n] == ';');
    }
done:
    return status;
}

ckpt_status ckpt_bind_depths_stored(ckpt_binder *b, ckpt_err *err)
{
    ckpt_json *config = b->m->config;
    const char *pattern = ckpt_json_string(ckpt_json_get(config, "pattern"));
    int64_t depths = 0, blocks = 0;
    if (pattern == NULL || !ckpt_json_int(ckpt_json_get(config, "mtp_layers"), &depths) ||
        !ckpt_json_int(ckpt_json_get(config, "mtp_blocks"), &blocks))
        return CKPT_OK;
    int64_t first = (int64_t)strlen(pattern) - blocks;
    for (size_t i = 0; i < b->n_matches; i++)
        if (b->matches[i].block >= first &&
            ckpt_row_copy_of(&b->layout->rows[b->matches[i].row]) == NULL)
            return CKPT_OK;
    char *kept = ckpt_arena_strndup(&b->m->arena, pattern, (size_t)first);
    if (kept == NULL || !ckpt_json_set(config, "pattern", ckpt_json_new_string(kept)))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    ckpt_json_delete(config, "mtp_layers");
    ckpt_json_delete(config, "mtp_blocks");
    return ckpt_bind_note(b, err,
                          "%lld depth%s of multi-token prediction configured, but no tensor of "
                          "%s stored",
                          (long long)depths, depths == 1 ? " is" : "s are",
                          depths == 1 ? "it" : "them");
}

/* What follows from the presence of tensors: found in the configuration, or added to it. */
static ckpt_status check_present(ckpt_binder *b, ckpt_err *err)
{
    static const struct {
        char letter;
        const char *key, *tail;
        bool always;  /* stated when false, too */
        bool lacking; /* may be missing although the configuration has it: some of Megatron's MLA
                         layers have no latent norms whatever qk_layernorm says. One that is stored
                         although it is off is always refused: to run it would add a norm. */
    } flags[] = {
        {'*', "attn_bias",   ".attn.q.bias",          false, false},
        {'*', "attn_gate",   ".attn.gate.weight",     false, false},
        {'*', "qk_norm",     ".attn.q_norm.weight",   true,  false},
        {'+', "latent_norm", ".mla.kv_a_norm.weight", true,  true },
    };
    ckpt_model *m = b->m;
    for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++) {
        const char *seen = NULL;
        bool said = false, has = false;
        for (size_t i = 0; i < b->n_blocks; i++)
            has = has ||
                  (b->block_kind[i] >= 0 && ckpt_kinds[b->block_kind[i]].letter == flags[f].letter);
        if (!has)
            continue;
        for (size_t i = 0; i < m->n_tensors && seen == NULL; i++) {
            size_t n = strlen(m->tensors[i].name), tail = strlen(flags[f].tail);
            if (n > tail && strcmp(m->tensors[i].name + n - tail, flags[f].tail) == 0)
                seen = m->tensors[i].name;
        }
        bool stated = ckpt_json_bool(ckpt_json_get(m->config, flags[f].key), &said);
        if (b->configured && said != (seen != NULL) && !(said && flags[f].lacking)) {
            ckpt_err found = {0};
            ckpt_status status =
                ckpt_fail(&found, CKPT_E_FORMAT, "configuration says %s %s, but %s%s", flags[f].key,
                          said ? "true" : "false", seen != NULL ? seen : flags[f].tail + 1,
                          seen != NULL ? " is stored" : " is missing");
            if (!b->opts->lenient)
                return ckpt_fail(err, status, "%s", found.text);
            if (ckpt_bind_note(b, err, "%s", found.text) != CKPT_OK)
                return CKPT_E_NOMEM;
        }
        if (!b->configured && !stated && (flags[f].always || seen != NULL) &&
            !ckpt_json_set(m->config, flags[f].key, ckpt_json_new_bool(seen != NULL)))
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    }
    return CKPT_OK;
}

/* Depths of multi-token prediction that no configuration mentions. */
static ckpt_status add_depths(ckpt_binder *b, ckpt_err *err)
{
    ckpt_model *m = b->m;
    int64_t depths = 0;
    int64_t blocks = (int64_t)b->n_blocks - ckpt_sym_get(&m->syms, "P", 1);
    for (size_t i = 0; i < m->n_tensors; i++) {
        const char *name = m->tensors[i].name;
        size_t n = strlen(name);
        depths += strncmp(name, "mtp.", 4) == 0 && n > 15 &&
                  strcmp(name + n - 15, ".eh_proj.weight") == 0;
    }
    if (ckpt_json_get(m->config, "mtp_layers") != NULL || depths == 0 || blocks <= 0)
        return CKPT_OK;
    if (!ckpt_json_set(m->config, "mtp_layers", ckpt_json_new_int(depths)) ||
        !ckpt_json_set(m->config, "mtp_blocks", ckpt_json_new_int(blocks)) ||
        !ckpt_sym_set(&m->syms, "Q", blocks / depths))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    return CKPT_OK;
}

/* Multi-token prediction that is stored, but that the configuration does not mention (Qwen3-Next has
 * no field for it): the pattern seen takes the place of the configured one. */
static ckpt_status extend_pattern(ckpt_binder *b, const char *seen, const char **pattern,
                                  ckpt_err *err)
{
    char name[64];
    ckpt_model *m = b->m;
    size_t n = *pattern != NULL ? strlen(*pattern) : 0;
    snprintf(name, sizeof name, "mtp.%zu.eh_proj.weight", n);
    if (n == 0 || n >= b->n_blocks || memcmp(*pattern, seen, n) != 0 ||
        ckpt_json_get(m->config, "mtp_layers") != NULL || ckpt_model_find(m, name) < 0)
        return CKPT_OK;
    if (!ckpt_json_set(m->config, "pattern", ckpt_json_new_string(seen)))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    *pattern = seen;
    return ckpt_bind_note(b, err,
                          "multi-token prediction is stored, which the configuration does not "
                          "mention");
}

/* Blocks seen against the configured pattern; the head against the tied flag. */
ckpt_status ckpt_bind_config(ckpt_binder *b, char **pattern_out, ckpt_err *err)
{
    ckpt_model *m = b->m;
    const char *pattern = ckpt_json_string(ckpt_json_get(m->config, "pattern"));
    char *seen = ckpt_arena_alloc(&m->arena, b->n_blocks + 1);
    if (seen == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    for (size_t i = 0; i < b->n_blocks; i++) {
        if (b->block_kind[i] == CKPT_NO_KIND) {
            if (!b->opts->lenient)
                return ckpt_fail(err, CKPT_E_FORMAT, "block %zu of %zu has no tensors", i,
                                 b->n_blocks);
            seen[i] = '?';
            continue;
        }
        seen[i] = ckpt_kinds[b->block_kind[i]].letter;
    }
    *pattern_out = seen;
    m->n_blocks = (int)b->n_blocks;
    if (b->opts->lenient)
        return CKPT_OK;
    ckpt_status status = extend_pattern(b, seen, &pattern, err);
    if (status != CKPT_OK)
        return status;
    if (pattern != NULL && strlen(pattern) != b->n_blocks)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "configuration has %zu blocks (%s), the tensors have %zu (%s)",
                         strlen(pattern), pattern, b->n_blocks, seen);
    bool tied = false;
    bool known = ckpt_json_bool(ckpt_json_get(m->config, "tied"), &tied);
    if (known && !tied && ckpt_model_find(m, "head.weight") < 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "missing tensor head.weight: the configuration says the head is not tied");
    return CKPT_OK;
}

/* What a manifest says of a model without a configuration of its own, where the tensors do not say
 * otherwise: every size and every block that they show must be the same. */
static ckpt_status adopt_config(ckpt_binder *b, ckpt_err *err)
{
    ckpt_json *config = b->m->config;
    const ckpt_json *said = b->opts->config;
    if (b->configured || said == NULL)
        return CKPT_OK;
    for (const ckpt_json *c = ckpt_json_child(config); c != NULL; c = ckpt_json_next(c)) {
        const ckpt_json *other = ckpt_json_get(said, ckpt_json_key(c));
        if (other == NULL || !ckpt_json_equal(c, other))
            return CKPT_OK;
    }
    for (const ckpt_json *c = ckpt_json_child(said); c != NULL; c = ckpt_json_next(c))
        if (ckpt_json_get(config, ckpt_json_key(c)) == NULL &&
            !ckpt_json_set(config, ckpt_json_key(c), ckpt_json_dup(c)))
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory completing a configuration");
    return CKPT_OK;
}

ckpt_status ckpt_bind_finish(ckpt_binder *b, const char *pattern, ckpt_err *err)
{
    ckpt_model *m = b->m;
    ckpt_status status = CKPT_OK;
    ckpt_err found = {0};
    int64_t embed = ckpt_model_find(m, "embed.weight");
    if (ckpt_sym_get(&m->syms, "V", 1) == 0 && embed >= 0)
        (void)ckpt_sym_set(&m->syms, "V", m->tensors[embed].dims[0]);
    bool tied = ckpt_model_find(m, "head.weight") < 0;
    if (b->layout->config_read == NULL && b->n_blocks == 0)
        return CKPT_OK; /* a user's table for something that is no stack of blocks */
    CKPT_CHECK(check_present(b, err));
    CKPT_CHECK(add_depths(b, err));
    CKPT_CHECK(ckpt_config_complete(m->config, &m->syms, pattern, tied, err));
    CKPT_CHECK(adopt_config(b, err));
    int64_t mtp_blocks = 0;
    (void)ckpt_json_int(ckpt_json_get(m->config, "mtp_blocks"), &mtp_blocks);
    m->n_main = m->n_blocks - (int)mtp_blocks;
    if (!b->opts->lenient)
        CKPT_TRY(ckpt_config_check(m->config, err), "configuration");
    else if (ckpt_config_check(m->config, &found) != CKPT_OK)
        status = ckpt_bind_note(b, err, "configuration: %s", found.text);
done:
    return status;
}

static int mesh_field(const ckpt_json *config, const char *key)
{
    int64_t v;
    return ckpt_json_int(ckpt_json_get(config, key), &v) && v > 0 && v < 65536 ? (int)v : 1;
}

void ckpt_mesh_from_args(ckpt_model *m)
{
    m->mesh = (ckpt_mesh){1, 1, 1, 0, 1, 1};
    if (m->src->config_kind == CKPT_CONFIG_MEGATRON) {
        const ckpt_json *c = m->src->config;
        m->mesh.tp = mesh_field(c, "tensor_model_parallel_size");
        m->mesh.pp = mesh_field(c, "pipeline_model_parallel_size");
        m->mesh.cp = mesh_field(c, "context_parallel_size");
        m->mesh.ep = mesh_field(c, "expert_model_parallel_size");
        if (ckpt_json_get(c, "expert_tensor_parallel_size") != NULL)
            m->mesh.etp = mesh_field(c, "expert_tensor_parallel_size");
    }
    if (m->mesh.etp == 0)
        m->mesh.etp = m->mesh.tp;
}

/* A container that cuts tensors shows TP by the chunks of the embedding; that beats the arguments,
 * which a resharded checkpoint carries unchanged. */
void ckpt_mesh_from_chunks(ckpt_model *m)
{
    int64_t embed = ckpt_model_find(m, "embed.weight");
    if (embed < 0 || m->src->config_kind != CKPT_CONFIG_MEGATRON)
        return;
    size_t n = m->src->tensors[m->tensors[embed].stored].n_chunks;
    if (n > 0 && n < 65536 && (int)n != m->mesh.tp) {
        m->mesh.etp = m->mesh.etp == m->mesh.tp ? (int)n : m->mesh.etp;
        m->mesh.tp = (int)n;
    }
}
