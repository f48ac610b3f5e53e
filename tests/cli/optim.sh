# Optimizer state follows its parameters: random models, through Megatron at two meshes and back.
seen=0
for seed in 1 2 3 4 5 6 7 8; do
    rm -rf g d m n b
    "$GEN" random g --seed $seed >/dev/null
    rc 0 convert g d; r=$(root_of)
    rc 0 convert d m --to torch_dist --layout megatron --tp 1
    out ' 0 reset, 0 dropped; '
    grep -q ' 0 of optimizer state' $OUT || seen=$((seen + 1))
    grep -q ' 0 of optimizer state' $OUT || err 'warning: Megatron-Core takes the step and param_groups'
    rc 0 convert m b --to safetensors --layout hf --verify
    [ "$(root_of)" = "$r" ] || fail "seed $seed: another root"
    for f in d/*.safetensors d/*.index.json; do [ ! -e "$f" ] || same "$f" "b/${f#d/}"; done
    rc 0 verify m --hash; rc 0 diff d m; out ' identical'
    # what is left out is counted, and so is what follows it
    [ -e d/optimizer.safetensors.index.json ] || continue
    rc 0 convert d x$seed --optimizer drop; err 'dropped: [0-9]+ optimizer tensors'; absent x$seed/optimizer.safetensors.index.json
    rc 0 inspect d 'optimizer.*head*' --json; out '"parameters":0,'
    rc 0 convert d y$seed --exclude model.norm.weight; err 'dropped: [0-9]+ optimizer tensors? left out'; no_err warning
    rc 0 inspect y$seed --json; no_out 'model.norm.weight'
    rc 0 convert d z$seed --dtype f16 --json; out '"counts":.*"optimizer":[1-9]'; rc 0 inspect z$seed 'opt*' --json; no_out '"F16"'
    # half of Adam's moments is no state
    if ls d | grep -q optimizer && grep -q exp_avg_sq d/optimizer.safetensors.index.json; then
        rc 0 convert d p$seed --exclude '*exp_avg_sq*final_norm*' --exclude '*final_norm*exp_avg_sq*' --exclude '*exp_avg_sq.model.norm*' --exclude '*model.norm.weight.exp_avg_sq'
        rc 3 verify p$seed; one_line; err "model.norm.weight': optimizer state exp_avg is stored, exp_avg_sq is missing"
    fi
done
[ $seen -ge 2 ] || fail "only $seen models with optimizer state"
# squared gradients that end in zeros may never have been written
p=$FIXTURES/mcore/optim_params_tp2
rc 0 verify $p --values; no_err 'are zero'
cp -r $p q; rc 0 convert $p n --dry-run
at=$(grep -oE 'state.exp_avg_sq.output_layer.weight F32 .* __[01]_[01].distcp.*' $OUT | grep -oE '__[01]_[01].distcp\[[0-9]+' | tail -1)
dd if=/dev/zero of=q/iter_0000003/${at%[*} bs=1 seek=${at#*[} count=4096 conv=notrunc status=none
rc 0 verify q --values; err "warning: .*the last 1024 of 2048 values of 'optimizer.exp_avg_sq.head.weight' are zero"
