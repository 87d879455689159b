"""Compute the numbers of a mismatch report: metrics, means by position, the tail, and the worst tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("numerics")

import torch

from nemo_fp8.mismatch import ImportanceSampling, LogProbs, Prediction, Verdict, metrics
from nemo_fp8.mismatch.files import Recording

# metric -> its meaning in a line.
MEANING = {
    "token_mult_prob_error": "mean exp|t - g|",
    "gen_kl_error": "KL(g || t)",
    "policy_kl_error": "KL(t || g)",
    "js_divergence_error": "mean log cosh((t - g) / 2)",
    "sampling_importance_ratio": "mean exp(t - g)",
    "is_oob_ratio": "share out of bounds",
}


@dataclass(frozen=True, eq=False)
class Mismatch:
    """A recording with its metrics, and with the gate's verdict if there is a prediction."""

    source: str
    recording: Recording
    pair: LogProbs
    importance: ImportanceSampling
    kl_type: str = "k3"
    prediction: Prediction | None = None
    verdict: Verdict | None = None
    limits: tuple[tuple[str, float], ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """Mismatch metrics over all recorded tokens."""
        return metrics(self.pair, self.importance, kl_type=self.kl_type)

    @property
    def expected(self) -> dict[str, float] | None:
        """Mismatch metrics of the prediction."""
        return None if self.prediction is None else metrics(self.prediction.pair, self.importance, kl_type=self.kl_type)

    @property
    def over(self) -> list[tuple[str, float, float]]:
        """The metrics above their limits: name, value, limit."""
        found = self.metrics
        return [(name, found[name], limit) for name, limit in self.limits if not found[name] <= limit]

    @property
    def fired(self) -> bool:
        """Whether a metric is above its limit, or the gate fired."""
        return bool(self.over) or (self.verdict is not None and self.verdict.fired)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "source": self.source,
            "sequences": self.pair.sequences,
            "tokens": self.pair.tokens,
            "dropped": self.pair.dropped,
            "metrics": self.metrics,
            "expected": self.expected,
            "limits": [{"metric": name, "value": value, "limit": limit} for name, value, limit in self.over],
            "quantiles": quantiles(self.pair),
            "worst": [vars(token) for token in worst(self)],
            "gate": None if self.verdict is None else self.verdict.to_dict(),
            "fired": self.fired,
        }


def quantiles(pair: LogProbs, points: tuple[float, ...] = (0.5, 0.9, 0.99, 0.999, 1.0)) -> dict[str, float]:
    """Return quantiles of |t - g| over all recorded tokens."""
    size = torch.sort(pair.log_ratio[pair.mask].abs())[0]
    return (
        {f"{100 * p:g}%": float(size[min(len(size) - 1, math.ceil(p * len(size)) - 1)]) for p in points}
        if len(size)
        else {}
    )


@dataclass(frozen=True)
class Token:
    """A token with different log-probs on the two sides."""

    sequence: int
    position: int
    token: int | None
    trainer: float
    rollout: float

    @property
    def log_ratio(self) -> float:
        """The trainer's log-prob minus the rollout's."""
        return self.trainer - self.rollout


def worst(mismatch: Mismatch, count: int = 20) -> list[Token]:
    """Return the tokens with the largest |t - g|."""
    pair, tokens = mismatch.pair, mismatch.recording.tokens
    size = pair.log_ratio.abs().masked_fill(~pair.mask, -1.0)
    chosen = size.flatten().topk(min(count, pair.tokens)).indices
    width = size.shape[1]
    return [
        Token(
            i // width,
            i % width,
            None if tokens is None else int(tokens[i // width, i % width]),
            float(pair.trainer[i // width, i % width]),
            float(pair.rollout[i // width, i % width]),
        )
        for i in chosen.tolist()
    ]


def by_position(pair: LogProbs, bins: int = 60) -> list[tuple[float, float, float]]:
    """Return the mean |t - g| by position, in at most ``bins`` bins, with its standard error over sequences."""
    found = []
    width = max(1, -(-pair.mask.shape[1] // bins))
    for start in range(0, pair.mask.shape[1], width):
        mask, size = pair.mask[:, start : start + width], pair.log_ratio[:, start : start + width].abs()
        rows = mask.any(1)
        if not rows.any():
            continue
        each = (size * mask).sum(1)[rows] / mask.sum(1)[rows]
        error = float(each.std() / math.sqrt(len(each))) if len(each) > 1 else 0.0
        found.append((start + (width - 1) / 2, float((size * mask).sum() / mask.sum()), error))
    return found


def tail(pair: LogProbs, most: int = 400) -> tuple[list[float], list[float]]:
    """Return sizes of |t - g| and the shares of tokens with a larger one, at ranks that are spread on a log scale."""
    size = torch.sort(pair.log_ratio[pair.mask].abs(), descending=True)[0]
    ranks = torch.unique(torch.logspace(0, math.log10(max(1, len(size))), most).long().clamp(1, len(size))) - 1
    return size[ranks].tolist(), [(int(rank) + 1) / len(size) for rank in ranks]


def sample(pair: LogProbs, most: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at most ``most`` tokens for a scatter plot: one eighth with the largest |t - g|, the others a sample."""
    t, g = pair.trainer[pair.mask], pair.rollout[pair.mask]
    if len(t) <= most:
        return t, g
    order = (t - g).abs().argsort(descending=True)
    far, rest = order[: most // 8], order[most // 8 :]
    drawn = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))[: most - len(far)]]
    chosen = torch.cat((far, drawn))
    return t[chosen], g[chosen]
