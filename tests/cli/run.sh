#!/bin/bash
# Command-line tests. CKPT=path of the program; FIXTURES=directory (default: fixtures of this
# checkout); JOBS=cases at a time (default: one a core); TIMES=1 prints the seconds of each case.
# Arguments name cases; default all but convert_netns, which needs network namespaces (make check-netns). Each case is one file NAME.sh beside this one, run in a shell
# and an empty directory of its own with the helpers of lib.bash.
here=$(cd "$(dirname "$0")" && pwd)
export CKPT=${CKPT:-$here/../../build/ckpt}
export GEN=${GEN:-$(dirname "$CKPT")/gen}
export FIXTURES=${FIXTURES:-$here/../../fixtures}
CKPT=$(realpath "$CKPT") || exit 2
GEN=$(realpath "$GEN") || exit 2
FIXTURES=$(realpath "$FIXTURES") || exit 2
export NO_COLOR=1 LC_ALL=C
unset SOURCE_DATE_EPOCH

# Longest first, so that none of them is alone at the end.
cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=($(cd "$here" && ls -S *.sh | grep -v -x -e run.sh -e convert_netns.sh | sed 's/\.sh$//'))
base=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-cli.XXXXXX") || exit 2
trap 'rm -rf "$base"' EXIT
export here base

one() { # NAME: its output is NAME.log, its exit code NAME.rc
    local start=$EPOCHREALTIME
    mkdir "$base/$1"
    (cd "$base/$1" && bash "$here/lib.bash" "$here/$1.sh") >"$base/$1.log" 2>&1 </dev/null
    echo $? >"$base/$1.rc"
    rm -rf "${base:?}/$1"
    [ -z "${TIMES:-}" ] || echo "$(((${EPOCHREALTIME/./} - ${start/./}) / 1000)) ms $1"
}
export -f one
printf '%s\n' "${cases[@]}" | xargs -P "${JOBS:-$(nproc)}" -I '{}' bash -c 'one {}'

passed=0 failed=0
for name in "${cases[@]}"; do
    grep -E '(^|[ :])SKIP' "$base/$name.log"
    if [ "$(cat "$base/$name.rc")" = 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $name"
        sed 's/^/    /' "$base/$name.log"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
