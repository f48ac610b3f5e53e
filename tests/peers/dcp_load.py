"""A DCP directory written by ckpt loads in real PyTorch and, if it is one, in real Megatron-Core.

usage: dcp_load.py DIR EXPECTED.safetensors [--subset]

DIR is a checkpoint directory or a Megatron save root. Checked, bit for bit:
1. torch.distributed.checkpoint.load of every tensor, with no_dist and in a process group, and of
   the second half of axis 0 of what can be halved;
2. torch.load(weights_only=True) of every tensor item, which must hold the very chunk;
3. dcp_to_torch_save;
4. with metadata.json: load_plain_tensors, load with default strictness (objects too),
   load_tensors_metadata, load_sharded_metadata, and the common state from common.pt and from its
   object.
--subset: the checkpoint may hold tensors that EXPECTED lacks.
"""

import glob
import io
import logging
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def raw(t):
    t = t.contiguous()
    return t.reshape(-1).view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)


def same(name, got, want):
    if got.dtype != want.dtype or got.shape != want.shape or not torch.equal(raw(got), raw(want)):
        sys.exit(f"{name}: {got.dtype} {tuple(got.shape)} differs from {tuple(want.shape)}")


def find(path):
    if os.path.exists(f"{path}/.metadata"):
        return path
    word = open(f"{path}/latest_checkpointed_iteration.txt").read().strip()
    return f"{path}/release" if word == "release" else f"{path}/iter_{int(word):07d}"


def load_all(path, meta, expected, **kw):
    state = {
        k: torch.empty(m.size, dtype=m.properties.dtype)
        for k, m in meta.state_dict_metadata.items()
        if hasattr(m, "size")
    }
    objects = [k for k, m in meta.state_dict_metadata.items() if not hasattr(m, "size")]
    state.update({k: None for k in objects})
    dcp.load(state, checkpoint_id=path, **kw)
    for key, want in expected.items():
        same(key, state[key], want)
    return len(state) - len(objects), {k: state[k] for k in objects}


def load_halves(path, expected):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class Planner(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            from torch.distributed.checkpoint.planner import LoadPlan

            items = []
            for k, m in self.metadata.state_dict_metadata.items():
                if k in self.state_dict:
                    n = m.size[0] // 2
                    chunk = ChunkStorageMetadata(
                        torch.Size([n] + [0] * (len(m.size) - 1)),
                        torch.Size([n] + list(m.size[1:])),
                    )
                    items += create_read_items_for_chunk_list(k, m, [chunk])
            return LoadPlan(items)

        def lookup_tensor(self, index):
            return self.state_dict[index.fqn]

    cut = {k: v for k, v in expected.items() if v.dim() and v.shape[0] and v.shape[0] % 2 == 0}
    state = {k: torch.empty_like(v[v.shape[0] // 2 :]) for k, v in cut.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True, planner=Planner(flatten_state_dict=False))
    for k, v in cut.items():
        same(k, state[k], v[v.shape[0] // 2 :])
    return len(cut)


def check_items(path, meta, expected):
    covered = {f: 0 for f in glob.glob(f"{path}/*.distcp")}
    for index, info in meta.storage_data.items():
        file = f"{path}/{info.relative_path}"
        with open(file, "rb") as f:
            f.seek(info.offset)
            item = f.read(info.length)
        if len(item) != info.length or covered[file] != info.offset:
            sys.exit(f"{index}: items do not follow one another")
        covered[file] += info.length
        if index.offset is None:
            continue
        got = torch.load(io.BytesIO(item), weights_only=True)
        if index.fqn in expected:
            cut = expected[index.fqn]
            chunk = meta.state_dict_metadata[index.fqn].chunks[index.index]
            if chunk.offsets != index.offset:
                sys.exit(f"{index}: index does not point at its chunk")
            for axis, (lo, n) in enumerate(zip(chunk.offsets, chunk.sizes)):
                cut = cut.narrow(axis, lo, n)
            same(index, got, cut)
    for file, end in covered.items():
        if os.path.getsize(file) != end:
            sys.exit(f"{file}: {os.path.getsize(file)} bytes, items end at {end}")


def sharded_object(name):
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject.empty_from_unique_key(name)


def check_megatron(path, expected, objects):
    from megatron.core import dist_checkpointing as mcore

    plain = mcore.load_plain_tensors(path)
    for key, want in expected.items():
        same(key, plain[key], want)
    # Megatron's own integrity check divides by the extents of a shard.
    expected = {k: v for k, v in expected.items() if v.numel()}
    request = {
        "model": {
            k: mcore.ShardedTensor.from_rank_offsets(k, torch.empty_like(v), replica_id=0)
            for k, v in expected.items()
        },
        "objects": {
            k: sharded_object(k) for k in objects if "/shard_" in k and "common_state" not in k
        },
    }
    loaded = mcore.load(request, path)
    for key, want in expected.items():
        same(key, loaded["model"][key], want)
    mcore.load_tensors_metadata(path)
    mcore.serialization.load_sharded_metadata(path)
    common = mcore.load_common_state_dict(path)
    for key in ("args", "checkpoint_version", "iteration", "content_metadata"):
        if key not in common or key not in loaded:
            sys.exit(f"{path}: no {key} in the common state")
    if "common_state/shard_0_1" in objects:
        whole = objects["common_state/shard_0_1"]
        if not isinstance(whole, list) or len(whole) != 1 or repr(whole[0]) != repr(common):
            sys.exit(f"{path}: common.pt and its object differ")
    return type(common["args"]).__name__, sorted(common)


def main():
    root, plain = sys.argv[1:3]
    path = find(root)
    expected = load_file(plain)
    meta = dcp.FileSystemReader(path).read_metadata()
    n, objects = load_all(path, meta, expected, no_dist=True)
    if n != len(expected) and "--subset" not in sys.argv:
        sys.exit(f"{path}: {n} tensors, expected {len(expected)}")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 500))
    dist.init_process_group("gloo", rank=0, world_size=1)
    load_all(path, meta, expected)
    halves = load_halves(path, expected)
    check_items(path, meta, expected)
    with tempfile.NamedTemporaryFile(suffix=".pt") as f:
        dcp_to_torch_save(path, f.name)
        whole = torch.load(f.name, weights_only=False)
        for key, want in expected.items():
            same(key, whole[key], want)
    said = f"{n} tensors, {halves} halves, {len(objects)} objects"
    if os.path.exists(f"{path}/metadata.json"):
        kind, keys = check_megatron(path, expected, objects)
        said += f", args {kind}, common state {keys}"
    dist.destroy_process_group()
    print(said)


main()
