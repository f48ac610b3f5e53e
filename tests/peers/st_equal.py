"""Two safetensors checkpoints (files or directories) are equal as safetensors.torch reads them.

usage: st_equal.py A B [FROM=TO ...]

FROM=TO: a name of A that B lacks is looked up again with FROM replaced by TO.
"""

import glob
import os
import sys

import torch
from safetensors.torch import load_file


def load(path):
    files = sorted(glob.glob(os.path.join(path, "*.safetensors"))) if os.path.isdir(path) else [path]
    tensors = {}
    for file in files:
        for name, tensor in load_file(file).items():
            if name in tensors:
                sys.exit(f"{file}: '{name}' appears twice")
            tensors[name] = tensor
    return tensors


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def main():
    a, b = load(sys.argv[1]), load(sys.argv[2])
    rules = [rule.split("=", 1) for rule in sys.argv[3:]]
    for name, want in a.items():
        found = name
        for old, new in rules:
            if found not in b:
                found = name.replace(old, new)
        if found not in b:
            sys.exit(f"'{name}' is missing in {sys.argv[2]}")
        got = b.pop(found)
        if got.dtype != want.dtype or got.shape != want.shape or not torch.equal(raw(got), raw(want)):
            sys.exit(f"'{name}' differs")
    if b:
        sys.exit(f"{sys.argv[2]} also has {sorted(b)[:4]}")
    print(f"{len(a)} tensors identical")


main()
