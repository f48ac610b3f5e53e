# Block-quantised weights: dequantised for another layout or type, carried where nothing changes.
f=$FIXTURES/hf/deepseek_fp8_tiny
rc 0 convert $f keep --to torch_dist --layout keep --verify; out '35 mapped, 22 carried'; no_err become
rc 0 verify keep --hash; out 'all digests match'
rc 0 convert keep back --to safetensors --layout keep; same back/model.safetensors $f/model.safetensors
same back/config.json $f/config.json
rc 0 convert $f same --layout hf; same same/model.safetensors $f/model.safetensors
rc 0 convert $f plain --dtype bf16 --verify; err '22 F8_E4M3 tensors become BF16'; out 'root equals source'
no_config() { ! grep -q quantization_config "$1" || fail "$1 still says quantization_config"; }
no_config plain/config.json
rc 0 verify plain --hash
rc 0 diff $f plain; out '35 identical'
rc 0 diff keep plain
rc 0 inspect plain; no_out F8_E4M3
rc 0 inspect $f 'model.layers.0.mlp.up_proj.weight'; out F8_E4M3
# one byte of a weight, then half a pair
cp -r $f bad && chmod -R u+w bad
flip bad/model.safetensors $(($(stat -c %s bad/model.safetensors) - 3))
rc 1 diff $f bad
sed -i 's/up_proj.weight_scale_inv/up_proj.weight_scale_inw/' bad/model.safetensors
rc 3 convert bad x --dtype bf16; one_line; err "F8 tensor 'model.layers.[0-9.a-z_]*up_proj.weight' has no scale"
absent x
