"""Compute the band in which the typical difference of two sides must lie if only the predicted noise is at work.

The typical difference of tokens is (mean sqrt|d|)**2. FP8's noise is heavy-tailed: a few tokens are off by ten times
the median. The mean of d**2, or of any metric that grows like it, depends mostly on how many such tokens were drawn.
The root gives them little weight, so that a fault of the whole model shows.

Take a predicted sample of c sequences, with sums s of sqrt|d| and counts n of tokens, and an observed one of m
sequences. Their means are S = sum s / sum n. If both are of the same kind, then

    log(S_observed / S_predicted) ~ t * sd * sqrt(1 / c + 1 / m),      t of Student's distribution with c - 1 degrees

where sd is the deviation of one sequence from the mean, (s - S n) / (S mean n). Sequences are the unit, since the
errors of a sequence's tokens depend on each other. Logarithms are taken, since errors multiply and their means are
skewed to the right. Sequences of different lengths count as their effective number, (sum n)**2 / sum n**2. Observed
sequences that are shorter than the predicted ones are assumed to scatter more, in proportion. A factor widens the band
on both sides for what emulation cannot know of a kernel.

``false_positives`` is the chance that sound weights lie above the band, and an upper bound of it if both samples are
the same tokens. Tests draw thousands of samples, from heavy tails to emulated models, and count. The trade-off against
resampling (a bootstrap): no random numbers and nothing to tune, but a normal approximation on the log scale, for which
eight sequences are enough and four are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from nemo_fp8.errors import PrecisionError

LEAST_SEQUENCES = 8


@dataclass(frozen=True)
class Band:
    """The expected typical difference, and the range in which it may lie."""

    expected: float
    low: float
    high: float

    def side(self, observed: float) -> str:
        """Say whether an observed difference lies ``below``, ``inside`` or ``above`` the band."""
        return "below" if observed < self.low else "above" if not observed <= self.high else "inside"


@dataclass(frozen=True, eq=False)
class Sample:
    """Sums of sqrt|d| over each sequence's tokens, and the counts of these tokens."""

    sums: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, difference: torch.Tensor, mask: torch.Tensor) -> Sample:
        """Sum up d of tokens, [sequences, tokens]; sequences without a token in the mask are left out."""
        some = mask.any(1)
        roots = difference.double().abs().sqrt().masked_fill(~mask, 0.0)
        return cls(roots.sum(1)[some].cpu(), mask.sum(1)[some].double().cpu())

    @property
    def mean(self) -> float:
        """The mean of sqrt|d| over all tokens."""
        return float(self.sums.sum() / self.counts.sum())

    @property
    def typical(self) -> float:
        """The typical difference, in the unit of d."""
        return self.mean**2

    @property
    def effective(self) -> float:
        """The number of equally long sequences whose mean would scatter as much."""
        return float(self.counts.sum().square() / self.counts.square().sum())

    @property
    def deviation(self) -> float:
        """The deviation of one sequence, as a share of the mean."""
        mean, length = self.mean, float(self.counts.mean())
        return float(((self.sums - mean * self.counts) / (mean * length)).std())


def band(predicted: Sample, observed: Sample, false_positives: float, factor: float = 1.0) -> Band:
    """Return the band for the typical difference of ``observed``, of which only the lengths are used.

    Raises PrecisionError if there are fewer than LEAST_SEQUENCES predicted sequences, no observed tokens, or no
    predicted difference.
    """
    sequences = len(predicted.sums)
    if sequences < LEAST_SEQUENCES:
        raise PrecisionError(
            f"A prediction from {sequences} sequences.",
            f"How much sequences differ cannot be told from fewer than {LEAST_SEQUENCES}, so no band can be drawn.",
            f"Predict {LEAST_SEQUENCES} sequences or more; 32 are better.",
        )
    if not len(observed.sums):
        raise PrecisionError(
            "There is no token to judge.", "The mask is empty.", "Mark the sampled tokens in the mask."
        )
    if not 0 < predicted.mean < math.inf:
        raise PrecisionError(
            f"The prediction finds a difference of {predicted.typical:g} between the two sides.",
            "They were emulated to the same numbers, or to none, so every difference would be out of the band.",
            "Check that the contract's rollout is what the engine runs, and that the weights are finite.",
        )
    shorter = max(1.0, float(predicted.counts.mean() / observed.counts.mean()))
    scatter = predicted.deviation * math.sqrt(1 / predicted.effective + shorter / observed.effective)
    reach = math.exp(2 * student_t(1 - false_positives, sequences - 1) * scatter) * factor
    return Band(predicted.typical, predicted.typical / reach, predicted.typical * reach)


def student_t(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, expanded around the normal one (Abramowitz, Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(degrees**i) for i, term in enumerate(terms, 1))
