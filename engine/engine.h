/* The compute engine: conventions, the context every operation takes, packed sequences.
 *
 * Arrays. Row-major. Activations are token-major [T, features]: T counts the tokens of all sequences,
 * which lie one after the other; a batch of B sequences of S tokens is cu = {0, S, 2S, ...}. Heads are
 * the slow part of features: [T, heads, dim]. Weights are [out, in]; y = x W^T. `ld*` arguments are
 * row strides in elements. Names: T tokens, N sequences, H query/key heads, HV value heads, K, V head
 * dims. Sizes are int64_t and at least 0; T = 0 does nothing.
 *
 * Types. One source is compiled for float and for double (real.h): ENG(name) is the function of the
 * type in use. Sums run in that type; the order is fixed (below).
 *
 * Gradients. Parameter gradients (dw, dbias, dA_log ...) are accumulated: the caller zeroes them once
 * a step. Activation gradients are written unless the function says otherwise. Pointers marked `or
 * NULL` may be NULL; others may not. In and out may alias only where it is said.
 *
 * Memory. Operations allocate nothing: temporaries come from the context's arena, a stack. What has to
 * live from forward to backward is taken by the caller before it calls (the *_saved structures), and
 * what an operation takes for itself it has given back when it returns. A context starts dry: every
 * operation then only takes and gives back, reads and writes no array, and `peak` says how many
 * bytes the same calls need; ckpt_eng_reserve allocates them at once and ends the dry run. So one
 * piece of code is both the plan and the execution. Pointers taken while dry must not be read.
 *
 * Determinism. Work is cut into pieces by sizes alone, never by the number of threads, and every
 * floating-point sum belongs to one piece and has a fixed order; there are no atomics. Results are
 * therefore equal bit by bit at any number of threads, on one kind of CPU. Kernels are compiled for
 * several instruction sets (kernels/kernels.h) and results may differ between those in the last bits.
 *
 * NaN. A NaN in an input reaches every output that depends on it; no operation hides, traps or tests
 * for it. Subnormal numbers are flushed to zero inside operations on x86.
 *
 * Global state: none.
 *
 * Errors: CKPT_E_USAGE for sizes that do not fit together, CKPT_E_UNSUPPORTED for what is not built,
 * CKPT_E_NOMEM when the arena is too small (a reserve without the dry run of the same calls). */
#ifndef CKPT_ENGINE_H
#define CKPT_ENGINE_H

#include "err.h"

#include <stddef.h>
#include <stdint.h>

typedef enum ckpt_eng_isa {
    CKPT_ENG_BASE, /* what the compiler targets by default */
    CKPT_ENG_V3,   /* x86: AVX2, FMA */
    CKPT_ENG_V4,   /* x86: AVX-512 F, DQ, BW, VL */
    CKPT_ENG_ISA_COUNT
} ckpt_eng_isa;

typedef struct ckpt_eng {
    int threads;      /* at least 1 */
    ckpt_eng_isa isa; /* the best this machine has; a test may lower it */
    bool dry;         /* nothing is computed, see above */
    bool failed;      /* a take did not fit */
    unsigned char *base;
    size_t cap, used, peak; /* bytes */
    struct ckpt_eng_par
        *par; /* the other ranks of the run (par.h), borrowed; NULL: there are none */
    struct ckpt_eng_device
        *device; /* whose memory the arena is (device.h), borrowed; NULL: this process's */
    struct ckpt_eng_graphs *graphs; /* captured pieces of a step (graph.h), borrowed; NULL: none */
    /* Not 0: a pass gives up before its next block, as where the process is interrupted; set by a signal
     * handler or another thread. Borrowed; NULL: nobody does. */
    const volatile int *stop;
} ckpt_eng;

/* threads 0 = all cores. The context is dry until ckpt_eng_reserve. Nothing to release before. */
void ckpt_eng_init(ckpt_eng *e, int threads);
/* Allocate `bytes` (usually e->peak after the dry run) and empty the stack. May be called again. */
ckpt_status ckpt_eng_reserve(ckpt_eng *e, size_t bytes, ckpt_err *err) CKPT_MUST_USE;
void ckpt_eng_release(ckpt_eng *e);
/* Best instruction set of this machine among those built. */
ckpt_eng_isa ckpt_eng_detect(void);

/* count * size bytes, 64-byte aligned, not zeroed. When they do not fit: NULL and e->failed, so take
 * everything, then ask ckpt_eng_check once. While dry: a pointer that must not be used. */
void *ckpt_eng_take(ckpt_eng *e, int64_t count, size_t size);
ckpt_status ckpt_eng_check(const ckpt_eng *e, ckpt_err *err) CKPT_MUST_USE;
/* Stack discipline: everything taken after the mark is given back. */
size_t ckpt_eng_mark(const ckpt_eng *e);
void ckpt_eng_drop(ckpt_eng *e, size_t mark);

/* Run fn(arg, item, worker) for item 0 .. n-1 on the context's threads; worker is in [0, threads) and
 * names scratch that no other running call uses. Items are independent. */
typedef void (*ckpt_eng_fn)(void *arg, int64_t item, int worker);
void ckpt_eng_parallel(const ckpt_eng *e, int64_t n, ckpt_eng_fn fn, void *arg);

/* Packed sequences: sequence n is tokens cu[n] .. cu[n+1]-1; empty ones are allowed. */
typedef struct ckpt_eng_seq {
    int64_t n;         /* sequences */
    const int64_t *cu; /* n + 1 offsets, from 0, not decreasing */
} ckpt_eng_seq;

static inline int64_t ckpt_eng_tokens(const ckpt_eng_seq *seq)
{
    return seq->n > 0 ? seq->cu[seq->n] : 0;
}
/* CKPT_E_USAGE if the offsets are not as said above. */
ckpt_status ckpt_eng_seq_check(const ckpt_eng_seq *seq, ckpt_err *err) CKPT_MUST_USE;

#endif
