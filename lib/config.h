/* Canonical model configuration: a flat JSON object with fixed keys, equal for every dialect of the
 * same model, so that its digest compares. Absent key = not applicable. Sizes carry the symbol that
 * schema and view expressions use.
 *
 *  key                      symbol  meaning
 *  pattern                          one letter a block: K KDA, + MLA, * attention, G GDN, g GDN2,
 *                                   M Mamba-2, - MLP, E MoE; those of multi-token prediction last
 *  mtp_layers, mtp_blocks           depths, and blocks of all depths together, which the pattern ends
 *                                   with; absent without multi-token prediction. P is the number of
 *                                   blocks before them, Q those of one depth
 *  hidden_size              H
 *  vocab_size               V       true rows of the embedding
 *  kda_heads                NK      kda_key_dim A, kda_value_dim B, kda_conv W
 *  kda_f_rank               RF      kda_gate_rank RG (absent = full rank)
 *  kda_safe_gate bool, kda_lower_bound number (only with safe gate)
 *  heads                    N       attention or MLA heads
 *  kv_heads G, head_dim D           attention; R is N / G
 *  attn_gate bool (only when true: sigmoid output gate, elementwise), attn_bias bool (only when true:
 *      q k v biases), qk_norm bool, attn_nope bool (only when true), rope_percent number (only when
 *      not 1: part of head_dim that rotates)
 *  gdn_key_heads GK, gdn_value_heads GV, gdn_key_dim GA, gdn_value_dim GB, gdn_conv GW   GDN and
 *      GDN2; U is GV / GK
 *  mamba_heads MN, mamba_head_dim MD, mamba_groups MG, mamba_state MT, mamba_conv MW
 *  q_lora_rank RQ, kv_lora_rank RK, qk_nope_dim DN, qk_rope_dim DR, v_head_dim DV
 *  mla_nope                         bool: no rotary embedding in MLA
 *  mla_gate "headwise"|"elementwise" (absent = none): GM = N or N*DV rows of the output gate
 *  rope_theta number, rope_type "rope"|"yarn"|"llama3", rope_scaling (object, only with yarn: factor,
 *      original_max_position_embeddings, beta_fast, beta_slow, mscale, mscale_all_dim); all three
 *      absent when nothing rotates
 *  latent_norm              bool
 *  ffn_size                 F
 *  experts                  E       expert_ffn_size FE, shared_ffn_size FS, experts_per_token
 *  router_score "sigmoid"|"softmax", router_bias bool, router_scale number, router_groups,
 *  router_group_topk (both only when there is more than one group), router_group_best (only when not
 *  2: how many of a group's best scores make up the group's), router_normalize bool,
 *  shared_gate bool (only when true: the shared expert has a sigmoid gate)
 *  norm_zero_centered bool (only when true: norm weights are stored minus one, the gated output norm
 *      of GDN and KDA excepted)
 *  norm_eps number, activation "silu"|"relu2" (relu2: no gate), tied bool, init_std number
 *
 * Keys belong to kinds of block: a model without MoE has no router keys, and so on. Numbers that are
 * integers are stored as integers, so 10000 and 10000.0 have one digest. */
#ifndef CKPT_CONFIG_H
#define CKPT_CONFIG_H

#include "hash.h"
#include "layout.h"

/* Bind the symbols that the canonical configuration gives. */
ckpt_status ckpt_config_symbols(const ckpt_json *canon, ckpt_symtab *syms,
                                ckpt_err *err) CKPT_MUST_USE;
/* Fill what the configuration does not say from sizes bound by tensor shapes (symbols) and from the
 * blocks found (pattern). Never overrides. */
ckpt_status ckpt_config_complete(ckpt_json *canon, const ckpt_symtab *syms, const char *pattern,
                                 bool tied, ckpt_err *err) CKPT_MUST_USE;
/* SHA-256 over the canonical configuration, keys sorted, no white space. */
ckpt_status ckpt_config_digest(const ckpt_json *canon, uint8_t out[CKPT_SHA256_LEN],
                               ckpt_err *err) CKPT_MUST_USE;
/* Validation rules that do not depend on a dialect (product.md, megatron-dist-ckpt.md section 6):
 * known keys of the right type, sizes > 0, pattern letters known, safe gate needs
 * -5 <= lower bound < 0. Errors: CKPT_E_FORMAT naming the key. */
ckpt_status ckpt_config_check(const ckpt_json *canon, ckpt_err *err) CKPT_MUST_USE;

/* How many of a group's best scores a dialect of that kind sums up to the group's: 2 for Hugging Face
 * models; experts_per_token / router_group_topk, rounded down, for Megatron
 * (moe_utils.group_limited_topk); 0 without groups. */
int64_t ckpt_config_group_best(const ckpt_json *canon, ckpt_config_kind kind);
/* Make a model say what a dialect of that kind can: another router_group_best, which changes no
 * tensor. *line: what it means, NULL if nothing had to change. */
ckpt_status ckpt_config_approach(ckpt_json *canon, ckpt_config_kind kind, ckpt_arena *arena,
                                 const char **line, ckpt_err *err) CKPT_MUST_USE;

/* Bind VP, the padded vocabulary, from a stored Megatron configuration (padded_vocab_size), such as
 * config_write just made for the target mesh. Nothing to bind is no error. */
ckpt_status ckpt_config_padded_vocab(const ckpt_json *stored, ckpt_symtab *syms,
                                     ckpt_err *err) CKPT_MUST_USE;
/* Say the element type of the weights ("float32" "bfloat16" "float16") in a stored configuration:
 * dtype (and torch_dtype if it is there) for Hugging Face, params_dtype, bf16 and fp16 for Megatron.
 * A field that says so already is left as it is. The canonical configuration does not have it. */
ckpt_status ckpt_config_set_dtype(ckpt_json *stored, ckpt_config_kind kind, const char *dtype,
                                  ckpt_err *err) CKPT_MUST_USE;

#endif
