# convert and verify divided between ranks: the bytes of one process, one report, the numbers of one
# forward pass, and nothing that looks complete when a rank fails or dies. Needs mpirun and libckpt_mpi.so.
src=$FIXTURES/hf/kimi_linear_tiny
if ! command -v mpirun >/dev/null || [ ! -e "$(dirname "$CKPT")/libckpt_mpi.so" ]; then
    OMPI_COMM_WORLD_SIZE=2 rc 4 convert "$src" out --to torch_dist
    one_line; err 'install libopenmpi-dev'
    echo "SKIP convert_mpi: no mpirun"
    exit 0
fi
# As in train_mpi.sh: suite share runs the same code on threads.
export ASAN_OPTIONS=detect_leaks=0
if sanitized tsan; then exit 0; fi
export SOURCE_DATE_EPOCH=1700000000 # the same manifests
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
mpi() { # WANT RANKS ARGS...
    local want=$1 ranks=$2 got
    shift 2
    # Open MPI 4.1 was seen to miss the end of its ranks, all four of them zombies: then once more.
    for _ in 1 2; do
        timeout -k 5 60 mpirun --oversubscribe --bind-to none -np "$ranks" "$CKPT" "$@" >$OUT 2>$ERR
        got=$?
        [ $got -eq 124 ] || [ $got -eq 137 ] || break
    done
    [ $got -eq "$want" ] || fail "mpirun -np $ranks ckpt $*: exit $got, expected $want: $(head -c 800 $ERR $OUT)"
}
to=(--to torch_dist --layout megatron --tp 2 --ep 2)
rc 0 convert "$src" one "${to[@]}"; root=$(root_of)
mpi 0 4 convert "$src" four "${to[@]}"
[ "$(root_of)" = "$root" ] || fail "another root: $(cat $OUT)"
[ "$(grep -c '^151 tensors' $OUT)" -eq 1 ] || fail "not one rank's words: $(cat $OUT)"
same_tree one four
mpi 0 3 convert four hf --to safetensors --layout hf --max-shard-size 200KB --verify
rc 0 convert one hf1 --to safetensors --layout hf --max-shard-size 200KB
same_tree hf1 hf
mpi 0 2 convert "$src" out.h5 # one file, made by rank 0
rc 0 convert "$src" one.h5; same out.h5 one.h5
# More ranks than files.
mpi 0 3 convert "$src" single.safetensors; rc 0 convert "$src" single1.safetensors
same single.safetensors single1.safetensors

mpi 0 4 verify four --hash --files --json
[ "$(grep -c '"command"' $OUT)" -eq 1 ] || fail "not one document"
out "${root#root }"
cp -r four bad; flip "$(ls bad/release/*.distcp | tail -n 1)" 2000
mpi 1 4 verify bad --hash
out 'differ from the manifest'
mpi 2 2 inspect four; [ "$(grep -c 'started by mpirun on 2 ranks' $ERR)" -eq 1 ] || fail "not one rank's words: $(cat $ERR)"
mpi 0 2 convert "$src" dry --to torch_dist --dry-run --json; [ "$(grep -c '"command"' $OUT)" -eq 1 ] || fail "not one document: $(cat $OUT)"
absent dry

# The model itself on ranks, near a peer's numbers at every mesh; two checkpoints; what rank 0 finds fails all.
near=(--forward --reference "$src.reference.safetensors")
for mesh in --tp=2 --cp=2; do
    mpi 0 2 verify "$src" "${near[@]}" "${mesh%=*}" 2
    out 'relative RMS [0-9.]+e-06; worst gradient .*, relative RMS [0-9.]+e-05'
    [ "$(grep -c 'gradient norm 20.3458' $OUT)" -eq 1 ] || fail "not one rank's words: $(tail -n 3 $OUT)"
done
deep=$FIXTURES/hf/deepseek_v3_tiny
mpi 0 4 verify "$deep" --forward --reference "$deep.reference.safetensors" --latent-eps 1e-6 --cp 2 --ep 4
mpi 0 2 verify "$src" --forward --against four; out 'logits and gradients bit-identical'
mpi 1 2 verify "$src" "${near[@]}" --rtol 1e-9; out 'logits: relative RMS .*, allowed 1e-09'; no_err 'rank 1'
mpi 0 2 verify "$src" --forward --json
[ "$(grep -c '"grad_norm"' $OUT)" -eq 1 ] || fail "not one document"
mpi 2 2 verify "$src" --forward --tp 3; err 'tp 3, cp 1 and ep 1, and 2 ranks; start as many as tp x cp'
rc 2 verify "$src" --forward --cp 2; one_line; rc 2 verify "$src" --tp 2; one_line; err '--tp needs --forward'

# In few bits: every rank measures a part of the matrices, and all of them know what NVFP4 has to know first.
for dtype in fp8-block128 nvfp4 mxfp8; do
    few=(--to safetensors --layout hf --max-shard-size 200KB --dtype "$dtype" --approximate)
    rc 0 convert "$src" one.$dtype "${few[@]}" --json; grep -o '"quantised":.*' $OUT | sed 's/"seconds".*//' >words
    mpi 0 3 convert "$src" three.$dtype "${few[@]}" --json
    grep -o '"quantised":.*' $OUT | sed 's/"seconds".*//' | cmp -s words - && [ -s words ] || fail "$dtype: other errors"
    same_tree one.$dtype three.$dtype
done
# A NaN in a matrix of one rank: refused as by one process.
cp -r "$src" nan; file=$(ls -S nan/*.safetensors | head -n 1)
head -c 200000 /dev/zero | tr '\0' '\377' | dd of="$file" bs=1000 seek=$((($(stat -c %s "$file") - 200000) / 1000)) conv=notrunc status=none
mpi 4 3 convert nan few "${few[@]}"; err 'holds a NaN or an infinity, which mxfp8 cannot say'; absent few

# What ranks finished before one of them failed is taken over, by as many ranks as there are then.
parts=(--to safetensors --layout hf --max-shard-size 100KB)
rc 0 convert "$src" whole "${parts[@]}"
files=$(ls whole/*.safetensors | wc -l)
timeout -k 5 90 mpirun --oversubscribe --bind-to none -np 2 "$CKPT" convert "$src" resumed "${parts[@]}" --resume : \
    -np 1 bash -c 'ulimit -f 8; exec "$0" "$@"' "$CKPT" convert "$src" resumed "${parts[@]}" --resume >$OUT 2>$ERR && fail "a rank that cannot write: exit 0"
absent resumed
err 'finished files kept in'
kept=$(grep -oE '[0-9]+ finished' $ERR)
mpi 0 4 convert "$src" resumed "${parts[@]}" --resume
err "note: ${kept% *} of [0-9]+ files taken over"
[ "${kept% *}" -ge 2 ] && [ "${kept% *}" -lt "$files" ] || fail "$kept of $files"
same_tree whole resumed
compgen -G '.*ckpt-tmp*' >/dev/null && fail "left behind: $(ls -A)"
mpi 2 2 convert "$src" four "${to[@]}"; err 'exists; --force'

# One rank cannot write: the others stop, and nothing is left.
before=$(ls -A)
again=(convert "$src" broken "${to[@]}" --memory 1MiB)
timeout -k 5 90 mpirun --oversubscribe --bind-to none -np 3 "$CKPT" "${again[@]}" : \
    -np 1 bash -c 'ulimit -f 1; exec "$0" "$@"' "$CKPT" "${again[@]}" >$OUT 2>$ERR && fail "a rank that cannot write: exit 0"
absent broken
[ "$(ls -A)" = "$before" ] || fail "left behind: $(ls -A)"
# One rank dies before it takes part, one in the midst of its work.
timeout -k 5 90 mpirun --oversubscribe --bind-to none -np 2 "$CKPT" "${again[@]}" : \
    -np 1 bash -c 'kill -9 $$' >$OUT 2>$ERR && fail "a rank that died: exit 0"
absent broken
"$GEN" kimi big --size 300M >/dev/null
timeout -k 5 90 mpirun --oversubscribe --bind-to none -np 2 "$CKPT" convert big broken "${to[@]}" : \
    -np 1 bash -c 'trap "" USR1; "$0" "$@" & pid=$!
        for ((i = 0; i < 2000; i++)); do compgen -G ".broken.ckpt-tmp.*" >/dev/null && break; sleep 0.005; done
        kill -9 $pid; wait $pid' "$CKPT" convert big broken "${to[@]}" >$OUT 2>$ERR && fail "a rank killed: exit 0"
absent broken
