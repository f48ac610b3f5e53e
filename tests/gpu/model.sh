#!/usr/bin/env bash
# Whole models on a card, by the program itself: references, training, resuming, a block's speed.
#
#   tests/gpu/model.sh BUILD [PART...]     BUILD: directory of `make all cuda`
#
# Parts: forward f32 (peers' references, tolerances of the CPU), bf16 (against the f32 run: reported, and
# the loss within 2 %), train (300 steps in bf16 to the loss of the f32 CPU run within 2 %), resume (bit for
# bit), block (one Kimi-Linear-shaped block forward and backward, MFU). All by default. FIXTURES says where
# the fixtures are. Exit 1 when a part failed.
set -uo pipefail
ckpt=$(readlink -f "$1")/ckpt
here=$(cd "$(dirname "$0")" && pwd)
FIXTURES=${FIXTURES:-$here/../../fixtures}
FIXTURES=$(readlink -f "$FIXTURES")
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(f32 bf16 resume train block)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
# shellcheck source=tests/gpu/block.bash
. "$here/block.bash"
failed=()

models='hf/kimi_linear_tiny hf/deepseek_v3_tiny hf/deepseek_v3_tiny_noq hf/qwen3_next_tiny hf/llama_tiny_tied
hf/qwen3_moe_tiny hf/moonlight_tiny hf/bailing_hybrid_tiny mcore/gpt_mla_mtp mcore/gpt_moe mcore/gpt_relu2
mcore/gpt_gdn_tp2 mcore/gpt_gdn2_tp2'
# Options of a fixture's reference: transformers' latent epsilon; a GDN decay is one number spread over
# channels on a device.
options() {
    case $1 in
    *deepseek* | *moonlight*) echo --latent-eps 1e-6 ;;
    *qwen3_next* | *gdn*) echo --grad-rtol 2e-3 ;;
    *bailing*) echo --grad-rtol 5e-3 --rtol 2e-3 ;;
    esac
}
reference() {
    local r=$FIXTURES/$1.reference.safetensors
    [ -e "$r" ] || r=$FIXTURES/${1%_tp2}.reference.safetensors
    echo "$r"
}
number() { sed -nE "s/.*$2 ([-+0-9.e]+).*/\1/p" "$1" | tail -1; }

part_f32() {
    local m bad=0
    for m in $models; do
        # shellcheck disable=SC2046 # options are words
        "$ckpt" verify "$FIXTURES/$m" --forward --reference "$(reference "$m")" --device cuda $(options "$m") \
            >out.txt 2>err.txt || { bad=1; echo "$m: FAILED"; grep -m 5 failed: out.txt err.txt; }
        echo "$m: $(grep -m 1 against out.txt | sed 's/.*safetensors: //') $(head -c 300 err.txt)"
    done
    return $bad
}
part_bf16() {
    local m bad=0 a b
    for m in $models; do
        "$ckpt" verify "$FIXTURES/$m" --forward --device cuda >f32.txt 2>err.txt
        "$ckpt" verify "$FIXTURES/$m" --forward --device cuda --dtype bf16 >bf16.txt 2>>err.txt
        a=$(number f32.txt 'loss') b=$(number bf16.txt 'loss')
        awk -v a="$a" -v b="$b" -v m="$m" 'BEGIN { r = (b - a) / a; if (r < 0) r = -r
            printf "%s: loss f32 %s bf16 %s, %.3f %%\n", m, a, b, 100 * r; exit !(a > 0 && r < 0.02) }' ||
            { bad=1; head -c 600 err.txt; }
    done
    return $bad
}
train() { # OUT DEVICE DTYPE STEPS [ARGS...]
    local out=$1 device=$2 dtype=$3 steps=$4
    shift 4
    "$ckpt" train --device "$device" --dtype "$dtype" --steps "$steps" --data "$FIXTURES/fla/corpus.txt" \
        --data-type bytes --seq-len 256 --batch 8 --lr 1e-3 --lr-style constant --save "$out" \
        --metrics "$out.jsonl" "$@" >"$out.txt" 2>&1 || { tail -5 "$out.txt"; return 1; }
}
part_resume() {
    local d=$FIXTURES/fla/kda_trained dtype bad=0
    for dtype in f32 bf16; do
        train whole.$dtype cuda $dtype 6 --resume "$d" --reset-optimizer --save-every 3 --change || return 1
        train rest.$dtype cuda $dtype 6 --resume whole.$dtype/iter_0000003 || return 1
        if "$ckpt" diff whole.$dtype/iter_0000006 rest.$dtype/iter_0000006 >diff.txt 2>&1; then
            echo "$dtype: 3 steps, saved, resumed, 3 steps: bit for bit"
        else
            echo "$dtype: NOT the same"; tail -5 diff.txt; bad=1
        fi
    done
    return $bad
}
# Mean loss of the last 20 of the run's steps.
last_loss() { sed -nE 's/.*"loss": ?([0-9.e+-]+).*/\1/p' "$1" | tail -20 | awk '{ s += $1 } END { print s / NR }'; }
part_train() {
    local d=$FIXTURES/fla/kda_trained a b
    train bf16.run cuda bf16 300 --resume "$d" --reset-optimizer --change || return 1
    train f32.run cuda f32 300 --resume "$d" --reset-optimizer --change || return 1
    a=$(last_loss f32.run.jsonl) b=$(last_loss bf16.run.jsonl)
    echo "300 steps: loss f32 $a, bf16 $b; $(tail -1 bf16.run.txt)"
    if [ -n "${CPU_STEPS:-}" ]; then
        train cpu.run cpu f32 "$CPU_STEPS" --resume "$d" --reset-optimizer --change || return 1
        echo "CPU f32, $CPU_STEPS steps: loss $(last_loss cpu.run.jsonl)"
        a=$(last_loss cpu.run.jsonl)
    fi
    awk -v a="$a" -v b="$b" 'BEGIN { r = (b - a) / a; exit !(r < 0.02 && r > -0.02) }'
}
# The block of block.bash, steps of one sequence of T tokens: time, TFLOP/s and MFU of the metrics (FLOPs formula
# of inspect --flops, median of the steps after the third). A step is forward, backward, norm and AdamW; AdamW's
# share is in OPS_NOTES.md. HIDDEN, HEADS, HEAD, FFN and T give a smaller one. Beside it PyTorch and FLA, where
# WHEELS has FLA.
part_block() {
    local T=${T:-8192} HIDDEN=${HIDDEN:-2304} HEADS=${HEADS:-32} HEAD=${HEAD:-128} FFN=${FFN:-9216}
    block_config "$HIDDEN" "$HEADS" "$HEAD" "$FFN" "$T" >block.json
    head -c $((64 * T)) /dev/urandom >bytes.bin
    "$ckpt" train --init block.json --device cuda --dtype bf16 --steps "${STEPS:-20}" --data bytes.bin \
        --data-type bytes --seq-len "$T" --batch 1 --metrics block.jsonl --peak-tflops "${PEAK:-989}" \
        >block.txt 2>&1 || { tail -5 block.txt; return 1; }
    python3 - block.jsonl <<'P' || return 1
import json, statistics, sys
steps = [s for s in map(json.loads, open(sys.argv[1])) if "tflops" in s][3:]
middle = {k: statistics.median(s[k] for s in steps) for k in ("seconds", "tflops", "utilisation")}
print("ckpt block, a step with AdamW: %.3f ms, %.1f TFLOP/s, MFU %.2f %%, %.3f TFLOP a step, loss %.4f"
      % (middle["seconds"] * 1e3, middle["tflops"], middle["utilisation"] * 100,
         middle["seconds"] * middle["tflops"], steps[-1]["loss"]))
P
    if [ "$(python3 -c 'import torch; print(torch.cuda.is_available())' 2>/dev/null)" != True ]; then
        echo "SKIP no torch with CUDA"
        return 0
    fi
    if [ -n "${WHEELS:-}" ]; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target site "$WHEELS"/*.whl
    fi
    PYTHONPATH=$PWD/site timeout "${FLA_SECONDS:-100}" python3 "$here/fla_block.py" "$T" "$HIDDEN" "$HEADS" "$HEAD" "$FFN"
}

for part in "${parts[@]}"; do
    echo "==== $part"
    start=$SECONDS
    if declare -F "part_$part" >/dev/null; then
        "part_$part" || failed+=("$part")
    else
        echo "unknown part $part"
        failed+=("$part")
    fi
    echo "---- $part: $((SECONDS - start)) s"
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
