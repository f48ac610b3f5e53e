/* Choice of the kernel table. */
#include "kernels/kernels.h"

#define TABLE2(name, isa) name##_##isa
#define TABLE(name, isa) TABLE2(name, isa)

extern const ENG(kernels) TABLE(ENG(k_table), base);
#if defined(__x86_64__)
extern const ENG(kernels) TABLE(ENG(k_table), v3), TABLE(ENG(k_table), v4);
#endif

const ENG(kernels) * ENG(kernels_for)(ckpt_eng_isa isa)
{
#if defined(__x86_64__)
    if (isa == CKPT_ENG_V4)
        return &TABLE(ENG(k_table), v4);
    if (isa == CKPT_ENG_V3)
        return &TABLE(ENG(k_table), v3);
#endif
    (void)isa;
    return &TABLE(ENG(k_table), base);
}
