/* Every vector cast kernel on all 2^32 values of f32, and on all codes of the 16-bit formats, against
 * the conversion of one element (lib/dtype.c: decode, round once, encode; integers only, and itself
 * compared with torch by the unit tests).
 *
 *   casts [THREADS]
 *
 * All builds of a kernel that this processor runs are called, not only the one that it would choose:
 * that is why the source is included. Prints a line a kernel; exit 1
 * on the first difference of each. Takes about two minutes of a core for a target. */
#include "../../lib/dtype.c"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_THREADS 64

typedef struct work {
    ckpt_dtype dtype;
    uint64_t from, to;           /* values, multiples of BLOCK */
    uint64_t bad[CAST_BUILDS];   /* by build */
    uint32_t first[CAST_BUILDS]; /* the first value that differs */
} work;

static void differs(work *w, int build, uint64_t x)
{
    if (w->bad[build]++ == 0)
        w->first[build] = (uint32_t)x;
}

static void *run_narrow(void *arg)
{
    work *w = arg;
    size_t size = (size_t)dtype_info[w->dtype].bits / 8;
    const int builds = cast_builds_here();
    uint8_t in[4 * BLOCK], out[CAST_BUILDS][2 * BLOCK], want[2 * BLOCK];
    for (uint64_t x = w->from; x < w->to; x += BLOCK) {
        for (size_t i = 0; i < BLOCK; i++)
            ckpt_put_u32(in + 4 * i, (uint32_t)(x + i));
        for (int b = 0; b < builds; b++)
            cast_builds[b].narrow(w->dtype, out[b], in);
        cast_scalar(w->dtype, want, CKPT_F32, in, BLOCK);
        for (int b = 0; b < builds; b++)
            for (size_t i = 0; memcmp(out[b], want, BLOCK * size) != 0 && i < BLOCK; i++)
                if (memcmp(out[b] + i * size, want + i * size, size) != 0)
                    differs(w, b, x + i);
    }
    return NULL;
}

static void *run_widen(void *arg)
{
    work *w = arg;
    const int builds = cast_builds_here();
    uint8_t in[2 * BLOCK], out[4 * BLOCK], want[4 * BLOCK];
    for (uint64_t x = w->from; x < w->to; x += BLOCK) {
        for (size_t i = 0; i < BLOCK; i++)
            ckpt_put_u16(in + 2 * i, (uint16_t)(x + i));
        cast_scalar(CKPT_F32, want, w->dtype, in, BLOCK);
        for (int b = 0; b < builds; b++) {
            cast_builds[b].widen(w->dtype, out, in);
            for (size_t i = 0; memcmp(out, want, sizeof out) != 0 && i < BLOCK; i++)
                if (memcmp(out + 4 * i, want + 4 * i, 4) != 0)
                    differs(w, b, x + i);
        }
    }
    return NULL;
}

/* True if no value differs. */
static bool check(const char *what, ckpt_dtype dtype, uint64_t values, void *(*run)(void *),
                  int threads)
{
    pthread_t id[MAX_THREADS];
    work w[MAX_THREADS];
    uint64_t bad = 0, blocks = values / BLOCK;
    for (int i = 0; i < threads; i++) {
        w[i] = (work){.dtype = dtype,
                      .from = blocks * (uint64_t)i / (uint64_t)threads * BLOCK,
                      .to = blocks * (uint64_t)(i + 1) / (uint64_t)threads * BLOCK};
        if (pthread_create(&id[i], NULL, run, &w[i]) != 0) {
            fprintf(stderr, "casts: no thread %d\n", i);
            exit(5);
        }
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(id[i], NULL);
        for (int b = 0; b < CAST_BUILDS; b++)
            if (w[i].bad[b] > 0) {
                bad += w[i].bad[b];
                printf("%s %s, %s: %" PRIu64 " differ, first 0x%08" PRIx32 "\n", what,
                       dtype_info[dtype].name, cast_builds[b].name, w[i].bad[b], w[i].first[b]);
            }
    }
    if (bad == 0)
        printf("%s %s: %" PRIu64 " values, %d builds, all equal\n", what, dtype_info[dtype].name,
               values, cast_builds_here());
    fflush(stdout);
    return bad == 0;
}

int main(int argc, char **argv)
{
    static const ckpt_dtype narrow_to[] = {CKPT_BF16,    CKPT_F16,         CKPT_F8_E4M3,
                                           CKPT_F8_E5M2, CKPT_F8_E4M3FNUZ, CKPT_F8_E5M2FNUZ,
                                           CKPT_F8_E8M0};
    static const ckpt_dtype widen_from[] = {CKPT_BF16, CKPT_F16};
    int threads = argc > 1 ? atoi(argv[1]) : 2;
    bool ok = true;
    if (threads < 1 || threads > MAX_THREADS) {
        fprintf(stderr, "usage: casts [THREADS]     1 to %d\n", MAX_THREADS);
        return 2;
    }
    for (size_t i = 0; i < sizeof widen_from / sizeof *widen_from; i++)
        ok = check("to F32 from", widen_from[i], UINT64_C(1) << 16, run_widen, threads) && ok;
    for (size_t i = 0; i < sizeof narrow_to / sizeof *narrow_to; i++)
        ok = check("F32 to", narrow_to[i], UINT64_C(1) << 32, run_narrow, threads) && ok;
    return ok ? 0 : 1;
}
