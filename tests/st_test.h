/* Helpers of the safetensors suites: scratch directories and files made of header and data. */
#ifndef CKPT_ST_TEST_H
#define CKPT_ST_TEST_H

#include <check.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"
#include "le.h"
#include "source.h"

/* A tensor description; offsets are literals. */
#define T(dtype, shape, begin, end)                                                                \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static char scratch[64];

static inline void scratch_make(void)
{
    snprintf(scratch, sizeof scratch, "/tmp/ckpt-st-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(scratch));
}

static inline void scratch_remove(void)
{
    ckpt_remove_tree(scratch);
}

/* scratch/name in a rotating buffer. */
static inline const char *in_scratch(const char *name)
{
    static char path[4][256];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s%s%s", scratch, *name ? "/" : "", name);
    return p;
}

static inline void put_file(const char *name, const void *p, size_t n)
{
    FILE *f = fopen(in_scratch(name), "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(p, 1, n, f), n);
    ck_assert_int_eq(fclose(f), 0);
}

static inline void put_text(const char *name, const char *text)
{
    put_file(name, text, strlen(text));
}

/* Length, header of n bytes, `data` zero bytes. */
static inline void put_st_n(const char *name, const char *header, size_t n, size_t data)
{
    uint8_t *bytes = calloc(1, 8 + n + data);
    ck_assert_ptr_nonnull(bytes);
    ckpt_put_u64(bytes, n);
    memcpy(bytes + 8, header, n);
    put_file(name, bytes, 8 + n + data);
    free(bytes);
}

static inline void put_st(const char *name, const char *header, size_t data)
{
    put_st_n(name, header, strlen(header), data);
}

/* Open and demand a status; a failure must mention `message`, a success leaves src open. */
static inline void expect_open(ckpt_source *src, const char *path, ckpt_status want,
                               const char *message)
{
    ckpt_err err = {0};
    ckpt_open_opts opts = {.iteration = -1, .container = "safetensors"};
    ckpt_status status = ckpt_source_open(src, path, &opts, &err);
    ck_assert_msg(status == want, "%s: status %d, expected %d: %s", path, (int)status, (int)want,
                  err.text);
    if (want != CKPT_OK)
        ck_assert_msg(strstr(err.text, message) != NULL, "expected '%s' in '%s'", message,
                      err.text);
}

static inline void expect_refused(const char *path, ckpt_status want, const char *message)
{
    ckpt_source src;
    expect_open(&src, path, want, message);
}

static inline const ckpt_tensor *tensor(const ckpt_source *src, const char *name)
{
    int64_t i = ckpt_source_find(src, name);
    ck_assert_msg(i >= 0, "no tensor %s", name);
    return &src->tensors[i];
}

#endif
