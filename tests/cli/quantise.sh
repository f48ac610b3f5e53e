# Projections in 8 and 4 bits: written, verified, read back, run; at any number of workers the same bytes.
kimi=$FIXTURES/hf/kimi_linear_tiny deepseek=$FIXTURES/hf/deepseek_v3_tiny
for kind in fp8-block128 nvfp4 mxfp8; do
    rc 0 convert $kimi $kind --dtype $kind --approximate --verify
    out "100 projections in $kind, 20 matrices kept; worst relative RMS error 0\.[0-9]+ \(model\.layers"
    out '^CLASS IN model\.layers\.\* +TENSORS +RELATIVE RMS'; out '^self_attn\.o_proj\.weight +4 +0\.'
    no_out 'layers\.0\.self_attn\.o_proj.weight +relative RMS' # one by one only with --verbose
    out 'root differs: 1 lossy step'; err '^ckpt: convert: lossy: 100 projections become'
    rc 0 verify $kind --hash; out 'all digests match'
    rc 0 convert $kimi one --dtype $kind --approximate --threads 1 --memory 8M --max-shard-size 100KB
    rc 0 convert $kimi four --dtype $kind --approximate --threads 4 --max-shard-size 100KB
    same_tree one four; rm -r one four
    grep -q '"lossy": *\[ *"100 projections' <(tr -d '\n' <$kind/ckpt.manifest.json) || fail "$kind: not lossy in the manifest"
    rc 0 convert $kind plain-$kind --dtype bf16 --verify; err 'become BF16'
    ! grep -q quantization_config plain-$kind/config.json || fail "$kind: still says quantization_config"
    rc 0 diff $kind $kind; out '151 identical'
    rc 0 verify $kind --forward; out 'loss 5\.9[0-9]'
    rc 0 inspect $kind model.norm.weight; no_out 'not known'
done
# inspect: what the files hold, and what it stands for
rc 0 inspect nvfp4 '*.0.self_attn.o_proj.weight'
out 'o_proj\.weight +U8 +\[64, 32\] +1 +2\.05 kB +nvfp4 of BF16 \[64, 64\]'; out '^U8 +1 +2,048 '
rc 0 inspect nvfp4 '*.0.self_attn.o_proj.weight' --json
out '"dtype":"BF16","shape":\[64,64\],"shards":1,"bytes":8192,"stored":\{"format":"nvfp4","dtype":"U8","shape":\[64,32\],"bytes":2048\}'
out '"bytes":8192,"stored_bytes":2048,'; out '"stored_dtype":\{"U8":'
rc 0 inspect mxfp8 '*.0.self_attn.o_proj.weight' --tree; out 'weight  F8_E4M3 \[64, 64\]$'; out '\(1, 4.10 kB\)'
rc 0 inspect fp8-block128 '*.0.self_attn.o_proj.weight'; out 'F8_E4M3 +\[64, 64\] +1 +4\.10 kB +fp8-block128 of BF16'
rc 0 inspect $kimi '*.0.self_attn.o_proj.weight'; no_out 'STANDS FOR'
grep -q '"quant_algo": "W4A16_NVFP4"' nvfp4/config.json || fail "nvfp4/config.json: $(cat nvfp4/config.json)"
# ModelOpt's second file, of the same content; none for the other convention, none when it is undone
python3 - <<'PY' || fail "hf_quant_config.json"
import json
for kind, algo, group in ("nvfp4", "W4A16_NVFP4", 16), ("mxfp8", "MXFP8", 32):
    q = json.load(open(kind + "/hf_quant_config.json"))
    c = json.load(open(kind + "/config.json"))["quantization_config"]
    assert q == {"producer": c["producer"],
                 "quantization": {"quant_algo": algo, "kv_cache_quant_algo": None, "group_size": group,
                                  "exclude_modules": c["ignore"]}}, q
PY
absent fp8-block128/hf_quant_config.json; absent plain-nvfp4/hf_quant_config.json
grep -q '"hf_quant_config.json"' nvfp4/ckpt.manifest.json || fail "the manifest does not list it"
grep -q '"weight_block_size"' fp8-block128/config.json || fail 'fp8-block128/config.json'
rc 0 inspect mxfp8 'model.layers.0.self_attn.A_log'; out F32

# to Megatron they are dequantised; from Megatron they are quantised; nothing else changes
rc 0 convert nvfp4 mg --to torch_dist --layout megatron --tp 2 --verify; out 'root equals source'
rc 0 diff nvfp4 mg; out '151 identical'
rc 0 convert $kimi mg32 --to torch_dist --layout megatron --tp 2
rc 0 convert mg32 from-mg --to safetensors --layout hf --dtype nvfp4 --approximate
same from-mg/model.safetensors nvfp4/model.safetensors

# columns that do not divide, errors in --json, --resume
rc 0 convert $deepseek d --dtype mxfp8 --approximate --json
out '"not_cast": *\[' ; out 'q_b_proj.weight: not quantised \(48 columns, mxfp8 needs a multiple of 32\)'
out '"quantised"'; out '"saturated"'; out '"rel_rms"'; out '"worst_rel_rms"'
# roots of what tests/peers/wquant.py found to be PyTorch's and ModelOpt's bits
out '"root": *"36a4a0843888682ede83320c1e865e439f0b30c0d57d51f746a6dce36fda90f8"'
rc 0 convert $deepseek dn --dtype nvfp4 --approximate; rc 0 verify dn --hash
out 'root aa07ea7adc22ccd7c9f4d3c6f63aebfe669d187928500ac46057906419f3ba3b'
rc 0 convert $deepseek d8 --dtype fp8-block128 --approximate
out 'root d835b19446295a0097432cf7cb9f3de0b62e78ed86760703b63bbd1f51d3ec2c'
# from one form into another
rc 0 convert nvfp4 again --dtype fp8-block128 --approximate; rc 0 verify again --hash
rc 0 convert $kimi dry --dtype nvfp4 --approximate --dry-run; out 'stored as 351'; absent dry

# refused
rc 4 convert $kimi x --dtype nvfp4; one_line; err 'loses precision; --approximate'
rc 4 convert $kimi x --dtype nvfp4 --approximate --to torch_dist --layout megatron; err 'layout megatron:hybrid has no quantised form'
rc 4 convert $kimi x --dtype nvfp4 --approximate --to torch; err 'a safetensors directory'
rc 4 convert $kimi x.safetensors --dtype nvfp4 --approximate; err 'a safetensors directory'
rc 4 convert $kimi x --dtype nvfp4 --approximate --exclude '*norm*'; err 'not together with'
rc 4 convert $FIXTURES/hf/qwen3_moe_joint_tiny x --dtype nvfp4 --approximate; err 'stacked in three dimensions'
rc 2 convert $kimi x --dtype nvfp4 --approximate --dtype-force; err 'no effect'
rc 2 convert $kimi x --dtype nvfp5 --approximate; err 'not one of'
absent x; absent x.safetensors

# a scale of another shape, a code that changed
cp -r nvfp4 bad && chmod -R u+w bad
flip bad/model.safetensors $(($(stat -c %s bad/model.safetensors) - 3))
rc 1 verify bad --hash
cp -r mxfp8 worse && chmod -R u+w worse && rm worse/ckpt.manifest.json
sed -i 's/"model.layers.0.self_attn.o_proj.weight_scale":{"dtype":"U8","shape":\[64,2\]/"model.layers.0.self_attn.o_proj.weight_scale":{"dtype":"U8","shape":[2,64]/' worse/model.safetensors
rc 3 verify worse; err "o_proj.weight_scale': 2 dimensions of \[2, 64\], expected \[64, 2\]"
rc 0 inspect worse
