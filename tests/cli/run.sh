#!/bin/bash
# Command-line tests. CKPT=path of the program; FIXTURES=directory (default: fixtures of this
# checkout). Arguments name cases; default all. Each case is one file NAME.sh beside this one, run
# in a shell and an empty directory of its own with the helpers of lib.bash.
here=$(cd "$(dirname "$0")" && pwd)
export CKPT=${CKPT:-$here/../../build/ckpt}
export GEN=${GEN:-$(dirname "$CKPT")/gen}
export FIXTURES=${FIXTURES:-$here/../../fixtures}
CKPT=$(realpath "$CKPT") || exit 2
GEN=$(realpath "$GEN") || exit 2
FIXTURES=$(realpath "$FIXTURES") || exit 2
export NO_COLOR=1 LC_ALL=C
unset SOURCE_DATE_EPOCH

cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=($(cd "$here" && ls *.sh | grep -v '^run\.sh$' | sed 's/\.sh$//'))
base=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-cli.XXXXXX") || exit 2
trap 'rm -rf "$base"' EXIT
passed=0 failed=0
for name in "${cases[@]}"; do
    mkdir "$base/$name"
    if (cd "$base/$name" && bash "$here/lib.bash" "$here/$name.sh") >"$base/$name.log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $name"
        sed 's/^/    /' "$base/$name.log"
    fi
    rm -rf "${base:?}/$name"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
