#!/bin/bash
# What a plan costs against the number of tensors: `convert --dry-run` of one file, of as many files as
# tensors, and `inspect` of the DCP directory that the conversion writes.
#
#   tests/bench/plan.sh [MAX]          MAX tensors at most, default 1000000; files stop at 100000
#
# CKPT and GEN name the programs (default build/). Prints Markdown: CPU seconds (user and system) and
# peak memory of each, and microseconds a tensor, which n log n lets grow by a fifth a decade.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
CKPT=$(realpath "${CKPT:-$here/../../build/ckpt}")
GEN=$(realpath "${GEN:-$(dirname "$CKPT")/gen}")
max=${1:-1000000}
dir=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-plan.XXXXXX")
trap 'rm -rf "$dir"' EXIT

# cost ARGS...: "CPU seconds | MB" of the program
cost() {
    local user system kib
    read -r user system kib < <({ /usr/bin/time -f '%U %S %M' "$CKPT" "$@" >/dev/null; } 2>&1 | tail -n 1)
    awk -v u="$user" -v s="$system" -v k="$kib" 'BEGIN { printf "%.2f | %.0f", u + s, k / 1024 }'
}

echo '| tensors | one file: CPU s | MB | µs a tensor | as many files: CPU s | MB | inspect of its .metadata: CPU s | MB |'
echo '|---|---|---|---|---|---|---|---|'
for ((n = 1000; n <= max; n *= 10)); do
    "$GEN" header "$dir/h.safetensors" --tensors "$n" >/dev/null
    file=$(cost convert "$dir/h.safetensors" "$dir/out" --to torch_dist --dry-run)
    shards='– | –'
    if [ "$n" -le 100000 ]; then
        "$GEN" shards "$dir/s" --tensors "$n" >/dev/null
        shards=$(cost convert "$dir/s" "$dir/out" --to torch_dist --dry-run)
        rm -r "$dir/s"
    fi
    "$CKPT" convert "$dir/h.safetensors" "$dir/out" --to torch_dist --quiet
    meta=$(cost inspect "$dir/out")
    rm -r "$dir/out"
    echo "| $n | $file | $(awk -v c="${file%% *}" -v n="$n" 'BEGIN { printf "%.1f", 1e6 * c / n }') | $shards | $meta |"
done
