"""Fingerprint the weights that a worker holds now, read from the memory that the next token is computed with.

The routes of a push (:mod:`nemo_fp8.rollout.refit.worker.routes`) say where each Hugging Face tensor lies in vLLM's
model, so they serve to read it, too. Nothing is written. A weight that a kernel packed in a layout that we do not know
cannot be read and has no fingerprint.
"""

from __future__ import annotations

from typing import Any

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit.manifest import SCALES
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.layouts import Tally
from nemo_fp8.rollout.refit.worker.patches import NemoFp8Patches
from nemo_fp8.rollout.refit.worker.plan import Plan
from nemo_fp8.rollout.refit.worker.session import Answer, answering
from nemo_fp8.rollout.refit.worker.sinks import name_of


class NemoFp8Held(NemoFp8Patches):
    """Adds a method that reads weights to those that push them."""

    model_runner: Any

    @answering
    def nemo_fp8_refit_held(self, message: Answer) -> Answer:
        """Answer with the fingerprints of every tensor, by the parts that this worker holds, as in a receipt.

        Raises PrecisionError if nothing was pushed and the engine was not started from a checkpoint.
        """
        plan = self._refit_plan
        if plan is None:
            own = self._refit_checkpoint()
            if own is None:
                raise PrecisionError(
                    "Nobody knows which tensors this engine is made of.",
                    "It was started from dummy weights or from files that are not safetensors, and nothing was pushed "
                    "yet.",
                    "Push once, or start it from a checkpoint.",
                )
            plan = Plan(self.model_runner.get_model(), own[0])
        sinks = plan.sinks(Tally(), verify=False)
        held: dict[str, dict[str, str]] = {}
        for route in plan.routes:
            name, sink = plan.manifest[route.entry].name, sinks[route.target]
            own_blocks = isinstance(sink, Blocks) and not sink.same_grid(route)
            told = None if own_blocks or name.endswith(SCALES) else sink.read(route)
            parts = held.setdefault(name, {})  # a tensor that cannot be read is listed, without fingerprints
            if told is not None:
                parts[name_of(route)] = told
        return {"held": held}
