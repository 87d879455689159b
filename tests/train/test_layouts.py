"""One model, one seed, several layouts over gloo: the losses are the same within rounding, and they fall."""

import pytest
from support.train.harness import RunFailed, train_tiny

LAYOUTS = {
    "dp2": {"ranks": 2},
    "tp2": {"ranks": 2, "tp": 2},
    "tp2-sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"ranks": 2, "pp": 2},
    "dp2-overlap": {"ranks": 2, "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
}
# Each pipeline stage draws its own initial weights, so that run starts elsewhere.
SAME_START = [name for name in LAYOUTS if name != "pp2"]


@pytest.fixture(scope="module")
def single():
    return train_tiny("bf16_mixed").losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_trains_in_every_layout(layout, single):
    losses = train_tiny("bf16_mixed", **LAYOUTS[layout]).losses
    assert losses[-1] < losses[0] - 1
    if layout in SAME_START:
        # The first three steps differ by summation order only; later ones amplify it.
        assert losses[:3] == pytest.approx(single[:3], abs=2e-3)
        assert losses == pytest.approx(single, abs=0.15)
    else:
        assert losses == pytest.approx(single, abs=0.3)


@pytest.mark.long
def test_torchrun_gives_what_forked_ranks_give():
    fresh = train_tiny("bf16_mixed", ranks=2, steps=3, torchrun=True, timeout=300)
    assert fresh.losses == train_tiny("bf16_mixed", ranks=2, steps=3).losses


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_models_of_nemo_train(model):
    losses = train_tiny("bf16_mixed", model=model).losses
    assert losses[-1] < losses[0] - 1


def test_a_failing_rank_ends_the_run_with_its_error():
    with pytest.raises(RunFailed, match="Expected world_size"):
        train_tiny("bf16_mixed", ranks=1, pp=2)


def test_a_seed_changes_weights_and_data_and_repeats_them():
    runs = [train_tiny("bf16_mixed", steps=2, seed=seed).losses for seed in (1, 2, 1)]
    assert runs[0] == runs[2]
    assert runs[0] != runs[1]
