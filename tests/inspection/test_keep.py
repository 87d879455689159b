"""Advice is exact: what fails is kept, what passes is not, by the names of training and of the checkpoint."""

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.inspection.advice import advise
from nemo_fp8.inspection.loss import Loss
from nemo_fp8.inspection.measure import Inspection, Row
from nemo_fp8.models.names import place

RECIPES = {s: preset(f"bf16_with_fp8_{s}_mixed") for s in ("delayed", "tensorwise", "blockwise")}
HUGGING_FACE = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "mlp.experts.linear_fc1": ("mlp.experts.0.gate_proj", "mlp.experts.11.up_proj"),
}


def _loss(snr):
    return Loss(1000, 0, 0, 0, 10 ** (snr / 10), 1.0, 1.0, 1.0, 1.0, 50.0, snr)


@st.composite
def inspections(draw):
    """Every linear of some layers, each with an SNR; one recipe."""
    p = RECIPES[draw(st.sampled_from(list(RECIPES)))]
    layers = draw(st.integers(1, 6))
    names = [f"model.layers.{n}.{tail}" for n in range(layers) for tails in HUGGING_FACE.values() for tail in tails]
    names += draw(st.sampled_from([[], ["connector"]]))
    snrs = draw(st.lists(st.sampled_from([10.0, 19.9, 20.0, 31.0]), min_size=len(names), max_size=len(names)))
    if draw(st.booleans()):  # whole layers below
        low = draw(st.sets(st.integers(0, layers - 1)))
        snrs = [5.0 if place(name).layer in low else snr for name, snr in zip(names, snrs, strict=True)]
    rows = tuple(
        Row(f"{n}.weight", "weight", place(n), (10, 100), "BF16", losses={"r": _loss(s)}, kept=_kept(p, n, layers))
        for n, s in zip(names, snrs, strict=True)
    )
    return Inspection(Path("x"), {"r": p}, rows, layers, 0, 0.0)


def _kept(p, name, layers):
    return {"r": "kept"} if p.keeps(name, place(name).layer, layers) else {}


@settings(max_examples=150, deadline=None)
@given(inspections())
def test_exactly_the_linears_that_fail_are_kept(inspection):
    p, layers = inspection.recipes["r"], inspection.layers
    advice = advise(inspection, "r", 20.0)
    units = {}
    for row in inspection.rows:
        if not row.kept:
            units.setdefault((row.place.layer, row.place.unit), []).append(row.losses["r"].floor_db)
    for row in inspection.rows:
        at = row.place
        should = bool(row.kept) or min(units[at.layer, at.unit]) < 20
        assert advice.precision.keeps(at.module, at.layer, layers) == should, (at.module, advice.changes)
        if at.layer is not None:
            assert advice.precision.keeps(f"decoder.layers.{at.layer}.{at.unit}", at.layer, layers) == should
            if should and advice.whole_layers:
                first, last = advice.whole_layers
                assert Precision(first_layers=first, last_layers=last).keeps("", at.layer, layers)
    assert advice.lowest >= 20
    assert (advice.precision.first_layers, advice.precision.last_layers) >= (p.first_layers, p.last_layers)
    assert len(advice.below) == sum(row.losses["r"].floor_db < 20 for row in inspection.rows if not row.kept)


@settings(max_examples=30, deadline=None)
@given(inspections())
def test_what_is_printed_can_be_pasted(inspection):
    advice = advise(inspection, "r", 20.0)
    call = ast.parse(f"f({advice.changes})", mode="eval").body
    fields = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    assert inspection.recipes["r"].replace(**fields) == advice.precision


def test_whole_layers_at_the_ends_need_no_pattern():
    names = [f"model.layers.{n}.{tail}" for n in range(6) for tails in HUGGING_FACE.values() for tail in tails]
    snr = {0: 5.0, 1: 5.0, 5: 5.0}
    rows = tuple(
        Row(n, "weight", place(n), (10, 10), "BF16", losses={"r": _loss(snr.get(place(n).layer, 30.0))}) for n in names
    )
    advice = advise(Inspection(Path("x"), {"r": RECIPES["blockwise"]}, rows, 6, 0, 0.0), "r", 20.0)
    assert advice.changes == "first_layers=2, last_layers=1"
    assert advice.share == pytest.approx(0.5)
    assert isinstance(advice.precision, Precision)


def test_a_threshold_is_a_number():
    with pytest.raises(PrecisionError, match="threshold of nan"):
        advise(Inspection(Path("m"), {"r": RECIPES["tensorwise"]}, (), 1, 0, 0.0), "r", float("nan"))


def test_a_bad_activation_keeps_its_linear():
    name = "decoder.layers.1.mlp.linear_fc2"
    modules = [f"decoder.layers.{n}.mlp.linear_fc2" for n in range(3)]
    weights = [Row(m, "weight", place(m), (9, 9), "BF16", losses={"r": _loss(31.0)}) for m in modules]
    grad = Row(f"{name}.grad", "grad", place(f"{name}.grad"), (9, 9), "BF16", losses={"r": _loss(3.0)})
    advice = advise(Inspection(Path("x"), {"r": RECIPES["blockwise"]}, (*weights, grad), 3, 0, 0.0), "r", 20.0)
    assert [row.name for row in advice.below] == [f"{name}.grad"]
    assert advice.precision.keeps(name)
    assert not advice.precision.keeps("decoder.layers.2.mlp.linear_fc2")
