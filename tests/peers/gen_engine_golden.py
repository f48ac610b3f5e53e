#!/usr/bin/env python3
"""Write tests/data/engine_kda.safetensors: inputs, outputs and gradients of kda_oracle.py in float64
for the unit tests of the engine. Needs numpy and safetensors.

    tests/peers/gen_engine_golden.py [OUT]

Names are CASE/in/NAME, CASE/param/NAME, CASE/out/NAME and CASE/grad/NAME. Sizes of every case are
repeated in tests/test_engine_oracle.c, which checks them against the shapes here."""
import os
import sys

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kda_oracle as oracle  # noqa: E402

OPS = {
    "softplus": dict(kind="kda", B=2, T=19, H=2, HV=2, K=8, V=6),
    "grouped": dict(kind="kda", B=1, T=37, H=1, HV=2, K=8, V=8),
    "bounded": dict(kind="kda", B=1, T=70, H=1, HV=1, K=8, V=8, lower_bound=-5.0),
    "negative": dict(kind="kda", B=1, T=33, H=1, HV=1, K=8, V=8, allow_neg_eigval=True),
    "varlen": dict(kind="kda", B=1, T=41, H=1, HV=1, K=8, V=8, cu_seqlens=[0, 1, 17, 18, 41]),
    "gdn_grouped": dict(kind="gdn", B=2, T=21, H=1, HV=2, K=8, V=8),
    "gdn_varlen": dict(kind="gdn", B=1, T=70, H=1, HV=1, K=6, V=8, cu_seqlens=[0, 5, 70]),
    "gdn2": dict(kind="gdn2", B=1, T=40, H=1, HV=1, K=8, V=6),
}
LAYER = dict(level="layer", B=1, T=19, H=2, HV=2, K=6, V=6, D=10)
LAYERS = {
    "full": dict(LAYER),
    "f_rank": dict(LAYER, f_rank=4),
    "z_rank": dict(LAYER, gate_rank=5),
    "both_ranks": dict(LAYER, f_rank=4, gate_rank=5),
    "bounded_varlen": dict(LAYER, lower_bound=-5.0, cu_seqlens=[0, 2, 11, 19]),
    "gdn_grouped": dict(LAYER, kind="gdn", B=2, T=15, HV=4),
}


def extreme():
    """Decay so strong that e^G underflows within a chunk."""
    s, a = oracle.make_op(dict(kind="kda", T=48, H=1, HV=1, K=8, V=8, round_inputs=None))
    a["g"] = -40.0 * np.random.default_rng(7).random(a["g"].shape)
    s["raw_gate"] = False
    return s, a


def main():
    out = {}

    def put(case, group, arrays):
        for name, value in arrays.items():
            out["%s/%s/%s" % (case, group, name)] = np.ascontiguousarray(value, np.float64)

    cases = {name: oracle.make_op(dict(spec, round_inputs=None)) for name, spec in OPS.items()}
    cases["extreme"] = extreme()
    for name, (s, a) in cases.items():
        results, grads = oracle.run_op(s, a)
        put(name, "in", a)
        put(name, "out", results)
        put(name, "grad", grads)
    for name, spec in LAYERS.items():
        s, a, p = oracle.make_layer(dict(spec, round_inputs=None, initial_state=False))
        y, _, saved = oracle.layer_forward(s, a["x"], p, a["s0"], s["cu_seqlens"])
        dx, grads, _ = oracle.layer_backward(s, p, saved, a["dy"], a["ds_final"])
        put("layer_" + name, "in", dict(x=a["x"], dy=a["dy"]))
        put("layer_" + name, "param", p)
        put("layer_" + name, "out", dict(y=y))
        put("layer_" + name, "grad", dict(grads, x=dx))
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "../data/engine_kda.safetensors")
    save_file(out, path)


if __name__ == "__main__":
    main()
