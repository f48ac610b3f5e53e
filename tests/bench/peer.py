"""What a user of Python would run instead of ckpt, one command a time (tests/bench/cases.json).

  peer.py probe MODULE...               exit 0 if they can be imported
  peer.py copy SRC DST                  safetensors: load all, save all, fsync
  peer.py dcp_save SRC DIR              safetensors -> torch.distributed.checkpoint directory
  peer.py dcp_to_safetensors DIR DST    back, by torch.distributed.checkpoint and save_file
  peer.py dcp_to_torch DIR DST          torch's own dcp_to_torch_save
  peer.py sha256 FILE                   hashlib
  peer.py b3 FILE                       the blake3 package
  peer.py cast SRC DST                  safetensors: load all, to bf16, save all, fsync
  peer.py cut SRC DIR                   of every tensor a quarter of the last axis a rank: DIR/dcp by
                                        torch.distributed.checkpoint from four processes, DIR/rank_N.pt
  peer.py merge DIR DST                 the latter back: four loads, cat, save, fsync
  peer.py hf SRC DIR                    transformers: from_pretrained, save_pretrained, fsync
"""
import importlib
import os
import sys
import warnings

warnings.filterwarnings("ignore")


def sync(path):
    names = [path] if os.path.isfile(path) else [e.path for e in os.scandir(path)]
    for name in names:
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def copy(src, dst):
    from safetensors.torch import load_file, save_file

    save_file(load_file(src), dst)
    sync(dst)


def dcp_save(src, directory):
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    dcp.save(load_file(src), checkpoint_id=directory, no_dist=True)
    sync(directory)


def dcp_to_safetensors(directory, dst):
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    reader = dcp.FileSystemReader(directory)
    state = {
        name: torch.empty(m.size, dtype=m.properties.dtype)
        for name, m in reader.read_metadata().state_dict_metadata.items()
        if hasattr(m, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    save_file(state, dst)
    sync(dst)


def dcp_to_torch(directory, dst):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(directory, dst)
    sync(dst)


def sha256(path):
    import hashlib

    with open(path, "rb") as f:
        print(hashlib.file_digest(f, "sha256").hexdigest())


def b3(path):
    import blake3

    print(blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest())


def cast(src, dst):
    import torch
    from safetensors.torch import load_file, save_file

    save_file({name: t.to(torch.bfloat16) for name, t in load_file(src).items()}, dst)
    sync(dst)


RANKS = 4


def cut_rank(rank, src, directory):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    parts = {}
    with safe_open(src, "pt") as f:
        for name in f.keys():
            whole = f.get_slice(name)
            rows, columns = whole.get_shape()
            step = columns // RANKS
            parts[name] = whole[:, rank * step : (rank + 1) * step].contiguous()
    torch.save(parts, f"{directory}/rank_{rank}.pt")
    state = {name: DTensor.from_local(t, mesh, [Shard(1)], run_check=False) for name, t in parts.items()}
    dcp.save(state, checkpoint_id=f"{directory}/dcp")
    dist.destroy_process_group()


def cut(src, directory):
    import multiprocessing
    import shutil

    import torch.distributed.checkpoint  # noqa: F401  before the processes part: one import serves all

    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=cut_rank, args=(r, src, directory)) for r in range(RANKS)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
    if any(p.exitcode != 0 for p in ranks):
        raise SystemExit("a rank failed")


def merge(directory, dst):
    import torch
    from safetensors.torch import save_file

    parts = [torch.load(f"{directory}/rank_{r}.pt", weights_only=True) for r in range(RANKS)]
    save_file({name: torch.cat([p[name] for p in parts], dim=1) for name in parts[0]}, dst)
    sync(dst)


def hf(src, directory):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16).save_pretrained(directory)
    sync(directory)


def probe(*modules):
    for name in modules:
        importlib.import_module(name)


def main():
    command = {f.__name__: f for f in (probe, copy, dcp_save, dcp_to_safetensors, dcp_to_torch, sha256, b3, cast, cut, merge, hf)}
    command[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
