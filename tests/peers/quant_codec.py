#!/usr/bin/env python3
"""Codecs of lib/codec.h against PyTorch's conversions: all 256 codes of E4M3, E5M2 and E8M0, every
bf16 and fp16 number, all midpoints and their neighbours, random f32.

    tests/peers/quant_codec.py WORKDIR          (compiles quant_codec.c there with cc)"""
import ctypes
import os
import subprocess
import sys

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))


def load(work):
    so = os.path.join(work, "quant_codec.so")
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-std=c17", "-ffp-contract=off", "-shared",
                    "-fPIC", "-I", os.path.join(HERE, "../../lib"), "-o", so,
                    os.path.join(HERE, "quant_codec.c")], check=True)
    return ctypes.CDLL(so)


def call(function, form, x, dtype):
    y = np.empty(x.size, dtype)
    function(ctypes.c_int(form), ctypes.c_size_t(x.size), x.ctypes.data_as(ctypes.c_void_p),
             y.ctypes.data_as(ctypes.c_void_p))
    return y


def inputs(decoded):
    every = np.arange(65536, dtype=np.uint32)
    half = every.astype(np.uint16).view(np.float16).astype(np.float32)
    brain = (every << 16).view(np.float32)
    grid = np.sort(decoded[np.isfinite(decoded)])
    edges = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    rng = np.random.default_rng(1)
    random = rng.integers(0, 2 ** 32, 400000, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(400000) * np.exp2(rng.uniform(-20, 18, 400000))).astype(np.float32)
    return np.concatenate([half, brain, edges, np.nextafter(edges, np.float32(0)),
                           np.nextafter(edges, np.float32(np.inf)), random, near])


def same(got, want, what):
    ok = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    if not ok.all():
        i = int(np.flatnonzero(~ok)[0])
        sys.exit("%s: %d of %d differ, first %r, %r" % (what, (~ok).sum(), ok.size, got[i], want[i]))
    return ok.size


def main():
    lib, total = load(sys.argv[1]), 0
    codes = np.arange(256, dtype=np.uint8)
    formats = ((0, "float8_e4m3fn", 448.0), (1, "float8_e5m2", 57344.0))
    with np.errstate(all="ignore"):
        for form, name, limit in formats:
            dtype = getattr(torch, name)
            want = torch.from_numpy(codes).view(dtype).float().numpy()
            got = call(lib.codec_decode, form, codes, np.float32)
            total += same(got, want, name + " decode")
            x = inputs(want)
            there = torch.from_numpy(x)
            back = there.to(dtype).float().numpy()
            mine = call(lib.codec_decode, form, call(lib.codec_encode, form, x, np.uint8), np.float32)
            total += same(mine, back, name)
            # saturating: torch clamps first
            keep = ~np.isnan(x)
            back = there.clamp(-limit, limit).to(dtype).float().numpy()
            mine = call(lib.codec_decode, form, call(lib.codec_encode, form + 3, x, np.uint8), np.float32)
            total += same(mine[keep], back[keep], name + " saturating")
            if form == 0:
                total += same(call(lib.codec_round, 2, x, np.float32)[keep], back[keep], "snap")
        want = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy()
        total += same(call(lib.codec_decode, 2, codes, np.float32), want, "e8m0")
        x = inputs(np.array([0.0, 65504.0, 1.0, 6e-8], np.float32))
        for form, dtype in ((0, torch.float16), (1, torch.bfloat16)):
            back = torch.from_numpy(x).to(dtype).float().numpy()
            total += same(call(lib.codec_round, form, x, np.float32), back, str(dtype))
    print("%d conversions as PyTorch's, bit for bit" % total)


if __name__ == "__main__":
    main()
