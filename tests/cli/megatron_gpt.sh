# Models built and saved by real Megatron-Core: read as they are, cut again, stacked and layer by layer.
m=$FIXTURES/mcore
for n in gpt_dense gpt_relu2 gpt_moe gpt_moe_all gpt_mla_mtp gpt_gdn_tp2 gpt_gdn2_tp2 hybrid_attn; do
    rc 0 convert $m/$n one.safetensors --force; out 'root equals source'; r=$(root_of)
    "${STCMP:-$(dirname "$CKPT")/stcmp}" one.safetensors $m/$n.plain.safetensors >cmp.txt || fail "$n: $(head -3 cmp.txt)"
    rc 0 convert $m/$n two --tp 2 --verify --force; [ "$(root_of)" = "$r" ] || fail "$n: TP 2 has another root"
    rc 0 verify two --hash
    rc 0 convert two one2.safetensors --force; same one.safetensors one2.safetensors
done
rc 0 inspect $m/gpt_dense; out '^layout +megatron:gpt'; out 'layers=stacked'
rc 0 inspect $m/gpt_moe; out 'layers=single'
rc 0 inspect $m/hybrid_attn; out '^layout +megatron:hybrid'

# Gated delta net and gated attention: Megatron-Core's logits, of two ranks, are the engine's.
rc 0 verify $m/gpt_gdn2_tp2 --forward --reference $m/gpt_gdn2_tp2.reference.safetensors --rtol 1e-6
rc 0 verify $m/gpt_gdn2_grouped_tp2 --forward --reference $m/gpt_gdn2_grouped_tp2.reference.safetensors --rtol 1e-6
rc 0 convert $m/gpt_gdn2_tp2 halves --pp 2 --tp 2 --force; rc 0 diff halves $m/gpt_gdn2_tp2; rm -r halves
rc 4 convert $m/gpt_gdn2_tp2 h --to safetensors --layout hf; one_line; absent h; err "block 0 is 'g'"
rc 0 inspect $m/gpt_gdn_tp2; out 'gdn_norms=fused,attn_norms=fused'; out '^mesh +tp 2'
rc 0 verify $m/gpt_gdn_tp2 --forward --reference $m/gpt_gdn_tp2.reference.safetensors --rtol 1e-6
rc 0 convert $m/gpt_gdn_tp2 halves --pp 2 --tp 4 --force; rc 0 diff halves $m/gpt_gdn_tp2
rc 0 verify halves --forward --against $m/gpt_gdn_tp2; rm -r halves

# Pipeline stages: whole layers, stacked or not; the depths of multi-token prediction on the last.
for n in gpt_dense gpt_moe_all gpt_mla_mtp; do
    rc 0 convert $m/$n stages --tp 2 --pp 3 --verify --force
    rc 0 diff stages $m/$n
    rc 2 convert $m/$n other --pp 2; err '3 layers are not divisible by PP 2'; absent other
done
rc 0 convert $m/gpt_moe_all experts --ep 4 --pp 3 --verify; rc 0 diff experts $m/gpt_moe_all
rc 0 convert $m/hybrid_attn halves --pp 2 --verify; rc 0 diff halves $m/hybrid_attn
# More ranks than key/value heads: groups are cut inside, as Megatron-Core does it.
rc 0 convert $m/gpt_dense four --tp 4 --verify; no_err 'exceeds the heads'; rc 0 diff four $m/gpt_dense

# To Hugging Face and back; stacked again because the arguments say so.
for n in gpt_dense gpt_mla_mtp; do
    rc 0 convert $m/$n hf --layout hf --to safetensors --force
    rc 0 convert hf back --layout megatron --to torch_dist --force; rc 0 diff back $m/$n
    rc 0 convert back back.safetensors --force; rc 0 convert $m/$n one.safetensors --force
    same back.safetensors one.safetensors
done
rc 0 inspect back; out 'layers=single'

# Hugging Face first: every byte returns, also those of tensors that only repeat others.
for n in qwen3_tiny deepseek_mtp_tiny; do
    rc 0 convert $FIXTURES/hf/$n mg --layout megatron --to torch_dist --tp 2 --force
    rc 0 convert mg hf2 --layout hf --to safetensors --force
    same hf2/model.safetensors $FIXTURES/hf/$n/model.safetensors
    same hf2/config.json $FIXTURES/hf/$n/config.json
done
rc 0 convert $FIXTURES/hf/deepseek_mtp_tiny mg --layout megatron --to torch_dist --force
err "dropped: 'model.layers.2.embed_tokens.weight' repeats embed.weight"
# A copy that is none: byte 100 of the depth's embedding.
cp -r $FIXTURES/hf/deepseek_mtp_tiny bad && chmod -R u+w bad
at=$("$CKPT" inspect bad 'model.layers.2.embed_tokens.weight' --json 2>/dev/null | grep -c .)
[ "$at" -gt 0 ] || fail 'inspect says nothing'
header=$(od -An -tu8 -N 8 bad/model.safetensors)
begin=$(head -c $((header + 8)) bad/model.safetensors | tail -c "$header" |
    sed 's/.*"model.layers.2.embed_tokens.weight":{[^}]*"data_offsets":\[\([0-9]*\),.*/\1/')
flip bad/model.safetensors $((8 + header + begin + 100))
rc 1 verify bad; out "model.layers.2.embed_tokens.weight' must repeat embed.weight"
rc 1 convert bad mg2 --layout megatron --to torch_dist; one_line; absent mg2
err "model.layers.2.embed_tokens.weight' must repeat 'model.embed_tokens.weight'"
