/* Work divided by bytes between ranks (threads here): every share is contiguous, all have all results,
 * files and digests are those of one process, a rank that fails fails all; and holes of sparse files. */
#include "derive.h"
#include "hole.h"
#include "par_test.h"
#include "share.h"
#include "stream.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char base[40];

static ckpt_status gather(void *self, const void *mine, const int64_t *counts, void *all,
                          ckpt_err *err)
{
    return ckpt_comm_allgather(self, 1, mine, counts, all, err);
}

static ckpt_share share_of(par_rank *r)
{
    return (ckpt_share){
        .rank = r->comm.rank, .size = r->comm.size, .allgather = gather, .self = &r->comm};
}

START_TEST(shares_are_contiguous_and_even)
{
    enum { N = 100 };
    for (int size = 1; size <= 5; size++) {
        ckpt_share s = {.size = size};
        uint64_t held[5] = {0}, at = 0;
        int last = 0;
        for (int i = 0; i < N; i++, at += 7) {
            int r = ckpt_share_of(&s, at, 7, 7 * N);
            ck_assert_int_ge(r, last);
            ck_assert_int_lt(r, size);
            held[r] += 7;
            last = r;
        }
        for (int r = 0; r < size; r++)
            ck_assert_uint_le(held[r] > 7 * N / (unsigned)size ? held[r] - 7 * N / (unsigned)size
                                                               : 7 * N / (unsigned)size - held[r],
                              7);
    }
    ckpt_share big = {.size = 4096}; /* no overflow near 2^64 */
    ck_assert_int_eq(ckpt_share_of(&big, UINT64_MAX - 1, 1, UINT64_MAX), 4095);
    ck_assert_int_eq(ckpt_share_of(&big, 0, 0, 0), 0);
}
END_TEST

static bool exchange_table(par_rank *r)
{
    enum { N = 57, ELEM = 3 };
    uint8_t table[N][ELEM];
    int owner[N];
    ckpt_share s = share_of(r);
    for (int i = 0; i < N; i++) {
        owner[i] = i * i % r->comm.size;
        memset(table[i], owner[i] == r->comm.rank ? i + 1 : 0xff, ELEM);
    }
    if (ckpt_share_table(&s, table, N, ELEM, owner, &r->err) != CKPT_OK)
        return false;
    for (int i = 0; i < N; i++)
        for (int k = 0; k < ELEM; k++)
            if (table[i][k] != i + 1)
                return PAR_FAIL(r, "element %d is %d", i, table[i][k]);
    return true;
}

START_TEST(table_is_complete_everywhere)
{
    par_run(_i + 1, exchange_table, NULL);
}
END_TEST

static bool one_fails(par_rank *r)
{
    ckpt_share s = share_of(r);
    bool mine = r->comm.rank == 1;
    ckpt_status own = mine ? ckpt_fail(&r->err, CKPT_E_FORMAT, "my own reason") : CKPT_OK;
    ckpt_status status = ckpt_share_agree(&s, own, &r->err);
    if (status != CKPT_E_FORMAT)
        return PAR_FAIL(r, "status %d", (int)status);
    if (strcmp(r->err.text, mine ? "my own reason" : "rank 1 of 3: my own reason") != 0)
        return PAR_FAIL(r, "text '%s'", r->err.text);
    r->err = (ckpt_err){0};
    return ckpt_share_agree(&s, CKPT_OK, &r->err) == CKPT_OK;
}

START_TEST(a_rank_that_fails_fails_all)
{
    par_run(3, one_fails, NULL);
}
END_TEST

static bool tell_text(par_rank *r)
{
    ckpt_share s = share_of(r);
    ckpt_arena arena = {0};
    const char *text = r->comm.rank == 0 ? "where it lies" : NULL, *none = NULL;
    bool ok = ckpt_share_tell(&s, &arena, &text, &r->err) == CKPT_OK &&
              ckpt_share_tell(&s, &arena, &none, &r->err) == CKPT_OK && text != NULL &&
              strcmp(text, "where it lies") == 0 && none == NULL;
    ckpt_arena_free(&arena);
    return ok || PAR_FAIL(r, "not told");
}

START_TEST(all_are_told_a_text)
{
    par_run(_i + 1, tell_text, NULL);
}
END_TEST

typedef struct outcome {
    uint8_t root[32], source[32], files[32][32];
    size_t n_files;
} outcome;

/* Convert the fixture into base/name: with `r`, this rank's share of it. */
static ckpt_status convert(const char *name, const ckpt_share *share, outcome *out, ckpt_err *err)
{
    ckpt_status status;
    ckpt_source src = {0};
    ckpt_model model = {0};
    ckpt_plan plan = {0};
    ckpt_arena arena = {0};
    ckpt_convert_result result;
    ckpt_open_opts open_opts = {.iteration = -1};
    ckpt_convert_opts opts = {
        .container = ckpt_container_find("torch_dist"),
        .mesh = {2, 1, 2, 0, 1, 1},
        .sharded = true
    };
    ckpt_stream_opts stream = {.threads = 2, .memory = (uint64_t)64 << 20, .share = share};
    char dir[128];
    for (size_t i = 0; ckpt_layouts[i] != NULL && opts.layout == NULL; i++)
        if (strcmp(ckpt_layouts[i]->group, "megatron") == 0)
            opts.layout = ckpt_layouts[i];
    snprintf(dir, sizeof dir, "%s/%s", base, name);
    CKPT_CHECK(ckpt_mesh_resolve(&opts.mesh, err));
    CKPT_CHECK(ckpt_mkdirs(dir, err));
    CKPT_CHECK(ckpt_source_open(&src, CKPT_FIXTURES "/hf/kimi_linear_tiny", &open_opts, err));
    CKPT_CHECK(ckpt_model_bind(&model, &src, NULL, err));
    CKPT_CHECK(ckpt_plan_convert(&plan, &model, &opts, err));
    CKPT_CHECK(ckpt_stream_convert(&plan, dir, &stream, &arena, &result, err));
    memcpy(out->root, result.root, 32);
    memcpy(out->source, result.source_root, 32);
    out->n_files = plan.sink.n_files;
    for (size_t f = 0; f < plan.sink.n_files && f < 32; f++)
        memcpy(out->files[f], result.files[f].sha256, 32);
done:
    ckpt_plan_release(&plan);
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    ckpt_arena_free(&arena);
    return status;
}

static bool convert_share(par_rank *r)
{
    const outcome *want = r->arg;
    outcome got = {0};
    ckpt_share s = share_of(r);
    if (convert("ranks", &s, &got, &r->err) != CKPT_OK)
        return false;
    if (memcmp(&got, want, sizeof got) != 0)
        return PAR_FAIL(r, "another result");
    return true;
}

/* Both digests of a checkpoint, divided. */
static bool digest_share(par_rank *r)
{
    const outcome *want = r->arg;
    ckpt_status status;
    ckpt_source src = {0};
    ckpt_model model = {0};
    ckpt_arena arena = {0};
    ckpt_open_opts open_opts = {.iteration = -1};
    ckpt_share s = share_of(r);
    ckpt_stream_opts stream = {.threads = 1, .memory = (uint64_t)8 << 20, .share = &s};
    ckpt_tensor_hash *hashes = NULL;
    ckpt_file_hash *files = NULL;
    uint8_t root[32];
    char dir[128];
    snprintf(dir, sizeof dir, "%s/ranks", base);
    CKPT_CHECK(ckpt_source_open(&src, dir, &open_opts, &r->err));
    CKPT_CHECK(ckpt_model_bind(&model, &src, NULL, &r->err));
    hashes = calloc(model.n_tensors + 1, sizeof *hashes);
    files = calloc(src.n_files + 1, sizeof *files);
    CKPT_CHECK(ckpt_stream_digest(&model, &stream, &arena, hashes, root, &r->err));
    if (memcmp(root, want->root, 32) != 0)
        status = ckpt_fail(&r->err, CKPT_E_MISMATCH, "another root");
    CKPT_CHECK(status);
    memset(root, 0, sizeof root);
    CKPT_CHECK(ckpt_stream_verify(&model, 0, model.n_tensors, &stream, &arena, hashes, files, root,
                                  &r->err));
    if (memcmp(root, want->root, 32) != 0)
        status = ckpt_fail(&r->err, CKPT_E_MISMATCH, "another root");
    int seen = 0;
    for (size_t i = 0; i < src.n_files; i++)
        for (size_t f = 0; f < want->n_files; f++)
            seen += memcmp(files[i].sha256, want->files[f], 32) == 0;
    if (seen < 4 && status == CKPT_OK)
        status = ckpt_fail(&r->err, CKPT_E_MISMATCH, "%d files known", seen);
done:
    free(hashes);
    free(files);
    ckpt_model_release(&model);
    ckpt_source_close(&src);
    ckpt_arena_free(&arena);
    return status == CKPT_OK;
}

START_TEST(ranks_write_what_one_process_writes)
{
    outcome one = {0};
    ckpt_err err = {0};
    char command[200];
    snprintf(base, sizeof base, "/tmp/ckpt-share-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(base));
    ck_assert_msg(convert("one", NULL, &one, &err) == CKPT_OK, "%s", err.text);
    ck_assert_uint_gt(one.n_files, 4);
    ck_assert_mem_eq(one.root, one.source, 32);
    par_run(4, convert_share, &one);
    snprintf(command, sizeof command, "diff -r %s/one %s/ranks >/dev/null", base, base);
    ck_assert_int_eq(system(command), 0);
    par_run(3, digest_share, &one);
    ckpt_remove_tree(base);
}
END_TEST

START_TEST(holes_read_as_zeros)
{
    enum { SIZE = 4 << 20, AT = (1 << 20) + 77 };
    char path[] = "/tmp/ckpt-hole-XXXXXX";
    int fd = mkstemp(path);
    struct stat st;
    ckpt_err err = {0};
    uint8_t *plain = malloc(SIZE), *holes = malloc(SIZE);
    ck_assert_int_ge(fd, 0);
    unlink(path);
    ck_assert_int_eq(ftruncate(fd, SIZE), 0);
    ck_assert_int_eq(pwrite(fd, "data", 4, AT), 4);
    ck_assert_int_eq(fstat(fd, &st), 0);
    ck_assert(ckpt_is_sparse(&st));
    /* clang-format off */
    static const size_t ranges[][2] = {
        {0, SIZE}, {5, 100}, {AT + 1, 2}, {AT - 1, 10}, {AT & ~4095, 8192}, {AT + 4, SIZE - AT - 4},
    };
    /* clang-format on */
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        size_t at = ranges[i][0], n = ranges[i][1];
        memset(holes, 0xaa, SIZE);
        ck_assert_int_eq(ckpt_pread_full(fd, plain, n, at, &err), CKPT_OK);
        ck_assert_int_eq(ckpt_pread_holes(fd, holes, n, at, &err), CKPT_OK);
        ck_assert_mem_eq(plain, holes, n);
        ck_assert(n == SIZE || holes[n] == 0xaa);
    }
    ck_assert_int_ne(ckpt_pread_holes(fd, holes, 16, SIZE - 4, &err), CKPT_OK);
    ck_assert(ckpt_all_zero(plain, 0));
    memset(plain, 0, 100);
    ck_assert(ckpt_all_zero(plain, 100));
    plain[99] = 1;
    ck_assert(!ckpt_all_zero(plain, 100));
    free(plain);
    free(holes);
    close(fd);
}
END_TEST

Suite *suite_share(void);
Suite *suite_share(void)
{
    Suite *s = suite_create("share");
    TCase *c = tcase_create("share");
    tcase_set_timeout(c, 120);
    tcase_add_test(c, shares_are_contiguous_and_even);
    tcase_add_loop_test(c, table_is_complete_everywhere, 0, 4);
    tcase_add_test(c, a_rank_that_fails_fails_all);
    tcase_add_loop_test(c, all_are_told_a_text, 0, 3);
    tcase_add_test(c, ranks_write_what_one_process_writes);
    tcase_add_test(c, holes_read_as_zeros);
    suite_add_tcase(s, c);
    return s;
}
