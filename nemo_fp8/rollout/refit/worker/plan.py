"""Plan a push in one worker: is the manifest what the model needs, and by which way does each tensor go?

All checks are made before the first byte. Their problems name tensors as the trainer does. A missing tensor has its
Hugging Face name if the engine's own checkpoint tells it; else the problem names vLLM's parameter that would stay old.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from nemo_fp8.contract import Operand
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import Problem
from nemo_fp8.rollout.engine import kv, released
from nemo_fp8.rollout.engine.experts import Quantizing
from nemo_fp8.rollout.engine.linear import NemoFp8LinearMethod
from nemo_fp8.rollout.refit.manifest import SCALES, Entry, Manifest
from nemo_fp8.rollout.refit.worker.arrived import Arrived, Copied, arrivals
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.keeping import Keeping, castable, kept_by
from nemo_fp8.rollout.refit.worker.layouts import Tally, layout_of
from nemo_fp8.rollout.refit.worker.packing import StagingMemory
from nemo_fp8.rollout.refit.worker.routes import Route, Routes, Target, record, unpushable
from nemo_fp8.rollout.refit.worker.sinks import InPlace, KvScales, Sink
from nemo_fp8.rollout.refit.worker.staged import VIEWS, Staged
from nemo_fp8.rollout.refit.worker.whole import Held, Table, places_of

# Pushed and kept dtypes that may differ: the cast is exact, and vLLM keeps some biases in FP32.
WIDENED = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}


class Plan:
    """The plan for one manifest and one model. Later pushes with the same manifest use it again.

    ``routes`` say where tensors go, ``problems`` why the manifest is refused; ``missing`` finds what it lacks.
    """

    def __init__(self, model: torch.nn.Module, manifest: Manifest) -> None:
        self.model, self.manifest = model, manifest
        self._ways: dict[Target, str] = {}
        self._kept_ways: tuple[list[Held], Table, dict[int, Arrived | Copied]] | None = None
        self._kept: tuple[dict[int, Keeping], list[list[int]]] | None = None
        self._castable: dict[int, Operand | None] | None = None
        self.layers: dict[str, Any] = dict(model.named_modules())
        self.scales = {i for i, entry in enumerate(manifest) if manifest.is_scales(entry)}
        self.routes = record(model, manifest, self.scales)
        self.to: dict[Target, list[Route]] = defaultdict(list)
        for route in self.routes:
            self.to[route.target].append(route)
        codes = {manifest.places[manifest[i].name.removesuffix(SCALES)]: i for i in self.scales}
        self.needed = set(self.routes.by_entry) | {codes[i] for i in self.routes.by_entry if i in codes}
        """Numbers of the tensors that this worker holds a part of, and of their scales."""
        self.whole = {i for route in self.routes if route.source is None for i in route.entries} | self.scales
        """Numbers of the tensors that must come in one piece."""
        self.stacks = {i: manifest[i].shape[0] for i, routes in self.routes.by_entry.items() if self._is_stack(routes)}
        """How many experts are in each stack of experts, by its number."""
        self.problems = [*self._refused()]

    def _is_stack(self, routes: list[Route]) -> bool:
        """Return whether a tensor is experts one after the other, whose rows are those of single experts all the
        way."""
        return len(routes[0].shape) == 3 and all(
            route.source is not None and isinstance(self.layers[route.target.layer], RoutedExperts) for route in routes
        )

    # ------------------------------------------------------------------ ways

    def way(self, target: Target) -> str:
        """Return by which way of sinks.py a parameter is written; ``""`` if it cannot be. It is worked out once."""
        if target not in self._ways:
            self._ways[target] = self._way(target)
        return self._ways[target]

    def _way(self, target: Target) -> str:
        """Work out by which way a parameter is written.

        A parameter is written in place if it lies in memory as it was loaded. That holds for layers whose method does
        not change weights, and for parameters of which vLLM recorded no state before loading.
        """
        layer = self.layers[target.layer]
        method = getattr(layer, "quant_method", None)
        if isinstance(method, BaseKVCacheMethod) and target.parameter.endswith("_scale"):
            return "scales"
        if target.parameter.endswith("weight") and method is not None and _in_four_bits(layer):
            return "four bits"
        if isinstance(method, (NemoFp8LinearMethod, Quantizing)) and target.parameter.endswith("weight"):
            return "staged" if layout_of(layer) is None else "blocks"
        live = _live(layer, target)
        same = live is not None and tuple(live.shape) == target.shape
        if same and (
            not isinstance(method, QuantizeMethodBase)
            or isinstance(method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod))
        ):
            return "in place"
        if same and live is not None and target.parameter not in _before(layer):
            return "in place"  # biases, which vLLM makes after the weights and does not process
        return "staged" if isinstance(method, QuantizeMethodBase) else ""

    def sinks(self, tally: Tally, verify: bool) -> dict[Target, Sink]:
        """Return the sink of every target that the push writes. Parameters of one staged layer share a sink.

        The sinks report to ``tally``; ``verify`` has every cast compared with the reference.
        """
        staged: dict[str, list[Target]] = defaultdict(list)
        sinks: dict[Target, Sink] = {}
        attention: dict[str, KvScales] = {}
        room = StagingMemory()
        for target, routes in self.to.items():
            layer, way = self.layers[target.layer], self.way(target)
            if way == "blocks":
                layout = layout_of(layer)
                assert layout is not None
                codes, scales = (released.live(layer, name) for name in (target.parameter, scale_name(target)))
                assert codes is not None
                assert scales is not None
                sinks[target] = Blocks(tally, codes, scales, layout, layer.quant_method.operand, routes, verify)
            elif way == "four bits":
                from nemo_fp8.rollout.refit.worker.four_bits import FourBitWeights

                filled = self.routes.constants.get(target, ())
                sinks[target] = FourBitWeights(tally, layer, target, routes, filled, room, verify)
            elif way == "scales":
                sinks[target] = attention.setdefault(target.layer, KvScales(tally, layer))
            elif way == "in place":
                live = _live(layer, target)
                assert live is not None
                sinks[target] = InPlace(tally, live, self.routes.constants.get(target, ()), self.manifest)
            else:
                staged[target.layer].append(target)
        for name, targets in staged.items():
            constants = [
                (target, self.routes.constants[target]) for target in targets if target in self.routes.constants
            ]
            routes = [route for target in targets for route in self.to[target]]
            sink = Staged(tally, self.layers[name], routes, constants, self._views(name), room)
            sinks |= dict.fromkeys(targets, sink)
        return sinks

    def kept_ways(self, sinks: dict[Target, Sink]) -> tuple[Table, dict[int, Arrived | Copied]]:
        """Return the table of the tensors that these sinks can write by one call, and the ways of those that come in
        pieces. Both are kept as long as the sinks write where they did."""
        places = places_of(sinks)
        if self._kept_ways is None or self._kept_ways[0] != places:
            self._kept_ways = places, Table(self, sinks), arrivals(self, sinks)
        return self._kept_ways[1:]

    def kept(self, sinks: dict[Target, Sink]) -> tuple[dict[int, Keeping], list[list[int]]]:
        """Return what ``kept_by`` says of this plan; the sinks of any push of it are as good."""
        if self._kept is None:
            self._kept = kept_by(self, sinks)
        return self._kept

    def castable(self, sinks: dict[Target, Sink]) -> dict[int, Operand | None]:
        """Return what ``castable`` says of this plan, likewise."""
        if self._castable is None:
            self._castable = castable(self, self.kept(sinks)[0])
        return self._castable

    def _views(self, name: str) -> dict[str, torch.Tensor]:
        """Return parameter -> view of it, for the views that the module around a layer has."""
        around, _, own = name.rpartition(".")
        parameter, view = VIEWS.get(own, ("", ""))
        held = getattr(self.layers.get(around), view, None) if view else None
        return {parameter: held} if held is not None else {}

    @functools.cached_property
    def all_packed_beside(self) -> dict[str, Any]:
        """What is ``packed_beside`` if all targets of the plan were written."""
        return self.packed_beside(self.to)

    @functools.cached_property
    def packed_from(self) -> dict[str, frozenset[int]]:
        """The numbers of the tensors that the weight of each layer of ``all_packed_beside`` is made of, by its name."""
        of = {name: set[int]() for name in self.all_packed_beside}
        if not of:
            return {}
        for i, routes in self.routes.by_entry.items():
            for target in {route.target for route in routes if self.way(route.target) == "in place"}:
                layer = self.layers[target.layer]
                weight = _live(layer, target) if target.parameter in _before(layer) else None
                for name, one in self.all_packed_beside.items():
                    if any(p is weight for p in one._parameters.values() if p is not None):
                        of[name].add(i)
        return {name: frozenset(numbers) for name, numbers in of.items()}

    @functools.cached_property
    def largest_packed(self) -> int:
        """The bytes of the largest weight that is packed anew for a kernel of a CPU; 0 if there is none."""
        if not next(self.model.parameters()).is_cpu:
            return 0
        staged = [t for t in self.to if self.way(t) == "staged"]
        beside = [p for layer in self.all_packed_beside.values() for p in layer._parameters.values() if p is not None]
        return max(
            [torch.Size(t.shape).numel() * t.dtype.itemsize for t in staged] + [p.nbytes for p in beside], default=0
        )

    def packed_beside(self, targets: Iterable[Target]) -> dict[str, Any]:
        """Return the layers whose weight is among ``targets``, is written in place, and may have a packed copy that
        must be packed again, by name.

        On a CPU vLLM packs a copy of an output head. The weight itself may belong to the embedding that it is tied to.
        """
        unpacked = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
        written = set()
        for target in targets:
            if self.way(target) == "in place" and target.parameter in _before(self.layers[target.layer]):
                written.add(id(_live(self.layers[target.layer], target)))
        return {
            name: layer
            for name, layer in self.layers.items()
            if isinstance(getattr(layer, "quant_method", None), unpacked)
            and any(id(p) in written for p in layer._parameters.values())
        }

    # ------------------------------------------------------------------ checks

    def _refused(self) -> Iterator[Problem]:
        """Yield everything for which this worker refuses the manifest, but for missing tensors."""
        if problem := unpushable(self.routes):
            yield problem
        for name, why in self.routes.problems:
            yield Problem(f"{name} is not what the engine's model takes.", f"vLLM's loader says: {why}", _SAME_MODEL)
        for target, routes in self.to.items():
            for first, second in overlapping(routes):
                names = f"{self.manifest[first.entry].name} and {self.manifest[second.entry].name}"
                yield Problem(
                    f"{names} are one tensor of the engine.",
                    f"Both would be written to {target.name}.",
                    "Push one of them.",
                )
        for route in self.routes:
            yield from self._wrong_type(self.manifest[route.entry], route)
        yield from self._lone_scales()

    def _lone_scales(self) -> Iterator[Problem]:
        """Yield a problem for each k_scale without its v_scale, or v_scale without its k_scale.

        vLLM would use the one for both, without a word.
        """
        pushed = {target.name for target in self.to if self.way(target) == "scales"}
        for name in sorted(pushed):
            for one, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
                if name.endswith(one) and (twin := name.removesuffix(one) + other) not in pushed:
                    yield Problem(f"{name} comes without {twin}.", "vLLM would use one scale for both.", "Push both.")

    def _wrong_type(self, entry: Entry, route: Route) -> Iterator[Problem]:
        """Yield a problem if a tensor's dtype is not one in which its parameter can be written."""
        target, layer = route.target, self.layers[route.target.layer]
        way = self.way(target)
        if way == "":
            what = (
                f"{target.name} has another shape in memory than in a checkpoint, and nothing says how it came to it."
            )
            yield Problem(
                f"{entry.name} cannot be pushed.", what, "Report it with the name of the model and vLLM's version."
            )
        elif way == "scales" and not kv.is_fp8(layer):
            why = "The engine's KV cache is not in FP8, and has no scales."
            yield Problem(
                f"{entry.name} is the scale of an FP8 KV cache.",
                why,
                "Start it with kv_cache='fp8', or leave the scales out.",
            )
        elif entry.is_codes:
            yield from self._wrong_codes(entry, route, way)
        elif way != "scales" and entry.torch_dtype != target.dtype and (entry.torch_dtype, target.dtype) not in WIDENED:
            kept = str(target.dtype).removeprefix("torch.")
            why = (
                f"The engine takes it in {kept}; another type would be rounded on the way, and once more by "
                "quantization."
            )
            yield Problem(f"{entry.name} comes in {entry.dtype}.", why, f"Push tensor.to(torch.{kept}).")

    def _wrong_codes(self, entry: Entry, route: Route, way: str) -> Iterator[Problem]:
        """Yield a problem if FP8 codes cannot be copied to their parameter as they are.

        The engine must keep the same blocks of 128x128, and cut the tensor only between them.
        """
        scales, rows = self.manifest.scales_of(entry), len(entry.shape)
        grid = (*entry.shape[:-2], *(-(-n // BLOCK) for n in entry.shape[-2:]))
        what, remedy = f"{entry.name} comes as FP8 codes.", "Push it in BF16; the engine quantizes it."
        if way != "blocks":
            layer = self.layers[route.target.layer]
            in_fp8 = isinstance(getattr(layer, "quant_method", None), (NemoFp8LinearMethod, Quantizing))
            why = (
                "kept in FP8 in a layout that codes cannot be written to"
                if in_fp8
                else f"in {route.target.dtype}, not in FP8"
            )
            yield Problem(what, f"The engine has {route.target.name} {why}.", remedy)
        elif self.layers[route.target.layer].quant_method.operand.block != (BLOCK, BLOCK):
            yield Problem(what, f"The engine keeps {route.target.name} in other blocks than {BLOCK}x{BLOCK}.", remedy)
        elif scales is None or scales.dtype != "float32" or scales.shape != grid or rows < 2:
            told = "there are none" if scales is None else f"they are {list(scales.shape)} in {scales.dtype}"
            yield Problem(
                what, f"Its scales, {entry.name}{SCALES}, must be float32 of shape {list(grid)}; {told}.", "Push both."
            )
        elif not all(map(_at_blocks, self.to[route.target])):
            why = (
                f"This worker's parts of {route.target.name} do not begin and end at blocks of {BLOCK}, so its blocks "
                "are others."
            )
            yield Problem(what, why, remedy)

    @functools.cached_property
    def lacking(self) -> list[tuple[Target, int]]:
        """What is ``missing`` where every element must be written."""
        return self.missing(None)

    def missing(self, baseline: Routes | None) -> list[tuple[Target, int]]:
        """Return the parameters that would keep old values in some elements, and in how many.

        ``baseline`` are the routes of the engine's own checkpoint: what that one leaves out a push may leave out, too.
        None if there is no checkpoint; then every element must be written.
        """
        covered = self.routes.covered()
        wanted = None if baseline is None else baseline.covered()
        found = []
        for target in self.routes.parameters:
            if self.way(target) == "scales":
                continue
            before = _before(self.layers[target.layer]).get(target.parameter)
            all_ = getattr(before, "weight_loader_numel", None) or torch.Size(target.shape).numel()
            left = (all_ if wanted is None else wanted.get(target, 0)) - covered.get(target, 0)
            if left > 0:
                found.append((target, left))
        return found


def overlapping(routes: list[Route]) -> Iterator[tuple[Route, Route]]:
    """Yield pairs of routes from different tensors to one place of a parameter, each with the first that came there."""
    order = sorted(range(len(routes)), key=lambda i: routes[i].to)
    open_: list[int] = []  # those that may reach to the next one
    for i in order:
        open_ = [j for j in open_ if not routes[i].to or routes[j].to[0][1] > routes[i].to[0][0]]
        for j in open_:
            meet = all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(routes[i].to, routes[j].to, strict=True))
            if meet and routes[i].entry != routes[j].entry:
                yield routes[min(i, j)], routes[max(i, j)]
        open_.append(i)


def scale_name(target: Target) -> str:
    """Return the name under which an FP8 layer keeps the scales of a weight."""
    return f"{target.parameter}{SCALES}"


def _at_blocks(route: Route) -> bool:
    """Return whether a route begins and ends at blocks (or at an end) both in the pushed tensor and in the
    parameter."""
    if route.source is None or len(route.source) < 2:
        return False
    ends = [
        *zip(route.source[-2:], route.shape[-2:], strict=True),
        *zip(route.to[-2:], route.target.shape[-2:], strict=True),
    ]
    return all(start % BLOCK == 0 and (stop % BLOCK == 0 or stop == n) for (start, stop), n in ends)


def _in_four_bits(layer: Any) -> bool:
    """Return whether a layer holds NVFP4 codes in the order in which they were made."""
    if layer.quant_method.__class__.__name__ not in ("Nvfp4LinearMethod", "Nvfp4MoEMethod"):
        return False  # and an old vLLM, which has no emulation, never imports it
    from nemo_fp8.rollout.refit.worker.four_bits import in_place

    return in_place(layer)


def _live(layer: torch.nn.Module, target: Target) -> torch.Tensor | None:
    """Return the parameter or buffer that the running model computes with, if it has one of this name."""
    live = released.live(layer, target.parameter)
    return layer._buffers.get(target.parameter) if live is None else live


def _before(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a layer as vLLM recorded them before loading, as meta tensors."""
    parameters: dict[str, torch.Tensor] = get_layerwise_info(layer).restore_metadata[0]
    return parameters


_SAME_MODEL = "Push the tensors of the model that the engine was started with, under their Hugging Face names."
