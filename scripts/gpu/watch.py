"""What flows through a model's linears in one step, measured the same way whoever multiplies: TE, Megatron, the
emulation.

nemo_fp8.train.measure tells what a linear's own quantizer saw, of which TE keeps little. Here the operands themselves
are caught by hooks and quantized by our numerics, so that two engines can be compared at every layer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

from common import CONTRACTS  # noqa: E402

from nemo_fp8.contract import Precision  # noqa: E402


class Watch:
    """What flows through every linear in one forward and backward: amax and SNR of inputs, weights and output
    gradients.

    Measured by our numerics on the tensors themselves, for whoever multiplies them; beside it the scales that delayed
    scaling keeps, TE's or ours. The input of a linear that norms it first is not to be seen.
    """

    def __init__(self, model: torch.nn.Module, precision: Precision) -> None:
        self.precision = precision if precision.is_fp8 else CONTRACTS["tensorwise"]
        self.found: dict[str, dict[str, float]] = {}
        self.handles = [module.register_forward_hook(self._hook(name)) for name, module in fp8_linears(model).items()]

    def _hook(self, name: str) -> Callable[..., None]:
        def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
            if f"{name}/weight" in self.found:
                return
            if not hasattr(module, "layer_norm_weight"):
                self._measure(f"{name}/input", args[0], "input")
            weight = module.weight
            self._measure(
                f"{name}/weight",
                weight.dequantize() if hasattr(weight, "dequantize") and is_fp8(weight) else weight,
                "weight",
            )
            out = output[0] if isinstance(output, tuple) else output
            out.register_hook(lambda grad: self._measure(f"{name}/grad", grad, "grad"))

        return after

    def _measure(self, key: str, x: torch.Tensor, role: str) -> None:
        from nemo_fp8.contract import Operand
        from nemo_fp8.numerics.quantize import quantize

        operand = self.precision.operand(role)
        assert operand is not None
        now = Operand(operand.format, operand.block, operand.scale)
        x = x.detach()
        statistics = quantize(x.reshape(-1, x.shape[-1]), now, statistics=True).statistics
        assert statistics is not None
        whole = statistics.total()
        self.found[key] = {name: float(getattr(whole, name)) for name in ("amax", "snr_db", "underflow_percent")}

    def close(self, model: torch.nn.Module) -> dict[str, dict[str, float]]:
        for handle in self.handles:
            handle.remove()
        for name, module in fp8_linears(model).items():
            for role, scale in delayed_scales(module).items():
                self.found.setdefault(f"{name}/{role}", {})["scale"] = scale
        return self.found


def fp8_linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The linears of the decoder that FP8 runs in, by canonical name."""
    found = {}
    for name, module in model.named_modules():
        if ".layers." in name and re.search(r"linear_(qkv|proj|fc1|fc2)$", name) and hasattr(module, "weight"):
            found[name[name.index("layers.") :]] = module
    return found


def delayed_scales(module: Any) -> dict[str, float]:
    """The scales of delayed scaling that a linear keeps for its next step."""
    meta = getattr(module, "fp8_meta", None) or {}
    forward, backward = (getattr(meta.get(key), "scale", None) for key in ("scaling_fwd", "scaling_bwd"))
    if forward is None or backward is None:
        return {}
    return {"input": float(forward[0]), "weight": float(forward[1]), "grad": float(backward[0])}


def is_fp8(weight: torch.Tensor) -> bool:
    return any(hasattr(weight, name) for name in ("_scale_inv", "_rowwise_scale_inv"))
