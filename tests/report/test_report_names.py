"""Names say what a tensor is: Hugging Face's and Megatron's, dense and MoE."""

import pytest

from nemo_fp8.models.families import ROLES
from nemo_fp8.models.names import place
from nemo_fp8.models.units import decoder, outside

# name -> role, layer, the linear of Megatron that it is a part of ("" where it is never quantized)
NAMES = {
    "model.layers.3.self_attn.q_proj.weight": ("q", 3, "self_attention.linear_qkv"),
    "model.layers.3.self_attn.k_proj.weight": ("k", 3, "self_attention.linear_qkv"),
    "model.layers.3.self_attn.v_proj.bias": ("bias", 3, ""),
    "model.layers.3.self_attn.o_proj.weight": ("o", 3, "self_attention.linear_proj"),
    "model.layers.3.self_attn.q_norm.weight": ("norm", 3, ""),
    "model.layers.12.mlp.gate_proj.weight": ("gate", 12, "mlp.linear_fc1"),
    "model.layers.12.mlp.up_proj.weight": ("up", 12, "mlp.linear_fc1"),
    "model.layers.12.mlp.down_proj.weight": ("down", 12, "mlp.linear_fc2"),
    "model.layers.0.input_layernorm.weight": ("norm", 0, ""),
    "model.embed_tokens.weight": ("embedding", None, ""),
    "model.norm.weight": ("norm", None, ""),
    "lm_head.weight": ("head", None, ""),
    # Qwen, Mixtral, DeepSeek
    "model.layers.5.mlp.gate.weight": ("router", 5, ""),
    "model.layers.5.mlp.gate.e_score_correction_bias": ("bias", 5, ""),
    "model.layers.5.mlp.shared_expert_gate.weight": ("router", 5, ""),
    "model.layers.5.mlp.experts.17.gate_proj.weight": ("experts", 5, "mlp.experts.linear_fc1"),
    "model.layers.5.mlp.experts.17.down_proj.weight": ("experts", 5, "mlp.experts.linear_fc2"),
    "model.layers.5.mlp.experts.gate_up_proj": ("experts", 5, "mlp.experts.linear_fc1"),
    "model.layers.5.mlp.shared_experts.up_proj.weight": ("up", 5, "mlp.shared_experts.linear_fc1"),
    "model.layers.5.mlp.shared_expert.down_proj.weight": ("down", 5, "mlp.shared_experts.linear_fc2"),
    "model.layers.5.block_sparse_moe.gate.weight": ("router", 5, ""),
    "model.layers.5.block_sparse_moe.experts.1.w2.weight": ("experts", 5, "mlp.experts.linear_fc2"),
    "model.layers.5.block_sparse_moe.experts.1.w3.weight": ("experts", 5, "mlp.experts.linear_fc1"),
    "model.layers.5.self_attn.q_a_proj.weight": ("q", 5, "self_attention.linear_q_down_proj"),
    "model.layers.5.self_attn.kv_a_proj_with_mqa.weight": ("kv", 5, "self_attention.linear_kv_down_proj"),
    "model.layers.5.self_attn.kv_a_layernorm.weight": ("norm", 5, ""),
    "model.layers.5.self_attn.kv_b_proj.weight": ("kv", 5, "self_attention.linear_kv_up_proj"),
    # GPT-2, GPT-NeoX, Phi-3
    "transformer.h.7.attn.c_attn.weight": ("qkv", 7, "self_attention.linear_qkv"),
    "transformer.h.7.attn.c_proj.weight": ("o", 7, "self_attention.linear_proj"),
    "transformer.h.7.mlp.c_proj.weight": ("down", 7, "mlp.linear_fc2"),
    "transformer.h.7.ln_1.weight": ("norm", 7, ""),
    "transformer.wte.weight": ("embedding", None, ""),
    "gpt_neox.layers.2.attention.query_key_value.weight": ("qkv", 2, "self_attention.linear_qkv"),
    "gpt_neox.layers.2.attention.dense.weight": ("o", 2, "self_attention.linear_proj"),
    "gpt_neox.layers.2.mlp.dense_4h_to_h.weight": ("down", 2, "mlp.linear_fc2"),
    "gpt_neox.embed_in.weight": ("embedding", None, ""),
    "embed_out.weight": ("head", None, ""),
    "model.layers.1.self_attn.qkv_proj.weight": ("qkv", 1, "self_attention.linear_qkv"),
    "model.layers.1.mlp.gate_up_proj.weight": ("gate_up", 1, "mlp.linear_fc1"),
    # Megatron, and what capture() writes
    "module.decoder.layers.0.self_attention.linear_qkv.weight": ("qkv", 0, "self_attention.linear_qkv"),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": ("norm", 0, ""),
    "decoder.layers.0.self_attention.linear_proj.input": ("o", 0, "self_attention.linear_proj"),
    "decoder.layers.0.mlp.linear_fc1.grad": ("gate_up", 0, "mlp.linear_fc1"),
    "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight": ("experts", 0, "mlp.experts.linear_fc2"),
    "decoder.layers.0.mlp.experts.linear_fc1.weight12": ("experts", 0, "mlp.experts.linear_fc1"),
    "decoder.layers.0.mlp.router.weight": ("router", 0, ""),
    "embedding.word_embeddings.weight": ("embedding", None, ""),
    "output_layer.weight": ("head", None, ""),
    # Nobody's: a linear all the same, under its own name
    "backbone.layers.4.mixer.in_proj.weight": ("linear", 4, "mixer.in_proj"),
    "connector.weight": ("linear", None, "connector"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_one_place(name):
    found = place(name)
    assert (found.role, found.layer, found.unit) == NAMES[name]
    assert bool(found.kept) == (not found.unit)
    assert found.role in ROLES


def test_layers_of_another_stack_are_no_decoder_layers():
    text, vision = place("model.layers.3.mlp.down_proj.weight"), place("visual.blocks.3.mlp.fc2.weight")
    assert decoder([text, vision], {text.module: 100, vision.module: 10}) == "model.layers"
    assert outside(vision).layer is None
    assert outside(vision).unit == "visual.blocks.3.mlp.fc2"
