# verify: --write, missing and stale files, an edited manifest, --against, --duplicates, --values.
k=$FIXTURES/hf/kimi_linear_tiny
cp -r $k m; chmod -R u+w m
rc 1 verify m --hash; out 'root [0-9a-f]{64}'; out 'no manifest'
rc 0 verify m --write; present m/ckpt.manifest.json
rc 0 verify m --hash --files --strict
rc 0 verify $k --against m/ckpt.manifest.json; rc 0 verify $k --against m
cp m/ckpt.manifest.json keep.json
sed -i 's/"root":"./"root":"x/' m/ckpt.manifest.json; rc 3 verify m --hash; one_line; err 'root'
sed 's/\("root":"\)\(.\)/\1f/; t' keep.json >m/ckpt.manifest.json; cmp -s keep.json m/ckpt.manifest.json || { rc 3 verify m; one_line; err 'root'; }
cp keep.json m/ckpt.manifest.json
cp m/model-00003-of-00003.safetensors m/old.safetensors
rc 0 verify m; out 'warning: .*old.safetensors'; rc 1 verify m --strict
rm m/old.safetensors
sed -i 's/0.08/0.09/' m/config.json; rc 1 verify m --hash; out 'config.json'; out 'init_std'
rc 1 verify m --against $k; out "configuration: 'init_std'"
cp $k/config.json m/config.json; rc 0 verify m --hash
rm m/generation_config.json; rc 0 verify m --write --force; rc 0 verify m --hash

st d.safetensors '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},"c":{"dtype":"F32","shape":[1,2],"data_offsets":[16,24]}}' 24
rc 0 verify d.safetensors --duplicates; out 'duplicate: a = b$'; rc 1 verify d.safetensors --duplicates --strict
rc 0 verify d.safetensors --values
size=$(stat -c %s d.safetensors)
printf '\x00\x00\xc0\x7f' | dd of=d.safetensors bs=1 seek=$((size - 4)) conv=notrunc status=none
rc 1 verify d.safetensors --values; out "tensor 'c': 1 NaN, 0 infinite, first at \[0, 1\]"

# what --include wrote is partial, not damaged, as long as its manifest lists just what is there
rc 0 convert $k part --include 'blocks.0.*'
rc 0 verify part --hash --files; out 'partial: the manifest lists 16 tensors, missing embed.weight'
rc 0 inspect part; out '^layout +hf:kimi_linear'; err 'partial: the manifest lists 16'
rc 0 diff part part; out 'A is partial: '; rc 1 diff part $k; out '^16 identical, 135 only in B$'
rc 0 convert part part2 --to torch_dist --layout megatron; rc 0 verify part2 --hash; rc 0 diff part part2
rm part/ckpt.manifest.json; rc 3 verify part; err 'missing tensor embed.weight'

# what a success proves is said; --json says null where nothing was compared
rc 0 verify $k --against m --values --duplicates; out '^ok: 151 tensors, [0-9]+ files, identical to m, no NaN or infinity in 151 floating tensors, no duplicates$'
rc 0 verify $k; out 'headers and sizes only'
rc 1 verify $k --hash --json; out '"ok":null'; no_out '"ok":true'
cp -r $k v; chmod -R u+w v; rc 0 verify v --write
size=$(stat -c %s v/model-00002-of-00003.safetensors); flip v/model-00002-of-00003.safetensors $((size - 1))
for by in '--hash' "--against $k"; do
    rc 1 verify v $by --json; out '"digest":"[0-9a-f]{64}","ok":false'; out '"problems":\[".*"ok":false\}$'
done
rc 1 verify v --hash; out 'FAILED: 1 problem, 0 warnings'
# one file of a directory is compared with the directory's manifest
for i in 1 3; do rc 0 verify v/model-0000$i-of-00003.safetensors --hash --files; out '1 file, all digests match'; err 'of the 151 tensors'; done
rc 1 verify v/model-00002-of-00003.safetensors --hash; out '^failed: model-00002.*differ from the manifest'
# a manifest that is replaced is not compared with
rc 1 verify v --write; out 'not written'
rm v/generation_config.json; rc 0 verify v --write --force --hash; no_out '^failed'
rc 0 verify v --hash --files --strict

# Commands that do without a manifest say in one line that it is damaged, or contradicts what is there; verify
# and convert make it an error, or a warning where only its layout is none.
l=$FIXTURES/hf/llama3_tiny
rc 0 convert $l odd; rc 0 convert $l even; cp odd/ckpt.manifest.json whole
study=(study odd --data "$FIXTURES/fla/corpus.txt" --seq-len 8 --batch 2 --steps 0 --only plain)
told() { # PATTERN: by each of them, in one line
    for c in 'inspect odd' 'inspect odd --tree' 'diff odd even' 'diff even odd' 'verify even --hash --against odd' "${study[*]}"; do
        rc 0 $c; [ "$(wc -l <$ERR)" -eq 1 ] || fail "$c: not one line: $(cat $ERR)"; err "^ckpt: ${c%% *}: warning: odd/ckpt.manifest.json: $1"
    done
    rc 0 inspect odd --quiet; silent
    cp whole odd/ckpt.manifest.json
}
head -c 300 whole >odd/ckpt.manifest.json; rc 3 verify odd; rc 3 convert odd o; told 'JSON .*; it is ignored$'
sed 's/"root":"[0-9a-f]/"root":"x/' whole >odd/ckpt.manifest.json; told ".*root.*; it is ignored$"
sed 's/"manifest_version":1/"manifest_version":9/' whole >odd/ckpt.manifest.json; told 'manifest_version 9, expected 1; it is ignored$'
sed '/"config.json"/s/"size":[0-9]*/"size":77/' whole >odd/ckpt.manifest.json; told 'contradicts what is there: config.json has [0-9]+ bytes, it says 77; `ckpt verify` tells all$'
sed 's/"layout":"[^"]*"/"layout":"nonsense"/' whole >odd/ckpt.manifest.json
rc 0 verify odd; out "warning: the manifest contradicts the tensors: it says layout 'nonsense', and the tensors are hf:llama's"
rc 1 verify odd --strict; rc 0 convert odd o; err "odd: the manifest contradicts the tensors: it says layout 'nonsense'"
told "contradicts what is there: it says layout 'nonsense', and the tensors are hf:llama's"
rc 0 convert odd other --dtype bf16; cp other/ckpt.manifest.json odd; cp even/*.safetensors other/ 2>/dev/null
rc 0 inspect other model.norm.weight; err "contradicts what is there: (model.safetensors has|tensor '.*' is F32)"
for c in 'inspect odd' 'diff even even'; do cp whole odd/ckpt.manifest.json; rc 0 $c; silent; done
