"""The door of a server, asked over its own protocol (ASGI): who may push, who waits, and what is taken for a body.

Behind it stands an engine that writes down what is asked of it; ``test_serve.py`` and ``test_refit.py`` push through real servers.
"""

import asyncio
import json

import pytest

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit import endpoints
from nemo_fp8.rollout.refit.control import Server
from nemo_fp8.rollout.refit.endpoints import RefitEndpoints

ROUTE = "/nemo_fp8/refit"


class Engine:
    """What the door asks of vLLM's client, and an answer of one worker to each method."""

    def __init__(self, **answers):
        self.asked = []
        self.answers = {"begin": {"accepted": True}, "abandon": {"mixed": ""}} | answers

    async def collective_rpc(self, method, args):
        self.asked.append(method.removeprefix("nemo_fp8_refit_"))
        answer = self.answers.get(self.asked[-1], {})
        return [await answer() if callable(answer) else answer]

    async def pause_generation(self, mode):
        self.asked.append(f"pause {mode}")

    async def resume_generation(self):
        self.asked.append("resume")

    async def reset_prefix_cache(self, reset_running_requests):
        self.asked.append("forget")


class Door:
    """A server's door, with an application behind it that says yes to everything."""

    def __init__(self, engine, token=""):
        self.engine, self.passed = engine, []
        self.door = RefitEndpoints(self._app)
        self.door.token = token

    async def _app(self, scope, receive, send):
        self.passed.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def knock(self, path, body=b"{}", client="127.0.0.1", method="POST", **headers):
        """Status and answer."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent, parts = [], [text[: len(text) // 2], text[len(text) // 2 :]]
        said = {"content-length": str(len(text))} | headers

        async def receive():
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)} if parts else {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        state = type("State", (), {"engine_client": self.engine})
        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "client": client and (client, 5),
            "app": type("App", (), {"state": state}),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in said.items()],
        }
        await self.door(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    async def push(self, method, number="a", **message):
        return await self.knock(f"{ROUTE}/{method}", {"push": number, **message})


# ---------------------------------------------------------------------- who may


@pytest.mark.parametrize(
    ("token", "client", "headers", "status"),
    [
        ("", "127.0.0.1", {}, 200),
        ("", "::1", {}, 200),
        ("", None, {}, 200),  # a socket in the file system
        ("", "10.0.0.7", {}, 403),
        ("", "testclient", {}, 403),
        ("", "127.0.0.1", {"origin": "http://127.0.0.1:8000"}, 403),
        ("", "10.0.0.7", {"authorization": "Bearer "}, 403),
        ("secret", "127.0.0.1", {}, 403),
        ("secret", "10.0.0.7", {"authorization": "Bearer wrong"}, 403),
        ("secret", "10.0.0.7", {"authorization": "secret"}, 403),
        ("secret", "10.0.0.7", {"authorization": "Bearer secret"}, 200),
        ("secret", "10.0.0.7", {"authorization": "Bearer secret", "origin": "http://somewhere"}, 403),
    ],
)
def test_who_may_push(token, client, headers, status):
    door = Door(Engine(), token)
    assert asyncio.run(door.knock(f"{ROUTE}/expected", client=client, **headers))[0] == status
    assert bool(door.engine.asked) == (status == 200)


def test_nothing_else_is_there():
    door = Door(Engine())
    for path, method in ((f"{ROUTE}/report", "POST"), (f"{ROUTE}/", "POST"), (f"{ROUTE}/begin", "GET"), (f"{ROUTE}/../begin", "POST")):
        assert asyncio.run(door.knock(path, method=method))[0] == 404
    assert door.engine.asked == []


# ---------------------------------------------------------------------- who waits


def test_requests_wait_for_the_end_of_a_push():
    async def scenario():
        door = Door(Engine())
        await door.push("begin")
        assert (await door.knock("/v1/completions"))[0] == 200  # nothing has been written
        await door.push("write", running="keep")
        waiting = asyncio.create_task(door.knock("/v1/completions"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert (await door.knock("/metrics", method="GET"))[0] == 200
        await door.push("finish")
        assert (await waiting)[0] == 200
        assert door.engine.asked == ["begin", "pause keep", "write", "finish", "forget", "resume"]

    asyncio.run(scenario())


def test_a_push_that_died_refuses_until_one_ends_well():
    async def scenario():
        door = Door(Engine(abandon={"mixed": "push a died half-way"}))
        await door.push("begin")
        await door.push("write")
        waiting = asyncio.create_task(door.knock("/v1/completions"))
        await asyncio.sleep(0.01)
        await door.push("abandon")
        for status, answer in (await waiting, await door.knock("/v1/completions")):
            assert status == 503
            assert "push a died half-way" in answer["error"]["message"]
        assert "resume" not in door.engine.asked
        for method in ("begin", "write", "finish"):
            await door.push(method, "b")
        assert (await door.knock("/v1/completions"))[0] == 200

    asyncio.run(scenario())


def test_a_push_that_ends_badly_opens_nothing():
    async def scenario():
        door = Door(Engine(finish={"problems": [["It did not come.", "", ""]]}))
        for method in ("begin", "write", "finish"):
            await door.push(method)
        assert door.engine.asked[-1] == "finish"
        await door.push("abandon", "another")
        assert door.engine.asked[-1] == "abandon"
        assert door.door.push == "a"

    asyncio.run(scenario())


@pytest.mark.parametrize("begun", [{"accepted": False}, {"problems": [["No.", "", ""]]}, {"accepted": True}])
def test_a_stray_write_holds_nobody_up(begun):
    """Only a push that the workers accepted may make others wait."""

    async def scenario():
        door = Door(Engine(begin=begun))
        await door.push("begin", "a")
        await door.push("write", "b" if begun.get("accepted") else "a")
        assert not [asked for asked in door.engine.asked if "pause" in asked]
        assert (await door.knock("/v1/completions"))[0] == 200

    asyncio.run(scenario())


def test_a_silent_sender_counts_as_dead_and_a_busy_engine_does_not(monkeypatch):
    monkeypatch.setattr(endpoints, "SILENCE", 0.2)

    async def slowly():
        await asyncio.sleep(0.5)
        return {}

    async def scenario():
        door = Door(Engine(finish=slowly))
        await door.push("begin")
        await door.push("write")
        ending = asyncio.create_task(door.push("finish"))
        assert (await door.knock("/v1/completions"))[0] == 200
        assert (await ending)[0] == 200
        await door.push("begin", "b")
        await door.push("write", "b")
        status, answer = await door.knock("/v1/completions")
        assert status == 503
        assert "push b has not been heard of" in answer["error"]["message"]

    asyncio.run(scenario())


# ---------------------------------------------------------------------- bodies


def _with_message(message, rest=b""):
    text = json.dumps(message).encode()
    return len(text).to_bytes(8, "little") + text + rest


@pytest.mark.parametrize(
    ("method", "body", "headers", "words"),
    [
        ("begin", b"", {}, "A body of 0 bytes"),
        ("begin", b"{}", {"content-length": "-2"}, "A body of -2 bytes"),
        ("begin", b"{}", {"content-length": str(2**40)}, "At most"),
        ("begin", b"{}", {"content-length": "1"}, "longer than it says"),
        ("begin", b"[]", {}, "no JSON object"),
        ("begin", b"\xff{", {}, "cannot be read"),
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
    assert words in str(PrecisionError([*map(_problem, answer["problems"])]))
    assert door.engine.asked == []


def _problem(row):
    from nemo_fp8.errors import Problem

    return Problem(*row)


def test_the_bytes_behind_a_message_lie_in_memory_that_workers_can_open():
    from nemo_fp8.rollout.refit.memory import Opened

    seen = {}

    class Reading(Engine):
        async def collective_rpc(self, method, args):
            seen.update(args[0])
            memory = Opened(args[0]["memory"])
            import torch

            seen["bytes"] = memory.read(0, torch.uint8, (5,)).tolist()
            return [{}]

    body = _with_message({"push": "a", "pieces": [], "memory": "of the sender's choice"}, bytes([1, 2, 3, 4, 5]))
    assert asyncio.run(Door(Reading()).knock(f"{ROUTE}/bytes", body))[0] == 200
    assert seen["bytes"] == [1, 2, 3, 4, 5]
    with pytest.raises(PrecisionError, match="refused"):
        Opened(seen["memory"])  # it is gone with the request


def test_on_both_ways_the_sender_says_what_becomes_of_running_requests(monkeypatch):
    sent = {}
    monkeypatch.setattr(Server, "_post", lambda self, method, parts, kind: sent.setdefault(method, b"".join(map(bytes, parts))))
    server = Server("http://node7:8000")
    server.hold("abort")
    server.call("write", {"push": "a"})
    server.carry({"push": "a"}, memoryview(b"values"))
    assert json.loads(sent["write"]) == {"push": "a", "running": "abort"}
    size = int.from_bytes(sent["bytes"][:8], "little")
    assert json.loads(sent["bytes"][8 : 8 + size]) == {"push": "a", "running": "abort"}
    assert sent["bytes"][8 + size :] == b"values"
