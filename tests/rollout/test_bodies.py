"""What is taken for a body at a server's door: nothing in it is believed, and none takes memory or time without end."""

import asyncio
import json

import pytest
from support.rollout.door import ROUTE, Door, Engine

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.rollout.refit import door as endpoints
from nemo_fp8.rollout.refit.control import Server


def _with_message(message, rest=b""):
    text = json.dumps(message).encode()
    return len(text).to_bytes(8, "little") + text + rest


@pytest.mark.parametrize(
    ("method", "body", "headers", "words"),
    [
        ("begin", b"", {}, "A body of 0 bytes"),
        ("begin", b"{}", {"content-length": "-2"}, "A body of -2 bytes"),
        ("begin", b"{}", {"content-length": str(2**40)}, "At most"),
        ("begin", b"{}", {"content-length": str(2**26)}, "At most 33554432"),
        ("begin", b"{}", {"content-length": "1"}, "longer than it says"),
        ("begin", b"[]", {}, "no JSON object"),
        ("begin", b"\xff{", {}, "cannot be read"),
        ("begin", b'{"a":' + b"[" * 9 + b"]" * 9 + b"}", {}, "more than 8 lists in one another"),
        ("begin", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, "recursion"),
        ("bytes", b"12345678", {}, "cannot be read"),
        ("bytes", b"\xff" * 9, {}, "message is too long"),
        ("bytes", _with_message({"push": "a"}, b"more"), {"content-length": "3"}, "longer than it says"),
        ("bytes", _with_message([1, 2]), {}, "no JSON object"),
    ],
)
def test_no_body_is_believed(method, body, headers, words):
    door = Door(Engine())
    status, answer = asyncio.run(door.knock(f"{ROUTE}/{method}", body, **headers))
    assert status == 400
    assert words in str(PrecisionError([Problem(*row) for row in answer["problems"]]))
    assert door.engine.asked == []


def _readings(receive):
    """Both ways in which a body is read."""
    yield endpoints._message({"headers": [(b"content-length", b"33554432")]}, receive)
    yield endpoints._body(receive, memoryview(bytearray(1 << 25)))


def test_a_body_that_never_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(endpoints, "SILENCE", 0.1)

    async def never():
        await asyncio.Event().wait()

    for reading in _readings(never):
        with pytest.raises(PrecisionError, match="Nothing of it came for"):
            asyncio.run(asyncio.wait_for(reading, 5))


def test_a_body_that_comes_byte_by_byte_is_given_up(monkeypatch):
    """Each byte ends a silence, and none of them is worth a connection."""
    monkeypatch.setattr(endpoints, "SILENCE", 0.2)

    async def a_byte():
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"\x01", "more_body": True}

    for reading in _readings(a_byte):
        with pytest.raises(PrecisionError, match=r"Only [1-4] bytes of it came in"):
            asyncio.run(asyncio.wait_for(reading, 5))


def test_a_large_body_has_the_time_that_it_needs(monkeypatch):
    monkeypatch.setattr(endpoints, "SILENCE", 0.2)
    parts = [{"type": "http.request", "body": bytes(1 << 17), "more_body": i < 7} for i in range(8)]

    async def an_eighth():
        await asyncio.sleep(0.1)
        return parts.pop(0)

    async def read():
        return sum([len(part) async for part in endpoints._parts(an_eighth)])

    assert asyncio.run(read()) == 1 << 20


@pytest.mark.parametrize(
    "error", [OverflowError("int too big"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")]
)
def test_what_no_message_to_a_worker_can_hold_is_the_sender_s_fault(error):
    class Failing(Engine):
        async def collective_rpc(self, method, args):
            raise error

    status, answer = asyncio.run(Door(Failing()).push("begin"))
    assert status == 400
    assert type(error).__name__ in answer["problems"][0][1]


def test_the_bytes_behind_a_message_lie_in_memory_that_workers_can_open():
    """Which is used again for the next ones: no worker is told of bytes that an earlier body has left."""
    import torch

    from nemo_fp8.rollout.refit.memory import Opened

    seen = []

    class Reading(Engine):
        async def collective_rpc(self, method, args):
            memory = Opened(args[0]["memory"]).first(args[0]["used"])
            seen.append((args[0]["memory"], memory.read(0, torch.uint8, (memory.size,)).tolist()))
            return [{}]

    door, mine = Door(Reading()), {"push": "a", "pieces": [], "memory": "of the sender's choice", "used": 1 << 40}
    for content in ([1, 2, 3, 4, 5], [6, 7], [*range(250)]):
        body = _with_message(mine, bytes(content))
        assert asyncio.run(door.knock(f"{ROUTE}/bytes", body))[0] == 200
        assert seen[-1][1] == content
    assert seen[0][0] == seen[1][0]
    assert seen[2][0] != seen[0][0]  # which was too small


def test_no_more_bodies_are_read_than_are_written():
    """Each takes memory. What is sent beyond two at once waits in its sender's hands, and comes to the same memory."""

    async def scenario():
        may, seen = asyncio.Event(), []

        class Writing(Engine):
            async def collective_rpc(self, method, args):
                seen.append(args[0]["memory"]["name"])
                await may.wait()
                return [{}]

        door, body = Door(Writing()), _with_message({"push": "a", "pieces": []}, b"12345")
        sent = [asyncio.create_task(door.knock(f"{ROUTE}/bytes", body)) for _ in range(4)]
        await asyncio.sleep(0.05)
        assert len({*seen}) == len(seen) == 2
        may.set()
        assert [status for status, _ in await asyncio.gather(*sent)] == [200] * 4
        assert len({*seen}) == 2
        assert len(seen) == 4

    asyncio.run(scenario())


def test_memory_that_a_worker_may_still_read_is_not_used_again():
    """Its answer did not come: the next bytes come to other memory, and that of before is freed."""
    from nemo_fp8.rollout.refit.memory import Opened

    seen = []

    class Failing(Engine):
        async def collective_rpc(self, method, args):
            seen.append(args[0]["memory"])
            raise OverflowError("int too big")

    door, body = Door(Failing()), _with_message({"push": "a", "pieces": []}, b"12345")
    for _ in range(2):
        assert asyncio.run(door.knock(f"{ROUTE}/bytes", body))[0] == 400
        with pytest.raises(PrecisionError, match="refused"):
            Opened(seen[-1])
    assert seen[0] != seen[1]


def test_on_both_ways_the_sender_says_what_becomes_of_running_requests(monkeypatch):
    sent = {}

    def post(self, method, parts, kind):
        sent[method] = b"".join(map(bytes, parts))
        return {"answers": []}

    monkeypatch.setattr(Server, "_post", post)
    server = Server("http://node7:8000")
    server.hold("abort")
    server.call("write", {"push": "a"})
    server.carry({"push": "a"}, memoryview(b"values"))
    assert json.loads(sent["write"]) == {"push": "a", "running": "abort"}
    size = int.from_bytes(sent["bytes"][:8], "little")
    assert json.loads(sent["bytes"][8 : 8 + size]) == {"push": "a", "running": "abort"}
    assert sent["bytes"][8 + size :] == b"values"
