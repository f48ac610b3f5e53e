#!/usr/bin/env python3
"""FLA's chunk_kda on the same card: its errors on the inputs that `kda_gpu dump DIR` wrote, and its times.

    fla_kda.py [DIR...]   needs torch with CUDA, triton and FLA's wheels (flash-linear-attention, fla-core)
    fla_kda.py --table    times by the protocol of quant-emulation.md section 7, beside which quant_gpu's stand
    fla_kda.py --warm     compiles only, for fla_tune.py's FLA_PART

Each kernel is tuned over 10 configurations (fla_tune.py)."""
import sys
import time
from importlib.metadata import version

import numpy
import torch
import triton

import fla_tune

fla_tune.limit(10)
from fla.ops.kda import chunk_kda

T, H, D = 1024, 32, 128


def load(directory, name, shape, dtype):
    x = numpy.fromfile(f"{directory}/{name}", dtype=numpy.float64).reshape(shape)
    return torch.from_numpy(x).to("cuda", dtype)


def errors(directory):
    half, full = torch.bfloat16, torch.float32
    shape = (1, T, H, D)
    a = {n: load(directory, n, shape, half) for n in ("q", "k", "v", "d_o")}
    a["g"] = load(directory, "g", shape, full)
    a["beta"] = load(directory, "beta", shape[:3], full)
    a["state0"] = load(directory, "state0", (1, H, D, D), full)
    d_state = load(directory, "d_state", (1, H, D, D), full)
    leaves = [a[n].requires_grad_(True) for n in ("q", "k", "v", "g", "beta", "state0")]
    o, state = chunk_kda(*leaves[:5], initial_state=leaves[5], output_final_state=True, safe_gate=True,
                         lower_bound=-5.0)
    grads = torch.autograd.grad([o, state], leaves, [a["d_o"], d_state])
    out = dict(zip(("dq", "dk", "dv", "dg", "dbeta", "dstate0"), grads), o=o, state=state)
    for name in ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate0"):
        got = out[name].double()
        # KDA's one beta erases and writes: kda_gpu has its gradient in the place of erase's.
        ref = load(directory, name.replace("beta", "erase"), got.shape, torch.float64)
        print(" %s %.2e" % (name, ((got - ref).norm() / ref.norm()).item()), end="")
    print("   FLA, the same inputs", flush=True)


def times(t, h, d, gate):
    shape = (1, t, h, d)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (q, k))
    beta = torch.rand(shape[:3], device="cuda")
    args = {"safe_gate": True, "lower_bound": -5.0}
    if gate == "in kernel":
        g = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        args.update(use_gate_in_kernel=True, A_log=torch.zeros(h, device="cuda"),
                    dt_bias=torch.zeros(h * d, device="cuda"))
    else:
        g = -5 * torch.rand(shape, device="cuda")
        g = g.bfloat16() if gate == "bf16" else g
    leaves = [x.requires_grad_(True) for x in (q, k, v, g, beta)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = chunk_kda(*leaves, **args)[0]
    torch.autograd.grad(o, leaves, do)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    if warm:
        return
    with torch.no_grad():
        fwd = triton.testing.do_bench(lambda: chunk_kda(*leaves, **args), return_mode="median")
    o = chunk_kda(*leaves, **args)[0]
    bwd = triton.testing.do_bench(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
                                  return_mode="median")
    print("FLA %s [1,%d,%d,%d] gate %s: forward %.4f ms, backward %.4f ms, extra %.0f MiB"
          % (version("fla-core"), t, h, d, gate, fwd, bwd, extra / 2**20), flush=True)


def table(t, h, d):
    """3 warm-ups, 20 rounds: medians of forward and backward by events, of both by the host's clock."""
    shape = (1, t, h, d)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (q, k))
    g, beta = -0.03 * torch.rand(shape, device="cuda"), torch.rand(shape[:3], device="cuda")
    state0, d_state = (0.1 * torch.randn(1, h, d, d, device="cuda") for _ in range(2))
    leaves = [x.requires_grad_(True) for x in (q, k, v, g, beta, state0)]
    rows = []
    for trial in range(1 if warm else 23):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        start = time.perf_counter()
        marks[0].record()
        out = chunk_kda(*leaves[:5], initial_state=leaves[5], output_final_state=True)
        marks[1].record()
        grads = torch.autograd.grad(out, leaves, [do, d_state])
        marks[2].record()
        torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - start)
        extra = (torch.cuda.max_memory_allocated() - before) / 2**20
        rows.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2]), wall, extra))
        del out, grads
    if not warm:
        print("FLA %s [1,%d,%d,%d] fused: forward %.4f ms, backward %.4f ms, wall %.4f ms, extra %.2f MiB"
              % ((version("fla-core"), t, h, d) + tuple(numpy.median(rows[3:], axis=0))), flush=True)


warm = "--warm" in sys.argv
if "--table" in sys.argv:
    table(1024, 4, 64)
    table(8192, 32, 128)
    sys.exit()
for directory in sys.argv[1:]:
    if not warm:
        errors(directory)
times(8192, 32, 128, "f32")
times(1024, 4, 64, "f32")
