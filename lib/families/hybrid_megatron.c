/* Megatron-Core hybrid models: a pattern letter is one layer; '|' only marks pipeline stages, '/'
 * starts a depth of multi-token prediction, all of which are equal (megatron-dist-ckpt.md 3.2, 3.7).
 * Layers are always stored one by one. The letter G is GDN2 where the variant says so. */
#include "megatron.h"

#include <stdio.h>
#include <string.h>

#define NAME "megatron:hybrid"

/* clang-format off */
#define LAYER(canon, key, view, tag) {"blocks.{l<P}." canon, "decoder.layers.{l}." key, view, tag},
#define DEPTH(canon, key, view, tag) {"blocks.{P+Q*l+j}." canon, "mtp.layers.{l}.mtp_model_layer.layers.{j}." key, view, tag},

static const ckpt_row rows[] = {
    {"embed.weight",      "embedding.word_embeddings.weight", "V<VP@tp | H", NULL},
    {"head.weight",       "output_layer.weight",              "V<VP@tp | H", NULL},
    {"final_norm.weight", "decoder.final_norm.weight",        "H", NULL},
    MEGATRON_MIXER_ROWS(LAYER)
    MEGATRON_MAMBA_ROWS(LAYER)
    MEGATRON_CHANNEL_ROWS(LAYER)
    MEGATRON_DEPTH_ROWS("{P+Q*l}"),
    MEGATRON_MIXER_ROWS(DEPTH)
    MEGATRON_MAMBA_ROWS(DEPTH)
    MEGATRON_CHANNEL_ROWS(DEPTH)
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    const ckpt_json *pattern = NULL;
    if (!ckpt_json_is_object(config) || ckpt_json_child(config) == NULL)
        return 0;
    if (ckpt_field_find(config, MEGATRON_PATTERNS, &pattern, NULL) != CKPT_OK || pattern != NULL)
        return 1;
    return ckpt_json_get(config, "num_layers") != NULL ? -1 : 0;
}

/* ---- pattern --------------------------------------------------------------------------------- */

static ckpt_status check_letter(char letter, size_t block, ckpt_err *err)
{
    if (strchr("K+*GgM-E", letter) != NULL)
        return CKPT_OK;
    if (strchr("DCHW", letter) != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'hybrid_layer_pattern': layer %zu is '%c', supported are "
                         "K + * G M - E",
                         block, letter);
    return ckpt_fail(err, CKPT_E_FORMAT,
                     "field 'hybrid_layer_pattern': layer %zu is '%c', expected one of "
                     "K + * G M - E",
                     block, letter);
}

static bool is_gdn2(const ckpt_json *stored)
{
    const char *variant = ckpt_json_string(ckpt_json_get(stored, "experimental_attention_variant"));
    return variant != NULL && strcmp(variant, "gdn2") == 0;
}

/* The parts between '/', without '|', in canonical letters. */
typedef struct parts {
    ckpt_buf main, depth;
    int64_t depths;
} parts;

static ckpt_status split_pattern(const char *text, bool gdn2, parts *x, ckpt_err *err)
{
    ckpt_buf now = {0};
    ckpt_status status = CKPT_OK;
    for (const char *p = text;; p++) {
        if (*p != '/' && *p != '\0' && *p != '|') {
            CKPT_CHECK(check_letter(*p, x->main.len + now.len, err));
            if (x->main.len + now.len >= 2 * CKPT_HYBRID_MAX_LAYERS) {
                status = ckpt_fail(err, CKPT_E_FORMAT,
                                   "field 'hybrid_layer_pattern': more than %d layers",
                                   2 * CKPT_HYBRID_MAX_LAYERS);
                goto done;
            }
            ckpt_buf_putc(&now, *p == 'G' && gdn2 ? 'g' : *p);
            continue;
        }
        if (*p == '|')
            continue;
        if (x->main.len == 0) {
            ckpt_buf_append(&x->main, now.data, now.len);
        } else {
            if (x->depths++ == 0)
                ckpt_buf_append(&x->depth, now.data, now.len);
            if (now.len == 0 || now.len != x->depth.len ||
                memcmp(now.data, x->depth.data, now.len) != 0) {
                status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                                   "field 'hybrid_layer_pattern': depths of multi-token prediction "
                                   "differ or are empty");
                goto done;
            }
        }
        ckpt_buf_clear(&now);
        if (*p == '\0')
            break;
        if (x->main.len == 0) {
            status = ckpt_fail(err, CKPT_E_FORMAT, "field 'hybrid_layer_pattern' starts with '/'");
            goto done;
        }
    }
done:
    if (status == CKPT_OK && (now.failed || x->main.failed || x->depth.failed))
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading a layer pattern");
    ckpt_buf_release(&now);
    return status;
}

static ckpt_status put_parts(ckpt_json *canon, const parts *x, ckpt_err *err)
{
    ckpt_buf all = {0};
    ckpt_status status = CKPT_OK;
    if (x->depths > CKPT_HYBRID_MAX_LAYERS)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'hybrid_layer_pattern': more than %d depths",
                         CKPT_HYBRID_MAX_LAYERS);
    ckpt_buf_append(&all, x->main.data, x->main.len);
    for (int64_t d = 0; d < x->depths; d++)
        ckpt_buf_append(&all, x->depth.data, x->depth.len);
    if (all.failed || all.data == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading a layer pattern");
        goto done;
    }
    CKPT_CHECK(ckpt_field_put(canon, "pattern", ckpt_json_new_string((char *)all.data), err));
    if (x->depths > 0) {
        CKPT_CHECK(ckpt_field_put(canon, "mtp_layers", ckpt_json_new_int(x->depths), err));
        CKPT_CHECK(ckpt_field_put(canon, "mtp_blocks",
                                  ckpt_json_new_int(x->depths * (int64_t)x->depth.len), err));
    }
done:
    ckpt_buf_release(&all);
    return status;
}

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    parts x = {0};
    const ckpt_json *j;
    ckpt_status status;
    int64_t layers, depths;
    CKPT_CHECK(ckpt_field_find(stored, MEGATRON_PATTERNS, &j, err));
    const char *pattern = ckpt_json_string(j);
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'hybrid_layer_pattern' is %s",
                         j == NULL ? "missing" : "not a string");
    CKPT_CHECK(split_pattern(pattern, is_gdn2(stored), &x, err));
    CKPT_CHECK(ckpt_field_size(stored, "num_layers", false, &layers, err));
    CKPT_CHECK(ckpt_field_size(stored, "mtp_num_layers", true, &depths, err));
    if (x.main.len == 0)
        status = ckpt_fail(err, CKPT_E_FORMAT, "field 'hybrid_layer_pattern' is empty");
    else if (layers != 0 && (uint64_t)layers != x.main.len)
        status = ckpt_fail(err, CKPT_E_FORMAT,
                           "field 'num_layers': found %lld, but 'hybrid_layer_pattern' has %zu "
                           "layers",
                           (long long)layers, x.main.len);
    else if (depths != 0 && depths != x.depths)
        status = ckpt_fail(err, CKPT_E_FORMAT,
                           "field 'mtp_num_layers': found %lld, but 'hybrid_layer_pattern' has "
                           "%lld depths",
                           (long long)depths, (long long)x.depths);
    else
        status = put_parts(canon, &x, err);
done:
    ckpt_buf_release(&x.main);
    ckpt_buf_release(&x.depth);
    return status;
}

/* The stored text of a canonical pattern: G for g, depths after '/'. */
static ckpt_status stored_pattern(const ckpt_field_write *w, const char *pattern, ckpt_buf *out,
                                  ckpt_err *err)
{
    int64_t depths = ckpt_canon_int(w->canon, "mtp_layers");
    int64_t blocks = ckpt_canon_int(w->canon, "mtp_blocks");
    size_t main_len = strlen(pattern) - (size_t)blocks;
    size_t each = depths > 0 ? (size_t)(blocks / depths) : 0;
    if (strchr(pattern, 'g') != NULL && strchr(pattern, 'G') != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, NAME " has no GDN beside GDN2");
    for (size_t i = 0; pattern[i] != '\0'; i++) {
        ckpt_status status = check_letter(pattern[i], i, err);
        if (status != CKPT_OK)
            return status;
        if (i >= main_len && each > 0 && (i - main_len) % each == 0)
            ckpt_buf_putc(out, '/');
        if (i >= main_len + each && each > 0 && pattern[i] != pattern[i - each])
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             NAME " wants all depths of multi-token prediction equal");
        ckpt_buf_putc(out, pattern[i] == 'g' ? 'G' : pattern[i]);
    }
    return out->failed ? ckpt_fail(err, CKPT_E_NOMEM, "out of memory") : CKPT_OK;
}

/* Stage cuts in the old text only fit the old number of stages. */
static bool cuts_are_stale(const ckpt_field_write *w)
{
    const ckpt_json *old;
    int64_t stages =
        w->foreign != NULL ? ckpt_megatron_earlier(w, "pipeline_model_parallel_size") : 1;
    const char *text = ckpt_field_find(w->out, MEGATRON_PATTERNS, &old, NULL) == CKPT_OK
                           ? ckpt_json_string(old)
                           : NULL;
    return w->has_mesh && (stages == 0 ? 1 : stages) != w->mesh.pp && text != NULL &&
           strchr(text, '|') != NULL;
}

static ckpt_status write_pattern(const ckpt_field_write *w, ckpt_err *err)
{
    static const char *const spellings[] = {"hybrid_layer_pattern", "hybrid_override_pattern"};
    const char *pattern = ckpt_json_string(ckpt_json_get(w->canon, "pattern"));
    ckpt_buf text = {0};
    ckpt_status status;
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "pattern is not known");
    CKPT_CHECK(stored_pattern(w, pattern, &text, err));
    if (!ckpt_field_changed(w, "pattern,mtp_layers,mtp_blocks") && !cuts_are_stale(w))
        goto done;
    bool only_old = ckpt_json_is_string(ckpt_json_get(w->out, spellings[1])) &&
                    !ckpt_json_is_string(ckpt_json_get(w->out, spellings[0]));
    for (int i = 0; i < 2; i++)
        if (i == only_old || ckpt_json_is_string(ckpt_json_get(w->out, spellings[i])))
            CKPT_CHECK(
                ckpt_field_put(w->out, spellings[i], ckpt_json_new_string((char *)text.data), err));
    int64_t depths = ckpt_canon_int(w->canon, "mtp_layers");
    int64_t layers = (int64_t)strlen(pattern) - ckpt_canon_int(w->canon, "mtp_blocks");
    CKPT_CHECK(ckpt_field_put(w->out, "num_layers", ckpt_json_new_int(layers), err));
    if (depths > 0 || ckpt_json_get(w->out, "mtp_num_layers") != NULL)
        CKPT_CHECK(ckpt_field_put(w->out, "mtp_num_layers",
                                  depths > 0 ? ckpt_json_new_int(depths) : ckpt_json_new_null(),
                                  err));
done:
    ckpt_buf_release(&text);
    return status;
}

static bool usual(const ckpt_json *canon)
{
    return !ckpt_layout_megatron_gpt.usual(canon);
}

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    return ckpt_megatron_read(stored, canon, 1, err);
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = write_pattern(w, err);
    return status == CKPT_OK ? ckpt_megatron_write(w, 1, err) : status;
}

/* The tables are other files', so their lengths are known at run time only. */
static ckpt_dialect dialect(void)
{
    return (ckpt_dialect){
        .name = NAME,
        .fields = ckpt_megatron_fields,
        .n_fields = ckpt_megatron_n_fields,
        .constants = ckpt_megatron_constants,
        .n_constants = ckpt_megatron_n_constants,
        .claims = claims,
        .read_pattern = read_pattern,
        .read_rest = read_rest,
        .write_rest = write_rest,
    };
}

static ckpt_status config_read(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_dialect d = dialect();
    return ckpt_dialect_read(&d, stored, canon, err);
}

static ckpt_status config_write(const ckpt_json *canon, const ckpt_json *foreign,
                                const ckpt_mesh *mesh, ckpt_json **out, ckpt_err *err)
{
    ckpt_dialect d = dialect();
    return ckpt_dialect_write(&d, canon, foreign, mesh, out, err);
}

const ckpt_layout ckpt_layout_megatron_hybrid = {
    .name = NAME,
    .group = "megatron",
    .family = "hybrid",
    .schema = ckpt_hybrid_schema,
    .n_schema = CKPT_HYBRID_SCHEMA_LEN,
    .rows = rows,
    .n_rows = sizeof rows / sizeof rows[0],
    .ignored = ckpt_megatron_ignored,
    .required = MEGATRON_REQUIRED,
    .config_kind = CKPT_CONFIG_MEGATRON,
    .default_tags = MEGATRON_DEFAULT_TAGS,
    .choices = ckpt_megatron_choices,
    .usual = usual,
    .claims = claims,
    .config_read = config_read,
    .config_write = config_write,
};
