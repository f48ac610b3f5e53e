# Two runs for one destination: the second refuses. A source that changes while it is read is noticed.
mkdir in
st in/model.safetensors '{"w":{"dtype":"F32","shape":[33554432],"data_offsets":[0,134217728]}}' 134217728
slow='--threads 1 --memory 1MiB'
# a run that lives holds the lock of its journal: stand in for it, so that nothing depends on time
mkdir .out.ckpt-tmp.1; : >.out.ckpt-tmp.1/.ckpt-journal
exec 9<.out.ckpt-tmp.1/.ckpt-journal; flock -x 9
rc 4 convert in out; one_line; err 'another run is writing this output, in \.out\.ckpt-tmp\.1$'; absent out
rc 4 convert in out --force; err 'another run'
rc 0 convert in other; silent; rm -rf other
exec 9<&-
rc 0 convert in out; err 'note: .*ckpt-tmp.1 was left by an interrupted run'; rm -rf out .out.ckpt-tmp.1
# before the journal is there, and for a single file, the process that the name tells has to live
mkdir .out.ckpt-tmp.$$
rc 4 convert in out; one_line; err "another run is writing this output, in \.out\.ckpt-tmp\.$$"; rmdir .out.ckpt-tmp.$$
: >.out.safetensors.ckpt-tmp.$$
rc 4 convert in out.safetensors; one_line; err "out.safetensors: another run is writing it, in \.out\.safetensors\.ckpt-tmp\.$$"; absent out.safetensors
rm .out.safetensors.ckpt-tmp.$$
(exit 0) & dead=$!; wait $dead; : >.out.safetensors.ckpt-tmp.$dead
rc 0 convert in out.safetensors; err "note: \.out\.safetensors\.ckpt-tmp\.$dead was left by an interrupted run"
rm -f .out.safetensors.ckpt-tmp.$dead out.safetensors*
nothing_but in
# two real ones, started together: at most one writes, and nothing is left
"$CKPT" convert in out $slow >a.out 2>a.err & one=$!
"$CKPT" convert in out $slow >b.out 2>b.err & two=$!
wait $one; x=$?; wait $two; y=$?
case "$x $y" in
'0 4' | '4 0' | '4 4' | '0 2' | '2 0') ;;
*) fail "two runs: exit $x and $y: $(cat a.err b.err)" ;;
esac
rm -rf out a.out a.err b.out b.err; nothing_but in
# written to, cut, grown or replaced while it is read
changed() { # WHAT COMMAND-OF-SHELL
    "$CKPT" convert in out $slow >$OUT 2>$ERR & pid=$!
    # the source is open once there is output; before, the change would not be one
    until [ -e .out.ckpt-tmp.$pid/model.safetensors ]; do kill -0 $pid 2>/dev/null || break; done
    eval "$2"; wait $pid; got=$?
    # 0: the run was over before the change
    [ $got -eq 5 ] || [ $got -eq 0 ] || fail "$1: exit $got: $(cat $ERR)"
    if [ $got -eq 5 ]; then one_line; err "model.safetensors"; absent out; hits=$((hits + 1)); fi
    rm -rf out; nothing_but in
}
f=in/model.safetensors hits=0
for _ in 1 2 3; do
    changed written 'printf x | dd of=$f bs=1 seek=100000000 conv=notrunc status=none'
    changed grown 'printf x >>$f'; truncate -s -1 $f
    changed replaced 'cp $f in/new; mv in/new $f'
    changed cut 'truncate -s 1000 $f'; truncate -s 0 $f; st $f '{"w":{"dtype":"F32","shape":[33554432],"data_offsets":[0,134217728]}}' 134217728
done
[ $hits -ge 3 ] || fail "noticed only $hits of 12 changes"
# read-only places
[ "$(id -u)" -eq 0 ] || { chmod a-w in; rc 0 convert in ok; mkdir ro; chmod a-w ro; rc 5 convert in ro/out; one_line; err 'ro: Permission denied'; chmod u+w ro in; rm -rf ok; }
