# In a tensor of several leaves the leaf with the damage is named, with its byte range.
st big.safetensors '{"w":{"dtype":"F32","shape":[1310720],"data_offsets":[0,5242880]}}' 5242880
rc 0 verify big.safetensors --write; present big.safetensors.ckpt.manifest.json
rc 0 verify big.safetensors --hash; out 'all digests match'
flip big.safetensors $(($(stat -c %s big.safetensors) - 5242880 + 3 * 1048576 + 5))
rc 1 verify big.safetensors --hash
out "big.safetensors: tensor 'w': leaf 3, bytes \[3145728\.\.4194304\)"; no_out 'leaf [0-24]'
rc 1 verify big.safetensors --write; out 'not written'
rc 0 verify big.safetensors --write --force; rc 0 verify big.safetensors --hash
