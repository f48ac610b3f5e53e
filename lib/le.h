/* Little-endian access through memcpy; the only way bytes on disk become integers. */
#ifndef CKPT_LE_H
#define CKPT_LE_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ckpt supports little-endian hosts only"
#endif

static inline uint16_t ckpt_get_u16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint32_t ckpt_get_u32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint64_t ckpt_get_u64(const void *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void ckpt_put_u16(void *p, uint16_t v)
{
    memcpy(p, &v, sizeof v);
}

static inline void ckpt_put_u32(void *p, uint32_t v)
{
    memcpy(p, &v, sizeof v);
}

static inline void ckpt_put_u64(void *p, uint64_t v)
{
    memcpy(p, &v, sizeof v);
}

#endif
