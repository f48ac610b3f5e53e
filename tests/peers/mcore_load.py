"""A torch_dist checkpoint loads in real Megatron-Core and equals expected tensors.

usage: mcore_load.py ITER_DIR PLAIN.safetensors [--extra-ok]

1. load_plain_tensors (every tensor whole);
2. dist_checkpointing.load with a ShardedTensor per key, default strictness, twice: whole, and the
   second half of axis 0 as rank 1 of 2 would ask for it;
3. load_common_state_dict: args and iteration are there.
--extra-ok: the checkpoint may hold tensors that PLAIN lacks.
"""

import logging
import os
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch
import torch.distributed as dist
from safetensors.torch import load_file


def start():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 500))
    dist.init_process_group("gloo", rank=0, world_size=1)


def same(name, got, want):
    if got.dtype != want.dtype or got.shape != want.shape or not torch.equal(
        got.contiguous().view(torch.uint8) if got.dim() else got.reshape(1).view(torch.uint8),
        want.contiguous().view(torch.uint8) if want.dim() else want.reshape(1).view(torch.uint8),
    ):
        sys.exit(
            f"{name}: {got.dtype} {tuple(got.shape)} differs from {want.dtype} {tuple(want.shape)}"
        )


def sharded(key, want, half):
    from megatron.core.dist_checkpointing import ShardedTensor

    if half and want.dim() > 0 and want.shape[0] % 2 == 0:
        local = torch.empty_like(want[want.shape[0] // 2 :])
        return ShardedTensor.from_rank_offsets(key, local, (0, 1, 2), replica_id=0)
    return ShardedTensor.from_rank_offsets(key, torch.empty_like(want), replica_id=0)


def main():
    path, plain = sys.argv[1:3]
    start()
    from megatron.core import dist_checkpointing

    expected = load_file(plain)
    got = dist_checkpointing.load_plain_tensors(path)
    tensors = {k: v for k, v in got.items() if isinstance(v, torch.Tensor)}
    missing = sorted(set(expected) - set(tensors))
    extra = sorted(set(tensors) - set(expected))
    if missing or (extra and "--extra-ok" not in sys.argv):
        sys.exit(f"{path}: missing {missing[:4]}, unexpected {extra[:4]}")
    for key, want in expected.items():
        same(key, tensors[key], want)

    for half in (False, True):
        request = {"model": {k: sharded(k, v, half) for k, v in expected.items()}}
        # Half of every tensor is no complete request, which is all that this check is about.
        loaded = dist_checkpointing.load(request, path, validate_access_integrity=not half)
        for key, want in expected.items():
            cut = half and want.dim() > 0 and want.shape[0] % 2 == 0
            same(key, loaded["model"][key], want[want.shape[0] // 2 :] if cut else want)

    common = dist_checkpointing.load_common_state_dict(path)
    if "args" not in common:
        sys.exit(f"{path}: no args in the common state: {sorted(common)}")
    print(f"{len(expected)} tensors, common state {sorted(common)}")
    dist.destroy_process_group()


main()
