# N steps = k steps + save + kill + resume + (N - k) steps, bit for bit: AdamW and Muon, every container
# that training saves in, KDA fused and low-rank, MLA, MoE with balanced routers; and through conversions.
export OMP_NUM_THREADS=1
data=(--data "$FIXTURES/fla/corpus.txt" --threads 1)
first=("${data[@]}" --seq-len 24 --batch 2 --lr 2e-3 --lr-warmup 3 --lr-style cosine --lr-decay 40)
root() { rc 0 verify "$1" --hash; root_of; }

# killed during the step after one that was saved: that checkpoint is whole, and 23 more steps are the same
new=(--reset-optimizer --resume "$FIXTURES/mcore/legacy_tp1" "${first[@]}")
(exec "$CKPT" train "${new[@]}" --steps 100000 --save cut --save-every 17 --keep 1 >/dev/null 2>&1) &
pid=$!
for _ in $(seq 600); do
    if [ -e cut/latest_checkpointed_iteration.txt ] || ! kill -0 $pid 2>/dev/null; then break; fi
    sleep 0.02
done
kill -9 $pid
wait $pid 2>/dev/null
at=$(cat cut/latest_checkpointed_iteration.txt)
rc 0 verify cut --hash
rc 0 train --resume cut "${data[@]}" --steps $((at + 23)) --save cut
err "at step $at, $((2 * at)) samples, with AdamW's state"
rc 0 train "${new[@]}" --steps $((at + 23)) --save whole --save-format safetensors
[ "$(root cut)" = "$(root whole)" ] || fail "resumed after a kill at $at: another root"

# every container; the second half saves in the next one
for o in adamw muon; do
    for m in fla/kda_trained mcore/lowrank_fg_tp2 hf/kimi_linear_tiny; do
        rm -rf w; rc 0 train --reset-optimizer --resume "$FIXTURES/$m" "${first[@]}" --optimizer $o --steps 5 --save w
        want=$(root w)
        rm -rf h; rc 0 train --reset-optimizer --resume "$FIXTURES/$m" "${first[@]}" --optimizer $o --steps 2 --save h \
            --save-format safetensors --save-format torch_dist --save-format torch --save-format hdf5
        for f in safetensors torch_dist torch hdf5; do
            rm -rf r; rc 0 train --resume h/$f "${data[@]}" --steps 5 --save r
            [ "$(root r)" = "$want" ] || fail "$m, $o, $f: another root"
        done
    done
done

# fused KDA -> a tensor a section -> fused at TP 2, in the middle: as if it had not been
rc 0 train "${new[@]}" --steps 4 --save w4 --save-format torch_dist
want=$(root w4)
rc 0 train "${new[@]}" --steps 2 --save w2 --save-format torch_dist
rc 0 convert w2 split --to safetensors --layout keep --verify
rc 0 convert split legacy --to torch_dist --layout megatron --tp 2
rc 0 train --resume legacy "${data[@]}" --steps 4 --save w2b
[ "$(root w2b)" = "$want" ] || fail "through conversions: another root"

# no step, no change
rc 0 train --resume w2 --steps 0 --save same
rc 0 diff w2 same; out ' identical'
rc 0 train --resume "$FIXTURES/hf/kimi_linear_tiny" --steps 0 --save plain
rc 0 diff "$FIXTURES/hf/kimi_linear_tiny" plain; out ' identical'

# other options are named
rc 2 train --resume w2 "${data[@]}" --steps 4 --lr 1e-3 --seed 7; one_line
err '--seed 7 was 1234, --lr 0.001 was 0.002; --change goes on with these'
rc 0 train --resume w2 "${data[@]}" --steps 4 --lr 1e-3 --change; err 'changed: --lr 0.001 was 0.002'
rc 2 train --resume w2 --data "$FIXTURES/fla/kda_trained.trajectory.json" --steps 4; one_line; err 'data is not what it was'
rc 4 train --resume w2 "${data[@]}" --steps 4 --optimizer muon --change; err "Adam's moments.* Muon needs momentum"
rc 0 train --resume w2 "${data[@]}" --steps 1 --optimizer muon --reset-optimizer; err 'weights alone; Muon starts anew'
# without its optimizer it is a model like any other
rc 0 convert w2 bare --to safetensors --layout keep --optimizer drop
rc 0 train --resume bare "${data[@]}" --seq-len 24 --batch 2 --steps 1 --reset-optimizer; err 'weights alone; AdamW starts anew'
! grep -q '"training"' bare/ckpt.manifest.json || fail 'a training state without an optimizer'
