"""torch.load(weights_only=True) of what ckpt wrote gives the tensors of safetensors files.

usage: torch_equal.py TORCH SAFETENSORS      files or directories
       torch_equal.py --make SAFETENSORS     write a file with every dtype, and odd shapes

Every file is loaded plainly and memory-mapped, and its zip archive is tested (CRCs included).
"""

import glob
import os
import sys
import zipfile

import torch
from safetensors.torch import load_file, save_file

DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu complex64"
).split()


def files(path, suffix):
    found = sorted(glob.glob(f"{path}/*{suffix}")) if os.path.isdir(path) else [path]
    if not found:
        sys.exit(f"{path}: no *{suffix}")
    return found


def make(path):
    torch.manual_seed(0)
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        raw = torch.randint(0, 256, (6, 8, dtype.itemsize), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).squeeze(-1) if name != "bool" else raw.squeeze(-1) > 127
        tensors[name + ".empty"] = torch.empty((0, 3), dtype=dtype)
    tensors["scalar"] = torch.tensor(1.5)
    tensors["naïve 'name'"] = torch.ones(1)
    save_file(tensors, path)


def bits(t):
    return t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t.reshape(-1)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def main():
    if sys.argv[1] == "--make":
        make(sys.argv[2])
        return
    want, got = {}, {}
    for file in files(sys.argv[2], ".safetensors"):
        want.update(load_file(file))
    for file in files(sys.argv[1], ".bin"):
        bad = zipfile.ZipFile(file).testzip()
        if bad:
            sys.exit(f"{file}: record {bad} has another CRC")
        plain = torch.load(file, weights_only=True)
        mapped = torch.load(file, weights_only=True, mmap=True)
        wrong = [k for k in plain if not same(plain[k], mapped[k])]
        if wrong or got.keys() & plain.keys():
            sys.exit(f"{file}: {wrong[:4]} differ when mapped, {sorted(got.keys() & plain.keys())[:4]} again")
        got.update(plain)
    if want.keys() != got.keys():
        sys.exit(f"names differ: {sorted(want.keys() ^ got.keys())[:4]}")
    wrong = [k for k in want if not same(want[k], got[k])]
    if wrong:
        sys.exit(f"{len(wrong)} tensors differ: {wrong[:4]}")
    storages = {t.untyped_storage().data_ptr() for t in got.values() if t.numel()}
    if len(storages) != sum(t.numel() > 0 for t in got.values()):
        sys.exit("tensors share storage")
    print(f"{len(want)} tensors equal")


main()
