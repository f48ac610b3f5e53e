# diff: every kind of difference, tolerances, options.
st a.safetensors '{"e":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"i":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},"o":{"dtype":"U8","shape":[2],"data_offsets":[24,26]},"p":{"dtype":"U8","shape":[2],"data_offsets":[26,28]},"z":{"dtype":"F32","shape":[1],"data_offsets":[28,32]}}' 32
st b.safetensors '{"e":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"i":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},"o":{"dtype":"I8","shape":[2],"data_offsets":[24,26]},"p":{"dtype":"U8","shape":[1,2],"data_offsets":[26,28]},"y":{"dtype":"F32","shape":[1],"data_offsets":[28,32]}}' 32
h=$(($(stat -c %s b.safetensors) - 32)); flip b.safetensors $((h + 12))
rc 0 diff a.safetensors a.safetensors; silent; out '^5 identical$'
rc 1 diff a.safetensors b.safetensors; silent
out '^value: e: max abs 1\.4[0-9]*e-45, .*max ulp 1, first at \[1, 1\], 25% changed'
out '^dtype: o: U8 \[2\], I8 \[2\]$'; out '^shape: p: U8 \[2\], U8 \[1, 2\]$'
out '^only in A: z$'; out '^only in B: y$'; out '^1 identical, 1 only in A, 1 only in B, 1 differs in shape, 1 differs in dtype, 1 differs in value$'
rc 1 diff a.safetensors b.safetensors --limit 1; out 'and 4 more'
rc 0 diff a.safetensors b.safetensors --include i
rc 0 diff a.safetensors b.safetensors --include 'e' --atol 1e-30; out '^within tolerance: e'; out 'tolerance: '
rc 1 diff a.safetensors b.safetensors --include e --rtol 0.5
rc 0 diff a.safetensors b.safetensors --exclude '[eopyz]'
rc 2 diff a.safetensors b.safetensors --include 'nothing*'; one_line; err "--include 'nothing\*' leaves no tensor"
rc 2 diff a.safetensors b.safetensors --include e --exclude '*'; one_line; err "--exclude '\*' leave no tensor"
rc 1 diff a.safetensors b.safetensors --quiet; [ ! -s $OUT ] || fail 'quiet is not'
rc 0 diff a.safetensors a.safetensors --verbose; out '^identical: e$'
# a difference in the sign of zero is a difference
cp a.safetensors n.safetensors; printf '\x80' | dd of=n.safetensors bs=1 seek=$(($(stat -c %s a.safetensors) - 1)) conv=notrunc status=none
rc 1 diff a.safetensors n.safetensors; out '^value: z: max abs 0'
rc 0 diff a.safetensors n.safetensors --atol 1e-9
m=$FIXTURES/mcore
rc 0 diff $m/legacy_tp1 $m/legacy_tp2
rc 1 diff $m/legacy_tp1 $m/lowrank_f_tp2
rc 0 diff $FIXTURES/torch/dcp_2rank $FIXTURES/torch/dcp_2rank --objects
rc 1 diff $m/legacy_tp1 $FIXTURES/hf/kimi_linear_tiny

# Many finite values are measured four at a time; a NaN in each of their blocks has them measured one by one,
# and says the same of the others. The first value of every 256 bytes is equal.
values() { # FIRST-NUMBER, what every 256 bytes begin with
    local i text
    text=$(seq "$1" 99999 | tr '\n' 7 | head -c 65536)
    for ((i = 0; i < 65536; i += 256)); do printf "$2%s" "${text:i + 8:248}"; done
}
for row in 'F64 8192 \xff\xff\xff\xff\xff\xff\xff\x7f' 'F32 16384 \xff\xff\xff\x7f1234' 'F16 32768 \xff\x7f123456' \
    'BF16 32768 \xff\x7f123456' 'F8_E4M3 65536 \x7f1234567'; do
    read -r type n nan <<<"$row"
    for s in a b; do
        from=70001
        [ $s = a ] || from=80002
        for v in finite nan; do
            start=12345678
            [ $v = finite ] || start=$nan
            st $s.$v "{\"t\":{\"dtype\":\"$type\",\"shape\":[$n],\"data_offsets\":[0,65536]}}" 0
            values $from "$start" >>$s.$v
        done
    done
    for v in finite nan; do
        rc 1 diff a.$v b.$v
        sed -n 's/, cosine.*//p' $OUT >said.$v
        out 'max ulp [1-9].*, first at \['
    done
    same said.finite said.nan
    grep -q 'cosine nan' $OUT || fail "$type: $(cat $OUT)"
done
