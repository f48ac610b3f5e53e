#!/usr/bin/env bash
# libFuzzer on one target, or on each in turn: run.sh [TARGET] [SECONDS] [BUILD-DIRECTORY]. Starts from
# the committed corpus and seeds of the fixtures; what it finds stays in BUILD-DIRECTORY/corpus.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${2:-60}
[ -n "$seconds" ] || seconds=60
build=${3:-build/fuzz}
make --no-print-directory CC=clang SAN=fuzzer-no-link,address BUILD="$build" "$build/fuzzer"
mapfile -t names < <("$build/fuzzer" -list)
[ -z "${1:-}" ] || names=("$1")
tests/fuzz/seeds.sh "$build/corpus"
failed=0
for name in "${names[@]}"; do
    mkdir -p "$build/found"
    echo "==== $name"
    if ! FUZZ_TARGET=$name nice -n 19 "$build/fuzzer" -max_total_time="$seconds" -timeout=10 \
        -rss_limit_mb=2048 -max_len=65536 -dict=tests/fuzz/dictionary -print_final_stats=1 \
        -verbosity=0 -artifact_prefix="$build/found/$name-" "$build/corpus/$name" \
        "tests/fuzz/corpus/$name"; then
        failed=1
    fi
done
exit $failed
