"""What a running engine holds, asked of its workers: fingerprints of the memory that they compute with."""

from __future__ import annotations

from typing import Any

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.mismatch.weights import Held
from nemo_fp8.rollout.refit.control import control_of


def read_back(engine: Any, token: str | None = None) -> dict[str, Held]:
    """Every tensor's fingerprints, by the part that a worker holds: what ``Gate.judge(held=...)`` takes.

    ``engine`` is what :class:`nemo_fp8.rollout.Refit` takes. Workers that hold the same part must hold the same bits.
    """
    answers = control_of(engine, token).call("held", {})
    problems = dict.fromkeys(Problem(*row) for answer in answers for row in answer.get("problems", ()))
    if problems:
        raise PrecisionError(problems)
    held: dict[str, dict[str, str]] = {}
    for answer in answers:
        for name, parts in answer["held"].items():
            mine = held.setdefault(name, {})  # a tensor of which nothing can be told is there all the same
            for part, told in parts.items():
                if mine.setdefault(part, told) != told:
                    mine[part] = "workers differ"
    return dict(held)
