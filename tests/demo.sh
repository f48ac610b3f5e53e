#!/usr/bin/env bash
# The main job on the committed fixtures, proving every claim it prints. CPU only, well under two
# minutes, nothing left behind. CKPT names the program, STCMP an independent comparison of
# safetensors files (tests/tools/stcmp.c).
set -euo pipefail
cd "$(dirname "$0")/.."

ckpt=${CKPT:-build/ckpt}
stcmp=${STCMP:-build/stcmp}
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-demo.XXXXXX")
trap 'rm -rf "$work"' EXIT
proofs=0

say() { printf '\n== %s\n' "$*"; }
proved() {
    printf '   proved: %s\n' "$*"
    proofs=$((proofs + 1))
}
die() {
    printf 'demo: NOT SHOWN: %s\n' "$*" >&2
    exit 1
}

show() {
    local line="ckpt $*"
    printf '   $ %s\n' "${line//$work/\$W}"
}
indent() { sed "s|^|     |; s|$work|\$W|g"; }

# Show and run a command, then show what it said.
run() {
    show "$@"
    "$ckpt" "$@" 2>&1 | indent
}
# A member of a --json document on stdin: json root
json() { sed -n "s/.*\"$1\" *: *\"\([^\"]*\)\".*/\1/p" | head -n 1; }

# Convert, print and remember the root digest of what was written.
convert() {
    show convert "$@"
    root=$("$ckpt" convert --json "$@" 2>"$work/stderr" | json root)
    indent <"$work/stderr"
    [ -n "$root" ] || die "convert printed no root"
    printf '     root %s\n' "$root"
}
same_root() { [ "$root" = "$1" ] || die "root $root, expected $1"; }

# A command must fail with this exit code, and say all of these words in one line on stderr.
refuses() { # CODE WORDS... -- ARGS...
    local code=$1 words=() rc=0
    shift
    while [ "$1" != -- ]; do
        words+=("$1")
        shift
    done
    shift
    show "$@"
    "$ckpt" "$@" >"$work/stdout" 2>"$work/stderr" </dev/null || rc=$?
    indent <"$work/stderr"
    if [ "$code" -eq 1 ]; then indent <"$work/stdout"; fi
    [ "$rc" -eq "$code" ] || die "exit $rc, expected $code"
    [ "$(wc -l <"$work/stderr")" -eq 1 ] || [ "$code" -eq 1 ] || die "not one line on stderr"
    for word in "${words[@]}"; do
        grep -qF -- "$word" "$work/stderr" "$work/stdout" || die "the message lacks '$word'"
    done
}

hf=fixtures/hf/kimi_linear_tiny
mcore=fixtures/mcore

say "1. Hugging Face -> Megatron TP 2 EP 2 -> TP 4 -> Hugging Face"
convert "$hf" "$work/tp2" --to torch_dist --layout megatron --tp 2 --ep 2
first=$root
convert "$work/tp2" "$work/tp4" --to torch_dist --layout megatron --tp 4
same_root "$first"
convert "$work/tp4" "$work/hf" --to safetensors --layout hf
same_root "$first"
proved "root digest equal at every step"
run diff "$hf" "$work/hf"
proved "diff finds no difference"
"$stcmp" "$hf" "$work/hf" block_sparse_moe.=mlp. | indent
proved "every tensor byte-identical, by a comparison that shares no code with ckpt"

say "2. One model saved by Megatron-Core at TP 1 and TP 2; fused and low-rank KDA"
convert "$mcore/legacy_tp1" "$work/l1" --to safetensors --layout keep
first=$root
convert "$mcore/legacy_tp2" "$work/l2" --to safetensors --layout keep
same_root "$first"
"$stcmp" "$work/l1" "$mcore/legacy.plain.safetensors" | indent
"$stcmp" "$work/l2" "$mcore/legacy.plain.safetensors" | indent
proved "legacy_tp1 and legacy_tp2 have one root, and the tensors Megatron-Core itself reads"
convert "$work/l1" "$work/l4" --to torch_dist --layout megatron --tp 4
same_root "$first"
convert "$work/l4" "$work/l5" --to safetensors --layout keep
same_root "$first"
"$stcmp" "$work/l5" "$mcore/legacy.plain.safetensors" | indent
proved "fused KDA -> per section -> fused at TP 4 -> per section: byte-identical"
for variant in f fg; do
    convert "$mcore/lowrank_${variant}_tp2" "$work/r4$variant" --to torch_dist --tp 4
    convert "$work/r4$variant" "$work/r$variant" --to safetensors --layout keep
    "$stcmp" "$work/r$variant" "$mcore/lowrank_${variant}_tp2.plain.safetensors" | indent
done
proved "low-rank F and F+G: TP 2 -> TP 4 -> per section: byte-identical"

say "3. What the target cannot hold is refused by name, or carried when asked"
refuses 4 g_proj.1.bias -- convert fixtures/fla/kda_trained "$work/no" --to torch_dist \
    --layout megatron --tp 2
[ ! -e "$work/no" ] || die "a refused conversion left output"
proved "FLA's gate bias has no slot in Megatron: exit 4, nothing written"
convert fixtures/fla/kda_trained "$work/fla2" --to torch_dist --layout megatron --tp 2 \
    --allow-unknown
convert "$work/fla2" "$work/fla" --to safetensors --layout fla --allow-unknown
"$stcmp" fixtures/fla/kda_trained "$work/fla" | indent
proved "with --allow-unknown it is carried, and the way back is byte-identical"

say "4. Damage is found and named"
run verify --hash "$work/tp2"
flip() { # FILE OFFSET: invert one byte
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1" | tr -d ' ')
    printf '%b' "\\x$(printf %02x $((255 - byte)))" |
        dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}
data=$(find "$work/tp2" -name '*.distcp' -size +100k | sort | head -n 1)
flip "$data" 100000
refuses 1 "${data##*/}" leaf -- verify --hash "$work/tp2"
proved "one flipped byte: exit 1, file, tensor and leaf named"

damaged() { # NAME: a fresh copy of the Hugging Face fixture
    rm -rf "${work:?}/bad"
    cp -r "$hf" "$work/bad"
}
damaged
truncate -s -1000 "$work/bad/model-00002-of-00003.safetensors"
refuses 3 model-00002-of-00003.safetensors -- convert "$work/bad" "$work/no" --to torch_dist
damaged
rm "$work/bad/model-00003-of-00003.safetensors"
refuses 3 model-00003-of-00003.safetensors -- convert "$work/bad" "$work/no" --to torch_dist
damaged
sed -i 's|"lm_head.weight"|"ghost.weight": "model-00001-of-00003.safetensors", &|' \
    "$work/bad/model.safetensors.index.json"
refuses 3 ghost.weight -- convert "$work/bad" "$work/no" --to torch_dist

# A one-file checkpoint from a header and a number of data bytes.
craft() { # HEADER BYTES
    local n=${#1} i out=''
    for i in 0 8 16 24 32 40 48 56; do out+=$(printf '\\x%02x' $(((n >> i) & 255))); done
    { printf '%b' "$out" && printf '%s' "$1" && head -c "$2" /dev/zero; } >"$work/bad.safetensors"
}
a='"a":{"dtype":"F32","shape":[2],"data_offsets":'
b='"b":{"dtype":"F32","shape":[2],"data_offsets":'
craft "{${a}[0,8]},${b}[4,12]}}" 12
refuses 3 "'b'" -- convert "$work/bad.safetensors" "$work/no" --to torch_dist --allow-unknown
craft "{${a}[0,8]},${b}[12,20]}}" 20
refuses 3 "'b'" -- convert "$work/bad.safetensors" "$work/no" --to torch_dist --allow-unknown
craft "{${a}[0,8]},${a}[8,16]}}" 16
refuses 3 "a" -- convert "$work/bad.safetensors" "$work/no" --to torch_dist --allow-unknown
craft "{${a}[0,12]}}" 12
refuses 3 "'a'" -- convert "$work/bad.safetensors" "$work/no" --to torch_dist --allow-unknown
[ ! -e "$work/no" ] || die "a refused conversion left output"
left=$(find "$work" -maxdepth 1 -name '.*ckpt-tmp*')
[ -z "$left" ] || die "temporary output left: $left"
proved "truncation, missing shard, ghost entry, overlap, hole, duplicate, wrong size: exit 3, \
nothing written"

say "5. Any checkpoint opens, and nothing in it is run"
run inspect "$mcore/legacy_tp2" 'decoder.layers.0.self_attention.in_proj.*' | sed -n '1,/^ *DTYPE/p'
run inspect --common fixtures/torch/dcp_2rank | tail -n 14

say "6. Training goes on, exactly, wherever the checkpoint has been meanwhile"
data=(--data fixtures/fla/corpus.txt --threads 1 --log-every 20)
first=(--seq-len 64 --batch 4 --lr 1e-3 --lr-warmup 5 --lr-style cosine --lr-decay 60)
run train --resume fixtures/fla/kda_trained "${data[@]}" "${first[@]}" \
    --steps 40 --save "$work/whole"
run train --resume fixtures/fla/kda_trained "${data[@]}" "${first[@]}" \
    --steps 17 --save "$work/part" --save-format torch_dist
run convert "$work/part" "$work/part.h5" --to hdf5
run train --resume "$work/part.h5" "${data[@]}" --steps 40 --save "$work/rest"
run diff "$work/whole" "$work/rest"
proved "40 steps = 17 + PyTorch's format + HDF5 + 23: weights and moments bit-identical"

printf '\ndemo: %d claims proved in %d s\n' "$proofs" "$SECONDS"
