# Choices inside a layout: norms fused or separate, folded low-rank projections, plain DCP.
k=$FIXTURES/hf/kimi_linear_tiny
rc 0 convert $k n1 --to torch_dist --layout megatron --norms separate; rc 0 inspect n1; out 'latent_norms=separate'; out 'mlp_norms=separate'; no_out 'layer_norm_weight'
rc 0 convert n1 n2 --norms fused --verify; out 'root equals source'; rc 0 inspect n2; out 'latent_norms=fused'; out 'mlp_norms=fused'; out 'layer_norm_weight'
rc 0 diff n1 n2
# a mixture is kept as it is: MLP norms fused, latent norms separate
x='decoder.layers'; y='mlp.linear_fc1.layer_norm_weight'
rc 0 convert $FIXTURES/mcore/legacy_tp1 mix --rename $x.1.pre_mlp_layernorm.weight=$x.1.$y --rename $x.3.pre_mlp_layernorm.weight=$x.3.$y
rc 0 convert mix mix2 --tp 2; rc 0 inspect mix2; out $x.1.$y; out self_attention.kv_layernorm.weight; no_out kv_up_proj.layer_norm
rc 0 convert $k p --to torch_dist --verify; present p/.metadata; present p/config.json; rc 0 diff p $k; rc 0 verify p --hash
rc 0 convert p h --to safetensors; rc 0 diff h $k; same h/config.json $k/config.json
f='--to torch_dist --layout megatron --kda-f-lora-rank none --kda-gate-lora-rank none'
rc 4 convert $k l $f; one_line; err approximate; absent l
rc 0 convert $k l $f --approximate --tp 2 --verify; err 'lossy: blocks.0.kda.f.weight'; out 'root differs: 6 lossy steps'
rc 0 inspect l; out 'kda=fused'
grep -q '"lossy":\["blocks' l/release/ckpt.manifest.json || fail 'the manifest does not list the lossy steps'
rc 0 verify l --hash
rc 4 convert l m --kda-f-lora-rank 16; one_line; absent m
