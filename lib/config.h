/* Canonical model configuration: a flat JSON object with fixed keys, equal for every dialect of the
 * same model, so that its digest compares. Absent key = not applicable. Sizes carry the symbol that
 * schema and view expressions use.
 *
 *  key                      symbol  meaning
 *  pattern                          one letter a block: K KDA, + MLA, * attention, G GDN, - MLP, E MoE
 *  hidden_size              H
 *  vocab_size               V       true rows of the embedding
 *  kda_heads                NK      kda_key_dim A, kda_value_dim B, kda_conv W
 *  kda_f_rank               RF      kda_gate_rank RG (absent = full rank)
 *  kda_safe_gate bool, kda_lower_bound number (only with safe gate)
 *  heads                    N       attention or MLA heads
 *  q_lora_rank RQ, kv_lora_rank RK, qk_nope_dim DN, qk_rope_dim DR, v_head_dim DV
 *  mla_nope                         bool: no rotary embedding in MLA
 *  rope_theta number, rope_type, rope_scaling (object)
 *  latent_norm              bool
 *  ffn_size                 F
 *  experts                  E       expert_ffn_size FE, shared_ffn_size FS, experts_per_token
 *  router_score "sigmoid"|"softmax", router_bias bool, router_scale number, router_groups,
 *  router_group_topk, router_normalize bool
 *  norm_eps number, activation "silu", tied bool, init_std number
 */
#ifndef CKPT_CONFIG_H
#define CKPT_CONFIG_H

#include "hash.h"
#include "layout.h"

/* Bind the symbols that the canonical configuration gives. */
ckpt_status ckpt_config_symbols(const ckpt_json *canon, ckpt_symtab *syms, ckpt_err *err)
    CKPT_MUST_USE;
/* Fill what the configuration does not say from sizes bound by tensor shapes (symbols) and from the
 * blocks found (pattern). Never overrides. */
ckpt_status ckpt_config_complete(ckpt_json *canon, const ckpt_symtab *syms, const char *pattern,
                                 bool tied, ckpt_err *err) CKPT_MUST_USE;
/* SHA-256 over the canonical configuration, keys sorted, no white space. */
ckpt_status ckpt_config_digest(const ckpt_json *canon, uint8_t out[CKPT_SHA256_LEN], ckpt_err *err)
    CKPT_MUST_USE;
/* Validation rules that do not depend on a dialect (product.md, megatron-dist-ckpt.md section 6):
 * KDA key and value heads equal, safe gate needs -5 <= lower bound < 0, ranks > 0, pattern letters
 * known. Errors: CKPT_E_FORMAT naming the key. */
ckpt_status ckpt_config_check(const ckpt_json *canon, ckpt_err *err) CKPT_MUST_USE;

#endif
