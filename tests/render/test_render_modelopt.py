"""ModelOpt's lists: what a model's modules have, written by name and read back the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.units import module_of, select
from nemo_fp8.render import modelopt

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


@pytest.mark.parametrize(("precision", "word"), [
    (Precision(rollout="fp8", rollout_block="tensor"), "They know NVFP4"),
    (Precision(), "They know NVFP4"),
    (Precision(rollout="fp8", activation_scale="pow2"), "no word for it"),
])  # fmt: skip
def test_formats_without_a_name_are_refused(precision, word):
    with pytest.raises(PrecisionError, match=word):
        modelopt.to_modelopt({"model.layers.0.mlp.down_proj": precision}, ())
