"""A tensor quantized to NVFP4: codes two a byte, a scale for 16 of them, the amax beneath.

    data        uint8 [.., K/2]       two codes: the even column in the lower half
    scale_inv   E4M3  [rows, K/16]    of a 16x16 block once for each of its rows, so that both kinds of block lie alike
    amax        FP32, 0-dim           or one for each row, where rows are scaled
    value       code * (scale_inv * amax * (1 / largest))         largest = 6 * 448

For usage ``col`` all three lie turned, [K, M/2] and so on, since a byte holds two codes of one GEMM's sum. ModelOpt
and vLLM hold the same bytes under other names, with ``weight_scale_2 = amax / largest`` in place of the amax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nemo_fp8.contract.operands import FOUR_BIT_BLOCK
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import Format, format_of
from nemo_fp8.numerics.quantized import Quantized, check_usage
from nemo_fp8.numerics.statistics import Statistics

BLOCK = FOUR_BIT_BLOCK
_LARGEST = format_of("e2m1").max
# The random signs of the transform: TE chose them once, for every tensor.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True, kw_only=True)
class QuantizedNVFP4(Quantized):
    """E2M1 ``data``, its E4M3 ``scale_inv`` and its FP32 ``amax``. ``source`` is the shape of what was quantized.

    ``block`` is (1, 16) or (16, 16), rows by contracted dimension, for both usages.
    """

    amax: torch.Tensor
    source: torch.Size
    largest_scale: int = 448
    hadamard: bool = False
    """Whether the codes are of transformed values; ``dequantize`` transforms them back."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the source."""
        return self.source

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return format_of("e2m1")

    @property
    def largest(self) -> float:
        """The number that the amax becomes: the largest code times the largest scale."""
        return _LARGEST * self.largest_scale

    @property
    def matrix(self) -> torch.Tensor:
        """The bytes as a matrix, [rows, contracted dimension / 2]."""
        return self.data.reshape(self.scale_inv.shape[0], self.scale_inv.shape[1] * BLOCK // 2)

    @property
    def scale_inv_fp32(self) -> torch.Tensor:
        """Return what the codes of each block are multiplied with, [rows, K/16], rounded as a GPU rounds it: the
        scale with the amax first, and with a reciprocal."""
        return self.scale_inv.float() * self.amax.reshape(-1, 1) * _reciprocal(self.largest)

    def codes(self) -> torch.Tensor:
        """Return the codes one a byte, as they lie."""
        return unpack(self.matrix)

    def scaled(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return ``code * scale`` as it lies: six bits, exact in FP32 and in BF16. A GEMM sums these, and multiplies
        with both amaxes at its end."""
        fast = self._decoded(None, dtype)
        return self._times(self.scale_inv.float()).to(dtype) if fast is None else fast

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Compute the values of the source's shape in FP32, rounded once to ``dtype``."""
        fast = None if self.hadamard else self._decoded(self.amax, dtype)
        return self.dequantize_reference(dtype) if fast is None else self._as_source(fast)

    def dequantize_reference(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Compute the same in plain torch; tests hold the kernels to it."""
        values = self._times(self.scale_inv_fp32)
        return self._as_source((hadamard_back(values) if self.hadamard else values).to(dtype))

    def _as_source(self, values: torch.Tensor) -> torch.Tensor:
        return (values if self.usage == "row" else values.t()).reshape(self.shape)

    def _decoded(self, amax: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        return kernels.decode_fp4(self.matrix, self.scale_inv, amax, self.largest, dtype)

    def t(self) -> QuantizedNVFP4:
        """Return the transpose. Raises PrecisionError for blocks that are not square."""
        self._must_turn("transposed")
        if len(self.shape) != 2:
            raise PrecisionError(
                f"Cannot transpose a quantized {len(self.shape)}-D tensor.",
                "Only a matrix has a transpose.",
                "Reshape the source to a matrix before it is quantized.",
            )
        return replace(self._turned(), source=torch.Size(reversed(self.shape)))

    def used_as(self, usage: str) -> QuantizedNVFP4:
        """Return the same values for the other usage. Raises PrecisionError for blocks that are not square."""
        check_usage(usage)
        if usage == self.usage:
            return self
        self._must_turn(f"used as {usage!r}")
        turned = self._turned()
        data = turned.data.view(*self.shape[:-1], self.shape[-1] // 2) if usage == "row" else turned.data
        return replace(turned, data=data, usage=usage)

    def with_statistics(self, statistics: Statistics) -> QuantizedNVFP4:
        """Return the same tensor with what was counted."""
        return replace(self, statistics=statistics)

    def _turned(self) -> QuantizedNVFP4:
        rows = self.scale_inv.shape[0]
        if rows % BLOCK:
            raise PrecisionError(
                f"{rows} {'rows' if self.usage == 'row' else 'columns'} are no whole blocks of {BLOCK}.",
                f"Turned, a GEMM contracts them, {BLOCK} values with one scale, two codes a byte.",
                f"Pad them to a multiple of {BLOCK}, or use this tensor as it lies.",
            )
        return replace(self, data=turn(self.matrix), scale_inv=turn_scales(self.scale_inv), statistics=None)

    def _times(self, scale: torch.Tensor) -> torch.Tensor:
        codes = self.codes().view(*scale.shape, BLOCK)
        magnitude = magnitude_of(codes) * scale[:, :, None]
        return torch.where(codes > 7, -magnitude, magnitude).view(len(scale), scale.shape[1] * BLOCK)

    # ------------------------------------------------------------------ ModelOpt's view

    @property
    def weight_scale_2(self) -> torch.Tensor:
        """The FP32 number that ModelOpt and vLLM keep beside the scales."""
        return weight_scale_2(self.amax, self.largest_scale)

    @staticmethod
    def from_modelopt(
        weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor, largest_scale: int = 448
    ) -> QuantizedNVFP4:
        """Return a checkpoint's weight [N, K/2] with scales [N, K/16], as they are; see :func:`amax_of_scale_2`.

        Raises PrecisionError if the scales have another shape or dtype.
        """
        rows, half = weight.shape
        if tuple(weight_scale.shape) != (rows, half * 2 // BLOCK) or weight_scale.dtype != torch.float8_e4m3fn:
            raise PrecisionError(
                f"A weight of {tuple(weight.shape)} bytes with {weight_scale.dtype} scales of shape "
                f"{tuple(weight_scale.shape)}.",
                "NVFP4 has one E4M3 scale for 16 codes, which are 8 bytes.",
                f"Give float8_e4m3fn scales of shape {(rows, half * 2 // BLOCK)}, neither padded nor swizzled.",
            )
        amax = amax_of_scale_2(weight_scale_2.reshape(()), largest_scale)
        return QuantizedNVFP4(
            weight.view(torch.uint8), weight_scale, (1, BLOCK), amax=amax, source=torch.Size((rows, 2 * half)),
            largest_scale=largest_scale,
        )  # fmt: skip


def weight_scale_2(amax: torch.Tensor, largest_scale: int = 448) -> torch.Tensor:
    """Compute ``amax / (6 * 448)``, divided as ModelOpt does."""
    return torch.div(amax, amax.new_full((), _LARGEST * largest_scale, dtype=torch.float32))


def amax_of_scale_2(scale_2: torch.Tensor, largest_scale: int = 448) -> torch.Tensor:
    """Return the amax that has this ``weight_scale_2``: the way back, exact for every number that the way there makes.

    Rounding twice may end at a neighbour; then the neighbours are tried. A number that no amax makes gets the nearest.
    """
    around = scale_2.float() * (_LARGEST * largest_scale)
    for amax in (around, torch.nextafter(around, torch.zeros_like(around)), torch.nextafter(around, around * 2)):
        around = torch.where(weight_scale_2(amax, largest_scale) == scale_2, amax, around)
    return around


def magnitude_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the FP32 values of codes without their signs: ``code / 2`` on the first grid, and steeper on the next
    two."""
    code = (codes & 7).float()
    return torch.maximum(torch.maximum(code / 2, code - 2), code * 2 - 8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack the codes of a matrix two a byte, the even column in the lower half."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes of two codes into one code a byte."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def turn(packed: torch.Tensor) -> torch.Tensor:
    """Turn packed codes [M, K/2] into [K, M/2]."""
    return pack(unpack(packed).t())


def turn_scales(scale: torch.Tensor) -> torch.Tensor:
    """Turn the scales of 16x16 blocks, each there for its 16 rows, [M, K/16] into [K, M/16]."""
    bytes_ = scale.view(torch.uint8)[::BLOCK].t().repeat_interleave(BLOCK, 0)
    return bytes_.contiguous().view(scale.dtype)


def hadamard(x: torch.Tensor, signs: tuple[float, ...] = SIGNS) -> torch.Tensor:
    """Compute ``x @ (signs * H) / 4`` on every 16 values of a row, in FP32: in four steps of sums and differences.

    Sums of 16 BF16 values of like size are exact in FP32, in any order; of others this order is the specification.
    """
    blocks = x.float().view(-1, BLOCK) * (torch.tensor(signs, dtype=torch.float32, device=x.device) / 4)
    return _sums_and_differences(blocks).view(x.shape)


def hadamard_back(x: torch.Tensor, signs: tuple[float, ...] = SIGNS) -> torch.Tensor:
    """Undo :func:`hadamard`: H is its own inverse, but for a factor of 16."""
    blocks = _sums_and_differences(x.float().reshape(-1, BLOCK))
    return (blocks * (torch.tensor(signs, dtype=torch.float32, device=x.device) / 4)).view(x.shape)


def _sums_and_differences(blocks: torch.Tensor) -> torch.Tensor:
    for apart in (1, 2, 4, 8):
        pairs = blocks.view(len(blocks), BLOCK // (2 * apart), 2, apart)  # of no values, too
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        blocks = torch.stack([first + second, first - second], 2).view(len(blocks), BLOCK)
    return blocks


def _reciprocal(number: float) -> torch.Tensor:
    return torch.reciprocal(torch.tensor(number, dtype=torch.float32))
