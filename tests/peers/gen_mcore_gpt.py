"""Writes fixtures/mcore/gpt_*: small checkpoints of GPT and hybrid models built and saved by real
Megatron-Core on the CPU, in one gloo process, with the plain tensors beside them.

usage: gen_mcore_gpt.py OUT_DIR [NAME...]
       gen_mcore_gpt.py --load DIR NAME   build NAME, load it from the iteration directory DIR as a
                                          training run would, and compare with what was saved

gpt_dense    homogeneous: one tensor a weight, layers stacked; grouped queries, q/k norms
gpt_relu2    homogeneous, squared ReLU without a gate, qkv biases, tied embeddings
gpt_moe      moe_layer_freq list: layer by layer; softmax router, shared expert
gpt_moe_all  moe_layer_freq 1: stacked layers of stacked experts
gpt_mla_mtp  MLA with latent norms, first layer dense, sigmoid router with bias and groups, MTP
hybrid_attn  pattern M*-M with local modules, if this Megatron-Core builds Mamba-2 here
"""

import argparse
import contextlib
import logging
import os
import shutil
import socket
import sys
import traceback
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from safetensors.torch import save_file

# Megatron-Core asks for a GPU where it only builds and saves: the current device, a stream to wait
# for, generators, and for psutil to log memory. Local attention does not take the head sizes that MLA hands it.
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None
filesystem_async._process_memory = lambda: 0
CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
attention_init = DotProductAttention.__init__


def init_attention(self, *args, k_channels=None, v_channels=None, **kwargs):
    attention_init(self, *args, **kwargs)


DotProductAttention.__init__ = init_attention
multi_latent_attention.TELinear = type("TELinear", (), {})

VOCAB, LENGTH = 320, 64
BASE = dict(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=48,
    normalization="RMSNorm",
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    bias_activation_fusion=False,
    layernorm_epsilon=1e-6,
    init_method_std=0.08,
    use_cpu_initialization=True,
    params_dtype=torch.float32,
)
MOE = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=16,
    moe_router_topk=2,
    moe_shared_expert_intermediate_size=32,
    moe_token_dispatcher_type="allgather",
    moe_aux_loss_coeff=0.0,
)


def squared_relu(x):
    return torch.pow(torch.nn.functional.relu(x), 2)


def arguments(config, **more):
    """The part of Megatron-LM's argument namespace that says what the model is."""
    args = argparse.Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        qk_layernorm=config.qk_layernorm,
        add_qkv_bias=config.add_qkv_bias,
        add_bias_linear=config.add_bias_linear,
        normalization=config.normalization,
        norm_epsilon=config.layernorm_epsilon,
        apply_layernorm_1p=config.layernorm_zero_centered_gamma,
        swiglu=config.gated_linear_unit,
        squared_relu=config.activation_func is squared_relu,
        init_method_std=config.init_method_std,
        multi_latent_attention=config.multi_latent_attention,
        num_experts=config.num_moe_experts,
        moe_layer_freq=config.moe_layer_freq,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_router_topk=config.moe_router_topk,
        moe_router_score_function=config.moe_router_score_function,
        moe_router_enable_expert_bias=config.moe_router_enable_expert_bias,
        moe_router_topk_scaling_factor=config.moe_router_topk_scaling_factor,
        moe_router_num_groups=config.moe_router_num_groups,
        moe_router_group_topk=config.moe_router_group_topk,
        moe_router_pre_softmax=config.moe_router_pre_softmax,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        experimental_attention_variant=config.experimental_attention_variant,
        linear_attention_freq=config.linear_attention_freq,
        mtp_num_layers=config.mtp_num_layers,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        make_vocab_size_divisible_by=64,
        max_position_embeddings=LENGTH,
        seq_length=LENGTH,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        use_rope_scaling=False,
        params_dtype=config.params_dtype,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        context_parallel_size=1,
        consumed_train_samples=640,
    )
    for key in (
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
        "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale "
        "mscale_all_dim"
    ).split():
        if hasattr(config, key):
            setattr(args, key, getattr(config, key))
    for key, value in more.items():
        setattr(args, key, value)
    return args


def gpt(config, tied=False):
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=mtp,
    )
    return model, arguments(config, untie_embeddings_and_output_weights=not tied)


def dense():
    return gpt(TransformerConfig(**BASE, num_query_groups=2, qk_layernorm=True))


def relu2():
    config = dict(
        BASE, gated_linear_unit=False, activation_func=squared_relu, add_qkv_bias=True
    )
    return gpt(TransformerConfig(**config), tied=True)


def moe():
    return gpt(TransformerConfig(**BASE, **MOE, moe_layer_freq=[0, 1, 1], num_query_groups=2))


def moe_all():
    return gpt(TransformerConfig(**BASE, **MOE, moe_layer_freq=1))


def mla_mtp():
    config = MLATransformerConfig(
        **BASE,
        **MOE,
        multi_latent_attention=True,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=12,
        qk_layernorm=True,
        rope_type="rope",
        moe_layer_freq=[0, 1, 1],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        mtp_num_layers=2,
    )
    return gpt(config)


def hybrid():
    from megatron.core.models.mamba import MambaModel
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm import mamba_block, mamba_context_parallel, mamba_mixer
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    # Building needs no Mamba-2 kernels, only a norm with a weight in place of theirs.
    class Norm(torch.nn.Module):
        def __init__(self, width, device=None, **_):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width))

    mamba_mixer.RMSNormGated = Norm
    mamba_mixer.ExtendedRMSNorm = type(
        "ExtendedRMSNorm", (Norm,), dict(mamba_mixer.ExtendedRMSNorm.__dict__)
    )
    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = True
    mamba_context_parallel.HAVE_EINOPS = True
    mamba_block.TENorm = WrappedTorchNorm
    config = TransformerConfig(
        **dict(BASE, num_layers=4), num_query_groups=2, mamba_num_heads=4, mamba_head_dim=16,
        mamba_num_groups=2, mamba_state_dim=8, is_hybrid_model=True,
    )
    local = get_gpt_layer_local_spec(normalization="RMSNorm")
    part = local.submodules
    spec = ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm,
                    mixer=ModuleSpec(
                        module=MambaMixer,
                        submodules=MambaMixerSubmodules(
                            in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                        ),
                    ),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=part.input_layernorm,
                    self_attention=part.self_attention,
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=part.pre_mlp_layernorm,
                    mlp=part.mlp,
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
        ),
    )
    model = MambaModel(
        config=config,
        mamba_stack_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        hybrid_override_pattern="M*-M",
        share_embeddings_and_output_weights=False,
    )
    args = arguments(
        config,
        untie_embeddings_and_output_weights=True,
        hybrid_override_pattern="M*-M",
        position_embedding_type="none",
        mamba_num_heads=4,
        mamba_head_dim=16,
        mamba_num_groups=2,
        mamba_state_dim=8,
    )
    return model, args


MODELS = {
    "gpt_dense": dense,
    "gpt_relu2": relu2,
    "gpt_moe": moe,
    "gpt_moe_all": moe_all,
    "gpt_mla_mtp": mla_mtp,
    "hybrid_attn": hybrid,
}


def fill(model):
    """Every parameter and buffer random, so that no two are equal."""
    generator = torch.Generator().manual_seed(7)
    for name, t in sorted(model.state_dict().items()):
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            continue
        noise = torch.randn(t.shape, generator=generator)
        t.copy_(1 + 0.1 * noise if "norm" in name and t.dim() == 1 else 0.1 * noise)


def save(out, name):
    model, args = MODELS[name]()
    fill(model)
    root = os.path.join(out, name)
    path = os.path.join(root, "iter_0000010")
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(path)
    state = {"model": sharded(model), "args": args, "checkpoint_version": 3.0, "iteration": 10,
             "content_metadata": {"singleton_local_shards": False}}
    dist_checkpointing.save(state, path)
    with open(os.path.join(root, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write("10")
    plain = dist_checkpointing.load_plain_tensors(path)
    plain = {k: v.contiguous() for k, v in plain.items() if isinstance(v, torch.Tensor)}
    save_file(plain, os.path.join(out, f"{name}.plain.safetensors"))
    print(name, len(plain), "tensors")


def sharded(model):
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(
        metadata={"dp_cp_group": group, "singleton_local_shards": False}
    )


def load(path, name):
    model, _ = MODELS[name]()
    with torch.no_grad():
        fill(model)
        want = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
        for v in model.state_dict().values():
            if isinstance(v, torch.Tensor) and v.is_floating_point():
                v.zero_()
    state = {k: v for k, v in sharded(model).items() if not k.endswith("_extra_state")}
    loaded = dist_checkpointing.load({"model": state}, path)
    missing, unexpected = model.load_state_dict(loaded["model"], strict=False)
    missing = [k for k in missing if not k.endswith("_extra_state")]
    assert not missing and not unexpected, (missing, unexpected)
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, want[key]), key
    print(name, len(want), "tensors loaded by the model that saved them")


def main():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    if sys.argv[1] == "--load":
        load(sys.argv[2], sys.argv[3])
        dist.destroy_process_group()
        return
    for name in sys.argv[2:] or MODELS:
        try:
            save(sys.argv[1], name)
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {e}")
            traceback.print_exc()
    dist.destroy_process_group()


if __name__ == "__main__":  # writers are processes that import this file
    main()
