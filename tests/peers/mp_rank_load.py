"""Rank files written by ckpt load in PyTorch's restricted loader, and hold what real Megatron saved.

usage: mp_rank_load.py ROOT [REAL_ROOT]

Every model_optim_rng.pt below ROOT is read with weights_only=True, argparse.Namespace allowed, as
Megatron-LM allows it. With REAL_ROOT, a save of the same model and mesh by real Megatron code: the
same rank directories, and in each the same parameters, shapes, dtypes and values, in the model chunks
of the same names.
"""

import argparse
import glob
import os
import sys
import zipfile

import torch

ALLOWED = [argparse.Namespace]


def ranks(root):
    found = {}
    for path in sorted(glob.glob(f"{root}/*/mp_rank_*/model_optim_rng.pt")):
        found[os.path.basename(os.path.dirname(path))] = path
    return found


def models(state):
    return {k: v for k, v in state.items() if k.startswith("model")}


def main():
    mine = ranks(sys.argv[1])
    if not mine:
        sys.exit(f"{sys.argv[1]}: no ranks")
    real = ranks(sys.argv[2]) if len(sys.argv) > 2 else {}
    if real and sorted(real) != sorted(mine):
        sys.exit(f"ranks {sorted(mine)}, expected {sorted(real)}")
    count = 0
    for name, path in mine.items():
        if zipfile.ZipFile(path).testzip() is not None:
            sys.exit(f"{path}: CRC")
        with torch.serialization.safe_globals(ALLOWED):
            state = torch.load(path, weights_only=True)
        for key in ("args", "iteration", "checkpoint_version"):
            if key not in state:
                sys.exit(f"{path}: no {key}")
        if not real:
            count += sum(len(m) for m in models(state).values())
            continue
        expected = torch.load(real[name], weights_only=False)
        if sorted(models(state)) != sorted(models(expected)):
            sys.exit(f"{path}: {sorted(models(state))}")
        for key, model in models(expected).items():
            want = {k: v for k, v in model.items() if torch.is_tensor(v)}
            got = state[key]
            if sorted(got) != sorted(want):
                sys.exit(f"{path}: {key}: {sorted(set(got) ^ set(want))}")
            for k, v in want.items():
                if got[k].dtype != v.dtype or got[k].shape != v.shape or not torch.equal(got[k], v):
                    sys.exit(f"{path}: {key}: {k} differs")
                count += 1
    print(f"{len(mine)} ranks, {count} parameters")


if __name__ == "__main__":
    main()
