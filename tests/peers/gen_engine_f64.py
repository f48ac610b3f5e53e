#!/usr/bin/env python3
"""Write tests/data/engine_f64.safetensors: gradients of whole models, computed in float64 by others.

    tests/peers/gen_engine_f64.py [OUT]

Two kinds of model. Hugging Face ones run in transformers itself, whose code asks for float32 in places:
while it runs here torch.float32 means torch.float64. Those of FLA and Megatron, whose own references
were made by kernels with TF32 products inside, are written out below in torch with autograd: the
recurrence is transformers' token-by-token KDA, everything else follows the formulas of the layers they
were saved by (FLA's KDA layer; Megatron's hybrid stack of KDA, MLA, MLP and MoE).

Names are FIXTURE/loss and FIXTURE/grad/STORED NAME, gradients of at most 1024 elements and those that
KEPT names; tokens and labels are those of the fixture's reference file."""
import glob
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as kimi

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
HF = ["kimi_linear_tiny", "deepseek_v3_tiny", "deepseek_v3_tiny_noq", "qwen3_next_tiny",
      "llama_tiny_tied"]
LARGEST = 1024  # elements of a gradient that is kept
# Larger ones where the fixture's TF32 reference is more than 5e-3 away.
KEPT = ("model.layers.0.attn.f_proj.0.weight", "decoder.layers.2.self_attention.in_proj.weight.g",
        "decoder.layers.4.self_attention.in_proj.weight.g")


def everything_is_double():
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double


def next_token_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1).long())


def rms(x, w, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def conv(x, w):
    """Causal depthwise convolution of x [B, T, C] with w [C, 1, W], then SiLU."""
    pad = w.shape[-1] - 1
    return F.silu(F.conv1d(F.pad(x.transpose(1, 2), (pad, 0)), w, groups=x.shape[-1]).transpose(1, 2))


def kda(q, k, v, f, beta, A_log, dt_bias, bound):
    """q, k, v, f [B, T, N, D] before norm and gate; beta [B, T, N] before the sigmoid."""
    a = f + dt_bias.view(f.shape[2:])
    rate = A_log.exp().view(1, 1, -1, 1)
    g = bound * torch.sigmoid(rate * a) if bound else -rate * F.softplus(a, threshold=1e9)
    o, _ = kimi.recurrent_kimi_delta_attention(q, k, v, g, torch.sigmoid(beta), None, False,
                                               use_qk_l2norm_in_kernel=True)
    return o


def heads(x, n):
    return x.reshape(*x.shape[:2], n, -1)


def fla_model(w, ids):
    """FLA's KDAForCausalLM: low-rank decay and output gate, the gate with a bias, softplus decay."""
    x = w["model.embeddings.weight"][ids]
    for i in range(3):
        p = {k.split(".", 3)[3]: t for k, t in w.items() if k.startswith(f"model.layers.{i}.")}
        h = rms(x, p["attn_norm.weight"], 1e-6)
        n = p["attn.A_log"].numel()
        q, k, v = (heads(conv(h @ p[f"attn.{c}_proj.weight"].T, p[f"attn.{c}_conv1d.weight"]), n)
                   for c in "qkv")
        f = heads(h @ p["attn.f_proj.0.weight"].T @ p["attn.f_proj.1.weight"].T, n)
        z = h @ p["attn.g_proj.0.weight"].T @ p["attn.g_proj.1.weight"].T + p["attn.g_proj.1.bias"]
        o = kda(q, k, v, f, h @ p["attn.b_proj.weight"].T, p["attn.A_log"], p["attn.dt_bias"], 0)
        o = rms(o, p["attn.o_norm.weight"], 1e-6) * torch.sigmoid(heads(z, n))
        x = x + o.flatten(2) @ p["attn.o_proj.weight"].T
        h = rms(x, p["mlp_norm.weight"], 1e-6)
        x = x + (F.silu(h @ p["mlp.gate_proj.weight"].T) * (h @ p["mlp.up_proj.weight"].T)) \
            @ p["mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"], 1e-6) @ w["lm_head.weight"].T


def mcore_kda(p, h):
    n = p["A_log"].numel()
    q, k, v = (heads(conv(h @ p[f"in_proj.weight.{c}"].T, p[f"conv1d.weight.{c}"]), n)
               for c in ("query", "key", "value"))
    f, z = (heads(h @ p[f"in_proj.weight.{c}"].T, n) for c in ("g", "gate"))
    o = kda(q, k, v, f, h @ p["beta_proj.weight"].T, p["A_log"], p["dt_bias"], -5.0)
    o = rms(o, p["out_norm.weight"], 1e-6) * torch.sigmoid(z)
    return o.flatten(2) @ p["out_proj.weight"].T


def rotate(x, base=10000.0):
    """Pairs (2i, 2i+1) of x [B, T, N, R] by the angle of their position, written half-split."""
    r = x.shape[-1]
    angle = torch.arange(x.shape[1]).double()[:, None] * base ** (-torch.arange(0, r, 2).double() / r)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def mcore_mla(p, h, n=4, dn=32, dr=16, rk=32):
    B, T, _ = h.shape
    q = rms(h @ p["linear_q_down_proj.weight"].T, p["q_layernorm.weight"], 1e-6)
    q = heads(q @ p["linear_q_up_proj.weight"].T, n)
    down = h @ p["linear_kv_down_proj.weight"].T
    kv = heads(rms(down[..., :rk], p["kv_layernorm.weight"], 1e-6) @ p["linear_kv_up_proj.weight"].T, n)
    shared = rotate(down[..., None, rk:]).expand(B, T, n, dr)
    q = torch.cat([q[..., :dn], rotate(q[..., dn:])], -1)
    k = torch.cat([kv[..., :dn], shared], -1)
    score = torch.einsum("bqnd,bknd->bnqk", q, k) * (dn + dr) ** -0.5
    score = score.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    o = torch.einsum("bnqk,bknd->bqnd", score.softmax(-1), kv[..., dn:])
    return o.flatten(2) @ p["linear_proj.weight"].T


def swiglu(h, fc1, fc2):
    gate, up = (h @ fc1.T).chunk(2, -1)
    return (F.silu(gate) * up) @ fc2.T


def mcore_moe(p, h, top=2, scale=2.5):
    x = h.reshape(-1, h.shape[-1])
    s = torch.sigmoid(x @ p["router.weight"].T)
    chosen = (s + p["router.expert_bias"]).topk(top).indices
    w = s.gather(1, chosen)
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * scale
    fc1, fc2 = (p[f"experts.experts.linear_fc{i}.weight"] for i in (1, 2))
    y = swiglu(x, p["shared_experts.linear_fc1.weight"], p["shared_experts.linear_fc2.weight"])
    for e in range(fc1.shape[0]):
        share = (w * (chosen == e)).sum(-1, keepdim=True)
        y = y + share * swiglu(x, fc1[e], fc2[e])
    return y.reshape(h.shape)


def mcore_model(w, ids, pattern="K-K-KE+E"):
    x = w["embedding.word_embeddings.weight"][ids]
    for i, letter in enumerate(pattern):
        p = {k[len(f"decoder.layers.{i}."):]: t for k, t in w.items()
             if k.startswith(f"decoder.layers.{i}.")}
        norm = p["input_layernorm.weight"] if letter in "K+" else p["pre_mlp_layernorm.weight"]
        p = {k.split(".", 1)[1]: t for k, t in p.items() if k.startswith(("self_attention.", "mlp."))}
        h = rms(x, norm, 1e-6)
        if letter == "-":
            x = x + swiglu(h, p["linear_fc1.weight"], p["linear_fc2.weight"])
        else:
            x = x + {"K": mcore_kda, "+": mcore_mla, "E": mcore_moe}[letter](p, h)
    return rms(x, w["decoder.final_norm.weight"], 1e-6) @ w["output_layer.weight"].T


def report(name, ref, logits, loss, grads):
    """How far the fixture's own reference is from the float64 values."""
    far = {n: ((ref["grad." + n].double() - g).norm() / g.norm()).item() for n, g in grads.items()}
    worst = max(far, key=far.get)
    r = ((ref["logits"].double() - logits).norm() / logits.norm()).item()
    print(f"{name}: reference differs: logits {r:.2e}, loss {abs(ref['loss'].item() - loss):.1e}, "
          f"gradient of {worst} {far[worst]:.2e}")


def keep(out, name, loss, grads):
    out[f"{name}/loss"] = loss.detach().reshape(1)
    for n, g in grads.items():
        if g.numel() <= LARGEST or n in KEPT:
            out[f"{name}/grad/{n}"] = g.reshape(-1).contiguous()


def double_frequencies(model):
    """The rotary table is made when the model is built, in float32; all these models' is the plain one."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            r = 2 * module.inv_freq.numel()
            base = model.config.rope_parameters["rope_theta"]
            module.inv_freq = base ** (-torch.arange(0, r, 2).double() / r)


def run_hf(out, name, ref, model):
    double_frequencies(model)
    logits = model(input_ids=ref["input_ids"]).logits
    loss = next_token_loss(logits, ref["input_ids"])
    loss.backward()
    # Only names that the reference has: transformers fuses experts, whose stored names are others.
    grads = {n: p.grad for n, p in model.named_parameters() if "grad." + n in ref}
    report(name, ref, logits.detach(), loss.item(), grads)
    keep(out, name, loss, grads)


def run_written(out, name, weights, ref, model):
    w = {n: t.double().requires_grad_() for n, t in weights.items()}
    logits = model(w, ref["input_ids"])
    if "labels" in ref:
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ref["labels"].reshape(-1).long())
    else:
        loss = next_token_loss(logits, ref["input_ids"])
    loss.backward()
    grads = {n: t.grad for n, t in w.items() if "grad." + n in ref}
    report(name, ref, logits.detach(), loss.item(), grads)
    keep(out, name, loss, grads)


def main():
    torch.set_num_threads(2)
    out = {}
    fla = {}
    for file in glob.glob(f"{ROOT}/fixtures/fla/kda_trained/*.safetensors"):
        fla.update(load_file(file))
    legacy = load_file(f"{ROOT}/fixtures/mcore/legacy.plain.safetensors")
    references = [load_file(f"{ROOT}/fixtures/{n}.reference.safetensors")
                  for n in ("fla/kda_trained", "mcore/legacy")]
    models = {n: (load_file(f"{ROOT}/fixtures/hf/{n}.reference.safetensors"),
                  AutoModelForCausalLM.from_pretrained(f"{ROOT}/fixtures/hf/{n}", dtype=torch.float32,
                                                       attn_implementation="eager",
                                                       experts_implementation="eager").double().eval())
              for n in HF}
    everything_is_double()
    run_written(out, "kda_trained", fla, references[0], fla_model)
    run_written(out, "legacy", legacy, references[1], mcore_model)
    for name, (ref, model) in models.items():
        run_hf(out, name, ref, model)
    path = sys.argv[1] if len(sys.argv) > 1 else f"{ROOT}/tests/data/engine_f64.safetensors"
    save_file(out, path)


if __name__ == "__main__":
    main()
