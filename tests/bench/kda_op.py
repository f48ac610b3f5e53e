#!/usr/bin/env python3
"""The KDA operator as transformers runs it on a CPU (eager PyTorch, its fallback without kernels):
best and median milliseconds of forward and of backward, to set beside tests/bench/engine_ops.c.

    kda_op.py [--threads N] [--repeat N] [--tokens T] [--heads H] [--dim D]
              [--cpu 1]   (processor time, for --threads 1 on a busy machine)"""
import argparse
import statistics
import time

import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi


def main():
    p = argparse.ArgumentParser()
    for name, value in (("threads", 0), ("repeat", 7), ("tokens", 1024), ("heads", 4), ("dim", 64), ("cpu", 0)):
        p.add_argument("--" + name, type=int, default=value)
    a = p.parse_args()
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    shape = (1, a.tokens, a.heads, a.dim)
    q, k, v, g, do = (torch.randn(shape) for _ in range(5))
    q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    args = [q, k, v, -g.abs(), torch.rand(shape[:3])]
    for x in args:
        x.requires_grad_(True)
    run = kimi.chunk_kimi_delta_attention
    run = getattr(run, "__wrapped__", run)
    forward, backward = [], []
    clock = time.process_time if a.cpu else time.perf_counter
    for i in range(a.repeat + 1):
        start = clock()
        o = run(*args)[0]
        middle = clock()
        torch.autograd.grad(o, args, do)
        end = clock()
        if i:
            forward.append((middle - start) * 1e3)
            backward.append((end - middle) * 1e3)
    print("threads %d, T %d, heads %d x %d" % (torch.get_num_threads(), a.tokens, a.heads, a.dim))
    for name, t in (("forward", forward), ("backward", backward)):
        print("%-28s best %9.3f ms  median %9.3f ms" % ("torch " + name, min(t), statistics.median(t)))


if __name__ == "__main__":
    main()
