# --dtype: the keep-list and integers stay, are listed, and the root differs for a stated reason.
k=$FIXTURES/hf/kimi_linear_tiny
rc 0 convert $k b --dtype bf16; err 'not cast: [0-9]+ tensors kept F32: kda.A_log, kda.dt_bias.*\(--dtype-force casts them\)$'; out 'root differs: [0-9]+ tensors cast'
[ "$(grep -c 'not cast' $ERR)" -eq 1 ] || fail 'more than one line'
rc 0 convert $k bv --dtype bf16 --verbose; err 'not cast: blocks.0.kda.A_log: not cast'
rc 0 convert $k bj --dtype bf16 --json; out '"lossy":."cast [0-9]+ tensors F32 -> BF16'; out '"not_cast":."blocks.0.kda.A_log'
grep -q '"lossy":."cast' bj/ckpt.manifest.json || fail 'the manifest does not list the cast'
rc 0 inspect b '*A_log'; out ' F32 '; no_out ' BF16 '
rc 0 inspect b 'lm_head*'; out ' BF16 '
rc 0 convert $k f --dtype bf16 --dtype-force; rc 0 inspect f '*A_log'; out ' BF16 '
rc 1 diff b $k; out '^dtype: '
rc 0 convert b c --dtype f32; no_err lossy; rc 0 inspect c 'lm_head*'; out ' F32 '
rc 0 convert c d --dtype bf16; rc 0 diff b d
rc 0 convert $k q --dtype bf16 --quiet; silent
st i.safetensors '{"n":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},"w":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}' 24
rc 0 convert i.safetensors j.safetensors --dtype bf16; err 'not cast: 1 integer tensor: n$'; err 'lossy: cast 1 tensor F32 -> BF16, rounded to nearest even$'
rc 0 inspect j.safetensors; out '^n +I64'; out '^w +BF16'
rc 0 convert $k k2 --dtype keep; rc 0 diff $k k2
# Digests of a cast cover every element, also where their number is no multiple of 8.
rc 0 convert $k f2 --dtype bf16 --dtype-force --verify; rc 0 verify f2 --hash
st odd.safetensors '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[17],"data_offsets":[4,72]},"c":{"dtype":"F32","shape":[5],"data_offsets":[72,92]}}' 92
for d in bf16 f16; do
    rc 0 convert odd.safetensors odd.$d.safetensors --dtype $d --verify
    rc 0 verify odd.$d.safetensors --hash
    rc 0 convert odd.$d.safetensors odd.$d.f32 --to torch_dist --dtype f32 --verify
done
