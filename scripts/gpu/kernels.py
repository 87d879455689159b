"""How fast values become FP8 and are multiplied: our Triton kernels, TE's own, torch; and whole FP8 linears and a Llama
layer.

    python3 scripts/gpu/kernels.py [--cpu]

Quantizing a BF16 element moves 3 bytes (2 in, 1 out), decoding it as many, and quantizing it for both of a GEMM's
directions 4 with one read. The yardstick is a device-to-device copy of as many bytes; the goal is 80% of it. Tensors
are several times the size of the L2 cache. ``graph`` is the replay of a captured CUDA graph: the kernels alone, without
the time that Python takes to launch.

GEMMs are 8192 x 8192 x 8192, linears forward and backward on 8192 tokens, all three GEMMs in FP8, weights quantized in
every step, as nemo_fp8.autocast and TE do it. FLOPs are those of the matrix products.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts", ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

from bench_peers import padded_eager, two_pass, two_pass_back  # noqa: E402
from bench_quantize import OPERATIONS  # noqa: E402
from common import CONTRACTS, Run, Skipped, Ways, number, require_te, result_of, table  # noqa: E402

import nemo_fp8  # noqa: E402
from nemo_fp8.contract import Operand, Precision  # noqa: E402
from nemo_fp8.numerics import kernels  # noqa: E402
from nemo_fp8.numerics.gemm import gemm  # noqa: E402
from nemo_fp8.numerics.quantize import quantize, quantize_pair  # noqa: E402
from nemo_fp8.numerics.scaled_mm import scaled_mm  # noqa: E402

GIVEN = 37.0
CASTS = (*OPERATIONS, "decode 128x128 to BF16")


# ---------------------------------------------------------------------- casts


def casts(run: Run) -> dict[str, Any]:
    """Every cast of ours into memory that is there, to a new tensor, and with statistics; beside it the copy that moves
    as much."""
    rows, columns = (256, 512) if run.cpu else (8192, 28672)
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=run.device)
    values = torch.empty_like(x)
    given = torch.tensor(GIVEN, device=run.device)
    source = torch.randint(255, (x.numel() * 3 // 2,), dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    ways: Ways = {"copy": lambda: target.copy_(source)}
    for name, (tile, kind) in OPERATIONS.items():

        def cast(out: Any, statistics: bool, tile: Any = tile, kind: str = kind) -> Any:
            done = kernels.quantize(x, tile, "e4m3", kind, "te", statistics, given if tile is None else None, out)
            if done is None:
                raise Skipped("there is no kernel for this device")
            return done

        there = cast(None, False)[:2]
        ways[name] = lambda cast=cast, there=there: cast(there, False)
        ways[f"{name}, new tensor"] = lambda cast=cast: cast(None, False)
        ways[f"{name}, with statistics"] = lambda cast=cast, there=there: cast(there, True)
    block_codes, block_scales, _ = ways["weight 128x128, FP32 scales, new tensor"]()
    ways["decode 128x128 to BF16"] = lambda: kernels.decode(block_codes, block_scales, (128, 128), out=values)
    return {"shape": [rows, columns], "bytes": x.numel() * 3, "ways": run.race(ways, 6.0, graphs=True)}


def peers(run: Run) -> dict[str, Any]:
    """The same work by TE's kernels, by torch eager and compiled, and by NeMo RL's algorithm."""
    rows, columns = (256, 512) if run.cpu else (8192, 28672)
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=run.device)
    codes, scale_inv = two_pass(x)
    weight, row = Operand("e4m3", (128, 128), "fp32"), Operand("e4m3", (1, 128), "fp32")
    ways: dict[str, Ways] = {
        "weight 128x128, one direction": {
            "nemo_fp8": lambda: kernels.quantize(x, (128, 128), "e4m3", "fp32"),
            "torch eager": lambda: two_pass(x),
            "NeMo RL's algorithm, eager": lambda: padded_eager(x),
        },
        "activation 1x128, one direction": {"nemo_fp8": lambda: kernels.quantize(x, (1, 128), "e4m3", "fp32")},
        "activation 1x128 and 128x1, both directions": {"nemo_fp8": lambda: quantize_pair(x, row)},
        "weight 128x128, both directions": {"nemo_fp8": lambda: (q := quantize(x, weight), q.t())},
        "whole tensor, current scale": {"nemo_fp8": lambda: quantize(x, Operand("e4m3", None, "fp32"))},
        "decode 128x128 to BF16": {
            "nemo_fp8": lambda: kernels.decode(codes, scale_inv, (128, 128)),
            "torch eager": lambda: two_pass_back(codes, scale_inv),
        },
    }
    if not run.cpu:
        fused, back = torch.compile(two_pass), torch.compile(two_pass_back)
        ways["weight 128x128, one direction"]["torch.compile"] = lambda: fused(x)
        ways["decode 128x128 to BF16"]["torch.compile"] = lambda: back(codes, scale_inv)
    try:
        _add_te(ways, x)
    except Skipped as reason:
        run.say(f"no TE among the peers: {reason}")
    found = {}
    for what, those in ways.items():
        found[what] = run.race(those, 1.5, graphs=True)
        run.say(f"{what}: {', '.join(f'{name} {_ms(way)}' for name, way in found[what].items())}")
    return {"shape": [rows, columns], "elements": x.numel(), "ways": found}


def _add_te(ways: dict[str, Ways], x: torch.Tensor) -> None:
    te = require_te()

    def block(dim: int, both: bool) -> Callable[[], Any]:
        q = te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=both, force_pow_2_scales=False, block_scaling_dim=dim
        )
        return lambda: q(x)

    ways["weight 128x128, one direction"]["TransformerEngine"] = block(2, False)
    ways["weight 128x128, both directions"]["TransformerEngine"] = block(2, True)
    ways["activation 1x128, one direction"]["TransformerEngine"] = block(1, False)
    ways["activation 1x128 and 128x1, both directions"]["TransformerEngine"] = block(1, True)
    current = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=x.device, rowwise=True, columnwise=False)
    ways["whole tensor, current scale"]["TransformerEngine"] = lambda: current(x)
    decoded = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=2)(x)
    ways["decode 128x128 to BF16"]["TransformerEngine"] = lambda: decoded.dequantize(dtype=torch.bfloat16)


# ---------------------------------------------------------------------- GEMMs


def gemms(run: Run) -> dict[str, Any]:
    """One product of operands that are quantized already: the three GEMMs of a linear under each recipe, and BF16."""
    n = 256 if run.cpu else 8192
    x, w, dy = (torch.randn(n, n, dtype=torch.bfloat16, device=run.device) for _ in range(3))
    ways: Ways = {"bf16": lambda: x @ w.t()}
    notes: dict[str, str] = {"bf16": "torch.mm"}
    errors: dict[str, float] = {}
    for name, precision in CONTRACTS.items():
        if precision.scaling in (
            "mxfp8",
            "delayed",
        ):  # no hardware for the one; the other multiplies as tensorwise does
            continue
        x_row, x_col = quantize_pair(x, precision.operand("input"))
        w_row, w_col = quantize_pair(w, precision.operand("weight"))
        dy_row, dy_col = quantize_pair(dy, precision.operand("grad"))
        for product, a, b, exact in (
            ("fprop", x_row, w_row, (x, w.t())),
            ("dgrad", dy_row, w_col, (dy, w)),
            ("wgrad", dy_col, x_col, (dy.t(), x)),
        ):
            label = f"{name} {product}"
            ways[label] = lambda a=a, b=b: gemm(a, b)
            try:
                real = scaled_mm(a, b, torch.bfloat16, None)
                notes[label] = "emulated" if real is None else "scaled_mm"
                reference = (exact[0] @ exact[1]).float()
                errors[label] = float((gemm(a, b).float() - reference).norm() / reference.norm())
            except Exception as error:
                notes[label] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return {"n": n, "flops": 2 * n**3, "ways": run.race(ways, 8.0), "by": notes, "relative_error": errors}


def e5m2_in_tiles(run: Run) -> dict[str, Any]:
    """Whether torch's older entry multiplies E5M2 gradients in tiles, which scaled_mm refuses and TE's GEMM does."""
    if run.cpu:
        raise Skipped("a GPU's GEMM")
    n = 1024
    grad = quantize(torch.randn(n, n, dtype=torch.bfloat16, device="cuda"), Operand("e5m2", (1, 128), "fp32"))
    weight = quantize(torch.randn(n, n, dtype=torch.bfloat16, device="cuda"), Operand("e4m3", (128, 128), "fp32"))
    found = {}
    scales = {"1x128": grad.scale_inv.t().contiguous().t(), "128x128": weight.scale_inv.t().contiguous()}
    for name, b_scale in (("128x128", scales["128x128"]), ("128x128 turned", weight.scale_inv.contiguous().t())):
        try:
            y = torch._scaled_mm(
                grad.data, weight.data.t(), scale_a=scales["1x128"], scale_b=b_scale, out_dtype=torch.bfloat16
            )
            exact = grad.dequantize() @ weight.dequantize().t()
            found[name] = float((y.float() - exact).norm() / exact.norm())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    return found


# ---------------------------------------------------------------------- linears and a layer


def linears(run: Run) -> dict[str, Any]:
    """Forward and backward of one linear: BF16, nemo_fp8.autocast and TE under each recipe."""
    n = 256 if run.cpu else 8192
    x = torch.randn(n, n, dtype=torch.bfloat16, device=run.device, requires_grad=True)
    dy = torch.randn(n, n, dtype=torch.bfloat16, device=run.device)

    def plain() -> torch.nn.Module:
        return torch.nn.Linear(n, n, bias=False, dtype=torch.bfloat16, device=run.device)

    def te_linear() -> torch.nn.Module:
        return require_te().Linear(n, n, bias=False, params_dtype=torch.bfloat16, device=run.device)

    ways, left_out = _steps(run, plain, te_linear, x, dy)
    return {"tokens": n, "features": n, "flops": 6 * n**3, "ways": run.race(ways, 10.0), "left_out": left_out}


class Layer(torch.nn.Module):
    """A layer of Llama-3.1-8B in plain PyTorch; ``linear`` makes its seven linears."""

    def __init__(
        self, linear: Callable[[int, int], torch.nn.Module], hidden: int, ffn: int, heads: int, groups: int, device: str
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, hidden // heads
        self.q, self.o = linear(hidden, hidden), linear(hidden, hidden)
        self.k, self.v = (linear(hidden, groups * self.size) for _ in range(2))
        self.gate, self.up, self.down = linear(hidden, ffn), linear(hidden, ffn), linear(ffn, hidden)
        self.norms = torch.nn.ModuleList(
            torch.nn.RMSNorm(hidden, dtype=torch.bfloat16, device=device) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (p(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def layer(run: Run) -> dict[str, Any]:
    """Forward and backward of a Llama-8B layer, 2 x 4096 tokens, causal attention in BF16."""
    sizes = (128, 256, 4, 2) if run.cpu else (4096, 14336, 32, 8)
    batch, sequence = (1, 128) if run.cpu else (2, 4096)
    hidden, ffn, heads, groups = sizes
    x = torch.randn(batch, sequence, hidden, dtype=torch.bfloat16, device=run.device, requires_grad=True)
    dy = torch.randn_like(x)

    def plain() -> torch.nn.Module:
        return Layer(
            lambda i, o: torch.nn.Linear(i, o, bias=False, dtype=torch.bfloat16, device=run.device), *sizes, run.device
        )

    def te_layer() -> torch.nn.Module:
        te = require_te()
        return Layer(
            lambda i, o: te.Linear(i, o, bias=False, params_dtype=torch.bfloat16, device=run.device), *sizes, run.device
        )

    ways, left_out = _steps(run, plain, te_layer, x, dy)
    weights = 2 * hidden * hidden + 2 * hidden * groups * (hidden // heads) + 3 * hidden * ffn
    flops = 6 * weights * batch * sequence + 6 * batch * sequence**2 * hidden  # causal attention: half of 12 b s^2 h
    return {"tokens": batch * sequence, "flops": flops, "ways": run.race(ways, 12.0), "left_out": left_out}


def _steps(
    run: Run,
    plain: Callable[[], torch.nn.Module],
    te_module: Callable[[], torch.nn.Module],
    x: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[Ways, dict[str, str]]:
    """A forward and backward under each recipe, ours and TE's, each on a module of its own that begins with the same
    weights."""
    first = plain()

    def step(model: torch.nn.Module, context: Callable[[], Any] | None = None) -> None:
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        if context is None:
            y = model(x)
        else:
            with context():
                y = model(x)
        y.backward(dy)

    ways: Ways = {"bf16": lambda: step(first)}
    left_out: dict[str, str] = {}
    for name, precision in CONTRACTS.items():
        if precision.scaling == "mxfp8":
            continue
        try:
            ways[f"nemo_fp8 {name}"] = _ours(plain, first, precision, step)
            if not run.cpu:
                ways[f"TE {name}"] = _theirs(te_module, first, precision, step)
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return ways, left_out


def _ours(
    make: Callable[[], torch.nn.Module], first: torch.nn.Module, precision: Precision, step: Callable[..., None]
) -> Callable[[], Any]:
    model = make()
    model.load_state_dict(first.state_dict())
    region = nemo_fp8.autocast(precision, model)
    return lambda: step(model, lambda: region)


def _theirs(
    make: Callable[[], torch.nn.Module], first: torch.nn.Module, precision: Precision, step: Callable[..., None]
) -> Callable[[], Any]:
    from nemo_fp8.render.te import te_recipe

    te, recipe, model = require_te(), te_recipe(precision), make()
    with torch.no_grad():
        for name, weight in first.named_parameters():
            model.get_parameter(name).copy_(weight)
    return lambda: step(model, lambda: te.autocast(enabled=True, recipe=recipe))


# ---------------------------------------------------------------------- telling


def tell(record: dict[str, Any]) -> str:
    """The tables of a record."""
    out: list[str] = []
    found = result_of(record, "casts")
    if found:
        copy = found["ways"].get("copy", {})
        shape, moved = " x ".join(map(str, found["shape"])), _rate(found["bytes"], copy)
        out += [f"Casts of {shape} BF16 into memory that is there; a copy moves {moved} GB/s.", ""]
        rows = []
        for name in CASTS:
            there, new, counted = (
                found["ways"].get(name + suffix, {}) for suffix in ("", ", new tensor", ", with statistics")
            )
            rows.append([name, _rate(found["bytes"], there), _share(copy, there), _rate(found["bytes"], new), _share(copy, new),
                         _rate(found["bytes"], counted), _share(copy, counted)])  # fmt: skip
        out += [
            table(
                [
                    "cast",
                    "GB/s",
                    "of the copy",
                    "new tensor, GB/s",
                    "of the copy",
                    "with statistics, GB/s",
                    "of the copy",
                ],
                rows,
            ),
            "",
        ]
    found = result_of(record, "peers")
    for what, ways in (found or {"ways": {}})["ways"].items():
        ours = ways.get("nemo_fp8", {})
        rows = [[name, _ms(way), _ratio(way, ours)] for name, way in ways.items()]
        out += [f"{what}, to a new tensor:", "", table(["way", "ms", "slower than nemo_fp8"], rows), ""]
    found = result_of(record, "gemms")
    if found:
        base = found["ways"].get("bf16", {})
        rows = [
            [
                name,
                _ms(way, False),
                _tflops(found["flops"], way),
                _ratio(base, way, False),
                found["by"].get(name),
                number(found["relative_error"].get(name), 2),
            ]
            for name, way in found["ways"].items()
        ]
        out += [f"GEMMs of {found['n']} cubed, operands quantized before:", ""]
        out += [table(["GEMM", "ms", "TFLOP/s", "faster than BF16", "by", "relative error"], rows), ""]
    for part, title in (
        ("linears", "A linear, forward and backward"),
        ("layer", "A Llama-8B layer, forward and backward"),
    ):
        found = result_of(record, part)
        if found:
            base = found["ways"].get("bf16", {})
            rows = [
                [name, _ms(way, False), _tflops(found["flops"], way), _ratio(base, way, False)]
                for name, way in found["ways"].items()
            ]
            rows += [[name, None, None, reason] for name, reason in found["left_out"].items()]
            out += [
                f"{title}, {found['tokens']} tokens:",
                "",
                table(["way", "ms", "TFLOP/s", "faster than BF16"], rows),
                "",
            ]
    return "\n".join(out).rstrip()


def _time(way: dict[str, Any], graph: bool = True) -> float | None:
    return (way.get("graph_ms") if graph else None) or way.get("ms")


def _ms(way: dict[str, Any], graph: bool = True) -> str:
    return way.get("error") or number(_time(way, graph))


def _rate(moved: int, way: dict[str, Any]) -> str:
    time = _time(way)
    return way.get("error", "") if time is None else number(moved / time / 1e6)


def share(copy: dict[str, Any], way: dict[str, Any]) -> float | None:
    """The speed of a way as a share of the copy's."""
    ours, theirs = _time(way), _time(copy)
    return None if ours is None or theirs is None else theirs / ours


def _share(copy: dict[str, Any], way: dict[str, Any]) -> str:
    found = share(copy, way)
    return "" if found is None else f"{found:.0%}"


def _ratio(way: dict[str, Any], other: dict[str, Any], graph: bool = True) -> str:
    mine, theirs = _time(way, graph), _time(other, graph)
    return "" if mine is None or theirs is None else f"{mine / theirs:.2f}x"


def _tflops(flops: int, way: dict[str, Any]) -> str:
    time = way.get("ms")
    return "" if time is None else number(flops / time / 1e9)


def main() -> None:
    run = Run("kernels", __doc__)
    for name, part, seconds in (
        ("casts", casts, 60),
        ("gemms", gemms, 30),
        ("linears", linears, 40),
        ("layer", layer, 40),
        ("peers", peers, 60),
        ("e5m2 in tiles", e5m2_in_tiles, 20),
    ):
        run.part(name, lambda part=part: part(run), seconds=seconds)
    run.finish(tell)


if __name__ == "__main__":
    main()
