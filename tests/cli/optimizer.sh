# Optimizer tensors: carried where no layout is involved, refused where one is, dropped on request.
st o.safetensors '{"optimizer.state.exp_avg.w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}' 8
rc 0 convert o.safetensors k.safetensors; out 'root equals source'; rc 0 diff o.safetensors k.safetensors; rc 0 inspect k.safetensors; out 'exp_avg'
rc 0 convert o.safetensors k --to torch_dist; out 'root equals source'; rc 0 convert k k2; out 'root equals source'; rc 0 diff k2 o.safetensors
rc 4 convert o.safetensors p.safetensors --layout hf; one_line; absent p.safetensors
rc 0 convert o.safetensors p.safetensors --optimizer drop; err 'dropped: 1 optimizer tensor .optimizer.state.exp_avg.w.$'; out 'root differs: 1 tensor left out$'
rc 0 inspect p.safetensors; out '^w '; no_out 'exp_avg'
rc 0 convert o.safetensors q.safetensors --optimizer drop --json; out '"dropped":."1 optimizer tensor'
# a known layout has no place for it; a filter that leaves it out already is enough
rc 0 convert o.safetensors i.safetensors --exclude 'optimizer.*'; err 'dropped: 1 optimizer'; rc 0 convert o.safetensors j.safetensors --include w --layout keep
rc 0 diff i.safetensors j.safetensors
