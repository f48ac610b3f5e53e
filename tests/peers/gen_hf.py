"""Small Hugging Face checkpoints of the families that fixtures/hf has no older ones of.

usage: gen_hf.py OUTDIR [NAME...]

Written by transformers' own save_pretrained with a fixed seed, and NAME.reference.safetensors beside
them: input_ids and logits of an f32 forward. What transformers cannot write (multi-token prediction,
block FP8, Ling 2.0, Arcee KDA) is random tensors under the published names; those have no reference
but, for FP8, NAME.dequantised.safetensors: what torch gives for weight times scale.
"""

import json
import os
import shutil
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

V, H = 320, 64
BASE = dict(vocab_size=V, hidden_size=H, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=96, max_position_embeddings=512, initializer_range=0.08,
            bos_token_id=None, eos_token_id=None, pad_token_id=None)
MLA = dict(BASE, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16,
           v_head_dim=24, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2)


def randomize(model):
    """Norms and biases away from ones and zeros, which would hide a swap."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.dim() == 1 and "A_log" not in name:
                p.add_(torch.rand(p.shape, generator=g) * 0.2 - 0.1)
        for name, b in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                b.copy_(torch.rand(b.shape, generator=g) * 0.1)


def save(out, name, model, dtype=torch.float32):
    path = os.path.join(out, name)
    shutil.rmtree(path, ignore_errors=True)
    model.to(dtype).save_pretrained(path)
    model = type(model).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, V, (1, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    save_file({"input_ids": ids, "logits": logits.contiguous()}, path + ".reference.safetensors")


def build(cls, config, seed=11):
    torch.manual_seed(seed)
    model = cls(config).eval()
    randomize(model)
    return model


def write(out, name, config, tensors):
    path = os.path.join(out, name)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    save_file(tensors, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
        f.write("\n")


def qwen2(out, name):
    c = tf.Qwen2Config(**BASE, num_key_value_heads=2, rope_theta=1000000.0)
    save(out, name, build(tf.Qwen2ForCausalLM, c))


def qwen3(out, name):
    c = tf.Qwen3Config(**BASE, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    save(out, name, build(tf.Qwen3ForCausalLM, c))


def qwen3_moe(out, name):
    c = tf.Qwen3MoeConfig(**dict(BASE, num_hidden_layers=4), num_key_value_heads=2, head_dim=32,
                          moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
                          norm_topk_prob=True, mlp_only_layers=[1])
    save(out, name, build(tf.Qwen3MoeForCausalLM, c), torch.bfloat16)


def qwen3_moe_joint(out, name):
    """A state dict as it is in memory: experts in one three-dimensional parameter each."""
    c = tf.Qwen3MoeConfig(**BASE, num_key_value_heads=2, head_dim=16, moe_intermediate_size=24,
                          num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    model = build(tf.Qwen3MoeForCausalLM, c).to(torch.bfloat16)
    c.architectures, c.dtype = ["Qwen3MoeForCausalLM"], torch.bfloat16
    write(out, name, c.to_diff_dict(), {k: v.contiguous() for k, v in model.state_dict().items()})


def llama3(out, name):
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192, rope_theta=500000.0)
    c = tf.LlamaConfig(**BASE, num_key_value_heads=2, rope_parameters=scaling)
    save(out, name, build(tf.LlamaForCausalLM, c))


def moonlight(out, name):
    c = tf.DeepseekV3Config(**dict(MLA, num_hidden_layers=4), q_lora_rank=None, n_group=1, topk_group=1,
                            n_shared_experts=2, first_k_dense_replace=1, rms_norm_eps=1e-5,
                            routed_scaling_factor=2.446, num_mtp_layers=0,
                            rope_parameters=dict(rope_type="default", rope_theta=50000.0))
    save(out, name, build(tf.DeepseekV3ForCausalLM, c), torch.bfloat16)


def bailing_hybrid(out, name):
    c = tf.BailingHybridConfig(**{k: v for k, v in MLA.items() if k != "n_routed_experts"},
                               head_dim=32, num_local_experts=4, q_lora_rank=48, n_group=2,
                               topk_group=1, first_k_dense_replace=1, layer_group_size=2,
                               num_mtp_layers=0)
    save(out, name, build(tf.BailingHybridForCausalLM, c), torch.bfloat16)


def qwen3_5(out, name):
    c = tf.Qwen3_5TextConfig(**BASE, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
                             linear_num_value_heads=4, linear_key_head_dim=16,
                             linear_value_head_dim=16,
                             layer_types=["linear_attention", "full_attention"])
    save(out, name, build(tf.Qwen3_5ForCausalLM, c))


def random_tensor(g, *shape):
    return (torch.randn(*shape, generator=g) * 0.08).to(torch.bfloat16)


def deepseek_mtp(out, name):
    """Two layers and one depth, which the published files store as layer 2 with copies of embedding
    and head."""
    c = tf.DeepseekV3Config(**MLA, q_lora_rank=48, n_group=1, topk_group=1, first_k_dense_replace=1,
                            num_mtp_layers=1)
    model = build(tf.DeepseekV3ForCausalLM, c).to(torch.bfloat16)
    path = os.path.join(out, name)
    shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(path)
    tensors = load_file(os.path.join(path, "model.safetensors"))
    g = torch.Generator().manual_seed(5)
    last = {k.replace("layers.1.", "layers.2."): random_tensor(g, *v.shape).to(v.dtype)
            for k, v in tensors.items() if "layers.1." in k}
    at = "model.layers.2."
    last |= {at + "enorm.weight": random_tensor(g, H), at + "hnorm.weight": random_tensor(g, H),
             at + "eh_proj.weight": random_tensor(g, H, 2 * H),
             at + "shared_head.norm.weight": random_tensor(g, H),
             at + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
             at + "shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors | last, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})


def qwen3_next_mtp(out, name):
    """A GDN layer, an attention layer and mtp.*, which transformers ignores; in bf16."""
    c = tf.Qwen3NextConfig(**BASE, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
                           linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
                           moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
                           num_experts_per_tok=2, layer_types=["linear_attention", "full_attention"])
    save(out, name, build(tf.Qwen3NextForCausalLM, c), torch.bfloat16)
    path = os.path.join(out, name, "model.safetensors")
    tensors = load_file(path)
    g = torch.Generator().manual_seed(19)
    depth = {k.replace("model.layers.1.", "mtp.layers.0."): random_tensor(g, *v.shape)
             for k, v in tensors.items() if "layers.1." in k}
    depth |= {"mtp.fc.weight": random_tensor(g, H, 2 * H), "mtp.norm.weight": random_tensor(g, H),
              "mtp.pre_fc_norm_embedding.weight": random_tensor(g, H),
              "mtp.pre_fc_norm_hidden.weight": random_tensor(g, H)}
    save_file(tensors | depth, path, metadata={"format": "pt"})


def deepseek_fp8(out, name):
    """Block-quantised as published: 128 x 128 blocks, partial at the edges (kv_a has 144 rows)."""
    scaling = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=32.0,
                   beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, rope_theta=10000.0)
    c = tf.DeepseekV3Config(**dict(MLA, hidden_size=192, kv_lora_rank=128, n_routed_experts=2),
                            q_lora_rank=48, n_group=1, topk_group=1, first_k_dense_replace=1,
                            num_mtp_layers=0, rope_parameters=scaling)
    model = build(tf.DeepseekV3ForCausalLM, c).to(torch.bfloat16)
    path = os.path.join(out, name)
    shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(path)
    quantised, plain = quantise(load_file(os.path.join(path, "model.safetensors")))
    save_file(quantised, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    save_file(plain, path + ".dequantised.safetensors")
    config = json.load(open(os.path.join(path, "config.json")))
    config["quantization_config"] = FP8
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
        f.write("\n")


FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])


def quantise(tensors):
    """What is published for these tensors, and what torch gives back for the quantised ones."""
    quantised, plain = {}, {}
    for k, v in tensors.items():
        if v.dim() != 2 or "embed" in k or "lm_head" in k or k.endswith("mlp.gate.weight"):
            quantised[k] = v
            continue
        rows, cols = v.shape
        scale = torch.ones((rows + 127) // 128, (cols + 127) // 128)
        q = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                block = v[at].float()
                amax = block.abs().max()
                if amax > 0:
                    scale[i, j] = amax / 448
                q[at] = (block / scale[i, j]).to(torch.float8_e4m3fn)
        full = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        quantised[k], quantised[k + "_scale_inv"] = q, scale
        plain[k] = (q.float() * full).to(torch.bfloat16)
    return quantised, plain


def kimi_k2_model(out, name, fp8, **sizes):
    """DeepseekV3ForCausalLM.save_pretrained, then the configuration with the fields of the published
    Kimi-K2-Instruct: another model_type, rope_scaling with both betas 1, remote code named."""
    scaling = dict(type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=1.0,
                   beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    c = tf.DeepseekV3Config(
        **(MLA | dict(vocab_size=160, max_position_embeddings=131072) | sizes), q_lora_rank=48,
        n_group=1, topk_group=1, first_k_dense_replace=1, rms_norm_eps=1e-6, num_mtp_layers=0,
        routed_scaling_factor=2.827,
        rope_parameters=dict(scaling, rope_type="yarn", rope_theta=50000.0))
    model = build(tf.DeepseekV3ForCausalLM, c).to(torch.bfloat16)
    path = os.path.join(out, name)
    shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(path)
    tensors = load_file(os.path.join(path, "model.safetensors"))
    if fp8:
        stored, plain = quantise(tensors)
        save_file(stored, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
        tensors |= plain
    ids = torch.randint(0, 160, (1, 16), generator=torch.Generator().manual_seed(3))
    model = tf.DeepseekV3ForCausalLM(c).float().eval()
    model.set_attn_implementation("eager")
    joint = dict(tensors)
    for l in range(c.first_k_dense_replace, c.num_hidden_layers):  # as in memory
        at = f"model.layers.{l}.mlp.experts."
        one = lambda e, x: joint.pop(f"{at}{e}.{x}_proj.weight")
        experts = [(one(e, "gate"), one(e, "up"), one(e, "down")) for e in range(c.n_routed_experts)]
        joint[at + "gate_up_proj"] = torch.stack([torch.cat(x[:2]) for x in experts])
        joint[at + "down_proj"] = torch.stack([x[2] for x in experts])
    model.load_state_dict({k: v.float() for k, v in joint.items()})
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    save_file({"input_ids": ids, "logits": logits.contiguous()}, path + ".reference.safetensors")
    config = dict(
        architectures=["DeepseekV3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config",
                  "AutoModel": "modeling_deepseek.DeepseekV3Model",
                  "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        aux_loss_alpha=0.001, bos_token_id=158, eos_token_id=159, ep_size=1, first_k_dense_replace=1,
        hidden_act="silu", hidden_size=c.hidden_size, initializer_range=0.02,
        intermediate_size=c.intermediate_size, kv_lora_rank=c.kv_lora_rank,
        max_position_embeddings=131072, model_type="kimi_k2",
        moe_intermediate_size=c.moe_intermediate_size, moe_layer_freq=1, n_group=1,
        n_routed_experts=c.n_routed_experts, n_shared_experts=1, norm_topk_prob=True,
        num_attention_heads=c.num_attention_heads, num_experts_per_tok=c.num_experts_per_tok,
        num_hidden_layers=c.num_hidden_layers, num_key_value_heads=c.num_attention_heads,
        num_nextn_predict_layers=0, pretraining_tp=1, q_lora_rank=c.q_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim, qk_rope_head_dim=c.qk_rope_head_dim, rms_norm_eps=1e-06,
        rope_scaling=scaling, rope_theta=50000.0, routed_scaling_factor=2.827, scoring_func="sigmoid",
        seq_aux=True, tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc",
        torch_dtype="bfloat16", transformers_version="4.48.3", use_cache=True,
        v_head_dim=c.v_head_dim, vocab_size=160)
    if fp8:
        config["quantization_config"] = FP8
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
        f.write("\n")


def kimi_k2(out, name):
    kimi_k2_model(out, name, False)


def kimi_k2_fp8(out, name):
    """Partial blocks in both directions: 160 columns, 144 rows of kv_a."""
    kimi_k2_model(out, name, True, hidden_size=160, kv_lora_rank=128, n_routed_experts=2,
                  num_attention_heads=2, num_key_value_heads=2)


def bailing_moe(out, name):
    """Ling 2.0 with one depth of multi-token prediction; names only, its code is remote."""
    g = torch.Generator().manual_seed(13)
    n, kv, d, f, e = 4, 2, 16, 32, 4
    t = {"model.word_embeddings.weight": random_tensor(g, V, H), "lm_head.weight": random_tensor(g, V, H),
         "model.norm.weight": random_tensor(g, H)}
    for l in range(3):
        at = f"model.layers.{l}."
        t |= {at + "input_layernorm.weight": random_tensor(g, H),
              at + "post_attention_layernorm.weight": random_tensor(g, H),
              at + "attention.query_key_value.weight": random_tensor(g, (n + 2 * kv) * d, H),
              at + "attention.query_layernorm.weight": random_tensor(g, d),
              at + "attention.key_layernorm.weight": random_tensor(g, d),
              at + "attention.dense.weight": random_tensor(g, H, n * d)}
        mlps = [("mlp.", 96)] if l == 0 else [("mlp.shared_experts.", f)] + [
            (f"mlp.experts.{i}.", f) for i in range(e)]
        for mlp, width in mlps:
            t |= {at + mlp + "gate_proj.weight": random_tensor(g, width, H),
                  at + mlp + "up_proj.weight": random_tensor(g, width, H),
                  at + mlp + "down_proj.weight": random_tensor(g, H, width)}
        if l > 0:
            t |= {at + "mlp.gate.weight": random_tensor(g, e, H),
                  at + "mlp.gate.expert_bias": torch.rand(e, generator=g)}
    at = "model.layers.2."
    t |= {at + "enorm.weight": random_tensor(g, H), at + "hnorm.weight": random_tensor(g, H),
          at + "eh_proj.weight": random_tensor(g, H, 2 * H),
          at + "final_layernorm.weight": random_tensor(g, H)}
    write(out, name, dict(
        architectures=["BailingMoeV2ForCausalLM"], model_type="bailing_moe", vocab_size=V, hidden_size=H,
        num_hidden_layers=2, num_attention_heads=n, num_key_value_heads=kv, head_dim=d,
        intermediate_size=96, moe_intermediate_size=f, num_experts=e, num_experts_per_tok=2,
        num_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        score_function="sigmoid", moe_router_enable_expert_bias=True, first_k_dense_replace=1,
        num_nextn_predict_layers=1, use_qk_norm=True, use_qkv_bias=False, use_bias=False,
        hidden_act="silu", rms_norm_eps=1e-6, rope_theta=600000.0, partial_rotary_factor=0.5,
        rope_scaling=None, initializer_range=0.02, tie_word_embeddings=False, dtype="bfloat16"), t)


def arcee_kda(out, name):
    """Three KDA layers and one of attention without rotation; names inferred, none was published."""
    g = torch.Generator().manual_seed(17)
    n, a, f = 2, 32, 96
    t = {"model.embed_tokens.weight": random_tensor(g, V, H), "lm_head.weight": random_tensor(g, V, H),
         "model.norm.weight": random_tensor(g, H)}
    for l in range(4):
        at = f"model.layers.{l}."
        t |= {at + "input_layernorm.weight": random_tensor(g, H),
              at + "post_attention_layernorm.weight": random_tensor(g, H),
              at + "mlp.up_proj.weight": random_tensor(g, f, H),
              at + "mlp.down_proj.weight": random_tensor(g, H, f)}
        at += "self_attn."
        if l == 3:
            t |= {at + "q_proj.weight": random_tensor(g, 4 * 16, H),
                  at + "k_proj.weight": random_tensor(g, 2 * 16, H),
                  at + "v_proj.weight": random_tensor(g, 2 * 16, H),
                  at + "o_proj.weight": random_tensor(g, H, 4 * 16)}
            continue
        for x in "qkv":
            t |= {at + f"{x}_proj.weight": random_tensor(g, n * a, H),
                  at + f"{x}_conv1d.weight": random_tensor(g, n * a, 1, 4)}
        t |= {at + "f_proj.0.weight": random_tensor(g, a, H),
              at + "f_proj.1.weight": random_tensor(g, n * a, a),
              at + "g_proj.0.weight": random_tensor(g, a, H),
              at + "g_proj.1.weight": random_tensor(g, n * a, a),
              at + "b_proj.weight": random_tensor(g, n, H),
              at + "A_log": torch.rand(n, generator=g),
              at + "dt_bias": torch.rand(n * a, generator=g),
              at + "o_norm.weight": random_tensor(g, a),
              at + "o_proj.weight": random_tensor(g, H, n * a)}
    write(out, name, dict(
        architectures=["ArceeKDAForCausalLM"], model_type="arcee_kda", vocab_size=V, hidden_size=H,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=f,
        hidden_act="relu2", rms_norm_eps=1e-5, num_heads=n, head_dim=a, conv_size=4, expand_v=1.0,
        attn=dict(layers=[3]), initializer_range=0.02, tie_word_embeddings=False, dtype="bfloat16"), t)


MODELS = dict(qwen2_tiny=qwen2, qwen3_tiny=qwen3, qwen3_moe_tiny=qwen3_moe,
              qwen3_moe_joint_tiny=qwen3_moe_joint, llama3_tiny=llama3,
              moonlight_tiny=moonlight, bailing_hybrid_tiny=bailing_hybrid, qwen3_5_tiny=qwen3_5,
              deepseek_mtp_tiny=deepseek_mtp, qwen3_next_mtp_tiny=qwen3_next_mtp,
              deepseek_fp8_tiny=deepseek_fp8, kimi_k2_tiny=kimi_k2, kimi_k2_fp8_tiny=kimi_k2_fp8,
              bailing_moe_tiny=bailing_moe, arcee_kda_tiny=arcee_kda)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MODELS:
        MODELS[name](sys.argv[1], name)
        print(name)
