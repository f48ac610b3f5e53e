#!/usr/bin/env python3
"""Optimizer state that went through ckpt trains on as if nothing had happened.

  optim.py CKPT WORK torch      a tiny Llama under torch.optim.AdamW: three steps, state stored under
                                torch.distributed.checkpoint's names, ckpt to Megatron TP 2 x PP 2 and
                                back, and the next two losses equal those of the run that went on
  optim.py CKPT WORK megatron   Megatron-Core's own optimizers on CPU (gen_optim.py): TP 2 saved, ckpt
                                to TP 1 and back to TP 2, loaded there: equal losses; TP 1 loaded: equal
                                but for the order of sums; dp_reshardable rescued: what Megatron-Core
                                makes of its own fully_reshardable save; the same after a way
                                through Hugging Face's layout and HDF5
  optim.py CKPT WORK mixed      the mixed-precision optimizer (bf16 parameters, fp32 copies) that Megatron-
                                Core saved at TP 2: to TP 1 and back, and through Hugging Face; and the chained optimizers of expert-parallel
                                training at EP 2: to EP 1 and back, loaded at both: equal losses;
                                fully_sharded_model_space loaded as fully_reshardable: equal losses"""
import json
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def ckpt(*args):
    subprocess.run([sys.argv[1], "convert", "--quiet", *args], check=True)


def through_torch(work):
    import torch
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                         tie_word_embeddings=False)

    def loss_of(model, i):
        gen = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 64, (2, 16), generator=gen)
        return model(input_ids=ids, labels=ids).loss

    def step(model, optimizer, i):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        return loss.item()

    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        step(model, optimizer, i)
    a = os.path.join(work, "a")
    model.save_pretrained(a)
    state = get_optimizer_state_dict(model, optimizer)
    flat = {f"optim.state.{p}.{s}": v for p, states in state["state"].items() for s, v in states.items()}
    tensors = load_file(os.path.join(a, "model.safetensors"))
    save_file({**tensors, **flat}, os.path.join(a, "model.safetensors"), {"format": "pt"})
    m, b = os.path.join(work, "m"), os.path.join(work, "b")
    ckpt(a, m, "--to", "torch_dist", "--layout", "megatron", "--tp", "2", "--pp", "2")
    ckpt(m, b, "--to", "safetensors", "--layout", "hf")
    again = LlamaForCausalLM.from_pretrained(b)
    back = load_file(os.path.join(b, "optimizer-00001-of-00001.safetensors"))
    assert back.keys() == flat.keys(), back.keys() ^ flat.keys()
    for name, value in flat.items():
        assert torch.equal(back[name], value), name
    fresh = torch.optim.AdamW(again.parameters(), lr=1e-2)
    loaded = {"state": {}, "param_groups": state["param_groups"]}
    for name, value in back.items():
        param, word = name[len("optim.state."):].rsplit(".", 1)
        loaded["state"].setdefault(param, {})[word] = value
    set_optimizer_state_dict(again, fresh, loaded)
    for i in range(3, 5):
        want, got = step(model, optimizer, i), step(again, fresh, i)
        assert want == got, (i, want, got)
    print(f"{len(flat)} states equal, losses of steps 4 and 5 equal: {got}")


def megatron(*args):
    out = subprocess.run([sys.executable, "-W", "ignore", os.path.join(HERE, "gen_optim.py"), *args],
                         stdout=subprocess.PIPE, check=True, text=True).stdout
    return json.loads(out.strip().splitlines()[-1])["losses"]


def through_megatron(work):
    at = lambda name: os.path.join(work, name)
    want = megatron("save", at("s"), "--tp", "2", "--type", "plain")
    ckpt(at("s"), at("one"), "--tp", "1")
    ckpt(at("one"), at("two"), "--tp", "2")
    got = megatron("load", at("two"), "--tp", "2", "--type", "plain")
    assert got == want, (got, want)
    got = megatron("load", at("one"), "--tp", "1", "--type", "plain")
    assert all(abs(x - y) < 1e-5 * y for x, y in zip(got, want)), (got, want)
    fixtures = os.path.join(HERE, "..", "..", "fixtures", "mcore")
    ckpt(os.path.join(fixtures, "optim_buckets_tp2"), at("r"), "--tp", "2")
    same = ["--tp", "2", "--type", "fully_reshardable", "--dtype", "bf16"]
    got = megatron("load", at("r"), *same)
    own = megatron("load", os.path.join(fixtures, "optim_params_tp2"), *same)
    assert got == own, (got, own)
    # through Hugging Face's layout, single files included: the manifest takes step and param_groups along
    ckpt(os.path.join(fixtures, "optim_buckets_tp2"), at("hf"), "--to", "safetensors", "--layout", "hf")
    ckpt(at("hf"), at("hf.h5"))
    ckpt(at("hf.h5"), at("again"), "--to", "torch_dist", "--layout", "megatron", "--tp", "2")
    got = megatron("load", at("again"), *same)
    assert got == own, (got, own)
    print(f"TP 2 -> 1 -> 2 trains on to {want[1]}, buckets rescued as {own[1]}")


def all_losses(*args):
    out = subprocess.run([sys.executable, "-W", "ignore", os.path.join(HERE, "gen_optim.py"), *args],
                         stdout=subprocess.PIPE, check=True, text=True).stdout
    return [json.loads(line)["losses"] for line in out.splitlines() if line.startswith("{")]


def mixed(work):
    at = lambda name: os.path.join(work, name)
    fixtures = os.path.join(HERE, "..", "..", "fixtures", "mcore")
    tp = os.path.join(fixtures, "optim_mixed_tp2")
    ckpt(tp, at("one"), "--tp", "1")
    ckpt(at("one"), at("two"), "--tp", "2")
    ckpt(tp, at("hf"), "--to", "safetensors", "--layout", "hf")
    ckpt(at("hf"), at("back"), "--to", "torch_dist", "--layout", "megatron", "--tp", "2")
    # param_groups, step and iteration came along in the manifest
    assert os.path.isdir(at("back/iter_0000003"))
    want, *got = all_losses("load", tp, at("two"), at("back"), "--tp", "2", "--layers", "1", "--dtype",
                            "bf16", "--type", "plain")
    assert got == [want] * 2, (want, got)
    ep = os.path.join(fixtures, "optim_chained_ep2")
    moe = ["--layers", "1", "--experts", "4", "--dtype", "bf16", "--type", "fully_reshardable", "--prefix"]
    ckpt(ep, at("alone"), "--ep", "1")
    ckpt(at("alone"), at("again"), "--ep", "2")
    first, *second = all_losses("load", ep, at("alone"), at("again"), "--dp", "2", "--ep", "2", *moe)
    assert second == [first] * 2, (first, second)
    # the form of Megatron-Core up to 0.15, read by a release that no longer knows it
    old = os.path.join(fixtures, "optim_model_space_tp2")
    ckpt(old, at("new"), "--tp", "2")
    now, then = all_losses("load", at("new"), old + ".params", "--tp", "2", "--layers", "1", "--dtype", "bf16",
                           "--type", "fully_reshardable")
    assert now == then, (now, then)
    print(f"TP 2 -> 1 -> 2 and over Hugging Face train on to {want[1]}, EP 2 -> 1 -> 2 to {first[1]}, "
          f"fully_sharded_model_space to {now[1]}")


if __name__ == "__main__":
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    os.makedirs(sys.argv[2])
    {"torch": through_torch, "megatron": through_megatron, "mixed": mixed}[sys.argv[3]](sys.argv[2])
