/* The CUDA kernels' instructions on a CPU: every thread of a block is a fiber, blocks run one after
 * the other, and mma, ldmatrix, shuffles and barriers exchange data between fibers as the PTX manual
 * says. Asynchronous copies land only when they are waited for, shared memory starts as NaN, so a
 * missing wait or an unwritten tile shows as NaN. Slow, exact about data flow, blind to data races.
 * Work that is captured (engine/cuda/graph.h) is kept with the arguments it was launched with and runs when
 * its graph is launched. */
#ifndef CKPT_TEST_EMULATE_H
#define CKPT_TEST_EMULATE_H

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <ucontext.h>
#include <vector>

#define DEV inline
#define KERNEL(threads, blocks) static void
#define SHARED_MEMORY(name) unsigned char *name = emu::shared()
#define LAUNCH(kernel, grid, block, smem, stream, ...)                                             \
    ((void)(stream),                                                                               \
     emu::launch((unsigned)(grid), (block), (smem), emu::bound(kernel, __VA_ARGS__)))

struct emu_index {
    unsigned x;
};
inline emu_index threadIdx, blockIdx;
inline int emulated_shared_memory = 227 << 10; /* of a block, as on an H200 */
inline int emulated_multiprocessors = 8;       /* few, so that small cases fill them */

namespace emu
{

struct copy {
    void *to;
    const void *from;
    bool wanted;
    size_t bytes;
};
struct fiber {
    ucontext_t start;
    void *at[5];
    bool started, done, waiting;
    std::vector<std::vector<copy>> groups; /* committed, oldest first */
    std::vector<copy> open;
};
struct slot {
    uint32_t w[8];
    const void *p;
};
struct bulk {
    void *to;
    const void *from;
    int bytes;
};
struct bar {
    int phase = 0, expected = 0;
    std::vector<bulk> copies;
};
struct gate {
    int phase = 0, count = 0, arrived = 0;
};
struct block {
    std::map<uint64_t *, bar> bars;
    std::map<uint64_t *, gate> gates;
    std::vector<fiber> fibers;
    std::vector<slot> slots;
    std::vector<unsigned> warp_count;
    unsigned threads, count, live;
    std::vector<unsigned char> memory;
    std::vector<std::vector<char>> stacks;
    std::function<void()> body;
    void *scheduler[5];
};
inline block b;

inline unsigned char *shared()
{
    return (unsigned char *)(((uintptr_t)b.memory.data() + 127) / 128 * 128);
}
/* The builtins are not watched by sanitizers, which know no fibers. They must not jump within the
 * function that set the mark. */
__attribute__((noinline)) inline void jump(void **to)
{
    __builtin_longjmp(to, 1);
}
__attribute__((noinline)) inline void yield()
{
    if (!__builtin_setjmp(b.fibers[threadIdx.x].at))
        jump(b.scheduler);
}
inline void barrier(unsigned first, unsigned n, unsigned &count)
{
    if (++count == n) {
        count = 0;
        for (unsigned i = first; i < first + n; i++)
            b.fibers[i].waiting = false;
        return;
    }
    fiber &f = b.fibers[threadIdx.x];
    f.waiting = true;
    while (f.waiting)
        yield();
}
inline void warp_barrier()
{
    unsigned w = threadIdx.x / 32;
    barrier(32 * w, 32, b.warp_count[w]);
}
/* A fiber lives on from block to block: starting one takes two calls of the system. */
inline void entry()
{
    for (;;) {
        b.body();
        b.fibers[threadIdx.x].done = true;
        b.live--;
        yield();
    }
}
__attribute__((noinline)) inline void resume(fiber &f)
{
    if (__builtin_setjmp(b.scheduler))
        return;
    if (f.started)
        jump(f.at);
    f.started = true;
    setcontext(&f.start);
}
inline void run_block(unsigned threads)
{
    b.live = threads;
    b.count = 0;
    b.bars.clear();
    b.gates.clear();
    std::memset(b.memory.data(), 0xff, b.memory.size());
    for (unsigned i = 0; i < threads; i++) {
        fiber &f = b.fibers[i];
        f.done = f.waiting = false;
        f.groups.clear();
        f.open.clear();
        if (f.started)
            continue;
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = b.stacks[i].data();
        f.start.uc_stack.ss_size = b.stacks[i].size();
        f.start.uc_link = nullptr;
        makecontext(&f.start, entry, 0);
    }
    while (b.live) {
        bool moved = false;
        for (unsigned i = 0; i < threads; i++) {
            fiber &f = b.fibers[i];
            if (f.done || f.waiting)
                continue;
            moved = true;
            threadIdx.x = i;
            resume(f);
        }
        if (!moved)
            std::abort(); /* a barrier that not all threads reach */
    }
}
/* What this thread captures, in order; NULL: work runs at once. */
typedef std::vector<std::function<void()>> work_list;
inline thread_local work_list *captured;
inline void perform(std::function<void()> work)
{
    if (captured)
        captured->push_back(work);
    else
        work();
}
/* A kernel with its arguments, converted and copied as a launch does. */
template <class T> struct same {
    typedef T type;
};
template <class... P>
std::function<void()> bound(void (*kernel)(P...), typename same<P>::type... arguments)
{
    return [=] { kernel(arguments...); };
}
inline void run_grid(unsigned grid, unsigned threads, size_t smem, std::function<void()> body)
{
    if (b.fibers.size() < threads) {
        b.fibers.resize(threads);
        b.stacks.resize(threads);
    }
    for (auto &s : b.stacks)
        s.resize(64 << 10);
    b.threads = threads;
    b.slots.assign(threads, slot());
    b.warp_count.assign(threads / 32, 0);
    b.memory.assign(smem + 128, 0);
    b.body = body;
    for (unsigned i = 0; i < grid; i++) {
        blockIdx.x = i;
        run_block(threads);
    }
}
inline void launch(unsigned grid, unsigned threads, size_t smem, std::function<void()> body)
{
    perform([=] { run_grid(grid, threads, smem, body); });
}
inline float f_of(uint32_t x)
{
    float r;
    std::memcpy(&r, &x, 4);
    return r;
}
inline uint32_t u_of(float x)
{
    uint32_t r;
    std::memcpy(&r, &x, 4);
    return r;
}
inline float half_of(uint32_t w, int i)
{
    return f_of(i ? w & 0xffff0000u : w << 16);
}
inline uint32_t bf16_of(float x)
{
    uint32_t u = u_of(x);
    if (x != x)
        return u >> 16 | 0x40;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline void land(fiber &f, size_t keep)
{
    while (f.groups.size() > keep) {
        for (const copy &c : f.groups.front()) {
            if (c.wanted)
                std::memcpy(c.to, c.from, c.bytes);
            else
                std::memset(c.to, 0, c.bytes);
        }
        f.groups.erase(f.groups.begin());
    }
}

} // namespace emu

namespace kda
{

struct words {
    uint32_t w[4];
};
inline int lane()
{
    return (int)(threadIdx.x & 31);
}
inline float bits_to_float(uint32_t x)
{
    return emu::f_of(x);
}
inline uint32_t pack_bf16(float x, float y)
{
    return emu::bf16_of(x) | emu::bf16_of(y) << 16;
}
inline void load_pair(const float *p, float &x, float &y)
{
    if ((uintptr_t)p % 8)
        std::abort();
    x = p[0];
    y = p[1];
}
inline void store_pair(float *p, float x, float y)
{
    if ((uintptr_t)p % 8)
        std::abort();
    p[0] = x;
    p[1] = y;
}
inline uint32_t to_tf32(float x)
{
    return (emu::u_of(x) + 0x1000) & ~0x1fffu;
}
inline float ex2(float x)
{
    float r = exp2f(x);
    return r < 1.17549435e-38f ? 0.f : r;
}
inline float reciprocal(float x)
{
    return 1.f / x;
}
inline emu::slot *warp_slots()
{
    return &emu::b.slots[threadIdx.x / 32 * 32];
}
inline void load_matrices(uint32_t (&r)[4], const void *p, bool transposed)
{
    emu::slot *s = warp_slots();
    s[lane()].p = p;
    emu::warp_barrier();
    const int row = lane() / 4, col = lane() % 4 * 2;
    for (int m = 0; m < 4; m++) {
        uint16_t lo, hi;
        if ((uintptr_t)s[8 * m].p % 16)
            std::abort();
        if (transposed) {
            lo = ((const uint16_t *)s[8 * m + col].p)[row];
            hi = ((const uint16_t *)s[8 * m + col + 1].p)[row];
        } else {
            lo = ((const uint16_t *)s[8 * m + row].p)[col];
            hi = ((const uint16_t *)s[8 * m + row].p)[col + 1];
        }
        r[m] = lo | (uint32_t)hi << 16;
    }
    emu::warp_barrier();
}
inline void ldmatrix(uint32_t (&r)[4], const void *p)
{
    load_matrices(r, p, false);
}
inline void ldmatrix_t(uint32_t (&r)[4], const void *p)
{
    load_matrices(r, p, true);
}
inline void mma_any(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half)
{
    emu::slot *s = warp_slots(), &own = s[lane()];
    std::memcpy(own.w, a, 16);
    own.w[4] = b0;
    own.w[5] = b1;
    emu::warp_barrier();
    const int g = lane() / 4, t = lane() % 4;
    for (int e = 0; e < 4; e++) {
        const int row = g + 8 * (e / 2), col = 2 * t + e % 2;
        float sum = 0;
        for (int k = 0; k < (half ? 16 : 8); k++) {
            if (half) {
                const int quad = k % 8 / 2, high = k / 8;
                sum += emu::half_of(s[row % 8 * 4 + quad].w[row / 8 + 2 * high], k & 1) *
                       emu::half_of(s[col * 4 + quad].w[4 + high], k & 1);
            } else {
                sum += emu::f_of(s[row % 8 * 4 + k % 4].w[row / 8 + 2 * (k / 4)]) *
                       emu::f_of(s[col * 4 + k % 4].w[4 + k / 4]);
            }
        }
        c[e] += sum;
    }
    emu::warp_barrier();
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma_any(c, a, b0, b1, true);
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma_any(c, a, b0, b1, false);
}
inline void copy_of(void *to, const void *from, bool wanted, size_t bytes)
{
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes)
        std::abort();
    emu::b.fibers[threadIdx.x].open.push_back({to, from, wanted, bytes});
}
inline void copy_async(void *to, const void *from, bool wanted)
{
    copy_of(to, from, wanted, 16);
}
inline void copy_async4(void *to, const void *from, bool wanted)
{
    copy_of(to, from, wanted, 4);
}
inline void copy_commit()
{
    emu::fiber &f = emu::b.fibers[threadIdx.x];
    f.groups.push_back(f.open);
    f.open.clear();
}
template <int N> inline void copy_wait()
{
    emu::land(emu::b.fibers[threadIdx.x], N);
}
inline void bar_init(uint64_t *b)
{
    emu::b.bars[b] = emu::bar();
}
inline void bar_expect(uint64_t *b, int bytes)
{
    if (threadIdx.x == 0)
        emu::b.bars.at(b).expected += bytes;
}
template <int THREADS> inline void bulk_copy(void *to, const void *from, int bytes, uint64_t *b)
{
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16)
        std::abort();
    if (threadIdx.x == 0)
        emu::b.bars.at(b).copies.push_back({to, from, bytes});
}
/* The copies land when their phase is first waited for; a wait for nothing would hang a card. */
inline void bar_wait(uint64_t *b, int parity)
{
    emu::bar &x = emu::b.bars.at(b);
    for (int turns = 0; x.phase == parity && x.copies.empty(); turns++) {
        if (turns == 1000)
            std::abort();
        emu::yield();
    }
    if (x.phase != parity)
        return;
    for (const emu::bulk &c : x.copies) {
        std::memcpy(c.to, c.from, (size_t)c.bytes);
        x.expected -= c.bytes;
    }
    if (x.expected != 0)
        std::abort();
    x.copies.clear();
    x.phase ^= 1;
}
inline void gate_init(uint64_t *b, int count)
{
    emu::b.gates[b].count = count;
}
inline void gate_arrive(uint64_t *b)
{
    emu::gate &x = emu::b.gates.at(b);
    if (++x.arrived == x.count)
        x.arrived = 0, x.phase ^= 1;
}
/* Nobody else moving for long would hang a card. */
inline void gate_wait(uint64_t *b, int parity)
{
    const emu::gate &x = emu::b.gates.at(b);
    for (int turns = 0; x.phase == parity; turns++) {
        if (turns == 100000)
            std::abort();
        emu::yield();
    }
}
inline float shuffle_xor(float x, int mask)
{
    emu::slot *s = warp_slots();
    s[lane()].w[6] = emu::u_of(x);
    emu::warp_barrier();
    float r = emu::f_of(s[lane() ^ mask].w[6]);
    emu::warp_barrier();
    return r;
}
inline double shuffle_from(double x, int from)
{
    emu::slot *s = warp_slots();
    std::memcpy(s[lane()].w, &x, sizeof x);
    emu::warp_barrier();
    double r;
    std::memcpy(&r, s[from].w, sizeof r);
    emu::warp_barrier();
    return r;
}
inline uint32_t largest_of_warp(uint32_t x)
{
    emu::slot *s = warp_slots();
    s[lane()].w[6] = x;
    emu::warp_barrier();
    uint32_t r = 0;
    for (int i = 0; i < 32; i++)
        r = s[i].w[6] > r ? s[i].w[6] : r;
    emu::warp_barrier();
    return r;
}
inline void raise_to(uint32_t *p, uint32_t x)
{
    *p = x > *p ? x : *p;
}
inline void raise_to(unsigned long long *p, unsigned long long x)
{
    *p = x > *p ? x : *p;
}
inline float fused(float a, float b, float c)
{
    return a * b + c;
}
inline double fused(double a, double b, double c)
{
    return a * b + c; /* of factors whose product is exact */
}
inline void sync_block()
{
    emu::barrier(0, emu::b.threads, emu::b.count);
}
inline void sync_warp()
{
    emu::warp_barrier();
}

} // namespace kda

#include "emulate_wgmma.h"

#endif
