#!/usr/bin/env python3
"""Write tests/data/quant.safetensors: what quant_oracle.py computes, for tests/test_quant.c and
tests/test_engine_quant.c.

    tests/peers/gen_quant.py [OUT]

prefill/in/NAME              inputs, float64, packed sequences of 5 and 67 tokens
prefill/POLICY/NAME          outputs (o, s_final) and gradients of one policy, all of it in float64
qdq/CASE/{x, y, ...}         one quantiser: float32 in and out, codes, scales"""
import os
import sys

import numpy as np
from safetensors.numpy import save_file

import quant_oracle as q

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
SHAPE = dict(B=1, T=72, H=1, HV=2, K=18, V=10, cu_seqlens=[0, 5, 72], g_range=0.5)
KINDS = {"rounded": dict(state={"block_v": 16}, elementwise={
    "gate_prefix": "float16", "gate_exp": "float16", "value_residual": "bfloat16",
    "state_decay": "float16", "state_add": "bfloat16", "output_add": "float16"})}


def policies():
    for name in ("off", "fp8_operands", "nvfp4_operands", "fp16_accumulation"):
        yield name, q.preset(name)
    rounded = q.preset("fp8_with_state")
    rounded["linear_attention"][0]["cfg"].update(KINDS["rounded"])
    yield "rounded", rounded
    # no two sides alike: operands that other policies share are apart here
    mixed = q.preset("fp8_operands")
    for pattern, cfg in (("*key_interaction.rhs*", q.NVFP4_CFG), ("*output_score.lhs*", q.NVFP4_CFG),
                         ("*wy_value.lhs*", q.NVFP4_CFG), ("*wy_key.rhs*", None),
                         ("*state_read.rhs*", q.NVFP4_CFG), ("*output_value.rhs*", q.NVFP4_CFG),
                         ("*state_update.lhs*", q.NVFP4_CFG), ("*kda_state_quantizer", dict(
                             num_bits=8, narrow_range=True, type="dynamic", axis=[0, 1]))):
        rule = {"quantizer_name": pattern}
        rule.update({"enable": False} if cfg is None else {"cfg": cfg})
        mixed["quant_cfg"].append(rule)
    mixed["linear_attention"][0]["cfg"]["matmul"] = {
        "wy_key": {"accumulator_dtype": "bfloat16", "reduction_block": 24},
        "state_update": {"accumulator_dtype": "float32", "reduction_block": 16}}
    mixed["linear_attention"][0]["cfg"]["state"] = {"block_v": 16}
    yield "mixed", mixed


def prefill(out):
    a = q.make_inputs(**SHAPE)
    for name, value in a.items():
        out["prefill/in/" + name] = np.asarray(value, np.float64)
    for name, config in policies():
        run = q.Prefill(q.Policy(config), np.float64)
        o, final = run.forward(a["q"], a["k"], a["v"], a["g"], a["beta"], a["s0"], None,
                               SHAPE["cu_seqlens"])
        values = dict(run.backward(a["do"], a["ds_final"]), o=o, s_final=final)
        for key, value in values.items():
            out["prefill/%s/%s" % (name, key)] = np.ascontiguousarray(value, np.float64)


def rows(seed, shape, spread=2.0):
    rng = np.random.default_rng(seed)
    scale = np.exp(spread * rng.standard_normal(shape[:-1] + (1,)))
    x = (rng.standard_normal(shape) * scale).astype(np.float32)
    x[0, :4] = [0.0, -0.0, x[0].max() * 3, -1e-30]
    x[1] = 0
    return x


def quantisers(out):
    def put(case, x, y, detail, codes):
        out["qdq/%s/x" % case], out["qdq/%s/y" % case] = x, y
        for key in codes:
            value = np.ascontiguousarray(detail[key])
            out["qdq/%s/%s" % (case, key)] = value.astype(np.uint8) if "code" in key else value

    x = rows(1, (9, 40))
    for arith in ("gpu", "ieee"):
        d = {}
        y = q.fp8_qdq(x, (0,), detail=d, arith=arith)
        put("fp8_rows_" + arith, x, y, d, ("code", "scale"))
    for case, amax in (("dynamic", None), ("static", np.float32(0.7))):
        d = {}
        y = q.fp8_qdq(x, None, amax, d)
        put("fp8_tensor_" + case, x, y, d, ("code",))
    for profile in ("triton", "ext", "store"):
        d = {}
        y = q.nvfp4_qdq(x, profile=profile, detail=d)
        put("nvfp4_" + profile, x, y, d, ("code", "scale_code"))
    for mode in ("ceil_div", "ceil_mul", "floor"):
        for fmt in ("e4m3", "e5m2"):
            d = {}
            y = q.mxfp8_qdq(x, mode, fmt, d)
            d["code"] = d["code"][..., :40]
            put("mxfp8_%s_%s" % (mode, fmt), x, y, d, ("code", "scale_code"))
    for style in ("deepseek", "te", "te_pow2"):
        d = {}
        y = q.fp8_block_qdq(x, (4, 16), style, d)
        put("block_" + style, x, y, d, ())
    state = rows(2, (2 * 9, 40)).reshape(2, 9, 40)
    for fmt in ("e4m3", "int8"):
        d = {}
        y = q.state_qdq(state, 16, fmt, d)
        put("state_" + fmt, state, y, d, ("scale",))


def main():
    out = {}
    prefill(out)
    quantisers(out)
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "tests/data/quant.safetensors")
    save_file({k: np.ascontiguousarray(v) for k, v in out.items()}, path)
    print("%d arrays, %d bytes" % (len(out), os.path.getsize(path)))


if __name__ == "__main__":
    main()
