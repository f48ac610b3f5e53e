# Whatever happens while training saves: the newest checkpoint that is there is whole, and goes on. The
# model is Megatron-Core's own small GPT, bf16 with f32 masters and moments.
export OMP_NUM_THREADS=1
RANDOM=1
base=$FIXTURES/mcore/optim_params_tp2
seq 1 20000 | tr -dc 0-9 | tr 0-9 '\000-\011' >tokens.txt
data=(--data tokens.txt --threads 1)
first=(--resume "$base" "${data[@]}" --seq-len 8 --batch 2 --lr 1e-3)
root() { rc 0 verify "$1" --hash; root_of; }

# kill -9 at random times, a hundred saves
saves=0 rounds=0
rc 0 train "${first[@]}" --steps 4 --save d --save-every 1 --keep 3
while [ $saves -lt 100 ] && [ $rounds -lt 100 ]; do
    rounds=$((rounds + 1))
    (exec "$CKPT" train --resume d "${data[@]}" --steps 1000000 --save d --save-every 1 --keep 3 >/dev/null 2>killed.txt) &
    pid=$!
    more=$((saves + RANDOM % 16))
    for _ in $(seq 400); do
        [ "$(grep -c '"event":"save"' d/metrics.jsonl)" -le $more ] || break
        sleep 0.02
    done
    sleep 0.0$((RANDOM % 10))
    kill -9 $pid 2>/dev/null || fail "round $rounds ended by itself: $(cat killed.txt)"
    wait $pid 2>/dev/null
    rc 0 verify d --hash
    saves=$(grep -c '"event":"save"' d/metrics.jsonl)
done
[ "$saves" -ge 100 ] || fail "only $saves saves in $rounds rounds"
at=$(cat d/latest_checkpointed_iteration.txt)
rc 0 train --resume d "${data[@]}" --steps $((at + 2)) --save d --keep 3
[ "$(ls -d d/iter_* | wc -l)" -le 3 ] || fail "kept: $(ls d)"
[ -z "$(ls -A d | grep -v '^\.ckpt-train.lock$' | grep '^\.')" ] || fail "left behind: $(ls -A d)"
rc 0 train "${first[@]}" --steps $((at + 2)) --save once
[ "$(root d)" = "$(root once)" ] || fail "after $rounds kills: another root than in one piece"

# no room: the run goes on, says so, and what was there stays
rc 0 train "${first[@]}" --steps 5 --save full; was=$(root full)
(ulimit -f 20; exec "$CKPT" train --resume full "${data[@]}" --steps 8 --save full --save-every 2) >$OUT 2>$ERR; got=$?
[ $got -eq 5 ] || fail "no room: exit $got"
err 'warning: saving step 6 failed: .*too large; the newest checkpoint is full'; err '^ckpt: train: saving step 8 failed'
[ "$(grep -c 'saving step' $ERR)" -eq 2 ] || fail "not once a save: $(cat $ERR)"; err 'saving step 8 failed: .*; the newest checkpoint is full'
grep -q '"event":"save_failed","step":6' full/metrics.jsonl || fail "no event: $(cat full/metrics.jsonl)"
[ "$(root full)" = "$was" ] || fail "a failed save changed the checkpoint"
rc 0 train --resume full "${data[@]}" --steps 8 --save full
rc 0 train "${first[@]}" --steps 8 --save whole
[ "$(root full)" = "$(root whole)" ] || fail "after a failed save: another root"

# of several formats one that fails is told, and is the end of the run, though the others are in place
mkdir one; ln -s /proc one/hdf5
rc 5 train "${first[@]}" --steps 5 --save one --force --save-format hdf5 --save-format torch_dist
[ "$(grep -c 'saving step 5 failed: one/hdf5' $ERR)" -eq 1 ] || fail "not told once: $(cat $ERR)"
present one/torch_dist/iter_0000005

# SIGTERM while saves are being written: none of them is given up
"$CKPT" train "${first[@]}" --steps 1000000 --save each --save-every 1 --keep 2 --save-format hdf5 --save-format torch_dist --save-format safetensors >$OUT 2>$ERR &
pid=$!; until_there each/safetensors/latest_checkpointed_iteration.txt; kill -TERM $pid; wait $pid || fail "SIGTERM: $(cat $ERR)"
no_err 'failed|warning'; err 'interrupted after step [0-9]+; saved each/'
same each/hdf5/latest_checkpointed_iteration.txt each/safetensors/latest_checkpointed_iteration.txt
! grep -q save_failed each/metrics.jsonl || fail "given up: $(grep save_failed each/metrics.jsonl)"

# SIGTERM: saved, and told how to go on
"$CKPT" train "${first[@]}" --steps 1000000 --save term >$OUT 2>$ERR &
pid=$!
for _ in $(seq 100); do if [ -s term/metrics.jsonl ] && [ "$(wc -l <term/metrics.jsonl)" -gt 3 ]; then break; fi; sleep 0.05; done
# one save directory serves one run
rc 2 train "${first[@]}" --steps 5 --save term; one_line; err 'term: another run is saving here'
"$CKPT" train "${first[@]}" --steps 5 --save term >/dev/null 2>&1 && fail 'a second run saved'
kill -TERM $pid; wait $pid; got=$?
cp $ERR stopped.txt
[ $got -eq 0 ] || fail "SIGTERM: exit $got"
[ -e term/latest_checkpointed_iteration.txt ] || fail 'SIGTERM saved nothing'
rc 0 verify term --hash
at=$(cat term/latest_checkpointed_iteration.txt)
rc 0 train --resume term "${data[@]}" --steps $((at + 1)) --save term
rc 0 train "${first[@]}" --steps $((at + 1)) --save term2
[ "$(root term)" = "$(root term2)" ] || fail "after SIGTERM at $at: another root"
"$CKPT" train "${first[@]}" --steps 1000000 >$OUT 2>$ERR & pid=$!; sleep 0.5; kill -TERM $pid; wait $pid; got=$?
[ $got -eq 130 ] || fail "nothing to save: exit $got"
