# What a run goes on from is as its manifest says; a save directory holds one run, and --keep removes only
# that run's checkpoints; a damaged newest checkpoint or tracker leaves a way back, which is named.
export OMP_NUM_THREADS=1
data=(--data tokens.txt --threads 1)
seq 1 2000 | tr -dc 0-9 | tr 0-9 '\000-\011' >tokens.txt
first=(--reset-optimizer --resume "$FIXTURES/mcore/optim_params_tp2" "${data[@]}" --seq-len 8 --batch 2 --lr 1e-3)
T=latest_checkpointed_iteration.txt
root() { rc 0 verify "$1" --hash; root_of; }
# data_flip FILE: one bit in the middle of its largest part
data_flip() { flip "$1" $(($(stat -c %s "$1") / 2)); }

# one flipped bit in weights, in optimizer state, in any container
for f in safetensors torch_dist torch hdf5; do
    rc 0 train "${first[@]}" --steps 6 --save $f --save-every 2 --save-format $f
    want=$(root $f)
    case $f in
    safetensors) files='model.safetensors optimizer-00001-of-00001.safetensors' ;;
    torch_dist) files=__0_0.distcp ;;
    torch) files=$(cd $f/iter_0000006 && ls | grep -E '\.(pt|bin|pth)$' | head -1) ;;
    hdf5) files= ;;
    esac
    for x in ${files:-.}; do
        [ -e "$f/iter_0000006/$x" ] || x=$(cd $f/iter_0000006 2>/dev/null && ls | grep -E '^optim.*safetensors$' | head -1)
        rm -rf d; cp -r $f d
        [ $f = hdf5 ] && x=d/iter_0000006.h5 || x=d/iter_0000006/$x
        data_flip $x
        "$CKPT" train --resume d "${data[@]}" --steps 8 >$OUT 2>$ERR; got=$?
        [ $got -eq 1 ] || [ $got -eq 3 ] || fail "$x: exit $got"
        one_line; err 'the newest good one before it is d/iter_0000004(\.h5)?: --fallback takes it \(or --resume d --iteration 4\)'
        [ $f = hdf5 ] || err "iter_0000006: damaged: .*tensor '.*of the tensor differ from the manifest"
        rc 0 train --resume d "${data[@]}" --steps 6 --save d --fallback
        err 'warning: .*; falling back to d/iter_0000004'
        [ "$(root d)" = "$want" ] || fail "$x: after falling back another root"
    done
done

# two damaged: the one before both; none left: said so
rm -rf d; cp -r safetensors d
for i in 4 6; do data_flip d/iter_000000$i/model.safetensors; done
rc 1 train --resume d "${data[@]}" --steps 8; one_line; err 'before it is d/iter_0000002: --fallback'
data_flip d/iter_0000002/model.safetensors
rc 1 train --resume d "${data[@]}" --steps 8 --fallback; one_line; err 'd has no good checkpoint before it'

# cut, missing, without or with a damaged manifest; tracker gone or garbage
rm -rf d; cp -r safetensors d; truncate -s 1000 d/iter_0000006/model.safetensors
rc 3 train --resume d "${data[@]}" --steps 8; one_line; err 'd/iter_0000004: --fallback takes it'
rc 3 train --resume d/iter_0000006 "${data[@]}" --steps 8; one_line; err 'd/iter_0000004: --fallback takes it'
for c in inspect verify; do rc 3 $c d; one_line; err 'other iterations here, for --iteration N: 4, 2$'; rc 0 $c d --iteration 4; done
rc 3 convert d o --to safetensors --layout keep; one_line; err 'other iterations here, for --iteration N: 4, 2$'
rc 0 train --resume d "${data[@]}" --steps 4 --fallback; err 'at step 4,'
rm -r d/iter_0000006
"$CKPT" train --resume d "${data[@]}" --steps 8 >$OUT 2>$ERR && fail 'went on from nothing'
one_line; err 'd/iter_0000004: --fallback takes it'
rm d/$T
rc 0 train --resume d "${data[@]}" --steps 4; err "warning: d: no $T: taking the newest complete iteration, 4"; err 'at step 4,'
rc 3 inspect d; one_line; err 'for --iteration N: 4, 2$'
rc 0 inspect d --iteration 2
echo 'four?' >d/$T
rc 0 train --resume d "${data[@]}" --steps 4; err "warning: d: .*holds 'four\?', .*: taking the newest complete iteration, 4"
rc 3 inspect d; one_line; err "holds 'four\?', expected a number or 'release'; other iterations here, for --iteration N: 4, 2$"
echo 4 >d/$T; sed -i 's/"root":"./"root":"x/' d/iter_0000004/ckpt.manifest.json
rc 3 train --resume d "${data[@]}" --steps 8; one_line; err 'ckpt.manifest.json.*d/iter_0000002: --fallback takes it'
rc 2 train --init "$FIXTURES/hf/kimi_linear_tiny" "${data[@]}" --steps 1 --fallback; one_line; err '--fallback without --resume'

# another run's directory: nothing is written
rm -rf d; cp -r safetensors d; cp -r d before
for from in "--resume $FIXTURES/mcore/optim_params_tp2" "--resume torch_dist" "--resume d --reset-optimizer"; do
    rc 2 train $from "${data[@]}" --seq-len 8 --batch 2 --lr 1e-3 --steps 8 --save d --keep 1; one_line
    err 'save d holds checkpoints of another run \(d/iter_0000002\): --resume d goes on with that one, --force saves among them'
done
mkdir multi; cp -r d multi/safetensors
rc 2 train "${first[@]}" --steps 8 --save multi; one_line; err 'another run \(multi/safetensors/iter_0000002\): --resume multi/safetensors goes on'
mkdir tracked; echo 3 >tracked/$T
rc 2 train "${first[@]}" --steps 8 --save tracked; one_line; err "another run \(tracked/$T\)"
same_tree d before
# --force: among them, none of them is removed, and metrics are not mixed
lines=$(wc -l <d/metrics.jsonl)
rc 0 train "${first[@]}" --lr 2e-3 --steps 9 --save d --save-every 3 --keep 1 --force --save-format safetensors
err 'd/metrics.jsonl: of another run, now d/metrics.1.jsonl'
[ "$(wc -l <d/metrics.1.jsonl)" -eq "$lines" ] || fail 'the old metrics changed'
for i in 2 4; do same_tree d/iter_000000$i before/iter_000000$i; done
absent d/iter_0000003; present d/iter_0000009

# --keep: what the run wrote, resumed or not; nothing that looks like it
rm -rf d; cp -r safetensors d; mkdir d/iter_0000001; echo mine >d/iter_0000001/notes; cp -r d/iter_0000002 d/iter_0000003
rc 0 train --resume d "${data[@]}" --steps 8 --save d --keep 2
present d/iter_0000001/notes; present d/iter_0000003/model.safetensors; present d/iter_0000006
absent d/iter_0000002; absent d/iter_0000004; present d/iter_0000008
# an earlier iteration again, over the later ones of the same run
rc 0 train --resume d --iteration 6 "${data[@]}" --steps 8 --save d --keep 2
grep -q '"run":"[0-9a-f]\{32\}"' d/iter_0000008/ckpt.manifest.json || fail 'no name of the run'
