"""Tiny random checkpoints of every family, made from their Hugging Face configurations: what loaders do differently is
in there.

A row is a family's configuration class and what makes it tiny beside ``COMMON``: two layers (three where three kinds
take turns), hidden size 256, a vocabulary of 512. It also has the keys that vLLM's model reads in a checkpoint's
``config.json`` and that transformers' class lacks (``use_routing_bias``).
"""

import torch

from support.rollout.models import VOCABULARY, write_tokenizer

COMMON = {
    "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "intermediate_size": 512, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HEADS = {"num_key_value_heads": 2, "head_dim": 64}
DENSE = COMMON | HEADS
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LOCAL = DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
          "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}  # fmt: skip
# vLLM's CPU kernel for latent attention is compiled for 512 + 64 and no other size.
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "v_head_dim": 64,
          "qk_nope_head_dim": 64}  # fmt: skip
GPT = {"vocab_size": VOCABULARY, "n_positions": 512, "n_embd": 256, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
       "eos_token_id": 1}  # fmt: skip
MAMBA = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 64}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
         "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
BIAS = "e_score_correction_bias"

FAMILIES = {
    # dense decoders
    "apertus": ("ApertusConfig", DENSE),
    "arcee": ("ArceeConfig", DENSE),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 256, "n_layer": 2, "n_head": 4}),
    "cohere": ("CohereConfig", DENSE),
    "cohere2": ("Cohere2Config", DENSE | {"sliding_window": 64}),
    "cwm": ("CwmConfig", DENSE),
    "ernie4_5": ("Ernie4_5Config", DENSE),
    "exaone4": ("Exaone4Config", DENSE | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "falcon": ("FalconConfig", COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "gemma": ("GemmaConfig", DENSE),
    "gemma2": ("Gemma2Config", DENSE | {"query_pre_attn_scalar": 64, "sliding_window": 64}),
    "gemma3": ("Gemma3TextConfig", DENSE | {"query_pre_attn_scalar": 64, "sliding_window": 64}),
    "gemma3n": ("Gemma3nTextConfig", DENSE | {
        "num_hidden_layers": 4, "intermediate_size": 512, "hidden_size_per_layer_input": 128,
        "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0, "laurel_rank": 64, "sliding_window": 64,
        "activation_sparsity_pattern": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma4": ("Gemma4TextConfig", DENSE | {
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
        "sliding_window": 64, "global_head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]}),
    "glm": ("GlmConfig", DENSE),
    "glm4": ("Glm4Config", DENSE),
    "gpt2": ("GPT2Config", GPT),
    "gpt_bigcode": ("GPTBigCodeConfig", GPT),
    "gpt_neox": ("GPTNeoXConfig", COMMON),
    "gptj": ("GPTJConfig", GPT | {"rotary_dim": 32}),
    "granite": ("GraniteConfig", DENSE),
    "granite_swa": ("GraniteSWAConfig", DENSE | {"sliding_window": 64}),
    "hrm_text": ("HrmTextConfig", DENSE),
    "hunyuan_dense": ("HunYuanDenseV1Config", DENSE),
    "hyperclovax": ("HyperCLOVAXConfig", DENSE),
    "jais2": ("Jais2Config", DENSE),
    "llama": ("LlamaConfig", DENSE),
    "minicpm3": ("MiniCPM3Config", DENSE | LATENT | {"qk_rope_head_dim": 32}),
    "ministral3": ("Ministral3Config", DENSE),
    "mistral": ("MistralConfig", DENSE),
    "nemotron": ("NemotronConfig", DENSE),
    "olmo": ("OlmoConfig", DENSE),
    "olmo2": ("Olmo2Config", DENSE),
    "olmo3": ("Olmo3Config", DENSE | {"sliding_window": 64}),
    "opt": ("OPTConfig", COMMON | {"ffn_dim": 512, "word_embed_proj_dim": 256}),
    "phi": ("PhiConfig", COMMON | {"intermediate_size": 1024}),
    "phi3": ("Phi3Config", DENSE),
    "qwen2": ("Qwen2Config", DENSE),
    "qwen3": ("Qwen3Config", DENSE),
    "seed_oss": ("SeedOssConfig", DENSE),
    "smollm3": ("SmolLM3Config", DENSE),
    "stablelm": ("StableLmConfig", DENSE),
    "starcoder2": ("Starcoder2Config", DENSE),
    "vaultgemma": ("VaultGemmaConfig", DENSE | {"query_pre_attn_scalar": 64, "sliding_window": 64}),
    # mixtures of experts
    "afmoe": ("AfmoeConfig", DENSE | EXPERTS | {
        "num_shared_experts": 1, "num_dense_layers": 1, "sliding_window": 64, "n_group": 1, "topk_group": 1,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "axk1": ("AXK1Config", COMMON | LATENT | ROUTED),
    "cohere2_moe": ("Cohere2MoeConfig", DENSE | EXPERTS | {"sliding_window": 64}),
    "dbrx": ("DbrxConfig", {
        "d_model": 256, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "vocab_size": VOCABULARY,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 256}}),
    "deepseek_v2": ("DeepseekV2Config", COMMON | LATENT | ROUTED | {"topk_method": "greedy", "head_dim": 64}),
    "deepseek_v3": ("DeepseekV3Config", COMMON | LATENT | ROUTED | {"topk_method": "noaux_tc"}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", DENSE | {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 128, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 1}),
    "exaone_moe": ("ExaoneMoeConfig", DENSE | EXPERTS | {"sliding_windows": [64, 64],
        "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}),
    "flex_olmo": ("FlexOlmoConfig", DENSE | EXPERTS | {"intermediate_size": 128}),
    "glm4_moe": ("Glm4MoeConfig", DENSE | ROUTED),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", COMMON | LATENT | ROUTED | {"mlp_layer_types": ["dense", "sparse"]}),
    "gpt_oss": ("GptOssConfig", LOCAL | {"intermediate_size": 128}),
    "granitemoe": ("GraniteMoeConfig", LOCAL),
    "granitemoeshared": ("GraniteMoeSharedConfig", LOCAL | {"shared_intermediate_size": 256}),
    "granitemoe_swa": ("GraniteMoeSWAConfig", LOCAL | {"shared_intermediate_size": 256, "sliding_window": 64}),
    "hunyuan_moe": ("HunYuanMoEV1Config", DENSE | EXPERTS | {"moe_topk": 2, "moe_intermediate_size": 512}),
    "hy_v3": ("HYV3Config", DENSE | EXPERTS | {"expert_hidden_dim": 128, "num_shared_experts": 1,
                                               "first_k_dense_replace": 1,
                                               "mlp_layer_types": ["dense", "sparse"]}),
    "laguna": ("LagunaConfig", DENSE | EXPERTS | {"shared_expert_intermediate_size": 128, "sliding_window": 64,
               "num_attention_heads_per_layer": [4, 4], "mlp_layer_types": ["dense", "sparse"],
               "layer_types": ["full_attention", "sliding_attention"]}),
    "llama4": ("Llama4TextConfig", LOCAL | {
        "intermediate_size": 128, "intermediate_size_mlp": 512, "interleave_moe_layer_step": 1,
        "num_experts_per_tok": 1, "attention_chunk_size": 128}),
    "longcat_flash": ("LongcatFlashConfig", {
        "hidden_size": 256, "num_layers": 2, "vocab_size": VOCABULARY, "num_attention_heads": 4, "ffn_hidden_size": 512,
        "expert_ffn_hidden_size": 128, "n_routed_experts": 8, "zero_expert_num": 0,
        "zero_expert_type": "identity", "moe_topk": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
        "max_position_embeddings": 512, **LATENT}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", DENSE | ROUTED | {"n_group": 1, "n_shared_experts": None,
        "v_head_dim": 64, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 64,
        "swa_v_head_dim": 64, "sliding_window": 64,
        "hybrid_layer_pattern": [0, 1], "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"], "moe_layer_freq": [0, 1], "sliding_window_size": 64,
        "layernorm_epsilon": 1e-5}),
    "minimax_m2": ("MiniMaxM2Config", LOCAL | {
        "intermediate_size": 128, "rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True}),
    "mixtral": ("MixtralConfig", LOCAL),
    "olmoe": ("OlmoeConfig", DENSE | EXPERTS | {"intermediate_size": 128}),
    "phimoe": ("PhimoeConfig", LOCAL),
    "qwen2_moe": ("Qwen2MoeConfig", DENSE | EXPERTS | {"shared_expert_intermediate_size": 256}),
    "qwen3_moe": ("Qwen3MoeConfig", DENSE | EXPERTS),
    # state spaces, linear attention and convolutions, alone or with attention
    "falcon_h1": ("FalconH1Config", DENSE | MAMBA_HEADS | {"mamba_d_ssm": 512}),
    "falcon_mamba": ("FalconMambaConfig", MAMBA | {"state_size": 16, "intermediate_size": 512}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", LOCAL | MAMBA_HEADS | {
        "shared_intermediate_size": 256, "layer_types": ["mamba", "attention"], "position_embedding_type": "rope"}),
    "jamba": ("JambaConfig", DENSE | {
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}),
    "kimi_linear": ("KimiLinearConfig", COMMON | LATENT | EXPERTS | {
        "num_shared_experts": 1, "first_k_dense_replace": 1, "linear_attn_config": {
            "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4}}),
    "lfm2": ("Lfm2Config", DENSE | {
        "conv_dim": 256, "block_dim": 256, "block_multiple_of": 128, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("Lfm2MoeConfig", DENSE | EXPERTS | {
        "conv_dim": 256, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "mamba": ("MambaConfig", MAMBA | {"state_size": 16, "intermediate_size": 512}),
    "mamba2": ("Mamba2Config", MAMBA | {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1,
               "chunk_size": 64}),
    "nemotron_h": ("NemotronHConfig", DENSE | {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "hybrid_override_pattern": "M*-", "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64,
        "n_groups": 1}),
    "olmo_hybrid": ("OlmoHybridConfig", DENSE | DELTA),
    "qwen3_next": ("Qwen3NextConfig", DENSE | EXPERTS | DELTA | {"shared_expert_intermediate_size": 128}),
    "qwen3_5": ("Qwen3_5TextConfig", DENSE | DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", DENSE | EXPERTS | DELTA | {"shared_expert_intermediate_size": 128}),
    "zamba2": ("Zamba2Config", DENSE | {
        "mamba_d_state": 64, "mamba_headdim": 64, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 64,
        "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1, "adapter_rank": 64,
        "num_key_value_heads": 4, "attention_hidden_size": 512, "attention_head_dim": 128}),
}  # fmt: skip


def write(folder, family, seed=0):
    """A checkpoint of this family with weights drawn from this seed. What begins as ones or zeros is drawn, too, so
    that no tensor is the same under two seeds."""
    import transformers

    name, fields = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields), dtype=torch.bfloat16)
    if "num_layers" in fields:  # LongCat's: its class makes this number one of attentions, of which a layer has two
        model.config.num_hidden_layers = fields["num_layers"]
    for key, tensor in model.state_dict().items():
        if key.endswith(BIAS):
            tensor.normal_()
        elif tensor.is_floating_point() and tensor.numel() > 1 and tensor.min() == tensor.max():
            tensor += torch.randn(tensor.shape).to(tensor.dtype) / 16
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
