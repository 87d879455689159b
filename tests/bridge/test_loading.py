"""Hugging Face weights in FP8 parameters: Bridge 0.3.1 trains on something else, and we do not."""

import pytest
import torch
from support.bridge.jobs import STORED


def masters(run):
    assert "refused" not in run, run["refused"]
    return run["masters"]


@pytest.fixture
def right(alone):
    """The masters of a run in BF16, which start from Hugging Face's values."""
    return masters(alone["bf16-loaded"])


def test_plain_bridge_trains_uninitialised_memory(alone):
    """NaN in the second step; where the memory held numbers, a run that is unrelated to the checkpoint."""
    run, ours = alone["plain-loaded"], alone["delayed-loaded"]
    assert "nan" in run.get("refused", "nan").lower()
    if "refused" not in run:
        assert run["losses"] != ours["losses"]


def test_plain_bridge_trains_a_random_initialization_and_the_loss_falls(alone, right):
    run = alone["plain-loaded-over-random"]
    wrong = [name for name, master in masters(run).items() if master != right[name]]
    assert len(wrong) == 16, "every FP8 weight"
    assert run["losses"][-1] < run["losses"][0], "nobody would notice"
    assert run["findings"] == ["bridge-loads-into-fp8"]


@pytest.mark.parametrize("name", STORED)
def test_masters_are_what_hugging_face_has(alone, right, name):
    run = alone[f"{name}-loaded"]
    assert masters(run) == right
    assert run["losses"] == pytest.approx(alone["bf16-loaded"]["losses"], rel=0.002)
    assert run["findings"] == []
    assert any(kind != "Parameter" for kind in run["kinds"].values())


def test_bridges_own_checkpoint_gives_exact_masters_too(alone, right):
    """The remedy that the finding and the report to Bridge name."""
    run = alone["fine-tuned"]
    assert "refused" not in run, run["refused"]
    assert masters(run) == right
    assert run["findings"] == []


def test_qwen3_loads_exactly(alone):
    run = alone["qwen3-loaded"]
    assert len(masters(run)) == 35
    assert run["losses"][-1] < run["losses"][0]


def test_every_rank_loads_its_share(pair):
    run = pair["delayed-loaded"]
    assert "refused" not in run, run["refused"]
    assert all(0 < norm < 100 for _, norm in run["masters"].values())
    assert run["losses"] == pytest.approx(pair["bf16-loaded"]["losses"], rel=0.003)


def test_one_call_repairs_bridges_own_precision(alone):
    run, ours = alone["plain-loaded-exactly"], alone["delayed-loaded"]
    assert (run["losses"], run["masters"]) == (ours["losses"], ours["masters"])


def test_weights_that_were_written_where_no_hook_sees_it_are_refused(alone):
    said = alone["unrepaired"]["refused"]
    assert "16 FP8 weights are not what the optimizer will train" in said
    assert "remedy: " in said


def test_shares_of_masters_on_two_ranks_are_the_checkpoint_again(pair, folder):
    """Before the first step the masters are Hugging Face's values; each rank holds the half of each."""
    from safetensors.torch import load_file

    assert "refused" not in pair["exported"], pair["exported"]["refused"]
    started, out = load_file(folder / "llama.safetensors"), load_file(folder / "exported.safetensors")
    assert out.keys() == started.keys()
    for name, weight in started.items():
        assert torch.equal(out[name], weight.to(out[name].dtype)), name
