"""A task with a verifiable reward: sort the digits.

    problem  "738146="      answer  "134678"      reward 1 if the completion is the answer, else 0

It is small enough for a model of a million parameters, and large enough to hold problems out: the digits of a problem
decide its split, so that no sample of the training split, whatever its seed, is ever one of the
validation split. Every problem follows from the seed, the split and its index alone: a resumed run sees the
same problems.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Sorting:
    """Problems of sorting ``digits`` digits."""

    digits: int = 8
    held_out: int = 8
    """One problem in this many is held out for validation."""

    def problem(self, split: str, seed: int, index: int) -> str:
        """Return problem ``index`` of a split."""
        draw = random.Random(f"{split} {seed} {index}")
        while True:
            problem = "".join(draw.choices("0123456789", k=self.digits)) + "="
            if self.split_of(problem) == split:
                return problem

    def split_of(self, problem: str) -> str:
        """Return the split that a problem belongs to."""
        return SPLITS[zlib.crc32(problem.encode()) % self.held_out == 0]

    def answer(self, problem: str) -> str:
        """Return the right answer of a problem."""
        return "".join(sorted(problem[:-1]))

    def reward(self, problem: str, completion: str) -> float:
        """Return 1 if the completion is exactly the answer, else 0."""
        return float(completion == self.answer(problem))

    @property
    def longest(self) -> int:
        """The length in bytes of a problem with its answer, with the marks of beginning and end."""
        return 2 * self.digits + 3
