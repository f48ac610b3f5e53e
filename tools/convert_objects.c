/* Objects that travel in the manifest where a container has no place for them: see convert.h. Only
 * plain data does: what names a class outside the allow-list stays where it is. Bounded: 256 KiB an
 * object (the common state 1 MiB), 4 MiB in all. Random states are one a (pipeline, tensor) rank,
 * rng_state/shard_{pp}.{tp}_{PP}.{TP}, and the rerun state machine's one a rank: both go back only
 * into the mesh they came from, as Megatron-Core would load them only there. */
#include "base64.h"
#include "convert.h"
#include "dcp.h"
#include "mp_rank.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OBJECT_LIMIT ((uint64_t)256 << 10)
#define COMMON_LIMIT ((uint64_t)1 << 20)
#define TOTAL_LIMIT ((uint64_t)4 << 20)
#define EXTRA_LIMIT ((uint64_t)1 << 20) /* of Transformer Engine's states: all of them or none */
#define EXTRA "_extra_state"
#define MEMBER "objects"
#define BUCKETS "optimizer.distributed.dp_group_idx_"

static const char *const kinds[] = {"none", "hf", "megatron"};

static const ckpt_json *member_of(const ckpt_manifest *m)
{
    const ckpt_json *j = m != NULL ? ckpt_json_get(m->foreign, MEMBER) : NULL;
    return ckpt_json_is_object(j) ? j : NULL;
}

bool ckpt_objects_have_common(const ckpt_manifest *old)
{
    return ckpt_json_get(ckpt_json_get(member_of(old), "items"), CKPT_DCP_COMMON_OBJECT) != NULL;
}

void ckpt_objects_release(ckpt_objects *o)
{
    ckpt_json_free(o->kept);
    *o = (ckpt_objects){0};
}

/* ---- keeping ----------------------------------------------------------------------------------- */

/* Append one object as text, if there is room. */
static ckpt_status put_item(ckpt_json *items, const char *name, const ckpt_buf *bytes,
                            uint64_t limit, uint64_t *total, ckpt_err *err)
{
    ckpt_buf text = {0};
    if (bytes->len > limit || *total + bytes->len > TOTAL_LIMIT)
        return CKPT_OK;
    *total += bytes->len;
    ckpt_base64_put(&text, bytes->data, bytes->len);
    ckpt_buf_putc(&text, '\0');
    ckpt_json *j = text.failed ? NULL : ckpt_json_new_string((const char *)text.data);
    ckpt_buf_release(&text);
    return j != NULL && ckpt_json_set(items, name, j) ? CKPT_OK : ckpt_tool_no_memory(err);
}

/* Objects about flat buckets have become part of the common state. */
static bool is_kept_kind(const ckpt_object *o, bool extra)
{
    return (extra || strstr(o->name, EXTRA) == NULL) && o->unknown_global == NULL &&
           o->name[0] != '.' && o->length <= OBJECT_LIMIT &&
           strcmp(o->name, CKPT_DCP_COMMON_OBJECT) != 0 && strstr(o->name, BUCKETS) == NULL;
}

static bool extra_fits(const ckpt_source *src)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        if (strstr(o->name, EXTRA) != NULL && (o->length > OBJECT_LIMIT || o->unknown_global))
            return false;
        sum += strstr(o->name, EXTRA) != NULL ? o->length : 0;
        if (sum > EXTRA_LIMIT)
            return false;
    }
    return true;
}

static ckpt_status collect(const ckpt_plan *plan, bool common, ckpt_json *items, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_source *src = plan->model->src;
    ckpt_buf bytes = {0};
    uint64_t total = 0;
    bool extra = extra_fits(src);
    if (common && src->common != NULL) {
        CKPT_TRY(ckpt_convert_common_bytes(src, NULL, &bytes, err), "common state");
        CKPT_CHECK(put_item(items, CKPT_DCP_COMMON_OBJECT, &bytes, COMMON_LIMIT, &total, err));
    }
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        if (!is_kept_kind(o, extra) || ckpt_convert_find_object(plan, o->name) != NULL)
            continue;
        ckpt_buf_clear(&bytes);
        void *room = ckpt_buf_extend(&bytes, (size_t)o->length);
        if (room == NULL && o->length > 0) {
            status = ckpt_tool_no_memory(err);
            goto done;
        }
        CKPT_TRY(ckpt_source_read(src, o->file, room, (size_t)o->length, o->offset, err),
                 "object '%s'", o->name);
        CKPT_CHECK(put_item(items, o->name, &bytes, OBJECT_LIMIT, &total, err));
    }
done:
    ckpt_buf_release(&bytes);
    return status;
}

static bool describe(ckpt_json *j, const ckpt_plan *plan)
{
    const ckpt_source *src = plan->model->src;
    const ckpt_mesh *mesh = &plan->model->mesh;
    const struct {
        const char *key;
        int size;
    } sizes[] = {
        {"tp", mesh->tp},
        {"pp", mesh->pp},
        {"ep", mesh->ep},
        {"cp", mesh->cp}
    };
    bool ok = ckpt_json_set(j, "kind", ckpt_json_new_string(kinds[src->config_kind]));
    ckpt_json *m = ok ? ckpt_json_new_object() : NULL;
    ok = ckpt_json_set(j, "mesh", m);
    for (size_t i = 0; ok && i < sizeof sizes / sizeof sizes[0]; i++)
        ok = ckpt_json_set(m, sizes[i].key,
                           ckpt_json_new_int(sizes[i].size > 1 ? sizes[i].size : 1));
    return ok && ckpt_json_set(j, "iteration", ckpt_json_new_int(src->iteration)) &&
           ckpt_json_set(j, "optimizer", ckpt_json_new_bool(plan->n_states > 0));
}

ckpt_status ckpt_objects_keep(ckpt_objects *o, const ckpt_plan *plan, const ckpt_container *to,
                              bool whole, ckpt_err *err)
{
    const ckpt_source *src = plan->model->src;
    bool megatron = src->config_kind == CKPT_CONFIG_MEGATRON;
    bool held = ckpt_has_common(to) && plan->out.config_kind == CKPT_CONFIG_MEGATRON;
    /* without its states an optimizer's groups and steps would mislead */
    if (!ckpt_has_common(src->container) || !whole)
        return CKPT_OK;
    ckpt_json *j = ckpt_json_new_object(), *items = ckpt_json_new_object();
    if (j == NULL || items == NULL || !describe(j, plan)) {
        ckpt_json_free(items);
        ckpt_json_free(j);
        return ckpt_tool_no_memory(err);
    }
    ckpt_status status = collect(plan, megatron && !held, items, err);
    if (status == CKPT_OK && ckpt_json_child(items) != NULL) {
        if (ckpt_json_set(j, "items", items)) {
            o->kept = j;
            return CKPT_OK;
        }
        items = NULL; /* freed, as it could not be set */
        status = ckpt_tool_no_memory(err);
    }
    ckpt_json_free(items);
    ckpt_json_free(j);
    return status;
}

ckpt_status ckpt_objects_store(ckpt_objects *o, ckpt_manifest *m, ckpt_err *err)
{
    if (o->restored && m->foreign != NULL)
        ckpt_json_delete(m->foreign, MEMBER);
    if (o->kept == NULL)
        return CKPT_OK;
    if (m->foreign == NULL)
        m->foreign = ckpt_json_new_object();
    ckpt_json *kept = o->kept;
    o->kept = NULL;
    return m->foreign != NULL && ckpt_json_set(m->foreign, MEMBER, kept) ? CKPT_OK
                                                                         : ckpt_tool_no_memory(err);
}

/* ---- restoring --------------------------------------------------------------------------------- */

static int64_t size_of(const ckpt_json *mesh, const char *key)
{
    int64_t n = 1;
    return ckpt_json_int(ckpt_json_get(mesh, key), &n) && n > 0 ? n : 1;
}

/* Whether an object of one rank means something at the target's mesh. */
static bool fits_mesh(const char *name, const ckpt_json *from, const ckpt_mesh *to)
{
    static const char rng[] = "rng_state/shard_", rerun[] = "rerun_state_machine_state/shard_";
    int at_pp, at_tp, pp = 0, tp = 0;
    if (strncmp(name, rng, sizeof rng - 1) == 0)
        return sscanf(name + sizeof rng - 1, "%9d.%9d_%9d.%9d", &at_pp, &at_tp, &pp, &tp) == 4 &&
               pp == to->pp && tp == to->tp;
    if (strncmp(name, rerun, sizeof rerun - 1) == 0)
        return size_of(from, "tp") == to->tp && size_of(from, "pp") == to->pp &&
               size_of(from, "ep") == to->ep && size_of(from, "cp") == to->cp;
    return true;
}

static ckpt_status restore_one(ckpt_tool *tool, ckpt_plan *plan, const char *name,
                               const ckpt_buf *bytes, ckpt_buf *common, ckpt_err *err)
{
    const uint8_t *data = bytes->data;
    uint64_t length = bytes->len;
    if (strcmp(name, CKPT_DCP_COMMON_OBJECT) == 0) {
        ckpt_status status = ckpt_dcp_repack_bytes(data, length, true, plan->config, common, err);
        if (status != CKPT_OK)
            return status;
        data = common->data;
        length = common->len;
    } else {
        uint8_t *copy = ckpt_arena_alloc(&tool->arena, (size_t)length + 1);
        if (copy == NULL)
            return ckpt_tool_no_memory(err);
        if (length > 0)
            memcpy(copy, data, (size_t)length);
        data = copy;
    }
    char *own = ckpt_arena_strdup(&plan->arena, name);
    ckpt_out_object *at = own != NULL ? ckpt_convert_add_object(plan, own) : NULL;
    if (at == NULL)
        return ckpt_tool_no_memory(err);
    at->data = data;
    at->length = length;
    return CKPT_OK;
}

/* mp_rank takes the common state alone: what else there is are objects of torch_dist. */
static bool takes(const ckpt_container *to, const char *name)
{
    return to != &ckpt_mp_rank || strcmp(name, CKPT_DCP_COMMON_OBJECT) == 0;
}

static ckpt_status restore_all(ckpt_tool *tool, ckpt_report *r, ckpt_plan *plan,
                               const ckpt_container *to, const ckpt_json *j, ckpt_buf *common,
                               ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf bytes = {0};
    bool had_states = false;
    (void)ckpt_json_bool(ckpt_json_get(j, "optimizer"), &had_states);
    for (const ckpt_json *c = ckpt_json_child(ckpt_json_get(j, "items")); c != NULL;
         c = ckpt_json_next(c)) {
        const char *name = ckpt_json_key(c), *text = ckpt_json_string(c);
        ckpt_buf_clear(&bytes);
        if (text == NULL || !ckpt_base64_get(&bytes, text, strlen(text))) {
            status = ckpt_fail(err, CKPT_E_FORMAT,
                               "manifest: foreign." MEMBER " '%.300s': expected base64", name);
            goto done;
        }
        bool of_optimizer =
            strcmp(name, CKPT_DCP_COMMON_OBJECT) == 0 || ckpt_is_optimizer(plan->model->src, name);
        if (had_states && plan->n_states == 0 && of_optimizer)
            CKPT_CHECK(ckpt_report_add(tool, &r->dropped, err,
                                       "%s: the optimizer state it belongs to is gone", name));
        else if (!fits_mesh(name, ckpt_json_get(j, "mesh"), &plan->out.mesh))
            CKPT_CHECK(ckpt_report_add(tool, &r->dropped, err,
                                       "%s: state of a rank of another mesh", name));
        else if (!takes(to, name))
            CKPT_CHECK(
                ckpt_report_add(tool, &r->dropped, err, "%s: no place in %s", name, to->name));
        else
            CKPT_TRY(restore_one(tool, plan, name, &bytes, common, err),
                     "manifest: foreign." MEMBER " '%.300s'", name);
    }
done:
    ckpt_buf_release(&bytes);
    return status;
}

ckpt_status ckpt_objects_restore(ckpt_tool *tool, ckpt_objects *o, ckpt_report *r, ckpt_plan *plan,
                                 const ckpt_container *to, const ckpt_manifest *old,
                                 ckpt_buf *common, ckpt_err *err)
{
    const ckpt_json *j = member_of(old);
    const char *kind = ckpt_json_string(ckpt_json_get(j, "kind"));
    int64_t iteration = -1;
    if (j == NULL || kind == NULL || strcmp(kind, kinds[plan->out.config_kind]) != 0 ||
        !ckpt_has_common(to) || plan->out.n_objects > 0 || plan->model->src->n_objects > 0)
        return CKPT_OK;
    o->restored = true;
    if (plan->out.iteration < 0 && ckpt_json_int(ckpt_json_get(j, "iteration"), &iteration))
        plan->out.iteration = iteration;
    return restore_all(tool, r, plan, to, j, common, err);
}

/* ---- leaving out ------------------------------------------------------------------------------- */

ckpt_status ckpt_convert_drop_optimizer(ckpt_tool *tool, ckpt_source *src, ckpt_strings *removed,
                                        ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t kept = 0;
    bool *drop = ckpt_arena_array(&tool->arena, src->n_tensors + src->n_objects + 1, sizeof *drop);
    if (drop == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < src->n_tensors; i++)
        drop[i] = ckpt_is_optimizer(src, src->tensors[i].name);
    for (size_t i = 0; i < src->n_objects; i++)
        drop[src->n_tensors + i] = ckpt_is_optimizer(src, src->objects[i].name);
    const bool *drop_object = drop + src->n_tensors;
    for (size_t i = 0; i < src->n_tensors; i++) {
        if (drop[i])
            CKPT_CHECK(ckpt_strings_push(removed, src->tensors[i].name, err));
        else
            src->tensors[kept++] = src->tensors[i];
    }
    src->n_tensors = kept;
    kept = 0;
    for (size_t i = 0; i < src->n_objects; i++)
        if (!drop_object[i])
            src->objects[kept++] = src->objects[i];
    src->n_objects = kept;
done:
    return status;
}
