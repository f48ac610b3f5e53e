# Training on ranks that the program starts itself (--launch): every kind of parallelism follows one
# process, equals the run under mpirun bit for bit, and a rank that dies ends the run with a clear word.
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

kimi=$FIXTURES/hf/kimi_linear_tiny
run=(--data "$FIXTURES/fla/corpus.txt" --seq-len 16 --batch 4 --lr 1e-3 --threads 1)
rc 0 train --resume "$kimi" "${run[@]}" --steps 6 --metrics one.jsonl
rc 0 train --resume "$kimi" "${run[@]}" --steps 6 --launch 4 --tp 2 --dp 2 --metrics tp2dp2.jsonl --save four --save-every 3
close_to tp2dp2.jsonl one.jsonl 1e-5
[ "$(grep -c '^step 6:' $OUT)" -eq 1 ] || fail "not one rank's words: $(cat $OUT)"
rc 0 verify four --hash
# Resumed at the same mesh: the same bits; at others: close.
rc 0 train --resume four --iteration 3 "${run[@]}" --steps 6 --launch 4 --tp 2 --dp 2 --save again
same four/iter_0000006/model.safetensors again/iter_0000006/model.safetensors
rc 0 train --resume four --iteration 3 "${run[@]}" --steps 6 --launch 2 --cp 2 --cp-mode chunks --metrics tail.jsonl
losses one.jsonl | tail -n 3 | sed 's/.*/"loss":&,/' >want.jsonl
close_to tail.jsonl want.jsonl 1e-5
rc 0 train --resume "$kimi" "${run[@]}" --steps 6 --launch 2 --ep 2 --micro-batch 1 --metrics ep2.jsonl
close_to ep2.jsonl one.jsonl 1e-5
rc 0 train --resume "$kimi" "${run[@]}" --steps 6 --launch 2 --cp 2 --metrics cp2.jsonl
close_to cp2.jsonl one.jsonl 1e-5
if command -v mpirun >/dev/null && [ -e "$(dirname "$CKPT")/libckpt_mpi.so" ] && ! sanitized asan && ! sanitized tsan; then
    mpirun --oversubscribe --bind-to none -np 4 "$CKPT" train --resume "$kimi" "${run[@]}" --steps 6 --tp 2 --dp 2 --save mpi >$OUT 2>$ERR ||
        fail "mpirun: $(cat $ERR)"
    same four/iter_0000006/model.safetensors mpi/iter_0000006/model.safetensors
    mpirun --oversubscribe --bind-to none -np 2 "$CKPT" train --resume "$kimi" "${run[@]}" --steps 6 --launch 2 >$OUT 2>$ERR
    [ $? -eq 2 ] || fail "--launch under mpirun"
    err 'mpirun has started ranks already'
fi

# Errors are one line, whichever rank has them.
rc 2 train --resume "$kimi" "${run[@]}" --steps 2 --launch 2 --tp 2 --cp 2; one_line
err 'tp 2 x cp 2 x dp 1 need 4 ranks, there are 2; start them with mpirun -np 4 or --launch 4'
rc 2 train --resume "$kimi" "${run[@]}" --steps 2 --launch 3 --tp 3; one_line; err '2 heads of linear attention cannot be cut into 3 parts'
rc 2 train --resume "$kimi" "${run[@]}" --steps 2 --launch 65; one_line; err '--launch'
rc 2 train --resume "$kimi" "${run[@]}" --steps 2 --launch 2 --dp 4000; one_line; err 'need 4000 ranks, there are 2; start them with mpirun -np 4000$'
rc 2 train --resume "$kimi" "${run[@]}" --steps 2 --launch 8 --dp 8; one_line; err 'not divisible by micro-batch [0-9]+ on each of 8 data-parallel ranks: expected a multiple of [0-9]+$'
(seq 1 99 | tr -dc 0-9 | tr 0-9 '\000-\011'; printf '\377'; seq 1 99 | tr -dc 0-9 | tr 0-9 '\000-\011') >broken.txt
rc 3 train --resume "$FIXTURES/mcore/optim_params_tp2" --reset-optimizer --data broken.txt --seq-len 8 --batch 2 \
    --steps 99 --no-shuffle --threads 1 --launch 2 --save broken
err 'token 189 is 255'; err 'the last checkpoint is broken/iter_0000011'
rc 0 train --resume "$kimi" "${run[@]}" --steps 1 --launch 2 --json
[ "$(grep -c '"command"' $OUT)" -eq 1 ] || fail "not one document: $(cat $OUT)"

# Ranks divide the check of what is resumed: a flipped bit anywhere is found, and told as by one process.
size=$(stat -c %s four/iter_0000006/model.safetensors)
for part in 2 5 8; do
    rm -rf bad && cp -r four bad
    flip bad/iter_0000006/model.safetensors $((size * part / 10))
    rc 1 train --resume bad "${run[@]}" --steps 7
    cp $ERR want.txt
    rc 1 train --resume bad "${run[@]}" --steps 7 --launch 3 --batch 3 --quiet; one_line
    same $ERR want.txt
    err 'damaged: model.safetensors: tensor .* is bad/iter_0000003'
done
rc 0 train --resume bad "${run[@]}" --steps 4 --launch 2 --fallback; err 'falling back to bad/iter_0000003'

# SIGINT to the program: every rank stops after the same step, and the run is saved.
"$CKPT" train --resume "$kimi" "${run[@]}" --steps 100000 --launch 2 --tp 2 --save int --save-every 3 >$OUT 2>$ERR &
job=$!
until_there int/latest_checkpointed_iteration.txt
kill -INT $job
wait $job || fail "SIGINT: $(cat $ERR)"
err 'interrupted after step [0-9]+; saved int/iter_[0-9]+; go on with'
rc 0 verify int --hash

# Under nohup a hangup stops nobody; names are printed without what would move the terminal.
(trap '' HUP; exec "$CKPT" train --resume "$kimi" "${run[@]}" --steps 12 --launch 2 --save "$(printf 'hup\033[31m')" --metrics hup.jsonl >$OUT 2>$ERR) &
job=$!
until_there hup.jsonl
kill -HUP $job
wait $job || fail "a hangup under nohup: $(cat $ERR)"
out 'saved hup\\x1b\[31m/iter_0000012'

# Ranks write together what they keep: the bytes that one process writes, in whatever container and mesh; rank 1
# has files of its own, and what it cannot write is told by name.
moved=(--resume four/iter_0000006 "${run[@]}" --steps 6 --save-format torch_dist:megatron:tp=2:ep=2 --save-format safetensors)
rc 0 train "${moved[@]}" --save alone
for n in "--tp 2" "--ep 2" "--cp 2" "--launch 4 --tp 2 --dp 2"; do
    rm -rf shared
    # shellcheck disable=SC2086
    rc 0 train "${moved[@]}" --micro-batch 1 --launch 2 $n --change --save shared
    for f in torch_dist/iter_0000006/__{0,1}_0.distcp safetensors/iter_0000006/model.safetensors; do
        same "alone/$f" "shared/$f"
    done
done
if command -v prlimit >/dev/null; then
    "$CKPT" train --resume "$kimi" "${run[@]}" --steps 100000 --launch 2 --tp 2 --save full --save-every 20 --save-format torch_dist:megatron:tp=2 >$OUT 2>$ERR &
    job=$!
    until_there full/latest_checkpointed_iteration.txt
    pids=($(cat /proc/$job/task/$job/children))
    prlimit --pid "${pids[1]}" --fsize=1000
    kill -INT $job
    wait $job
    got=$?
    [ $got -eq 5 ] || fail "exit $got with a full disk on rank 1: $(cat $ERR)"
    err 'saving step [0-9]+ failed: full/iter_[0-9]+: rank 1 of 2: full/[^ ]*/__1_0.distcp: .*File too large'
    [ -z "$(grep -oE 'saving step [0-9]+ failed' $ERR | sort | uniq -d)" ] || fail "told twice: $(cat $ERR)"
    rc 0 verify full --hash
fi
# The memory that ranks share counts as a file: the limit is named, and what to do.
(ulimit -f 2000; exec "$CKPT" train --resume "$kimi" "${run[@]}" --steps 2 --launch 2 --save limit) >$OUT 2>$ERR; got=$?
[ $got -eq 5 ] || fail "ulimit -f: exit $got"
err 'memory of [0-9]+ bytes that ranks share for a snapshot is more than a file may have here, 2048000 bytes \(ulimit -f\): raise that limit'

# A rank that is killed, rank 0 too: the others say so at once, what is saved stays.
for victim in 0 1 2; do
    "$CKPT" train --resume "$kimi" "${run[@]}" --steps 100000 --launch 3 --save dead$victim --save-every 2 --batch 3 >$OUT 2>$ERR &
    job=$!
    until_there dead$victim/latest_checkpointed_iteration.txt
    pids=($(cat /proc/$job/task/$job/children))
    [ ${#pids[@]} -eq 3 ] || fail "ranks: ${pids[*]}"
    start=$SECONDS
    kill -9 "${pids[$victim]}"
    wait $job
    got=$?
    [ $got -eq 5 ] || fail "exit $got with a dead rank: $(cat $ERR)"
    [ $((SECONDS - start)) -le 30 ] || fail "noticed after $((SECONDS - start)) s"
    grep -v -e 'starts anew$' -e '--batch is given again' $ERR >words.txt
    [ "$(wc -l <words.txt)" -eq 1 ] || fail "not one line: $(cat $ERR)"
    err "rank $victim of 3 was killed by signal 9 \\(Killed\\)"
    err "the last checkpoint is dead$victim/iter_0"
    rc 0 verify dead$victim --hash
done
# The program itself is killed: its ranks save and end.
"$CKPT" train --resume "$kimi" "${run[@]}" --steps 100000 --launch 2 --save orphan --save-every 2 >$OUT 2>$ERR &
job=$!
until_there orphan/latest_checkpointed_iteration.txt
pids=($(cat /proc/$job/task/$job/children))
kill -9 $job
wait $job
for ((i = 0; i < 600; i++)); do
    kill -0 "${pids[0]}" 2>/dev/null || kill -0 "${pids[1]}" 2>/dev/null || break
    sleep 0.1
done
[ $i -lt 600 ] || fail "ranks ${pids[*]} live on"
rc 0 verify orphan --hash
