"""A patch: how it is written, how a worker adds it to what it holds, and reads that as patches pass."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import build_for

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.kernels import Order
from nemo_fp8.numerics.kernels import patches as kernel
from nemo_fp8.rollout.refit import fingerprint
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, _sums, together
from nemo_fp8.rollout.refit.patch import PATTERNS, decode, encode, size_of
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.layouts import AMX, ROWS, Tally
from nemo_fp8.rollout.refit.worker.patches import Passing, moved, place_of
from nemo_fp8.rollout.refit.worker.routes import Route, Target

QUICK = st.booleans()


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
@given(changes(), QUICK)
def test_a_patch_goes_out_and_comes_back(change, quick):
    strip, positions, differences = change
    if len(positions) == 0:
        return
    *counts, raw = encode(strip, positions, differences, quick)
    width = differences.itemsize
    assert len(raw) == size_of(strip, *counts, width) <= strip * width
    there, wanted = np.zeros(strip, differences.dtype), np.zeros(strip, differences.dtype)
    wanted[positions] = differences
    for places, by in decode(raw, strip, *counts, width):
        assert len(np.unique(places)) == len(places)
        there[places] += by
    assert np.array_equal(there, wanted)
    for places, by in reversed(decode(raw, strip, *counts, width)):
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
    *_, raw = encode(strip, positions, differences)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    assert 8 * len(raw) / len(positions) < entropy + 1 + 1.5


@settings(deadline=None)
@given(st.integers(1, 300), st.sampled_from(kernel.Coding), st.data())
def test_no_bytes_are_believed(strip, coding, data):
    """Whatever comes, it is refused or gives places inside the strip, each once a list."""
    ups = data.draw(st.integers(0, strip))
    downs = data.draw(st.integers(0, strip - ups))
    counts = coding, ups, downs, data.draw(st.integers(0, strip - ups - downs))
    n = size_of(strip, *counts, 1)
    raw = np.frombuffer(data.draw(st.binary(min_size=n, max_size=n)), np.uint8)
    live = torch.zeros(strip, dtype=torch.uint8)
    place = place_of((strip,), ((0, strip),), ((0, strip),), live)
    to = kernel.Matrices((strip, 1), 1, [place])
    (added,) = kernel.add([kernel.Addition(raw.ctypes.data, strip, *counts, 0, to)])
    try:
        lists = decode(raw, strip, *counts, 1)
    except PrecisionError:
        assert not added
        assert not live.any()  # all of it or nothing
        return
    assert added
    for places, by in lists:
        assert len(places) == len(by) == len(np.unique(places))
        assert places.size == 0 or 0 <= places.min() <= places.max() < strip


@pytest.mark.parametrize("isa", ["native", "avx2"])
@pytest.mark.parametrize(("at", "bit", "more", "good"), [
    (0, 7, 1, False),  # an eighth word, where 100 elements have seven
    (0, 1, 0, False),  # one word more than it says
    (3, 4, 0, False),  # element 100
    (3, 3, 0, True),  # element 99
])  # fmt: skip
def test_words_of_a_bitmap_lie_in_the_strip(at, bit, more, good, isa, monkeypatch):
    """Of a patch whose first and last words have a bit: one more makes it no patch, unless it is an element's."""
    build_for(isa, monkeypatch)
    coding, ups, downs, others, raw = encode(100, np.array([5, 96]), np.ones(2, np.uint8), quick=True)
    assert (coding, ups, downs, others, len(raw)) == (kernel.Coding.QUICK, 2, 0, 0, 5)
    raw, ups = np.append(raw, np.array([1, 0] * more, np.uint8)), ups + more
    raw[at] |= 1 << bit
    live = torch.zeros(1, 100, dtype=torch.uint8)
    to = kernel.Matrices((1, 100), 1, [place_of((1, 100), ((0, 1), (0, 100)), ((0, 1), (0, 100)), live)])
    assert kernel.add([kernel.Addition(raw.ctypes.data, 100, coding, ups, downs, others, 0, to)]) == [good]
    if good:
        ((places, _), *_) = decode(raw, 100, coding, ups, downs, others, 1)
        assert places.tolist() == live.flatten().nonzero().flatten().tolist() == [5, 96, 99]
    else:
        assert not live.any()
        with pytest.raises(PrecisionError, match=r"words are beyond|positions are beyond|words, and says"):
            decode(raw, 100, coding, ups, downs, others, 1)


def test_a_patch_of_another_size_is_refused():
    *_, raw = encode(100, np.array([5]), np.array([1], np.uint8))
    for wrong in (raw[:-1], np.append(raw, 0).astype(np.uint8)):
        with pytest.raises(PrecisionError, match="counts ask for"):
            decode(wrong, 100, 0, 1, 0, 0, 1)


# ---------------------------------------------------------------------- added by a worker


def _added(shape, source, to, live, patch, back):
    """What lies there after the kernel added a patch of a whole tensor, and after numpy did."""
    (strip, *counts, raw), width = patch, live.itemsize
    place = place_of(shape, source, to, live)
    matrix = (shape[-2] if len(shape) > 1 else strip, shape[-1] if len(shape) > 1 else 1)
    to = kernel.Matrices(matrix, width, [place])
    (done,) = kernel.add([kernel.Addition(raw.ctypes.data, strip, *counts, 0, to)], back)
    return done, live.clone()


BOXES = [
    ((40, 24), ((0, 40), (0, 24)), ((0, 40), (0, 24)), (40, 24)),
    ((40, 24), ((8, 40), (5, 24)), ((2, 3), (1, 33), (0, 19)), (3, 40, 20)),
    ((4, 10, 24), ((1, 3), (0, 10), (4, 9)), ((0, 2), (2, 12), (0, 5)), (2, 12, 6)),
    ((60,), ((10, 50),), ((5, 45),), (45,)),
]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("width", PATTERNS)
@pytest.mark.parametrize(("shape", "source", "to", "there"), BOXES, ids=str)
def test_the_kernel_adds_what_numpy_adds(shape, source, to, there, width, quick):
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
    patch = (strip, *encode(strip, positions, by, quick))
    done, added = _added(shape, source, to, live, patch, False)
    assert done
    assert np.array_equal(added.numpy().view(PATTERNS[width]), expected)
    assert not torch.equal(added, before)
    assert torch.equal(_added(shape, source, to, live, patch, True)[1], before)


BOXES_FOR_AMX = [
    ((40, 24), ((0, 40), (0, 24)), ((0, 1), (0, 40), (0, 24)), (1, 64, 24)),
    ((40, 24), ((3, 40), (5, 17)), ((2, 3), (32, 69), (4, 16)), (3, 96, 20)),
    ((4, 40, 24), ((1, 3), (0, 40), (4, 10)), ((0, 2), (64, 104), (0, 6)), (2, 128, 6)),
]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("shape", "source", "to", "there"), BOXES_FOR_AMX, ids=str)
def test_the_kernel_adds_to_codes_for_amx(shape, source, to, there, quick):
    """What it adds to codes in plain order, forth and back."""
    draws, strip = np.random.default_rng(0), int(np.prod(shape))
    positions = np.flatnonzero(draws.random(strip) < 0.2)
    by = np.where(draws.random(len(positions)) < 0.7, 1, draws.integers(2, 256, len(positions))).astype(np.uint8)
    *counts, raw = encode(strip, positions, by, quick)
    plain = torch.from_numpy(draws.integers(0, 256, there, dtype=np.uint8))
    live, before = torch.empty_like(plain), plain.clone()
    for m, codes in enumerate(plain):
        AMX.store(live[m], 0, codes)
    place = place_of(shape, source, to, live, Order.AMX)
    for back, memory, at in ((False, plain, place_of(shape, source, to, plain)), (False, live, place)):
        there = kernel.Matrices(shape[-2:], 1, [at])
        assert kernel.add([kernel.Addition(raw.ctypes.data, strip, *counts, 0, there)], back) == [True]
        assert memory is plain or torch.equal(torch.stack([AMX.load(m, 0, len(m)) for m in live]), plain)
    assert not torch.equal(plain, before)
    kernel.add([kernel.Addition(raw.ctypes.data, strip, *counts, 0, there)], back=True)
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
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "box", [((0, 2048), (0, 256)), ((100, 2000), (0, 256)), ((0, 1030), (64, 200)), ((0, 1030), (8, 200))], ids=str
)
def test_patches_are_added_together_and_their_rows_summed_up(isa, layout, box, quick, monkeypatch):
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
        by = draws.choice([1, 255, 5], len(positions), p=[0.4, 0.4, 0.2]).astype(np.uint8)
        *counts, raw = encode(each * 256, positions, by, quick)
        if n == bad:
            raw[-len(raw) // 2 :] = 0xFF
        raws.append(raw)
        additions.append(kernel.Addition(raw.ctypes.data, each * 256, *counts, n * each * 256, there))
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


@pytest.mark.parametrize("quick", [False, True])
def test_a_patch_is_added_to_places_of_words_of_a_bitmap_and_to_others(quick):
    """Of one tensor: columns that begin with a word, columns that do not, and rows that are not summed up."""
    draws, shape = np.random.default_rng(0), (70, 256)
    live = torch.from_numpy(draws.integers(0, 256, shape, dtype=np.uint8))
    expected, positions = live.clone(), np.flatnonzero(draws.random(live.numel()) < 0.1)
    by = draws.choice([1, 255, 5], len(positions), p=[0.4, 0.4, 0.2]).astype(np.uint8)
    after = live.clone()
    after.numpy().reshape(-1)[positions] += by
    boxes = [((0, 70), (64, 128)), ((3, 70), (136, 256)), ((0, 70), (0, 64))]
    places = [place_of(shape, box, box, live) for box in boxes]
    sums = {
        n: (torch.full((box[0][1] - box[0][0],), -1), torch.zeros((box[1][1] - box[1][0]) // 8, dtype=torch.int64))
        for n, box in enumerate(boxes[:2])
    }
    *counts, raw = encode(live.numel(), positions, by, quick)
    to = kernel.Matrices(shape, 1, places, sums)
    assert kernel.add([kernel.Addition(raw.ctypes.data, live.numel(), *counts, 0, to)], summed=True) == [True]
    for n, box in enumerate(boxes):
        here = tuple(slice(*one) for one in box)
        expected[here] = after[here]
        if n in sums:
            assert all(torch.equal(*pair) for pair in zip(sums[n], _sums(after[here].contiguous())[:2], strict=True))
    assert torch.equal(live, expected)  # and nothing outside of the boxes


def test_a_route_that_turns_a_tensor_over_has_no_place():
    assert place_of((4, 6), ((0, 4), (0, 6)), ((0, 6), (0, 4)), torch.empty(6, 4)) is None
    assert place_of((2, 2, 4, 6), ((0, 2),) * 4, ((0, 2),) * 4, torch.empty(2, 2, 4, 6)) is None


def test_a_position_follows_its_route():
    """The example of the docstring, and what a route does not take along."""
    here, places = moved(np.array([11, 13, 23]), (4, 6), ((2, 4), (0, 6)), ((1, 2), (0, 2), (0, 6)))
    assert here.tolist() == [False, True, True]
    assert [place.tolist() for place in places] == [[1, 1], [0, 1], [1, 5]]


def test_single_codes_are_found_where_a_layout_stores_them():
    codes = (torch.arange(64 * 256) % 251).to(torch.uint8).view(64, 256)
    live = torch.empty_like(codes)
    AMX.store(live, 0, codes)
    rows, columns = np.divmod(np.arange(64 * 256), 256)
    at = AMX.where(rows, columns, 256)
    assert torch.equal(live[tuple(map(torch.from_numpy, at))].view(64, 256), codes)


# ---------------------------------------------------------------------- read while they pass


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
