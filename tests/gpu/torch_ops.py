#!/usr/bin/env python3
"""PyTorch's best path for what attn_gpu and ops_gpu time, on the same card and shapes, in one run.

    torch_ops.py    needs torch with CUDA. With DEVICE=cpu it runs small shapes, to try the script itself.

Attention: every fused backend of scaled_dot_product_attention that takes the shape; where head dims of q
and v differ and a backend refuses that, v is padded. Short convolution and gated norm: torch.compile.
Projections: torch.matmul; experts: torch._grouped_mm where it is there. Medians of 30 calls after 5, CUDA
events; backward alone, through a kept graph. A path that fails prints why."""
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = os.environ.get("DEVICE", "cuda")
CUDA = DEVICE == "cuda"
T = 8192 if CUDA else 64
HALF = torch.bfloat16


def median(fn):
    times = []
    for i in range(-5, 30):
        if CUDA:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            fn()
            b.record()
            b.synchronize()
            ms = a.elapsed_time(b)
        else:
            start = time.perf_counter()
            fn()
            ms = (time.perf_counter() - start) * 1e3
        if i >= 0:
            times.append(ms)
    return statistics.median(times)


def show(name, ms, flop=0.0):
    print("%-56s %8.4f ms%s" % (name, ms, " %7.1f TFLOP/s" % (flop / ms * 1e-9) if flop else ""), flush=True)


def both(name, fn, leaves, flop=(0.0, 0.0)):
    """Forward without a graph, backward through one."""
    try:
        with torch.no_grad():
            show(name + " forward", median(lambda: fn(*leaves)), flop[0])
        out = fn(*leaves)
        grad = torch.randn_like(out)
        show(name + " backward",
             median(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)), flop[1])
    except Exception as e:  # what a backend says of a shape it has not
        print("%-56s %s: %s" % (name, type(e).__name__, str(e).strip().split("\n")[0][:120]), flush=True)


def leaf(*shape):
    return torch.randn(shape, device=DEVICE, dtype=HALF).requires_grad_(True)


BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}


def attention(n, g, dk, dv):
    pairs = T * T / 2 * n * 2
    flop = (pairs * (dk + dv), pairs * (3 * dk + 2 * dv))
    # [B, T, heads, dim] in memory, as a projection leaves it
    leaves = [leaf(1, T, n, dk), leaf(1, T, g, dk), leaf(1, T, g, dv)]
    for backend, which in BACKENDS.items():
        for pad in (False, True):
            if pad and dk == dv:
                continue

            def run(q, k, v, pad=pad, which=which):
                v = F.pad(v, (0, dk - dv)) if pad else v
                with sdpa_kernel(which):
                    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                                       is_causal=True, enable_gqa=n != g)
                return o[..., :dv] if pad else o

            both("attention [%d, %d/%d, %d/%d] %s%s" % (T, n, g, dk, dv, backend, " v padded" if pad else ""),
                 run, leaves, flop)


def rows():
    """Convolution of 4 taps + SiLU over 4096 channels, gated RMSNorm of 32 x 128."""
    c = 4096 if CUDA else 64

    @torch.compile
    def conv(x, w):
        y = F.conv1d(x.transpose(1, 2), w, padding=3, groups=x.shape[2])[..., : x.shape[1]]
        return F.silu(y).transpose(1, 2)

    @torch.compile
    def taps(x, w):  # the same as four shifted products, which inductor fuses
        p = F.pad(x, (0, 0, 3, 0)).float()
        y = sum(p[:, j : j + x.shape[1]] * w[:, 0, j].float() for j in range(4))
        return F.silu(y).to(x.dtype)

    @torch.compile
    def gated(x, z, w):
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5) * w.float()
        return (f * torch.sigmoid(z.float())).to(x.dtype)

    x, w = leaf(1, T, c), leaf(c, 1, 4)
    both("conv W 4 + silu, conv1d compiled", conv, [x, w])
    both("conv W 4 + silu, taps compiled", taps, [x, w])
    both("gated norm 32 x 128, compiled", gated, [leaf(T, 32, 128), leaf(T, 32, 128), leaf(128)])


def products():
    for n_in, n_out in ((2304, 4096), (4096, 2304), (2304, 9216), (9216, 2304), (2304, 576)):
        if not CUDA:
            n_in, n_out = n_in // 36, n_out // 36
        x, w, dy = leaf(T, n_in), leaf(n_out, n_in), leaf(T, n_out)
        flop = 2.0 * T * n_in * n_out
        with torch.no_grad():
            show("%d -> %d" % (n_in, n_out), median(lambda: F.linear(x, w)), flop)
            show("%d -> %d dx" % (n_in, n_out), median(lambda: dy @ w), flop)
            show("%d -> %d dw (bf16 result)" % (n_in, n_out), median(lambda: dy.t() @ x), flop)
    if CUDA and hasattr(torch, "_grouped_mm"):
        experts, n, hidden, inner = 64, 8 * T, 2304, 1024
        x, w = leaf(n, hidden), leaf(experts, inner, hidden)
        each = n // experts
        sizes = torch.tensor([each // 2 + i % 2 * each for i in range(experts)], device=DEVICE)
        ends = sizes.cumsum(0).to(torch.int32)
        try:
            with torch.no_grad():
                show("experts 64, %d x 2304 -> 1024, _grouped_mm" % n,
                     median(lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)), 2.0 * n * hidden * inner)
        except Exception as e:
            print("_grouped_mm: %s" % str(e).strip().split("\n")[0][:120], flush=True)


torch.manual_seed(0)
print("torch %s, %s" % (torch.__version__, torch.cuda.get_device_name() if CUDA else "cpu"), flush=True)
for shape in ((32, 32, 192, 128), (32, 8, 128, 128), (32, 32, 128, 128), (32, 32, 64, 64), (16, 4, 256, 256)):
    attention(*shape)
products()
rows()
