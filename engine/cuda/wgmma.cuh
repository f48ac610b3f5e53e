/* Warpgroup products of sm_90a: 64 rows by N columns, one row of 16 a warp, operands in shared memory.
 * tests/gpu/emulate_wgmma.h has the same names for a CPU.
 *
 * A tile of R rows and D columns, D a multiple of 64, is D / 64 panels [R, 64] of 128-byte rows, each at a
 * multiple of 1024 bytes; the 16-byte pieces of a row are permuted by its number modulo 8 (the 128-byte
 * swizzle). The same tile serves as the side whose k is D (rows are rows of A or columns of B) and, with
 * KEYS, as the side B whose k is its rows and whose columns are D.
 * Accumulators: warp w of a warpgroup has rows 16 w + g and 16 w + g + 8, columns 8 n + 2 t and the next,
 * as tile.cuh's.
 * Source: PTX ISA, wgmma.mma_async, matrix descriptors and canonical layouts. */
#ifndef CKPT_CUDA_WGMMA_CUH
#define CKPT_CUDA_WGMMA_CUH

#include "tile.cuh"

#ifndef CKPT_CUDA_EMULATE /* else the emulator's header has brought them */

namespace kda
{

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define CKPT_CUDA_HAS_WGMMA 1
#endif

/* Whether what was built has these products for the current card: code for other cards takes less shared
 * memory here. */
template <int N> __global__ void warpgroup_probe()
{
#ifdef CKPT_CUDA_HAS_WGMMA
    __shared__ volatile char room[2 * N];
#else
    __shared__ volatile char room[N];
#endif
    room[threadIdx.x] = 0;
}
inline bool has_warpgroups()
{
    cudaFuncAttributes a;
    return cudaFuncGetAttributes(&a, (const void *)warpgroup_probe<64>) == cudaSuccess &&
           a.sharedSizeBytes >= 128;
}

typedef uint64_t matrix; /* a descriptor */

DEV unsigned char *align_panels(unsigned char *p)
{
    return p + ((1024 - (shared_address(p) & 1023)) & 1023);
}
/* next: bytes to the next 64 columns, where the columns of B are (KEYS). */
DEV matrix matrix_at(const void *p, int next)
{
    return (uint64_t)(shared_address(p) >> 4 & 0x3fff) | (uint64_t)(next >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
DEV matrix matrix_plus(matrix m, int bytes)
{
    return m + (uint64_t)(bytes >> 4);
}

#ifdef CKPT_CUDA_HAS_WGMMA

/* Registers a thread of this warpgroup has from here on; what the block was started with is divided anew. */
template <int N> DEV void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> DEV void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
/* Ordinary writes to shared memory become visible to products; before the barrier. */
DEV void products_see_writes()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* Registers written before are ready for the products that follow. */
DEV void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEV void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* All but the last N committed groups are done. */
template <int N> DEV void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* The compiler moves no use of these registers across. */
template <int NT> DEV void hold(float (&d)[NT][4])
{
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("" : "+f"(d[i][e])::"memory");
}
template <int K> DEV void hold(uint32_t (&a)[K][4])
{
#pragma unroll
    for (int i = 0; i < K; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("" : "+r"(a[i][e])::"memory");
}

/* d [64, N] = or += A B, k 16; KEYS: B's columns are contiguous, else its k. Asynchronous.
 *   shared      A [64, 16] in shared memory; ROWS: its rows are contiguous, else its k
 *   registers   A in registers, as mma.sync has it: a warp's 16 rows */
template <int N> struct wgmma;

/* clang-format off */
/* Registers of d as the instruction names them. */
#define WGMMA_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_24 WGMMA_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_32 WGMMA_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_64 WGMMA_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_96 WGMMA_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_128 WGMMA_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
/* The same as operands of asm: four of each of n tiles of 8 columns from tile i. */
#define WGMMA_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_D4(i) WGMMA_D(i), WGMMA_D(i + 1), WGMMA_D(i + 2), WGMMA_D(i + 3)
#define WGMMA_D6(i) WGMMA_D4(i), WGMMA_D(i + 4), WGMMA_D(i + 5)
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D16(i) WGMMA_D8(i), WGMMA_D8(i + 8)
#define WGMMA_D24(i) WGMMA_D16(i), WGMMA_D8(i + 16)
#define WGMMA_D32(i) WGMMA_D24(i), WGMMA_D8(i + 24)
/* clang-format on */

/* Of N columns: names and operands of d's N / 2 registers, then the numbers of the operands that follow. */
#define WGMMA(N, names, operands, i0, i1, i2, i3, i4, i5, i6)                                      \
    template <> struct wgmma<N> {                                                                  \
        template <bool KEYS, bool ROWS = false>                                                    \
        static DEV void shared(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool add)             \
        {                                                                                          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "               \
                         "{" names "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i4 ", %" #i3 ";\n}\n"      \
                         : operands                                                                \
                         : "l"(a), "l"(b), "r"((int)add), "n"(KEYS ? 1 : 0), "n"(ROWS ? 1 : 0));   \
        }                                                                                          \
        template <bool KEYS>                                                                       \
        static DEV void registers(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b,        \
                                  bool add)                                                        \
        {                                                                                          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "               \
                         "{" names "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4            \
                         ", p, 1, 1, %" #i6 ";\n}\n"                                               \
                         : operands                                                                \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add),      \
                           "n"(KEYS ? 1 : 0));                                                     \
        }                                                                                          \
    };
WGMMA(32, WGMMA_16, WGMMA_D4(0), 16, 17, 18, 19, 20, 21, 22)
WGMMA(48, WGMMA_24, WGMMA_D6(0), 24, 25, 26, 27, 28, 29, 30)
WGMMA(64, WGMMA_32, WGMMA_D8(0), 32, 33, 34, 35, 36, 37, 38)
WGMMA(128, WGMMA_64, WGMMA_D16(0), 64, 65, 66, 67, 68, 69, 70)
WGMMA(192, WGMMA_96, WGMMA_D24(0), 96, 97, 98, 99, 100, 101, 102)
WGMMA(256, WGMMA_128, WGMMA_D32(0), 128, 129, 130, 131, 132, 133, 134)

#endif

} // namespace kda

#endif
#endif
