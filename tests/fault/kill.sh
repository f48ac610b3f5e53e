#!/usr/bin/env bash
# SIGKILL at random moments of convert, each followed by what a user would do next: look, then --resume.
# Nothing may look complete that is not, the source may not change, and resuming gives the same bytes.
#
#   CKPT=PROGRAM tests/fault/kill.sh [TIMES [SEED]]      default 500; prints what was met
set -euo pipefail
cd "$(dirname "$0")/../.."

ckpt=$(realpath "${CKPT:-build/ckpt}")
source=$(realpath fixtures/hf/kimi_linear_tiny)
times=${1:-500}
RANDOM=${2:-1}
export SOURCE_DATE_EPOCH=1700000000 OPENBLAS_NUM_THREADS=1 NO_COLOR=1 LC_ALL=C
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-kill.XXXXXX")
trap 'rm -rf "$work"' EXIT
cp -rL "$source" "$work/src"
cd "$work"
before=$(find src -type f -exec sha256sum {} + | sort | sha256sum)
killed=0 whole=0 absent=0 resumed=0 bad=0
fail() {
    echo "kill: run $i ($to): $*"
    bad=$((bad + 1))
}
declare -A took
for to in safetensors torch_dist torch hdf5; do
    out=want.$to
    start=$EPOCHREALTIME
    "$ckpt" convert src "$out" --to $to --quiet --threads 1
    took[$to]=$((${EPOCHREALTIME/./} - ${start/./}))
done
kinds=(safetensors torch_dist torch hdf5)
for ((i = 0; i < times; i++)); do
    to=${kinds[i % 4]}
    out=out.$to
    "$ckpt" convert src "$out" --to "$to" --quiet --threads 1 --resume >log 2>&1 &
    pid=$!
    # A quarter beyond the time of a whole run, so that the end is met as well.
    us=$((RANDOM * (took[$to] * 5 / 4) / 32768))
    sleep "$((us / 1000000)).$(printf %06d $((us % 1000000)))"
    kill -9 $pid 2>/dev/null || true
    rc=0
    wait $pid 2>/dev/null || rc=$?
    if [ $rc -eq 137 ]; then killed=$((killed + 1)); elif [ $rc -ne 0 ]; then fail "exit $rc: $(cat log)"; fi
    if [ -e "$out" ]; then
        whole=$((whole + 1))
        diff -r "$out" "want.$to" >/dev/null || fail 'the output is there, and is another'
    else
        absent=$((absent + 1))
        rc=0
        "$ckpt" convert src "$out" --to "$to" --threads 1 --resume >log 2>&1 || rc=$?
        [ $rc -eq 0 ] || fail "resumed: exit $rc: $(cat log)"
        grep -qE 'note: [1-9][0-9]* of [0-9]+ files taken over' log && resumed=$((resumed + 1))
        diff -r "$out" "want.$to" >/dev/null || fail 'resumed: another output'
    fi
    rm -rf "$out" ".$out".ckpt-tmp.* "$out.ckpt.manifest.json"
done
[ "$before" = "$(find src -type f -exec sha256sum {} + | sort | sha256sum)" ] || fail 'the source changed'
echo "kill: $times runs, $killed killed: $absent left nothing ($resumed resumed from finished files), $whole whole; $bad failures"
[ $bad -eq 0 ] && [ $killed -gt 0 ]
