# Hugging Face to Megatron's torch_dist and back, every family at every mesh: the same bytes.
trip() {
    local name=$1 moe=$2 tp ep pp d=$FIXTURES/hf/$1
    for tp in 1 2 4; do
        for ep in 1 2; do
            [ $ep -eq 1 ] || [ "$moe" = moe ] || continue
            for pp in 1 2; do
                rm -rf m h
                rc 0 convert $d m --to torch_dist --layout megatron --tp $tp --ep $ep --pp $pp
                rc 0 convert m h --to safetensors --layout hf --max-shard-size 100GB
                rc 0 diff $d h; no_out 'only in'
                if [ -e $d/model.safetensors ]; then same h/model.safetensors $d/model.safetensors; fi
                [ "$3" = new_config ] || same h/config.json $d/config.json
            done
        done
    done
}
# They wait for the disk most of the time, so all at once, each in a directory of its own.
start() {
    (
        mkdir "$1" && cd "$1" && trip "$@"
        if [ "$1" = qwen3_next_mtp_tiny ]; then # the depth gets a field that says so
            grep -q '"num_nextn_predict_layers": 1' h/config.json || fail "no depth in config.json"
        fi
        [ "${failures:-0}" -eq 0 ]
    ) >"$1.log" 2>&1 &
    started+=("$! $1")
}
started=()
for name in kimi_linear moonlight deepseek_mtp qwen3_next qwen3_moe qwen3_moe_joint bailing_hybrid bailing_moe; do
    start ${name}_tiny moe
done
start qwen3_next_mtp_tiny moe new_config
for name in llama3 qwen2 qwen3 qwen3_5 arcee_kda; do start ${name}_tiny dense; done
start llama_tiny_tied dense
for job in "${started[@]}"; do
    wait "${job% *}" || fail "${job#* }: $(cat "${job#* }.log")"
done

# block FP8 comes back as BF16, with the values that torch gives
f=$FIXTURES/hf/deepseek_fp8_tiny
rm -rf m h
rc 0 convert $f m --to torch_dist --layout megatron --tp 2 --ep 2; err '22 F8_E4M3 tensors become BF16'
rc 0 convert m h --to safetensors --layout hf; rc 0 diff $f h; rc 0 inspect h; no_out F8_E4M3
rc 0 diff h $f.dequantised.safetensors --include '*proj*'; out '22 identical'
! grep -q quantization_config h/config.json || fail "quantization_config is still there"

# groups that Megatron would score by another number of experts
rm -rf m
rc 4 convert $FIXTURES/hf/deepseek_v3_tiny m --to torch_dist --layout megatron; one_line; err moe_router_group_topk
absent m

# without the manifest the dialect follows from the model alone
for name in llama3 qwen2 qwen3 qwen3_moe qwen3_next moonlight bailing_moe; do
    rm -rf m h
    rc 0 convert $FIXTURES/hf/${name}_tiny m --to torch_dist --layout megatron --tp 2
    find m -name ckpt.manifest.json -delete
    rc 0 convert m h --to safetensors --layout hf; rc 0 diff $FIXTURES/hf/${name}_tiny h; no_out 'only in'
    grep -q "$(grep ForCausalLM $FIXTURES/hf/${name}_tiny/config.json | tr -d ' ')" h/config.json ||
        fail "$name: another architecture in config.json"
done
