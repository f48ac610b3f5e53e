/* Collectives over memory of a device (engine/cuda/device_comm.cu) on the emulator: ranks are processes,
 * NCCL is tests/gpu/fake_nccl.c. Against the host's communicator bit for bit, both ways memory can take;
 * errors, a rank that dies and one that does not answer. */
#include "comm_host.h"
#include "cuda/device_comm.h"
#include "gpu/fake_nccl.h"

#include <check.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct rank {
    ckpt_comm c, host; /* the second is another run of the same ranks */
    ckpt_err err;
} rank;

static bool open_rank(rank *r, ckpt_comm_host *h, ckpt_comm_host *plain, int i,
                      const ckpt_cuda_comm_opts *o)
{
    ckpt_comm host;
    return ckpt_comm_host_join(h, i, &host, &r->err) == CKPT_OK &&
           ckpt_comm_host_join(plain, i, &r->host, &r->err) == CKPT_OK &&
           ckpt_cuda_comm_open(&host, o, &r->c, &r->err) == CKPT_OK;
}

/* `size` processes run fn; the error texts of those that fail are printed. how[i]: as waitpid says. */
static void run_ranks(int size, ckpt_cuda_comm_opts o, bool share, bool (*fn)(rank *), int *how)
{
    ckpt_comm_host *h, *plain;
    ckpt_err err;
    pid_t pids[4];
    ck_assert_int_eq(ckpt_comm_host_new(&h, size, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_comm_host_new(&plain, size, &err), CKPT_OK);
    for (int i = 0; i < size; i++) {
        pids[i] = fork();
        ck_assert_int_ge(pids[i], 0);
        if (pids[i] != 0)
            continue;
        rank r = {.err = {0}};
        o.device = share ? 0 : i;
        ckpt_cuda_comm_pretend(true);
        bool ok = open_rank(&r, h, plain, i, &o) && fn(&r);
        if (!ok)
            fprintf(stderr, "rank %d: %s\n", i, r.err.text);
        ckpt_comm_release(&r.c);
        ckpt_comm_release(&r.host);
        _exit(ok ? 0 : 1);
    }
    for (int left = size; left > 0; left--) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        for (int i = 0; i < size; i++)
            if (pids[i] == pid) {
                how[i] = status;
                ckpt_comm_host_gone(h, i, WIFSIGNALED(status) ? "was killed by signal 9" : NULL);
                ckpt_comm_host_gone(plain, i, NULL);
            }
    }
    ckpt_comm_host_free(h);
    ckpt_comm_host_free(plain);
}

static void expect_all(int size, ckpt_cuda_comm_opts o, bool share, bool (*fn)(rank *))
{
    int how[4];
    run_ranks(size, o, share, fn, how);
    for (int i = 0; i < size; i++)
        ck_assert_int_eq(how[i], 0);
}

/* ---- values ----------------------------------------------------------------------------------- */

static void fill(unsigned char *p, size_t n, int seed)
{
    uint64_t z = 88172645463325252u + (uint64_t)seed * 7919;
    for (size_t i = 0; i < n; i++) {
        z ^= z << 13;
        z ^= z >> 7;
        z ^= z << 17;
        p[i] = (unsigned char)(z >> 32);
    }
}

/* Finite numbers of all sizes out of random bits. */
static void tame(unsigned char *p, size_t bytes, int type)
{
    uint16_t *h = (uint16_t *)p;
    static const size_t step[] = {2, 4, 0, 1}, top[] = {1, 3, 0, 0};
    static const unsigned keep[] = {0xbfff, 0xbfff, 0, 0xbfff};
    for (size_t i = top[type]; step[type] > 0 && i < bytes / 2; i += step[type])
        h[i] = (uint16_t)((h[i] & keep[type]) | 0x2000);
}

static bool same_reduction(rank *r, ckpt_comm *c, ckpt_comm *host, int64_t n)
{
    static const size_t size[] = {4, 8, 8, 2};
    size_t most = (size_t)n * 8 + 8;
    bool ok = true;
    for (int type = CKPT_COMM_F32; type <= CKPT_COMM_BF16 && ok; type++)
        for (int op = CKPT_COMM_SUM; op <= CKPT_COMM_MAX_OF && ok; op++) {
            unsigned char *a = calloc(1, most), *b = calloc(1, most);
            size_t bytes = (size_t)n * size[type];
            fill(a, bytes, c->rank + 10 * type);
            tame(a, bytes, type);
            memcpy(b, a, bytes);
            ok = ckpt_comm_allreduce(c, (ckpt_comm_type)type, (ckpt_comm_op)op, a, n, &r->err) ==
                 CKPT_OK;
            ckpt_cuda_comm_pretend(false);
            ok = ok && ckpt_comm_allreduce(host, (ckpt_comm_type)type, (ckpt_comm_op)op, b, n,
                                           &r->err) == CKPT_OK;
            ckpt_cuda_comm_pretend(true);
            if (ok && memcmp(a, b, bytes) != 0)
                ok = ckpt_fail(&r->err, CKPT_E_MISMATCH, "type %d, op %d, %lld elements", type, op,
                               (long long)n) == CKPT_OK;
            free(a);
            free(b);
        }
    return ok;
}

static bool reductions(rank *r)
{
    const int64_t lengths[] = {1, 3, 256, 257, 1025};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        if (!same_reduction(r, &r->c, &r->host, lengths[i]))
            return false;
    return true;
}

START_TEST(comm_cuda_sums_are_the_hosts_bits)
{
    expect_all(_i % 2 + 2, (ckpt_cuda_comm_opts){.library = fake_nccl(), .stage = _i >= 2}, false,
               reductions);
}
END_TEST

/* What a group of the middle ranks does must not meet what all do. */
static bool moves(rank *r)
{
    ckpt_comm half, plain;
    int n = r->c.size, me = r->c.rank;
    int64_t counts[4], to[4], from[4], total = 0;
    int32_t mine[8], all[32], back[32], next = -1, word = me + 5, passed = -1;
    for (int i = 0; i < n; i++) {
        counts[i] = i == 1 ? 0 : 2 + i;
        to[i] = (me + i) % 3;
        from[i] = (i + me) % 3;
        total += counts[i];
    }
    for (int i = 0; i < 8; i++)
        mine[i] = 100 * me + i;
    if (ckpt_comm_allgather(&r->c, 4, mine, counts, all, &r->err) != CKPT_OK ||
        ckpt_comm_ring(&r->c, &me, &next, 4, &r->err) != CKPT_OK ||
        ckpt_comm_broadcast(&r->c, &word, 4, n - 1, &r->err) != CKPT_OK ||
        ckpt_comm_pass(&r->c, n - 1, 0, &me, &passed, 4, &r->err) != CKPT_OK ||
        ckpt_comm_split(&r->c, me % 2, &half, &r->err) != CKPT_OK ||
        ckpt_comm_split(&r->host, me % 2, &plain, &r->err) != CKPT_OK ||
        !same_reduction(r, &half, &plain, 70))
        return false;
    int64_t at = 0;
    for (int i = 0; i < n; i++)
        for (int64_t k = 0; k < counts[i]; k++)
            if (all[at++] != 100 * i + k)
                return false;
    for (int64_t i = 0; i < 32; i++)
        all[i] = (int32_t)i;
    bool ok = ckpt_comm_alltoall(&r->c, 4, all, to, back, from, &r->err) == CKPT_OK &&
              next == (me + n - 1) % n && word == n + 4 && passed == (me == 0 ? n - 1 : -1) &&
              half.size == (n + 1 - me % 2) / 2;
    ckpt_cuda_comm_pretend(false); /* host memory goes its own way, through the same communicator */
    int64_t sum = me;
    ok = ok &&
         ckpt_comm_allreduce(&r->c, CKPT_COMM_I64, CKPT_COMM_SUM, &sum, 1, &r->err) == CKPT_OK &&
         sum == n * (n - 1) / 2;
    ckpt_comm_release(&half);
    ckpt_comm_release(&plain);
    return ok && total > 0;
}

START_TEST(comm_cuda_moves_and_groups)
{
    expect_all(3 + _i / 2, (ckpt_cuda_comm_opts){.library = fake_nccl(), .stage = _i % 2 != 0},
               false, moves);
}
END_TEST

static bool is_staged(rank *r)
{
    return strstr(ckpt_cuda_comm_way(&r->c), "several ranks share a GPU") != NULL && reductions(r);
}

START_TEST(comm_cuda_ranks_of_one_gpu_are_staged)
{
    expect_all(2, (ckpt_cuda_comm_opts){.library = fake_nccl()}, true, is_staged);
}
END_TEST

static bool has_no_nccl(rank *r)
{
    return strstr(ckpt_cuda_comm_way(&r->c), "NCCL is not there") != NULL && reductions(r);
}
static bool has_nccl(rank *r)
{
    return strcmp(ckpt_cuda_comm_way(&r->c), "NCCL 2.28.9") == 0;
}

START_TEST(comm_cuda_says_which_way_it_goes)
{
    expect_all(2, (ckpt_cuda_comm_opts){.library = "/nowhere/libnccl.so.2"}, false, has_no_nccl);
    expect_all(2, (ckpt_cuda_comm_opts){.library = fake_nccl()}, false, has_nccl);
}
END_TEST

/* ---- failures --------------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Sum until it fails; then true if the words say why. */
static bool until(rank *r, const char *words)
{
    float x = 1;
    double start = seconds();
    for (int i = 0; i < 1000000; i++)
        if (ckpt_comm_allreduce(&r->c, CKPT_COMM_F32, CKPT_COMM_SUM, &x, 1, &r->err) != CKPT_OK) {
            if (seconds() - start > 30 || strstr(r->err.text, words) == NULL)
                return false;
            ckpt_comm_abort(&r->c, 1);
            return true;
        }
    return false;
}

static bool killed(rank *r)
{
    float x = 1;
    if (r->c.rank == 1 &&
        ckpt_comm_allreduce(&r->c, CKPT_COMM_F32, CKPT_COMM_SUM, &x, 1, &r->err) == CKPT_OK)
        (void)raise(SIGKILL);
    return until(r, "rank 1 of 3 was killed") ||
           strstr(r->err.text, "remote process exited") != NULL;
}

START_TEST(comm_cuda_killed_rank_ends_the_others)
{
    int how[4];
    run_ranks(3, (ckpt_cuda_comm_opts){.library = fake_nccl()}, false, killed, how);
    ck_assert_int_eq(how[0], 0);
    ck_assert(WIFSIGNALED(how[1]));
    ck_assert_int_eq(how[2], 0);
}
END_TEST

/* Rank 0 waits inside the driver, where no other thread of it comes in, for the rank that dies. */
static bool killed_meanwhile(rank *r)
{
    float x = 1;
    ckpt_cuda_comm_hold(r->c.rank == 0);
    if (r->c.rank == 0)
        (void)setenv("FAKE_NCCL_DEAF", "2", 1);
    if (ckpt_comm_allreduce(&r->c, CKPT_COMM_F32, CKPT_COMM_SUM, &x, 1, &r->err) != CKPT_OK)
        return false;
    if (r->c.rank == 1)
        (void)raise(SIGKILL);
    double start = seconds();
    bool failed =
        ckpt_comm_allreduce(&r->c, CKPT_COMM_F32, CKPT_COMM_SUM, &x, 1, &r->err) != CKPT_OK;
    ckpt_cuda_comm_hold(false);
    ckpt_comm_abort(&r->c, 1);
    return failed && seconds() - start < 30;
}

START_TEST(comm_cuda_killed_rank_is_seen_past_the_driver)
{
    int how[4];
    run_ranks(2, (ckpt_cuda_comm_opts){.library = fake_nccl()}, false, killed_meanwhile, how);
    ck_assert_int_eq(how[0], 0);
    ck_assert(WIFSIGNALED(how[1]));
}
END_TEST

static bool fails(rank *r)
{
    if (r->c.rank == 0)
        return until(r, "NCCL: unhandled system error");
    return until(r, "another rank stopped") || strstr(r->err.text, "remote process exited") != NULL;
}
static bool fails_later(rank *r)
{
    if (r->c.rank == 0)
        return until(r, "NCCL: unhandled system error: the fake's words");
    return until(r, "another rank stopped") || strstr(r->err.text, "remote process exited") != NULL;
}
static bool no_answer(rank *r)
{
    if (r->c.rank == 0)
        return until(r, "no answer from another rank's GPU for 0.3 seconds");
    return until(r, "another rank stopped") || strstr(r->err.text, "no answer") != NULL ||
           strstr(r->err.text, "remote process exited") != NULL;
}

/* The fault is rank 0's: the others' environment is the same, so they take part in fewer calls. */
static bool only_first(rank *r, const char *name, const char *value, bool (*fn)(rank *))
{
    if (r->c.rank == 0)
        (void)setenv(name, value, 1);
    return fn(r);
}
static bool fail_5(rank *r)
{
    return only_first(r, "FAKE_NCCL_FAIL", "5", fails);
}
static bool late_5(rank *r)
{
    return only_first(r, "FAKE_NCCL_LATE", "5", fails_later);
}
static bool deaf_5(rank *r)
{
    return only_first(r, "FAKE_NCCL_DEAF", "5", no_answer);
}

START_TEST(comm_cuda_nccl_errors_are_told)
{
    static bool (*const cases[])(rank *) = {fail_5, late_5, deaf_5};
    expect_all(2, (ckpt_cuda_comm_opts){.library = fake_nccl(), .limit = _i == 2 ? 0.3 : 0}, false,
               cases[_i]);
}
END_TEST

START_TEST(comm_cuda_one_rank_alone_is_refused)
{
    ckpt_comm alone = ckpt_comm_alone(), out;
    ckpt_err err;
    ck_assert_int_eq(ckpt_cuda_comm_open(&alone, &(ckpt_cuda_comm_opts){.stage = true}, &out, &err),
                     CKPT_E_USAGE);
}
END_TEST

Suite *suite_comm_cuda(void);
Suite *suite_comm_cuda(void)
{
    Suite *s = suite_create("comm_cuda");
    TCase *t = tcase_create("comm_cuda");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, comm_cuda_sums_are_the_hosts_bits, 0, 4);
    tcase_add_loop_test(t, comm_cuda_moves_and_groups, 0, 4);
    tcase_add_test(t, comm_cuda_ranks_of_one_gpu_are_staged);
    tcase_add_test(t, comm_cuda_says_which_way_it_goes);
    tcase_add_test(t, comm_cuda_killed_rank_ends_the_others);
    tcase_add_test(t, comm_cuda_killed_rank_is_seen_past_the_driver);
    tcase_add_loop_test(t, comm_cuda_nccl_errors_are_told, 0, 3);
    tcase_add_test(t, comm_cuda_one_rank_alone_is_refused);
    suite_add_tcase(s, t);
    return s;
}
