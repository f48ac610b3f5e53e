"""Writes fixtures/mcore/gpt_gdn_tp2: a GPT model with gated delta net layers, gated attention and MoE,
built and saved by real Megatron-Core 0.16.1 on the CPU, two gloo ranks of tensor parallelism; and loads
what ckpt wrote into the same model, with one rank or a rank for every part of a mesh.

usage: gen_mcore_gdn.py save OUT_DIR [gpt_gdn | gpt_gdn2 | gpt_gdn2_grouped]
       gen_mcore_gdn.py load MODEL REFERENCE DIR...            one rank loads every iteration directory;
                                                               its logits must be the reference's
       gen_mcore_gdn.py load-mesh MODEL TP PP PLAIN DIR        TP x PP ranks load DIR; the state of each
                                                               must be its part of PLAIN's tensors
MODEL: gpt_gdn, gpt_gdn2 or gpt_gdn2_grouped (of OUT_DIR) or qwen3_next (sizes of fixtures/hf/qwen3_next_tiny).

The layers are those of get_transformer_block_with_experimental_attention_variant_spec, whose only
back end is Transformer Engine; it gets one of Megatron-Core's local modules instead. A norm fused into
the projection behind it and the norm with one added to the weight exist in Transformer Engine alone:
here they are two classes with its parameters' names. GatedDeltaNet asks for flash-linear-attention
also where its deterministic mode, which is plain PyTorch, needs of it a normalisation by length.

gpt_gdn2: no release of Megatron-Core has the layer; its main branch does (ssm/gated_delta_net/gdn2.py,
seen at 00bebb45). Gdn2 is that layer's sizes, sections and gates on the release's GatedDeltaNet, whose
modules and sharded state dict are used as they are. The recurrence is written from its formula; FLA=FILE
(fla/ops/gdn2/naive.py of flash-linear-attention 0.6.0) uses FLA's own, which is how the committed
reference was made."""

import argparse
import importlib.util
import os
import shutil
import socket
import subprocess
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling a gate takes longer than running it

import gen_mcore_gpt as base  # first: it makes Megatron-Core do without a GPU
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file, save_file


class Norm(torch.nn.Module):
    """RMS norm whose weight is around zero where the configuration says so."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.plus, self.eps = float(config.layernorm_zero_centered_gamma), eps

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight + self.plus, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """The names of TELayerNormColumnParallelLinear: layer_norm_weight beside weight."""

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))
        self.plus, self.eps = float(config.layernorm_zero_centered_gamma), config.layernorm_epsilon

    def forward(self, x):
        weight = self.layer_norm_weight + self.plus
        return super().forward(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps))


class Provider(LocalSpecProvider):
    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm=False, for_qk=False):
        return Norm


def self_attention_spec(config, backend=None):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec = spec.submodules.self_attention
    spec.submodules.linear_qkv = NormColumnParallelLinear
    spec.submodules.q_layernorm = spec.submodules.k_layernorm = Norm
    spec.metainfo["fuse_input_layernorm"] = True
    return spec


variants._get_backend_spec_provider = lambda config: Provider()
variants._get_self_attention_module_spec = self_attention_spec
moe_utils.te_general_gemm = None  # named without Transformer Engine, too
gated_delta_net.HAVE_FLA = True
gated_delta_net.l2norm = lambda x, dim=-1, eps=1e-6: x * torch.rsqrt(x.square().sum(dim, True) + eps)

class Gdn2(gated_delta_net.GatedDeltaNet):
    def __init__(self, config, submodules, **kwargs):
        super().__init__(config, submodules, **kwargs)
        self.in_proj_dim = 4 * self.qk_dim + 3 * self.v_dim
        self.in_proj = submodules.in_proj(
            self.hidden_size, self.in_proj_dim, config=config, init_method=config.init_method,
            gather_output=False, bias=False, skip_bias_add=False, is_expert=False,
            tp_comm_buffer_name="fc1", tp_group=self.pg_collection.tp)
        qk, v = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        self.names, self.sections = ["query", "key", "value", "z", "f", "b", "w"], [qk, qk, v, v, qk, qk, v]
        self.A_log = torch.nn.Parameter(torch.zeros(self.num_key_heads // self.tp_size))
        self.dt_bias = torch.nn.Parameter(torch.zeros(qk))
        self.A_log.tensor_model_parallel = self.dt_bias.tensor_model_parallel = True

    def forward(self, hidden_states, attention_mask=None, **_):
        x = self.in_proj(hidden_states)[0].transpose(0, 1)
        batch, length = x.shape[:2]
        qkv = sum(self.sections[:3])
        qkv, z, f, b, w = x.split([qkv, *self.sections[3:]], dim=-1)
        qkv = self.act_fn(self.conv1d(qkv.transpose(1, 2))[..., :length]).transpose(1, 2)
        q, k, v = qkv.split(self.sections[:3], dim=-1)
        heads = lambda t, width: t.reshape(batch, length, -1, width)
        more = self.num_value_heads // self.num_key_heads
        g = -self.A_log.float().exp().repeat_interleave(self.key_head_dim)
        g = g * torch.nn.functional.softplus(f.float() + self.dt_bias)
        q, k = (gated_delta_net.l2norm(heads(t, self.key_head_dim)) for t in (q, k))
        q, k, g, b = (t.repeat_interleave(more, dim=2) for t in (
            q, k, heads(g, self.key_head_dim), heads(b.sigmoid(), self.key_head_dim)))
        v, w, z = (heads(t, self.value_head_dim) for t in (v, w.sigmoid(), z))
        out = self._apply_gated_norm(recurrence()(q, k, v, g, b, w)[0], z)
        return self.out_proj(out.reshape(batch, length, -1).transpose(0, 1).contiguous())

    def sharded_state_dict(self, *args, **kwargs):
        real = gated_delta_net._split_tensor_factory
        gated_delta_net._split_tensor_factory = lambda t, sections, names, dim: (
            real(t, self.sections, self.names, dim) if t.key.endswith("in_proj.weight")
            else real(t, sections, names, dim))
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            gated_delta_net._split_tensor_factory = real


def gdn2_steps(q, k, v, g, b, w):
    state, out = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
    for t in range(k.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        read = ((b * k)[:, t].unsqueeze(-1) * state).sum(-2)
        state = state + k[:, t].unsqueeze(-1) * ((w * v)[:, t] - read).unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-1) * state).sum(-2) / k.shape[-1] ** 0.5)
    return torch.stack(out, 1), state


def recurrence():
    if "FLA" not in os.environ:
        return gdn2_steps
    spec = importlib.util.spec_from_file_location("naive", os.environ["FLA"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_recurrent_gdn2


SIZES = {
    "gpt_gdn": dict(values=4, hidden=32, kv=8, gdn=8, freq=2, experts=4, topk=2, moe=8, vocab=64, layers=2),
    "gpt_gdn2": dict(values=2, hidden=32, kv=8, gdn=8, freq=2, experts=4, topk=2, moe=8, vocab=64, layers=2),
    "gpt_gdn2_grouped": dict(values=4, hidden=32, kv=8, gdn=8, freq=2, experts=4, topk=2, moe=8, vocab=64, layers=2),
    "qwen3_next": dict(values=4, hidden=64, kv=32, gdn=16, freq=4, experts=8, topk=3, moe=32, vocab=320, layers=4),
}


def build(name, tp, pp):
    s = argparse.Namespace(**SIZES[name])
    if name.startswith("gpt_gdn2"):
        variants.GatedDeltaNet = Gdn2
    config = TransformerConfig(
        **dict(base.BASE, num_layers=s.layers, hidden_size=s.hidden, num_query_groups=2,
               kv_channels=s.kv, qk_layernorm=True, attention_output_gate=True,
               layernorm_zero_centered_gamma=True, deterministic_mode=True,
               experimental_attention_variant="gated_delta_net", linear_attention_freq=s.freq,
               linear_conv_kernel_dim=4, linear_key_head_dim=s.gdn, linear_value_head_dim=s.gdn,
               linear_num_key_heads=2, linear_num_value_heads=s.values,
               num_moe_experts=s.experts, moe_ffn_hidden_size=s.moe, moe_router_topk=s.topk,
               moe_shared_expert_intermediate_size=s.moe, moe_shared_expert_gate=True,
               moe_token_dispatcher_type="allgather", moe_aux_loss_coeff=0.0,
               moe_router_load_balancing_type="none", hidden_dropout=0.0, attention_dropout=0.0,
               masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
               tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
               pipeline_dtype=torch.float32))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config=config, vocab_size=s.vocab, max_sequence_length=base.LENGTH,
        transformer_layer_spec=variants.get_transformer_block_with_experimental_attention_variant_spec(config),
        pre_process=stage == 0, post_process=stage == pp - 1, position_embedding_type="rope",
        rotary_percent=0.25, rotary_base=10000, share_embeddings_and_output_weights=False,
        parallel_output=False)
    args = base.arguments(
        config, untie_embeddings_and_output_weights=True, rotary_percent=0.25, vocab_size=s.vocab,
        padded_vocab_size=s.vocab, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        **{k: getattr(config, k) for k in (
            "attention_output_gate", "moe_shared_expert_gate", "linear_conv_kernel_dim",
            "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
            "linear_num_value_heads")})
    if name.startswith("gpt_gdn2"):
        args.experimental_attention_variant = "gdn2"
    return model.eval(), args


def fill(model):
    """Random: what the ranks hold whole is equal on all, their parts are not. The gated output norm
    gets steps of 2^-10: Hugging Face stores one plus it, which is then exact."""
    for i, (name, p) in enumerate(sorted(model.named_parameters())):
        rank = dist.get_rank() if getattr(p, "tensor_model_parallel", False) else 0
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * rank + i))
        with torch.no_grad():
            p.copy_(noise.abs() if name.endswith("A_log") else 0.1 * noise)
            if "out_norm" in name:
                p.mul_(1024).round_().div_(1024).add_(0.0)  # no -0.0


def read(model, path):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    state = {k: v for k, v in base.sharded(model).items() if not k.endswith("_extra_state")}
    loaded = dist_checkpointing.load({"model": state}, path)
    missing, unexpected = model.load_state_dict(loaded["model"], strict=False)
    missing = [k for k in missing if not k.endswith("_extra_state")]
    assert not missing and not unexpected, (missing, unexpected)
    for key, p in model.named_parameters():
        assert not torch.isnan(p).any(), key


def logits(model, ids):
    position = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.triu(torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
    with torch.no_grad():
        return model(ids, position, mask)


def same_logits(model, reference, path):
    ref = load_file(reference)
    got, want = logits(model, ref["input_ids"]).double(), ref["logits"].double()
    rms = ((got - want).square().mean().sqrt() / want.square().mean().sqrt()).item()
    print(f"{os.path.basename(path)}: logits {tuple(got.shape)}, relative RMS {rms:.2e}")
    assert rms < 1e-5, rms


def same_parts(model, plain):
    want, count = load_file(plain), 0
    state = base.sharded(model)
    apply_factories(state)
    for part in nested_values(state):
        if not isinstance(part, ShardedTensor):
            continue
        whole, shape = want[part.key], (1,) * part.prepend_axis_num + tuple(part.local_shape)
        assert tuple(part.global_shape) == tuple(whole.shape), part.key
        at = tuple(slice(o, o + n) for o, n in zip(part.global_offset, shape))
        assert torch.equal(whole[at].reshape(part.data.shape), part.data), part.key
        count += 1
    print(f"rank {dist.get_rank()}: {count} parts equal", flush=True)


def save(out, name="gpt_gdn"):
    model, args = build(name, 2, 1)
    fill(model)
    root = os.path.join(out, name + "_tp2")
    path = os.path.join(root, "iter_0000010")
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        os.makedirs(path)
    dist.barrier()
    state = {"model": base.sharded(model), "args": args, "checkpoint_version": 3.0, "iteration": 10,
             "content_metadata": {"singleton_local_shards": False}}
    dist_checkpointing.save(state, path)
    ids = torch.randint(0, SIZES[name]["vocab"], (1, 24), generator=torch.Generator().manual_seed(3))
    out_logits = logits(model, ids)
    plain = dist_checkpointing.load_plain_tensors(path)  # which all ranks do together
    if dist.get_rank() > 0:
        return
    with open(os.path.join(root, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write("10")
    save_file({k: v.contiguous() for k, v in plain.items() if isinstance(v, torch.Tensor)},
              root + ".plain.safetensors")
    save_file({"input_ids": ids, "logits": out_logits.contiguous()}, root + ".reference.safetensors")


def worker(rank, tp, pp, argv):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{os.environ['GDN_PORT']}", rank=rank, world_size=tp * pp)
    parallel_state.initialize_model_parallel(tp, pp)
    if argv[0] == "save":
        save(*argv[1:])
    elif argv[0] == "load":
        model, _ = build(argv[1], 1, 1)
        for path in argv[3:]:
            read(model, path)
            same_logits(model, argv[2], path)
    else:
        model, _ = build(argv[1], tp, pp)
        read(model, argv[5])
        same_parts(model, argv[4])
    dist.barrier()
    dist.destroy_process_group()


def main(argv):
    tp, pp = {"save": (2, 1), "load": (1, 1)}.get(argv[0]) or (int(argv[2]), int(argv[3]))
    if "GDN_RANK" in os.environ:
        return worker(int(os.environ["GDN_RANK"]), tp, pp, argv)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    # plain processes: Megatron-Core's writer starts children of its own
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=dict(os.environ, GDN_RANK=str(r), GDN_PORT=port))
             for r in range(tp * pp)]
    try:
        return max(abs(r.wait(timeout=600)) for r in ranks)
    finally:
        for r in ranks:
            r.kill()


if __name__ == "__main__":  # writers are processes that import this file
    sys.exit(main(sys.argv[1:]))
