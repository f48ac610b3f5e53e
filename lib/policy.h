/* Policies of quantisation emulation in the KDA prefill: which of the 17 handles of a module rounds what,
 * and how products and sums are rounded. Rules are parsed, resolved per module, validated, printed as
 * one canonical text (which checkpoints carry) and read back.
 *
 * Rules, a JSON object (quant-emulation.md section 4, form of NVIDIA ModelOpt):
 *   quant_cfg         [{quantizer_name, cfg, enable}]: shell patterns against "MODULE.HANDLE", in order.
 *                     cfg replaces all attributes and enables unless enable is false; enable alone toggles
 *   linear_attention  [{module_name, cfg}]: execution of a module; the last match wins, whole
 *   algorithm         null or absent
 * Stored text, sorted keys, no white space:
 *   {"modules":{"blocks.0.kda":{"execution":{complete},"quantizers":{HANDLE:{"enable":..,attributes}}}},
 *    "schema":1}
 * Modules are named by their canonical block, so the text is the same in every layout. Rules may name them
 * so, or as the layouts do: model.layers.L.self_attn, model.layers.L.attn, and the stored name.
 *
 * What is refused is refused by name (CKPT_E_UNSUPPORTED), as section 5 lists; a value of another JSON
 * type than expected is CKPT_E_FORMAT. Nothing is ever approximated. */
#ifndef CKPT_POLICY_H
#define CKPT_POLICY_H

#include "json.h"
#include "model.h"

/* The eight products, lhs . rhs^T, in the published order: handles are numbered by it. */
typedef enum ckpt_quant_site {
    CKPT_SITE_KEY_INTERACTION,
    CKPT_SITE_WY_VALUE,
    CKPT_SITE_WY_KEY,
    CKPT_SITE_STATE_READ, /* its lhs is W, CKPT_HANDLE_W */
    CKPT_SITE_STATE_UPDATE,
    CKPT_SITE_OUTPUT_STATE,
    CKPT_SITE_OUTPUT_SCORE,
    CKPT_SITE_OUTPUT_VALUE,
    CKPT_SITE_COUNT
} ckpt_quant_site;

typedef enum ckpt_quant_handle {
    CKPT_HANDLE_KEY_INTERACTION_LHS,
    CKPT_HANDLE_KEY_INTERACTION_RHS,
    CKPT_HANDLE_WY_VALUE_LHS,
    CKPT_HANDLE_WY_VALUE_RHS,
    CKPT_HANDLE_WY_KEY_LHS,
    CKPT_HANDLE_WY_KEY_RHS,
    CKPT_HANDLE_STATE_READ_RHS,
    CKPT_HANDLE_STATE_UPDATE_LHS,
    CKPT_HANDLE_STATE_UPDATE_RHS,
    CKPT_HANDLE_OUTPUT_STATE_LHS,
    CKPT_HANDLE_OUTPUT_STATE_RHS,
    CKPT_HANDLE_OUTPUT_SCORE_LHS,
    CKPT_HANDLE_OUTPUT_SCORE_RHS,
    CKPT_HANDLE_OUTPUT_VALUE_LHS,
    CKPT_HANDLE_OUTPUT_VALUE_RHS,
    CKPT_HANDLE_W,
    CKPT_HANDLE_STATE,
    CKPT_HANDLE_COUNT
} ckpt_quant_handle;

typedef enum ckpt_quant_kind {
    CKPT_QUANT_OFF,
    CKPT_QUANT_FP8,        /* E4M3, one dynamic scale a row */
    CKPT_QUANT_NVFP4,      /* E2M1 in blocks of 16, one scale a call */
    CKPT_QUANT_STATE_E4M3, /* a tile [K, block_v] */
    CKPT_QUANT_STATE_INT8
} ckpt_quant_kind;

typedef enum ckpt_quant_boundary {
    CKPT_BOUNDARY_GATE_PREFIX,
    CKPT_BOUNDARY_GATE_EXP,
    CKPT_BOUNDARY_VALUE_RESIDUAL,
    CKPT_BOUNDARY_STATE_DECAY,
    CKPT_BOUNDARY_STATE_ADD,
    CKPT_BOUNDARY_OUTPUT_ADD,
    CKPT_BOUNDARY_COUNT
} ckpt_quant_boundary;

typedef enum ckpt_quant_dtype {
    CKPT_QUANT_NO_ROUNDING,
    CKPT_QUANT_F32,
    CKPT_QUANT_F16,
    CKPT_QUANT_BF16
} ckpt_quant_dtype;

/* One module, as the engine takes it. */
typedef struct ckpt_quant {
    bool enabled; /* any handle, schedule or boundary; else the ordinary path runs */
    bool matmul;  /* backend */
    ckpt_quant_kind kind[CKPT_HANDLE_COUNT];
    ckpt_quant_dtype accumulator[CKPT_SITE_COUNT];
    int64_t block[CKPT_SITE_COUNT]; /* of the reduction; 0 without a schedule */
    ckpt_quant_dtype rounding[CKPT_BOUNDARY_COUNT];
    int64_t block_v;
    /* No part of a policy: 0 = exact substitution, else factors of the product that approximates the
     * inverse (engine/quant/kda_quant.h). */
    int solve_factors;
} ckpt_quant;

extern const char *const ckpt_site_names[CKPT_SITE_COUNT];
extern const char *const ckpt_handle_names[CKPT_HANDLE_COUNT];
extern const char *const ckpt_boundary_names[CKPT_BOUNDARY_COUNT];
/* lhs (side 0) or rhs (1) of a site. */
ckpt_quant_handle ckpt_handle_of(ckpt_quant_site site, int side);

/* Where a checkpoint keeps the text: strings of safetensors' __metadata__ (and HDF5's attribute of that
 * name); a member of Megatron's common state; attributes in the pickles of torch.save and plain DCP
 * (pickle_policy.h); a manifest's "quant_policy" in any case. */
#define CKPT_POLICY_KEY "kda_quant_policy"
#define CKPT_POLICY_DIGEST_KEY "kda_quant_policy_sha256"

#define CKPT_POLICY_ALIASES 3
typedef struct ckpt_policy_module {
    const char *name;                       /* "blocks.0.kda" */
    const char *alias[CKPT_POLICY_ALIASES]; /* other names, or NULL */
    int block;
    ckpt_quant q;
} ckpt_policy_module;

typedef struct ckpt_policy {
    ckpt_arena arena;
    ckpt_policy_module *modules; /* every KDA block of the model, in order */
    size_t n;
    bool enabled;    /* some module is */
    char *text;      /* stored form */
    char digest[65]; /* SHA-256 of the text, hexadecimal */
} ckpt_policy;

/* Modules of a bound model, everything disabled. Zero-initialise; release in any case. */
ckpt_status ckpt_policy_open(ckpt_policy *p, const ckpt_model *model, ckpt_err *err) CKPT_MUST_USE;
/* Resolve rules for these modules. Rules name something: a pattern that matches no module, or an
 * enabling one that matches no handle, is an error. */
ckpt_status ckpt_policy_resolve(ckpt_policy *p, const ckpt_json *rules,
                                ckpt_err *err) CKPT_MUST_USE;
/* From a file of rules. Errors name the path. */
ckpt_status ckpt_policy_load(ckpt_policy *p, const char *path, ckpt_err *err) CKPT_MUST_USE;
/* From stored text; digest: what it should have, or NULL. Errors (CKPT_E_FORMAT): another digest, an
 * unknown field, other modules than the model's; CKPT_E_UNSUPPORTED a refused setting. */
ckpt_status ckpt_policy_restore(ckpt_policy *p, const char *text, const char *digest,
                                ckpt_err *err) CKPT_MUST_USE;
/* Rules of the published overhead table: off, exact_matmul, fp8_operands, nvfp4_operands,
 * fp16_accumulation, fp8_with_state. NULL: no such preset, or no memory. The caller frees it. */
ckpt_json *ckpt_policy_preset(const char *name);
/* Of a block, or NULL: no such module, or p NULL. */
const ckpt_quant *ckpt_policy_of(const ckpt_policy *p, int block);
void ckpt_policy_release(ckpt_policy *p);
/* SHA-256 of a stored text. */
void ckpt_policy_digest(const char *text, char hex[65]);
/* Put a string that a file has under one of the two keys into *metadata, of which an object is made when it is
 * NULL. Errors: CKPT_E_FORMAT a file before had another. */
ckpt_status ckpt_policy_note(ckpt_json **metadata, const char *key, const ckpt_json *value,
                             ckpt_err *err) CKPT_MUST_USE;

/* Low-rank widths that an FP8 or FP4 recipe can run: positive multiples of its alignment. precision
 * "fp8" or "fp4"; rank 0: full, anything goes. field names it in the error (CKPT_E_UNSUPPORTED). */
ckpt_status ckpt_policy_check_rank(const char *precision, const char *recipe, const char *field,
                                   int64_t rank, ckpt_err *err) CKPT_MUST_USE;

#endif
