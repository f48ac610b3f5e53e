#!/usr/bin/env bash
# Checkpoints into the memory of a card: what arrives, and times beside other loaders; within 120 s.
#
#   tests/gpu/load.sh BUILD [small]   BUILD: the directory of ckpt, gen and load_gpu (make all gen load_gpu), or
#                                     with load_emulated for load_gpu, with `small`
#
# Makes a Kimi-Linear model of $SIZE (4G; `small`: the fixture) in one safetensors file and its torch_dist at TP 4 below $LOAD_DIR
# (/tmp), both with manifests. Rivals are taken from python3's packages; wheels in the directory $WHEELS are
# installed into a temporary one before. `small` compares no times. Exit 1 when something is not as it should be.
set -uo pipefail
build=$(readlink -f "$1")
small=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
fixtures=${FIXTURES:-$here/../../fixtures}
size=${SIZE:-4G}
program=$build/load_gpu
if [ -n "$small" ]; then
    program=$build/load_emulated
fi
dir=$(mktemp -d "${LOAD_DIR:-/tmp}/ckpt_load.XXXXXX")
trap 'rm -rf "$dir"' EXIT
bad=0
say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }

model() {
    if [ -n "$small" ]; then
        "$build/ckpt" convert "$fixtures/hf/kimi_linear_tiny" "$dir/flat" --dtype bf16 --quiet
    else
        "$build/gen" kimi "$dir/flat" --size "$size" --shard 1000G >/dev/null && "$build/ckpt" verify "$dir/flat" --write --quiet
    fi
}
model && "$build/ckpt" convert "$dir/flat" "$dir/cut" --to torch_dist --layout megatron --tp 4 --quiet || exit 1
say "models made: $(du -sh "$dir/flat" | cut -f1) on $(stat -f -c %T "$dir"), $(nproc) processors"
"$program" check "$fixtures/hf/kimi_linear_tiny" "$fixtures/mcore/legacy_tp2" || bad=1
if [ -n "$small" ]; then
    for method in stored digests wide network file bus pin; do
        for from in flat cut; do
            answer=$("$program" "$method" "$dir/$from" 2) || bad=1
            [[ $answer =~ ^[0-9.]+\ [0-9]+$ ]] || { echo "$method of $from: $answer"; bad=1; }
        done
    done
    # A byte that changed after the manifest was written is seen on the way.
    printf '\xff' | dd of="$dir/flat/model.safetensors" bs=1 seek=300000 conv=notrunc status=none
    "$program" digests "$dir/flat" >"$dir/said" && bad=1
    grep -q "failed: .*flat: tensor '.*' differs from the manifest" "$dir/said" || { cat "$dir/said"; bad=1; }
    exit $bad
fi
if [ -n "${WHEELS:-}" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$dir/site" "$WHEELS"/*.whl &&
        export PYTHONPATH=$dir/site${PYTHONPATH:+:$PYTHONPATH}
fi
python3 "$here/load_rivals.py" "$program" "$dir/flat" "$dir/cut" "${ROUNDS:-5}" "${LIMIT:-75}" || bad=1
say "done"
exit $bad
