"""The proof that two sides agree: against the casts themselves, on real tensors, and in words."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import contracts

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.findings import RULES
from nemo_fp8.models.spellings import all_names
from nemo_fp8.preflight import agreement
from nemo_fp8.preflight.agreement import check, join
from nemo_fp8.preflight.engine import backward_findings

DEEPSEEK = {"format": "e4m3", "scaling": "blockwise"}
FP32 = {"weight_scale": "fp32", "activation_scale": "fp32"}
POW2 = {"weight_scale": "pow2", "activation_scale": "pow2"}
NVFP4 = {"format": "e2m1", "scaling": "nvfp4"}
ALIKE = {**NVFP4, "weight_block": "1x16", "row_scaled": True, "backward": "dequantized"}
TENSORWISE_128 = {"format": "hybrid", "scaling": "tensorwise"}
TENSORWISE = {"format": "hybrid", "scaling": "tensorwise", "rollout_block": "tensor"}


def _cast(weights, operand):
    """Values of an FP8 copy: the plainest formula, one scale for each block."""
    import torch

    rows, cols = operand.block or weights.shape
    tiles = weights.view(weights.shape[0] // rows, rows, weights.shape[1] // cols, cols)
    scale = torch.div(torch.tensor(448.0), tiles.abs().amax((1, 3), keepdim=True))
    if operand.scale != "fp32":
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return ((tiles * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale).view_as(weights)


def _four_bits(weights, rows):
    """Values of an NVFP4 copy in blocks of ``rows`` x 16, by the same plain formula in two levels."""
    import ml_dtypes
    import torch

    tiles = weights.view(weights.shape[0] // rows, rows, weights.shape[1] // 16, 16)
    whole = weights.abs().max() / (6 * 448)
    scale = (tiles.abs().amax((1, 3), keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    codes = (tiles / scale).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype("float32")
    return (torch.from_numpy(codes) * scale).view_as(weights)


@pytest.fixture(scope="module")
def weights():
    import torch

    return (torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16().float()


def _percent(a, b, weights):
    return 100 * ((a - b).norm() / weights.norm()).item()


@pytest.mark.parametrize(("scheme", "said"), [("dynamic", "nvfp4-rollout-fixed-scale"), ("none", "sides-activations")])
def test_what_becomes_of_four_bit_activations_is_said_of_sides_that_agree(scheme, said):
    """vLLM has a fixed scale in place of the contract's; or the rollout rounds none that training rounds."""
    alike = Precision(**(ALIKE | {"activation_scheme": scheme}))
    agreement = check(train=alike, rollout=alike)
    assert [f.code for f in agreement.findings] == [said]
    assert agreement.agrees
    assert "but for underflow" not in str(agreement)


def test_the_costs_that_findings_quote_are_what_the_casts_cost(weights):
    p = Precision(**DEEPSEEK)
    pow2, fp32 = _cast(weights, p.operand("weight")), _cast(weights, p.replace(**FP32).operand("weight"))
    assert _percent(pow2, weights, weights) == pytest.approx(agreement.FROM_MASTER, abs=0.05)
    assert _percent(fp32, weights, weights) == pytest.approx(agreement.FROM_MASTER, abs=0.05)
    assert _percent(pow2, fp32, weights) == pytest.approx(agreement.BETWEEN_COPIES, abs=0.1)
    twice = _cast(pow2, p.replace(**FP32).operand("weight"))
    assert _percent(twice, weights, weights) == pytest.approx(agreement.CAST_TWICE, abs=0.2)
    square, row = _four_bits(weights, 16), _four_bits(weights, 1)
    for copy, cost in zip((square, row), agreement.FOUR_BITS_FROM_MASTER, strict=True):
        assert _percent(copy, weights, weights) == pytest.approx(cost, abs=0.2)
    assert _percent(square, row, weights) == pytest.approx(agreement.FOUR_BITS_APART, abs=0.3)


@pytest.mark.parametrize(
    ("scaling", "block"), [("tensorwise", "128x128"), ("tensorwise", "1x32"), ("blockwise", "1x32")]
)
def test_powers_of_two_give_the_same_values_but_for_underflow_and_not_the_same_codes(scaling, block):
    import torch

    from nemo_fp8.mismatch import sides_apart

    p = Precision(format="e4m3", scaling=scaling, rollout_block=block, **POW2)
    name = "model.layers.0.mlp.down_proj.weight"
    gaussian = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    # How much underflows depends on where between two powers of two the largest value lies.
    for size in (0.5, 0.6, 0.7, 0.8, 0.9):
        ((_, _, values),) = sides_apart({name: (gaussian * size).bfloat16()}, p)
        assert 100 * values <= agreement.UNDERFLOW
    ((_, codes, values),) = sides_apart({name: (gaussian * torch.logspace(-1, 1, 1024)[:, None]).bfloat16()}, p)
    assert codes > 0.5, "powers of two lie in the codes' exponents, so the codes differ"
    assert 0 < values < 0.005
    result = check(train=p, rollout=p)
    assert result.agrees
    assert "codes" not in str(result).splitlines()[0]
    assert str(result).startswith("Both sides agree: the same weights give the same values, but for underflow.")
    assert any("codes and scales differ" in str(f) for f in result.findings)


def test_other_fp32_scales_are_counted_as_other_values():
    import torch

    from nemo_fp8.mismatch import sides_apart

    weights = {
        "model.layers.0.mlp.down_proj.weight": torch.randn(
            256, 256, generator=torch.Generator().manual_seed(0)
        ).bfloat16()
    }
    fp32 = Precision(format="e4m3", scaling="tensorwise")
    ((_, codes, values),) = sides_apart(weights, fp32)
    assert values > 0.5
    ((_, codes, values),) = sides_apart(weights, fp32.replace(rollout_block="tensor"))
    assert (codes, values) == (0, 0)
    assert list(sides_apart(weights, Precision(rollout="fp8"))) == []


def test_scales_found_beforehand_are_other_scales_on_each_side():
    """Training's come from earlier steps, the rollout's from calibration: equal operands, and other scales."""
    p = preset("bf16_with_fp8_mixed").replace(rollout_block="tensor", activation_scheme="static")
    assert p.operand("input", "train") == p.operand("input", "rollout")
    result = check(train=p, rollout=p)
    assert not result.agrees
    assert {f.where: f.code for f in result.findings if f.severity == "warning"} == {
        "weights": "sides-delayed",
        "activations": "sides-delayed",
    }


CASTS = [
    (scaling, block, ours, theirs)
    for scaling, block, ours, theirs in itertools.product(
        ("tensorwise", "blockwise", "mxfp8"), ("tensor", "128x128", "1x32"), ("fp32", "pow2"), ("fp32", "pow2")
    )
    if not (scaling == "mxfp8" and ours == "fp32") and not (block == "1x32" and theirs == "fp32")
]


@pytest.mark.parametrize(("scaling", "block", "ours", "theirs"), CASTS)
def test_the_verdict_on_weights_is_what_the_casts_do(weights, scaling, block, ours, theirs):
    train = Precision(format="e4m3", scaling=scaling, rollout="compute", weight_scale=ours, activation_scale=ours)
    rollout = Precision(rollout="fp8", rollout_block=block, weight_scale=theirs, activation_scale=theirs)
    apart = _percent(
        _cast(weights, train.operand("weight")), _cast(weights, rollout.operand("weight", "rollout")), weights
    )
    found = [f for f in check(train=train, rollout=rollout).findings if f.where == "weights" and f.severity != "info"]
    assert bool(found) == (apart > 0.1), f"{apart:.3f}% apart"


def test_one_contract_on_both_sides_agrees():
    for p in (
        Precision(**DEEPSEEK),
        Precision(**DEEPSEEK, **FP32, first_layers=1, keep=("*.a_proj",)),
        Precision(format="e4m3", scaling="mxfp8"),
        Precision(
            format="hybrid", scaling="tensorwise", rollout_block="tensor", weight_scale="pow2", activation_scale="pow2"
        ),
        preset("bf16_mixed"),
    ):
        assert check(train=p, rollout=p).require().agrees, p


# Two contracts, and what must be found: how grave, in which respect, by which rule, in which words.
DIFFERENCES = [
    ({**DEEPSEEK}, {**DEEPSEEK, **FP32}, "error", "weights", "sides-scales", "3.7% apart"),
    ({**DEEPSEEK}, {**DEEPSEEK, **FP32}, "error", "activations", "sides-scales", "Set activation_scale to the same"),
    ({**DEEPSEEK}, {"rollout": "fp8"}, "error", "weights", "sides-scales", "power-of-2 scales"),
    ({}, {"rollout": "fp8"}, "warning", "format", "sides-format", "The rollout multiplies in FP8"),
    ({**DEEPSEEK}, {}, "warning", "format", "sides-format", "Training multiplies in FP8"),
    ({**NVFP4}, {}, "warning", "format", "sides-format", "in NVFP4 and the rollout in BF16"),
    ({**NVFP4}, {}, "warning", "format", "sides-format", "lies 11.1% in norm"),
    ({}, {"rollout": "nvfp4"}, "warning", "format", "sides-format", "lies 9.5% in norm"),
    (
        {**DEEPSEEK, "modules": (("*.linear_fc1", "nvfp4"),)},
        {},
        "warning",
        "format",
        "sides-format",
        "FP8 and NVFP4 and the rollout in BF16",
    ),
    ({"compute": "fp16"}, {}, "error", "compute", "sides-compute", "FP16"),
    ({**DEEPSEEK, "first_layers": 1}, {**DEEPSEEK}, "error", "layers", "sides-layers", "first 1 layers"),
    (
        {**DEEPSEEK, "keep": ("*.linear_fc2",)},
        {**DEEPSEEK, "keep": ("*.linear_fc2",)},
        "warning",
        "modules",
        "sides-units",
        "decoder.layers.*.mlp.experts.linear_fc1 (E4M3 in training, BF16 in the rollout)",
    ),
    ({**DEEPSEEK}, {**DEEPSEEK, "keep": ("*a_proj*",)}, "error", "modules", "sides-modules", "*a_proj*"),
    (TENSORWISE_128, TENSORWISE_128, "warning", "weights", "sides-blocks", "whole tensor"),
    (
        {"format": "hybrid", "scaling": "delayed"},
        {"rollout": "fp8"},
        "warning",
        "weights",
        "sides-delayed",
        "found beforehand",
    ),
    # One scale for a weight on both sides, and yet other inputs: the engine scales them in 1x128 (see
    # test_operands.py).
    ({**TENSORWISE}, {**TENSORWISE}, "warning", "activations", "sides-blocks", "Activations"),
    (
        {**TENSORWISE},
        {**TENSORWISE, "activation_scheme": "static"},
        "warning",
        "activations",
        "sides-calibrated",
        "calibrated",
    ),
    ({**NVFP4}, {**NVFP4}, "warning", "weights", "sides-four-bits", "14% apart in norm"),
    ({**ALIKE, "row_scaled": False}, {**ALIKE}, "warning", "activations", "sides-four-bits", "for the row"),
    (
        {**ALIKE},
        {**ALIKE, "activation_scheme": "none"},
        "info",
        "activation_scheme",
        "sides-activations",
        "leaves them in BF16",
    ),
    (
        {**ALIKE, "modules": (("*.linear_qkv", "bf16"),)},
        {**ALIKE, "modules": (("*.layers.3.*", "bf16"),)},
        "error",
        "modules",
        "sides-recipes",
        "decoder.layers.*.self_attention.linear_qkv (BF16 in training, E2M1 in the rollout)",
    ),
    # Rules: the same on both sides, and what each makes of them is not.
    (
        {**DEEPSEEK, "modules": (("*.linear_fc*", "nvfp4"),)},
        {**DEEPSEEK, "modules": (("*.linear_fc*", "nvfp4"),)},
        "warning",
        "weights",
        "sides-four-bits",
        "Weights of modules named *.linear_fc*: training holds E2M1 with E4M3 scales, one for each 16x16 block",
    ),
    (
        {**DEEPSEEK, "modules": (("*.linear_fc*", "nvfp4"),), "weight_block": "1x16"},
        {**DEEPSEEK, "modules": (("*.linear_fc*", "nvfp4"),), "weight_block": "1x16"},
        "warning",
        "activations",
        "sides-four-bits",
        "Activations of modules named *.linear_fc*",
    ),
    (
        {**DEEPSEEK, "modules": (("*.mixer.*", "nvfp4"),)},
        {**DEEPSEEK, "modules": (("*.mixer.*", "nvfp4"),)},
        "warning",
        "weights",
        "sides-four-bits",
        "Weights of modules named *.mixer.*",
    ),
    (
        {**DEEPSEEK, "modules": (("*.linear_fc1", "tensorwise"),)},
        {**DEEPSEEK, "modules": (("*.linear_fc1", "tensorwise"),)},
        "warning",
        "weights",
        "sides-blocks",
        "Weights of modules named *.linear_fc1: training holds E4M3 with FP32 scales, one for the whole tensor",
    ),
    (
        {**NVFP4, "modules": (("*.layers.3.*", "mxfp8"),)},
        {**NVFP4, "modules": (("*.layers.3.*", "mxfp8"),)},
        "warning",
        "weights",
        "sides-four-bits",
        "Weights of modules in the contract's own recipe",
    ),
    (
        {**NVFP4, "modules": (("*.self_attention.*", "bf16"), ("*.mlp.*", "mxfp8"))},
        {**NVFP4, "modules": (("*.self_attention.*", "bf16"), ("*.mlp.*", "mxfp8"))},
        "warning",
        "weights",
        "sides-four-bits",
        "such as mixers (a last rule for '*'",
    ),
    # Rules: other values by other rules.
    (
        {**DEEPSEEK, "modules": (("*.linear_fc1", "tensorwise"),)},
        {**DEEPSEEK, "modules": (("*.linear_fc1", "mxfp8"),)},
        "error",
        "modules",
        "sides-recipes",
        "decoder.layers.*.mlp.linear_fc1 (E4M3 with FP32 scales, one for the whole tensor in training, "
        "E4M3 with E8M0 scales, one for each 1x32 block in the rollout)",
    ),
    *(
        (
            {**DEEPSEEK, "modules": ((pattern, "bf16"),)},
            DEEPSEEK,
            "error",
            "modules",
            "sides-recipes",
            f"{pattern.replace('*.', 'decoder.layers.*.', 1)} (BF16 in training, E4M3 in the rollout)",
        )
        for pattern in ("*.mixer.in_proj", "*.linear_attn.*", "*.indexer.*", r"re:mixer\.\w+_proj")
    ),
    (
        {**DEEPSEEK, "modules": (("*.linear_fc1", "mxfp8"),)},
        {**DEEPSEEK, "modules": (("*.linear_fc1", "blockwise"),)},
        "info",
        "weights",
        "sides-underflow",
        "Weights of modules named *.linear_fc1",
    ),
    ({**DEEPSEEK}, {**DEEPSEEK, "kv_cache": "fp8"}, "warning", "attention", "sides-kv-cache", "KV cache"),
    *(
        (
            {**TENSORWISE, **POW2, attends: True},
            {**TENSORWISE, **POW2, "kv_cache": cache},
            "warning",
            "attention",
            "sides-attention",
            f"attends in FP8, the rollout in BF16{beside}.",
        )
        for attends in ("attention", "multi_head_attention")
        for cache, beside in (("auto", ""), ("fp8", ", with keys and values from an FP8 cache"))
    ),
    ({**TENSORWISE, **POW2}, {**DEEPSEEK, **POW2}, "info", "weights", "sides-underflow", "underflows"),
    ({**DEEPSEEK}, {**DEEPSEEK, "importance_sampling": False}, "info", "loss", "sides-correction", "not corrected"),
]


def test_nvfp4_agrees_where_blocks_and_the_scales_of_rows_do():
    p = Precision(**ALIKE)
    assert check(train=p, rollout=p).agrees
    rules = (("*.self_attention.*", "bf16"), ("*.mlp.linear_fc2", "mxfp8"))
    assert check(train=p.replace(modules=rules), rollout=p.replace(modules=rules)).agrees


def _ruled(base, *rules, **more):
    return Precision(**base, modules=rules, **more)


AGREEING = {
    "nothing runs in the base": _ruled(NVFP4, ("*", "mxfp8")),
    "nothing runs in FP8": _ruled(NVFP4, ("*", "bf16")),
    "what would run in the base is kept": _ruled(
        NVFP4, ("*.mlp.*", "mxfp8"), ("*", "blockwise"), keep=("*.self_attention.*",)
    ),
    "four bits alike": _ruled(
        DEEPSEEK, ("*.linear_fc*", "nvfp4"), weight_block="1x16", row_scaled=True, backward="dequantized"
    ),
    "mixers": _ruled(DEEPSEEK, ("*.mixer.in_proj", "bf16"), ("*.linear_attn.*", "mxfp8")),
}


@pytest.mark.parametrize("name", AGREEING)
def test_rules_with_the_same_values_on_both_sides_agree(name):
    found = check(train=AGREEING[name], rollout=AGREEING[name]).require().findings
    assert [f.code for f in found] == ["nvfp4-rollout-fixed-scale"] * (
        name == "four bits alike"
    )  # vLLM's, not a side's


@pytest.mark.parametrize("side", [{"rollout": "nvfp4"}, {"rollout": "fp8"}])
def test_what_is_advised_for_a_side_alone_makes_both_agree(side):
    (found,) = [f for f in check(train=Precision(), rollout=Precision(**side)).findings if f.code == "sides-format"]
    advised = dict(re.findall(r"(\w+)='?(\w+)'?[,)]", found.remedy))
    one = Precision(**{"format": "e2m1"} | advised | ({"row_scaled": True} if "row_scaled" in advised else {}))
    assert check(train=one, rollout=one).agrees
    assert not [*backward_findings(one)]


def test_rules_of_a_side_that_runs_without_fp8_are_left_out_of_one_contract():
    """Rules stand beside a rollout that is not the other side's; without FP8 on both sides they mean nothing."""
    train = Precision(rollout="fp8", modules=(("*.linear_fc1", "mxfp8"),))
    assert join(train, Precision()) == Precision()


@pytest.mark.parametrize("rules", [((), (("*.linear_fc1", "mxfp8"),)), ((("*.linear_fc1", "mxfp8"),), ())])
def test_a_rule_that_only_one_side_has_is_not_dropped_from_one_contract(rules):
    """Powers of two give equal values in blocks and in MX, and the rollout stores other bytes."""
    train, rollout = (_ruled(DEEPSEEK, *side) for side in rules)
    assert check(train=train, rollout=rollout).agrees
    with pytest.raises(PrecisionError, match=r"other rules for modules \(modules=\): decoder.layers.\*.mlp.linear_fc1"):
        join(train, rollout)


def test_a_rule_that_changes_nothing_may_be_on_one_side():
    ruled = _ruled(DEEPSEEK, ("*.linear_fc1", "blockwise"))
    assert join(Precision(**DEEPSEEK), ruled) == Precision(**DEEPSEEK)


def test_a_rule_for_all_leaves_a_side_without_fp8_as_the_other_is():
    assert check(train=_ruled(DEEPSEEK, ("*", "bf16")), rollout=Precision()).findings == ()
    codes = [f.code for f in check(train=_ruled(DEEPSEEK, ("*.linear_fc1", "bf16")), rollout=Precision()).findings]
    assert codes == ["sides-format"]


@given(contracts(), st.sampled_from(["tensorwise", "blockwise", "mxfp8", "nvfp4"]))
def test_a_rule_for_every_module_is_what_the_same_recipe_is_as_base(contract, recipe):
    try:
        ruled = contract.replace(modules=(("*", recipe),))
    except PrecisionError:
        return  # the contract has no recipe that a rule could change, or one that goes with no rule
    # The contract that the rule makes, on the side that is quantized; one without FP8 has no rules.
    base = ruled.of(["decoder.layers.0.mlp.linear_fc1"])
    train = base if ruled.is_quantized else contract
    by_rule, alone = (
        [str(f) for f in result.findings if f.where in ("format", "weights", "activations", "modules")]
        for result in (check(train=ruled, rollout=ruled), check(train=train, rollout=base))
    )
    assert by_rule == alone


@pytest.mark.parametrize(("train", "rollout", "severity", "where", "code", "words"), DIFFERENCES)
def test_what_differs_is_said_in_words(train, rollout, severity, where, code, words):
    result = check(train=Precision(**train), rollout=Precision(**rollout))
    found = [f for f in result.findings if (f.code, f.where, f.severity) == (code, where, severity)]
    assert any(words in str(f) for f in found), str(result)
    assert all(f.what and f.why and f.remedy for f in result.findings)
    assert result.agrees == (severity == "info")
    if not result.agrees:
        with pytest.raises(PrecisionError, match=r"remedy"):
            result.require()


def test_every_rule_on_two_sides_is_found():
    of_a_model = {"sides-shapes"}  # found in test_check_model.py
    assert {code for *_, code, _ in DIFFERENCES} == {code for code in RULES if code.startswith("sides-")} - of_a_model


def test_json_keeps_the_words_of_scripts():
    """One scale inside; ``conflict``, ``difference`` and ``note`` are what ``check --json`` has always said."""
    for severity, word in (("error", "conflict"), ("warning", "difference"), ("info", "note")):
        train, rollout, _, where, code, _ = next(row for row in DIFFERENCES if row[2] == severity)
        rows = check(train=Precision(**train), rollout=Precision(**rollout)).to_dict()["findings"]
        row = next(row for row in rows if row["code"] == code)
        assert (row["severity"], row["topic"]) == (word, where)
        assert row["what"]
        assert row["why"]
        assert row["remedy"]


def test_a_router_kept_by_name_is_kept_anyway():
    train = Precision(**DEEPSEEK)
    assert check(
        train=train, rollout=train.replace(keep=("*router*", "lm_head", "*.mlp.gate", "*embed*", "*norm*"))
    ).agrees


def test_a_linear_whose_name_begins_like_a_routers_is_none():
    train = Precision(**DEEPSEEK)
    found = check(train=train, rollout=train.replace(keep=("*.mlp.gate_proj",)))
    assert [f.code for f in found.findings if f.severity == "error"] == ["sides-modules"]


@pytest.mark.parametrize("pattern", [
    "*.mlp.gate*",  # the router, and gate_proj
    r"re:norm|linear_fc1",
    r"re:(linear_fc1|\.router)$",
    r"re:norm|mixer",
    "*.feed_forward.gate*",
])  # fmt: skip
def test_a_pattern_that_names_linears_beside_what_is_kept_anyway_counts(pattern):
    train = Precision(**DEEPSEEK)
    for changes in ({"keep": (pattern,)}, {"modules": ((pattern, "bf16"),)}):
        for sides in ((train, train.replace(**changes)), (train.replace(**changes), train)):
            assert not check(train=sides[0], rollout=sides[1]).agrees, changes


@pytest.mark.parametrize(("ours", "theirs", "module"), [
    ("*.layers.1[23].*", "*.layers.12.*", "decoder.layers.13."),
    (r"re:layers\.1[23]\.", r"re:layers\.12\.", "decoder.layers.13."),
    ("*.layers.1?.*", r"re:layers\.1[0-8]\.", "decoder.layers.19."),
    ("*.[12].mlp.*", "*.1.mlp.*", "decoder.layers.2."),
    (r"re:layers\.\d\d\.mlp\.linear_fc1", r"re:layers\.[1-8]\d\.mlp\.linear_fc1", "decoder.layers.90."),
])  # fmt: skip
def test_layers_that_patterns_do_not_name_by_number_are_told_apart(ours, theirs, module):
    p = Precision(**DEEPSEEK)
    one, other = (p.replace(modules=((pattern, "bf16"),)) for pattern in (ours, theirs))
    for train, rollout in ((one, other), (other, one)):
        found = check(train=train, rollout=rollout)
        assert module in str(found), found
        assert check(train=train, rollout=train).agrees
    kept = [p.replace(keep=(pattern,)) for pattern in (ours, theirs)]
    assert not check(train=kept[0], rollout=kept[1]).agrees


@pytest.mark.parametrize(("train", "rollout"), [
    ({"keep": ("*.mlp.linear_fc2",)}, {"modules": (("*.mlp.linear_fc2", "bf16"),)}),
    ({"keep": ("*.linear_fc1", "*.linear_fc2")}, {"keep": ("*.linear_fc?",)}),
    ({"keep": ("*.mlp.linear_fc1",)}, {"keep": ("*.mlp.gate_up_proj",)}),
    ({"keep": ("*.mlp.linear_fc1",)}, {"keep": ("*.mlp.up_proj", "*.mlp.gate_proj", "*.router")}),
    ({"keep": ("*.mlp.experts.*",)}, {"keep": ("*.experts.*_proj", "*.experts.*.w?")}),
])  # fmt: skip
def test_the_same_linears_kept_by_other_words_are_no_difference(train, rollout):
    sides = [Precision(**DEEPSEEK, **changes) for changes in (train, rollout)]
    assert check(train=sides[0], rollout=sides[1]).agrees
    assert join(*sides).keep == sides[0].keep


@pytest.mark.parametrize(("changes", "module"), [
    ({"modules": (("*.linear_fc1", "mxfp8"),)}, "decoder.layers.*.mlp.experts.linear_fc2"),
    ({"modules": (("*.experts.*.down_proj", "mxfp8"),)}, "decoder.layers.*.mlp.experts.linear_fc1"),
    ({"modules": (("*.layers.3.*.linear_fc2", "bf16"),)}, "decoder.layers.3.mlp.experts.linear_fc1"),
    ({"keep": ("*.linear_fc2",)}, "decoder.layers.*.mlp.experts.linear_fc1"),
    ({"keep": ("*.q_a_proj",)}, "decoder.layers.*.self_attention.linear_kv_down_proj"),
])  # fmt: skip
def test_a_part_of_what_an_engine_holds_as_one_is_the_whole_there(changes, module):
    """Megatron runs the experts' two linears by two recipes, and an engine all experts of a layer by one."""
    p = Precision(**ALIKE, **changes)
    (found,) = [f for f in check(train=p, rollout=p).findings if f.code == "sides-units"]
    assert module in found.what
    assert not check(train=p, rollout=p).agrees
    assert join(p, p) == p


@pytest.mark.parametrize(
    "rule", ["*.mlp.linear_fc1", "*.experts.*", "*.linear_fc*", "*.shared_experts.linear_fc1", "*"]
)
def test_rules_for_all_of_what_an_engine_holds_as_one_or_for_none_agree(rule):
    p = Precision(**DEEPSEEK, modules=((rule, "mxfp8"),))
    assert check(train=p, rollout=p).agrees
    four = Precision(**ALIKE, modules=((rule, "bf16"),))
    assert check(train=four, rollout=four).agrees


def test_powers_of_two_are_alike_whatever_an_engine_holds_as_one():
    p = Precision(**DEEPSEEK, modules=(("*.linear_fc1", "mxfp8"),))
    assert check(train=p, rollout=p).agrees


def test_the_engines_name_of_all_experts_is_one_of_theirs_on_both_sides():
    p = Precision(**ALIKE, modules=(("*.mlp.experts", "bf16"),))
    assert p.of(all_names(["decoder.layers.3.mlp.experts.linear_fc2"], 4)).scaling is None
    assert check(train=p, rollout=p).agrees


def test_a_missing_correction_is_a_note():
    p = Precision(**DEEPSEEK, importance_sampling=False)
    result = check(train=p, rollout=p)
    assert result.agrees
    assert [f.severity for f in result.findings] == ["info"]
    assert result.to_dict()["findings"][0]["topic"] == "loss"


def test_the_result_has_no_truth_value():
    with pytest.raises(TypeError, match="agrees"):
        bool(check(train=Precision(), rollout=Precision()))


@given(contracts())
def test_a_contract_never_conflicts_with_itself(contract):
    assert "error" not in {f.severity for f in check(train=contract, rollout=contract).findings}
    assert join(contract, contract) == contract


@given(contracts(), contracts())
def test_two_sides_without_conflict_join_to_one_contract_that_says_both(train, rollout):
    conflicts = [f for f in check(train=train, rollout=rollout).findings if f.severity == "error"]
    if conflicts:
        with pytest.raises(PrecisionError):
            join(train, rollout)
        return
    one = join(train, rollout)
    assert one.gemms() == train.gemms()
    assert (one.rollout, one.kv_cache, one.deep_gemm) == (rollout.rollout, rollout.kv_cache, rollout.deep_gemm)
    if train.is_fp8 and rollout.rollout == "fp8":
        assert one.operand("weight", "rollout") == rollout.operand("weight", "rollout")


def test_the_packages_public_name_goes_on_being_callable():
    import importlib

    import nemo_fp8

    for _ in range(2):  # a submodule of the same name must not take its place after the first use
        assert nemo_fp8.check(train=Precision(), rollout=Precision()).agrees
        importlib.import_module("nemo_fp8.preflight.agreement")


@pytest.mark.parametrize(
    ("megatron", "vllm"), [("linear_qkv", "qkv_proj"), ("linear_fc1", "gate_up_proj")], ids=["qkv", "gate_up"]
)
def test_a_rule_in_vllm_s_words_holds_in_training_too(megatron, vllm):
    """vLLM's name for what it fuses is Megatron's matrix: a rule that only the rollout obeyed would be agreed to."""
    base = preset("bf16_with_mxfp8_mixed")
    ruled = base.replace(modules=((f"*.{vllm}", "bf16"),))
    unit = {"linear_qkv": "self_attention.linear_qkv", "linear_fc1": "mlp.linear_fc1"}[megatron]
    assert ruled.of(all_names([f"decoder.layers.3.{unit}"])).scaling is None
    assert any(map(base.replace(keep=(f"*.{vllm}",)).keeps, all_names([f"decoder.layers.3.{unit}"])))
    alike = check(train=ruled, rollout=base.replace(modules=((f"*.{megatron}", "bf16"),)))
    assert {f.code for f in alike.findings} <= {"sides-units"}, (
        "the experts' other linear alone, which is no part of it"
    )
    assert not check(train=ruled, rollout=base).agrees
