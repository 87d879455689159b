"""ModelOpt's lists: what a model's modules have, written by name and read back the same."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_models import config

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.units import module_of, select
from nemo_fp8.render import modelopt, render

LAYERS, HIDDEN, FFN = 3, 256, 384


def tensors(experts):
    """Names and shapes of a small model, dense or with experts and one that is shared."""
    found = {"model.embed_tokens.weight": (512, HIDDEN), "lm_head.weight": (512, HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        found |= {f"{at}self_attn.{word}_proj.weight": (HIDDEN, HIDDEN) for word in "qkvo"}
        mlps = [f"{at}mlp.experts.{e}." for e in range(2)] + [f"{at}mlp.shared_expert."] if experts else [f"{at}mlp."]
        found |= {f"{mlp}{word}_proj.weight": (FFN, HIDDEN) for mlp in mlps for word in ("gate", "up")}
        found |= {f"{mlp}down_proj.weight": (HIDDEN, FFN) for mlp in mlps}
        if experts:
            found[f"{at}mlp.gate.weight"] = (2, HIDDEN)
    return found


patterns = st.sampled_from(
    ["*.linear_qkv", "*.linear_proj", "*.linear_fc1", "*.linear_fc2", "*.k_proj", "*.up_proj", "*.down_proj", "*.mlp.*",
     "*.layers.0.*", "decoder.layers.1.*", "model.layers.2.self_attn.*", r"re:layers\.(0|2)\.", "*.experts.*", "*"]
)  # fmt: skip
rules = st.lists(st.tuples(patterns, st.sampled_from(["bf16", "mxfp8", "nvfp4", "tensorwise"])), max_size=4)
bases = st.sampled_from([
    Precision(rollout="nvfp4"),
    Precision(rollout="nvfp4", activation_scheme="none", keep=("*.o_proj",)),
    Precision(rollout="fp8", rollout_block="1x32", weight_scale="pow2", activation_scale="pow2", last_layers=1),
    Precision(rollout="fp8", keep=("*.layers.1.*down_proj",)),
])  # fmt: skip


def stored(precision, experts):
    """Each weight's operands in a rollout; what is kept is not in it."""
    selection = select(tensors(experts), precision, layers=LAYERS)
    own = {name: unit.contract(precision) for unit in selection.units for name in unit.tensors}
    return (
        selection,
        {name: [p.operand(role, "rollout") for role in ("weight", "input")] for name, p in own.items()},
        own,
    )


@settings(deadline=None)
@given(bases, rules, st.booleans())
def test_every_module_reads_back_with_its_recipe(base, rules, experts):
    precision = base.replace(modules=tuple(rules))
    selection, right, own = stored(precision, experts)
    if not right:
        return
    config = modelopt.to_modelopt({module_of(name): p for name, p in own.items()}, selection.not_converted)
    assert (config["quant_algo"] == "MIXED_PRECISION") == (len(dict.fromkeys(map(str, right.values()))) > 1)
    for document in (config, modelopt.to_hf_quant_config(config)):
        back = modelopt.from_modelopt(document)
        assert stored(back, experts)[1] == right


@pytest.mark.parametrize(("said", "word"), [
    ({"quant_algo": "INT4_AWQ"}, "INT4_AWQ"),
    ({"quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
    ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}}, "quantized_layers: 'FP8'"),
    ({"quant_algo": "MIXED_PRECISION",
      "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A16_NVFP4"}}}, "in one checkpoint"),
])  # fmt: skip
def test_lists_that_a_contract_cannot_describe_are_refused(said, word):
    with pytest.raises(PrecisionError, match=word):
        modelopt.from_modelopt(said)


EIGHT = {"type": "float", "num_bits": 8, "dynamic": False}


@pytest.mark.parametrize(("cache", "meant"), [
    ({}, "auto"),
    ({"kv_cache_quant_algo": None}, "auto"),
    ({"kv_cache_quant_algo": "FP8"}, "fp8"),
    ({"kv_cache_scheme": EIGHT}, "fp8"),
    ({"kv_cache_quant_algo": "NVFP4"}, None),
    ({"kv_cache_scheme": EIGHT | {"num_bits": 4}}, None),
])  # fmt: skip
def test_the_cache_that_the_lists_name_is_the_contracts(cache, meant):
    """An engine obeys them, where nobody gives it a dtype of the cache."""
    said = {"quant_algo": "NVFP4"} | cache
    for document in (said, {"quantization": said}):
        if meant is None:
            with pytest.raises(PrecisionError, match="KV cache in ModelOpt's lists"):
                modelopt.from_modelopt(document)
        else:
            assert modelopt.from_modelopt(document) == Precision(rollout="nvfp4", kv_cache=meant)


@pytest.mark.parametrize(("precision", "word"), [
    (Precision(rollout="fp8", rollout_block="tensor"), "They know NVFP4"),
    (Precision(), "They know NVFP4"),
    (Precision(rollout="fp8", activation_scale="pow2"), "no word for it"),
])  # fmt: skip
def test_formats_without_a_name_are_refused(precision, word):
    with pytest.raises(PrecisionError, match=word):
        modelopt.to_modelopt({"model.layers.0.mlp.down_proj": precision}, ())


# ---------------------------------------------------------------------- of a model that is known by its config alone

EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": FFN, "decoder_sparse_step": 1}
MODELS = {
    False: config(layers=LAYERS, hidden_size=HIDDEN, intermediate_size=FFN, num_key_value_heads=4, head_dim=64),
    True: config(
        layers=LAYERS, hidden_size=HIDDEN, num_key_value_heads=4, head_dim=64, model_type="qwen3_moe",
        mlp_only_layers=[], **EXPERTS,
    ),
}  # fmt: skip


@settings(deadline=None)
@given(bases, rules, st.booleans())
def test_the_rendering_of_a_model_is_what_the_exporter_writes(base, rules, experts):
    """That of a checkpoint's names; without the shared expert, which this family has not."""
    precision = base.replace(modules=tuple(rules))
    shapes = {name: shape for name, shape in tensors(experts).items() if "shared" not in name}
    selection = select(shapes, precision, layers=LAYERS)
    forms = {module_of(n): unit.contract(precision) for unit in selection.units for n in unit.tensors}
    if not forms or any(".experts." in name and p.rollout_block == "128x128" for name, p in forms.items()):
        with pytest.raises(PrecisionError, match=r"quantizes nothing|experts in 128x128 blocks"):
            render(precision, "modelopt", model=MODELS[experts])
        return
    rendering = render(precision, "modelopt", model=MODELS[experts])
    right = modelopt.to_modelopt(forms, selection.not_converted)
    found = rendering.data["quantization_config"]
    assert {*found["ignore"]} - {"model.embed_tokens"} == {*right["ignore"]} - {"model.embed_tokens"}
    assert {**found, "ignore": 0} == {**right, "ignore": 0}
    assert json.loads(rendering.text) == {"quantization_config": found}
    assert not {"keep", "modules", "rollout", "rollout_block", "last_layers"} & {*rendering.lost}
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), [
    ("llama", {}),
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 4}),
    ("deepseek_v3", MLA),
])  # fmt: skip
def test_names_are_those_of_transformers(name, sizes):
    transformers = pytest.importorskip("transformers")
    about = transformers.AutoConfig.for_model(name, **SIZES | sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(about)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name}
    assert modelopt._weights(Model.read(about.to_dict())) == theirs


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (None, "without a model"),
        (
            {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
            "lists of a gpt2",
        ),
    ],
)
def test_a_model_is_needed_whose_names_are_known(model, word):
    with pytest.raises(PrecisionError, match=word):
        render(Precision(rollout="nvfp4"), "modelopt", model=model)


def test_what_keeps_everything_is_said():
    with pytest.raises(PrecisionError, match="keep patterns match"):
        render(Precision(rollout="nvfp4", keep=("*",)), "modelopt", model=MODELS[False])
