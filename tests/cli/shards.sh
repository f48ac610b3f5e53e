# Sharded directories: a missing shard, a ghost in the index, a cut file, a stray file.
k=$FIXTURES/hf/kimi_linear_tiny
copy() { rm -rf m; cp -r $k m; chmod -R u+w m; }
copy; rm m/model-00002-of-00003.safetensors
rc 3 verify m; one_line; err 'model-00002-of-00003.safetensors'; err 'incomplete download'
rc 3 convert m dst; one_line; absent dst
copy; sed -i 's/"lm_head.weight"/"ghost.weight"/' m/model.safetensors.index.json
rc 3 verify m; one_line; err 'ghost.weight|lm_head.weight'
copy; truncate -s 100000 m/model-00001-of-00003.safetensors
rc 3 verify m; one_line; err 'model-00001'; rc 3 convert m dst; absent dst; rc 3 verify m --hash
copy; cp m/model-00003-of-00003.safetensors m/model.safetensors
rc 0 verify m; out 'warning: .*model.safetensors'; rc 1 verify m --strict
rc 0 convert m dst; out 'root equals source'; rc 0 diff $k dst
rm -r dst
copy; sed -i 's/model-00003-of-00003.safetensors/..\/evil.safetensors/' m/model.safetensors.index.json
rc 3 inspect m; one_line
copy; sed -i 's/"hidden_size": 64/"hidden_size": 32/' m/config.json
rc 3 verify m; one_line; err 'hidden|size|64|32'
rc 0 inspect m
