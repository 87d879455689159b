"""What a push is made of, without an engine: manifests, chunks, shared memory, fingerprints, the receipt's words."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit import Entry, Manifest, fingerprint
from nemo_fp8.rollout.refit.fingerprint import Fingerprint
from nemo_fp8.rollout.refit.memory import Opened, Shared
from nemo_fp8.rollout.refit.stream import capacity, cut


def _tensors():
    draws = torch.Generator().manual_seed(0)
    shapes = {"tall": (1000, 64), "wide": (256, 640), "vector": (77,), "scalar": (), "stack": (3, 40, 16)}
    return {name: torch.randn(shape, generator=draws).bfloat16() for name, shape in shapes.items()}


@pytest.mark.parametrize("size", [20_000, 100_000, 10_000_000])
def test_chunks_are_bounded_and_give_back_every_bit(size):
    tensors = _tensors()
    manifest = Manifest.of(tensors)
    size = capacity(manifest, size)
    assert size <= max(164_000, size)
    room = torch.zeros(size, dtype=torch.uint8)
    back = {name: [] for name in tensors}
    for pieces, used in cut(tensors.items(), manifest, lambda: room):
        assert used <= size
        for i, row, rows, offset in pieces:
            entry = manifest[i]
            assert row % entry.step == 0
            count = rows * entry.row_bytes
            back[entry.name].append(room[offset : offset + count].clone().view(torch.bfloat16))
    for name, tensor in tensors.items():
        assert torch.equal(torch.cat(back[name]).view(tensor.shape), tensor)


def test_a_tensor_that_was_not_announced_is_refused():
    tensors = _tensors()
    manifest = Manifest.of(tensors)
    for name, tensor in (("other", tensors["tall"]), ("tall", tensors["tall"][:-1]), ("tall", tensors["tall"].float())):
        with pytest.raises(PrecisionError, match=name):
            list(cut([(name, tensor)], manifest, lambda: torch.zeros(10**6, dtype=torch.uint8)))


BAD_ROWS = [None, ["a", "bfloat16"], ["", "bfloat16", [1]], ["a", "int64", [1]], ["a" * 5000, "bfloat16", [1]]]
BAD_SHAPES = [[-1], [0], [1.5], [2**40] * 3, [1] * 9, "11", None]


@pytest.mark.parametrize(
    "rows", [None, [], [["a", "bfloat16", [1]]] * 2, *([row] for row in BAD_ROWS), *([["a", "bfloat16", s]] for s in BAD_SHAPES)]
)
def test_a_manifest_from_outside_is_not_believed(rows):
    with pytest.raises(PrecisionError):
        Manifest.from_plain(rows)


def test_a_manifest_goes_out_and_comes_back():
    manifest = Manifest.of(_tensors())
    assert Manifest.from_plain(manifest.to_plain()) == manifest
    assert Manifest.of(iter(_tensors().items())) is None
    assert Manifest.of([*_tensors().items()]) == manifest


def test_shared_memory_is_private_and_says_no_to_what_it_is_not(tmp_path):
    shared = Shared(4096)
    try:
        shared.tensor.copy_(torch.arange(4096) % 251)
        opened = Opened(shared.handle)
        assert torch.equal(opened.read(64, torch.uint8, (100,)), shared.tensor[64:164])
        assert os.stat(f"/proc/self/fd/{shared.handle['fd']}").st_mode & 0o777 == 0o600
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(shared.handle["fd"], 10)  # sealed: a reader never sees it shrink
        for offset, shape in ((-64, (1,)), (0, (4097,)), (4090, (10,)), (1, (1,))):
            with pytest.raises(PrecisionError, match="does not lie inside"):
                opened.read(offset, torch.uint8 if offset != 1 else torch.float32, shape)
        for wrong in ({"size": 8192}, {"fd": 10_000}, {"pid": -1}, {"pid": "1"}, {"size": True}, {"name": "nemo_fp8-refit-0"}, {"name": 1}):
            with pytest.raises(PrecisionError, match="refused"):
                Opened(shared.handle | wrong)
        with open(tmp_path / "secret", "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            with pytest.raises(PrecisionError, match="not the memory that a Refit made"):
                Opened(shared.handle | {"fd": file.fileno()})
    finally:
        handle = shared.handle
        shared.close()
    again = Shared(4096)  # most likely under the same number
    assert again.handle != handle
    with pytest.raises(PrecisionError, match="refused"):
        Opened(handle)
    again.close()


def test_a_killed_sender_leaves_nothing_behind():
    code = (
        "import sys, time; from nemo_fp8.rollout.refit.memory import Shared; s = Shared(1 << 20); s.tensor.fill_(7);"
        "import json; print(json.dumps(s.handle), flush=True); time.sleep(60)"
    )
    before = set(os.listdir("/dev/shm"))
    sender = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    handle = json.loads(sender.stdout.readline())
    opened = Opened(handle)
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    assert int(opened.read(0, torch.uint8, (1 << 20,)).sum()) == 7 << 20  # what is open can be read to the end
    assert set(os.listdir("/dev/shm")) <= before
    with pytest.raises(PrecisionError, match="cannot be opened"):
        Opened(handle)


def test_a_fingerprint_depends_on_every_bit_and_not_on_the_cuts():
    x = torch.randn(300, 48).bfloat16()
    whole = fingerprint(x)
    parts = Fingerprint()
    for part in (x[:128], x[128:129], x[129:]):
        parts.add(part)
    assert parts.digest() == whole
    flipped = x.clone()
    flipped.view(torch.int16)[150, 20] ^= 1
    swapped = x.clone()
    swapped[[3, 200]] = swapped[[200, 3]]
    turned = x.flip(1)
    assert len({whole, *map(fingerprint, (flipped, swapped, turned, x[:-1], x.view(600, 24)))}) == 6


def test_entries_know_where_they_may_be_cut():
    assert Entry("a", "bfloat16", (256, 8)).step == 128
    assert Entry("a", "bfloat16", (4, 256, 8)).step == 1
    assert Entry("a", "float8_e4m3fn", (256, 8)).bytes == 2048
