/* Quantised weights on the way out: the projection matrices of a Hugging Face checkpoint in 4 or 8 bits.
 *
 * A conversion is planned as ever, and this puts a second stage behind it: the tensors that the plan would
 * write are the tensors of a source in memory whose projections are quantised while they are read, and a
 * second plan writes that source's tensors and describes the model that is bound from it. What the manifest
 * says of a tensor is thus what reading the output back gives: dequantised, in BF16.
 *
 *   fp8-block128  X.weight F8_E4M3 [R, C], X.weight_scale_inv F32 [ceil(R/128), ceil(C/128)]
 *   nvfp4         X.weight U8 [R, C/2], low nibble first, X.weight_scale F8_E4M3 [R, C/16],
 *                 X.weight_scale_2 F32 []
 *   mxfp8         X.weight F8_E4M3 [R, C], X.weight_scale U8 [R, C/32], powers of two rounded up
 *
 * Quantisers: qdq.h (fp8_block DeepSeek, nvfp4 `store`, mxfp8 CEIL_DIV). Source: conversion-maps.md section
 * 9, quant-emulation.md section 2, ModelOpt's Hugging Face export. */
#ifndef CKPT_WQUANT_H
#define CKPT_WQUANT_H

#include "stream.h"

typedef enum ckpt_wquant_kind {
    CKPT_WQUANT_NONE,
    CKPT_WQUANT_FP8_BLOCK,
    CKPT_WQUANT_NVFP4,
    CKPT_WQUANT_MXFP8
} ckpt_wquant_kind;

/* One quantised matrix [rows, cols], and what ckpt_wquant_measure found. Errors are of the dequantised f32
 * value against the source's, before its rounding to BF16. */
typedef struct ckpt_wquant_tensor {
    const char *name; /* stored */
    int64_t rows, cols;
    uint32_t base;      /* in the base plan's out.tensors */
    float amax, global; /* NVFP4: largest magnitude, scale of the whole tensor */
    double rel_rms;     /* RMS of the error over RMS of the values; 0 of a zero matrix */
    double max_abs;     /* largest error */
    uint64_t saturated; /* elements beyond the largest code of their block */
} ckpt_wquant_tensor;

struct ckpt_wquant_stored;
typedef struct ckpt_wquant {
    ckpt_wquant_kind kind;
    ckpt_plan *base; /* borrowed */
    ckpt_arena arena;
    ckpt_source src; /* in memory */
    ckpt_model model;
    ckpt_wquant_tensor *tensors; /* in the base plan's order */
    size_t n;
    struct ckpt_wquant_stored *stored; /* per tensor of src */
    const char **skipped;              /* modules of matrices that stay as they are */
    size_t n_skipped;
} ckpt_wquant;

const char *ckpt_wquant_name(ckpt_wquant_kind kind);
/* Put the second stage behind `base`, which stays with the caller and must outlive q, as must q the plan
 * `out`. opts: those of base. Errors: CKPT_E_UNSUPPORTED a target that is not safetensors in a Hugging
 * Face layout, without opts->approximate, stacked experts, no projection at all. */
ckpt_status ckpt_wquant_open(ckpt_wquant *q, ckpt_wquant_kind kind, ckpt_plan *base,
                             const ckpt_convert_opts *opts, ckpt_plan *out,
                             ckpt_err *err) CKPT_MUST_USE;
/* Read every projection once (NVFP4 twice): largest magnitudes, which NVFP4 needs before anything is
 * written, and errors. One worker a tensor, so that sums do not depend on their number; with opts->share
 * every process measures a part of them and has all in the end. Errors: CKPT_E_UNSUPPORTED a NaN or an
 * infinity, naming the tensor. */
ckpt_status ckpt_wquant_measure(ckpt_wquant *q, const ckpt_stream_opts *opts,
                                ckpt_err *err) CKPT_MUST_USE;
void ckpt_wquant_release(ckpt_wquant *q);

#endif
