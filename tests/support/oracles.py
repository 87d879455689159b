"""What the numerics are held to, written by others or written differently: numpy, ml_dtypes, TransformerEngine,
torchao.

Nothing in here calls nemo_fp8. The tests and ``tools/conformance.py`` share it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
TE = ROOT / ".te" / "transformer_engine"
VLLM = ROOT / ".venv-rollout" / "lib"
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
LARGEST = {name: np.float32(ml_dtypes.finfo(ML_DTYPES[name]).max) for name in ("e4m3", "e5m2")}


def cast(values: np.ndarray, format: str) -> np.ndarray:
    """Saturating cast by ml_dtypes, codes as uint8; NaN is 0x7F as on a GPU."""
    clipped = np.clip(values.astype(np.float32), -LARGEST[format], LARGEST[format])
    codes = clipped.astype(ML_DTYPES[format]).view(np.uint8)
    return np.where(np.isnan(clipped), np.uint8(0x7F), codes)


def quantize(
    x: torch.Tensor, tile: tuple[int, int] | None, format: str, kind: str, convention: str = "te"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale_inv (or E8M0 codes), tile after tile, in numpy."""
    values = x.float().numpy().reshape(-1, x.shape[-1]) if x.dim() else x.float().numpy().reshape(1, 1)
    rows, columns = tile or values.shape
    tiny = np.float32(3.4028235e38) if tile is None else np.float32(torch.finfo(x.dtype).max)
    m, k = values.shape
    codes = np.zeros((m, k), np.uint8)
    scale_inv = np.zeros((-(-m // rows), -(-k // columns)), np.uint8 if kind == "e8m0" else np.float32)
    with np.errstate(all="ignore"):
        for i in range(scale_inv.shape[0]):
            for j in range(scale_inv.shape[1]):
                part = values[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                amax = np.fmax.reduce(np.abs(part), axis=None, initial=np.float32(0))
                scale, inverse = _scale(amax, format, kind, convention, tiny)
                codes[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = cast(part * scale, format)
                scale_inv[i, j] = inverse
    return codes.reshape(tuple(x.shape)), scale_inv


def _scale(
    amax: np.float32, format: str, kind: str, convention: str, tiny: np.float32
) -> tuple[np.float32, np.float32 | int]:
    largest, one = LARGEST[format], np.float32(1)
    if kind == "e8m0":
        ratio = amax * (one / largest)
        if np.isinf(ratio):
            exponent = 254
        else:
            mantissa, power = np.frexp(np.float64(ratio))  # ratio = mantissa * 2**power, mantissa in [0.5, 1)
            exponent = 0 if ratio == 0 else int(np.clip(power - (mantissa == 0.5) + 127, 0, 254))
        return np.float32(2.0 ** (127 - exponent)), exponent
    if not np.isfinite(amax):
        return one, one
    if convention == "deepgemm":
        inverse = np.float32(max(amax, np.float32(1e-4))) / largest
        if kind == "pow2":
            inverse = np.float32(2.0 ** np.ceil(np.log2(np.float64(inverse))))
        return one / inverse, inverse
    if amax == 0:
        return one, one
    scale = largest / amax
    if np.isinf(scale):
        scale = tiny
    if kind == "pow2":
        scale = np.float32(2.0 ** np.floor(np.log2(np.float64(scale))))
    return scale, one / scale


def function_of(path: Path, name: str, **names: object) -> Callable:
    """One function out of somebody's file, whose imports need a GPU; ``names`` is what it uses of its module."""
    return lift(path, name, Tuple=tuple, **names)[name]


def lift(path: Path, *wanted: str, **names: object) -> dict[str, Any]:
    """Functions and classes out of somebody's file, as :func:`function_of`."""
    nodes = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in wanted]
    assert len(nodes) == len(wanted), f"{path} no longer holds all of {wanted}"
    found = {"torch": torch, **names}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *nodes], []), str(path), "exec"), found)
    return found


def te_scale() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """TE's own Python reference for scales."""
    return function_of(TE / "pytorch" / "custom_recipes" / "reference_current_scaling.py", "_scale_from_amax_tensor")


def te_nvfp4() -> SimpleNamespace:
    """TE's own Python reference for NVFP4: its class ``NVFP4QuantizerRef`` and its casts."""

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    gemm = SimpleNamespace(GEMMType=SimpleNamespace(FPROP=None))  # a default argument of a method that is not called
    names = ("cast_to_fp4x2", "cast_from_fp4x2", "cast_to_e8", "get_wgrad_sign_vector", "NVFP4QuantizerRef")
    file = TE / "pytorch" / "custom_recipes" / "reference_nvfp4.py"
    return SimpleNamespace(**lift(file, *names, Quantizer=Quantizer, gemm=gemm))


def vllm_nvfp4() -> SimpleNamespace | None:
    """vLLM's own ``ref_nvfp4_quant``, out of the rollout environment; None if that is not there."""
    path = "python3*/site-packages/vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py"
    files = sorted(VLLM.glob(path))
    names = ("get_reciprocal", "cast_to_fp4", "ref_nvfp4_quant")
    return SimpleNamespace(**lift(files[0], *names, FLOAT4_E2M1_MAX_RECIPROCAL=1 / 6.0)) if files else None


def as_codes(data: torch.Tensor) -> np.ndarray:
    return data.view(torch.uint8).numpy()


def differences(ours: np.ndarray, theirs: np.ndarray) -> int:
    """How many entries differ in their bits. NaNs differ from nothing that is NaN."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    same = ours.view(np.uint8 if ours.dtype.itemsize == 1 else np.uint32) == theirs.view(
        np.uint8 if theirs.dtype.itemsize == 1 else np.uint32
    )
    if ours.dtype == np.float32:
        same |= np.isnan(ours) & np.isnan(theirs)
    return int((~same).sum())
