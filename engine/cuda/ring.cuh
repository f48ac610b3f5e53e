/* Tiles in shared memory between the warpgroup that copies them and the two that multiply: N stages in turn,
 * a gate each that says it is full and one that says it is empty again. Step n is in stage n % N. */
#ifndef CKPT_CUDA_RING_CUH
#define CKPT_CUDA_RING_CUH

#include "panels.cuh"

namespace kda
{

constexpr int READERS = 256, WRITERS = 128; /* threads of a block, in this order */
constexpr int RING_BYTES = 128;             /* of all gates of a block */

/* EACH: every lane of the readers says that a stage is read, not one a warp. */
template <int N, bool EACH = false> struct ring {
    uint64_t *full; /* then N that are empty */

    DEV void init() const
    {
        for (int i = 0; i < N; i++) {
            gate_init(full + i, WRITERS);
            gate_init(full + N + i, EACH ? READERS : READERS / 32);
        }
    }
    DEV void wait_empty(int n) const
    {
        gate_wait(full + N + n % N, (n / N & 1) ^ 1);
    }
    DEV void wait_full(int n) const
    {
        gate_wait(full + n % N, n / N & 1);
    }
    /* This warp's work with step n is done. */
    DEV void read(int n) const
    {
        if constexpr (!EACH)
            sync_warp();
        if (EACH || lane() == 0)
            gate_arrive(full + N + n % N);
    }
};
#ifdef CKPT_CUDA_HAS_WGMMA
/* What a writer has under way: one step while it copies the next. */
struct writer {
    uint64_t *last = nullptr;

    template <int N, bool EACH> DEV void wrote(const ring<N, EACH> &r, int n)
    {
        copy_commit();
        if (last) {
            copy_wait<1>();
            products_see_writes();
            gate_arrive(last);
        }
        last = r.full + n % N;
    }
    DEV void end()
    {
        copy_wait<0>();
        products_see_writes();
        if (last)
            gate_arrive(last);
    }
};
/* Each warpgroup its part, with the gates set, and its share of the 3 x 168 registers of three threads. */
template <int REGISTERS, class R, class W> DEV void divide_block(const R &read, const W &write)
{
    sync_block();
    if (threadIdx.x >= READERS) {
        give_registers<3 * 168 - 2 * REGISTERS>();
        write();
    } else {
        take_registers<REGISTERS>();
        read();
    }
}
#endif

} // namespace kda

#endif
