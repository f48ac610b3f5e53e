#!/bin/bash
# What a plan costs against the number of tensors: `convert --dry-run` of one file, of as many files as
# tensors, and `inspect` of the DCP directory that the conversion writes.
#
#   tests/bench/plan.sh [--svg FILE] [MAX]     MAX tensors at most, default 1000000; files stop at 100000
#
# CKPT and GEN name the programs (default build/). Prints Markdown: CPU seconds (user and system) and
# peak memory of each, and microseconds a tensor, which n log n lets grow by a fifth a decade. FILE gets
# a picture of it, logarithmic in both directions (plan.svg is one).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
CKPT=$(realpath "${CKPT:-$here/../../build/ckpt}")
GEN=$(realpath "${GEN:-$(dirname "$CKPT")/gen}")
svg=
if [ "${1:-}" = --svg ]; then
    svg=${2:?--svg FILE}
    shift 2
fi
max=${1:-1000000}
if [ $# -gt 1 ] || ! [[ $max =~ ^[0-9]+$ ]]; then
    echo "usage: plan.sh [--svg FILE] [MAX]" >&2
    exit 2
fi
dir=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-plan.XXXXXX")
trap 'rm -rf "$dir"' EXIT

# cost ARGS...: "CPU seconds | MB" of the program; small ones run ten times, as the clock ticks in hundredths
cost() {
    local user system kib times=1
    [ "$n" -gt 30000 ] || times=10
    # shellcheck disable=SC2016
    read -r user system kib < <({ /usr/bin/time -f '%U %S %M' bash -c \
        'for ((i = 0; i < $1; i++)); do "${@:2}" >/dev/null || exit; done' - "$times" "$CKPT" "$@"; } 2>&1 | tail -n 1)
    awk -v u="$user" -v s="$system" -v k="$kib" -v t="$times" 'BEGIN { printf "%.3f | %.0f", (u + s) / t, k / 1024 }'
}

echo '| tensors | one file: CPU s | MB | µs a tensor | as many files: CPU s | MB | inspect of its .metadata: CPU s | MB |'
echo '|---|---|---|---|---|---|---|---|'
for ((n = 1000, step = 3; n <= max; n = n * step / (step == 3 ? 1 : 3), step = 13 - step)); do
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
done | tee "$dir/table"

[ -z "$svg" ] || awk -F' *[|] *' -f "$here/plan.awk" "$dir/table" >"$svg"
