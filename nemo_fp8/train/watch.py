"""Watch what FP8 does to every layer of a run, every so many steps, whichever loop trains it.

For each FP8 linear and each of its operands (input, weight, grad) a row holds amax, scales, underflow, saturation and
SNR of the first micro-batch of the step, under the scales that the GEMMs of that step used, summed over the ranks with
the same layer: of finite values, and the number of the others. For the weight it also holds the distance between the
copies that backward and forward multiply by; for the grad, the error of the input's gradient that follows from it
(``numerics.transposition``). If a layer crosses a threshold, one line in the log names it and the pattern that keeps it
out of FP8; if it holds NaN or infinity, that.

Linears have hooks in watched steps only, so other steps cost nothing. A watched step quantizes every operand a second
time (``measure.py``). A front door (``monitor.py`` for Lightning, ``nemo_fp8.bridge`` for Megatron-Bridge) says when
a step begins and ends, and logs the metrics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

from nemo_fp8.train.linears import linear_names
from nemo_fp8.train.measure import Probe, reduced

logger = logging.getLogger("nemo_fp8")

METRICS = (
    *("amax", "scale_min", "scale_max", "underflow_percent", "saturation_percent", "snr_db", "nonfinite"),
    *("differ_percent", "distance", "gain", "cosine"),
)


class Watch:
    """Measure every ``every_n_steps`` steps, and warn if a layer crosses a threshold.

    A warning comes above ``underflow_percent`` or ``saturation_percent``, or below ``snr_db``; None never warns.
    ``rows`` holds all measurements, one dictionary for each step, layer and operand; ``skipped`` counts the steps that
    the optimizer skipped.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        underflow_percent: float | None = 10.0,
        saturation_percent: float | None = 1.0,
        snr_db: float | None = 20.0,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.limits = {
            "underflow_percent": underflow_percent,
            "saturation_percent": saturation_percent,
            "snr_db": snr_db,
        }
        self.rows: list[dict[str, Any]] = []
        self.skipped = 0
        self._probe: Probe | None = None
        self._warned: set[tuple[str, str, str]] = set()

    def begin(self, step: int, model: Any, optimizers: Iterable[Any]) -> None:
        """Start measuring, if ``step``, counted from 1, is to be watched."""
        if step % self.every_n_steps == 0:
            self._probe = Probe(linear_names(model), optimizers)

    def end(self, step: int, *, warns: bool) -> dict[str, float] | None:
        """Stop measuring; return what is to be logged, or None if the step was not watched.

        Every rank takes part, and those with ``warns`` write the warnings.
        """
        if self._probe is None:
            return None
        measured = reduced(self._probe.close())
        self._probe = None
        rows: list[dict[str, Any]] = [
            {"step": step, "layer": layer, "operand": operand, **m.numbers()}
            for (layer, operand), m in measured.items()
        ]
        self.rows += rows
        for row in rows if warns else ():
            self._warn(row)
        return {
            f"fp8/{row['layer']}/{row['operand']}/{name}": row[name]
            for row in rows
            for name in METRICS
            if row[name] is not None and math.isfinite(row[name])
        } | {"fp8/skipped_steps": self.skipped}

    def abandon(self) -> None:
        """Remove every hook, when the training fails."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _warn(self, row: dict[str, Any]) -> None:
        """Warn when a layer crosses a threshold, and again only after it was within it in between."""
        step, layer, operand = row["step"], row["layer"], row["operand"]
        if self._is_news((layer, operand, "nonfinite"), bool(row["nonfinite"]) or not math.isfinite(row["amax"])):
            logger.warning(
                "FP8 step %d: the %s of %s holds NaN or infinity, which its other numbers leave out. No precision "
                "mends it: look at the data, the learning rate and the steps before",
                step,
                operand,
                layer,
            )
        for name, limit in self.limits.items():
            if self._is_news((layer, operand, name), limit is not None and _beyond(name, row[name], limit)):
                logger.warning(
                    "FP8 step %d: %s of the %s of %s is %.3g (threshold %g). To keep it in BF16: keep=[%r]",
                    step,
                    _WORDS[name],
                    operand,
                    layer,
                    row[name],
                    limit,
                    layer,
                )

    def _is_news(self, key: tuple[str, str, str], holds: bool) -> bool:
        """Return whether something holds that did not hold when it was asked last."""
        known = key in self._warned
        (self._warned.add if holds else self._warned.discard)(key)
        return holds and not known


_WORDS = {"underflow_percent": "underflow in %", "saturation_percent": "saturation in %", "snr_db": "SNR in dB"}


def _beyond(name: str, value: float | None, limit: float) -> bool:
    if value is None:
        return False
    return not value >= limit if name == "snr_db" else not value <= limit
