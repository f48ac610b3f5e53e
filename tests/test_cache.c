/* Pages behind the reading of a large source go, and nothing else does. */
#define _GNU_SOURCE /* mincore */
#include "cache.h"

#include <check.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

Suite *suite_cache(void);

#define SIZE (4 * CKPT_CACHE_LAG)

/* Pages of the first `n` bytes that are in memory. */
static size_t resident(int fd, uint64_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (size_t)n / page, here = 0;
    unsigned char *vec = malloc(pages);
    void *map = mmap(NULL, (size_t)n, PROT_READ, MAP_SHARED, fd, 0);
    ck_assert(map != MAP_FAILED && vec != NULL);
    ck_assert_int_eq(mincore(map, (size_t)n, vec), 0);
    for (size_t i = 0; i < pages; i++)
        here += vec[i] & 1;
    munmap(map, (size_t)n);
    free(vec);
    return here;
}

/* Read all, in pieces; pages of the part before the lag that are left. */
static size_t left_behind(uint64_t available)
{
    FILE *f = tmpfile();
    size_t piece = 1 << 20;
    uint8_t *buf = malloc(piece);
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(ftruncate(fileno(f), (off_t)SIZE), 0);
    ckpt_file file = {.name = "f", .path = "f", .size = SIZE, .fd = fileno(f), .is_data = true};
    ckpt_source src = {.files = &file, .n_files = 1};
    ckpt_err err = {0};
    ckpt_cache_stream(&src, available);
    ckpt_cache_stream(&src, available);
    for (uint64_t at = 0; at < SIZE; at += piece)
        ck_assert_int_eq(ckpt_source_read(&src, 0, buf, piece, at, &err), CKPT_OK);
    size_t left = resident(file.fd, CKPT_CACHE_LAG);
    ckpt_arena_free(&src.arena);
    free(buf);
    fclose(f);
    return left;
}

/* A file system in memory keeps everything. */
static bool pages_can_go(void)
{
    FILE *f = tmpfile();
    char buf[4096];
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(ftruncate(fileno(f), 1 << 20), 0);
    ck_assert_int_eq(pread(fileno(f), buf, sizeof buf, 0), sizeof buf);
    ck_assert_int_eq(posix_fadvise(fileno(f), 0, 0, POSIX_FADV_DONTNEED), 0);
    bool gone = resident(fileno(f), 1 << 20) == 0;
    fclose(f);
    return gone;
}

START_TEST(pages_of_a_large_source_go)
{
    size_t all = (size_t)(CKPT_CACHE_LAG / (uint64_t)sysconf(_SC_PAGESIZE));
    ck_assert_uint_eq(left_behind(2 * SIZE), all);
    size_t left = left_behind(2 * SIZE - 1);
    if (pages_can_go())
        ck_assert_uint_le(left, all / 100); /* a page in use at that moment stays */
}
END_TEST

Suite *suite_cache(void)
{
    Suite *s = suite_create("cache");
    TCase *c = tcase_create("behind");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, pages_of_a_large_source_go);
    suite_add_tcase(s, c);
    return s;
}
