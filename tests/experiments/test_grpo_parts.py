"""The small parts: task, rows, settings, record."""

import json
import socket
from dataclasses import replace

import pytest
import torch

from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.rl.driver import RESTARTS, Deaths, known_base
from nemo_fp8.experiments.rl.experience import Experience, row
from nemo_fp8.experiments.rl.record import Record, read_record
from nemo_fp8.experiments.rl.settings import GrpoSettings, PolicySize
from nemo_fp8.experiments.rl.task import Sorting
from nemo_fp8.experiments.rl.trainer import TrainerRank


def settings(**changes):
    return GrpoSettings(folder="run", base="base", **changes)


def test_the_ranks_meet_on_a_port_that_is_theirs_from_the_start():
    """Seconds pass before they meet, in which a port that nobody listens on may be given to any connection."""
    first = TrainerRank(settings().to_dict(), 0, 2)
    meeting = first.meeting_point()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(meeting)
    with socket.create_connection(meeting, timeout=5):
        pass


def test_only_the_answer_is_rewarded():
    task = Sorting(4)
    assert task.answer("3102=") == "0123"
    assert task.reward("3102=", "0123") == 1
    for wrong in ("", "012", "0124", "01230", "3102", " 0123"):
        assert task.reward("3102=", wrong) == 0


def test_held_out_problems_are_never_trained_on():
    task = Sorting(3)  # a thousand problems: every one is drawn
    splits = {
        split: {task.problem(split, seed, i) for seed in range(6) for i in range(3000)}
        for split in ("train", "validation")
    }
    assert not splits["train"] & splits["validation"]
    assert len(splits["train"] | splits["validation"]) == 1000
    assert 80 < len(splits["validation"]) < 200


def test_problems_follow_from_seed_and_index():
    task = Sorting(8)
    assert [task.problem("train", 1, i) for i in range(5)] == [task.problem("train", 1, i) for i in range(5)]
    assert task.problem("train", 1, 0) != task.problem("train", 2, 0) != task.problem("train", 1, 1)


def test_rows_of_prompt_and_answer():
    tokens, labels, mask = row([1, 50, 51], [52, 53, 2], 8)
    assert tokens.tolist() == [1, 50, 51, 52, 53, 2, 0, 0]
    assert labels.tolist() == [50, 51, 52, 53, 2, 0, 0, 0]
    assert labels[mask.bool()].tolist() == [52, 53, 2]
    with pytest.raises(PrecisionError, match="cut off"):
        row([1] * 5, [2] * 5, 8)


def test_log_probs_of_the_engine_lie_at_their_tokens():
    answers = [([52, 2], [-0.5, -0.25]), ([60, 61, 2], [-1.0, -2.0, -3.0])]
    experience = Experience.of([[1, 50], [1, 51]], answers, torch.tensor([1.0, -1.0]), 8)
    assert experience.rollout[experience.mask.bool()].tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]
    assert experience.labels[experience.mask.bool()].tolist() == [52, 2, 60, 61, 2]
    sample = experience.sample(1)
    assert sample["advantages"] == -1
    assert float(sample["weights"].sum()) == pytest.approx(2 * 3 / 5)


def test_settings_survive_the_way_to_another_process():
    s = settings(
        precision=preset("bf16_with_fp8_blockwise_mixed"),
        policy=PolicySize(hidden=256),
        loss_fn={"a": 1},
        one_step_off=True,
    )
    assert GrpoSettings.from_dict(json.loads(json.dumps(s.to_dict()))) == s


def test_correction_follows_the_contract():
    assert settings(precision=preset("bf16_mixed")).correction == {"use_importance_sampling_correction": False}
    assert (
        settings(precision=preset("bf16_mixed").replace(rollout="fp8")).correction["truncated_importance_sampling_type"]
        == "tis"
    )
    own = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop"}
    assert settings(loss_fn=own).correction == own


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 3, "tensor_parallel": 2}, "tensor_parallel"),
        ({"micro_batch": 96}, "micro-batches"),
        ({"engines": 3}, "engines"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(PrecisionError, match=words):
        settings(**wrong)


def test_sizes_of_the_policy_fit_blocks():
    size = PolicySize()
    assert all(n % 128 == 0 for n in (size.hidden, size.ffn, size.vocab, size.heads * size.hidden // size.heads))


def test_a_record_forgets_the_steps_that_are_done_again(tmp_path):
    path = tmp_path / "steps.jsonl"
    record = Record(path, 0)
    for step in range(5):
        record.write({"step": step, "turn": 1})
    with path.open("a") as file:
        file.write('{"step": 5, "tu')  # killed while it wrote
    assert [r["step"] for r in read_record(path)] == [0, 1, 2, 3, 4]
    again = Record(path, 3)
    again.write({"step": 3, "turn": 2})
    assert [(r["step"], r["turn"]) for r in read_record(path)] == [(0, 1), (1, 1), (2, 1), (3, 2)]


def test_a_base_model_that_is_done_is_known_without_nemo(tmp_path):
    s = GrpoSettings(folder="run", base=str(tmp_path), base_steps=30)
    checkpoint, note = tmp_path / "step=29", tmp_path / "trained-30-steps"
    assert known_base(s) is None
    note.write_text(str(checkpoint))
    assert known_base(s) is None, "it was noted, and is gone"
    checkpoint.mkdir()
    assert known_base(s) == str(checkpoint)
    assert known_base(replace(s, base_steps=31)) is None


def test_deaths_count_since_the_last_step_and_not_over_the_run():
    deaths, died = Deaths(), RuntimeError("the node is gone")
    for step in range(3 * RESTARTS):
        deaths.count(step + 1, died)  # each one after a further step
    for _ in range(RESTARTS - 1):
        deaths.count(3 * RESTARTS, died)
    with pytest.raises(PrecisionError, match=f"died {RESTARTS + 1} times without a step between"):
        deaths.count(3 * RESTARTS, died)


def test_a_run_that_never_begins_ends():
    deaths, died = Deaths(), RuntimeError("no memory")
    for _ in range(RESTARTS):
        deaths.count(0, died)
    with pytest.raises(PrecisionError, match="no memory"):
        deaths.count(0, died)
