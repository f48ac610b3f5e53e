# What Megatron refuses to train with (megatron-dist-ckpt.md section 6): convert and verify --forward
# refuse it naming the field, inspect shows the model with a warning.
mc=$FIXTURES/mcore
rc 0 convert $mc/legacy_tp2 good --to safetensors --layout keep
present good/megatron_args.json
# with FIELD VALUE: a copy whose configuration says so.
with() {
    rm -rf bad
    cp -r good bad
    rm -f bad/ckpt.manifest.json
    if grep -q "\"$1\":" bad/megatron_args.json; then
        sed -i "s/\"$1\": *[^,}]*/\"$1\": $2/" bad/megatron_args.json
    else
        sed -i "0,/{/s//{\"$1\": $2, /" bad/megatron_args.json
    fi
    grep -q "\"$1\": $2" bad/megatron_args.json || fail "megatron_args.json was not changed"
}
# refused FIELD: of the copy.
refused() {
    rc 3 convert bad out --to torch_dist --layout megatron; one_line; err "$1"; absent out
    rc 3 verify bad --forward; one_line; err "$1"
    rc 0 inspect bad; err "warning: bad: .*$1"
}
with linear_num_value_heads 8; refused "field 'linear_num_value_heads': found 8"
with linear_value_head_dim 16 # what inspect says of it is that no tensor has such a shape
rc 3 verify bad --forward; one_line; err "field 'linear_value_head_dim': found 16"
with kda_lower_bound -5.5; refused "'kda_lower_bound'"
with kda_lower_bound 0; refused "'kda_lower_bound'"
with kda_f_lora_rank 0; refused "'kda_f_lora_rank'"
with cache_mla_latents true; rc 0 verify bad --forward
sed -i 's/"cache_mla_latents": true/"cache_mla_latents": true, "no_rope_freq": 1/' bad/megatron_args.json
[ "$(grep -o no_rope_freq bad/megatron_args.json | wc -l)" -eq 1 ] || sed -i 's/, "no_rope_freq": null//' bad/megatron_args.json
refused "field 'cache_mla_latents'"
with fp8 '"e4m3"'; rc 0 verify bad --forward
with linear_cp_mode '"headwise"'; rc 0 verify bad --forward
# Latent norms are stored: a configuration without them would swap the up-projections.
with qk_layernorm false; refused 'latent_norm false, but .*kv_a_norm.weight is stored'
# 4 heads over 3 ranks.
rc 2 convert good out --to torch_dist --layout megatron --tp 3; one_line; err 'KDA heads 4 is not divisible by TP 3'; absent out
