"""A quantized tensor: FP8 codes, the scales that turn them back into values, and which GEMM it was made for.

    value = code * scale_inv        scale_inv is shared by a tile of (rows, columns), or by the whole tensor

A GEMM contracts one dimension of each operand, and scales must not change along it inside a tile; so a tensor
with 1xN tiles is quantized once for the GEMM that contracts its columns (usage ``row``, tiles 1xN) and once
for the GEMM that contracts its rows (usage ``col``, tiles Nx1). Square tiles and whole-tensor scales serve both:
:meth:`Quantized.t` transposes them and :meth:`Quantized.used_as` turns them round without touching a byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import Format, decode, decode_e8m0, format_of
from nemo_fp8.numerics.statistics import Statistics

USAGES = ("row", "col")


@dataclass(frozen=True)
class Quantized:
    """FP8 ``data`` of the source's shape and its dequantization scales.

    ``scale_inv`` is a 0-dim FP32 tensor when ``block`` is None, else ``[ceil(m / rows), ceil(k / columns)]`` over
    the source seen as a matrix (leading dimensions flattened): FP32, or float8_e8m0fnu for MX scales.
    ``block`` is the tile as it lies on the data, so (1, 128) becomes (128, 1) for usage ``col``.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    block: tuple[int, int] | None = None
    usage: str = "row"
    statistics: Statistics | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the source."""
        return self.data.shape

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return format_of(self.data.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.data.device

    @property
    def scale_inv_fp32(self) -> torch.Tensor:
        """Return the scales in FP32, however they are stored."""
        return self.scale_inv if self.scale_inv.dtype == torch.float32 else decode_e8m0(self.scale_inv)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Compute ``code * scale_inv`` in FP32, rounded once to ``dtype``."""
        fast = kernels.decode(self.data, self.scale_inv, self.block, dtype)
        return self.dequantize_reference(dtype) if fast is None else fast

    def dequantize_reference(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Compute the same in plain torch; tests hold the kernels to it."""
        values = decode(self.data, torch.float32)
        return (
            values * self.scale_inv_fp32 if self.block is None else per_tile(values, self.scale_inv_fp32, self.block)
        ).to(dtype)

    def t(self) -> Quantized:
        """Return the transpose. Raises PrecisionError for tiles that are not square."""
        self._must_turn("transposed")
        if self.data.dim() != 2:
            raise PrecisionError(
                f"Cannot transpose a quantized {self.data.dim()}-D tensor.",
                "Only a matrix has a transpose.",
                "Reshape the source to a matrix before it is quantized.",
            )
        scale_inv = self.scale_inv if self.block is None else self.scale_inv.t().contiguous()
        return replace(self, data=turned(self.data), scale_inv=scale_inv, statistics=None)

    def used_as(self, usage: str) -> Quantized:
        """Return the same codes for the other usage. Raises PrecisionError for tiles that are not square."""
        check_usage(usage)
        if usage == self.usage:
            return self
        self._must_turn(f"used as {usage!r}")
        return replace(self, usage=usage)

    def _must_turn(self, what: str) -> None:
        if self.block is not None and self.block[0] != self.block[1]:
            raise PrecisionError(
                f"A tensor quantized in {self.block[0]}x{self.block[1]} tiles cannot be {what}.",
                "Its scales run along one dimension only; the other one needs codes of its own, made from the "
                "original values.",
                f"Quantize the original tensor again with usage={'col' if self.usage == 'row' else 'row'!r}.",
            )


def per_tile(values: torch.Tensor, factors: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Multiply every value with the factor of its tile, in the wider of both dtypes."""
    rows, columns = tile
    matrix = as_matrix(values)
    m, k = matrix.shape
    if m % rows == 0 and k % columns == 0:
        out = matrix.view(m // rows, rows, k // columns, columns) * factors[:, None, :, None]
    else:  # ragged edges: repeat the factors instead of padding the values
        out = matrix * factors.repeat_interleave(rows, 0)[:m].repeat_interleave(columns, 1)[:, :k]
    return out.view(values.shape)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a contiguous matrix, with its leading dimensions flattened."""
    return x.reshape(-1, x.shape[-1]).contiguous() if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def turned(matrix: torch.Tensor) -> torch.Tensor:
    """Return the transpose of a matrix, in memory of its own."""
    into = matrix.new_empty(matrix.shape[::-1])
    return into if kernels.turn(matrix, into) else into.copy_(matrix.t())


def check_usage(usage: str) -> None:
    """Raise PrecisionError for an unknown usage."""
    if usage not in USAGES:
        raise PrecisionError([unknown("usage", usage, USAGES)])
