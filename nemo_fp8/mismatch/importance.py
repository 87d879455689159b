"""Compute importance-sampling weights, which correct a policy loss on the rollout's tokens for the trainer's policy.

    w = p_trainer / p_rollout = exp(t - g)

for each token, or exp(sum (t - g)) for each sequence (``sequence_level_importance_ratios``, GSPO). Three methods, under
NeMo RL's names, keep a few very large ratios from deciding the step:

    tis            w clamped to [ratio_min, ratio]; ratio_min is 0 if not given
    icepop         w if it lies in [ratio_min, ratio], else 0                             usual bounds 0.5 and 5
    seq-mask-tis   w of each token, not truncated, if the sequence's geometric mean
                   exp(mean (t - g)) lies in [ratio_min, ratio], else 0 for all of it     usual bounds 0.999 and 1.002

Clamping keeps every token, and biases the loss a little. Filtering removes the tokens with large ratios, which then
teach nothing. Masking whole sequences is the strictest: at its usual bounds FP8 noise alone removes many
(``is_oob_ratio`` says how many). A ratio that FP32 cannot hold counts as 0. Weights carry no gradient, and are 0
outside of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.mismatch.logprobs import LogProbs

TYPES = ("tis", "icepop", "seq-mask-tis")


@dataclass(frozen=True)
class Weights:
    """A factor for the loss of each token, and which ratios were out of bounds."""

    values: torch.Tensor
    """[sequences, tokens] in FP32, 0 outside of the mask."""
    out_of_bounds: torch.Tensor | None
    """[sequences, tokens], or [sequences] if whole sequences are masked; None without truncation."""


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling:
    """The settings of the correction, under the keys of NeMo RL's ``loss_fn``.

    Raises PrecisionError if they contradict each other.
    """

    use_importance_sampling_correction: bool = True
    """False leaves every weight at 1."""
    sequence_level_importance_ratios: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    """The upper bound."""
    truncated_importance_sampling_ratio_min: float | None = None
    """The lower bound."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise PrecisionError(problems)

    @classmethod
    def of(cls, loss_fn: Mapping[str, Any]) -> ImportanceSampling:
        """Return the settings in NeMo RL's ``loss_fn`` section, where the correction is off by default."""
        mine = {f.name: loss_fn[f.name] for f in fields(cls) if f.name in loss_fn}
        return cls(**{"use_importance_sampling_correction": False, **mine})

    @torch.no_grad()
    def weights(self, pair: LogProbs) -> Weights:
        """Return the weights for these log-probs."""
        if not self.use_importance_sampling_correction:
            return Weights(pair.mask.float(), None)
        w = ratios(pair, sequence_level=self.sequence_level_importance_ratios)
        w = w[:, None].expand_as(pair.mask) if w.dim() == 1 else w
        out = None
        kind = self.truncated_importance_sampling_type
        high = self.truncated_importance_sampling_ratio or 0.0
        low = self.truncated_importance_sampling_ratio_min or 0.0
        if kind == "seq-mask-tis":
            mean = geometric_mean(pair)
            out = pair.sample_mask & ((mean < low) | (mean > high))
            w = w * ~out[:, None]
        elif kind is not None:
            out = pair.mask & ((w < low) | (w > high))
            w = w.clamp(low, high) if kind == "tis" else w * ~out
        return Weights((w * pair.mask).float(), out)


def ratios(pair: LogProbs, *, sequence_level: bool = False) -> torch.Tensor:
    """Return ``p_trainer / p_rollout`` of tokens [sequences, tokens], or of whole sequences [sequences].

    A ratio that FP32 cannot hold is 0.
    """
    log = pair.log_ratio.sum(1) if sequence_level else pair.log_ratio
    ratio = log.exp()
    return ratio.masked_fill(ratio > torch.finfo(torch.float32).max, 0.0)


def geometric_mean(pair: LogProbs) -> torch.Tensor:
    """Return ``exp(mean (t - g))`` of each sequence; 1 for a sequence without tokens."""
    return (pair.log_ratio.sum(1) / pair.mask.sum(1).clamp_min(1)).exp()


def _problems(c: ImportanceSampling) -> list[Problem]:
    kind, high, low = (
        c.truncated_importance_sampling_type,
        c.truncated_importance_sampling_ratio,
        c.truncated_importance_sampling_ratio_min,
    )
    if kind is None:
        given = [name for name, value in (("ratio", high), ("ratio_min", low)) if value is not None]
        return [
            Problem(
                f"truncated_importance_sampling_{name} without truncated_importance_sampling_type.",
                "A bound says nothing without what to do at it.",
                f"Set the type to one of {', '.join(TYPES)}, or leave the bound out.",
            )
            for name in given
        ]
    if kind not in TYPES:
        return [unknown("truncated_importance_sampling_type", kind, TYPES)]
    key = f"truncated_importance_sampling_type={kind!r}"
    rows = (
        (
            not c.use_importance_sampling_correction,
            f"{key} with use_importance_sampling_correction=False.",
            "There are no weights to truncate.",
            "Switch the correction on, or leave the type out.",
        ),
        (
            high is None or not high > 0,
            f"{key} with truncated_importance_sampling_ratio={high!r}.",
            "It needs an upper bound above 0.",
            "Set truncated_importance_sampling_ratio: 2.0 for tis, 5.0 for icepop, 1.002 for seq-mask-tis are usual.",
        ),
        (
            kind != "tis" and low is None,
            f"{key} without truncated_importance_sampling_ratio_min.",
            "It keeps what lies between two bounds.",
            "Set truncated_importance_sampling_ratio_min: 0.5 for icepop, 0.999 for seq-mask-tis are usual.",
        ),
        (
            low is not None and high is not None and not 0 <= low <= high,
            f"{key} with bounds {low!r} and {high!r}.",
            "The lower bound lies at 0 or above, and not above the upper one.",
            "Set truncated_importance_sampling_ratio_min below truncated_importance_sampling_ratio.",
        ),
        (
            kind == "seq-mask-tis" and c.sequence_level_importance_ratios,
            f"{key} with sequence_level_importance_ratios=True.",
            "It masks sequences and weighs tokens; weights of sequences have no place in it.",
            "Set sequence_level_importance_ratios=False, or use tis or icepop.",
        ),
    )
    return [Problem(*words) for wrong, *words in rows if wrong]
