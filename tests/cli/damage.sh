# One flipped byte anywhere in a data file: exit 1, naming the file, and tensor and leaf if it lies
# in a tensor.
k=$FIXTURES/hf/kimi_linear_tiny
rc 0 convert $k a --to torch_dist --layout megatron --tp 2
rc 0 convert $k h --max-shard-size 500kB
check() { # CHECKPOINT FILE
    local size i at
    size=$(stat -c %s $2)
    for ((i = 0; i < 12; i++)); do
        at=$((size * i / 12 + i * 7))
        flip $2 $at
        rc 1 verify $1 --hash; out "$(basename $2)"; out '^FAILED'
        flip $2 $at
    done
    at=$((size - 1))
    flip $2 $at; rc 1 verify $1 --hash; flip $2 $at
    rc 0 verify $1 --hash
}
check a a/release/__0_0.distcp
check a a/release/__1_0.distcp
check a a/release/.metadata
check a a/release/common.pt
for f in h/*.safetensors; do check h $f; done
last=$(ls h/*.safetensors | tail -1)
flip $last $(($(stat -c %s $last) - 3)); rc 1 verify h --hash
out "$(basename $last): tensor '[a-zA-Z0-9_.]+' .*leaf 0, bytes \[0\.\.[0-9]+\)"
rc 1 verify h --hash --quiet; err "$(basename $last)"
# a damaged source is not converted into an intact-looking result
rc 1 convert h dst; err 'contradict'; absent dst
rc 0 convert h dst --force
# nor when it is named instead of its directory
rc 0 convert $k d; f=d/model.safetensors
rc 0 convert $f ok --verify; out 'root equals source'; rm -r ok
flip $f $(($(stat -c %s $f) - 100))
for more in '' --verify '--dtype bf16' "--include final_norm.weight"; do
    rc 1 convert $f dst2 $more; absent dst2
    err "^ckpt: convert: $f: tensor 'final_norm.weight' contradicts the manifest of its directory"
done
(cd d && "$CKPT" convert model.safetensors ../dst2.h5 2>../$ERR) && fail 'in the directory: exit 0'
err contradicts; absent dst2.h5
rc 0 convert $f part --include embed.weight # what is damaged takes no part
head -c 400 d/ckpt.manifest.json >short.json; cp short.json d/ckpt.manifest.json
rc 3 convert $f dst2; one_line; err 'd/ckpt.manifest.json: JSON offset 400'; err '[-]-force'; absent dst2
rc 0 convert $f dst2 --force
# F8 blocks as they are stored
rc 0 convert $FIXTURES/hf/deepseek_fp8_tiny fp; f=fp/model.safetensors
rc 0 verify $f --hash; rc 0 convert $f f8.safetensors
flip $f $(($(stat -c %s $f) - 100)); rc 1 convert $f f9.safetensors; err 'contradicts'; absent f9.safetensors
