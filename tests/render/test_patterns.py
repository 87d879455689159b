"""Patterns that another program reads as we do, or that are refused: of every layer and of every family's linears.

A pattern counts if it matches any name of what is stored as one matrix; Megatron and vLLM know their own names alone.
So for contracts with patterns of any kind and naming, what is rendered is matched here as these two match, linear by
linear, and compared with what the contract says of it.
"""

import fnmatch
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.patterns import EXPERTS, LAYERS, MEGATRONS, VLLMS, ruled

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.selection import contract_of, why_kept_by_name
from nemo_fp8.models.units import part_names
from nemo_fp8.render import render
from nemo_fp8.render.te_precision import to_te_precision
from nemo_fp8.render.vllm import to_vllm

TRAINED = preset("bf16_with_mxfp8_mixed").replace(fp8_param=False)
STOCK = Precision(rollout="fp8", weight_scale="fp32", activation_scale="fp32")


@settings(max_examples=200)
@given(ruled(TRAINED, "bf16", "nvfp4", "blockwise"))
def test_megatron_matches_what_the_contract_says_or_the_file_is_refused(contract):
    try:
        matchers = to_te_precision(contract)["matchers"].values()
    except PrecisionError:
        return
    for name in (f"decoder.layers.{layer}.{tail}" for layer in LAYERS for tail in MEGATRONS):
        kept = why_kept_by_name(contract, (name,), None, side="train", experts=EXPERTS)
        right = "bf16" if kept else contract_of(contract, (name,), EXPERTS).scaling or "bf16"
        found = (m["config"] for m in matchers if fnmatch.fnmatch(name, m["pattern"]))
        assert next(found, "mxfp8") == right, name


@settings(max_examples=200)
@given(ruled(STOCK, "bf16", "mxfp8"))
def test_stock_vllm_matches_what_the_contract_says_or_the_plugin_is_taken(contract):
    try:
        arguments = to_vllm(contract, plugin=False)
    except PrecisionError:
        return
    config = arguments.get("quantization_config", {})
    targets = config.get("targets", {"re:.*": arguments["quantization"]})
    for name in (f"model.layers.{layer}.{tail}" for layer in LAYERS for tail in VLLMS):
        routed = EXPERTS if name.endswith(".experts") else 0
        names = part_names(name, experts=routed)
        own = contract_of(contract, names, routed)
        kept = why_kept_by_name(contract, names, None, experts=routed) or not own.rolls_out_quantized
        ignored = any(re.match(text[3:], name) for text in config.get("ignore", ()))
        found = [scheme for text, scheme in targets.items() if re.match(text[3:], name) and not ignored]
        assert found == ([] if kept else [{"128x128": "fp8_per_block", "1x32": "mxfp8"}[own.rollout_block]]), name


# Hugging Face's names of the parts of what vLLM holds as one, and vLLM's name of the whole, if it has one.
HELD = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    (("self_attn.o_proj",), ""),
    (("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
    (("mlp.down_proj",), ""),
    (tuple(f"mlp.experts.{e}.{w}_proj" for e in range(EXPERTS) for w in ("gate", "up", "down")), "mlp.experts"),
    (("self_attn.q_b_proj",), ""),
    (("mixer.in_proj",), ""),
    (("linear_attn.out_proj",), ""),
)
BLOCKS = Precision(format="e4m3", scaling="blockwise", weight_scale="fp32", activation_scale="fp32")
bases = st.sampled_from((TRAINED, BLOCKS, STOCK, STOCK.replace(rollout_block="1x32", weight_scale="pow2",
                                                              activation_scale="pow2")))  # fmt: skip


# A rule in words that vLLM does not know put the same name to keep on the list, where it leaves nothing alone.
BACKBONE = {"keep": ("backbone.layers.*.*",), "modules": (("backbone.layers.*.*", "bf16"),)}
# Of the second rule, which decides nothing, comes a line with the words of the name.
OVERRULED = {
    "keep": ("*.self_attention.*",),
    "modules": (("*.self_attention.*", "mxfp8"), ("*.self_attention.*", "bf16")),
}


@settings(max_examples=150)
@example(STOCK.replace(rollout_block="1x32", weight_scale="pow2", activation_scale="pow2", **BACKBONE))
@example(STOCK.replace(**OVERRULED))
@given(bases.flatmap(lambda base: ruled(base, "bf16", "mxfp8", "tensorwise")))
def test_nemo_rls_lists_leave_alone_what_the_contract_keeps_or_it_is_named_as_lost(contract):
    """Words are tried on the names of parameters, and every part of a linear has to hold one; patterns on vLLM's."""
    try:
        rendering = render(contract, "nemo-rl", 48)
    except PrecisionError:
        return
    if {"keep", "modules"} & {*rendering.lost} or not contract.rolls_out_quantized:
        return
    engine = rendering.data["policy"]["generation"]["vllm_cfg"]
    words, globs = (engine.get(f"quantization_{n}", ()) for n in ("ignored_layer_kws", "ignore_patterns"))

    def is_on(name):
        return any(fnmatch.fnmatch(name, text if set(text) & set("*?[") else f"*{text}*") for text in globs)

    for layer in LAYERS[:-2]:
        for parts, whole in HELD:
            names = [f"model.layers.{layer}.{name}" for name in (*filter(None, [whole]), *parts)]
            routed = EXPERTS if whole == "mlp.experts" else 0
            own = contract_of(contract, names, routed, "rollout").operand("weight", "rollout")
            kept = why_kept_by_name(contract, names, None, experts=routed) is not None or own is None
            of_parts = [f"{name}.weight" for name in names[bool(whole) :]]
            left_alone = all(any(word in name for word in words) for name in of_parts)
            left_alone |= is_on(names[0]) if whole else all(map(is_on, names))
            assert left_alone == kept, names[0]
            assert kept or own == contract.operand("weight", "rollout"), names[0]
