# The recipes of the README, line by line, on small models under the names used there.
export OMP_NUM_THREADS=1
k=$FIXTURES/hf/kimi_linear_tiny
cp -r $k kimi; cp -r $FIXTURES/mcore/legacy_tp2 legacy; cp $FIXTURES/fla/corpus.txt .
rc 0 convert $k run8 --to torch_dist --layout megatron --tp 8
echo '{"gate":1,"sources":{"a":{"path":"hf"}},"cases":[{"source":"a","checks":["structure","hash"]}]}' >gate.json
n=0
while IFS= read -r line; do
    line=${line#'    $ '} n=$((n + 1))
    line=${line%%#*}
    case $line in 'ckpt '*) ;; *) fail "no ckpt: $line" ;; esac
    bash -c "\"\$CKPT\" ${line#ckpt }" >$OUT 2>$ERR || fail "$line: exit $?: $(head -c 600 $ERR $OUT)"
done < <(sed -n '/^## Recipes/,/^## Commands/p' "$FIXTURES/../README.md" | grep '^    \$ ')
[ $n -eq 12 ] || fail "$n lines"
present run.html; present gate.xml; present gate.sarif
rc 0 diff kimi hf; out '^151 identical'
grep -q '"step":6' run/metrics.jsonl || fail 'steps'
