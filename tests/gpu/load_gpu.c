/* Checkpoints into the memory of a card: is it what is stored, and how long it takes (tests/gpu/load.sh).
 *
 *   load_gpu check PATH...                     every byte and leaf hash, as stored and widened
 *   load_gpu METHOD PATH [THREADS [PIECE]]     one line: seconds, bytes; or `failed: why`
 *   load_gpu serve                             lines of METHOD PATH [THREADS [PIECE]] from stdin, one answer each
 *
 * Methods, each from the path to tensors that are there, files in the page cache; PIECE in MiB:
 *   stored   tensors in their own types      digests  the same, compared with the manifest on the way
 *   wide     bf16 widened to f32             network  a model to train in bf16: f32 and rounded weights
 *   file     stored, every file's bytes read by the threads into pageable memory, none sent
 *   bus      as many bytes from one pinned buffer, none read
 *   pin      opening and filling the pipes alone */
#include "load_case.h"

#include <time.h>

static ckpt_eng_device device;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct order {
    const char *method, *path;
    ckpt_eng_load_opts how;
} order;

typedef struct answer {
    double seconds;
    uint64_t bytes; /* as stored */
} answer;

/* ---- tensors ---------------------------------------------------------------------------------- */

static ckpt_status tensors(const order *o, load_form form, bool digests, answer *out, ckpt_err *err)
{
    load_case c;
    ckpt_status status;
    const double start = now();
    CKPT_CHECK(load_open(&c, &device, o->how.threads, o->path, form, digests, err));
    CKPT_CHECK(ckpt_eng_load(&c.e, &c.src, c.items, c.n, &o->how, err));
    if (digests)
        CKPT_CHECK(load_digests(&c, err));
    *out = (answer){now() - start, c.bytes};
done:
    load_close(&c);
    return status;
}

/* What verify --forward and train open. */
static ckpt_status network(const order *o, answer *out, ckpt_err *err)
{
    const ckpt_eng_networks *networks = &ckpt_eng_networks_d16;
    const ckpt_eng_spec_opts opts = {0};
    const ckpt_model_opts bind = {0};
    ckpt_source src = {0};
    ckpt_model model = {0};
    ENG(network) net = {0};
    ckpt_eng e;
    ckpt_status status;
    const double start = now();
    ckpt_eng_init(&e, o->how.threads);
    e.device = &device;
    CKPT_CHECK(ckpt_source_open(&src, o->path, NULL, err));
    CKPT_CHECK(ckpt_model_bind(&model, &src, &bind, err));
    CKPT_CHECK(networks->open(&net, &e, &model, &opts, false, err));
    CKPT_CHECK(device.api->wait(&device.card, err));
    *out = (answer){.seconds = now() - start};
    for (size_t i = 0; i < model.n_tensors; i++)
        out->bytes += model.tensors[i].bytes;
done:
    if (net.device != NULL)
        networks->close(&net);
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    return status;
}

/* ---- what bounds it --------------------------------------------------------------------------- */

typedef struct reading {
    load_case *c;
    uint8_t *room; /* PIECE a worker, and one of scratch */
    size_t piece;
    ckpt_status status;
    ckpt_err *err;
} reading;

static void read_item(void *arg, int64_t i, int worker)
{
    reading *r = arg;
    const ckpt_eng_load_item *item = &r->c->items[i];
    uint8_t *room = r->room + 2 * r->piece * (size_t)worker;
    ckpt_scratch scratch = {.buf = room + r->piece, .cap = r->piece};
    for (uint64_t at = 0; at < item->bytes; at += r->piece) {
        const uint64_t left = item->bytes - at;
        const size_t n = left < r->piece ? (size_t)left : r->piece;
        if (ckpt_gather_run(&r->c->src, item->gather, at, n, room, &scratch, r->err) != CKPT_OK)
            r->status = CKPT_E_IO;
    }
}

static ckpt_status read_only(const order *o, answer *out, ckpt_err *err)
{
    load_case c;
    ckpt_status status;
    reading r = {.c = &c, .piece = o->how.piece > 0 ? o->how.piece : (size_t)4 << 20, .err = err};
    CKPT_CHECK(load_open(&c, &device, o->how.threads, o->path, LOAD_STORED, false, err));
    r.room = malloc(2 * r.piece * (size_t)c.e.threads);
    if (r.room == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %d threads", c.e.threads);
        goto done;
    }
    memset(r.room, 1, 2 * r.piece * (size_t)c.e.threads);
    const double start = now();
    ckpt_eng_parallel(&c.e, (int64_t)c.n, read_item, &r);
    *out = (answer){now() - start, c.bytes};
    status = r.status;
done:
    free(r.room);
    load_close(&c);
    return status;
}

static ckpt_status bus(const order *o, answer *out, ckpt_err *err)
{
    const size_t piece = (size_t)32 << 20;
    load_case c;
    ckpt_cuda_pipe *pipe = NULL;
    ckpt_status status;
    void *buffer;
    CKPT_CHECK(load_open(&c, &device, 1, o->path, LOAD_STORED, false, err));
    CKPT_CHECK(device.api->pipe_open(&device.card, piece, &pipe, err));
    for (int i = 0; i < 2; i++) { /* both buffers are there */
        CKPT_CHECK(device.api->pipe_next(pipe, &buffer, err));
        memset(buffer, i, piece);
        CKPT_CHECK(device.api->pipe_send(pipe, c.memory, c.bytes < piece ? c.bytes : piece, err));
    }
    CKPT_CHECK(device.api->pipe_wait(pipe, err));
    const double start = now();
    for (uint64_t at = 0; at < c.bytes; at += piece) {
        const uint64_t left = c.bytes - at;
        CKPT_CHECK(device.api->pipe_next(pipe, &buffer, err));
        CKPT_CHECK(device.api->pipe_send(pipe, c.memory + at, left < piece ? left : piece, err));
    }
    CKPT_CHECK(device.api->pipe_wait(pipe, err));
    *out = (answer){now() - start, c.bytes};
done:
    device.api->pipe_close(pipe);
    load_close(&c);
    return status;
}

typedef struct pinning {
    ckpt_cuda_pipe *pipe[64];
    size_t piece;
    ckpt_status status;
    ckpt_err *err;
} pinning;

static void pin_one(void *arg, int64_t i, int worker)
{
    pinning *p = arg;
    void *buffer = NULL;
    (void)worker;
    for (int k = 0; k < 2 && p->status == CKPT_OK; k++) {
        if (device.api->pipe_next(p->pipe[i], &buffer, p->err) != CKPT_OK ||
            device.api->pipe_send(p->pipe[i], NULL, 0, p->err) != CKPT_OK)
            p->status = CKPT_E_IO;
    }
}

static ckpt_status pin(const order *o, answer *out, ckpt_err *err)
{
    ckpt_eng e;
    ckpt_status status;
    pinning p = {.piece = o->how.piece > 0 ? o->how.piece : (size_t)4 << 20, .err = err};
    ckpt_eng_init(&e, o->how.threads);
    e.threads = e.threads < 64 ? e.threads : 64;
    const double start = now();
    for (int i = 0; i < e.threads; i++)
        CKPT_CHECK(device.api->pipe_open(&device.card, p.piece, &p.pipe[i], err));
    ckpt_eng_parallel(&e, e.threads, pin_one, &p);
    *out = (answer){now() - start, 2 * (uint64_t)e.threads * p.piece};
    status = p.status;
done:
    for (int i = 0; i < 64; i++)
        device.api->pipe_close(p.pipe[i]);
    return status;
}

/* ---- orders ----------------------------------------------------------------------------------- */

static ckpt_status carry_out(const order *o, answer *out, ckpt_err *err)
{
    const char *m = o->method;
    if (strcmp(m, "stored") == 0)
        return tensors(o, LOAD_STORED, false, out, err);
    if (strcmp(m, "digests") == 0)
        return tensors(o, LOAD_STORED, true, out, err);
    if (strcmp(m, "wide") == 0)
        return tensors(o, LOAD_WIDE, false, out, err);
    if (strcmp(m, "network") == 0)
        return network(o, out, err);
    if (strcmp(m, "file") == 0)
        return read_only(o, out, err);
    if (strcmp(m, "bus") == 0)
        return bus(o, out, err);
    if (strcmp(m, "pin") == 0)
        return pin(o, out, err);
    return ckpt_fail(err, CKPT_E_USAGE, "no method '%s'", m);
}

/* Prints the answer; false when there is none. */
static bool answered(const order *o)
{
    ckpt_err err = {0};
    answer a = {0};
    const bool ok = carry_out(o, &a, &err) == CKPT_OK;
    if (ok)
        printf("%.6f %llu\n", a.seconds, (unsigned long long)a.bytes);
    else
        printf("failed: %s\n", err.text);
    fflush(stdout);
    return ok;
}

static order order_of(const char *method, const char *path, const char *threads, const char *piece)
{
    const long t = threads != NULL ? strtol(threads, NULL, 10) : 0;
    const long p = piece != NULL ? strtol(piece, NULL, 10) : 0;
    return (order){
        method,
        path,
        {.threads = t > 0 && t < 1024 ? (int)t : 0,
          .piece = p > 0 && p < 4096 ? (size_t)p << 20 : 0}
    };
}

static int serve(void)
{
    char line[4096];
    bool ok = true;
    while (fgets(line, sizeof line, stdin) != NULL) {
        char *word[4] = {NULL}, *next = line;
        for (int i = 0; i < 4 && (word[i] = strtok_r(next, " \n", &next)) != NULL;)
            i++;
        if (word[1] == NULL)
            return 2;
        const order o = order_of(word[0], word[1], word[2], word[3]);
        ok = answered(&o) && ok;
    }
    return ok ? 0 : 1;
}

static int check(int n, char **paths)
{
    static const load_form forms[] = {LOAD_STORED, LOAD_WIDE};
    int bad = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 4; k++) {
            ckpt_err err = {0};
            size_t count = 0;
            const bool ok = load_check(&device, 0, paths[i], forms[k / 2], k % 2 == 0,
                                       k % 2 == 0 ? 0 : CKPT_LEAF_BYTES, &count, &err) == CKPT_OK;
            printf("%-9s %-8s %zu tensors of %s: %s\n", k / 2 == 0 ? "as stored" : "widened",
                   k % 2 == 0 ? "digests," : "1 MiB,", count, paths[i], ok ? "equal" : err.text);
            bad += !ok;
        }
    return bad > 0;
}

int main(int argc, char **argv)
{
    ckpt_err err = {0};
    if (argc < 2 || (argc < 3 && strcmp(argv[1], "serve") != 0)) {
        fprintf(stderr, "usage: load_gpu check PATH... | METHOD PATH [THREADS [PIECE]] | serve\n");
        return 2;
    }
    if (ckpt_eng_device_open(&device, &ckpt_cuda_plugin_v1, 0, &err) != CKPT_OK) {
        fprintf(stderr, "load_gpu: %s\n", err.text);
        return 4;
    }
    int rc = 0;
    if (strcmp(argv[1], "check") == 0) {
        rc = check(argc - 2, argv + 2);
    } else if (strcmp(argv[1], "serve") == 0) {
        printf("%s\n", device.name);
        fflush(stdout);
        rc = serve();
    } else {
        const order o =
            order_of(argv[1], argv[2], argc > 3 ? argv[3] : NULL, argc > 4 ? argv[4] : NULL);
        rc = answered(&o) ? 0 : 1;
    }
    ckpt_eng_device_close(&device);
    return rc;
}
