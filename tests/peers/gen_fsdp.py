"""Writes fixtures/torch/megatron_fsdp: a small GPT model trained one step under Megatron-FSDP (ZeRO-3) of
real Megatron-Core 0.16.1, two gloo ranks, saved as Megatron-LM's --ckpt-format fsdp_dtensor saves it:
the model's own state dict, fc1 halved by handle_swiglu_in_state_dict, chunks of uneven DTensors by
preprocess_state_dict_for_uneven_dtensor, then torch.distributed.checkpoint. The optimizer's is left
out: PyTorch's Adam has states only where a rank holds a part of the parameter, and Megatron-FSDP's
collective check of fc1's halves then fails (DTensor chunk metadata is invalid).

usage: PYTHONPATH=DIR gen_fsdp.py OUT_DIR      DIR holds einops, which Megatron-FSDP wants

Beside it OUT_DIR/megatron_fsdp.expected.safetensors has the whole tensors, as PyTorch loads them (gloo
cannot gather uneven parts, so Megatron-FSDP's own gathering does not run). Megatron-FSDP names CUDA where it could ask for the device it is
given; its text is changed while it is imported. gloo has no coalescing and no scaled sum: collectives
are run one by one, and the factor is applied before."""
import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"
import gen_optim
import stand_in

gen_optim.RULES += [
    ("f'cuda:{torch.cuda.current_device()}'", "'cpu'"), ('f"cuda:{torch.cuda.current_device()}"', '"cpu"'),
    ('device_type="cuda"', 'device_type="cpu"'), (").cuda()", ")"),
    ('torch.device("cuda", torch.cuda.current_device())', 'torch.device("cpu")'),
    ('torch.device("cuda")', 'torch.device("cpu")'),
    ("with _coalescing_manager(", "with no_coalescing("),
    ("from torch.distributed import _coalescing_manager", "from without_nccl import no_coalescing")]


@contextlib.contextmanager
def no_coalescing(*_, **__):
    yield gen_optim.NoStream()


def without_nccl(torch):
    stand_in.module("without_nccl", no_coalescing=no_coalescing)
    real = torch.distributed.reduce_scatter_tensor

    def reduce_scatter_tensor(output, input, op=torch.distributed.ReduceOp.SUM, **kwargs):
        if isinstance(op, float):
            input.mul_(op)
            op = torch.distributed.ReduceOp.SUM
        return real(output, input, op=op, **kwargs)

    torch.distributed.reduce_scatter_tensor = reduce_scatter_tensor
    torch.distributed._make_nccl_premul_sum = float
    none = gen_optim.NoStream()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = torch.cuda.set_device = torch.cuda.empty_cache = lambda *_: None
    torch.cuda.Stream = torch.cuda.Event = gen_optim.NoStream
    torch.cuda.current_stream = torch.cuda.stream = lambda *_: none


def build(torch):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
        kv_channels=8, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, bias_activation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        apply_rope_fusion=False, params_dtype=torch.bfloat16, bf16=True)
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=64, max_sequence_length=32, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, parallel_output=False).bfloat16()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=True,
        overlap_param_gather=True, use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params")
    model = FullyShardedDataParallel(config, ddp, model, device=torch.device("cpu"))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.01, bf16=True, clip_grad=0.0,
                        params_dtype=torch.bfloat16, use_distributed_optimizer=True), [model])
    return model, optimizer


def expected(root, shapes):
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    whole = {"model": {k: torch.full(shape, float("nan")) for k, shape in shapes.items()}}
    dcp.load(whole, checkpoint_id=root, no_dist=True)
    save_file({k.removeprefix("module."): v for k, v in whole["model"].items()},
              root + ".expected.safetensors")


def worker(rank, out, port):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    sys.meta_path.insert(0, gen_optim.CpuFinder())
    torch.set_num_threads(1)
    without_nccl(torch)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_swiglu_in_state_dict
    parallel_state.initialize_model_parallel()
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    model, optimizer = build(torch)
    gen_optim.step(model, optimizer, 0, torch)
    weights = model.state_dict_for_save_checkpoint()
    weights, _ = handle_swiglu_in_state_dict(model, weights, None)
    weights = {k: v for k, v in weights.items() if v is not None}
    args = dict(json.loads(json.dumps(gen_optim.ARGS)), num_layers=1, tensor_model_parallel_size=1, bf16=True,
                params_dtype="torch.bfloat16")
    state = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 1,
             "model": weights}
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
    root = os.path.join(out, "megatron_fsdp")
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=root)
    if rank == 0:
        expected(root, {k: v.shape for k, v in weights.items()})
    dist.barrier()
    dist.destroy_process_group()


def main():
    if len(sys.argv) > 2:
        return worker(int(sys.argv[2]), sys.argv[1], sys.argv[3])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, *sys.argv, str(r), port]) for r in range(2)]
    try:
        return max(abs(r.wait(timeout=600)) for r in ranks)
    finally:
        for r in ranks:
            r.kill()


if __name__ == "__main__":
    sys.exit(main())
