"""What a user of Python would run instead of ckpt, one command a time (tests/bench/cases.json).

  peer.py probe MODULE...               exit 0 if they can be imported
  peer.py copy SRC DST                  safetensors: load all, save all, fsync
  peer.py dcp_save SRC DIR              safetensors -> torch.distributed.checkpoint directory
  peer.py dcp_to_safetensors DIR DST    back, by torch.distributed.checkpoint and save_file
  peer.py dcp_to_torch DIR DST          torch's own dcp_to_torch_save
  peer.py sha256 FILE                   hashlib
  peer.py b3 FILE                       the blake3 package
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


def probe(*modules):
    for name in modules:
        importlib.import_module(name)


def main():
    command = {f.__name__: f for f in (probe, copy, dcp_save, dcp_to_safetensors, dcp_to_torch, sha256, b3)}
    command[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
