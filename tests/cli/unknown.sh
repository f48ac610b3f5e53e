# A target without a place for a tensor refuses by name; --allow-unknown carries it, and back.
f=$FIXTURES/fla/kda_trained
rc 4 convert $f m --to torch_dist --layout megatron; one_line; err 'g_proj\.1\.bias'; absent m
rc 0 convert $f m --to torch_dist --layout megatron --allow-unknown --tp 2 --verify; out 'root equals source'
rc 4 convert m back --to safetensors --layout fla; err 'g_proj.1.bias'; absent back
rc 0 convert m back --to safetensors --layout fla --allow-unknown --verify
rc 0 diff $f back; same back/config.json $f/config.json
rc 4 convert $FIXTURES/torch/dcp_2rank x --to safetensors --layout hf; one_line; err 'no known model family'
nothing_but m back
