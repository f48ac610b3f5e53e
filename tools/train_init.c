/* A new model from a configuration (train_init.h).
 *
 * The tensors a model has follow from its canonical configuration: the blocks of its pattern, times the
 * rows of the schema, less those whose part the configuration lacks (`conditions`). Each is given its
 * place in the stored layout by the layout's own rows, as in writing, so that the source built here is
 * what a file of that layout would be; binding it checks it like one. Then the initial values are
 * computed tensor by tensor and put into the boxes that binding found. */
#include "train_init.h"

#include "checked.h"
#include "io.h"
#include "train/init.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_LIMIT ((uint64_t)16 << 20)
#define MAX_TENSORS ((size_t)1 << 20)

typedef struct builder {
    ckpt_source *src;
    const ckpt_layout *layout;
    ckpt_json *canon;
    ckpt_symtab syms;
    const char *pattern;
    const char *words[3]; /* choices, in order of authority */
    ckpt_row_index rows;
    size_t cap;
    uint64_t bytes;
    ckpt_err *err;
} builder;

/* ---- what there is ---------------------------------------------------------------------------- */

/* Tensors that a configuration decides about: present if the key says something (a number above 0, true,
 * a text), with '!' if it does not. Rest of the name, '*' at the end: any. */
static const struct {
    const char *kind, *rest, *key;
} conditions[] = {
    {"kda",  "f.weight",        "!kda_f_rank"    },
    {"kda",  "f_a.weight",      "kda_f_rank"     },
    {"kda",  "f_b.weight",      "kda_f_rank"     },
    {"kda",  "g.weight",        "!kda_gate_rank" },
    {"kda",  "g_a.weight",      "kda_gate_rank"  },
    {"kda",  "g_b.weight",      "kda_gate_rank"  },
    {"kda",  "g_b.bias",        "@"              }, /* '@': if the layout requires it */
    {"mla",  "q.weight",        "!q_lora_rank"   },
    {"mla",  "q_a.weight",      "q_lora_rank"    },
    {"mla",  "q_a_norm.weight", "q_lora_rank"    },
    {"mla",  "q_b.weight",      "q_lora_rank"    },
    {"mla",  "gate.weight",     "mla_gate"       },
    {"moe",  "router.bias",     "router_bias"    },
    {"moe",  "shared.*",        "shared_ffn_size"},
    {"moe",  "shared_gate.*",   "shared_gate"    },
    {"attn", "q.bias",          "attn_bias"      },
    {"attn", "k.bias",          "attn_bias"      },
    {"attn", "v.bias",          "attn_bias"      },
    {"attn", "gate.weight",     "attn_gate"      },
    {"attn", "q_norm.weight",   "qk_norm"        },
    {"attn", "k_norm.weight",   "qk_norm"        },
    {"",     "head.weight",     "!tied"          },
};

static bool says(const ckpt_json *canon, const char *key)
{
    const ckpt_json *v = ckpt_json_get(canon, key);
    int64_t n = 0;
    bool flag = false;
    if (ckpt_json_bool(v, &flag))
        return flag;
    return ckpt_json_int(v, &n) ? n > 0 : ckpt_json_string(v) != NULL;
}

/* Is "rest" one of the words of "kind: …;" in the layout's list? */
static bool is_required(const ckpt_layout *layout, const char *kind, const char *rest)
{
    char head[32];
    (void)snprintf(head, sizeof head, "%s: ", kind);
    const char *at = layout->required != NULL ? strstr(layout->required, head) : NULL;
    if (at == NULL)
        return false;
    const char *end = at + strcspn(at, ";");
    const size_t n = strlen(rest);
    for (at = strstr(at, rest); at != NULL && at < end; at = strstr(at + n, rest))
        if (strchr(" /+", at[-1]) != NULL && strchr(" /+;", at[n]) != NULL)
            return true;
    return false;
}

static bool matches(const char *pattern, const char *text)
{
    const size_t n = strlen(pattern);
    return pattern[n - 1] == '*' ? strncmp(pattern, text, n - 1) == 0 : strcmp(pattern, text) == 0;
}

static bool exists(const builder *b, const char *kind, const char *rest)
{
    const char *act = ckpt_json_string(ckpt_json_get(b->canon, "activation"));
    const bool latent = says(b->canon, "latent_norm");
    const size_t n = strlen(rest);
    /* An MLP whose activation is no product has no gate. */
    if (act != NULL && strcmp(act, "relu2") == 0 &&
        (strcmp(kind, "mlp") == 0 || strcmp(kind, "moe") == 0) && n >= 11 &&
        strcmp(rest + n - 11, "gate.weight") == 0)
        return strcmp(rest, "shared_gate.weight") == 0 && says(b->canon, "shared_gate");
    if (strcmp(kind, "mla") == 0 && strstr(rest, "_a_norm.") != NULL && !latent &&
        !is_required(b->layout, kind, rest))
        return false;
    for (size_t i = 0; i < sizeof conditions / sizeof *conditions; i++) {
        const char *key = conditions[i].key;
        if (strcmp(conditions[i].kind, kind) != 0 || !matches(conditions[i].rest, rest))
            continue;
        if (*key == '@')
            return strcmp(b->layout->group, "fla") == 0;
        return *key == '!' ? !says(b->canon, key + 1) : says(b->canon, key);
    }
    return true;
}

/* ---- where it lies ---------------------------------------------------------------------------- */

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for a new model");
}

/* As the planner decides when it writes (plan_rows.c): every choice by the first word about it. */
static int decide(const builder *b, const char *tag)
{
    return ckpt_tags_decide(b->words, sizeof b->words / sizeof *b->words, tag);
}

static ckpt_status add_stored(builder *b, const char *name, const ckpt_view_out *view)
{
    ckpt_source *src = b->src;
    ckpt_arena *arena = &src->arena;
    int64_t n;
    uint64_t bytes;
    void *tensors = src->tensors; /* the arena owns the final table: copied when it is complete */
    ckpt_status status =
        ckpt_grow(&tensors, &b->cap, src->n_tensors + 1, sizeof *src->tensors, b->err);
    src->tensors = tensors;
    if (status != CKPT_OK)
        return status;
    ckpt_tensor *t = &src->tensors[src->n_tensors];
    const size_t rank = (size_t)view->rank;
    int64_t *lo = ckpt_arena_array(arena, rank + 1, sizeof *lo);
    int64_t *dims = ckpt_arena_array(arena, rank + 1, sizeof *dims);
    *t = (ckpt_tensor){.name = name, .dims = dims, .dtype = CKPT_F32, .rank = view->rank};
    t->chunks = ckpt_arena_array(arena, 1, sizeof *t->chunks);
    if (lo == NULL || dims == NULL || t->chunks == NULL)
        return no_memory(b->err);
    memcpy(dims, view->dims, rank * sizeof *dims);
    if (!ckpt_numel(view->rank, dims, &n) || !ckpt_mul_u64((uint64_t)n, sizeof(float), &bytes))
        return ckpt_fail(b->err, CKPT_E_FORMAT, "tensor '%s': its size overflows", name);
    t->chunks[0] = (ckpt_chunk){.lo = lo, .len = dims};
    t->n_chunks = 1;
    src->n_tensors++;
    return CKPT_OK;
}

/* The stored tensor that a canonical one is in; it may be there already. */
static ckpt_status place(builder *b, const char *canon, int rank)
{
    ckpt_arena *arena = &b->src->arena;
    for (int32_t r = ckpt_row_index_first(&b->rows, canon); r >= 0; r = b->rows.next[r]) {
        const ckpt_row *row = &b->layout->rows[r];
        ckpt_index at;
        ckpt_view_out view;
        if (!ckpt_pattern_match(row->canon, canon, &b->syms, &at) || decide(b, row->tag) == 0)
            continue;
        const ckpt_view_in in = {
            .view = row->view, .e = at.e, .l = at.l, .rank = rank, .syms = &b->syms};
        ckpt_status status = ckpt_view_build(&in, arena, &view, b->err);
        if (status != CKPT_OK) {
            ckpt_err_frame(b->err, "tensor '%s'", canon);
            return status;
        }
        const char *name = ckpt_pattern_format(arena, row->stored, &b->syms, &at);
        return name != NULL ? add_stored(b, name, &view) : no_memory(b->err);
    }
    return ckpt_fail(b->err, CKPT_E_UNSUPPORTED, "layout %s has no place for '%s'", b->layout->name,
                     canon);
}

/* ---- the whole ---------------------------------------------------------------------------------- */

static int rank_of(const ckpt_schema_row *row)
{
    int rank = 1;
    for (const char *p = row->dims; *p != '\0'; p++)
        rank += *p == ',';
    return rank;
}

/* A schema name with its block and, in a loop, its experts filled in. */
static ckpt_status place_row(builder *b, const ckpt_schema_row *row, int64_t block)
{
    const char *e = strstr(row->canon, "{e}"), *hole = strstr(row->canon, "{b}");
    const int64_t n = e != NULL ? ckpt_sym_get(&b->syms, "E", 1) : 1;
    const int head = hole != NULL ? (int)(hole - row->canon) : 0;
    if (n > (int64_t)(MAX_TENSORS - b->src->n_tensors))
        return ckpt_fail(b->err, CKPT_E_UNSUPPORTED, "more than %zu tensors", MAX_TENSORS);
    for (int64_t i = 0; i < n; i++) {
        char *name;
        if (hole == NULL)
            name = ckpt_arena_strdup(&b->src->arena, row->canon);
        else if (e == NULL)
            name = ckpt_arena_printf(&b->src->arena, "%.*s%lld%s", head, row->canon,
                                     (long long)block, hole + 3);
        else
            name = ckpt_arena_printf(&b->src->arena, "%.*s%lld%.*s%lld%s", head, row->canon,
                                     (long long)block, (int)(e - hole - 3), hole + 3, (long long)i,
                                     e + 3);
        if (name == NULL)
            return no_memory(b->err);
        ckpt_status status = place(b, name, rank_of(row));
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

/* All rows of the schema that begin with `prefix`, whose rest exists. */
static ckpt_status place_group(builder *b, const char *prefix, const char *kind, int64_t block)
{
    const size_t n = strlen(prefix);
    for (size_t i = 0; i < b->layout->n_schema; i++) {
        const ckpt_schema_row *row = &b->layout->schema[i];
        if (strncmp(row->canon, prefix, n) != 0 || (n == 0 && strstr(row->canon, "{b}") != NULL) ||
            !exists(b, kind, row->canon + n))
            continue;
        ckpt_status status = place_row(b, row, block);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status place_all(builder *b)
{
    ckpt_status status;
    const int64_t n = (int64_t)strlen(b->pattern);
    const int64_t main_blocks = ckpt_sym_get(&b->syms, "P", 1),
                  depth = ckpt_sym_get(&b->syms, "Q", 1);
    CKPT_CHECK(place_group(b, "", "", -1));
    for (int64_t i = 0; i < n; i++) {
        char prefix[48];
        const ckpt_kind *kind = NULL;
        for (int k = 0; k < CKPT_N_KINDS && kind == NULL; k++)
            if (ckpt_kinds[k].letter == b->pattern[i])
                kind = &ckpt_kinds[k];
        if (kind == NULL)
            return ckpt_fail(b->err, CKPT_E_UNSUPPORTED, "block %lld is '%c'", (long long)i,
                             b->pattern[i]);
        (void)snprintf(prefix, sizeof prefix, "blocks.{b}.%s.", kind->name);
        CKPT_CHECK(place_group(b, prefix, kind->name, i));
        if (i >= main_blocks && depth > 0 && (i - main_blocks) % depth == 0)
            CKPT_CHECK(place_group(b, "mtp.{b}.", "mtp", i));
    }
done:
    return status;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ckpt_tensor *)a)->name, ((const ckpt_tensor *)b)->name);
}

static ckpt_status read_memory(ckpt_source *src, uint32_t file, void *buf, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    if (file != 0 || offset > src->files[0].size || n > src->files[0].size - offset)
        return ckpt_fail(err, CKPT_E_INTERNAL, "new model: %zu bytes at %llu", n,
                         (unsigned long long)offset);
    memcpy(buf, (const uint8_t *)src->self + offset, n);
    return CKPT_OK;
}

static void close_memory(ckpt_source *src)
{
    free(src->self);
    src->self = NULL;
}

/* Sort, drop what several canonical tensors share, and lay out the file. */
static ckpt_status finish(builder *b)
{
    ckpt_source *src = b->src;
    ckpt_tensor *all = src->tensors;
    size_t kept = 0;
    qsort(all, src->n_tensors, sizeof *all, by_name);
    for (size_t i = 0; i < src->n_tensors; i++) {
        int64_t n = 0;
        if (kept > 0 && strcmp(all[kept - 1].name, all[i].name) == 0)
            continue;
        all[kept] = all[i];
        all[kept].chunks[0].offset = b->bytes;
        (void)ckpt_numel(all[i].rank, all[i].dims, &n); /* checked when it was added */
        if (!ckpt_add_u64(b->bytes, (uint64_t)n * sizeof(float), &b->bytes))
            return ckpt_fail(b->err, CKPT_E_FORMAT, "the model's size overflows");
        kept++;
    }
    src->tensors = ckpt_arena_memdup(&src->arena, all, kept * sizeof *all);
    free(all);
    src->n_tensors = src->tensors != NULL ? kept : 0;
    src->files = ckpt_arena_array(&src->arena, 1, sizeof *src->files);
    if (src->tensors == NULL || src->files == NULL)
        return no_memory(b->err);
    src->files[0] = (ckpt_file){
        .name = "memory", .path = "memory", .size = b->bytes, .fd = -1, .is_data = true};
    src->n_files = src->n_virtual = 1;
    src->self = b->bytes < SIZE_MAX ? calloc(1, (size_t)b->bytes + 1) : NULL;
    if (src->self == NULL)
        return ckpt_fail(b->err, CKPT_E_NOMEM, "out of memory for a new model of %llu bytes",
                         (unsigned long long)b->bytes);
    src->read_at = read_memory;
    src->close = close_memory;
    return CKPT_OK;
}

/* ---- configuration ---------------------------------------------------------------------------- */

static ckpt_status read_config(ckpt_source *src, const char *path, ckpt_err *err)
{
    ckpt_status status;
    ckpt_buf text = {0};
    const char *file = path;
    ckpt_entry what;
    CKPT_CHECK(ckpt_look(path, &what, err));
    src->is_dir = what == CKPT_ENTRY_DIR;
    if (src->is_dir)
        file = ckpt_path_join(&src->arena, path, "config.json");
    src->path = ckpt_arena_strdup(&src->arena, path);
    if (file == NULL || src->path == NULL)
        return no_memory(err);
    src->root = src->is_dir
                    ? src->path
                    : ckpt_arena_strndup(&src->arena, path, (size_t)(ckpt_basename(path) - path));
    if (src->root == NULL)
        return no_memory(err);
    if (*src->root == '\0')
        src->root = ".";
    CKPT_CHECK(ckpt_read_file(file, CONFIG_LIMIT, &text, err));
    CKPT_TRY(ckpt_json_parse((const char *)text.data, text.len, &src->config, err), "%s", file);
    if (!ckpt_json_is_object(src->config))
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: no configuration: not a JSON object", file);
    src->config_kind = CKPT_CONFIG_HF;
    ckpt_json_delete(src->config, "quantization_config"); /* what is made here is F32 */
done:
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status find_layout(builder *b)
{
    for (size_t i = 0; ckpt_layouts[i] != NULL; i++) {
        const ckpt_layout *l = ckpt_layouts[i];
        if (l->config_kind == CKPT_CONFIG_HF && l->claims != NULL && l->config_read != NULL &&
            l->claims(b->src->config) > 0) {
            b->layout = l;
            return CKPT_OK;
        }
    }
    const char *type = ckpt_json_string(ckpt_json_get(b->src->config, "model_type"));
    return ckpt_fail(b->err, CKPT_E_UNSUPPORTED, "no layout is known for a model of type '%s'",
                     type != NULL ? type : "?");
}

static ckpt_status read_symbols(builder *b)
{
    ckpt_status status;
    ckpt_buf choices = {0}, written = {0};
    ckpt_arena *arena = &b->src->arena;
    b->canon = ckpt_json_new_object();
    if (b->canon == NULL)
        return no_memory(b->err);
    CKPT_CHECK(b->layout->config_read(b->src->config, b->canon, b->err));
    CKPT_CHECK(ckpt_config_symbols(b->canon, &b->syms, b->err));
    b->pattern = ckpt_json_string(ckpt_json_get(b->canon, "pattern"));
    static const char *const needed[] = {"pattern", "hidden_size", "vocab_size"};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (ckpt_json_get(b->canon, needed[i]) == NULL) {
            status = ckpt_fail(b->err, CKPT_E_FORMAT, "the configuration gives no %s",
                               i == 0 ? "layers" : needed[i]);
            goto done;
        }
    if (ckpt_sym_get(&b->syms, "P", 1) == 0 &&
        !ckpt_sym_set(&b->syms, "P", (int64_t)strlen(b->pattern)))
        status = ckpt_fail(b->err, CKPT_E_UNSUPPORTED, "too many size symbols");
    if (b->layout->choices != NULL)
        b->layout->choices(b->canon, &choices);
    if (b->layout->choices_written != NULL)
        b->layout->choices_written(b->src->config, &written);
    b->words[0] = ckpt_arena_strndup(arena, (const char *)choices.data, choices.len);
    b->words[1] = ckpt_arena_strndup(arena, (const char *)written.data, written.len);
    b->words[2] = b->layout->default_tags;
    if (choices.failed || written.failed || b->words[0] == NULL || b->words[1] == NULL)
        status = no_memory(b->err);
done:
    ckpt_buf_release(&choices);
    ckpt_buf_release(&written);
    return status;
}

static ckpt_status build(builder *b, const char *path)
{
    ckpt_status status;
    CKPT_CHECK(read_config(b->src, path, b->err));
    CKPT_CHECK(find_layout(b));
    CKPT_CHECK(read_symbols(b));
    CKPT_CHECK(ckpt_row_index_build(&b->rows, b->layout, true, b->err));
    CKPT_CHECK(place_all(b));
    CKPT_CHECK(finish(b));
    b->src->container = &ckpt_safetensors;
    b->src->iteration = -1;
    CKPT_CHECK(ckpt_config_set_dtype(b->src->config, CKPT_CONFIG_HF, "float32", b->err));
done:
    if (status != CKPT_OK && b->src->self == NULL) { /* the table is not in the arena yet */
        if (b->src->files == NULL)
            free(b->src->tensors);
        b->src->tensors = NULL;
        b->src->n_tensors = 0;
    }
    ckpt_row_index_free(&b->rows);
    ckpt_json_free(b->canon);
    return status;
}

/* ---- values ------------------------------------------------------------------------------------ */

/* Put the values of a canonical tensor into its box of the stored one, row by row of the box. */
static ckpt_status scatter(ckpt_source *src, const ckpt_canon *c, const float *values, int64_t n,
                           ckpt_err *err)
{
    float *stored =
        (float *)(void *)((uint8_t *)src->self + src->tensors[c->stored].chunks[0].offset);
    const int axes = c->map.n;
    const float shift = (float)c->shift;
    int64_t *at = calloc((size_t)axes + 1, 2 * sizeof *at);
    if (at == NULL)
        return no_memory(err);
    int64_t *stride = at + axes + 1;
    int64_t step = 1, base = 0;
    for (int i = axes - 1; i >= 0; i--) {
        stride[i] = step;
        base += c->map.axis[i].lo * step;
        step *= c->map.axis[i].size;
    }
    const int64_t run = axes > 0 ? c->map.axis[axes - 1].len : 1;
    for (int64_t done = 0; done < n; done += run) {
        for (int64_t k = 0; k < run; k++)
            stored[base + k] = values[done + k] + shift;
        for (int i = axes - 2; i >= 0; i--) {
            base += stride[i];
            if (++at[i] < c->map.axis[i].len)
                break;
            base -= stride[i] * at[i];
            at[i] = 0;
        }
    }
    free(at);
    return CKPT_OK;
}

static ckpt_init_config rules_of(const ckpt_model *model, uint64_t seed)
{
    const ckpt_json *canon = model->config;
    const bool fla = strcmp(model->layout->group, "fla") == 0;
    ckpt_init_config c = {.seed = seed, .std = 0.02, .blocks = model->n_main, .scaled = !fla};
    (void)ckpt_json_double(ckpt_json_get(canon, "init_std"), &c.std);
    c.conv_normal = fla;
    c.zero_A_log = fla && says(canon, "kda_safe_gate");
    c.centered = says(canon, "norm_zero_centered");
    return c;
}

static ckpt_status fill(ckpt_source *src, const ckpt_model *model, uint64_t seed, int threads,
                        ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_init_config rules = rules_of(model, seed);
    ckpt_eng e;
    float *values = NULL;
    ckpt_eng_init(&e, threads);
    for (size_t i = 0; i < model->n_tensors; i++) {
        const ckpt_canon *c = &model->tensors[i];
        int64_t n;
        CKPT_CHECK(ckpt_check_interrupted(err));
        if (!ckpt_numel(c->rank, c->dims, &n)) {
            status = ckpt_fail(err, CKPT_E_FORMAT, "tensor '%s': its size overflows", c->name);
            goto done;
        }
        free(values);
        values = malloc(((size_t)n + 1) * sizeof *values);
        if (values == NULL) {
            status = no_memory(err);
            goto done;
        }
        if (c->derived != NULL || c->extra) {
            status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "no initial values for '%s'", c->name);
            goto done;
        }
        CKPT_CHECK(ckpt_init_range(&e, &rules, c->name, c->rank, c->dims, 0, n, values, err));
        CKPT_CHECK(scatter(src, c, values, n, err));
    }
done:
    free(values);
    ckpt_eng_release(&e);
    return status;
}

ckpt_status ckpt_train_init(ckpt_source *src, ckpt_model *model, const char *path, uint64_t seed,
                            int threads, ckpt_err *err)
{
    ckpt_status status;
    builder b = {.src = src, .err = err};
    CKPT_CHECK(build(&b, path));
    CKPT_CHECK(
        ckpt_model_bind(model, src, &(ckpt_model_opts){.layout = b.layout, .lenient = false}, err));
    CKPT_CHECK(fill(src, model, seed, threads, err));
done:
    if (status != CKPT_OK)
        ckpt_err_frame(err, "%s", path);
    return status;
}
