/* Bump allocator and growable buffer. Blocks double up to 4 MiB so that a million small records
 * cost few mallocs; a request larger than a block gets its own behind the current one, so that the
 * space left in the current block is not lost. */
#include "arena.h"

#include "checked.h"

#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ARENA_ALIGN 16
#define ARENA_FIRST_BLOCK ((size_t)4 << 10)
#define ARENA_MAX_BLOCK ((size_t)4 << 20)

#if defined(__SANITIZE_ADDRESS__)
#define CKPT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CKPT_ASAN 1
#endif
#endif
#ifdef CKPT_ASAN
#include <sanitizer/asan_interface.h>
#define POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
/* Space between allocations that stays poisoned, so that overruns are caught. */
#define ARENA_GAP ARENA_ALIGN
#else
#define POISON(p, n) ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#define ARENA_GAP 0
#endif

struct ckpt_arena_block {
    struct ckpt_arena_block *next;
    size_t used, size; /* bytes of data */
    alignas(ARENA_ALIGN) unsigned char data[];
};

static struct ckpt_arena_block *new_block(ckpt_arena *arena, size_t size)
{
    size_t bytes;
    if (__builtin_add_overflow(size, sizeof(struct ckpt_arena_block), &bytes))
        return NULL;
    /* calloc: large blocks then come from fresh pages and are not touched before use. */
    struct ckpt_arena_block *block = calloc(1, bytes);
    if (block == NULL)
        return NULL;
    block->size = size;
    arena->total += bytes;
    POISON(block->data, size);
    return block;
}

void *ckpt_arena_alloc(ckpt_arena *arena, size_t size)
{
    if (size > SIZE_MAX - 4 * ARENA_ALIGN)
        return NULL;
    size_t take = (size + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    if (take == 0)
        take = ARENA_ALIGN;
    take += ARENA_GAP;
    struct ckpt_arena_block *block = arena->head;
    if (block == NULL || block->size - block->used < take) {
        size_t want = block == NULL ? ARENA_FIRST_BLOCK : block->size * 2;
        if (want > ARENA_MAX_BLOCK)
            want = ARENA_MAX_BLOCK;
        bool own = take > want / 2 && block != NULL;
        struct ckpt_arena_block *fresh = new_block(arena, own || take > want ? take : want);
        if (fresh == NULL)
            return NULL;
        if (own) {
            fresh->next = block->next;
            block->next = fresh;
        } else {
            fresh->next = block;
            arena->head = fresh;
        }
        block = fresh;
    }
    void *p = block->data + block->used;
    block->used += take;
    UNPOISON(p, size);
    return p;
}

void *ckpt_arena_array(ckpt_arena *arena, size_t count, size_t size)
{
    size_t bytes;
    return ckpt_mul_size(count, size, &bytes) ? ckpt_arena_alloc(arena, bytes) : NULL;
}

void *ckpt_arena_memdup(ckpt_arena *arena, const void *p, size_t n)
{
    void *copy = ckpt_arena_alloc(arena, n);
    if (copy != NULL && n != 0)
        memcpy(copy, p, n);
    return copy;
}

char *ckpt_arena_strndup(ckpt_arena *arena, const char *s, size_t n)
{
    if (n == SIZE_MAX)
        return NULL;
    char *copy = ckpt_arena_alloc(arena, n + 1);
    if (copy != NULL && n != 0)
        memcpy(copy, s, n);
    return copy;
}

char *ckpt_arena_strdup(ckpt_arena *arena, const char *s)
{
    return ckpt_arena_strndup(arena, s, strlen(s));
}

char *ckpt_arena_printf(ckpt_arena *arena, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char *s = n < 0 ? NULL : ckpt_arena_alloc(arena, (size_t)n + 1);
    if (s != NULL)
        (void)vsnprintf(s, (size_t)n + 1, fmt, again);
    va_end(again);
    return s;
}

void ckpt_arena_free(ckpt_arena *arena)
{
    struct ckpt_arena_block *block = arena->head;
    while (block != NULL) {
        struct ckpt_arena_block *next = block->next;
        UNPOISON(block->data, block->size);
        free(block);
        block = next;
    }
    arena->head = NULL;
    arena->total = 0;
}

/* Room for n more bytes and the NUL. */
static bool buf_reserve(ckpt_buf *buf, size_t n)
{
    if (buf->failed)
        return false;
    if (n < buf->cap && buf->len < buf->cap - n)
        return true;
    size_t need;
    if (__builtin_add_overflow(buf->len, n, &need) || need > SIZE_MAX / 2 - 1) {
        buf->failed = true;
        return false;
    }
    need++;
    size_t cap = buf->cap < 64 ? 64 : buf->cap;
    while (cap < need)
        cap *= 2;
    uint8_t *grown = realloc(buf->data, cap);
    if (grown == NULL) {
        buf->failed = true;
        return false;
    }
    buf->data = grown;
    buf->cap = cap;
    return true;
}

uint8_t *ckpt_buf_extend(ckpt_buf *buf, size_t n)
{
    if (!buf_reserve(buf, n))
        return NULL;
    uint8_t *p = buf->data + buf->len;
    buf->len += n;
    buf->data[buf->len] = 0;
    return p;
}

void ckpt_buf_append(ckpt_buf *buf, const void *p, size_t n)
{
    uint8_t *dst = ckpt_buf_extend(buf, n);
    if (dst != NULL && n != 0)
        memcpy(dst, p, n);
}

void ckpt_buf_puts(ckpt_buf *buf, const char *s)
{
    ckpt_buf_append(buf, s, strlen(s));
}

void ckpt_buf_putc(ckpt_buf *buf, int c)
{
    uint8_t *dst = ckpt_buf_extend(buf, 1);
    if (dst != NULL)
        *dst = (uint8_t)c;
}

void ckpt_buf_vprintf(ckpt_buf *buf, const char *fmt, va_list ap)
{
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    if (n < 0) {
        buf->failed = true;
    } else if (buf_reserve(buf, (size_t)n)) {
        (void)vsnprintf((char *)buf->data + buf->len, (size_t)n + 1, fmt, again);
        buf->len += (size_t)n;
    }
    va_end(again);
}

void ckpt_buf_printf(ckpt_buf *buf, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    ckpt_buf_vprintf(buf, fmt, ap);
    va_end(ap);
}

void ckpt_buf_clear(ckpt_buf *buf)
{
    buf->len = 0;
    buf->failed = false;
    if (buf->data != NULL)
        buf->data[0] = 0;
}

void ckpt_buf_release(ckpt_buf *buf)
{
    free(buf->data);
    *buf = (ckpt_buf){0};
}

ckpt_status ckpt_grow(void **array, size_t *cap, size_t need, size_t elem, ckpt_err *err)
{
    if (need <= *cap)
        return CKPT_OK;
    size_t grown = *cap < 8 ? 8 : *cap, bytes;
    while (grown < need)
        if (!ckpt_mul_size(grown, 2, &grown))
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu elements", need);
    if (!ckpt_mul_size(grown, elem, &bytes))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu elements", need);
    void *p = realloc(*array, bytes);
    if (p == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory (%zu bytes)", bytes);
    *array = p;
    *cap = grown;
    return CKPT_OK;
}

void ckpt_large_pages(void *p, size_t n)
{
    const uintptr_t page = (uintptr_t)2 << 20;
    uintptr_t first = ((uintptr_t)p + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)p + n) / page * page;
    if (first < end)
        (void)madvise((char *)p + (first - (uintptr_t)p), end - first, MADV_HUGEPAGE);
}
