#!/usr/bin/env bash
# Two GPUs of one host, without MPI: models and training over ranks against one GPU, failures, times.
#
#   tests/gpu/two.sh BUILD [small]    BUILD: the directory of ckpt, libckpt_cuda.so and two_gpu
#                                     (make all cuda two_gpu), or of emulated/ckpt, two_emulated and
#                                     fake_nccl.so (make cuda-emulated two_emulated), with `small`
#
# PARTS="files failures" runs those parts alone. Nothing is fetched; NCCL's environment is left as the machine sets it, LIBNCCL names another library.
# Prints one table a part; exit 1 when something is not as it should be. Under five minutes on H200s;
# `small` takes sizes that the emulator can do.
set -uo pipefail
build=$(readlink -f "$1")
small=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
fixtures=${FIXTURES:-$here/../../fixtures}
ckpt=$build/ckpt
if [ -n "$small" ]; then
    program=$build/two_emulated
    export LIBNCCL=$build/fake_nccl.so
    ckpt=$build/emulated/ckpt
    S=12 long=32 hidden=64 heads=2 dim=32 rows=64 steps=3 more=4 experts=4 inner=32 batch=2 length=12
else
    program=$build/two_gpu
    S=256 long=32768 hidden=2304 heads=32 dim=128 rows=65536 steps=20 more=30 experts=32 inner=1024 batch=4 length=64
fi
dir=$(mktemp -d)
if [ -n "${LIBNCCL:-}" ]; then # for the program, which asks for it by name
    mkdir "$dir/lib"
    ln -s "$LIBNCCL" "$dir/lib/libnccl.so.2"
    export LD_LIBRARY_PATH=$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
trap 'rm -rf "$dir"' EXIT
failed=()
part() {
    local name=$1 start=$SECONDS
    shift
    [[ -z ${PARTS:-} || " $PARTS models " == *" $1 "* ]] || return
    echo "==== $name"
    "$@" || failed+=("$name")
    echo "---- $name: $((SECONDS - start)) s"
}

# model NAME DENSE: one KDA layer and a dense MLP (DENSE 1) or experts (0), Kimi-Linear's sizes; random values.
model() {
    mkdir -p "$dir/$1.config"
    cat >"$dir/$1.config/config.json" <<JSON
{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
 "hidden_size": $hidden, "intermediate_size": $((hidden * 4)), "num_hidden_layers": 1, "vocab_size": 512,
 "first_k_dense_replace": $2, "hidden_act": "silu", "rms_norm_eps": 1e-05, "initializer_range": 0.02,
 "linear_attn_config": {"full_attn_layers": [], "kda_layers": [1], "head_dim": $dim, "num_heads": $heads,
  "short_conv_kernel_size": 4},
 "num_attention_heads": $heads, "num_key_value_heads": $heads, "kv_lora_rank": 32, "q_lora_rank": null,
 "qk_nope_head_dim": $dim, "qk_rope_head_dim": 16, "v_head_dim": $dim, "mla_use_nope": true, "head_dim": $dim,
 "num_experts": $experts, "num_experts_per_token": 4, "num_shared_experts": 1, "moe_intermediate_size": $inner,
 "num_expert_group": 1, "topk_group": 1, "moe_renormalize": true, "routed_scaling_factor": 1.0,
 "tie_word_embeddings": false, "model_max_length": 65536}
JSON
    "$ckpt" train --init "$dir/$1.config" --steps 0 --save "$dir/$1" --quiet >"$dir/log" 2>&1 || { cat "$dir/log"; return 1; }
}
models() { model block 1 && model experts 0; }

correct() {
    "$program" check "$fixtures/hf/kimi_linear_tiny" "$S" && "$program" check "$fixtures/hf/llama_tiny_tied" "$S" bf16
}
times() { "$program" time "$dir/block/iter_0000000" "$long" bf16; }
experts() { "$program" experts "$dir/experts/iter_0000000" "$long" bf16; }
moves() { "$program" moves "$long" "$hidden" "$rows"; }
failures() {
    local ok=0
    "$program" killed || ok=1
    "$program" silent || ok=1
    # No interface of this name: NCCL cannot start, and says so.
    if [ -z "$small" ]; then NCCL_SOCKET_IFNAME='=none0' "$program" error || echo "(NCCL started: no error to show)"; fi
    return $ok
}

# ---- training ----------------------------------------------------------------------------------
losses() { grep '"loss"' "$1" | sed 's/.*"loss":\([^,]*\),.*/\1/'; }
# far A B: worst relative difference of two runs' losses, step by step.
far() {
    paste -d' ' <(losses "$1") <(losses "$2") | awk 'function abs(x) { return x < 0 ? -x : x }
        NF == 2 { d = abs($1 - $2) / $2; if (!(d <= w)) w = d; n++ } END { printf "%d steps, %.2e\n", n, w; exit !(n > 0 && w <= 1e-3) }'
}
run=(--data "$fixtures/fla/corpus.txt" --seq-len "$length" --batch "$batch" --micro-batch 1 --lr 1e-3 --device cuda)
kimi=$fixtures/hf/kimi_linear_tiny
# train NAME ARGS...: its losses go to NAME.jsonl; a failure is said.
train() {
    local name=$1 rc
    shift
    rm -f "$dir/$name.jsonl"
    timeout 100 "$ckpt" train "${run[@]}" --metrics "$dir/$name.jsonl" "$@" >"$dir/$name.log" 2>&1
    rc=$?
    [ $rc -eq 0 ] || echo "$name: exit $rc: $(tail -n 1 "$dir/$name.log")"
    return $rc
}
against() { # NAME OTHER WORDS
    printf '%-10s %s: ' "$1" "$3"
    far "$dir/$1.jsonl" "$dir/$2.jsonl"
}
training() {
    local bad=0 name
    train one --resume "$kimi" --steps "$steps" || return 1
    for name in "tp2 --tp 2 --verbose" "cp2heads --cp 2" "cp2chunks --cp 2 --cp-mode chunks" "ep2 --ep 2" "dp2 --dp 2"; do
        # shellcheck disable=SC2086
        set -- $name
        train "$1" --resume "$kimi" --steps "$steps" --launch 2 "${@:2}" && against "$1" one "against one GPU" || bad=1
    done
    grep -h 'moves by' "$dir/tp2.log"
    train muon --resume "$kimi" --steps "$steps" --optimizer muon || bad=1
    train muon2 --resume "$kimi" --steps "$steps" --optimizer muon --launch 2 --tp 2 && against muon2 muon "under Muon at tp 2, against one GPU" || bad=1
    # Saved at TP 2, gone on with at TP 1 and CP 2.
    train save --resume "$kimi" --steps "$steps" --launch 2 --tp 2 --save "$dir/run" --lr-decay "$more" || return 1
    train whole --resume "$kimi" --steps "$more" --lr-decay "$more" || return 1
    train tp1 --resume "$dir/run" --steps "$more" || bad=1
    train cp2 --resume "$dir/run" --steps "$more" --launch 2 --cp 2 || bad=1
    train chunks --resume "$dir/run" --steps "$more" --launch 2 --cp 2 --cp-mode chunks || bad=1
    losses "$dir/whole.jsonl" | tail -n $((more - steps)) | sed 's/.*/"loss":&,/' >"$dir/tail.jsonl"
    for name in tp1 cp2 chunks; do
        against "$name" tail "from a save at tp 2" || bad=1
    done
    "$ckpt" verify "$dir/run" --hash --quiet || bad=1
    return $bad
}
killed() {
    local job i pids
    "$ckpt" train "${run[@]}" --quiet --resume "$kimi" --steps 1000000 --launch 2 --tp 2 --save "$dir/dead" --save-every 3 >"$dir/log" 2>&1 &
    job=$!
    for ((i = 0; i < 600; i++)); do
        [ -e "$dir/dead/latest_checkpointed_iteration.txt" ] && break
        sleep 0.1
    done
    read -r -a pids </proc/$job/task/$job/children
    kill -9 "${pids[1]}"
    wait $job && return 1
    tail -n 1 "$dir/log"
    grep -q 'rank 1 of 2 was killed by signal 9 (Killed); the last checkpoint is ' "$dir/log" && "$ckpt" verify "$dir/dead" --hash --quiet
}
since() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN { printf "%.2f", b - a }'; }
# Seconds to save and to open what two ranks train, all digests checked: each rank writes files of its own.
files() {
    local start
    local run=("${run[@]}" --seq-len 32 --launch 2 --tp 2 --save-format torch_dist:megatron:tp=2)
    start=$(date +%s.%N)
    "$ckpt" train "${run[@]}" --init "$dir/block.config" --steps 6 --save "$dir/big" --save-every 2 --verbose >"$dir/log" 2>&1 || { tail -n 1 "$dir/log"; return 1; }
    echo "init, six steps and three saves at tp 2: $(since "$start") s, $(du -sh "$dir/big/iter_0000006" | cut -f1) each; $(tail -n 1 "$dir/log" | sed 's/^saved [^,]*, //')"
    grep -h ': saved ' "$dir/log" | sed 's/.*: saved [^:]*/by two ranks/'
    start=$(date +%s.%N)
    "$ckpt" train "${run[@]:0:${#run[@]}-2}" --resume "$dir/big" --steps 6 >"$dir/log" 2>&1 || { tail -n 1 "$dir/log"; return 1; }
    echo "open by two ranks, digests divided: $(since "$start") s"
    start=$(date +%s.%N)
    "$ckpt" verify "$dir/big" --hash --quiet || return 1
    echo "verify by one process: $(since "$start") s"
}

if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=index,name,memory.total --format=csv; nvidia-smi topo -m 2>/dev/null | head -n 6; fi
part "models of Kimi-Linear's sizes" models
part "two ranks against one" correct
part "what moves" moves
part "failures" failures
part "a block, T $long" times
part "experts, T $long" experts
part "training" training
part "a killed rank" killed
part "files" files
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
