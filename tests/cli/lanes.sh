# Files that advance in step (sixteen ranks here) have the bytes and digests of any other way.
export SOURCE_DATE_EPOCH=1700000000
"$GEN" kimi src --size 300M >$OUT 2>$ERR || fail "gen: $(cat $ERR)"
rc 0 convert src a --to torch_dist --layout megatron --tp 16 --threads 1
rc 0 convert src b --to torch_dist --layout megatron --tp 16 --threads 3 --memory 2MiB
same_tree a b
[ "$(find a -name '*.distcp' -size +1024k | wc -l)" -ge 10 ] || fail "files too small to share a lane"
rm -rf b
rc 0 verify a --hash --files
rc 0 diff src a
# verifying reads them in step as well: one pass for both kinds of digests, whatever the threads
cp a/*/ckpt.manifest.json want.json 2>/dev/null || cp a/ckpt.manifest.json want.json
for how in '--threads 1' '--threads 2 --memory 1MiB' '--threads 16'; do
    rc 0 verify a --write --force $how; same "$(find a -name ckpt.manifest.json)" want.json
    rc 0 verify a --hash --files --strict $how
done
(cd "$(dirname "$(find a -name ckpt.manifest.json)")" && find . -name '*.distcp' -exec sha256sum {} +) >sums.txt
[ "$(wc -l <sums.txt)" -ge 10 ] || fail "$(cat sums.txt)"
while read -r sum _; do grep -q "\"$sum\"" want.json || fail "no file has digest $sum"; done <sums.txt
# a byte of a tensor, and one of none, in a file among others
f=$(find a -name '*.distcp' -size +1024k | sort | sed -n 5p); cp $f keep
flip $f $(($(stat -c %s $f) / 2)); rc 1 verify a --hash --files; out "$(basename $f).*tensor '"; out "$(basename $f).*sha256|sha256.*$(basename $f)"; cp keep $f
flip $f "$(grep -obUam1 ZZZZZZZZ $f | head -1 | cut -d: -f1)"; rc 1 verify a --hash --files; out "$(basename $f)"; no_out "tensor '"; cp keep $f
truncate -s -4096 $f; rc 3 verify a --hash --files; one_line; cp keep $f
rc 0 verify a --hash --files
# where the system gives less memory than the buffers would take, less has to do
sanitized any || (ulimit -v 400000; exec "$CKPT" verify a --hash --files --threads 64 >$OUT 2>$ERR) || fail "64 threads: $(cat $ERR)"
rm -rf a keep
# a dozen files of other containers
for to in safetensors torch; do
    rc 0 convert src c --to $to --max-shard-size 25MB; rc 0 verify c --hash --files --strict
    cp c/ckpt.manifest.json want.json; rc 0 verify c --write --force; same c/ckpt.manifest.json want.json; rm -rf c
done
