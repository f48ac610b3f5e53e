# Optimizer tensors: keeping them comes later and is said; dropping them is reported.
st o.safetensors '{"optimizer.state.exp_avg.w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}' 8
rc 4 convert o.safetensors p.safetensors; one_line; err 'optimizer'; absent p.safetensors
rc 0 convert o.safetensors p.safetensors --optimizer drop; err 'dropped: 1 optimizer'; out 'root differs: 1 tensor left out$'
rc 0 inspect p.safetensors; out '^w '; no_out 'exp_avg'
