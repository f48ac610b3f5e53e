# Training on several ranks under mpirun: every kind of parallelism follows one process, a checkpoint
# of one mesh goes on at another, a rank that dies ends the run. Needs mpirun and libckpt_mpi.so.
if ! command -v mpirun >/dev/null || [ ! -e "$(dirname "$CKPT")/libckpt_mpi.so" ]; then
    rc 4 train --resume "$FIXTURES/hf/kimi_linear_tiny" --data "$FIXTURES/fla/corpus.txt" --steps 1 --tp 2
    one_line; err 'install libopenmpi-dev'
    echo "SKIP train_mpi: no mpirun"
    exit 0
fi
# Open MPI leaks, and its own threads are nothing ThreadSanitizer understands: there, suites comm and par
# run the same code on ranks that are threads.
export ASAN_OPTIONS=detect_leaks=0
if sanitized tsan; then exit 0; fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
# Ranks that wait leave the cores to those that work.
export OMPI_MCA_mpi_yield_when_idle=1
# mpi WANT RANKS ARGS...: the program on several ranks; mpirun passes the exit code on.
mpi() {
    local want=$1 ranks=$2 got
    shift 2
    mpirun --oversubscribe --bind-to none -np "$ranks" "$CKPT" "$@" >$OUT 2>$ERR
    got=$?
    [ $got -eq "$want" ] || fail "mpirun -np $ranks ckpt $*: exit $got, expected $want: $(head -c 800 $ERR $OUT)"
}

kimi=$FIXTURES/hf/kimi_linear_tiny
run=(--data "$FIXTURES/fla/corpus.txt" --seq-len 16 --batch 4 --lr 1e-3 --threads 1)
rc 0 train --resume "$kimi" "${run[@]}" --steps 20 --save one --metrics one.jsonl
[ "$(losses one.jsonl | wc -l)" -eq 20 ] || fail "not 20 steps"
mpi 0 2 train --resume "$kimi" "${run[@]}" --steps 20 --tp 2 --metrics tp2.jsonl --save tp2 --save-every 12
close_to tp2.jsonl one.jsonl 1e-5
[ "$(grep -c '^step 20:' $OUT)" -eq 1 ] || fail "not one rank's words: $(cat $OUT)"
mpi 0 2 train --resume "$kimi" "${run[@]}" --steps 20 --cp 2 --metrics cp2.jsonl
close_to cp2.jsonl one.jsonl 1e-5
mpi 0 2 train --resume "$kimi" "${run[@]}" --steps 20 --cp 2 --cp-mode chunks --metrics chunks.jsonl
close_to chunks.jsonl one.jsonl 1e-5
mpi 0 4 train --resume "$kimi" "${run[@]}" --steps 20 --tp 2 --cp 2 --cp-mode chunks --metrics tp2cp2.jsonl
close_to tp2cp2.jsonl one.jsonl 1e-5
mpi 0 2 train --resume "$kimi" "${run[@]}" --steps 20 --metrics dp2.jsonl
close_to dp2.jsonl one.jsonl 1e-5
mpi 0 2 train --resume "$kimi" "${run[@]}" --steps 20 --ep 2 --micro-batch 1 --metrics ep2.jsonl
close_to ep2.jsonl one.jsonl 1e-5
mpi 0 4 train --resume "$FIXTURES/hf/bailing_hybrid_tiny" "${run[@]}" --steps 6 --tp 2 --cp 2 --ep 2 --metrics four.jsonl
rc 0 train --resume "$FIXTURES/hf/bailing_hybrid_tiny" "${run[@]}" --steps 6 --metrics bailing.jsonl
close_to four.jsonl bailing.jsonl 1e-5
# Saved at one mesh, resumed at others: moments and weights are those of the whole model.
rc 0 train --resume tp2 --iteration 12 "${run[@]}" --steps 20 --metrics back.jsonl
grep '"loss"' one.jsonl | tail -n 8 >tail.jsonl
close_to back.jsonl tail.jsonl 1e-5
mpi 0 4 train --resume tp2 --iteration 12 "${run[@]}" --steps 20 --dp 2 --tp 2 --ep 4 --metrics other.jsonl
close_to other.jsonl tail.jsonl 1e-5
rc 0 verify tp2 --hash --iteration 20
# Muon: matrices cut over ranks are orthogonalised whole.
rc 0 train --resume "$kimi" "${run[@]}" --steps 4 --optimizer muon --muon-extra 0.2 --metrics muon.jsonl --save muon
mpi 0 2 train --resume "$kimi" "${run[@]}" --steps 4 --optimizer muon --muon-extra 0.2 --tp 2 --metrics muon2.jsonl --save muon2
close_to muon2.jsonl muon.jsonl 1e-4

# A token outside the vocabulary on one of two data-parallel ranks: the steps before it are saved.
(seq 1 99 | tr -dc 0-9 | tr 0-9 '\000-\011'; printf '\377'; seq 1 99 | tr -dc 0-9 | tr 0-9 '\000-\011') >broken.txt
mpi 3 2 train --resume "$FIXTURES/mcore/optim_params_tp2" --reset-optimizer --data broken.txt --seq-len 8 --batch 2 \
    --steps 99 --no-shuffle --threads 1 --save broken
err 'token 189 is 255'; err 'the last checkpoint is broken/iter_0000011'
rc 0 verify broken --hash --quiet
# the parameters are the model's, not a rank's
mpi 0 2 train --init "$kimi" "${run[@]}" --steps 1 --tp 2; err 'a new model of 332830 parameters'

# Errors: one line from rank 0, the others end with it.
mpi 2 2 train --resume "$kimi" "${run[@]}" --steps 2 --tp 2 --cp 2
err 'tp 2 x cp 2 x dp 1 need 4 ranks, there are 2; start them with mpirun -np 4'
[ "$(grep -c '^ckpt: train: tp 2' $ERR)" -eq 1 ] || fail "said by every rank: $(cat $ERR)"
mpi 2 3 train --resume "$kimi" "${run[@]}" --steps 2 --tp 3
err 'block 0: 2 heads of linear attention cannot be cut into 3 parts'
# mpirun passes SIGUSR1 on: every rank stops after the same step, and the run is saved.
mpirun --oversubscribe --bind-to none -np 2 "$CKPT" train --resume "$kimi" "${run[@]}" --steps 100000 --tp 2 --save usr1 --metrics usr1.jsonl >$OUT 2>$ERR &
job=$!
for _ in $(seq 200); do [ -s usr1.jsonl ] && grep -q '"loss"' usr1.jsonl && break; sleep 0.1; done
kill -USR1 "$job"
wait "$job" || fail "SIGUSR1 to mpirun: $(cat $ERR)"
err 'interrupted after step [0-9]+; saved usr1/iter_[0-9]+; go on with'
rc 0 verify usr1 --hash
# A rank that is killed ends the run, and what it was saving does not look complete.
if command -v pgrep >/dev/null; then
    mpirun --oversubscribe --bind-to none -np 2 "$CKPT" train --resume "$kimi" "${run[@]}" --steps 100000 --tp 2 --save dead --save-every 3 >$OUT 2>$ERR &
    job=$!
    until_there dead/latest_checkpointed_iteration.txt
    victim=$(pgrep -P "$job" | tail -n 1)
    kill -9 "$victim"
    wait "$job" && fail "a run with a dead rank succeeds"
    err 'signal 9|Killed'
    rc 0 verify dead --hash
fi
mpi 2 2 train --resume "$kimi" "${run[@]}" --steps 2 --batch 3; err 'not divisible by micro-batch'
rc 2 train --resume "$kimi" "${run[@]}" --steps 2 --tp 2; one_line; err 'start them with mpirun -np 2'
