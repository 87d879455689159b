"""What a linear's operands lose in FP8, measured where the run quantizes them.

The emulated linears are watched through hooks: the operand that comes by is quantized once more, with statistics, under the
scale that the linear uses. FP8 primary weights are compared with the share of the FP32 master weights that lies on this
rank. From TransformerEngine's modules comes what TE keeps: amax histories and scales of ``fp8_meta`` or of its quantizers, and
the scales of FP8 weights, compared with master weights in the same way. Its codes of inputs and gradients are never to be had.

Everything is sums and extremes, which add up over ranks:

    SUM  elements, underflow, saturated, non-finite, signal, noise          MAX  amax, scale, 1 / scale
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_fp8.contract import ROLES
from nemo_fp8.numerics.delayed import DelayedState
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.linear import operands
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.train import autocast
from nemo_fp8.train.emulated import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from nemo_fp8.train.parameters import Fp8Tensor

EMULATED = (Fp8ColumnParallelLinear, Fp8RowParallelLinear)
SUMS, EXTREMES = 6, 3
Key = tuple[str, str]


@dataclass
class Measurement:
    """Sums and extremes of one operand of one linear; all zeros where nothing was seen."""

    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(SUMS, dtype=torch.float64))
    extremes: torch.Tensor = field(default_factory=lambda: torch.zeros(EXTREMES, dtype=torch.float64))

    @classmethod
    def of(cls, amax: Any, scale_inv: torch.Tensor, *sums: Any) -> Measurement:
        """From an amax, scales and, where they are known, the six sums."""
        inverse = scale_inv.detach().double()
        ends = torch.stack([inverse.new_tensor(float(amax)), inverse.amin().reciprocal(), inverse.amax()])
        return cls(torch.tensor([float(s) for s in sums or [0] * SUMS], dtype=torch.float64), ends.cpu())

    def numbers(self) -> dict[str, float | None]:
        """What people read; None where it is not known."""
        elements, underflow, saturated, nonfinite, signal, noise = self.sums.tolist()
        amax, largest, inverse = self.extremes.tolist()
        known = elements > 0
        ratio = self.sums[4] / self.sums[5] if noise else torch.tensor(float("inf"))
        return {
            "amax": amax,
            "scale_min": 1 / inverse,
            "scale_max": largest,
            "underflow_percent": 100 * underflow / elements if known else None,
            "saturation_percent": 100 * saturated / elements if known else None,
            "snr_db": float(10 * torch.log10(ratio)) if known and signal else None,
            "nonfinite": nonfinite if known else None,
        }


class Probe:
    """Hooks on a model's linears, from now until :meth:`close`, which gives what they saw of each linear and operand."""

    def __init__(self, linears: Mapping[str, torch.nn.Module], optimizers: Iterable[Any]) -> None:
        self.linears, self.optimizers = dict(linears), list(optimizers)
        self.seen: dict[Key, Measurement] = {}
        self._handles = [m.register_forward_hook(self._hook(name)) for name, m in linears.items() if isinstance(m, EMULATED)]

    @staticmethod
    def sees(module: torch.nn.Module) -> bool:
        """Whether a module is one whose FP8 can be looked at: an emulated linear, or one of TransformerEngine's."""
        return isinstance(module, EMULATED) or (isinstance(getattr(module, "fp8_meta", None), dict) and hasattr(module, "weight"))

    def close(self) -> dict[Key, Measurement]:
        """Every operand of every linear, in the same order on every rank."""
        for handle in self._handles:
            handle.remove()
        for name, module in self.linears.items():
            if not isinstance(module, EMULATED):
                self.seen |= {(name, role): m for role, m in _of_te(module, self.optimizers).items()}
        return {(name, role): self.seen.get((name, role), Measurement()) for name in self.linears for role in ROLES}

    def _hook(self, name: str) -> Any:
        def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
            region = autocast.current_region()
            if region is None or module.keep:
                return
            precision, delayed = region.precision, module._delayed
            if (name, "input") not in self.seen:
                self.seen[name, "input"] = _quantized(args[0], "input", precision, delayed)
                self.seen[name, "weight"] = (
                    _primary(module.weight, self.optimizers)
                    if isinstance(module.weight, Fp8Tensor)
                    else _quantized(module.weight, "weight", precision, delayed)
                )
            out = output[0] if isinstance(output, tuple) else output
            if out.requires_grad and (name, "grad") not in self.seen:
                self.seen[name, "grad"] = Measurement()  # taken: only the first micro-batch is measured

                def before_backward(grad: torch.Tensor) -> None:
                    self.seen[name, "grad"] = _quantized(grad, "grad", precision, delayed)

                out.register_hook(before_backward)

        return after


def reduced(mine: dict[Key, Measurement]) -> dict[Key, Measurement]:
    """What all ranks saw: added up over those that share the layers, collected over the stages of a pipeline."""
    from megatron.core import parallel_state

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if mine and torch.distributed.get_world_size(group) > 1:
        sums, extremes = (torch.stack([getattr(m, kind) for m in mine.values()]).to(device) for kind in ("sums", "extremes"))
        torch.distributed.all_reduce(sums, torch.distributed.ReduceOp.SUM, group)
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group)
        mine = {key: Measurement(s, e) for key, s, e in zip(mine, sums.cpu(), extremes.cpu(), strict=True)}
    stages = parallel_state.get_pipeline_model_parallel_group()
    everyone: list[Any] = [mine]
    if torch.distributed.get_world_size(stages) > 1:
        everyone = [None] * torch.distributed.get_world_size(stages)
        torch.distributed.all_gather_object(everyone, mine, stages)
    return {key: m for part in everyone for key, m in part.items() if m.extremes.any()}


# ---------------------------------------------------------------------- the emulation


def _quantized(x: torch.Tensor, role: str, precision: Any, delayed: DelayedState | None) -> Measurement:
    """An operand, quantized once more with statistics."""
    operand = operands(precision)[role]
    scale = None
    if operand.delayed:
        assert delayed is not None
        scaling = delayed.for_role(role)
        scale = scaling.scale[scaling.roles.index(role)]
    x = x.detach()
    q = quantize(x.reshape(-1, x.shape[-1]), operand, scale=scale, statistics=True)
    assert q.statistics is not None
    s = q.statistics.total()
    return Measurement.of(s.amax, q.scale_inv_fp32, s.elements, s.underflow, s.saturated, s.nonfinite, s.signal, s.noise)


# ---------------------------------------------------------------------- FP8 primary weights


def _primary(weight: Any, optimizers: Iterable[Any]) -> Measurement:
    """An FP8 weight against the share of its master weight that lies on this rank."""
    codes, scale_inv, values = _parts(weight)
    return _against_master(weight, codes, scale_inv, values, optimizers)


def _parts(weight: Any) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Codes, scales and values of an FP8 weight: ours, or one of TE's under the names that its tensor classes have."""
    if isinstance(weight, Fp8Tensor):
        row = weight._held.row
        return row.data, row.scale_inv_fp32, row.dequantize()
    codes = next((c for n in ("_data", "_rowwise_data") if isinstance(c := getattr(weight, n, None), torch.Tensor)), None)
    scales = (getattr(weight, n, None) for n in ("_scale_inv", "_rowwise_scale_inv"))
    scale_inv = next(s for s in scales if isinstance(s, torch.Tensor))
    rows, columns = weight.shape[0], weight.numel() // weight.shape[0]
    if scale_inv.dtype == torch.uint8:  # MX: the byte of an exponent
        scale_inv = scale_inv.view(torch.float8_e8m0fnu).float()[:rows, : -(-columns // 32)]
    elif scale_inv.dim() == 2:  # TE pads scales of blocks for its kernels, with whatever lies there
        scale_inv = scale_inv[: -(-rows // 128), : -(-columns // 128)]
    # TE keeps codes as bytes; FP8 weights are E4M3 in every recipe.
    return None if codes is None else codes.view(torch.float8_e4m3fn), scale_inv, weight.dequantize(dtype=torch.float32)


@torch.no_grad()
def _against_master(
    weight: Any, codes: torch.Tensor | None, scale_inv: torch.Tensor, values: torch.Tensor, optimizers: Iterable[Any]
) -> Measurement:
    master = getattr(weight, "main_param", None)
    span = _share(weight, optimizers)
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
    return Measurement.of(values.abs().amax(), scale_inv, master.numel(), underflow, saturated, (~finite).sum(), signal, noise)


def _share(weight: Any, optimizers: Iterable[Any]) -> slice | None:
    """Which stretch of a flattened weight Megatron's distributed optimizer keeps the master of on this rank."""
    for optimizer in optimizers:
        if weight in getattr(optimizer, "model_param_gbuf_map", ()):
            here = optimizer._get_model_param_range_map(weight)["param"]
            return slice(here.start, here.end)
    return None


# ---------------------------------------------------------------------- TransformerEngine

# Where fp8_meta and the quantizers of a linear keep which operand.
_SLOTS = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "grad": ("scaling_bwd", 0)}


def _of_te(module: Any, optimizers: Iterable[Any]) -> dict[str, Measurement]:
    """What a TE module keeps. Written after TE 2.20's sources; it has not run on a GPU."""
    if not getattr(module, "fp8", False) and not getattr(module, "fp8_initialized", False):
        return {}
    found = {}
    for role, (key, slot) in _SLOTS.items():
        state = module.fp8_meta.get(key)
        history, scale = getattr(state, "amax_history", None), getattr(state, "scale", None)
        if history is not None and scale is not None:  # delayed: the newest entry is the last one, row 0 collects
            amax = history[-1 if len(history) > 1 else 0, slot]
            found[role] = Measurement.of(amax, scale[slot].reciprocal())
            continue
        quantizers = getattr(module, "quantizers", {}).get(key) or ()
        if len(quantizers) > slot and isinstance(scale := getattr(quantizers[slot], "scale", None), torch.Tensor):
            found[role] = Measurement.of(getattr(quantizers[slot], "amax", scale.new_zeros(())), scale.reciprocal())
    if any(hasattr(module.weight, name) for name in ("_scale_inv", "_rowwise_scale_inv")):
        found["weight"] = _primary(module.weight, optimizers)
    return found
