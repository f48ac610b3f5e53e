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
for target in tests/fuzz/corpus/*/; do
    mkdir -p "$dir/$(basename "$target")"
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
printf '%s' '{"name":"mine","like":"hf:llama","side":"source","rows":[{"canon":"blocks.{2l}.attn.q.weight","stored":"net.{l}.q","view":"NQ@tp A | H"},{"canon":"embed.weight","stored":"wte","view":"V<VP | H"}],"ignored":["*.inv_freq"]}' >"$dir/map/like"
printf '%s' '{"name":"free","rows":[{"canon":"a.{b}.w","stored":"x.{l}","view":"2=1 R+2[0:R] | 4"},{"canon":"c","stored":"c","view":"3"}]}' >"$dir/map/free"
printf '%s' '{"quant_cfg":[{"quantizer_name":"*","enable":false},{"quantizer_name":"*linear_attn_sites.*","cfg":{"num_bits":[4,3],"type":"dynamic","axis":[0]}},{"quantizer_name":"*kda_state_quantizer","cfg":{"num_bits":[4,3],"type":"dynamic","axis":[0,1]}}],"linear_attention":[{"module_name":"*","cfg":{"backend":"matmul"}}],"algorithm":null}' >"$dir/policy/rules"
# Directories, as frames (tests/fuzz/mutate.h).
"$ckpt" convert --quiet "$work/two.safetensors" "$work/shards" --max-shard-size 24
"$ckpt" convert --quiet "$work/two.safetensors" "$work/bins" --to torch --max-shard-size 24
python3 - "$work" "$dir" <<'PY'
import io
import os
import struct
import sys
import zipfile

work, out = sys.argv[1:]


def frames(name, *files):
    with open(f"{out}/{name}", "wb") as f:
        for number, path in files:
            body = path if isinstance(path, bytes) else open(f"{work}/{path}", "rb").read()
            f.write(struct.pack("<BH", number, len(body)) + body)


def only(directory, *words):
    return next(f"{directory}/{n}" for n in sorted(os.listdir(f"{work}/{directory}")) if all(w in n for w in words))


dist = ((0, "dist/.metadata"), (1, only("dist", "__0_", ".distcp")))
frames("dcp/two", *dist)
frames("dcp/megatron", *dist, (4, b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'), (3, "two.pt"))
frames("dcp/zarr", (4, b'{"sharded_backend": "zarr", "sharded_backend_version": 1}'), (3, "two.pt"), (5, b'{"chunks":[2],"compressor":null,"dtype":"<f4","fill_value":null,"filters":null,"order":"C","shape":[2],"zarr_format":2}'), (6, bytes(8)))
frames("index/safetensors", (0, only("shards", "index.json")), (1, only("shards", "00001-of")), (2, only("shards", "00002-of")), (3, b'{"architectures":["LlamaForCausalLM"],"model_type":"llama"}'))
frames("index/torch", (4, only("bins", "index.json")), (5, only("bins", "00001-of")), (7, only("bins", "00002-of")))
frames("ranks/safetensors", (3, "two.safetensors"), (4, "two.safetensors"))
sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "padded_vocab_size": 4}
old = zipfile.ZipFile(f"{work}/two.pt")
new = io.BytesIO()
with zipfile.ZipFile(new, "w") as z:
    for n in old.namelist():
        body = old.read(n)
        if n.endswith("data.pkl"):
            # {"model": what was there, "args": Namespace, "checkpoint_version": 3.0, "iteration": 1}
            args = b"".join(b"X" + struct.pack("<I", len(k)) + k.encode() + b"K" + bytes([v]) for k, v in sizes.items())
            body = b"\x80\x02}X\x05\0\0\0model" + body[2:-1] + b"sX\4\0\0\0argscargparse\nNamespace\n)\x81}(" + args + b"ubsX\x12\0\0\0checkpoint_versionG@\x08\0\0\0\0\0\0sX\x09\0\0\0iterationK\x01s."
        z.writestr(zipfile.ZipInfo(n), body)
frames("ranks/megatron", (0, new.getvalue()), (5, b"1\n"))
frames("ranks/tensor_parallel", (0, new.getvalue()), (1, new.getvalue()))
lengths, pointers, documents = (3, 4, 5), (0, 6, 14), (0, 2, 3)
with open(f"{out}/idx/three", "wb") as f:
    f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ3i3q3q", 1, 8, 3, 3, *lengths, *pointers, *documents))
PY
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
for file in fixtures/mcore/*/release/.metadata fixtures/mcore/*/iter_*/.metadata; do
    if [ -e "$file" ] && [ "$(stat -c %s "$file")" -lt 65000 ]; then
        python3 - "$file" "$dir/dcp/$(echo "$file" | tr / _)" <<'PY'
import struct
import sys

body = open(sys.argv[1], "rb").read()
open(sys.argv[2], "wb").write(struct.pack("<BH", 0, len(body)) + body)
PY
    fi
done
