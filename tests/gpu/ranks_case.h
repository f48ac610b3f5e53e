/* A model on one device or on several, ranks forked here: loss, whole gradients and times, for a comparison
 * (tests/test_ranks_cuda.c on the emulator, two_gpu.c on cards). A CUDA context does not survive a fork,
 * so also one rank runs in a process of its own, and what comes out lies in memory that all map. */
#ifndef CKPT_TEST_GPU_RANKS_CASE_H
#define CKPT_TEST_GPU_RANKS_CASE_H

#define CKPT_REAL 32
#include "checked.h"
#include "comm_host.h"
#include "device.h"
#include "model.h"
#include "network.h"
#include "par.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS_MOST 8
#define RANKS_REPEATS 20

typedef struct ranks_mesh {
    const char *name;
    int tp, cp, dp, ep;
    ckpt_eng_cp_mode mode;
} ranks_mesh;

/* What moves between ranks, by the form of an exchange. */
typedef enum ranks_kind {
    RANKS_GATHER, /* one piece to all: gathers, small sums */
    RANKS_DEAL,   /* a piece to each: rows of experts, pieces of sums */
    RANKS_PASS,   /* from one rank to one other: states, rows of convolutions */
    RANKS_KINDS
} ranks_kind;

typedef struct ranks_job {
    const char *path; /* of a checkpoint */
    int64_t B, S;     /* sequences of all data-parallel ranks, tokens of each */
    ranks_mesh mesh;
    bool bf16, recompute, share; /* share: all ranks on one card */
    const char *library;         /* NCCL's, or NULL */
    int repeats;                 /* beyond the first */
    bool watch;                  /* then one more, every exchange of it waited for and timed */
} ranks_job;

typedef struct ranks_out {
    size_t bytes;
    bool ok;
    char said[400], way[160];
    double loss;
    double load;                   /* s: opening, reading and sending the parameters */
    double seconds[RANKS_REPEATS]; /* of a forward and backward with the sum of gradients */
    /* Of every rank's watched pass: exchanges during forward and backward by kind, the sum of gradients,
     * all of it, s. */
    double moved[RANKS_MOST][RANKS_KINDS], sums[RANKS_MOST], all[RANKS_MOST];
    int64_t n;
    float grads[]; /* of all parameters, in order of names */
} ranks_out;

static inline double ranks_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Room for the gradients of a checkpoint's model, mapped shared. NULL: said on stderr. */
static inline ranks_out *ranks_room(const char *path)
{
    ckpt_source src;
    ckpt_model model = {0};
    const ckpt_model_opts opts = {0};
    ckpt_err err = {0};
    int64_t n = 0;
    ranks_out *out = NULL;
    if (ckpt_source_open(&src, path, NULL, &err) != CKPT_OK ||
        ckpt_model_bind(&model, &src, &opts, &err) != CKPT_OK) {
        fprintf(stderr, "%s: %s\n", path, err.text);
        return NULL;
    }
    for (size_t i = 0; i < model.n_tensors; i++) {
        int64_t k = 0;
        if (model.tensors[i].state == NULL &&
            ckpt_numel(model.tensors[i].rank, model.tensors[i].dims, &k))
            n += k;
    }
    size_t bytes = sizeof *out + (size_t)n * sizeof(float);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p != MAP_FAILED) {
        out = p;
        out->bytes = bytes;
        out->n = n;
    }
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    return out;
}

/* ---- a watched pass -------------------------------------------------------------------------- */

/* Of this process: a rank. */
static struct {
    const ckpt_comm_ops *real;
    const ckpt_eng_device *device;
    double moved[RANKS_KINDS];
    bool on;
} ranks_watched;

/* The exchange that was there, between waits for the device, its time by the form of it. */
static bool ranks_exchange(void *self, const void *const *send, const uint64_t *send_n,
                           void *const *recv, const uint64_t *recv_n, char *msg, size_t cap)
{
    const ckpt_eng_device *d = ranks_watched.device;
    int sent = 0, same = 1, received = 0;
    bool there = ranks_watched.on && d->api->wait(&d->card, NULL) == CKPT_OK;
    double start = ranks_now();
    bool ok = ranks_watched.real->exchange(self, send, send_n, recv, recv_n, msg, cap);
    if (!there || d->api->wait(&d->card, NULL) != CKPT_OK)
        return ok;
    for (int r = 0; r < 2; r++) { /* two ranks */
        same = same && send[r] == send[0];
        sent += send_n[r] > 0;
        received += recv_n[r] > 0;
    }
    ranks_watched.moved[sent + received == 1 ? RANKS_PASS
                        : same               ? RANKS_GATHER
                                             : RANKS_DEAL] += ranks_now() - start;
    return ok;
}

/* Before groups are split off: they take the table over. */
static inline void ranks_watch(ckpt_comm *world, const ckpt_eng_device *d)
{
    static ckpt_comm_ops table;
    ranks_watched.real = world->ops;
    ranks_watched.device = d;
    table = *world->ops;
    table.exchange = ranks_exchange;
    world->ops = &table;
}

typedef struct ranks_rank {
    const ranks_job *job;
    ranks_out *out;
    int rank, size;
    ckpt_comm world;
    ckpt_eng_par par;
    ckpt_eng_device device;
    ckpt_eng e;
    ckpt_source src;
    ckpt_model model;
    ENG(network) net;
    const ckpt_eng_networks *api;
    char way[160];
} ranks_rank;

static inline ckpt_status ranks_open(ranks_rank *r, ckpt_comm_host *h, ckpt_err *err)
{
    const ranks_mesh *m = &r->job->mesh;
    const ckpt_eng_spec_opts opts = {0};
    const ckpt_model_opts bind = {0};
    const int card = r->job->share ? 0 : r->rank;
    ckpt_status status;
    CKPT_CHECK(ckpt_eng_device_open(&r->device, &ckpt_cuda_plugin_v1, card, err));
    ckpt_eng_init(&r->e, r->size > 1 ? 2 : 0);
    r->e.device = &r->device;
    if (r->size > 1) {
        ckpt_comm host;
        const ckpt_cuda_comm_opts way = {
            .device = card, .stream = r->device.card.stream, .library = r->job->library};
        CKPT_CHECK(ckpt_comm_host_join(h, r->rank, &host, err));
        CKPT_CHECK(ckpt_cuda_comm_open(&host, &way, &r->world, err));
        snprintf(r->way, sizeof r->way, "%s", ckpt_cuda_comm_way(&r->world));
        if (r->job->watch)
            ranks_watch(&r->world, &r->device);
        CKPT_CHECK(ckpt_eng_par_open(&r->par, &r->world, m->tp, m->cp, m->dp, m->ep, m->mode, err));
        r->e.par = &r->par;
    }
    CKPT_CHECK(ckpt_source_open(&r->src, r->job->path, NULL, err));
    CKPT_CHECK(ckpt_model_bind(&r->model, &r->src, &bind, err));
    r->api = r->job->bf16 ? &ckpt_eng_networks_d16 : &ckpt_eng_networks_d32;
    CKPT_CHECK(r->api->open(&r->net, &r->e, &r->model, &opts, true, err));
done:
    return status;
}

/* One forward and backward into zeroed gradients, completed; waits. */
static inline ckpt_status ranks_pass(ranks_rank *r, const ENG(batch) * batch, ckpt_err *err)
{
    ENG(run) run = {.backward = true, .recompute = r->job->recompute, .mtp_coef = 0.1};
    ckpt_status status;
    CKPT_CHECK(r->api->zero_grads(&r->net, err));
    if (r->e.dry) {
        CKPT_CHECK(r->api->run(&r->e, &r->net, batch, &run, err));
        CKPT_CHECK(ckpt_eng_reserve(&r->e, r->e.peak, err));
    }
    CKPT_CHECK(r->api->run(&r->e, &r->net, batch, &run, err));
    CKPT_CHECK(r->api->sum_grads(&r->e, &r->net, err));
    CKPT_CHECK(r->device.api->wait(&r->device.card, err));
    if (r->rank == 0)
        r->out->loss = run.loss;
done:
    return status;
}

static inline ckpt_status ranks_watch_pass(ranks_rank *r, const ENG(batch) * batch, ckpt_err *err)
{
    ENG(run) run = {.backward = true, .recompute = r->job->recompute, .mtp_coef = 0.1};
    double start = ranks_now(), between;
    ckpt_status status;
    ranks_watched.on = true;
    CKPT_CHECK(r->api->zero_grads(&r->net, err));
    CKPT_CHECK(r->api->run(&r->e, &r->net, batch, &run, err));
    CKPT_CHECK(r->device.api->wait(&r->device.card, err));
    between = ranks_now();
    memcpy(r->out->moved[r->rank], ranks_watched.moved, sizeof ranks_watched.moved);
    CKPT_CHECK(r->api->sum_grads(&r->e, &r->net, err));
    CKPT_CHECK(r->device.api->wait(&r->device.card, err));
    r->out->sums[r->rank] = ranks_now() - between;
    r->out->all[r->rank] = ranks_now() - start;
    ranks_watched.on = false;
done:
    return status;
}

static inline ckpt_status ranks_run(ranks_rank *r, ckpt_err *err)
{
    const ranks_job *j = r->job;
    int64_t B = j->B / j->mesh.dp, first = B * r->par.d, at = 0;
    ckpt_status status = CKPT_OK;
    int64_t *cu = calloc((size_t)B + 1, sizeof *cu);
    int32_t *ids = calloc((size_t)(2 * B * j->S) + 1, sizeof *ids), *labels = ids + B * j->S;
    for (int64_t i = 0; i < B * j->S; i++) {
        uint64_t z = (uint64_t)(first * j->S + i + 1) * 0x9e3779b97f4a7c15u;
        cu[i / j->S + 1] = i + 1;
        ids[i] = (int32_t)((z >> 33) % (uint64_t)r->net.spec.V);
        labels[i] = (i + 1) % j->S == 0 ? -1 : (int32_t)((z >> 20) % (uint64_t)r->net.spec.V);
    }
    const ckpt_eng_seq seq = {B, cu};
    const ENG(batch) batch = {&seq, ids, labels};
    CKPT_CHECK(ranks_pass(r, &batch, err));
    for (int i = 0; i < j->repeats; i++) {
        double start = ranks_now();
        CKPT_CHECK(ranks_pass(r, &batch, err));
        if (r->rank == 0)
            r->out->seconds[i] = ranks_now() - start;
    }
    if (j->watch && r->size > 1)
        CKPT_CHECK(ranks_watch_pass(r, &batch, err));
    for (size_t i = 0; i < r->net.n_params; i++) {
        const ENG(param) *p = &r->net.params[i];
        int64_t n = 0;
        (void)ckpt_numel(p->box.rank, p->box.dims, &n);
        CKPT_CHECK(r->api->gather(&r->e, &r->net, &r->model, i, r->net.grads + p->at,
                                  r->rank == 0 ? r->out->grads + at : NULL, err));
        at += n;
    }
done:
    free(cu);
    free(ids);
    return status;
}

static inline void ranks_main(const ranks_job *j, ranks_out *out, ckpt_comm_host *h, int rank,
                              int size)
{
    ranks_rank r = {.job = j, .out = out, .rank = rank, .size = size};
    ckpt_err err = {0};
    double start = ranks_now();
    ckpt_status status = ranks_open(&r, h, &err);
    if (rank == 0)
        out->load = ranks_now() - start;
    if (status == CKPT_OK && rank == 0)
        snprintf(out->way, sizeof out->way, "%s", size > 1 ? r.way : "one card");
    if (status == CKPT_OK)
        status = ranks_run(&r, &err);
    if (status != CKPT_OK && ckpt_comm_host_speak(h))
        snprintf(out->said, sizeof out->said, "%.399s", err.text);
    if (status != CKPT_OK && size > 1)
        ckpt_comm_abort(&r.world, 1);
    if (r.api != NULL)
        r.api->close(&r.net);
    if (size > 1) {
        ckpt_eng_par_close(&r.par);
        ckpt_comm_release(&r.world);
    }
    _exit(status == CKPT_OK ? 0 : 1);
}

/* Fills *out; out->ok tells whether all ranks came to the end. */
static inline void ranks_go(const ranks_job *j, ranks_out *out)
{
    const int size = j->mesh.tp * j->mesh.cp * j->mesh.dp;
    ckpt_comm_host *h = NULL;
    ckpt_err err = {0};
    pid_t pids[RANKS_MOST];
    out->ok = ckpt_comm_host_new(&h, size, &err) == CKPT_OK;
    out->said[0] = '\0';
    memset(out->grads, 0, (size_t)out->n * sizeof *out->grads);
    fflush(NULL);
    for (int i = 0; i < size && out->ok; i++)
        if ((pids[i] = fork()) == 0)
            ranks_main(j, out, h, i, size);
    for (int left = out->ok ? size : 0; left > 0; left--) {
        int how = 0;
        pid_t pid = waitpid(-1, &how, 0);
        for (int i = 0; i < size; i++)
            if (pids[i] == pid)
                ckpt_comm_host_gone(h, i, how == 0 ? NULL : "failed");
        out->ok = out->ok && how == 0;
    }
    ckpt_comm_host_free(h);
}

/* Worst relative RMS of a parameter's gradient... of all of them together is what a mesh changes least, so
 * blocks of 4096 elements are compared with the RMS of their own and a thousandth of all. */
static inline double ranks_far(const ranks_out *a, const ranks_out *b)
{
    double all = 0, worst = 0;
    for (int64_t i = 0; i < b->n; i++)
        all += (double)b->grads[i] * (double)b->grads[i];
    all = sqrt(all / (double)b->n);
    for (int64_t lo = 0; lo < b->n; lo += 4096) {
        double diff = 0, size = 0;
        int64_t hi = lo + 4096 < b->n ? lo + 4096 : b->n;
        for (int64_t i = lo; i < hi; i++) {
            double d = (double)a->grads[i] - (double)b->grads[i];
            diff += d * d;
            size += (double)b->grads[i] * (double)b->grads[i];
        }
        double far =
            sqrt(diff / (double)(hi - lo)) / (sqrt(size / (double)(hi - lo)) + 1e-3 * all + 1e-30);
        worst = far == far ? fmax(worst, far) : INFINITY;
    }
    return worst;
}

#endif
