#!/usr/bin/env bash
# The installed library, as others use it: a C client by pkg-config, shared and static, a C++ compiler
# over the header, a ctypes client, and the ABI (exported symbols, structure sizes) against abi.txt.
# CC, BUILD, MAKE, FIXTURES come from `make check-clients`. --update writes abi.txt anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${CC:=cc}" "${BUILD:=build}" "${MAKE:=make}" "${FIXTURES:=fixtures}"

work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-clients.XXXXXX")
trap 'rm -rf "$work"' EXIT
"$MAKE" --no-print-directory install BUILD="$BUILD" DESTDIR="$work/root" PREFIX=/usr
export PKG_CONFIG_PATH=$work/root/usr/lib/pkgconfig
export LD_LIBRARY_PATH=$work/root/usr/lib
san=${SAN:+-fsanitize=$SAN}
strict=(-std=c17 -Wall -Wextra -Werror)
words() { # not a sysroot, which would move the paths of other libraries too
    pkg-config --define-variable=prefix="$work/root/usr" --define-variable=libdir="$work/root/usr/lib" "$@" ckpt
}

# shellcheck disable=SC2046,SC2086 # compiler words
"$CC" "${strict[@]}" $san -o "$work/shared" tests/clients/client.c $(words --cflags --libs)
# shellcheck disable=SC2046,SC2086
"$CC" "${strict[@]}" $san -o "$work/static" tests/clients/client.c $(words --cflags) \
    "$work/root/usr/lib/libckpt.a" $(words --static --libs | sed "s/-lckpt//g")
printf '#include <ckpt.h>\nint main() { return ckpt_abi(); }\n' >"$work/cxx.cc"
# shellcheck disable=SC2046,SC2086
c++ -std=c++17 -Wall -Wextra -Werror $san -o "$work/cxx" "$work/cxx.cc" $(words --cflags --libs)
[ "$("$work/cxx" && echo 0)" = 0 ]

for kind in shared static; do
    mkdir "$work/$kind.d"
    "$work/$kind" "$FIXTURES/hf/kimi_linear_tiny" "$work/$kind.d" "$FIXTURES/README.md"
done

# shellcheck disable=SC2046
"$CC" "${strict[@]}" -o "$work/sizes" tests/clients/sizes.c $(words --cflags)
{
    "$work/sizes"
    objdump -p "$work/root/usr/lib/libckpt.so" | sed -n 's/^ *SONAME */soname /p'
    nm -D --defined-only "$work/root/usr/lib/libckpt.so" | sed -n 's/.* [TDBRV] \(.*\)/symbol \1/p' |
        LC_ALL=C sort
} >"$work/abi.txt"
if [ "${1:-}" = --update ]; then
    cp "$work/abi.txt" tests/clients/abi.txt
elif [ -z "$san" ] && ! diff tests/clients/abi.txt "$work/abi.txt"; then
    echo "clients: the ABI changed: raise CKPT_ABI if something is gone or moved, then run.sh --update"
    exit 1
fi

# A sanitizer's runtime must come first in a process, which an interpreter is not.
if [ -z "$san" ]; then
    python3 tests/clients/client.py "$work/root/usr/lib/libckpt.so" "$FIXTURES/hf/kimi_linear_tiny"
fi

# Digests as README.md describes them, of a model and of a tensor with several leaves.
"$BUILD/ckpt" convert "$FIXTURES/hf/kimi_linear_tiny" "$work/model" --dtype bf16 --quiet 2>/dev/null
printf '\x58\0\0\0\0\0\0\0%-88s' '{"t":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4000000]}}' >"$work/t.safetensors"
head -c 4000000 "$BUILD/ckpt" >>"$work/t.safetensors"
"$BUILD/ckpt" convert "$work/t.safetensors" "$work/leaves" --to safetensors --quiet
for dir in model leaves; do
    python3 tests/clients/manifest.py "$work/$dir"
done

# Manual pages and completion scripts are whole.
for page in ckpt ckpt-convert ckpt-gate; do
    LC_ALL=C man --warnings -l "$work/root/usr/share/man/man1/$page.1" >"$work/man.txt" 2>"$work/man.err" || true
    if command -v man >/dev/null; then
        [ ! -s "$work/man.err" ] || {
            cat "$work/man.err"
            exit 1
        }
    fi
    grep -q '^\.SH NAME' "$work/root/usr/share/man/man1/$page.1"
done
grep -q -- 'max\\-shard\\-size' "$work/root/usr/share/man/man1/ckpt-convert.1"
bash -n "$work/root/usr/share/bash-completion/completions/ckpt"
complete_words() { # WORD...: what bash offers for the last one
    bash -c 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ckpt; echo "${COMPREPLY[*]}"' _ \
        "$work/root/usr/share/bash-completion/completions/ckpt" "$@"
}
[ "$(complete_words ckpt conv)" = convert ]
[ "$(complete_words ckpt convert --max)" = --max-shard-size ]
[ "$(complete_words ckpt convert --to torch)" = "torch_dist torch" ]
for shell in zsh fish; do
    file=$work/root/usr/share/zsh/site-functions/_ckpt
    if [ $shell = fish ]; then file=$work/root/usr/share/fish/vendor_completions.d/ckpt.fish; fi
    [ -s "$file" ]
    if command -v $shell >/dev/null; then $shell -n "$file"; fi
done
if command -v fish >/dev/null; then
    fish --no-config -c "source '$file'; complete -C 'ckpt conv'" | grep -q '^convert'
    fish --no-config -c "source '$file'; complete -C 'ckpt convert --max'" | grep -q '^--max-shard-size'
fi
if command -v zsh >/dev/null; then
    zsh -fc "fpath=('$work/root/usr/share/zsh/site-functions' \$fpath); autoload -U compinit && compinit -u -D &&
        [[ \$_comps[ckpt] = _ckpt ]] && autoload +X _ckpt"
fi
"$MAKE" --no-print-directory uninstall BUILD="$BUILD" DESTDIR="$work/root" PREFIX=/usr
left=$(find "$work/root" ! -type d)
[ -z "$left" ] || {
    echo "clients: uninstall left $left"
    exit 1
}
echo "clients: C shared and static, C++, ctypes, ABI, digests, manual, completion"
