/* Collectives at sizes 1 to 4 and 7, over ranks that are threads and over shared memory: values, order of
 * sums, splitting, sizes that do not fit, a rank that stops. Ranks that are processes: one that is killed. */
#include "par_test.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const int sizes[] = {1, 2, 3, 4, 7};
#define N_SIZES ((int)(sizeof sizes / sizeof *sizes))

/* Loops go over backends and sizes. */
static void run_both(int i, bool (*fn)(par_rank *))
{
    par_run_on(i < N_SIZES ? PAR_THREADS : PAR_HOST, sizes[i % N_SIZES], fn, NULL);
}

/* A number of rank and index; sums of floats depend on their order. */
static float value(int rank, int64_t i)
{
    uint64_t z = ((uint64_t)rank * 1000003u + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    return (float)((double)(z >> 40) * pow(2, (double)(z % 30) - 20));
}

static bool reduce_all(par_rank *r)
{
    const int64_t lengths[] = {0, 1, 5, 256, 257, 3000, (1 << 20) + 77};
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        int64_t n = lengths[k];
        float *x = malloc((size_t)(n + 1) * sizeof *x);
        double *d = malloc((size_t)(n + 1) * sizeof *d);
        int64_t *z = malloc((size_t)(n + 1) * sizeof *z);
        for (int64_t i = 0; i < n; i++) {
            x[i] = value(r->comm.rank, i);
            d[i] = (double)value(r->comm.rank, i) * 1.0000001;
            z[i] = i * 7 - r->comm.rank;
        }
        if (ckpt_comm_allreduce(&r->comm, CKPT_COMM_F32, CKPT_COMM_SUM, x, n, &r->err) != CKPT_OK ||
            ckpt_comm_allreduce(&r->comm, CKPT_COMM_F64, CKPT_COMM_SUM, d, n, &r->err) != CKPT_OK ||
            ckpt_comm_allreduce(&r->comm, CKPT_COMM_I64, CKPT_COMM_MAX_OF, z, n, &r->err) !=
                CKPT_OK)
            return false;
        for (int64_t i = 0; i < n; i++) {
            double sum = 0, sum64 = 0;
            for (int s = 0; s < r->comm.size; s++) {
                sum += (double)value(s, i);
                sum64 += (double)value(s, i) * 1.0000001;
            }
            if (x[i] != (float)sum || d[i] != sum64 || z[i] != i * 7)
                return PAR_FAIL(r, "element %lld of %lld", (long long)i, (long long)n);
        }
        free(x);
        free(d);
        free(z);
    }
    return true;
}

START_TEST(allreduce_sums_in_rank_order)
{
    run_both(_i, reduce_all);
}
END_TEST

static bool max_nan(par_rank *r)
{
    float x[2] = {(float)r->comm.rank, r->comm.rank == r->comm.size - 1 ? NAN : 1};
    if (ckpt_comm_allreduce(&r->comm, CKPT_COMM_F32, CKPT_COMM_MAX_OF, x, 2, &r->err) != CKPT_OK)
        return false;
    if (x[0] != (float)(r->comm.size - 1) || !isnan(x[1]))
        return PAR_FAIL(r, "maxima %g, %g", (double)x[0], (double)x[1]);
    return true;
}

START_TEST(allreduce_max_keeps_nan)
{
    run_both(_i, max_nan);
}
END_TEST

static bool gather(par_rank *r)
{
    int64_t counts[PAR_RANKS], total = 0, lo = 0;
    for (int i = 0; i < r->comm.size; i++) {
        counts[i] = i == 1 ? 0 : 2 * i + 1;
        lo += i < r->comm.rank ? counts[i] : 0;
        total += counts[i];
    }
    double all[100], mine[20], sum[20];
    for (int64_t i = 0; i < counts[r->comm.rank]; i++)
        mine[i] = (double)(lo + i);
    if (ckpt_comm_allgather(&r->comm, sizeof *all, mine, counts, all, &r->err) != CKPT_OK)
        return false;
    for (int64_t i = 0; i < total; i++)
        if (all[i] != (double)i)
            return PAR_FAIL(r, "allgather: element %lld is %g", (long long)i, all[i]);
    for (int64_t i = 0; i < total; i++)
        all[i] += 100 * r->comm.rank;
    if (ckpt_comm_reduce_scatter(&r->comm, CKPT_COMM_F64, all, counts, sum, &r->err) != CKPT_OK)
        return false;
    for (int64_t i = 0; i < counts[r->comm.rank]; i++) {
        double want = (double)((lo + i) * r->comm.size) +
                      100 * (double)(r->comm.size * (r->comm.size - 1) / 2);
        if (sum[i] != want)
            return PAR_FAIL(r, "reduce_scatter: element %lld is %g", (long long)i, sum[i]);
    }
    return true;
}

START_TEST(allgather_and_reduce_scatter_with_uneven_counts)
{
    run_both(_i, gather);
}
END_TEST

static bool transpose(par_rank *r)
{
    int64_t to[PAR_RANKS], from[PAR_RANKS], n = 0;
    int32_t send[100], recv[100];
    for (int i = 0; i < r->comm.size; i++) {
        to[i] = (r->comm.rank + i) % 3;
        from[i] = to[i];
        for (int64_t k = 0; k < to[i]; k++)
            send[n++] = r->comm.rank * 100 + i * 10 + (int32_t)k;
    }
    if (ckpt_comm_alltoall(&r->comm, 4, send, to, recv, from, &r->err) != CKPT_OK)
        return false;
    n = 0;
    for (int i = 0; i < r->comm.size; i++)
        for (int64_t k = 0; k < from[i]; k++)
            if (recv[n++] != i * 100 + r->comm.rank * 10 + (int32_t)k)
                return PAR_FAIL(r, "from rank %d: %d", i, recv[n - 1]);
    return true;
}

START_TEST(alltoall_transposes)
{
    run_both(_i, transpose);
}
END_TEST

static bool one_to_another(par_rank *r)
{
    int last = r->comm.size - 1, x = r->comm.rank + 5, y = -1, z = -1;
    if (ckpt_comm_broadcast(&r->comm, &x, sizeof x, last, &r->err) != CKPT_OK ||
        ckpt_comm_ring(&r->comm, &r->comm.rank, &y, sizeof y, &r->err) != CKPT_OK ||
        ckpt_comm_pass(&r->comm, last, 0, &r->comm.rank, &z, sizeof z, &r->err) != CKPT_OK ||
        ckpt_comm_barrier(&r->comm, &r->err) != CKPT_OK)
        return false;
    if (x != last + 5 || y != (r->comm.rank + last) % r->comm.size ||
        z != (r->comm.rank == 0 ? last : -1))
        return PAR_FAIL(r, "broadcast %d, ring %d, pass %d", x, y, z);
    return true;
}

START_TEST(broadcast_ring_and_pass)
{
    run_both(_i, one_to_another);
}
END_TEST

static bool split_odd(par_rank *r)
{
    ckpt_comm half, again;
    int64_t sum = r->comm.rank, want = 0, n = 0;
    bool odd = r->comm.rank % 2 != 0;
    if (ckpt_comm_split(&r->comm, odd, &half, &r->err) != CKPT_OK ||
        ckpt_comm_allreduce(&half, CKPT_COMM_I64, CKPT_COMM_SUM, &sum, 1, &r->err) != CKPT_OK ||
        ckpt_comm_split(&half, half.rank, &again, &r->err) != CKPT_OK)
        return false;
    for (int i = odd; i < r->comm.size; i += 2, n++)
        want += i;
    if (sum != want || half.size != n || half.rank != r->comm.rank / 2 || again.size != 1)
        return PAR_FAIL(r, "group of %d, sum %lld", half.size, (long long)sum);
    ckpt_comm_release(&again);
    ckpt_comm_release(&half);
    return true;
}

START_TEST(split_makes_groups_in_order)
{
    run_both(_i, split_odd);
}
END_TEST

static bool misfit(par_rank *r)
{
    int64_t counts[2] = {1, r->comm.rank == 0 ? 1 : 2};
    char x[4] = {0}, out[8];
    return ckpt_comm_allgather(&r->comm, 1, x, counts, out, &r->err) == CKPT_OK;
}

START_TEST(sizes_that_do_not_fit_are_an_error)
{
    par_rank ranks[PAR_RANKS];
    ck_assert(!par_try_on(_i == 0 ? PAR_THREADS : PAR_HOST, ranks, 2, misfit, NULL));
    ck_assert_ptr_nonnull(strstr(ranks[0].err.text, "bytes"));
    ck_assert_int_eq(ranks[0].err.code, CKPT_E_IO);
}
END_TEST

static bool one_stops(par_rank *r)
{
    ckpt_comm group;
    bool ok = ckpt_comm_split(&r->comm, 0, &group, &r->err) == CKPT_OK;
    if (ok && r->comm.rank == 1)
        ok = PAR_FAIL(r, "the disk is full");
    else if (ok)
        ok = ckpt_comm_barrier(&group, &r->err) == CKPT_OK;
    if (!ok)
        ckpt_comm_abort(&r->comm, 1);
    ckpt_comm_release(&group);
    return ok;
}

START_TEST(a_rank_that_stops_makes_the_others_fail)
{
    par_rank ranks[PAR_RANKS];
    ck_assert(!par_try_on(_i == 0 ? PAR_THREADS : PAR_HOST, ranks, 3, one_stops, NULL));
    for (int i = 0; i < 3; i++)
        ck_assert_ptr_nonnull(
            strstr(ranks[i].err.text, i == 1 ? "the disk is full" : "another rank stopped"));
}
END_TEST

static bool different_calls(par_rank *r)
{
    ckpt_comm half;
    char x = 0, y = 0;
    if (ckpt_comm_split(&r->comm, 0, &half, &r->err) != CKPT_OK)
        return false;
    ckpt_comm *c = r->comm.rank == 0 ? &half : &r->comm;
    bool ok = ckpt_comm_ring(c, &x, &y, 1, &r->err) == CKPT_OK;
    ckpt_comm_release(&half);
    return ok;
}

START_TEST(different_exchanges_are_told_apart)
{
    par_rank ranks[PAR_RANKS];
    ck_assert(!par_try_on(PAR_HOST, ranks, 2, different_calls, NULL));
    ck_assert_ptr_nonnull(strstr(ranks[0].err.text, "another exchange"));
}
END_TEST

/* ---- processes -------------------------------------------------------------------------------- */

/* Forked ranks run fn(comm); exit code 0: true. */
static void start(ckpt_comm_host *h, int size, bool (*fn)(ckpt_comm *), pid_t *pids)
{
    for (int i = 0; i < size; i++) {
        pids[i] = fork();
        ck_assert_int_ge(pids[i], 0);
        if (pids[i] != 0)
            continue;
        ckpt_comm c;
        ckpt_err err;
        bool ok = ckpt_comm_host_join(h, i, &c, &err) == CKPT_OK && fn(&c);
        _exit(ok ? 0 : 1);
    }
}

static int wait_for(pid_t pid)
{
    int how = -1;
    ck_assert_int_eq(waitpid(pid, &how, 0), pid);
    return how;
}

/* 5 MB to everybody, through rings of at most 1 MiB. */
static bool send_much(ckpt_comm *c)
{
    const int64_t n = 5000000;
    ckpt_err err;
    bool ok = true;
    int64_t counts[PAR_RANKS];
    unsigned char *mine = malloc((size_t)n), *all = malloc((size_t)(n * c->size));
    for (int i = 0; i < c->size; i++)
        counts[i] = n - i;
    for (int64_t i = 0; i < n; i++)
        mine[i] = (unsigned char)(i * 7 + c->rank);
    for (int round = 0; round < 3; round++)
        ok = ok && ckpt_comm_allgather(c, 1, mine, counts, all, &err) == CKPT_OK;
    const unsigned char *at = all;
    for (int r = 0; r < c->size; r++)
        for (int64_t i = 0; i < counts[r] && ok; i++)
            ok = *at++ == (unsigned char)(i * 7 + r);
    free(mine);
    free(all);
    return ok;
}

START_TEST(processes_exchange_more_than_a_ring_holds)
{
    ckpt_comm_host *h;
    ckpt_err err;
    pid_t pids[3];
    ck_assert_int_eq(ckpt_comm_host_new(&h, 3, &err), CKPT_OK);
    start(h, 3, send_much, pids);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(wait_for(pids[i]), 0);
    ckpt_comm_host_free(h);
}
END_TEST

/* Rank 1 kills itself in the third exchange; the others must get its name and its signal. */
static bool until_killed(ckpt_comm *c)
{
    ckpt_err err = {0};
    for (int i = 0; i < 100; i++) {
        if (c->rank == 1 && i == 2)
            (void)raise(SIGKILL);
        if (ckpt_comm_barrier(c, &err) != CKPT_OK)
            return strstr(err.text, "rank 1 of 3 was killed by signal 9") != NULL;
    }
    return false;
}

START_TEST(a_killed_process_is_noticed_at_once)
{
    ckpt_comm_host *h;
    ckpt_err err;
    pid_t pids[3];
    ck_assert_int_eq(ckpt_comm_host_new(&h, 3, &err), CKPT_OK);
    ck_assert_ptr_null(ckpt_comm_host_why(h));
    start(h, 3, until_killed, pids);
    int how = wait_for(pids[1]);
    ck_assert(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
    ckpt_comm_host_gone(h, 1, "was killed by signal 9");
    ck_assert_int_eq(wait_for(pids[0]), 0);
    ck_assert_int_eq(wait_for(pids[2]), 0);
    ck_assert_str_eq(ckpt_comm_host_why(h), "rank 1 of 3 was killed by signal 9");
    ck_assert(ckpt_comm_host_speak(h) && !ckpt_comm_host_speak(h));
    ckpt_comm_host_free(h);
}
END_TEST

/* Rank 2 leaves after one exchange, whose data must still arrive; rank 0 then waits for it in vain. */
static bool leave_early(ckpt_comm *c)
{
    ckpt_err err = {0};
    int x = c->rank == 2 ? 77 : 0;
    if (ckpt_comm_broadcast(c, &x, sizeof x, 2, &err) != CKPT_OK || x != 77)
        return false;
    if (c->rank != 0)
        return true;
    return ckpt_comm_pass(c, 2, 0, &x, &x, sizeof x, &err) == CKPT_E_IO &&
           strstr(err.text, "rank 2 of 3 ended before the others") != NULL;
}

START_TEST(one_that_ends_early_fails_only_who_waits_for_it)
{
    ckpt_comm_host *h;
    ckpt_err err;
    pid_t pids[3];
    ck_assert_int_eq(ckpt_comm_host_new(&h, 3, &err), CKPT_OK);
    start(h, 3, leave_early, pids);
    ck_assert_int_eq(wait_for(pids[2]), 0);
    ckpt_comm_host_gone(h, 2, NULL);
    ck_assert_int_eq(wait_for(pids[1]), 0);
    ck_assert_int_eq(wait_for(pids[0]), 0);
    ck_assert_ptr_null(ckpt_comm_host_why(h));
    ckpt_comm_host_free(h);
}
END_TEST

START_TEST(sizes_of_a_host_run_are_checked)
{
    ckpt_comm_host *h;
    ckpt_comm c;
    ckpt_err err;
    ck_assert_int_eq(ckpt_comm_host_new(&h, 0, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_comm_host_new(&h, CKPT_COMM_HOST_MAX + 1, &err), CKPT_E_USAGE);
    ck_assert_int_eq(ckpt_comm_host_new(&h, CKPT_COMM_HOST_MAX, &err), CKPT_OK);
    ck_assert_int_eq(ckpt_comm_host_join(h, CKPT_COMM_HOST_MAX, &c, &err), CKPT_E_USAGE);
    ckpt_comm_host_free(h);
}
END_TEST

START_TEST(a_missing_part_says_what_to_install)
{
    ckpt_comm c;
    ckpt_err err;
    ck_assert_int_eq(ckpt_comm_load(&c, "/nowhere/libckpt_mpi.so", &err), CKPT_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, "libopenmpi-dev"));
    ck_assert_ptr_nonnull(strstr(err.text, "/nowhere/libckpt_mpi.so"));
}
END_TEST

START_TEST(parts_cover_and_differ_by_one_at_most)
{
    for (int64_t n = 0; n < 20; n++)
        for (int64_t parts = 1; parts < 8; parts++) {
            ck_assert_int_eq(ckpt_part_at(n, parts, 0), 0);
            ck_assert_int_eq(ckpt_part_at(n, parts, parts), n);
            for (int64_t i = 0; i < parts; i++) {
                int64_t len = ckpt_part_at(n, parts, i + 1) - ckpt_part_at(n, parts, i);
                ck_assert(len == n / parts || len == n / parts + 1);
            }
        }
}
END_TEST

Suite *suite_comm(void);
Suite *suite_comm(void)
{
    Suite *s = suite_create("comm");
    TCase *t = tcase_create("comm");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, allreduce_sums_in_rank_order, 0, 2 * N_SIZES);
    tcase_add_loop_test(t, allreduce_max_keeps_nan, 0, 2 * N_SIZES);
    tcase_add_loop_test(t, allgather_and_reduce_scatter_with_uneven_counts, 0, 2 * N_SIZES);
    tcase_add_loop_test(t, alltoall_transposes, 0, 2 * N_SIZES);
    tcase_add_loop_test(t, broadcast_ring_and_pass, 0, 2 * N_SIZES);
    tcase_add_loop_test(t, split_makes_groups_in_order, 0, 2 * N_SIZES);
    tcase_add_loop_test(t, sizes_that_do_not_fit_are_an_error, 0, 2);
    tcase_add_loop_test(t, a_rank_that_stops_makes_the_others_fail, 0, 2);
    tcase_add_test(t, different_exchanges_are_told_apart);
    tcase_add_test(t, processes_exchange_more_than_a_ring_holds);
    tcase_add_test(t, a_killed_process_is_noticed_at_once);
    tcase_add_test(t, one_that_ends_early_fails_only_who_waits_for_it);
    tcase_add_test(t, sizes_of_a_host_run_are_checked);
    tcase_add_test(t, a_missing_part_says_what_to_install);
    tcase_add_test(t, parts_cover_and_differ_by_one_at_most);
    suite_add_tcase(s, t);
    return s;
}
