# verify --forward --against: one model in many layouts gives the same bits on one thread count; where a
# layout change is another computation, how far it is.
hf=$FIXTURES/hf mc=$FIXTURES/mcore
# bits A B: logits and every gradient.
bits() { rc 0 verify "$1" --forward --against "$2"; out 'logits and gradients bit-identical'; }
# Every family through Megatron at TP 2, the hybrid ones at TP 4 and home again too.
families=(llama_tiny_tied qwen2_tiny qwen3_tiny qwen3_moe_tiny qwen3_moe_joint_tiny moonlight_tiny arcee_kda_tiny
    bailing_hybrid_tiny bailing_moe_tiny qwen3_5_tiny deepseek_mtp_tiny qwen3_next_mtp_tiny llama3_tiny)
if sanitized tsan; then return; fi # the engine is on one thread there, and forward.sh loads as this does
if sanitized any; then families=(qwen3_moe_tiny bailing_hybrid_tiny qwen3_next_mtp_tiny); fi
for m in "${families[@]}"; do
    rc 0 convert $hf/$m $m --to torch_dist --layout megatron --tp 2
    bits $m $hf/$m
done
rc 0 convert $hf/qwen3_next_tiny q4 --to torch_dist --layout megatron --tp 4 --ep 2; bits q4 $hf/qwen3_next_tiny
rc 0 convert q4 q1 --to safetensors --layout hf; bits q1 $hf/qwen3_next_tiny
for m in gpt_dense gpt_mla_mtp gpt_moe_all; do
    rc 0 convert $mc/$m $m --to torch_dist --tp 4; bits $m $mc/$m
done
# DeepSeek's groups are scored otherwise in Megatron's layouts: through another container.
rc 0 convert $hf/deepseek_v3_tiny ds.pt; bits ds.pt $hf/deepseek_v3_tiny
# KDA: legacy fused and low-rank layouts, cut and whole.
for m in legacy lowrank_f lowrank_fg; do
    rc 0 convert $mc/${m}_tp2 $m.4 --to torch_dist --tp 4; bits $m.4 $mc/${m}_tp2
    rc 0 convert $m.4 $m.1 --to safetensors --layout keep; bits $m.1 $mc/${m}_tp2
done
bits $mc/legacy_tp1 $mc/legacy_tp2
# Latent norms inside the up-projections or beside them.
rc 0 convert $mc/legacy_tp2 fused --to torch_dist --norms fused
rc 0 inspect fused; out 'linear_kv_up_proj.layer_norm_weight'; no_out 'kv_layernorm'
bits fused $mc/legacy_tp2
# Without them the model runs, as another one; it gets none. With the flag on it is refused.
rc 0 convert $mc/legacy_tp2 bare --to safetensors --layout keep --exclude '*.q_layernorm.*' --exclude '*.kv_layernorm.*'
rm -f bare/ckpt.manifest.json
rc 3 verify bare --forward; one_line; err "latent norms are not stored, but 'latent_norm' is true"
sed -i 's/"qk_layernorm": true/"qk_layernorm": false/' bare/megatron_args.json
rc 0 verify bare --forward; no_out 'kv_a_norm'
rc 1 verify bare --forward --against $mc/legacy_tp2; out '^failed: logits'
rc 0 convert bare bare.4 --to torch_dist --layout megatron --tp 4; bits bare.4 bare
rc 0 inspect bare.4; no_out 'layer_norm_weight|kv_layernorm'
# The same weights without rotation are another function.
cp -r legacy.1 nope; rm -f nope/ckpt.manifest.json
sed -i '0,/{/s//{"no_rope_freq": 1, /; s/, *"no_rope_freq": null//' nope/megatron_args.json
rc 1 verify nope --forward --against legacy.1; out '^failed: logits'
# Folded products, each of the four layouts: rounded once to f32 (6e-8 of a weight; measured 2e-7 of the
# logits, 6e-7 of a gradient). The unit suite engine_grad has the same at 1e-12 in f64.
fold() { # SOURCE NAME ARGS...
    local source=$1 name=$2
    shift 2
    rc 0 convert $source $name --to torch_dist --layout megatron --approximate "$@"
    rc 0 verify $name --forward --against $source --rtol 1e-6 --grad-rtol 5e-6
}
fold $mc/lowrank_fg_tp2 none.none --kda-f-lora-rank none --kda-gate-lora-rank none
fold $mc/lowrank_fg_tp2 none.r --kda-f-lora-rank none
fold $mc/lowrank_fg_tp2 r.none --kda-gate-lora-rank none
fold $mc/lowrank_f_tp2 f.none --kda-f-lora-rank none
fold none.r again --kda-gate-lora-rank none
