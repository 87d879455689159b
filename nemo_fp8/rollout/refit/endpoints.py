"""The door of a server: pushes come in here, and requests wait here while weights change.

    vllm serve ... --worker-extension-cls nemo_fp8.rollout.in_vllm.worker.NemoFp8Worker \\
                   --middleware nemo_fp8.rollout.refit.endpoints.RefitEndpoints

``--middleware`` is vLLM's own way to add such a door, so the server needs no developer mode, whose endpoints let
anybody call any method of a worker. Who may push: without a token in ``VLLM_API_KEY``, vLLM's own variable,
callers from this machine; with one, whoever shows it, from anywhere. Browsers may never.

A request that comes during a push waits for its end. After a push that died, or whose sender fell silent, requests
are answered with 503 and the reason, until a push ends well.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.checkpoint import bytes_of
from nemo_fp8.rollout.access import TOKEN, is_loopback
from nemo_fp8.rollout.refit.control import LENGTH, PREFIX, ROUTE, Answer, refusal
from nemo_fp8.rollout.refit.memory import Shared

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
METHODS = ("begin", "write", "bytes", "finish", "abandon", "expected", "held")
MODES = ("wait", "abort", "keep")
LARGEST_MESSAGE, LARGEST_BODY = 1 << 28, 1 << 31
SILENCE = 60.0  # seconds without a word from the sender, after which a push counts as dead


class RefitEndpoints:
    """ASGI middleware."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app, self.token = app, os.environ.get(TOKEN, "")
        self.begun = self.push = self.died = ""  # accepted by the workers; writing; why the engine answers nobody
        self.heard, self.tasks = 0.0, 0  # when the sender last had an answer; what the engine is doing for it now
        self.free = asyncio.Event()
        self.free.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].startswith(f"{ROUTE}/"):
            await self._control(scope, receive, send)
        elif scope["method"] != "POST":
            await self.app(scope, receive, send)  # health, metrics, lists: nothing that computes
        else:
            await self._wait_for_end()
            if self.died:
                problem = refusal(self.died).problems[0]
                text = f"{problem.what} {problem.why} {problem.remedy}"
                await _reply(send, 503, {"error": {"message": text, "type": "ServiceUnavailable", "code": 503}})
            else:
                await self.app(scope, receive, send)

    async def _wait_for_end(self) -> None:
        while self.push and not self.died:
            left = SILENCE if self.tasks else SILENCE - (time.monotonic() - self.heard)
            if left <= 0:
                self._die(f"push {self.push} has not been heard of for {SILENCE:.0f} seconds")
                return
            try:
                await asyncio.wait_for(self.free.wait(), left)
            except asyncio.TimeoutError:
                continue

    def _die(self, why: str) -> None:
        self.died = why
        self.free.set()

    # ------------------------------------------------------------------ control

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["path"].removeprefix(f"{ROUTE}/")
        status, answer = 200, dict[str, Any]()
        if method not in METHODS or scope["method"] != "POST":
            status, answer = 404, {"error": f"POST one of {', '.join(METHODS)}."}
        elif not self._may(scope):
            status, answer = 403, {"error": f"Not allowed. Push from this machine, or set {TOKEN} for the server and give Refit(token=)."}
        else:
            try:
                answer = {"answers": await self._do(scope["app"].state.engine_client, method, scope, receive)}
            except PrecisionError as error:
                status, answer = 400, {"problems": [[p.what, p.why, p.remedy] for p in error.problems]}
        await _reply(send, status, answer)

    def _may(self, scope: Scope) -> bool:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if b"origin" in headers:  # a page in somebody's browser
            return False
        if self.token:
            return hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self.token}".encode())
        client = scope.get("client")
        return client is None or is_loopback(client[0])  # none: a socket in the file system, which has permissions of its own

    async def _do(self, engine: Any, method: str, scope: Scope, receive: Receive) -> list[Answer]:
        if method == "bytes":
            message, shared = await _body(scope, receive)
            try:
                return await self._write(engine, message | {"memory": shared.handle})
            finally:
                shared.close()
        message = await _message(scope, receive)
        if method == "write":
            return await self._write(engine, message)
        if method == "finish":
            return await self._finish(engine, message)
        answers = await self._call(engine, method, message)
        if method == "begin" and all(answer.get("accepted") for answer in answers):
            self.begun = str(message.get("push"))
        if method == "abandon" and str(message.get("push")) == self.push:
            mixed = next((a["mixed"] for a in answers if a.get("mixed")), "")
            if mixed:
                self._die(mixed)
            else:
                await self._open(engine)
        return answers

    async def _write(self, engine: Any, message: Answer) -> list[Answer]:
        push = str(message.get("push"))
        if push == self.begun != self.push:  # any other is refused by the workers, and holds nobody up
            self.push = push
            self.free.clear()
            running = message.get("running", "wait")
            await self._at_work(engine.pause_generation(mode=running if running in MODES else "wait"))
        return await self._call(engine, "write", message)

    async def _finish(self, engine: Any, message: Answer) -> list[Answer]:
        answers = await self._call(engine, "finish", message)
        if not any(answer.get("problems") for answer in answers):
            await engine.reset_prefix_cache(reset_running_requests=True)
            await self._open(engine)
        return answers

    async def _open(self, engine: Any) -> None:
        self.push, self.died = "", ""
        await engine.resume_generation()
        self.free.set()

    async def _call(self, engine: Any, method: str, message: Answer) -> list[Answer]:
        task = engine.collective_rpc(PREFIX + method, args=(message,))
        return list(await (self._at_work(task) if str(message.get("push")) == self.push else task))

    async def _at_work(self, task: Awaitable[Any]) -> Any:
        """What the engine takes its time for, in the push that is writing, is no silence of the sender's."""
        self.tasks += 1
        try:
            return await task
        finally:
            self.tasks -= 1
            self.heard = time.monotonic()


# ---------------------------------------------------------------------- bodies, of no trusted size


def _length(scope: Scope, most: int) -> int:
    told = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"")
    if not told.isdigit() or not 0 < int(told) <= most:
        raise PrecisionError(
            f"A body of {told.decode('latin-1')[:20] or 'unknown'} bytes.", f"At most {most} are taken.", "Use Refit(url)."
        )
    return int(told)


async def _message(scope: Scope, receive: Receive) -> Answer:
    length, body = _length(scope, LARGEST_MESSAGE), bytearray()
    async for part in _parts(receive):
        body += part
        if len(body) > length:
            raise _unreadable("it is longer than it says")
    return _object(bytes(body))


async def _body(scope: Scope, receive: Receive) -> tuple[Answer, Shared]:
    """The message at the head of a body, and the bytes behind it in memory that workers can open."""
    shared = Shared(_length(scope, LARGEST_BODY))
    try:
        head, at = bytearray(), 0
        room = bytes_of(shared.tensor)
        size = 0
        async for part in _parts(receive):
            if size == 0 or len(head) < size:
                head += part
                if len(head) < LENGTH:
                    continue
                size = size or LENGTH + int.from_bytes(head[:LENGTH], "little")
                if size > LARGEST_MESSAGE:
                    raise _unreadable("its message is too long")
                part = bytes(head[size:])
                del head[size:]
            if at + len(part) > len(room):
                raise _unreadable("it is longer than it says")
            room[at : at + len(part)] = part
            at += len(part)
        del room
        return _object(bytes(head[LENGTH:])), shared
    except BaseException:
        shared.close()
        raise


async def _parts(receive: Receive) -> Any:
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise _unreadable("its sender went away")
        if event.get("body"):
            yield event["body"]
        if not event.get("more_body"):
            return


def _object(text: bytes) -> Answer:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _unreadable(str(error)) from None
    if not isinstance(found, dict):
        raise _unreadable("it is no JSON object")
    return found


def _unreadable(why: str) -> PrecisionError:
    return PrecisionError("The body of a push cannot be read.", f"{why[0].upper()}{why[1:]}.", "Push with nemo_fp8.rollout.Refit(url).")


async def _reply(send: Send, status: int, answer: Any) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
