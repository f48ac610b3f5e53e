"""PyTorch's side of tests/bench/engine.sh and train.sh, eager on the CPU.

    engine_torch.py save DIR                       the Kimi-Linear-shaped model of the benchmark
    engine_torch.py model DIR TOKENS REPEATS THREADS
    engine_torch.py train DIR TOKENS REPEATS THREADS       steps of AdamW with clipping
    engine_torch.py kda TOKENS HEADS DIM REPEATS THREADS   transformers' chunk and recurrent form
"""
import resource
import statistics
import sys
import time

import torch


def save(path):
    from transformers import AutoModelForCausalLM, KimiLinearConfig

    torch.manual_seed(0)
    layers = 8
    config = KimiLinearConfig(
        vocab_size=32000, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=1536, moe_intermediate_size=512, num_experts=8,
        num_experts_per_token=2, num_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=128,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        moe_router_activation_func="sigmoid", moe_renormalize=True, routed_scaling_factor=2.446,
        num_expert_group=1, topk_group=1, mla_use_nope=True,
        linear_attn_config={
            "kda_layers": [i for i in range(1, layers + 1) if i % 4 != 0],
            "full_attn_layers": [i for i in range(1, layers + 1) if i % 4 == 0],
            "head_dim": 128, "num_heads": 4, "short_conv_kernel_size": 4},
        tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def timed(function, repeats):
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        function()
        if i:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def model(path, tokens, repeats):
    from transformers import AutoModelForCausalLM

    m = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    m.train()
    v = m.config.vocab_size
    ids = torch.tensor([[t * 7919 % v for t in range(tokens)]])
    loss = 0.0

    def forward():
        with torch.no_grad():
            m(input_ids=ids)

    def step():
        nonlocal loss
        m.zero_grad(set_to_none=False)
        out = m(input_ids=ids, labels=ids)
        out.loss.backward()
        loss = out.loss.item()

    a, b = timed(forward, repeats), timed(step, repeats)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"forward {a:.2f} ms, forward+backward {b:.2f} ms, loss {loss:.6f}, peak RSS {rss} MiB")


def train(path, tokens, repeats):
    from transformers import AutoModelForCausalLM

    m = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    m.train()
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.tensor([[t * 7919 % m.config.vocab_size for t in range(tokens)]])

    def step():
        optimizer.zero_grad(set_to_none=False)
        m(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()

    t = timed(step, repeats)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{t / 1e3:.2f} s a step, {tokens / t * 1e3:.0f} tokens/s, peak RSS {rss} MiB")


def kda(tokens, heads, dim, repeats):
    from transformers.models.kimi_linear import modeling_kimi_linear as kl

    shape = (1, tokens, heads, dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    g = (-0.2 * torch.rand(shape)).requires_grad_()
    beta = torch.rand(shape[:3]).requires_grad_()
    w = torch.randn(shape)
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        f = lambda q, k, v, g, beta, name=name: getattr(kl, name)(
            q, k, v, g, beta, initial_state=None, output_final_state=False)
        with torch.no_grad():
            a = timed(lambda: f(q, k, v, g, beta), repeats)

        def both():
            o = f(q, k, v, g, beta)
            o = o[0] if isinstance(o, tuple) else o
            (o * w).sum().backward()

        b = timed(both, repeats)
        print(f"{name}: forward {a:.3f} ms, backward {b - a:.3f} ms")


if __name__ == "__main__":
    what, args = sys.argv[1], sys.argv[2:]
    if what == "save":
        save(args[0])
    else:
        torch.set_num_threads(int(args[-1]))
        if what == "kda":
            kda(*(int(x) for x in args[:-1]))
        else:
            run = {"model": model, "train": train}[what]
            run(args[0], *(int(x) for x in args[1:-1]))
