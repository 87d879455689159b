"""The door of a server, asked over its own protocol (ASGI): who may push, and who waits.

Behind it stands an engine that writes down what is asked of it; ``test_serve.py`` and ``test_refit.py`` push through
real servers.
"""

import asyncio
import logging
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from support.rollout.door import ROUTE, Door, Engine
from support.rollout.servers import ask, beyond_loopback, free_port

from nemo_fp8.rollout.refit import alive
from nemo_fp8.rollout.refit import door as endpoints
from nemo_fp8.rollout.refit.control import Server
from nemo_fp8.rollout.refit.door import RefitEndpoints

# ---------------------------------------------------------------------- who may


@pytest.mark.parametrize(
    ("token", "client", "headers", "status"),
    [
        ("", "127.0.0.1", {}, 200),
        ("", "::1", {}, 200),
        ("", "10.0.0.7", {}, 403),
        ("", "testclient", {}, 403),
        ("", "127.0.0.1", {"origin": "http://127.0.0.1:8000"}, 403),
        ("", "10.0.0.7", {"authorization": "Bearer "}, 403),
        ("secret", "127.0.0.1", {}, 403),
        ("secret", "10.0.0.7", {"authorization": "Bearer wrong"}, 403),
        ("secret", "10.0.0.7", {"authorization": "secret"}, 403),
        ("secret", "10.0.0.7", {"authorization": "Bearer secret"}, 200),
        ("secret", "10.0.0.7", {"authorization": "bearer secret"}, 200),
        ("secret", "10.0.0.7", {"authorization": "Bearer secret", "x-forwarded-for": "10.0.0.8"}, 200),
        # uvicorn that trusts every proxy says 127.0.0.1 for whoever says so
        *(
            ("", "127.0.0.1", {name: "127.0.0.1"}, 403)
            for name in ("x-forwarded-for", "X-Forwarded-Host", "forwarded", "x-real-ip", "via")
        ),
        *(
            ("", "127.0.0.1", {"host": host}, 200)
            for host in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000", socket.gethostname())
        ),
        *(
            ("", "127.0.0.1", {"host": host}, 403)
            for host in ("evil.example", "evil.example:8000", "10.0.0.7", "[::1", "")
        ),
        ("secret", "10.0.0.7", {"authorization": "Bearer secret", "origin": "http://somewhere"}, 403),
    ],
)
def test_who_may_push(token, client, headers, status):
    door = Door(Engine(), token)
    assert asyncio.run(door.knock(f"{ROUTE}/expected", client=client, **headers))[0] == status
    assert bool(door.engine.asked) == (status == 200)


@pytest.mark.parametrize(
    ("server", "status"), [(("/run/vllm.sock", None), 200), (("10.0.0.5", 8000), 403), (None, 403)]
)
def test_a_socket_in_the_file_system_has_permissions_of_its_own_and_a_connection_that_is_gone_has_none(server, status):
    """uvicorn knows of neither who called."""
    assert asyncio.run(Door(Engine()).knock(f"{ROUTE}/expected", client=None, server=server))[0] == status


@pytest.mark.parametrize(
    ("api_key", "key", "token", "opens"),
    [
        (["of the option"], "of the variable", "drawn", "of the option"),
        (None, "of the variable", "drawn", "of the variable"),
        (None, "", "drawn", "drawn"),
    ],
)
def test_the_server_s_key_goes_before_the_token_of_the_door(api_key, key, token, opens):
    door = Door(Engine(), token)
    door.door.key = key
    door.state.args = type("Args", (), {"api_key": api_key})
    for said in ("of the option", "of the variable", "drawn", ""):
        status, _ = asyncio.run(door.knock(f"{ROUTE}/expected", authorization=f"Bearer {said}"))
        assert status == (200 if said == opens else 403)


@pytest.mark.parametrize(
    ("token", "words"),
    [("", "every user and every program of this machine"), ("secret", "Who brings this server's token")],
)
def test_the_server_says_at_start_whom_it_lets_push(token, words, said):
    logging.getLogger("vllm.nemo_fp8").setLevel(logging.INFO)
    door = Door(Engine(), token)
    asyncio.run(door.door({"type": "lifespan", "app": type("App", (), {"state": door.state})}, None, _nothing))
    assert words in "".join(said)
    assert door.passed == [None]


async def _nothing(message):
    pass


def test_a_prefix_before_every_path_is_no_part_of_ours():
    door = Door(Engine(), "secret")
    for path in (f"/api{ROUTE}/expected", f"{ROUTE}/expected"):
        assert asyncio.run(door.knock(path, root_path="/api"))[0] == 403
        assert asyncio.run(door.knock(path, root_path="/api", authorization="Bearer secret"))[0] == 200
    assert door.passed == []


def test_nothing_else_is_there():
    door = Door(Engine())
    for path, method in (
        (f"{ROUTE}/report", "POST"),
        (f"{ROUTE}/", "POST"),
        (f"{ROUTE}/begin", "GET"),
        (f"{ROUTE}/../begin", "POST"),
    ):
        assert asyncio.run(door.knock(path, method=method))[0] == 404
    assert door.engine.asked == []


# ---------------------------------------------------------------------- who waits


def test_requests_wait_for_the_end_of_a_push():
    async def scenario():
        door = Door(Engine())
        await door.push("begin")
        assert (await door.knock("/v1/completions"))[0] == 200  # nothing has been written
        await door.push("write", running="keep", pieces=[1])
        waiting = asyncio.create_task(door.knock("/v1/completions"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert (await door.knock("/metrics", method="GET"))[0] == 200
        await door.push("finish")
        assert (await waiting)[0] == 200
        assert door.engine.asked == ["begin", "pause keep", "write", "finish", "forget", "resume"]

    asyncio.run(scenario())


def test_an_engine_that_its_owner_paused_is_left_so():
    """After a push with pieces, one without, and one that gave up another; not after one that repaired."""

    async def scenario():
        door = Door(Engine(begin={"accepted": True, "mixed": ""}, delta={"accepted": True}))
        engine = door.engine
        for owner in (True, False):
            engine.paused = owner
            for method, pieces in (("begin", [1]), ("delta", [])):
                await door.push(method)
                await door.push("write", pieces=pieces)
                await door.push("finish")
                assert engine.paused == owner
            await door.push("delta", "b")
            await door.push("write", "b", pieces=[1])
            await door.push("delta", "c")
            await door.push("write", "c", pieces=[1])
            await door.push("finish", "c")
            assert engine.paused == owner
        engine.paused, engine.answers["begin"]["mixed"] = True, "push d died half-way"  # and left it paused
        await door.push("begin", "e")
        await door.push("write", "e", pieces=[1])
        await door.push("finish", "e")
        assert not engine.paused

    asyncio.run(scenario())


def test_a_push_says_whether_old_prefixes_were_forgotten(monkeypatch):
    """What vLLM answers, all the way to the sender's control. An error of its is no yes: nobody can say what is in the
    cache, so requests are refused, as by a push into an LLM."""

    def push(engine):
        door, control = Door(engine), Server("http://127.0.0.1:1")

        def post(self, method, parts, kind):
            status, answer = asyncio.run(door.knock(f"{ROUTE}/{method}", b"".join(map(bytes, parts))))
            assert status == 200
            return answer

        monkeypatch.setattr(Server, "_post", post)
        for method in ("begin", "write", "finish"):
            control.call(method, {"push": "a", "pieces": [1]})
        status, _ = asyncio.run(door.knock("/v1/completions"))
        assert (engine.asked[-1], status) == (("finish", 503) if isinstance(engine, Failing) else ("resume", 200))
        return control.forget()

    class Failing(Engine):
        async def reset_prefix_cache(self, reset_running_requests, reset_connector):
            raise RuntimeError("no cache")

    busy = Engine()
    busy.forgets = False
    assert [push(Engine()), push(busy), push(Failing())] == [True, False, False]
    assert Server("http://127.0.0.1:1").forget() is False


def test_a_websocket_waits_and_is_refused_as_requests_are():
    async def scenario():
        door = Door(Engine(abandon={"mixed": "push a died half-way"}))
        await door.push("begin")
        await door.push("write", pieces=[1])
        waiting = asyncio.create_task(door.knock("/v1/realtime", kind="websocket"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await door.push("abandon")
        assert (await waiting)[0] == 503
        assert "/v1/realtime" not in door.passed
        for method in ("begin", "write", "finish"):
            await door.push(method, "b", pieces=[1])
        assert (await door.knock("/v1/realtime", kind="websocket"))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("writes", [[], [None], [[]]])
def test_a_sender_that_dies_before_its_first_tensor_holds_nobody_up(writes):
    """It had the workers open its memory, which is a message without pieces."""

    async def scenario():
        door = Door(Engine())
        await door.push("begin")
        for pieces in writes:
            await door.push("write", pieces=pieces)
        assert (await door.knock("/v1/completions"))[0] == 200
        assert [asked for asked in door.engine.asked if "pause" in asked] == []

    asyncio.run(scenario())


@pytest.mark.parametrize("mixed", ["", "push a has begun and has not ended"])
def test_a_sender_that_fell_silent_is_dead_only_if_it_had_written(monkeypatch, mixed):
    """Its first write may have been refused: the workers are asked, once for all who wait, and a sender that comes back
    may go on."""
    monkeypatch.setattr(endpoints, "SILENCE", 0.2)

    async def scenario():
        door = Door(Engine(write={"problems": [["Piece 7 is refused.", "", ""]]}, abandon={"mixed": mixed}))
        await door.push("begin")
        await door.push("write", pieces=[7])
        replies = await asyncio.gather(*(door.knock("/v1/completions") for _ in range(5)))
        assert {status for status, _ in replies} == {503 if mixed else 200}
        assert door.engine.asked[3:] == (["abandon"] if mixed else ["abandon", "resume"])
        if mixed:
            assert "has not been heard of for 0 seconds. Push again;" in replies[0][1]["error"]["message"]
        else:
            await door.push("write", pieces=[7])
            assert door.engine.asked[-2:] == ["pause wait", "write"]
            assert not door.door.free.is_set()

    asyncio.run(scenario())


class TakesBack(Engine):
    """An engine whose workers have written, until they are asked to abandon the push that they write."""

    async def collective_rpc(self, method, args):
        (answer,) = await super().collective_rpc(method, args)
        if self.asked[-1] != "abandon":
            return [answer]
        return [{"mixed": "" if args[0]["push"] == "a" else "push a has begun and has not ended"}]


@pytest.mark.parametrize(("method", "status"), [("begin", 503), ("delta", 200)])
def test_changes_of_a_sender_that_fell_silent_are_taken_back(monkeypatch, method, status):
    """And requests go on, with the weights of before; of any other push weights of two stay behind."""
    monkeypatch.setattr(endpoints, "SILENCE", 0.2)

    async def scenario():
        door = Door(TakesBack(delta={"accepted": True}))
        await door.push(method)
        await door.push("write", pieces=[7])
        assert (await asyncio.wait_for(door.knock("/v1/completions"), 5))[0] == status
        assert door.engine.asked[3:] == (["abandon", "resume"] if status == 200 else ["abandon"])

    asyncio.run(scenario())


def test_a_dead_engine_ends_a_push_and_answers_for_itself(monkeypatch):
    """vLLM's own wait for what its EngineCore was doing never ends."""
    monkeypatch.setattr(alive, "LOOK", 0.05)
    monkeypatch.setattr(endpoints, "LOOK", 0.05)

    async def for_ever():
        await asyncio.Event().wait()

    async def scenario():
        door = Door(Engine(write=for_ever))
        await door.push("begin")
        writing = asyncio.create_task(door.push("write", pieces=[1]))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(door.knock("/v1/completions"))
        await asyncio.sleep(0.2)
        assert not writing.done()
        assert not waiting.done()
        door.engine.errored = True
        status, answer = await asyncio.wait_for(writing, 5)
        assert status == 503
        assert answer["problems"][0][0] == "The engine is dead."
        assert (await asyncio.wait_for(waiting, 5))[0] == 200  # vLLM's application says what it has to say

    asyncio.run(scenario())


def test_a_push_that_died_refuses_until_one_ends_well():
    async def scenario():
        door = Door(Engine(abandon={"mixed": "push a died half-way"}))
        await door.push("begin")
        await door.push("write", pieces=[1])
        waiting = asyncio.create_task(door.knock("/v1/completions"))
        await asyncio.sleep(0.01)
        await door.push("abandon")
        for status, answer in (await waiting, await door.knock("/v1/completions")):
            assert status == 503
            assert "push a died half-way" in answer["error"]["message"]
        assert "resume" not in door.engine.asked
        for method in ("begin", "write", "finish"):
            await door.push(method, "b", pieces=[1])
        assert (await door.knock("/v1/completions"))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [{"problems": [["It failed.", "", ""]]}, {}])
def test_a_worker_that_cannot_say_what_it_holds_opens_nothing(answer):
    async def scenario():
        door = Door(Engine(abandon=answer))
        await door.push("begin")
        await door.push("write", pieces=[1])
        await door.push("abandon")
        assert "resume" not in door.engine.asked
        status, said = await door.knock("/v1/completions")
        assert status == 503
        assert "cannot say what it holds" in said["error"]["message"]

    asyncio.run(scenario())


def test_a_push_that_ends_badly_opens_nothing():
    async def scenario():
        door = Door(Engine(finish={"problems": [["It did not come.", "", ""]]}))
        for method in ("begin", "write", "finish"):
            await door.push(method, pieces=[1])
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
        await door.push("write", "b" if begun.get("accepted") else "a", pieces=[1])
        assert not [asked for asked in door.engine.asked if "pause" in asked]
        assert (await door.knock("/v1/completions"))[0] == 200

    asyncio.run(scenario())


def test_a_silent_sender_counts_as_dead_and_a_busy_engine_does_not(monkeypatch):
    monkeypatch.setattr(endpoints, "SILENCE", 0.2)

    async def slowly():
        await asyncio.sleep(0.5)
        return {}

    async def scenario():
        door = Door(Engine(finish=slowly, abandon={"mixed": "push b has begun and has not ended"}))
        await door.push("begin")
        await door.push("write", pieces=[1])
        ending = asyncio.create_task(door.push("finish"))
        assert (await door.knock("/v1/completions"))[0] == 200
        assert (await ending)[0] == 200
        await door.push("begin", "b")
        await door.push("write", "b", pieces=[1])
        status, answer = await door.knock("/v1/completions")
        assert status == 503
        assert "push b has not been heard of" in answer["error"]["message"]

    asyncio.run(scenario())


class Slow(Engine):
    """Forgets, and answers about an ended push, only when it is told to."""

    def __init__(self, **answers):
        super().__init__(**answers)
        self.may = asyncio.Event()

    async def reset_encoder_cache(self):
        self.asked.append("encoder")
        await self.may.wait()


async def _both_push(door, ends):
    """Push a ``ends`` while push b begins to write: b waits for it, and then closes the door until its own end."""
    await asyncio.sleep(0.05)
    await door.push("begin", "b")
    writes = asyncio.create_task(door.push("write", "b", pieces=[1]))
    request = asyncio.create_task(door.knock("/v1/completions"))
    await asyncio.sleep(0.05)
    assert not writes.done()  # the first one has not ended yet
    assert not request.done()
    door.engine.may.set()
    await asyncio.gather(ends, writes)
    await asyncio.sleep(0.05)
    assert door.engine.paused
    assert door.door.push == "b"
    late = asyncio.create_task(door.knock("/v1/completions"))
    await asyncio.sleep(0.05)
    assert not late.done()
    await door.push("finish", "b")
    assert [status for status, _ in await asyncio.gather(request, late)] == [200, 200]
    assert not door.engine.paused


def test_the_end_of_a_push_lets_nobody_in_among_the_weights_of_the_next():
    """Its caches are still dropped when another one begins to write."""

    async def scenario():
        door = Door(Slow())
        await door.push("begin", "a")
        await door.push("write", "a", pieces=[1])
        await _both_push(door, asyncio.create_task(door.push("finish", "a")))
        assert door.engine.asked.count("resume") == 2

    asyncio.run(scenario())


def test_an_end_that_was_interrupted_lets_nobody_in_either():
    """A sender that has not waited for its finish asks what became of it, and pushes again."""

    async def scenario():
        door = Door(Slow())
        await door.push("begin", "a")
        await door.push("write", "a", pieces=[1])
        finish = asyncio.create_task(door.push("finish", "a"))
        await asyncio.sleep(0.05)
        abandon = asyncio.create_task(door.push("abandon", "a"))
        await _both_push(door, asyncio.gather(finish, abandon))

    asyncio.run(scenario())


@pytest.mark.parametrize("version", ["step 7", None, 7, "x" * 2000, "a\nb"])
def test_a_push_names_its_weights(version):
    door = Door(Engine())

    async def scenario():
        await door.push("begin")
        await door.push("write", pieces=[1])
        return await door.push("finish", weight_version=version)

    status, answer = asyncio.run(scenario())
    if version == "step 7":
        assert (status, answer["weight_version"], door.engine.version) == (200, version, version)
    else:
        assert status == 400
        assert "weight_version is no short text" in str(answer)


# ---------------------------------------------------------------------- behind uvicorn, which says who called


@pytest.fixture
def listening():
    """``listening(engine)`` is the port of a door on every address, behind a uvicorn that believes every proxy."""
    import uvicorn

    servers = []

    def start(engine):
        app = FastAPI()
        app.add_middleware(RefitEndpoints)
        app.state.engine_client = engine

        @app.get("/busy")
        async def busy():
            time.sleep(1)  # and nobody is looked at meanwhile

        @app.websocket("/echo")
        async def echo(socket: WebSocket):
            await socket.accept()
            with suppress(WebSocketDisconnect):
                while True:
                    await socket.send_text(await socket.receive_text())

        port = free_port()
        server = uvicorn.Server(
            uvicorn.Config(app, host="0.0.0.0", port=port, forwarded_allow_ips="*", log_level="warning")
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return port

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(20)


def said_to(address, text):
    """The status line that comes back."""
    with socket.create_connection(address, 10) as connection:
        connection.sendall(text.encode())
        return connection.makefile("rb").readline().decode().strip()


def test_no_header_makes_a_caller_local(listening):
    engine = Engine()
    port = listening(engine)
    for header in (
        "X-Forwarded-For: 127.0.0.1",
        "Forwarded: for=127.0.0.1",
        "X-Real-IP: 127.0.0.1",
        "Host: evil.example",
        "Origin: null",
    ):
        host = "" if header.startswith("Host") else "Host: 127.0.0.1\r\n"
        text = f"POST {ROUTE}/expected HTTP/1.1\r\n{host}{header}\r\nContent-Length: 2\r\n\r\n{{}}"
        assert said_to(("127.0.0.1", port), text) == "HTTP/1.1 403 Forbidden"
    assert engine.asked == []
    assert ask(f"http://127.0.0.1:{port}", f"{ROUTE}/expected") == (200, {"answers": [{}]})


@pytest.mark.skipif(beyond_loopback() is None, reason="this machine has no address but loopback")
def test_what_goes_to_this_machine_goes_past_a_proxy(listening, monkeypatch):
    """It would see the token and the weights, and from another machine it would not reach the server."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        engine = Engine()
        url = f"http://127.0.0.1:{listening(engine)}"
        assert Server(url, "secret", timeout=20).call("begin", {"push": "a"}) == [engine.answers["begin"]]
        assert engine.asked == ["begin"]


def test_a_stranger_who_hangs_up_at_once_is_no_local(listening):
    """The address of a connection that was reset is not known any more, though what it brought is there to read."""
    engine = Engine()
    port = listening(engine)
    busy = threading.Thread(target=said_to, args=(("127.0.0.1", port), "GET /busy HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
    busy.start()
    time.sleep(0.3)
    with socket.create_connection((beyond_loopback(), port)) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.sendall(f"POST {ROUTE}/expected HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    busy.join()
    assert ask(f"http://127.0.0.1:{port}", f"{ROUTE}/held")[0] == 200  # asked later, and answered later
    assert engine.asked == ["held"]


def test_a_websocket_is_told_why(listening):
    port = listening(Engine(abandon={"mixed": "push a died half-way"}))
    for method in ("begin", "write", "abandon"):
        assert ask(f"http://127.0.0.1:{port}", f"{ROUTE}/{method}", {"push": "a", "pieces": [1]})[0] == 200
    upgrade = (
        "Host: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: "
        "13\r\nSec-WebSocket-Key: "
    )
    text = f"GET /v1/realtime HTTP/1.1\r\n{upgrade}dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    assert said_to(("127.0.0.1", port), text) == "HTTP/1.1 503 Service Unavailable"


def test_messages_on_an_open_websocket_wait_and_a_dead_push_closes_it(listening):
    """With uvicorn and a client of its own on both sides: vLLM's realtime endpoint keeps connections open."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    port = listening(Engine(abandon={"mixed": "push a died half-way"}))

    def push(method, number):
        assert ask(f"http://127.0.0.1:{port}", f"{ROUTE}/{method}", {"push": number, "pieces": [1]})[0] == 200

    with connect(f"ws://127.0.0.1:{port}/echo") as first, connect(f"ws://127.0.0.1:{port}/echo") as second:
        first.send("before")
        assert first.recv(5) == "before"
        push("begin", "b")
        push("write", "b")
        first.send("during")
        with pytest.raises(TimeoutError):
            first.recv(0.5)
        push("finish", "b")
        assert first.recv(5) == "during"
        for method in ("begin", "write", "abandon"):
            push(method, "a")
        second.send("after")
        with pytest.raises(ConnectionClosed) as closed:
            second.recv(5)
        assert closed.value.rcvd.code == endpoints.TRY_AGAIN_LATER
        assert closed.value.rcvd.reason.startswith("The engine holds old and new weights")
