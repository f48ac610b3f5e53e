#!/usr/bin/env python3
"""Write tests/data/train.safetensors and tests/data/indexed/*: optimizers, schedules and an indexed
data set as their own implementations compute them.

    tests/peers/gen_train.py EMERGING [OUT-DIR]

Needs PyTorch 2.11 (torch.optim.AdamW, torch.optim.Muon, clip_grad_norm_), megatron-core 0.16.1
(OptimizerParamScheduler, IndexedDatasetBuilder, helpers.build_sample_idx) and, unpacked in the
directory EMERGING, the wheel of emerging-optimizers 0.3.0. That asks for Python 3.12 and absl only for
decorators and log lines, for which stand-ins are given here; its arithmetic runs as it is.

Names: adamw/CASE/{w0,g,w,m,v}, clip/{g,norm,scaled}, muon/CASE/{w0,g,w,m}, schedule/CASE/{n,lr,wd},
pack/sample_index, data/tokens. Cases and their settings are repeated in tests/test_train_*.c."""
import os
import sys
import types
import typing

import numpy as np
import torch
from safetensors.torch import save_file

torch.set_num_threads(1)
out = {}

# ---- AdamW --------------------------------------------------------------------------------------

LRS = [1e-3, 7e-4, 2e-3, 0.0, 5e-4, 1e-3]
ADAMW = {
    "default": dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    "fast": dict(betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0),
    "plain": dict(betas=(0.0, 0.5), eps=1e-3, weight_decay=0.5),
}


def run(optimizer, w, grads, state, lrs=LRS):
    rows, first, second = [], [], []
    for lr, g in zip(lrs, grads):
        for group in optimizer.param_groups:
            group["lr"] = lr
        w.grad = g.clone()
        optimizer.step()
        rows.append(w.detach().clone())
        first.append(optimizer.state[w][state[0]].clone())
        if len(state) > 1:
            second.append(optimizer.state[w][state[1]].clone())
    return [torch.stack(x) for x in (rows, first, second) if x]


def adamw():
    for name, kw in ADAMW.items():
        torch.manual_seed(len(name))
        n = 301
        w = torch.nn.Parameter(torch.randn(n))
        grads = torch.randn(len(LRS), n) * torch.logspace(-12, 3, n)
        grads[2, :7] = 0
        out[f"adamw/{name}/w0"] = w.detach().clone()
        out[f"adamw/{name}/g"] = grads
        opt = torch.optim.AdamW([w], foreach=False, fused=False, **kw)
        for key, x in zip("wmv", run(opt, w, grads, ("exp_avg", "exp_avg_sq"))):
            out[f"adamw/{name}/{key}"] = x


def clip():
    torch.manual_seed(3)
    parts = [torch.randn(n) for n in (5, 2000, 1, 33)]
    params = [torch.nn.Parameter(torch.zeros_like(p)) for p in parts]
    for p, g in zip(params, parts):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, 1.5, foreach=False)
    out["clip/g"] = torch.cat(parts)
    out["clip/norm"] = norm.reshape(1)
    out["clip/scaled"] = torch.cat([p.grad for p in params])


# ---- Muon ---------------------------------------------------------------------------------------

MUON_LRS = [1.0, 0.7, 2.0]  # large, so that the update is not lost in the rounding of the weight
SHAPES = {"wide": (8, 20), "tall": (20, 8), "square": (13, 13), "row": (1, 9)}


def stand_ins(path):
    """emerging_optimizers without Python 3.12, absl and triton."""
    typing.override = lambda f: f
    logging = types.SimpleNamespace(
        INFO=0, debug=lambda *a: None, warning=lambda *a: None, log_first_n=lambda *a: None)
    sys.modules["absl"] = types.SimpleNamespace(logging=logging)
    sys.modules["triton"] = None
    base = os.path.join(path, "emerging_optimizers")
    for name in ("", ".orthogonalized_optimizers", ".utils"):
        module = types.ModuleType("emerging_optimizers" + name)
        module.__path__ = [os.path.join(base, *name.split(".")[1:])]
        sys.modules[module.__name__] = module
    kernels = types.ModuleType("emerging_optimizers.triton_kernels")
    sys.modules[kernels.__name__] = kernels
    sys.modules["emerging_optimizers"].triton_kernels = kernels
    with open(os.path.join(base, "utils", "__init__.py"), encoding="utf-8") as f:
        source = f.read()
    utils = sys.modules["emerging_optimizers.utils"]
    exec(compile(source, "utils", "exec"), utils.__dict__)
    sys.modules["emerging_optimizers"].utils = utils


def muon(path):
    stand_ins(path)
    from emerging_optimizers.orthogonalized_optimizers.muon import Muon
    cases = {}
    for shape in SHAPES:
        cases[f"torch_{shape}"] = (shape, torch.optim.Muon, dict(momentum=0.95, weight_decay=0.1))
        cases[f"megatron_{shape}"] = (shape, Muon, dict(momentum=0.9, weight_decay=0.01))
        cases[f"exact_{shape}"] = (shape, Muon, dict(
            momentum=0.9, weight_decay=0.1, nesterov=True, fp32_matmul_prec="highest"))
    for name, steps in dict(simple=5, polar_express=9, cans=5, aol=8, deepseekv4=12).items():
        cases[f"set_{name}"] = ("wide", Muon, dict(
            momentum=0.9, weight_decay=0.1, fp32_matmul_prec="highest", coefficient_type=name,
            num_ns_steps=steps, scale_mode="unit_rms_norm", extra_scale_factor=0.2))
    cases["torch_match"] = ("tall", torch.optim.Muon, dict(
        momentum=0.9, nesterov=False, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    for name, (shape, cls, kw) in cases.items():
        torch.manual_seed(7)
        w = torch.nn.Parameter(torch.randn(SHAPES[shape]) * 0.1)
        grads = torch.randn(3, *SHAPES[shape])
        out[f"muon/{name}/w0"] = w.detach().clone()
        out[f"muon/{name}/g"] = grads
        for key, x in zip("wm", run(cls([w], lr=1.0, **kw), w, grads, ("momentum_buffer",), MUON_LRS)):
            out[f"muon/{name}/{key}"] = x


# ---- schedules ----------------------------------------------------------------------------------

BASE = dict(init_lr=0.0, max_lr=1e-3, min_lr=1e-5, lr_warmup_steps=0, lr_decay_steps=1000,
            start_wd=0.1, end_wd=0.1, wd_incr_steps=1000, wd_incr_style="constant")
SCHEDULES = {
    "constant": dict(lr_decay_style="constant", lr_warmup_steps=100),
    "linear": dict(lr_decay_style="linear", lr_warmup_steps=96, init_lr=1e-4),
    "cosine": dict(lr_decay_style="cosine", start_wd=0.01, end_wd=0.3, wd_incr_style="linear"),
    "inverse": dict(lr_decay_style="inverse-square-root", lr_warmup_steps=50, min_lr=3e-4),
    "inverse0": dict(lr_decay_style="inverse-square-root"),
    "wsd_exp": dict(lr_decay_style="WSD", wsd_decay_steps=300, lr_wsd_decay_style="exponential",
                    start_wd=0.0, end_wd=0.1, wd_incr_style="cosine", wd_incr_steps=500),
    "wsd_lin": dict(lr_decay_style="WSD", wsd_decay_steps=300, lr_wsd_decay_style="linear",
                    lr_warmup_steps=10),
    "wsd_cos": dict(lr_decay_style="WSD", wsd_decay_steps=1000, lr_wsd_decay_style="cosine",
                    lr_warmup_steps=100),
    "wsd_sqrt": dict(lr_decay_style="WSD", wsd_decay_steps=1, lr_wsd_decay_style="minus_sqrt"),
}


def schedules():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    for name, kw in SCHEDULES.items():
        group = {}
        optimizer = types.SimpleNamespace(param_groups=[group])
        scheduler = OptimizerParamScheduler(optimizer, **{**BASE, **kw})
        n, lr, wd = [], [], []
        for step in [0, 1, 15, 16, 16, 2, 46, 4, 100, 499, 1, 1, 99, 199, 1, 0, 1, 500]:
            scheduler.step(step)
            n.append(scheduler.num_steps)
            lr.append(group["lr"])
            wd.append(group["weight_decay"])
        out[f"schedule/{name}/n"] = torch.tensor(n, dtype=torch.float64)
        out[f"schedule/{name}/lr"] = torch.tensor(lr, dtype=torch.float64)
        out[f"schedule/{name}/wd"] = torch.tensor(wd, dtype=torch.float64)


# ---- indexed data -------------------------------------------------------------------------------

LENGTHS = [[5, 1], [13], [], [2, 0, 8], [31]]  # sequences of every document


def indexed(directory):
    from megatron.core.datasets import helpers
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    os.makedirs(directory, exist_ok=True)
    rng = np.random.default_rng(5)
    docs = [[rng.integers(0, 250, k).tolist() for k in doc] for doc in LENGTHS]
    for dtype in (np.uint8, np.uint16, np.int32, np.int64):
        prefix = os.path.join(directory, np.dtype(dtype).name)
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
        for doc in docs:
            tokens = [t for seq in doc for t in seq]
            builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(s) for s in doc])
        builder.finalize(prefix + ".idx")
    lengths = np.array([len(s) for doc in docs for s in doc], dtype=np.int32)
    order = np.arange(len(lengths), dtype=np.int32)
    index = helpers.build_sample_idx(lengths, order, 7, 1, int(lengths.sum()), True, 1)
    start = np.concatenate([[0], np.cumsum(lengths)])
    out["data/tokens"] = torch.tensor([float(t) for doc in docs for s in doc for t in s])
    out["data/documents"] = torch.tensor(
        np.concatenate([[0.0], np.cumsum([sum(map(len, d)) for d in docs])]))
    out["pack/start"] = torch.tensor([float(start[d] + o) for d, o in index])


def main():
    directory = sys.argv[2] if len(sys.argv) > 2 else "tests/data"
    adamw()
    clip()
    muon(sys.argv[1])
    schedules()
    indexed(os.path.join(directory, "indexed"))
    save_file({k: v.contiguous() for k, v in out.items()}, os.path.join(directory, "train.safetensors"))


main()
