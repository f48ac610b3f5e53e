/* The files that `ckpt bench` works on: safetensors of one shape, values of a fixed seed. */
#include "bench.h"
#include "checked.h"
#include "io.h"
#include "le.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static size_t tensor_bytes(const bench_source *s)
{
    return (size_t)(s->rows * s->columns) * (size_t)ckpt_dtype_get(s->dtype)->bits / 8;
}

/* An expert of a published model, 4.5 MiB; fewer of them, for what takes long and grows with the bytes
 * alone; the same in f32; tensors of 4 KiB; one of them alone. */
const bench_source bench_sources[BENCH_SOURCES] = {
    {"{src}",   "source.safetensors", CKPT_BF16, 1024, 2304, 1},
    {"{part}",  "part.safetensors",   CKPT_BF16, 1024, 2304, 4},
    {"{wide}",  "wide.safetensors",   CKPT_F32,  1024, 2304, 2},
    {"{small}", "small.safetensors",  CKPT_BF16, 32,   64,   8},
    {"{tiny}",  "tiny.safetensors",   CKPT_BF16, 32,   64,   0},
};
#define LEAST                                                                                      \
    ((uint64_t)256 << 20) /* bytes: no part of the size is smaller, but for the size itself */

uint64_t bench_source_size(const bench_source *s, uint64_t size)
{
    if (s->divide == 0)
        return 0;
    const uint64_t part = size / s->divide;
    return tensor_bytes(s) >= 1 << 20 ? ckpt_max_u64(part, ckpt_min_u64(size, LEAST)) : part;
}

static void write_header(const bench_source *s, uint64_t count, ckpt_buf *out)
{
    const uint64_t n = tensor_bytes(s);
    for (uint64_t t = 0; t < count; t++)
        ckpt_buf_printf(out,
                        "%c\"experts.%llu.weight\":{\"dtype\":\"%s\",\"shape\":[%lld,%lld],"
                        "\"data_offsets\":[%llu,%llu]}",
                        t == 0 ? '{' : ',', (unsigned long long)t, ckpt_dtype_get(s->dtype)->name,
                        (long long)s->rows, (long long)s->columns, (unsigned long long)(t * n),
                        (unsigned long long)((t + 1) * n));
    ckpt_buf_putc(out, '}');
    while (!out->failed && out->len % 8 != 0)
        ckpt_buf_putc(out, ' ');
}

static ckpt_status write_tensors(const bench_source *s, int fd, const ckpt_buf *header,
                                 uint64_t count, uint8_t *block, ckpt_err *err)
{
    uint64_t state = 1, at = 8 + header->len;
    const size_t n = tensor_bytes(s);
    uint8_t length[8];
    ckpt_status status;
    ckpt_put_u64(length, header->len);
    CKPT_CHECK(ckpt_pwrite_full(fd, length, sizeof length, 0, err));
    CKPT_CHECK(ckpt_pwrite_full(fd, header->data, header->len, sizeof length, err));
    for (uint64_t t = 0; t < count; t++, at += n) {
        for (size_t i = 0; i < n; i += 8) /* exponents below infinity's, of both types */
            ckpt_put_u64(block + i, ckpt_tool_draw(&state) & 0xbfffbfffbfffbfffU);
        CKPT_CHECK(ckpt_pwrite_full(fd, block, n, at, err));
        CKPT_CHECK(ckpt_check_interrupted(err));
    }
    if (ckpt_sync_fd(fd) != 0)
        status = ckpt_fail_errno(err, errno, "fsync");
done:
    return status;
}

ckpt_status bench_write_source(const bench_source *s, const char *path, uint64_t size,
                               ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf header = {0};
    const uint64_t n = tensor_bytes(s), count = size / n > 0 ? size / n : 1;
    uint8_t *block = malloc(n);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        status = ckpt_fail_errno(err, errno, "%s", path);
    } else {
        write_header(s, count, &header);
        status = block == NULL || header.failed ? ckpt_tool_no_memory(err)
                                                : write_tensors(s, fd, &header, count, block, err);
    }
    if (fd >= 0 && close(fd) != 0 && status == CKPT_OK)
        status = ckpt_fail_errno(err, errno, "%s: close", path);
    free(block);
    ckpt_buf_release(&header);
    return status;
}
