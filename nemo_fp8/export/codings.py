"""How a weight becomes tensors of a checkpoint: one class for each format, the same three questions to all.

    DeepSeekBlocks    codes, and an FP32 scale for 128x128
    MxBlocks          codes, and one exponent byte for 32 in a row
    Nvfp4Blocks       two codes a byte, an E4M3 scale for 16 in a row, an FP32 scale for the matrix, one for its input

``parts`` says what there will be before a byte is read, ``encode`` makes it, ``decode`` goes back. The first part,
``""``, is the codes; it has the name of the weight. The trade-off: only the first is in a form that a second
quantization leaves as it is (:mod:`nemo_fp8.export.canonical`). The others come back to the same values, but for blocks
so small that their scale lies among the smallest that there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.export.canonical import canonical
from nemo_fp8.numerics.modelopt import BLOCK, INPUT_SCALE, four_bits
from nemo_fp8.numerics.nvfp4_tensor import QuantizedNVFP4
from nemo_fp8.numerics.quantize import quantize
from nemo_fp8.numerics.quantized import Quantized
from nemo_fp8.storage.safetensors import Described

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODES, SCALE, SCALE_2, INPUT = "", "scale", "scale_2", "input_scale"
Encoded = dict[str, torch.Tensor]


class Coding(Protocol):
    """A format in which a weight is stored."""

    comes_back: bool
    """Whether quantizing the decoded weight gives the same codes and scales, every one."""
    shares_amax: bool
    """Whether parts that an engine fuses have one scale, so that ``encode`` wants the amax of all of them."""

    def parts(self, shape: tuple[int, ...]) -> dict[str, Described]:
        """Return what is stored of a weight of this shape; the codes first."""

    def encode(self, x: torch.Tensor, amax: torch.Tensor | None) -> Encoded:
        """Quantize a matrix that is in the compute dtype."""

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the values of a matrix."""

    def moved(self, x: torch.Tensor, encoded: Encoded) -> int:
        """Return how many scales differ from those that plain quantization gives, with equal values."""


@dataclass(frozen=True)
class DeepSeekBlocks:
    """FP8 codes with an FP32 scale for each 128x128.

    ``spread``: the scales have a dimension of one behind each of theirs, ``[n, 1, k, 1]``, as ModelOpt stores them.
    """

    operand: Operand
    spread: bool = False
    comes_back = True
    shares_amax = False

    def parts(self, shape: tuple[int, ...]) -> dict[str, Described]:
        *stack, rows, columns = shape
        grid = (*stack, -(-rows // 128), -(-columns // 128))
        grid = (grid[0], 1, grid[1], 1) if self.spread else grid
        return {CODES: Described.of(shape, "F8_E4M3"), SCALE: Described.of(grid, "F32")}

    def encode(self, x: torch.Tensor, amax: torch.Tensor | None) -> Encoded:
        q = canonical(quantize(x, self.operand))
        return {CODES: q.data, SCALE: q.scale_inv[:, None, :, None] if self.spread else q.scale_inv}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return Quantized(parts[CODES], self._flat(parts), (128, 128)).dequantize(dtype)

    def moved(self, x: torch.Tensor, encoded: Encoded) -> int:
        return int((quantize(x, self.operand).scale_inv != self._flat(encoded)).sum())

    def _flat(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parts[SCALE][:, 0, :, 0] if self.spread else parts[SCALE]


@dataclass(frozen=True)
class MxBlocks:
    """FP8 codes with an E8M0 exponent for each 32 in a row, as bytes."""

    operand: Operand
    comes_back = False
    shares_amax = False

    def parts(self, shape: tuple[int, ...]) -> dict[str, Described]:
        return {
            CODES: Described.of(shape, "F8_E4M3"),
            SCALE: Described.of((*shape[:-1], shape[-1] // 32), "U8"),
        }

    def encode(self, x: torch.Tensor, amax: torch.Tensor | None) -> Encoded:
        q = quantize(x, self.operand)
        return {CODES: q.data, SCALE: q.scale_inv.view(torch.uint8)}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return Quantized(parts[CODES], parts[SCALE].view(torch.float8_e8m0fnu), (1, 32)).dequantize(dtype)

    def moved(self, x: torch.Tensor, encoded: Encoded) -> int:
        return 0


@dataclass(frozen=True)
class Nvfp4Blocks:
    """E2M1 codes two a byte, an E4M3 scale for each 16 in a row, and an FP32 scale for all that an engine fuses.

    ``activations``: whether an engine quantizes activations as well, for which it wants a scale of the layer's input.
    """

    operand: Operand
    activations: bool
    comes_back = False
    shares_amax = True

    def parts(self, shape: tuple[int, ...]) -> dict[str, Described]:
        *rows, columns = shape
        found = {
            CODES: Described.of((*rows, columns // 2), "U8"),
            SCALE: Described.of((*rows, columns // BLOCK), "F8_E4M3"),
            SCALE_2: Described.of((), "F32"),
        }
        return found | ({INPUT: Described.of((), "F32")} if self.activations else {})

    def encode(self, x: torch.Tensor, amax: torch.Tensor | None) -> Encoded:
        assert amax is not None
        q = four_bits(x, self.operand, amax)
        found = {CODES: q.weight, SCALE: q.weight_scale, SCALE_2: q.weight_scale_2}
        return found | ({INPUT: torch.full_like(q.weight_scale_2, INPUT_SCALE)} if self.activations else {})

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return QuantizedNVFP4.from_modelopt(parts[CODES], parts[SCALE], parts[SCALE_2]).dequantize(dtype)

    def moved(self, x: torch.Tensor, encoded: Encoded) -> int:
        return 0


def in_compute(matrix: torch.Tensor, compute: str, name: str) -> torch.Tensor:
    """Return a weight in the compute dtype; raise PrecisionError if it holds values that are not finite."""
    x = matrix.to(COMPUTE[compute])
    if not bool(torch.isfinite(x).all()):
        raise PrecisionError(
            f"{name} holds values that are not finite.",
            "NaN or infinity in a weight means that the training run which wrote it had diverged, or that the file is "
            "damaged; or a "
            f"value is too large for {compute.upper()}.",
            "Export an earlier checkpoint.",
        )
    return x
