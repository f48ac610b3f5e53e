#!/usr/bin/env bash
# Static analysis, clean or exit 1: cppcheck over everything, clang's analyzer over the code that meets
# untrusted bytes. About a minute on two cores.
#
# Left out of clang's checks: those that need to see into other functions, which its fast mode does not
# (null pointers behind a status that was checked), and buffers whose unit is bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
for tool in cppcheck clang; do
    command -v $tool >/dev/null || {
        echo "analyse: $tool not found; tools/deps.sh ci installs it" >&2
        exit 1
    }
done

log=$(mktemp "${TMPDIR:-/tmp}/ckpt-analyse.XXXXXX")
trap 'rm -f "$log"' EXIT
rc=0
include=(-Ilib -Iformats -Iengine -Iengine/train)
cppcheck -q -j"$jobs" --std=c11 --enable=warning,portability,performance --error-exitcode=1 \
    --suppressions-list=tools/cppcheck.txt --suppress=missingIncludeSystem --inline-suppr \
    -DCKPT_REAL=32 -DCKPT_ISA=base "${include[@]}" --template='{file}:{line}: {id}: {message}' \
    lib formats tools engine/*.c engine/common engine/train engine/quant || rc=1

flags=(-std=c17 -DCKPT_FEATURES='""' -D_POSIX_C_SOURCE=200809L -D_DEFAULT_SOURCE -D_FILE_OFFSET_BITS=64 "${include[@]}"
    --analyze -Xclang -analyzer-output=text -Xclang -analyzer-config -Xclang mode=shallow)
for check in core.NullDereference core.NonNullParamChecker core.CallAndMessage unix.cstring.NullArg \
    unix.MallocSizeof; do
    flags+=(-Xclang "-analyzer-disable-checker=$check")
done
for check in security.insecureAPI.rand security.insecureAPI.strcpy security.FloatLoopCounter nullability \
    valist.Uninitialized valist.Unterminated; do
    flags+=(-Xclang "-analyzer-checker=$check")
done
read -ra packages < <(pkg-config --cflags libcjson libcrypto zlib hdf5 openblas 2>/dev/null || true)
printf '%s\0' lib/*.c lib/families/*.c formats/*.c tools/*.c |
    xargs -0 -P "$jobs" -n 4 clang "${flags[@]}" "${packages[@]}" >"$log" 2>&1 || rc=1
if [ -s "$log" ]; then
    cat "$log"
    rc=1
fi
echo "analyse: $([ "$rc" -eq 0 ] && echo clean || echo 'findings above')"
exit "$rc"
