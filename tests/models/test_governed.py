"""Two contracts alone tell which contract each linear has on either side."""

import itertools

import pytest

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.models.families import HUGGING_FACE
from nemo_fp8.models.governed import governed

RULES = (("*.layers.1.*", "bf16"), ("*.linear_qkv", "bf16"), ("*.up_proj", "mxfp8"), ("*.linear_fc2", "blockwise"))
RULED = preset("bf16_with_nvfp4_mixed").replace(modules=RULES)
BLOCKWISE = Precision(format="e4m3", scaling="blockwise")


def _apart(train, rollout):
    """Names of linears that have another recipe on one side than on the other."""
    return [name for g in governed(train, rollout) if g.train.scaling != g.rollout.scaling for name in g.linears]


def test_where_two_sides_rules_part_each_linear_is_named():
    apart = _apart(RULED, RULED.replace(modules=RULES[1:]))
    units = {name.split("layers.1.")[1] for name in apart if not name.startswith("other")}
    assert units == HUGGING_FACE.keys() - {"self_attention.linear_qkv"}
    assert "other linears of decoder.layers.1" in apart
    for p in (RULED, RULED.replace(modules=())):
        assert not _apart(p, p)
    ways = itertools.permutations((("*.linear_proj", "bf16"), ("*.linear_proj", "mxfp8")))
    first, second = (RULED.replace(modules=tuple(rules)) for rules in ways)
    assert _apart(first, second) == ["decoder.layers.*.self_attention.linear_proj"]


def test_linears_of_one_recipe_are_one_group_and_the_contracts_own_comes_first():
    own, *ruled = governed(RULED, RULED)
    assert (own.by_rule, own.patterns) == ((False, False), [])
    assert "decoder.layers.*.self_attention.linear_proj" in own.linears
    found = {g.train.scaling: (g.by_rule, g.patterns) for g in ruled}
    both = (True, True)
    assert found == {
        None: (both, ["*.linear_qkv", "*.layers.1.*"]), "mxfp8": (both, ["*.up_proj"]),
        "blockwise": (both, ["*.linear_fc2"]),
    }  # fmt: skip


@pytest.mark.parametrize(("pattern", "names"), [
    ("*", ["decoder.layers.*.mlp.linear_fc1", "other linears of decoder.layers.*"]),
    ("*.k_proj", ["decoder.layers.*.self_attention.linear_qkv"]),
    ("*.layers.1*", ["decoder.layers.1.mlp.linear_fc1"]),
    (r"re:layers\.(0|3)\.", ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.3.mlp.linear_fc2"]),
    (r"re:layers\.1\d\.", ["decoder.layers.10.mlp.linear_fc1"]),  # no number that it holds is a layer of it
    ("*.layers.?.*", ["decoder.layers.0.mlp.linear_fc1"]),
    (r"re:mixer\..*proj", [r"re:mixer\..*proj"]),
    ("*.mixer.in_proj", ["decoder.layers.*.mixer.in_proj"]),
    ("*.experts.5.*", ["decoder.layers.*.experts.5.*"]),
])  # fmt: skip
def test_a_rule_of_one_side_is_seen_whatever_it_names(pattern, names):
    for sides in itertools.permutations((BLOCKWISE.replace(modules=((pattern, "bf16"),)), BLOCKWISE)):
        apart = _apart(*sides)
        assert {*names} <= {*apart}
        own = governed(*sides)[0]
        assert any(own.by_rule) == (pattern == "*"), "no linear is left but under a rule for all"


def test_a_pattern_of_one_side_is_what_a_wider_one_of_the_other_gives_it():
    narrow, wide, layer = (("*.mixer.in_proj", "bf16"),), (("*.mixer.*", "bf16"),), (("*.layers.1.*", "mxfp8"),)
    assert _apart(BLOCKWISE.replace(modules=narrow), BLOCKWISE.replace(modules=wide)) == ["decoder.layers.*.mixer.*"]
    assert not _apart(BLOCKWISE.replace(modules=narrow + wide), BLOCKWISE.replace(modules=wide))
    first, last = (BLOCKWISE.replace(modules=rules) for rules in (narrow + layer, layer + narrow))
    assert _apart(first, last) == ["decoder.layers.1.mixer.in_proj"]


def test_two_patterns_of_other_linears_are_compared_where_both_match():
    rules = (("*.mixer.*", "bf16"), ("*.in_proj", "mxfp8"))
    first, last = (BLOCKWISE.replace(modules=found) for found in (rules, rules[::-1]))
    assert _apart(first, last) == ["decoder.layers.*.mixer.in_proj"]


def test_what_both_sides_keep_and_what_no_side_quantizes_is_no_difference():
    kept = BLOCKWISE.replace(keep=("*.mixer.*", "*.linear_fc1"))
    rules = (("*.mixer.in_proj", "mxfp8"), ("*.gate_proj", "mxfp8"), ("*.router", "mxfp8"))
    assert not _apart(kept.replace(modules=rules), kept)
    assert governed(BLOCKWISE.replace(keep=("*",)), Precision()) == []
    assert governed(Precision(keep=("*",)), Precision(rollout="fp8")), "without FP8 a side keeps nothing out of it"


def test_the_rules_of_a_side_without_fp8_change_nothing():
    rollout = Precision(rollout="fp8", modules=(("*.linear_fc1", "mxfp8"),))
    assert {g.train for g in governed(rollout, rollout)} == {rollout.replace(modules=())}
