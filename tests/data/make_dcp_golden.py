"""Write dcp_2rank.safetensors and common_tensor.pt: every tensor of fixtures/torch/dcp_2rank as torch reads it.

usage: make_dcp_golden.py (from the repository root; torch 2.11, safetensors 0.8)
"""

import argparse

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

path = "fixtures/torch/dcp_2rank"
meta = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
state = {
    k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in meta.items() if hasattr(m, "size")
}
dcp.load(state, checkpoint_id=path, no_dist=True)
save_file({k: v.contiguous() for k, v in state.items()}, "tests/data/dcp_2rank.safetensors")

# A common.pt as an fp16 run leaves it: the loss scaler's state is a tensor.
torch.save(
    {
        "args": argparse.Namespace(fp16=True, hidden_size=8),
        "checkpoint_version": 3.0,
        "iteration": 3,
        "optimizer": {"grad_scaler": {"scale": torch.full((1,), 65536.0), "growth_tracker": 0}},
    },
    "tests/data/common_tensor.pt",
)
