"""The whole loop, real: Ray, NeMo and Megatron under our plugin, vLLM with ours. Two steps, a kill, a broken engine."""

import os

import pytest
import ray
from support import actors

from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.rl.driver import ray_session, run_grpo
from nemo_fp8.experiments.rl.record import read_record
from nemo_fp8.experiments.rl.settings import GrpoSettings

ray.cloudpickle.register_pickle_by_value(actors)  # it lies where the actors' environments do not look


def small(tmp_path, **changes):
    """A run of seconds."""
    sizes = {
        "digits": 4,
        "base_steps": 30,
        "steps": 3,
        "problems": 8,
        "micro_batch": 16,
        "validation": 16,
        "validate_every": 2,
    }
    precision = preset("bf16_with_fp8_blockwise_mixed")
    return GrpoSettings(
        **{"folder": str(tmp_path / "run"), "base": str(tmp_path / "base"), "precision": precision, **sizes, **changes}
    )


def test_two_steps_a_killed_rank_and_a_broken_engine(tmp_path):
    """FP8 on both sides, the policy over two tensor-parallel ranks. A rank is killed after the first step, and the run
    goes on with the second; in the third the engine loses a layer's scales, and the gate ends the run before it learns
    from that. Only changes are pushed, but where there is no ledger: at the start, and after the kill."""
    s = small(tmp_path, ranks=2, tensor_parallel=2, steps=4, delta=True)
    seen, memory = [], set()

    def on_step(row):
        seen.append(row)
        memory.update(actors.shared_memory())
        if row["step"] == 0:
            assert actors.kill("ray::TrainerRank") == 2

    with ray_session(4), pytest.raises(PrecisionError, match="as far") as stopped:
        run_grpo(s, on_step=on_step, engine=actors.BreaksAfterAPush)
    assert f"{actors.BROKEN_LAYER}.weight is zeroed in the engine" in str(stopped.value)

    rows = read_record(s.record)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[:2]:
        assert not row["gate"]["fired"]
        assert row["push"][0]["fp8"] == 4 * 7
        assert 1 < row["mismatch"]["token_mult_prob_error"] < 1.05
        assert 0 < row["mismatch"]["gen_kl_error"] < 0.004
        assert {"push", "rollout", "log_probs", "train"} <= set(row["seconds"])
    assert rows[0]["kl"] == 0, "the policy is the reference"
    assert rows[1]["kl"] > 0
    assert rows[0]["push"][0]["fingerprint"] != rows[1]["push"][0]["fingerprint"]
    pushes = [row["push"][0] for row in rows]
    # Which of the next pushes begins a ledger again depends on how far the rank had come when it was killed.
    changes = [push for push in pushes if not push["delta"]["instead"]]
    assert pushes[0]["delta"]["instead"].startswith("No ledger")
    assert changes
    for push in changes:
        assert 0 < push["delta"]["share"] < 1
        assert push["bytes"] < pushes[0]["bytes"] / 10
    assert rows[2]["gate"]["fired"]
    assert rows[2]["gate"]["weights"] == {f"{actors.BROKEN_LAYER}.weight": "zeroed"}
    assert "loss" not in rows[2]

    assert actors.processes("ray::") == []
    assert not memory & set(os.listdir("/dev/shm"))
