#!/usr/bin/env bash
# Commands under valgrind's memcheck: no invalid or uninitialised access, nothing lost. CKPT names the
# program, an ordinary build: what an instrumented one cannot see is what its libraries do with our
# memory. Valgrind offers no AVX-512, so the paths for it are those that are not taken here.
set -euo pipefail
cd "$(dirname "$0")/.."
ckpt=$(realpath "${CKPT:-build/ckpt}")
fixtures=$(realpath fixtures)
command -v valgrind >/dev/null || {
    echo "valgrind: not found; tools/deps.sh ci installs it" >&2
    exit 1
}
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-valgrind.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
export OPENBLAS_NUM_THREADS=1 NO_COLOR=1 LC_ALL=C
passed=0 failed=0

v() { # EXIT-CODE ARGUMENTS-OF-CKPT...
    local want=$1 rc=0
    shift
    valgrind -q --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite,indirect \
        --show-leak-kinds=definite,indirect --log-file=log "$ckpt" "$@" >out 2>&1 || rc=$?
    # It has no seccomp (317, a call it says five lines about): commands that only read do without.
    sed -i '/WARNING: unhandled [a-z0-9]*-linux syscall: 317$/,/valgrind\.org\/support/d' log
    if [ "$rc" -eq "$want" ] && [ ! -s log ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "valgrind: ckpt $*: exit $rc, expected $want"
        head -n 40 log out
    fi
}

small=$fixtures/hf/llama_tiny_tied
v 0 inspect "$fixtures/hf/kimi_linear_tiny" --stats --json
v 0 convert "$small" dist --to torch_dist --layout megatron --tp 2 --threads 2
v 0 verify dist --hash --threads 2
v 0 convert dist back.pt --to torch
v 0 diff dist back.pt
"$ckpt" convert "$small" h.h5 --to hdf5 --quiet
v 0 verify h.h5
v 0 inspect "$fixtures/mcore/legacy_tp2" --common
# errors free what was built up to them
head -c 3000 "$small/model.safetensors" >cut.safetensors
v 3 verify cut.safetensors
head -c 4000 back.pt >cut.pt
v 3 verify cut.pt
v 2 convert "$small" other --to torch_dist --layout megatron --tp 3
echo "valgrind: $passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
