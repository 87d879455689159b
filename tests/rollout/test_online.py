"""vLLM's own online quantization under a contract's rules: its own matching of names, and what it then holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollout.in_process import build, same_bits
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.online.base import _find_matching_targets

from nemo_fp8.contract import Precision
from nemo_fp8.render import vllm

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
OWN = ["*.self_attn.*", "*.o_proj", "model.layers.2.*", r"re:layers\.(0|2)\.", r"re:\.(mlp|block_sparse_moe)\.", "*"]
MX = Precision(rollout="fp8", rollout_block="1x32", weight_scale="pow2", activation_scale="pow2")
NAMES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "mlp.experts")


@settings(deadline=None)
@given(
    st.sampled_from([Precision(rollout="fp8"), MX]),
    st.lists(st.sampled_from(OWN), max_size=1),
    st.lists(st.tuples(st.sampled_from(OWN), st.sampled_from(["bf16", "mxfp8", "tensorwise"])), max_size=4),
)
def test_vllm_matches_every_layer_as_the_rules_say(base, keep, rules):
    contract = base.replace(keep=tuple(keep), modules=tuple(rules))
    arguments = vllm.to_vllm(contract, plugin=False)
    config = arguments.get("quantization_config", {})
    for name in (f"model.layers.{i}.{name}" for i in range(4) for name in NAMES):
        parts = [name, *(name.rpartition(".")[0] + f".{part}" for part in PACKED.get(name.rpartition(".")[2], ()))]
        own = contract.of(parts)
        kept = any(map(contract.keeps, parts)) or not own.rolls_out_quantized
        ignored = should_ignore_layer(name, ignore=config.get("ignore", []), fused_mapping=PACKED, use_fnmatch=True)
        if "targets" not in config:
            assert ignored == kept
            continue
        found = _find_matching_targets(name, config["targets"], PACKED)  # raises where two match
        assert not (ignored and found)
        assert bool(found) != kept
        if found:
            assert config["targets"][found[0]] == vllm.STOCK[own.rollout_block]


@pytest.mark.parametrize("rules", [(("*.o_proj", "bf16"),), (("*.self_attn.*", "mxfp8"), ("model.layers.2.*", "bf16"))])
def test_vllm_alone_holds_what_our_plugin_holds(checkpoint, rules):
    """The same codes and scales, and the same layers in BF16; a rule may say once more what the contract says."""
    contract = MX.replace(modules=rules)
    arguments = {k: v for k, v in vllm.to_vllm(contract, plugin=False).items() if k.startswith("quantization")}
    theirs = build(checkpoint("llama"), engine=arguments, quantized=False)
    fields = {name: value for name, (_, value) in Precision(rollout="fp8").diff(contract).items()}
    ours = build(checkpoint("llama"), **fields)
    seen = {True: 0, False: 0}
    for name, layer in ours.named_modules():
        if "_proj" in name and hasattr(layer, "quant_method"):
            same, quantized = theirs.get_submodule(name), hasattr(layer, "weight_scale_inv")
            seen[quantized] += 1
            assert same_bits(same.weight.data, layer.weight.data), name
            if quantized:
                assert same_bits(same.weight_scale.data, layer.weight_scale_inv.data), name
    assert seen == ({True: 12, False: 4} if len(rules) == 1 else {True: 14, False: 2})
