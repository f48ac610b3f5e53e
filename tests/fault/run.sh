#!/usr/bin/env bash
# Faults of the C library, SIGKILL and power loss at every call of convert and verify --write, for
# every container, and of train --save (sweep.c, shim.c). CKPT, SWEEP and SHIM name the programs and
# the library.
#
#   tests/fault/run.sh [NAME-PATTERN]   a sample: every STRIDE-th call (default 20), from PHASE on
#   STRIDE=1 tests/fault/run.sh         all of them, tens of minutes
set -euo pipefail
cd "$(dirname "$0")/../.."

ckpt=$(realpath "${CKPT:-build/ckpt}")
sweep=$(realpath "${SWEEP:-build/sweep}")
shim=$(realpath "${SHIM:-build/faultshim.so}")
fixtures=$(realpath fixtures)
pattern=${1:-*}
stride=${STRIDE:-20}
phase=${PHASE:-0}
export SOURCE_DATE_EPOCH=1700000000 OPENBLAS_NUM_THREADS=1 NO_COLOR=1 LC_ALL=C
base=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-fault.XXXXXX")
trap 'chmod -R u+w "$base"; rm -rf "$base"' EXIT
passed=0
failed=0

# t NAME STRIDE-FACTOR SWEEP-OPTIONS... -- ARGUMENTS-OF-CKPT...: in a directory with `src` in it.
t() {
    local name=$1 every=$(($2 * stride)) opts=()
    shift 2
    # shellcheck disable=SC2254 # a pattern is meant
    case $name in
    $pattern) ;;
    *) return 0 ;;
    esac
    [ "$stride" -gt 1 ] || every=1
    while [ "$1" != -- ]; do
        opts+=("$1")
        shift
    done
    shift
    printf '%s: ' "$name"
    if (cd "$work" && "$sweep" --shim "$shim" --stride "$every" --phase $((phase % every)) \
        "${opts[@]}" -- "$ckpt" "$@" --threads 1); then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
}
source_is() { # PATH: what `src` is from here on
    work=$(mktemp -d "$base/work.XXXXXX")
    cp -rL "$1" "$work/src"
    chmod -R u+w "$work"
}
convert() { # CONTAINER OUTPUT: every kind of fault, without and with something to replace
    local to=$1 out=$2
    rm -rf "$work/old" "$work"/old.*
    t "$to-io" 1 --source src --output "$out" -- convert src "$out" --to "$to"
    t "$to-sticky" 4 --source src --output "$out" --sticky --kinds eio,enospc -- \
        convert src "$out" --to "$to"
    t "$to-kill" 1 --source src --output "$out" --mode kill --resume -- \
        convert src "$out" --to "$to" --resume
    for lose in data entries rename; do
        t "$to-power-$lose" 2 --source src --output "$out" --mode power --lose "$lose" -- \
            convert src "$out" --to "$to"
    done
    cp -r "$work/src" "$work/old"
    echo other >"$work/old/note.txt"
    t "$to-replace-io" 4 --source src --output "$out" --old old -- \
        convert src "$out" --to "$to" --force
    t "$to-replace-power" 4 --source src --output "$out" --old old --mode power --lose rename -- \
        convert src "$out" --to "$to" --force
}
memory() { # CONTAINER OUTPUT
    t "$1-oom" 1 --source src --output "$2" --mode oom --skip libcrypto -- \
        convert src "$2" --to "$1"
}

source_is "$fixtures/hf/llama_tiny_tied"
for to in safetensors torch_dist torch; do
    convert $to out
    memory $to out
done
t hdf5-io 1 --source src --output out.h5 -- convert src out.h5 --to hdf5
t hdf5-kill 2 --source src --output out.h5 --mode kill -- convert src out.h5 --to hdf5
t hdf5-power 2 --source src --output out.h5 --mode power -- convert src out.h5 --to hdf5
t single-io 1 --source src --output out.safetensors -- convert src out.safetensors
t single-power 2 --source src --output out.safetensors --mode power -- convert src out.safetensors
t verify-write 1 --source src --output src/ckpt.manifest.json -- verify src --write
t verify-write-oom 1 --source src --output src/ckpt.manifest.json --mode oom --skip libcrypto -- \
    verify src --write
t verify-write-power 2 --source src --output src/ckpt.manifest.json --mode power -- \
    verify src --write

# A step and its save; the save root, its lock, metrics and tracker are there from an earlier run.
train=(train --init src --data src/config.json --steps 1 --seq-len 16 --batch 1 --save save --force
    --metrics save/metrics.jsonl)
for _ in 1 2; do
    rm -rf "$work/save/iter_0000001"
    (cd "$work" && "$ckpt" "${train[@]}" --threads 1 --quiet)
done
t train-io 1 --source src --output save/iter_0000001 -- "${train[@]}"
t train-oom 2 --source src --output save/iter_0000001 --mode oom --skip libcrypto -- "${train[@]}"
t train-kill 2 --source src --output save/iter_0000001 --mode kill --resume -- "${train[@]}"
t train-power 2 --source src --output save/iter_0000001 --mode power --lose entries -- "${train[@]}"

source_is "$fixtures/mcore/mp_gpt_tp2_pp2"
t mp_rank-io 1 --source src --output out -- convert src out --to mp_rank --optimizer drop
t mp_rank-oom 1 --source src --output out --mode oom --skip libcrypto -- \
    convert src out --to mp_rank --optimizer drop
t mp_rank-kill 2 --source src --output out --mode kill --resume -- \
    convert src out --to mp_rank --optimizer drop --resume
t mp_rank-power 2 --source src --output out --mode power --lose entries -- \
    convert src out --to mp_rank --optimizer drop

# Old runs, which are only read.
source_is "$fixtures/torch/mcore_zarr"
t zarr-io 1 --source src --output out -- convert src out --to safetensors
t zarr-oom 2 --source src --output out --mode oom --skip libcrypto -- convert src out --to safetensors
t zarr-kill 2 --source src --output out --mode kill --resume -- convert src out --to safetensors --resume

# A source that changes while it is read, with no times moved (a writer through mmap): another byte in each
# reading in turn. Either that is found, or the output is as without it; some must be found by its root.
changing() { # NAME SOURCE-ARGUMENTS... : of convert --verify; writes out or out.*
    local name=$1 log=$base/reads root call what n=0 found=0 bad=0 got
    shift
    # shellcheck disable=SC2254 # a pattern is meant
    case $name in
    $pattern) ;;
    *) return 0 ;;
    esac
    run() { # VARIABLES...: convert anew
        rm -rf "$work"/out*
        (cd "$work" && env "$@" LD_PRELOAD="$shim" FAULT_MODE=io "$ckpt" "${args[@]}" >"$base/said" 2>&1)
    }
    local args=(convert "$@" --verify --threads 1)
    run FAULT_LOG="$log"
    root=$(grep -oE 'root [0-9a-f]{64}' "$base/said")
    while read -r call what; do
        [ "$what" = read ] || continue
        n=$((n + 1))
        got=0
        run FAULT_AT="$call" FAULT_KIND=flip FAULT_NAME=read || got=$?
        if [ "$got" -eq 0 ]; then
            grep -qF "$root" "$base/said" && continue
        elif ! compgen -G "$work/out*" >/dev/null; then
            [ "$got" -ne 5 ] || ! grep -q 'source changed.* its root is now' "$base/said" ||
                found=$((found + 1))
            continue
        fi
        bad=$((bad + 1))
        echo "  read $call: exit $got: $(tail -n 1 "$base/said")"
    done <"$log"
    echo "$name: $n readings, $found found by the root, $bad not found"
    if [ "$bad" -eq 0 ] && [ "$found" -gt 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}
source_is "$fixtures/hf/llama_tiny_tied"
changing change-dir src out
changing change-cast src out --dtype bf16

echo "faults: $passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
