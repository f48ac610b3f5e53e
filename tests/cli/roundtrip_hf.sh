# HF -> Megatron TP 2 EP 2 -> TP 4 -> HF: one root, byte-identical tensors, same configuration.
k=$FIXTURES/hf/kimi_linear_tiny
rc 0 convert $k a --to torch_dist --layout megatron --tp 2 --ep 2 --verify; out 'root equals source'; r=$(root_of)
present a/release/.metadata; present a/release/ckpt.manifest.json; present a/latest_checkpointed_iteration.txt
rc 0 convert a b --tp 4 --verify; out 'root equals source'; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 convert b c --to safetensors --layout hf --verify; [ "$(root_of)" = "$r" ] || fail 'another root'
for x in a b c; do
    rc 0 diff $k $x; out '^151 identical$'
    rc 0 verify $x --hash --files --strict; [ "$(root_of)" = "$r" ] || fail 'another root'
    rc 0 verify $x --against $k; rc 0 verify $k --against $(find $x -name ckpt.manifest.json)
done
same c/config.json $k/config.json
same c/generation_config.json $k/generation_config.json
# the same bytes in the same number of shards
size=$(stat -c %s $k/model-00002-of-00003.safetensors)
rc 0 convert b d --to safetensors --layout hf --max-shard-size $size
rc 0 inspect d; out 'model-00001-of-0000'
rc 0 diff d $k
nothing_but a b c d
