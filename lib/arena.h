/* Bump allocator and growable byte buffer.
 *
 * An arena owns everything allocated from it and is freed at once; individual frees do not exist.
 * Allocations are zeroed and 16-byte aligned. A zero-initialised ckpt_arena is valid and empty.
 * Not thread-safe. All allocation functions return NULL only when memory is exhausted. */
#ifndef CKPT_ARENA_H
#define CKPT_ARENA_H

#include "err.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ckpt_arena {
    struct ckpt_arena_block *head;
    size_t total; /* bytes obtained from malloc */
} ckpt_arena;

void *ckpt_arena_alloc(ckpt_arena *arena, size_t size);
/* count * size with overflow check. */
void *ckpt_arena_array(ckpt_arena *arena, size_t count, size_t size);
char *ckpt_arena_strndup(ckpt_arena *arena, const char *s, size_t n);
char *ckpt_arena_strdup(ckpt_arena *arena, const char *s);
char *ckpt_arena_printf(ckpt_arena *arena, const char *fmt, ...) CKPT_PRINTF(2, 3);
void *ckpt_arena_memdup(ckpt_arena *arena, const void *p, size_t n);
void ckpt_arena_free(ckpt_arena *arena);

/* Growable byte string. Zero-initialise; data stays NUL-terminated after any append (the NUL is
 * not counted). On exhausted memory `failed` is set, later appends do nothing and the contents
 * stay valid: check once at the end. */
typedef struct ckpt_buf {
    uint8_t *data;
    size_t len, cap;
    bool failed;
} ckpt_buf;

void ckpt_buf_append(ckpt_buf *buf, const void *p, size_t n);
void ckpt_buf_puts(ckpt_buf *buf, const char *s);
void ckpt_buf_putc(ckpt_buf *buf, int c);
void ckpt_buf_printf(ckpt_buf *buf, const char *fmt, ...) CKPT_PRINTF(2, 3);
void ckpt_buf_vprintf(ckpt_buf *buf, const char *fmt, va_list ap) CKPT_PRINTF(2, 0);
/* Reserve n writable bytes at the end and return them, or NULL. len grows by n. */
uint8_t *ckpt_buf_extend(ckpt_buf *buf, size_t n);
void ckpt_buf_clear(ckpt_buf *buf);
void ckpt_buf_release(ckpt_buf *buf);

/* A hint to back what lies in [p, p + n) of whole 2 MiB with large pages: a program that walks through
 * hundreds of megabytes spends a few per cent less on address translation. */
void ckpt_large_pages(void *p, size_t n);

/* Grow a malloc'd array by doubling so that it holds at least `need` elements. */
ckpt_status ckpt_grow(void **array, size_t *cap, size_t need, size_t elem,
                      ckpt_err *err) CKPT_MUST_USE;

#endif
