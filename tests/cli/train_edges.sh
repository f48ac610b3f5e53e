# Training where something is odd: values that are no numbers, data and metrics that break off, options
# without effect, checkpoints of others that say less. What is wrong is named, what was trained is kept.
export OMP_NUM_THREADS=1
kimi=$FIXTURES/hf/kimi_linear_tiny gpt=$FIXTURES/mcore/optim_params_tp2
data=(--data "$FIXTURES/fla/corpus.txt" --seq-len 16 --batch 2 --threads 1)
seq 1 9000 | tr -dc 0-9 | tr 0-9 '\000-\011' >tokens.txt
small=(--data tokens.txt --threads 1)

# the router's correction bias is not trained: no state is missed
rc 0 train --resume "$kimi" "${data[@]}" --steps 1 --save own --save-format hdf5
rc 0 verify own --strict --quiet; silent
rc 0 inspect own --quiet; no_err 'no optimizer state'
# an iteration of a save root may be a directory or a file
rc 2 train --resume own "${data[@]}" --steps 3 --iteration 8; one_line
err "own: requested iteration 8: neither directory 'iter_0000008' nor file 'iter_0000008.h5' is there"
rc 0 train --resume own "${data[@]:0:2}" --steps 2 --iteration 1

# NaN: the parameter that holds it, and a source that holds it is no good checkpoint
cp -r "$kimi" bad; chmod -R u+w bad
rc 0 inspect bad 'model.norm.weight' --json
file=$(grep -oE '"file":"[^"]*"' $OUT | cut -d'"' -f4)
start=$(grep -aoE '"model.norm.weight":\{[^}]*\}' bad/$file | grep -oE 'offsets":\[[0-9]+' | grep -oE '[0-9]+$')
length=$(od -An -tu8 -N 8 bad/$file | tr -d ' ')
printf '\377\377\377\377\377\377\377\377' | dd of=bad/$file bs=1 seek=$((8 + length + start + 8)) conv=notrunc status=none
rc 1 train --resume bad "${data[@]}" --steps 2 --save nans
err 'warning: bad: tensor final_norm.weight holds NaN'
err 'step 1: tensor final_norm.weight: element [0-9]+ is nan; no checkpoint of this run is good: bad itself holds NaN in tensor final_norm.weight'
rc 1 train --resume "$kimi" "${data[@]}" --steps 4 --lr 1e300 --clip-grad 0 --save huge --save-every 1
err 'step 2: tensor .* is (nan|infinite); the newest checkpoint, huge/iter_0000001, holds it too'

# a token outside the vocabulary: the steps before it are saved
(head -c 100 tokens.txt; printf '\377'; head -c 100 tokens.txt) >broken.txt
rc 3 train --resume "$gpt" --reset-optimizer --data broken.txt --seq-len 8 --batch 2 --steps 99 --no-shuffle --save cut --threads 1
err 'step 7: broken.txt: token 100 is 255, expected 0 to less than [0-9]+; the last checkpoint is cut/iter_0000006'
rc 0 verify cut --hash --quiet
rc 3 train --resume "$gpt" --reset-optimizer --data broken.txt --seq-len 8 --batch 2 --steps 99 --no-shuffle --threads 1
err 'the last checkpoint is .*/optim_params_tp2$'

# metrics that cannot be written: said once, and at the end
if [ -c /dev/full ]; then
    rc 5 train --resume "$gpt" --reset-optimizer "${small[@]}" --seq-len 8 --batch 2 --steps 2 --save full --metrics /dev/full
    [ "$(grep -c 'warning: /dev/full: No space left on device' $ERR)" -eq 1 ] || fail "not one warning: $(cat $ERR)"
    err '^ckpt: train: /dev/full: metrics were lost'
    rc 0 verify full --hash --quiet
fi

# Megatron's schedule without a style is constant; an optimizer that steps a tied head once
rc 0 train --resume "$FIXTURES/mcore/mp_gpt_bf16" "${small[@]}" --seq-len 8 --steps 21
err 'mp_gpt_bf16: its learning-rate schedule has no style: constant at 0.001'
out 'lr 0.001,'
rc 0 train --resume "$FIXTURES/torch/dcp_fsdp2" "${small[@]}" --seq-len 8 --steps 3 --save tied
err 'head.weight repeats embed.weight and has no state: tied'; err "at step 1, .* with AdamW's state"
rc 0 train --resume tied "${small[@]}" --steps 4; no_err 'repeats'

# what a layout has no place for is carried when asked
fla=(--resume "$FIXTURES/fla/kda_trained" "${data[@]}" --steps 1 --save carried --save-format torch_dist:megatron)
rc 4 train "${fla[@]}"; err '--allow-unknown carries them through'
rc 0 train "${fla[@]}" --allow-unknown
rc 0 inspect carried 'blocks.0.kda.g_b.bias' --json; out '"name":"blocks.0.kda.g_b.bias"'

# positions that are too few
echo 1 2 3 >w.txt
rc 0 train --resume "$kimi" "${data[@]}" --steps 2 --windows w.txt; err 'warning: w.txt: 3 positions for 4 samples: they are taken again'
echo 5 >one.txt
rc 3 verify "$kimi" --forward --tokens one.txt; one_line; err 'one.txt: 1 token, none followed by another'

# options without effect
for o in '--momentum 0.9' '--nesterov' '--muon-steps 3' '--muon-scale spectral' '--muon-extra 1' '--wsd-style cosine' \
    '--lr-wsd 2' '--init-lr 1e-5' '--min-lr 1e-5' '--mtp-coef 0.2' '--approximate' '--peak-tflops 1' '--no-shuffle --windows w.txt'; do
    rc 2 train --resume "$kimi" "${data[@]}" --steps 1 $o; one_line; err "${o%% *} has no effect: "
done
rc 2 train --resume "$gpt" --reset-optimizer "${small[@]}" --seq-len 8 --batch 2 --steps 1 --aux-coef 0.1; err '--aux-coef has no effect: the model has no routers'
rc 2 train --init "$kimi" "${data[@]}" --steps 1 --reset-optimizer; err '--reset-optimizer has no effect: --init begins anew'
# values of the run that is resumed are not the command line's
rc 0 train --resume "$kimi" "${data[@]}" --steps 1 --optimizer muon --momentum 0.8 --save muon
rc 0 train --resume muon "${data[@]:0:2}" --steps 2 --momentum 0.8

# several formats in one directory: each is a root of its own, and is named
rc 0 train --resume "$kimi" "${data[@]}" --steps 1 --save several --save-format hdf5 --save-format torch_dist
for c in "train --resume several ${data[*]} --steps 2" 'verify several' 'inspect several' 'convert several o'; do
    rc 2 $c; one_line; err 'several: saves of 2 formats, a directory each: choose one of several/hdf5, several/torch_dist$'
done
rc 0 train --resume several/hdf5 "${data[@]:0:2}" --steps 2
