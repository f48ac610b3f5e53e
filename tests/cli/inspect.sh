# inspect: what it recognises, its views, and its options.
k=$FIXTURES/hf/kimi_linear_tiny
rc 0 inspect $k; silent
out '^container +safetensors'; out '^layout +hf:kimi_linear'; out '^family +hybrid'
out '^parameters +[0-9,]+'; out '^lm_head.weight +F32 +\[320, 64\] +1 '; out '^kda +[0-9]+'
out '"kda_heads": *2'
rc 0 inspect $k 'lm_head.*'; out '^lm_head'; no_out '^model\.'
rc 0 inspect $k 'blocks.0.kda.q.weight'; out 'self_attn.q_proj.weight'; no_out 'k_proj'
rc 0 inspect $k 'nothing*'; out '0 stored of 151'; one_line; err "'nothing\*' matches no tensor"
rc 0 inspect $k 'nothing*' --json; out '"warnings":\[.*matches no tensor"'; out '"iteration":null'
rc 0 inspect $k --verbose 'lm_head*'; out '^  = head.weight'
rc 0 inspect $k --tree; out '^model  \('; out '^      input_layernorm|^    0  \('
rc 0 inspect $k 'lm_head.weight' --stats; out '^lm_head.weight = head.weight +-[0-9.]+ +[0-9.]+'
rc 0 inspect $k 'lm_head.weight' --head 3; out '^lm_head.weight = head.weight: -?[0-9.e-]+ -?[0-9.e-]+ -?[0-9.e-]+$'
rc 0 inspect $k --quiet; [ ! -s $OUT ] || fail 'quiet is not'
rc 0 inspect $k --color always; out $'\033\\[1m'
rc 0 inspect $k --color never; no_out $'\033'
rc 0 inspect $k; no_out $'\033'

m=$FIXTURES/mcore/legacy_tp2
rc 0 inspect $m --common
out '^layout +megatron:hybrid'; out '^mesh +tp 2'; out '^iteration +100'; out '^common state'
out 'kda=fused'; out 'word_embeddings.weight +F32 +\[320, 64\] +2 '
rc 0 inspect $m/iter_0000100; out '^iteration +100'
rc 0 inspect $m --iteration 100
rc 5 inspect nowhere; one_line; err '^ckpt: inspect: nowhere: No such file'
rc 0 inspect $FIXTURES/torch/dcp_2rank --common; out 'meta.str .*"hello"'; out 'param_groups.0.lr .*0.001'
for f in torch_save_zip.pt torch_save_legacy.pt torch_save_proto4.pt state_dict.bin; do
    rc 0 inspect $FIXTURES/torch/$f --stats --head 2
done
for f in dcp_2rank dcp_hf_sharded; do rc 0 inspect $FIXTURES/torch/$f --stats --head 2; done
"$CKPT" inspect $k >/dev/full 2>$ERR; [ $? -eq 5 ] || fail 'a full stdout is not an error'
err 'standard output: No space left'
for args in "inspect $k --json" 'inspect --help' --help --version help 'help diff'; do
    "$CKPT" $args >/dev/full 2>$ERR; [ $? -eq 5 ] || fail "$args >/dev/full is not an error"
    one_line; err 'standard output: No space left on device$'
done
# a part of a torch_dist checkpoint is not one
for f in .metadata __0_0.distcp; do rc 4 inspect $m/iter_0000100/$f; one_line; err "open its directory, $m/iter_0000100/$"; done

# The operation count of a training step.
rc 0 inspect $FIXTURES/mcore/legacy_tp2 --flops 128; out "^128 tokens: .* operations forward"
rc 0 inspect $FIXTURES/mcore/legacy_tp2 --flops 128 --json; out "flops_step"
rc 4 inspect $FIXTURES/torch/dcp_full_expected.safetensors --flops 8; one_line; err "no known layout"
