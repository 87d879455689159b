"""Who makes golden vectors: TransformerEngine's CUDA kernels where there is a GPU, its own Python reference anywhere.

Both answer the same two questions, in nemo_fp8's layout: what are the codes and scales of this tensor, and what becomes
of delayed scaling's state over several steps on two ranks. They may move data and never compute: TE keeps column-wise
data transposed and pads scales for its GEMMs, and our files hold both as they lie on the source.

TE's Python is not its kernels: it gives NaN and infinite amaxes another scale, it rolls a history on where an amax is 0
(the kernel leaves it), it has no delayed cast. Where they part nemo_fp8 follows the kernels, so those cases come from
them alone.
"""

from __future__ import annotations

import ast
import itertools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu", ROOT / "tests" / "golden"):
    sys.path.insert(0, str(folder))

from common import Skipped, require_te  # noqa: E402
from golden import RANKS, ROLES, SHAPES, delayed_inputs  # noqa: E402

from nemo_fp8.contract import Operand  # noqa: E402
from nemo_fp8.numerics.formats import FORMATS  # noqa: E402
from nemo_fp8.numerics.quantize import tile_of  # noqa: E402

TE_PYTHON = ROOT / ".te" / "transformer_engine" / "pytorch"
Pair = tuple[torch.Tensor, torch.Tensor]


# ---------------------------------------------------------------------- TE's kernels


def te_kernels(x: torch.Tensor, operand: Operand, usage: str) -> Pair:
    """TE's own codes and scale_inv for an operand, brought into our layout."""
    te = require_te()
    dtype = {"e4m3": te.DType.kFloat8E4M3, "e5m2": te.DType.kFloat8E5M2}[operand.format]
    row, pow2 = usage == "row", operand.scale == "pow2"
    if operand.block is None:
        settings = {"device": x.device, "rowwise": True, "columnwise": False, "force_pow_2_scales": pow2}
        q = te.Float8CurrentScalingQuantizer(dtype, **settings)(x)
        return q._data, q._scale_inv.reshape(())
    m, k = x.shape
    if operand.scale == "e8m0":
        if not te.is_mxfp8_available():
            raise Skipped(te.is_mxfp8_available(return_reason=True)[1])
        if m % 32 or k % 32:
            raise Skipped("TE's MXFP8 takes multiples of 32")
        q = te.MXFP8Quantizer(dtype, rowwise=row, columnwise=not row)(x)
        if row:
            return q._rowwise_data, q._rowwise_scale_inv.view(torch.uint8)[:m, : k // 32]
        return q._columnwise_data, q._columnwise_scale_inv.view(torch.uint8)[: m // 32, :k]
    square = operand.block == (128, 128)
    q = te.Float8BlockQuantizer(
        dtype, rowwise=True, columnwise=not row, force_pow_2_scales=pow2, block_scaling_dim=2 if square else 1
    )(x)
    data, scales = (q._rowwise_data, q._rowwise_scale_inv) if row else (q._columnwise_data.t(), q._columnwise_scale_inv)
    tiles_down, tiles_across = -(-m // 128), -(-k // 128)
    if square:
        return data, scales[:tiles_down, :tiles_across] if row else scales[:tiles_across, :tiles_down].t()
    return data, scales[:tiles_across, :m].t() if row else scales[:tiles_down, :k]


def te_case(rank: int, group: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A real ``te.Linear`` through several steps, amaxes reduced over the ranks by TE: the codes it makes, the state it
    keeps."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    recipe = DelayedScaling(
        fp8_format=Format[case["format"].upper()],
        amax_history_len=case["history_len"],
        amax_compute_algo=case["algo"],
        margin=case["margin"],
    )
    rows, columns = SHAPES["weight"]
    linear = te.Linear(columns, rows, bias=False, params_dtype=torch.bfloat16, device="cuda")
    grad_type = te.DType.kFloat8E5M2 if case["format"] == "hybrid" else te.DType.kFloat8E4M3
    keys = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
    kept: dict[str, torch.Tensor] = {}
    for step, given in delayed_inputs():
        mine = {role: given[f"{rank}/{role}"].cuda() for role in SHAPES}
        for direction, roles in ROLES.items():
            for slot, role in enumerate(roles):
                state = linear.fp8_meta.get(keys[direction])
                scale = torch.ones(1, device="cuda") if state is None else state.scale[slot : slot + 1].clone()
                amax = torch.zeros(1, device="cuda")
                dtype = grad_type if role == "grad" else te.DType.kFloat8E4M3
                q = te.Float8Quantizer(scale, amax, dtype, rowwise=True, columnwise=False)(mine[role])
                key = f"{step}/{rank}/{role}"
                kept |= {
                    f"{key}.codes": q._data,
                    f"{key}.scale_inv": q._scale_inv.reshape(()),
                    f"{key}.amax": amax.reshape(()),
                }
        with torch.no_grad():
            linear.weight.copy_(mine["weight"])
        x = mine["input"].requires_grad_()
        with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group):
            y = linear(x)
        y.backward(mine["grad"])
        for direction, roles in ROLES.items():
            state = linear.fp8_meta[keys[direction]]
            kept[f"{step}/{direction}.scale"] = state.scale[: len(roles)].clone()
            kept[f"{step}/{direction}.history"] = state.amax_history[:, : len(roles)].clone()
    return {name: t.detach().cpu() for name, t in kept.items()}


# ---------------------------------------------------------------------- TE's Python reference


def te_python(x: torch.Tensor, operand: Operand, usage: str) -> Pair:
    """TE's own Python quantizer on every tile, which is a tensor to it; a ragged one is padded with zeros."""
    if operand.scale == "e8m0":
        raise Skipped("TE has no Python reference for MXFP8")
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


def python_case(rank: int, group: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """TE's own Python update of scales and histories, on amaxes other than 0, reduced over a real group.

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
    """Functions and classes out of TE's sources, whose package does not import without CUDA."""

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    gemm = SimpleNamespace(GEMMType=SimpleNamespace(FPROP=None))  # a default argument of a method that is not called
    found: dict[str, Any] = {"torch": torch, "Quantizer": Quantizer, "jit_fuser": lambda f: f, "gemm": gemm}
    nodes = [n for n in ast.parse((TE_PYTHON / file).read_text()).body if getattr(n, "name", None) in names]
    assert len(nodes) == len(names), f"{file} no longer holds all of {names}"
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *nodes], []), str(TE_PYTHON / file), "exec"), found)
    return found


# ---------------------------------------------------------------------- ranks


def on_ranks(
    one: Callable[..., dict[str, torch.Tensor]], cases: list[dict[str, Any]]
) -> list[list[dict[str, torch.Tensor]]]:
    """What each rank finds in each case, [rank][case]; the ranks are fresh processes, and share the device if there is
    one."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(rank, one, cases, folder)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.terminate()
        codes = [process.exitcode for process in processes]
        if late or any(codes):
            raise RuntimeError(f"the ranks ended with {codes}; what they said is above")
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]


def _rank(rank: int, one: Callable[..., dict[str, torch.Tensor]], cases: list[dict[str, Any]], folder: str) -> None:
    # Two processes share one GPU, which NCCL refuses; gloo carries tensors of either device.
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.save([one(rank, torch.distributed.group.WORLD, case) for case in cases], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
