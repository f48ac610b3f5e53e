# Ranks of KDA's projections: fold, truncated SVD, and back.
k=$FIXTURES/hf/kimi_linear_tiny
fg() { for o in f gate; do printf -- '--kda-%s-lora-rank %s ' $o $1; done; }
rc 0 convert $k full --to torch_dist --layout megatron $(fg none) --approximate
rc 4 convert full x --to safetensors --layout hf $(fg 32); one_line; err "'blocks.0.kda.f.weight' is full rank.*--approximate"; absent x
# full matrices that are products of rank 32: nothing but rounding is lost, and the report says so
rc 0 convert full back --to safetensors --layout hf $(fg 32) --approximate --verify
[ "$(grep -cE 'lossy: blocks\.[024]\.kda\.[fg]\.weight: rank 32 of 64 by truncated SVD, factors rounded to F32, relative Frobenius error [0-9.]+e-08 \(no more than rounding\)$' $ERR)" -eq 6 ] || fail "$(cat $ERR)"
rc 0 verify back --hash; same back/config.json $k/config.json 2>/dev/null || rc 0 convert $k ref --to safetensors --layout hf; [ ! -d ref ] || same back/config.json ref/config.json
rc 0 convert back again --to torch_dist --layout megatron $(fg none) --approximate; rc 0 diff again full --atol 1e-6 --rtol 0
rc 1 diff again full
# a smaller rank: error in the report, the manifest and --json; the same bytes at any number of threads
rc 0 convert full r4 --to torch_dist --layout megatron $(fg 4) --approximate --threads 1 --json; out '"lossy":."blocks.0.kda.f.weight: rank 4 of 64[^"]*relative Frobenius error 7\.[0-9]*e-01"'
rc 0 convert full s4 --to torch_dist --layout megatron $(fg 4) --approximate --threads 3 --memory 2MiB; SOURCE_DATE_EPOCH=1 same_tree r4 s4
grep -q 'rank 4 of 64.*relative Frobenius error' r4/release/ckpt.manifest.json || fail 'no error in the manifest'
# another rank of a low-rank model goes through the product
rc 0 convert r4 r3 --to torch_dist --layout megatron --kda-f-lora-rank 3 --approximate; err 'rank 3 instead of 4 by truncated SVD of the product'
rc 0 convert r4 r8 --to torch_dist --layout megatron --kda-f-lora-rank 8 --approximate; err 'rank 8 instead of 4 .*e-08 .no more than rounding'
rc 0 convert r4 same --to torch_dist --layout megatron $(fg 4); no_err lossy; rc 0 diff same r4
rc 2 convert full x --to torch_dist --layout megatron $(fg 65) --approximate; one_line; err '\[64, 64\]: rank 65 exceeds it'; absent x
# a plan computes nothing and leaves nothing
rc 0 convert full x --to torch_dist --layout megatron $(fg 4) --approximate --dry-run; err 'rank 4 of 64'; no_err Frobenius; absent x
nothing_but full back again ref r4 s4 r3 r8 same tree.txt
