"""Decide whether a mismatch is the noise of FP8, or the engine runs other weights than the trainer's.

    prediction = predict(config, weights, tokens, precision)      three emulated forwards, now and then
    verdict = Gate().judge(prediction, pair)                      at every step; verdict.fired, print(verdict)

The prediction emulates both sides on some sequences: the trainer, the rollout under the contract, and the rollout again
in other arithmetic (FP32 instead of BF16). Two typical differences are compared with a band
(:mod:`nemo_fp8.mismatch.band`):

    distance    d = trainer - rollout, observed, against the emulated one. It works for any tokens of the same kind.
    residual    d = rollout - emulated rollout, token by token, against the change by other arithmetic alone. It needs
                the tokens of the prediction, and sees smaller faults: the noise of quantized weights is in both and
                cancels.

Above the band the gate fires. Below it the engine is closer to the trainer than FP8 can be, as an engine is that
silently runs in BF16; that is a warning. If the gate is given the engine's weights (``held``: a receipt's fingerprints,
or weights read back from the workers), it names each one that is not the trainer's, and fires even inside of the band:
a weight that is stale after a small step changes less than FP8's noise, and is still wrong. Scales other than the
contract's are a warning, since their values are right.

On sound weights the gate fires with a chance of at most ``false_positives``, shared by its checks. ``factor`` and
``residual_factor`` are the errors that emulation may have. docs/mismatch.md has the measurements on vLLM, and the
faults that a band can and cannot see.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.findings import finding
from nemo_fp8.mismatch.band import Band, Sample, band
from nemo_fp8.mismatch.forward import Run, log_probs, require_tokens
from nemo_fp8.mismatch.logprobs import LogProbs
from nemo_fp8.mismatch.metrics import metrics
from nemo_fp8.mismatch.weights import Held, Weights, compare_weights, kind_of

DISTANCE, RESIDUAL = "distance", "residual"


@dataclass(frozen=True, eq=False)
class Prediction:
    """The emulated log-probs of some sequences. Tensors are [sequences, tokens]."""

    precision: Precision
    tokens: torch.Tensor
    trainer: torch.Tensor
    rollout: torch.Tensor
    again: torch.Tensor
    """The rollout again, in other arithmetic."""
    mask: torch.Tensor

    @property
    def pair(self) -> LogProbs:
        """Trainer and rollout for :func:`metrics`; the rollout in other arithmetic, like that of a real engine."""
        return LogProbs(self.trainer, self.again, self.mask)

    def cpu(self) -> Prediction:
        """Return the prediction with its tensors on the CPU."""
        tensors = ("tokens", "trainer", "rollout", "again", "mask")
        return replace(self, **{name: getattr(self, name).cpu() for name in tensors})

    def distance(self) -> Sample:
        """Return the predicted differences between trainer and rollout."""
        return Sample.of(self.trainer - self.again, self.mask)

    def residual(self) -> Sample:
        """Return the predicted differences between two sound rollouts."""
        return Sample.of(self.rollout - self.again, self.mask)

    @property
    def quantized(self) -> bool:
        """Whether the two sides are quantized differently. If not, they differ by arithmetic alone."""
        return not torch.equal(self.trainer[self.mask], self.rollout[self.mask])


def predict(
    config: Mapping[str, Any],
    weights: Weights,
    tokens: torch.Tensor,
    precision: Precision | str,
    *,
    mask: torch.Tensor | None = None,
    activations: bool = True,
    batch: int = 8,
    progress: Callable[[], None] | None = None,
) -> Prediction:
    """Emulate trainer and rollout of a Hugging Face model on these tokens, padded on the right.

    ``precision`` is a contract, or the name of a preset or of a YAML file. ``mask`` says which tokens count; by default
    all but the first. ``activations`` says whether the engine's kernels quantize activations: True for FP8 kernels on
    GPUs, False for vLLM's on CPUs. ``progress`` is called three times for each layer. Raises PrecisionError if
    :func:`log_probs` cannot emulate the model.
    """
    precision = given(precision)
    require_tokens(tokens)
    if mask is None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
    _require_shape(mask, tokens)
    mask = mask.bool().clone()
    mask[:, 0] = False  # nothing comes before the first token
    trained = Run(precision, side="train") if precision.is_quantized else Run()
    runs = (
        trained,
        Run(precision, activations=activations),
        Run(precision, activations=activations, dtype=torch.float32),
    )
    trainer, rollout, again = (log_probs(config, weights, tokens, run, batch=batch, progress=progress) for run in runs)
    return Prediction(precision, tokens, trainer, rollout, again, mask)


def _require_shape(mask: torch.Tensor, tokens: torch.Tensor) -> None:
    if mask.shape != tokens.shape:
        raise PrecisionError(
            f"A mask of shape {tuple(mask.shape)} is not of tokens of shape {tuple(tokens.shape)}.",
            "Column t is token t, and its log-prob, everywhere.",
            "Cut all alike; of tokens that were predicted give every column, with the first one out of the mask.",
        )


@dataclass(frozen=True)
class Check:
    """One typical difference and its band."""

    name: str
    observed: float
    band: Band

    @property
    def side(self) -> str:
        """``below``, ``inside`` or ``above`` the band."""
        return self.band.side(self.observed)


@dataclass(frozen=True)
class Verdict:
    """The gate's answer: what fired, why, and on which evidence."""

    checks: tuple[Check, ...]
    metrics: Mapping[str, float]
    expected: Mapping[str, float]
    """The metrics of the prediction."""
    differences: tuple[Problem, ...] = ()
    """The weights that are not the trainer's; ``where`` is the name of each."""
    told: bool = False
    """Whether the gate was told what weights the engine holds."""
    false_positives: float = field(default=0.0, repr=False)

    @property
    def left(self) -> bool:
        """Whether a typical difference lies above its band."""
        return any(check.side == "above" for check in self.checks)

    @property
    def only_scales(self) -> bool:
        """Whether scales other than the contract's are the only difference between the weights."""
        return bool(self.differences) and not self.layers

    def severity(self, check: Check) -> str:
        """Return the severity of a check above its band: a warning for a residual that other scales explain."""
        return "warning" if check.name == RESIDUAL and self.only_scales else "error"

    @property
    def fired(self) -> bool:
        """Whether weights are wrong, or a check lies above its band with the severity of an error."""
        return bool(self.layers) or any(
            check.side == "above" and self.severity(check) == "error" for check in self.checks
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the weights that are wrong."""
        return tuple(d.where for d in self.differences if d.severity == "error")

    @property
    def findings(self) -> tuple[Problem, ...]:
        """All findings: first those of the checks, then those of the weights."""
        return (*_of_checks(self), *self.differences)

    def problems(self) -> list[tuple[str, Problem]]:
        """Return (severity, finding) pairs. Deprecated: ``findings`` has both."""
        warnings.warn(
            "Verdict.problems() is Verdict.findings now, whose rows hold their severity.",
            DeprecationWarning,
            stacklevel=2,
        )
        return [(found.severity, found) for found in self.findings]

    def require(self) -> Verdict:
        """Return the verdict; raise PrecisionError with all findings that are errors if the gate fired."""
        if self.fired:
            raise PrecisionError(found for found in self.findings if found.severity == "error")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values, for JSON."""
        return {
            "fired": self.fired,
            "false_positives": self.false_positives,
            "checks": [{**asdict(check), "side": check.side} for check in self.checks],
            "metrics": dict(self.metrics),
            "expected": dict(self.expected),
            "weights": [_row(different) for different in self.differences] if self.told else None,
            "problems": [found.to_dict() for found in self.findings],
        }

    def __str__(self) -> str:
        lines = [
            f"{c.name}: {c.observed:.3g}, expected {c.band.expected:.3g}, band {c.band.low:.3g} to {c.band.high:.3g}"
            for c in self.checks
        ]
        lines += [f"{found.severity}: {found.what}" for found in self.findings]
        return "\n".join([f"the gate {'FIRES' if self.fired else 'is calm'}", *lines])


@dataclass(frozen=True)
class Gate:
    """Thresholds of the mismatch gate. Raises PrecisionError if they make no sense."""

    false_positives: float = 1e-3
    """The chance to fire on sound weights, at most."""
    factor: float = 1.15
    """The factor by which the distance may differ from its prediction, beyond its scatter."""
    residual_factor: float = 1.5
    """The factor by which the residual may differ from its prediction, beyond its scatter."""

    def __post_init__(self) -> None:
        factors = (self.factor, self.residual_factor)
        if not 1e-9 <= self.false_positives <= 0.1 or not all(1 <= factor < math.inf for factor in factors):
            raise PrecisionError(
                f"A gate with false_positives={self.false_positives}, factors {self.factor} and "
                f"{self.residual_factor}.",
                "It is a chance between 1e-9 and 0.1, and a factor of one is no room at all.",
                "Use Gate(), whose room was measured.",
            )

    def judge(
        self,
        prediction: Prediction,
        pair: LogProbs,
        tokens: torch.Tensor | None = None,
        *,
        weights: Weights | None = None,
        held: Mapping[str, Held] | None = None,
        previous: Weights | None = None,
    ) -> Verdict:
        """Compare observed log-probs with the prediction.

        ``tokens`` are those of ``pair``; if they are the prediction's, the residual is checked, too. ``weights`` (the
        trainer's), ``held`` (the engine's) and ``previous`` are compared by :func:`compare_weights`.

        Raises PrecisionError for ``held`` without ``weights``, ``tokens`` of another shape than ``pair``, or if no
        band can be drawn.
        """
        if tokens is not None:
            _require_shape(pair.mask, tokens)
        same = (
            tokens is not None
            and tokens.shape == prediction.tokens.shape
            and torch.equal(tokens.cpu(), prediction.tokens.cpu())
        )
        chance = self.false_positives / (2 if same else 1)
        observed = Sample.of(pair.log_ratio, pair.mask)
        factor = self.factor if prediction.quantized else self.residual_factor
        found = [Check(DISTANCE, observed.typical, band(prediction.distance(), observed, chance, factor))]
        if same:
            mask = pair.mask & prediction.mask.to(pair.mask.device)
            rest = Sample.of(pair.rollout - prediction.rollout.to(pair.rollout.device), mask)
            found.append(Check(RESIDUAL, rest.typical, band(prediction.residual(), rest, chance, self.residual_factor)))
        differences: list[Problem] = []
        if held is not None:
            if weights is None:
                raise PrecisionError(
                    "held= without weights=.",
                    "Fingerprints mean nothing without the trainer's weights.",
                    "Pass weights=, the trainer's, by their Hugging Face names.",
                )
            differences = compare_weights(weights, held, prediction.precision, previous=previous)
        return Verdict(
            tuple(found),
            metrics(pair),
            metrics(prediction.pair),
            tuple(differences),
            bool(held),
            self.false_positives,
        )


# ---------------------------------------------------------------------- findings

_NAME_THEM = (
    "Pass held=, fingerprints or weights read back from the engine, and the gate names the layers; push again with "
    "verify=True."
)


def _of_checks(verdict: Verdict) -> Iterator[Problem]:
    for check in verdict.checks:
        if check.side == "above":
            remedy = _after_naming(verdict) if verdict.told else _NAME_THEM
            numbers = {
                "observed": check.observed,
                "high": check.band.high,
                "times": check.observed / check.band.expected,
            }
            yield finding(f"gate-{check.name}", check.name, severity=verdict.severity(check), remedy=remedy, **numbers)
        elif check.side == "below" and check.name == DISTANCE:
            yield finding("gate-too-close", check.name, observed=check.observed, low=check.band.low)


def _row(different: Problem) -> dict[str, str]:
    return {
        "name": different.where,
        "kind": kind_of(different),
        "detail": different.why,
        "severity": different.severity,
    }


def _after_naming(verdict: Verdict) -> str:
    if verdict.layers:
        return (
            f"Look at {verdict.layers[0]}{f' and {len(verdict.layers) - 1} more' if len(verdict.layers) > 1 else ''}, "
            "below."
        )
    if verdict.only_scales:
        return "Other scales than the contract's do this; see below."
    return (
        "All weights that were told are right: look at the tokens, the sampling settings, and what was not told (KV "
        "scales, LoRA)."
    )
