# --include, --exclude, --rename, --dry-run, --max-shard-size.
k=$FIXTURES/hf/kimi_linear_tiny
rc 0 convert $k a.safetensors --include '*.mlp.*' --include 'lm_head*'; err 'dropped: '; out 'root differs: 1[0-9]+ tensors left out$'
rc 0 convert $k a1 --include '*.mlp.*' --json; out '"source_root":null'
# the source's own manifest knows the root of the whole
rc 0 convert $k a2; r=$(root_of); rc 0 convert a2 a3 --exclude 'lm_head*'; out 'root differs: 1 tensor left out$'
rc 0 convert a2 a4 --exclude 'lm_head*' --json; out "\"source_root\":\"${r#root }\""
rc 0 inspect a.safetensors; out '^lm_head'; no_out 'q_proj'
rc 0 convert $k b --exclude 'blocks.*.moe.*' --exclude 'nothing' --verify; err "warning: --exclude 'nothing' matches no tensor$"; rc 0 inspect b; no_out 'experts\.0'
rc 2 convert $k c --include 'zzz*'; one_line; absent c
rc 0 convert $k d --rename 'lm_head.weight=head.w' --rename 'model.layers.*=m.l.*' --verify
rc 0 inspect d; out '^head.w '; out '^m.l.0.input_layernorm'; no_out 'model\.layers'
rc 0 convert $k e --dry-run; absent e; out 'nothing written'; out 'lm_head.weight F32 \[320, 64\] <- model-0000[0-9]-of-00003.safetensors\[[0-9]+\.\.[0-9]+\)'
rc 0 convert $k e --dry-run --to torch_dist --layout megatron --tp 2; out '__1_0.distcp'; out ' at \[[0-9, ]+\] of '; absent e
rc 0 convert $k g --max-shard-size 300kB; [ "$(ls g/*.safetensors | wc -l)" -ge 4 ] || fail 'too few shards'
for f in g/*.safetensors; do [ "$(stat -c %s $f)" -lt 320000 ] || fail "$f is too large"; done
rc 0 diff g $k
rc 0 verify g --hash
# the manifest lists the names that the output is read under
rc 0 convert $k r --rename 'model.*=net.*'; out 'root differs: tensors renamed$'; r=$(root_of)
rc 0 verify r --hash; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 convert $k r.safetensors --rename 'model.*=net.*'; rc 0 verify r.safetensors --hash
rc 0 convert $k ru --rename 'lm_head.weight=head.w'; err 'warning: the renamed output: .*head.w'; rc 0 verify ru --hash --allow-unknown
rc 0 convert $k rm --to torch_dist --layout megatron --rename 'decoder.*=net.*'; out 'tensors renamed'; r=$(root_of)
rc 0 verify rm --hash; [ "$(root_of)" = "$r" ] || fail 'another root'
rc 0 convert $k w --rename 'nope.*=x.*' --include '*' --json; out '"warnings":."--rename .nope'; err "warning: --rename 'nope[.][*]=x[.][*]' matches no tensor$"
no_err include
# a dry run refuses what the run would refuse, and says what it counts
rc 2 convert $k r --dry-run; one_line; err 'exists'; rc 0 convert $k r --dry-run --force
rc 5 convert $k no/such/x --dry-run; one_line; rc 5 convert $k no/such/x; one_line
rc 0 convert $k x --dry-run --to torch_dist --layout megatron; out '^plan: 151 tensors stored as [0-9]+, [0-9]+ objects?, '
rc 0 convert $k x.safetensors --dry-run; out '^plan: 151 tensors, 0 objects, .* in 1 file, '
rc 2 convert $k x.safetensors --to torch_dist; one_line; absent x.safetensors
# a configuration that is not the manifest's
cp -r a2 cd; sed -i 's/"rms_norm_eps": *[^,]*/"rms_norm_eps": 0.5/' cd/config.json
rc 1 convert cd ce; one_line; err 'configuration contradicts .*norm_eps'; absent ce; rc 0 convert cd ce --force
# A misspelt name is told what it may mean.
rc 2 convert $FIXTURES/hf/kimi_linear_tiny near --include model.embed_token.weight; one_line
err "leave no tensor; did you mean 'model.embed_tokens.weight'\?$"; absent near
rc 2 diff $FIXTURES/hf/kimi_linear_tiny $FIXTURES/hf/kimi_linear_tiny --include lm_haed.weight; one_line
err "no tensor on either side; did you mean 'lm_head.weight'\?$"
rc 0 inspect $FIXTURES/hf/kimi_linear_tiny blocks.0.kda.q.weigt; err "did you mean 'blocks.0.kda.q.weight'\?$"
