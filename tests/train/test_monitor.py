"""The monitor sees every FP8 linear on every layout, measures what its GEMMs are fed, and names the layer to keep in
BF16."""

import json
import math
import os
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support.train.harness import train_tiny

BLOCKWISE, DELAYED, TENSORWISE = (
    "bf16_with_fp8_blockwise_mixed",
    "bf16_with_fp8_mixed",
    "bf16_with_fp8_current_scaling_mixed",
)
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
FORWARD_MAX, GRAD_MAX = 448.0, 57344.0


def attach(trainer, tiny):
    """In the rank: a monitor with the arguments of the test, and TensorBoard where it asks for it."""
    from lightning.pytorch.loggers import TensorBoardLogger

    from nemo_fp8.train.monitor import Fp8Monitor

    if "TENSORBOARD" in os.environ:
        trainer.loggers = [TensorBoardLogger(os.environ["TENSORBOARD"], name="", version="")]
    trainer.callbacks.append(Fp8Monitor(**{"every_n_steps": 3} | json.loads(os.environ.get("MONITOR", "{}"))))


def look(trainer, extra):
    """In the rank, at the end: what the monitor found, and the hooks that it left."""
    from nemo_fp8.te_cpu.quantized import _watchers
    from nemo_fp8.train.linears import linear_names
    from nemo_fp8.train.monitor import Fp8Monitor

    monitor = next(c for c in trainer.callbacks if isinstance(c, Fp8Monitor))
    hooks = sum(len(m._forward_hooks) for m in linear_names(trainer.model).values()) + len(_watchers)
    extra |= {"rows": monitor.rows, "skipped": monitor.skipped, "hooks": hooks}


def watched(plugin=BLOCKWISE, *, steps=3, monitor=None, env=None, **settings):
    env = {"MONITOR": json.dumps(monitor or {})} | (env or {})
    names = {"before": "train.test_monitor:attach", "probe": "train.test_monitor:look"}
    return train_tiny(plugin, stock=False, steps=steps, env=env, **names, **settings)


def _layers(rows):
    return {row["layer"] for row in rows}


def _named(layers):
    return {f"decoder.layers.{i}.{name}" for i in layers for name in LINEARS}


LAYOUTS = {
    "one": {},
    "dp2": {"ranks": 2},
    "tp2-sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"ranks": 2, "pp": 2},
    "recompute": {
        "config": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    },
}


@pytest.fixture(scope="module")
def alone():
    return watched().extra["rows"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_shows_the_same_layers(layout, alone):
    rows = alone if layout == "one" else watched(**LAYOUTS[layout]).extra["rows"]
    assert _layers(rows) == _named(range(4))
    assert {(r["layer"], r["operand"]) for r in rows} == {
        (n, o) for n in _named(range(4)) for o in ("input", "weight", "grad")
    }
    reference = {(r["layer"], r["operand"]): r for r in alone}
    for row in rows:
        there = reference[row["layer"], row["operand"]]
        assert row["snr_db"] == pytest.approx(there["snr_db"], abs=1.0)
        if row["operand"] == "weight" and layout != "pp2":  # whose stages draw their initial weights apart
            assert row["amax"] == pytest.approx(there["amax"], rel=0.05)


MXFP8 = "bf16_with_mxfp8_mixed"


def test_a_backward_that_reads_the_forwards_codes_is_exactly_there(alone):
    for row in alone:
        expected = (None,) * 4 if row["operand"] == "input" else (0, 0, 0, 1)
        assert (row["differ_percent"], row["distance"], row["gain"], row["cosine"]) == expected


@pytest.mark.parametrize("layout", ["one", "tp2-sp"])
def test_a_backward_that_reads_another_cast_is_seen(layout):
    """Blocks of 1x32 with powers of two agree on weights as they are drawn, but for what lies below the last code."""
    settings = {"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}
    rows = watched(MXFP8, settings=settings, **LAYOUTS[layout]).extra["rows"]
    weights = [row for row in rows if row["operand"] == "weight"]
    assert _layers(weights) == _named(range(4))
    assert all(0 <= row["distance"] < 1e-3 and row["cosine"] > 0.999999 for row in weights)
    assert any(row["differ_percent"] > 0 for row in weights)
    assert all(row["distance"] < 1e-3 for row in rows if row["operand"] == "grad")


def test_primary_weights_in_blocks_of_rows_say_nothing():
    weights = [row for row in watched(MXFP8).extra["rows"] if row["operand"] == "weight"]
    assert {row["distance"] for row in weights} == {None}


def test_layers_in_bf16_are_not_shown():
    assert _layers(watched(TENSORWISE).extra["rows"]) == _named((1, 2))


@pytest.mark.parametrize("primary", [False, True])
def test_scales_are_those_of_the_amaxes(primary):
    """Tensorwise: scale = largest value of the format / amax, on one rank for all three operands."""
    for row in watched(TENSORWISE, settings={"fp8_param_gather": primary}).extra["rows"]:
        largest = GRAD_MAX if row["operand"] == "grad" else FORWARD_MAX
        assert row["scale_max"] == pytest.approx(largest / row["amax"], rel=1e-5 if not primary else 0.01)
        assert row["scale_min"] == row["scale_max"]
        # E4M3 has three bits of mantissa, E5M2 two: 6 dB apart
        assert row["snr_db"] == pytest.approx(25.5 if row["operand"] == "grad" else 31.5, abs=1.0)


def test_a_scale_that_is_too_large_saturates():
    """A margin of -3 makes delayed scales eight times too large: whatever is above an eighth of the amax is clamped."""
    run = watched(DELAYED, settings={"fp8_margin": -3, "fp8_param_gather": False})
    weights = [r for r in run.extra["rows"] if r["operand"] == "weight"]
    assert all(r["saturation_percent"] > 1 for r in weights)
    assert all(r["snr_db"] < 20 for r in weights)
    assert len(re.findall(r"saturation in % of the weight of decoder", run.log)) == len(weights)


def test_warns_once_and_names_what_to_keep():
    run = watched(steps=6, monitor={"snr_db": 28.0})
    warned = re.findall(
        r"SNR in dB of the grad of (\S+) is \S+ \(threshold 28\). To keep it in BF16: keep=\['(\S+)'\]", run.log
    )
    assert sorted(layer for layer, _ in warned) == sorted(_named(range(4)))  # once each, although twice measured
    assert len(run.extra["rows"]) == 2 * 3 * 16
    pattern = warned[0][1]
    kept = watched(settings={"keep": [pattern]}).extra["rows"]
    assert _named(range(4)) - _layers(kept) == {pattern}


def test_steps_between_cost_nothing():
    run = watched(steps=5, monitor={"every_n_steps": 2})
    assert {r["step"] for r in run.extra["rows"]} == {2, 4}
    assert run.extra["hooks"] == 0


def test_monitoring_changes_no_loss():
    assert (
        watched(DELAYED, steps=6, monitor={"every_n_steps": 2}).losses
        == watched(DELAYED, steps=6, monitor={"every_n_steps": 100}).losses
    )


def test_skipped_steps_are_counted():
    run = watched("fp16_mixed", steps=8, settings={"fp16_hysteresis": 1})
    scales = [2.0**32, *run.loss_scales]
    assert run.extra["skipped"] == sum(b < a for a, b in pairwise(scales)) > 0


def test_tensorboard_gets_it(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = watched(env={"TENSORBOARD": str(tmp_path)}).extra["rows"]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    row = next(row for row in rows if row["operand"] == "weight")
    for metric in ("amax", "scale_max", "underflow_percent", "saturation_percent", "snr_db", "distance", "gain"):
        (event,) = events.Scalars(f"fp8/{row['layer']}/{row['operand']}/{metric}")
        assert (event.step, event.value) == (3, pytest.approx(row[metric], rel=1e-5))
    assert [e.value for e in events.Scalars("fp8/skipped_steps")] == [0.0]


class _TeLinear(torch.nn.Module):
    """The attributes that TransformerEngine 2.20's Linear keeps its FP8 numbers in; TE itself does not run without a
    GPU."""

    def __init__(self, quantizers=None, **meta):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16, 16))
        self.fp8_initialized, self.fp8_meta, self.quantizers = True, meta, quantizers or {}


def test_te_delayed_state_is_read():
    from nemo_fp8.train.measure import Probe

    forward = SimpleNamespace(
        scale=torch.tensor([2.0, 4.0, 1.0]), amax_history=torch.tensor([[0.0] * 3, [8.0, 9.0, 1.0]])
    )
    backward = SimpleNamespace(scale=torch.tensor([16.0, 1.0]), amax_history=torch.tensor([[0.0] * 2, [3.0, 1.0]]))
    seen = Probe({"layer": _TeLinear(scaling_fwd=forward, scaling_bwd=backward)}, []).close()
    numbers = {role: measured.numbers() for (_, role), measured in seen.items()}
    read = {role: (n["amax"], n["scale_max"]) for role, n in numbers.items()}
    assert read == {
        "input": (8.0, 2.0),
        "weight": (9.0, 4.0),
        "grad": (3.0, 16.0),
    }
    assert numbers["input"]["snr_db"] is None  # TE keeps no codes


def test_te_current_scaling_is_read():
    from nemo_fp8.train.measure import Probe

    quantizer = SimpleNamespace(scale=torch.tensor([32.0]), amax=torch.tensor([14.0]))
    module = _TeLinear({"scaling_fwd": [quantizer], "scaling_bwd": []}, scaling_fwd=SimpleNamespace())
    seen = Probe({"layer": module}, []).close()
    assert seen["layer", "input"].numbers()["amax"] == 14.0
    assert not seen["layer", "grad"].extremes.any()


def test_what_is_not_finite_is_counted_and_said(monkeypatch, caplog):
    """Every other number is of finite values, so that a NaN would leave no trace in them."""
    from nemo_fp8 import preset
    from nemo_fp8.train import watch
    from nemo_fp8.train.measure import _quantized

    monkeypatch.setattr(watch, "reduced", lambda found: found)
    watching, x = watch.Watch(), torch.randn(128, 128)
    counts = []
    for step, value in enumerate((1.0, math.nan, math.nan, 1.0, -math.inf), 1):
        x[3, 5] = value
        found = {("decoder.layers.0.mlp.linear_fc1", "grad"): _quantized(x, "grad", preset(BLOCKWISE), None)}
        watching._probe = SimpleNamespace(close=lambda found=found: found)
        counts.append(watching.end(step, warns=True)["fp8/decoder.layers.0.mlp.linear_fc1/grad/nonfinite"])
    assert counts == [0, 1, 1, 0, 1]
    said = [record.getMessage() for record in caplog.records]
    assert [words.split(",")[0] for words in said] == [
        f"FP8 step {step}: the grad of decoder.layers.0.mlp.linear_fc1 holds NaN or infinity" for step in (2, 5)
    ]


def test_a_scale_of_infinity_is_a_number_like_others():
    from nemo_fp8.train.measure import Measurement

    assert Measurement.of(1.0, torch.tensor(0.0)).numbers()["scale_min"] == math.inf
