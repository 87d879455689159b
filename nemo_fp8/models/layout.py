"""How a training run is spread over ranks, as far as FP8 is concerned: sizes of the splits, tokens, the optimizer.

It is read from keywords, a mapping, or words: ``tp4,pp2,sp,seq4096,no-distopt``. None means "not given".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nemo_fp8.errors import PrecisionError, Problem, unknown

# Word -> field. Words of sizes end in a number; the others are switches, switched off by ``no-``.
WORDS = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "dp": "data",
    "seq": "seq_length",
    "mbs": "micro_batch",
    "pad": "pad_to",
    "rollout-tp": "rollout_tensor",
    "sp": "sequence_parallel",
    "packed": "packed",
    "distopt": "distributed_optimizer",
    "overlap": "overlap_param_gather",
    "reuse-grad-buf": "reuse_grad_buf",
    "rollout-ep": "rollout_expert",
}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The sizes of the splits, and the tokens that each rank processes at once.

    Raises PrecisionError with every size that is no number of at least 1.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Tensor parallelism inside experts; None follows ``tensor``, as in Megatron."""
    data: int = 1
    """Data-parallel replicas of the dense part: world = tensor x pipeline x context x data."""
    sequence_parallel: bool = False
    seq_length: int | None = None
    micro_batch: int = 1
    packed: bool = False
    pad_to: int | None = None
    """The multiple to which packed sequences are padded, if that is decided."""
    distributed_optimizer: bool | None = None
    overlap_param_gather: bool | None = None
    reuse_grad_buf: bool | None = None
    """Megatron's ``reuse_grad_buf_for_mxfp8_param_ag``."""
    rollout_tensor: int | None = None
    """vLLM's tensor parallelism; None follows ``tensor``."""
    rollout_expert: bool = False
    """vLLM's expert parallelism: each worker holds whole experts."""

    def __post_init__(self) -> None:
        problems = []
        for name, kind in SIZES.items():
            value = getattr(self, name)
            optional = value is None and "None" in kind
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                problems.append(
                    Problem(
                        f"{name}={value!r} is no number of at least 1.",
                        "It counts ranks or tokens.",
                        f"Give {name} as 1 or more.",
                    )
                )
        if problems:
            raise PrecisionError(problems)

    @classmethod
    def of(cls, given: Parallel | Mapping[str, Any] | str | None) -> Parallel:
        """Make a layout of None, words, a mapping of the fields, or a layout. Raises PrecisionError if unknown."""
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, Mapping):
            known = [f.name for f in fields(cls)]
            problems = [unknown("parallel setting", name, known) for name in given if name not in known]
            if problems:
                raise PrecisionError(problems)
            return cls(**given)
        if given is not None and not isinstance(given, cls):
            raise PrecisionError(
                f"{given!r} is no layout of ranks.", "It is words, or a mapping of sizes.", "Write 'tp4,pp2,dp8'."
            )
        return given or cls()

    @classmethod
    def parse(cls, words: str) -> Parallel:
        """Return the layout that words between commas describe; raise PrecisionError for an unknown or a second word.

        The words: ``tp4,pp2,cp2,ep8,dp8,sp,seq4096,mbs1,packed,distopt,rollout-tp4``; ``no-sp`` turns a switch off.
        """
        said: dict[str, Any] = {}
        for word in filter(None, (w.strip().lower() for w in words.split(","))):
            found = re.fullmatch(r"(no-)?([a-z-]+?)=?(\d+)?", word)
            name = WORDS.get(found[2]) if found else None
            if found is None or name is None or (name in SIZES) != bool(found[3]) or (name in SIZES and found[1]):
                raise PrecisionError(
                    [unknown("parallel word", word, [w + ("N" if n in SIZES else "") for w, n in WORDS.items()])]
                )
            if name in said:
                raise PrecisionError(
                    f"{word!r} contradicts an earlier word in {words!r}.",
                    f"Both say {name!r}.",
                    "Leave one of them out.",
                )
            said[name] = int(found[3]) if found[3] else not found[1]
        return cls(**said)

    @property
    def experts_cut(self) -> int:
        """Tensor parallelism inside experts."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def rollout_cut(self) -> int:
        """Tensor parallelism in rollout."""
        return self.tensor if self.rollout_tensor is None else self.rollout_tensor


# The fields that are sizes, by their annotation; the others are switches.
SIZES = {f.name: str(f.type) for f in fields(Parallel) if "int" in str(f.type)}
