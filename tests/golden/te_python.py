"""TransformerEngine's own Python as a source of golden vectors: it runs anywhere, and without a line of ours.

    python tests/golden/te_python.py [FILE]

TE's Python is not its kernels: it gives NaN and infinite amaxes another scale, it rolls a history on where an amax is 0
(the kernel leaves it), it has no delayed cast. Where they part nemo_fp8 follows the kernels, so here are finite values,
and amaxes other than 0. Its functions are taken out of its sources, so that nothing stands beneath them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from golden import FOLDER, ROLES, Golden, delayed_inputs
from recording import Pair, new, record, record_delayed

from nemo_fp8.contract import Operand
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.quantize import tile_of

TE = importlib.metadata.distribution("transformer-engine")
FILE = FOLDER / "te_python_reference.safetensors"
COMMAND = "python tests/golden/te_python.py"
NAMES = ("gaussian.bf16", "gaussian.fp16", "magnitudes.fp32")


def recorded() -> Golden:
    """The whole file."""
    golden = new(
        f"TransformerEngine {TE.version}, its Python reference on a CPU", f"torch {torch.__version__}", COMMAND
    )
    for recipe in ("tensorwise", "blockwise_fp32", "blockwise_pow2"):
        left_out = record(golden, te_python, recipe, NAMES)
        assert not left_out, left_out
    record_delayed(golden, te_python_update, zeros=False)
    return golden


def te_python(x: torch.Tensor, operand: Operand, usage: str) -> Pair:
    """TE's own quantizer on every tile, which is a tensor to it; a ragged one is padded with zeros."""
    reference = lift(
        "custom_recipes/reference_current_scaling.py", "_scale_from_amax_tensor", "CurrentScalingQuantizerRef"
    )
    dtype = FORMATS[operand.format].dtype
    quantizer = reference["CurrentScalingQuantizerRef"](dtype, columnwise=False, pow_2_scales=operand.scale == "pow2")
    if operand.block is None:
        codes, scale_inv, _, _ = quantizer._quantize(x)
        return codes.view(torch.uint8), scale_inv.reshape(())
    rows, columns = tile_of(operand, usage) or x.shape
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    codes = torch.empty(padded.shape, dtype=dtype)
    scales = torch.empty(padded.shape[0] // rows, padded.shape[1] // columns)
    for i, j in itertools.product(*map(range, scales.shape)):
        at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        codes[at], scales[i, j], _, _ = quantizer._quantize(padded[at])
    return codes[: x.shape[0], : x.shape[1]].contiguous().view(torch.uint8), scales


def te_python_update(rank: int, group: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """TE's own update of scales and histories, reduced over a real group.

    The format's maximum is given to it as a tensor, so that torch divides, as TE's kernel does. (Given as the float
    that TE gives, torch multiplies with a reciprocal, and a quarter of the scales are an ulp off the kernel's.)
    """
    update = lift(
        "quantization.py", "_update_amax_history", "_default_get_amax_and_update_history", "_default_sf_compute",
        "_compute_amax_and_update_history", "_compute_scaling_factor", "_amax_and_scale_update",
    )  # fmt: skip
    recipe = type(
        "Recipe", (), {"amax_compute_algo": case["algo"], "scaling_factor_compute_algo": None, "margin": case["margin"]}
    )
    state = {d: (torch.ones(len(roles)), torch.zeros(case["history_len"], len(roles))) for d, roles in ROLES.items()}
    kept: dict[str, torch.Tensor] = {}
    for step, given in delayed_inputs(zeros=False):
        for direction, roles in ROLES.items():
            scale, history = state[direction]
            for slot, role in enumerate(roles):
                history[0, slot] = given[f"{rank}/{role}"].abs().max()
            torch.distributed.all_reduce(history[0], torch.distributed.ReduceOp.MAX, group)
            largest = torch.tensor(
                FORMATS["e5m2" if direction == "backward" and case["format"] == "hybrid" else "e4m3"].max
            )
            update["_amax_and_scale_update"](history, scale, largest, recipe)
            kept |= {f"{step}/{direction}.scale": scale.clone(), f"{step}/{direction}.history": history.clone()}
    return kept


def lift(file: str, *names: str) -> dict[str, Any]:
    """Functions and classes out of TE's sources."""

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    gemm = SimpleNamespace(GEMMType=SimpleNamespace(FPROP=None))  # a default argument of a method that is not called
    found: dict[str, Any] = {"torch": torch, "Quantizer": Quantizer, "jit_fuser": lambda f: f, "gemm": gemm}
    path = Path(str(TE.locate_file("transformer_engine/pytorch"))) / file
    nodes = [n for n in ast.parse(path.read_text()).body if getattr(n, "name", None) in names]
    assert len(nodes) == len(names), f"{file} no longer holds all of {names}"
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *nodes], []), str(path), "exec"), found)
    return found


if __name__ == "__main__":
    recorded().save(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
