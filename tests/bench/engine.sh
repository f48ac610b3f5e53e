#!/usr/bin/env bash
# The engine against PyTorch eager on the CPU: the same model from transformers, the same threads.
#
#   tests/bench/engine.sh [--threads N] [--repeats 5]
#
# PYTHON names an interpreter with torch and transformers (default: that of make check-peers).
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/bench/torch.bash
bench=${ENGBENCH:-build/engbench}
ours() { echo "ckpt   $*: $("$bench" "$@" "$threads")"; }
echo "$machine"
for n in 1024 2048; do ours gemm $n "$repeats"; done
ours kda 1024 4 64 "$repeats"
ours kda 1024 4 128 "$repeats"
if ! [ -x "$python" ]; then
    echo "PyTorch: skipped, $python not found (make check-peers sets it up)"
    exit 0
fi
echo "torch  kda 1024 4 64:"
torch kda 1024 4 64 "$repeats" "$threads"
echo "torch  kda 1024 4 128:"
torch kda 1024 4 128 "$repeats" "$threads"
torch save "$work/model"
ours model "$work/model" 1024 "$repeats"
echo "torch  model: $(torch model "$work/model" 1024 "$repeats" "$threads")"
