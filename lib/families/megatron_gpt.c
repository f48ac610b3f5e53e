/* Megatron-Core GPT models: a layer is a token mixer and a channel mixer (blocks 2l and 2l+1).
 *
 * Homogeneous stacks are stored as one tensor a weight with the layers as axis 0
 * (decoder.layers.<rest>), others layer by layer (decoder.layers.{l}.<rest>): choice layers, read from
 * the keys that are there, written as Megatron-Core writes it: layer by layer if moe_layer_freq or
 * linear_attention_freq is a list or an integer > 1 (megatron-dist-ckpt.md 2.2). Depths of
 * multi-token prediction are built like the last layer and stored one by one, under transformer_layer
 * (choice mtp; the attribute itself is named mtp_model_layer in newer versions).
 *
 * Layers in the arguments: linear_attention_freq N leaves every N-th layer to softmax attention, a
 * list has 1 for a linear layer; moe_layer_freq N makes layers 0, N, 2N … MoE, a list has 1 for MoE. */
#include "megatron.h"

#include <stdio.h>
#include <string.h>

#define NAME "megatron:gpt"

/* clang-format off */
#define STACKED(canon, key, view, tag)      {"blocks.{2l<P}." canon,   "decoder.layers." key,                      "L=l@pp | " view, "layers=stacked " tag},
#define STACKED_ODD(canon, key, view, tag)  {"blocks.{2l+1<P}." canon, "decoder.layers." key,                      "L=l@pp | " view, "layers=stacked " tag},
#define SINGLE(canon, key, view, tag)       {"blocks.{2l<P}." canon,   "decoder.layers.{l}." key,                  view, "layers=single " tag},
#define SINGLE_ODD(canon, key, view, tag)   {"blocks.{2l+1<P}." canon, "decoder.layers.{l}." key,                  view, "layers=single " tag},
#define DEPTH(canon, key, view, tag)        {"blocks.{2l+P}." canon,   "mtp.layers.{l}.transformer_layer." key,    view, "mtp=transformer_layer " tag},
#define DEPTH_ODD(canon, key, view, tag)    {"blocks.{2l+P+1}." canon, "mtp.layers.{l}.transformer_layer." key,    view, "mtp=transformer_layer " tag},
#define RENAMED(canon, key, view, tag)      {"blocks.{2l+P}." canon,   "mtp.layers.{l}.mtp_model_layer." key,      view, "mtp=mtp_model_layer " tag},
#define RENAMED_ODD(canon, key, view, tag)  {"blocks.{2l+P+1}." canon, "mtp.layers.{l}.mtp_model_layer." key,      view, "mtp=mtp_model_layer " tag},

static const ckpt_row rows[] = {
    {"embed.weight",      "embedding.word_embeddings.weight", "V<VP@tp | H", NULL},
    {"head.weight",       "output_layer.weight",              "V<VP@tp | H", NULL},
    {"final_norm.weight", "decoder.final_layernorm.weight",   "H", NULL},
    MEGATRON_MIXER_ROWS(STACKED)
    MEGATRON_CHANNEL_ROWS(STACKED_ODD)
    MEGATRON_MIXER_ROWS(SINGLE)
    MEGATRON_CHANNEL_ROWS(SINGLE_ODD)
    MEGATRON_DEPTH_ROWS("{2l+P}"),
    MEGATRON_MIXER_ROWS(DEPTH)
    MEGATRON_CHANNEL_ROWS(DEPTH_ODD)
    MEGATRON_MIXER_ROWS(RENAMED)
    MEGATRON_CHANNEL_ROWS(RENAMED_ODD)
};
/* clang-format on */

static int claims(const ckpt_json *config)
{
    const ckpt_json *pattern = NULL;
    if (!ckpt_json_is_object(config) || ckpt_json_child(config) == NULL)
        return 0;
    if (ckpt_field_find(config, MEGATRON_PATTERNS, &pattern, NULL) != CKPT_OK || pattern != NULL)
        return -1;
    return ckpt_json_get(config, "num_layers") != NULL ? 1 : 0;
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* Entry of a frequency list: 0 or 1 a layer. */
static ckpt_status list_entry(const ckpt_json *entry, const char *field, int64_t layer, bool *out,
                              ckpt_err *err)
{
    int64_t v;
    if (!ckpt_json_int(entry, &v) || v < 0 || v > 1)
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': entry %lld is neither 0 nor 1", field,
                         (long long)layer);
    *out = v == 1;
    return CKPT_OK;
}

/* letters[2i + offset] = yes where the frequency says so of layer i, else no. every(i, n) is the
 * meaning of an integer. */
static ckpt_status read_freq(const ckpt_json *stored, const char *field, int64_t layers,
                             bool (*every)(int64_t i, int64_t n), char yes, char no, char *letters,
                             ckpt_err *err)
{
    const ckpt_json *freq;
    int64_t n = 1;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_find(stored, field, &freq, err));
    bool list = ckpt_json_is_array(freq);
    if (freq != NULL && !list && (!ckpt_json_int(freq, &n) || n < 1))
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': expected an integer > 0 or a list",
                         field);
    if (list && ckpt_json_size(freq) != layers)
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': %d entries for %lld layers", field,
                         ckpt_json_size(freq), (long long)layers);
    const ckpt_json *entry = ckpt_json_child(freq);
    for (int64_t i = 0; i < layers; i++, entry = ckpt_json_next(entry)) {
        bool is = !list && every(i, n);
        if (list)
            CKPT_CHECK(list_entry(entry, field, i, &is, err));
        letters[2 * i] = is ? yes : no;
    }
done:
    return status;
}

static bool is_moe(int64_t i, int64_t n)
{
    return i % n == 0;
}

static bool is_linear(int64_t i, int64_t n)
{
    return (i + 1) % n != 0;
}

/* The letter of a variant of linear attention; '\0': none is configured. */
static ckpt_status read_variant(const ckpt_json *stored, char *letter, ckpt_err *err)
{
    static const struct {
        const char *name;
        char letter;
    } variants[] = {
        {"gated_delta_net", 'G'},
        {"gdn",             'G'},
        {"gdn2",            'g'},
        {"kda",             'K'},
    };
    const ckpt_json *j;
    ckpt_status status = ckpt_field_find(stored, "experimental_attention_variant", &j, err);
    const char *name = ckpt_json_string(j);
    *letter = '\0';
    if (status != CKPT_OK || j == NULL)
        return status;
    for (size_t i = 0; name != NULL && i < sizeof variants / sizeof variants[0]; i++)
        if (strcmp(variants[i].name, name) == 0)
            *letter = variants[i].letter;
    if (*letter == '\0')
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'experimental_attention_variant': found %s, supported are "
                         "gated_delta_net, gdn, gdn2, kda",
                         name != NULL ? name : "no string");
    const ckpt_json *freq = ckpt_json_get(stored, "linear_attention_freq");
    if (freq == NULL || ckpt_json_is_null(freq))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'linear_attention_freq': missing, but %s needs it", name);
    return CKPT_OK;
}

static ckpt_status read_letters(const ckpt_json *stored, int64_t layers, char *letters,
                                ckpt_err *err)
{
    ckpt_status status;
    bool mla;
    char variant = '\0';
    int64_t experts;
    CKPT_CHECK(ckpt_field_bool(stored, "multi_latent_attention", false, &mla, err));
    CKPT_CHECK(read_variant(stored, &variant, err));
    char full = mla ? '+' : '*';
    for (int64_t i = 0; i < layers; i++) {
        letters[2 * i] = full;
        letters[2 * i + 1] = '-';
    }
    if (variant != '\0')
        CKPT_CHECK(read_freq(stored, "linear_attention_freq", layers, is_linear, variant, full,
                             letters, err));
    CKPT_CHECK(ckpt_field_size(stored, "num_experts|num_moe_experts", true, &experts, err));
    if (experts > 0)
        CKPT_CHECK(read_freq(stored, "moe_layer_freq", layers, is_moe, 'E', '-', letters + 1, err));
done:
    return status;
}

static ckpt_status read_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_arena arena = {0};
    int64_t layers, depths;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "num_layers", false, &layers, err));
    CKPT_CHECK(ckpt_field_size(stored, "mtp_num_layers", true, &depths, err));
    if (layers == 0 || layers > CKPT_HYBRID_MAX_LAYERS || depths > CKPT_HYBRID_MAX_LAYERS) {
        status = ckpt_fail(
            err, CKPT_E_FORMAT, "field '%s': found %lld, expected 1 to %d",
            layers == 0 || layers > CKPT_HYBRID_MAX_LAYERS ? "num_layers" : "mtp_num_layers",
            (long long)(layers == 0 || layers > CKPT_HYBRID_MAX_LAYERS ? layers : depths),
            CKPT_HYBRID_MAX_LAYERS);
        goto done;
    }
    char *letters = ckpt_arena_alloc(&arena, (size_t)(2 * (layers + depths)) + 1);
    if (letters == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading layers");
        goto done;
    }
    CKPT_CHECK(read_letters(stored, layers, letters, err));
    for (int64_t d = 0; d < depths; d++)
        memcpy(letters + 2 * (layers + d), letters + 2 * (layers - 1), 2);
    CKPT_CHECK(ckpt_field_put(canon, "pattern", ckpt_json_new_string(letters), err));
    if (depths > 0) {
        CKPT_CHECK(ckpt_field_put(canon, "mtp_layers", ckpt_json_new_int(depths), err));
        CKPT_CHECK(ckpt_field_put(canon, "mtp_blocks", ckpt_json_new_int(2 * depths), err));
    }
done:
    ckpt_arena_free(&arena);
    return status;
}

/* ---- writing layers -------------------------------------------------------------------------- */

static ckpt_status check_layers(const char *pattern, int64_t layers, int64_t depths, ckpt_err *err)
{
    char linear = '\0';
    for (int64_t i = 0; i < 2 * (layers + depths); i++) {
        const char *letters = i % 2 == 0 ? "K+*Gg" : "-E";
        char c = pattern[i];
        if (strchr(letters, c) == NULL)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "pattern: block %lld is '%c', but layer %lld of " NAME
                             " has one of '%s' here",
                             (long long)i, c, (long long)(i / 2), letters);
        if (i >= 2 * layers && c != pattern[2 * layers - 2 + i % 2])
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             NAME " builds multi-token prediction like the last layer ('%.2s'), "
                                  "not '%.2s'",
                             pattern + 2 * layers - 2, pattern + 2 * (i / 2));
        if (strchr("KGg", c) != NULL && linear != '\0' && c != linear)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             NAME " has one variant of linear attention, not '%c' and '%c'", linear,
                             c);
        if (strchr("KGg", c) != NULL)
            linear = c;
    }
    return CKPT_OK;
}

/* 1 for layers whose letter at pattern[2i] is `yes`, as a list; NULL: out of memory. */
static ckpt_json *freq_list(const char *pattern, int64_t layers, char yes)
{
    ckpt_json *list = ckpt_json_new_array();
    for (int64_t i = 0; list != NULL && i < layers; i++)
        if (!ckpt_json_push(list, ckpt_json_new_int(pattern[2 * i] == yes))) {
            ckpt_json_free(list);
            list = NULL;
        }
    return list;
}

/* The N for which every N-th layer is no linear one, 0 if there is none. */
static int64_t linear_every(const char *pattern, int64_t layers, char yes)
{
    int64_t n = 1;
    while (n <= layers && pattern[2 * (n - 1)] == yes)
        n++;
    for (int64_t i = 0; i < layers && n <= layers; i++)
        if ((pattern[2 * i] == yes) != is_linear(i, n))
            return 0;
    return n <= layers ? n : 0;
}

static ckpt_status write_mixers(const ckpt_field_write *w, const char *pattern, int64_t layers,
                                ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char *at = strpbrk(pattern, "KGg");
    char letter = at != NULL ? *at : '\0';
    const char *variant = letter == 'K' ? "kda" : letter == 'G' ? "gated_delta_net" : "gdn2";
    bool mla = strchr(pattern, '+') != NULL;
    if (mla || ckpt_json_get(w->out, "multi_latent_attention") != NULL)
        CKPT_CHECK(ckpt_field_put(w->out, "multi_latent_attention", ckpt_json_new_bool(mla), err));
    if (letter == '\0') {
        if (ckpt_json_get(w->out, "experimental_attention_variant") != NULL)
            CKPT_CHECK(ckpt_field_put(w->out, "experimental_attention_variant",
                                      ckpt_json_new_null(), err));
        if (ckpt_json_get(w->out, "linear_attention_freq") != NULL)
            CKPT_CHECK(ckpt_field_put(w->out, "linear_attention_freq", ckpt_json_new_null(), err));
        return CKPT_OK;
    }
    int64_t n = linear_every(pattern, layers, letter);
    CKPT_CHECK(ckpt_field_put(w->out, "experimental_attention_variant",
                              ckpt_json_new_string(variant), err));
    CKPT_CHECK(ckpt_field_put(w->out, "linear_attention_freq",
                              n > 1 ? ckpt_json_new_int(n) : freq_list(pattern, layers, letter),
                              err));
done:
    return status;
}

static ckpt_status write_channels(const ckpt_field_write *w, const char *pattern, int64_t layers,
                                  ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t moe = 0;
    for (int64_t i = 0; i < layers; i++)
        moe += pattern[2 * i + 1] == 'E';
    if (moe == 0 && ckpt_json_get(w->out, "num_experts") != NULL)
        CKPT_CHECK(ckpt_field_put(w->out, "num_experts", ckpt_json_new_null(), err));
    CKPT_CHECK(ckpt_field_put(w->out, "moe_layer_freq",
                              moe == 0 || moe == layers ? ckpt_json_new_int(1)
                                                        : freq_list(pattern + 1, layers, 'E'),
                              err));
done:
    return status;
}

static ckpt_status write_layers(const ckpt_field_write *w, ckpt_err *err)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(w->canon, "pattern"));
    int64_t depths = ckpt_canon_int(w->canon, "mtp_layers");
    int64_t blocks = ckpt_canon_int(w->canon, "mtp_blocks");
    ckpt_status status;
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "pattern is not known");
    int64_t layers = ((int64_t)strlen(pattern) - blocks) / 2;
    if (strlen(pattern) % 2 != 0 || blocks != 2 * depths)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "pattern: %zu blocks, but layers of " NAME " are pairs of blocks",
                         strlen(pattern));
    CKPT_CHECK(check_layers(pattern, layers, depths, err));
    if (!ckpt_field_changed(w, "pattern,mtp_layers,mtp_blocks"))
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put(w->out, "num_layers", ckpt_json_new_int(layers), err));
    CKPT_CHECK(write_mixers(w, pattern, layers, err));
    CKPT_CHECK(write_channels(w, pattern, layers, err));
    if (depths > 0 || ckpt_json_get(w->out, "mtp_num_layers") != NULL)
        CKPT_CHECK(ckpt_field_put(w->out, "mtp_num_layers",
                                  depths > 0 ? ckpt_json_new_int(depths) : ckpt_json_new_null(),
                                  err));
done:
    return status;
}

/* ---- the layout ------------------------------------------------------------------------------ */

static ckpt_status read_rest(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    return ckpt_megatron_read(stored, canon, 2, err);
}

static ckpt_status write_rest(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = write_layers(w, err);
    return status == CKPT_OK ? ckpt_megatron_write(w, 2, err) : status;
}

/* Megatron-Core's rule; content metadata does not come into it, as training leaves it at false. */
static bool is_homogeneous(const ckpt_json *args)
{
    static const char *const freqs[] = {"moe_layer_freq", "linear_attention_freq"};
    bool heterogeneous = false;
    for (int i = 0; i < 2; i++) {
        int64_t n = 0;
        const ckpt_json *freq = ckpt_json_get(args, freqs[i]);
        if (ckpt_json_is_array(freq) || (ckpt_json_int(freq, &n) && n > 1))
            return false;
    }
    return !(ckpt_json_bool(ckpt_json_get(args, "hetereogenous_dist_checkpoint"), &heterogeneous) &&
             heterogeneous);
}

/* Pairs of blocks without KDA and Mamba-2: models with those are written by hybrid code. */
static bool usual(const ckpt_json *canon)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    if (pattern == NULL || strlen(pattern) % 2 != 0)
        return false;
    for (size_t i = 0; pattern[i] != '\0'; i++)
        if (strchr(i % 2 == 0 ? "+*Gg" : "-E", pattern[i]) == NULL)
            return false;
    return true;
}

static void choices_written(const ckpt_json *stored, ckpt_buf *out)
{
    ckpt_buf_puts(out, is_homogeneous(stored) ? "layers=stacked" : "layers=single");
}

/* The tables are another file's, so their lengths are known at run time only. */
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

const ckpt_layout ckpt_layout_megatron_gpt = {
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
    .default_tags = MEGATRON_DEFAULT_TAGS ",layers=single,mtp=transformer_layer",
    .blocks_per_layer = 2,
    .choices = ckpt_megatron_choices,
    .choices_written = choices_written,
    .usual = usual,
    .claims = claims,
    .config_read = config_read,
    .config_write = config_write,
};
