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

/* Check one "kind: words" section for one prefix. */
static ckpt_status check_words(ckpt_binder *b, const char *prefix, const char *words, size_t n,
                               ckpt_err *err)
{
    for (size_t i = 0; i < n;) {
        size_t word = 0;
        char missing[320];
        while (i + word < n && words[i + word] != ' ')
            word++;
        if (word > 0 && !have_group(b, prefix, words + i, word, missing, sizeof missing)) {
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
        if (kind == CKPT_NO_KIND)
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

ckpt_status ckpt_bind_finish(ckpt_binder *b, const char *pattern, ckpt_err *err)
{
    ckpt_model *m = b->m;
    ckpt_status status = CKPT_OK;
    int64_t embed = ckpt_model_find(m, "embed.weight");
    if (ckpt_sym_get(&m->syms, "V", 1) == 0 && embed >= 0)
        (void)ckpt_sym_set(&m->syms, "V", m->tensors[embed].dims[0]);
    bool tied = ckpt_model_find(m, "head.weight") < 0;
    if (b->layout->config_read == NULL && b->n_blocks == 0)
        return CKPT_OK; /* a user's table for something that is no stack of blocks */
    CKPT_CHECK(ckpt_config_complete(m->config, &m->syms, pattern, tied, err));
    if (!b->opts->lenient)
        CKPT_TRY(ckpt_config_check(m->config, err), "configuration");
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
