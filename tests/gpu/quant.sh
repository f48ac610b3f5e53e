#!/usr/bin/env bash
# The quantised KDA prefill on a card: codecs, parity, the table beside FLA's fused kernels, where time goes.
#
#   tests/gpu/quant.sh BUILD [PART...]     BUILD: directory of `make quant_gpu`
#
# Parts: codec check table profile memcheck racecheck; the first four by default. FLA's wheels are looked for in
# the directory $WHEELS; without FLA the table has no ratios. Exit 1 when a part failed; a part that cannot run
# says so.
set -uo pipefail
program=$(readlink -f "$1")/quant_gpu
here=$(cd "$(dirname "$0")" && pwd)
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(codec check table profile)
failed=()

wall() { sed -nE "s/^FLA .*\[1,$2\] fused.*wall ([0-9.]+) ms.*/\1/p" <<<"$1"; }
table() {
    local fla bad=0
    fla=$("$here/run.sh" "$program" fla_table 2>&1)
    grep -E '^(FLA|SKIP)|Error' <<<"$fla"
    # shellcheck disable=SC2046 # no number: no argument
    "$program" table 1024 4 64 $(wall "$fla" 1024,4,64) || bad=1
    # shellcheck disable=SC2046
    "$program" table 8192 32 128 $(wall "$fla" 8192,32,128) || bad=1
    return $bad
}
# Microseconds of each kernel at the large shape, in order.
profile() {
    command -v ncu >/dev/null || { echo "SKIP no ncu"; return 0; }
    local policy
    for policy in off fp8_operands fp16_accumulation approximate; do
        echo "-- $policy"
        ncu --clock-control none --csv --page raw --metrics \
            "gpu__time_duration.sum,smsp__issue_active.avg.pct_of_peak_sustained_active,\
sm__warps_active.avg.pct_of_peak_sustained_active,l1tex__data_bank_conflicts_pipe_lsu.sum" \
            "$program" once 8192 32 128 $policy 2>&1 | python3 -c '
import csv, sys
rows = list(csv.reader(line for line in sys.stdin if line.startswith("\"")))
at = rows[0].index("Kernel Name")
keep = [i for i, n in enumerate(rows[0]) if "__" in n]
print("kernel | " + " | ".join(rows[0][i] + " " + rows[1][i] for i in keep))
for row in rows[2:]:
    print(row[at][:40] + " | " + " | ".join(row[i] for i in keep))'
    done
}
sanitizer() {
    command -v compute-sanitizer >/dev/null || { echo "SKIP no compute-sanitizer"; return 0; }
    compute-sanitizer --tool "$1" --error-exitcode 1 --print-limit 5 "$program" check small | tail -n 25
}

for part in "${parts[@]}"; do
    echo "==== $part"
    start=$SECONDS
    case $part in
    codec | check) "$program" "$part" ;;
    table | profile) "$part" ;;
    memcheck | racecheck) sanitizer "$part" ;;
    *)
        echo "unknown part $part"
        false
        ;;
    esac || failed+=("$part")
    echo "---- $part: $((SECONDS - start)) s"
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
