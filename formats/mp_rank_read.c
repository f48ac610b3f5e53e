/* Reading mp_rank_* directories as the tensors that torch_dist would store: every rank's parameter
 * becomes boxes of global tensors (rank_names.h), joined over the ranks (rank_join.h). Layers are
 * numbered from 0 in every model chunk; their place in the model is known once all chunks have been
 * counted, so boxes wait until then. GPT models whose layers are all alike are stored stacked, with a
 * leading axis of layers, others layer by layer (megatron-dist-ckpt.md section 2.2). */
#include "mp_rank_read.h"

#include "checked.h"
#include "dcp.h"
#include "io.h"
#include "pickle_internal.h"
#include "shard.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* ---- where ------------------------------------------------------------------------------------ */

static bool has_prefix(const char *s, const char *prefix)
{
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

static bool any_rank(char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (has_prefix(names[i], CKPT_MP_PREFIX))
            return true;
    return false;
}

/* Newest iteration directory with ranks in it, "release" if there is nothing else. */
static ckpt_status newest(ckpt_mp_reader *r, char *const *names, size_t n, int64_t *iteration,
                          ckpt_err *err)
{
    *iteration = -2;
    for (size_t i = 0; i < n; i++) {
        int64_t it = ckpt_dcp_iteration_of(names[i]);
        char **inner;
        size_t n_inner;
        const char *dir = ckpt_path_join(&r->src->arena, r->src->path, names[i]);
        ckpt_entry what;
        if (it == -2 || it <= *iteration)
            continue;
        if (dir == NULL)
            return no_memory(err);
        ckpt_status status = ckpt_look(dir, &what, err);
        if (status != CKPT_OK)
            return status;
        if (what != CKPT_ENTRY_DIR)
            continue;
        status = ckpt_list_dir(dir, &r->src->arena, &inner, &n_inner, err);
        if (status != CKPT_OK)
            return status;
        if (any_rank(inner, n_inner))
            *iteration = it;
    }
    return *iteration != -2 ? CKPT_OK
                            : ckpt_fail(err, CKPT_E_FORMAT, "no iteration with mp_rank_* in it");
}

static ckpt_status locate(ckpt_mp_reader *r, int64_t wanted, ckpt_err *err)
{
    ckpt_status status;
    ckpt_source *src = r->src;
    ckpt_arena *arena = &src->arena;
    int64_t iteration = wanted;
    r->dir = src->path;
    CKPT_CHECK(ckpt_list_dir(r->dir, arena, &r->names, &r->n_names, err));
    if (any_rank(r->names, r->n_names))
        return CKPT_OK;
    const char *tracker = ckpt_path_join(arena, src->path, CKPT_DCP_TRACKER);
    if (tracker == NULL)
        return no_memory(err);
    if (wanted < 0 && ckpt_exists(tracker))
        CKPT_CHECK(ckpt_dcp_read_tracker(tracker, &iteration, err));
    else if (wanted < 0)
        CKPT_CHECK(newest(r, r->names, r->n_names, &iteration, err));
    const char *name =
        iteration < 0 ? "release" : ckpt_arena_printf(arena, "iter_%07lld", (long long)iteration);
    r->dir = name != NULL ? ckpt_path_join(arena, src->path, name) : NULL;
    if (r->dir == NULL)
        return no_memory(err);
    if (!ckpt_exists(r->dir)) /* a file in its place: listing it says so */
        return ckpt_fail(err, wanted >= 0 ? CKPT_E_USAGE : CKPT_E_FORMAT,
                         "neither directory '%s' nor file '%s.h5' is there", name, name);
    CKPT_CHECK(ckpt_list_dir(r->dir, arena, &r->names, &r->n_names, err));
    if (!any_rank(r->names, r->n_names))
        status = ckpt_fail(err, CKPT_E_FORMAT, "'%s' has no mp_rank_* directory", name);
    src->root = r->dir;
done:
    return status;
}

static bool listed(const ckpt_mp_reader *r, const char *name)
{
    for (size_t i = 0; i < r->n_names; i++)
        if (strcmp(r->names[i], name) == 0)
            return true;
    return false;
}

/* ---- mesh ------------------------------------------------------------------------------------- */

static int mesh_arg(const ckpt_json *args, const char *name, int absent)
{
    int64_t v;
    if (!ckpt_rank_arg(args, name, &v))
        return absent;
    return v < 0 || v > INT32_MAX ? 0 : (int)v;
}

static ckpt_status read_mesh(ckpt_mp_reader *r, const ckpt_json *args, ckpt_err *err)
{
    ckpt_mesh *m = &r->mesh;
    ckpt_err why = {0};
    *m = (ckpt_mesh){.tp = mesh_arg(args, "tensor_model_parallel_size", 1),
                     .pp = mesh_arg(args, "pipeline_model_parallel_size", 1),
                     .ep = mesh_arg(args, "expert_model_parallel_size", 1),
                     .etp = mesh_arg(args, "expert_tensor_parallel_size", 0),
                     .cp = 1,
                     .dp = 1};
    if (ckpt_mesh_resolve(m, &why) != CKPT_OK)
        return ckpt_fail(err, CKPT_E_FORMAT, "args: %s", why.text);
    ckpt_status status = ckpt_mp_dirs(m, &r->src->arena, &r->dirs, &r->n_dirs, err);
    if (status != CKPT_OK)
        return status;
    for (size_t i = 0; i < r->n_dirs; i++)
        if (!listed(r, r->dirs[i].name))
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "rank directory '%s' is missing (args say TP %d, PP %d, EP %d)",
                             r->dirs[i].name, m->tp, m->pp, m->ep);
    for (size_t k = 0; k < r->n_names; k++) {
        bool known = !has_prefix(r->names[k], CKPT_MP_PREFIX);
        for (size_t i = 0; i < r->n_dirs && !known; i++)
            known = strcmp(r->names[k], r->dirs[i].name) == 0;
        if (!known)
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "directory '%s' is beyond TP %d, PP %d, EP %d of args", r->names[k],
                             m->tp, m->pp, m->ep);
    }
    return CKPT_OK;
}

/* Arguments that shape the model or the mesh must not differ between ranks. */
static ckpt_status check_args(const ckpt_mp_reader *r, const ckpt_json *args, ckpt_err *err)
{
    static const char *const shaping[] = {"tensor_model_parallel_size",
                                          "pipeline_model_parallel_size",
                                          "expert_model_parallel_size",
                                          "expert_tensor_parallel_size",
                                          "virtual_pipeline_model_parallel_size",
                                          "num_layers",
                                          "hidden_size",
                                          "ffn_hidden_size",
                                          "num_attention_heads",
                                          "num_query_groups",
                                          "kv_channels",
                                          "padded_vocab_size",
                                          "num_experts",
                                          "moe_ffn_hidden_size",
                                          "swiglu",
                                          "hybrid_layer_pattern",
                                          "hybrid_override_pattern",
                                          "untie_embeddings_and_output_weights"};
    for (size_t i = 0; i < sizeof shaping / sizeof shaping[0]; i++) {
        const ckpt_json *a = ckpt_json_get(args, shaping[i]);
        const ckpt_json *b = ckpt_json_get(r->src->config, shaping[i]);
        if ((a == NULL && b == NULL) || ckpt_json_equal(a, b))
            continue;
        return ckpt_fail(err, CKPT_E_FORMAT, "args: %s differs from that of %s", shaping[i],
                         r->dirs[0].name);
    }
    return CKPT_OK;
}

/* ---- boxes ------------------------------------------------------------------------------------ */

/* Put a box aside until the layers are numbered. */
static ckpt_status keep_box(ckpt_mp_reader *r, const ckpt_mp_param *p, const char *part,
                            ckpt_piece *piece, ckpt_err *err)
{
    ckpt_status status =
        ckpt_grow((void **)&r->boxes, &r->cap_boxes, r->n_boxes + 1, sizeof *r->boxes, err);
    if (status != CKPT_OK)
        return status;
    ckpt_mp_box *b = &r->boxes[r->n_boxes++];
    size_t n = p->place.head_len;
    *b = (ckpt_mp_box){
        .piece = *piece, .layer = p->place.layer, .chunk = p->chunk, .state = p->state};
    if (n >= 16 && memcmp(p->place.head + n - 16, "mtp_model_layer.", 16) == 0) {
        /* on disk the GPT module has its older name; a hybrid one goes on with "layers." */
        n -= 16;
        b->head = ckpt_arena_printf(&r->src->arena, "%s%.*stransformer_layer.", p->prefix, (int)n,
                                    p->place.head);
    } else {
        b->head = ckpt_arena_printf(&r->src->arena, "%s%.*s", p->prefix, (int)n, p->place.head);
    }
    b->tail = part != NULL ? ckpt_arena_printf(&r->src->arena, "%s.%s", p->stored, part)
                           : ckpt_arena_strdup(&r->src->arena, p->stored);
    return b->head != NULL && b->tail != NULL ? CKPT_OK : no_memory(err);
}

static ckpt_status prepend(ckpt_piece *b, int64_t index, int64_t count, ckpt_err *err)
{
    if (b->rank == CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rank above %d", CKPT_MAX_RANK);
    size_t bytes = (size_t)b->rank * sizeof b->dims[0];
    int64_t *const rows[] = {b->dims, b->lo, b->len, b->stride};
    const int64_t first[] = {count, index, 1, 0};
    for (size_t i = 0; i < 4; i++) {
        memmove(rows[i] + 1, rows[i], bytes);
        rows[i][0] = first[i];
    }
    b->rank++;
    return CKPT_OK;
}

/* Axis `axis` of the box is part `index` of `parts`; axis < 0: not cut. */
static ckpt_status cut(ckpt_piece *b, int axis, int64_t index, int64_t parts, ckpt_err *err)
{
    if (axis < 0)
        return CKPT_OK;
    if (axis >= b->rank || !ckpt_mul_i64(b->len[axis], parts, &b->dims[axis]))
        return ckpt_fail(err, CKPT_E_FORMAT, "cut on axis %d of a tensor of rank %d", axis,
                         b->rank);
    b->lo[axis] = b->len[axis] * index;
    return CKPT_OK;
}

/* A box of rows [row, row + rows) of the parameter. */
static ckpt_piece rows_of(const ckpt_mp_param *p, int64_t row, int64_t rows)
{
    const ckpt_pt_tensor *t = &p->t;
    ckpt_piece b = {.rank = t->rank,
                    .dtype = t->dtype,
                    .offset = t->offset,
                    .file = p->file,
                    .big_endian = t->big_endian,
                    .strided = t->stride != NULL};
    uint64_t step = 1; /* an empty tensor may claim extents whose product wraps */
    for (int a = t->rank - 1; a >= 0; a--) {
        b.dims[a] = b.len[a] = t->dims[a];
        b.stride[a] = t->stride != NULL ? t->stride[a] : (int64_t)step;
        step *= (uint64_t)t->dims[a];
    }
    if (t->rank > 0) {
        b.dims[0] = b.len[0] = rows;
        b.offset +=
            (uint64_t)row * (uint64_t)b.stride[0] * (uint64_t)ckpt_dtype_get(t->dtype)->bits / 8;
    }
    return b;
}

static ckpt_status put_box(ckpt_mp_reader *r, const ckpt_mp_param *p, ckpt_piece *b, int64_t expert,
                           const char *part, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (p->rule != NULL && p->rule->expert)
        status = prepend(b, p->dir->ep * r->local_experts + expert, r->experts, err);
    return status == CKPT_OK ? keep_box(r, p, part, b, err) : status;
}

/* ---- parameters ------------------------------------------------------------------------------- */

static ckpt_status put_gated(ckpt_mp_reader *r, const ckpt_mp_param *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t rows = p->t.rank > 0 ? p->t.dims[0] : 0;
    if (p->t.rank == 0 || rows % 2 != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "%" PRId64 " rows are no gate and up half", rows);
    for (int half = 0; half < 2; half++) {
        ckpt_piece b = rows_of(p, half * (rows / 2), rows / 2);
        CKPT_CHECK(cut(&b, 0, half * p->ways + p->way, 2 * p->ways, err));
        CKPT_CHECK(put_box(r, p, &b, p->expert, NULL, err));
    }
done:
    return status;
}

static bool has_sibling(const void *self, const char *rest)
{
    const ckpt_mp_param *p = self;
    char name[512];
    size_t n = (size_t)(p->place.rest - p->name);
    if (n + strlen(rest) >= sizeof name)
        return false;
    memcpy(name, p->name, n);
    memcpy(name + n, rest, strlen(rest) + 1);
    return ckpt_pkl_get(p->dict, name) != NULL;
}

/* Stored names follow Transformer Engine's modules, where the linear layer after a norm holds it. The
 * local modules keep norms apart and are renamed (sharded_state_dict_keys_map of
 * get_gpt_layer_local_spec). The renaming of the norm before MoE, to that of a layer which does not
 * exist there, is not followed. The layers of hybrid models have no such map. */
static const char *stored_name(const ckpt_mp_param *p, bool hybrid)
{
    static const struct {
        const char *memory, *linear, *stored;
    } fused[] = {
        {"input_layernorm.weight",   "self_attention.linear_qkv.weight",
         "self_attention.linear_qkv.layer_norm_weight"                                                     },
        {"input_layernorm.bias",     "self_attention.linear_qkv.weight",
         "self_attention.linear_qkv.layer_norm_bias"                                                       },
        {"pre_mlp_layernorm.weight", "mlp.linear_fc1.weight",            "mlp.linear_fc1.layer_norm_weight"},
        {"pre_mlp_layernorm.bias",   "mlp.linear_fc1.weight",            "mlp.linear_fc1.layer_norm_bias"  },
    };
    for (size_t i = 0; i < sizeof fused / sizeof fused[0]; i++)
        if (!hybrid && strcmp(p->place.rest, fused[i].memory) == 0 &&
            has_sibling(p, fused[i].linear) && has_sibling(p, "self_attention.linear_qkv.weight"))
            return fused[i].stored;
    if (p->rule == NULL)
        return p->place.rest;
    return p->rule->stored != NULL ? p->rule->stored : p->rule->memory;
}

static ckpt_status put_parts(ckpt_mp_reader *r, const ckpt_mp_param *p, ckpt_err *err)
{
    ckpt_status status;
    ckpt_rank_parts parts;
    int64_t total = 0, row = 0, rows = p->t.rank > 0 ? p->t.dims[0] : 0;
    CKPT_CHECK(ckpt_rank_sections(p->place.rest, r->src->config, has_sibling, p, &parts, err));
    for (int i = 0; i < parts.n; i++) {
        if (parts.size[i] % p->ways != 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "section %s of %" PRId64 " rows at TP %" PRId64,
                             parts.name[i], parts.size[i], p->ways);
        total += parts.size[i] / p->ways;
    }
    if (total != rows)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "%" PRId64 " rows, expected %" PRId64 " of %d sections by args", rows,
                         total, parts.n);
    for (int i = 0; i < parts.n; i++) {
        int64_t n = parts.size[i] / p->ways;
        ckpt_piece b = rows_of(p, row, n);
        CKPT_CHECK(cut(&b, 0, p->way, p->ways, err));
        CKPT_CHECK(put_box(r, p, &b, -1, parts.name[i], err));
        row += n;
    }
done:
    return status;
}

/* Experts of a grouped GEMM in one matrix, transposed against everybody else's. */
static ckpt_status put_gemm(ckpt_mp_reader *r, const ckpt_mp_param *p, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool first = p->rule->cut == CKPT_RANK_GEMM1;
    const ckpt_pt_tensor *t = &p->t;
    if (t->rank != 2 || t->stride != NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "experts in a matrix that is not row-major");
    int64_t n = r->local_experts, in = first ? t->dims[0] : t->dims[0] / n;
    int64_t out = first ? t->dims[1] / n : t->dims[1];
    int halves = first && r->gated ? 2 : 1;
    if (t->dims[first ? 1 : 0] % n != 0 || out % halves != 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "shape [%" PRId64 ", %" PRId64 "] does not hold %" PRId64 " experts",
                         t->dims[0], t->dims[1], n);
    for (int64_t e = 0; e < n; e++)
        for (int h = 0; h < halves; h++) {
            int64_t rows = out / halves, at = e * in * out + h * rows;
            ckpt_piece b = rows_of(p, 0, t->dims[0]);
            b.strided = true;
            b.dims[0] = b.len[0] = rows;
            b.dims[1] = b.len[1] = in;
            b.stride[0] = 1;
            b.stride[1] = out;
            b.offset = t->offset + (uint64_t)at * (uint64_t)ckpt_dtype_get(t->dtype)->bits / 8;
            if (first)
                CKPT_CHECK(cut(&b, 0, h * p->ways + p->way, halves * p->ways, err));
            else
                CKPT_CHECK(cut(&b, 1, p->way, p->ways, err));
            CKPT_CHECK(put_box(r, p, &b, e, NULL, err));
        }
done:
    return status;
}

/* Rows of a module that is either duplicated or column-parallel. */
static ckpt_status sized_cut(const ckpt_mp_reader *r, const ckpt_mp_param *p, int *axis,
                             ckpt_err *err)
{
    int64_t size = 0, v, rows = p->t.rank > 0 ? p->t.dims[0] : 0;
    *axis = -1;
    if (p->ways == 1)
        return CKPT_OK;
    for (size_t i = 0; i < 2 && p->rule->size[i] != NULL; i++) {
        if (!ckpt_rank_arg(r->src->config, p->rule->size[i], &v) || v <= 0 || v > INT32_MAX)
            return ckpt_fail(err, CKPT_E_FORMAT, "args do not give %s, needed to place its rows",
                             p->rule->size[i]);
        size += v;
    }
    if (rows != size && (size % p->ways != 0 || rows != size / p->ways))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "%" PRId64 " rows, expected %" PRId64 " or 1/%" PRId64 " of them", rows,
                         size, p->ways);
    *axis = rows == size ? -1 : 0;
    return CKPT_OK;
}

static ckpt_status put_param(ckpt_mp_reader *r, const ckpt_mp_param *p, ckpt_err *err)
{
    ckpt_status status;
    int axis = -1;
    if (p->rule == NULL && (p->ways > 1 || r->mesh.ep > 1 || r->mesh.etp > 1))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "it is not known how parallel ranks share this parameter");
    if (ckpt_dtype_get(p->t.dtype)->bits % 8 != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s elements cannot be cut by rows",
                         ckpt_dtype_get(p->t.dtype)->name);
    ckpt_rank_cut how = p->rule != NULL ? p->rule->cut : CKPT_RANK_WHOLE;
    if (how == CKPT_RANK_PARTS)
        return put_parts(r, p, err);
    if (how == CKPT_RANK_GEMM1 || how == CKPT_RANK_GEMM2)
        return put_gemm(r, p, err);
    if (how == CKPT_RANK_GATED && r->gated)
        return put_gated(r, p, err);
    if (how == CKPT_RANK_ROWS || how == CKPT_RANK_GATED)
        axis = 0;
    else if (how == CKPT_RANK_COLS)
        axis = 1;
    else if (how == CKPT_RANK_SIZED)
        CKPT_CHECK(sized_cut(r, p, &axis, err));
    ckpt_piece b = rows_of(p, 0, p->t.rank > 0 ? p->t.dims[0] : 0);
    CKPT_CHECK(cut(&b, axis, p->way, p->ways, err));
    CKPT_CHECK(put_box(r, p, &b, p->expert, NULL, err));
done:
    return status;
}

ckpt_status ckpt_mp_add(ckpt_mp_reader *r, ckpt_mp_param *p, ckpt_err *err)
{
    if (!ckpt_rank_split(p->name, &p->place))
        return ckpt_fail(err, CKPT_E_FORMAT, "layer number of '%.300s'", p->name);
    bool copy = r->tied && strcmp(p->name, "output_layer.weight") == 0;
    if (copy) /* the last stage's copy of the embedding */
        (void)ckpt_rank_split("embedding.word_embeddings.weight", &p->place);
    p->rule = ckpt_rank_by_memory(p->place.rest, &p->expert);
    p->stored = stored_name(p, r->hybrid);
    bool expert = p->rule != NULL && p->rule->expert;
    if (expert && (r->local_experts == 0 || p->expert >= r->local_experts))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "expert %" PRId64 " of %" PRId64 " of this rank (num_experts %" PRId64
                         ", EP %d)",
                         p->expert, r->local_experts, r->experts, r->mesh.ep);
    p->ways = expert ? r->mesh.etp : r->mesh.tp;
    p->way = expert ? p->dir->etp : p->dir->tp;
    return put_param(r, p, err);
}

/* ---- one model chunk -------------------------------------------------------------------------- */

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && strcmp(s + n - m, tail) == 0;
}

/* Layers of a chunk, which every rank must hold alike. */
static ckpt_status count_layers(ckpt_mp_reader *r, ckpt_pkl *const *pairs, size_t n, int chunk,
                                ckpt_err *err)
{
    int64_t layers = 0;
    for (size_t i = 0; i + 1 < n; i += 2) {
        ckpt_rank_place place;
        const char *name = ckpt_pkl_str(pairs[i]);
        if (name != NULL && ckpt_rank_split(name, &place) && place.layer >= layers)
            layers = place.layer + 1;
    }
    if (r->counts[chunk] >= 0 && r->counts[chunk] != layers)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "%" PRId64 " layers, but %" PRId64 " in other ranks of its stage", layers,
                         r->counts[chunk]);
    r->counts[chunk] = layers;
    return CKPT_OK;
}

static ckpt_status read_chunk(ckpt_mp_reader *r, const ckpt_mp_file *f, const ckpt_pkl *dict,
                              int chunk, ckpt_err *err)
{
    ckpt_pkl *const *pairs;
    size_t n;
    ckpt_status status;
    if (!ckpt_pkl_pairs(dict, &pairs, &n))
        return ckpt_fail(err, CKPT_E_FORMAT, "the model is not a dictionary");
    CKPT_CHECK(count_layers(r, pairs, n, chunk, err));
    for (size_t i = 0; i + 1 < n; i += 2) {
        ckpt_mp_param p = {.name = ckpt_pkl_str(pairs[i]),
                           .prefix = "",
                           .dict = dict,
                           .dir = f->dir,
                           .file = f->file,
                           .chunk = chunk};
        bool is_tensor;
        const char *what;
        if (p.name == NULL || strlen(p.name) != pairs[i]->len)
            return ckpt_fail(err, CKPT_E_FORMAT, "a parameter without a usable name");
        if (ends_with(p.name, "._extra_state")) {
            r->n_extra += pairs[i + 1]->kind != CKPT_PKL_NONE;
            continue;
        }
        CKPT_TRY(ckpt_pt_tensor_of(&f->pt, pairs[i + 1], f->arena, &p.t, &is_tensor, &what, err),
                 "tensor '%.300s'", p.name);
        if (!is_tensor)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "'%.300s' is %s%s", p.name,
                             what != NULL ? what : "no tensor",
                             what != NULL ? " tensor, which is not decoded" : "");
        if (strncmp(p.name, "decoder.final_norm.", 19) == 0)
            r->hybrid = true;
        CKPT_TRY(ckpt_mp_add(r, &p, err), "tensor '%.300s'", p.name);
    }
done:
    return status;
}

/* ---- one rank --------------------------------------------------------------------------------- */

const ckpt_pkl *ckpt_mp_model(const ckpt_pkl *root, int v)
{
    char key[24];
    snprintf(key, sizeof key, "model%d", v);
    const ckpt_pkl *chunk = ckpt_pkl_get(root, key);
    return chunk == NULL && v == 0 ? ckpt_pkl_get(root, "model") : chunk;
}

static ckpt_status count_chunks(ckpt_mp_reader *r, const ckpt_pkl *root, ckpt_err *err)
{
    int vpp = 0;
    while (vpp < CKPT_MP_MAX_CHUNKS && ckpt_mp_model(root, vpp) != NULL)
        vpp++;
    if (vpp == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "neither 'model' nor 'model0'");
    if (r->vpp != 0 && r->vpp != vpp)
        return ckpt_fail(err, CKPT_E_FORMAT, "%d model chunks, but %d in %s", vpp, r->vpp,
                         r->dirs[0].name);
    if (r->vpp != 0)
        return CKPT_OK;
    r->vpp = vpp;
    size_t n = (size_t)vpp * (size_t)r->mesh.pp;
    r->counts = ckpt_arena_array(&r->src->arena, n, sizeof *r->counts);
    if (r->counts == NULL)
        return no_memory(err);
    for (size_t i = 0; i < n; i++)
        r->counts[i] = -1;
    return CKPT_OK;
}

/* What the first rank says about the whole. */
static ckpt_status read_first(ckpt_mp_reader *r, const ckpt_pkl *root, ckpt_json *args,
                              ckpt_err *err)
{
    ckpt_source *src = r->src;
    int64_t iteration, n = 0;
    bool untied = true;
    src->config = args;
    src->config_kind = CKPT_CONFIG_MEGATRON;
    ckpt_status status = read_mesh(r, args, err);
    if (status != CKPT_OK)
        return status;
    if (ckpt_pkl_int(ckpt_pkl_get(root, "iteration"), &iteration) && iteration >= 0)
        src->iteration = iteration;
    r->gated = ckpt_rank_flag(args, "swiglu") || ckpt_rank_flag(args, "gated_linear_unit");
    r->tied = ckpt_json_bool(ckpt_json_get(args, "untie_embeddings_and_output_weights"), &untied) &&
              !untied;
    if ((ckpt_rank_arg(args, "num_experts", &n) || ckpt_rank_arg(args, "num_moe_experts", &n)) &&
        n > 0) {
        if (n > CKPT_MP_MAX_EXPERTS || n % r->mesh.ep != 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "args: num_experts %" PRId64 " with EP %d", n,
                             r->mesh.ep);
        r->experts = n;
        r->local_experts = n / r->mesh.ep;
    }
    r->hybrid = ckpt_json_is_string(ckpt_json_get(args, "hybrid_layer_pattern")) ||
                ckpt_json_is_string(ckpt_json_get(args, "hybrid_override_pattern"));
    src->common = ckpt_mp_display(root, &src->arena);
    return src->common != NULL ? CKPT_OK : no_memory(err);
}

static ckpt_status flag_unknown(ckpt_mp_reader *r, const ckpt_mp_file *f, ckpt_err *err)
{
    ckpt_source *src = r->src;
    const char *global = ckpt_pkl_unknown_global(f->pt.root, f->pt.n_nodes, &src->arena, err);
    if (global == NULL)
        return CKPT_OK;
    ckpt_object *grown = ckpt_arena_array(&src->arena, src->n_objects + 1, sizeof *grown);
    const char *name = ckpt_arena_printf(&src->arena, "%s/data.pkl", f->dir->name);
    if (grown == NULL || name == NULL)
        return no_memory(err);
    if (src->n_objects > 0)
        memcpy(grown, src->objects, src->n_objects * sizeof *grown);
    grown[src->n_objects++] = (ckpt_object){.name = name,
                                            .file = f->file,
                                            .offset = f->pt.pickle_offset,
                                            .length = f->pt.pickle_length,
                                            .unknown_global = global};
    src->objects = grown;
    return CKPT_OK;
}

static ckpt_status open_rank(ckpt_mp_reader *r, const char *dir, ckpt_mp_file *f, ckpt_err *err)
{
    ckpt_source *src = r->src;
    const char *name = ckpt_arena_printf(&src->arena, "%s/" CKPT_MP_FILE, dir);
    const char *path = name != NULL ? ckpt_path_join(&src->arena, r->dir, name) : NULL;
    if (path == NULL)
        return no_memory(err);
    if (!ckpt_exists(path))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' does not exist", name);
    ckpt_status status = ckpt_source_add_file(src, name, path, true, &f->file, err);
    if (status != CKPT_OK)
        return status;
    CKPT_TRY(ckpt_pt_open(src, f->file, 0, src->files[f->file].size, f->arena, &f->pt, err), "%s",
             name);
done:
    return status;
}

/* The other files of a rank directory: optimizer state in forms that are not read. */
static ckpt_status note_optimizer_files(ckpt_mp_reader *r, const char *dir, ckpt_err *err)
{
    ckpt_arena *arena = &r->src->arena;
    char **names;
    size_t n;
    const char *path = ckpt_path_join(arena, r->dir, dir);
    if (path == NULL)
        return no_memory(err);
    ckpt_status status = ckpt_list_dir(path, arena, &names, &n, err);
    for (size_t i = 0; status == CKPT_OK && i < n && r->src->no_optimizer == NULL; i++)
        if (strcmp(names[i], "distrib_optim.pt") == 0 || has_prefix(names[i], "layer_wise_optim")) {
            r->src->no_optimizer = ckpt_arena_printf(
                arena, "%s/%s: distributed optimizer state of the torch format is not read", dir,
                names[i]);
            if (r->src->no_optimizer == NULL)
                return no_memory(err);
        }
    return status;
}

static ckpt_status read_rank(ckpt_mp_reader *r, ckpt_mp_file *f, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    CKPT_CHECK(count_chunks(r, f->pt.root, err));
    for (int v = 0; v < r->vpp; v++) {
        CKPT_CHECK(
            read_chunk(r, f, ckpt_mp_model(f->pt.root, v), v * r->mesh.pp + f->dir->pp, err));
    }
    CKPT_CHECK(ckpt_mp_optimizer(r, f, err));
    CKPT_CHECK(flag_unknown(r, f, err));
done:
    return status;
}

static ckpt_status first_args(const ckpt_mp_file *f, ckpt_json **out, ckpt_err *err)
{
    const ckpt_pkl *args = ckpt_pkl_get(f->pt.root, "args");
    if (!ckpt_pkl_is_object(args, "argparse", "Namespace"))
        return ckpt_fail(err, CKPT_E_FORMAT, "no training arguments ('args')");
    *out = ckpt_pkl_to_json(args);
    return *out != NULL ? CKPT_OK : no_memory(err);
}

static ckpt_status read_ranks(ckpt_mp_reader *r, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const char *first = NULL;
    ckpt_arena arena = {0};
    for (size_t i = 0; i < r->n_names && first == NULL; i++)
        if (has_prefix(r->names[i], CKPT_MP_PREFIX))
            first = r->names[i];
    for (size_t i = 0; i == 0 || i < r->n_dirs; i++) {
        ckpt_mp_file f = {.arena = &arena};
        ckpt_json *args = NULL;
        const char *name = i == 0 ? first : r->dirs[i].name;
        CKPT_CHECK(ckpt_check_interrupted(err));
        CKPT_CHECK(open_rank(r, name, &f, err));
        CKPT_TRY(first_args(&f, &args, err), "%s", name);
        if (i == 0) {
            CKPT_TRY(read_first(r, f.pt.root, args, err), "%s", name);
            if (strcmp(first, r->dirs[0].name) != 0) {
                status =
                    ckpt_fail(err, CKPT_E_FORMAT, "first rank directory is '%s', expected '%s'",
                              first, r->dirs[0].name);
                goto done;
            }
        } else {
            status = check_args(r, args, err);
            ckpt_json_free(args);
            CKPT_TRY(status, "%s", name);
        }
        f.dir = &r->dirs[i];
        CKPT_CHECK(note_optimizer_files(r, name, err));
        CKPT_TRY(read_rank(r, &f, err), "%s/" CKPT_MP_FILE, name);
        ckpt_arena_free(&arena);
    }
done:
    ckpt_arena_free(&arena);
    return status;
}

/* ---- numbering -------------------------------------------------------------------------------- */

static bool per_layer_arg(const ckpt_json *args, const char *name)
{
    int64_t every = 1;
    const ckpt_json *j = ckpt_json_get(args, name);
    return ckpt_json_is_array(j) || (ckpt_json_int(j, &every) && every > 1);
}

/* Whether Megatron stores the layers with a leading axis (TransformerBlock.sharded_state_dict). */
static bool is_stacked(const ckpt_mp_reader *r)
{
    const ckpt_json *args = r->src->config;
    return !r->hybrid && !per_layer_arg(args, "moe_layer_freq") &&
           !per_layer_arg(args, "linear_attention_freq") &&
           !ckpt_rank_flag(args, "hetereogenous_dist_checkpoint") &&
           !ckpt_json_is_string(ckpt_json_get(args, "heterogeneous_layers_config_path"));
}

static ckpt_status number_layers(ckpt_mp_reader *r, ckpt_join *join, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool stacked = is_stacked(r);
    int chunks = r->vpp * r->mesh.pp;
    int64_t layers = 0, said;
    int64_t *first = ckpt_arena_array(&r->src->arena, (size_t)chunks, sizeof *first);
    if (first == NULL)
        return no_memory(err);
    for (int c = 0; c < chunks; c++) {
        first[c] = layers;
        layers += r->counts[c];
    }
    if (!r->hybrid && ckpt_rank_arg(r->src->config, "num_layers", &said) && said != layers)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "the ranks hold %" PRId64 " layers, args say num_layers %" PRId64, layers,
                         said);
    for (size_t i = 0; i < r->n_boxes; i++) {
        ckpt_mp_box *b = &r->boxes[i];
        const char *name;
        if (b->state && r->src->no_optimizer != NULL)
            continue; /* some rank's could not be read */
        if (b->layer >= 0 && stacked)
            CKPT_CHECK(prepend(&b->piece, first[b->chunk] + b->layer, layers, err));
        if (b->layer >= 0 && !stacked)
            name = ckpt_arena_printf(&r->src->arena, "%s%" PRId64 ".%s", b->head,
                                     first[b->chunk] + b->layer, b->tail);
        else
            name = ckpt_arena_printf(&r->src->arena, "%s%s", b->head, b->tail);
        if (name == NULL)
            return no_memory(err);
        b->piece.name = name;
        CKPT_CHECK(ckpt_join_add(join, &b->piece, err));
    }
done:
    return status;
}

ckpt_status ckpt_mp_open(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    ckpt_status status;
    ckpt_mp_reader r = {.src = src};
    ckpt_join join = {0};
    CKPT_CHECK(locate(&r, opts->iteration, err));
    CKPT_CHECK(read_ranks(&r, err));
    CKPT_CHECK(number_layers(&r, &join, err));
    CKPT_CHECK(ckpt_join_finish(&join, src, err));
    if (r.n_extra > 0)
        CKPT_CHECK(ckpt_source_warn(src, err,
                                    "%zu _extra_state entries of the ranks are left out (state of "
                                    "delayed FP8 scaling)",
                                    r.n_extra));
done:
    free(r.boxes);
    ckpt_join_release(&join);
    return status;
}
