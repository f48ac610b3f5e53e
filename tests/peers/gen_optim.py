#!/usr/bin/env python3
"""Real Megatron-Core optimizer checkpoints on CPU, and what training does next.

  gen_optim.py save DIR [--tp N] [--dp N] [--ep N] [--type T] [--dtype bf16|f32] [--experts N]
                        [--layers N] [--steps N] [--prefix]
  gen_optim.py load DIR... [the same options]

save trains a tiny GPT three steps with Megatron-Core's Adam, stores DIR/iter_0000003 (torch_dist) and
prints the losses of the next steps (--next, 2); load reads a checkpoint into fresh objects and prints the
losses of two steps from there, of each directory in turn. The second of the two depends on the
optimizer's moments. One gloo process a rank; expert parallelism (--ep) is of the data-parallel ranks,
and its experts have an optimizer of their own, chained behind the other; --prefix stores it under
chained_1.

T: fully_reshardable dp_reshardable fully_sharded_model_space (DistributedOptimizer; the last one needs a
megatron-core before 0.16 first on PYTHONPATH), or plain (the mixed-precision or FP32 optimizer without it). Megatron-Core names CUDA in a few places on this path;
its text is changed while it is imported so that these say CPU; and where it wants PyTorch's Adam to have
a step tensor stored (it stores none; Transformer Engine's has none), it no longer does."""
import argparse
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
from importlib.metadata import version

import stand_in

RULES = [("torch.cuda.FloatTensor", "torch.FloatTensor"), ("torch.cuda.HalfTensor", "torch.HalfTensor"),
         ("torch.cuda.BFloat16Tensor", "torch.BFloat16Tensor"), ("device='cuda'", "device='cpu'"),
         ('device="cuda"', 'device="cpu"'),
         # PyTorch's Adam keeps the step beside the moments; it comes with the parameter groups
         ("for key in dst_tensors:", "for key in tensors:")]


class CpuLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        text = self.get_data(self.path).decode()
        for a, b in RULES:
            text = text.replace(a, b)
        return compile(text, self.path, "exec", dont_inherit=True)


class CpuFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith(("megatron.core.optimizer", "megatron.core.distributed", "megatron.core.utils",
                                "megatron.core.dist_checkpointing")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = CpuLoader(name, spec.origin)
        return spec


class NoStream:
    """The token dispatcher copies to the host on a stream of its own; here everything is there."""

    def __init__(self, *_, **__):
        pass

    def record_event(self):
        return self

    def wait_stream(self, _):
        pass

    wait = synchronize = __exit__ = __enter__ = lambda self, *_: None


def without_gpu(torch):
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    none = NoStream()
    torch.cuda.Stream = NoStream
    torch.cuda.current_stream = torch.cuda.stream = lambda *_: none
    token_dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, **_: (
        t.numpy() if as_numpy and torch.is_tensor(t) else t)
    moe_utils.te_general_gemm = None  # named without Transformer Engine, too


def build(a, torch):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    bf16 = a.dtype == "bf16"
    torch.manual_seed(7)
    moe = {"num_moe_experts": a.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
           "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall" if a.ep > 1 else "allgather",
           "expert_model_parallel_size": a.ep,
           "add_bias_linear": False} if a.experts else {}
    config = TransformerConfig(
        num_layers=a.layers, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
        kv_channels=8, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, bias_activation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        tensor_model_parallel_size=a.tp, sequence_parallel=False, bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        **{k: v for k, v in moe.items() if k != "add_bias_linear"})
    spec = get_gpt_layer_local_spec(num_experts=a.experts or None, moe_grouped_gemm=False,
                                    normalization="RMSNorm")
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=32,
                     position_embedding_type="rope", share_embeddings_and_output_weights=False,
                     parallel_output=False)
    if bf16:
        model = model.bfloat16()
    distributed = a.type != "plain"
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed,
                                        grad_reduce_in_fp32=True, overlap_grad_reduce=False,
                                        bucket_size=a.bucket)
    model = DistributedDataParallel(config, ddp, model)
    opt = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.01, bf16=bf16,
                          params_dtype=config.params_dtype, use_distributed_optimizer=distributed,
                          clip_grad=0.0)
    return model, get_megatron_optimizer(opt, [model])


def step(model, opt, i, torch):
    gen = torch.Generator().manual_seed(100 + i)
    ids = torch.randint(0, 64, (2, 16), generator=gen)
    pos = torch.arange(16).unsqueeze(0).expand(2, -1)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    model.zero_grad_buffer()
    opt.zero_grad()
    out = model(ids, pos, mask)
    loss = torch.nn.functional.cross_entropy(out.float().view(-1, 64), ids.roll(-1, 1).reshape(-1))
    loss.backward()
    model.finish_grad_sync()
    ok, _, _ = opt.step()
    assert ok
    return loss.item()


def state(a, model, opt, loading):
    meta = {"distrib_optim_sharding_type": a.type if a.type != "plain" else "fully_reshardable",
            "chained_optim_avoid_prefix": not a.prefix, "singleton_local_shards": False,
            "distrib_optim_fully_reshardable_mem_efficient": True}
    sd = model.module.sharded_state_dict(metadata=dict(meta))
    # what the state dict calls a tensor is the name of no key: Megatron's training keeps the
    # parameters themselves in it while the optimizer looks for them
    keep = model.module.sharded_state_dict(metadata=dict(meta))
    for name, p in model.module.named_parameters():
        if name in keep:
            keep[name].data = p
    both = {"model": sd, "optimizer": opt.sharded_state_dict(keep, is_loading=loading, metadata=dict(meta))}
    return both, meta


def worker(rank, a, port):
    import torch
    import torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(a.tp * a.dp), LOCAL_RANK=str(rank))
    sys.meta_path.insert(0, CpuFinder())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=a.tp * a.dp)
    # parallel state asks only for a device number; reduce-scatter of a bucket has no gloo form
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    if tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 16):
        stand_in.unified_memory()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    filesystem_async._process_memory = lambda: 0  # a figure for its log, of psutil
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=a.tp,
                                             expert_model_parallel_size=a.ep)
    # there is no dropout: no random numbers are drawn inside it
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    if a.experts:
        without_gpu(torch)
    model, opt = build(a, torch)
    if a.what == "save":
        save(a, model, opt, torch, rank)
        report(rank, a, a.dir[0], model, opt, torch)
    for where in a.dir if a.what == "load" else []:
        load(a, os.path.join(where, "iter_0000003"), model, opt, torch)
        report(rank, a, where, model, opt, torch)
    dist.barrier()
    dist.destroy_process_group()


def report(rank, a, where, model, opt, torch):
    losses = [step(model, opt, 3 + i, torch) for i in range(a.next)]
    if rank == 0:
        print(json.dumps({"of": where, "losses": losses}))


def save(a, model, opt, torch, rank):
    from megatron.core import dist_checkpointing
    where = os.path.join(a.dir[0], "iter_0000003")
    for i in range(a.steps):
        step(model, opt, i, torch)
    sd, meta = state(a, model, opt, False)
    sd.update(args=argparse.Namespace(**json.loads(a.args)), iteration=3, checkpoint_version=3.0)
    if rank == 0:
        os.makedirs(where)
    torch.distributed.barrier()
    dist_checkpointing.save(sd, where, content_metadata=meta, validate_access_integrity=False)
    if rank == 0:
        with open(os.path.join(a.dir[0], "latest_checkpointed_iteration.txt"), "w") as f:
            f.write("3")


def load(a, where, model, opt, torch):
    from megatron.core import dist_checkpointing
    each = getattr(opt, "chained_optimizers", [opt]) if a.type != "plain" else []
    for o in each:  # PyTorch's Adam has no state before its first step
        o._init_optimizer_states_with_dummy_values()
    sd, meta = state(a, model, opt, True)
    found = dist_checkpointing.load_content_metadata(where)
    if a.type != "plain":
        assert found and found["distrib_optim_sharding_type"] == a.type, found
    # Transformer Engine's state, of nothing here, is in no file that went through another layout
    sd["model"] = {k: v for k, v in sd["model"].items() if not k.endswith("_extra_state")}
    got = dist_checkpointing.load(sd, where, validate_access_integrity=False)
    missing, unexpected = model.module.load_state_dict(got["model"], strict=False)
    assert not unexpected and all(k.endswith("_extra_state") for k in missing), (missing, unexpected)
    opt.load_state_dict(got["optimizer"])
    for o in each:
        for g in o.optimizer.param_groups:
            for p in g["params"]:
                o.optimizer.state[p]["step"].fill_(g["step"])


ARGS = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
        "group_query_attention": True, "ffn_hidden_size": 48, "kv_channels": 8,
        "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True, "padded_vocab_size": 64, "vocab_size": 64,
        "make_vocab_size_divisible_by": 1, "position_embedding_type": "rope", "rotary_base": 10000,
        "rotary_percent": 1.0, "layernorm_epsilon": 1e-5, "norm_epsilon": 1e-5,
        "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1,
        "context_parallel_size": 1, "max_position_embeddings": 32}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=["save", "load"])
    p.add_argument("dir", nargs="+")
    p.add_argument("--tp", type=int, default=1)
    p.add_argument("--dp", type=int, default=1)
    p.add_argument("--type", default="fully_reshardable")
    p.add_argument("--dtype", default="f32")
    p.add_argument("--experts", type=int, default=0)
    p.add_argument("--ep", type=int, default=1)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--prefix", action="store_true")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--next", type=int, default=2)
    p.add_argument("--rank", type=int)
    p.add_argument("--port", type=int)
    p.add_argument("--bucket", type=int, default=None)
    a = p.parse_args()
    args = dict(ARGS, num_layers=a.layers, tensor_model_parallel_size=a.tp,
                expert_model_parallel_size=a.ep, bf16=a.dtype == "bf16",
                params_dtype="torch.bfloat16" if a.dtype == "bf16" else "torch.float32")
    if a.experts:
        args.update(num_experts=a.experts, moe_router_topk=2, moe_ffn_hidden_size=16,
                    moe_router_load_balancing_type="none")
    a.args = json.dumps(args)
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # plain processes: Megatron-Core's writer starts children of its own
    if a.rank is not None:
        worker(a.rank, a, a.port)
        return
    ranks = [subprocess.Popen([sys.executable, *sys.argv, "--rank", str(r), "--port", str(port)])
             for r in range(a.tp * a.dp)]
    try:
        sys.exit(max(abs(r.wait(timeout=600)) for r in ranks))
    finally:
        for r in ranks:
            r.kill()


if __name__ == "__main__":
    main()
