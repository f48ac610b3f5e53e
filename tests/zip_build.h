/* Test helpers: zip archives spelled entry by entry, and a source whose one file is in memory. */
#ifndef CKPT_ZIP_BUILD_H
#define CKPT_ZIP_BUILD_H

#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "le.h"
#include "source.h"

typedef struct zip_part {
    const char *name;
    const void *data;
    size_t n;
    bool deflate;
    /* Lies; 0 means the truth. */
    uint32_t usize, csize, local, crc;
    uint16_t flags, method;
} zip_part;

static inline void zb16(ckpt_buf *b, unsigned v)
{
    uint8_t p[2];
    ckpt_put_u16(p, (uint16_t)v);
    ckpt_buf_append(b, p, sizeof p);
}

static inline void zb32(ckpt_buf *b, size_t v)
{
    uint8_t p[4];
    ckpt_put_u32(p, (uint32_t)v);
    ckpt_buf_append(b, p, sizeof p);
}

static inline void zb64(ckpt_buf *b, uint64_t v)
{
    uint8_t p[8];
    ckpt_put_u64(p, v);
    ckpt_buf_append(b, p, sizeof p);
}

static inline void zip_end(ckpt_buf *b, size_t entries, size_t cd_size, size_t cd_offset)
{
    ckpt_buf_append(b, "PK\5\6\0\0\0\0", 8);
    zb16(b, (unsigned)entries);
    zb16(b, (unsigned)entries);
    zb32(b, cd_size);
    zb32(b, cd_offset);
    zb16(b, 0);
}

static inline void zip_deflate(ckpt_buf *out, const void *data, size_t n)
{
    z_stream z = {0};
    ck_assert_int_eq(deflateInit2(&z, 9, Z_DEFLATED, -MAX_WBITS, 9, Z_DEFAULT_STRATEGY), Z_OK);
    size_t bound = deflateBound(&z, n);
    uint8_t *p = malloc(bound), *in = malloc(n ? n : 1);
    memcpy(in, data, n);
    z.next_in = in;
    z.avail_in = (uInt)n;
    z.next_out = p;
    z.avail_out = (uInt)bound;
    ck_assert_int_eq(deflate(&z, Z_FINISH), Z_STREAM_END);
    ckpt_buf_append(out, p, bound - z.avail_out);
    deflateEnd(&z);
    free(p);
    free(in);
}

/* Local headers carry true sizes; lies go into the central directory. Up to 64 parts. */
static inline void zip_build(ckpt_buf *b, const zip_part *parts, size_t n)
{
    size_t local[64], csize[64];
    ck_assert_uint_le(n, 64);
    for (size_t i = 0; i < n; i++) {
        ckpt_buf packed = {0};
        if (parts[i].deflate)
            zip_deflate(&packed, parts[i].data, parts[i].n);
        else
            ckpt_buf_append(&packed, parts[i].data, parts[i].n);
        local[i] = b->len;
        csize[i] = packed.len;
        ckpt_buf_append(b, "PK\3\4\24\0\0\10", 8);
        zb16(b, parts[i].deflate ? 8 : 0);
        zb32(b, 0);
        zb32(b, crc32_z(0, parts[i].data, parts[i].n));
        zb32(b, packed.len);
        zb32(b, parts[i].n);
        zb16(b, (unsigned)strlen(parts[i].name));
        zb16(b, 0);
        ckpt_buf_puts(b, parts[i].name);
        ckpt_buf_append(b, packed.data, packed.len);
        ckpt_buf_release(&packed);
    }
    size_t cd = b->len;
    for (size_t i = 0; i < n; i++) {
        const zip_part *p = &parts[i];
        ckpt_buf_append(b, "PK\1\2\24\0\24\0", 8);
        zb16(b, p->flags ? p->flags : 0x0800);
        zb16(b, p->method ? p->method : p->deflate ? 8 : 0);
        zb32(b, 0);
        zb32(b, p->crc ? p->crc : crc32_z(0, p->data, p->n));
        zb32(b, p->csize ? p->csize : csize[i]);
        zb32(b, p->usize ? p->usize : p->n);
        zb16(b, (unsigned)strlen(p->name));
        zb32(b, 0);
        zb64(b, 0);
        zb32(b, p->local ? p->local : local[i]);
        ckpt_buf_puts(b, p->name);
    }
    zip_end(b, n, b->len - cd, cd);
    ck_assert(!b->failed);
}

typedef struct memory_source {
    ckpt_source src;
    ckpt_file file;
    const uint8_t *data;
} memory_source;

static inline ckpt_status memory_read(ckpt_source *src, uint32_t file, void *buf, size_t n,
                                      uint64_t offset, ckpt_err *err)
{
    const memory_source *m = src->self;
    (void)file;
    if (offset > m->file.size || n > m->file.size - offset)
        return ckpt_fail(err, CKPT_E_IO, "unexpected end of file");
    memcpy(buf, m->data + offset, n);
    return CKPT_OK;
}

static inline void memory_open(memory_source *m, const void *data, size_t n)
{
    memset(m, 0, sizeof *m);
    m->data = data;
    m->file = (ckpt_file){.name = "memory", .path = "memory", .size = n, .fd = -1, .is_data = true};
    m->src.files = &m->file;
    m->src.n_files = 1;
    m->src.read_at = memory_read;
    m->src.self = m;
}

static inline void memory_close(memory_source *m)
{
    ckpt_arena_free(&m->src.arena);
}

#endif
