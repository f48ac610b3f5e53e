#!/usr/bin/env bash
# Training against PyTorch eager on the CPU: the same model, AdamW, the same threads; then what a save
# in the background costs the steps, and how long it takes to resume.
#
#   tests/bench/train.sh [--threads N] [--repeats 5]
#
# PYTHON names an interpreter with torch and transformers (default: that of make check-peers).
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/bench/torch.bash
ckpt=${CKPT:-build/ckpt}
[ -x "$python" ] || {
    echo "train.sh: $python not found (make check-peers sets it up)" >&2
    exit 2
}
seconds() { date +%s.%N; }
torch save "$work/model"
for _ in 1 2 3 4; do cat fixtures/fla/corpus.txt; done >"$work/data"

echo "$machine"
run() { # TRAIN-ARGUMENTS: peak memory in KiB goes to $work/kib
    /usr/bin/time -f '%M' -o "$work/kib" "$ckpt" train --data "$work/data" --batch 1 --seq-len 1024 \
        --lr 1e-4 --threads "$threads" --log-every 1000 "$@" 2>"$work/err" || {
        cat "$work/err" >&2
        exit 1
    }
}
median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
run --resume "$work/model" --steps $((repeats + 1)) --metrics "$work/metrics"
sed -n 's/.*"step":[0-9]*,"loss".*"tokens_per_second":\([0-9.]*\).*/\1/p' "$work/metrics" |
    tail -n "$repeats" | median |
    awk -v kib="$(tail -n 1 "$work/kib")" '{ printf "ckpt:    %.2f s a step, %.0f tokens/s, peak RSS %d MiB\n", 1024 / $1, $1, kib / 1024 }'
echo "PyTorch: $(torch train "$work/model" 1024 "$repeats" "$threads")"

echo "saves in the background, every second step:"
run --resume "$work/model" --steps 6 --save "$work/save" --save-every 2 --keep 1 | tail -n 1 | sed "s|$work/||g"
du -sh "$work/save" | awk '{ print "size of one checkpoint:", $1 }'
start=$(seconds)
run --resume "$work/save" --steps 6 >/dev/null
awk -v a="$start" -v b="$(seconds)" 'BEGIN { printf "opening it to resume, no step: %.2f s\n", b - a }'
