# --device cuda: the program with the plug-in that runs the kernels on the CPU (make cuda-emulated). Peers'
# references in f32; bf16 near f32; training near the CPU's; N steps = k steps + save + resume + N - k.
emulated=$(dirname "$CKPT")/emulated/ckpt
present "$emulated"
present "$(dirname "$emulated")/libckpt_cuda.so"
with_plugin
export OMP_NUM_THREADS=1
cpu=$CKPT
hf=$FIXTURES/hf
CKPT=$emulated
rc 0 verify $hf/kimi_linear_tiny --forward --reference $hf/kimi_linear_tiny.reference.safetensors --device cuda
out 'relative RMS [0-9.]+e-06; worst gradient'
rc 0 verify $hf/llama_tiny_tied --forward --device cuda --verbose
err 'device: emulated on the CPU, products by'
f32=$(grep -oE 'loss [0-9.]+' $OUT)
rc 0 verify $hf/llama_tiny_tied --forward --device cuda --dtype bf16
bf16=$(grep -oE 'loss [0-9.]+' $OUT)
[ "$f32" != "$bf16" ] && [ "${f32%.*}" = "${bf16%.*}" ] || fail "f32 $f32, bf16 $bf16"
echo "1 99999999" >tokens
rc 3 verify $hf/kimi_linear_tiny --forward --device cuda --tokens tokens; one_line
err 'token 1: id 99999999, expected 0 to'

# Quantisation policies: the exact path near the CPU's, FP8 within what flipped roundings move; training.
echo '{"linear_attention":[{"module_name":"*","cfg":{"backend":"matmul","elementwise":{"output_add":"float32"}}}]}' >exact.json
cat >fp8.json <<'JSON'
{"quant_cfg": [{"quantizer_name": "*", "enable": false},
  {"quantizer_name": "*linear_attn_sites.*", "cfg": {"num_bits": [4, 3], "type": "dynamic", "axis": [0, 1, 2]}}],
 "linear_attention": [{"module_name": "*", "cfg": {"backend": "matmul"}}]}
JSON
for p in exact fp8; do
    for d in cpu cuda; do
        rc 0 verify $hf/kimi_linear_tiny --forward --policy $p.json --device $d
        out 'quantisation policy [0-9a-f]{12}… on 3 of 3 KDA modules'
        grep -oE 'loss [0-9.]+' $OUT >$p.$d
    done
    limit=1e-6
    [ $p = exact ] || limit=1e-3
    paste -d' ' $p.cpu $p.cuda | awk -v limit=$limit '{ d = $2 / $4 - 1; exit !((d < 0 ? -d : d) < limit) }' ||
        fail "$p: $(cat $p.cpu $p.cuda)"
done
cmp -s exact.cuda fp8.cuda && fail "FP8 changes nothing: $(cat fp8.cuda)"
seq 2 4 90 | tr '\n' ' ' >ids
for d in cpu cuda; do
    rc 0 verify "$hf/kimi_linear_tiny" --forward --tokens ids --policy exact.json --device $d --approximate-solve 2 --json
    grep -oE '"(loss|inverse_error|inverse_residual)":[0-9.e-]+' $OUT >solve.$d
done
[ "$(wc -l <solve.cuda)" = 3 ] || fail "errors of the inverse: $(cat solve.cuda)"
paste -d: solve.cpu solve.cuda | awk -F: '{ d = $2 / $4 - 1; bad += !((d < 0 ? -d : d) < 1e-4) } END { exit bad }' ||
    fail "approximate inverse: $(cat solve.cpu solve.cuda)"

data=(--data "$FIXTURES/fla/corpus.txt" --seq-len 12 --batch 2 --lr 2e-3 --reset-optimizer)
for o in adamw muon; do
    args=(--resume "$hf/kimi_linear_tiny" "${data[@]}" --optimizer "$o")
    CKPT=$cpu
    rc 0 train "${args[@]}" --steps 3 --metrics cpu.$o
    CKPT=$emulated
    rc 0 train "${args[@]}" --steps 3 --device cuda --metrics f32.$o
    close_to f32.$o cpu.$o 1e-4
done
for d in f32 bf16; do
    args=(--resume "$hf/kimi_linear_tiny" "${data[@]}" --dtype "$d" --device cuda)
    rc 0 train "${args[@]}" --steps 4 --save $d --save-every 2 --metrics m.$d
    rc 0 train --resume $d/iter_0000002 --data "$FIXTURES/fla/corpus.txt" --steps 4 --device cuda --save $d.rest
    rc 0 diff $d/iter_0000004 $d.rest/iter_0000004
done
close_to m.bf16 m.f32 2e-2
for d in cpu cuda; do
    rc 0 train --resume $hf/kimi_linear_tiny "${data[@]}" --steps 2 --policy exact.json --device $d --metrics m.exact.$d
done
close_to m.exact.cuda m.exact.cpu 1e-4
# A study there: the same tokens, near losses, a time of a block that has been run before.
for d in cpu cuda; do
    rc 0 study "$FIXTURES/fla/kda_trained" --data "$FIXTURES/fla/corpus.txt" --seq-len 32 --blocks 2 --only exact_matmul --device $d --json
    grep -oE '"tokens_evaluated":"[0-9a-f]{64}"|"weights_before":"[0-9a-f]{64}"' $OUT >study.$d
    grep -oE '"ppl_(before|after)":[0-9.]+' $OUT | sed 's/.*://' >ppl.$d
done
same study.cpu study.cuda
paste -d' ' ppl.cpu ppl.cuda | awk '{ d = $1 / $2 - 1; if ((d < 0 ? -d : d) > 1e-4) bad = 1 } END { exit bad || NR != 4 }' ||
    fail "perplexities $(paste -d' ' ppl.cpu ppl.cuda)"
