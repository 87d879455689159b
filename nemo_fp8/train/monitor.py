"""What FP8 does to every layer of a run, every so many steps: a Lightning callback.

    trainer.callbacks = [run.Config(Fp8Monitor, every_n_steps=50)]

For each FP8 linear and each of its operands (input, weight, grad): amax, scales, underflow, saturation, SNR, in the
first micro-batch of the step, under the scales that the GEMMs of that step used; summed over the ranks that share the
layer. And the steps that the optimizer skipped. All of it goes to whatever Lightning logs to. A layer that crosses a
threshold is told of in one line, with the pattern that keeps it out of FP8.

Hooks hang on the linears in monitored steps only, so that other steps cost nothing. A monitored step quantizes every
operand a second time (``measure.py``).
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
# What Megatron, NeMo and Lightning wrap around a model, as it shows in the names of modules.
_WRAPPERS = re.compile(r"^(?:(?:module|\d+)\.)+")
_LAYER = re.compile(r"^(.*?\blayers\.)(\d+)(?=\.|$)")


class Fp8Monitor(Callback):
    """Log per-layer FP8 statistics every ``every_n_steps`` steps, and warn where a layer crosses a threshold.

    ``underflow_percent`` and ``saturation_percent`` are the most, ``snr_db`` the least that passes without a warning;
    None never warns. ``rows`` holds everything that was measured, one dictionary for each step, layer and operand;
    ``skipped`` counts the steps that the optimizer skipped.
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
        """Hang the hooks up, if the step that begins is one to monitor."""
        if (trainer.global_step + 1) % self.every_n_steps == 0:
            self._probe = Probe(linear_names(trainer.model), _optimizers(trainer))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Take them down, and tell what they saw."""
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

    # ------------------------------------------------------------------ telling

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
        """One line when a layer crosses a threshold; again only after it has been within it."""
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
    """Every linear that FP8 can run in, by the name that ``keep`` knows it by; layers are counted over all pipeline
    stages."""
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
    """Megatron's optimizers, taken out of NeMo's and out of a chain."""
    found = [getattr(o, "mcore_optimizer", o) for o in trainer.strategy.optimizers]
    return [part for o in found for part in getattr(o, "chained_optimizers", [o])]
