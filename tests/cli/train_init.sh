# A new model from a configuration: the tensors that real files of it have, values that depend on the
# seed alone, and training that goes on from it.
export OMP_NUM_THREADS=1
data=(--data "$FIXTURES/fla/corpus.txt" --seq-len 16 --batch 2 --quiet)
# with no step: the model itself, tensor for tensor that of the fixture, with other values
for m in fla/kda_trained hf/kimi_linear_tiny hf/deepseek_mtp_tiny hf/qwen3_next_tiny hf/llama_tiny_tied \
    hf/qwen2_tiny hf/qwen3_moe_joint_tiny hf/bailing_hybrid_tiny hf/arcee_kda_tiny; do
    name=${m#*/}
    rc 0 train --init "$FIXTURES/$m" --steps 0 --save "$name" --threads 1 --quiet
    rc 1 diff "$name" "$FIXTURES/$m" --json
    grep -oE '"name":"[^"]*","kind":"[^"]*"' $OUT | grep -vE '"(value|dtype)"' >other.txt && fail "$m: $(head -3 other.txt)"
    rc 0 verify "$name" --hash --quiet
done
# numbers in known places: norms 1, no NaN, a spread of initializer_range
rc 0 inspect kimi_linear_tiny '*input_layernorm.weight' --stats --json; out '"min":1,"max":1,"mean":1,"std":0,"nan":0'
# the seed decides, threads do not
rc 0 train --init "$FIXTURES/hf/kimi_linear_tiny/config.json" --steps 0 --save again --threads 3 --quiet
rc 0 diff again kimi_linear_tiny
rc 0 train --init "$FIXTURES/hf/kimi_linear_tiny" --steps 0 --save seed --seed 7 --quiet
rc 1 diff seed kimi_linear_tiny --limit 3
# into another container and layout, cut; the values are the same
rc 0 train --init "$FIXTURES/hf/kimi_linear_tiny" --steps 0 --save cut --save-format torch_dist:megatron:tp=2 --quiet
rc 0 diff cut kimi_linear_tiny
# training goes on from it: 3 steps are 1 and 2
rc 0 train --init "$FIXTURES/hf/kimi_linear_tiny" "${data[@]}" --steps 3 --save whole
rc 0 train --init "$FIXTURES/hf/kimi_linear_tiny" "${data[@]:0:6}" --steps 1
err 'kimi_linear_tiny: a new model of [0-9]{6} parameters, seed 1234; AdamW'
rc 0 train --init "$FIXTURES/hf/kimi_linear_tiny" "${data[@]}" --steps 1 --save half --lr-decay 3
rc 0 train --resume half "${data[@]}" --steps 3 --save half
rc 0 diff whole half
# refused
rc 2 train --init "$FIXTURES/hf/kimi_linear_tiny" --resume half --steps 3; one_line; err 'choose --resume PATH'
rc 5 train --init nothing --steps 0 --save x; one_line; err 'nothing: No such file'
mkdir empty
rc 5 train --init empty --steps 0 --save x; one_line; err 'empty/config.json: No such file'
echo '[1]' >list.json
rc 3 train --init list.json --steps 0 --save x; one_line; err 'list.json: .*not a JSON object'
echo '{"model_type":"bert"}' >bert.json
rc 4 train --init bert.json --steps 0 --save x; one_line; err "no layout is known for a model of type 'bert'"
sed 's/"hidden_size"/"hidden"/' "$FIXTURES/hf/llama_tiny_tied/config.json" >cut.json
rc 3 train --init cut.json --steps 0 --save x; one_line; err "cut.json: .*hidden_size"
sed -E 's/"vocab_size": [0-9]+/"vocab_size": 9000000000000000/' "$FIXTURES/hf/llama_tiny_tied/config.json" >huge.json
"$CKPT" train --init huge.json --steps 0 --save x >$OUT 2>$ERR && fail "a model of 2^60 parameters"
one_line
absent x
