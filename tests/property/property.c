/* Property test: for a model drawn from a seed, any chain of conversions mesh A -> mesh B -> A over
 * all containers gives back the same bytes and the same root digest. Cast to another dtype, the digests
 * that a conversion reports are those of what it wrote.
 *
 *   property [--seeds N] [--first S] [--threads T] [--dir D] [--keep]
 *
 * A seed decides everything: kind of model, sizes, dtypes, meshes, shard sizes, threads, buffers.
 * Repeat one failure with --first SEED --seeds 1 --keep. Runs in one process, on /dev/shm when it
 * exists, because the library makes every file durable. */
#include "dcp.h"
#include "io.h"
#include "memsource.h"
#include "stream.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_STAGES 16

typedef struct stage {
    char label[96]; /* also the directory's name */
    char *dir;      /* NULL for the memory source */
    ckpt_source src;
    ckpt_model model;
    bool opened, bound;
    uint8_t root[CKPT_SHA256_LEN]; /* as the conversion reported it; the memory source's own */
} stage;

/* One seed's run. */
typedef struct run {
    uint64_t seed;
    synth_rng rng;
    synth_model synth;
    const char *dir;
    stage stages[MAX_STAGES];
    int n_stages;
    uint8_t config[CKPT_SHA256_LEN];
    bool has_config;
    ckpt_stream_opts stream;
    ckpt_arena arena;
    const char *doing; /* for the failure message */
    unsigned conversions;
} run;

static const char *const kind_names[] = {"hf", "megatron", "plain"};

/* ---- stages ----------------------------------------------------------------------------------- */

static ckpt_status check_stage(run *r, stage *s, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint8_t root[CKPT_SHA256_LEN], config[CKPT_SHA256_LEN];
    ckpt_model_opts opts = {.allow_unknown = r->synth.kind == SYNTH_PLAIN};
    r->doing = "bind";
    CKPT_CHECK(ckpt_model_bind(&s->model, &s->src, &opts, err));
    s->bound = true;
    ckpt_tensor_hash *hash = ckpt_arena_array(&r->arena, s->model.n_tensors + 1, sizeof *hash);
    if (hash == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    r->doing = "digest";
    CKPT_CHECK(ckpt_stream_digest(&s->model, &r->stream, &r->arena, hash, root, err));
    bool has_config = s->model.config != NULL;
    if (has_config)
        CKPT_CHECK(ckpt_config_digest(s->model.config, config, err));
    if (s == r->stages) {
        memcpy(s->root, root, sizeof root);
        r->has_config = has_config;
        if (has_config)
            memcpy(r->config, config, sizeof config);
        if (has_config != (r->synth.kind != SYNTH_PLAIN))
            return ckpt_fail(err, CKPT_E_MISMATCH, "model family %s",
                             has_config ? "found in a plain source" : "not recognised");
        return CKPT_OK;
    }
    if (memcmp(root, s->root, sizeof root) != 0)
        return ckpt_fail(err, CKPT_E_MISMATCH, "root differs from the one that convert reports");
    if (has_config != r->has_config ||
        (has_config && memcmp(config, r->config, sizeof config) != 0))
        return ckpt_fail(err, CKPT_E_MISMATCH, "config digest differs from the source's");
done:
    return status;
}

static ckpt_status open_memory(run *r, stage **out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    stage *s = &r->stages[r->n_stages++];
    snprintf(s->label, sizeof s->label, "source");
    s->opened = true; /* a half-filled source is closed like a whole one */
    r->doing = "open";
    CKPT_CHECK(memsource_open(&s->src, &r->synth, &r->rng, err));
    CKPT_CHECK(check_stage(r, s, err));
    *out = s;
done:
    return status;
}

typedef struct target {
    const char *container, *group; /* group NULL: keep the layout */
    ckpt_mesh mesh;
    uint64_t max_shard;
    bool cast;
    ckpt_dtype dtype; /* if cast */
} target;

static const ckpt_mesh whole = {1, 1, 1, 1, 1, 1};

/* As the program chooses: no change within the group, else what the drawn configuration says of its
 * own group. */
static const ckpt_layout *layout_for(const run *r, const stage *from, const target *to)
{
    const ckpt_layout *now = from->model.layout, *was = r->stages[0].model.layout;
    if (to->group == NULL || now == NULL || strcmp(now->group, to->group) == 0)
        return NULL;
    bool back = was != NULL && strcmp(was->group, to->group) == 0;
    return ckpt_layout_for(&from->model, back ? r->stages[0].src.config : NULL, &to->mesh,
                           to->group);
}

/* The common state is carried with its arguments brought up to date, as the program does. */
static ckpt_status refresh_common(void *self, ckpt_plan *plan, ckpt_err *err)
{
    ckpt_arena *arena = self;
    for (size_t i = 0; i < plan->out.n_objects; i++) {
        ckpt_out_object *object = &plan->out.objects[i];
        if (strcmp(object->name, CKPT_DCP_COMMON_OBJECT) != 0)
            continue;
        ckpt_buf payload = {0};
        ckpt_status status =
            ckpt_dcp_common_with_args(plan->model->src, plan->config, &payload, err);
        if (status == CKPT_OK) {
            object->data = ckpt_arena_memdup(arena, payload.data, payload.len);
            object->length = payload.len;
            if (object->data == NULL)
                status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        }
        ckpt_buf_release(&payload);
        if (status != CKPT_OK)
            return status;
    }
    return CKPT_OK;
}

static ckpt_status write_stage(run *r, const stage *from, const target *to, stage *s, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const uint8_t *source_root = r->stages[0].root;
    ckpt_plan plan = {0};
    ckpt_convert_result result = {0};
    union {
        const ckpt_model *in;
        ckpt_model *out;
    } model = {&from->model}; /* the plan borrows it; it does not change */
    ckpt_convert_opts opts = {.container = ckpt_container_find(to->container),
                              .layout = layout_for(r, from, to),
                              .mesh = to->mesh,
                              .sharded = strcmp(to->container, "torch_dist") == 0,
                              .allow_unknown = r->synth.kind == SYNTH_PLAIN,
                              .max_shard_bytes = to->max_shard,
                              .cast = to->cast ? CKPT_CAST_TO : CKPT_CAST_KEEP,
                              .dtype = to->dtype,
                              .before_layout = refresh_common,
                              .self = &r->arena};
    /* the way back knows the spellings of the source, as the program does by the manifest */
    const ckpt_layout *was = r->stages[0].model.layout;
    if (was != NULL && to->group != NULL && strcmp(to->group, was->group) == 0)
        opts.tags = r->stages[0].model.tags;
    r->doing = "plan";
    CKPT_CHECK(ckpt_mesh_resolve(&opts.mesh, err));
    CKPT_CHECK(ckpt_plan_convert(&plan, model.out, &opts, err));
    r->doing = "convert";
    if (mkdir(s->dir, 0777) != 0)
        return ckpt_fail(err, CKPT_E_IO, "cannot create %s", s->dir);
    CKPT_CHECK(ckpt_stream_convert(&plan, s->dir, &r->stream, &r->arena, &result, err));
    memcpy(s->root, result.root, sizeof s->root);
    if (plan.n_lossy != 0 && !to->cast)
        status = ckpt_fail(err, CKPT_E_MISMATCH, "lossy: %s", plan.lossy[0]);
    else if (memcmp(result.root, source_root, sizeof s->root) != 0 && !to->cast)
        status = ckpt_fail(err, CKPT_E_MISMATCH, "convert reports another root");
    else if (memcmp(result.source_root, source_root, sizeof s->root) != 0)
        status = ckpt_fail(err, CKPT_E_MISMATCH, "convert reports another source root");
done:
    ckpt_plan_release(&plan);
    return status;
}

/* Convert `from`, open what was written, and check its root and configuration. */
static ckpt_status step(run *r, const stage *from, const target *to, stage **out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    stage *s = &r->stages[r->n_stages++];
    snprintf(s->label, sizeof s->label, "%d-%s-%s-tp%d-pp%d-ep%d-etp%d%s%s", r->n_stages - 1,
             to->container, to->group ? to->group : "keep", to->mesh.tp, to->mesh.pp, to->mesh.ep,
             to->mesh.etp, to->cast ? "-" : "", to->cast ? ckpt_dtype_get(to->dtype)->name : "");
    s->dir = ckpt_path_join(&r->arena, r->dir, s->label);
    if (s->dir == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_TRY(write_stage(r, from, to, s, err), "%s", s->label);
    r->conversions++;
    r->doing = "open";
    ckpt_open_opts opts = {.iteration = -1};
    CKPT_TRY(ckpt_source_open(&s->src, s->dir, &opts, err), "%s", s->label);
    s->opened = true;
    CKPT_TRY(check_stage(r, s, err), "%s", s->label);
    *out = s;
done:
    return status;
}

/* ---- comparisons ------------------------------------------------------------------------------ */

/* Every stored tensor has the name, dtype, shape and bytes that were drawn, read without the plan. */
static ckpt_status check_contents(run *r, stage *s, ckpt_err *err)
{
    r->doing = "compare with the drawn tensors";
    if (s->src.n_tensors != r->synth.n)
        return ckpt_fail(err, CKPT_E_MISMATCH, "%s: %zu tensors, expected %zu", s->label,
                         s->src.n_tensors, r->synth.n);
    for (size_t i = 0; i < r->synth.n; i++) {
        const synth_tensor *want = &r->synth.tensors[i];
        int64_t at = ckpt_source_find(&s->src, want->name);
        if (at < 0)
            return ckpt_fail(err, CKPT_E_MISMATCH, "%s: '%s' is missing", s->label, want->name);
        const ckpt_tensor *t = &s->src.tensors[at];
        bool same = strcmp(ckpt_dtype_get(t->dtype)->name, want->dtype) == 0 &&
                    t->rank == want->rank && (want->bytes == 0 || t->n_chunks == 1);
        for (int k = 0; same && k < t->rank; k++)
            same = t->dims[k] == want->dims[k];
        if (!same)
            return ckpt_fail(err, CKPT_E_MISMATCH, "%s: '%s' has another dtype, shape or cut",
                             s->label, want->name);
        if (want->bytes == 0)
            continue;
        uint8_t *have = malloc((size_t)want->bytes), *expect = malloc((size_t)want->bytes);
        if (have == NULL || expect == NULL)
            abort();
        ckpt_status status = ckpt_source_read(&s->src, t->chunks[0].file, have, (size_t)want->bytes,
                                              t->chunks[0].offset, err);
        synth_fill(want, 0, expect, (size_t)want->bytes);
        same = memcmp(have, expect, (size_t)want->bytes) == 0;
        free(have);
        free(expect);
        if (status != CKPT_OK)
            return status;
        if (!same)
            return ckpt_fail(err, CKPT_E_MISMATCH, "%s: '%s' has other bytes", s->label,
                             want->name);
    }
    return CKPT_OK;
}

static ckpt_status same_chunk(stage *a, const ckpt_tensor *x, stage *b, const ckpt_tensor *y,
                              size_t c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t elements = 1;
    uint64_t bytes = 0;
    bool same = true;
    for (int k = 0; k < x->rank; k++) {
        same = same && x->chunks[c].lo[k] == y->chunks[c].lo[k] &&
               x->chunks[c].len[k] == y->chunks[c].len[k];
        elements *= x->chunks[c].len[k];
    }
    if (!same || !ckpt_dtype_bytes(x->dtype, elements, &bytes))
        return ckpt_fail(err, CKPT_E_MISMATCH, "'%s' is cut differently in %s and %s", x->name,
                         a->label, b->label);
    uint8_t *p = malloc((size_t)bytes + 1), *q = malloc((size_t)bytes + 1);
    if (p == NULL || q == NULL)
        abort();
    CKPT_CHECK(
        ckpt_source_read(&a->src, x->chunks[c].file, p, (size_t)bytes, x->chunks[c].offset, err));
    CKPT_CHECK(
        ckpt_source_read(&b->src, y->chunks[c].file, q, (size_t)bytes, y->chunks[c].offset, err));
    if (memcmp(p, q, (size_t)bytes) != 0)
        status = ckpt_fail(err, CKPT_E_MISMATCH, "'%s' has other bytes in %s than in %s", x->name,
                           a->label, b->label);
done:
    free(p);
    free(q);
    return status;
}

/* Two directories hold the same names and bytes, recursively (a depth of two is all there is).
 * `except` (or NULL) names files whose bytes may differ. */
static ckpt_status same_tree(run *r, const char *a, const char *b, const char *except, int depth,
                             ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    char **na, **nb;
    size_t ca, cb;
    CKPT_CHECK(ckpt_list_dir(a, &r->arena, &na, &ca, err));
    CKPT_CHECK(ckpt_list_dir(b, &r->arena, &nb, &cb, err));
    if (ca != cb)
        return ckpt_fail(err, CKPT_E_MISMATCH, "%s holds %zu names, %s %zu", a, ca, b, cb);
    for (size_t i = 0; i < ca; i++) {
        if (strcmp(na[i], nb[i]) != 0)
            return ckpt_fail(err, CKPT_E_MISMATCH, "%s has %s where %s has %s", a, na[i], b, nb[i]);
        const char *pa = ckpt_path_join(&r->arena, a, na[i]);
        const char *pb = ckpt_path_join(&r->arena, b, nb[i]);
        if (pa == NULL || pb == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        if (ckpt_is_dir(pa)) {
            if (depth == 0)
                return ckpt_fail(err, CKPT_E_MISMATCH, "%s: a directory too deep", pa);
            CKPT_CHECK(same_tree(r, pa, pb, except, depth - 1, err));
            continue;
        }
        if (except != NULL && strcmp(na[i], except) == 0)
            continue;
        ckpt_buf ba = {0}, bb = {0};
        status = ckpt_read_file(pa, UINT64_C(1) << 30, &ba, err);
        if (status == CKPT_OK)
            status = ckpt_read_file(pb, UINT64_C(1) << 30, &bb, err);
        if (status == CKPT_OK && (ba.len != bb.len || memcmp(ba.data, bb.data, ba.len) != 0))
            status = ckpt_fail(err, CKPT_E_MISMATCH, "%s and %s differ", pa, pb);
        ckpt_buf_release(&ba);
        ckpt_buf_release(&bb);
        CKPT_CHECK(status);
    }
done:
    return status;
}

static ckpt_status same_stage(run *r, const stage *a, const stage *b, const char *except,
                              ckpt_err *err)
{
    r->doing = "compare directories";
    return same_tree(r, a->dir, b->dir, except, 2, err);
}

/* Two stages store the same tensors in the same cuts with the same bytes. A vocabulary that a mesh
 * has to pad may be padded further by a stop on the way, so there only the name must agree. */
static ckpt_status same_tensors(run *r, stage *a, stage *b, ckpt_err *err)
{
    r->doing = "compare stored tensors";
    if (a->src.n_tensors != b->src.n_tensors)
        return ckpt_fail(err, CKPT_E_MISMATCH, "%s stores %zu tensors, %s %zu", a->label,
                         a->src.n_tensors, b->label, b->src.n_tensors);
    for (size_t i = 0; i < a->src.n_tensors; i++) {
        const ckpt_tensor *x = &a->src.tensors[i], *y = &b->src.tensors[i];
        if (strcmp(x->name, y->name) != 0)
            return ckpt_fail(err, CKPT_E_MISMATCH, "'%s' in %s, '%s' in %s", x->name, a->label,
                             y->name, b->label);
        if (x->rank == 2 && x->dims[0] != y->dims[0] && !r->synth.vocab_fits &&
            (strstr(x->name, "embedding.word_embeddings.weight") != NULL ||
             strstr(x->name, "output_layer.weight") != NULL))
            continue;
        bool same = x->dtype == y->dtype && x->rank == y->rank && x->n_chunks == y->n_chunks;
        for (int k = 0; same && k < x->rank; k++)
            same = x->dims[k] == y->dims[k];
        if (!same)
            return ckpt_fail(err, CKPT_E_MISMATCH, "'%s' is stored differently in %s and %s",
                             x->name, a->label, b->label);
        for (size_t c = 0; c < x->n_chunks; c++) {
            ckpt_status status = same_chunk(a, x, b, y, c, err);
            if (status != CKPT_OK)
                return status;
        }
    }
    return CKPT_OK;
}

/* ---- chains ----------------------------------------------------------------------------------- */

static int draw_divisor(synth_rng *rng, int64_t unit)
{
    int64_t d = 1 + (int64_t)synth_below(rng, (uint64_t)unit);
    while (unit % d != 0)
        d--;
    return (int)d;
}

/* The result must not depend on these. */
static void draw_stream(run *r)
{
    static const int64_t memory[] = {1 << 20, 3 << 20, 64 << 20};
    r->stream.threads = 1 + (int)synth_below(&r->rng, 2);
    r->stream.memory = (uint64_t)synth_pick(&r->rng, memory, 3);
}

static ckpt_mesh draw_mesh(run *r)
{
    ckpt_mesh mesh = {1, 1, 1, 0, 1, 1};
    mesh.tp = draw_divisor(&r->rng, r->synth.tp_unit);
    mesh.pp = draw_divisor(&r->rng, r->synth.blocks);
    mesh.ep = draw_divisor(&r->rng, r->synth.experts);
    /* Explicit, because the default (as TP) need not divide the experts' width. */
    mesh.etp = draw_divisor(&r->rng, r->synth.etp_unit);
    mesh.cp = 1 + (int)synth_below(&r->rng, 2);
    return mesh;
}

static uint64_t draw_shard(run *r)
{
    static const int64_t sizes[] = {1, 1000, 4096, 50000, 1000000000};
    return (uint64_t)synth_pick(&r->rng, sizes, sizeof sizes / sizeof *sizes);
}

/* Megatron torch_dist at A, at B, at A again, and out of B through safetensors with Megatron names
 * and back to A: equal tensors in equal cuts each time. Writing A twice, with other threads and
 * buffers, gives the same files. *at_b receives the checkpoint at mesh B. */
static ckpt_status reshard(run *r, const stage *source, ckpt_mesh a, ckpt_mesh b, stage **at_b,
                           ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    stage *first, *again, *twice, *kept, *from_kept;
    target dist_a = {.container = "torch_dist", .group = "megatron", .mesh = a};
    target dist_b = {.container = "torch_dist", .group = "megatron", .mesh = b};
    target keep = {.container = "safetensors", .mesh = whole, .max_shard = draw_shard(r)};
    CKPT_CHECK(step(r, source, &dist_a, &first, err));
    CKPT_CHECK(step(r, first, &dist_b, at_b, err));
    CKPT_CHECK(step(r, *at_b, &dist_a, &again, err));
    CKPT_CHECK(same_tensors(r, first, again, err));
    draw_stream(r);
    CKPT_CHECK(step(r, *at_b, &dist_a, &twice, err));
    CKPT_CHECK(same_stage(r, again, twice, NULL, err));
    CKPT_CHECK(step(r, *at_b, &keep, &kept, err));
    if (r->synth.kind == SYNTH_MEGATRON && r->synth.vocab_fits)
        CKPT_CHECK(check_contents(r, kept, err));
    CKPT_CHECK(step(r, kept, &dist_a, &from_kept, err));
    CKPT_CHECK(same_tensors(r, again, from_kept, err));
done:
    return status;
}

/* Plain DCP with the stored names (which say nothing of a mesh), twice, and back to safetensors. */
static ckpt_status through_dcp(run *r, const stage *source, uint64_t max_shard, stage **out,
                               ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    stage *first, *second;
    target dcp = {.container = "torch_dist", .mesh = whole};
    target keep = {.container = "safetensors", .mesh = whole, .max_shard = max_shard};
    CKPT_CHECK(step(r, source, &dcp, &first, err));
    CKPT_CHECK(step(r, first, &dcp, &second, err));
    CKPT_CHECK(same_stage(r, first, second, NULL, err));
    CKPT_CHECK(step(r, second, &keep, out, err));
    CKPT_CHECK(check_contents(r, *out, err));
done:
    return status;
}

/* A cast is no way back; digests of what it gives were computed while it was written. */
static ckpt_status through_cast(run *r, const stage *source, ckpt_err *err)
{
    static const ckpt_dtype dtypes[] = {CKPT_BF16, CKPT_F16, CKPT_F32};
    stage *out;
    target to = {.container = r->seed % 2 == 0 ? "safetensors" : "torch_dist",
                 .mesh = whole,
                 .cast = true,
                 .dtype = dtypes[r->seed / 2 % 3]};
    return step(r, source, &to, &out, err);
}

static ckpt_status run_chain(run *r, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    stage *source, *direct, *at_b, *back, *dcp;
    ckpt_mesh a = draw_mesh(r), b = draw_mesh(r);
    target st = {.container = "safetensors", .mesh = whole, .max_shard = draw_shard(r)};
    CKPT_CHECK(open_memory(r, &source, err));
    CKPT_CHECK(step(r, source, &st, &direct, err));
    CKPT_CHECK(check_contents(r, direct, err));
    CKPT_CHECK(through_cast(r, source, err));
    if (r->synth.kind == SYNTH_MEGATRON)
        return reshard(r, source, a, b, &at_b, err);
    CKPT_CHECK(through_dcp(r, direct, st.max_shard, &dcp, err));
    CKPT_CHECK(same_stage(r, direct, dcp, NULL, err));
    if (r->synth.kind == SYNTH_PLAIN)
        return CKPT_OK;
    st.group = "hf";
    CKPT_CHECK(reshard(r, source, a, b, &at_b, err));
    CKPT_CHECK(step(r, at_b, &st, &back, err));
    CKPT_CHECK(check_contents(r, back, err));
    /* Fields of config.json that are no part of the model do not travel through Megatron; those
     * that are have been compared by digest. */
    CKPT_CHECK(same_stage(r, direct, back, "config.json", err));
done:
    return status;
}

/* ---- driver ----------------------------------------------------------------------------------- */

typedef struct driver {
    uint64_t first, seeds;
    const char *dir;
    bool keep;
    atomic_ullong next, failed, conversions, refused, models[3];
} driver;

static synth_kind kind_of_seed(uint64_t seed)
{
    static const synth_kind kinds[] = {SYNTH_HF, SYNTH_MEGATRON, SYNTH_HF, SYNTH_MEGATRON,
                                       SYNTH_PLAIN};
    return kinds[seed % 5];
}

static void run_seed(driver *d, uint64_t seed)
{
    run r = {.seed = seed};
    ckpt_err err = {0};
    char dir[4096];
    snprintf(dir, sizeof dir, "%s/seed-%llu", d->dir, (unsigned long long)seed);
    r.dir = dir;
    r.rng.state = seed * UINT64_C(0x2545f4914f6cdd1d);
    synth_random(&r.synth, kind_of_seed(seed), seed);
    draw_stream(&r);
    ckpt_status status = mkdir(dir, 0777) == 0
                             ? run_chain(&r, &err)
                             : ckpt_fail_errno(&err, errno, "cannot create %s", dir);
    atomic_fetch_add(&d->models[r.synth.kind], 1);
    atomic_fetch_add(&d->conversions, r.conversions);
    /* A stack of layers cannot say that one of them has no state: that is refused, and nothing else. */
    if (status == CKPT_E_UNSUPPORTED && r.synth.frozen && strcmp(r.doing, "plan") == 0 &&
        strstr(err.text, "frozen ones?") != NULL) {
        atomic_fetch_add(&d->refused, 1);
        status = CKPT_OK;
    }
    if (status != CKPT_OK) {
        atomic_fetch_add(&d->failed, 1);
        printf("property: seed %llu (%s, pattern '%s'): %s: %s\n", (unsigned long long)seed,
               kind_names[r.synth.kind], r.synth.pattern, r.doing, err.text);
        fflush(stdout);
    }
    for (int i = 0; i < r.n_stages; i++) {
        if (r.stages[i].bound)
            ckpt_model_release(&r.stages[i].model);
        if (r.stages[i].opened)
            ckpt_source_close(&r.stages[i].src);
    }
    if (status == CKPT_OK || !d->keep)
        ckpt_remove_tree(dir);
    ckpt_arena_free(&r.arena);
    synth_release(&r.synth);
}

static void *worker(void *arg)
{
    driver *d = arg;
    for (;;) {
        uint64_t i = atomic_fetch_add(&d->next, 1);
        /* After this many failures more of them tell nothing new. */
        if (i >= d->seeds || atomic_load(&d->failed) >= 20)
            return NULL;
        run_seed(d, d->first + i);
    }
}

static int usage(void)
{
    fputs("usage: property [--seeds N] [--first S] [--threads T] [--dir D] [--keep]\n", stderr);
    return 2;
}

int main(int argc, char **argv)
{
    driver d = {.seeds = 1000};
    uint64_t threads = 2;
    const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : getenv("TMPDIR");
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--keep") == 0) {
            d.keep = true;
            continue;
        }
        if (i + 1 == argc)
            return usage();
        const char *value = argv[++i];
        if (strcmp(argv[i - 1], "--seeds") == 0)
            d.seeds = strtoull(value, NULL, 10);
        else if (strcmp(argv[i - 1], "--first") == 0)
            d.first = strtoull(value, NULL, 10);
        else if (strcmp(argv[i - 1], "--threads") == 0)
            threads = strtoull(value, NULL, 10);
        else if (strcmp(argv[i - 1], "--dir") == 0)
            base = value;
        else
            return usage();
    }
    char dir[4096];
    snprintf(dir, sizeof dir, "%s/ckpt-property-XXXXXX", base ? base : "/tmp");
    d.dir = mkdtemp(dir);
    if (d.dir == NULL || threads < 1 || threads > 64) {
        fprintf(stderr, "property: cannot work in %s with %llu threads\n", dir,
                (unsigned long long)threads);
        return 5;
    }
    time_t begin = time(NULL);
    pthread_t thread[64];
    uint64_t started = 0;
    while (started < threads && pthread_create(&thread[started], NULL, worker, &d) == 0)
        started++;
    for (uint64_t i = 0; i < started; i++)
        pthread_join(thread[i], NULL);
    unsigned long long ran = d.models[0] + d.models[1] + d.models[2], failed = d.failed;
    if (failed == 0 || !d.keep)
        ckpt_remove_tree(dir);
    printf("property: %llu models (%llu hf, %llu megatron, %llu plain), %llu conversions, %llu "
           "refused, "
           "%lld s\n",
           ran, (unsigned long long)d.models[0], (unsigned long long)d.models[1],
           (unsigned long long)d.models[2], (unsigned long long)d.conversions,
           (unsigned long long)d.refused, (long long)(time(NULL) - begin));
    printf("%llu passed, %llu failed\n", ran - failed, failed);
    return failed == 0 && ran == d.seeds ? 0 : 1;
}
