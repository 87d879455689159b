"""Comparing weights: every accident is named, by codes and scales as by fingerprints, and sound weights are not."""

import re

import pytest
import torch
from support import tiny

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.findings import RULES
from nemo_fp8.mismatch import compare_weights, kind_of
from nemo_fp8.mismatch import weights as weights_module
from nemo_fp8.mismatch.weights import _cut, reference
from nemo_fp8.numerics import Quantized, quantize
from nemo_fp8.rollout.refit import fingerprint

FP8 = Precision(rollout="fp8")
POW2 = FP8.replace(weight_scale="pow2")
LAYER = "model.layers.1."
GATE, UP, DOWN = (f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


def held_as(kind, weights, precision=FP8):
    """What an engine that was given these weights would tell."""
    told = {}
    quantized = dict(reference(weights, precision))
    for name, t in weights.items():
        q = quantized.get(name)
        parts = (t,) if q is None else (q.data, q.scale_inv)
        if kind == "fingerprint":
            told[name] = fingerprint(*parts)
        elif kind == "parts":
            told[name] = cut(*parts)
        else:
            told[name] = t if q is None else (q if kind == "quantized" else parts)
    return told


def cut(tensor, scales=None):
    """Two tensor-parallel workers, each with half of the rows, cut at blocks where there are two."""
    rows = tensor.shape[0] // 2 if scales is None or tensor.shape[0] >= 256 else tensor.shape[0]
    rest = "".join(f",0:{n}" for n in tensor.shape[1:])
    told = {}
    for start in range(0, tensor.shape[0], rows):
        mine = (tensor[start : start + rows],)
        if scales is not None:
            mine += (scales[start // 128 : -(-(start + rows) // 128)],)
        told[f"{start}:{start + rows}{rest}"] = fingerprint(*mine)
    return told


@pytest.mark.parametrize("held", [{"decoder.final_norm": "0123456789abcdef"}, {"model.norm.weight": {}}])
def test_nothing_to_compare_is_no_answer(held):
    with pytest.raises(PrecisionError, match=f"None of the {len(held)} tensors that the engine holds can be compared"):
        compare_weights(tiny.state_dict(tiny.config("llama")), held, Precision())


@pytest.mark.parametrize(
    ("shape", "block"), [((320, 256), (128, 128)), ((2, 256, 256), (128, 128)), ((320, 256), None)], ids=str
)
def test_a_part_has_the_scales_of_its_own_blocks(shape, block):
    """Also where the whole has a ragged edge, or is a stack of matrices."""
    whole = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), Operand("e4m3", block, "fp32"))
    rest = ",0:256" if len(shape) == 2 else ",0:256,0:256"
    for start, stop in ((0, shape[0] // 2 // 128 * 128 or 1), (256 if len(shape) == 2 else 1, shape[0])):
        codes, scales = _cut(whole, f"{start}:{stop}{rest}")
        assert codes.shape[0] == stop - start
        part = Quantized(
            codes.reshape(-1, 256), scales if block is None else scales.reshape(-1, scales.shape[-1]), block
        )
        assert torch.equal(part.dequantize(), whole.dequantize()[start:stop].reshape(-1, 256))


HELD = pytest.mark.parametrize("kind", ["quantized", "tensors", "fingerprint", "parts"])


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def weights(request):
    return tiny.state_dict(tiny.config(request.param))


@pytest.fixture(scope="module")
def dense():
    return tiny.state_dict(tiny.config("qwen3"))


@HELD
@pytest.mark.parametrize(
    "precision", [FP8, POW2, FP8.replace(first_layers=1, keep=("*.o_proj",))], ids=["fp32", "pow2", "some kept"]
)
def test_sound_weights(weights, kind, precision):
    assert compare_weights(weights, held_as(kind, weights, precision), precision) == []


@HELD
def test_scales_of_one_layer_are_zero(dense, kind):
    held = held_as(kind, dense)
    q = dict(reference(dense, FP8))[DOWN]
    broken = Quantized(q.data, torch.zeros_like(q.scale_inv), q.block)
    held[DOWN] = {
        "quantized": broken,
        "tensors": (q.data, broken.scale_inv),
        "fingerprint": fingerprint(q.data, broken.scale_inv),
    }.get(kind) or cut(q.data, broken.scale_inv)
    (found,) = compare_weights(dense, held, FP8)
    assert (found.where, kind_of(found), found.severity) == (DOWN, "zeroed", "error")
    assert "scales" in found.why


def test_one_bad_scale_of_many(dense):
    for value in (0.0, float("inf"), float("nan"), -1.0):
        held = held_as("tensors", dense)
        codes, scales = held[GATE]
        held[GATE] = (codes, scales.index_fill(0, torch.tensor([1]), value))
        (found,) = compare_weights(dense, held, FP8)
        assert (found.where, kind_of(found), found.why) == (
            GATE,
            "zeroed",
            "1 of 2 scales are zero, infinite or no number.",
        )


@HELD
def test_gate_and_up_swapped(dense, kind):
    found = compare_weights(dense, held_as(kind, tiny.swapped(dense, GATE, UP)), FP8)
    assert [(d.where, kind_of(d), d.why) for d in found] == [
        (GATE, "swapped", f"It holds {UP}."),
        (UP, "swapped", f"It holds {GATE}."),
    ]


@HELD
def test_two_experts_and_two_layers_swapped(kind):
    moe = tiny.state_dict(tiny.config("qwen3_moe"))
    a, b = (f"{LAYER}mlp.experts.{e}.up_proj.weight" for e in (0, 3))
    c, d = (f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 2))
    found = compare_weights(moe, held_as(kind, tiny.swapped(tiny.swapped(moe, a, b), c, d)), FP8)
    assert {(f.where, f.why) for f in found} == {(x, f"It holds {y}.") for x, y in ((a, b), (b, a), (c, d), (d, c))}


@HELD
def test_one_layer_is_stale(dense, kind):
    previous = tiny.noisy(dense, LAYER, 1e-2)
    mixed = dense | {name: t for name, t in previous.items() if name.startswith(LAYER)}
    held = held_as(kind, mixed)
    with_history = compare_weights(dense, held, FP8, previous=previous)
    without = compare_weights(dense, held, FP8)
    assert {d.where for d in with_history} == {n for n in dense if n.startswith(LAYER) and dense[n].dim() == 2}
    assert {kind_of(d) for d in with_history} == {"stale"}
    assert {kind_of(d) for d in without} == {"differs"}
    assert {d.where for d in with_history} == {d.where for d in without}
    if kind in ("tensors", "quantized"):
        assert "off by" in without[0].why


@HELD
@pytest.mark.parametrize(("mine", "other"), [(FP8, POW2), (POW2, FP8)])
def test_the_other_scale_convention_is_a_warning(dense, kind, mine, other):
    held = held_as(kind, dense, mine)
    held[UP] = held_as(kind, dense, other)[UP]
    (found,) = compare_weights(dense, held, mine)
    assert (found.where, kind_of(found), found.severity) == (UP, "scales", "warning")


@HELD
def test_a_step_too_small_for_fp8_is_seen_where_bf16_changed(dense, kind):
    """A norm that was not written, and a weight of which some codes changed."""
    step = dense | {"model.norm.weight": dense["model.norm.weight"] + 0.01}
    (found,) = compare_weights(step, held_as(kind, dense), FP8, previous=dense)
    assert (found.where, kind_of(found)) == ("model.norm.weight", "stale")


def test_missing_and_reshaped(dense):
    held = held_as("tensors", dense)
    del held[DOWN]
    codes, scales = held[GATE]
    held[GATE] = (codes[:128].contiguous(), scales[:1])
    held[UP] = (held[UP][0], scales[:1])
    kinds = {d.where: d for d in compare_weights(dense, held, FP8)}
    assert kind_of(kinds[DOWN]) == "missing"
    assert "Its shape is (128, 128), and not (256, 128)" in kinds[GATE].why
    assert "Its scales have the shape (1, 1)" in kinds[UP].why


@pytest.mark.parametrize(
    "other", [torch.tensor([2.0]), torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(2), torch.tensor(2.0).neg()]
)
def test_a_scalar_has_a_shape_and_a_type_too(other):
    """One scale for a whole weight lies in a tensor without dimensions."""
    name, scalar = "model.layers.0.self_attn.scale", torch.tensor(2.0)
    assert compare_weights({name: scalar}, {name: scalar.clone()}, FP8) == []
    (found,) = compare_weights({name: scalar}, {name: other}, FP8)
    assert (found.where, kind_of(found)) == (name, "differs")


def test_one_scale_for_a_weight_is_told_from_one_in_another_type(dense):
    whole = FP8.replace(rollout_block="tensor")
    q = dict(reference(dense, whole))[DOWN]
    assert q.scale_inv.dim() == 0
    held = held_as("tensors", dense, whole) | {DOWN: (q.data, q.scale_inv.double())}
    (found,) = compare_weights(dense, held, whole)
    assert found.where == DOWN


def test_nothing_is_asked_of_tensors_outside_of_fp8_that_are_not_told(dense):
    held = {name: told for name, told in held_as("fingerprint", dense).items() if "_proj" in name}
    assert compare_weights(dense, held, FP8) == []
    assert compare_weights(dense, {}, Precision(rollout="compute")) == []


def test_a_difference_says_what_to_do(dense):
    (found,) = compare_weights(dense, held_as("tensors", dense | {DOWN: torch.zeros_like(dense[DOWN])}), FP8)
    assert str(found).splitlines() == [
        f"{DOWN} is zeroed in the engine.",
        "  why:    All weights are zero.",
        "  remedy: Push again; if it stays, the engine's loader drops scales (verl#7224 was one).",
    ]


def test_every_kind_has_its_words_and_no_words_are_of_no_kind():
    kinds = {
        word for word in (re.match(r"    (\w+)  +\S", line) for line in weights_module.__doc__.splitlines()) if word
    }
    assert {f"weight-{kind[1]}" for kind in kinds} == {code for code in RULES if code.startswith("weight-")}


def test_what_no_part_is():
    with pytest.raises(PrecisionError, match="no part of a tensor"):
        compare_weights({"model.norm.weight": torch.ones(4)}, {"model.norm.weight": {"half": "0"}}, FP8)


def test_the_reference_stores_each_weight_by_the_rule_for_its_module():
    draws = torch.Generator().manual_seed(0)
    names = [f"model.layers.0.{part}_proj.weight" for part in ("self_attn.q", "self_attn.k", "self_attn.v")]
    names += [f"model.layers.0.{part}_proj.weight" for part in ("self_attn.o", "mlp.gate", "mlp.up", "mlp.down")]
    weights = {name: torch.randn(256, 256, generator=draws).bfloat16() for name in names}
    rules = (("*.linear_qkv", "bf16"), ("*.linear_proj", "mxfp8"))
    found = dict(reference(weights, Precision(rollout="nvfp4", modules=rules), layers=1))
    assert {name: q.block for name, q in found.items()} == {
        names[3]: (1, 32), **dict.fromkeys(names[4:], (1, 16)),
    }  # fmt: skip
    held = dict(found)
    assert (
        compare_weights(weights, held | {n: weights[n] for n in names[:3]}, Precision(rollout="nvfp4", modules=rules))
        == []
    )
    stale = {n: t + 1 for n, t in weights.items()}
    held[names[3]] = dict(reference(stale, Precision(rollout="nvfp4", modules=rules), layers=1))[names[3]]
    (problem,) = compare_weights(weights, held, Precision(rollout="nvfp4", modules=rules), previous=stale)
    assert (problem.where, problem.code) == (names[3], "weight-stale")
