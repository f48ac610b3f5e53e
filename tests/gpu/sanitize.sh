#!/usr/bin/env bash
# compute-sanitizer over every kernel on small cases: a table line a program and tool.
#
#   tests/gpu/sanitize.sh BUILD [TOOL...]    BUILD: directory of `make all cuda kda_gpu attn_gpu ops_gpu quant_gpu`
#
# Tools: memcheck racecheck initcheck synccheck; all by default. JOBS runs at a time (4), each ended after LIMIT
# seconds (150); what tools say is kept in the directory $LOGS. Exit 1 when a run found something, failed or came
# to no end.
set -uo pipefail
build=$(readlink -f "$1")
shift
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(racecheck memcheck initcheck synccheck) # the slowest first
here=$(cd "$(dirname "$0")" && pwd)
FIXTURES=$(readlink -f "${FIXTURES:-$here/../../fixtures}")
JOBS=${JOBS:-4} LIMIT=${LIMIT:-150}
logs=${LOGS:-$(mktemp -d)}
[ -n "${LOGS:-}" ] || trap 'rm -rf "$logs"' EXIT
mkdir -p "$logs"
command -v compute-sanitizer >/dev/null || { echo "SKIP no compute-sanitizer"; exit 0; }

step="ckpt train --device cuda --resume $FIXTURES/hf/kimi_linear_tiny --reset-optimizer \
--data $FIXTURES/fla/corpus.txt --data-type bytes --seq-len 16 --batch 1 --steps 1"
# NAME COMMAND...: what is run under TOOL, a line each.
programs() {
    local set=small policy
    [ "$1" != racecheck ] || set=tiny # a case of each kernel
    printf '%s\t%s\n' "recurrence" "kda_gpu check $set" \
        "products, attention" "attn_gpu check small" "attention by warpgroups" "attn_gpu group small" \
        "operations, f32" "ops_gpu small f32" "operations, bf16" "ops_gpu small bf16"
    if [ "$1" = racecheck ]; then
        for policy in fp8_operands nvfp4_operands fp16_accumulation fp8_with_state; do
            printf '%s\t%s\n' "quantised, $policy" "quant_gpu once 65 1 128 $policy"
        done
    else
        printf '%s\t%s\n' "quantised recurrence" "quant_gpu check small"
    fi
    printf '%s\t%s\n' "training step, f32" "$step --dtype f32" "training step, bf16" "$step --dtype bf16"
}
# initcheck does not see what cuBLASLt stores by bulk copies (4656 reports of a step in bf16, none of the same step by
# own kernels): for it the library cannot be opened.
mkdir -p "$logs/none"
for n in libcublasLt.so libcublasLt.so.{12,13}; do : >"$logs/none/$n"; done
# FILE TOOL NAME COMMAND: one run; its line into FILE.
run() {
    local file=$1 tool=$2 name=$3 start=$SECONDS found rc
    local -a command
    read -ra command <<<"$4"
    [ "$tool" != initcheck ] || local -x LD_LIBRARY_PATH=$logs/none${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    timeout -k 5 "$LIMIT" compute-sanitizer --tool "$tool" --error-exitcode 7 --print-limit 30 \
        "$build/${command[0]}" "${command[@]:1}" >"$file.log" 2>&1
    rc=$?
    found=$(sed -nE 's/.*(ERROR|RACECHECK) SUMMARY: ([0-9]+) (error|hazard).*/\2/p' "$file.log" | tail -1)
    case $rc in
    0) found=${found:-no summary} ;;
    7) found=${found:-unknown} ;;
    124 | 137) found="no end" ;;
    *) found="exit $rc" ;;
    esac
    printf '| %-28s | %-9s | %10s | %4d |\n' "$name" "$tool" "$found" $((SECONDS - start)) >"$file"
    [ "$found" = 0 ] || echo "$file" >>"$logs/bad"
}

rm -f "$logs/bad"
n=0
for tool in "${tools[@]}"; do
    while IFS=$'\t' read -r name command; do
        while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
        n=$((n + 1))
        run "$(printf '%s/%02d-%s' "$logs" $n "$tool")" "$tool" "$name" "$command" </dev/null &
    done < <(programs "$tool")
done
wait
if [ -e "$logs/bad" ]; then
    while read -r file; do
        echo "==== $(cat "$file")"
        grep -E '=====|rror' "$file.log" | grep -vE 'Host Frame|Saved host|in libc|^=+ *$' | head -12 | cut -c1-230
    done < <(sort "$logs/bad")
fi
echo "| program                      | tool      |      found |    s |"
for ((i = 1; i <= n; i++)); do cat "$(compgen -G "$(printf '%s/%02d-*k' "$logs" $i)")"; done
echo "$n runs, $SECONDS s"
[ ! -e "$logs/bad" ]
