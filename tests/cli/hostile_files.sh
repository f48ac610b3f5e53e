# Files that lie about sizes, counts and depth: exit 3 (4 where it is a limit of this program), one line
# that names file, tensor or record and both numbers; quickly, and in little memory.
# refused CODE FILE MESSAGE: the whole line but for the program and the command
refused() {
    rc "$1" verify "$2"; one_line
    [ "$(cat $ERR)" = "ckpt: verify: $2: $3" ] || fail "expected '$2: $3', found '$(cat $ERR)'"
}
one() { st "$1.safetensors" "{\"a\":$2}" "${3:-1}"; }

# ---- safetensors: sizes ----------------------------------------------------------------------------
printf "$(le 8 100000001)" >long.safetensors; truncate -s 100000009 long.safetensors
refused 3 long.safetensors 'header length 100000001 exceeds the limit of 100000000 bytes'
printf '\xff\xff\xff\xff\xff\xff\xff\xff{}' >most.safetensors
refused 3 most.safetensors 'header length 18446744073709551615 exceeds the limit of 100000000 bytes'
printf "$(le 8 1000){}" >short.safetensors
refused 3 short.safetensors 'header of 1000 bytes ends past the end of the file (10 bytes)'
one product '{"dtype":"F64","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}' 8
refused 3 product.safetensors "tensor 'a': dtype F64 shape [4294967296,4294967296,4294967296] overflows a 64-bit size"
one bytes '{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}' 0
refused 3 bytes.safetensors "tensor 'a': dtype F64 shape [2305843009213693952] overflows a 64-bit size"
one rank "{\"dtype\":\"U8\",\"shape\":[$(printf '1,%.0s' $(seq 99))1],\"data_offsets\":[0,1]}"
refused 4 rank.safetensors "tensor 'a': shape: rank is above the limit of 16"
one big '{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}'
refused 3 big.safetensors "tensor 'a': shape: header byte 28: integer 9223372036854775808 is above the limit 9223372036854775807"
# 2^53 + 1 is itself, not its neighbour
one exact '{"dtype":"U8","shape":[9007199254740993],"data_offsets":[0,9007199254740993]}'
rc 3 verify exact.safetensors; one_line; err '9007199254740993'; no_err '900719925474099[0-24-9]'

# ---- depth and text --------------------------------------------------------------------------------
deep=$(printf '%*s' 100000 '' | tr ' ' '[')
st deep.safetensors "{\"a\":$deep}" 0
refused 3 deep.safetensors "tensor 'a': header byte 6: expected a string, found an array"
st deeper.safetensors "{\"a\":{\"x\":$deep}}" 0
rc 3 verify deeper.safetensors; one_line; err 'nested deeper than 127'
mkdir ix; printf '{"weight_map":%s' "$deep" >ix/model.safetensors.index.json
rc 3 verify ix; one_line; err 'model.safetensors.index.json: JSON offset [0-9]+: nested deeper than 128 levels'
st utf8.safetensors $'{"\xff\xfe":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' 1
refused 3 utf8.safetensors 'header byte 2: invalid UTF-8 (byte 0xff)'
one surrogate '{"dtype":"\ud800","shape":[1],"data_offsets":[0,1]}'
rc 3 verify surrogate.safetensors; one_line; err 'surrogate'
st nul.safetensors '{"a\u0000b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' 1
refused 3 nul.safetensors "tensor name 'a...' contains a NUL character"
# what was saved in place of a model
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 9\n' 7 >lfs.safetensors
refused 3 lfs.safetensors "Git LFS pointer, not the file itself (oid sha256:$(printf %064d 7), size 9): fetch it with 'git lfs pull'"
printf '<!DOCTYPE html>\n<html><title>Sign in</title></html>' >page.safetensors
rc 3 verify page.safetensors; one_line; err 'page.safetensors: .*HTML'

# ---- pickles in a torch.save archive ---------------------------------------------------------------
# record NAME FILE METHOD SIZE: a zip record. CRC 0 stands for one that was not computed.
record() {
    local common at=$offset csize
    csize=$(stat -c %s "$2")
    common="$(le 2 0)$(le 2 $3)$(le 4 0)$(le 4 0)$(le 4 "$csize")$(le 4 "$4")$(le 2 ${#1})$(le 2 0)"
    { printf "PK\x03\x04$(le 2 20)$common$1"; cat "$2"; } >>"$zip"
    central+="PK\x01\x02$(le 2 20)$(le 2 20)$common$(le 2 0)$(le 2 0)$(le 2 0)$(le 4 0)$(le 4 "$at")$1"
    records=$((records + 1)) directory=$((directory + 46 + ${#1}))
    offset=$((offset + 30 + ${#1} + csize))
}
# end FILE OFFSET: its central directory, at OFFSET
end() { printf "$central" >>"$1"; printf "PK\x05\x06$(le 4 0)$(le 2 $records)$(le 2 $records)$(le 4 $directory)$(le 4 "$2")$(le 2 0)" >>"$1"; }
# pt FILE: of data.pkl (deflated as raw.z if that is there) and a version
pt() {
    zip=$1 offset=0 records=0 directory=0 central=''
    : >"$zip"
    if [ -e raw.z ]; then record archive/data.pkl raw.z 8 "$2"; else record archive/data.pkl data.pkl 0 "$(stat -c %s data.pkl)"; fi
    printf '3\n' >version; record archive/version version 0 2
    end "$zip" $offset
}
printf '\x80\x02}.' >data.pkl; pt good.pt; rc 0 verify good.pt
pickle() { # NAME ESCAPES MESSAGE
    printf '\x80\x02' >data.pkl; printf "$2" >>data.pkl; pt "$1.pt"; refused 3 "$1.pt" "archive/data.pkl: $3"
}
pickle long4 '\x8b\xff\xff\xff\x7f\x01.' 'pickle opcode 0x8b at byte 2: argument of 2147483647 bytes, 2 left'
pickle string 'X\xff\xff\xff\xffaaaa.' 'pickle opcode 0x58 at byte 2: argument of 4294967295 bytes, 5 left'
pickle string8 '\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.' 'pickle opcode 0x8d at byte 2: argument of 9223372036854775807 bytes, 2 left'
pickle bytes8 '\x8e\xff\xff\xff\xff\xff\xff\xff\x7fa.' 'pickle opcode 0x8e at byte 2: argument of 9223372036854775807 bytes, 2 left'
pickle frame '\x95\xff\xff\xff\xff\xff\xff\xff\xffN.' 'pickle opcode 0x95 at byte 2: frame of 18446744073709551615 bytes, 2 left'
pickle memo 'j\xff\xff\xff\xff.' 'pickle opcode 0x6a at byte 2: memo index 4294967295 was never stored'
# a memo index of four billion takes no memory for those below it
printf '\x80\x02}r\xff\xff\xff\xff.' >data.pkl; pt sparse.pt
(ulimit -v 400000; OPENBLAS_NUM_THREADS=1 exec "$CKPT" verify sparse.pt >$OUT 2>$ERR); got=$?
[ $got -eq 0 ] || sanitized any || fail "sparse memo: exit $got: $(cat $ERR)"
# OpenBLAS would ask for its buffers for ever.
if ! sanitized asan && ! sanitized tsan; then
    (ulimit -v 150000; exec timeout -s KILL 20 "$CKPT" convert "$FIXTURES/mcore/legacy_tp2" factors --kda-f-lora-rank 8 --kda-gate-lora-rank 8 --approximate >$OUT 2>$ERR); got=$?
    [ $got -eq 4 ] || fail "a decomposition without memory: exit $got: $(cat $ERR)"
    err 'needs OpenBLAS: its buffers take [0-9]+ MiB of address space, and the limit \(ulimit -v\) leaves less'
    absent factors
fi
{ printf '\x80\x02'; printf '%*s' 1100000 '' | tr ' ' '('; } >data.pkl; pt marks.pt
refused 3 marks.pt 'archive/data.pkl: pickle opcode 0x28 at byte 1048578: more than 1048576 marks'
{ printf '\x80\x02N'; printf '%*s' 1100000 '' | tr ' ' 2; } >data.pkl; pt stack.pt
refused 3 stack.pt 'archive/data.pkl: pickle opcode 0x32 at byte 1048578: stack deeper than 1048576'
{ printf '\x80\x02'; printf '%*s' 1000 '' | tr ' ' ']'; printf '%*s' 999 '' | tr ' ' 'a'; printf .; } >data.pkl; pt nested.pt
rc 3 verify nested.pt; one_line; err 'nested.pt: objects nested deeper than 256'
# ten references to ten references to ...: 10^39 objects in 600 bytes
laughs='(K\x01lq\x00'
for i in $(seq 39); do
    laughs+="0($(printf "h\\\\x%02x%.0s" $((i - 1)) 1 $((i - 1)) 2 $((i - 1)) 3 $((i - 1)) 4 $((i - 1)) 5 $((i - 1)) 6 $((i - 1)) 7 $((i - 1)) 8 $((i - 1)) 9 $((i - 1)) 10)lq\\x$(printf %02x $i)"
done
printf '\x80\x02' >data.pkl; printf "$laughs." >>data.pkl; pt laughs.pt
rc 3 verify laughs.pt; one_line; err 'laughs.pt: [0-9]+ objects refer to each other in more than [0-9]+ ways'

# ---- archives --------------------------------------------------------------------------------------
# 32 MiB of nothing in 32 KiB
{ printf '\x80\x02X'; printf "$(le 4 33554432)"; head -c 33554432 /dev/zero; printf .; } | gzip -9n | tail -c +11 | head -c -8 >raw.z
pt bomb.pt 33554440
refused 3 bomb.pt "zip: entry 'archive/data.pkl': 33554440 bytes deflated to $(stat -c %s raw.z), more than 200 to 1: a zip bomb"
pt lie.pt 4000000000
rc 3 verify lie.pt; one_line; err "entry 'archive/data.pkl': 4000000000 bytes"
rm raw.z; printf '\x80\x02}.' >data.pkl; pt count.pt
size=$(stat -c %s count.pt)
printf '\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff' | dd of=count.pt bs=1 seek=$((size - 14)) conv=notrunc status=none
rc 3 verify count.pt; one_line; err 'count.pt: zip: central directory of 4294967295 bytes at 4294967295'
printf "PK\x06\x06$(le 8 44)$(le 4 45)$(le 8 0)$(le 8 4294967296)$(le 8 4294967296)$(le 8 197568495616)$(le 8 0)PK\x06\x07$(le 4 0)$(le 8 0)$(le 4 1)PK\x05\x06$(le 4 0)\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff$(le 2 0)" >tail.bin
cat good.pt tail.bin >count64.pt
rc 3 verify count64.pt; one_line; err 'count64.pt: zip: '

# names that lead out of the directory somebody may extract to: refused, though nothing is extracted here
named() { # NAME MESSAGE: an archive with that record beside a good pickle
    zip=named.pt offset=0 records=0 directory=0 central=''
    : >$zip
    record archive/data.pkl data.pkl 0 "$(stat -c %s data.pkl)"; printf '3\n' >version; record "$1" version 0 2
    end $zip $offset
    refused 3 $zip "$2"
}
for name in ../version archive/../../version /archive/version archive/..; do
    named "$name" "zip: entry '$name': expected a path inside the archive"
done
# a record within a record: what is one to a reader is another to the next
zip=inner offset=0; : >inner; record archive/version version 0 2
zip=overlap.pt offset=0 records=0 directory=0 central=''; : >$zip; record archive/data.pkl inner 0 "$(stat -c %s inner)"; whole=$offset
zip=/dev/null offset=46; record archive/version version 0 2; end overlap.pt $whole
refused 3 overlap.pt "zip: entry 'archive/version' at 46 overlaps 'archive/data.pkl', which ends at $whole"
# a tensor that repeats the one element of its storage 10^12 times
tensor='ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00'
expanded() { # FILE LENGTH: one of LENGTH x LENGTH elements
    { printf '\x80\x02'; printf "$tensor"; printf "(J$(le 4 "$2")J$(le 4 "$2")t(K\x00K\x00t\x89ccollections\nOrderedDict\n)RtR."; } >data.pkl
    zip=$1 offset=0 records=0 directory=0 central=''; : >"$zip"; printf '\x00\x00\x80\x3f' >one
    record archive/data.pkl data.pkl 0 "$(stat -c %s data.pkl)"; record archive/data/0 one 0 4; record archive/version version 0 2; end "$1" $offset
}
expanded million.pt 1000000
refused 4 million.pt "tensor 'tensor': 1000000000000 elements expanded from the 1 of storage '0': more than 200 to 1"
expanded some.pt 100; rc 0 convert some.pt some.safetensors

# ---- a Git LFS pointer or a page in place of what is read beside the tensors --------------------------
pointer="version https://git-lfs.github.com/spec/v1
oid sha256:$(printf %064d 7)
size 9"
instead() { # DIRECTORY FILE: the one of DIRECTORY, which becomes m
    rm -rf m; cp -r "$FIXTURES/$1" m; rm -f m/ckpt.manifest.json
    echo "$pointer" >"m/$2"; rc 3 inspect m; one_line
    err "${2##*/}: Git LFS pointer, not the file itself \(oid sha256:0{63}7, size 9\): fetch it with 'git lfs pull'\$"
    echo '<!DOCTYPE html><html>' >"m/$2"; rc 3 inspect m; one_line; err "${2##*/}: HTML page saved as a checkpoint's file\$"
    no_err 'JSON|opcode'
}
instead hf/llama_tiny_tied config.json
instead hf/kimi_linear_tiny model.safetensors.index.json
instead mcore/gpt_relu2/iter_0000010 metadata.json
instead mcore/gpt_relu2/iter_0000010 .metadata
instead torch/mcore_zarr uneven/.zarray

# ---- token indexes ---------------------------------------------------------------------------------
head -c 64 /dev/zero >t.bin
printf "MMIDIDX\x00\x00$(le 8 1)\x08$(le 8 4294967296)$(le 8 4294967296)" >t.idx
rc 3 train --resume $FIXTURES/hf/kimi_linear_tiny --data t.idx --steps 1 --threads 1; one_line
err 't.idx: 34 bytes do not hold 4294967296 sequences and 4294967296 document ends$'
printf "MMIDIDX\x00\x00$(le 8 1)\x08$(le 8 -1)$(le 8 1)" >t.idx
rc 3 train --resume $FIXTURES/hf/kimi_linear_tiny --data t.idx --steps 1 --threads 1; one_line
err 't.idx: 34 bytes do not hold 18446744073709551615 sequences and 1 document ends$'
printf "MMIDIDX\x00\x00$(le 8 1)\x08$(le 8 1)$(le 8 1)$(le 4 2147483647)$(le 8 0)$(le 8 0)" >t.idx
rc 3 train --resume $FIXTURES/hf/kimi_linear_tiny --data t.idx --steps 1 --threads 1; one_line
err 't.idx: sequence 0: 2147483647 tokens of 2 bytes at offset 0, but t.bin has 64 bytes$'
