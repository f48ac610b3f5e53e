#!/usr/bin/env bash
# Install what building and testing need from Debian's packages. Idempotent: prints nothing and
# returns at once when nothing is missing.
#
#   tools/deps.sh              build, tests and demo
#   tools/deps.sh ci           also what .ci/run and `make lint`, `bench`, `check-peers` use
#   tools/deps.sh --missing [ci]   only print the missing packages, one a line
set -euo pipefail

mode=install
if [ "${1:-}" = --missing ]; then
    mode=list
    shift
fi
set_name=${1:-build}

# One row per need: the test that it is there, then the package that brings it.
needs_build='
command -v gcc               | gcc
command -v g++               | g++
command -v make              | make
command -v pkg-config        | pkg-config
test -e /usr/include/stdio.h | libc6-dev
pkg-config --exists check    | check
pkg-config --exists libcjson | libcjson-dev
pkg-config --exists libcrypto| libssl-dev
pkg-config --exists zlib     | zlib1g-dev
pkg-config --exists hdf5     | libhdf5-dev
pkg-config --exists libisal  | libisal-dev
pkg-config --exists openblas | libopenblas-dev
'
needs_ci='
command -v clang             | clang
ls /usr/lib/llvm-*/lib/libomp.so | libomp-dev
command -v clang-format      | clang-format
command -v cppcheck          | cppcheck
command -v valgrind          | valgrind
command -v shellcheck        | shellcheck
command -v python3           | python3
command -v openssl           | openssl
command -v b3sum             | b3sum
python3 -c "import ensurepip"| python3-venv
test -x /usr/bin/time        | time
command -v zsh               | zsh
command -v fish              | fish
command -v man               | man-db
command -v mpicc             | libopenmpi-dev
command -v mpirun            | openmpi-bin
'

missing() {
    local test package
    while IFS='|' read -r test package; do
        [ -n "$package" ] || continue
        bash -c "$test" >/dev/null 2>&1 || echo "${package# }"
    done
}

case $set_name in
build) needs=$needs_build ;;
ci) needs=$needs_build$needs_ci ;;
*)
    echo "deps.sh: unknown set '$set_name' (build, ci)" >&2
    exit 2
    ;;
esac

packages=$(missing <<<"$needs")
if [ -z "$packages" ]; then
    exit 0
fi
if [ "$mode" = list ]; then
    printf '%s\n' "$packages"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    # shellcheck disable=SC2086 # one word per package
    echo "deps.sh: no apt-get here; please install:" $packages >&2
    exit 1
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        # shellcheck disable=SC2086
        echo "deps.sh: not root and no sudo; please install:" $packages >&2
        exit 1
    fi
    sudo=sudo
fi
# shellcheck disable=SC2086
echo "deps.sh: installing" $packages
$sudo apt-get update -qq </dev/null
# shellcheck disable=SC2086
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    $packages </dev/null >/dev/null
packages=$(missing <<<"$needs")
if [ -n "$packages" ]; then
    # shellcheck disable=SC2086
    echo "deps.sh: still missing after installation:" $packages >&2
    exit 1
fi
