"""Planes of a ledger: what changed is found, and fingerprints are carried through it, by a kernel as by numpy."""

import functools
import itertools

import numpy as np
import pytest
import torch
from support.kernel_cases import OF_PRODUCTS, build_for

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import quantize
from nemo_fp8.numerics.kernels import patches as kernel
from nemo_fp8.rollout.refit import fingerprint
from nemo_fp8.rollout.refit.ledger import Patchable
from nemo_fp8.rollout.refit.manifest import Entry
from nemo_fp8.rollout.refit.patch import VALUES, decode
from nemo_fp8.rollout.refit.planes import Cast, Look, Plane, Room
from nemo_fp8.rollout.refit.planes import changes as changes_of

PARTS = {
    "0:256,0:384": ((0, 256), (0, 384)),
    "128:256,0:384": ((128, 256), (0, 384)),
    "0:256,128:256": ((0, 256), (128, 256)),
}
SHAPES = [
    ((256, 384), 1),
    ((300, 128), 1),
    ((20, 4176), 1),
    ((24, 2070), 2),
    ((70, 40), 2),
    ((64, 33), 2),
    ((3, 40, 16), 2),
    ((77,), 2),
    ((), 4),
    ((9, 3), 4),
    ((20, 1040), 4),
]
OF_WIDTH = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def _changes(plane, row, rows, patch_rows, quick=False):
    """What one look at some rows, which may be a cast, says of their plane."""
    new = rows if isinstance(rows, torch.Tensor) else rows.job(patch_rows) or rows.made()
    look = Look(plane, row, new, patch_rows, quick)
    (found,) = changes_of([look], Room().bytes(look.bytes))
    return found


@pytest.mark.parametrize(
    ("dtype", "shape", "parts"),
    [
        (torch.float8_e4m3fn, (256, 384), PARTS),
        (torch.bfloat16, (256, 384), PARTS | {"odd": ((0, 256), (1, 7))}),
        (torch.bfloat16, (3, 40, 16), {"one": ((1, 2), (0, 40), (0, 16))}),
        (torch.bfloat16, (77,), {"all": ((0, 77),)}),
        (torch.float32, (), {"whole": ()}),
        (torch.float8_e8m0fnu, (5, 3), {"all": ((0, 5), (0, 3))}),
    ],
    ids=str,
)
def test_fingerprints_are_carried_through_changes(dtype, shape, parts):
    """Through fifty changes of rows, the sums are those of the bits that are there then."""
    draws = torch.Generator().manual_seed(0)
    plane = Plane(shape, dtype, parts)

    def some(rows):
        return torch.randint(0, 100, (rows, plane.columns * dtype.itemsize), generator=draws, dtype=torch.uint8).view(
            dtype
        )

    plane.put(0, some(plane.rows))
    for _ in range(50):
        for part in parts:
            plane.digest(part)
        row = int(torch.randint(0, plane.rows, (1,), generator=draws))
        new = plane.matrix[row : row + 3].clone()
        old = new.clone()
        new.view(torch.uint8)[0, int(torch.randint(0, new.view(torch.uint8).shape[1], (1,), generator=draws))] ^= 3
        patterns = old.view(torch.uint8).view(-1).numpy().view(plane.pattern).copy()
        for first, rows, *counts, raw in _changes(plane, row, new, 2):
            strip = patterns[(first - row) * plane.columns :][: rows * plane.columns]
            for positions, differences in decode(raw, rows * plane.columns, *counts, dtype.itemsize):
                strip[positions] += differences
        assert np.array_equal(patterns, new.view(torch.uint8).view(-1).numpy().view(plane.pattern))
        assert not _changes(plane, row, new, 2)
        for part, box in parts.items():
            assert plane.digest(part) == fingerprint(plane.values[tuple(slice(*one) for one in box)]), part


@pytest.fixture
def without_compiler(monkeypatch):
    """What :func:`in_numpy` of it does, runs without the compiled kernels."""

    def in_numpy(function, *arguments):
        with monkeypatch.context() as patched:
            patched.setattr(kernel.build, "library", lambda: None)
            return function(*arguments)

    return in_numpy


@pytest.mark.parametrize("block", [(128, 128), (1, 32)], ids=str)
def test_codes_are_compared_as_they_are_made(block, monkeypatch):
    """The patches, bits, sums and scales of a cast that the kernel runs by itself, of few rows at a time, are those of
    codes that were there; a cast that patches would cut is run as a whole."""
    operand, shape = Operand("e4m3", block, "e8m0" if block[0] == 1 else "fp32"), (640, 4224)
    before = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    after = before + (before * 2**-8 * (torch.rand(shape) < 0.1)).bfloat16()
    after[300, 7] = 1e30  # one block needs other scales, and the slow way
    coded = [quantize(x, operand) for x in (before, after)]
    planes = [Plane(shape, torch.float8_e4m3fn, {"all": ((0, 640), (0, 4224))}) for _ in range(3)]
    for plane in planes:
        plane.put(0, coded[0].data)
        assert plane.digest("all")
    monkeypatch.setattr("nemo_fp8.rollout.refit.planes.quantize_into", None)  # the kernel casts
    found = []
    for plane, rows in zip(planes[:2], (None, 256), strict=True):
        scales = torch.empty_like(coded[1].scale_inv)
        cast = Cast(after, operand, scales, Room())
        new = coded[1].data if rows is None else cast
        found.append([(*row, raw.tobytes()) for *row, raw in _changes(plane, 0, new, 256)])
        assert rows is None or torch.equal(scales.view(torch.uint8), coded[1].scale_inv.view(torch.uint8))
    assert found[0] == found[1] != []
    assert planes[0].digest("all") == planes[1].digest("all") != planes[2].digest("all")
    assert torch.equal(planes[1].matrix.view(torch.uint8), coded[1].data.view(torch.uint8))
    if block[0] > 1:
        assert cast.job(100) is None
        monkeypatch.undo()
        assert _changes(planes[2], 0, cast, 100)
        assert planes[2].digest("all") == planes[1].digest("all")


@pytest.mark.parametrize("isa", [*OF_PRODUCTS, "plain"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize(("shape", "width"), SHAPES, ids=str)
def test_the_kernel_finds_what_numpy_finds(without_compiler, shape, width, share, isa, monkeypatch):
    """The same patches, bits, fingerprints, counts and largest magnitudes, whatever changes, and whatever parts the
    workers hold: one, several of different rows, or such as have elements in common."""
    build_for(isa, monkeypatch)
    whole = {"all": tuple((0, n) for n in shape)}
    cuts = [whole]
    if len(shape) == 2:
        (high, wide), half = ((0, n) for n in shape), shape[1] // 2
        top, bottom = (0, shape[0] // 3), (shape[0] // 3, shape[0])
        cuts += [{"above": (top, wide), "below": (bottom, wide)}, whole | {"below": (bottom, wide)}]
        cuts += [{"left": (high, (0, half)), "right": (high, (half, shape[1]))}]
        cuts += [{"a corner": (top, (half, shape[1])), "the other": (bottom, (0, half))}]
    for parts, quick in itertools.product(cuts, [False, True]):
        _finds_the_same(without_compiler, shape, width, share, parts, quick)


def _finds_the_same(without_compiler, shape, width, share, parts, quick):
    draws = torch.Generator().manual_seed(0)
    planes = [Plane(shape, OF_WIDTH[width], parts) for _ in range(2)]

    def bits(high):
        return torch.randint(0, high, (planes[0].matrix.numel() * width,), generator=draws, dtype=torch.uint8)

    first = bits(255)
    others = torch.where(torch.rand(len(first), generator=draws) < 0.8, bits(3), bits(255))
    second = first + others * (torch.rand(len(first), generator=draws) < share)
    for plane in planes:
        plane.put(0, first.view(plane.values.dtype).view(plane.matrix.shape))
        plane.top = 0
        assert all(plane.digest(part) for part in parts)

    def found(plane):
        new = second.view(plane.values.dtype).view(plane.matrix.shape)
        return [(*row, raw.tobytes()) for *row, raw in _changes(plane, 0, new, 16, quick)]

    by_kernel, by_numpy = found(planes[0]), without_compiler(found, planes[1])
    assert by_kernel == by_numpy
    assert bool(by_kernel) == bool((first != second).any())
    assert torch.equal(planes[0].matrix.view(torch.uint8).view(-1), second)
    assert torch.equal(planes[1].matrix.view(torch.uint8).view(-1), second)
    assert [*planes[0].prints] == [*planes[1].prints]
    assert (planes[0].changed, planes[0].top) == (planes[1].changed, planes[1].top)
    for part, box in parts.items():
        expected = fingerprint(planes[0].values[tuple(slice(*one) for one in box)])
        assert planes[0].digest(part) == planes[1].digest(part) == expected


def test_planes_are_looked_at_together():
    """Rows of several, of all widths, with parts, and two looks at one: as by one look after the other."""
    draws, first, second = torch.Generator().manual_seed(0), [], []
    shapes = [((300, 256), 1), ((64, 128), 2), ((7, 3), 4), ((2048, 512), 1), ((1,), 2)]
    planes = [
        [Plane(shape, OF_WIDTH[width], {"all": tuple((0, n) for n in shape)}) for shape, width in shapes]
        for _ in range(2)
    ]
    for one, other in zip(*planes, strict=True):
        bits = torch.randint(0, 250, (one.rows, one.columns * one.values.itemsize), generator=draws, dtype=torch.uint8)
        for plane in (one, other):
            plane.put(0, bits.view(plane.values.dtype))
            plane.digest("all")
        bits += (torch.rand(bits.shape, generator=draws) < 0.02).to(torch.uint8)
        cut, new = one.rows // 3, bits.view(one.values.dtype)
        for row, rows in ((0, cut), (cut, one.rows - cut)):
            if rows:
                first.append(Look(one, row, new[row : row + rows], 50))
                second.append((other, row, new[row : row + rows], 50))
    together = changes_of(first, Room().bytes(sum(look.bytes for look in first)))
    alone = [_changes(*about) for about in second]
    assert [[(*row, raw.tobytes()) for *row, raw in some] for some in together] == [
        [(*row, raw.tobytes()) for *row, raw in some] for some in alone
    ]
    assert any(together)
    for one, other in zip(*planes, strict=True):
        assert one.digest("all") == other.digest("all") == fingerprint(one.values)
        assert one.changed == other.changed
    assert changes_of([], Room().bytes(0)) == []


def test_sums_that_wrap_are_no_overflow(monkeypatch, capfd):
    """A compiler may take a signed sum for one that never overflows; its sanitizer says where one did."""
    monkeypatch.setattr(kernel.build, "MACHINE_FLAGS", (("-fsanitize=signed-integer-overflow",),))
    monkeypatch.setattr(kernel.build, "library", functools.cache(kernel.build.library.__wrapped__))
    if kernel.build.library() is None:
        pytest.skip("no compiler with a sanitizer here")
    plane = Plane((64, 64), torch.bfloat16, {"all": ((0, 64), (0, 64))})
    for value in (-1.0, 1e30, -1e30, 2.0, -2.0):  # their upper bits make 64-bit words of both ends of the range
        new = torch.full((64, 64), value).bfloat16()
        plane.put(0, new) if value == -1.0 else _changes(plane, 0, new, 16)
        assert plane.digest("all") == fingerprint(new)
    assert "runtime error" not in capfd.readouterr().err


def test_what_is_told_of_values_is_there():
    """The largest is exact once most has changed, and never too small; NaNs are counted while they are there."""
    kept = Patchable(Entry("w", "bfloat16", (128, 256)), None, ["0:128,0:256"])
    plane, zeros = kept.planes[VALUES], torch.zeros(128, 256, dtype=torch.bfloat16)
    plane.put(0, zeros)
    assert (plane.largest(), plane.nonfinite()) == (0.0, 0)
    some = zeros.clone()
    some[3, 4], some[5, 6] = -7.0, float("nan")
    _changes(plane, 0, some, 100)
    assert not np.isfinite(plane.largest())
    assert plane.nonfinite() == 1
    some[5, 6] = 1.0
    _changes(plane, 0, some, 100)
    assert (plane.largest(), plane.nonfinite()) == (7.0, 0)
    some[3, 4] = 2.0
    _changes(plane, 0, some, 100)
    assert plane.largest() >= 2.0
    plane.changed = 0
    _changes(plane, 0, torch.full_like(zeros, 0.5), 100)
    assert plane.largest() == 0.5
