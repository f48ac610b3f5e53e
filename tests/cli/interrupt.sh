# SIGINT, a file-size limit and an unwritable place leave no partial output.
mkdir in
st in/model.safetensors '{"w":{"dtype":"F32","shape":[16777216],"data_offsets":[0,67108864]}}' 67108864
(ulimit -f 1000; exec "$CKPT" convert in big) >$OUT 2>$ERR; got=$?
[ $got -eq 5 ] || fail "file-size limit: exit $got"; one_line; absent big; nothing_but in
for delay in 0.01 0.05 0.1; do
    "$CKPT" convert in out --threads 1 --memory 1MiB >$OUT 2>$ERR &
    pid=$!; sleep $delay; kill -INT $pid; wait $pid; got=$?
    # SIGINT is ignored in background jobs of a shell without job control: use SIGTERM then
    [ $got -eq 0 ] || [ $got -eq 130 ] || fail "SIGINT: exit $got"
    rm -rf out; nothing_but in
    "$CKPT" convert in out --threads 1 --memory 1MiB >$OUT 2>$ERR &
    pid=$!; sleep $delay; kill -TERM $pid; wait $pid; got=$?
    [ $got -eq 0 ] || [ $got -eq 130 ] || [ $got -eq 143 ] || fail "SIGTERM: exit $got"
    [ $got -ne 130 ] || { absent out; err interrupted; }
    rm -rf out; nothing_but in
done

# Commands that write nothing end at once, and say so.
rc 0 convert in a --to safetensors; cp -r a b
for args in 'diff a b' 'inspect a --stats' 'verify a --values --hash'; do
    for delay in 0.02 0.005 0.1; do
        "$CKPT" $args --threads 1 --memory 1MiB >$OUT 2>$ERR &
        pid=$!; sleep $delay; kill -TERM $pid; wait $pid; got=$?
        [ $got -eq 130 ] && break
    done
    [ $got -eq 0 ] || [ $got -eq 1 ] || [ $got -eq 130 ] || [ $got -eq 143 ] || fail "$args: exit $got"
    [ $got -ne 130 ] || { one_line; err "ckpt: ${args%% *}: .*interrupted"; }
done
# One that is certainly still there: it waits for a reader of its output.
mkfifo pipe
(sleep 60) <pipe & reader=$!
"$CKPT" inspect $FIXTURES/hf/kimi_linear_tiny --head 100 >pipe 2>$ERR & pid=$!
sleep 1; kill -TERM $pid; wait $pid; got=$?; kill $reader
[ $got -eq 130 ] || fail "inspect: exit $got"; one_line; err '^ckpt: inspect: interrupted$'
