# --device cuda: the program with the plug-in that runs the kernels on the CPU (make cuda-emulated). Peers'
# references in f32; bf16 near f32; training near the CPU's; N steps = k steps + save + resume + N - k.
emulated=$(dirname "$CKPT")/emulated/ckpt
present "$emulated"
present "$(dirname "$emulated")/libckpt_cuda.so"
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
