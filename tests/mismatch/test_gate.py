"""The gate on emulated engines: calm over many sound models, firing on broken ones, and naming what is broken.

``benchmarks/mismatch.py`` counts the same over hundreds of models, into docs/benchmarks/mismatch.md.
"""

import copy
import json
import math

import pytest
import torch
from support import tiny

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch import Gate, LogProbs, Run, kind_of, log_probs, predict
from nemo_fp8.mismatch.weights import reference
from nemo_fp8.rollout.refit import fingerprint

FP8 = Precision(rollout="fp8")
DOWN = "model.layers.1.mlp.down_proj.weight"
GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


class Engine:
    """A trainer's model, its prediction, and an engine that computes in an arithmetic of its own."""

    def __init__(self, seed=0, family="qwen3", activations=False, precision=FP8):
        self.config = tiny.config(family)
        self.weights = tiny.state_dict(self.config, seed)
        self.tokens = tiny.tokens(16, 24, seed)
        self.activations, self.precision = activations, precision
        self.prediction = predict(self.config, self.weights, self.tokens, precision, activations=activations)

    def pair(self, held=None, tokens=None, precision=None):
        tokens = self.tokens if tokens is None else tokens
        run = Run(precision or self.precision, activations=self.activations, dtype=torch.float16)
        return LogProbs(
            log_probs(self.config, self.weights, tokens),
            log_probs(self.config, held or self.weights, tokens, run),
            self.prediction.mask,
        )

    def told(self, held, precision=None):
        return {name: fingerprint(q.data, q.scale_inv) for name, q in reference(held, precision or self.precision)}

    def judge(self, held, **more):
        return Gate().judge(
            self.prediction, self.pair(held), self.tokens, weights=self.weights, held=self.told(held), **more
        )


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.mark.parametrize("activations", [False, True], ids=["W8A16", "W8A8"])
def test_calm_over_sound_models(activations):
    """20 models, other tokens and the same ones: none of 40 verdicts fires."""
    for seed in range(20):
        sound = Engine(seed, activations=activations)
        others = tiny.tokens(16, 24, seed + 1000)
        assert not Gate().judge(sound.prediction, sound.pair(tokens=others)).fired
        verdict = Gate().judge(sound.prediction, sound.pair(), sound.tokens)
        assert not verdict.fired, f"seed {seed}: {verdict}"
        assert [check.name for check in verdict.checks] == ["distance", "residual"]


def test_every_accident_is_named(engine):
    previous = tiny.noisy(engine.weights, "model.layers.1.", 0.03)
    accidents = {
        "zeroed": (tiny.zeroed(engine.weights, DOWN), {DOWN}),
        "swapped": (tiny.swapped(engine.weights, GATE, UP), {GATE, UP}),
        "stale": (previous, {name for name in previous if "layers.1." in name and "_proj" in name}),
    }
    assert not engine.judge(engine.weights).fired
    for kind, (held, names) in accidents.items():
        verdict = engine.judge(held, previous=previous)
        assert verdict.left, verdict
        assert set(verdict.layers) == names
        assert {kind_of(d) for d in verdict.differences} == {kind}
        assert {f.code for f in verdict.findings} >= {"gate-residual", f"weight-{kind}"}
        with pytest.raises(PrecisionError, match=r"model\.layers\.1\.") as error:
            verdict.require()
        assert len(error.value.problems) >= 2


def test_a_stale_weight_that_no_band_sees_is_named_all_the_same(engine):
    held = tiny.noisy(engine.weights, DOWN, 1e-4)
    verdict = engine.judge(held, previous=held)
    assert not verdict.left
    assert verdict.fired
    assert verdict.layers == (DOWN,)


def test_other_scales_in_a_layer_are_a_warning(engine):
    other = FP8.replace(weight_scale="pow2")
    told = engine.told(engine.weights) | {DOWN: engine.told(engine.weights, other)[DOWN]}
    by_hand = {n: q.dequantize(torch.bfloat16) for n, q in reference(engine.weights, FP8)}
    by_hand[DOWN] = dict(reference(engine.weights, other))[DOWN].dequantize(torch.bfloat16)
    rollout = log_probs(engine.config, engine.weights | by_hand, engine.tokens, Run(dtype=torch.float16))
    pair = LogProbs(log_probs(engine.config, engine.weights, engine.tokens), rollout, engine.prediction.mask)
    verdict = Gate().judge(engine.prediction, pair, engine.tokens, weights=engine.weights, held=told)
    assert not verdict.fired, verdict
    assert [(d.where, kind_of(d)) for d in verdict.differences] == [(DOWN, "scales")]
    assert {found.severity for found in verdict.findings} == {"warning"}


def test_an_engine_that_silently_runs_in_bf16(engine):
    in_bf16 = engine.pair(precision=Precision(rollout="compute"))
    by_distance = Gate().judge(engine.prediction, in_bf16)
    assert [check.side for check in by_distance.checks] == ["below"]
    assert not by_distance.fired
    assert [found.code for found in by_distance.findings] == ["gate-too-close"]
    assert "closer than the contract" in str(by_distance)
    assert Gate().judge(engine.prediction, in_bf16, engine.tokens).fired


def test_a_bf16_rollout_has_a_band_too():
    bf16 = Engine(precision=Precision())
    assert not bf16.prediction.quantized
    assert not Gate().judge(bf16.prediction, bf16.pair(), bf16.tokens).fired
    assert Gate().judge(bf16.prediction, bf16.pair(precision=FP8), bf16.tokens).fired


def test_a_trainer_in_the_same_fp8_leaves_arithmetic_alone():
    same = Precision(format="e4m3", scaling="blockwise", weight_scale="fp32", activation_scale="fp32", rollout="fp8")
    fp8 = Engine(activations=True, precision=same)
    assert not fp8.prediction.quantized
    apart = Engine(activations=True).prediction.distance().typical
    assert fp8.prediction.distance().typical < 0.9 * apart
    pair = LogProbs(
        log_probs(fp8.config, fp8.weights, fp8.tokens, Run(same, side="train")),
        fp8.pair().rollout.float(),
        fp8.prediction.mask,
    )
    assert not Gate().judge(fp8.prediction, pair, fp8.tokens).fired


def test_it_says_what_to_do_where_no_weights_are_told(engine):
    verdict = Gate().judge(engine.prediction, engine.pair(tiny.zeroed(engine.weights, DOWN)))
    assert verdict.fired
    assert verdict.findings[0].code == "gate-distance"
    assert "Pass held=" in verdict.findings[0].remedy
    with pytest.warns(DeprecationWarning, match=r"Verdict\.findings"):
        assert verdict.problems() == [(found.severity, found) for found in verdict.findings]
    plain = json.loads(json.dumps(verdict.to_dict()))
    assert plain["fired"]
    assert plain["weights"] is None
    assert plain["checks"][0]["side"] == "above"


def test_right_weights_and_wrong_log_probs(engine):
    """Another temperature: nothing is wrong with the weights, and the gate says so."""
    pair = engine.pair()
    hot = LogProbs(pair.trainer, pair.rollout * 1.3, pair.mask)
    verdict = Gate().judge(
        engine.prediction, hot, engine.tokens, weights=engine.weights, held=engine.told(engine.weights)
    )
    assert verdict.fired
    assert verdict.layers == ()
    assert "All weights that were told are right" in verdict.findings[0].remedy


def test_questions_without_an_answer(engine):
    with pytest.raises(PrecisionError, match="held= without weights="):
        Gate().judge(engine.prediction, engine.pair(), held={})
    pair = engine.pair()
    without_the_first = LogProbs(pair.trainer[:, 1:], pair.rollout[:, 1:], pair.mask[:, 1:])
    with pytest.raises(PrecisionError, match="is not of tokens of shape"):
        Gate().judge(engine.prediction, without_the_first, engine.tokens)
    with pytest.raises(PrecisionError, match="is not of tokens of shape"):
        predict(tiny.config(), {}, engine.tokens, engine.prediction.precision, mask=without_the_first.mask)
    for wrong in ({"false_positives": 0.0}, {"factor": 0.5}, {"residual_factor": 0.9}, {"factor": math.inf}):
        with pytest.raises(PrecisionError, match="A gate with"):
            Gate(**wrong)


def test_the_page_says_what_the_record_has():
    from benchmarks import mismatch as measured

    record = json.loads(measured.PAGE.with_suffix(".json").read_text())
    page = measured.page(record)
    assert page == measured.PAGE.read_text()
    calm = [kind[measured.SOUND][f"gate, {which}"] for kind in record["fired"].values() for which in measured.WHICH]
    assert calm == [0.0] * 8
    other = copy.deepcopy(record)
    other["fired"]["qwen3, W8A16"][measured.SOUND]["gate, others"] = 0.5
    assert "| none | 50 / 0 |" in measured.page(other)
