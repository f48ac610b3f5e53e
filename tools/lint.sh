#!/usr/bin/env bash
# Rules of the code that no compiler checks: which directory may include which, calls that are
# banned, white space, formatting, length, shell scripts. Exit 1 if any rule is broken; a tool that
# is absent is a named skip and, with CI=true, a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

failures=0
skips=0

fail() {
    echo "lint: $*"
    failures=$((failures + 1))
}

# Report every line that grep finds among the given files as a violation of a rule.
forbid() { # RULE REGEX FILE...
    local rule=$1 regex=$2 hits
    shift 2
    [ $# -gt 0 ] || return 0
    hits=$(grep -nHE -- "$regex" "$@" || true)
    [ -z "$hits" ] || while IFS= read -r line; do fail "$rule: $line"; done <<<"$hits"
}

skip() {
    echo "lint: SKIP $1: $2 not found"
    skips=$((skips + 1))
    if [ "${CI:-}" = true ]; then
        fail "$1 could not run"
    fi
}

# Files git knows or would add: build products are left out.
list() {
    local f
    git ls-files -co --exclude-standard -- "$@" | sort -u | while IFS= read -r f; do
        if [ -e "$f" ]; then echo "$f"; fi
    done
}
mapfile -t c_files < <(list '*.c' '*.h' '*.cu' '*.cuh')
mapfile -t sh_files < <(list '*.sh' .ci/run)
mapfile -t py_files < <(list '*.py')
mapfile -t mk_files < <(list Makefile '*.mk')

only() { # REGEX: C files whose path matches
    printf '%s\n' "${c_files[@]}" | grep -E -- "$1" || true
}
except() { # REGEX: C files of the product whose path does not match
    printf '%s\n' "${c_files[@]}" | grep -E '^(lib|formats|engine|tools)/' | grep -vE -- "$1" || true
}

# ---- include directions: tools -> engine, formats -> lib ----------------------------------------

headers_of() { # DIR: basenames of its headers, as an alternation
    only "^$1/.*\.h$" | sed 's|.*/||; s|\.|\\.|' | paste -sd'|'
}
direction() { # DIR FORBIDDEN-DIR: by path and, as -I hides paths, by header name
    local names files
    mapfile -t files < <(only "^$1/")
    [ ${#files[@]} -gt 0 ] || return 0
    names=$(headers_of "$2")
    forbid "$1 must not include $2" "^ *# *include *[<\"](\.\./)*$2/" "${files[@]}"
    [ -z "$names" ] || forbid "$1 must not include $2" \
        "^ *# *include *\"([^\"]*/)?($names)\"" "${files[@]}"
}
for dir in formats engine tools tests; do direction lib "$dir"; done
for dir in engine tools tests; do direction formats "$dir"; done
for dir in formats tools tests; do direction engine "$dir"; done
direction tools tests

library() { # HEADER-REGEX ALLOWED-PATH-REGEX WHAT
    local files
    mapfile -t files < <(except "$2")
    forbid "$3" "^ *# *include *[<\"]($1)" "${files[@]}"
}
library '(cjson/)?cJSON\.h' '^lib/json\.c$' 'cJSON.h only in lib/json.c'
library 'openssl/' '^lib/(hash|sign)\.c$' 'OpenSSL only in lib/hash.c and lib/sign.c'
library 'zlib\.h' '^(formats/(zip|zip_write|dcp_common|hdf5_filter)|lib/crc)\.c$' \
    'zlib only in lib/crc.c and where formats inflate or deflate'
library '(hdf5|H5public)\.h>' '^formats/hdf5_(scan\.h|scan\.c|dataset\.c|driver\.c|write\.c)$' 'libhdf5 only in formats/hdf5_*'
library '(cuda|cublas|cudnn|nccl|mpi\.h|cusolver)' '^engine/' 'CUDA, NCCL, MPI only in engine/'
library '(lapacke?|cblas|openblas)' '^(engine/|lib/svd\.c$)' 'BLAS and LAPACK only in engine/, lib/svd.c'

# ---- calls --------------------------------------------------------------------------------------

forbid 'banned call' \
    '(^|[^_[:alnum:]])(strcpy|strcat|sprintf|vsprintf|gets|alloca|strtok|tmpnam|mktemp) *\(' \
    "${c_files[@]}"
mapfile -t library_c < <(only '^(lib|formats|engine)/')
if [ ${#library_c[@]} -gt 0 ]; then
    forbid 'library code never prints or exits' \
        '(^|[^_[:alnum:]])(printf|puts|putchar|perror|exit|abort) *\(' "${library_c[@]}"
    mapfile -t library_c < <(printf '%s\n' "${library_c[@]}" | grep -vx 'formats/hdf5_child\.c')
    forbid 'library code never exits, except a child process it made itself' \
        '(^|[^_[:alnum:]])_exit *\(' "${library_c[@]}"
fi

# ---- white space, length ------------------------------------------------------------------------

forbid 'trailing blanks' '[[:blank:]]+$' "${c_files[@]}" "${sh_files[@]}" "${py_files[@]}" \
    "${mk_files[@]}"
forbid 'tab' $'\t' "${c_files[@]}" "${sh_files[@]}" "${py_files[@]}"
for f in "${c_files[@]}"; do
    n=$(wc -l <"$f")
    # A file whose top comment says why it is long is accepted (style: justify beyond 800).
    if [ "$n" -gt 800 ] && ! head -40 "$f" | grep -qi 'length:'; then
        fail "longer than 800 lines without a 'Length:' note in its top comment: $f ($n)"
    fi
done
for f in "${c_files[@]}"; do
    if [ -s "$f" ] && [ -n "$(tail -c1 "$f")" ]; then fail "no newline at end: $f"; fi
    case $f in
    *_golden.h) ;; # generated table, included in the middle of one test
    *.h)
        guard=$(grep -m1 -cE '^#ifndef [A-Z0-9_]+_H$' "$f" || true)
        if [ "$guard" != 1 ] && ! grep -q 'pragma once' "$f"; then
            fail "no include guard NAME_H: $f"
        fi
        ;;
    esac
done

# ---- tools --------------------------------------------------------------------------------------

if command -v clang-format >/dev/null; then
    for f in "${c_files[@]}"; do
        if ! clang-format --dry-run --Werror "$f" >/dev/null 2>&1; then
            fail "clang-format (make format): $f"
        fi
    done
else
    skip clang-format clang-format
fi
if command -v shellcheck >/dev/null; then
    mapfile -t scripts < <(printf '%s\n' "${sh_files[@]}" | grep -v '^tests/cli/')
    mapfile -t cases < <(printf '%s\n' "${sh_files[@]}" | grep '^tests/cli/')
    shellcheck -x "${scripts[@]}" || fail 'shellcheck'
    # The cases are fragments run by tests/cli/lib.bash, on short words without blanks.
    if [ ${#cases[@]} -gt 0 ]; then
        shellcheck -s bash -S warning -e SC2010,SC2046,SC2207 "${cases[@]}" || fail 'shellcheck tests/cli'
    fi
else
    skip shellcheck shellcheck
fi
if [ ${#py_files[@]} -gt 0 ]; then
    if command -v python3 >/dev/null; then
        for f in "${py_files[@]}"; do
            python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read(), sys.argv[1])' "$f" ||
                fail "python syntax: $f"
        done
    else
        skip 'python syntax' python3
    fi
fi

echo "lint: ${#c_files[@]} C files, ${#sh_files[@]} scripts, $failures problems, $skips skipped"
[ "$failures" -eq 0 ]
