#!/usr/bin/env bash
# Adding a container, a layout, a command and an operation of the engine touches the files that the README
# says, and no others: each is added to a copy of the tree, its files are counted, all is built and used.
# CC, BUILD, MAKE come from `make check-adding`; BUILD's objects save compiling what does not change.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${CC:=cc}" "${BUILD:=build}" "${MAKE:=make}"
here=$PWD/tests/adding fixtures=$PWD/fixtures

work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-adding.XXXXXX")
trap 'rm -rf "$work"' EXIT
tree=$work/tree
mkdir "$tree"
git ls-files -z -- . ':!fixtures' | tar cf - --null -T - | tar xf - -C "$tree"
(cd "$BUILD" && find lib formats tools engine -name '*.o' -print0 | tar cf - --null -T - flags) |
    (mkdir "$tree/build" && tar xf - -C "$tree/build")

sums() { (cd "$tree" && find . -path ./build -prune -o -type f -print0 | sort -z | xargs -0 sha256sum); }
# row FILE BEFORE ROW: a row in front of another one.
row() {
    grep -qF -- "$2" "$tree/$1" || {
        echo "adding: $1 has no '$2'"
        exit 1
    }
    sed -i "0,/$2/s//$3 $2/" "$tree/$1"
}
# touched WHAT README-ROW FILE...: what changed since the last call is these files, and the README says so.
touched() {
    local what=$1 says=$2
    shift 2
    sums >"$work/now"
    diff "$work/sums" "$work/now" | sed -n 's/^[<>] [0-9a-f]*  \.\///p' | sort -u >"$work/changed" || true
    printf '%s\n' "$@" | sort | diff - "$work/changed" || {
        echo "adding: $what touches other files than these $#"
        exit 1
    }
    mv "$work/now" "$work/sums"
    grep -qF -- "| $what | $says |" README.md || {
        echo "adding: README.md does not say: | $what | $says |"
        exit 1
    }
    echo "$what: $# files"
}

sums >"$work/sums"
# shellcheck disable=SC2016 # of Markdown
{
    cp "$here/npy.c" "$tree/formats/npy.c"
    row formats/registry.c 'X(ckpt_rank_safetensors)' 'X(ckpt_npy)'
    touched 'a container' '`formats/NAME.c`, one row in `formats/registry.c`' \
        formats/npy.c formats/registry.c

    # The nearest layout under another name, which its configuration has too.
    sed 's/llama"/toy"/; s/_llama/_toy/; s/"llama"/"toy"/; s/\\"llama\\"/\\"toy\\"/; s/LlamaFor/ToyFor/' \
        lib/families/hf_llama.c >"$tree/lib/families/hf_toy.c"
    row lib/families/families.c 'X(ckpt_layout_fla_kda)' 'X(ckpt_layout_hf_toy)'
    touched 'a layout or family' \
        '`lib/families/NAME.c`, one row in `lib/families/families.c` (or `--map` without building)' \
        lib/families/hf_toy.c lib/families/families.c

    cp "$here/cmd_count.c" "$tree/tools/cmd_count.c"
    row tools/command.c 'X(ckpt_cmd_report)' 'X(ckpt_cmd_count)'
    touched 'a command' '`tools/cmd_NAME.c`, one row in `tools/command.c`' \
        tools/cmd_count.c tools/command.c

    cp "$here/gelu.c" "$tree/engine/gelu.c"
    cp "$here/test_gelu.c" "$tree/tests/test_gelu.c"
    # shellcheck disable=SC1003
    sed -i '/^#endif/i\
ckpt_status ENG(gelu)(ckpt_eng *e, int64_t n, const real *x, real *y, ckpt_err *err) CKPT_MUST_USE;\
ckpt_status ENG(gelu_bwd)(ckpt_eng *e, int64_t n, const real *x, const real *dy, real *dx,\
                          ckpt_err *err) CKPT_MUST_USE;\
' "$tree/engine/ops.h"
    touched 'an operation (kernel) of the engine' \
        '`engine/NAME.c`, its declaration in `engine/ops.h`, its test `tests/test_NAME.c`' \
        engine/gelu.c engine/ops.h tests/test_gelu.c
}

"$MAKE" --no-print-directory -C "$tree" CC="$CC" BUILD=build ONLY=gelu all check-unit >"$work/log" 2>&1 || {
    cat "$work/log"
    exit 1
}
grep -q '100%: Checks: 2, Failures: 0, Errors: 0' "$work/log"
ckpt=$tree/build/ckpt

# The container: found, read, its bytes where they should be.
printf '\x93NUMPY\x01\x00\x76\x00%-117s\n' "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}" >"$work/a.npy"
printf '\x00\x00\x80\x3f\x00\x00\x00\xc0' >>"$work/a.npy"
"$ckpt" inspect "$work/a.npy" --head 2 >"$work/out"
grep -q '^container *npy$' "$work/out"
grep -q '^array: 1 -2$' "$work/out"
"$ckpt" convert "$work/a.npy" "$work/a.safetensors" --quiet
"$ckpt" diff "$work/a.npy" "$work/a.safetensors" | grep -q '^1 identical'
"$ckpt" formats | grep -qF "\`npy\` | yes | no"
# The layout: detected, converted to Megatron and back, equal to the model it was made of.
cp -r "$fixtures/hf/llama3_tiny" "$work/toy"
sed -i 's/LlamaForCausalLM/ToyForCausalLM/; s/"model_type": "llama"/"model_type": "toy"/' "$work/toy/config.json"
"$ckpt" inspect "$work/toy" | grep -q '^layout *hf:toy$'
"$ckpt" convert "$work/toy" "$work/mg" --to torch_dist --layout megatron --tp 2 --quiet
"$ckpt" diff "$work/mg" "$fixtures/hf/llama3_tiny" | grep -qE '^[0-9]+ identical$'
# The command: runs, is in the help and in completion.
[ "$("$ckpt" count "$work/toy")" -gt 10 ]
"$ckpt" help | grep -q '^  count '
"$ckpt" completion bash | grep -q 'count)'
echo "adding: 4 additions built and used"
