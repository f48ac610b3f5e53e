# Files that advance in step (sixteen ranks here) have the bytes and digests of any other way.
"$GEN" kimi src --size 300M >$OUT 2>$ERR || fail "gen: $(cat $ERR)"
rc 0 convert src a --to torch_dist --layout megatron --tp 16 --threads 1
rc 0 convert src b --to torch_dist --layout megatron --tp 16 --threads 3 --memory 2MiB
same_tree a b
[ "$(find a -name '*.distcp' -size +1024k | wc -l)" -ge 10 ] || fail "files too small to share a lane"
rm -rf b
rc 0 verify a --hash --files
rc 0 diff src a
