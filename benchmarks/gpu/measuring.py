"""One measure in this process, and what measures share: the GPU or its stand-in, clocks, the contracts that are
compared.

Times are medians of rounds in which all ways take turns, by the device's clock. As a replayed CUDA graph (``graph_ms``)
a way is free of the time that Python takes to launch it.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from nemo_fp8.contract import Operand, Precision

from . import parts

# Every layer in FP8, primary weights in BF16: what a recipe costs, and nothing else. TE's block recipe is E4M3, and so
# is this one.
CONTRACTS = {
    "delayed": Precision(format="hybrid", scaling="delayed", amax_history_len=1024, amax_compute_algo="max"),
    "tensorwise": Precision(format="hybrid", scaling="tensorwise"),
    "blockwise pow2": Precision(format="e4m3", scaling="blockwise", weight_scale="pow2", activation_scale="pow2"),
    "blockwise fp32": Precision(format="e4m3", scaling="blockwise", weight_scale="fp32", activation_scale="fp32"),
    "mxfp8": Precision(format="e4m3", scaling="mxfp8"),
}
Ways = dict[str, Callable[[], Any]]


class Skipped(Exception):
    """A measure that does not apply here; the message says why."""


@dataclass
class Run:
    """The settings of a measure, and its results."""

    folder: Path
    """Where golden vectors go."""
    small: bool
    """A dry run on small shapes, where "cuda" is the CPU."""
    file: Path
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self) -> None:
        """Write what is found by now: all that is left of a measure that is ended."""
        parts.write(self.file, {"result": self.found})

    def race(self, ways: Ways, seconds: float, *, graphs: bool = False) -> dict[str, Any]:
        """Measure the milliseconds of each way: the median, the first and ninth decile. A way that fails has its error
        instead."""
        found: dict[str, Any] = {}
        ready: Ways = {}
        for name, way in ways.items():
            try:
                for _ in range(1 if self.small else 3):  # builds, compiles, allocates
                    self._ms(way)
                ready[name] = way
            except Exception as error:
                found[name] = {"error": told(error)}
        found |= {name: _summary(times) for name, times in self._turns(ready, seconds).items()}
        self.found["ways"] = found
        self.keep()
        if graphs and not self.small:
            replays: Ways = {}
            for name, way in ready.items():
                try:
                    replays |= _captured(name, way)
                except Exception as error:  # later captures fail, too
                    found[name]["graph_error"] = told(error)
                    break
            for name, times in self._turns(replays, seconds).items():
                found[name]["graph_ms"] = median(times)
        return found

    def _turns(self, ways: Ways, seconds: float) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in ways}
        started = time.monotonic()
        for number in range(2 if self.small else 60):
            if number >= 5 and time.monotonic() - started > seconds:
                break
            for name, way in ways.items():
                times[name].append(self._ms(way))
        return times

    def _ms(self, way: Callable[[], Any]) -> float:
        return _host_ms(way) if self.small else _device_ms(way)


def _device_ms(way: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    way()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _host_ms(way: Callable[[], Any]) -> float:
    started = time.perf_counter()
    way()
    return (time.perf_counter() - started) * 1e3


def _captured(name: str, way: Callable[[], Any]) -> Ways:
    """Return a way as a CUDA graph; nothing for one that waits for the device, which is found out before: a failed
    capture breaks later ones."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(stream):
            way()
    except RuntimeError:
        return {}
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return {name: graph.replay}


def _summary(times: list[float]) -> dict[str, float]:
    low, *_, high = quantiles(times, n=10)
    return {"ms": median(times), "low_ms": low, "high_ms": high, "rounds": len(times)}


def told(error: Exception) -> str:
    """Return an error as one line of text."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@cache
def te_quantizer(operand: Operand, usage: str = "row") -> Any:
    """Return TransformerEngine's quantizer of an operand, for its rows or for its columns. Raise Skipped on a GPU
    without MXFP8 or NVFP4."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    row, pow2 = usage == "row", {"force_pow_2_scales": operand.scale == "pow2"}
    dtype = te.DType.kFloat8E5M2 if operand.format == "e5m2" else te.DType.kFloat8E4M3
    if operand.block is None:
        return te.Float8CurrentScalingQuantizer(dtype, device=torch.device("cuda"), columnwise=False, **pow2)
    if operand.format == "e2m1":
        _require(te.is_nvfp4_available(return_reason=True))
        return NVFP4Quantizer(rowwise=row, columnwise=not row)
    if operand.scale == "e8m0":
        _require(te.is_mxfp8_available(return_reason=True))
        return te.MXFP8Quantizer(dtype, rowwise=row, columnwise=not row)
    dimensions = 2 if operand.block == (128, 128) else 1
    return te.Float8BlockQuantizer(dtype, rowwise=True, columnwise=not row, block_scaling_dim=dimensions, **pow2)


def _require(available: tuple[bool, str]) -> None:
    is_there, reason = available
    if not is_there:
        raise Skipped(reason)


def main() -> None:
    part, name, folder, *dry, file = sys.argv[1:]
    run = Run(Path(folder), bool(dry), Path(file))
    if run.small:
        from nemo_fp8 import te_cpu
        from nemo_fp8_hook import HOPPER

        # "cuda" is the CPU from here on, and refused where there is a GPU; Hopper alone has FP32 scales of blocks.
        te_cpu.install(HOPPER if "blockwise fp32" in name.replace("_", " ") else None)
    torch.manual_seed(0)
    failed = False
    try:
        importlib.import_module(f"benchmarks.gpu.{part}").measure(run, name)
        torch.cuda.synchronize()
        run.keep()
    except Skipped as reason:
        parts.write(run.file, {"skipped": str(reason)})
    except Exception as error:
        failed = True
        traceback.print_exc()
        parts.write(run.file, parts.read(run.file) | {"error": told(error)})
    sys.stderr.flush()
    os._exit(failed)  # NCCL and CUDA may take long to say goodbye


if __name__ == "__main__":
    main()
