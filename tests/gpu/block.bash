# HIDDEN HEADS HEAD FFN T: the configuration of one block of Kimi-Linear's shape, KDA and its MLP, between an
# embedding and a head of 256 columns.
block_config() {
    cat <<J
{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": $1,
 "num_hidden_layers": 1, "vocab_size": 256, "intermediate_size": $4, "num_attention_heads": $2,
 "num_key_value_heads": $2, "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128,
 "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": true, "rms_norm_eps": 1e-5, "hidden_act": "silu",
 "first_k_dense_replace": 1, "tie_word_embeddings": false, "num_experts": 8, "num_experts_per_token": 2,
 "moe_intermediate_size": 1024, "num_shared_experts": 1, "moe_renormalize": true, "num_expert_group": 1,
 "topk_group": 1, "routed_scaling_factor": 2.446, "rope_theta": 10000.0, "initializer_range": 0.02,
 "model_max_length": $5,
 "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [], "head_dim": $3, "num_heads": $2,
 "short_conv_kernel_size": 4}}
J
}
