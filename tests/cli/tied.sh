# A configuration that ties the head: a different head is a contradiction, none is fine.
k=$FIXTURES/hf/kimi_linear_tiny
cp -r $k t; chmod -R u+w t
sed -i 's/"tie_word_embeddings": false/"tie_word_embeddings": true/' t/config.json
rc 1 verify t; out 'ties the head to the embedding'
rc 1 convert t m --to torch_dist --layout megatron; one_line; err 'ties the head to the embedding'; absent m
rc 0 convert t m --to torch_dist --layout megatron --exclude head.weight; rc 0 verify m --hash
rc 0 inspect m; no_out output_layer
