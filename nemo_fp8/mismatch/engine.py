"""Ask the workers of a running engine for fingerprints of the weights that they compute with."""

from __future__ import annotations

from typing import Any

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.mismatch.weights import Held
from nemo_fp8.rollout.refit.control import control_of


def read_back(engine: Any, token: str | None = None) -> dict[str, Held]:
    """Return the fingerprints of every tensor, by the part that a worker holds, for ``Gate.judge(held=...)``.

    ``engine`` and ``token`` are those of :class:`nemo_fp8.rollout.Refit`. A part of which workers hold different bits
    gets ``workers differ``. Raises PrecisionError with the workers' problems.
    """
    answers = control_of(engine, token).call("held", {})
    problems = dict.fromkeys(Problem(*row) for answer in answers for row in answer.get("problems", ()))
    if problems:
        raise PrecisionError(problems)
    held: dict[str, dict[str, str]] = {}
    for answer in answers:
        for name, parts in answer["held"].items():
            mine = held.setdefault(name, {})  # a tensor that cannot be read is listed, without fingerprints
            for part, told in parts.items():
                if mine.setdefault(part, told) != told:
                    mine[part] = "workers differ"
    return dict(held)
