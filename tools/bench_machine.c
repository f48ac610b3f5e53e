/* What one thread does per second: the denominators of ratios that hold on other machines too. */
#include "bench.h"
#include "hash.h"
#include "io.h"
#include "le.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RUNS = 5, ROWS = 1024, COLUMNS = 2304 };
#define BLOCK ((size_t)32 << 20) /* bytes: far more than any cache of one core */
#define TENSOR ((size_t)2 * ROWS * COLUMNS)

typedef struct bench_work {
    uint8_t *a, *b;
    int fd, scratch;
    uint64_t file_size;
    ckpt_err *err;
} bench_work;

/* Each tells the bytes it moved. */
static ckpt_status run_memcpy(bench_work *w, size_t *moved)
{
    memcpy(w->b, w->a, BLOCK);
    *moved = BLOCK;
    return CKPT_OK;
}

static ckpt_status run_hash(bench_work *w, size_t *moved)
{
    ckpt_sha256_stream s;
    ckpt_sha256_stream_init(&s);
    ckpt_sha256_stream_update2(&s, w->a, BLOCK, NULL, NULL, 0);
    ckpt_sha256_stream_final(&s, w->b);
    *moved = BLOCK;
    return CKPT_OK;
}

static ckpt_status run_tree(bench_work *w, size_t *moved)
{
    enum { LANES = CKPT_SHA256_LANES };
    ckpt_sha256_stream s[LANES], *stream[LANES];
    const void *p[LANES];
    size_t n[LANES];
    for (int i = 0; i < LANES; i++) {
        stream[i] = &s[i];
        ckpt_sha256_stream_init(&s[i]);
        p[i] = w->a + (size_t)i * (BLOCK / LANES);
        n[i] = BLOCK / LANES;
    }
    ckpt_sha256_stream_update_many(stream, p, n, LANES);
    for (int i = 0; i < LANES; i++)
        ckpt_sha256_stream_final(&s[i], w->b + (size_t)i * CKPT_SHA256_LEN);
    *moved = BLOCK;
    return CKPT_OK;
}

static ckpt_status run_cast(bench_work *w, size_t *moved)
{
    ckpt_dtype_cast(CKPT_BF16, w->b, CKPT_F32, w->a, BLOCK / 4);
    *moved = BLOCK;
    return CKPT_OK;
}

static ckpt_status run_read(bench_work *w, size_t *moved)
{
    size_t n = w->file_size < BLOCK ? (size_t)w->file_size : BLOCK;
    ckpt_status status = CKPT_OK;
    for (size_t at = 0, k; at < n && status == CKPT_OK; at += k) {
        k = n - at < (size_t)4 << 20 ? n - at : (size_t)4 << 20;
        status = ckpt_pread_full(w->fd, w->b, k, at, w->err);
    }
    *moved = n;
    return status;
}

static ckpt_status run_write(bench_work *w, size_t *moved)
{
    ckpt_status status = ckpt_pwrite_full(w->scratch, w->a, BLOCK, 0, w->err);
    if (status == CKPT_OK && ckpt_sync_fd(w->scratch) != 0)
        status = ckpt_fail_errno(w->err, errno, "fsync");
    *moved = BLOCK;
    return status;
}

static const struct {
    const char *name, *what;
    ckpt_status (*run)(bench_work *w, size_t *moved);
} rates[BENCH_RATES] = {
    {"memcpy", "from and to memory",             run_memcpy},
    {"sha256", "one stream, as a file's digest", run_hash  },
    {"leaves", "sixteen streams, as tensors'",   run_tree  },
    {"cast",   "f32 to bf16, bytes of f32",      run_cast  },
    {"read",   "pread of a cached file, 4 MiB",  run_read  },
    {"write",  "32 MiB written and synced",      run_write },
};

static ckpt_status measure(bench_work *w, bench_rate out[BENCH_RATES])
{
    for (int i = 0; i < BENCH_RATES; i++) {
        bench_run runs[RUNS + 1];
        size_t n = 0;
        for (int r = 0; r <= RUNS; r++) { /* the first touches memory */
            struct timespec start;
            clock_gettime(CLOCK_MONOTONIC, &start);
            ckpt_status status = rates[i].run(w, &n);
            if (status != CKPT_OK)
                return status;
            runs[r] = (bench_run){.seconds = ckpt_seconds_since(&start)};
        }
        bench_stat s = bench_median(runs + 1, RUNS);
        out[i] = (bench_rate){rates[i].name, rates[i].what, (double)n / s.median / 1e9};
    }
    return CKPT_OK;
}

ckpt_status bench_machine(const char *file, const char *scratch, bench_rate out[BENCH_RATES],
                          ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bench_work w = {.a = malloc(BLOCK), .b = malloc(BLOCK), .fd = -1, .scratch = -1, .err = err};
    if (w.a == NULL || w.b == NULL) {
        status = ckpt_tool_no_memory(err);
        goto done;
    }
    for (size_t i = 0; i < BLOCK; i += 4) /* small floats: no subnormals, no NaN */
        ckpt_put_u32(w.a + i, 0x3f000000U + (uint32_t)i);
    memset(w.b, 0, BLOCK);
    CKPT_CHECK(ckpt_open_read(file, &w.fd, &w.file_size, err));
    w.scratch = open(scratch, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (w.scratch < 0) {
        status = ckpt_fail_errno(err, errno, "%s", scratch);
        goto done;
    }
    CKPT_CHECK(measure(&w, out));
done:
    if (w.fd >= 0)
        close(w.fd);
    if (w.scratch >= 0) {
        close(w.scratch);
        unlink(scratch);
    }
    free(w.a);
    free(w.b);
    return status;
}

/* ---- data -------------------------------------------------------------------------------------- */

static ckpt_status write_tensors(int fd, const ckpt_buf *header, uint64_t count, uint8_t *block,
                                 ckpt_err *err)
{
    uint64_t state = 1, at = 8 + header->len;
    uint8_t length[8];
    ckpt_status status;
    ckpt_put_u64(length, header->len);
    CKPT_CHECK(ckpt_pwrite_full(fd, length, sizeof length, 0, err));
    CKPT_CHECK(ckpt_pwrite_full(fd, header->data, header->len, sizeof length, err));
    for (uint64_t t = 0; t < count; t++, at += TENSOR) {
        for (size_t i = 0; i < TENSOR; i += 8) /* exponents below infinity's */
            ckpt_put_u64(block + i, ckpt_tool_draw(&state) & 0xbfffbfffbfffbfffU);
        CKPT_CHECK(ckpt_pwrite_full(fd, block, TENSOR, at, err));
        CKPT_CHECK(ckpt_check_interrupted(err));
    }
    if (ckpt_sync_fd(fd) != 0)
        status = ckpt_fail_errno(err, errno, "fsync");
done:
    return status;
}

ckpt_status bench_source(const char *path, uint64_t size, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf header = {0};
    uint64_t count = size / TENSOR > 0 ? size / TENSOR : 1;
    uint8_t *block = malloc(TENSOR);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    for (uint64_t t = 0; t < count; t++)
        ckpt_buf_printf(&header,
                        "%c\"experts.%llu.weight\":{\"dtype\":\"BF16\",\"shape\":[%d,%d],"
                        "\"data_offsets\":[%llu,%llu]}",
                        t == 0 ? '{' : ',', (unsigned long long)t, ROWS, COLUMNS,
                        (unsigned long long)(t * TENSOR), (unsigned long long)((t + 1) * TENSOR));
    ckpt_buf_putc(&header, '}');
    while (!header.failed && header.len % 8 != 0)
        ckpt_buf_putc(&header, ' ');
    if (fd < 0)
        status = ckpt_fail_errno(err, errno, "%s", path);
    else if (block == NULL || header.failed)
        status = ckpt_tool_no_memory(err);
    else
        status = write_tensors(fd, &header, count, block, err);
    if (fd >= 0 && close(fd) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s: close", path);
    free(block);
    ckpt_buf_release(&header);
    return status;
}
