# The kinds of DCP directory and Megatron zarr through the commands; whole tensors are beside each.
t=$FIXTURES/torch
for k in dcp_safetensors_items mcore_flat_0_13_0 mcore_flat_0_15_0 mcore_flat_lost mcore_zarr dcp_hf_consolidated/sharded; do
    name=$(basename $k)
    want=$t/${k%/sharded}.expected.safetensors
    rc 0 inspect $t/$k
    rc 0 verify $t/$k
    rc 1 verify $t/$k --hash; out "no manifest to compare with"
    root=$(root_of)
    rc 0 convert $t/$k $name --to safetensors --allow-unknown --verify
    rc 0 diff $name $want; no_out 'differ'
    rc 0 verify $name --hash
    [ "$(root_of)" = "$root" ] || fail "$k: another root"
    rc 0 convert $t/$k $name.dist --to torch_dist --allow-unknown
    rc 0 diff $name.dist $want; no_out 'differ'
done
# The loss of mcore_data is said.
rc 0 inspect $t/mcore_flat_lost; err '6 flattened optimizer tensors without mcore_data'
# What zarr holds beside tensors goes along.
rc 0 inspect $t/mcore_zarr; out '^container +zarr$'; out '^iteration +30$'
rc 0 inspect mcore_zarr.dist --common; out '"hidden_size": 4'; out '"iteration": 30'
rc 4 inspect $t/dcp_rank_local; one_line; err 'rank-local metadata \(__0.metadata\)'
# FSDP2's {"model": ..., "optim": ...}: the names bind, the optimizer goes along.
rc 0 inspect $t/dcp_fsdp2; out '^layout +hf:llama$'; out '^container +torch_dist$'
rc 0 verify $t/dcp_fsdp2
rc 0 convert $t/dcp_fsdp2 llama --to safetensors --layout hf --verify; out '60 of optimizer state'
mkdir e; cp $t/dcp_fsdp2.expected.safetensors e/model.safetensors; cp $t/dcp_fsdp2/config.json e
rc 0 diff llama e; no_out 'differ'
rc 0 convert llama fsdp --to torch_dist --layout hf
rc 0 diff $t/dcp_fsdp2 fsdp; no_out 'differ'
# The outer "model." comes back on request.
rc 0 convert $t/dcp_fsdp2 outer --to torch_dist --layout keep --rename 'model.*=model.model.*' --rename 'lm_head.*=model.lm_head.*'
rc 0 inspect outer 'model.model.embed_tokens.weight'; out '^model.model.embed_tokens.weight'; rc 0 inspect outer; out '^optim.state.model.embed_tokens.weight.exp_avg '
# What Megatron-FSDP itself wrote: uneven chunks, fc1 in halves, names under its wrappers.
rc 0 inspect $t/megatron_fsdp; out '^layout +megatron:gpt$'; out 'linear_fc1.weight_v'; out '^iteration +1$'
rc 0 convert $t/megatron_fsdp zero --to safetensors --layout hf --verify; out 'root equals source'
rc 0 convert zero zero2 --to torch_dist --layout megatron --tp 2; rc 0 diff zero2 $t/megatron_fsdp; no_out 'only in'
# Megatron's fsdp_dtensor: the members of the state dict are objects of their own.
rc 0 inspect $t/dcp_megatron_fsdp --common; out '^iteration +12$'; out 'opt_param_scheduler.max_lr'
