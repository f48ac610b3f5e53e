"""A Hugging Face model as per-rank safetensors in the names and shapes of vLLM's modules: merged
qkv_proj and gate_up_proj, key/value heads repeated where ranks outnumber them, padded vocabulary.

usage: gen_rank_safetensors.py MODEL_DIR OUTDIR TP
"""

import glob
import json
import os
import sys

import torch
from safetensors.torch import load_file, save_file


def part(t, r, ways, axis=0):
    return t.chunk(ways, axis)[r].contiguous()


def padded(t, tp):
    rows = -(-t.shape[0] // (64 * tp)) * 64 * tp
    out = torch.zeros(rows, t.shape[1], dtype=t.dtype)
    out[: t.shape[0]] = t
    return out


def rank(weights, config, r, tp):
    kv = config["num_key_value_heads"]
    ways = min(kv, tp)
    out = {}
    for n, t in weights.items():
        if "q_proj" in n:
            k, v = (weights[n.replace("q_proj", x)] for x in ("k_proj", "v_proj"))
            own = r * ways // tp
            out[n.replace("q_proj", "qkv_proj")] = torch.cat(
                [part(t, r, tp), part(k, own, ways), part(v, own, ways)])
        elif "gate_proj" in n:
            up = weights[n.replace("gate_proj", "up_proj")]
            out[n.replace("gate_proj", "gate_up_proj")] = torch.cat([part(t, r, tp), part(up, r, tp)])
        elif "k_proj" in n or "v_proj" in n or "up_proj" in n:
            continue
        elif "o_proj" in n or "down_proj" in n:
            out[n] = part(t, r, tp, 1)
        elif "embed_tokens" in n or "lm_head" in n:
            out[n] = part(padded(t, tp), r, tp)
        else:
            out[n] = t
    return out


def main():
    source, target, tp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    config = json.load(open(f"{source}/config.json"))
    weights = {}
    for f in sorted(glob.glob(f"{source}/*.safetensors")):
        weights.update(load_file(f))
    os.makedirs(target, exist_ok=True)
    json.dump(config, open(f"{target}/config.json", "w"), indent=2, sort_keys=True)
    for r in range(tp):
        out = rank(weights, config, r, tp)
        names = sorted(out)
        for p, half in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
            save_file({n: out[n] for n in half}, f"{target}/model-rank-{r}-part-{p}.safetensors")


if __name__ == "__main__":
    main()
