/* Saving a training run: formats, the thread and its two snapshots. What one save writes is in
 * train_write.c. */
#include "shard.h"
#include "train_save.h"
#include "train_write.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOCK_NAME ".ckpt-train.lock"
#define SIDECAR_BYTES ((uint64_t)512 << 20)

/* ---- formats --------------------------------------------------------------------------------- */

static ckpt_status set_axis(ckpt_save_format *f, const char *word, size_t n, ckpt_err *err)
{
    const char *eq = memchr(word, '=', n);
    char *end = NULL;
    long v = eq != NULL ? strtol(eq + 1, &end, 10) : 0;
    for (int i = 0; eq != NULL && i < CKPT_MESH_STORED; i++)
        if (strlen(ckpt_mesh_axes[i]) == (size_t)(eq - word) &&
            memcmp(ckpt_mesh_axes[i], word, (size_t)(eq - word)) == 0 && end == word + n &&
            v >= 1 && v <= 65536) {
            *ckpt_mesh_size(&f->mesh, i) = (int)v;
            return CKPT_OK;
        }
    return ckpt_fail(err, CKPT_E_USAGE,
                     "--save-format '%s': '%.*s' is neither a layout (hf, megatron, fla, keep) nor "
                     "AXIS=N",
                     f->text, (int)n, word);
}

static ckpt_status parse_format(ckpt_save_format *f, const char *text, ckpt_err *err)
{
    static const char *const groups[] = {"hf", "megatron", "fla"};
    char name[32];
    size_t n = strcspn(text, ":");
    f->text = text;
    f->mesh = (ckpt_mesh){.tp = 1, .pp = 1, .ep = 1, .cp = 1, .dp = 1};
    if (n < sizeof name) {
        memcpy(name, text, n);
        name[n] = '\0';
        f->container = ckpt_container_find(name);
    }
    if (f->container == NULL || f->container->layout == NULL)
        return ckpt_fail(err, CKPT_E_USAGE,
                         "--save-format '%s': expected safetensors, torch_dist, torch or hdf5",
                         text);
    for (const char *p = text + n; *p == ':'; p += n) {
        bool known = false;
        p++;
        n = strcspn(p, ":");
        for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
            if (strlen(groups[i]) == n && memcmp(groups[i], p, n) == 0) {
                f->group = groups[i];
                known = true;
            }
        if (known || (n == 4 && memcmp(p, "keep", 4) == 0))
            continue;
        ckpt_status status = set_axis(f, p, n, err);
        if (status != CKPT_OK)
            return status;
    }
    return ckpt_mesh_resolve(&f->mesh, err);
}

ckpt_status ckpt_saver_format(ckpt_saver *s, const char *text, ckpt_err *err)
{
    if (s->n_formats == CKPT_SAVE_FORMATS)
        return ckpt_fail(err, CKPT_E_USAGE, "--save-format: more than %d formats",
                         CKPT_SAVE_FORMATS);
    ckpt_save_format *f = &s->formats[s->n_formats];
    *f = (ckpt_save_format){0};
    ckpt_status status;
    if (text == NULL) {
        const ckpt_container *own = s->base->src->container;
        text = own->layout != NULL && own != &ckpt_mp_rank && own != &ckpt_rank_safetensors
                   ? own->name
                   : "safetensors";
    }
    status = parse_format(f, text, err);
    f->file = status == CKPT_OK && f->container == &ckpt_hdf5;
    if (status == CKPT_OK &&
        (f->container == &ckpt_mp_rank || f->container == &ckpt_rank_safetensors))
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "--save-format %s: optimizer state has no place in this container; "
                           "save another and `ckpt convert --optimizer drop`",
                           f->container->name);
    s->n_formats += status == CKPT_OK;
    return status;
}

/* ---- the directory --------------------------------------------------------------------------- */

static ckpt_status take_lock(ckpt_saver *s, ckpt_err *err)
{
    char *path = ckpt_path_join(&s->arena, s->dir, LOCK_NAME);
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    s->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (s->lock_fd < 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    if (flock(s->lock_fd, LOCK_EX | LOCK_NB) == 0)
        return CKPT_OK;
    if (errno == EWOULDBLOCK)
        return ckpt_fail(err, CKPT_E_USAGE, "%s: another run is saving here", s->dir);
    return ckpt_fail_errno(err, errno, "%s", path);
}

/* Directories of the formats: the run's own, or one each below it. */
static ckpt_status make_roots(ckpt_saver *s, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_mkdirs(s->dir, err));
    CKPT_CHECK(take_lock(s, err));
    for (size_t i = 0; i < s->n_formats; i++) {
        ckpt_save_format *f = &s->formats[i];
        int same = 0;
        for (size_t k = 0; k < i; k++)
            same += s->formats[k].container == f->container;
        f->root = s->n_formats == 1 ? s->dir
                  : same == 0       ? ckpt_path_join(&s->arena, s->dir, f->container->name)
                              : ckpt_arena_printf(&s->arena, "%s/%s-%d", s->dir, f->container->name,
                                                  same + 1);
        if (f->root == NULL) {
            status = ckpt_tool_no_memory(err);
            goto done;
        }
        CKPT_CHECK(ckpt_mkdirs(f->root, err));
        CKPT_CHECK(ckpt_write_sweep(f->root, err));
    }
done:
    return status;
}

/* ---- the thread ------------------------------------------------------------------------------ */

void ckpt_save_event_free(ckpt_save_event *event)
{
    free(event->path);
    free(event->error);
    *event = (ckpt_save_event){0};
}

enum { JOB_FREE, JOB_COPYING, JOB_WAITING, JOB_WRITING };

static void push_event(ckpt_saver *s, ckpt_save_event *event)
{
    void *events = s->events;
    ckpt_err err;
    if (ckpt_grow(&events, &s->cap_events, s->n_events + 1, sizeof *s->events, &err) != CKPT_OK) {
        ckpt_save_event_free(event);
        return;
    }
    s->events = events;
    s->events[s->n_events++] = *event;
}

/* All formats of one job, outside the lock. */
static void write_job(ckpt_saver *s, ckpt_save_job *job)
{
    ckpt_err of_copies = {0};
    const ckpt_status copied = ckpt_write_await(s, job, &of_copies);
    free(job->failed);
    job->failed = NULL;
    for (size_t i = 0; i < s->n_formats; i++) {
        ckpt_err err = of_copies;
        ckpt_save_event event = {.step = job->step};
        struct timespec start;
        clock_gettime(CLOCK_MONOTONIC, &start);
        ckpt_status status = copied;
        if (status == CKPT_OK)
            status = ckpt_write_checkpoint(s, job, &s->formats[i], &event, &err);
        event.seconds = ckpt_seconds_since(&start);
        if (status != CKPT_OK) {
            free(event.path);
            event.path = NULL;
            event.error = strdup(err.text[0] != '\0' ? err.text : ckpt_status_text(status));
        }
        pthread_mutex_lock(&s->lock);
        push_event(s, &event);
        pthread_mutex_unlock(&s->lock);
    }
}

/* Under the lock. */
static ckpt_save_job *find_job(ckpt_saver *s, int state)
{
    for (int i = 0; i < 2; i++)
        if (s->jobs[i].state == state)
            return &s->jobs[i];
    return NULL;
}

/* Of a copy that failed nothing is written; a crew hears of it. */
static void copy_job(ckpt_saver *s, ckpt_save_job *job)
{
    ckpt_err err = {0};
    ckpt_status status = job->copy(job->self, &job->snapshot, &err);
    if (status == CKPT_OK)
        ckpt_write_copied(s, job);
    ckpt_save_event event = {.step = job->step};
    char **why = s->crew != NULL ? &job->failed : &event.error;
    if (status != CKPT_OK)
        *why = strdup(err.text[0] != '\0' ? err.text : ckpt_status_text(status));
    pthread_mutex_lock(&s->lock);
    job->state = status == CKPT_OK || s->crew != NULL ? JOB_WAITING : JOB_FREE;
    if (event.error != NULL)
        push_event(s, &event);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void *copy_all(void *arg)
{
    ckpt_saver *s = arg;
    uint64_t populated = 0;
    bool pages = true;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        ckpt_save_job *job = find_job(s, JOB_COPYING); /* one at a time: begin waits for the last */
        if (job == NULL && s->stop)
            break;
        if (job == NULL && pages) {
            pthread_mutex_unlock(&s->lock);
            pages = ckpt_snapshot_populate(&s->jobs[0].snapshot, &populated);
            pthread_mutex_lock(&s->lock);
            continue;
        }
        if (job == NULL) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        copy_job(s, job);
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void *work(void *arg)
{
    ckpt_saver *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        ckpt_save_job *job = NULL; /* the older of those that wait */
        for (int i = 0; i < 2; i++)
            if (s->jobs[i].state == JOB_WAITING && (job == NULL || s->jobs[i].step < job->step))
                job = &s->jobs[i];
        if (job == NULL && s->stop && find_job(s, JOB_COPYING) == NULL)
            break;
        if (job == NULL) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        job->state = JOB_WRITING;
        pthread_mutex_unlock(&s->lock);
        write_job(s, job);
        pthread_mutex_lock(&s->lock);
        job->state = JOB_FREE;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

ckpt_status ckpt_saver_open(ckpt_saver *s, const ckpt_snapshot_tensor *tensors, size_t n,
                            ckpt_err *err)
{
    ckpt_status status;
    s->lock_fd = -1;
    s->jobs = calloc(2, sizeof *s->jobs);
    if (s->jobs == NULL)
        return ckpt_tool_no_memory(err);
    if (ckpt_saver_leads(s)) {
        CKPT_CHECK(make_roots(s, err));
        CKPT_CHECK(ckpt_sidecars_collect(&s->sidecars, s->base->src, s->old, err));
        CKPT_CHECK(ckpt_sidecars_load(&s->sidecars, SIDECAR_BYTES, err));
    }
    for (int i = 0; s->crew != NULL && i < 2; i++)
        s->jobs[i].memory = s->crew->snapshots[i];
    CKPT_CHECK(ckpt_write_prepare(s, &s->jobs[0], tensors, n, err));
    for (size_t i = 0; i < s->n_formats; i++)
        CKPT_TRY(ckpt_write_check(s, &s->jobs[0], &s->formats[i], err), "--save-format %s",
                 s->formats[i].text);
    if (pthread_mutex_init(&s->lock, NULL) != 0 || pthread_cond_init(&s->changed, NULL) != 0 ||
        pthread_create(&s->thread, NULL, work, s) != 0)
        status = ckpt_fail(err, CKPT_E_NOMEM, "no thread for saving");
    else
        s->started = true;
    if (status == CKPT_OK && s->begin != NULL) {
        if (pthread_create(&s->copier, NULL, copy_all, s) != 0)
            status = ckpt_fail(err, CKPT_E_NOMEM, "no thread for copying");
        else
            s->copies = true;
    }
done:
    return status;
}

/* The two take turns: on every rank of a crew it is the same one. */
static ckpt_save_job *wait_free(ckpt_saver *s)
{
    ckpt_save_job *job = &s->jobs[s->turn];
    pthread_mutex_lock(&s->lock);
    while (job->state != JOB_FREE)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return job;
}

ckpt_status ckpt_saver_save(ckpt_saver *s, const ckpt_snapshot_tensor *tensors, size_t n,
                            const ckpt_save_state *state, ckpt_save_copy copy, void *self,
                            double *stall, ckpt_err *err)
{
    struct timespec start;
    clock_gettime(CLOCK_MONOTONIC, &start);
    ckpt_save_job *job = wait_free(s);
    ckpt_status status = ckpt_write_prepare(s, job, tensors, n, err);
    if (status == CKPT_OK)
        status = ckpt_write_state(job, state, err);
    if (status == CKPT_OK)
        status = s->begin != NULL ? s->begin(self, err) : copy(self, &job->snapshot, err);
    if (status != CKPT_OK)
        return status;
    if (s->begin == NULL)
        ckpt_write_copied(s, job);
    job->copy = copy;
    job->self = self;
    s->turn = 1 - s->turn;
    pthread_mutex_lock(&s->lock);
    job->state = s->begin != NULL ? JOB_COPYING : JOB_WAITING;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    *stall = ckpt_seconds_since(&start);
    return CKPT_OK;
}

bool ckpt_saver_event(ckpt_saver *s, ckpt_save_event *out)
{
    bool any = false;
    if (!s->started)
        return false;
    pthread_mutex_lock(&s->lock);
    if (s->n_events > 0) {
        *out = s->events[0];
        s->n_events--;
        memmove(s->events, s->events + 1, s->n_events * sizeof *s->events);
        any = true;
    }
    pthread_mutex_unlock(&s->lock);
    return any;
}

void ckpt_saver_drain(ckpt_saver *s)
{
    if (!s->started)
        return;
    pthread_mutex_lock(&s->lock);
    while (s->jobs[0].state != JOB_FREE || s->jobs[1].state != JOB_FREE)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

void ckpt_saver_close(ckpt_saver *s)
{
    if (s->started) {
        pthread_mutex_lock(&s->lock);
        s->stop = true;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
        if (s->copies)
            pthread_join(s->copier, NULL);
        pthread_mutex_destroy(&s->lock);
        pthread_cond_destroy(&s->changed);
    }
    for (size_t i = 0; i < s->n_events; i++)
        ckpt_save_event_free(&s->events[i]);
    free(s->events);
    for (int i = 0; i < 2 && s->jobs != NULL; i++)
        ckpt_write_release(&s->jobs[i]);
    free(s->jobs);
    if (s->dir != NULL && s->lock_fd >= 0)
        close(s->lock_fd);
    ckpt_sidecars_release(&s->sidecars);
    ckpt_arena_free(&s->arena);
    *s = (ckpt_saver){.lock_fd = -1};
}
