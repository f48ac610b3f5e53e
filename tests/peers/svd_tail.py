"""Errors that `convert --kda-*-lora-rank R` reports are the tails of numpy's singular values, and the
factors multiply to the best approximation.

usage: svd_tail.py FULL.safetensors LOW.safetensors LOSSY.json RANK

Both in Megatron's layout: full projections are the parts .g (decay) and .gate of in_proj. Tolerance: factors of F32 are rounded to 24 bits, 6e-8 relative each.
"""

import json
import re
import sys

import numpy as np
from safetensors.numpy import load_file


def main():
    full, low, rank = load_file(sys.argv[1]), load_file(sys.argv[2]), int(sys.argv[4])
    reported = {}
    for line in json.load(open(sys.argv[3]))["lossy"]:
        m = re.match(r"blocks\.(\d+)\.kda\.([fg])\.weight: rank \d+ .*error (\S+)", line)
        reported[int(m[1]), m[2]] = float(m[3])
    if not reported:
        sys.exit("nothing reported")
    layers = [k for k in low if k.endswith(".f_a_proj.weight") or k.endswith(".g_a_proj.weight")]
    if len(layers) != len(reported):
        sys.exit(f"{len(layers)} factors, {len(reported)} reports")
    worst = 0
    for name in layers:
        stem = name[: -len("_a_proj.weight")]
        part = "g" if stem[-1] == "f" else "gate"
        w = full[f"{stem[:-1]}in_proj.weight.{part}"].astype(np.float64)
        a = low[name].astype(np.float64)
        b = low[stem + "_b_proj.weight"].astype(np.float64)
        if a.shape[0] != rank or b.shape[1] != rank:
            sys.exit(f"{name}: {a.shape}, {b.shape}")
        u, s, v = np.linalg.svd(w, full_matrices=False)
        tail = np.sqrt((s[rank:] ** 2).sum() / (s**2).sum())
        said = reported[int(re.search(r"\.(\d+)\.", name)[1]), stem[-1]]
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        off = np.linalg.norm(b @ a - best) / np.linalg.norm(w)
        if abs(said - tail) > 5e-4 * tail + 2e-7 or off > 3e-7:
            sys.exit(f"{stem}: reported {said}, numpy {tail}; off the best approximation by {off}")
        worst = max(worst, off)
    print(f"{len(layers)} layers: errors are numpy's tails, products within {worst:.1e} of the best")


main()
