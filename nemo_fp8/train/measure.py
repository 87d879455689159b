"""Measure what the operands of TransformerEngine's linears lose in FP8, where TE quantizes them.

On a CPU every cast passes through ``nemo_fp8.te_cpu``. Its input is quantized once more, with statistics, under the
scale that the cast had; so the statistics are of what the GEMM multiplies, also where TE fuses the cast into a norm. On
a GPU only what TE keeps can be read: amax histories and scales from ``fp8_meta`` or its quantizers; the codes of inputs
and gradients cannot. FP8 primary weights are compared, on both, with the share of the FP32 master weights that lies on
this rank.

How far the weight that dgrad multiplies by is from the one that fprop used (``numerics.transposition``) follows from
the weight and the recipe, on both: two casts of the weight where its blocks are not square, and nothing where they are.
Where casts are seen, the error of the input's gradient is measured, too: :data:`TOKENS` rows of the gradient are
multiplied with both copies. FP8 primary weights in 1x32 blocks are left out: the values that they were cast from are
not available.

Measurements are sums and extremes, which add up over the experts of a layer and over ranks:

    SUM  elements, underflow, saturated, non-finite, signal, noise; the six of a Transposition
    MAX  amax, scale, 1 / scale
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, replace
from functools import reduce
from typing import Any

import torch

from nemo_fp8 import te_cpu
from nemo_fp8.contract import ROLES
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.linear import operands
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.numerics.transposition import Copies, Transposition
from nemo_fp8.render.te import from_te
from nemo_fp8.te_cpu.quantized import watching_casts
from nemo_fp8.train.linears import codes_of, weights_of

COUNTED = 6
SUMS, EXTREMES = COUNTED + len(astuple(Transposition())), 3
TOKENS = 256
"""The most rows of a gradient that are multiplied to see how far off the input's gradient is."""
Key = tuple[str, str]


@dataclass
class Measurement:
    """Sums and extremes of one operand of one linear; all are zero if nothing was measured."""

    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(SUMS, dtype=torch.float64))
    extremes: torch.Tensor = field(default_factory=lambda: torch.zeros(EXTREMES, dtype=torch.float64))

    @classmethod
    def of(cls, amax: Any, scale_inv: torch.Tensor, *sums: Any) -> Measurement:
        """Make a measurement of an amax, scales and, if known, the first six sums."""
        inverse = scale_inv.detach().double()
        ends = torch.stack([inverse.new_tensor(float(amax)), inverse.amin().reciprocal(), inverse.amax()])
        all_sums = [*map(float, sums), *[0.0] * (SUMS - len(sums))]
        return cls(torch.tensor(all_sums, dtype=torch.float64), ends.cpu())

    def and_(self, other: Measurement) -> Measurement:
        """Combine two measurements, as for the experts that share a name."""
        return Measurement(self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    def turned(self, found: Transposition) -> Measurement:
        """Return the measurement of a weight, with ``found`` about the copy that dgrad multiplies by."""
        return replace(self, sums=torch.cat([self.sums[:COUNTED], self.sums.new_tensor(astuple(found))]))

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers that reports print; None for one that is not known."""
        elements, underflow, saturated, nonfinite, signal, noise = self.sums[:COUNTED].tolist()
        turned = Transposition(*self.sums[COUNTED:].tolist())
        amax, largest, inverse = self.extremes.tolist()
        known = elements > 0
        ratio = self.sums[4] / self.sums[5] if noise else torch.tensor(float("inf"))
        return {
            "amax": amax,
            "scale_min": 1 / inverse if inverse else math.inf,
            "scale_max": largest,
            "underflow_percent": 100 * underflow / elements if known else None,
            "saturation_percent": 100 * saturated / elements if known else None,
            "snr_db": float(10 * torch.log10(ratio)) if known and signal else None,
            "nonfinite": nonfinite if known else None,
            **{name: value if turned.elements else None for name, value in turned.to_dict().items()},
        }


class Probe:
    """Measure the linears of a model from construction until :meth:`close`."""

    def __init__(self, linears: Mapping[str, torch.nn.Module], optimizers: Iterable[Any]) -> None:
        self.linears, self.optimizers = dict(linears), list(optimizers)
        self.seen: dict[Key, Measurement] = {}
        self._owners: dict[int, tuple[str, str]] = {}
        self._once: set[int] = set()
        self._watch = ExitStack()
        if te_cpu.is_installed():
            self._watch.enter_context(watching_casts(self._see))

    def close(self) -> dict[Key, Measurement]:
        """Stop measuring; return the measurement of every operand of every linear, in the same order on every rank."""
        self._watch.close()
        for name, module in self.linears.items():
            self.seen = {(name, role): m for role, m in _of_te(module).items()} | self.seen
            primary = [_primary(weight, self.optimizers) for weight in weights_of(module) if _is_primary(weight)]
            if primary:
                self.seen[name, "weight"] = reduce(Measurement.and_, primary)
            if (turned := _turned(module)) is not None and (name, "weight") in self.seen:
                self.seen[name, "weight"] = self.seen[name, "weight"].turned(turned)
        return {(name, role): self.seen.get((name, role), Measurement()) for name in self.linears for role in ROLES}

    def _see(self, quantizer: Any, x: torch.Tensor, quantized: Any) -> None:
        """Measure one cast. Only the first of each quantizer counts: that of the first micro-batch."""
        if id(quantizer) in self._once:
            return
        if id(quantizer) not in self._owners:
            self._owners = {
                id(q): (name, role) for name, module in self.linears.items() for role, q in _quantizers(module)
            }
        self._once.add(id(quantizer))
        if id(quantizer) in self._owners:
            name, role = self._owners[id(quantizer)]
            module: Any = self.linears[name]
            precision = from_te(module.fp8_meta["recipe"])
            found = _quantized(x, role, precision, quantizer)
            if role == "grad" and len(weights := weights_of(module)) == 1 and not _is_primary(weights[0]):
                found = found.turned(_error_of_dx(weights[0], x, Copies.under(precision)))
            self.seen[name, role] = found if (name, role) not in self.seen else self.seen[name, role].and_(found)


def unchained(optimizers: Iterable[Any]) -> list[Any]:
    """Return the optimizers that chains of Megatron's are made of."""
    return [part for o in optimizers for part in getattr(o, "chained_optimizers", [o])]


def reduced(mine: dict[Key, Measurement]) -> dict[Key, Measurement]:
    """Combine the measurements of all ranks: add over ranks that share layers, collect over pipeline stages."""
    from megatron.core import parallel_state

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if mine and torch.distributed.get_world_size(group) > 1:
        sums, extremes = (
            torch.stack([getattr(m, kind) for m in mine.values()]).to(device) for kind in ("sums", "extremes")
        )
        torch.distributed.all_reduce(sums, torch.distributed.ReduceOp.SUM, group)
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group)
        mine = {key: Measurement(s, e) for key, s, e in zip(mine, sums.cpu(), extremes.cpu(), strict=True)}
    stages = parallel_state.get_pipeline_model_parallel_group()
    everyone: list[Any] = [mine]
    if torch.distributed.get_world_size(stages) > 1:
        everyone = [None] * torch.distributed.get_world_size(stages)
        torch.distributed.all_gather_object(everyone, mine, stages)
    return {key: m for part in everyone for key, m in part.items() if m.extremes.any()}


# ---------------------------------------------------------------------- casts


def _quantized(x: torch.Tensor, role: str, precision: Any, quantizer: Any) -> Measurement:
    """Quantize an operand once more, with statistics, under the scale of its cast."""
    operand = operands(precision.in_backward if role == "grad" else precision)[role]
    x = x.detach()
    q = quantize(
        x.reshape(-1, x.shape[-1]),
        operand,
        scale=quantizer.scale.reshape(()) if operand.delayed else None,
        statistics=True,
    )
    assert q.statistics is not None
    s = q.statistics.total()
    return Measurement.of(
        s.amax, q.scale_inv_fp32, s.elements, s.underflow, s.saturated, s.nonfinite, s.signal, s.noise
    )


@torch.no_grad()
def _turned(module: Any) -> Transposition | None:
    """Return how far dgrad's copies of a module's weights are from fprop's, under the recipe that it last ran."""
    recipe, weights = module.fp8_meta.get("recipe"), weights_of(module)
    if recipe is None or not weights:
        return None
    copies = Copies.under(from_te(recipe))
    if copies.are_one:
        return Transposition.together(Transposition.none(_values_of(weight)) for weight in weights)
    if any(map(_is_primary, weights)):
        return None
    return Transposition.together(copies.measure(weight.detach()) for weight in weights)


def _values_of(weight: Any) -> torch.Tensor:
    values: torch.Tensor = weight.dequantize() if _is_primary(weight) else weight.detach()
    return values


@torch.no_grad()
def _error_of_dx(weight: torch.Tensor, dy: torch.Tensor, copies: Copies) -> Transposition:
    """Return how far ``dy @ B`` is from ``dy @ F`` for the first rows of a gradient."""
    return copies.of_gradient(weight.detach(), dy.detach().reshape(-1, dy.shape[-1])[:TOKENS])


# Operand -> where a TE linear keeps its quantizer: the list, the index, and the step to the next GEMM's (experts
# have one GEMM each).
_SLOTS = {"input": ("scaling_fwd", 0, 3), "weight": ("scaling_fwd", 1, 3), "grad": ("scaling_bwd", 0, 2)}


def _quantizers(module: Any) -> Iterable[tuple[str, Any]]:
    """Yield (role, quantizer) for every operand of a linear; for an FP8 weight, the quantizer of its own codes."""
    for codes in getattr(module, "_fp8_workspaces", {}).values():
        yield "weight", _by_rows(codes._quantizer)
    for role, (key, first, stride) in _SLOTS.items():
        for quantizer in (getattr(module, "quantizers", {}).get(key) or ())[first::stride]:
            if quantizer is not None:
                yield role, _by_rows(quantizer)


def _by_rows(quantizer: Any) -> Any:
    """Return a hybrid quantizer's quantizer by rows, whose codes the forward multiplies; any other unchanged."""
    return getattr(quantizer, "rowwise_quantizer", quantizer)


# ---------------------------------------------------------------------- FP8 primary weights


def _is_primary(weight: Any) -> bool:
    return any(hasattr(weight, name) for name in ("_scale_inv", "_rowwise_scale_inv"))


def _primary(weight: Any, optimizers: Iterable[Any]) -> Measurement:
    """Compare an FP8 weight with the share of its master weight that lies on this rank."""
    codes, scale_inv, values = _parts(weight)
    return _against_master(weight, codes, scale_inv, values, optimizers)


def _parts(weight: Any) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return codes, scales and values of an FP8 weight, under the attribute names of TE's tensor classes."""
    codes = codes_of(weight)
    scales = (getattr(weight, n, None) for n in ("_scale_inv", "_rowwise_scale_inv"))
    scale_inv = next(s for s in scales if isinstance(s, torch.Tensor))
    rows, columns = weight.shape[0], weight.numel() // weight.shape[0]
    if scale_inv.dtype == torch.uint8:  # MX: an exponent byte
        scale_inv = scale_inv.view(torch.float8_e8m0fnu).float()[:rows, : -(-columns // 32)]
    elif scale_inv.dim() == 2:  # TE pads block scales for its kernels; the padding is uninitialized
        scale_inv = scale_inv[: -(-rows // 128), : -(-columns // 128)]
    # TE keeps codes as bytes; FP8 weights are E4M3 in every recipe.
    return None if codes is None else codes.view(torch.float8_e4m3fn), scale_inv, weight.dequantize(dtype=torch.float32)


@torch.no_grad()
def _against_master(
    weight: Any, codes: torch.Tensor | None, scale_inv: torch.Tensor, values: torch.Tensor, optimizers: Iterable[Any]
) -> Measurement:
    master = getattr(weight, "main_param", None)
    span = share_of(weight, optimizers)
    if master is None or span is None or not master.numel():
        return Measurement.of(values.abs().amax(), scale_inv)
    master, share = master.detach().float(), values.flatten()[span]
    finite = master.isfinite()
    saturated = torch.zeros((), dtype=torch.int64)
    if codes is not None and codes.numel() == values.numel():
        format = format_of(codes.dtype)
        at_end = (codes.view(torch.uint8).flatten()[span] & 0x7F) == format.first_nan - 1
        saturated = (at_end & (master.abs() > share.abs() * (format.saturates_above / format.max))).sum()
    signal, noise = (torch.where(finite, t, 0.0).square().sum(dtype=torch.float64) for t in (master, master - share))
    underflow = ((share == 0) & (master != 0)).sum()
    return Measurement.of(
        values.abs().amax(), scale_inv, master.numel(), underflow, saturated, (~finite).sum(), signal, noise
    )


def share_of(weight: Any, optimizers: Iterable[Any]) -> slice | None:
    """Return the slice of a flattened weight whose master Megatron's distributed optimizer keeps on this rank."""
    for optimizer in optimizers:
        if weight in getattr(optimizer, "model_param_gbuf_map", ()):
            here = optimizer._get_model_param_range_map(weight)["param"]
            return slice(here.start, here.end)
    return None


# ---------------------------------------------------------------------- TransformerEngine


def _of_te(module: Any) -> dict[str, Measurement]:
    """Read what a TE module keeps of its last casts, the only source for GPU kernels. Written for TE 2.20."""
    if not getattr(module, "fp8", False) and not getattr(module, "fp8_initialized", False):
        return {}
    found = {}
    for role, (key, slot, _) in _SLOTS.items():
        state = module.fp8_meta.get(key)
        history, scale = getattr(state, "amax_history", None), getattr(state, "scale", None)
        if history is not None and scale is not None:  # delayed: the newest entry is the last one, row 0 collects
            amax = history[-1 if len(history) > 1 else 0, slot]
            found[role] = Measurement.of(amax, scale[slot].reciprocal())
            continue
        quantizers = getattr(module, "quantizers", {}).get(key) or ()
        if len(quantizers) > slot and isinstance(scale := getattr(quantizers[slot], "scale", None), torch.Tensor):
            found[role] = Measurement.of(getattr(quantizers[slot], "amax", scale.new_zeros(())), scale.reciprocal())
    return found
