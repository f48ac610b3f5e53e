# Megatron KDA fused: one root at TP 1, 2 and 4, in DCP and in one safetensors file.
m=$FIXTURES/mcore
rc 0 convert $m/legacy_tp1 one.safetensors; out 'root equals source'; r=$(root_of)
rc 0 convert $m/legacy_tp2 two.safetensors; [ "$(root_of)" = "$r" ] || fail 'TP 2 has another root'
rc 0 diff one.safetensors two.safetensors
rc 0 diff one.safetensors $m/legacy.plain.safetensors
rc 0 diff $m/legacy_tp2 $m/legacy.plain.safetensors
rc 0 convert one.safetensors four --to torch_dist --tp 4 --verify; [ "$(root_of)" = "$r" ] || fail 'TP 4 has another root'
rc 0 convert $m/legacy_tp2 again --verify; out 'root equals source'; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 inspect again; out '^mesh +tp 2'; out '^iteration +100'
rc 0 verify again --hash; rc 0 diff again $m/legacy_tp2 --exclude 'none'
for v in f fg; do
    rc 0 convert $m/lowrank_${v}_tp2 low_$v --tp 4 --pp 2 --verify; out 'root equals source'
    rc 0 diff low_$v $m/lowrank_$v\_tp2.plain.safetensors
done
