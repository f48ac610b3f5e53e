"""Quantised weights of `ckpt convert`, against PyTorch, transformers and ModelOpt.

  wquant.py CKPT SOURCE WORK [MODELOPT]

SOURCE is a Hugging Face model in f32 or bf16. Codes and scales are recomputed with torch's float8 types and
the published formulas and must be the same bits; the BF16 that `ckpt` dequantises them to likewise. transformers'
dequantisation of the fp8-block128 form must give what ckpt makes of it in BF16. With MODELOPT (an unpacked nvidia-modelopt wheel) its own quantisers are called as well.
"""

import glob
import importlib
import os
import subprocess
import sys

import torch
from safetensors.torch import load_file

import stand_in

BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1_codes(x):
    a = x.abs()
    code = torch.searchsorted(BOUNDS, a)  # a tie falls to the lower code
    odd = (a[..., None] == BOUNDS[[1, 3, 5]]).any(-1)  # and belongs to the even one
    return (code + odd).to(torch.uint8) + (x < 0).to(torch.uint8) * 8


def blocks(w, n):
    return w.float().reshape(w.shape[0], -1, n)


def fp8(w):
    rows, cols = w.shape
    down, across = -(-rows // 128), -(-cols // 128)
    padded = torch.zeros(down * 128, across * 128)
    padded[:rows, :cols] = w.float()
    tiles = padded.view(down, 128, across, 128)
    scale = tiles.abs().amax((1, 3)) / 448
    scale[scale == 0] = 1
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    value = (codes.float() * scale[:, None, :, None]).view_as(padded)[:rows, :cols]
    return {"": codes.view_as(padded)[:rows, :cols], "_scale_inv": scale}, value


def nvfp4(w):
    x = blocks(w, 16)
    outer = x.abs().max() / torch.tensor(2688.0)
    inner = x.abs().amax(-1) / (6 * outer)
    inner[inner == 0] = 1
    inner = inner.clamp(2**-9, 448).to(torch.float8_e4m3fn)
    step = (inner.float() * outer)[..., None]
    codes = e2m1_codes(x / step)
    value = E2M1[(codes & 7).long()] * step * torch.where(codes > 7, -1.0, 1.0)
    flat = codes.view(w.shape[0], -1)
    packed = flat[:, 0::2] | flat[:, 1::2] << 4
    return {"": packed, "_scale": inner, "_scale_2": outer}, value.view_as(w)


def mxfp8(w):
    x = blocks(w, 32)
    exponent = torch.ceil(torch.log2((x.abs().amax(-1) / 448).double())).clamp(-127, 127)
    step = torch.exp2(exponent).float()[..., None]
    codes = (x / step).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = (exponent + 127).to(torch.uint8)
    return {"": codes.view_as(w), "_scale": scale}, (codes.float() * step).view_as(w)


def load_modelopt(path):
    """The two files with the quantisers; the packages around them need a GPU stack to import."""
    for name in ["modelopt", "modelopt.torch", "modelopt.torch.quantization", "modelopt.torch.quantization.qtensor"]:
        stand_in.module(name, __path__=[os.path.join(path, *name.split("."))])

    class Base:
        def __init__(self, shape, dtype, data):
            self.metadata, self._quantized_data = {"shape": shape, "dtype": dtype}, data

    def block_amax(x, block_sizes):
        return x.abs().reshape(*x.shape[:-1], -1, block_sizes[-1]).amax(-1)

    of = "modelopt.torch.quantization."
    stand_in.module(of + "backends")
    stand_in.module(of + "backends.utils", fp4_compatible=lambda: False)
    stand_in.module(of + "qtensor.base_qtensor", BaseQuantizedTensor=Base)
    stand_in.module(of + "utils", __path__=[os.path.join(path, "modelopt/torch/quantization/utils")],
                    reduce_amax=lambda x: x.abs().max(), reduce_block_amax=block_amax,
                    reduce_block_padding=lambda x, block_sizes: x)
    stand_in.module(of + "utils.numeric_utils", E2M1_MAX=6.0, E4M3_MAX=448.0,
                    fp8_max_for_normalization=lambda q: 448.0)
    return (importlib.import_module(of + "qtensor.nvfp4_tensor").NVFP4QTensor,
            importlib.import_module(of + "qtensor.mxfp8_tensor").MXFP8QTensor)


def same(name, what, a, b):
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    if a.shape != b.shape or not torch.equal(a, b):
        sys.exit(f"{name}: {what}: {(a != b).sum().item() if a.shape == b.shape else (a.shape, b.shape)} bytes differ")


def check(kind, quantise, source, got, plain, peer):
    n = 0
    for name, w in source.items():
        if name + "_scale" not in got and name + "_scale_inv" not in got:
            same(name, "kept", got[name], w)
            continue
        n += 1
        parts, value = quantise(w)
        for suffix, part in parts.items():
            same(name, kind + suffix, got[name + suffix].reshape(part.shape), part)
        same(name, "dequantised", plain[name], value.to(torch.bfloat16))
        if peer is not None and kind == "nvfp4":
            q, inner, outer = peer[0].quantize(w.float().clone(), 16)
            same(name, "ModelOpt's codes", got[name], q._quantized_data)
            same(name, "ModelOpt's scales", got[name + "_scale"], inner)
            same(name, "ModelOpt's outer scale", got[name + "_scale_2"].reshape(()), outer.reshape(()))
        if peer is not None and kind == "mxfp8":
            q, scale = peer[1].quantize(w.float().clone())
            same(name, "ModelOpt's codes", got[name], q._quantized_data)
            same(name, "ModelOpt's scales", got[name + "_scale"], scale)
    if n < 20:
        sys.exit(f"{kind}: only {n} tensors quantised")
    return n


def run_transformers(work):
    """Its own dequantisation (loading such a model whole needs accelerate)."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    got, plain = load_file(work + "/fp8-block128/model.safetensors"), load_file(work + "/fp8-block128-plain/model.safetensors")
    scaled = [name for name in got if name + "_scale_inv" in got]
    for name in scaled:
        value = _dequantize_fp8_weight(got[name], got[name + "_scale_inv"], [128, 128], torch.float32)
        same(name, "transformers", plain[name], value.to(torch.bfloat16))
    return len(scaled)


def main(ckpt, source, work, modelopt=None):
    peer = load_modelopt(modelopt) if modelopt else None
    weights = {}
    for shard in sorted(glob.glob(source + "/model*.safetensors")):
        weights.update(load_file(shard))
    counts = []
    for kind, quantise in (("fp8-block128", fp8), ("nvfp4", nvfp4), ("mxfp8", mxfp8)):
        to = f"{work}/{kind}"
        subprocess.run([ckpt, "convert", "--quiet", source, to, "--dtype", kind, "--approximate"], check=True)
        subprocess.run([ckpt, "convert", "--quiet", to, to + "-plain", "--dtype", "bf16"], check=True)
        plain = load_file(to + "-plain/model.safetensors")
        n = check(kind, quantise, weights, load_file(to + "/model.safetensors"), plain, peer)
        counts.append(f"{kind} {n}")
    counts.append(f"transformers {run_transformers(work)}")
    print(f"{', '.join(counts)} tensors the same bits{' as ModelOpt' if peer else ''}")


main(*sys.argv[1:])
