/* Rank arithmetic follows Megatron's default order tp-cp-ep-dp-pp (megatron-dist-ckpt.md section 2;
 * a chunk's replica 0 writes it, so dense weights sit on the first tp ranks of their stage). */
#include "shard.h"
#include "checked.h"

#include <string.h>

#define MESH_MAX (1 << 20)

/* What a symbol is called in messages to people. */
static const char *symbol_text(const char *symbol)
{
    static const struct {
        const char *symbol, *text;
    } names[] = {
        {"F",  "gate/up dim"              },
        {"FE", "expert gate/up dim"       },
        {"FS", "shared expert gate/up dim"},
        {"NK", "KDA heads"                },
        {"N",  "attention heads"          },
        {"G",  "key/value heads"          },
        {"L",  "layers"                   },
        {"E",  "experts"                  },
        {"V",  "vocabulary"               },
        {"VP", "padded vocabulary"        },
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (symbol != NULL && strcmp(names[i].symbol, symbol) == 0)
            return names[i].text;
    return symbol != NULL ? symbol : "dimension";
}

const char *const ckpt_mesh_axes[CKPT_MESH_AXES] = {"tp", "pp", "ep", "etp", "cp", "dp"};

int *ckpt_mesh_size(ckpt_mesh *mesh, int axis)
{
    int *const sizes[CKPT_MESH_AXES] = {&mesh->tp,  &mesh->pp, &mesh->ep,
                                        &mesh->etp, &mesh->cp, &mesh->dp};
    return sizes[axis];
}

ckpt_status ckpt_mesh_resolve(ckpt_mesh *mesh, ckpt_err *err)
{
    struct {
        const char *name;
        int *value;
    } sizes[] = {
        {"TP",  &mesh->tp },
        {"PP",  &mesh->pp },
        {"EP",  &mesh->ep },
        {"ETP", &mesh->etp},
        {"CP",  &mesh->cp },
        {"DP",  &mesh->dp },
    };
    if (mesh->etp == 0)
        mesh->etp = mesh->tp;
    int64_t product = 1;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (*sizes[i].value < 1)
            return ckpt_fail(err, CKPT_E_USAGE, "%s is %d, must be at least 1", sizes[i].name,
                             *sizes[i].value);
        product *= *sizes[i].value;
        if (product > MESH_MAX)
            return ckpt_fail(err, CKPT_E_USAGE, "the mesh has more than %d ranks", MESH_MAX);
    }
    return CKPT_OK;
}

static int gcd_int(int a, int b)
{
    while (b != 0) {
        int t = a % b;
        a = b;
        b = t;
    }
    return a;
}

/* Ranks of one pipeline stage: the dense grid tp*cp*dp widened so that the expert grid etp*ep
 * divides it. */
static int per_stage(const ckpt_mesh *mesh)
{
    int dense = mesh->tp * mesh->cp, expert = mesh->etp * mesh->ep;
    int base = dense / gcd_int(dense, expert) * expert;
    int wanted = dense * mesh->dp;
    return wanted > base && wanted % base == 0 ? wanted : base;
}

int ckpt_mesh_stage_ranks(const ckpt_mesh *mesh)
{
    return per_stage(mesh);
}

ckpt_coord ckpt_mesh_coord(const ckpt_mesh *mesh, int rank)
{
    return (ckpt_coord){
        .tp = rank % mesh->tp, .etp = rank % mesh->etp, .ep = rank / mesh->etp % mesh->ep};
}

int ckpt_mesh_world(const ckpt_mesh *mesh)
{
    return mesh->pp * per_stage(mesh);
}

ckpt_status ckpt_mesh_check_blocks(const ckpt_mesh *mesh, int n_blocks, const char *what,
                                   ckpt_err *err)
{
    if (n_blocks > 0 && n_blocks % mesh->pp != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%d %s are not divisible by PP %d", n_blocks, what,
                         mesh->pp);
    return CKPT_OK;
}

int ckpt_mesh_stage(const ckpt_mesh *mesh, int block, int n_blocks)
{
    if (block >= n_blocks)
        return n_blocks > 0 ? mesh->pp - 1 : 0;
    return (int)((int64_t)block * mesh->pp / n_blocks);
}

/* The cut of one stored dimension: an outer run of unit axes, then at most one axis in equal parts.
 * `step` is the extent of one chunk in stored elements. */
typedef struct dim_cut {
    int64_t units, parts, part_len, unit_len;
    ckpt_cut unit_kind, part_kind;
    int64_t unit_size; /* of the EP or PP axis, for the owner */
} dim_cut;

static int cut_ways(const ckpt_mesh *mesh, ckpt_cut cut)
{
    if (cut == CKPT_CUT_ETP)
        return mesh->etp;
    return cut == CKPT_CUT_NONE ? 1 : mesh->tp;
}

static ckpt_status cut_parts(const ckpt_mesh *mesh, const ckpt_axis *axis, int64_t extent,
                             ckpt_cut cut, dim_cut *out, ckpt_err *err)
{
    int ways = cut_ways(mesh, cut);
    if (extent % ways != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s %lld is not divisible by %s %d",
                         symbol_text(axis->symbol), (long long)extent,
                         cut == CKPT_CUT_ETP ? "ETP" : "TP", ways);
    out->parts = ways;
    out->part_kind = cut;
    return CKPT_OK;
}

static bool inside_heads(const ckpt_mesh *mesh, int64_t heads)
{
    return heads > 0 && heads % mesh->tp != 0 && mesh->tp % heads == 0;
}

static bool by_heads(ckpt_cut cut)
{
    return cut == CKPT_CUT_HEAD || cut == CKPT_CUT_GROUP;
}

/* Every index of the axis is a chunk of its own. */
static ckpt_status cut_units(const ckpt_mesh *mesh, const ckpt_axis *axis, dim_cut *out,
                             ckpt_err *err)
{
    out->units *= axis->size;
    out->unit_len = axis->size > 0 ? out->unit_len / axis->size : 0;
    out->part_len = out->unit_len;
    if (axis->cut == CKPT_CUT_UNIT)
        return CKPT_OK;
    bool ep = axis->cut == CKPT_CUT_EP;
    int ways = ep ? mesh->ep : mesh->pp;
    out->unit_kind = axis->cut;
    out->unit_size = axis->size;
    if (axis->size % ways != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%s %lld is not divisible by %s %d",
                         symbol_text(axis->symbol), (long long)axis->size, ep ? "EP" : "PP", ways);
    return CKPT_OK;
}

static ckpt_status plan_dim(const ckpt_mesh *mesh, int dim, int64_t size, const ckpt_map *map,
                            dim_cut *out, bool *inside, ckpt_err *err)
{
    *out = (dim_cut){.units = 1, .parts = 1, .unit_len = size, .part_len = size};
    bool closed = false;
    for (int i = 0; i < map->n; i++) {
        const ckpt_axis *axis = &map->axis[i];
        if (axis->dim != dim || axis->cut == CKPT_CUT_NONE) {
            closed = closed || axis->dim == dim;
            continue;
        }
        if (closed)
            return ckpt_fail(err, CKPT_E_INTERNAL, "axis %d is cut inside an uncut one", i);
        ckpt_status status = CKPT_OK;
        if (axis->cut == CKPT_CUT_TP_DIM) {
            status = cut_parts(mesh, axis, size, CKPT_CUT_TP, out, err);
            closed = true;
        } else if (axis->cut == CKPT_CUT_UNIT || axis->cut == CKPT_CUT_EP ||
                   axis->cut == CKPT_CUT_PP) {
            status = cut_units(mesh, axis, out, err);
        } else if (by_heads(axis->cut) && inside_heads(mesh, axis->size)) {
            if (size % mesh->tp == 0)
                status = cut_parts(mesh, axis, size, CKPT_CUT_TP, out, err);
            *inside = *inside || axis->cut == CKPT_CUT_HEAD;
            closed = true;
        } else {
            ckpt_cut cut = by_heads(axis->cut) ? CKPT_CUT_TP : axis->cut;
            status = cut_parts(mesh, axis, axis->size, cut, out, err);
            closed = true;
        }
        if (status != CKPT_OK)
            return status;
    }
    out->part_len = out->unit_len / out->parts;
    return CKPT_OK;
}

/* Chunk `index` of the row-major grid: place and coordinates on the mesh. */
static int place_chunk(const ckpt_mesh *mesh, int rank, const dim_cut *cut, size_t index,
                       int64_t *lo, int64_t *len, int *stage)
{
    int tp = 0, etp = 0, ep = 0;
    bool expert = false;
    for (int d = rank - 1; d >= 0; d--) {
        int64_t ways = cut[d].units * cut[d].parts;
        int64_t at = (int64_t)(index % (size_t)ways);
        index /= (size_t)ways;
        int64_t unit = at / cut[d].parts, part = at % cut[d].parts;
        lo[d] = unit * cut[d].unit_len + part * cut[d].part_len;
        len[d] = cut[d].part_len;
        if (cut[d].unit_kind == CKPT_CUT_EP) {
            ep = (int)(unit / (cut[d].unit_size / mesh->ep));
            expert = true;
        }
        if (cut[d].unit_kind == CKPT_CUT_PP)
            *stage = (int)(unit / (cut[d].unit_size / mesh->pp));
        if (cut[d].part_kind == CKPT_CUT_TP)
            tp = (int)part;
        if (cut[d].part_kind == CKPT_CUT_ETP) {
            etp = (int)part;
            expert = true;
        }
    }
    return expert ? ep * mesh->etp + etp : tp;
}

ckpt_status ckpt_shard_cut(const ckpt_mesh *mesh, int stage, int rank, const int64_t *dims,
                           const ckpt_map *map, ckpt_arena *arena, ckpt_out_chunk **chunks,
                           size_t *n_chunks, bool *inside, ckpt_err *err)
{
    bool within = false;
    static const ckpt_map none = {0};
    static const ckpt_mesh one = {1, 1, 1, 1, 1, 1};
    dim_cut cut[CKPT_MAX_RANK];
    if (mesh == NULL)
        map = &none;
    if (mesh == NULL || map == NULL)
        mesh = &one;
    size_t n = 1;
    for (int d = 0; d < rank; d++) {
        ckpt_status status =
            plan_dim(mesh, d, dims[d], map != NULL ? map : &none, &cut[d], &within, err);
        if (status != CKPT_OK)
            return status;
        if (!ckpt_mul_size(n, (size_t)(cut[d].units * cut[d].parts), &n))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "too many chunks");
    }
    ckpt_out_chunk *out = ckpt_arena_array(arena, n, sizeof *out);
    int64_t *box = ckpt_arena_array(arena, n * 2 * (size_t)(rank > 0 ? rank : 1), sizeof *box);
    if (out == NULL || box == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu chunks", n);
    for (size_t i = 0; i < n; i++) {
        int64_t *lo = box + i * 2 * (size_t)rank, *len = lo + rank;
        int at_stage = stage;
        int local = place_chunk(mesh, rank, cut, i, lo, len, &at_stage);
        out[i] =
            (ckpt_out_chunk){.lo = lo, .len = len, .owner = at_stage * per_stage(mesh) + local};
    }
    *chunks = out;
    *n_chunks = n;
    if (inside != NULL)
        *inside = within;
    return CKPT_OK;
}

ckpt_status ckpt_shard_sequence(int64_t tokens, int rank, int n, bool zigzag, ckpt_span out[2],
                                int *n_spans, ckpt_err *err)
{
    int64_t pieces = zigzag ? 2 * (int64_t)n : n;
    if (n < 1 || rank < 0 || rank >= n || tokens < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "CP rank %d of %d is out of range", rank, n);
    if (tokens % pieces != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "%lld tokens are not divisible by %lld CP chunks",
                         (long long)tokens, (long long)pieces);
    int64_t len = tokens / pieces;
    out[0] = (ckpt_span){rank * len, len};
    *n_spans = 1;
    if (zigzag) {
        out[1] = (ckpt_span){(pieces - 1 - rank) * len, len};
        *n_spans = 2;
    }
    return CKPT_OK;
}
