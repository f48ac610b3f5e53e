/* One checkpoint of a training run: plan from the snapshot, write, manifest, rename, tracker, retention.
 * The steps are those of `ckpt convert`, whose parts they are, without its conversation. */
#include "train_write.h"

#include "convert.h"
#include "dcp.h"
#include "mp_rank.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REMOVED ".ckpt-old."

typedef struct writer {
    ckpt_saver *s;
    ckpt_save_job *job;
    const ckpt_save_format *f;
    const ckpt_layout *layout; /* of the target; NULL: none known */
    ckpt_convert_opts opts;
    ckpt_plan plan;
    ckpt_commit commit;
    ckpt_convert_result result;
    ckpt_manifest manifest;
    ckpt_buf common, text;
    ckpt_arena arena;
    const ckpt_share *others; /* ranks that write with this one, or NULL */
} writer;

/* ---- the job --------------------------------------------------------------------------------- */

static bool same_tensors(const ckpt_snapshot *s, const ckpt_snapshot_tensor *t, size_t n)
{
    if (s->n != n)
        return false;
    for (size_t i = 0; i < n; i++) {
        const ckpt_snapshot_tensor *have = &s->tensors[i];
        bool states = have->state != NULL && t[i].state != NULL
                          ? strcmp(have->state, t[i].state) == 0
                          : have->state == t[i].state;
        if (have->param != t[i].param || have->dtype != t[i].dtype || !states)
            return false;
    }
    return true;
}

/* Rank 0 first, which sets the size. */
static ckpt_status share_memory(const ckpt_saver *s, ckpt_save_job *job, ckpt_status status,
                                ckpt_err *err)
{
    const ckpt_share *callers = s->crew->callers;
    const size_t ranks = (size_t)callers->size;
    if (status == CKPT_OK && callers->rank == 0)
        status = ckpt_snapshot_share(&job->snapshot, job->memory, ranks, true, err);
    status = ckpt_share_agree(callers, status, err);
    if (status == CKPT_OK && callers->rank != 0)
        status = ckpt_snapshot_share(&job->snapshot, job->memory, ranks, false, err);
    return ckpt_share_agree(callers, status, err);
}

ckpt_status ckpt_write_prepare(ckpt_saver *s, ckpt_save_job *job,
                               const ckpt_snapshot_tensor *tensors, size_t n, ckpt_err *err)
{
    if (job->open && same_tensors(&job->snapshot, tensors, n))
        return CKPT_OK;
    if (job->open)
        ckpt_snapshot_close(&job->snapshot);
    job->open = false;
    ckpt_status status = ckpt_snapshot_open(&job->snapshot, s->base, tensors, n, err);
    job->open = status == CKPT_OK;
    if (s->crew != NULL)
        status = share_memory(s, job, status, err);
    if (status == CKPT_OK && s->set_dtype)
        status = ckpt_config_set_dtype(job->snapshot.src.config, job->snapshot.src.config_kind,
                                       ckpt_dtype_get(s->config_dtype)->torch, err);
    return status;
}

static ckpt_status keep(ckpt_json **at, const ckpt_json *value, ckpt_err *err)
{
    ckpt_json_free(*at);
    *at = value != NULL ? ckpt_json_dup(value) : NULL;
    return value == NULL || *at != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

ckpt_status ckpt_write_state(ckpt_save_job *job, const ckpt_save_state *state, ckpt_err *err)
{
    ckpt_status status;
    job->step = state->step;
    job->snapshot.src.iteration = state->step;
    CKPT_CHECK(keep(&job->training, state->training, err));
    CKPT_CHECK(keep(&job->common, state->common, err));
    CKPT_CHECK(keep(&job->args, state->args, err));
done:
    return status;
}

void ckpt_write_release(ckpt_save_job *job)
{
    if (job->open)
        ckpt_snapshot_close(&job->snapshot);
    ckpt_json_free(job->training);
    ckpt_json_free(job->common);
    ckpt_json_free(job->args);
    free(job->failed);
    *job = (ckpt_save_job){0};
}

/* ---- plan ------------------------------------------------------------------------------------ */

/* The base's common state with the new members, or a new one. */
static ckpt_status edit_common(writer *w, const ckpt_dcp_changes *c, ckpt_err *err)
{
    ckpt_source *src = w->s->base->src;
    ckpt_buf plain = {0};
    ckpt_status status;
    if (src->common != NULL && src->container == &ckpt_torch_dist &&
        src->config_kind == CKPT_CONFIG_MEGATRON)
        return ckpt_dcp_common_changed(src, c, &w->common, err);
    if (src->common != NULL && src->container == &ckpt_mp_rank)
        CKPT_CHECK(ckpt_mp_common(src, &plain, err));
    else
        CKPT_CHECK(ckpt_dcp_new_common(c->args, w->job->step, NULL, true, &plain, err));
    CKPT_CHECK(ckpt_dcp_common_edit(plain.data, plain.len, c, &w->common, err));
done:
    ckpt_buf_release(&plain);
    return status;
}

/* Megatron's directory says in its own words where training stands. */
static ckpt_status before_layout(void *self, ckpt_plan *plan, ckpt_err *err)
{
    enum { EDITS = 16 };
    writer *w = self;
    ckpt_dcp_edit edits[EDITS];
    ckpt_dcp_changes c = {.args = plan->config, .edits = edits};
    if (plan->out.config_kind != CKPT_CONFIG_MEGATRON || w->f->container != &ckpt_torch_dist ||
        w->job->common == NULL || plan->config == NULL)
        return ckpt_convert_policy(w->f->container, plan, w->s->quant_policy, &w->common, err);
    for (const ckpt_json *a = ckpt_json_child(w->job->args); a != NULL; a = ckpt_json_next(a))
        if (!ckpt_json_set(plan->config, ckpt_json_key(a), ckpt_json_dup(a)))
            return ckpt_tool_no_memory(err);
    for (const ckpt_json *m = ckpt_json_child(w->job->common); m != NULL; m = ckpt_json_next(m)) {
        if (c.n_edits == EDITS)
            return ckpt_fail(err, CKPT_E_INTERNAL, "too many members of a common state");
        edits[c.n_edits++] = (ckpt_dcp_edit){.path = ckpt_json_key(m), .json = m};
    }
    ckpt_buf_clear(&w->common);
    ckpt_status status = edit_common(w, &c, err);
    if (status == CKPT_OK)
        status = ckpt_convert_set_common(plan, &w->common, err);
    return status == CKPT_OK
               ? ckpt_convert_policy(w->f->container, plan, w->s->quant_policy, &w->common, err)
               : status;
}

static ckpt_status choose_layout(writer *w, ckpt_err *err)
{
    const ckpt_model *m = &w->job->snapshot.model;
    w->layout = m->layout;
    if (w->f->group == NULL || (m->layout != NULL && strcmp(m->layout->group, w->f->group) == 0))
        return CKPT_OK;
    w->layout =
        ckpt_layout_for(m, ckpt_foreign_config(w->s->old, w->f->group), &w->f->mesh, w->f->group);
    if (w->layout == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "family %s has no layout %s",
                         m->layout != NULL ? m->layout->family : "(none)", w->f->group);
    return CKPT_OK;
}

static ckpt_status make_plan(writer *w, ckpt_err *err)
{
    ckpt_model *m = &w->job->snapshot.model;
    ckpt_status status = choose_layout(w, err);
    if (status != CKPT_OK)
        return status;
    const char *group = w->layout != NULL ? w->layout->group : "";
    w->opts = (ckpt_convert_opts){.container = w->f->container,
                                  .layout = w->layout == m->layout ? NULL : w->layout,
                                  .mesh = w->f->mesh,
                                  .sharded = w->f->container->sharded,
                                  .tags = ckpt_foreign_tags(w->s->old, group),
                                  .approximate = w->s->approximate,
                                  .allow_unknown = w->s->allow_unknown,
                                  .single_file = w->f->file,
                                  .bare = true,
                                  .max_shard_bytes = w->f->file ? 0 : 5000000000U,
                                  .foreign_config = ckpt_foreign_config(w->s->old, group),
                                  .quant_policy = w->s->quant_policy,
                                  .before_layout = before_layout,
                                  .self = w};
    if (w->opts.foreign_config == NULL && m->layout != NULL && strcmp(m->layout->group, group) == 0)
        w->opts.foreign_config = m->src->config;
    return ckpt_plan_convert(&w->plan, m, &w->opts, err);
}

static void release(writer *w, ckpt_err *err)
{
    ckpt_commit_discard(&w->commit, err);
    ckpt_manifest_release(&w->manifest);
    ckpt_plan_release(&w->plan);
    ckpt_buf_release(&w->common);
    ckpt_buf_release(&w->text);
    ckpt_arena_free(&w->arena);
}

ckpt_status ckpt_write_check(ckpt_saver *s, ckpt_save_job *job, const ckpt_save_format *f,
                             ckpt_err *err)
{
    writer w = {.s = s, .job = job, .f = f};
    ckpt_status status = make_plan(&w, err);
    release(&w, err);
    return status;
}

/* ---- manifest -------------------------------------------------------------------------------- */

static ckpt_status fill_manifest(writer *w, const char *single, ckpt_err *err)
{
    static const char *const kinds[] = {NULL, "hf", "megatron"};
    const ckpt_model *m = &w->job->snapshot.model;
    const char *from = m->layout != NULL ? m->layout->group : kinds[m->src->config_kind];
    const char *to = w->layout != NULL ? w->layout->group : kinds[w->plan.out.config_kind];
    ckpt_status status;
    CKPT_CHECK(ckpt_manifest_of_plan(&w->manifest, &w->plan, &w->result, single, err));
    w->manifest.layout = w->layout != NULL ? w->layout->name : NULL;
    w->manifest.family = w->layout != NULL ? w->layout->family : NULL;
    w->manifest.container = w->f->container->name;
    w->manifest.mesh = w->f->mesh;
    w->manifest.has_source_root = false;
    w->manifest.training = ckpt_json_dup(w->job->training);
    w->manifest.quant_policy = w->s->quant_policy;
    if (w->manifest.training == NULL && w->job->training != NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_foreign_carry(&w->manifest, w->s->old, m, from, to, err));
    if (w->plan.sink.serial != NULL)
        CKPT_CHECK(ckpt_sidecars_carry(&w->s->sidecars, &w->manifest, err));
    else
        CKPT_CHECK(ckpt_sidecars_write(&w->s->sidecars, &w->commit, &w->plan.sink,
                                       w->plan.out.config_kind == CKPT_CONFIG_MEGATRON,
                                       &w->manifest, err));
done:
    return status;
}

static ckpt_status publish(writer *w, const char *path, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_manifest_print(&w->manifest, &w->text, err));
    if (!w->f->file) {
        CKPT_CHECK(
            ckpt_commit_write(&w->commit, CKPT_MANIFEST_NAME, w->text.data, w->text.len, err));
        CKPT_CHECK(ckpt_commit_finish(&w->commit, err));
        goto done;
    }
    char *beside = ckpt_arena_printf(&w->arena, "%s%s", path, CKPT_MANIFEST_SUFFIX);
    if (beside == NULL)
        return ckpt_tool_no_memory(err);
    (void)unlink(beside);
    CKPT_CHECK(ckpt_commit_finish(&w->commit, err));
    CKPT_CHECK(ckpt_tool_write_file(beside, w->text.data, w->text.len, err));
done:
    return status;
}

/* ---- retention ------------------------------------------------------------------------------- */

int64_t ckpt_train_iteration_of(const char *name)
{
    char *end = NULL;
    size_t digits = strncmp(name, "iter_", 5) == 0 ? strspn(name + 5, "0123456789") : 0;
    if (digits < 1 || digits > 18)
        return -1;
    long long n = strtoll(name + 5, &end, 10);
    return *end == '\0' || strcmp(end, ".h5") == 0 ? (int64_t)n : -1;
}

/* The step of a checkpoint that this run wrote, by its name and its manifest; else -1. What cannot be
 * read is not ours. */
static int64_t own_step(writer *w, const char *name)
{
    ckpt_manifest m = {0};
    int64_t at = ckpt_train_iteration_of(name), step = -1;
    char expected[40];
    size_t n = strlen(name);
    bool file = n > 3 && strcmp(name + n - 3, ".h5") == 0;
    if (at < 0)
        return -1;
    snprintf(expected, sizeof expected, "iter_%07lld%s", (long long)at, file ? ".h5" : "");
    if (strcmp(name, expected) != 0 || file != w->f->file)
        return -1;
    const char *path = ckpt_arena_printf(&w->arena, "%s/%s%s%s", w->f->root, name, file ? "" : "/",
                                         file ? CKPT_MANIFEST_SUFFIX : CKPT_MANIFEST_NAME);
    if (path == NULL || ckpt_manifest_read(path, &m, NULL) != CKPT_OK)
        return -1;
    const char *run = ckpt_json_string(ckpt_json_get(m.training, "run"));
    bool ours = run != NULL && strcmp(run, w->s->run_name) == 0 &&
                ckpt_json_int(ckpt_json_get(m.training, "step"), &step) && step == at;
    ckpt_manifest_release(&m);
    return ours ? at : -1;
}

/* Renamed first: what is half removed must not look like a checkpoint. */
static ckpt_status remove_one(ckpt_arena *arena, const char *root, const char *name, ckpt_err *err)
{
    char *from = ckpt_path_join(arena, root, name);
    char *to = ckpt_arena_printf(arena, "%s/.%s%s%ld", root, name, REMOVED, (long)getpid());
    char *beside = ckpt_arena_printf(arena, "%s/%s%s", root, name, CKPT_MANIFEST_SUFFIX);
    if (from == NULL || to == NULL || beside == NULL)
        return ckpt_tool_no_memory(err);
    if (rename(from, to) != 0)
        return ckpt_fail_errno(err, errno, "removing %s", from);
    (void)unlink(beside);
    ckpt_remove_tree(to);
    return CKPT_OK;
}

/* Of this run's, the newest `keep` up to this step stay; nothing else is touched. */
static ckpt_status retain(writer *w, ckpt_err *err)
{
    char **names = NULL;
    size_t n = 0;
    ckpt_status status;
    if (w->s->keep <= 0)
        return CKPT_OK;
    CKPT_CHECK(ckpt_list_dir(w->f->root, &w->arena, &names, &n, err));
    int64_t *steps = ckpt_arena_array(&w->arena, n + 1, sizeof *steps);
    if (steps == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n; i++)
        steps[i] = own_step(w, names[i]);
    for (size_t i = 0; i < n; i++) {
        int64_t newer = 0;
        if (steps[i] < 0 || steps[i] >= w->job->step)
            continue;
        for (size_t k = 0; k < n; k++)
            newer += steps[k] > steps[i] && steps[k] <= w->job->step;
        if (newer >= w->s->keep)
            CKPT_CHECK(remove_one(&w->arena, w->f->root, names[i], err));
    }
done:
    return status;
}

ckpt_status ckpt_write_sweep(const char *root, ckpt_err *err)
{
    ckpt_arena arena = {0};
    char **names = NULL;
    size_t n = 0;
    ckpt_status status = ckpt_list_dir(root, &arena, &names, &n, err);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        bool ours = (strncmp(names[i], ".iter_", 6) == 0 ||
                     strncmp(names[i], "." CKPT_DCP_TRACKER, sizeof CKPT_DCP_TRACKER) == 0) &&
                    (strstr(names[i], ".ckpt-tmp.") != NULL || strstr(names[i], REMOVED) != NULL);
        char *path = ours ? ckpt_path_join(&arena, root, names[i]) : NULL;
        if (path != NULL)
            ckpt_remove_tree(path);
    }
    ckpt_arena_free(&arena);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static ckpt_status point_at(writer *w, ckpt_err *err)
{
    char text[24];
    char *path = ckpt_path_join(&w->arena, w->f->root, CKPT_DCP_TRACKER);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    int n = snprintf(text, sizeof text, "%lld", (long long)w->job->step);
    return ckpt_tool_write_file(path, text, (size_t)n, err);
}

/* The files below rank 0's temporary, each rank its share of them. path: what it becomes, which rank 0 knows;
 * NULL there: no memory was left for it, which the others have to be told. */
static ckpt_status write_files(writer *w, const char *path, ckpt_err *err)
{
    ckpt_stream_opts opts = {
        .threads = (int)w->s->tool->g.threads, .memory = w->s->tool->g.memory, .share = w->others};
    ckpt_status status = make_plan(w, err);
    if (status == CKPT_OK && ckpt_saver_leads(w->s))
        status = path != NULL ? ckpt_commit_begin(&w->commit, path, !w->f->file, true, err)
                              : ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_share_agree(w->others, status, err));
    const char *temp = w->commit.temp_path;
    CKPT_CHECK(ckpt_share_tell(w->others, &w->arena, &temp, err));
    CKPT_CHECK(ckpt_stream_convert(&w->plan, temp, &opts, &w->arena, &w->result, err));
done:
    return status;
}

static ckpt_status write_all(writer *w, const char *path, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(write_files(w, path, err));
    CKPT_CHECK(fill_manifest(w, w->f->file ? ckpt_basename(path) : NULL, err));
    CKPT_CHECK(ckpt_convert_reopen(NULL, &w->plan, w->f->container, w->commit.temp_path, err));
    CKPT_CHECK(ckpt_convert_seal(&w->plan, &w->manifest, &w->result, w->commit.temp_path, err));
    CKPT_CHECK(publish(w, path, err));
    CKPT_CHECK(point_at(w, err));
    CKPT_CHECK(retain(w, err));
done:
    return status;
}

/* others: ranks that write with this one, or NULL. */
static ckpt_status write_one(ckpt_saver *s, ckpt_save_job *job, const ckpt_save_format *f,
                             const ckpt_share *others, ckpt_save_event *event, ckpt_err *err)
{
    writer w = {.s = s, .job = job, .f = f, .others = others};
    ckpt_status status;
    if (!ckpt_saver_leads(s)) {
        status = write_files(&w, NULL, err);
        release(&w, err);
        return status;
    }
    const char *name =
        ckpt_arena_printf(&w.arena, "iter_%07lld%s", (long long)job->step, f->file ? ".h5" : "");
    char *path = name != NULL ? ckpt_path_join(&w.arena, f->root, name) : NULL;
    status = write_all(&w, path, err);
    if (status == CKPT_OK) {
        event->path = strdup(path);
        event->bytes = w.result.bytes;
        memcpy(event->digest, w.result.root, CKPT_SHA256_LEN);
    } else {
        ckpt_tool_frame(err, path != NULL ? path : f->root);
    }
    release(&w, err);
    return status;
}

/* What a rank says in the snapshot once its copy is there; 0 is nobody's word. */
static int64_t word_of(const ckpt_save_job *job)
{
    return job->step + 1;
}

void ckpt_write_copied(const ckpt_saver *s, ckpt_save_job *job)
{
    if (s->crew != NULL)
        __atomic_store_n(&job->snapshot.shared[s->crew->callers->rank], word_of(job),
                         __ATOMIC_RELEASE);
}

static bool all_copied(const ckpt_saver *s, const ckpt_save_job *job)
{
    int n = 0;
    for (int r = 0; r < s->crew->callers->size; r++)
        n += __atomic_load_n(&job->snapshot.shared[r], __ATOMIC_ACQUIRE) == word_of(job);
    return n == s->crew->callers->size;
}

/* A rank died, and this one may go on without it. */
static bool goes_on_alone(const ckpt_saver *s, ckpt_status status)
{
    return s->crew != NULL && ckpt_saver_leads(s) && status != CKPT_E_INTERRUPTED &&
           s->crew->dead(s->crew->self) != NULL;
}

ckpt_status ckpt_write_await(const ckpt_saver *s, ckpt_save_job *job, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    job->alone = s->crew == NULL;
    if (job->alone)
        return CKPT_OK;
    if (job->failed != NULL)
        status = ckpt_fail(err, CKPT_E_IO, "%s", job->failed);
    status = ckpt_share_agree(s->crew->writers, status, err);
    if (status == CKPT_OK || !goes_on_alone(s, status) || !all_copied(s, job))
        return status;
    job->alone = true;
    *err = (ckpt_err){0};
    return CKPT_OK;
}

ckpt_status ckpt_write_checkpoint(ckpt_saver *s, ckpt_save_job *job, const ckpt_save_format *f,
                                  ckpt_save_event *event, ckpt_err *err)
{
    ckpt_status status = write_one(s, job, f, job->alone ? NULL : s->crew->writers, event, err);
    if (status == CKPT_OK || job->alone || !goes_on_alone(s, status))
        return status;
    job->alone = true;
    *err = (ckpt_err){0};
    return write_one(s, job, f, NULL, event, err);
}
