"""The comparison's numbers and its page, from records as runs write them; the command's questions."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from nemo_fp8.cli import app
from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.rl.compare import VARIANTS, RlComparison, RlRun, run_rl_comparison, settings_of
from nemo_fp8.experiments.rl.settings import GrpoSettings
from nemo_fp8.report.rl_page import rl_page

TEMPLATE = GrpoSettings(folder="/tmp/here", base="", steps=10)


def record(final, error, fired=()):
    """Ten steps, and the look at the last weights behind them."""
    rows = [
        {
            "step": i,
            "reward": i / 10,
            "kl": i / 100,
            "loss": 0.1,
            "mismatch": {"token_mult_prob_error": error, "gen_kl_error": (error - 1) / 10},
            "seconds": {"rollout": 9.0 if i == 0 else 1.0, "push": 0.5, "log_probs": 2.0, "train": 3.0},
            "gate": {"fired": i in fired},
        }
        for i in range(10)
    ]
    rows[0]["validation_accuracy"] = 0.5
    return [*rows, {"step": 10, "seconds": {}, "validation_accuracy": final}]


@pytest.fixture
def comparison():
    ends = {"bf16-bf16": (0.9, 0.92), "bf16-fp8": (0.85, 0.87), "fp8-fp8": (0.9, 0.91)}
    runs = [
        RlRun(name, seed, record(ends[name][seed], 1.01, fired=(3,) if name == "bf16-fp8" else ()))
        for name in ends
        for seed in (0, 1)
    ]
    return RlComparison(TEMPLATE, runs)


def test_numbers_of_a_variant(comparison):
    found = comparison.summary("bf16-fp8")
    assert found["base_accuracy"] == 0.5
    assert found["final_accuracy"] == pytest.approx(0.86)
    assert found["points_to_baseline"] == pytest.approx(-5.0)
    assert found["reward"] == pytest.approx(0.9), "the last tenth"
    assert found["token_mult_prob_error"] == pytest.approx(1.01)
    assert found["gate_fired"] == 2
    assert found["seconds"] == {"rollout": 1.0, "push": 0.5, "log_probs": 2.0, "train": 3.0}, "without the first step"
    assert comparison.summary("bf16-bf16")["points_to_baseline"] == 0


def test_everything_is_json(comparison):
    back = json.loads(json.dumps(comparison.to_dict()))
    assert [s["variant"] for s in back["summary"]] == ["bf16-bf16", "bf16-fp8", "fp8-fp8"]


def test_the_record_has_every_accuracy_by_arm_and_seed(comparison):
    found = json.loads(json.dumps(comparison.record()))
    assert found["validation_accuracy"]["bf16-fp8"] == {"0": {"0": 0.5, "10": 0.85}, "1": {"0": 0.5, "10": 0.87}}
    assert found["mismatch"]["fp8-fp8"]["1"]["token_mult_prob_error"] == {"mean": pytest.approx(1.01), "largest": 1.01}
    assert found["gate_fired"] == {
        "bf16-bf16": {"0": 0, "1": 0},
        "bf16-fp8": {"0": 1, "1": 1},
        "fp8-fp8": {"0": 0, "1": 0},
    }
    assert found["settings"]["steps"] == 10


def test_the_command_writes_the_record(comparison, tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_fp8.experiments.rl.compare.run_rl_comparison", lambda *args, **kwargs: comparison)
    file = tmp_path / "new" / "rl.json"
    done = CliRunner().invoke(app, ["rl-compare", "--folder", str(tmp_path), "--seeds", "0,1", "--record", str(file)])
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_text())["validation_accuracy"] == comparison.record()["validation_accuracy"]


def test_the_page_holds_what_was_asked_for(comparison):
    html = rl_page(comparison).html()
    for words in (
        "Validation accuracy",
        "Reward",
        "KL to the base model",
        "token_mult_prob_error",
        "gen_kl_error",
        "log-probs, s",
        "push, s",
    ):
        assert words in html
    assert html.count("<svg") == 3


def test_variants_differ_in_contract_and_correction_alone():
    runs = {name: settings_of(TEMPLATE, name, 7) for name in VARIANTS}
    assert len({run.base for run in runs.values()}) == 1, "one base model"
    assert len({run.folder for run in runs.values()}) == len(VARIANTS)
    same = {replace(run, folder="", precision=TEMPLATE.precision, loss_fn=None) for run in runs.values()}
    assert len(same) == 1
    assert runs["fp8-fp8"].precision.is_fp8
    assert runs["bf16-fp8"].precision.rollout == "fp8"
    assert not runs["bf16-fp8"].precision.is_fp8
    # What an FP8 rollout holds is the same, whatever trains.
    assert runs["bf16-fp8"].precision.weight_scale == runs["fp8-fp8"].precision.weight_scale
    four = runs["bf16-nvfp4"].precision
    assert (four.is_quantized, four.rollout, four.operand("input", "rollout")) == (False, "nvfp4", None)
    corrected = {n for n in VARIANTS if runs[n].correction["use_importance_sampling_correction"]}
    assert corrected == {"bf16-fp8", "bf16-nvfp4", "fp8-fp8"}


def test_wrong_questions_are_answered_before_anything_starts():
    with pytest.raises(PrecisionError, match="Did you mean 'fp8-fp8'"):
        run_rl_comparison(TEMPLATE, seeds=[1], variants=["fp8-fp9"])
    for arguments in (["--seeds", "one"], ["--variants", "nothing"]):
        result = CliRunner().invoke(app, ["rl-compare", *arguments])
        assert isinstance(result.exception, PrecisionError)
