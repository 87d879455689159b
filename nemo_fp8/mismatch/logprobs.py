"""Hold the log-probs of the same sampled tokens from trainer and rollout, checked once.

    pair = LogProbs(trainer, rollout, mask)        each [sequences, tokens]; mask is 1 on sampled tokens

Column t of both sides is the log-prob of token t. (NeMo RL keeps a first column for the token that nothing predicts,
and cuts it off before it computes anything; do the same, or leave it out of the mask.) Everything is kept in FP64, so
that a sum over a long sequence loses nothing, and a ratio overflows much later than in FP32.

Values under the mask that are no log-probs are refused: NaN, +inf, and anything above zero. So are types narrower than
FP32: a BF16 log-prob of -10 is off by up to 0.03, more than the differences measured here. -inf is a log-prob: a token
that top-k or top-p filtering removed on one side. It is refused, too, unless ``infinite="drop"``, which takes such
tokens out of the mask and counts them. NeMo RL replaces them by 0, which means probability 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nemo_fp8.errors import PrecisionError, unknown

INFINITE = ("refuse", "drop")
# Rounding may put the log-prob of a token of probability 1 above zero, by at most this much.
_ABOVE_ZERO = 1e-4


@dataclass(frozen=True, eq=False)
class LogProbs:
    """The log-probs of both sides. A single sequence may be given without its first dimension.

    Raises PrecisionError if shapes, types or values are not as the module says.
    """

    trainer: torch.Tensor
    """[sequences, tokens] in FP64; 0 outside of the mask."""
    rollout: torch.Tensor
    mask: torch.Tensor = None  # type: ignore[assignment]
    """[sequences, tokens] of booleans: the sampled tokens of samples that count. All True if not given."""
    sample_mask: torch.Tensor = None  # type: ignore[assignment]
    """[sequences] of booleans: which samples count. If not given, those with any token in the mask."""
    infinite: str = field(default="refuse", kw_only=True)
    dropped: int = field(default=0, init=False)
    """The number of tokens that were taken out of the mask since their log-prob is -inf."""

    def __post_init__(self) -> None:
        if self.infinite not in INFINITE:
            raise PrecisionError([unknown("infinite=", self.infinite, INFINITE)])
        trainer, rollout = _floats(self.trainer, "trainer's"), _floats(self.rollout, "rollout's")
        if trainer.shape != rollout.shape:
            raise _shapes("The trainer's log-probs", trainer, "the rollout's", rollout)
        mask = (
            torch.ones_like(trainer, dtype=torch.bool)
            if self.mask is None
            else _booleans(self.mask, "mask", trainer.device)
        )
        mask = mask[None] if mask.dim() == 1 else mask
        if mask.shape != trainer.shape:
            raise _shapes("The mask", mask, "the log-probs", trainer)
        samples = (
            mask.any(1) if self.sample_mask is None else _booleans(self.sample_mask, "sample_mask", trainer.device)
        )
        if samples.shape != trainer.shape[:1]:
            raise _shapes("The sample mask", samples, "the samples of the log-probs", trainer[:, 0])
        mask = mask & samples[:, None]
        _refuse_other_numbers(trainer, mask, "trainer's")
        _refuse_other_numbers(rollout, mask, "rollout's")
        gone = mask & (trainer.isinf() | rollout.isinf())
        if self.infinite == "refuse" and gone.any():
            where = [int(i) for i in gone.nonzero()[0]]
            raise PrecisionError(
                f"{int(gone.sum())} of {int(mask.sum())} tokens have a log-prob of -inf, the first at {where}.",
                "Top-k or top-p filtering took the token away on one side; no ratio is defined there.",
                'Compute log-probs without filtering, or pass infinite="drop" to leave these tokens out and count '
                "them.",
            )
        mask = mask & ~gone
        for name, value in (("trainer", trainer), ("rollout", rollout)):
            object.__setattr__(self, name, value.masked_fill(~mask, 0.0))
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "sample_mask", samples)
        object.__setattr__(self, "dropped", int(gone.sum()))

    @property
    def log_ratio(self) -> torch.Tensor:
        """``log(p_trainer / p_rollout)`` of each token; 0 outside of the mask."""
        return self.trainer - self.rollout

    @property
    def tokens(self) -> int:
        """The number of tokens that count."""
        return int(self.mask.sum())

    @property
    def sequences(self) -> int:
        """The number of samples that count."""
        return int(self.sample_mask.sum())


def _require_tensor(x: object, name: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise PrecisionError(
            f"The {name} are a {type(x).__name__}.", "Both sides are compared as tensors.", "Give torch.tensor(...)."
        )


def _floats(x: torch.Tensor, whose: str) -> torch.Tensor:
    _require_tensor(x, f"{whose} log-probs")
    if x.dtype not in (torch.float32, torch.float64):
        raise PrecisionError(
            f"The {whose} log-probs are {x.dtype}.",
            "In a narrower type than FP32 their own rounding is larger than the mismatch to be measured.",
            "Take log_softmax of logits.float(), and do not cast its result.",
        )
    if x.dim() not in (1, 2):
        raise PrecisionError(
            f"The {whose} log-probs have the shape {tuple(x.shape)}.",
            "One number for each token is compared: [sequences, tokens].",
            "Gather the log-probs of the sampled tokens; pack micro-batches one below the other.",
        )
    x = x.detach().to(torch.float64)
    return x[None] if x.dim() == 1 else x


def _booleans(x: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    _require_tensor(x, name)
    x = x.detach().to(device)
    if x.dtype != torch.bool and not bool(((x == 0) | (x == 1)).all()):
        raise PrecisionError(
            f"The {name} holds other values than 0 and 1.",
            "A token counts or does not.",
            "Pass weights to the loss, not to the mask.",
        )
    return x.bool()


def _shapes(a: str, x: torch.Tensor, b: str, y: torch.Tensor) -> PrecisionError:
    return PrecisionError(
        f"{a} of shape {tuple(x.shape)} do not fit {b} of shape {tuple(y.shape)}.",
        "Both sides must speak of the same tokens, position by position.",
        "Pad both to one length, and mark what was sampled in the mask.",
    )


def _refuse_other_numbers(x: torch.Tensor, mask: torch.Tensor, whose: str) -> None:
    wrong = mask & ~(x <= _ABOVE_ZERO)  # NaN compares as False
    if not wrong.any():
        return
    where = [int(i) for i in wrong.nonzero()[0]]
    value = float(x[tuple(where)])
    nan = value != value
    raise PrecisionError(
        f"{int(wrong.sum())} of {int(mask.sum())} of the {whose} log-probs are none: {value:g} at {where}.",
        "A NaN comes from broken weights or scales." if nan else "The logarithm of a probability is never above zero.",
        "Verify the last refit; an FP8 engine without scales answers with NaN."
        if nan
        else "Pass log_softmax(logits), not logits or exp().",
    )
