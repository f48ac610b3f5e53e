"""Tiny Megatron-Core models, saved per rank (mp_rank_*), and what torch_dist would store of them.

usage: gen_mp_rank.py OUTDIR [CASE ...]

Real megatron-core modules on CPU over gloo, one process a rank. Every case gives a save root
OUTDIR/CASE/ as Megatron-LM's checkpointing.py writes it with --ckpt-format torch (the names of
get_checkpoint_name, the members of generate_state_dict), and OUTDIR/CASE.plain/: the
global tensors, by storage key, that dist_checkpointing.save makes of sharded_state_dict of the same
modules (read back whole). The second is the expected reading of the first.
"""

import argparse
import glob
import json
import os
import shutil
import socket
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file

BASE = dict(
    hidden_size=16, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=24,
    normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
    use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
    apply_rope_fusion=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    init_method_std=0.5,
)
MOE = dict(
    num_moe_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2, moe_layer_freq=[0, 1],
    moe_shared_expert_intermediate_size=8, moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True, moe_token_dispatcher_type="allgather", moe_grouped_gemm=False,
)
MLA = dict(
    multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=8, qk_head_dim=8,
    qk_pos_emb_head_dim=4, v_head_dim=8, rope_type="rope", qk_layernorm=True,
)
CASES = {
    "gpt_tp2_pp2": dict(tp=2, pp=2, layers=4, extra=dict(add_qkv_bias=True), optimizer=True),
    "gpt_vpp": dict(pp=2, vpp=2, layers=8, extra=dict(num_query_groups=4), tied=True),
    "mla_moe_tp2_ep2": dict(tp=2, ep=2, layers=2, extra={**MOE, **MLA}, mtp=1),
    "gpt_bf16": dict(tp=2, layers=1, extra=dict(bf16=True, params_dtype=torch.bfloat16), optimizer=True),
}


def arguments(case, config, vocab):
    """The members of args that Megatron-LM's own argument parser would hold under these names."""
    names = [
        "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
        "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "num_layers",
        "init_method_std", "multi_latent_attention", "moe_layer_freq", "moe_ffn_hidden_size",
        "moe_router_topk", "moe_shared_expert_intermediate_size", "moe_router_score_function",
        "moe_router_enable_expert_bias", "moe_grouped_gemm", "bf16", "fp16", "params_dtype",
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
        "rope_type", "mtp_num_layers", "layernorm_zero_centered_gamma", "moe_router_topk_scaling_factor",
    ]
    args = argparse.Namespace(**{n: getattr(config, n) for n in names if hasattr(config, n)})
    args.num_experts = config.num_moe_experts
    args.norm_epsilon = config.layernorm_epsilon
    args.swiglu = config.gated_linear_unit
    args.group_query_attention = config.num_query_groups != config.num_attention_heads
    args.untie_embeddings_and_output_weights = not case.get("tied", False)
    args.position_embedding_type = "rope"
    args.rotary_base = 10000
    args.rotary_percent = 1.0
    args.vocab_size = vocab
    args.padded_vocab_size = vocab
    args.make_vocab_size_divisible_by = 16
    args.tensor_model_parallel_size = case.get("tp", 1)
    args.pipeline_model_parallel_size = case.get("pp", 1)
    args.expert_model_parallel_size = case.get("ep", 1)
    args.expert_tensor_parallel_size = case.get("tp", 1)
    args.context_parallel_size = 1
    args.virtual_pipeline_model_parallel_size = case.get("vpp")
    args.consumed_train_samples = 32
    args.ckpt_format = "torch"
    args.transformer_impl = "local"
    args.max_position_embeddings = 64
    return args


def build(case, config, vocab):
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec, get_gpt_layer_local_spec, get_gpt_mtp_block_spec)
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.identity_op import IdentityOp

    for n in ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear"):
        if not isinstance(getattr(mla, n, int), type):  # absent Transformer Engine classes
            setattr(mla, n, type(n, (), {}))

    chunks = []
    vpp = case.get("vpp")
    for v in range(vpp or 1):
        if vpp:
            ps.set_virtual_pipeline_model_parallel_rank(v)
        first = ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=v if vpp else None)
        last = ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=v if vpp else None)
        stage = v if vpp else None
        mtp = None
        if config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
        else:
            spec = get_gpt_layer_local_spec(
                qk_layernorm=config.qk_layernorm, normalization="RMSNorm",
                multi_latent_attention=config.multi_latent_attention)
        for layer in getattr(spec, "layer_specs", [spec]):
            if config.multi_latent_attention:  # the local core attention does not know MLA's sizes
                layer.submodules.self_attention.submodules.core_attention = IdentityOp
        if case.get("mtp"):
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
        chunks.append(GPTModel(
            config, spec, vocab, 64, pre_process=first, post_process=last,
            share_embeddings_and_output_weights=case.get("tied", False),
            position_embedding_type="rope", mtp_block_spec=mtp, vp_stage=stage))
    return chunks


def optimizer_of(config, chunks):
    """Megatron's non-distributed optimizers around torch's AdamW, after one step.

    They insist on CUDA tensor types and one CUDA scratch tensor, which their constructors are
    talked out of here; nothing else of them is changed."""
    from megatron.core import parallel_state as ps
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups
    from megatron.core.optimizer.optimizer import FP32Optimizer, Float16OptimizerWithFloat16Params

    config_o = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=config.bf16,
                               params_dtype=config.params_dtype, weight_decay=0.1, clip_grad=0.0)
    groups = _get_param_groups(chunks, config_o, None)
    inner = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
    tensor, kind = torch.tensor, torch.Tensor.type
    torch.tensor = lambda *a, device=None, **k: tensor(*a, **k)
    torch.Tensor.type = lambda self: kind(self).replace("torch.", "torch.cuda.")
    if config.bf16:
        opt = Float16OptimizerWithFloat16Params(inner, config_o, None, None)
    else:
        opt = FP32Optimizer(inner, config_o, None)
    torch.tensor, torch.Tensor.type = tensor, kind
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for group in inner.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
            # Gradients of replicated parameters agree over the tensor-parallel group.
            if not getattr(p, "tensor_model_parallel", False):
                dist.broadcast(p.grad, ps.get_tensor_model_parallel_src_rank(),
                               group=ps.get_tensor_model_parallel_group())
    inner.step()
    if config.bf16:
        for low, main in zip(opt.float16_groups, opt.fp32_from_float16_groups):
            for a, b in zip(low, main):
                a.data.copy_(b.data)
    return opt


def directory(case):
    from megatron.core import parallel_state as ps
    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if case.get("pp", 1) > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if case.get("ep", 1) > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    return name


def save(out, name, case, config, args, chunks, opt):
    from megatron.core import dist_checkpointing, parallel_state as ps
    root = os.path.join(out, name)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 20,
             "num_floating_point_operations_so_far": 12345}
    for i, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{i}"
        state[key] = chunk.state_dict_for_save_checkpoint()
    if opt is not None:
        state["optimizer"] = opt.state_dict()
    state["opt_param_scheduler"] = {"max_lr": 1e-3, "num_steps": 32}
    state["rng_state"] = [{"random_rng_state": None, "torch_rng_state": torch.arange(16, dtype=torch.uint8)}]
    path = os.path.join(root, "iter_0000020", directory(case))
    expert_replica = ps.get_expert_data_parallel_rank() if case.get("ep", 1) > 1 else ps.get_data_parallel_rank()
    if expert_replica == 0:
        os.makedirs(path, exist_ok=True)
        torch.save(state, os.path.join(path, "model_optim_rng.pt"))

    sharded = {k: v for k, v in state.items() if not k.startswith(("model", "optim", "rng"))}
    sharded["opt_param_scheduler"] = state["opt_param_scheduler"]
    sharded["content_metadata"] = {"singleton_local_shards": False, "distrib_optim_sharding_type": None}
    model = {}
    for i, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{i}"
        sharded[key] = chunk.sharded_state_dict(metadata={})
        model.update(sharded[key])
    if opt is not None:
        sharded["optimizer"] = opt.sharded_state_dict(model, metadata={})
    dist_dir = os.path.join(out, f"{name}.dist")
    os.makedirs(dist_dir, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded, dist_dir)
    dist.barrier()
    if dist.get_rank() == 0:
        with open(os.path.join(root, "latest_checkpointed_iteration.txt"), "w") as f:
            f.write("20")


def plain(out, name):
    """The global tensors of the torch_dist save, which then goes."""
    path = os.path.join(out, f"{name}.dist")
    meta = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in meta.items() if hasattr(m, "size")}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    shutil.rmtree(path)
    path = os.path.join(out, f"{name}.plain")
    os.makedirs(path)
    save_file(state, os.path.join(path, "model.safetensors"))
    first = sorted(glob.glob(os.path.join(out, name, "iter_*", "mp_rank_*", "*.pt")))[0]
    args = vars(torch.load(first, weights_only=False)["args"])
    with open(os.path.join(path, "megatron_args.json"), "w") as f:
        json.dump(args, f, indent=1, sort_keys=True, default=str)


def work(rank, world, port, out, name):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    # dist_checkpointing.save asks for the CUDA device even where everything is on the CPU.
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *a, **k: self  # the tied embedding's start-up
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    filesystem_async._process_memory = lambda: 0  # only for its log, and wants psutil
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    case = CASES[name]
    tp, pp, ep = case.get("tp", 1), case.get("pp", 1), case.get("ep", 1)
    ps.initialize_model_parallel(
        tp, pp, virtual_pipeline_model_parallel_size=case.get("vpp"), expert_model_parallel_size=ep)
    torch.manual_seed(3)
    values = {**BASE, **case["extra"]}
    kind = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    config = kind(
        num_layers=case["layers"], tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, virtual_pipeline_model_parallel_size=case.get("vpp"),
        expert_model_parallel_size=ep, sequence_parallel=False, mtp_num_layers=case.get("mtp"), **values)
    vocab = 64
    chunks = build(case, config, vocab)
    if case.get("tied"):  # as at start-up: the last stage holds a copy
        for chunk in chunks:
            if chunk.pre_process or chunk.post_process:
                weight = chunk.shared_embedding_or_output_weight()
                dist.broadcast(weight.data, 0, group=ps.get_embedding_group())
    for chunk in chunks:
        if config.bf16:
            chunk.bfloat16()  # as Float16Module does
        for n, p in chunk.named_parameters():
            if p.dim() == 1 and "norm" in n:
                p.data.copy_(torch.linspace(0.5, 1.5, p.numel()) + 0.01 * (len(n) % 7))
        for n, b in chunk.named_buffers():
            if n.endswith("expert_bias"):
                b.copy_(torch.linspace(-1, 1, b.numel()))
    opt = optimizer_of(config, chunks) if case.get("optimizer") else None
    save(out, name, case, config, arguments(case, config, vocab), chunks, opt)
    dist.barrier()
    dist.destroy_process_group()


def main():
    out = os.path.abspath(sys.argv[1])
    for name in sys.argv[2:] or CASES:
        case = CASES[name]
        world = case.get("tp", 1) * case.get("pp", 1) * (case.get("ep", 1))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.spawn(work, (world, port, out, name), nprocs=world)
        plain(out, name)


if __name__ == "__main__":
    main()
