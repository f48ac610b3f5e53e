/* What the HDF5 test suites share: a directory, one file in it, made-up bytes. */
#ifndef HDF5_TEST_H
#define HDF5_TEST_H

#include "hdf5_file.h"

#include "checked.h"
#include "hash.h"
#include "io.h"
#include "le.h"

#include <check.h>
#include <fcntl.h>
#include <hdf5.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOOP(t, test, table) tcase_add_loop_test(t, test, 0, (int)(sizeof table / sizeof *table))

static char dir[64], path[96];

static inline void setup(void)
{
    snprintf(dir, sizeof dir, "/tmp/ckpt-h5-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/t.h5", dir);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

static inline void teardown(void)
{
    ckpt_remove_tree(dir);
}

static inline uint64_t rng(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return *s >> 33;
}

static inline void fill(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)rng(&seed);
}

static inline void open_ok(ckpt_source *src)
{
    ckpt_err err = {0};
    ck_assert_msg(ckpt_source_open(src, path, NULL, &err) == CKPT_OK, "%s", err.text);
}

#endif
