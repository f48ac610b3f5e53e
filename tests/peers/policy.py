"""PyTorch loads what ckpt wrote with a quantisation policy: the tensors of a safetensors file and nothing else,
and the policy as attributes that its loaders leave alone.

usage: policy.py TORCH-DIR DCP-DIR RANKS-DIR SAFETENSORS
"""

import glob
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

KEYS = ("kda_quant_policy", "kda_quant_policy_sha256")


def policy_of(holder):
    return tuple(getattr(holder, key) for key in KEYS)


def same(got, want, what):
    assert got.keys() == want.keys(), f"{what}: {got.keys() ^ want.keys()}"
    assert all(torch.equal(got[name], want[name]) for name in want), f"{what}: another value"


def main():
    torch_dir, dcp_dir, ranks_dir, plain = sys.argv[1:]
    want = load_file(plain)
    with safe_open(plain, "pt") as f:
        texts = {tuple(f.metadata()[key] for key in KEYS)}
    for mmap in (False, True):
        state = {}
        for name in sorted(glob.glob(f"{torch_dir}/pytorch_model*.bin")):
            part = torch.load(name, weights_only=True, mmap=mmap)
            texts.add(policy_of(part))
            state.update(part)
        same(state, want, "torch.load")
    module = torch.nn.ParameterDict({name.replace(".", "/"): t for name, t in want.items()})
    module.load_state_dict({name.replace(".", "/"): t for name, t in state.items()}, strict=True)
    meta = dcp.FileSystemReader(dcp_dir).read_metadata()
    texts.add(policy_of(meta))
    state = {
        name: torch.empty(m.size, dtype=m.properties.dtype)
        for name, m in meta.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=dcp_dir, no_dist=True)
    same(state, want, "dcp.load")
    with tempfile.NamedTemporaryFile() as f:
        dcp_to_torch_save(dcp_dir, f.name)
        same(torch.load(f.name, weights_only=True), want, "dcp_to_torch_save")
    for name in glob.glob(f"{ranks_dir}/model-rank-*.safetensors"):
        with safe_open(name, "pt") as f:
            assert f.keys() and texts == {tuple(f.metadata()[key] for key in KEYS)}, name
    assert len(texts) == 1, f"{len(texts)} policies"
    print(f"{len(want)} tensors three times, one policy")


if __name__ == "__main__":
    main()
