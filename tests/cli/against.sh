# verify --against and diff say the same, whichever side is which.
both() { # RC A B
    rc $1 verify $2 --against $3; rc $1 verify $3 --against $2; rc $1 diff $2 $3; rc $1 diff $3 $2
}
# F8 blocks and their values
f=$FIXTURES/hf/deepseek_fp8_tiny
rc 0 convert $f keep --to torch_dist --layout keep
rc 0 convert $f plain --dtype bf16
both 0 $f keep; both 0 $f plain; both 0 keep plain; both 0 keep keep
rc 0 verify $f --against keep/ckpt.manifest.json; rc 0 verify keep --against keep/ckpt.manifest.json
rc 0 verify keep --against plain/ckpt.manifest.json; out 'F8 blocks as they are stored'
rc 4 verify plain --against keep/ckpt.manifest.json; one_line; err 'compare with the checkpoint itself'
rc 0 verify keep --hash --against plain; out 'all digests match the manifest, identical to plain'
flip plain/model.safetensors $(($(stat -c %s plain/model.safetensors) - 3))
both 1 keep plain; both 1 $f plain
# what fits two layouts is read as the other side is, by every command, or not at all
t=$FIXTURES/torch e=$FIXTURES/torch/dcp_fsdp2.expected.safetensors
rc 4 verify $e; one_line; err 'both fit'
rc 4 convert $e x; one_line; err 'both fit'; absent x
rc 0 inspect $e; out '^layout +none recognised'; err 'both fit: names are as stored'
rc 0 diff $t/dcp_fsdp2 $e; out "B states no configuration: read as A's, hf:llama"; out '81 identical'; no_out 'differs'
rc 0 diff $e $t/dcp_fsdp2; out '81 identical'
rc 0 verify $t/dcp_fsdp2 --against $e
# the other side is looked at before the long part
rc 5 verify $f --hash --against nowhere; one_line; err 'nowhere: No such file'; [ ! -s $OUT ] || fail "output: $(cat $OUT)"
rc 5 verify $FIXTURES/hf/llama3_tiny --forward --against nowhere; one_line; [ ! -s $OUT ] || fail "output: $(cat $OUT)"
printf junk >junk; rc 3 verify $f --against junk; one_line; err 'junk'
