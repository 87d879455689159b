"""NVFP4: E2M1 codes, an E4M3 scale for 16 of them, and one FP32 amax for the tensor beneath.

    encode = 448 * 6 / amax(tensor)                   the scale that makes the largest block's scale 448
    scale  = e4m3(amax(block) * (encode * (1 / 6)))   one byte for a block
    code   = e2m1(x / (scale / encode))               two to a byte
    value  = code * scale * amax(tensor) / (448 * 6)

E2M1 knows 0, 0.5, 1, 1.5, 2, 3, 4 and 6: three grids, of steps 0.5 (below 2), 1 (below 4) and 2. Its variants:

    16x16            one scale for a square, so that a weight has the same values in both of its GEMMs
    Hadamard         columns are quantized after ``x @ (signs * H) / 4``, which spreads an outlier over its block
    stochastic       a value becomes one of its two neighbours by chance, so that the mean stays
    row-scaled       each row has an amax of its own
    4 over 6         a block's largest value becomes 4 or 6, whichever loses less: between 4 and 6 there is no code
    convention       ``te``, or ``vllm``, which multiplies in another order: an ulp before the cast to E4M3

:func:`cast_reference` is the specification, in plain torch; the kernels of the device equal it to the bit. A matrix is
cast along its rows. For the GEMM that contracts its rows (usage ``col``) it is turned first, and lies turned.

The edges are those of TE's kernels, which its Python shares but for NaN:

    amax 0                encode 1
    amax infinite         encode 1; what is multiplied with the amax is infinite or NaN
    a tiny amax           encode overflows, and is the largest FP32 number; vLLM's is infinite beneath 2688 * 2**-128
    an infinity           its block has the largest scale, and its code is 6
    NaN                   enters no amax; its code is +6. TE's Python makes NaN of the whole tensor, vLLM's of the block
    -0, -0.1              +0, -0
"""

from __future__ import annotations

import functools
from dataclasses import fields

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.numerics import kernels, scales
from nemo_fp8.numerics.formats import FP32_MAX, cast, format_of
from nemo_fp8.numerics.nvfp4_tensor import (
    BLOCK,
    SIGNS,
    QuantizedNVFP4,
    hadamard,
    magnitude_of,
    pack,
    unpack,
    weight_scale_2,
)
from nemo_fp8.numerics.quantized import as_matrix, check_usage
from nemo_fp8.numerics.statistics import Statistics, measure

FORMAT, SCALE = format_of("e2m1"), format_of("e4m3")
LARGEST = FORMAT.max
CONVENTIONS = ("te", "vllm")
ERRORS = ("mae", "mse")
_AT_ONCE = 1 << 18
"""The elements that statistics are counted of at a time."""


@torch.no_grad()
def quantize(
    x: torch.Tensor,
    operand: Operand,
    *,
    usage: str = "row",
    amax: torch.Tensor | None = None,
    convention: str = "te",
    statistics: bool = False,
    generator: torch.Generator | None = None,
) -> QuantizedNVFP4:
    """Quantize ``x`` as an E2M1 ``operand`` says; :func:`nemo_fp8.numerics.quantize` comes here.

    amax         take this instead of the largest magnitude: of a tensor that ``x`` is a shard of, or from calibration.
                 One number; where rows are scaled, one for each row that is contracted
    convention   ``te`` or ``vllm``: the order of the multiplications
    generator    of the chance in stochastic rounding; torch's own by default

    Raises PrecisionError if the operand is none that there is, or if ``x`` does not divide into its blocks.
    """
    check(operand, convention)
    check_usage(usage)
    check_source(x, operand, usage)
    matrix, signs = as_matrix(x.detach()), SIGNS if transforms(operand, usage) else None
    matrix = matrix if usage == "row" else matrix.t()
    amax = amax_of(matrix, operand, signs) if amax is None else _known(amax, matrix, operand)
    codes, found = cast_rows(matrix, operand, amax, signs=signs, convention=convention, generator=generator)
    data = codes.view(*x.shape[:-1], x.shape[-1] // 2) if usage == "row" else codes
    quantized = QuantizedNVFP4(
        data, found, operand.block, usage, amax=amax, source=x.shape, largest_scale=operand.largest_scale,
        hadamard=transforms(operand, usage),
    )  # fmt: skip
    if not statistics:
        return quantized
    return quantized.with_statistics(_statistics(along_rows(x, operand, usage), operand, quantized))


def along_rows(x: torch.Tensor, operand: Operand, usage: str) -> torch.Tensor:
    """Return the matrix whose rows are cast: ``x`` with its leading dimensions flattened, turned for usage ``col``, and
    transformed if the operand says so."""
    matrix = as_matrix(x.detach())
    return matrix if usage == "row" else transformed(matrix.t(), SIGNS if operand.hadamard else None)


def transforms(operand: Operand, usage: str) -> bool:
    """Return whether this usage is quantized after the Hadamard transform."""
    return operand.hadamard and usage == "col"


def transformed(matrix: torch.Tensor, signs: tuple[float, ...] | None) -> torch.Tensor:
    """Return the matrix row by row, in one piece; with ``signs`` after the Hadamard transform, which is rounded to the
    matrix's dtype."""
    matrix = matrix.contiguous()
    return matrix if signs is None else hadamard(matrix, signs).to(matrix.dtype)


def amax_of(matrix: torch.Tensor, operand: Operand, signs: tuple[float, ...] | None = None) -> torch.Tensor:
    """Return the largest magnitude of the matrix (0-dim) or, where rows are scaled, of each of its rows; NaN is
    skipped. With ``signs`` it is that of the transformed matrix."""
    if operand.row_scaled:
        return scales.amax_of(transformed(matrix, signs), (1,))
    if signs is not None:
        found = kernels.transformed_amax(matrix, signs)
        if found is not None:
            return found
        matrix = transformed(matrix, signs)
    matrix = matrix.t() if matrix.stride(0) == 1 else matrix  # as it lies in memory
    found = kernels.amax(matrix)
    return scales.amax_of(matrix) if found is None else found


def cast_rows(
    matrix: torch.Tensor,
    operand: Operand,
    amax: torch.Tensor,
    *,
    signs: tuple[float, ...] | None = None,
    convention: str = "te",
    generator: torch.Generator | None = None,
    scaled_errors: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a matrix along its rows as :func:`cast_reference` does, with ``signs`` after the Hadamard transform: with
    the kernel of its device, if there is one, else with that. The matrix may lie turned (``x.t()``). ``out`` is memory
    for codes and scales, contiguous."""
    encode = encode_scale(amax.float(), operand.largest_scale, convention).reshape(-1)
    chance = chance_of(matrix, generator) if operand.stochastic else None
    choice = None
    if operand.four_over_six is not None:
        choice = kernels.FourOverSix(operand.four_over_six, amax, LARGEST * operand.largest_scale, scaled_errors)
    tile_rows = 1 if operand.block == (1, BLOCK) else BLOCK
    cast_with = functools.partial(
        kernels.quantize_fp4, encode=encode, tile_rows=tile_rows, convention=convention, chance=chance,
        four_over_six=choice, out=out,
    )  # fmt: skip
    found = cast_with(matrix, signs=signs)
    if found is not None:
        return found
    if signs is not None or not matrix.is_contiguous():  # perhaps there is a kernel for it row by row
        matrix = transformed(matrix, signs)
        found = cast_with(matrix)
    if found is None:
        found = cast_reference(matrix, operand, amax, convention=convention, chance=chance, scaled_errors=scaled_errors)
        for there, made in zip(out or (), found, strict=False):
            there.copy_(made)
    return out or found


def chance_of(matrix: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw a number for each value, uniform between 0 and 1: four numbers of 16 bits from each of 64 that torch's
    generator draws, in less than half of the time of ``torch.rand``. A neighbour is favoured by at most 2**-17."""
    drawn = torch.empty(-(-matrix.numel() // 4), dtype=torch.int64, device=matrix.device)
    bits = drawn.random_(-(2**63), None, generator=generator).view(torch.int16)[: matrix.numel()]
    return bits.view(matrix.shape).float().mul_(2.0**-16).add_(0.5 + 2.0**-17)


# ---------------------------------------------------------------------- the specification


def cast_reference(
    matrix: torch.Tensor,
    operand: Operand,
    amax: torch.Tensor,
    *,
    convention: str = "te",
    chance: torch.Tensor | None = None,
    scaled_errors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [rows, columns / 2], two a byte, and E4M3 scales [rows, columns / 16] of a matrix.

    The scale of a 16x16 block is there for each of its rows. ``amax`` is one number or one for each row. A stochastic
    operand rounds by ``chance``, one number for each value, uniform from 0 to 1; torch draws those that are not given.
    ``scaled_errors`` lets 4 over 6 compare ``code * scale`` with ``x * encode``, as TE does when its fast math is
    asked for, instead of values.
    """
    rows, columns = matrix.shape
    blocks = matrix.float().view(rows, columns // BLOCK, BLOCK)
    most = largest_of_tiles(scales.amax_of(blocks, (2,)), operand)
    encode = encode_scale(amax.float(), operand.largest_scale, convention).reshape(-1, 1)
    if operand.four_over_six is not None:
        codes, found = _four_over_six(blocks, most, encode, amax.float().reshape(-1, 1), operand, scaled_errors)
    else:
        found = cast(block_scale(most, encode, convention), SCALE)
        scaled = blocks * factor(found.float(), encode, convention)[:, :, None]
        if operand.stochastic:
            chance = chance_of(matrix) if chance is None else chance
            codes = stochastic(scaled, chance.view(scaled.shape))
        else:
            codes = nearest(scaled)
    return pack(codes.view(rows, columns)), found


def encode_scale(amax: torch.Tensor, largest_scale: int = 448, convention: str = "te") -> torch.Tensor:
    """Return the tensor's own scale, 1 where its amax is 0 or infinite. vLLM's is the reciprocal of the FP32 number
    that a checkpoint holds."""
    if convention == "vllm":
        encode = torch.reciprocal(weight_scale_2(amax, largest_scale))
    else:
        encode = torch.div(largest_scale * LARGEST, amax)
    return torch.where((encode == 0) | (amax == 0), 1.0, encode.clamp_max(FP32_MAX))


def block_scale(amax: torch.Tensor, encode: torch.Tensor, convention: str = "te") -> torch.Tensor:
    """Return a block's scale in FP32, before it is rounded to E4M3."""
    sixth = torch.reciprocal(torch.tensor(LARGEST, dtype=torch.float32))
    scale = encode * (amax * sixth) if convention == "vllm" else amax * (encode * sixth)
    return scale.clamp_max(FP32_MAX)


def factor(scale: torch.Tensor, encode: torch.Tensor, convention: str = "te") -> torch.Tensor:
    """Return what the values of a block are multiplied with, from its scale as E4M3 holds it.

    Where that is 0 the codes stand for nothing. TE's are those of the largest factor there is, vLLM's those of 1e-8.
    """
    decode = scale * torch.reciprocal(encode)
    if convention == "vllm":
        decode = torch.where(decode == 0, 1e8, decode)
    return torch.reciprocal(decode).clamp_max(FP32_MAX)


def largest_of_tiles(most: torch.Tensor, operand: Operand) -> torch.Tensor:
    """Return for the largest magnitude of every 16 values [rows, blocks] that of the tile that they lie in: themselves,
    or a square. Rows that fill no square are one."""
    if operand.block == (1, BLOCK):
        return most
    rows, blocks = most.shape
    squares = torch.nn.functional.pad(most, (0, 0, 0, -rows % BLOCK)).view(-(-rows // BLOCK), BLOCK, blocks).amax(1)
    return squares.repeat_interleave(BLOCK, 0)[:rows]


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Return the code of each value, one a byte: the nearest, ties to even, 6 for anything larger."""
    x = _within(x)
    steps, first = _steps(x)
    return _signed(x, torch.round(steps) + first)


def stochastic(x: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Return one of the two codes around each value by chance: as often the upper one as the value is near to it."""
    x = _within(x)
    steps, first = _steps(x)
    below = torch.floor(steps)
    return _signed(x, below + first + (chance < steps - below))


def _within(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST, LARGEST).nan_to_num(nan=LARGEST)


def _steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return magnitudes in steps of the grid that they lie in, and the code at which the grid counts from 0."""
    magnitude = x.abs()
    grid = (magnitude >= 2).int() + (magnitude >= 4).int()
    return torch.ldexp(magnitude, 1 - grid), 2 * grid


def _signed(x: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    return (magnitude + 8 * (x < 0)).to(torch.uint8)


def _four_over_six(
    blocks: torch.Tensor,
    most: torch.Tensor,
    encode: torch.Tensor,
    amax: torch.Tensor,
    operand: Operand,
    scaled_errors: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast every block in both ways and take the better one; 6 if neither is."""
    base = torch.div(most, torch.tensor(LARGEST, dtype=torch.float32)) * encode
    ways = []
    for scale in (base * 1.5, base):
        found = cast(scale, SCALE)
        codes = nearest(blocks * factor(found.float(), encode)[:, :, None])
        value = _decoded(codes) * found.float()[:, :, None]
        if scaled_errors:
            lost = value - blocks * encode[:, :, None]
        else:  # divided last, by a tensor, so that torch does not multiply with a reciprocal
            largest = torch.tensor(LARGEST * operand.largest_scale, dtype=torch.float32)
            lost = torch.div(value * amax[:, :, None], largest) - blocks
        ways.append((codes, found, _error(lost, operand)))
    (four, scale_4, error_4), (six, scale_6, error_6) = ways
    better = error_4 < error_6
    scale = torch.where(better, scale_4.view(torch.uint8), scale_6.view(torch.uint8)).view(SCALE.dtype)
    return torch.where(better[:, :, None], four, six), scale


def _error(lost: torch.Tensor, operand: Operand) -> torch.Tensor:
    """Sum up errors in the order of TE's kernel: one after the other in a row, and rows of a square pair by pair."""
    each = lost.square() if operand.four_over_six == "mse" else lost.abs()
    total = torch.zeros_like(each[:, :, 0])
    for i in range(BLOCK):
        total = total + each[:, :, i]
    if operand.block == (1, BLOCK):
        return total
    rows = len(total)
    squares = torch.nn.functional.pad(total, (0, 0, 0, -rows % BLOCK)).view(-1, BLOCK, total.shape[1])
    for half in (8, 4, 2, 1):
        squares = squares[:, :half] + squares[:, half : 2 * half]
    return squares.expand(-1, BLOCK, -1).reshape(-1, total.shape[1])[:rows]


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    magnitude = magnitude_of(codes)
    return torch.where(codes > 7, -magnitude, magnitude)


# ---------------------------------------------------------------------- statistics


def _statistics(matrix: torch.Tensor, operand: Operand, quantized: QuantizedNVFP4) -> Statistics:
    """Count for every 16 values what the cast did, as for FP8; rows of a square count by themselves."""
    decode = quantized.scale_inv_fp32
    counted = kernels.count_fp4(matrix, quantized.matrix, decode, FORMAT.saturates_above)
    if counted is None:
        counted = _counted(matrix, quantized.codes().view(matrix.shape), decode)
    most = largest_of_tiles(counted.pop("amax"), operand)
    return Statistics(FORMAT, elements=_sixteen(decode), scale_inv=decode, amax=most, **counted)


_COUNTED = [field.name for field in fields(Statistics) if field.name not in ("format", "elements", "scale_inv")]


def _counted(matrix: torch.Tensor, codes: torch.Tensor, decode: torch.Tensor) -> dict[str, torch.Tensor]:
    """Count in torch, some rows at a time, so that what is computed on the way stays in a cache."""
    rows, columns = matrix.shape
    step = max(1, _AT_ONCE // max(1, columns))
    strips = (slice(first, first + step) for first in range(0, max(1, rows), step))
    parts = [_count(matrix[strip], codes[strip], decode[strip]) for strip in strips]
    return {name: torch.cat([getattr(part, name) for part in parts]) for name in _COUNTED}


def _count(matrix: torch.Tensor, codes: torch.Tensor, decode: torch.Tensor) -> Statistics:
    rows, columns = matrix.shape
    tiles, codes = (tensor.reshape(rows, 1, columns // BLOCK, BLOCK) for tensor in (matrix, codes))
    scaled = tiles.float() * torch.reciprocal(decode).clamp_max(FP32_MAX)[:, None, :, None]
    most = scales.amax_of(tiles[:, 0].float(), (2,))
    return measure(tiles, scaled, codes & 7, _decoded(codes), most, decode, _sixteen(decode), FORMAT)


def totals(stack: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor, beneath: torch.Tensor) -> torch.Tensor:
    """Sum up what the casts of the matrices of a stack did: [matrices, TOTALS], as ``Statistics.totals`` of each does.
    A code stands for ``code * (scale_inv * beneath)``, with one FP32 number ``beneath`` for each matrix."""
    found = kernels.total_fp4(stack, codes, scale_inv, beneath, FORMAT.saturates_above)
    if found is not None:
        return found
    each = zip(stack, codes, scale_inv.float() * beneath.view(-1, 1, 1), strict=True)
    return torch.cat(
        [
            Statistics(FORMAT, _sixteen(decode), scale_inv=decode, **_counted(matrix, unpack(packed), decode)).totals()
            for matrix, packed, decode in each
        ]
    )


def _sixteen(decode: torch.Tensor) -> torch.Tensor:
    return torch.tensor(BLOCK, device=decode.device).expand(decode.shape)


# ---------------------------------------------------------------------- checks


def check(operand: Operand, convention: str = "te") -> None:
    """Raise PrecisionError for an E2M1 operand that nobody has arithmetic for."""
    if convention not in CONVENTIONS:
        raise PrecisionError([unknown("scale convention", convention, CONVENTIONS)])
    if operand.block not in ((1, BLOCK), (BLOCK, BLOCK)) or operand.scale != "e4m3" or operand.delayed:
        raise PrecisionError(
            f"An E2M1 operand in blocks of {operand.block} with {operand.scale} scales.",
            "NVFP4 has an E4M3 scale for 16 values in a row or for a square of 16x16, found from the values.",
            "Use block=(1, 16) or (16, 16), scale='e4m3' and delayed=False.",
        )
    if operand.four_over_six not in (None, *ERRORS):
        raise PrecisionError([unknown("error of 4 over 6", operand.four_over_six, ERRORS)])
    if operand.largest_scale not in (448, 256):
        raise PrecisionError([unknown("largest scale", str(operand.largest_scale), ("448", "256"))])
    for reason, holds in {
        "4 over 6 weighs the errors of nearest codes, and TE refuses it": operand.four_over_six is not None
        and (operand.stochastic or operand.hadamard),
        "a square's scale would have to serve 16 rows of different size": operand.row_scaled
        and operand.block != (1, BLOCK),
        "a square serves both GEMMs, of which one would contract transformed values": operand.hadamard
        and operand.block != (1, BLOCK),
        "only 4 over 6 leaves room above the largest scale": operand.largest_scale != 448
        and operand.four_over_six is None,
        "vLLM rounds to the nearest code and knows one amax": convention == "vllm"
        and (operand.stochastic or operand.hadamard or operand.row_scaled or operand.four_over_six is not None),
    }.items():
        if holds:
            raise PrecisionError(f"An E2M1 operand that contradicts itself: {operand.words()}.", reason, "Drop one.")


def check_source(x: torch.Tensor, operand: Operand, usage: str) -> None:
    """Raise PrecisionError if ``x`` does not divide into blocks, or cannot be transformed."""
    contracted = x.shape[-1] if usage == "row" else x.shape[:-1].numel()
    if contracted % BLOCK:
        raise PrecisionError(
            f"{contracted} {'columns' if usage == 'row' else 'rows'} are no whole blocks of {BLOCK}.",
            f"A GEMM in NVFP4 contracts {BLOCK} values with one scale, and two codes share a byte.",
            f"Pad the contracted dimension to a multiple of {BLOCK}, or keep this tensor in FP8 or BF16.",
        )
    if transforms(operand, usage) and x.dtype != torch.bfloat16:
        raise PrecisionError(
            f"A Hadamard transform of a {x.dtype} tensor.",
            "GPUs transform BF16 only, and round the result to it.",
            "Give x.bfloat16(), or an operand with hadamard=False.",
        )


def _known(amax: torch.Tensor, matrix: torch.Tensor, operand: Operand) -> torch.Tensor:
    wanted = (len(matrix),) if operand.row_scaled else ()
    if amax.numel() != (len(matrix) if operand.row_scaled else 1):
        raise PrecisionError(
            f"An amax of shape {tuple(amax.shape)} for a matrix of {len(matrix)} rows.",
            "A tensor has one amax, and one for each row where rows are scaled.",
            f"Give an amax of shape {wanted}.",
        )
    return amax.detach().to(matrix.device, torch.float32).reshape(wanted)
