# verify --roundtrip: there and back in memory, equal or each difference by name; nothing is written.
hf=$FIXTURES/hf
through() { # LAYOUT-IT-IS PATH ASKED
    rc 0 verify "$2" --roundtrip "$3"; out "equal after $1 and back\$"
}
through megatron:hybrid $hf/kimi_linear_tiny megatron,tp=2,ep=2,pp=2
through hf:kimi_linear $hf/kimi_linear_tiny hf
through megatron:gpt $hf/deepseek_mtp_tiny megatron,tp=4
through megatron:gpt $hf/qwen3_next_tiny megatron,tp=2,pp=2
through megatron:gpt $hf/llama_tiny_tied megatron,tp=4
through megatron:hybrid $FIXTURES/mcore/legacy_tp2 megatron,tp=4
through hf:deepseek_v3 $FIXTURES/mcore/mp_mla_moe_tp2_ep2 hf
through hf:llama $FIXTURES/mcore/optim_params_tp2 hf
rc 0 verify $hf/qwen3_tiny --roundtrip megatron --json; out '"through": ?"megatron:gpt"'

# What does not survive is named: F8 blocks become bf16 where the layout has none.
rc 1 verify $hf/deepseek_fp8_tiny --roundtrip megatron
out "^failed: tensor 'model.layers.0.self_attn.o_proj.weight': comes back as BF16, is F8_E4M3"
out "^failed: tensor 'model.layers.0.self_attn.o_proj.weight_scale_inv': does not come back"

rc 4 verify $hf/kimi_linear_tiny --roundtrip fla; one_line; err 'there: layout fla:kda: configuration: pattern'
rc 2 verify $hf/kimi_linear_tiny --roundtrip megatron,tp=3; one_line; err 'there: .*TP 3'
for bad in megatron,tp=2,tp=4 megatron,ep=1,tp=2,ep=1 x '' 'megatron,' megatron,tp megatron,tp= megatron,tp=0 megatron,tp=2x megatron,xp=2 megatron,tp=99999999999999999999; do
    rc 2 verify $hf/kimi_linear_tiny --roundtrip "$bad"; one_line; err '^ckpt: verify: --roundtrip'
done
st plain.safetensors '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' 8
rc 4 verify plain.safetensors --roundtrip hf --allow-unknown; one_line; err 'no known model family, so it has no layout hf'
nothing_but plain.safetensors
