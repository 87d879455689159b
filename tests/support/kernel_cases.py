"""What the tests of the kernels share: sources that find mistakes, and comparisons that say where they are."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.kernels import build
from nemo_fp8.numerics.quantize import quantize_reference
from nemo_fp8.numerics.quantized import Quantized

TILES = [(128, 128), (1, 128), (128, 1), (1, 32), (32, 1), (16, 64), None]
RULES = [("te", "fp32"), ("te", "pow2"), ("deepgemm", "fp32"), ("deepgemm", "pow2"), ("te", "e8m0")]
SOURCES = [torch.bfloat16, torch.float16, torch.float32]
FP8 = ["e4m3", "e5m2"]
FOUR_BIT_KINDS = ["gaussian", "magnitudes", "bits", "specials", "zero", "negative zeros", "tiny blocks", "large blocks"]
SPECIALS = [
    0.0,
    -0.0,
    float("nan"),
    -float("nan"),
    float("inf"),
    -float("inf"),
    1e-45,
    -1e-39,
    6e-8,
    3.3e38,
    448.0,
    -57344.0,
    65504.0,
]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, kind: str) -> torch.Tensor:
    """Gaussians, every magnitude that the type has, or any bits at all."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random)
    if kind == "magnitudes":
        x = x * torch.exp2(torch.randint(-145, 127, shape, generator=random).float())
    if kind == "bits":
        integer, top = {2: (torch.int16, 1 << 15), 4: (torch.int32, 1 << 31)}[dtype.itemsize]
        return torch.randint(-top, top - 1, shape, generator=random, dtype=torch.int64).to(integer).view(dtype)
    if kind == "specials":
        at = torch.randint(0, x.numel(), (1 + x.numel() // 50,), generator=random)
        x.view(-1)[at] = torch.tensor(SPECIALS)[torch.randint(0, len(SPECIALS), at.shape, generator=random)]
    if kind == "zero":
        x = x * 0.0
    return x.to(dtype)


def four_bit_source(shape: tuple[int, int], dtype: torch.dtype, seed: int, kind: str) -> torch.Tensor:
    """What :func:`values` has, and what is rare: zeros with a sign, blocks whose scale is 0, blocks of huge values."""
    if kind not in ("negative zeros", "tiny blocks", "large blocks"):
        return values(shape, dtype, seed, kind)
    x = values(shape, dtype, seed, "gaussian")
    if kind == "negative zeros":
        x.view(-1)[::3] = -0.0
    elif kind == "tiny blocks":
        x[:, 16:48] *= 2.0**-20
    else:
        x *= torch.finfo(dtype).max / 8
        x.view(-1)[1::5] = -torch.finfo(dtype).tiny
    return x


def same(fast: torch.Tensor, slow: torch.Tensor) -> None:
    """Equal to the bit, or a message that says where not."""
    assert (fast.shape, fast.dtype) == (slow.shape, slow.dtype)
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (fast, slow))
    wrong = (a != b).nonzero().flatten()
    assert not len(wrong), (
        f"{len(wrong)} of {len(a)} bytes differ, first at {wrong[0]}: {a[wrong[0]]} instead of {b[wrong[0]]}"
    )


# This processor, and AVX-512 without dot products of BF16 and without shuffles and packing of bytes, as the first ones
# with it.
OF_PRODUCTS = {
    "native": (),
    "no-dots": (*build.MACHINE_FLAGS[0], "-mno-avx512bf16"),
    "no-shuffles": (*build.MACHINE_FLAGS[0], "-mno-avx512bf16", "-mno-avx512vbmi", "-mno-avx512vbmi2"),
    "avx2": build.OTHERS["avx2"],
}


def build_for(isa, monkeypatch):
    """Give a test the kernels of another instruction set, or the ``native`` ones; skip it where they cannot run."""
    capability = torch.backends.cpu.get_cpu_capability()
    if isa == "avx2" and capability not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no AVX2")
    if isa.startswith("no-") and capability != "AVX512":
        pytest.skip("this processor has no AVX-512")
    if isa != "native":
        monkeypatch.setattr(build, "MACHINE_FLAGS", ((OF_PRODUCTS | build.OTHERS)[isa],))
        monkeypatch.setattr(build, "library", functools.cache(build.library.__wrapped__))


def compare_statistics(fast, slow, sums: bool) -> None:
    for name in ("elements", "underflow", "saturated", "nonfinite", "amax", "scale_inv", "least_code", "largest_code"):
        assert torch.equal(getattr(fast, name).double(), getattr(slow, name).double()), name
    # of squares in units of the scale, which FP32 cannot hold where a tile's scale has nothing to do with its values
    if sums:
        torch.testing.assert_close(fast.norm.double(), slow.norm.double(), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(
            fast.error_norm.double(), slow.error_norm.double(), rtol=1e-4, atol=1e-6 * float(slow.norm.max())
        )
    assert fast.summary().keys() == slow.summary().keys()


def jobs_of_every_kind():
    """Every tile, source and format against the specification, with statistics, there and back, in two strips."""
    kinds = ["gaussian", "magnitudes", "specials", "zero"]
    for number, (tile, dtype) in enumerate(itertools.product(TILES, SOURCES)):
        convention, kind = RULES[number % len(RULES)]
        shape = (65, 4118) if low(tile) else (130, 2070)
        for element in FP8:
            x = values(shape, dtype, number, kinds[number % len(kinds)])
            fast = kernels.quantize(x, tile, element, kind, convention, True)
            slow = quantize_reference(x, tile, FORMATS[element], kind, convention, True)
            same(fast[0], slow[0])
            same(fast[1], slow[1])
            compare_statistics(fast[2], slow[2], sums=number % len(kinds) == 0)
            decoded = kernels.decode(fast[0], fast[1], tile, torch.bfloat16)
            expected = Quantized(fast[0], fast[1], tile).dequantize_reference(torch.bfloat16)
            torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


def low(tile):
    """Whether strips of such tiles are 4096 columns wide, and not 2048 (`plan_for` in fp8.h)."""
    return tile is not None and tile[0] < 16


def large_results(tile, rule, dtype):
    """Rows that end within a cache line, rows that begin on one and rows that do not, and a wild tile among tame ones.

    Of small tiles there are so many that what is counted for them goes past the caches, too: 17 bytes each.
    """
    rows = 2000 if tile == (1, 32) or not low(tile) else 1000
    columns = 4160 if low(tile) else 2112
    for shape in ((rows, columns), (rows, columns + 3)) if dtype == torch.bfloat16 else ((rows, columns),):
        x = values(shape, dtype, 10, "gaussian")
        x[700, columns - 12] = float("nan")
        fast = kernels.quantize(x, tile, "e4m3", rule[1], rule[0], True)
        slow = quantize_reference(x, tile, FORMATS["e4m3"], rule[1], rule[0], True)
        same(fast[0], slow[0])
        same(fast[1], slow[1])
        compare_statistics(fast[2], slow[2], sums=True)
        decoded = kernels.decode(fast[0], fast[1], tile, torch.bfloat16)
        expected = Quantized(fast[0], fast[1], tile).dequantize_reference(torch.bfloat16)
        torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


def matrices_turned(dtype):
    """Whole squares and lines, what is left of them to the right and below, more than one thread's share, enough to be
    streamed past the caches, a part of a matrix, and into a part of another. Return the last matrix."""
    for shape in ((1, 1), (16, 16), (15, 33), (33, 15), (64, 48), (130, 257), (512, 768), (2048, 2304), (2080, 2050)):
        x = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]
        room = torch.zeros((shape[1], shape[0] + 64), dtype=dtype)
        for part, into in (
            (x, torch.zeros(shape[::-1], dtype=dtype)),
            (x, room[:, 32:-32]),
            (x[:, 1:], torch.zeros((shape[1] - 1, shape[0]), dtype=dtype)),
        ):
            if part.numel():
                assert kernels.turn(part, into)
                same(into, part.t())
        assert not room[:, :32].any()
        assert not room[:, -32:].any()
    for parts, rows, columns in ((1, 5, 7), (5, 32, 130), (3, 70, 257), (40, 33, 2048)):
        stack = torch.randint(0, 256, (parts, rows + 3, columns, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]
        room = torch.zeros((parts, columns + 1, rows + 64), dtype=dtype)
        assert kernels.turn(stack[:, 3:], room[:, 1:, 32:-32])
        same(room[:, 1:, 32:-32], stack[:, 3:].mT)
        assert not room[:, 0].any()
        assert not room[..., :32].any()
        assert not room[..., -32:].any()
    return x
