#!/usr/bin/env python3
"""The block of model.sh's part `block` by PyTorch and FLA on the same card: KDA layer and MLP, bf16.

    fla_block.py [T HIDDEN HEADS HEAD FFN]    default 8192 2304 32 128 9216; needs torch with CUDA and FLA

One KDA layer as FLA builds it (fla/layers/kda.py: projections, short convolutions, gate and l2norm in the
kernel, gated norm) and a SwiGLU MLP, residuals, torch's rms_norm, between an embedding and a head of 256
columns with cross entropy. Prints medians of 20 steps by CUDA events: forward and backward, and a step with
torch's fused AdamW. FLOPs are those of the products and 6 (1 + 2) H K V a token and pass of the recurrence, so
MFU is a little above that of the formula of `ckpt inspect --flops`; the time of a step is what compares.
Kernels are tuned over 10 configurations (fla_tune.py); --warm, last, compiles only."""
import statistics
import sys

import torch
import torch.nn.functional as F
from torch import nn

import fla_tune

fla_tune.limit(10)
from fla.modules import FusedRMSNormGated, ShortConvolution
from fla.modules.activations import swiglu
from fla.ops.kda import chunk_kda

warm = sys.argv[-1] == "--warm"
sizes = sys.argv[1 : len(sys.argv) - warm]
T, HIDDEN, HEADS, HEAD, FFN = map(int, sizes) if sizes else (8192, 2304, 32, 128, 9216)
INNER = HEADS * HEAD


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(3))
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, INNER, bias=False) for _ in range(3))
        self.conv = nn.ModuleList(ShortConvolution(INNER, 4, activation="silu") for _ in range(3))
        self.f = nn.Sequential(nn.Linear(HIDDEN, HEAD, bias=False), nn.Linear(HEAD, INNER, bias=False))
        self.g = nn.Sequential(nn.Linear(HIDDEN, HEAD, bias=False), nn.Linear(HEAD, INNER, bias=False))
        self.beta = nn.Linear(HIDDEN, HEADS, bias=False)
        self.o_norm = FusedRMSNormGated(HEAD, activation="sigmoid", eps=1e-5)
        self.o = nn.Linear(INNER, HIDDEN, bias=False)
        self.up, self.gate = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.a_log, self.dt_bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.full((INNER,), -4.0))

    def forward(self, ids, labels):
        x = self.embed(ids)
        h = self.norms[0](x)
        heads = lambda y: y.view(1, T, HEADS, HEAD)
        q, k, v = (heads(conv(w(h))[0]) for w, conv in zip(self.qkv, self.conv))
        o = chunk_kda(q, k, v, heads(self.f(h)), self.beta(h).float().sigmoid(), A_log=self.a_log.float(),
                      dt_bias=self.dt_bias.float(), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True)[0]
        x = x + self.o(self.o_norm(o, heads(self.g(h))).reshape(1, T, INNER))
        h = self.norms[1](x)
        x = x + self.down(swiglu(self.gate(h), self.up(h)))
        return F.cross_entropy(self.head(self.norms[2](x)).float().view(T, 256), labels.view(T))


def median(fn):
    times = []
    for i in range(-5, 20):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        fn()
        b.record()
        b.synchronize()
        if i >= 0:
            times.append(a.elapsed_time(b))
    return statistics.median(times)


torch.manual_seed(0)
model = Block().to("cuda", torch.bfloat16)
ids = torch.randint(256, (1, T + 1), device="cuda")
adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def passes():
    adam.zero_grad(set_to_none=True)
    model(ids[:, :-1], ids[:, 1:]).backward()


def step():
    passes()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()


if warm:
    step()
    sys.exit()
weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
flop = 6.0 * T * (weights + 3 * HEADS * HEAD * HEAD)
for name, fn in (("forward and backward", passes), ("a step with AdamW", step)):
    ms = median(fn)
    print("PyTorch %s + FLA block, %s: %.3f ms, %.1f TFLOP/s, MFU %.2f %% of 989, peak %.0f MiB"
          % (torch.__version__, name, ms, flop / ms * 1e-9, flop / ms * 1e-9 / 9.89,
             torch.cuda.max_memory_allocated() / 2**20), flush=True)
