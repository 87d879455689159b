"""Tiny random checkpoints of many families, made from their Hugging Face configurations: what loaders do differently is
in there."""

import torch

VOCABULARY = 512
COMMON = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
GROUPS = {"n_group": 2, "topk_group": 1}
# family -> the name of its configuration's class, and what makes it tiny.
FAMILIES = {
    "deepseek_v3": ("DeepseekV3Config", COMMON | EXPERTS | GROUPS | {
        "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 64, "v_head_dim": 64, "qk_nope_head_dim": 64,
        "topk_method": "noaux_tc", }), "glm4_moe": ("Glm4MoeConfig", COMMON | HEADS | EXPERTS | GROUPS |
        {"intermediate_size": 512, "moe_intermediate_size": 128}), "gpt2": ("GPT2Config", { "vocab_size": VOCABULARY,
        "n_positions": 512, "n_embd": 256, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1, }),
        "gpt_neox": ("GPTNeoXConfig", COMMON | {"intermediate_size": 512, "num_attention_heads": 4}), "mamba2":
        ("Mamba2Config", { "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "num_heads": 8,
        "head_dim": 64, "state_size": 64, "n_groups": 1, "chunk_size": 64, }), "nemotron_h": ("NemotronHConfig", COMMON
        | HEADS | { "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "intermediate_size": 512, "hybrid_override_pattern": "M*-", "mamba_num_heads": 8, "mamba_head_dim": 64,
        "ssm_state_size": 64, "n_groups": 1, }), "falcon_h1": ("FalconH1Config", COMMON | HEADS | { "intermediate_size":
        512, "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64,
        "mamba_chunk_size": 64, }), "gpt_oss": ("GptOssConfig", COMMON | HEADS | {"intermediate_size": 128,
        "num_local_experts": 4, "num_experts_per_tok": 2}), "llama4": ("Llama4TextConfig", COMMON | HEADS | {
        "intermediate_size": 128, "intermediate_size_mlp": 512, "num_local_experts": 4, "interleave_moe_layer_step": 1,
        "num_experts_per_tok": 1, "attention_chunk_size": 64, }), }  # fmt: skip


def write(folder, family, seed=0):
    """A checkpoint of this family with weights drawn from this seed; the biases that choose experts, which begin as
    zeros, too."""
    import transformers

    name, fields = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields), dtype=torch.bfloat16)
    for key, tensor in model.state_dict().items():
        if key.endswith("e_score_correction_bias"):
            tensor.normal_()
    model.save_pretrained(folder)
    return folder
