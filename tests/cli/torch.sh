# PyTorch files and plain DCP: converted as they are, every tensor kept.
t=$FIXTURES/torch
rc 0 convert $t/dcp_2rank a.safetensors; rc 0 diff a.safetensors $t/dcp_2rank
rc 0 diff $t/dcp_full_expected.safetensors $t/dcp_2rank --include 'w.*'
rc 0 convert $t/dcp_2rank b; rc 0 diff b $t/dcp_2rank --objects; rc 0 verify b --hash
rc 0 diff $t/dcp_full_expected.pt $t/dcp_full_expected.safetensors
rc 0 convert $t/dcp_full_expected.pt c.safetensors; rc 0 diff c.safetensors $t/dcp_full_expected.safetensors
rc 0 convert $t/dcp_full_expected.pt d; rc 0 diff d $t/dcp_full_expected.safetensors; present d/pytorch_model.bin
rc 0 verify $t/state_dict.bin
rc 0 convert $t/torch_save_zip.pt z.safetensors; out 'root differs: 2 tensors left out$'
err "dropped: 'q' .quantised, not decoded.$"; err "dropped: 'sparse' .sparse, not decoded.$"
rc 0 convert $t/torch_save_zip.pt zj.safetensors --json; out "\"dropped\":.*'q' .quantised, not decoded"; out '"source_root":null'
# the configuration is not lost, nor are the other objects; without the optimizer they are counted
rc 0 convert $FIXTURES/mcore/legacy_tp1 h --to safetensors; err 'kept: [0-9]+ objects in the manifest, for the way back: common_state'; no_err 'dropped'
rc 0 convert $FIXTURES/mcore/optim_params_tp2 hx --to safetensors --optimizer drop; err 'dropped: [0-9]+ _extra_state objects: Transformer Engine'
