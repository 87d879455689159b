"""Gather the tensors of a layer, and have the layer's own method process them, as at load.

That is right for every kernel, whatever it makes of a weight: what the method has made is copied into the memory that
was there, so that every address stays the same. The trade-off: memory for one layer beside the model, and the time that
a load takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from nemo_fp8.rollout.refit.fingerprint import fingerprint
from nemo_fp8.rollout.refit.manifest import Box
from nemo_fp8.rollout.refit.worker.layouts import Tally
from nemo_fp8.rollout.refit.worker.packing import StagingMemory, packed, packs_columns, release
from nemo_fp8.rollout.refit.worker.routes import Route, Target, before_loading
from nemo_fp8.rollout.refit.worker.sinks import Sink, count_rows, inside, part_of, rows_of, word

COVERED = {
    "moe_kernel": "where there is a kernel, the method believes the weights to be packed",
    "moe_quant_config": "the method makes another one, of the gathered weights, and kernels hold that of the live ones",
}
"""What a layer's method holds beside its class, and gets back when gathered weights have been processed; and why."""
VIEWS = {"conv1d": ("weight", "conv_weights")}
"""A layer's name -> its parameter, and the view of it that the module around the layer made when it was constructed.

Mamba 2 convolves by the view. Where a CPU packs the parameter (AVX-512 with BF16), the view goes on to hold what was
loaded, and no longer follows the parameter.
"""


class Staged(Sink):
    """Gathers all tensors of a layer, and has the layer's own method process them as at load.

    ``routes`` are all that lead to the layer; ``constants`` are the boxes that vLLM's loader fills with a number.
    ``views`` are tensors beside the layer that hold a parameter as it was before it was processed. ``room`` is the
    memory that all staged layers of a push share.
    """

    def __init__(
        self,
        tally: Tally,
        layer: Any,
        routes: Iterable[Route],
        constants: Iterable[tuple[Target, list[tuple[Box, float]]]],
        views: Mapping[str, torch.Tensor],
        room: StagingMemory,
    ) -> None:
        super().__init__(tally)
        self.layer, self.values, self.views, self.room = layer, dict[str, torch.Tensor](), views, room
        self.constants = list(constants)
        self.awaited = {entry for route in routes for entry in route.entries}

    def write(self, route: Route, row: int, values: torch.Tensor) -> None:
        name = route.target.parameter
        if name not in self.values:
            self.values[name] = self._empty(name)
        rows = count_rows(values)
        self._copy(route, row, values, inside(self.values[name].data, part_of(route, row, rows)))

    def complete(self, entry: int) -> None:
        """Note that all rows of a tensor have come; process the layer if it was the last one.

        Every worker gets the same rows in the same order, so all process a layer at the same time. They must: a method
        may talk to the other workers, for the amax of a weight that has one scale.
        """
        self.awaited.discard(entry)
        if not self.awaited and self.values:
            size = sum(value.nbytes for value in self.values.values())
            for route in self.prints:
                held = inside(self.values[route.target.parameter].data, route.to)
                self.facts[route.entry].count_nonfinite(held, self._experts(route, 0, rows_of(route)))
            self._process()
            self.tally.hold(-size)

    def _empty(self, name: str) -> torch.Tensor:
        """Return memory for a parameter as it is before loading: with its shape, type and loader."""
        info = get_layerwise_info(self.layer)
        like = before_loading(info.restore_metadata[0][name], self.layer)
        if name == "weight" and packs_columns(self.layer, like, info.restore_device):
            made = self.room.take(like.data.new_empty(like.shape[::-1]), info.restore_device).t()
        else:
            made = self.room.take(like.data, info.restore_device)
        made.__class__, made.__dict__ = like.__class__, vars(like).copy()
        self.tally.hold(made.nbytes)
        return made

    def _process(self) -> None:
        """Put the gathered parameters into the layer, process them as at load, and copy the results to the live ones.

        The live parameters, and the kernels that hold them, are put back in the end, so every address stays the same.
        """
        layer, method = self.layer, self.layer.quant_method
        for target, filled in self.constants:
            for box, value in filled:
                inside(self.values[target.parameter].data, box).fill_(value)
        live, loaded = dict(layer._parameters), {name: value.data for name, value in self.values.items()}
        kernel = {name: getattr(method, name) for name in COVERED if hasattr(method, name)}
        try:
            layer._parameters.clear()
            layer._parameters.update(
                {name: tensor for name, tensor in live.items() if name in SKIP_TENSORS} | self.values
            )
            layer.__dict__.pop("_already_called_process_weights_after_loading", None)
            if "moe_kernel" in kernel:
                method.moe_kernel = None
            release(layer)
            method.process_weights_after_loading(layer)
            if hasattr(layer, "update_param_tp_status"):
                layer.update_param_tp_status()
            for name, tensor in live.items():
                made = layer._parameters.get(name)
                if tensor is None or made is None or made is tensor:
                    continue
                if made.numel() and not tensor.numel():
                    live[name] = made  # until attention has packed it, and lets go of it again
                else:
                    tensor.data.copy_(made.data)
            for name, view in self.views.items():
                view.copy_(loaded[name].view_as(view))
        finally:
            layer._parameters.clear()
            layer._parameters.update(live)
            for name, value in kernel.items():
                setattr(method, name, value)
            self.values.clear()

    def finish(self) -> None:
        for route, print_ in self.prints.items():
            self._tell(route, word(route.target.dtype), print_.digest())

    def seal(self) -> Any:
        """Return the layer's memory as fingerprints, and which function multiplies."""
        held = {name: one for name, one in self.layer._parameters.items() if one is not None and one.numel()}
        return {name: fingerprint(one) for name, one in held.items()}, packed(self.layer)
