#!/usr/bin/env bash
# Conversions in a loop, from container to container and mesh to mesh at random, some of them killed or
# given a failing disk on the way: the root must stay that of the first model, memory of a run may not
# grow, every descriptor must be closed when it ends, failed or not, no temporary may be left unnamed.
#
#   CKPT=PROGRAM SHIM=faultshim.so tests/soak.sh [SECONDS [SEED]]      default 1200 s
set -euo pipefail
cd "$(dirname "$0")/.."

ckpt=$(realpath "${CKPT:-build/ckpt}")
shim=$(realpath "${SHIM:-build/faultshim.so}")
seconds=${1:-1200}
RANDOM=${2:-1}
models=(hf/kimi_linear_tiny hf/qwen3_next_tiny hf/moonlight_tiny mcore/legacy_tp2 hf/bailing_hybrid_tiny)
fixtures=$(realpath fixtures)
export OPENBLAS_NUM_THREADS=1 NO_COLOR=1 LC_ALL=C
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-soak.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
root() { "$ckpt" verify "$1" --hash 2>/dev/null | grep -oE 'root [0-9a-f]{64}' | head -n 1; }
pick() { eval "echo \"\${$((RANDOM % $# + 1))}\""; }

runs=0 faults=0 mismatches=0 first=0 last=0
export FAULT_FDS=$work/fds # a line a run: descriptors left open at its end
: >"$FAULT_FDS"
window=() # peak memory of the last runs, KiB
end=$((SECONDS + seconds))
while [ $SECONDS -lt $end ]; do
    model=${models[RANDOM % ${#models[@]}]}
    rm -rf a* .a*
    at=$fixtures/$model
    "$ckpt" convert "$at" a0 --to torch_dist --layout megatron --quiet
    want=$(root a0)
    at=a0
    for hop in 1 2 3 4 5 6; do
        next=a$hop
        to=$(pick torch_dist torch_dist safetensors torch hdf5)
        args=(convert "$at" "$next" --to "$to" --layout megatron --threads "$(pick 1 2 3)" --memory "$(pick 1MiB 16MiB 1GiB)")
        [ "$to" != torch_dist ] || args+=(--tp "$(pick 1 2 4)" --pp "$(pick 1 2)")
        case $((RANDOM % 4)) in
        0) # a call that fails, somewhere; what can be mended is
            rc=0
            LD_PRELOAD=$shim FAULT_MODE=io FAULT_AT=$((RANDOM % 400)) FAULT_ROOT=. \
                FAULT_KIND="$(pick 5 28 4 short)" "$ckpt" "${args[@]}" >log 2>&1 || rc=$?
            case $rc in
            0) ;;
            *)
                faults=$((faults + 1))
                [ ! -e "$next" ] || {
                    echo "soak: exit $rc and an output: ${args[*]}: $(cat log)"
                    mismatches=$((mismatches + 1))
                }
                rm -rf "$next" ".$next".*
                ;;
            esac
            ;;
        1) # killed
            "$ckpt" "${args[@]}" >/dev/null 2>&1 &
            sleep "0.0$((RANDOM % 10))"
            if kill -9 $! 2>/dev/null; then faults=$((faults + 1)); fi
            wait $! 2>/dev/null || true
            ;;
        esac
        if [ ! -e "$next" ]; then
            rc=0
            /usr/bin/time -f '%M' -o mem env LD_PRELOAD="$shim" "$ckpt" "${args[@]}" --resume >log 2>&1 || rc=$?
            if [ $rc -eq 2 ] && grep -q 'not divisible' log; then continue; fi
            [ $rc -eq 0 ] || {
                echo "soak: exit $rc: ${args[*]}: $(cat log)"
                mismatches=$((mismatches + 1))
                break
            }
            window+=("$(tail -n 1 mem)")
        fi
        runs=$((runs + 1))
        [ "$(root "$next")" = "$want" ] || {
            echo "soak: another root: $model, ${args[*]}"
            mismatches=$((mismatches + 1))
        }
        [ -z "$(find . -maxdepth 1 -name '.a*.ckpt-tmp.*' -newer "$next" -print -quit)" ] || mismatches=$((mismatches + 1))
        at=$next
    done
    if [ ${#window[@]} -ge 40 ]; then
        peak=$(printf '%s\n' "${window[@]}" | sort -n | tail -n 1)
        [ "$first" -gt 0 ] || first=$peak
        last=$peak
        window=()
    fi
done
watched=$(wc -l <"$FAULT_FDS") left=$(grep -vcx 0 "$FAULT_FDS" || true)
echo "soak: $runs conversions, $faults interrupted, $mismatches mismatches; peak memory of the first 40 $first KiB, of the last 40 $last KiB; of $watched runs $left left descriptors open"
[ $mismatches -eq 0 ] && [ $runs -gt 0 ] && [ "$last" -le $((first * 5 / 4)) ] && [ "$watched" -gt 0 ] && [ "$left" -eq 0 ]
