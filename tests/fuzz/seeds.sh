#!/usr/bin/env bash
# Seeds for the fuzz targets, made from the fixtures: tests/fuzz/seeds.sh DIRECTORY. CKPT names the
# program. The committed corpus is what this writes with --small, plus what fuzzing found.
set -euo pipefail
cd "$(dirname "$0")/../.."

ckpt=${CKPT:-build/ckpt}
small=0
if [ "${1:-}" = --small ]; then
    small=1
    shift
fi
dir=$1
work=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-seeds.XXXXXX")
trap 'rm -rf "$work"' EXIT
export SOURCE_DATE_EPOCH=1700000000
for target in json manifest config pickle metadata zip torch safetensors open; do
    mkdir -p "$dir/$target"
done

# A model of two tensors in every container.
header='{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b.c":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}'
{
    printf '\x73\x00\x00\x00\x00\x00\x00\x00'
    printf '%s' "$header"
    head -c 32 /dev/zero
} >"$work/two.safetensors"
"$ckpt" convert --quiet "$work/two.safetensors" "$work/two.pt"
"$ckpt" convert --quiet "$work/two.safetensors" "$work/two.h5"
"$ckpt" convert --quiet "$work/two.safetensors" "$work/dist" --to torch_dist
cp "$work/two.safetensors" "$dir/safetensors/two"
cp "$work/two.safetensors" "$dir/open/two.safetensors"
cp "$work/two.pt" "$dir/zip/two"
cp "$work/two.pt" "$dir/torch/two"
cp "$work/two.pt" "$dir/open/two.pt"
cp "$work/two.h5" "$dir/open/two.h5"
cp "$work/dist/.metadata" "$dir/metadata/two"
cp "$work/dist/.metadata" "$dir/pickle/metadata"
cp "$work/two.pt.ckpt.manifest.json" "$dir/manifest/two"
python3 - "$work/two.pt" "$dir/pickle/data" <<'PY'
import sys
import zipfile

z = zipfile.ZipFile(sys.argv[1])
name = next(n for n in z.namelist() if n.endswith("data.pkl"))
open(sys.argv[2], "wb").write(z.read(name))
PY
for model in kimi_linear_tiny qwen3_next_tiny deepseek_v3_tiny; do
    cp "fixtures/hf/$model/config.json" "$dir/config/$model"
done
printf '%s' '{"a":[1,-2.5e3,"\u00e9",null,true,{}],"":9007199254740991}' >"$dir/json/kinds"
if [ "$small" -eq 1 ]; then exit 0; fi

for file in fixtures/hf/*/config.json fixtures/hf/*/generation_config.json; do
    cp "$file" "$dir/json/$(echo "$file" | tr / _)"
    cp "$file" "$dir/config/$(echo "$file" | tr / _)"
done
for file in fixtures/mcore/*/.metadata fixtures/mcore/*/*/.metadata fixtures/torch/*/.metadata; do
    if [ -e "$file" ]; then
        cp "$file" "$dir/metadata/$(echo "$file" | tr / _)"
        cp "$file" "$dir/pickle/$(echo "$file" | tr / _)"
    fi
done
find fixtures \( -name '*.pt' -o -name '*.bin' -o -name '*.pth' \) -size -64k | while IFS= read -r file; do
    for target in zip torch open; do cp "$file" "$dir/$target/$(echo "$file" | tr / _)"; done
done
