"""What a push is made of, without an engine: manifests, chunks, shared memory, fingerprints, the receipt's words."""

import fcntl
import gc
import json
import math
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit import Entry, Manifest, Refit, fingerprint
from nemo_fp8.rollout.refit.channel import Line
from nemo_fp8.rollout.refit.control import Offline, Server, refusal
from nemo_fp8.rollout.refit.fingerprint import Fingerprint, _sums
from nemo_fp8.rollout.refit.memory import (
    BUFFERS,
    MOST_MAPPED,
    MOST_SPARE,
    Mappings,
    Opened,
    Shared,
    SharedWeights,
    Spare,
)
from nemo_fp8.rollout.refit.receipt import receipt
from nemo_fp8.rollout.refit.wire import SharedMemory, capacity, cut, transport_of
from nemo_fp8.rollout.refit.worker.layouts import Facts, Tally


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


CPU = torch.device("cpu")


def test_layers_are_gathered_where_earlier_ones_were_that_nobody_refers_to():
    """Memory that a layer's method kept is not used again; a layer that fits nowhere has new memory, and small memory
    is let go of."""
    from nemo_fp8.rollout.refit.worker.packing import StagingMemory

    room, wide = StagingMemory(), torch.empty(64, 32, dtype=torch.bfloat16)
    first = room.take(wide, CPU)
    assert (first.shape, first.stride(), first.dtype) == (wide.shape, wide.stride(), wide.dtype)
    place, kept = first.data_ptr(), first[3]
    del first
    assert room.take(wide, CPU).data_ptr() != place  # `kept` refers to it
    assert len(room.kept) == 2
    del kept
    assert room.take(wide.float().t(), CPU).data_ptr() != place  # twice as large
    assert len(room.kept) == 1
    place = room.kept[0].data_ptr()
    small, other = room.take(torch.empty(3, 5), CPU), room.take(torch.empty(()), CPU)
    assert small.data_ptr() == place != other.data_ptr()


def test_a_device_without_a_number_is_the_one_of_the_worker():
    """vLLM names it with or without."""
    from nemo_fp8.rollout.refit.worker.packing import _lies_on

    there = SimpleNamespace(device=torch.device("cuda", 1))
    assert _lies_on(there, torch.device("cuda"))
    assert _lies_on(there, torch.device("cuda", 1))
    assert not _lies_on(there, torch.device("cuda", 0))
    assert not _lies_on(there, CPU)


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="Linux here has no huge pages.")
def test_layers_are_gathered_in_huge_pages():
    """What Linux is asked for stands in its list of the process's memory, for each mapping."""
    from nemo_fp8.rollout.refit.worker.packing import StagingMemory

    # Memory of its own: numpy asks for huge pages, too, and malloc gives its memory again.
    like = torch.frombuffer(mmap.mmap(-1, 2**24), dtype=torch.float32).view(2048, 2048)
    torch.arange(2.0**22, out=like.view(-1))
    assert "hg" not in _flags_of(like)
    gathered = StagingMemory().take(like, CPU)
    assert "hg" in _flags_of(gathered)
    gathered[:] = like
    assert torch.equal(gathered, like)


def _flags_of(tensor):
    """Return what Linux notes of the mapping in which a tensor begins."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(n, 16) for n in found.groups())
            inside = first <= tensor.data_ptr() < end
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping")


BAD_ROWS = [None, ["a", "bfloat16"], ["", "bfloat16", [1]], ["a", "int64", [1]], ["a" * 5000, "bfloat16", [1]]]
BAD_SHAPES = [[-1], [0], [1.5], [2**40] * 3, [1] * 9, "11", None]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [],
        [["a", "bfloat16", [1]]] * 2,
        *([row] for row in BAD_ROWS),
        *([["a", "bfloat16", s]] for s in BAD_SHAPES),
    ],
)
def test_a_manifest_from_outside_is_not_believed(rows):
    with pytest.raises(PrecisionError):
        Manifest.from_plain(rows)


def test_a_manifest_that_no_model_has_is_refused_by_its_number():
    with pytest.raises(PrecisionError, match="300,000 tensors; a push takes 1 to 262,144"):
        Manifest.from_plain([["a", "bfloat16", [1]]] * 300_000)


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
        for wrong in (
            {"size": 8192},
            {"fd": 10_000},
            {"pid": -1},
            {"pid": "1"},
            {"size": True},
            {"name": "nemo_fp8-refit-0"},
            {"name": 1},
        ):
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


def until(so):
    """Wait until it is so."""
    end = time.monotonic() + 20
    while not so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_worker_keeps_a_few_mappings_of_senders_that_live():
    """Those that were used last: a trainer's buffers stay, whatever else comes between two of its pushes."""
    mappings, senders = Mappings(), [Shared(4096) for _ in range(MOST_MAPPED + 2)]
    buffers, opened = mappings.opened(senders[0].handle), []
    for sender in senders[:-1]:
        opened.append(mappings.opened(sender.handle))
        assert mappings.opened(senders[0].handle) is buffers
    assert len(mappings) == MOST_MAPPED
    assert mappings.opened(senders[-2].handle) is opened[-1]
    assert mappings.opened(senders[-1].handle) not in opened
    assert mappings.opened(senders[0].handle) is buffers
    assert mappings.opened(senders[1].handle) is not opened[1]
    for sender in senders:
        sender.close()
    until(lambda: not len(mappings))


def test_mappings_that_come_and_go_leave_no_thread_and_no_descriptor():
    """Of more senders than are kept, in turns, and of handles in which something else stands as well."""
    mappings, senders = Mappings(), [Shared(4096) for _ in range(MOST_MAPPED + 2)]

    def counted():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for sender in senders:
        mappings.opened(sender.handle)
    threads, files = counted()
    for i in range(20):
        for sender in senders:
            mappings.opened(sender.handle | {"junk": i})
    assert counted() == (threads, files)
    assert len(mappings) == MOST_MAPPED
    for sender in senders:
        sender.close()
    until(lambda: not len(mappings) and threading.active_count() < threads)
    late = Shared(4096)  # and its end is seen, too
    mappings.opened(late.handle)
    late.close()
    until(lambda: not len(mappings))


def test_spare_memory_is_lent_again():
    """To a body that is not much longer; not what was much larger than any, nor what a worker may still read."""
    spare, handles = Spare(), []
    for size in (5000, 8192, 8193, 100, 2 * MOST_SPARE):
        with spare.lent(size) as shared:
            assert shared.size >= size
            handles.append(shared.handle)
    assert handles[0] == handles[1] == handles[3] != handles[2]
    assert _is_refused(handles[4])
    with spare.lent(1) as one, spare.lent(1) as two, spare.lent(1) as three:
        kept = [shared.handle for shared in (one, two, three)]
    assert sorted(one == two for one in handles[:3:2] for two in kept) == [False] * 4 + [True] * 2
    found = [handle for handle in kept if not _is_refused(handle)]
    assert len(found) == BUFFERS
    with pytest.raises(KeyError) as caught:
        _die_holding(spare)
    (there,) = caught.value.args
    assert there["used"] == 3
    assert _is_refused(there["memory"])


def _die_holding(spare):
    with spare.holding(b"123") as there:
        raise KeyError(there)


def _is_refused(handle):
    try:
        Opened(handle)
    except PrecisionError:
        return True
    return False


@pytest.mark.parametrize("size", [-1, 4097, 1 << 40, "5", None, 3.0, True], ids=str)
def test_no_more_of_a_memory_is_used_than_there_is(size):
    shared = Shared(4096)
    try:
        with pytest.raises(PrecisionError, match="said to be used"):
            Opened(shared.handle).first(size)
        part = Opened(shared.handle).first(64)
        assert part.read(0, torch.uint8, (64,)).shape == (64,)
        with pytest.raises(PrecisionError, match="does not lie inside"):
            part.read(0, torch.uint8, (65,))
    finally:
        shared.close()


def test_a_killed_sender_leaves_nothing_behind():
    code = (
        "import sys, time; from nemo_fp8.rollout.refit.memory import Shared; s = Shared(1 << 20); s.tensor.fill_(7);"
        "import json; print(json.dumps(s.handle), flush=True); time.sleep(60)"
    )
    sender = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    handle, mappings = json.loads(sender.stdout.readline()), Mappings()
    opened = mappings.opened(handle)
    time.sleep(0.2)
    assert len(mappings) == 1  # for as long as the sender lives
    # What has no name goes with its processes; what lies in /dev/shm would stay, where other engines have files, too.
    held = [os.readlink(file) for file in Path(f"/proc/{sender.pid}/fd").iterdir()]
    assert any(handle["name"] in file for file in held)
    assert not any("/dev/shm" in file for file in [*held, Path(f"/proc/{sender.pid}/maps").read_text()])
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    until(lambda: not len(mappings))
    assert int(opened.read(0, torch.uint8, (1 << 20,)).sum()) == 7 << 20  # what is open can be read to the end
    with pytest.raises(PrecisionError, match="cannot be opened"):
        Opened(handle)


@pytest.mark.parametrize("rows", [300, 5000], ids=["few", "many"])
def test_a_fingerprint_depends_on_every_bit_and_not_on_the_cuts(rows):
    x = torch.randn(rows, 48).bfloat16()
    whole = fingerprint(x)
    parts, closed = Fingerprint(), Fingerprint()
    for part in (x[:128], x[128:129], x[129:]):
        parts.add(part)
        closed.add_sums(*(sums.clone() for sums in _sums(part)[:2]), 96)
    closed.close()
    assert parts.digest() == closed.digest() == closed.digest() == whole
    flipped = x.clone()
    flipped.view(torch.int16)[150, 20] ^= 1
    swapped = x.clone()
    swapped[[3, 200]] = swapped[[200, 3]]
    turned = x.flip(1)
    assert len({whole, *map(fingerprint, (flipped, swapped, turned, x[:-1], x.view(2 * rows, 24)))}) == 6


def test_entries_know_where_they_may_be_cut():
    assert Entry("a", "bfloat16", (256, 8)).step == 128
    assert Entry("a", "bfloat16", (4, 256, 8)).step == 1
    assert Entry("a", "float8_e4m3fn", (256, 8)).bytes == 2048


def _freed():
    tensor = torch.zeros(128, 128).bfloat16()
    tensor.untyped_storage().resize_(0)  # as FSDP lets go of what it gathered
    return tensor


# What has no bytes that could be sent -> how it is named, and what helps.
NOT_SENDABLE = {
    "nothing": (lambda: None, r"w is None\.", "torch.Tensor"),
    "a list": (lambda: [1.0], r"w is a list\.", "torch.Tensor"),
    "an array": (lambda: torch.zeros(3).numpy(), r"w is a numpy\.ndarray\.", "torch.Tensor"),
    "meta": (lambda: torch.zeros(128, 128, device="meta"), "w is on the meta device", "gathered"),
    "sparse": (lambda: torch.zeros(128, 128).to_sparse(), "w is sparse_coo", "to_dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "w is a nested tensor", "parts"),
    "freed": (_freed, "w is without memory", "gathered"),
    "float64": (lambda: torch.zeros(3).double(), r"w comes in float64\.", r"to\(torch.bfloat16\)"),
}


@pytest.mark.parametrize(("make", "named", "remedy"), NOT_SENDABLE.values(), ids=NOT_SENDABLE)
def test_tensors_without_bytes_are_named_before_anything_is_sent(make, named, remedy):
    with pytest.raises(PrecisionError, match=named) as refused:
        Manifest.of({"good": torch.zeros(3), "w": make(), "v": None}, to_send=True)
    assert [p.what.split()[0] for p in refused.value.problems] == ["w", "v"]  # all of them at once
    assert re.search(remedy, refused.value.problems[0].remedy)
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize(("make", "named", "remedy"), NOT_SENDABLE.values(), ids=NOT_SENDABLE)
def test_they_cannot_be_shared_either(make, named, remedy):
    with pytest.raises(PrecisionError, match=named):
        SharedWeights({"good": torch.zeros(3), "w": make()})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "came as None"),
        (torch.nn.Linear(2, 2), r"came as a torch.nn.modules.linear.Linear"),
        (torch.zeros(3), "came as a torch.Tensor"),
        ("model.safetensors", "came as a str"),
        (lambda: (), "came as a function"),
        ([torch.zeros(3)], "is a torch.Tensor"),
        ([1], "is a int"),
    ],
    ids=["nothing", "module", "tensor", "path", "function", "tensors", "numbers"],
)
@pytest.mark.parametrize("take", [Manifest.of, SharedWeights])
def test_what_are_no_names_with_tensors_is_one_error(take, given, words):
    with pytest.raises(PrecisionError, match=words):
        take(given)


@pytest.mark.parametrize(("make", "named", "remedy"), NOT_SENDABLE.values(), ids=NOT_SENDABLE)
def test_an_iterator_that_brings_them_is_told_the_same(make, named, remedy):
    manifest = Manifest.of({"w": torch.zeros(128, 128).bfloat16()})
    with pytest.raises(PrecisionError, match=named):
        list(cut([("w", make())], manifest, lambda: torch.zeros(10**6, dtype=torch.uint8)))


def test_a_manifest_of_meta_tensors_is_good():
    assert Manifest.of({"w": torch.zeros(3, device="meta")}) == Manifest.of({"w": torch.zeros(3)}, to_send=True)


def test_odd_strides_are_sent_as_they_are_read():
    base = torch.randn(64, 96).bfloat16()
    odd = {
        "turned": base.t(),
        "every other": base[::2, ::3],
        "repeated": base[:1].expand(40, -1),
        "parameter": torch.nn.Parameter(base),
    }
    manifest, room = Manifest.of(odd, to_send=True), torch.zeros(10**6, dtype=torch.uint8)
    for pieces, _ in cut(odd.items(), manifest, lambda: room):
        for i, _, rows, offset in pieces:
            entry = manifest[i]
            there = room[offset : offset + entry.bytes].view(torch.bfloat16).view(entry.shape)
            assert rows == entry.rows
            assert torch.equal(there, odd[entry.name])
        assert len(pieces) == len(odd)


def test_a_tensor_that_comes_twice_is_named():
    x = torch.zeros(256, 128).bfloat16()
    with pytest.raises(PrecisionError, match=r"w came twice\."):
        list(cut([("w", x), ("w", x)], Manifest.of({"w": x}), lambda: torch.zeros(10**6, dtype=torch.uint8)))


def test_a_refusal_is_made_of_sentences():
    for why in ("push 1 died half-way", "push 1 died half-way."):
        assert refusal(why).problems[0].why == "A push of weights died half-way: push 1 died half-way."


def test_a_part_of_a_sharded_tensor_is_no_tensor(tmp_path):
    """Of a DTensor every process has its shard; to copy it as it is would be an error from deep inside of torch."""
    code = """
import sys, torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit import Manifest
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=0, world_size=1)
sharded = distribute_tensor(torch.zeros(128, 128), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
try:
    Manifest.of({"w": sharded}, to_send=True)
except PrecisionError as error:
    print(error)
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert "w is a DTensor." in done.stdout, done.stderr
    assert "full_tensor()" in done.stdout


@pytest.mark.parametrize("chunk", [0, -1, 2**20 - 1, 1.5e6, "1 MiB", None, float("nan")])
def test_a_chunk_is_a_whole_number_of_bytes(chunk):
    with pytest.raises(PrecisionError, match=r"chunk=(.|\n)*whole number of bytes"):
        Refit("http://127.0.0.1:1", chunk=chunk)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "localhost", "Qwen/Qwen3-8B", "ftp://127.0.0.1", "/models/qwen3"]
)
def test_a_text_that_is_no_url_is_refused_before_a_push(url):
    with pytest.raises(PrecisionError, match=r"Cannot push to(.|\n)*Give http://HOST:PORT"):
        Refit(url)


# ---------------------------------------------------------------------- receipts


def _written(manifest, *workers):
    """Return the rows of a receipt of these facts of workers, by the number of the tensor."""
    answers = [
        {"facts": {str(i): facts.to_plain() for i, facts in told.items()}, "unwritten": [], "held": 0}
        for told in workers
    ]
    about = {"push": "", "passed_over": (), "bytes": 0, "chunks": 0, "chunk_bytes": 0, "seconds": 1.0}
    return receipt(manifest, answers, prefix_cache_reset=True, **about).tensors


@pytest.mark.parametrize(
    ("dtype", "kind", "bad"),
    [(torch.float8_e4m3fn, "e4m3", 0x7F), (torch.float8_e4m3fn, "e4m3", 0xFF), (torch.float8_e8m0fnu, "e8m0", 0xFF)],
    ids=str,
)
def test_bad_scales_of_a_byte_are_counted_where_there_are_any(dtype, kind, bad):
    """Whether there is one is asked of the extremes first: a quick look that finds nothing has to be right."""
    good = torch.arange(0x7F, dtype=torch.uint8).repeat(2)
    for wrong in ([], [0], [3, 126, 253], [*range(254)]):
        scales = good.clone()
        scales[wrong] = bad
        tally = Tally()
        tally.facts[0].count_scales(good.view(dtype), kind)
        tally.facts[1].experts = 2
        tally.facts[1].count_scales(scales.view(dtype), kind, slice(0, 2))
        tally.settle()
        assert tally.facts[0].bad_scales == 0
        each = [sum(i < 127 for i in wrong), sum(i >= 127 for i in wrong)]
        assert tally.facts[1].bad_scales == (each if each[0] != each[1] else each[0])


def test_a_receipt_has_the_numbers_of_each_tensor_and_expert():
    """Of two workers, one of which holds nothing of the second tensor: sums, the largest, and the SNR of the sums."""
    manifest = Manifest.from_plain([["one", "bfloat16", [2, 2]], ["stack", "bfloat16", [3, 2, 2]]])
    largest = [3.0, 0.0, math.inf]
    stack = Facts(experts=3, signal=[1e4, 0.0, 5.0], noise=[1.0, 0.0, 0.0], largest=largest, nonfinite=[0, 0, 2])
    first = {0: Facts(signal=90.0, noise=0.5, largest=1.0, saturated=2), 1: stack}
    one, both = _written(manifest, first, {0: Facts(signal=10.0, noise=0.5, largest=2.0, saturated=3)})
    assert (one.snr_db, one.largest, one.saturated, one.experts) == (pytest.approx(20), 2.0, 5, {})
    assert both.experts["snr_db"] == [pytest.approx(40), None, math.inf]
    assert (both.snr_db, both.largest, both.nonfinite) == (pytest.approx(40), math.inf, 2)
    assert both.experts["largest"] == largest
    (nothing,) = _written(manifest, {1: Facts(experts=3)})  # counted, as of a tensor that no patch changed
    assert nothing.experts["saturated"] == [0, 0, 0]


@pytest.mark.parametrize("numbers", [[1.0, math.nan], [math.nan, 1.0], [math.nan, math.inf]], ids=str)
def test_the_largest_of_a_receipt_is_no_number_if_one_is_none(numbers):
    manifest = Manifest.from_plain([["stack", "bfloat16", [2, 2, 2]]])
    (stack,) = _written(manifest, {0: Facts(experts=2, largest=numbers)})
    assert math.isnan(stack.largest)


class _Streaming:
    """A control whose one worker reads the messages of a stream, and gives up after two seconds of waiting."""

    def call(self, method, message):
        line = Line(message["socket"], 2.0)
        for _ in line.messages():
            pass
        line.close()
        return [{}]


def test_many_messages_that_fill_no_buffer_are_answered():
    """As those of 100,000 tensors in shared memory are: each side would wait for the other to read."""
    weights, ended = Shared(64), []
    transport = SharedMemory(_Streaming(), 64, weights, None, {weights})
    transport.mapped.add(transport.shared)

    def stream():
        transport.open("a", 1)
        for _ in range(300):
            transport.send([[0, 0, 1, 0]], 0)
        transport.end()
        ended.append(transport.unanswered)

    thread = threading.Thread(target=stream, daemon=True)
    thread.start()
    thread.join(30)
    assert ended == [0]
    transport.close()


def test_a_transport_that_is_closed_goes_without_the_collector_of_cycles():
    """Its buffers would stay in a trainer that collects by hand, as Megatron does."""
    transport = SharedMemory(_Streaming(), 64, None, None, set())
    transport.mapped.add(transport.shared)
    transport.open("a", 1)
    transport.end()
    transport.close()
    gone = weakref.ref(transport)
    gc.disable()
    try:
        del transport
        assert gone() is None
    finally:
        gc.enable()


def test_memory_that_is_let_go_of_is_not_held_by_a_forked_child():
    """As those of a data loader are: workers would keep it mapped as long as the child lives."""
    shared = Shared(4096)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        file = os.open(f"/proc/{child}/fd/{shared.handle['fd']}", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shared.close()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(file)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_tensor_that_no_server_takes_at_once_is_refused_before_the_first_byte():
    """One of which a loader makes other values is not cut."""
    manifest = Manifest([Entry("experts.gate_up_proj", "bfloat16", (128, 5760, 2880))])
    assert transport_of("http", Server("http://127.0.0.1:1"), manifest, 1 << 28).size == 32 << 20
    with pytest.raises(PrecisionError, match=r"experts\.gate_up_proj has 4\.2 GB, and a server takes 2\.1 GB"):
        transport_of("http", Server("http://127.0.0.1:1"), manifest, 1 << 28, whole=[0])


class _Core:
    """An EngineCore as far as it is paused."""

    paused = False

    def call_utility(self, name, *arguments):
        if name == "is_scheduler_paused":
            return self.paused
        self.paused = name == "pause_scheduler"
        return None


def test_a_pause_that_an_interrupted_push_left_is_not_its_owner_s():
    core = _Core()
    engine = SimpleNamespace(engine_core=core, output_processor=SimpleNamespace(request_states={}))
    control = Offline(SimpleNamespace(llm_engine=engine))
    control.hold("wait")  # and then Ctrl-C, twice
    control.hold("wait")
    control.free()
    assert not core.paused
    core.paused = True
    control.hold("wait")
    control.free()
    assert core.paused


def test_a_second_ctrl_c_leaves_no_engine_that_stands_still():
    """It comes while the end of a push waits for the workers."""
    control = Mock(spec_set=("call", "hold", "free", "refuse", "allow", "forget"))
    control.call.return_value = [{"mixed": ""}]
    refit, closing = Refit(control), Mock()
    closing.close.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        refit._end_dead("a", None, Future(), closing, KeyboardInterrupt())
    assert [name for name, *_ in control.mock_calls] == ["call", "free"]
    assert control.call.call_args.args[0] == "abandon"
