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
