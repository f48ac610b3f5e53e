/* Several GPUs of one host: a model over ranks against one, what moves between them, failures
 * (tests/gpu/two.sh). Exit 1 when something is not as it should be.
 *
 *   two_gpu check PATH S [bf16]   every mesh of two ranks against one: loss, gradients
 *   two_gpu time PATH S [bf16]    forward and backward on one, tp 2, cp 2: medians, efficiency, and of a
 *                                 pass whose every exchange is waited for the share of each kind
 *   two_gpu experts PATH S [bf16] the same on one and ep 2
 *   two_gpu moves T H ROWS        gathering, scattering, all-to-all, a state passed on: microseconds
 *   two_gpu killed | silent | error
 *
 * `error` wants an environment in which NCCL cannot start (two.sh). LIBNCCL names another library. */
#include "ranks_case.h"

#include "card_or_host.h"

#ifdef CKPT_EMULATED
#define SOME 1024
#define REPEATS 1
#else
#define SOME (1 << 20)
#define REPEATS 7
#endif

static const ranks_mesh one = {"one GPU", 1, 1, 1, 1, CKPT_ENG_CP_HEADS};
static const ranks_mesh meshes[] = {
    {"tp 2",           2, 1, 1, 1, CKPT_ENG_CP_HEADS },
    {"cp 2 headwise",  1, 2, 1, 1, CKPT_ENG_CP_HEADS },
    {"cp 2 chunkwise", 1, 2, 1, 1, CKPT_ENG_CP_CHUNKS},
    {"dp 2",           1, 1, 2, 1, CKPT_ENG_CP_HEADS },
    {"ep 2",           1, 1, 2, 2, CKPT_ENG_CP_HEADS },
};
#define N_MESHES (sizeof meshes / sizeof *meshes)

/* ---- a model ---------------------------------------------------------------------------------- */

/* Sequences that a border between ranks cuts: one of all tokens, or for data-parallel ranks one each. */
static ranks_job cut_job(const char *path, int64_t S, const ranks_mesh *m, bool bf16)
{
    const int64_t B = m->dp > 1 ? 2 : 1;
    return (ranks_job){.path = path,
                       .B = B,
                       .S = 2 * S / B,
                       .mesh = one,
                       .bf16 = bf16,
                       .library = getenv("LIBNCCL")};
}

static int check(const char *path, int64_t S, bool bf16)
{
    const double limit = bf16 ? 0.1 : 1e-5;
    ranks_out *alone = ranks_room(path), *both = ranks_room(path);
    int64_t B = 0; /* of what `alone` holds */
    int bad = 0;
    if (alone == NULL || both == NULL)
        return 2;
    printf("%-16s %-5s %-12s %-12s %s\n", "mesh", "type", "loss", "gradients", "through");
    for (size_t i = 0; i < N_MESHES; i++) {
        ranks_job j = cut_job(path, S, &meshes[i], bf16);
        if (B != j.B)
            ranks_go(&j, alone);
        if (B != j.B && alone->ok)
            printf("%-16s %-5s %-12.6f %lld of %lld tokens\n", "one GPU", bf16 ? "bf16" : "f32",
                   alone->loss, (long long)j.B, (long long)j.S);
        B = j.B;
        j.mesh = meshes[i];
        ranks_go(&j, both);
        if (!both->ok || !alone->ok) {
            printf("%-16s FAILED: %s\n", meshes[i].name, both->ok ? alone->said : both->said);
            bad++;
            continue;
        }
        double far = ranks_far(both, alone), loss = fabs(both->loss - alone->loss) / alone->loss;
        bool good = far <= limit && loss <= limit;
        printf("%-16s %-5s %-12.6f %-12.3g %s%s\n", meshes[i].name, bf16 ? "bf16" : "f32",
               both->loss, far, both->way, good ? "" : "  FAILED");
        bad += !good;
    }
    return bad > 0;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Shares of the watched pass, of the rank that waits longer. */
static void shares(const ranks_out *o)
{
    static const char *const names[] = {"gathers", "all-to-all and pieces of sums",
                                        "states and rows passed"};
    printf("%-16s of %.3f ms:", "", 1e3 * fmax(o->all[0], o->all[1]));
    for (int k = 0; k < RANKS_KINDS; k++) {
        int r = o->moved[1][k] > o->moved[0][k];
        if (o->moved[r][k] > 0)
            printf(" %s %.3f ms (%.1f %%),", names[k], 1e3 * o->moved[r][k],
                   100 * o->moved[r][k] / o->all[r]);
    }
    int r = o->sums[1] > o->sums[0];
    printf(" sums of gradients %.3f ms (%.1f %%)\n", 1e3 * o->sums[r],
           100 * o->sums[r] / o->all[r]);
}

/* T tokens in all: one sequence, or for experts over ranks (`experts`) half of them a rank. */
static int times(const char *path, int64_t S, bool bf16, bool experts)
{
    ranks_job j = {.path = path,
                   .B = experts ? 2 : 1,
                   .S = experts ? S / 2 : S,
                   .mesh = one,
                   .bf16 = bf16,
                   .recompute = true,
                   .repeats = REPEATS,
                   .watch = true};
    ranks_out *out = ranks_room(path);
    double alone = 0;
    int bad = 0;
    if (out == NULL)
        return 2;
    j.library = getenv("LIBNCCL");
    for (size_t i = 0; i < (experts ? 2 : 4); i++) {
        j.mesh = i == 0 ? one : meshes[experts ? N_MESHES - 1 : i - 1];
        ranks_go(&j, out);
        if (!out->ok) {
            printf("%-16s FAILED: %s\n", j.mesh.name, out->said);
            bad++;
            continue;
        }
        qsort(out->seconds, (size_t)j.repeats, sizeof *out->seconds, by_size);
        double median = out->seconds[j.repeats / 2];
        alone = i == 0 ? median : alone;
        printf("%-16s %-5s T %lld: %9.3f ms (best %.3f)", j.mesh.name, bf16 ? "bf16" : "f32",
               (long long)S, 1e3 * median, 1e3 * out->seconds[0]);
        if (i > 0 && alone > 0)
            printf("  speed-up %.2f, efficiency %.0f %%", alone / median, 50 * alone / median);
        printf("; opened in %.2f s\n", out->load);
        if (i > 0)
            shares(out);
    }
    return bad > 0;
}

/* ---- what moves ------------------------------------------------------------------------------- */

typedef struct moves {
    int64_t T, H, rows;
    const char *what;
    double limit;
} moves;

/* All ranks. Returns false with err set. */
static bool each(ckpt_comm *c, const moves *m, bool first, ckpt_err *err)
{
    const int64_t state = 32 * 128 * 128;
    const size_t bytes = (size_t)(m->T * m->H + m->rows * m->H + state) * 4;
    char *x = dev_alloc(bytes), *y = dev_alloc(bytes);
    int64_t tokens[2] = {m->T / 2 * m->H, (m->T - m->T / 2) * m->H};
    int64_t rows[2] = {m->rows / 2 * m->H, m->rows / 2 * m->H}; /* what even routers choose */
    bool ok = x != NULL && y != NULL;
    static const char *const names[] = {"gather tokens, bf16", "scatter tokens, bf16",
                                        "scatter tokens, f32", "all-to-all of rows, bf16",
                                        "pass a state, f32"};
    const double moved[] = {(double)tokens[0] * 2, (double)tokens[0] * 2, (double)tokens[0] * 4,
                            (double)rows[0] * 2, (double)state * 4};
    dev_clear(x, bytes);
    for (int k = 0; k < 5 && ok; k++) {
        double best = INFINITY;
        for (int i = 0; i < 6 && ok; i++) {
            ok = dev_wait() && ckpt_comm_barrier(c, err) == CKPT_OK;
            double start = ranks_now();
            if (ok && k == 0)
                ok = ckpt_comm_allgather(c, 2, x, tokens, y, err) == CKPT_OK;
            else if (ok && k < 3)
                ok = ckpt_comm_reduce_scatter(c, k == 1 ? CKPT_COMM_BF16 : CKPT_COMM_F32, x, tokens,
                                              y, err) == CKPT_OK;
            else if (ok && k == 3)
                ok = ckpt_comm_alltoall(c, 2, x, rows, y, rows, err) == CKPT_OK;
            else if (ok)
                ok = ckpt_comm_pass(c, 0, 1, x, y, (size_t)state * 4, err) == CKPT_OK;
            ok = ok && dev_wait();
            double seconds = ranks_now() - start;
            best = i > 0 && seconds < best ? seconds : best;
        }
        if (ok && first)
            printf("%-26s %10.1f us  %8.1f MB to the other  %7.1f GB/s\n", names[k], 1e6 * best,
                   moved[k] / 1e6, moved[k] / best / 1e9);
    }
    fflush(stdout);
    dev_free(x);
    dev_free(y);
    return ok;
}

/* Until it fails; the words. */
static bool fail_slowly(ckpt_comm *c, const moves *m, ckpt_err *err)
{
    float *x = dev_alloc(4 * SOME);
    double start = ranks_now();
    dev_clear(x, 4 * SOME);
    for (int i = 0;; i++) {
        if (c->rank == 1 && i == 20) {
            if (strcmp(m->what, "killed") == 0)
                (void)raise(SIGKILL);
            const struct timespec nap = {.tv_sec = 8};
            nanosleep(&nap, NULL);
            return true;
        }
        start = i <= 20 ? ranks_now() : start;
        if (ckpt_comm_allreduce(c, CKPT_COMM_F32, CKPT_COMM_SUM, x, SOME, err) != CKPT_OK)
            break;
        (void)dev_wait();
        int64_t going = 1; /* the host's part of a step */
        if (ckpt_comm_allreduce(c, CKPT_COMM_I64, CKPT_COMM_MAX_OF, &going, 1, err) != CKPT_OK)
            break;
    }
    printf("after %.2f s: %s\n", ranks_now() - start, err->text);
    fflush(stdout);
    return strstr(err->text, m->what[0] == 'k' ? "killed by signal 9" : "no answer") != NULL;
}

static void moves_rank(ckpt_comm_host *h, int rank, const moves *m)
{
    ckpt_comm host, c = ckpt_comm_alone();
    ckpt_err err = {0};
    ckpt_cuda_comm_opts o = {.device = rank, .limit = m->limit, .library = getenv("LIBNCCL")};
    bool ok = ckpt_comm_host_join(h, rank, &host, &err) == CKPT_OK &&
              ckpt_cuda_comm_open(&host, &o, &c, &err) == CKPT_OK;
    if (ok && rank == 0)
        printf("%s\n", ckpt_cuda_comm_way(&c));
    if (!ok && strcmp(m->what, "error") == 0) {
        if (ckpt_comm_host_speak(h))
            printf("%s\n", err.text);
        fflush(stdout);
        _exit(0);
    }
    if (ok && strcmp(m->what, "moves") == 0)
        ok = each(&c, m, rank == 0, &err);
    else if (ok)
        ok = fail_slowly(&c, m, &err);
    if (!ok)
        printf("rank %d: FAILED: %s\n", rank, err.text);
    fflush(stdout);
    if (strcmp(m->what, "moves") == 0)
        ckpt_comm_release(&c);
    else if (c.ops != NULL)
        ckpt_comm_abort(&c, 1);
    _exit(ok && strcmp(m->what, "error") != 0 ? 0 : 1);
}

static int two_ranks(const moves *m)
{
    dev_pretend();
    ckpt_comm_host *h;
    ckpt_err err;
    pid_t pids[2];
    int bad = 0;
    if (ckpt_comm_host_new(&h, 2, &err) != CKPT_OK)
        return 2;
    fflush(NULL);
    for (int i = 0; i < 2; i++)
        if ((pids[i] = fork()) == 0)
            moves_rank(h, i, m);
    for (int left = 2; left > 0; left--) {
        int how = 0;
        pid_t pid = waitpid(-1, &how, 0);
        int i = pid == pids[1];
        bool meant = i == 1 && strcmp(m->what, "killed") == 0 && WIFSIGNALED(how);
        ckpt_comm_host_gone(h, i, meant ? "was killed by signal 9 (Killed)" : NULL);
        bad += how != 0 && !meant;
    }
    ckpt_comm_host_free(h);
    return bad > 0;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    bool bf16 = argc > 4 && strcmp(argv[4], "bf16") == 0;
    if (argc > 3 && strcmp(what, "check") == 0)
        return check(argv[2], strtoll(argv[3], NULL, 10), bf16);
    if (argc > 3 && strcmp(what, "time") == 0)
        return times(argv[2], strtoll(argv[3], NULL, 10), bf16, false);
    if (argc > 3 && strcmp(what, "experts") == 0)
        return times(argv[2], strtoll(argv[3], NULL, 10), bf16, true);
    if (argc > 4 && strcmp(what, "moves") == 0)
        return two_ranks(&(moves){.T = strtoll(argv[2], NULL, 10),
                                  .H = strtoll(argv[3], NULL, 10),
                                  .rows = strtoll(argv[4], NULL, 10),
                                  .what = what});
    if (strcmp(what, "killed") == 0 || strcmp(what, "silent") == 0 || strcmp(what, "error") == 0)
        return two_ranks(&(moves){.what = what, .limit = what[0] == 's' ? 3 : 60});
    fprintf(stderr, "usage: two_gpu check|time|experts PATH S [bf16] | moves T H ROWS | killed | "
                    "silent | error\n");
    return 2;
}
