# Real Megatron-Core 0.16.1: the same training saved as dp_reshardable (flat buckets) and as
# fully_reshardable. What is rescued from the one is the other, bit for bit.
b=$FIXTURES/mcore/optim_buckets_tp2 p=$FIXTURES/mcore/optim_params_tp2
rc 0 inspect $b; out 'bucket_idx_0.exp_avg_sq'; silent; out '^optimizer +6 tensors in flat buckets'
rc 0 convert $b r --tp 1 --pp 1; err 'note: dp_reshardable optimizer buckets are given back'; out ' 0 reset, 0 dropped'
rc 0 diff r $p; out '^[0-9]+ identical$'; no_out 'only in'
rc 0 diff $b $p; out '^[0-9]+ identical$'
rc 0 verify r --hash; rc 0 verify $b
rc 0 inspect r --common; out '"distrib_optim_sharding_type": "fully_reshardable"'
out '"param_state_sharding_type": "fully_reshardable"'; out '"step": 3.0'; no_out 'dp_reshardable'
rc 0 inspect r; no_out 'dp_group_idx'
rc 0 convert $b d --tp 1 --pp 1 --optimizer drop; err 'dropped: 6 optimizer tensors'; rc 0 inspect d; no_out 'exp_avg'
# mixed precision without the distributed optimizer, and an optimizer for experts chained behind another:
# the stored names stay, whatever the mesh
for n in optim_mixed_tp2:tp optim_chained_ep2:ep; do
    f=$FIXTURES/mcore/${n%:*} axis=--${n#*:}
    rc 0 convert $f one $axis 1 --force; out ' 0 reset, 0 dropped'; r=$(root_of)
    rc 0 convert one two $axis 2 --force; [ "$(root_of)" = "$r" ] || fail "$n: another root"
    rc 0 diff two $f; no_out 'only in'; rc 0 verify two --hash
    rc 0 inspect $f; grep -oE '^[a-z_0-9]+\.[^ ]+' $OUT >names.txt
    rc 0 inspect two; grep -oE '^[a-z_0-9]+\.[^ ]+' $OUT >names2.txt
    same names.txt names2.txt; [ "$(grep -c optimizer names.txt)" -ge 27 ] || fail "$n: no names"
done
# fully_sharded_model_space of Megatron-Core 0.15.3, in ranges over two data-parallel ranks: the same
# training saved as fully_reshardable there, under its names
m=$FIXTURES/mcore/optim_model_space_tp2
rc 0 inspect $m; out 'optimizer.state.fp32_param.output_layer.weight'; silent
rc 0 convert $m ms --tp 1; err 'note: optimizer states of fully_sharded_model_space are taken as fully_reshardable'; out ' 0 reset, 0 dropped'
rc 0 convert ms ms2 --tp 2; silent; out 'root equals source'
for d in ms ms2; do
    rc 0 diff $d $m.params; out '^48 identical$'; rc 0 verify $d --hash
    rc 0 inspect $d; no_out fp32_param; out 'optimizer.state.param.output_layer.weight +F32 +.64, 32.'
    rc 0 inspect $d --common; no_out model_space; out '"step": 3.0'
    [ "$(grep -c '_sharding_type": "fully_reshardable"' $OUT)" -eq 2 ] || fail "$d: its form is not said twice"
done
rc 0 convert $m mh5.h5 --layout hf; rc 0 convert mh5.h5 ms3 --to torch_dist --layout megatron --tp 2
rc 0 inspect ms3 --common; no_out model_space; out '"param_state_sharding_type": "fully_reshardable"'
rc 0 diff ms3 $m.params; no_out 'only in'
rc 0 inspect $FIXTURES/mcore/optim_chained_ep2; out 'chained_1.optimizer.state.param.decoder.layers.mlp.experts'
rc 0 inspect $FIXTURES/mcore/optim_mixed_tp2; out 'optimizer.state.fp32_param.output_layer.weight'
rc 0 convert $FIXTURES/mcore/optim_mixed_tp2 hf --to safetensors --layout hf; out ' 36 of optimizer state'
rc 0 convert hf mg --to torch_dist --layout megatron --tp 2; silent; present mg/iter_0000003/metadata.json
rc 0 diff mg $FIXTURES/mcore/optim_mixed_tp2
# step and param_groups came along in the manifest; without it they are missed
rm hf/ckpt.manifest.json
rc 0 convert hf mh --to torch_dist --layout megatron --tp 2; err 'reads these states only once they are added there'

# a weight that is not its master copy, in one bit: nothing is proved
cp -r $b x; rc 0 convert $b n --tp 1 --pp 1 --dry-run
at=$(grep -oE 'output_layer.weight BF16 .* <- __0_1.distcp\[[0-9]+' $OUT | grep -oE '[0-9]+$'); flip x/iter_0000003/__0_1.distcp $((at + 100))
rc 4 convert x y --tp 1 --pp 1; one_line; err 'no stored weight equals the rounded master copy from element'; err '[-]-optimizer drop'; absent y
rc 0 convert x y --tp 1 --pp 1 --optimizer drop
rc 1 diff x $b; out 'head.weight'
