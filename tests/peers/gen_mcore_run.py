"""Writes fixtures/mcore/gpt_*.reference.safetensors: logits, loss and gradients of the models of
gen_mcore_gpt.py, run by Megatron-Core itself on the CPU in float64 and rounded once to F32.

usage: gen_mcore_run.py OUT_DIR [NAME...]

input_ids, labels [B, S]; logits [B, S, V]; loss, the mean over all positions, without the loss of
multi-token prediction, whose gradients are in nevertheless (factor 0.1, Megatron's own); grad.KEY under
the storage keys: the gradients are saved in the parameters' place and read back. While a model
runs torch.float32, which Megatron-Core asks for in places, means torch.float64."""

import contextlib
import os
import shutil
import socket
import sys
import tempfile

import gen_mcore_gpt as gpt
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import save_file

NAMES = ["gpt_dense", "gpt_relu2", "gpt_moe", "gpt_moe_all", "gpt_mla_mtp"]
attention_init = DotProductAttention.__init__


def init_attention(self, *args, v_channels=None, **kwargs):
    """Local attention takes the width of its output from kv_channels, which MLA's values do not have."""
    attention_init(self, *args, **kwargs)
    if v_channels:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


DotProductAttention.__init__ = init_attention
moe_utils.te_general_gemm = None  # not defined where Transformer Engine is absent


@contextlib.contextmanager
def everything_is_double():
    names, convert = (torch.float32, torch.float), torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    yield
    torch.float32, torch.float = names
    torch.Tensor.float = convert


def gradients(model):
    """By storage key: saved and read back in the parameters' place."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    path = tempfile.mkdtemp()
    dist_checkpointing.save({"model": gpt.sharded(model)}, path)
    plain = dist_checkpointing.load_plain_tensors(path)
    shutil.rmtree(path)
    return {k: v for k, v in plain.items() if isinstance(v, torch.Tensor) and "expert_bias" not in k}


def run(out, name, batch=2, length=12):
    model, _ = gpt.MODELS[name]()
    with torch.no_grad():
        gpt.fill(model)
    model.double().train()
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
        if hasattr(m, "hidden_dropout"):
            m.hidden_dropout = 0.0
    ids = torch.randint(0, gpt.VOCAB, (batch, length), generator=torch.Generator().manual_seed(5))
    labels = torch.roll(ids, -1, 1)
    positions = torch.arange(length).expand(batch, length).contiguous()
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    heads = []  # outputs of the head: one a depth of multi-token prediction, then the model's
    model.output_layer.register_forward_hook(lambda _, args, out: heads.append(out[0].detach().clone()))
    with everything_is_double():
        loss = model(ids, positions, mask, labels=labels).mean()
        loss.backward()
    logits = heads[-1].transpose(0, 1)
    again = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert abs(again - loss.item()) < 1e-12, (again, loss)
    tensors = {"input_ids": ids, "labels": labels, "loss": loss.detach().to(torch.float32),
               "logits": logits.to(torch.float32).contiguous()}
    tensors.update({"grad." + k: v.to(torch.float32).contiguous() for k, v in gradients(model).items()})
    save_file(tensors, os.path.join(out, name + ".reference.safetensors"))
    print(f"{name}: loss {loss.item():.8f} in {loss.dtype}, {len(tensors) - 4} gradients")


def main():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    for name in sys.argv[2:] or NAMES:
        run(sys.argv[1], name)
    dist.destroy_process_group()


if __name__ == "__main__":  # writers are processes that import this file
    main()
