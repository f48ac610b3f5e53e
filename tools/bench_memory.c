/* Operations of `ckpt bench` on memory, one thread each:
 *
 *   @memcpy N       copy N bytes, a block of 32 MiB after another (N may name a file: its size)
 *   @cast N         N bytes of f32 to bf16
 *   @sha256 N       one stream, as a file's digest
 *   @leaves N       sixteen streams, as tensors' leaves
 *   @gather DIR PIECE N   N bytes of a tensor that is cut into four files along its last axis, in pieces
 *                   of PIECE bytes, out of the page cache into a buffer of 4 MiB (ckpt_gather_run)
 *   @aim SECONDS    nothing: a time that something is aimed at
 *
 * Each tells the seconds of a processor that its N bytes take at the rate of the best of several passes:
 * what others do on the machine meanwhile does not count. */
#include "bench.h"
#include "checked.h"
#include "gather.h"
#include "hash.h"
#include "io.h"
#include "le.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MIN_PASSES = 3, MAX_PASSES = 64, SHARDS = 4 };
#define BLOCK ((size_t)32 << 20)      /* bytes: far more than the second cache of a core */
#define ENOUGH 0.1                    /* seconds of passes */
#define WINDOW ((size_t)4 << 20)      /* of a gather, bytes: a piece of the executor */
#define SCRATCH ((size_t)1 << 20)     /* what it gives a worker beside it */
#define SHARD_MAX ((uint64_t)8 << 20) /* bytes of one of the four files */

ckpt_status bench_amount(const char *word, uint64_t *out, ckpt_err *err)
{
    struct stat st;
    if (strchr(word, '/') != NULL) {
        if (stat(word, &st) != 0)
            return ckpt_fail_errno(err, errno, "%s", word);
        *out = (uint64_t)st.st_size;
    } else {
        ckpt_status status = ckpt_parse_size(word, out, err);
        if (status != CKPT_OK)
            return status;
    }
    return *out > 0 ? CKPT_OK : ckpt_fail(err, CKPT_E_USAGE, "'%s': expected more than 0", word);
}

double bench_clock(int threads)
{
    struct timespec t;
    clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One pass, whose bytes it tells. */
typedef ckpt_status pass_fn(void *self, uint64_t *bytes, ckpt_err *err);

/* The best pass, scaled to n bytes; the first one touches memory. */
static ckpt_status time_passes(pass_fn *pass, void *self, uint64_t n, bench_run *out, ckpt_err *err)
{
    bench_run runs[MAX_PASSES];
    size_t count = 0;
    double all = 0;
    uint64_t bytes = 1;
    ckpt_status status = pass(self, &bytes, err);
    while (status == CKPT_OK && count < MAX_PASSES && (count < MIN_PASSES || all < ENOUGH)) {
        const double start = bench_clock(1);
        status = pass(self, &bytes, err);
        runs[count] = (bench_run){.seconds = bench_clock(1) - start};
        all += runs[count++].seconds;
    }
    if (status != CKPT_OK)
        return status;
    const double rate = (double)bytes / bench_median(runs, count).min;
    out->seconds = (double)n / rate;
    (void)snprintf(out->note, sizeof out->note, "%.2f GB/s", rate / 1e9);
    return CKPT_OK;
}

/* ---- from memory to memory --------------------------------------------------------------------- */

typedef struct blocks {
    uint8_t *a, *b;
    size_t n;
} blocks;

static ckpt_status pass_memcpy(void *self, uint64_t *bytes, ckpt_err *err)
{
    blocks *w = self;
    (void)err;
    memcpy(w->b, w->a, w->n);
    *bytes = w->n;
    return CKPT_OK;
}

static ckpt_status pass_cast(void *self, uint64_t *bytes, ckpt_err *err)
{
    blocks *w = self;
    (void)err;
    ckpt_dtype_cast(CKPT_BF16, w->b, CKPT_F32, w->a, w->n / 4);
    *bytes = w->n;
    return CKPT_OK;
}

static ckpt_status pass_sha256(void *self, uint64_t *bytes, ckpt_err *err)
{
    blocks *w = self;
    ckpt_sha256_stream s;
    (void)err;
    ckpt_sha256_stream_init(&s);
    ckpt_sha256_stream_update2(&s, w->a, w->n, NULL, NULL, 0);
    ckpt_sha256_stream_final(&s, w->b);
    *bytes = w->n;
    return CKPT_OK;
}

static ckpt_status pass_leaves(void *self, uint64_t *bytes, ckpt_err *err)
{
    enum { LANES = CKPT_SHA256_LANES };
    blocks *w = self;
    ckpt_sha256_stream s[LANES], *stream[LANES];
    const void *p[LANES];
    size_t n[LANES];
    (void)err;
    for (int i = 0; i < LANES; i++) {
        stream[i] = &s[i];
        ckpt_sha256_stream_init(&s[i]);
        p[i] = w->a + (size_t)i * (w->n / LANES);
        n[i] = w->n / LANES;
    }
    ckpt_sha256_stream_update_many(stream, p, n, LANES);
    for (int i = 0; i < LANES; i++)
        ckpt_sha256_stream_final(&s[i], w->b + (size_t)i * CKPT_SHA256_LEN);
    *bytes = w->n;
    return CKPT_OK;
}

static ckpt_status time_blocks(pass_fn *pass, const char *amount, bench_run *out, ckpt_err *err)
{
    uint64_t n;
    ckpt_status status = bench_amount(amount, &n, err);
    blocks w = {.a = malloc(BLOCK), .b = malloc(BLOCK), .n = BLOCK};
    if (status == CKPT_OK && (w.a == NULL || w.b == NULL))
        status = ckpt_tool_no_memory(err);
    if (status == CKPT_OK) {
        for (size_t i = 0; i < BLOCK; i += 4) /* small floats: no subnormals, no NaN */
            ckpt_put_u32(w.a + i, 0x3f000000U + (uint32_t)i);
        status = time_passes(pass, &w, n, out, err);
    }
    free(w.a);
    free(w.b);
    return status;
}

static ckpt_status op_memcpy(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    (void)n;
    return time_blocks(pass_memcpy, words[1], out, err);
}

static ckpt_status op_cast(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    (void)n;
    return time_blocks(pass_cast, words[1], out, err);
}

static ckpt_status op_sha256(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    (void)n;
    return time_blocks(pass_sha256, words[1], out, err);
}

static ckpt_status op_leaves(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    (void)n;
    return time_blocks(pass_leaves, words[1], out, err);
}

/* ---- gather ------------------------------------------------------------------------------------ */

typedef struct gathering {
    ckpt_source src;
    ckpt_file files[SHARDS];
    ckpt_gather g;
    ckpt_copy copies[SHARDS];
    ckpt_loop loops[SHARDS][2];
    uint64_t piece, rows;
    uint8_t *window;
    ckpt_scratch scratch;
} gathering;

/* The piece that row r of shard s holds: its place tells what must be there. */
static void piece_bytes(uint64_t r, size_t s, uint8_t *out, size_t n)
{
    uint64_t state = r * SHARDS + s;
    for (size_t i = 0; i < n; i += 8) {
        uint64_t x = ckpt_tool_draw(&state);
        memcpy(out + i, &x, n - i < 8 ? n - i : 8);
    }
}

static ckpt_status write_shard(gathering *w, size_t s, const char *dir, ckpt_err *err)
{
    char path[4096];
    ckpt_status status = CKPT_OK;
    int len = snprintf(path, sizeof path, "%s/shard.%zu", dir, s);
    if (len < 0 || (size_t)len >= sizeof path)
        return ckpt_fail(err, CKPT_E_USAGE, "%s: too long", dir);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return ckpt_fail_errno(err, errno, "%s", path);
    unlink(path);
    w->files[s] =
        (ckpt_file){.name = "shard", .path = "shard", .size = w->rows * w->piece, .fd = fd};
    for (uint64_t r = 0; r < w->rows && status == CKPT_OK; r++) {
        piece_bytes(r, s, w->window, (size_t)w->piece);
        status = ckpt_pwrite_full(fd, w->window, (size_t)w->piece, r * w->piece, err);
    }
    return status;
}

static ckpt_status pass_gather(void *self, uint64_t *bytes, ckpt_err *err)
{
    gathering *w = self;
    ckpt_status status = CKPT_OK;
    for (uint64_t lo = 0; lo < w->g.bytes && status == CKPT_OK; lo += WINDOW)
        status = ckpt_gather_run(&w->src, &w->g, lo, (size_t)ckpt_min_u64(WINDOW, w->g.bytes - lo),
                                 w->window, &w->scratch, err);
    *bytes = w->g.bytes;
    return status;
}

/* What lies in the window now is the last one, up to the end of the tensor. */
static ckpt_status check_gather(const gathering *w, ckpt_err *err)
{
    const uint64_t row = SHARDS * w->piece, lo = (w->g.bytes - 1) / WINDOW * WINDOW;
    uint8_t *want = malloc((size_t)w->piece);
    ckpt_status status = want != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
    for (uint64_t r = (lo + row - 1) / row; r < w->rows && status == CKPT_OK; r++)
        for (size_t s = 0; s < SHARDS && status == CKPT_OK; s++) {
            piece_bytes(r, s, want, (size_t)w->piece);
            if (memcmp(w->window + (r * row + s * w->piece - lo), want, (size_t)w->piece) != 0)
                status = ckpt_fail(err, CKPT_E_MISMATCH, "row %llu of shard %zu was gathered wrong",
                                   (unsigned long long)r, s);
        }
    free(want);
    return status;
}

static ckpt_status op_gather(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    ckpt_status status;
    uint64_t amount;
    gathering *w = calloc(1, sizeof *w);
    (void)n;
    if (w == NULL || (w->window = malloc(WINDOW)) == NULL ||
        (w->scratch.buf = malloc(SCRATCH)) == NULL) {
        status = ckpt_tool_no_memory(err);
        goto done;
    }
    w->scratch.cap = SCRATCH;
    CKPT_CHECK(bench_amount(words[2], &w->piece, err));
    CKPT_CHECK(bench_amount(words[3], &amount, err));
    if (w->piece % 2 != 0 || w->piece > SCRATCH / 2) {
        status = ckpt_fail(err, CKPT_E_USAGE, "a piece of %s: expected an even number, at most %zu",
                           words[2], SCRATCH / 2);
        goto done;
    }
    w->rows = SHARD_MAX / w->piece;
    w->src.files = w->files;
    w->src.n_files = SHARDS;
    w->g = (ckpt_gather){.name = "gathered",
                         .copies = w->copies,
                         .n_copies = SHARDS,
                         .bytes = w->rows * w->piece * SHARDS,
                         .from = CKPT_BF16,
                         .to = CKPT_BF16};
    for (size_t s = 0; s < SHARDS; s++) {
        const int64_t piece = (int64_t)w->piece;
        CKPT_CHECK(write_shard(w, s, words[1], err));
        w->loops[s][0] = (ckpt_loop){(int64_t)w->rows, piece, SHARDS * piece};
        w->loops[s][1] = (ckpt_loop){piece / 2, 2, 2};
        w->copies[s] = (ckpt_copy){.loop = w->loops[s],
                                   .n_loops = 2,
                                   .dst = s * w->piece,
                                   .last = w->g.bytes - (SHARDS - 1 - s) * w->piece - 2,
                                   .file = (uint32_t)s};
    }
    CKPT_CHECK(time_passes(pass_gather, w, amount, out, err));
    CKPT_CHECK(check_gather(w, err));
done:
    for (size_t s = 0; w != NULL && s < SHARDS; s++)
        if (w->files[s].name != NULL)
            close(w->files[s].fd);
    if (w != NULL) {
        free(w->window);
        free(w->scratch.buf);
    }
    free(w);
    return status;
}

/* ---- aims -------------------------------------------------------------------------------------- */

static ckpt_status op_aim(const char *const *words, size_t n, bench_run *out, ckpt_err *err)
{
    char *end;
    (void)n;
    out->seconds = strtod(words[1], &end);
    return *end == '\0' && out->seconds > 0
               ? CKPT_OK
               : ckpt_fail(err, CKPT_E_USAGE, "'%s': expected seconds", words[1]);
}

const bench_op bench_memory_ops[] = {
    {"@memcpy", 2, op_memcpy},
    {"@cast",   2, op_cast  },
    {"@sha256", 2, op_sha256},
    {"@leaves", 2, op_leaves},
    {"@gather", 4, op_gather},
    {"@aim",    2, op_aim   },
    {NULL,      0, NULL     },
};
