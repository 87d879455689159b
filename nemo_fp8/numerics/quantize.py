"""From values to FP8 codes and scales: one function for every operand of every recipe.

    scale = f(amax of the tile),  code = cast(x * scale),  scale_inv = 1 / scale

``quantize`` checks, and picks the fast kernel of the device where there is one; :func:`quantize_reference` is
the specification in torch, which every kernel equals to the bit. A ragged edge is padded with zeros, which can
change no amax, so no other tile's scale either. A tile without any value (all zeros, or nothing but NaN) has
scale 1; an infinite amax has scale 1 too, and the infinity becomes the format's largest value; NaN stays NaN
and moves no scale. All of this is what TE's kernels do.
"""

from __future__ import annotations

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.numerics import kernels, scales
from nemo_fp8.numerics.formats import FP32_MAX, Format, cast, decode_e8m0, format_of
from nemo_fp8.numerics.quantized import Quantized, as_matrix, check_usage
from nemo_fp8.numerics.statistics import Statistics, measure

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
Tile = tuple[int, int] | None
Result = tuple[torch.Tensor, torch.Tensor, Statistics | None]


@torch.no_grad()
def quantize(
    x: torch.Tensor,
    operand: Operand,
    *,
    usage: str = "row",
    scale: torch.Tensor | None = None,
    convention: str = "te",
    epsilon: float = 0.0,
    statistics: bool = False,
) -> Quantized:
    """``x`` as ``operand`` says, for a GEMM that contracts its columns (usage ``row``) or its rows (``col``).

    ``scale`` gives the factor instead of finding it (delayed scaling); ``epsilon`` is a floor for amaxes.
    """
    tile = _check(x, operand, usage, scale, convention)
    result = None
    if epsilon == 0.0:
        result = kernels.quantize(x, tile, operand.format, operand.scale, convention, statistics, scale)
    if result is None:
        format = format_of(operand.format)
        result = quantize_reference(
            x, tile, format, operand.scale, convention, statistics, epsilon=epsilon, scale=scale
        )
    data, scale_inv, stats = result
    return Quantized(data, scale_inv, tile, usage, stats)


@torch.no_grad()
def quantize_into(
    x: torch.Tensor,
    operand: Operand,
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    usage: str = "row",
    scale: torch.Tensor | None = None,
    convention: str = "te",
    statistics: bool = False,
) -> Quantized:
    """:func:`quantize` into memory that is there: an engine's parameter, one shard of a fused weight, a buffer that is
    used again.

    ``codes`` has the shape of ``x``; its rows may lie apart, so a slice of rows or of columns will do. ``scale_inv``
    has the shape of the scales, one for each tile of ``x``, and may lie anywhere. Both are written once, and read
    never.
    """
    tile = _check(x, operand, usage, scale, convention)
    out = (codes, scale_inv)
    result = kernels.quantize(x, tile, operand.format, operand.scale, convention, statistics, scale, out)
    if result is None:
        data, inverse, stats = quantize_reference(
            x, tile, format_of(operand.format), operand.scale, convention, statistics, scale=scale
        )
        result = (codes.copy_(data), scale_inv.copy_(inverse.reshape(scale_inv.shape)), stats)
    return Quantized(codes, scale_inv, tile, usage, result[2])


def quantize_pair(
    x: torch.Tensor,
    operand: Operand,
    *,
    scale: torch.Tensor | None = None,
    convention: str = "te",
    statistics: bool = False,
) -> tuple[Quantized, Quantized]:
    """``x`` for both usages, row and col. One pass where the tile is square or the whole tensor."""
    row = quantize(x, operand, scale=scale, convention=convention, statistics=statistics)
    if operand.block is None or operand.block[0] == operand.block[1]:
        return row, row.used_as("col")
    return row, quantize(x, operand, usage="col", scale=scale, convention=convention, statistics=statistics)


def tile_of(operand: Operand, usage: str) -> Tile:
    """The tile as it lies on the data: the contract's block, turned round for usage ``col``."""
    if operand.block is None:
        return None
    rows, contracted = operand.block
    return (rows, contracted) if usage == "row" else (contracted, rows)


def quantize_reference(
    x: torch.Tensor,
    tile: Tile,
    format: Format,
    scale_kind: str,
    convention: str = "te",
    statistics: bool = False,
    *,
    epsilon: float = 0.0,
    scale: torch.Tensor | None = None,
) -> Result:
    """Codes, scale_inv and statistics in plain torch: the specification, and the oracle of every kernel."""
    tiles = _tiles(x, tile)
    amax = amax_of_tiles(x, tiles, tile) if scale is None or statistics else None
    if scale is not None:
        scale = scale.detach().to(x.device, torch.float32).reshape(tiles.shape[0], tiles.shape[2])
        scale_inv = torch.reciprocal(scale)
    else:
        assert amax is not None
        # Where the scale overflows, TE takes the largest value of the source's type for tiles, FP32's for tensors.
        value_for_inf = FP32_MAX if tile is None else torch.finfo(x.dtype).max
        scale, scale_inv = find_scales(amax, format, scale_kind, convention, epsilon, value_for_inf)
    scaled = tiles * scale[:, None, :, None]  # FP32: a scale of one dimension or more is wider than BF16
    data = cast(scaled, format)
    stats = None
    if statistics:
        assert amax is not None
        stats = measure(tiles, scaled, data, amax, scale_inv, _elements(x, tile), format)
        stats = stats.whole() if tile is None else stats
    return _untile(data, x, tile), scale_inv.reshape(()) if tile is None else scale_inv, stats


def find_scales(
    amax: torch.Tensor,
    format: Format,
    scale_kind: str,
    convention: str = "te",
    epsilon: float = 0.0,
    value_for_inf: float = FP32_MAX,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``scale`` (FP32) and ``scale_inv`` as it is stored, from amaxes."""
    if scale_kind not in scales.SCALE_KINDS:
        raise PrecisionError([unknown("scale kind", scale_kind, scales.SCALE_KINDS)])
    if scale_kind == "e8m0":
        code = scales.e8m0_from_amax(amax if epsilon == 0.0 else amax.clamp_min(epsilon), format)
        # 254 - code is the exponent of the reciprocal; the code of NaN has none.
        inverse = torch.where(code == 255, float("nan"), decode_e8m0((254 - code.int()).clamp_min(0).to(torch.uint8)))
        return inverse, code.view(torch.float8_e8m0fnu)
    if convention == "deepgemm":
        scale_inv = scales.deepgemm_scale_inv(amax, format, pow2=scale_kind == "pow2")
        return torch.reciprocal(scale_inv), scale_inv
    scale = scales.scale_from_amax(
        amax, format, epsilon=epsilon, pow2=scale_kind == "pow2", value_for_inf=value_for_inf
    )
    return scale, torch.reciprocal(scale)


def amax_of_tiles(x: torch.Tensor, tiles: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The amax of each tile, [tile rows, tile columns]."""
    return scales.amax_of(x).reshape(1, 1) if tile is None else scales.amax_of(tiles, (1, 3))


# ---------------------------------------------------------------------- tiles


def _tiles(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """``x`` as [tile rows, rows, tile columns, columns], padded with zeros; a whole tensor is one tile of one row."""
    if tile is None:
        return x.reshape(1, 1, 1, -1)
    rows, columns = tile
    matrix = as_matrix(x)
    m, k = matrix.shape
    if m % rows or k % columns:
        matrix = torch.nn.functional.pad(matrix, (0, -k % columns, 0, -m % rows))
        m, k = matrix.shape
    return matrix.view(m // rows, rows, k // columns, columns)


def _untile(data: torch.Tensor, x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Codes in the shape of ``x``, without the padding."""
    if tile is None:
        return data.reshape(x.shape)
    k = x.shape[-1]
    m = x.numel() // k if k else x.shape[:-1].numel()
    matrix = data.view(torch.uint8).reshape(data.shape[0] * data.shape[1], data.shape[2] * data.shape[3])
    return matrix[:m, :k].reshape(x.shape).contiguous().view(data.dtype)


def _elements(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """How many elements of ``x`` lie in each tile."""
    if tile is None:
        return torch.tensor([[x.numel()]], device=x.device)
    rows, columns = tile
    m, k = x.shape[:-1].numel(), x.shape[-1]
    if m % rows == 0 and k % columns == 0:
        return torch.tensor(rows * columns, device=x.device).expand(m // rows, k // columns)
    high = torch.arange(0, m, rows, device=x.device).sub_(m).neg_().clamp_max_(rows)
    wide = torch.arange(0, k, columns, device=x.device).sub_(k).neg_().clamp_max_(columns)
    return high[:, None] * wide[None, :]


# ---------------------------------------------------------------------- checks


def _check(x: torch.Tensor, operand: Operand, usage: str, scale: torch.Tensor | None, convention: str) -> Tile:
    """The tile, where everything that was asked for fits together."""
    check_usage(usage)
    scales.check_convention(convention)
    tile = tile_of(operand, usage)
    _check_source(x, tile)
    _check_scale(operand, scale, convention)
    return tile


def _check_source(x: torch.Tensor, tile: Tile) -> None:
    if x.dtype not in SOURCES:
        raise PrecisionError(
            f"Cannot quantize a {x.dtype} tensor.",
            "FP8 codes are defined from BF16, FP16 and FP32 values; anything else would be rounded twice, or is FP8 "
            "already.",
            "Convert it first (x.bfloat16()), or dequantize() what is quantized.",
        )
    if tile is not None and x.dim() < 2:
        raise PrecisionError(
            f"Cannot quantize a {x.dim()}-D tensor in {tile[0]}x{tile[1]} tiles.",
            "A tile has rows and columns.",
            "Reshape it to a matrix, or keep it in the compute dtype (biases and norms are).",
        )


def _check_scale(operand: Operand, scale: torch.Tensor | None, convention: str) -> None:
    if operand.delayed and scale is None:
        raise PrecisionError(
            "A delayed operand without a scale.",
            "Delayed scaling takes its scale from the amaxes of earlier steps, which the tensor does not hold.",
            "Pass scale=, or quantize through nemo_fp8.numerics.delayed.DelayedScaling.",
        )
    if scale is not None and (operand.block is not None or scale.numel() != 1):
        raise PrecisionError(
            f"A given scale of shape {tuple(scale.shape)} for tiles {operand.block}.",
            "Only a scale for the whole tensor can be given; scales of tiles are found from their amaxes.",
            "Leave scale= out, or use an operand with block=None.",
        )
    if convention == "deepgemm" and operand.scale == "e8m0":
        raise PrecisionError(
            "convention='deepgemm' with E8M0 scales.",
            "MX formats define their own scale: amax over the format's largest value, rounded up.",
            "Leave convention= out, or use an operand with fp32 or pow2 scales.",
        )
