# A user's layout table: written with it, read with it, and what is wrong with one.
k=$FIXTURES/hf/kimi_linear_tiny
if command -v python3 >/dev/null; then
    rc 0 inspect $k --json
    for side in source target; do
        python3 - $OUT $side >$side.json <<'PY'
import json, re, sys
rows = {}
for t in json.load(open(sys.argv[1]))["tensors"]:
    for c in t["canonical"]:
        n = re.sub(r"^blocks\.\d+", "blocks.{l}", c["name"])
        n = re.sub(r"experts\.\d+", "experts.{e}", n)
        rows[n] = dict(canon=n, stored="w." + n, view=" | ".join(map(str, c["shape"])))
json.dump(dict(name="mine", like="hf:kimi_linear", side=sys.argv[2], rows=list(rows.values())), sys.stdout)
PY
    done
    rc 0 convert $k m --map target.json; out 'root equals source'
    rc 0 inspect m 'w.blocks.0.kda.q.weight'; out '^w.blocks.0.kda.q.weight'
    rc 2 convert $k n --map target.json --layout hf; one_line; absent n
    rc 0 convert m h --map source.json --layout hf --verify; out 'root equals source'
    rc 0 diff h $k; same h/config.json $k/config.json
    rc 0 convert m g --map source.json --to torch_dist --layout megatron --tp 2; rc 0 diff g $k
fi
st s.safetensors '{"h":{"dtype":"F32","shape":[6,2],"data_offsets":[0,48]}}' 48
bad() { echo "$1" >bad.json; rc $2 convert s.safetensors u --map bad.json; one_line; err bad.json; err "$3"; }
bad '{"name":"x","rows":[]}' 3 rows
bad '{"name":"x"' 3 bad
bad '{"name":"x","like":"hf:nope","rows":[{"canon":"a","stored":"b","view":"H"}]}' 3 hf:nope
bad '{"name":"x","side":"up","rows":[{"canon":"a","stored":"b","view":"H"}]}' 3 side
bad '{"name":"x","rows":[{"canon":"a","stored":"b"}]}' 3 view
rc 5 convert s.safetensors u --map none.json; one_line
absent u

# The documented example: another model's names, as good as the layout that knows them.
a=$FIXTURES/hf/arcee_kda_tiny
rc 0 convert $a arcee --map $FIXTURES/maps/arcee_kda.json --layout hf --verify; out 'root equals source'
same arcee/model.safetensors $a/model.safetensors; same arcee/config.json $a/config.json
rc 0 convert $a built_in --layout hf --verify
same arcee/ckpt.manifest.json built_in/ckpt.manifest.json
sed 's/"side": "source"/"side": "target"/' $FIXTURES/maps/arcee_kda.json >target.json
rc 0 convert $a arcee2 --map target.json --verify; same arcee2/model.safetensors $a/model.safetensors
# a table that forgets a tensor says so
sed '/mlp.down.weight/d; s/"mlp.up_proj.weight", "view": "F | H"},/"mlp.up_proj.weight", "view": "F | H"}/' \
    $FIXTURES/maps/arcee_kda.json | sed 'N;s/},\n  \]/}\n  ]/;P;D' >short.json
rc 4 convert $a short --map short.json --layout hf; one_line; err 'mlp.down_proj.weight'; absent short
