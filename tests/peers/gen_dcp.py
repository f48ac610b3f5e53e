#!/usr/bin/env python3
"""Write the DCP fixtures of fixtures/torch with their real writers.

usage: gen_dcp.py WHAT DIR      (two gloo ranks on this machine; torch 2.11)

  items      dcp_safetensors_items: FileSystemWriter, SerializationFormat.SAFETENSORS
  hf         dcp_hf_consolidated: HuggingFaceStorageWriter with consolidation, sharded/ kept
  fsdp2      dcp_fsdp2: {"model": ..., "optim": ...} of a fully_shard'ed small Llama after one step
  local      dcp_rank_local: __R.metadata files, saved without collectives
  megatron   dcp_megatron_fsdp: the keys and kinds of --ckpt-format torch_dcp and fsdp_dtensor
  flat       mcore_flat_VERSION: flattened optimizer tensors; needs an old megatron-core first on
             PYTHONPATH (pip download --no-deps megatron-core==0.13.0, unpacked)
  lost       mcore_flat_lost: the same with megatron-core 0.13, whose mcore_data torch >= 2.9 drops
  big        dcp_big: --entries N chunks that all lie in one item, to measure the parsing of .metadata
  zarr       mcore_zarr: as flat with megatron-core 0.15, zarr<3 and tensorstore, backend zarr

Every checkpoint comes with NAME.expected.safetensors: the tensors whole.
"""

import argparse
import os
import shutil
import socket
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

import stand_in

WORLD = 2
DP = 2  # data-parallel ranks of the flattened writers, which run on WORLD * DP ranks


def values(shape, dtype=torch.float32, seed=0):
    """Distinct small numbers: a misplaced element cannot go unseen."""
    n = 1
    for s in shape:
        n *= s
    return (torch.arange(n) + 1000 * seed).to(dtype).reshape(shape)


def mesh():
    return dist.device_mesh.init_device_mesh("cpu", (WORLD,))


def sharded(tensor, dim):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(tensor, mesh(), [placement])


def state():
    """Row, column and unevenly cut, replicated, integer, bf16, scalar."""
    return {
        "rows": (values((6, 4), seed=1), 0),
        "columns": (values((4, 6), torch.bfloat16, seed=2), 1),
        "uneven": (values((5, 3), seed=3), 0),
        "whole": (values((7,), seed=4), None),
        "ints": (values((4, 2), torch.int64, seed=5), 0),
        "scalar": (torch.tensor(2.5), None),
    }


def run_items(out):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    sd = {k: sharded(t, d) for k, (t, d) in state().items()}
    sd["note"] = {"kind": "safetensors items", "step": 7}
    writer = FileSystemWriter(out, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(sd, storage_writer=writer)
    return {k: t for k, (t, _) in state().items()}


def run_hf(out):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    # Consolidation upstream fails on integers and leaves scalars zero.
    full = {k: v for k, v in state().items() if k not in ("ints", "scalar")}
    sd = {k: sharded(t, d) for k, (t, d) in full.items()}
    index = {"rows": 1, "columns": 1, "uneven": 2, "whole": 2}
    writer = HuggingFaceStorageWriter(
        str(out), fqn_to_index_mapping=index, save_distributed=True, enable_consolidation=True
    )
    dcp.save(sd, storage_writer=writer)
    return {k: t for k, (t, _) in full.items()}


def run_local(out):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    sd = {"part": values((4, 2), seed=dist.get_rank())}
    dcp.save(sd, storage_writer=FileSystemWriter(out), use_collectives=False)
    return None


def run_fsdp2(out):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=48,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    m = mesh()
    for layer in model.model.layers:
        fully_shard(layer, mesh=m)
    fully_shard(model, mesh=m)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(16).reshape(1, 16) + 16 * dist.get_rank() + 1
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    weights, optim = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=out)
    if dist.get_rank() == 0:
        config.save_pretrained(out)
    full = dict(weights)  # ckpt gives the names without the outer "model."
    for name, moments in optim["state"].items():
        for kind, t in moments.items():
            full[f"optim.state.{name}.{kind}"] = t
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in full.items()}


def run_megatron(out):
    """What T/checkpointing.py gives torch.distributed.checkpoint.save for these formats."""
    weights = {
        "embedding.word_embeddings.weight": (values((8, 4), seed=1), 0),
        "decoder.layers.0.mlp.linear_fc1.weight_w": (values((6, 4), seed=2), 0),
        "decoder.layers.0.mlp.linear_fc1.weight_v": (values((6, 4), seed=3), 0),
        "decoder.layers.0.mlp.linear_fc2.weight": (values((4, 6), seed=4), 0),
        "decoder.final_layernorm.weight": (values((4,), seed=5), 0),
    }
    rng = [
        {
            "random_rng_state": (3, tuple(range(5)), None),
            "torch_rng_state": torch.arange(16, dtype=torch.uint8),
            "rng_tracker_states": {"model-parallel-rng": torch.arange(8, dtype=torch.uint8)},
        }
    ]
    sd = {
        "args": argparse.Namespace(
            num_layers=1, hidden_size=4, ckpt_format="fsdp_dtensor", swiglu=True, iteration=12
        ),
        "checkpoint_version": 3.0,
        "iteration": 12,
        "model": {k: sharded(t, d) for k, (t, d) in weights.items()},
        "optimizer": {
            "state": {k: {"exp_avg": sharded(t + 0.5, d)} for k, (t, d) in weights.items()},
            "param_to_group_meta": {k: {"lr": 0.1, "wd_mult": 1.0} for k in weights},
        },
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 48, "lr_decay_style": "cosine"},
        "rng_state": {(0, 0): rng},
        "num_floating_point_operations_so_far": 123,
    }
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(out))
    full = {k: t for k, (t, _) in weights.items()}
    full |= {f"optimizer.state.{k}.exp_avg": t + 0.5 for k, (t, _) in weights.items()}
    full["rng_state.(0, 0).0.torch_rng_state"] = rng[0]["torch_rng_state"]
    full["rng_state.(0, 0).0.rng_tracker_states.model-parallel-rng"] = rng[0][
        "rng_tracker_states"
    ]["model-parallel-rng"]
    return full


def mcore_state(flattened):
    """TP 2; the flattening of each block is cut over two data-parallel ranks at a third of it."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank, dp = dist.get_rank() % WORLD, dist.get_rank() // WORLD
    full, sd = {}, {}

    def add(key, tensor, axis, stacked=0, flattened=flattened):
        """axis of the 2-rank cut (None: rank 0 owns it); stacked: leading axes prepended."""
        local = tensor if axis is None else tensor.chunk(WORLD, axis)[rank]
        pieces = [((), local)]
        if stacked:
            pieces = [((layer,), local[layer]) for layer in range(tensor.shape[0])]
        if axis is None and rank:
            pieces = []
        full[key] = tensor
        for where, piece in pieces:
            offsets = [(0, where[0], tensor.shape[0])] if where else []
            if axis is not None:
                offsets.append((axis, rank, WORLD))
            replica = 0 if flattened else dp
            t = ShardedTensor.from_rank_offsets(
                key, piece.contiguous(), *offsets, replica_id=replica, prepend_axis_num=len(where)
            )
            if flattened:
                third = piece.numel() // 3
                t.flattened_range = slice(third, piece.numel()) if dp else slice(0, third)
                t.data = piece.contiguous().flatten()[t.flattened_range].clone()
            sd[f"{key}.{where}"] = t

    add("optimizer.state.exp_avg.rows", values((6, 5), seed=1), 0)
    add("optimizer.state.exp_avg.columns", values((5, 6), seed=2), 1)
    add("optimizer.state.exp_avg.cube", values((4, 4, 5), seed=3), 1)
    add("optimizer.state.exp_avg.stacked", values((2, 6, 3), seed=4), 1, stacked=1)
    add("optimizer.state.exp_avg.vector", values((10,), seed=5), 0)
    add("optimizer.state.exp_avg.lone", values((3, 3), seed=6), None)
    # The parameters themselves, never flattened.
    for name, axis, stacked in (
        ("rows", 0, 0),
        ("columns", 1, 0),
        ("cube", 1, 0),
        ("stacked", 1, 1),
        ("vector", 0, 0),
        ("lone", None, 0),
    ):
        add(name, full["optimizer.state.exp_avg." + name] + 0.5, axis, stacked, False)
    plain = values((4, 4), seed=7)
    sd["plain"] = ShardedTensor.from_rank_offsets(
        "decoder.weight", plain.chunk(WORLD)[rank].contiguous(), (0, rank, WORLD), replica_id=dp
    )
    full["decoder.weight"] = plain
    sd["rng"] = ShardedObject("rng_state", {"rank": rank}, (1, WORLD), (0, rank), replica_id=dp)
    sd["args"] = argparse.Namespace(hidden_size=4, num_layers=2)
    sd["iteration"] = 30
    sd["checkpoint_version"] = 3.0
    return sd, full, add


def run_flat(out):
    """Before torch 2.9 finish() did not rebuild Metadata, and the attribute of 0.13 lived."""
    from torch.distributed.checkpoint import filesystem

    same = types.SimpleNamespace(**vars(filesystem.dataclasses))
    same.replace = lambda metadata, **fields: metadata
    filesystem.dataclasses = same
    return run_lost(out)


def run_lost(out):
    from megatron.core import dist_checkpointing

    sd, full, add = mcore_state(True)
    dist_checkpointing.save(sd, str(out), validate_access_integrity=False)
    return full


def run_zarr(out):
    import zarr
    import tensorstore  # noqa: F401 registers bfloat16 with numpy
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy

    sd, full, add = mcore_state(False)
    add("bf16", values((6, 4), torch.bfloat16, seed=8), 0)
    add("ints", values((4,), torch.int64, seed=9), 0)
    if dist.get_rank() == 0:
        # Zarr itself also makes what Megatron does not ask for: a last chunk of three rows that
        # reaches past the end, and column-major chunks.
        for name, order in (("uneven", "C"), ("fortran", "F")):
            full[name] = values((5, 4), seed=10)
            zarr.create(
                (5, 4), chunks=(3, 2), dtype="<f4", store=out / name, compressor=None, order=order
            )[:] = full[name].numpy()
    dist_checkpointing.save(
        sd, str(out), ZarrSaveShardedStrategy("zarr", 1), validate_access_integrity=False
    )
    return full


def write_big(out, entries):
    """One process. Ten chunks a tensor, a thousand files, names as Megatron has them."""
    import io
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    item = io.BytesIO()
    torch.save(torch.zeros(1, 4), item)
    out.mkdir(parents=True, exist_ok=True)
    files = [f"__{i}_0.distcp" for i in range(min(1000, entries))]
    for file in files:
        (out / file).write_bytes(item.getvalue())
    tensors, storage, chunks, made = {}, {}, 10, 0
    while made < entries:
        name = f"decoder.layers.{made // 5000}.mlp.experts.local_experts.{made % 5000}.linear.weight"
        pieces = []
        for i in range(min(chunks, entries - made)):
            offset = torch.Size([i, 0])
            pieces.append(ChunkStorageMetadata(offset, torch.Size([1, 4])))
            where = _StorageInfo(files[made % len(files)], 0, len(item.getvalue()))
            storage[MetadataIndex(name, offset, i)] = where
            made += 1
        size = torch.Size([len(pieces), 4])
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.float32), size, pieces)
    with open(out / ".metadata", "wb") as f:
        pickle.dump(Metadata(tensors, {}, storage), f)


NAMES = {
    "big": "dcp_big",
    "items": "dcp_safetensors_items",
    "hf": "dcp_hf_consolidated",
    "local": "dcp_rank_local",
    "fsdp2": "dcp_fsdp2",
    "megatron": "dcp_megatron_fsdp",
    "flat": "mcore_flat",
    "lost": "mcore_flat_lost",
    "zarr": "mcore_zarr",
}


def without_cuda():
    """Old Megatron-Core assumes a GPU: it synchronizes, and compiles a helper when imported."""
    torch.cuda.synchronize = lambda *a: None
    torch.cuda.current_device = lambda: "cpu"
    stand_in.unified_memory()


def world_of(what):
    return WORLD * DP if what in ("flat", "lost") else WORLD


def worker(rank, what, directory, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    without_cuda()
    dist.init_process_group("gloo", rank=rank, world_size=world_of(what))
    name = NAMES[what]
    if what == "flat":
        from importlib.metadata import version

        name += "_" + version("megatron-core").replace(".", "_")
    out = directory / name
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
    dist.barrier()
    full = globals()["run_" + what](out)
    dist.barrier()
    if rank == 0 and full is not None:
        full = {k: v.detach().clone().contiguous() for k, v in full.items()}
        save_file(full, str(directory / (name + ".expected.safetensors")))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=sorted(NAMES))
    parser.add_argument("dir", type=Path)
    parser.add_argument("--entries", type=int, default=1000000)
    o = parser.parse_args()
    if o.what == "big":
        return write_big(o.dir / NAMES[o.what], o.entries)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, (o.what, o.dir, port), nprocs=world_of(o.what))


if __name__ == "__main__":
    sys.exit(main())
