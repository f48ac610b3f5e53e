# A single file has no configuration beside it but its manifest's, and needs no other.
hf=$FIXTURES/hf
for m in llama_tiny_tied qwen3_next_tiny qwen3_5_tiny bailing_moe_tiny arcee_kda_tiny moonlight_tiny kimi_linear_tiny; do
    for to in f.safetensors f.pt; do
        rm -rf f.* back
        rc 0 convert $hf/$m $to; rc 0 verify $to --hash; no_out 'partial'
        rc 0 verify $to --against $hf/$m
        [ $m = arcee_kda_tiny ] || rc 0 convert $to back --to torch_dist --layout megatron --tp 2 --force
        [ $m = arcee_kda_tiny ] || rc 0 diff $hf/$m back
    done
done
rc 0 convert $hf/qwen3_next_tiny f.safetensors --force; rc 0 verify f.safetensors --forward --against $hf/qwen3_next_tiny
out 'bit-identical'
rc 0 convert $FIXTURES/mcore/gpt_dense g.pt; rc 0 verify g.pt --hash
rc 0 convert $FIXTURES/mcore/hybrid_attn h --to mp_rank --tp 2; rc 0 diff $FIXTURES/mcore/hybrid_attn h
rc 0 convert $hf/llama_tiny_tied r.safetensors --resume; err 'single file is one unit'
