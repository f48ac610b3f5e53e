#!/usr/bin/env bash
# The engine against PyTorch eager on the CPU: the same model from transformers, the same threads.
#
#   tests/bench/engine.sh [--threads N] [--repeats 5]
#
# PYTHON names an interpreter with torch and transformers (default: that of make check-peers).
set -euo pipefail
cd "$(dirname "$0")/../.."
threads=$(nproc)
repeats=5
while [ $# -gt 0 ]; do
    case $1 in
    --threads) threads=$2 ;;
    --repeats) repeats=$2 ;;
    *)
        echo "usage: engine.sh [--threads N] [--repeats 5]" >&2
        exit 2
        ;;
    esac
    shift 2
done
bench=${ENGBENCH:-build/engbench}
python=${PYTHON:-$HOME/.cache/ckpt/peers/bin/python}
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-engbench.XXXXXX")
trap 'rm -rf "$work"' EXIT
ours() { echo "ckpt   $*: $("$bench" "$@" "$threads")"; }
echo "machine: $(nproc) cores, $(awk -F': ' '/model name/ { print $2; exit }' /proc/cpuinfo); $threads threads"
for n in 1024 2048; do ours gemm $n "$repeats"; done
ours kda 1024 4 64 "$repeats"
ours kda 1024 4 128 "$repeats"
if ! [ -x "$python" ]; then
    echo "PyTorch: skipped, $python not found (make check-peers sets it up)"
    exit 0
fi
torch() { "$python" tests/bench/engine_torch.py "$@" 2>"$work/err" || { cat "$work/err" >&2; exit 1; }; }
echo "torch  kda 1024 4 64:"
torch kda 1024 4 64 "$repeats" "$threads"
echo "torch  kda 1024 4 128:"
torch kda 1024 4 128 "$repeats" "$threads"
torch save "$work/model"
ours model "$work/model" 1024 "$repeats"
echo "torch  model: $(torch model "$work/model" 1024 "$repeats" "$threads")"
