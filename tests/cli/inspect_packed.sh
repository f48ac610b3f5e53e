# Sub-byte types are shown packed; unprintable names are escaped; empty and scalar shapes.
st p.safetensors '{"f":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}' 4
rc 0 inspect p.safetensors --stats --head 3; out '\[2, 4\] packed'; out '^f: 0 0 0$'
rc 0 inspect p.safetensors --json; out '"packed":true'
st s.safetensors '{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]},"c":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}' 4
rc 0 inspect s.safetensors --stats --head 2; out '^a +F32 +\[\] '; out '^b +F32 +\[0, 5\] '
rc 0 convert s.safetensors t.safetensors; rc 0 diff s.safetensors t.safetensors
st n.safetensors '{"x\u001b[31my":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' 1
rc 0 inspect n.safetensors; no_out $'\033'; out 'x\\x1b\[31my'
rc 0 inspect n.safetensors --tree; no_out $'\033'
