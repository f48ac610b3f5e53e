#!/usr/bin/env bash
# Steps as CUDA graphs, and saves beside steps, on a card by the program itself; one table, within six minutes.
#
#   tests/gpu/six.sh BUILD [small]     BUILD: directory of `make all cuda`, or `emulated` of `make cuda-emulated`
#
#   times    median step of kimi_linear_tiny and of a Kimi-Linear-shaped block (hidden 2304, 32 x 128, MLP 9216,
#            T 8192, bf16, AdamW), with graphs and launch by launch (CKPT_CUDA_GRAPHS=0)
#   save     median step of that block without saves, and with one after every step and after the ninth
#   resume   3 steps, save, resume, 3 steps; and 6 without graphs: the same bits, f32 and bf16, AdamW and Muon
#   memcheck compute-sanitizer over three steps of kimi_linear_tiny, the last two of them graphs
#
# `small` takes few steps of a tiny block, for a machine without a card. Exit 1 when a part failed.
set -uo pipefail
ckpt=$(readlink -f "$1")/ckpt
small=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
FIXTURES=$(readlink -f "${FIXTURES:-$here/../../fixtures}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failed=()
if [ -n "$small" ]; then
    STEPS=5 T=16 HIDDEN=64 HEADS=2 HEAD=64 FFN=64 SAVES=10
else
    STEPS=${STEPS:-24} T=${T:-8192} HIDDEN=${HIDDEN:-2304} HEADS=${HEADS:-32} HEAD=${HEAD:-128} FFN=${FFN:-9216}
    SAVES=${SAVES:-18}
fi
# shellcheck source=tests/gpu/block.bash
. "$here/block.bash"
block_config "$HIDDEN" "$HEADS" "$HEAD" "$FFN" "$T" >block.json
head -c $((16 * T + 16)) /dev/urandom >bytes.bin

row() { printf '| %-58s | %12s | %12s | %s |\n' "$@"; }
# NAME ARGS...: train, metrics in NAME.jsonl, what it said in NAME.txt
train() {
    local name=$1
    shift
    "$ckpt" train --device cuda --verbose --metrics "$name.jsonl" "$@" >"$name.txt" 2>&1 ||
        { echo "FAILED: $name"; tail -5 "$name.txt"; return 1; }
}
block() {
    local name=$1
    shift
    train "$name" --init block.json --dtype bf16 --data bytes.bin --data-type bytes --seq-len "$T" --batch 1 "$@"
}
tiny() {
    local name=$1
    shift
    train "$name" --data "$FIXTURES/fla/corpus.txt" --data-type bytes --seq-len 16 --batch 2 --micro-batch 1 --lr 1e-3 "$@"
}
fixture=$FIXTURES/hf/kimi_linear_tiny
# Median ms of the steps after the third. WHICH: all, or those that a save was before; of these, with what
# they waited for it.
median() {
    python3 - "$1" "${2:-all}" <<'P'
import json, statistics, sys
steps = [s for s in map(json.loads, open(sys.argv[1])) if "loss" in s][3:]
if sys.argv[2] == "saves":
    steps = [s for s in steps if "save_stall" in s]
times = [s["seconds"] + s.get("save_stall", 0) for s in steps]
print("%.3f" % (statistics.median(times) * 1e3) if times else "none")
P
}
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { if (b > 0) printf "%.2f", a / b; else printf "-" }'; }
graphs() { grep -oE 'CUDA graphs.*' "$1.txt" || { echo "no graphs: $1"; return 1; }; }

part_times() {
    local bad=0 d a b
    for d in f32 bf16; do
        tiny "t1.$d" --resume "$fixture" --reset-optimizer --dtype $d --steps "$STEPS" || return 1
        CKPT_CUDA_GRAPHS=0 tiny "t0.$d" --resume "$fixture" --reset-optimizer --dtype $d --steps "$STEPS" || return 1
        a=$(median "t0.$d.jsonl") b=$(median "t1.$d.jsonl")
        row "kimi_linear_tiny $d, a step: launches / graphs, ms" "$a" "$b" "$(ratio "$a" "$b")"
        graphs "t1.$d" | grep -q 'CUDA graphs: 4 of' || { graphs "t1.$d"; bad=1; }
    done
    block b1 --steps "$STEPS" || return 1
    CKPT_CUDA_GRAPHS=0 block b0 --steps "$STEPS" || return 1
    a=$(median b0.jsonl) b=$(median b1.jsonl)
    row "block, T $T, a step: launches / graphs, ms" "$a" "$b" "$(ratio "$a" "$b")"
    graphs b1 | grep -q 'CUDA graphs: [1-9]' || { graphs b1; bad=1; }
    return $bad
}
part_save() {
    local a b
    [ -e b1.jsonl ] || block b1 --steps "$STEPS" || return 1
    block s1 --steps "$SAVES" --save s1 --save-every 1 --keep 1 || return 1
    rm -rf s1
    block s8 --steps "$SAVES" --save s8 --save-every 9 --keep 1 || return 1
    rm -rf s8
    a=$(median b1.jsonl)
    b=$(median s8.jsonl saves)
    row "block, a step: no save / the one after a save, ms" "$a" "$b" "$(ratio "$a" "$b")"
    b=$(median s1.jsonl saves)
    row "block, a step: no save / a save every step (disk-bound), ms" "$a" "$b" "$(ratio "$a" "$b")"
    tail -1 s8.txt
}
part_resume() {
    local d o bad=0
    for o in adamw muon; do
        for d in f32 bf16; do
            tiny "w.$o.$d" --resume "$fixture" --reset-optimizer --optimizer $o --dtype $d --steps 6 --save "w.$o.$d" \
                --save-every 3 || return 1
            tiny "r.$o.$d" --resume "w.$o.$d/iter_0000003" --steps 6 --save "r.$o.$d" || return 1
            CKPT_CUDA_GRAPHS=0 tiny "p.$o.$d" --resume "$fixture" --reset-optimizer --optimizer $o --dtype $d \
                --steps 6 --save "p.$o.$d" || return 1
            for x in r p; do
                "$ckpt" diff "w.$o.$d/iter_0000006" "$x.$o.$d/iter_0000006" >diff.txt 2>&1 ||
                    { echo "$o $d: $x differs"; tail -5 diff.txt; bad=1; }
            done
        done
    done
    [ $bad = 0 ] && row "resumed / without graphs: the same bits, 4 runs" yes yes -
    return $bad
}
part_memcheck() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "SKIP no compute-sanitizer"
        return 0
    fi
    compute-sanitizer --tool memcheck --error-exitcode 7 --print-limit 5 "$ckpt" train --device cuda --verbose \
        --resume "$fixture" --reset-optimizer --data "$FIXTURES/fla/corpus.txt" --data-type bytes --seq-len 16 \
        --batch 1 --steps 3 >check.txt 2>&1
    local rc=$?
    grep -E 'ERROR SUMMARY|CUDA graphs' check.txt
    if [ $rc != 0 ] || ! grep -q 'CUDA graphs: 4 of' check.txt; then
        tail -20 check.txt
        return 1
    fi
    row "memcheck of graph steps: errors" 0 - -
}

row "what" "before" "with" "ratio"
for part in times save resume memcheck; do
    start=$SECONDS
    "part_$part" || failed+=("$part")
    echo "---- $part: $((SECONDS - start)) s"
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
