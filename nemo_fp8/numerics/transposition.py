"""Measure how far the weight that the backward multiplies by is from the one that the forward used.

    fprop   y  = x  @ F.T      F: the weight's values as fprop reads them, in blocks along its columns
    dgrad   dx = dy @ B        B: the same weight as dgrad reads it, in blocks along its rows

dgrad contracts the other dimension than fprop, so a block of 1xN lies the other way, holds other values, and has
another scale: F and B are then two roundings of one weight W, and the backward differentiates another function than the
forward computed. Square blocks and a scale of the whole tensor give one set of codes for both. From sums over all
elements:

    differ     share of elements with B != F
    distance   |B - F| / |W|                  how far apart the two are (Frobenius norms)
    gain       <B - F, F> / |F|**2            B = (1 + gain) F + rest, and the rest has nothing of F
    cosine     <B, F> / (|B| |F|)             how far the rest turns dx

``gain`` is the bias of the gradient along the weight: dx is too long or too short by it. Two roundings with
independent errors of equal size have a gain of about ``-distance**2 / 2``; another value says that one of them is
larger. The rest is no noise either: it is the same for every token, and for every step until codes change, so no mean
over a batch removes it.

If the components of dy are independent and equally large, the expected squares of ``dy @ (B - F)`` and ``dy @ F`` have
the ratio of ``|B - F|**2`` and ``|F|**2``: the distance is then the relative error of dx. Real gradients are not such,
so in a live run the same numbers are taken of the products ``dy @ F`` and ``dy @ B`` (:meth:`Copies.of_gradient`).

The trade-off: numbers of the weight need no run, and none of them says what a training does with the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

import torch

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.numerics.nvfp4_tensor import QuantizedNVFP4
from nemo_fp8.numerics.quantize import quantize, tile_of

_BAND = 1 << 20
"""The number of elements that are compared at once: few enough to stay in the cache."""
_SQUARES = 1e-20
"""Sums of squares below it may be of numbers whose squares, or those of their differences, are beneath FP32."""


@dataclass(frozen=True)
class Transposition:
    """Sums over the elements of one or more pairs of F and B, and the numbers that follow from them."""

    elements: float = 0
    differing: float = 0
    source: float = 0
    """|W|**2"""
    forward: float = 0
    """|F|**2"""
    difference: float = 0
    """|B - F|**2"""
    along: float = 0
    """<B - F, F>"""

    @classmethod
    def of(cls, source: torch.Tensor, forward: torch.Tensor, backward: torch.Tensor) -> Transposition:
        """Compare two copies of ``source``; elements that are not finite in any of the three are left out."""
        bands = zip(*map(_bands, (source, forward, backward)), strict=True)
        return cls.together(cls._of(*band) for band in bands)

    @classmethod
    def _of(cls, w: torch.Tensor, f: torch.Tensor, b: torch.Tensor) -> Transposition:
        w, f, b = w.float(), f.float(), b.float()
        finite = w.isfinite() & f.isfinite() & b.isfinite()
        if not finite.all():
            w, f, b = w[finite], f[finite], b[finite]
        d = b - f
        return cls(w.numel(), int(d.count_nonzero()), *_dots((w, w), (f, f), (d, d), (d, f)))

    @classmethod
    def none(cls, source: torch.Tensor) -> Transposition:
        """Return what is measured where forward and backward read the same codes: no element differs.

        Nothing is quantized for it, so the weight itself stands for its codes in the sums of squares.
        """
        bands = [t[t.isfinite()].float() for t in _bands(source)]
        squares = math.fsum(square for band in bands for square in _dots((band, band)))
        return cls(sum(band.numel() for band in bands), 0, squares, squares)

    @classmethod
    def together(cls, parts: Iterable[Transposition]) -> Transposition:
        """Return the sums over several pairs, as if they were one."""
        return cls(*map(math.fsum, zip(*map(astuple, parts), strict=True)))

    @property
    def differ_percent(self) -> float:
        """The share of elements that differ, in percent."""
        return 100 * self.differing / max(self.elements, 1)

    @property
    def distance(self) -> float:
        """How far the two are apart, relative to the source."""
        return _ratio(math.sqrt(self.difference), math.sqrt(self.source))

    @property
    def gain(self) -> float:
        """What the backward's copy has too much of the forward's, as a share; below zero: too little."""
        return _ratio(self.along, self.forward)

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the two; 1 if both are zero."""
        backward = self.forward + 2 * self.along + self.difference
        product = math.sqrt(self.forward * max(backward, 0.0))
        return min(1.0, (self.forward + self.along) / product) if product else 1.0

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers as plain values, for JSON; None for the distance of something from nothing, and for all of
        them if no element is finite."""
        numbers = {"differ_percent": self.differ_percent, "distance": self.distance, "gain": self.gain}
        if not self.elements:
            return {**dict.fromkeys(numbers), "cosine": None}
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()} | {
            "cosine": self.cosine
        }


def _bands(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(x.reshape(-1), _BAND)


def _dots(*pairs: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """Return inner products, the first of which is the largest; in FP64 if its squares are none of FP32's numbers."""
    first = _dot(*pairs[0])
    if _SQUARES < first < math.inf or not pairs[0][0].any():
        return [first, *(_dot(*pair) for pair in pairs[1:])]
    return [float((a.double() * b.double()).sum()) for a, b in pairs]


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the inner product: within rows of 1024 in FP32, over the rows in FP64."""
    whole = a.numel() // 1024 * 1024
    product = a * b
    return float(product[:whole].view(-1, 1024).sum(1).sum(dtype=torch.float64) + product[whole:].double().sum())


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.copysign(math.inf, a) if a else 0.0


# ---------------------------------------------------------------------- which two copies


@dataclass(frozen=True)
class Copies:
    """How the copies of a weight are stored that fprop and dgrad multiply by; None for the weight itself."""

    forward: Operand | None
    backward: Operand | None
    shared: bool = False
    """Whether dgrad reads the codes that fprop read, whatever their blocks."""
    of_codes: bool = False
    """Whether dgrad's copy is cast from the values of fprop's codes, as a backward with a recipe of its own is."""

    @classmethod
    def under(cls, precision: Precision) -> Copies:
        """Return the copies of a contract's weights."""
        gemms = precision.gemms()
        forward, backward = (_found_now(gemms[gemm][1]) for gemm in ("fprop", "dgrad"))
        of_codes = precision.backward_scaling is not None
        return cls(forward, backward, precision.backward == "dequantized", of_codes)

    @property
    def words(self) -> str:
        """What the backward multiplies by, in words."""
        if self.are_one:
            return "the forward's codes"
        if self.backward is None:
            return "the weight itself"
        return "a cast by rows" if self.backward == self.forward else f"a cast to {self.backward.format.upper()}"

    @property
    def are_one(self) -> bool:
        """Whether both GEMMs read the same values of any weight: no measurement can find a difference."""
        if self.shared or self.forward is None or self.backward is None:
            return self.shared or self.forward is self.backward
        turned = tile_of(self.backward, "col")
        return self.forward == self.backward and turned == tile_of(self.forward, "row")

    def values(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return F and B of a matrix ``[out, in]``, in FP32."""
        forward = _values(weight, self.forward, "row")
        source = _decoded(weight, self.forward).to(weight.dtype) if self.of_codes else weight
        return forward, forward if self.shared else _values(source, self.backward, "col")

    def measure(self, weight: torch.Tensor) -> Transposition:
        """Return how far B is from F for a matrix ``[out, in]``."""
        return Transposition.none(weight) if self.are_one else Transposition.of(weight, *self.values(weight))

    def of_gradient(self, weight: torch.Tensor, dy: torch.Tensor) -> Transposition:
        """Return how far ``dy @ B`` is from ``dy @ F``, for the output gradient ``dy`` [tokens, out]."""
        dy = dy.reshape(-1, dy.shape[-1]).float()
        if self.are_one:
            return Transposition.none(dy @ weight.float())
        forward, backward = self.values(weight)
        dx = dy @ forward
        return Transposition.of(dx, dx, dy @ backward)


ONE = Copies(None, None, shared=True)
"""What stands for all copies that are one: their measurements are the same."""


def _found_now(operand: Operand | None) -> Operand | None:
    """Return an operand whose scale is found from the tensor: no file holds a delayed one."""
    return None if operand is None else replace(operand, delayed=False)


def _values(weight: torch.Tensor, operand: Operand | None, usage: str) -> torch.Tensor:
    """Return the values that a GEMM multiplies; of E2M1 they are ``code * scale``, exactly, times one number.

    Decoded otherwise, 3 beneath a scale of 4 and 6 beneath 2 would be two numbers, an ulp apart.
    """
    if operand is None:
        return weight.float()
    rows, columns = weight.shape
    q = quantize(whole_blocks(weight, operand), operand, usage=usage)
    if not isinstance(q, QuantizedNVFP4) or q.amax.dim():
        return q.dequantize()[:rows, :columns]
    values = q.scaled() * (q.amax * (1 / q.largest))
    return (values if usage == "row" else values.t())[:rows, :columns]


def _decoded(weight: torch.Tensor, operand: Operand | None) -> torch.Tensor:
    """Return the values of the forward's codes as they are decoded, which a backward with a recipe of its own casts."""
    if operand is None:
        return weight.float()
    rows, columns = weight.shape
    return quantize(whole_blocks(weight, operand), operand).dequantize()[:rows, :columns]


def whole_blocks(matrix: torch.Tensor, operand: Operand) -> torch.Tensor:
    """Return a matrix with zeros behind it for E2M1 casts, which take whole blocks only; others it is as it is.

    No GEMM multiplies such a weight in four bits: its numbers are of what a contract keeps.
    """
    rows, columns = matrix.shape
    if operand.format != "e2m1" or not (rows % 16 or columns % 16):
        return matrix
    return torch.nn.functional.pad(matrix, (0, -columns % 16, 0, -rows % 16))
