#!/usr/bin/env python3
"""Write tests/data/engine_mla.safetensors: inputs, intermediates, outputs and gradients of mla_oracle.py
in float64 for the unit tests of the engine. Needs numpy and safetensors.

    tests/peers/gen_engine_mla.py [OUT]

Names are CASE/GROUP.NAME as the oracle dumps them, for GROUP in, param, dout, out, mid and grad; MLA
cases have mid.absorbed too, the core attention computed from cached latents. Arrays of tokens [s, b, ..]
are written [b, s, ..], the engine's order, in the MLA and MTP cases. Integers are written as F64. Sizes are repeated in
tests/test_engine_mla.c, which checks them against the shapes here."""
import os
import sys

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mla_oracle as oracle  # noqa: E402

MLA = dict(seq=6, batch=2, hidden=12, heads=2, kv_lora_rank=6, qk_head_dim=4,
           qk_pos_emb_head_dim=4, v_head_dim=3)
YARN = dict(rope_type="yarn", qk_pos_emb_head_dim=8, rotary_scaling_factor=40.0, mscale=1.0,
            mscale_all_dim=0.7)
MOE = dict(seq=6, batch=2, hidden=8, experts=8, topk=3, moe_ffn=5, shared_ffn=6)
SOFTMAX = dict(MOE, score_function="softmax", use_expert_bias=False, scaling=None)
CASES = {
    "mla_plain": ("mla", MLA),
    "mla_q": ("mla", dict(MLA, q_lora_rank=5)),
    "mla_no_norm": ("mla", dict(MLA, q_lora_rank=5, qk_layernorm=False)),
    "mla_nope": ("mla", dict(MLA, no_rope=True)),
    "mla_nope_element": ("mla", dict(MLA, q_lora_rank=5, no_rope=True, gate="elementwise")),
    "mla_head": ("mla", dict(MLA, q_lora_rank=5, gate="headwise")),
    "mla_yarn": ("mla", dict(MLA, **YARN)),
    "mla_partial": ("mla", dict(MLA, qk_pos_emb_head_dim=8, rotary_percent=0.5,
                                zero_centered_gamma=True)),
    "mla_packed": ("mla", dict(MLA, seq=9, batch=1, cu_seqlens=[0, 4, 9], gate="headwise")),
    "mla_offset": ("mla", dict(MLA, batch=1, position_offset=5)),
    "mla_long": ("mla", dict(MLA, seq=70, batch=1, hidden=6, q_lora_rank=3)),
    "norm": ("rmsnorm", dict(seq=5, batch=2, hidden=16)),
    "norm_centered": ("rmsnorm", dict(seq=5, batch=2, hidden=16, zero_centered_gamma=True, eps=1e-5)),
    "mlp": ("mlp", dict(seq=5, batch=2, hidden=8, ffn=6)),
    "mlp_clamp": ("mlp", dict(seq=5, batch=2, hidden=8, ffn=6, clamp=0.8)),
    "moe": ("moe", MOE),
    "moe_groups": ("moe", dict(MOE, num_groups=4, group_topk=2, topk=4, z_loss_coeff=0.05,
                               aux="aux_loss", aux_coeff=0.3)),
    "moe_softmax_pre": ("moe", dict(SOFTMAX, pre_softmax=True, aux="aux_loss", aux_coeff=0.3)),
    "moe_softmax_post": ("moe", dict(SOFTMAX, pre_softmax=False, shared_gate=True,
                                     z_loss_coeff=0.05)),
    "moe_one": ("moe", dict(MOE, topk=1, shared_ffn=0)),
    "lm": ("lm_loss", dict(seq=6, batch=2, hidden=8, vocab=11, padded_vocab=12)),
    "lm_tied": ("lm_loss", dict(seq=6, batch=2, hidden=8, vocab=11, padded_vocab=12, tied=True,
                                vocab_parts=3)),
    "mtp": ("mtp_input", dict(seq=5, batch=2, hidden=8, vocab=11)),
}


def main():
    out = {}
    for name, (kind, spec) in CASES.items():
        case = oracle.CASES[kind](spec)
        arrays = case.arrays()
        if kind == "mla":
            arrays["mid.absorbed"] = case.absorbed_core()[0]
        lead = (case.c["seq"], case.c["batch"])
        for key, value in arrays.items():
            value = np.asarray(value)
            if kind in ("mla", "mtp_input") and value.shape[:2] == lead and not key.startswith("param"):
                value = value.swapaxes(0, 1)
            if value.dtype.kind in "iuf":  # not the spec, which is text
                out[f"{name}/{key}"] = np.ascontiguousarray(value, np.float64)
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "../data/engine_mla.safetensors")
    save_file(out, path)


if __name__ == "__main__":
    main()
