"""Log what FP8 does to every layer of a run, every so many steps: a Lightning callback.

    trainer.callbacks = [run.Config(Fp8Monitor, every_n_steps=50)]

For each FP8 linear and each of its operands (input, weight, grad) it logs amax, scales, underflow, saturation and SNR
of the first micro-batch of the step, under the scales that the GEMMs of that step used, summed over the ranks with
the same layer; and the number of steps that the optimizer skipped. They go to every logger of the Trainer. If a layer
crosses a threshold, one line in the log names it and the pattern that keeps it out of FP8.

Linears have hooks in monitored steps only, so other steps cost nothing. A monitored step quantizes every operand a
second time (``measure.py``).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("train")

import torch
from lightning.pytorch.callbacks import Callback

from nemo_fp8.train.measure import Probe, reduced

logger = logging.getLogger("nemo_fp8")

METRICS = ("amax", "scale_min", "scale_max", "underflow_percent", "saturation_percent", "snr_db")
# The prefixes that the wrappers of Megatron, NeMo and Lightning add to the names of modules.
_WRAPPERS = re.compile(r"^(?:(?:module|\d+)\.)+")
_LAYER = re.compile(r"^(.*?\blayers\.)(\d+)(?=\.|$)")


class Fp8Monitor(Callback):
    """Log per-layer FP8 statistics every ``every_n_steps`` steps, and warn if a layer crosses a threshold.

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

    # ------------------------------------------------------------------ Lightning's hooks

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Start measuring, if the step that begins is to be monitored."""
        if (trainer.global_step + 1) % self.every_n_steps == 0:
            self._probe = Probe(linear_names(trainer.model), _optimizers(trainer))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Stop measuring, and log the result."""
        self.skipped += any(
            bool(o.found_inf.item()) for o in _optimizers(trainer) if getattr(o, "found_inf", None) is not None
        )
        if self._probe is None:
            return
        measured = reduced(self._probe.close())
        self._probe = None
        step = trainer.global_step
        rows = [
            {"step": step, "layer": layer, "operand": operand, **m.numbers()}
            for (layer, operand), m in measured.items()
        ]
        self.rows += rows
        self._log(trainer, rows, step)
        if trainer.global_rank == 0:
            for row in rows:
                self._warn(row)

    def on_exception(self, *_: Any) -> None:
        """Remove every hook when the training fails."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    # ------------------------------------------------------------------ logging

    def _log(self, trainer: Any, rows: list[dict[str, Any]], step: int) -> None:
        metrics = {
            f"fp8/{row['layer']}/{row['operand']}/{name}": row[name]
            for row in rows
            for name in METRICS
            if row[name] is not None and math.isfinite(row[name])
        }
        for to in trainer.loggers:
            to.log_metrics(metrics | {"fp8/skipped_steps": self.skipped}, step=step)

    def _warn(self, row: dict[str, Any]) -> None:
        """Warn when a layer crosses a threshold, and again only after it was within it in between."""
        layer, operand = row["layer"], row["operand"]
        for name, limit in self.limits.items():
            key = layer, operand, name
            if limit is None or not _beyond(name, row[name], limit):
                self._warned.discard(key)
            elif key not in self._warned:
                self._warned.add(key)
                logger.warning(
                    "FP8 step %d: %s of the %s of %s is %.3g (threshold %g). To keep it in BF16: keep=[%r]",
                    row["step"],
                    _WORDS[name],
                    operand,
                    layer,
                    row[name],
                    limit,
                    layer,
                )


_WORDS = {"underflow_percent": "underflow in %", "saturation_percent": "saturation in %", "snr_db": "SNR in dB"}


def _beyond(name: str, value: float | None, limit: float) -> bool:
    if value is None:
        return False
    return not value >= limit if name == "snr_db" else not value <= limit


def linear_names(model: Any) -> dict[str, torch.nn.Module]:
    """Return every linear that FP8 can run in by the name that ``keep`` matches; layers count over pipeline stages."""
    chunks: Iterable[Any] = model if isinstance(model, torch.nn.ModuleList | list) else [model]
    names: dict[str, torch.nn.Module] = {}
    for chunk in chunks:
        numbers: dict[str, str] = {}
        for name, module in chunk.named_modules():
            name = _WRAPPERS.sub("", name)
            here = _LAYER.match(name)
            if here and here.end() == len(name) and isinstance(number := getattr(module, "layer_number", None), int):
                numbers[name] = f"{here[1]}{number - 1}"
            if Probe.sees(module):
                names[name if here is None else numbers.get(here[0], here[0]) + name[here.end() :]] = module
    return names


def _optimizers(trainer: Any) -> list[Any]:
    """Return Megatron's optimizers, unwrapped from NeMo's and from a chain."""
    found = [getattr(o, "mcore_optimizer", o) for o in trainer.strategy.optimizers]
    return [part for o in found for part in getattr(o, "chained_optimizers", [o])]
