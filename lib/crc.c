/* ISA-L's folding kernel where it was found at build time (three times zlib's speed), else zlib. */
#include "crc.h"

#ifdef CKPT_ISAL
#include <isa-l/crc.h>

#if defined(__x86_64__)
/* ISA-L may return with dirty upper vector halves, which makes the SHA instructions that follow
 * about a hundred times slower on Intel. */
__attribute__((target("avx"))) static void clean_upper_halves(void)
{
    __builtin_ia32_vzeroupper();
}
#endif

uint32_t ckpt_crc32(uint32_t crc, const void *p, size_t n)
{
    if (n == 0)
        return crc;
    crc = crc32_gzip_refl(crc, p, n);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx"))
        clean_upper_halves();
#endif
    return crc;
}
#else
#include <zlib.h>

uint32_t ckpt_crc32(uint32_t crc, const void *p, size_t n)
{
    return (uint32_t)crc32_z(crc, p, n);
}
#endif
