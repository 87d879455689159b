"""Comparing precisions: the arithmetic on known runs, the page that holds it, and one real comparison from a shell."""

import gc
import json
import re
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from support import ROOT, TESTS

from nemo_fp8 import PrecisionError, preset
from nemo_fp8.experiments import trial
from nemo_fp8.experiments.trial import Outcome, Trial, python_for, run_trial
from nemo_fp8.report.compare import Comparison, Run, run_comparison
from nemo_fp8.report.compare_page import comparison_page

BF16, DELAYED, MX = preset("bf16_mixed"), preset("bf16_with_fp8_mixed"), preset("bf16_with_mxfp8_mixed")
ROW = {
    "step": 10,
    "layer": "decoder.layers.0.mlp.linear_fc1",
    "operand": "grad",
    "amax": 1.0,
    "scale_min": 2.0,
    "scale_max": 4.0,
}
ROW |= {"underflow_percent": 0.5, "saturation_percent": 0.0, "snr_db": 25.0, "nonfinite": 0.0}


def _run(precision, seed, last, seconds, **outcome):
    """Twenty steps down to ``last``; the first two are slow."""
    losses = [5.0 - 0.1 * i for i in range(18)] + [last, last]
    return Run(precision, seed, Outcome(losses, [9.0, 9.0] + [seconds] * 18, **outcome))


@pytest.fixture
def comparison():
    runs = [
        _run(BF16, 1, 2.0, 0.1, memory=2**20),
        _run(DELAYED, 1, 2.02, 0.2, statistics=[ROW], skipped=3),
        _run(BF16, 2, 1.0, 0.1),
        _run(DELAYED, 2, 0.99, 0.4),
    ]
    return Comparison("tiny_llama", 20, runs)


def test_gaps_are_taken_seed_by_seed(comparison):
    assert comparison.baseline is BF16
    assert comparison.gaps(DELAYED) == pytest.approx([1.0, -1.0])
    assert comparison.gaps(BF16) == [0.0, 0.0]


def test_summary(comparison):
    s = comparison.summary(DELAYED)
    assert s["gap_percent"] == pytest.approx(0.0)
    assert s["gap_percent_by_seed"] == {1: pytest.approx(1.0), 2: pytest.approx(-1.0)}
    assert s["loss"] == pytest.approx(1.505)
    assert (s["step_seconds"], s["step_ratio"]) == (
        pytest.approx(0.3),
        pytest.approx(3.0),
    )  # the slow first steps are left out
    assert (s["memory_bytes"], s["skipped_steps"]) == (0, 3)


def test_without_bf16_there_is_no_gap():
    alone = Comparison("tiny_llama", 20, [_run(DELAYED, 1, 2.0, 0.1)])
    assert alone.baseline is None
    assert alone.summary(DELAYED)["gap_percent"] is None
    assert "Gap to BF16" not in comparison_page(alone).html()


def test_the_page_shows_all_of_it(comparison):
    html = comparison_page(comparison).html()
    for words in ("bf16_with_fp8_mixed", "Gap to BF16", "+1.00", "-1.00", "SNR in dB", "linear_fc1", "25", "<svg"):
        assert words in html
    assert html.count("<svg") == 2
    assert "http://" not in html.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_json_holds_every_step(comparison):
    read = json.loads(json.dumps(comparison.to_dict()))
    assert [len(run["losses"]) for run in read["runs"]] == [20] * 4
    assert read["runs"][1]["precision"] == DELAYED.to_dict()


def test_a_recipe_of_a_package_that_is_not_there_is_told_before_anything_runs(tmp_path, monkeypatch):
    """It was the traceback of each rank, after they had started."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrecisionError, match=r"There is no package mine for the recipe mine\.tiny"):
        python_for("mine.tiny", "nemo")
    (tmp_path / "mine.py").write_text("")
    assert python_for("mine.tiny", "nemo") == sys.executable


def test_an_unknown_recipe_or_stack_is_told_before_anything_runs():
    with pytest.raises(PrecisionError, match="Did you mean 'tiny_llama'"):
        run_trial(Trial("tiny_lama", BF16))
    with pytest.raises(PrecisionError, match="Did you mean 'bridge'"):
        run_trial(Trial("tiny_llama", BF16, stack="bridg"))


def test_the_stack_that_is_asked_for_trains():
    """From an environment without Megatron-Bridge: in the one beside it."""
    if not (ROOT / ".venv-bridge").exists():
        pytest.skip("Megatron-Bridge is in .venv-bridge: make setup")
    words = [sys.executable, "-m", "nemo_fp8.cli", "compare", "--stack", "bridge", "--ranks", "1", "--json"]
    words += ["--precisions", "bf16_mixed", "--steps", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout)["runs"][0]["losses"]) == 2
    other = subprocess.run([*words, "--recipe", "llama3_8b"], capture_output=True, text=True, timeout=60)
    assert other.returncode == 2
    assert "Choose one of: tiny_llama." in other.stdout, "llama3_8b is a recipe of NeMo's"


def test_two_precisions_of_one_name_are_refused():
    with pytest.raises(PrecisionError, match="twice"):
        run_comparison("tiny_llama", [BF16, BF16.replace(grad_reduce="compute")])


def test_a_rank_looks_for_no_garbage_among_what_its_imports_made(monkeypatch, tmp_path):
    seen = []

    def look():
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))

    def imports(*_):
        look()
        return look

    monkeypatch.setattr(trial, "_on_nemo", imports)
    monkeypatch.setattr(trial.lifetime, "end_with_parent", lambda: None)
    task = {"recipe": "tiny_llama", "precision": BF16.to_dict(), "folder": str(tmp_path), "out": str(tmp_path / "out")}
    gc.unfreeze()
    try:
        trial.main(task)
    finally:
        gc.unfreeze()
    assert seen == [(False, False), (True, True)]  # while it imports, while it trains
    assert gc.isenabled()


@pytest.mark.train
@pytest.mark.slow
def test_a_trial_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with pytest.raises(PrecisionError, match="broken on purpose"):
        run_comparison("support.failing.recipe", [BF16], steps=2, ranks=1)


@pytest.mark.train
@pytest.mark.slow
def test_from_a_shell(tmp_path):
    """Two precisions, really trained: the same first loss, JSON on stdout, a page with the statistics."""
    names = "bf16_mixed,bf16_with_fp8_blockwise_mixed"
    from nemo_fp8.train.checkpoints import Checkpoint

    arguments = [
        "--precisions",
        names,
        "--steps",
        "6",
        "--ranks",
        "1",
        "--monitor",
        "3",
        "--html",
        str(tmp_path / "c.html"),
    ]
    arguments += ["--keep", str(tmp_path / "kept"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "nemo_fp8.cli", "compare", *arguments], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^bf16_mixed, seed 1234: starting$", done.stderr, re.M), done.stderr
    assert re.search(
        r"^bf16_with_fp8_blockwise_mixed, seed 1234: 6 of 6, loss \d\.\d{3}, \d+:\d\d in all$", done.stderr, re.M
    )
    assert "\x1b" not in done.stderr
    bf16, fp8 = json.loads(done.stdout)["runs"]
    assert bf16["losses"][0] == pytest.approx(fp8["losses"][0], rel=5e-3)
    assert bf16["losses"] != fp8["losses"]
    assert bf16["statistics"] == []
    assert {row["step"] for row in fp8["statistics"]} == {3, 6}
    assert len(fp8["statistics"]) == 2 * 6 * 4 * 3  # steps, layers, linears, operands
    assert "SNR" in (tmp_path / "c.html").read_text()
    kept = sorted(path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    assert [path.name for path in kept] == ["bf16_mixed-seed1234", "bf16_with_fp8_blockwise_mixed-seed1234"]
    assert [Checkpoint.at(path).problems(contents=True) for path in kept] == [[], []]
    for path, run in zip(kept, (bf16, fp8), strict=True):
        found = load_file(f"{path}.log_probs.safetensors")
        assert found["log_probs"].shape == (16, found["tokens"].shape[1] - 1)
        assert -found["log_probs"].mean() == pytest.approx(run["losses"][-1], rel=0.1), (
            "other stories, nearly the same loss"
        )
