#!/usr/bin/env bash
# Runs the unit tests, one process per suite and several at a time: Check forks for every test, and
# under a sanitizer the fork of a process that has run all earlier suites is what costs.
#
#   tests/unit.sh PROGRAM JOBS SUITE...
#
# Prints every failure and a total in Check's own form. Exit 1 if a test failed or a suite ran none.
set -euo pipefail

program=$1
jobs=$2
shift 2
logs=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-unit.XXXXXX")
trap 'rm -rf "$logs"' EXIT
export program logs

# shellcheck disable=SC2016 # expanded by the inner shell
printf '%s\n' "$@" | xargs -P "$jobs" -I '{}' bash -c '
    CK_RUN_SUITE={} "$program" >"$logs/{}" 2>&1 </dev/null
    echo "$?" >"$logs/{}.rc"'

checks=0
failures=0
errors=0
bad=()
for suite in "$@"; do
    line=$(grep -E '^[0-9]+%: Checks: [0-9]+' "$logs/$suite" | tail -n 1 || true)
    rc=$(cat "$logs/$suite.rc")
    read -r c f e < <(sed -E 's/.*Checks: ([0-9]+), Failures: ([0-9]+), Errors: ([0-9]+).*/\1 \2 \3/' \
        <<<"${line:-Checks: 0, Failures: 0, Errors: 0}")
    checks=$((checks + c))
    failures=$((failures + f))
    errors=$((errors + e))
    if [ "$rc" -ne 0 ] || [ "$c" -eq 0 ]; then
        bad+=("$suite")
        echo "suite $suite: exit $rc, $c checks"
        grep -vE '^Running suite|^ [a-z_]+$' "$logs/$suite" | tail -n 60 || true
    fi
done
echo "unit: $# suites; failed: ${bad[*]:-none}"
if [ "$checks" -eq 0 ]; then
    echo "unit: no test ran"
    exit 1
fi
echo "$((100 * (checks - failures - errors) / checks))%: Checks: $checks, Failures: $failures, Errors: $errors"
[ ${#bad[@]} -eq 0 ]
