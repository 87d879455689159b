"""Quantize values to codes and scales: one function for every operand of every recipe.

A tensor is cut into tiles, and each tile shares one scale:

    amax       = max |x| over the tile
    scale      = max_of_format / amax          by one of the rules in ``scales.py``
    code       = cast(x * scale)               nearest, ties to even, saturating (``formats.py``)
    scale_inv  = 1 / scale                     stored beside the codes: value = code * scale_inv

The tile is what tells the recipes apart:

    delayed, tensorwise   the whole tensor
    blockwise             128x128 for weights, 1x128 for inputs and gradients
    mxfp8                 1x32
    nvfp4                 1x16 or 16x16, beneath a scale of the tensor: ``nvfp4.py``

:func:`quantize_reference` is the specification, in plain torch. :func:`quantize` checks its arguments and runs the
compiled kernel of the device, which equals the specification to the bit, or the specification where there is no
kernel. The trade-off: the reference makes several passes over memory and several copies; it is written to be read.

The edges are those of TE's kernels:

    ragged edges         padded with zeros, which change no amax and therefore no scale
    tile of zeros, NaN   amax 0, scale 1
    an infinity          amax infinite, scale 1; the infinity saturates to the format's largest value
    NaN                  stays NaN, and does not enter an amax
"""

from __future__ import annotations

import torch

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.numerics import kernels, nvfp4, scales
from nemo_fp8.numerics.formats import FP32_MAX, Format, cast, decode_e8m0, format_of
from nemo_fp8.numerics.kernels import SOURCES, Result, Tile
from nemo_fp8.numerics.quantized import Quantized, as_matrix, check_usage
from nemo_fp8.numerics.statistics import measure

STRIP = 1 << 22
"""Elements to quantize at a time where more is done with the codes, so that they still lie in a cache."""


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
    amax: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Quantized:
    """Quantize ``x`` as ``operand`` says.

    x            BF16, FP16 or FP32; leading dimensions are flattened where tiles have rows and columns
    usage        ``row`` if the GEMM contracts the columns of ``x``, ``col`` if it contracts the rows
    scale        multiply with this one scale of the whole tensor instead of computing it (delayed scaling)
    convention   ``te`` or ``deepgemm``: which FP32 division makes the scale, see ``scales.py``
    epsilon      a lower bound for amaxes; no kernel has one, so the reference runs
    statistics   count underflow, saturation and errors along with the cast
    amax         for E2M1 operands alone: take this amax of the tensor, see :func:`nemo_fp8.numerics.nvfp4.quantize`
    generator    for E2M1 operands alone: what stochastic rounding draws from

    An E2M1 operand gives a :class:`~nemo_fp8.numerics.nvfp4_tensor.QuantizedNVFP4`; its conventions are ``te`` and
    ``vllm``.

    Raises PrecisionError if ``x`` has another dtype, lacks rows and columns for its tiles, or if the operand, the
    scale and the convention do not go together.
    """
    _check_kinds(x, operand, scale, amax, epsilon)
    if operand.format == "e2m1":
        _check_fp4(x, operand, scale, epsilon)
        return nvfp4.quantize(
            x, operand, usage=usage, amax=amax, convention=convention, statistics=statistics, generator=generator
        )
    _check_fp8(operand, amax, generator)
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
    epsilon: float = 0.0,
    statistics: bool = False,
) -> Quantized:
    """Quantize ``x`` into given memory: an engine's parameter, one shard of a fused weight, a reused buffer.

    ``codes`` has the shape of ``x``; it may be a slice of rows or of columns of a larger matrix. ``scale_inv`` has one
    element for each tile of ``x``, with any strides. Both are written once and never read. The other arguments and
    what is raised are those of :func:`quantize`; memory of a wrong shape or dtype, or that overlaps ``x``, is refused.
    """
    _check_kinds(x, operand, scale, None, epsilon)
    if operand.format == "e2m1":
        raise PrecisionError(
            "Given memory for an E2M1 operand.",
            "Its codes lie two a byte beside an amax, which this memory has no place for.",
            "Use quantize(), and copy its data and scale_inv.",
        )
    tile = _check(x, operand, usage, scale, convention)
    out = (codes, scale_inv)
    result = None
    if epsilon == 0.0:
        result = kernels.quantize(x, tile, operand.format, operand.scale, convention, statistics, scale, out)
    if result is None:
        data, inverse, stats = quantize_reference(
            x, tile, format_of(operand.format), operand.scale, convention, statistics, epsilon=epsilon, scale=scale
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
    generator: torch.Generator | None = None,
) -> tuple[Quantized, Quantized]:
    """Quantize ``x`` for both usages, as (row, col). The arguments are those of :func:`quantize`."""

    def cast_for(usage: str) -> Quantized:
        return quantize(
            x, operand, usage=usage, scale=scale, convention=convention, statistics=statistics, generator=generator
        )

    # A square tile, or the whole tensor, is the same tile for both usages, so both share one set of codes.
    row = cast_for("row")
    square = operand.block is None or operand.block[0] == operand.block[1]
    return row, row.used_as("col") if square else cast_for("col")


def tile_of(operand: Operand, usage: str) -> Tile:
    """Return the tile as (rows, columns) of the data: the operand's block, transposed for usage ``col``."""
    if operand.block is None:
        return None
    rows, contracted = operand.block
    return (rows, contracted) if usage == "row" else (contracted, rows)


# ---------------------------------------------------------------------- the specification


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
    """Compute codes, scale_inv and statistics (None unless asked for) in plain torch. Tests hold every kernel to it.

    Codes have the shape of ``x``; scale_inv has one element for each tile, and no dimension for a whole tensor. The
    arguments are those of :func:`quantize`, unchecked, with the operand spelled out as tile, format and scale kind.
    """
    tiles = _tiles(x, tile)  # [tile rows, rows, tile columns, columns]
    amax = amax_of_tiles(x, tiles, tile) if scale is None or statistics else None
    if scale is not None:
        scale = scale.detach().to(x.device, torch.float32).reshape(tiles.shape[0], tiles.shape[2])
        scale_inv = torch.reciprocal(scale)
    else:
        assert amax is not None
        # A tiny amax makes the quotient overflow. TE then takes the largest finite value: that of the source's dtype
        # for a tile, that of FP32 for a whole tensor.
        value_for_inf = FP32_MAX if tile is None else torch.finfo(x.dtype).max
        scale, scale_inv = find_scales(amax, format, scale_kind, convention, epsilon, value_for_inf)
    # The scale keeps its dimensions, so that torch promotes the product to FP32; a 0-dim scale would leave it in BF16.
    scaled = tiles * scale[:, None, :, None]
    data = cast(scaled, format)
    stats = None
    if statistics:
        assert amax is not None
        codes, decoded = data.view(torch.uint8) & 0x7F, data.to(torch.float32)
        stats = measure(tiles, scaled, codes, decoded, amax, scale_inv, _elements(x, tile), format)
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
    """Compute the scales of amaxes: ``scale`` in FP32, and ``scale_inv`` as it is stored.

    ``scale_kind`` is ``fp32``, ``pow2`` or ``e8m0``; ``value_for_inf`` replaces a scale that overflows FP32. Raises
    PrecisionError if the kind is unknown.
    """
    if scale_kind not in scales.SCALE_KINDS:
        raise PrecisionError([unknown("scale kind", scale_kind, scales.SCALE_KINDS)])
    if scale_kind == "e8m0":
        code = scales.e8m0_from_amax(amax if epsilon == 0.0 else amax.clamp_min(epsilon), format)
        # scale_inv = 2**(code - 127), so scale = 2**(127 - code), whose code is 254 - code. Code 255 is NaN.
        inverse = torch.where(code == 255, float("nan"), decode_e8m0((254 - code.int()).clamp_min(0).to(torch.uint8)))
        return inverse, code.view(torch.float8_e8m0fnu)
    if convention == "deepgemm":
        # DeepGEMM divides amax / max, so scale_inv is the rounded quotient and scale its reciprocal.
        scale_inv = scales.deepgemm_scale_inv(amax, format, pow2=scale_kind == "pow2")
        return torch.reciprocal(scale_inv), scale_inv
    scale = scales.scale_from_amax(
        amax, format, epsilon=epsilon, pow2=scale_kind == "pow2", value_for_inf=value_for_inf
    )
    return scale, torch.reciprocal(scale)


def amax_of_tiles(x: torch.Tensor, tiles: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return the amax of each tile, [tile rows, tile columns]; ``tiles`` is ``x`` cut up by ``tile``."""
    return scales.amax_of(x).reshape(1, 1) if tile is None else scales.amax_of(tiles, (1, 3))


# ---------------------------------------------------------------------- tiles


def _tiles(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """View ``x`` as [tile rows, rows, tile columns, columns], padded with zeros; a whole tensor is one 1xN tile.

    A 5x6 matrix in 2x4 tiles is padded to 6x8 and viewed as [3, 2, 2, 4].
    """
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
    """Undo :func:`_tiles`: codes in the shape of ``x``, without the padding."""
    if tile is None:
        return data.reshape(x.shape)
    k = x.shape[-1]
    m = x.numel() // k if k else x.shape[:-1].numel()
    matrix = data.view(torch.uint8).reshape(data.shape[0] * data.shape[1], data.shape[2] * data.shape[3])
    return matrix[:m, :k].reshape(x.shape).contiguous().view(data.dtype)


def _elements(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Count the elements of ``x`` in each tile, [tile rows, tile columns]; padding does not count."""
    if tile is None:
        return torch.tensor([[x.numel()]], device=x.device)
    rows, columns = tile
    m, k = x.shape[:-1].numel(), x.shape[-1]
    if m % rows == 0 and k % columns == 0:
        return torch.tensor(rows * columns, device=x.device).expand(m // rows, k // columns)
    # In tiles of 128, 300 rows give min(300 - [0, 128, 256], 128) = [128, 128, 44].
    high = torch.arange(0, m, rows, device=x.device).sub_(m).neg_().clamp_max_(rows)
    wide = torch.arange(0, k, columns, device=x.device).sub_(k).neg_().clamp_max_(columns)
    return high[:, None] * wide[None, :]


# ---------------------------------------------------------------------- checks


def _check_kinds(x: object, operand: object, scale: object, amax: object, epsilon: float) -> None:
    """Raise PrecisionError for what is no tensor, no operand, or no bound: nothing else can be asked of it."""
    for name, value in (("x", x), ("scale", scale), ("amax", amax)):
        if value is None and name != "x":
            continue
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_nested:
            kind = value.layout if isinstance(value, torch.Tensor) and not value.is_nested else type(value).__name__
            raise PrecisionError(
                f"Cannot quantize with {name}={kind}.",
                "It is no tensor whose values lie in memory in rows.",
                "Give a torch.Tensor, of a list or an array torch.tensor(...), of a sparse one x.to_dense().",
            )
    if not isinstance(operand, Operand) or not _is_tile(operand.block):
        raise PrecisionError(
            f"Cannot quantize by {operand!r}.",
            "An operand says the format, the scale, and the block (rows, columns) of it, or None for the tensor.",
            "Take precision.operand('weight'), or write Operand('e4m3', (128, 128), 'fp32').",
        )
    if not isinstance(epsilon, (int, float)) or not 0 <= epsilon < FP32_MAX:
        raise PrecisionError(
            f"epsilon={epsilon!r}.", "It is the least that an amax may be.", "Give a number from 0 on, or leave it out."
        )


def _is_tile(block: object) -> bool:
    if block is None:
        return True
    return isinstance(block, tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)


def _check(x: torch.Tensor, operand: Operand, usage: str, scale: torch.Tensor | None, convention: str) -> Tile:
    """Return the tile; raise PrecisionError if the arguments of a quantization do not go together."""
    check_usage(usage)
    scales.check_convention(convention)
    tile = tile_of(operand, usage)
    _check_source(x, tile)
    _check_scale(operand, scale, convention)
    return tile


def _check_fp4(x: torch.Tensor, operand: Operand, scale: torch.Tensor | None, epsilon: float) -> None:
    """Raise PrecisionError for a source or for arguments that E2M1 has no use for."""
    _check_source(x, operand.block)
    if scale is not None or epsilon:
        raise PrecisionError(
            "A given scale, or an epsilon, for an E2M1 operand.",
            "Its scales follow from the tensor's amax, which has no lower bound.",
            "Give amax=, or leave both out.",
        )


def _check_fp8(operand: Operand, amax: torch.Tensor | None, generator: torch.Generator | None) -> None:
    """Raise PrecisionError for what only E2M1 operands have."""
    only = (operand.hadamard, operand.stochastic, operand.row_scaled, operand.four_over_six is not None)
    if amax is not None or generator is not None or any(only):
        raise PrecisionError(
            f"An {operand.format.upper()} operand with what belongs to E2M1: {operand.words()}.",
            "FP8 is rounded to the nearest code, with scales of its tiles alone.",
            "Use an operand of format e2m1, and give amax= and generator= to none else.",
        )


def _check_source(x: torch.Tensor, tile: Tile) -> None:
    if x.dtype not in SOURCES:
        raise PrecisionError(
            f"Cannot quantize a {x.dtype} tensor.",
            "Codes are defined from BF16, FP16 and FP32 values; anything else would be rounded twice, or is FP8 "
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
