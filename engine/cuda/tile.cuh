/* Warp-level matrix products on tiles in shared memory, written once for three arithmetics:
 *   bf16   mma.sync m16n8k16, operands through ldmatrix (sm_80 and later)
 *   tf32   mma.sync m16n8k8 on f32 operands
 *   float  FFMA on CUDA cores, the same accumulator layout, for parity
 *
 * An operand is an object: at(r, k) is its element, r a row of A or a column of B. Row and Col are
 * stored with k or r contiguous; any other object computes its elements and is packed on the way.
 * Accumulator acc[mt][nt][4] of lane 4 g + t holds rows 16 mt + g (0, 1) and 16 mt + g + 8 (2, 3),
 * columns 8 nt + 2 t and the next, as the PTX manual lays out .f32 fragments. */
#ifndef CKPT_CUDA_TILE_CUH
#define CKPT_CUDA_TILE_CUH

#include <stdint.h>

#ifdef CKPT_CUDA_EMULATE
#include CKPT_CUDA_EMULATE
#else
#include "intrinsics.cuh"
#endif

namespace kda
{

constexpr float LOG2E = 1.4426950408889634f; /* e^x is ex2(x LOG2E) */

/* ---- elements ------------------------------------------------------------------------------- */

struct bf16 {
    uint16_t x;
};
struct tf32 {
};

DEV float to_f(float x)
{
    return x;
}
DEV float to_f(bf16 x)
{
    return bits_to_float((uint32_t)x.x << 16);
}
template <class E> DEV E cast(float x);
template <> DEV float cast<float>(float x)
{
    return x;
}
template <> DEV bf16 cast<bf16>(float x)
{
    bf16 r;
    r.x = (uint16_t)pack_bf16(x, 0.f);
    return r;
}

struct pair {
    float x, y;
};
DEV pair load2(const float *p)
{
    pair r;
    load_pair(p, r.x, r.y);
    return r;
}
DEV pair load2(const bf16 *p)
{
    uint32_t w = *(const uint32_t *)p;
    return pair{bits_to_float(w << 16), bits_to_float(w & 0xffff0000u)};
}
DEV void store2(float *p, float x, float y)
{
    store_pair(p, x, y);
}
DEV void store2(bf16 *p, float x, float y)
{
    *(uint32_t *)p = pack_bf16(x, y);
}

/* 16 bytes of E as floats and back. */
template <class E> struct vec {
    static constexpr int n = 16 / (int)sizeof(E);
    E e[n];
};
template <class E> DEV vec<E> load16(const E *p)
{
    vec<E> r;
    *(words *)r.e = *(const words *)p;
    return r;
}
template <class E> DEV void store16(E *p, const vec<E> &v)
{
    *(words *)p = *(const words *)v.e;
}

/* 16 bytes of E by neighbours. */
template <class E> struct pairs {
    vec<E> v;
    DEV pairs()
    {
    }
    DEV explicit pairs(const E *p) : v(load16(p))
    {
    }
    DEV pair get(int j) const
    {
        return pair{to_f(v.e[2 * j]), to_f(v.e[2 * j + 1])};
    }
    DEV void put(int j, float x, float y)
    {
        v.e[2 * j] = cast<E>(x);
        v.e[2 * j + 1] = cast<E>(y);
    }
    DEV void store(E *p) const
    {
        store16(p, v);
    }
};
template <> struct pairs<bf16> {
    words w;
    DEV pairs()
    {
    }
    DEV explicit pairs(const bf16 *p) : w(*(const words *)p)
    {
    }
    DEV uint32_t &at(int j)
    {
        return ((uint32_t *)&w)[j];
    }
    DEV pair get(int j) const
    {
        const uint32_t x = ((const uint32_t *)&w)[j];
        return pair{bits_to_float(x << 16), bits_to_float(x & 0xffff0000u)};
    }
    DEV void put(int j, float x, float y)
    {
        at(j) = pack_bf16(x, y);
    }
    DEV void store(bf16 *p) const
    {
        *(words *)p = w;
    }
};
DEV void store4(float *p, const vec<float> &v)
{
    store16(p, v);
}
DEV void store4(bf16 *p, const vec<float> &v)
{
    store2(p, v.e[0], v.e[1]);
    store2(p + 2, v.e[2], v.e[3]);
}

/* ---- operands ------------------------------------------------------------------------------- */

template <class E> struct Row {
    const E *p;
    int ld;
    DEV float at(int r, int k) const
    {
        return to_f(p[(int64_t)r * ld + k]);
    }
};
template <class E> struct Col {
    const E *p;
    int ld;
    DEV float at(int r, int k) const
    {
        return to_f(p[(int64_t)k * ld + r]);
    }
};

template <class Op> DEV void frag_a(uint32_t (&a)[4], const Op &op, int m0, int k0)
{
    const int r = m0 + (lane() >> 2), k = k0 + 2 * (lane() & 3);
    a[0] = pack_bf16(op.at(r, k), op.at(r, k + 1));
    a[1] = pack_bf16(op.at(r + 8, k), op.at(r + 8, k + 1));
    a[2] = pack_bf16(op.at(r, k + 8), op.at(r, k + 9));
    a[3] = pack_bf16(op.at(r + 8, k + 8), op.at(r + 8, k + 9));
}
DEV void frag_a(uint32_t (&a)[4], const Row<bf16> &op, int m0, int k0)
{
    const int l = lane();
    ldmatrix(a, op.p + (m0 + (l & 15)) * op.ld + k0 + (l >> 4) * 8);
}
DEV void frag_a(uint32_t (&a)[4], const Col<bf16> &op, int m0, int k0)
{
    const int l = lane();
    ldmatrix_t(a, op.p + (k0 + (l & 7) + (l >> 4) * 8) * op.ld + m0 + ((l >> 3) & 1) * 8);
}

/* Columns n0 .. n0 + 15 of B: b[0], b[1] are the first eight, b[2], b[3] the others. */
template <class Op> DEV void frag_b(uint32_t (&b)[4], const Op &op, int n0, int k0)
{
    const int n = n0 + (lane() >> 2), k = k0 + 2 * (lane() & 3);
    b[0] = pack_bf16(op.at(n, k), op.at(n, k + 1));
    b[1] = pack_bf16(op.at(n, k + 8), op.at(n, k + 9));
    b[2] = pack_bf16(op.at(n + 8, k), op.at(n + 8, k + 1));
    b[3] = pack_bf16(op.at(n + 8, k + 8), op.at(n + 8, k + 9));
}
DEV void frag_b(uint32_t (&b)[4], const Row<bf16> &op, int n0, int k0)
{
    const int l = lane();
    ldmatrix(b, op.p + (n0 + (l & 7) + (l >> 4) * 8) * op.ld + k0 + ((l >> 3) & 1) * 8);
}
DEV void frag_b(uint32_t (&b)[4], const Col<bf16> &op, int n0, int k0)
{
    const int l = lane();
    ldmatrix_t(b, op.p + (k0 + (l & 15)) * op.ld + n0 + (l >> 4) * 8);
}

/* ---- products ------------------------------------------------------------------------------- */

template <int MT, int NT> DEV void clear(float (&acc)[MT][NT][4])
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[i][j][e] = 0.f;
}

template <class E> struct product;

template <> struct product<bf16> {
    template <int MT, int NT, class A, class B>
    static DEV void run(float (&acc)[MT][NT][4], const A &a, int m0, const B &b, int n0, int k0,
                        int k1)
    {
        static_assert(NT % 2 == 0, "columns come in sixteens");
#pragma unroll
        for (int k = k0; k < k1; k += 16) {
            uint32_t fa[MT][4], fb[NT / 2][4];
#pragma unroll
            for (int i = 0; i < MT; i++)
                frag_a(fa[i], a, m0 + 16 * i, k);
#pragma unroll
            for (int j = 0; j < NT / 2; j++)
                frag_b(fb[j], b, n0 + 16 * j, k);
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT / 2; j++) {
                    mma_bf16(acc[i][2 * j], fa[i], fb[j][0], fb[j][1]);
                    mma_bf16(acc[i][2 * j + 1], fa[i], fb[j][2], fb[j][3]);
                }
        }
    }
    /* Two products with one B. */
    template <int MT, int NT, class A1, class A2, class B>
    static DEV void run2(float (&x)[MT][NT][4], float (&y)[MT][NT][4], const A1 &a1, const A2 &a2,
                         int m0, const B &b, int n0, int k0, int k1)
    {
#pragma unroll
        for (int k = k0; k < k1; k += 16) {
            uint32_t f1[MT][4], f2[MT][4], fb[4];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                frag_a(f1[i], a1, m0 + 16 * i, k);
                frag_a(f2[i], a2, m0 + 16 * i, k);
            }
#pragma unroll
            for (int j = 0; j < NT / 2; j++) {
                frag_b(fb, b, n0 + 16 * j, k);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    mma_bf16(x[i][2 * j], f1[i], fb[0], fb[1]);
                    mma_bf16(x[i][2 * j + 1], f1[i], fb[2], fb[3]);
                    mma_bf16(y[i][2 * j], f2[i], fb[0], fb[1]);
                    mma_bf16(y[i][2 * j + 1], f2[i], fb[2], fb[3]);
                }
            }
        }
    }
};

template <> struct product<float> {
    template <int MT, int NT, class A, class B>
    static DEV void run(float (&acc)[MT][NT][4], const A &a, int m0, const B &b, int n0, int k0,
                        int k1)
    {
        const int r = m0 + (lane() >> 2), n = n0 + 2 * (lane() & 3);
        for (int k = k0; k < k1; k++) {
            float x[MT][2];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                x[i][0] = a.at(r + 16 * i, k);
                x[i][1] = a.at(r + 16 * i + 8, k);
            }
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const float y0 = b.at(n + 8 * j, k), y1 = b.at(n + 8 * j + 1, k);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    acc[i][j][0] += x[i][0] * y0;
                    acc[i][j][1] += x[i][0] * y1;
                    acc[i][j][2] += x[i][1] * y0;
                    acc[i][j][3] += x[i][1] * y1;
                }
            }
        }
    }
    template <int MT, int NT, class A1, class A2, class B>
    static DEV void run2(float (&x)[MT][NT][4], float (&y)[MT][NT][4], const A1 &a1, const A2 &a2,
                         int m0, const B &b, int n0, int k0, int k1)
    {
        run(x, a1, m0, b, n0, k0, k1);
        run(y, a2, m0, b, n0, k0, k1);
    }
};

template <> struct product<tf32> {
    template <int MT, int NT, class A, class B>
    static DEV void run(float (&acc)[MT][NT][4], const A &a, int m0, const B &b, int n0, int k0,
                        int k1)
    {
        const int r = m0 + (lane() >> 2), n = n0 + (lane() >> 2), t = lane() & 3;
#pragma unroll
        for (int k = k0; k < k1; k += 8)
#pragma unroll
            for (int i = 0; i < MT; i++) {
                uint32_t fa[4] = {
                    to_tf32(a.at(r + 16 * i, k + t)), to_tf32(a.at(r + 16 * i + 8, k + t)),
                    to_tf32(a.at(r + 16 * i, k + t + 4)), to_tf32(a.at(r + 16 * i + 8, k + t + 4))};
#pragma unroll
                for (int j = 0; j < NT; j++)
                    mma_tf32(acc[i][j], fa, to_tf32(b.at(n + 8 * j, k + t)),
                             to_tf32(b.at(n + 8 * j, k + t + 4)));
            }
    }
};

/* The arithmetic of small f32 products beside one of type E. */
template <class E> struct fine {
    typedef float type;
};
template <> struct fine<bf16> {
    typedef tf32 type;
};

/* f(row, column, &x0, &x1) for every pair of neighbours of an accumulator. */
template <int MT, int NT, class F>
DEV void each(float (&acc)[MT][NT][4], int m0, int n0, const F &f)
{
    const int r = m0 + (lane() >> 2), c = n0 + 2 * (lane() & 3);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) {
            f(r + 16 * i, c + 8 * j, acc[i][j][0], acc[i][j][1]);
            f(r + 16 * i + 8, c + 8 * j, acc[i][j][2], acc[i][j][3]);
        }
}

} // namespace kda

#endif
