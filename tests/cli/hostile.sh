# Files of other kinds than they seem, paths that lead elsewhere, names that play tricks.
# FIFOs and devices are refused at once: nothing waits for a writer
mkfifo fifo.safetensors; mkdir dir; mkfifo dir/model.safetensors
for c in inspect verify; do
    rc 5 $c fifo.safetensors; one_line; err 'fifo.safetensors: expected a regular file, found a FIFO'
    rc 5 $c /dev/zero; one_line; err '/dev/zero: expected a regular file, found a device'
    rc 5 $c dir; one_line; err 'dir/model.safetensors: expected a regular file, found a FIFO'
done
# numbers that are none
st nan.safetensors '{"t":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}' 1
rc 3 verify nan.safetensors; one_line; err "'t': shape: header byte 28: expected an unsigned integer, found NaN"
st inf.safetensors '{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,Infinity]}}' 1
rc 3 verify inf.safetensors; one_line; err "'t': data_offsets: header byte 49: expected an unsigned integer, found Infinity"
# an index leads to no file outside its directory
shard=model-00001-of-00001.safetensors; mkdir ix; st ix/$shard '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' 1
for name in ../nan.safetensors /etc/passwd sub/../x 'a\\b' '' .; do
    printf '{"metadata":{},"weight_map":{"a":"%s"}}' "$name" >ix/model.safetensors.index.json
    rc 3 verify ix; one_line; err "weight_map: tensor 'a': expected a plain file name, found '"
    rc 3 convert ix out; absent out
done
# a link that the user's directory holds is followed, as snapshots of the Hugging Face cache need
printf '{"weight_map":{"a":"%s"}}' $shard >ix/model.safetensors.index.json
mv ix/$shard blob; ln -s ../blob ix/$shard; rc 0 verify ix
ln -sf /dev/zero ix/$shard; rc 5 verify ix; one_line; err "ix/$shard: expected a regular file, found a device"
ln -sf loop ix/loop; ln -sf loop ix/$shard; rc 5 verify ix; one_line; err 'Too many levels of symbolic links'
# what cannot be looked at is not taken for absent, wherever a save root is searched
for name in .metadata metadata.json mp_rank_00; do
    rm -rf root; mkdir -p root/iter_0000001; ln -s $name root/iter_0000001/$name
    for tracker in '' 1; do
        [ -z "$tracker" ] || echo "$tracker" >root/latest_checkpointed_iteration.txt
        rc 5 verify root; one_line; err "iter_0000001/$name: Too many levels of symbolic links"
        rc 5 convert root out; one_line; absent out
    done
done
# a terminal is not written to by names
st ctl.safetensors '{"a\u001b[31mred\u0007\u009b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' 1
rc 0 inspect ctl.safetensors; out 'a\\x1b\[31mred\\x07'
! LC_ALL=C grep -q $'[\x01-\x08\x0b-\x1f\x7f]' $OUT || fail 'control characters on the terminal'
rc 0 inspect ctl.safetensors --json; ! LC_ALL=C grep -q $'[\x01-\x08\x0b-\x1f\x7f]' $OUT || fail 'control characters in JSON'
# names longer than a file's may be, and names that differ in case alone, are not names of files
long=$(printf 'n%.0s' $(seq 300)); st long.safetensors "{\"$long\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}" 1
st case.safetensors '{"A":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}' 2
flip case.safetensors $(($(wc -c <case.safetensors) - 1))
for to in torch_dist torch hdf5; do
    for n in long case; do rc 0 convert $n.safetensors $n.$to --to $to; rc 0 diff $n.safetensors $n.$to; done
done
rc 5 convert case.safetensors $long; one_line; err 'File name too long'
# little memory (a sanitizer's own is more than that): a message of one line, not a crash
cp -r $FIXTURES/hf/kimi_linear_tiny k
limits=(20000 60000 70000 100000 200000)
if sanitized asan || sanitized tsan; then limits=(); fi
for kb in "${limits[@]}"; do
    (ulimit -v $kb; exec timeout 20 "$CKPT" convert k out >$OUT 2>$ERR); got=$?
    # the loader itself needs some: 127 is its answer
    case $got in 0 | 4 | 5 | 127) ;; *) fail "ulimit -v $kb: exit $got: $(cat $ERR)" ;; esac
    [ $got -eq 127 ] || [ "$(wc -l <$ERR)" -le 1 ] || fail "ulimit -v $kb: $(cat $ERR)"
    [ $got -eq 0 ] || absent out
    rm -rf out
done
for command in "inspect k" "verify k"; do # OpenBLAS is not loaded for these, so there is nothing it could not start
    [ ${#limits[@]} -gt 0 ] || break
    (ulimit -v 70000; exec timeout 20 "$CKPT" $command >$OUT 2>$ERR); got=$?
    [ $got -eq 0 ] || fail "ulimit -v 70000: $command: exit $got: $(cat $ERR)"
done
