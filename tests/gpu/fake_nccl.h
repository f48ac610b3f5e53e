/* Ranks on the emulator in a unit suite: what stands for NCCL, and which memory counts as a device's. */
#ifndef CKPT_TEST_GPU_FAKE_NCCL_H
#define CKPT_TEST_GPU_FAKE_NCCL_H

#include <check.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

void ckpt_cuda_comm_pretend(bool device);
void ckpt_cuda_comm_hold(bool driver);

/* The library of fake_nccl.c, beside this program. */
static inline const char *fake_nccl(void)
{
    static char library[4200];
    ssize_t n = readlink("/proc/self/exe", library, sizeof library - 20);
    ck_assert_int_gt(n, 0);
    library[n] = '\0';
    char *at = strrchr(library, '/');
    (void)snprintf(at, sizeof library - (size_t)(at - library), "/fake_nccl.so");
    return library;
}

#endif
