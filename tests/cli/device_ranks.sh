# train --device cuda on several ranks, on the emulator (device.sh), NCCL's place taken by fake_nccl.so:
# every mesh follows one device, AdamW and Muon; ranks on cards of their own and on one card; saved at TP 2,
# resumed there (the same bits), at CP 2 and on one card; a rank that dies.
with_plugin
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
emulated=$(dirname "$CKPT")/emulated
present "$emulated/ckpt"
present "$(dirname "$CKPT")/fake_nccl.so"
mkdir lib
ln -s "$(realpath "$(dirname "$CKPT")")/fake_nccl.so" lib/libnccl.so.2
export LD_LIBRARY_PATH=$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
mpi=$(dirname "$CKPT")/libckpt_mpi.so
CKPT=$emulated/ckpt
kimi=$FIXTURES/hf/kimi_linear_tiny
data=(--data "$FIXTURES/fla/corpus.txt" --threads 1 --device cuda)
run=(--resume "$kimi" "${data[@]}" --seq-len 12 --batch 2 --lr 2e-3 --reset-optimizer)

rc 0 train "${run[@]}" --steps 4 --metrics one.jsonl
rc 0 train "${run[@]}" --steps 4 --launch 2 --tp 2 --metrics tp2.jsonl --verbose --save tp2 --save-every 2
err '2 ranks: memory of their cards moves by NCCL'
close_to tp2.jsonl one.jsonl 1e-5
rc 0 verify tp2 --hash
CKPT_EMULATED_CARDS=1 rc 0 train "${run[@]}" --steps 2 --launch 2 --dp 2 --metrics dp2.jsonl --verbose
err 'moves by through pinned memory \(several ranks share a GPU\)'
losses one.jsonl | head -n 2 | sed 's/.*/"loss":&,/' >begin.jsonl
close_to dp2.jsonl begin.jsonl 1e-5
# Gone on with: the same mesh gives the same bits, others follow.
rc 0 train --resume tp2/iter_0000002 "${data[@]}" --steps 4 --launch 2 --tp 2 --save again
same tp2/iter_0000004/model.safetensors again/iter_0000004/model.safetensors
losses one.jsonl | tail -n 2 | sed 's/.*/"loss":&,/' >end.jsonl
rc 0 train --resume tp2/iter_0000002 "${data[@]}" --steps 4 --launch 2 --cp 2 --metrics cp2.jsonl
close_to cp2.jsonl end.jsonl 1e-5
rc 0 train --resume tp2/iter_0000002 "${data[@]}" --steps 4 --metrics tp1.jsonl
close_to tp1.jsonl end.jsonl 1e-5

# Sequences cut over ranks, experts cut over ranks.
rc 0 train "${run[@]}" --steps 2 --launch 2 --cp 2 --cp-mode chunks --micro-batch 1 --metrics chunks.jsonl
close_to chunks.jsonl begin.jsonl 1e-5
rc 0 train "${run[@]}" --steps 2 --launch 2 --ep 2 --metrics ep2.jsonl
close_to ep2.jsonl begin.jsonl 1e-5

rc 0 train "${run[@]}" --steps 2 --optimizer muon --metrics muon.jsonl
rc 0 train "${run[@]}" --steps 2 --optimizer muon --launch 2 --tp 2 --metrics muon2.jsonl
close_to muon2.jsonl muon.jsonl 1e-5
# bf16: a model without routers, which would choose other experts.
run16=(--resume "$FIXTURES/hf/llama_tiny_tied" "${data[@]}" --seq-len 12 --batch 2 --lr 2e-3 --reset-optimizer --dtype bf16 --steps 2)
rc 0 train "${run16[@]}" --metrics bf16.jsonl
rc 0 train "${run16[@]}" --launch 2 --cp 2 --metrics bf16.2.jsonl
close_to bf16.2.jsonl bf16.jsonl 5e-3
if command -v mpirun >/dev/null && [ -e "$mpi" ] && ! sanitized asan && ! sanitized tsan; then
    mkdir bin
    cp "$CKPT" "$emulated/libckpt_cuda.so" "$mpi" bin
    mpirun --oversubscribe --bind-to none -np 2 bin/ckpt train "${run[@]}" --steps 2 --dp 2 --metrics mpi.jsonl >$OUT 2>$ERR || fail "mpirun: $(cat $ERR)"
    close_to mpi.jsonl begin.jsonl 1e-5
fi

"$CKPT" train "${run[@]}" --steps 100000 --launch 2 --tp 2 --save dead --save-every 1 --quiet >$OUT 2>$ERR &
job=$!
until_there dead/latest_checkpointed_iteration.txt
pids=($(cat /proc/$job/task/$job/children))
kill -9 "${pids[1]}"
wait $job
got=$?
[ $got -eq 5 ] || fail "exit $got with a dead rank: $(cat $ERR)"
one_line
err 'rank 1 of 2 was killed by signal 9 \(Killed\); the last checkpoint is dead/iter_0'
rc 0 verify dead --hash
# An error that NCCL reports at once ends the run, not only the rank that it is told to.
FAKE_NCCL_FAIL=40 "$CKPT" train "${run[@]}" --steps 100000 --launch 2 --tp 2 --quiet >$OUT 2>$ERR
got=$?
[ $got -eq 5 ] || fail "exit $got with an error of NCCL: $(cat $ERR)"
err 'NCCL: unhandled system error'
