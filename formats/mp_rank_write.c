/* Writing mp_rank_* directories: the rank files of a mesh, each parameter the concatenation on axis 0
 * of the chunks that its rank holds. A replicated chunk goes into several files; the first, in the
 * order in which the reader opens them, is the one that is read back.
 *
 * Transformer Engine's module names are written unless args name the local implementation, which
 * keeps norms apart from the linear layers (rank_names.h has both). */
#include "mp_rank.h"

#include "checked.h"
#include "dcp.h"
#include "layout.h"
#include "rank_names.h"
#include "shard.h"
#include "torch_write.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One out tensor as the table knows it. */
typedef struct known {
    ckpt_rank_place place;
    const ckpt_rank_rule *rule; /* NULL: only in a mesh of one rank */
    const char *memory;         /* pattern of its name inside the layer */
    const char *part;
    int part_order;
    int base; /* leading axes that are stored only: layers, experts */
    bool stacked;
    bool gather;  /* every rank holds all the parts */
    int64_t ways; /* parts that a rank group makes of it */
    bool gated;
} known;

/* One chunk in one rank's parameter. */
typedef struct entry {
    const char *name;
    int v, order;
    uint32_t tensor, chunk;
    bool copy;
} entry;

typedef struct writer {
    ckpt_out *out;
    ckpt_arena *arena; /* the sink's */
    ckpt_pt_writer pt;
    ckpt_mp_dir *dirs;
    size_t n_dirs;
    ckpt_mp_stages stages;
    known *known;
    bool **written; /* [tensor][chunk] */
    int64_t layers, experts;
    bool gated, local, hybrid, sequential, tied, mtp, kda_low_rank;
    entry *entries; /* of one rank */
    size_t n_entries, cap_entries;
    ckpt_buf head; /* pickle up to the models */
    ckpt_err *err;
} writer;

static ckpt_status no_memory(const writer *w)
{
    return ckpt_fail(w->err, CKPT_E_NOMEM, "out of memory");
}

/* ---- tensors ---------------------------------------------------------------------------------- */

static int order_of_part(const char *part)
{
    /* module order of every family; a section has one place in all of them */
    static const char *const order[] = {"query", "key", "value", "g", "gate", "z", "beta", "alpha",
                                        "f",     "b",   "w",     "x", "B",    "C", "dt"};
    for (int i = 0; part != NULL && i < (int)(sizeof order / sizeof order[0]); i++)
        if (strcmp(order[i], part) == 0)
            return i;
    return part == NULL ? 0 : -1;
}

static const char *local_norm(const writer *w, const char *rest)
{
    static const char *const names[][2] = {
        {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"  },
        {"self_attention.linear_qkv.layer_norm_bias",   "input_layernorm.bias"    },
        {"mlp.linear_fc1.layer_norm_weight",            "pre_mlp_layernorm.weight"},
        {"mlp.linear_fc1.layer_norm_bias",              "pre_mlp_layernorm.bias"  },
    };
    for (size_t i = 0; w->local && !w->hybrid && i < sizeof names / sizeof names[0]; i++)
        if (strcmp(rest, names[i][0]) == 0)
            return names[i][1];
    return NULL;
}

static ckpt_status know(writer *w, const ckpt_out_tensor *t, known *k)
{
    const ckpt_mesh *mesh = &w->out->mesh;
    if (strncmp(t->name, "optimizer.", 10) == 0)
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED,
                         "optimizer state is not written to per-rank files, which keep it by a "
                         "parameter's number among its rank's, and no name says that: torch_dist "
                         "holds it, --optimizer drop leaves it out");
    if (!ckpt_rank_split(t->name, &k->place))
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "layer number");
    k->stacked = k->place.layer < 0 && k->place.head_len > 0 &&
                 strncmp(k->place.head, "decoder.layers.", 15) == 0;
    k->rule = ckpt_rank_by_stored(k->place.rest, w->sequential, &k->part);
    if (k->rule == NULL && (mesh->tp > 1 || mesh->ep > 1 || mesh->etp > 1))
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED,
                         "it is not known how parallel ranks share this parameter");
    bool expert = k->rule != NULL && k->rule->expert;
    k->memory = local_norm(w, k->place.rest);
    if (k->memory == NULL)
        k->memory = k->rule != NULL ? k->rule->memory : k->place.rest;
    k->part_order = order_of_part(k->part);
    if (k->part_order < 0)
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "section '%s' is not known", k->part);
    k->base = k->stacked + expert;
    k->ways = expert ? mesh->etp : mesh->tp;
    k->gated = k->rule != NULL && k->rule->cut == CKPT_RANK_GATED && w->gated;
    if (k->base > t->rank)
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "rank %d", t->rank);
    if (expert && t->dims[k->stacked] != w->experts)
        return ckpt_fail(w->err, CKPT_E_UNSUPPORTED,
                         "%" PRId64 " experts, but num_experts is %" PRId64, t->dims[k->stacked],
                         w->experts);
    int64_t l = k->stacked ? t->dims[0] : k->place.layer + 1;
    if (l > w->layers)
        w->layers = l;
    w->mtp = w->mtp || strncmp(t->name, "mtp.", 4) == 0;
    return CKPT_OK;
}

/* Axis that ranks cut, or -1. */
static int cut_axis(const known *k)
{
    switch (k->rule != NULL ? k->rule->cut : CKPT_RANK_WHOLE) {
    case CKPT_RANK_ROWS:
    case CKPT_RANK_GATED:
    case CKPT_RANK_PARTS:
    case CKPT_RANK_SIZED:
        return k->base;
    case CKPT_RANK_COLS:
        return k->base + 1;
    case CKPT_RANK_WHOLE:
    case CKPT_RANK_GEMM1:
    case CKPT_RANK_GEMM2:
        break;
    }
    return -1;
}

/* The chunks must be those that rank files are made of. */
static ckpt_status check_chunks(writer *w, const ckpt_out_tensor *t, known *k)
{
    int axis = cut_axis(k);
    int64_t parts = axis < 0 ? 1 : k->ways * (k->gated ? 2 : 1);
    bool sized = k->rule != NULL && k->rule->cut == CKPT_RANK_SIZED;
    for (size_t c = 0; c < t->n_chunks; c++) {
        const ckpt_out_chunk *chunk = &t->chunks[c];
        for (int a = 0; a < t->rank; a++) {
            int64_t want = a < k->base ? 1 : a == axis ? t->dims[a] / parts : t->dims[a];
            if (a == axis && sized && chunk->len[a] == t->dims[a]) {
                k->ways = 1;
                continue;
            }
            if (chunk->len[a] != want || want == 0)
                return ckpt_fail(w->err, CKPT_E_UNSUPPORTED,
                                 "cut into %" PRId64 " of %" PRId64
                                 " on axis %d, the files of its ranks hold %" PRId64,
                                 chunk->len[a], t->dims[a], a, want);
        }
        ckpt_status status = ckpt_pt_check(t, chunk, w->err);
        if (status != CKPT_OK)
            return status;
    }
    /* Low-rank KDA keeps its beta projection whole on every rank. */
    k->gather = sized && k->ways > 1 && w->kda_low_rank &&
                strcmp(k->rule->memory, "self_attention.beta_proj.weight") == 0;
    return CKPT_OK;
}

static ckpt_status know_all(writer *w)
{
    ckpt_err *err = w->err;
    ckpt_out *out = w->out;
    ckpt_status status = CKPT_OK;
    w->known = ckpt_arena_array(w->arena, out->n_tensors, sizeof *w->known);
    w->written = ckpt_arena_array(w->arena, out->n_tensors, sizeof *w->written);
    if (w->known == NULL || w->written == NULL)
        return no_memory(w);
    for (size_t i = 0; i < out->n_tensors; i++) {
        w->written[i] = ckpt_arena_array(w->arena, out->tensors[i].n_chunks + 1, sizeof(bool));
        if (w->written[i] == NULL)
            return no_memory(w);
        CKPT_TRY(know(w, &out->tensors[i], &w->known[i]), "tensor '%.300s'", out->tensors[i].name);
        CKPT_TRY(check_chunks(w, &out->tensors[i], &w->known[i]), "tensor '%.300s'",
                 out->tensors[i].name);
    }
done:
    return status;
}

/* ---- one rank --------------------------------------------------------------------------------- */

static ckpt_status put_entry(writer *w, const char *name, int v, int order, uint32_t tensor,
                             uint32_t chunk)
{
    if (name == NULL)
        return no_memory(w);
    ckpt_status status = ckpt_grow((void **)&w->entries, &w->cap_entries, w->n_entries + 1,
                                   sizeof *w->entries, w->err);
    if (status == CKPT_OK)
        w->entries[w->n_entries++] =
            (entry){.name = name, .v = v, .order = order, .tensor = tensor, .chunk = chunk};
    return status;
}

/* Virtual stage on which the rank holds a layer, and its number there; false: another stage's. */
static bool find_stage(const ckpt_mp_stages *s, int64_t layer, int pp, int *v, int64_t *local)
{
    for (*v = 0; *v < s->vpp; ++*v) {
        int c = *v * s->pp + pp;
        *local = layer - s->first[c];
        if (layer >= s->first[c] && layer < s->first[c + 1])
            return true;
    }
    return false;
}

/* Tensors outside the decoder's layers: on the first or the last stage, some on both. */
static ckpt_status put_outside(writer *w, const ckpt_mp_dir *d, uint32_t tensor, uint32_t chunk,
                               int order, const char *inner)
{
    const char *name = w->out->tensors[tensor].name;
    ckpt_status status = CKPT_OK;
    bool embedding = strncmp(name, "embedding.", 10) == 0;
    bool words = strcmp(name, "embedding.word_embeddings.weight") == 0;
    bool first = d->pp == 0, last = d->pp == w->stages.pp - 1, both = w->stages.pp > 1;
    const known *k = &w->known[tensor];
    const char *own =
        ckpt_arena_printf(w->arena, "%.*s%s", (int)k->place.head_len, k->place.head, inner);
    if (embedding ? first : last)
        CKPT_CHECK(put_entry(w, own, embedding ? 0 : w->stages.vpp - 1, order, tensor, chunk));
    if (embedding && both && last && w->mtp)
        CKPT_CHECK(put_entry(w, own, w->stages.vpp - 1, order, tensor, chunk));
    if (words && both && last && w->tied)
        CKPT_CHECK(put_entry(w, "output_layer.weight", w->stages.vpp - 1, order, tensor, chunk));
done:
    return status;
}

static ckpt_status put_chunk(writer *w, const ckpt_mp_dir *d, uint32_t tensor, uint32_t chunk)
{
    const known *k = &w->known[tensor];
    const ckpt_out_tensor *t = &w->out->tensors[tensor];
    const ckpt_out_chunk *c = &t->chunks[chunk];
    bool expert = k->rule != NULL && k->rule->expert;
    int axis = cut_axis(k), v = 0, half = 0;
    int64_t part = 0, e = -1, local = -1, layer = k->stacked ? c->lo[0] : k->place.layer;
    if (axis >= 0 && k->ways * (k->gated ? 2 : 1) > 1) {
        part = c->lo[axis] / c->len[axis];
        half = (int)(part / k->ways);
        if (!k->gather && k->ways > 1 && part % k->ways != (expert ? d->etp : d->tp))
            return CKPT_OK;
    }
    if (expert) {
        int64_t own = w->experts / w->out->mesh.ep;
        if (c->lo[k->stacked] / own != d->ep)
            return CKPT_OK;
        e = c->lo[k->stacked] % own;
    }
    int order = k->gather ? (int)part : k->part != NULL ? k->part_order : half;
    ckpt_index at = {.l = -1, .j = -1, .e = e};
    const char *inner = ckpt_pattern_format(w->arena, k->memory, NULL, &at);
    if (inner == NULL)
        return no_memory(w);
    if (layer < 0)
        return put_outside(w, d, tensor, chunk, order, inner);
    if (!find_stage(&w->stages, layer, d->pp, &v, &local))
        return CKPT_OK;
    return put_entry(w, ckpt_arena_printf(w->arena, "decoder.layers.%" PRId64 ".%s", local, inner),
                     v, order, tensor, chunk);
}

static int by_name(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    int c = x->v != y->v ? (x->v < y->v ? -1 : 1) : strcmp(x->name, y->name);
    if (c == 0)
        c = x->order < y->order ? -1 : x->order > y->order;
    return c;
}

/* Shape of the parameter that entries [i, n) with one name make up; false: they do not fit. */
static bool shape_of(const writer *w, size_t i, size_t n, int *rank, int64_t dims[CKPT_MAX_RANK])
{
    const entry *first = &w->entries[i];
    int base = w->known[first->tensor].base;
    const ckpt_out_tensor *t = &w->out->tensors[first->tensor];
    *rank = t->rank - base;
    for (int a = 0; a < *rank; a++)
        dims[a] = t->chunks[first->chunk].len[base + a];
    for (size_t j = i + 1; j < n; j++) {
        const ckpt_out_tensor *o = &w->out->tensors[w->entries[j].tensor];
        const int64_t *len =
            o->chunks[w->entries[j].chunk].len + w->known[w->entries[j].tensor].base;
        if (o->dtype != t->dtype || o->rank - w->known[w->entries[j].tensor].base != *rank ||
            *rank == 0 || !ckpt_add_i64(dims[0], len[0], &dims[0]))
            return false;
        for (int a = 1; a < *rank; a++)
            if (len[a] != dims[a])
                return false;
    }
    return true;
}

/* The pickle of one virtual stage's parameters, entries [first, last). */
static ckpt_status put_model(writer *w, ckpt_buf *b, size_t first, size_t last, uint64_t *key,
                             ckpt_pt_payload *payloads)
{
    ckpt_pkl_put_global(b, "collections", "OrderedDict");
    ckpt_buf_puts(b, ")R(");
    for (size_t i = first, next; i < last; i = next) {
        entry *e = &w->entries[i];
        int rank;
        int64_t dims[CKPT_MAX_RANK];
        for (next = i + 1; next < last && strcmp(w->entries[next].name, e->name) == 0;)
            next++;
        const ckpt_out_tensor *t = &w->out->tensors[e->tensor];
        ckpt_pkl_put_str(b, e->name);
        if (!shape_of(w, i, next, &rank, dims) ||
            !ckpt_zip_put_tensor(b, t->dtype, rank, dims, (*key)++))
            return ckpt_fail(w->err, CKPT_E_UNSUPPORTED,
                             "tensor '%.300s': its parts do not make one parameter '%s'", t->name,
                             e->name);
        for (size_t j = i; j < next; j++) {
            bool *done = &w->written[w->entries[j].tensor][w->entries[j].chunk];
            payloads[j] = (ckpt_pt_payload){.tensor = w->entries[j].tensor,
                                            .chunk = w->entries[j].chunk,
                                            .more = j > i,
                                            .copy = *done};
            *done = true;
        }
    }
    ckpt_buf_putc(b, 'u');
    return CKPT_OK;
}

static ckpt_status put_rank(writer *w, const ckpt_mp_dir *d, const char *dir)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf b = {0};
    uint64_t key = 0;
    ckpt_pt_payload *payloads = NULL;
    w->n_entries = 0;
    for (size_t t = 0; t < w->out->n_tensors; t++)
        for (size_t c = 0; c < w->out->tensors[t].n_chunks; c++)
            CKPT_CHECK(put_chunk(w, d, (uint32_t)t, (uint32_t)c));
    if (w->n_entries > 0)
        qsort(w->entries, w->n_entries, sizeof *w->entries, by_name);
    payloads = calloc(w->n_entries + 1, sizeof *payloads);
    if (payloads == NULL) {
        status = no_memory(w);
        goto done;
    }
    ckpt_buf_append(&b, w->head.data, w->head.len);
    for (int v = 0, i = 0; v < w->stages.vpp; v++) {
        char name[24] = "model";
        size_t first = (size_t)i;
        while ((size_t)i < w->n_entries && w->entries[i].v == v)
            i++;
        if (w->stages.vpp > 1)
            snprintf(name, sizeof name, "model%d", v);
        ckpt_pkl_put_str(&b, name);
        CKPT_CHECK(put_model(w, &b, first, (size_t)i, &key, payloads));
    }
    ckpt_buf_putc(&b, 'u');
    ckpt_pkl_end(&b);
    const char *path = ckpt_arena_printf(w->arena, "%s/%s/" CKPT_MP_FILE, dir, d->name);
    if (path == NULL) {
        status = no_memory(w);
        goto done;
    }
    CKPT_CHECK(ckpt_pt_archive(&w->pt, path, &b, payloads, w->n_entries, w->err));
done:
    ckpt_buf_release(&b);
    free(payloads);
    return status;
}

/* ---- layout ----------------------------------------------------------------------------------- */

/* What belongs to torch_dist, or to one rank. */
static bool keep_member(const char *key)
{
    static const char *const dropped[] = {"optimizer", "content_metadata", "rng_state",
                                          "rerun_state_machine", "model"};
    for (size_t i = 0; i < sizeof dropped / sizeof dropped[0]; i++)
        if (strcmp(key, dropped[i]) == 0)
            return false;
    return true;
}

static ckpt_status make_head(writer *w)
{
    ckpt_err *err = w->err;
    ckpt_status status = CKPT_OK;
    const ckpt_out *out = w->out;
    ckpt_buf fresh = {0};
    const uint8_t *data = NULL;
    uint64_t length = 0;
    for (size_t i = 0; i < out->n_objects; i++)
        if (strcmp(out->objects[i].name, CKPT_DCP_COMMON_OBJECT) == 0) {
            data = out->objects[i].data;
            length = out->objects[i].length;
        }
    if (data == NULL) {
        CKPT_CHECK(ckpt_dcp_new_common(out->config, out->iteration, NULL, true, &fresh, w->err));
        data = fresh.data;
        length = fresh.len;
    }
    ckpt_pkl_begin(&w->head);
    ckpt_buf_puts(&w->head, "}(");
    CKPT_TRY(ckpt_dcp_common_members(data, length, keep_member, &w->head, w->err), "common state");
done:
    ckpt_buf_release(&fresh);
    return status;
}

static void read_config(writer *w)
{
    const ckpt_json *args = w->out->config;
    bool untied = true;
    int64_t rank;
    const char *impl = ckpt_json_string(ckpt_json_get(args, "transformer_impl"));
    (void)ckpt_rank_arg(args, "num_experts", &w->experts);
    (void)ckpt_json_bool(ckpt_json_get(args, "untie_embeddings_and_output_weights"), &untied);
    w->tied = !untied;
    w->gated = ckpt_rank_flag(args, "swiglu") || ckpt_rank_flag(args, "gated_linear_unit");
    w->local = impl != NULL && strcmp(impl, "local") == 0;
    w->hybrid = ckpt_json_is_string(ckpt_json_get(args, "hybrid_layer_pattern")) ||
                ckpt_json_is_string(ckpt_json_get(args, "hybrid_override_pattern"));
    w->sequential = w->local || !ckpt_rank_flag(args, "moe_grouped_gemm");
    w->kda_low_rank = ckpt_rank_arg(args, "kda_f_lora_rank", &rank) ||
                      ckpt_rank_arg(args, "kda_gate_lora_rank", &rank);
}

/* The files are found again by the sizes that args state. */
static ckpt_status check_args(const writer *w)
{
    const ckpt_mesh *m = &w->out->mesh;
    const struct {
        const char *arg;
        int size, absent;
    } sizes[] = {
        {"tensor_model_parallel_size",   m->tp,  1    },
        {"pipeline_model_parallel_size", m->pp,  1    },
        {"expert_model_parallel_size",   m->ep,  1    },
        {"expert_tensor_parallel_size",  m->etp, m->tp},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        int64_t said = sizes[i].absent;
        (void)ckpt_rank_arg(w->out->config, sizes[i].arg, &said);
        if (said != sizes[i].size)
            return ckpt_fail(w->err, CKPT_E_UNSUPPORTED,
                             "args say %s %" PRId64 ", the files are for %d: only a known layout "
                             "is cut anew",
                             sizes[i].arg, said, sizes[i].size);
    }
    return CKPT_OK;
}

static ckpt_status put_files(writer *w, ckpt_sink *sink)
{
    ckpt_status status;
    ckpt_out *out = w->out;
    const char *dir = out->iteration < 0
                          ? "release"
                          : ckpt_arena_printf(w->arena, "iter_%07lld", (long long)out->iteration);
    ckpt_buf tracker = {0};
    if (dir == NULL)
        return no_memory(w);
    CKPT_CHECK(ckpt_pt_begin(&w->pt, out, sink, w->n_dirs + 1, w->err));
    for (size_t i = 0; i < w->n_dirs; i++)
        CKPT_CHECK(put_rank(w, &w->dirs[i], dir));
    for (size_t t = 0; t < out->n_tensors; t++)
        for (size_t c = 0; c < out->tensors[t].n_chunks; c++)
            if (!w->written[t][c])
                return ckpt_fail(w->err, CKPT_E_UNSUPPORTED, "tensor '%.300s': no rank holds it",
                                 out->tensors[t].name);
    if (out->iteration < 0)
        ckpt_buf_puts(&tracker, "release");
    else
        ckpt_buf_printf(&tracker, "%lld", (long long)out->iteration);
    CKPT_CHECK(ckpt_pt_text(&w->pt, CKPT_DCP_TRACKER, &tracker, w->err));
    sink->manifest_dir = dir;
done:
    return status;
}

ckpt_status ckpt_mp_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err)
{
    ckpt_status status;
    writer w = {.out = out, .arena = &sink->arena, .err = err};
    if (out->config_kind != CKPT_CONFIG_MEGATRON || out->config == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "mp_rank holds Megatron's modules and arguments: --layout megatron");
    if (out->n_tensors >= UINT32_MAX)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%zu tensors", out->n_tensors);
    read_config(&w);
    CKPT_CHECK(check_args(&w));
    CKPT_CHECK(ckpt_mp_dirs(&out->mesh, w.arena, &w.dirs, &w.n_dirs, err));
    CKPT_CHECK(know_all(&w));
    CKPT_CHECK(ckpt_mp_stages_of(out->config, &out->mesh, w.layers, w.arena, &w.stages, err));
    CKPT_CHECK(make_head(&w));
    CKPT_CHECK(put_files(&w, sink));
done:
    free(w.entries);
    ckpt_buf_release(&w.head);
    return status;
}
