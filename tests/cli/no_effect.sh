# An option that asks for something that cannot be done here is an error that says why.
l=$FIXTURES/hf/llama3_tiny
none() { rc 2 "$@"; one_line; err "ckpt: $1: .*--[a-z-]+ has no effect: "; }
none convert $l o.h5 --max-shard-size 1GB; err 'the output is one file'
none convert $l o.safetensors --max-shard-size 1GB
none convert $l o --to torch_dist --max-shard-size 1GB; err "those of its ranks"
none convert $l o --to mp_rank --layout megatron --max-shard-size 1GB
for c in convert verify inspect; do
    d=; [ $c = convert ] && d=o
    none $c $l $d --iteration 3; err 'not a save root'
    rc 2 $c $FIXTURES/mcore/legacy_tp1/iter_0000100 $d --iteration 3; one_line
done
rc 2 convert $FIXTURES/torch/dcp_fsdp2 o --iteration 3; one_line; err "not the requested 3"
for r in f gate; do
    none convert $l o --kda-$r-lora-rank none; err 'no KDA block'
    none convert $l o --kda-$r-lora-rank 4 --approximate
    none convert $FIXTURES/torch/dcp_2rank o --kda-$r-lora-rank 4
done
none convert $l o --norms fused; none convert $l o --layout hf --norms separate
none convert $l o --dtype-force
none convert $l o --to torch_dist --layout megatron --ep 2; err 'no experts'
none convert $l o --to torch_dist --layout megatron --tp 2 --etp 2
none convert $l o --dry-run --verify; none convert $l o --dry-run --resume
none verify $l --force; none verify $l --forward --rtol 1; none verify $l --forward --latent-eps 1e-6
none inspect $l --tree --json
# what is so already, and permissions, are fine
rc 0 convert $l o --tp 1 --pp 1 --ep 1 --etp 1 --cp 1 --allow-unknown --approximate --force --optimizer drop --compress none
rc 0 inspect $FIXTURES/mcore/legacy_tp1/iter_0000100 --iteration 100
rc 0 inspect $FIXTURES/mcore/legacy_tp1 --iteration 100
nothing_but o

# An option of one value that is given again with another: the last counts, and that is told once. A flag, a list
# and the same again are as they were meant.
rc 0 convert $l twice --tp 1 --tp=1 --threads 1 --threads 2 --force --force --include '*' --include 'embed*' --to safetensors --to hdf5 --to torch
[ "$(grep -c 'given again' $ERR)" -eq 3 ] || fail "not each replaced value once: $(cat $ERR)"
err '^ckpt: convert: warning: --threads is given again: 2 counts, not 1$'
err '--to is given again: hdf5 counts, not safetensors$'; err -- '--to is given again: torch counts, not hdf5$'
rc 0 inspect twice; out '^container +torch( |$)'
rc 0 inspect $l --memory 1GiB --memory 2GiB --quiet; silent
rc 0 inspect $l --memory 1GiB --memory 2GiB --json; err 'memory is given again: 2GiB'
OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 rc 2 inspect $l --threads 1 --threads 2; no_err 'again'
data=(--data "$FIXTURES/fla/corpus.txt" --seq-len 8 --batch 2 --steps 0 --threads 1)
none train --resume $l "${data[@]}" --cp-mode chunks; err 'sequences are not cut'
rc 0 train --resume $l "${data[@]}" --cp 1 --cp-mode chunks
rc 0 train --resume $l "${data[@]}" --launch 1 --launch 2 --save-every 0; err 'launch is given again: 2 counts, not 1'
