"""What a push of changes is made of, without an engine: the format of a patch, planes, carried fingerprints."""

import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import OF_PRODUCTS, build_for

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import quantize
from nemo_fp8.numerics.kernels import Order
from nemo_fp8.numerics.kernels import patches as kernel
from nemo_fp8.rollout.refit import fingerprint
from nemo_fp8.rollout.refit.channel import LARGEST
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, _sums, together
from nemo_fp8.rollout.refit.ledger import FIRST, Ledger, Patchable
from nemo_fp8.rollout.refit.manifest import Entry, Manifest
from nemo_fp8.rollout.refit.memory import Shared, SharedWeights
from nemo_fp8.rollout.refit.patch import LONGEST, PATTERNS, SCALES, VALUES, decode, encode, size_of
from nemo_fp8.rollout.refit.planes import Cast, Look, Plane, Room
from nemo_fp8.rollout.refit.planes import changes as changes_of
from nemo_fp8.rollout.refit.wire import AT_ONCE, cut
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.layouts import AMX, ROWS, Tally
from nemo_fp8.rollout.refit.worker.patches import Passing, moved, place_of
from nemo_fp8.rollout.refit.worker.routes import Route, Target


@st.composite
def changes(draw):
    """A strip's length, and what changes in it: any share, steps and others mixed in any way."""
    width = draw(st.sampled_from([*PATTERNS]))
    strip = draw(st.integers(1, 5000))
    draws = np.random.default_rng(draw(st.integers(0, 2**32)))
    share, steps = draw(st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0])), draw(st.sampled_from([0.0, 0.5, 1.0]))
    positions = np.flatnonzero(draws.random(strip) < share)
    others = draws.integers(1, 1 << (8 * width), len(positions))
    moves = np.where(draws.random(len(positions)) < 0.5, 1, -1)
    return strip, positions, np.where(draws.random(len(positions)) < steps, moves, others).astype(PATTERNS[width])


@settings(deadline=None)
@given(changes())
def test_a_patch_goes_out_and_comes_back(change):
    strip, positions, differences = change
    if len(positions) == 0:
        return
    steps, others, raw = encode(strip, positions, differences)
    width = differences.itemsize
    assert len(raw) == size_of(strip, steps, others, width) <= strip * width
    there, wanted = np.zeros(strip, differences.dtype), np.zeros(strip, differences.dtype)
    wanted[positions] = differences
    for places, by in decode(raw, strip, steps, others, width):
        assert len(np.unique(places)) == len(places)
        there[places] += by
    assert np.array_equal(there, wanted)
    for places, by in reversed(decode(raw, strip, steps, others, width)):
        there[places] -= by
    assert not there.any()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_steps_take_a_bit_more_than_their_entropy(share):
    """Positions without a pattern need H(share) bits an element; here they and a step's direction take at most 1.5
    bits more for each change."""
    draws = np.random.default_rng(0)
    strip = 1 << 20
    positions = np.flatnonzero(draws.random(strip) < share)
    differences = np.where(draws.random(len(positions)) < 0.5, 1, 255).astype(np.uint8)
    _, _, raw = encode(strip, positions, differences)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    assert 8 * len(raw) / len(positions) < entropy + 1 + 1.5


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_no_bytes_are_believed(strip, data):
    """Whatever comes, it is refused or gives places inside the strip, each once a list."""
    steps = data.draw(st.integers(0, strip))
    others = data.draw(st.integers(0, strip - steps))
    raw = np.frombuffer(data.draw(st.binary(min_size=(n := size_of(strip, steps, others, 1)), max_size=n)), np.uint8)
    live = torch.zeros(strip, dtype=torch.uint8)
    place = place_of((strip,), ((0, strip),), ((0, strip),), live)
    to = kernel.Matrices((strip, 1), 1, [place])
    (added,) = kernel.add([kernel.Addition(raw.ctypes.data, strip, steps, others, 0, to)])
    try:
        lists = decode(raw, strip, steps, others, 1)
    except PrecisionError:
        assert not added
        assert not live.any()  # all of it or nothing
        return
    assert added
    for places, by in lists:
        assert len(places) == len(by) == len(np.unique(places))
        assert places.size == 0 or 0 <= places.min() <= places.max() < strip


def test_a_patch_of_another_size_is_refused():
    _, _, raw = encode(100, np.array([5]), np.array([1], np.uint8))
    for wrong in (raw[:-1], np.append(raw, 0).astype(np.uint8)):
        with pytest.raises(PrecisionError, match="counts ask for"):
            decode(wrong, 100, 1, 0, 1)


PARTS = {
    "0:256,0:384": ((0, 256), (0, 384)),
    "128:256,0:384": ((128, 256), (0, 384)),
    "0:256,128:256": ((0, 256), (128, 256)),
}


def _changes(plane, row, rows, patch_rows):
    """What one look at some rows, which may be a cast, says of their plane."""
    new = rows if isinstance(rows, torch.Tensor) else rows.job(patch_rows) or rows.made()
    look = Look(plane, row, new, patch_rows)
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
        for first, rows, steps, others, raw in _changes(plane, row, new, 2):
            strip = patterns[(first - row) * plane.columns :][: rows * plane.columns]
            for positions, differences in decode(raw, rows * plane.columns, steps, others, dtype.itemsize):
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
    for parts in cuts:
        _finds_the_same(without_compiler, shape, width, share, parts)


def _finds_the_same(without_compiler, shape, width, share, parts):
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
        return [(*row, raw.tobytes()) for *row, raw in _changes(plane, 0, new, 16)]

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


def _added(shape, source, to, live, patch, back):
    """What lies there after the kernel added a patch of a whole tensor, and after numpy did."""
    (strip, steps, others, raw), width = patch, live.itemsize
    place = place_of(shape, source, to, live)
    matrix = (shape[-2] if len(shape) > 1 else strip, shape[-1] if len(shape) > 1 else 1)
    to = kernel.Matrices(matrix, width, [place])
    (done,) = kernel.add([kernel.Addition(raw.ctypes.data, strip, steps, others, 0, to)], back)
    return done, live.clone()


BOXES = [
    ((40, 24), ((0, 40), (0, 24)), ((0, 40), (0, 24)), (40, 24)),
    ((40, 24), ((8, 40), (5, 24)), ((2, 3), (1, 33), (0, 19)), (3, 40, 20)),
    ((4, 10, 24), ((1, 3), (0, 10), (4, 9)), ((0, 2), (2, 12), (0, 5)), (2, 12, 6)),
    ((60,), ((10, 50),), ((5, 45),), (45,)),
]


@pytest.mark.parametrize("width", PATTERNS)
@pytest.mark.parametrize(("shape", "source", "to", "there"), BOXES, ids=str)
def test_the_kernel_adds_what_numpy_adds(shape, source, to, there, width):
    """To the part of a tensor that a route takes along, forth and back."""
    draws = np.random.default_rng(0)
    strip = int(np.prod(shape))
    positions = np.flatnonzero(draws.random(strip) < 0.2)
    by = np.where(draws.random(len(positions)) < 0.7, 1, draws.integers(2, 1 << 8 * width, len(positions)))
    by = by.astype(PATTERNS[width])
    live = torch.from_numpy(draws.integers(0, 1 << 8 * width - 1, there).astype(f"i{width}"))
    before = live.clone()
    expected = live.numpy().view(PATTERNS[width]).copy()
    here, places = moved(positions, shape, source, to)
    expected[places] += by[here]
    patch = (strip, *encode(strip, positions, by))
    done, added = _added(shape, source, to, live, patch, back=False)
    assert done
    assert np.array_equal(added.numpy().view(PATTERNS[width]), expected)
    assert not torch.equal(added, before)
    assert torch.equal(_added(shape, source, to, live, patch, back=True)[1], before)


BOXES_FOR_AMX = [
    ((40, 24), ((0, 40), (0, 24)), ((0, 1), (0, 40), (0, 24)), (1, 64, 24)),
    ((40, 24), ((3, 40), (5, 17)), ((2, 3), (32, 69), (4, 16)), (3, 96, 20)),
    ((4, 40, 24), ((1, 3), (0, 40), (4, 10)), ((0, 2), (64, 104), (0, 6)), (2, 128, 6)),
]


@pytest.mark.parametrize(("shape", "source", "to", "there"), BOXES_FOR_AMX, ids=str)
def test_the_kernel_adds_to_codes_for_amx(shape, source, to, there):
    """What it adds to codes in plain order, forth and back."""
    draws, strip = np.random.default_rng(0), int(np.prod(shape))
    positions = np.flatnonzero(draws.random(strip) < 0.2)
    by = np.where(draws.random(len(positions)) < 0.7, 1, draws.integers(2, 256, len(positions))).astype(np.uint8)
    steps, others, raw = encode(strip, positions, by)
    plain = torch.from_numpy(draws.integers(0, 256, there, dtype=np.uint8))
    live, before = torch.empty_like(plain), plain.clone()
    for m, codes in enumerate(plain):
        AMX.store(live[m], 0, codes)
    place = place_of(shape, source, to, live, Order.AMX)
    for back, memory, at in ((False, plain, place_of(shape, source, to, plain)), (False, live, place)):
        there = kernel.Matrices(shape[-2:], 1, [at])
        assert kernel.add([kernel.Addition(raw.ctypes.data, strip, steps, others, 0, there)], back) == [True]
        assert memory is plain or torch.equal(torch.stack([AMX.load(m, 0, len(m)) for m in live]), plain)
    assert not torch.equal(plain, before)
    kernel.add([kernel.Addition(raw.ctypes.data, strip, steps, others, 0, there)], back=True)
    assert torch.equal(torch.stack([AMX.load(m, 0, len(m)) for m in live]), before)


def test_a_box_that_is_not_of_whole_lines_has_no_place_for_amx():
    def place(rows, columns, live=None):
        source = ((0, rows[1] - rows[0]), (0, columns[1] - columns[0]))
        live = torch.empty(1, 128, 64, dtype=torch.uint8) if live is None else live
        return place_of(tuple(b for _, b in source), source, ((0, 1), rows, columns), live, Order.AMX)

    assert place((32, 96), (2, 64)) is not None
    assert place((32, 90), (2, 64)) is not None
    for rows, columns in (((16, 96), (2, 64)), ((32, 96), (1, 63)), ((32, 96), (0, 63))):
        assert place(rows, columns) is None
    assert place((32, 96), (2, 32), torch.empty(1, 128, 64, dtype=torch.uint8)[..., :32]) is None
    turned = torch.empty(4, 128, 64, dtype=torch.uint8)  # four rows that are of one matrix each
    assert place_of((4, 64), ((0, 4), (0, 64)), ((0, 4), (0, 1), (0, 64)), turned, Order.AMX) is None


@pytest.mark.parametrize("isa", ["native", "avx2", "plain"])
@pytest.mark.parametrize("layout", [ROWS, AMX], ids=["rows", "amx"])
@pytest.mark.parametrize("box", [((0, 2048), (0, 256)), ((100, 2000), (0, 256)), ((0, 1030), (64, 200))], ids=str)
def test_patches_are_added_together_and_their_rows_summed_up(isa, layout, box, monkeypatch):
    """By all threads. One among them is no patch: it says so, nothing of it is added, and the others are."""
    build_for(isa, monkeypatch)
    draws, shape, each = np.random.default_rng(0), (2048, 256), 512
    live = torch.from_numpy(draws.integers(0, 127, shape, dtype=np.uint8))
    before, (rows, columns) = live.clone(), box
    # For AMX a box begins with a group: it lies in rows 32, 33 ... there, and all around it is something else.
    wide, to = (live, box) if layout is ROWS else (torch.full((1, 2112, 256), 7, dtype=torch.uint8), None)
    if layout is AMX:
        to = ((0, 1), (32, 32 + rows[1] - rows[0]), columns)
        plain = wide[0].clone()
        plain[slice(*to[1]), slice(*columns)] = live[slice(*rows), slice(*columns)]
        AMX.store(wide[0], 0, plain)
    place = place_of(shape, box, to, wide, layout.order)
    of_rows = torch.full((rows[1] - rows[0],), -1)
    of_columns = torch.zeros((columns[1] - columns[0]) // 8, dtype=torch.int64)
    there = kernel.Matrices(shape, 1, [place], {0: (of_rows, of_columns)})
    additions, bad, raws = [], 2, []
    for n in range(4):
        positions = np.flatnonzero(draws.random(each * 256) < 0.1)
        by = np.where(draws.random(len(positions)) < 0.7, 1, 5).astype(np.uint8)
        steps, others, raw = encode(each * 256, positions, by)
        if n == bad:
            raw[-len(raw) // 2 :] = 0xFF
        raws.append(raw)
        additions.append(kernel.Addition(raw.ctypes.data, each * 256, steps, others, n * each * 256, there))
    done = kernel.add(additions, summed=True)
    assert done == [n != bad for n in range(4)]
    part = live[slice(*rows), slice(*columns)]
    if layout is AMX:
        now = AMX.load(wide[0], 0, 2112)
        part.copy_(now[slice(*to[1]), slice(*columns)])
        now[slice(*to[1]), slice(*columns)] = 7
        assert (now == 7).all()  # nothing outside of the box
    assert torch.equal(live[bad * each : (bad + 1) * each], before[bad * each : (bad + 1) * each])
    expected = _sums(torch.cat([part[: bad * each - rows[0]], part[(bad + 1) * each - rows[0] :]]))[:2]
    patched = torch.cat([of_rows[: bad * each - rows[0]], of_rows[(bad + 1) * each - rows[0] :]])
    assert all(torch.equal(a, b) for a, b in zip((patched, of_columns), expected, strict=True))
    assert bool((of_rows[bad * each - rows[0] : (bad + 1) * each - rows[0]] == -1).all())
    assert not torch.equal(part, before[slice(*rows), slice(*columns)])
    kernel.add([one for n, one in enumerate(additions) if n != bad], back=True)
    if layout is AMX:
        part.copy_(AMX.load(wide[0], 0, 2112)[slice(*to[1]), slice(*columns)])
    assert torch.equal(live, before)  # nothing outside of the box
    assert torch.equal(of_columns, expected[1])  # nobody has asked for sums again


def test_a_route_that_turns_a_tensor_over_has_no_place():
    assert place_of((4, 6), ((0, 4), (0, 6)), ((0, 6), (0, 4)), torch.empty(6, 4)) is None
    assert place_of((2, 2, 4, 6), ((0, 2),) * 4, ((0, 2),) * 4, torch.empty(2, 2, 4, 6)) is None


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


def test_a_scalar_is_told_of_and_changes():
    """Such as a scale of logits, which lies in memory as it was loaded."""
    tensors = {"scale": torch.tensor(2.0)}
    ledger = Ledger.of(Manifest.of(tensors), set(), [{"kept": {0: [None, ["whole"], ""]}, "together": []}])
    plane, memory = ledger.kept[0].planes[VALUES], Shared(1 << 12)
    assert [*ledger.noting(tensors.items())]
    assert (plane.largest(), plane.nonfinite()) == (2.0, 0)
    for value, sent in ((2.0, 0), (float("-inf"), 1)):
        changed = {"scale": torch.tensor(value)}
        assert len([*ledger.changes(changed.items(), lambda: memory.tensor, 1 << 12)]) == sent
        assert plane.digest("whole") == fingerprint(changed["scale"])
    assert (plane.largest(), plane.nonfinite()) == (float("inf"), 1)
    memory.close()


@pytest.mark.parametrize(
    "operand",
    [Operand("e4m3", (128, 128), "fp32"), Operand("e4m3", (128, 128), "pow2"), Operand("e4m3", (1, 32), "e8m0")],
)
@pytest.mark.parametrize("shape", [(300, 256), (3, 128, 320), (2, 100, 96)], ids=str)
def test_a_ledger_quantizes_as_the_reference_does(operand, shape):
    """Strip by strip, and each matrix of a stack by itself."""
    draws = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=draws).bfloat16()
    kept = Patchable(Entry("w", "bfloat16", shape), operand, [",".join(f"0:{n}" for n in shape)])
    for strip in kept.strips(tensor, True, Room()):
        kept.put(strip)
    assert kept.as_reference
    stack = [quantize(matrix, operand) for matrix in tensor.reshape(-1, *shape[-2:])]
    codes, scales = (
        torch.stack([getattr(one, name).view(torch.uint8) for one in stack]) for name in ("data", "scale_inv")
    )
    for what, expected in ((VALUES, codes), (SCALES, scales)):
        assert torch.equal(kept.planes[what].values.view(torch.uint8).reshape(-1), expected.reshape(-1))


def test_a_cast_that_once_was_not_the_reference_s_is_held_against_it_again(monkeypatch):
    """A trainer that wrote its weights during one push: ``verified`` of the next ones is no answer about that one."""
    kept = Patchable(Entry("w", "bfloat16", (128, 128)), Operand("e4m3", (128, 128), "fp32"), ["0:128,0:128"])

    def as_reference():
        [*kept.strips(torch.ones(128, 128).bfloat16(), True, Room())]
        return kept.as_reference

    with monkeypatch.context() as patch:
        patch.setattr(kept, "_compare", lambda *made: setattr(kept, "as_reference", False))
        assert not as_reference()
    assert as_reference()


def test_single_codes_are_found_where_a_layout_stores_them():
    codes = (torch.arange(64 * 256) % 251).to(torch.uint8).view(64, 256)
    live = torch.empty_like(codes)
    AMX.store(live, 0, codes)
    rows, columns = np.divmod(np.arange(64 * 256), 256)
    at = AMX.where(rows, columns, 256)
    assert torch.equal(live[tuple(map(torch.from_numpy, at))].view(64, 256), codes)


@pytest.mark.parametrize("layout", [ROWS, AMX])
def test_a_part_that_is_read_as_patches_pass_it_has_the_fingerprint_of_one_that_is_read_at_once(layout):
    """A worker's part: rows 128:384 of a tensor, in rows 128:384 of a fused weight. And what was read is seen."""
    target, to = Target("layer", "weight", (512, 256), torch.bfloat16), ((128, 384), (0, 256))
    route = Route(0, (512, 256), ((128, 384), (0, 256)), ((256, 256), (256, 1), 128 * 256), target, to)
    codes = (torch.arange(512 * 256) * 31 % 251).to(torch.uint8).view(512, 256)
    live = torch.empty(512, 256, dtype=torch.float8_e4m3fn)
    layout.store(live, 0, codes.view(live.dtype))
    sink = Blocks(Tally(), live, torch.ones(4, 2), layout, Operand("e4m3", (128, 128), "fp32"), [route], False)
    at_once = together([fingerprint(codes[128:384].view(live.dtype)), fingerprint(torch.ones(2, 2))])
    assert sink.read(route) == at_once
    for ends in ([0], [128], [256], [64, 192], [32, 32, 160, 256]):
        print_, row = Fingerprint(), 0
        for end in ends:
            sink.read_rows(route, row, end, print_)
            row = end
        assert sink.read(route, print_, row) == at_once
    print_ = Fingerprint()
    live.view(torch.uint8)[130, 3] ^= 1
    sink.read_rows(route, 0, 128, print_)
    assert sink.read(route, print_, 128) != at_once


@pytest.mark.parametrize(
    "patched",
    [
        [],
        [(0, 256, True), (256, 256, True)],
        [(0, 512, True)],
        [(0, 64, True), (160, 32, True), (200, 100, True)],  # and what lies between them is read
        [(128, 32, True), (160, 32, False), (192, 32, True), (320, 192, False)],
        [(256, 64, False), (384, 128, True)],
    ],
    ids=str,
)
def test_a_part_that_patches_pass_takes_sums_where_there_are_some(patched):
    """Rows 128:384 of a tensor; of each patch its first row, how many it has, and whether a kernel has summed them."""
    target, to = Target("layer", "weight", (256, 256), torch.bfloat16), ((0, 256), (0, 256))
    route = Route(0, (512, 256), ((128, 384), (0, 256)), ((256, 256), (256, 1), 128 * 256), target, to)
    live = (torch.arange(256 * 256) * 31 % 251).to(torch.uint8).view(256, 256).view(torch.float8_e4m3fn)
    sink = Blocks(Tally(), live, torch.ones(2, 2), ROWS, Operand("e4m3", (128, 128), "fp32"), [route], False)
    one, at_once, read, known = Passing(route, sink, (128, 384)), sink.read(route), set(), set()
    sink.read_rows = lambda *about: (read.update(range(*about[1:3])), Blocks.read_rows(sink, *about))
    for row, rows, summed in patched:
        first, last = max(row, 128) - 128, min(row + rows, 384) - 128
        if summed and first < last:
            of_rows, of_columns, _ = _sums(live[first:last])
            one.sums[0][first:last] = of_rows
            one.sums[1].add_(of_columns)
            known.update(range(first, last))
        one.note(row, rows, summed)
    assert one.read() == at_once
    assert not read & known
    again = Passing(route, sink, (128, 384))
    again.sums[0][:256] = _sums(live)[0] + 1
    again.note(128, 256, True)
    assert again.read() != at_once  # sums of other bits are seen


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


def test_a_position_follows_its_route():
    """The example of the docstring, and what a route does not take along."""
    here, places = moved(np.array([11, 13, 23]), (4, 6), ((2, 4), (0, 6)), ((1, 2), (0, 2), (0, 6)))
    assert here.tolist() == [False, True, True]
    assert [place.tolist() for place in places] == [[1, 1], [0, 1], [1, 5]]


# ---------------------------------------------------------------------- messages

MANY = 2 * AT_ONCE + 7


def _many():
    return {f"model.layers.{i}.input_layernorm.weight": torch.full((8,), float(i)).bfloat16() for i in range(MANY)}


def test_no_message_of_a_push_has_more_pieces_than_a_socket_takes():
    tensors = _many()
    memory = Shared(1 << 20)
    sent = [pieces for pieces, _ in cut(tensors.items(), Manifest.of(tensors), lambda: memory.tensor)]
    assert [len(pieces) for pieces in sent] == [AT_ONCE, AT_ONCE, 7]
    weights = SharedWeights(tensors)  # pieces of the trainer's own memory
    placed = [pieces for pieces, _ in cut(weights.items(), Manifest.of(tensors), memory, shared=weights.shared)]
    assert [len(pieces) for pieces in placed] == [AT_ONCE, AT_ONCE, 7]
    assert max(len(_message(memory, pieces)) for pieces in [*sent, *placed]) < LARGEST
    memory.close()


def test_no_message_of_changes_has_more_patches_than_a_socket_takes():
    tensors = _many()
    manifest = Manifest.of(tensors)
    ledger = Ledger.of(manifest, set(), [{"kept": {i: [None, ["0:8"], ""] for i in range(MANY)}, "together": []}])
    memory = Shared(1 << 20)
    assert [*ledger.noting(tensors.items())]
    changed = {name: 2 * tensor + 1 for name, tensor in tensors.items()}
    sent = [patches for patches, _ in ledger.changes(changed.items(), lambda: memory.tensor, 1 << 20)]
    rising = [FIRST * 2**n for n in range(7)]  # the first is short: workers can begin
    assert [len(patches) for patches in sent] == [*rising, MANY - sum(rising)]
    assert max(map(len, sent)) <= AT_ONCE
    few = [patches for patches, _ in ledger.changes(tensors.items(), lambda: memory.tensor, 1 << 20, 100)]
    assert [len(patches) for patches in few] == [*rising[:5], *[100] * 8, MANY - sum(rising[:5]) - 800]
    # As long as they can be: of a million tensors, each with as many rows and changes as may come.
    longest = (10**6, SCALES, 10**7, LONGEST, LONGEST, LONGEST, 10**10)
    assert len(_message(memory, [longest] * AT_ONCE)) < LARGEST
    memory.close()


def _message(memory, pieces):
    return json.dumps({"memory": memory.handle, "pieces": [*pieces]})
