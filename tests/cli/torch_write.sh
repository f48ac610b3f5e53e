# torch.save files and directories of pytorch_model*.bin: written, read back, round trips.
k=$FIXTURES/hf/kimi_linear_tiny
export SOURCE_DATE_EPOCH=1700000000
rc 0 convert $k s --to safetensors --max-shard-size 300KB; root=$(root_of)
rc 0 convert $k a.pt --verify; out 'root equals source'; [ "$(root_of)" = "$root" ] || fail "root: $(root_of)"
present a.pt.ckpt.manifest.json; rc 0 verify a.pt --hash; rc 0 diff a.pt $k
rc 0 convert $k d --to torch --verify; present d/pytorch_model.bin; absent d/pytorch_model.bin.index.json
same d/config.json s/config.json; same d/generation_config.json $k/generation_config.json
rc 0 convert $k b --to torch --max-shard-size 300KB --verify; present b/pytorch_model.bin.index.json
rc 0 verify b --hash; rc 0 diff b $k; rc 0 diff b/pytorch_model.bin.index.json $k
# and back: the same bytes as without the detour
for from in d b; do rc 0 convert $from back.$from --to safetensors --max-shard-size 300KB --verify; same_tree back.$from s; done
# the container of the source, and of the name
rc 0 convert b c; present c/pytorch_model.bin; for n in x.pth x.bin; do rc 0 convert $k $n; same $n a.pt; done
# another layout and back
rc 0 convert $k m --to torch --layout megatron; present m/megatron_args.json; rc 0 convert m h --layout hf --to safetensors --max-shard-size 300KB
for f in s/*; do [ $f = s/ckpt.manifest.json ] || same $f h/${f#s/}; done
# the same bytes at any number of threads and any buffer
rc 0 convert $k t1 --to torch --max-shard-size 300KB --threads 1 --memory 1MiB; same_tree t1 b
# a name that contradicts --to; damage
rc 2 convert $k y.pt --to safetensors; one_line; err 'the name is that of a torch file'; absent y.pt
rc 2 convert $k y.safetensors --to torch; one_line; err 'safetensors file'; absent y.safetensors
rc 2 convert $k y --to torch --tp 2; one_line; absent y
rm b/pytorch_model-00002-of-*.bin; rc 3 inspect b; one_line; err "shard 'pytorch_model-00002-of-0000.\.bin' that pytorch_model.bin.index.json lists is absent"
rm b/pytorch_model.bin.index.json; rc 3 verify b; one_line; err 'pytorch_model-00002-of-0000.\.bin is missing'
flip a.pt 700000; rc 1 verify a.pt --hash; out "tensor"
# optimizer state lies beside the weights; there and back in the same bytes; cut parameters lose it
for seed in 2 7; do
    rm -rf g o ob or; "$GEN" random g --seed $seed >/dev/null; rc 0 convert g o
    rc 0 convert o or --to torch --max-shard-size 20KB --verify; present or/optimizer.bin; ! grep -q optimizer or/pytorch_model.bin.index.json || fail 'in the index'
    rc 0 convert or ob --to safetensors --verify
    for f in o/*.safetensors o/*.index.json; do [ ! -e "$f" ] || same "$f" "ob/${f#o/}"; done
    rc 0 convert o or.dist --to torch_dist --layout megatron --kda-f-lora-rank 2 --approximate; out ' [1-9][0-9]* reset, 0 dropped'; rm -rf or.dist
done
