"""The orders of vLLM's developer mode at a server's door: who may give them, and what they wait for."""

import asyncio

import pytest
from support.rollout.door import Door, Engine

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.rollout.refit import door as endpoints


def test_every_order_of_this_vllm_is_known():
    """A new one would pass as a request does, for whoever may generate."""
    import importlib
    import pkgutil

    import vllm.entrypoints

    found = set()
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints.", onerror=lambda name: None):
        if ".serve.dev." in module.name or ".entrypoints.rl." in module.name:
            router = getattr(importlib.import_module(module.name), "router", None)
            for route in getattr(router, "routes", ()):
                found |= {route.path} if "POST" in route.methods else set()
    assert "/update_weights" in found
    assert "/collective_rpc" in found
    assert found <= endpoints.ORDERS


@pytest.mark.parametrize("path", sorted(endpoints.ORDERS))
def test_who_may_give_orders(path):
    engine = Engine()
    door = Door(engine)

    def knock(**about):
        return asyncio.run(door.knock(path, **about))[0]

    assert knock(client="10.0.0.7") == knock(origin="http://127.0.0.1:8000") == 403
    assert knock(host="evil.example") == knock(**{"x-forwarded-for": "127.0.0.1"}) == 403
    assert knock(root_path="/behind") == 200
    door.door.token = "secret"
    assert knock() == knock(authorization="Bearer wrong") == 403
    assert door.passed == [path]
    assert knock(authorization="Bearer secret", client="10.0.0.7") == 200
    assert asyncio.run(door.knock("/v1/completions", client="10.0.0.7"))[0] == 200  # generating is not ours to guard


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"{}", {"content-length": str(2**40)}, "At most"),
        (b"{}", {"content-length": "1"}, "longer than it says"),
        (b"{}", {"content-length": "0", "transfer-encoding": "chunked"}, "A body of 0 bytes"),
        (b"[]", {}, "no JSON object"),
        (b"\xff{", {}, "cannot be read"),
        (b'{"a":' + b"[" * 9 + b"]" * 9 + b"}", {}, "more than 8 lists in one another"),
        (b'{"update_info": {"ipc_handles_pickled": ""}}', {}, "pickled handles"),
        (b'{"update_info": [{"ipc_handles_\\u0070ickled": "gAS"}]}', {}, "pickled handles"),
    ],
)
def test_no_body_of_an_order_is_believed(body, headers, words):
    door = Door(Engine())
    status, answer = asyncio.run(door.knock("/update_weights", body, **headers))
    assert status == 400
    assert words in str(PrecisionError([Problem(*row) for row in answer["problems"]]))
    assert door.passed == []


def test_an_order_comes_through_as_it_was_sent():
    seen = []

    class Reading(Door):
        async def _app(self, scope, receive, send):
            seen.append(await receive())
            await super()._app(scope, receive, send)

    door = Reading(Engine())
    assert asyncio.run(door.knock("/update_weights", b'{"update_info": {"a": [1]}}'))[0] == 200
    assert asyncio.run(door.knock("/resume", b""))[0] == 200
    assert [event["body"] for event in seen] == [b'{"update_info": {"a": [1]}}', b""]


def test_orders_wait_for_a_push_and_a_transfer_repairs_what_one_left():
    async def scenario():
        engine = Engine(abandon={"mixed": "push a died half-way"})
        door = Door(engine)
        await door.push("begin")
        await door.push("write", pieces=[1])
        waiting = asyncio.create_task(door.knock("/resume"))
        await asyncio.sleep(0.05)
        assert not waiting.done()  # it would let requests in among weights of two pushes
        await door.push("abandon")
        assert (await waiting)[0] == 503
        assert (await door.knock("/finish_weight_update"))[0] == 200
        assert (await door.knock("/v1/completions"))[0] == 503
        engine.answers["abandon"] = {"mixed": ""}
        assert (await door.knock("/finish_weight_update"))[0] == 200
        assert engine.asked[-2:] == ["forget", "resume"]  # who waits is not answered from keys of the old weights
        assert (await door.knock("/v1/completions"))[0] == 200
        engine.answers["abandon"] = {"mixed": "push b has begun and has not ended"}  # a weight transfer, and died
        assert (await door.knock("/resume"))[0] == 503
        assert (await door.knock("/v1/completions"))[0] == 503
        assert "/resume" not in door.passed

    asyncio.run(scenario())


def test_an_order_to_resume_waits_for_a_push_that_begins_while_it_is_looked_at():
    async def scenario():
        may = asyncio.Event()

        async def after_a_while():
            await may.wait()
            return {"mixed": ""}

        class Resuming(Door):
            async def _app(self, scope, receive, send):
                if scope["path"] == "/resume":
                    await self.engine.resume_generation()
                await super()._app(scope, receive, send)

        door = Resuming(Engine(abandon=after_a_while))
        resumes = asyncio.create_task(door.knock("/resume"))
        await asyncio.sleep(0.05)
        await door.push("begin", "b")
        writes = asyncio.create_task(door.push("write", "b", pieces=[1]))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(door.knock("/resume"))  # waits for its turn behind the push
        await asyncio.sleep(0.05)
        may.set()
        assert (await resumes)[0] == 200
        await writes
        await asyncio.sleep(0.05)
        assert door.engine.paused
        assert not second.done()
        await door.push("finish", "b")
        assert (await second)[0] == 200

    asyncio.run(scenario())
