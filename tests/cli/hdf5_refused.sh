# HDF5: options that do not fit, damage, interruption.
k=$FIXTURES/hf/kimi_linear_tiny
rc 2 convert $k x.h5 --compress gzip; one_line; err "'gzip' is neither"
rc 2 convert $k x.h5 --compress shuffle-deflate:0; one_line
rc 2 convert $k x --compress shuffle-deflate; one_line; err 'container safetensors is not compressed'
rc 2 convert $k x.h5 --tp 2; one_line; err 'not sharded'
mkdir d; rc 2 convert $k d --to hdf5; one_line; err 'directory'; rmdir d
nothing_but -
rc 0 convert $k a.h5
rc 2 convert $k a.h5; one_line; err 'exists'
rc 2 convert a.h5 x; one_line; err 'choose --to'
rc 0 convert $k a.h5 --force --compress shuffle-deflate:9
rc 0 verify a.h5 --hash
# one bit of a chunk: the file's own checksum tells, and what is written has not started to exist
cp a.h5 b.h5; flip b.h5 $(($(stat -c %s b.h5) / 2))
rc 3 convert b.h5 x.h5; one_line; err 'Fletcher-32 checksum|cannot be read|damaged'; absent x.h5
# cut short, not HDF5 at all
for n in 8 100 2000 100000; do head -c $n a.h5 >c.h5; rc 3 inspect c.h5; one_line; rc 3 verify c.h5; rc 3 convert c.h5 x.h5; absent x.h5; done
echo hello >c.h5; rc 3 inspect c.h5; one_line
: >c.h5; rc 3 inspect c.h5; one_line
# names that HDF5 cannot hold
st p.safetensors '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a/b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}' 8
rc 4 convert p.safetensors x.h5; one_line; err "'a' and 'a/b'"
st p.safetensors '{"a//b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' 4
rc 4 convert p.safetensors x.h5; one_line; err "tensor 'a//b': HDF5 cannot store this name"
absent x.h5
# every dtype and shape, groups
st p.safetensors '{"g/h/f4":{"dtype":"F4","shape":[4,2],"data_offsets":[0,4]},"g/f6":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[4,7]},"b":{"dtype":"BOOL","shape":[],"data_offsets":[7,8]},"c":{"dtype":"C64","shape":[1,1],"data_offsets":[8,16]},"e":{"dtype":"F32","shape":[0,3],"data_offsets":[16,16]},"e8":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[16,19]}}' 19
rc 0 convert p.safetensors q.h5 --verify; rc 0 convert q.h5 r.safetensors --verify; rc 0 diff p.safetensors r.safetensors; out '^6 identical$'
rm -f p.safetensors q.h5* r.safetensors* c.h5 b.h5 a.h5*
# a file-size limit, a signal
mkdir in; st in/model.safetensors '{"w":{"dtype":"F32","shape":[4096,4096],"data_offsets":[0,67108864]}}' 67108864
# (libhdf5 leaks when it fails; that is not what a sanitizer is to look for here)
(ulimit -f 1000; ASAN_OPTIONS=detect_leaks=0 exec "$CKPT" convert in big.h5) >$OUT 2>$ERR; got=$?
[ $got -eq 5 ] || fail "file-size limit: exit $got"; one_line; err 'File too large'; absent big.h5; nothing_but in
for delay in 0.01 0.05 0.1; do
    "$CKPT" convert in out.h5 --threads 1 >$OUT 2>$ERR &
    pid=$!; sleep $delay; kill -TERM $pid; wait $pid; got=$?
    [ $got -eq 0 ] || [ $got -eq 130 ] || [ $got -eq 143 ] || fail "SIGTERM: exit $got"
    [ $got -ne 130 ] || { absent out.h5; err interrupted; }
    rm -f out.h5*; nothing_but in
done
