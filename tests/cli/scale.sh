# Sizes: sparse checkpoints of published models, tensors and files beyond 4 GiB, more files than
# descriptors, holes kept as holes. Slow under a sanitizer, and nothing there depends on size.
if sanitized asan || sanitized tsan; then exit 0; fi
# peak KIB ARGS...: the program within that much memory for everything but its libraries' text
limited() {
    local want=$1 kib=$2
    shift 2
    (ulimit -v "$kib"; exec "$CKPT" "$@") >$OUT 2>$ERR
    local got=$?
    [ $got -eq "$want" ] || fail "ckpt $* in $kib KiB: exit $got, expected $want: $(head -c 600 $ERR $OUT)"
}
"$GEN" kimi48 kimi >/dev/null # 27 layers, 256 experts: 94 GB, a few MB on disk
[ "$(du -sk kimi | cut -f1)" -lt 20000 ] || fail "the model is not a hole"
limited 0 1200000 convert kimi out --to torch_dist --layout megatron --tp 8 --dry-run --json
out '"tensors":20503'
absent out

# A hole stays one, and what lies in it is found.
"$GEN" hole sparse.safetensors --size 60M >/dev/null
printf hello | dd of=sparse.safetensors bs=1 seek=30000001 conv=notrunc status=none
head -c 5000 /dev/urandom | dd of=sparse.safetensors bs=1 seek=59990001 conv=notrunc status=none
rc 0 convert sparse.safetensors dense.pt
[ "$(du -k dense.pt | cut -f1)" -lt 1000 ] || fail "a hole was filled: $(du -k dense.pt)"
rc 0 diff sparse.safetensors dense.pt
rc 0 verify dense.pt --hash --files
rc 0 convert dense.pt again.safetensors; same sparse.safetensors again.safetensors
cp --sparse=never sparse.safetensors full.safetensors # the same values without holes: the same bytes
rc 0 convert full.safetensors full.pt; same dense.pt full.pt

# One tensor, and a zip file, of more than 4 GiB.
"$GEN" hole big.safetensors --size 4200M >/dev/null
printf last | dd of=big.safetensors bs=1 seek=$(($(stat -c %s big.safetensors) - 4)) conv=notrunc status=none
rc 0 convert big.safetensors big.pt
rc 0 diff big.safetensors big.pt # reads all of both: the last bytes as well

# More files than descriptors, in and out.
"$GEN" shards shards --tensors 300 >/dev/null
(ulimit -n 100; exec "$CKPT" convert shards joined --to torch_dist) >$OUT 2>$ERR || fail "many inputs: $(cat $ERR)"
(ulimit -n 100; exec "$CKPT" convert joined again --to safetensors --max-shard-size 1) >$OUT 2>$ERR || fail "many outputs: $(cat $ERR)"
[ "$(ls again/*.safetensors | wc -l)" -eq 300 ] || fail "not 300 files"
rc 0 diff shards again
rc 0 verify again --hash
rm -r again/model-00150-of-00300.safetensors
got=0; (ulimit -n 100; exec "$CKPT" inspect again) >$OUT 2>$ERR || got=$?
[ "$got" -eq 3 ] || fail "a missing shard: exit $got"
err 'model-00150-of-00300'

# A model downloaded as very many files, with few descriptors: seconds, as nothing is compared with
# everything.
rm -rf shards joined again
"$GEN" shards many --tensors 20000 >/dev/null
for args in "inspect many" "convert many out --to torch_dist --dry-run" "verify many --write" "verify many --hash"; do
    (ulimit -n 256 -t 20; exec "$CKPT" $args) >$OUT 2>$ERR || fail "ckpt $args: exit $? $(head -c 600 $ERR)"
done
out '20000 tensors, 20001 files, all digests match'
touch many/other.bin
rc 0 verify many
out 'other.bin: stale data file'
rm many/model-00777-of-20000.safetensors
rc 3 verify many
err 'model-00777-of-20000'
