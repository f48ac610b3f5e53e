"""Hugging Face directories load in transformers as they are and reproduce reference logits.

usage: hf_logits.py DIR REFERENCE.safetensors [DIR REFERENCE.safetensors...]

Fails on missing, unexpected or mismatched keys. The reference holds input_ids, logits and loss.
Tolerance: f32 forward of the same weights by two releases of the same code, 1e-5 relative RMS.
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from safetensors.torch import load_file
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM


def check(path, reference):
    ref = load_file(reference)
    torch.manual_seed(0)
    with open(os.path.join(path, "config.json")) as f:
        config = json.load(f)
    loader, known = AutoModelForCausalLM, {}
    if config.pop("model_type") not in CONFIG_MAPPING:
        # A published name for remote code of a known class: without the name, which would keep the
        # class from stacking the experts it reads one by one.
        loader = getattr(transformers, config["architectures"][0])
        known = {"config": loader.config_class.from_dict(config)}
    model, info = loader.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **known
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            sys.exit(f"{path}: {kind}: {sorted(info[kind])[:4]}")
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ref["input_ids"]).logits
    diff = (logits.double() - ref["logits"].double()).square().mean().sqrt()
    rms = (diff / ref["logits"].double().square().mean().sqrt()).item()
    print(f"{type(model).__name__}: logits {tuple(logits.shape)}, relative RMS {rms:.2e}")
    if not rms < 1e-5:
        sys.exit(f"{path}: relative RMS {rms:.3e} of logits, expected below 1e-5")


for i in range(1, len(sys.argv), 2):
    check(*sys.argv[i : i + 2])
