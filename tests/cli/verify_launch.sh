# verify on ranks that the program starts itself: --forward cut by heads and by sequences in both modes, digests
# divided, and one rank's words whatever comes out.
export OMP_NUM_THREADS=1
k=$FIXTURES/hf/kimi_linear_tiny
loss() { grep -oE 'loss [0-9.]{8}' $OUT; }
rc 0 verify $k --forward; want=$(loss) sha=$(grep -oE 'sha256 [0-9a-f]*' $OUT); lines=$(wc -l <$OUT)
for n in '--tp 2' '--cp 2' '--cp 2 --cp-mode chunks' '--ep 2'; do
    rc 0 verify $k --forward --launch 2 $n; silent
    [ "$(loss)" = "$want" ] && [ "$(wc -l <$OUT)" -eq "$lines" ] || fail "$n: $(head -3 $OUT), expected $want"
done
rc 0 verify $k --forward --launch 2 --cp 2 --cp-mode chunks; [ "$(grep -oE 'sha256 [0-9a-f]*' $OUT)" = "$sha" ] || fail "logits in pieces: $(head -1 $OUT)"
rc 0 verify $k --forward --launch 1; [ "$(loss)" = "$want" ] || fail "one rank: $(head -1 $OUT)"
rc 0 verify $k --forward --launch 2 --json; [ "$(grep -c '"loss"' $OUT)" -eq 1 ] || fail "not one document: $(cat $OUT)"
# what differs is said once, and its exit code is the program's
rc 0 convert $k m; rc 0 verify m --hash --launch 3; out 'all digests match'; silent
flip m/model.safetensors 70000; rc 1 verify m --hash; cp $OUT one.txt
rc 1 verify m --hash --launch 3; same one.txt $OUT; silent
rc 1 verify m --hash --files; cp $OUT one.txt
for _ in 1 2 3 4 5 6; do rc 1 verify m --hash --files --launch 5; same one.txt $OUT; silent; done # whoever is first to end
rc 1 verify m --hash --launch 2 --quiet; one_line; err 'm: model.safetensors: tensor'
rc 1 verify $k --forward --launch 2 --against $FIXTURES/hf/llama3_tiny; no_err 'exit status'
# errors are one line
rc 5 verify nowhere --launch 2; one_line; err 'nowhere: No such file'
rc 2 verify $k --forward --launch 3; one_line; err 'cannot be cut into 3 parts'
rc 2 verify $k --forward --cp 2; one_line; err 'start as many as tp x cp with --launch or mpirun -np'
rc 2 verify $k --forward --launch 4 --tp 2; one_line; err 'tp 2, cp 1 and ep 1, and 4 ranks'
rc 2 verify $k --forward --launch 2 --cp-mode chunks; one_line; err 'cp-mode has no effect: sequences are not cut'
rc 2 verify $k --cp-mode chunks; one_line; err 'cp-mode needs --forward'
rc 2 verify $k --launch 65; one_line; err 'outside 1..64'
OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 rc 2 verify $k --launch 2; one_line; err 'mpirun has started ranks already'
