"""How fast values become FP8 or NVFP4 and are multiplied, by our Triton kernels and by TE's; and a whole FP8 linear and
a Llama layer.

Quantizing a BF16 element moves 3 bytes (2 in, 1 out), decoding it as many; NVFP4 moves 2.5625 (half a byte and a
scale's sixteenth out), beneath a given amax, and so does its yardstick. The yardstick is a device-to-device copy of
as many bytes; tensors are several times the size of the L2 cache. GEMMs are 8192 x 8192 x 8192; linears go forward and
backward on 8192 tokens, all three GEMMs in FP8, weights quantized in every step, as nemo_fp8.autocast and TE do it.
FLOPs are those of the matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import nemo_fp8
from nemo_fp8.contract import Operand, Precision
from nemo_fp8.numerics import kernels, nvfp4
from nemo_fp8.numerics.gemm import gemm
from nemo_fp8.numerics.modelopt import LARGEST
from nemo_fp8.numerics.quantize import quantize_pair
from nemo_fp8.numerics.scaled_mm import scaled_mm
from nemo_fp8.render.te import te_recipe

from .measuring import CONTRACTS, Run, Skipped, Ways, te_quantizer, told

# name -> tile, kind of scale, given scale
CASTS: dict[str, tuple[tuple[int, int] | None, str, float | None]] = {
    "weight 128x128, FP32 scales": ((128, 128), "fp32", None),
    "weight 128x128, power-of-2 scales": ((128, 128), "pow2", None),
    "activation 1x128, FP32 scales": ((1, 128), "fp32", None),
    "activation 128x1 (column usage)": ((128, 1), "fp32", None),
    "MX 1x32, E8M0 scales": ((1, 32), "e8m0", None),
    "MX 32x1 (column usage)": ((32, 1), "e8m0", None),
    "whole tensor, current scale": (None, "fp32", None),
    "whole tensor, given scale": (None, "fp32", 37.0),
}
# Those that a quantizer of TE's makes, and nothing beside it.
BY_TE = [name for name, (*_, given) in CASTS.items() if given is None and "column" not in name]
# name -> rows of a block
FP4_CASTS = {"NVFP4 1x16, given amax": 1, "NVFP4 16x16, given amax": 16}
FP4_COPY, FP4_DECODED, FP4_BYTES = "copy, for NVFP4", "decode NVFP4 to BF16", 2.5625

Make = Callable[[int, int], torch.nn.Module]
"""Make a linear of these input and output features."""


def measure(run: Run, name: str) -> None:
    """Run one measure of this part."""
    {"casts": casts, "gemms": gemms, "linear": linear, "layer": layer}[name](run)


def casts(run: Run) -> None:
    """Measure every cast of ours into memory that is there, to a new tensor, with statistics; TE's to a new tensor; a
    copy that moves as much."""
    x = torch.randn((256, 512) if run.small else (8192, 28672), dtype=torch.bfloat16, device="cuda")
    source = torch.randint(255, (x.numel() * 3 // 2,), dtype=torch.uint8, device="cuda")
    target, values = torch.empty_like(source), torch.empty_like(x)
    ways: Ways = {"copy": lambda: target.copy_(source)}
    held: dict[str, tuple[torch.Tensor, ...]] = {}
    for name, (tile, kind, given) in CASTS.items():
        scale = None if given is None else torch.tensor(given, device="cuda")
        held[name] = _add(ways, name, partial(kernels.quantize, x, tile, "e4m3", kind, scale=scale))
        ways[f"{name}, with statistics"] = partial(ways[name], statistics=True)
        if name in BY_TE:
            operand = Operand("e4m3", tile, kind)
            ways[f"{name}, by TE"] = partial(lambda operand: te_quantizer(operand)(x), operand)
    blocks = held["weight 128x128, FP32 scales"]
    ways["decode 128x128 to BF16"] = lambda: kernels.decode(*blocks, (128, 128), out=values)
    # NVFP4 moves other bytes, and has a copy of its own.
    moved, amax, before = int(x.numel() * FP4_BYTES), x.abs().amax().float(), set(ways)
    ways[FP4_COPY] = lambda: target[: moved // 2].copy_(source[: moved // 2])
    for name, rows in FP4_CASTS.items():
        held[name] = _add(ways, name, partial(kernels.quantize_fp4, x, nvfp4.encode_scale(amax).reshape(1), rows))
    ways[FP4_DECODED] = lambda: kernels.decode_fp4(*held[name], amax, LARGEST, out=values)
    others = {name: {"bytes": moved, "copy": FP4_COPY} for name in ways if name not in before}
    run.found = {"shape": list(x.shape), "bytes": x.numel() * 3, "others": others}
    run.race(ways, 60.0, graphs=True)


def _add(ways: Ways, name: str, cast: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """Add a cast into memory that is there, and to a new tensor; return that memory, codes and scales."""
    done = cast()
    if done is None:
        raise Skipped("there is no kernel for this device")
    ways[name], ways[f"{name}, new tensor"] = partial(cast, out=done[:2]), cast
    return tuple(done[:2])


def gemms(run: Run) -> None:
    """Measure one product of operands that are quantized already: the three GEMMs of a linear under each recipe, and
    BF16."""
    n = 256 if run.small else 8192
    x, w, dy = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    ways: Ways = {"bf16": lambda: x @ w.t()}
    by, errors = {"bf16": "torch.mm"}, {}
    for name, precision in CONTRACTS.items():
        if precision.scaling == "delayed":  # it multiplies as tensorwise does
            continue
        x_row, x_col = quantize_pair(x, precision.operand("input"))
        w_row, w_col = quantize_pair(w, precision.operand("weight"))
        dy_row, dy_col = quantize_pair(dy, precision.operand("grad"))
        for product, a, b, exact in (
            ("fprop", x_row, w_row, x @ w.t()),
            ("dgrad", dy_row, w_col, dy @ w),
            ("wgrad", dy_col, x_col, dy.t() @ x),
        ):
            label = f"{name} {product}"
            ways[label] = partial(gemm, a, b)
            try:
                by[label] = "emulated" if run.small or scaled_mm(a, b, torch.bfloat16, None) is None else "scaled_mm"
                errors[label] = float((gemm(a, b).float() - exact.float()).norm() / exact.float().norm())
            except Exception as error:  # the race says so, too; the other products go on
                by[label] = told(error)
    run.found = {"n": n, "flops": 2 * n**3, "by": by, "relative_error": errors}
    run.race(ways, 10.0)


def linear(run: Run) -> None:
    """Measure forward and backward of one linear under each recipe."""
    n = 256 if run.small else 8192
    x = torch.randn(n, n, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    run.found = {"tokens": n, "flops": 6 * n**3}
    _steps(run, lambda make: make(n, n), x)


class Layer(torch.nn.Module):
    """A layer of Llama-3.1-8B in plain PyTorch; ``make`` makes its seven linears."""

    def __init__(self, make: Make, hidden: int, ffn: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.q, self.o = make(hidden, hidden), make(hidden, hidden)
        self.k, self.v = (make(hidden, groups * self.size) for _ in range(2))
        self.gate, self.up, self.down = make(hidden, ffn), make(hidden, ffn), make(ffn, hidden)
        norms = (torch.nn.RMSNorm(hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.norms = torch.nn.ModuleList(norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (p(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def layer(run: Run) -> None:
    """Measure forward and backward of a Llama-8B layer, causal attention in BF16."""
    hidden, ffn, heads, groups = sizes = (128, 256, 4, 2) if run.small else (4096, 14336, 32, 8)
    batch, sequence = (1, 128) if run.small else (2, 4096)
    x = torch.randn(batch, sequence, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weights = 2 * hidden * hidden + 2 * hidden * groups * (hidden // heads) + 3 * hidden * ffn
    flops = 6 * weights * batch * sequence + 6 * batch * sequence**2 * hidden  # causal attention: half of 12 b s^2 h
    run.found = {"tokens": batch * sequence, "flops": flops}
    _steps(run, lambda make: Layer(make, *sizes), x)


def _steps(run: Run, model_of: Callable[[Make], torch.nn.Module], x: torch.Tensor) -> None:
    """Measure a forward and backward under each recipe, ours and TE's, each on a model of its own that begins with the
    same weights."""
    import transformer_engine.pytorch as te

    dy = torch.randn_like(x)

    def plain() -> torch.nn.Module:
        return model_of(lambda i, o: torch.nn.Linear(i, o, bias=False, dtype=torch.bfloat16, device="cuda"))

    def step(model: torch.nn.Module, region: Callable[[], Any] = nullcontext) -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        with region():
            y = model(x)
        y.backward(dy)

    def ours(precision: Precision) -> Callable[[], None]:
        model = plain()
        model.load_state_dict(first.state_dict())
        region = nemo_fp8.autocast(precision, model)
        return partial(step, model, lambda: region)

    def theirs(precision: Precision) -> Callable[[], None]:
        model = model_of(lambda i, o: te.Linear(i, o, bias=False, params_dtype=torch.bfloat16, device="cuda"))
        model.load_state_dict(first.state_dict(), strict=False)
        return partial(step, model, partial(te.autocast, enabled=True, recipe=te_recipe(precision)))

    first = plain()
    ways: Ways = {"bf16": partial(step, first)}
    left_out: dict[str, str] = {}
    for name, precision in CONTRACTS.items():
        for whose, way_of in (("nemo_fp8", ours), ("TE", theirs)):
            try:
                ways[f"{whose} {name}"] = way_of(precision)
            except Exception as error:
                left_out[f"{whose} {name}"] = told(error)
    run.found["left_out"] = left_out
    run.race(ways, 20.0)
