# --resume: killed at any moment, continued, and the result is that of a run nobody disturbed.
export SOURCE_DATE_EPOCH=1700000000
shard=8MB kills=20
if sanitized any; then kills=6; fi
"$GEN" kimi src --size 300M >$OUT 2>$ERR || { fail "gen: $(cat $ERR)"; return; }
to="--to torch --max-shard-size $shard --threads 2 --memory 4MiB"
start=$(date +%s%N); rc 0 convert src want $to; took=$((($(date +%s%N) - start) / 1000000)) # ms
files=$(ls want | wc -l); [ "$files" -gt 20 ] || fail "only $files files"
left() { ls -d .got.ckpt-tmp.* 2>/dev/null; }
# killed many times, at any moment of what a whole run takes
taken=0 killed=0
for _ in $(seq $kills); do
    "$CKPT" convert src got $to --resume >$OUT 2>$ERR & pid=$!
    ms=$((RANDOM * took / 32768 + 5)); sleep "$((ms / 1000)).$(printf %03d $((ms % 1000)))"; kill -9 $pid 2>/dev/null; wait $pid 2>/dev/null; got=$?
    if [ $got -eq 137 ]; then killed=$((killed + 1)); else [ $got -eq 0 ] || fail "exit $got: $(cat $ERR)"; fi
    grep -qE 'note: [1-9][0-9]* of [0-9]+ files taken over' $ERR && taken=$((taken + 1))
    [ ! -d got ] || { same_tree got want; rm -rf got; }
done
[ $killed -ge $((kills / 6)) ] || fail "killed only $killed times"
# killed in the last instant before the rename, when the journal is gone: named, never used
for d in $(left); do [ -e $d/.ckpt-journal ] || rm -rf $d; done
rc 0 convert src got $to --resume --verify; same_tree got want; [ -z "$(left)" ] || fail "left: $(left)"
[ $taken -ge 1 ] || grep -q '[1-9][0-9]* of [0-9]* files taken over' $ERR || fail "nothing was ever taken over"
rm -rf got
# kill_late: killed when at least three files are finished
kill_late() {
    "$CKPT" convert src got "$@" --threads 1 --memory 1MiB >$OUT 2>$ERR & pid=$!
    for _ in $(seq 2000); do
        [ "$(cat .got.ckpt-tmp.$pid/.ckpt-journal 2>/dev/null | grep -c ^file)" -ge 3 ] && break
        kill -0 $pid 2>/dev/null || break
    done
    kill -9 $pid 2>/dev/null; wait $pid 2>/dev/null
    [ $? -eq 137 ] && present .got.ckpt-tmp.$pid/.ckpt-journal
}
kill_late --to torch --max-shard-size $shard || fail 'not killed in time'
# without --resume it is named; other options, or another source, leave it alone
rc 0 convert src other --to torch --max-shard-size $shard; silent; rm -rf other
rc 0 convert src got --to torch --max-shard-size $shard; err 'note: .*got.ckpt-tmp.* was left by an interrupted run: --resume continues it'; same_tree got want; rm -rf got
rc 0 convert src got --to torch --max-shard-size 30MB --resume; err 'with other options or another source: remove it by hand'; err 'note: 0 of '; rm -rf got; [ -n "$(left)" ] || fail 'removed'
cp -al src src2; rm src2/config.json; cp src/config.json src2; rc 0 convert src2 got --to torch --max-shard-size $shard --resume; err 'another source'; rm -rf got
# a finished file that was damaged since is written again; one that is untouched is not
first=$(grep ^file "$(left)/.ckpt-journal" | head -1 | cut -d' ' -f2); name=$(printf 'pytorch_model-%05d-of-' $((first + 1)))
flip "$(ls "$(left)"/$name*)" 1000000
rc 0 convert src got --to torch --max-shard-size $shard --resume; err '1 finished file of .* damaged: written again'; err 'note: [1-9][0-9]* of'
same_tree got want; [ -z "$(left)" ] || fail "left: $(left)"; rm -rf got
# a torn last line, and lines that lie, are not believed
kill_late --to torch --max-shard-size $shard || fail 'not killed in time'
printf 'file 0 17' >>"$(left)/.ckpt-journal"; rc 0 convert src got --to torch --max-shard-size $shard --resume; same_tree got want; rm -rf got
# two interrupted runs are both used; a running one is left alone
kill_late --to torch --max-shard-size $shard; kill_late --to torch --max-shard-size $shard; [ "$(left | wc -l)" -eq 2 ] || fail "$(left)"
rc 0 convert src got --to torch --max-shard-size $shard --resume; same_tree got want; [ -z "$(left)" ] || fail "left: $(left)"; rm -rf got
# a run with --resume that is stopped keeps what it finished; without, nothing stays
"$CKPT" convert src got $to --resume >$OUT 2>$ERR & pid=$!
for _ in $(seq 2000); do [ "$(grep -c ^file .got.ckpt-tmp.$pid/.ckpt-journal 2>/dev/null)" -ge 2 ] 2>/dev/null && break; kill -0 $pid 2>/dev/null || break; done
kill -TERM $pid 2>/dev/null; wait $pid; got=$?
[ $got -ne 130 ] || { err 'finished files kept in .*for --resume'; absent got; [ -n "$(left)" ] || fail 'nothing kept'; }
rm -rf got; rc 0 convert src got $to --resume; same_tree got want; rm -rf got
# torch_dist, whose files advance together, and a save root
rc 0 convert src dist --to torch_dist --layout megatron --tp 4 --threads 2
"$CKPT" convert src got --to torch_dist --layout megatron --tp 4 >$OUT 2>$ERR & pid=$!; sleep 0.1; kill -9 $pid; wait $pid 2>/dev/null
rm -rf got; rc 0 convert src got --to torch_dist --layout megatron --tp 4 --resume; same_tree got dist
