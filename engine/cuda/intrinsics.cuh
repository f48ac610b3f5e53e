/* The instructions behind tile.cuh, for nvcc. tests/gpu/emulate.h has the same names for a CPU. */
#ifndef CKPT_CUDA_INTRINSICS_CUH
#define CKPT_CUDA_INTRINSICS_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#define DEV __device__ __forceinline__
#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]
#define LAUNCH(kernel, grid, block, smem, stream, ...)                                             \
    kernel<<<(unsigned)(grid), (block), (smem), (stream)>>>(__VA_ARGS__)

namespace kda
{

typedef uint4 words;

DEV int lane()
{
    return (int)(threadIdx.x & 31);
}
DEV float bits_to_float(uint32_t x)
{
    return __uint_as_float(x);
}
/* x in the low half; round to nearest even. */
DEV uint32_t pack_bf16(float x, float y)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
}
DEV void load_pair(const float *p, float &x, float &y)
{
    const float2 v = *(const float2 *)p;
    x = v.x;
    y = v.y;
}
DEV void store_pair(float *p, float x, float y)
{
    *(float2 *)p = make_float2(x, y);
}
DEV uint32_t to_tf32(float x)
{
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
/* 2^x, two units in the last place; 0 below the normal range. */
DEV float ex2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
/* 1 / x within one unit in the last place; 0 below the normal range. */
DEV float reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEV uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
DEV void ldmatrix(uint32_t (&r)[4], const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}
DEV void ldmatrix_t(uint32_t (&r)[4], const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}
DEV void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* 16 bytes from global to shared memory, or zeros; p is not read then but must be an address. */
DEV void copy_async(void *to, const void *from, bool wanted)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
}
/* 4 bytes likewise. */
DEV void copy_async4(void *to, const void *from, bool wanted)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(wanted ? 4 : 0)
                 : "memory");
}
DEV void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> DEV void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
/* Bulk copies (sm_90): one thread copies, a barrier in shared memory counts the bytes. On older cards
 * every thread copies its part with copy_async and the barrier does nothing. */
DEV void bar_init(uint64_t *b)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(b)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEV void bar_expect(uint64_t *b, int bytes)
{
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                     "r"(bytes)
                     : "memory");
#endif
}
/* Of a multiple of 16 bytes, by THREADS threads. */
template <int THREADS> DEV void bulk_copy(void *to, const void *from, int bytes, uint64_t *b)
{
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
            "%2, [%3];" ::"r"(shared_address(to)),
            "l"(from), "r"(bytes), "r"(shared_address(b))
            : "memory");
#else
    for (int i = (int)threadIdx.x * 16; i < bytes; i += THREADS * 16)
        copy_async((char *)to + i, (const char *)from + i, true);
#endif
}
DEV void bar_wait(uint64_t *b, int parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nagain_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@p bra done_%=;\nbra again_%=;\ndone_%=:\n}" ::"r"(shared_address(b)),
                 "r"(parity)
                 : "memory");
#endif
}
/* A gate opens, phase by phase, when `count` threads have arrived; what they wrote before is then seen. */
DEV void gate_init(uint64_t *b, int count)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEV void gate_arrive(uint64_t *b)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
#endif
}
/* Until the phase of this parity is over: 1 does not wait for the first. */
DEV void gate_wait(uint64_t *b, int parity)
{
    bar_wait(b, parity);
}
DEV float shuffle_xor(float x, int mask)
{
    return __shfl_xor_sync(0xffffffffu, x, mask);
}
/* Of lane `from`. */
DEV double shuffle_from(double x, int from)
{
    return __shfl_sync(0xffffffffu, x, from);
}
DEV uint32_t largest_of_warp(uint32_t x)
{
    return __reduce_max_sync(0xffffffffu, x);
}
/* *p becomes the larger of it and x: the same in whatever order threads come. */
DEV void raise_to(uint32_t *p, uint32_t x)
{
    atomicMax(p, x);
}
DEV void raise_to(unsigned long long *p, unsigned long long x)
{
    atomicMax(p, x);
}
/* a b + c rounded once, also where contraction is off. */
DEV float fused(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}
DEV double fused(double a, double b, double c)
{
    return __fma_rn(a, b, c);
}
DEV void sync_block()
{
    __syncthreads();
}
DEV void sync_warp()
{
    __syncwarp();
}

} // namespace kda

#endif
