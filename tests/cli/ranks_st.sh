# Per-rank safetensors: cut over tensor parallelism by Hugging Face module names.
hf=$FIXTURES/hf
for m in kimi_linear_tiny llama_tiny_tied; do
    for tp in 1 2 4; do
        [ $m$tp != kimi_linear_tiny4 ] || continue # two KDA heads
        rc 0 convert $hf/$m $m.$tp --to ranks --tp $tp --verify --max-shard-size 100KB; out 'root equals source'
        present $m.$tp/model-rank-$((tp - 1))-part-0.safetensors; absent $m.$tp/model-rank-$tp-part-0.safetensors
        rc 0 diff $m.$tp $hf/$m; rc 0 verify $m.$tp --hash
        rc 0 convert $m.$tp back.$m.$tp --to safetensors; out 'root equals source'
        rc 0 convert $m.$tp again.$m.$tp --to ranks --tp 2; out 'root equals source'
    done
    same again.$m.1/model-rank-1-part-0.safetensors again.$m.2/model-rank-1-part-0.safetensors
done
rc 0 inspect kimi_linear_tiny.2; out '^container +rank_safetensors'
present kimi_linear_tiny.2/model-rank-0-part-1.safetensors

# whole ranks, whole parts
cp -r llama_tiny_tied.4 hole; rm hole/model-rank-1-part-*; rc 3 inspect hole; err 'no file of rank 1'; one_line
cp -r kimi_linear_tiny.2 part; rm part/model-rank-0-part-0.*; rc 3 inspect part; err 'missing'; one_line
# a replicated tensor that differs
cp -r llama_tiny_tied.2 odd; rm odd/ckpt.manifest.json
cp llama_tiny_tied.2/model-rank-1-part-0.safetensors x; at=$(grep -abo 'model.layers.0.input_layernorm.weight' x | head -1 | cut -d: -f1)
offset=$(head -c $((at + 120)) x | tail -c 120 | grep -aoE 'data_offsets":\[[0-9]+' | head -1 | grep -oE '[0-9]+$')
size=$(od -An -tu8 -N 8 x); flip odd/model-rank-1-part-0.safetensors $((8 + size + offset + 3))
rc 1 verify odd; out "'model.layers.0.input_layernorm.weight': the copy in model-rank-1-part-0.safetensors differs"
# refused
rc 2 convert $hf/llama_tiny_tied y --to ranks --tp 3; absent y
rc 4 convert $hf/kimi_linear_tiny y --to ranks --pp 2; err "tensor parallelism only: the rank in a file's name is the tensor-parallel one"; absent y
rc 2 convert $hf/kimi_linear_tiny y --to ranks --tp 4; err 'A_log.*not divisible by 4'; absent y
rc 4 convert $FIXTURES/mcore/legacy_tp2 y --to ranks --tp 2; err 'not known how parallel ranks share'; absent y
rc 4 convert $FIXTURES/mcore/legacy_tp1 y --to ranks; err 'layout hf'; absent y
rc 0 convert $hf/kimi_linear_tiny dist --to torch_dist --layout megatron --tp 2
rc 0 convert dist y --to ranks --layout hf --tp 2; out 'root equals source'
rc 0 diff y $hf/kimi_linear_tiny
# merged modules, repeated key/value heads and padded rows, as vLLM holds them
rc 0 diff $hf/llama_tiny_tied_tp4 $hf/llama_tiny_tied
rc 0 convert $hf/llama_tiny_tied_tp4 whole --to safetensors; rc 0 diff whole $hf/llama_tiny_tied
