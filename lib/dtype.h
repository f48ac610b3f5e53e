/* Element types: one table, and exact scalar conversion.
 *
 * The enum order is the safetensors serializer's (descending in its own enum), so that sorting by
 * it is sorting as that serializer does. Names: `name` is the safetensors spelling and the one that
 * enters digests; `torch` is the attribute of the torch module ("float32"), NULL if none;
 * `storage` is the torch.save typed storage class ("FloatStorage"), NULL if the dtype needs
 * UntypedStorage and _rebuild_tensor_v3. */
#ifndef CKPT_DTYPE_H
#define CKPT_DTYPE_H

#include "err.h"

#include <stddef.h>
#include <stdint.h>

typedef enum ckpt_dtype {
    CKPT_C128, /* torch only: safetensors has no such type */
    CKPT_U64,
    CKPT_I64,
    CKPT_F64,
    CKPT_C64,
    CKPT_F32,
    CKPT_U32,
    CKPT_I32,
    CKPT_C32, /* torch.complex32: torch only */
    CKPT_BF16,
    CKPT_F16,
    CKPT_U16,
    CKPT_I16,
    CKPT_F8_E5M2FNUZ,
    CKPT_F8_E4M3FNUZ,
    CKPT_F8_E8M0,
    CKPT_F8_E4M3,
    CKPT_F8_E5M2,
    CKPT_I8,
    CKPT_U8,
    CKPT_F6_E3M2,
    CKPT_F6_E2M3,
    CKPT_F4,
    CKPT_BOOL,
    CKPT_DTYPE_COUNT
} ckpt_dtype;

typedef enum ckpt_dtype_kind {
    CKPT_KIND_FLOAT,
    CKPT_KIND_INT,
    CKPT_KIND_UINT,
    CKPT_KIND_BOOL,
    CKPT_KIND_COMPLEX
} ckpt_dtype_kind;

typedef struct ckpt_dtype_info {
    const char *name;    /* "BF16" */
    const char *torch;   /* "bfloat16" */
    const char *storage; /* "BFloat16Storage" or NULL */
    int bits;
    ckpt_dtype_kind kind;
    bool safetensors; /* the safetensors format can hold it */
    /* Shape of a float format, for conversion; 0 for non-floats. */
    int exp_bits, man_bits, bias;
} ckpt_dtype_info;

const ckpt_dtype_info *ckpt_dtype_get(ckpt_dtype dtype);
/* safetensors name, length n; exact case. */
bool ckpt_dtype_from_name(const char *name, size_t n, ckpt_dtype *out);
/* torch attribute name ("bfloat16", "float8_e4m3fn", "half" is not accepted). */
bool ckpt_dtype_from_torch(const char *name, ckpt_dtype *out);
/* typed storage class name ("HalfStorage"). */
bool ckpt_dtype_from_storage(const char *name, ckpt_dtype *out);

/* Bytes of n elements; false on overflow or when n * bits is not a multiple of 8. */
bool ckpt_dtype_bytes(ckpt_dtype dtype, int64_t n, uint64_t *out);

/* True if ckpt_dtype_cast can convert between the two: F64 F32 F16 BF16 F8_* in any pair. */
bool ckpt_dtype_castable(ckpt_dtype from, ckpt_dtype to);
/* Convert n elements, rounding to nearest even once. NaN stays NaN, with its sign and leading
 * payload bits where the format has them, so that widening and narrowing back is exact; infinities
 * and overflow become infinity where the target has it, else NaN; subnormals are exact. F8_E8M0 as
 * a target keeps only powers of two: other values round to the nearest, 1.5 * 2^e up, positive
 * values below 2^-127 to 2^-127; zero and negatives become NaN (torch drops signs and gives
 * 2^-127). Any alignment. src and dst must not overlap. */
void ckpt_dtype_cast(ckpt_dtype to, void *dst, ckpt_dtype from, const void *src, size_t n);

/* One element as double (integers above 2^53 round; complex gives the real part), for display,
 * statistics and diff. `index` counts elements; sub-byte types are packed low bits first. */
double ckpt_dtype_load(ckpt_dtype dtype, const void *data, int64_t index);

#endif
