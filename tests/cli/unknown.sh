# A target without a place for a tensor refuses by name; --allow-unknown carries it, and back.
f=$FIXTURES/fla/kda_trained
rc 4 convert $f m --to torch_dist --layout megatron; one_line; err 'g_proj\.1\.bias'; absent m
rc 0 convert $f m --to torch_dist --layout megatron --allow-unknown --tp 2 --verify; out 'root equals source'
out '^63 mapped, 3 carried, 0 reset, 0 dropped; 0 of optimizer state'
rc 4 convert m back --to safetensors --layout fla; err 'g_proj.1.bias'; absent back
rc 0 convert m back --to safetensors --layout fla --allow-unknown --verify
rc 0 diff $f back; same back/config.json $f/config.json
rc 4 convert $FIXTURES/torch/dcp_2rank x --to safetensors --layout hf; one_line; err 'no known model family'
# torch.optim's own state dict under any usual name
d=$FIXTURES/torch/dcp_2rank
rc 0 convert $d o --to safetensors --optimizer drop; out '^0 mapped, 17 carried, 0 reset, 2 dropped'
err 'dropped: 2 optimizer tensors \(opt.state.exp_avg'; no_err 'opt.param_groups'
nothing_but m back o
