#!/usr/bin/env python3
"""Training states of real optimizers go on in ckpt: the next five losses are those of the peer.

  train.py CKPT WORK torch      a tiny Llama under torch.optim.AdamW, clipped, saved with
                                torch.distributed.checkpoint after three steps
  train.py CKPT WORK megatron   Megatron-Core's GPT and its optimizers on CPU (gen_optim.py): the FP32 one
                                at TP 2, the distributed one with bf16 parameters; and what ckpt saves of
                                the first goes on in Megatron-Core
"""
import json
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def train(work, base, steps, *options):
    metrics = os.path.join(work, "metrics.jsonl")
    if os.path.exists(metrics):
        os.remove(metrics)
    subprocess.run([sys.argv[1], "train", "--quiet", "--resume", base, "--data", os.path.join(work, "tokens.txt"),
                    "--data-type", "bytes", "--windows", os.path.join(work, "windows.txt"), "--seq-len", "16",
                    "--batch", "2", "--steps", str(steps), "--metrics", metrics, *options], check=True)
    with open(metrics) as f:
        return [line["loss"] for line in map(json.loads, f) if "loss" in line]


def batch(torch, i, first):
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(first + i))


def tokens(work, torch, first, label, steps=10):
    """Steps 0.. as a file of bytes: each sample's 16 tokens and the one that labels its last."""
    rows = [row for i in range(steps) for row in batch(torch, i, first).tolist()]
    with open(os.path.join(work, "tokens.txt"), "wb") as f:
        for row in rows:
            f.write(bytes(row + [label(row)]))
    with open(os.path.join(work, "windows.txt"), "w") as f:
        f.write("\n".join(str(17 * i) for i in range(len(rows))))


def near(got, want, tolerance=1e-4):
    assert len(got) == len(want) and all(abs(x - y) <= tolerance for x, y in zip(got, want)), (got, want)
    return max(abs(x - y) for x, y in zip(got, want))


def through_torch(work):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2,
                                  betas=(0.9, 0.95), weight_decay=0.1)

    def step(i):
        optimizer.zero_grad()
        ids = batch(torch, i, 0)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    for i in range(3):
        step(i)
    base = os.path.join(work, "dcp")
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)},
             checkpoint_id=base, no_dist=True)
    config.save_pretrained(base)
    want = [step(3 + i) for i in range(5)]
    tokens(work, torch, 0, lambda row: row[0])
    got = train(work, base, 8, "--labels", "inside", "--lr", "1e-2", "--beta2", "0.95", "--clip-grad", "0.5",
                "--weight-decay", "0.1")
    print(f"torch.optim.AdamW: five losses to {near(got, want):.1e}")


def megatron(*args):
    out = subprocess.run([sys.executable, "-W", "ignore", os.path.join(HERE, "gen_optim.py"), *args],
                         stdout=subprocess.PIPE, check=True, text=True).stdout
    return json.loads(out.strip().splitlines()[-1])["losses"]


def through_megatron(work):
    import torch
    tokens(work, torch, 100, lambda row: row[0])
    far = []
    for name, *how in (("plain", "--type", "plain", "--tp", "2"),
                       ("bf16", "--type", "fully_reshardable", "--dtype", "bf16")):
        base, saved = os.path.join(work, name), os.path.join(work, name + "-2")
        want = megatron("save", base, *how, "--next", "5")
        got = train(work, base, 8, "--clip-grad", "0")
        # with bf16 parameters the peer computes in bf16, too
        far.append(f"{name} {near(got, want, 1e-4 if name != 'bf16' else 2e-2):.1e}")
        if name == "bf16":
            continue
        train(work, base, 3, "--save", saved, "--save-format", "torch_dist:megatron:tp=2")
        again = megatron("load", saved, *how, "--next", "5")
        assert again == want, (again, want)
    print("Megatron-Core: five losses to " + ", ".join(far) + "; and back into Megatron-Core")


if __name__ == "__main__":
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    os.makedirs(sys.argv[2])
    (through_torch if sys.argv[3] == "torch" else through_megatron)(sys.argv[2])
