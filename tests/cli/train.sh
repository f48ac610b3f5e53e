# Training follows PyTorch's own 20 steps from the same weights and batches (TF32 in its kernels), and
# says what it does; options that make no sense are refused.
export OMP_NUM_THREADS=1
T=$FIXTURES/fla/kda_trained.trajectory.json
sed 's/.*"batch_starts": \[\[\(.*\)\]\], "loss_gradnorm".*/\1/; s/\], \[/\n/g; s/,//g' "$T" >starts.txt
sed 's/.*"loss_gradnorm": \[\[\(.*\)\]\], "optimizer".*/\1/; s/\], \[/\n/g; s/,//g' "$T" >want.txt
echo >>want.txt
[ "$(wc -l <want.txt)" -eq 20 ] || fail "trajectory of $(wc -l <want.txt) steps"
corpus=(--data "$FIXTURES/fla/corpus.txt" --threads 1)
rc 0 train --resume "$FIXTURES/fla/kda_trained" "${corpus[@]}" --windows starts.txt --labels inside \
    --seq-len 256 --batch 4 --micro-batch 2 --steps 20 --lr 1e-3 --beta2 0.95 --weight-decay 0.1 --decay-all --metrics m.jsonl
err 'weights alone; AdamW starts anew'
out '^step 20: loss 0\.6[0-9]+, gradient norm'
out '^20 steps to step 20: loss .* 20480 tokens in all'
grep '"loss"' m.jsonl | sed 's/.*"loss":\([^,]*\),"grad_norm":\([^,]*\),.*/\1 \2/' >got.txt
paste -d' ' got.txt want.txt | awk 'function abs(x) { return x < 0 ? -x : x }
    { n++; if (!(abs($1 - $3) <= 2e-3)) { print "step " n ": loss " $1 ", peer " $3; bad = 1 }
      if (!(abs($2 - $4) <= 0.02 * $4)) { print "step " n ": norm " $2 ", peer " $4; bad = 1 } }
    END { exit bad || n != 20 }' >far.txt || fail "$(cat far.txt)"

small=("${corpus[@]}" --seq-len 16 --batch 2)
from=(--resume "$FIXTURES/hf/kimi_linear_tiny")
# accumulation is the sum of the same gradients; recomputation gives the same bits
rc 0 train "${from[@]}" "${small[@]}" --steps 3 --json; a=$(grep -oE '"loss":[0-9.e-]+' $OUT)
rc 0 train "${from[@]}" "${small[@]}" --steps 3 --json --recompute
[ "$a" = "$(grep -oE '"loss":[0-9.e-]+' $OUT)" ] || fail "recomputation changed the loss"
rc 0 train "${from[@]}" "${small[@]}" --steps 3 --json --micro-batch 1
awk -v a="${a#*:}" -v b="$(grep -oE '"loss":[0-9.e-]+' $OUT | cut -d: -f2)" 'BEGIN { d = a - b; exit !(d * d < 1e-10) }' ||
    fail "accumulated: $(cat $OUT), whole: $a"
out '"step":3,"first_step":0,"samples":6,"tokens":96'

# what makes no sense
rc 2 train; one_line; err 'choose --resume PATH'
rc 2 train "${from[@]}" --steps 3; one_line; err '--data FILE is missing'
rc 2 train "${from[@]}" "${small[@]}"; one_line; err '--steps N is missing'
rc 2 train "${from[@]}" "${small[@]}" --steps 3 --keep 2; one_line; err '--keep without --save DIR'
rc 2 train "${from[@]}" "${small[@]}" --steps 3 --micro-batch 4; one_line; err 'batch of 2 is not divisible by micro-batch 4'
rc 2 train "${from[@]}" "${small[@]}" --steps 3 --save s --save-format floppy; one_line; err "'floppy': expected safetensors"
rc 2 train "${from[@]}" "${small[@]}" --steps 3 --save s --save-format torch_dist:left; err "'left' is neither a layout"
rc 4 train "${from[@]}" "${small[@]}" --steps 3 --save s --save-format mp_rank; one_line; err 'optimizer state has no place'
rc 2 train "${from[@]}" "${small[@]}" --steps 3 --save s --save-format safetensors:tp=2; one_line; err 'is not sharded'
rc 2 train "${from[@]}" "${small[@]}" --steps 3 --lr 1e-4 --min-lr 1; one_line
rc 5 train "${from[@]}" --data nothing.txt --steps 3; one_line; err 'nothing.txt'
rc 2 train "${from[@]}" --data nothing.bin --steps 3; one_line; err 'say whether its tokens are u16 or u32'
rc 5 train --resume nothing --data starts.txt --steps 3; one_line; err 'nothing: No such file'
rc 3 train "${from[@]}" "${small[@]}" --windows want.txt --steps 3; one_line; err "want.txt: position 1: found '.68"
# a learning rate that no model survives: nothing is saved over what was
rc 1 train "${from[@]}" "${small[@]}" --steps 40 --lr 1e30 --clip-grad 0 --save n --save-every 1
err 'step 2: block [0-9]+ \(.\): output is not finite, first of token [0-9]+, channel [0-9]+ \((nan|infinite)\); the last good checkpoint is n/iter_0000001'
rc 0 verify n --hash
