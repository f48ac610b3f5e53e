/* Synthetic checkpoints: names, shapes and a configuration drawn from a seed, contents that are a
 * pure function of (tensor name, seed, byte offset), so that nothing needs to be kept to check a
 * copy. Used by build/gen (which writes files) and by the property test (which serves them from
 * memory). Knows nothing of the library under test. */
#ifndef CKPT_TESTS_SYNTH_H
#define CKPT_TESTS_SYNTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct synth_rng {
    uint64_t state;
} synth_rng;

uint64_t synth_next(synth_rng *rng); /* splitmix64 */
/* Uniform enough in [0, n), n > 0. */
uint64_t synth_below(synth_rng *rng, uint64_t n);
bool synth_coin(synth_rng *rng);
/* One of the n values. */
int64_t synth_pick(synth_rng *rng, const int64_t *values, size_t n);

typedef struct synth_tensor {
    char name[128];
    const char *dtype; /* safetensors name */
    int rank;
    int64_t dims[4];
    uint64_t bytes;
    uint64_t seed; /* of the contents */
} synth_tensor;

typedef enum synth_kind {
    SYNTH_HF,       /* Kimi-Linear as Hugging Face stores it; config is config.json */
    SYNTH_MEGATRON, /* Megatron hybrid, whole tensors under storage keys; config is args */
    SYNTH_PLAIN     /* no model family: any names, any dtypes; no config */
} synth_kind;

typedef struct synth_model {
    synth_kind kind;
    uint64_t seed;
    synth_tensor *tensors;
    size_t n, cap;
    char *config; /* JSON text or NULL */
    char pattern[64];
    /* What a mesh must divide: TP (heads, widths), expert TP, EP, PP. */
    int64_t tp_unit, etp_unit, experts, blocks;
    bool vocab_fits; /* no mesh has to pad the vocabulary */
    bool frozen;     /* one layer has no optimizer state while the others do */
    uint64_t bytes;  /* of all tensors */
} synth_model;

/* Sizes of a hybrid model; symbols as in lib/config.h. */
typedef struct synth_sizes {
    int64_t hidden, vocab;
    int64_t nk, a, conv, rf, rg;   /* KDA; rank 0 = full */
    int64_t n, rq, rk, dn, dr, dv; /* MLA; rq 0 = none */
    int64_t ffn, experts, expert_ffn, shared_ffn, topk;
    bool tied, router_bias, latent_norm, latent_fused, safe_gate, rope;
    int64_t groups, head_dim; /* attention */
    int64_t gk, gv, ga, gb;   /* GDN */
    bool qk_norm, qkv_bias, gate, centered, plain_mlp;
    int depths;        /* of multi-token prediction */
    const char *dtype; /* of weights; A_log, dt_bias and router bias stay F32 */
    int layers;        /* HF layers */
    int dense;         /* leading HF layers with a dense MLP */
} synth_sizes;

/* All abort on exhausted memory: these are test tools. */
void synth_random(synth_model *m, synth_kind kind, uint64_t seed);
/* Kimi-Linear proportions (hidden 2304, experts 1024 x 2304 bf16 = 4.5 MiB) of about `size` bytes;
 * experts 0 chooses a number for four layers. False if size is too small for one of each layer. */
bool synth_kimi(synth_model *m, uint64_t size, int64_t experts, uint64_t seed);
/* Kimi-Linear-48B with its 20,000 tensors; below its size of 94 GB the experts are narrower (size 0: as
 * published). False if size is too small. DeepSeek-V3-671B with 46,000 tensors, FP8: 91,000. */
bool synth_kimi48(synth_model *m, uint64_t size);
void synth_deepseek671(synth_model *m, bool fp8);
/* Append tensor number i of one byte. */
void synth_byte(synth_model *m, uint64_t i);
void synth_release(synth_model *m);

/* Bytes [offset, offset + n) of a tensor. Floats are finite and below 2 in magnitude. */
void synth_fill(const synth_tensor *t, uint64_t offset, void *out, size_t n);
/* Element size in bytes of a dtype name; 0 if unknown. */
size_t synth_itemsize(const char *dtype);

#endif
