#!/usr/bin/env bash
# Fuzzes targets for long and writes one table: executions, edges covered, features, corpus, findings.
#
#   tests/fuzz/long.sh FUZZER DIRECTORY SECONDS [TARGET...]
#
# FUZZER is built by tests/fuzz/run.sh. DIRECTORY gets corpus/TARGET, logs and what crashes, leaks or
# hangs (found-TARGET-*). JOBS targets run at a time (default 1), at low priority. Exit 1 if anything
# was found.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
fuzzer=$(realpath "$1")
dir=$2
seconds=$3
shift 3
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <("$fuzzer" -list)
mkdir -p "$dir"
export here fuzzer dir seconds

one() { # TARGET
    mkdir -p "$dir/corpus/$1"
    FUZZ_TARGET=$1 nice -n 15 "$fuzzer" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -max_len=65536 -dict="$here/dictionary" -print_final_stats=1 \
        -artifact_prefix="$dir/found-$1-" "$dir/corpus/$1" "$here/corpus/$1" >"$dir/$1.log" 2>&1 || true
}
export -f one
printf '%s\n' "${targets[@]}" | xargs -P "${JOBS:-1}" -I '{}' bash -c 'one {}'

found=0
printf '| target | seconds | executions | edges | features | corpus | findings |\n|---|---|---|---|---|---|---|\n'
for name in "${targets[@]}"; do
    log=$dir/$name.log
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    last=$(grep -aE '^#[0-9]+.* cov: ' "$log" | tail -n 1)
    cov=$(sed -nE 's/.* cov: ([0-9]+).*/\1/p' <<<"$last")
    ft=$(sed -nE 's/.* ft: ([0-9]+).*/\1/p' <<<"$last")
    corpus=$(sed -nE 's/.* corp: ([0-9]+).*/\1/p' <<<"$last")
    bad=$(find "$dir" -maxdepth 1 -name "found-$name-*" | wc -l)
    found=$((found + bad))
    echo "| $name | $seconds | ${runs:-?} | ${cov:-?} | ${ft:-?} | ${corpus:-?} | $bad |"
done | tee "$dir/table.md"
[ -z "$(find "$dir" -maxdepth 1 -name 'found-*' -print -quit)" ]
