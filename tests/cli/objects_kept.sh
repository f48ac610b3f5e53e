# What a target has no place for (param_groups, schedulers, random states, the common state) travels in
# the manifest and goes back into a DCP directory.
m=$FIXTURES/mcore p=$FIXTURES/mcore/optim_params_tp2 t=$FIXTURES/torch
rc 0 convert $p h --to safetensors --layout hf; err 'kept: 9 objects in the manifest, for the way back: common_state/shard_0_1, '
rc 0 convert h h.h5; no_err dropped
rc 0 convert h.h5 d --to torch_dist --layout megatron --tp 2 --verify; silent; out '0 reset, 0 dropped; 63 of optimizer state'
present d/iter_0000003/metadata.json
rc 0 diff d $p; out '^84 identical$'
rc 1 diff d $p --objects; out '^92 identical, 1 only in A$' # which stores it as common.pt
rc 0 inspect d --common; out '"max_lr": 0.01'; out '"step": 3.0'; out '"iteration": 3'; out 'fully_reshardable'
grep -q '"objects"' h/ckpt.manifest.json || fail 'nothing in the manifest'
! grep -q '"objects"' d/iter_0000003/ckpt.manifest.json || fail 'still in the manifest'
# flat buckets: what belongs to them is part of the common state by then
rc 0 convert $m/optim_buckets_tp2 hb --to safetensors --layout hf; no_err 'dp_group_idx'
rc 0 convert hb b --to torch_dist --layout megatron --tp 2; rc 0 diff b $p; out '^84 identical$'
rc 0 inspect b --common; out '"step": 3.0'; out '"param_state_sharding_type": "fully_reshardable"'
# without the states, their steps and groups would mislead
rc 0 convert h w --optimizer drop; rc 0 convert w w.d --to torch_dist --layout megatron
err 'dropped: common_state/shard_0_1: the optimizer state it belongs to is gone'
rc 0 convert $p v --to safetensors --layout hf --optimizer drop; no_err 'kept:'
# plain DCP: every object comes back byte for byte
for k in dcp_fsdp2 dcp_2rank; do
    rc 0 convert $t/$k $k --to safetensors; err 'kept: (9|12) objects'
    rc 0 convert $k $k.d --to torch_dist --layout keep; no_err dropped; no_err kept
    rc 0 diff --objects $k.d $t/$k; no_out 'only in|object'
    rc 0 convert $k $k.pt; rc 0 convert $k.pt $k.e --to torch_dist; rc 0 diff --objects $k.e $t/$k; no_out 'only in|object'
done
# random states only into the mesh they are of
rc 0 convert $m/legacy_tp2 l --to safetensors --layout megatron
if grep -q 'rng_state' l/ckpt.manifest.json; then
    rc 0 convert l l2 --to torch_dist --tp 2; no_err 'rng_state'
    rc 0 convert l l1 --to torch_dist --tp 1; err 'dropped: rng_state.*: state of a rank of another mesh'
fi
# a manifest that was tampered with
sed 's/"common_state\/shard_0_1":"[^"]/"common_state\/shard_0_1":"*/' h/ckpt.manifest.json >x; cp x h/ckpt.manifest.json
rc 3 convert h y --to torch_dist --layout megatron; one_line; err "foreign.objects 'common_state/shard_0_1': expected base64"; absent y
# one that cannot be read: what it keeps is lost only by the user's word
head -c 3000 x >h/ckpt.manifest.json
rc 3 convert h y --to torch_dist --layout megatron; one_line; err 'h/ckpt.manifest.json: .*would be lost: --force converts without it'; absent y
rc 0 convert h y --to torch_dist --layout megatron --force; err 'h/ckpt.manifest.json: .*: ignored'
# a torch file: what is no tensor is named, however deep
rc 0 convert $t/torch_save_zip.pt z --to safetensors; err 'dropped: 1 non-tensor entry .meta.'
