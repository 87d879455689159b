"""The door of a vLLM server, as ASGI middleware: it takes pushes, and makes requests wait while weights change.

    vllm serve ... --worker-extension-cls nemo_fp8.rollout.engine.worker.NemoFp8Worker \\
                   --middleware nemo_fp8.rollout.refit.door.RefitEndpoints

``--middleware`` is an option of vLLM. The server needs no developer mode, whose endpoints let anybody call any method
of a worker. Who may push:

    a key (``--api-key``, ``VLLM_API_KEY``)      callers that send this key
    no key, but ``NEMO_FP8_REFIT_TOKEN``         callers that send this token (``nemo-fp8 serve`` draws one)
    neither                                      callers on this machine, of any user; the log warns at start

Browsers may never push.

The same rules hold for the orders of vLLM's own developer mode (``VLLM_SERVER_DEV_MODE=1``), if it is on: its calls for
weight transfer, to pause, to reset, and to any method of a worker. Their bodies have the limits of ours.

A request that comes during a push waits for its end, and so does a message on a websocket that is open. After a push
that died with weights half written, requests get 503 and the reason until a push ends well, and such a websocket is
closed with it. A sender that is silent for a minute counts as dead; if it had written nothing, the engine serves on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nemo_fp8.errors import PrecisionError
from nemo_fp8.moved import renamed
from nemo_fp8.rollout.access import PUSH_TOKEN, TOKEN, brings, comes_from_a_page, is_local, path_of
from nemo_fp8.rollout.refit.alive import LOOK, SILENCE, answered_on_loop
from nemo_fp8.rollout.refit.control import (
    LARGEST_BODY,
    LENGTH,
    PREFIX,
    ROUTE,
    RUNNING,
    Answer,
    forgotten,
    refusal,
    version_to_set,
    why_mixed,
)
from nemo_fp8.rollout.refit.manifest import MOST_ENTRIES, is_version
from nemo_fp8.rollout.refit.memory import BUFFERS, Spare
from nemo_fp8.storage.safetensors import bytes_of

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__, {"MODES": "nemo_fp8.rollout.refit.control.RUNNING"})

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
METHODS = ("begin", "stored", "delta", "write", "stream", "bytes", "finish", "abandon", "expected", "held")
# What vLLM's developer mode lets whoever reaches it do to the engine.
ORDERS = frozenset(
    f"/{name}"
    for name in (
        "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update",
        "start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version",
        "weight_checker", "pause", "resume", "abort_requests", "collective_rpc", "reset_prefix_cache",
        "reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up", "release_kv_cache_memory",
    )
)  # fmt: skip
RESUMING = ("/resume", "/wake_up")
PICKLED = "ipc_handles_pickled"
TRY_AGAIN_LATER = 1013  # a code with which a websocket is closed
# 128 bytes for each tensor of the longest manifest. The server answers nobody while it parses a message, which takes
# half a second for the largest.
LARGEST_MESSAGE = MOST_ENTRIES << 7
DEEPEST = 8  # lists in lists of a message; a push needs four
SLOWEST = 1 << 20  # bytes per second that a body must bring on average, once the first SILENCE seconds are over
NOT_ALLOWED = (
    "Not allowed. Give the server's token as Refit(url, token=). One that nemo-fp8 serve drew is found by itself, by "
    "the same user "
    "on the same machine. A server without any takes pushes from its own machine alone, and not through a proxy: "
    f"set {PUSH_TOKEN} or {TOKEN} for it."
)
log = logging.getLogger("vllm.nemo_fp8")


class RefitEndpoints:
    """ASGI middleware with the endpoints of a push. Reads the server's key and token from the environment."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app, self.key, self.token = app, os.environ.get(TOKEN, ""), os.environ.get(PUSH_TOKEN, "")
        self.begun = ""  # the push that the workers accepted last
        self.changes = False  # whether that one brings changes only, which can be taken back
        self.push = ""  # the push that is writing
        self.died = ""  # why requests are refused, if they are
        self.mixed = False  # whether the workers held weights of two pushes when that push began
        self.resumes = False  # whether the end of the push that is writing, or that died, resumes the engine
        self.heard = 0.0  # when the engine last finished work for the push that is writing
        self.tasks = 0  # how many calls the engine is working on for it
        self.free = asyncio.Event()  # set unless a push is writing: requests wait for it
        self.free.set()
        self.spare = Spare()  # for the bytes of pushes
        self.bodies = asyncio.Semaphore(BUFFERS)  # a sender has one under way, and bodies beyond these wait
        # One at a time stops requests or lets them in: between the workers' answer and what follows from it another
        # push could begin, and an engine that resumes then would compute with weights of two.
        self.turning = asyncio.Lock()
        self.asking = asyncio.Lock()  # one request at a time asks the workers about a silent sender

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._say_who_may(scope)
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and path_of(scope).startswith(f"{ROUTE}/"):
            await self._control(scope, receive, send)
        elif scope["type"] == "http" and path_of(scope) in ORDERS:
            await self._order(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] != "POST":
            await self.app(scope, receive, send)  # health, metrics, lists: nothing that computes
        else:
            await self._wait_for_end(scope["app"].state.engine_client)
            if self.died:
                error = {"error": {"message": self._refusal(), "type": "ServiceUnavailable", "code": 503}}
                await _reply(send, 503, error, "http" if scope["type"] == "http" else "websocket.http")
            elif scope["type"] == "websocket":
                await self.app(scope, self._holding(scope, receive, send), send)
            else:
                await self.app(scope, receive, send)

    def _refusal(self) -> str:
        problem = refusal(self.died).problems[0]
        return f"{problem.what} {problem.why} {problem.remedy}"

    def _holding(self, scope: Scope, receive: Receive, send: Send) -> Receive:
        """Return a ``receive`` for an open websocket: its messages wait as requests do, or close it."""

        async def held() -> MutableMapping[str, Any]:
            event = await receive()
            if event["type"] == "websocket.receive":
                await self._wait_for_end(scope["app"].state.engine_client)
                if self.died:
                    reason = self._refusal()[:120]  # 123 bytes are the most
                    await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})
                    return {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": reason}
            return event

        return held

    async def _order(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let an order of vLLM's developer mode through if its sender may push, its body is sane and no push writes."""
        if not self._may(scope):
            await _reply(send, 403, {"error": NOT_ALLOWED})
            return
        try:
            body = await _order_body(scope, receive)
        except PrecisionError as error:
            await _reply(send, 400, _problems(error))
            return
        engine = scope["app"].state.engine_client
        whole = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> MutableMapping[str, Any]:
            return whole.pop() if whole else await receive()

        await self._wait_for_end(engine)
        if path_of(scope) in RESUMING:
            await self._resume(engine, scope, again, send)
            return
        await self.app(scope, again, send)
        if path_of(scope) == "/finish_weight_update":
            async with self.turning:
                if self.died and not await self._is_mixed(engine):  # a weight transfer has repaired what a push left
                    await self._forget_and_open(engine)

    async def _resume(self, engine: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Let an order through that lets requests in, unless the engine holds weights of two pushes."""
        while True:
            async with self.turning:
                if not self._is_writing(engine):  # a push that has begun since is to end first
                    if await self._is_mixed(engine):
                        await _reply(send, 503, {"error": self._refusal()})
                    else:
                        await self.app(scope, receive, send)
                    return
            await self._wait_for_end(engine)

    async def _is_mixed(self, engine: Any) -> bool:
        """Ask the workers whether they hold weights of two pushes, and refuse requests if they do."""
        mixed = why_mixed(await self._call(engine, "abandon", {"push": None}))  # which is the number of no push
        if mixed and not self.died:
            self._die(mixed)
        return bool(mixed)

    async def _wait_for_end(self, engine: Any) -> None:
        """Wait until no push is writing, or it died, or the engine did (which then refuses requests by itself)."""
        while self._is_writing(engine):
            left = LOOK if self.tasks else self.heard + SILENCE - time.monotonic()
            if left > 0:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.free.wait(), min(left, LOOK))
            else:
                async with self.asking:
                    await self._give_up(engine)

    def _is_writing(self, engine: Any) -> bool:
        return bool(self.push) and not self.died and not engine.errored

    async def _give_up(self, engine: Any) -> None:
        """End the push of a sender that was silent for too long.

        Serve on if the workers say that nothing was written; else refuse requests.
        """
        push, heard = self.push, self.heard
        if not push or self.died or self.tasks or heard + SILENCE > time.monotonic():
            return  # another request has done this, or the sender is back
        try:
            # Changes are taken back; a sender that comes back then pushes everything. No push has the number None: this
            # abandons nothing, and asks whether the model is mixed.
            over = push if self.changes and push == self.begun else None
            # It is no work for the sender, so that it is no sign of it either.
            task = engine.collective_rpc(f"{PREFIX}abandon", args=({"push": over},))
            mixed = why_mixed(list(await _answered(engine, task)))
        except PrecisionError:  # the engine died
            return
        async with self.turning:
            if self.tasks or (push, heard) != (self.push, self.heard):
                return  # the sender is back
            if mixed:
                self._die(f"push {push} has not been heard of for {SILENCE:.0f} seconds")
            else:
                await self._open(engine)

    def _die(self, why: str) -> None:
        self.died = why
        self.free.set()

    # ------------------------------------------------------------------ control

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = path_of(scope).removeprefix(f"{ROUTE}/")
        engine, status, answer = scope["app"].state.engine_client, 200, dict[str, Any]()
        if method not in METHODS or scope["method"] != "POST":
            status, answer = 404, {"error": f"POST one of {', '.join(METHODS)}."}
        elif not self._may(scope):
            status, answer = 403, {"error": NOT_ALLOWED}
        else:
            try:
                answer = await self._do(engine, method, scope, receive)
            except PrecisionError as error:
                status, answer = 503 if engine.errored else 400, _problems(error)
            except (ValueError, OverflowError, RecursionError) as error:  # what no message to a worker can hold
                status, answer = 400, _problems(_unreadable(f"{type(error).__name__}: {error}"))
            except Exception as error:
                log.exception("%r of a push failed", method)
                what, why = f"The server could not do {method!r} of a push.", f"{type(error).__name__}: {error}"
                status, answer = 500, _problems(PrecisionError(what, why, "Its log has the traceback; report it."))
        await _reply(send, status, answer)

    def _may(self, scope: Scope) -> bool:
        tokens = self._tokens(scope)
        return not comes_from_a_page(scope) and (
            any(brings(scope, token) for token in tokens) if tokens else is_local(scope)
        )

    def _tokens(self, scope: Scope) -> list[str]:
        """Return the secrets of which any one allows a push: the server's keys, or, without keys, the push token."""
        told = getattr(getattr(scope["app"].state, "args", None), "api_key", None)
        return [key for key in told or [self.key] if key] or [token for token in [self.token] if token]

    def _say_who_may(self, scope: Scope) -> None:
        if self._tokens(scope):
            log.info("Who brings this server's token may push weights into it, from anywhere that reaches it.")
        else:
            log.warning(
                "Without a token every user and every program of this machine that reaches this server may push "
                "weights into it, and so may whoever comes through a proxy on this machine that adds no header. "
                "Set %s (for pushes alone) or %s to a secret; nemo-fp8 serve draws one by itself.",
                PUSH_TOKEN,
                TOKEN,
            )

    async def _do(self, engine: Any, method: str, scope: Scope, receive: Receive) -> Answer:
        if method == "bytes":
            async with self.bodies:
                return await self._bytes(engine, scope, receive)
        message = await _message(scope, receive)
        if method == "write":
            return {"answers": await self._write(engine, message)}
        if method == "stream":
            return {"answers": await self._write(engine, message | {"silence": SILENCE}, "stream")}
        if method == "finish":
            async with self.turning:
                return await self._finish(engine, message)
        if method == "abandon":
            async with self.turning:
                return await self._abandon(engine, message)
        answers = await self._call(engine, method, message)
        if method in ("begin", "delta") and all(answer.get("accepted") for answer in answers):
            self.begun, self.changes = str(message.get("push")), method == "delta"
            self.mixed = method == "begin" and bool(why_mixed(answers))
        return {"answers": answers}

    async def _bytes(self, engine: Any, scope: Scope, receive: Receive) -> Answer:
        """Have the workers write what a body brings."""
        length = _length(scope, LARGEST_BODY)
        with self.spare.lent(length) as shared:
            message, used = await _body(receive, bytes_of(shared.tensor[:length]))
            return {"answers": await self._write(engine, message | {"memory": shared.handle, "used": used})}

    async def _abandon(self, engine: Any, message: Answer) -> Answer:
        """End a push that died: let requests in, or refuse them if weights of two pushes are left."""
        answers = await self._call(engine, "abandon", message)
        if str(message.get("push")) == self.push:
            mixed = why_mixed(answers)
            if mixed:
                self._die(mixed)
            else:
                await self._open(engine)
        return {"answers": answers}

    async def _write(self, engine: Any, message: Answer, method: str = "write") -> list[Answer]:
        """Have the workers write pieces, or take a stream of them; make requests wait from the first of a push on."""
        push = str(message.get("push"))
        # Requests need not wait for a message without pieces, which only has the workers open memory, nor for a push
        # that was not accepted, which the workers will refuse.
        if (method == "stream" or message.get("pieces")) and push == self.begun != self.push:
            async with self.turning:
                if push == self.begun != self.push:
                    await self._stop_requests(engine, push, message.get("running", "wait"))
        return await self._call(engine, method, message)

    async def _stop_requests(self, engine: Any, push: str, running: Any) -> None:
        """Close the door for a push that writes now, and have the engine stop computing."""
        others, self.push = self.push, push
        self.free.clear()
        if not others:  # Its owner's pause outlasts a push; that of a push which died does not.
            self.resumes = self.mixed or not await self._at_work(engine, engine.is_paused())
        await self._at_work(engine, engine.pause_generation(mode=running if running in RUNNING else "wait"))

    async def _finish(self, engine: Any, message: Answer) -> Answer:
        """End a push: drop the prefix cache, and let requests in again."""
        if not is_version(message.get("weight_version", "")):
            raise _unreadable("its weight_version is no short text")
        answers, done = await self._call(engine, "finish", message), False
        named = None
        if not any(answer.get("problems") for answer in answers):
            if version := version_to_set("finish", message, answers):
                await self._at_work(engine, engine.update_weight_version(version))
                named = await self._at_work(engine, engine.get_weight_version())
            done = await self._forget_and_open(engine)
        return {"answers": answers, "forgotten": done, "weight_version": named}

    async def _forget_and_open(self, engine: Any) -> bool:
        """Drop the prefix cache, and let requests in again; return whether vLLM says that it dropped the cache.

        Requests are refused if nobody can say: all weights are the new ones, and the cache may be of the old ones.
        """
        try:
            done = bool(await self._at_work(engine, forgotten(engine)))
        except PrecisionError:
            raise
        except Exception as error:
            log.exception("the prefix cache could not be reset")
            self._die(f"it ended, but the prefix cache was not dropped ({type(error).__name__})")
            return False
        await self._open(engine)
        return done

    async def _open(self, engine: Any) -> None:
        self.push, self.died = "", ""
        # Requests that come now are held by the paused engine until it resumes. A push that begins now closes the door.
        self.free.set()
        if self.resumes:
            await self._at_work(engine, engine.resume_generation())
            self.resumes = False

    async def _call(self, engine: Any, method: str, message: Answer) -> list[Answer]:
        task = engine.collective_rpc(PREFIX + method, args=(message,))
        return list(
            await (self._at_work(engine, task) if str(message.get("push")) == self.push else _answered(engine, task))
        )

    async def _at_work(self, engine: Any, task: Awaitable[Any]) -> Any:
        """Wait for the engine's work for the push that is writing; the time does not count as the sender's silence."""
        self.tasks += 1
        try:
            return await _answered(engine, task)
        finally:
            self.tasks -= 1
            self.heard = time.monotonic()


async def _answered(engine: Any, task: Awaitable[Any]) -> Any:
    return await answered_on_loop(task, lambda: bool(engine.errored))


def _problems(error: PrecisionError) -> Answer:
    return {"problems": [[p.what, p.why, p.remedy] for p in error.problems]}


# ---------------------------------------------------------------------- bodies: nothing in them is trusted


def _length(scope: Scope, most: int) -> int:
    """Return the announced length of a body; raise PrecisionError if there is none, or it is beyond ``most``."""
    told = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"")
    if not told.isdigit() or not 0 < int(told) <= most:
        raise PrecisionError(
            f"A body of {told.decode('latin-1')[:20] or 'unknown'} bytes.",
            f"At most {most} are taken.",
            "Use Refit(url).",
        )
    return int(told)


async def _message(scope: Scope, receive: Receive) -> Answer:
    """Read a body that is a JSON message."""
    return _object(await _text(scope, receive))


async def _text(scope: Scope, receive: Receive) -> bytes:
    """Read a body that is not larger than the largest message, and not longer than it says."""
    length, body = _length(scope, LARGEST_MESSAGE), bytearray()
    async for part in _parts(receive):
        body += part
        if len(body) > length:
            raise _unreadable("it is longer than it says")
    return bytes(body)


async def _order_body(scope: Scope, receive: Receive) -> bytes:
    """Read the body of an order; raise PrecisionError if it is too large, no JSON object, or holds pickled handles."""
    names = {name.lower() for name, _ in scope["headers"]}
    lengths = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    if b"transfer-encoding" not in names and lengths in ([], [b"0"]):
        return b""
    body = await _text(scope, receive)
    if _has_key(_object(body), PICKLED):
        raise PrecisionError(
            "Weights with pickled handles.",
            "To unpickle what comes over HTTP is to run whatever the sender put there.",
            "Push with Refit(url), or by the backend nemo_fp8, which send no pickles.",
        )
    return body


async def _body(receive: Receive, room: memoryview) -> tuple[Answer, int]:
    """Read a body of a message's length, the message, and bytes, which come into ``room``, as large as the body; return
    the message, and how many bytes there are."""
    head, size, at = bytearray(), 0, 0
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
    return _object(bytes(head[LENGTH:])), at


async def _parts(receive: Receive) -> Any:
    """Yield the parts of a body; raise PrecisionError if its sender goes away, falls silent or is too slow."""
    begun, came = time.monotonic(), 0
    while True:
        left = begun + SILENCE + came / SLOWEST - time.monotonic()
        try:
            event = await asyncio.wait_for(receive(), min(left, SILENCE))
        except asyncio.TimeoutError:
            slow = f"only {came} bytes of it came in {time.monotonic() - begun:.0f} seconds"
            raise _unreadable(
                slow if came and left < SILENCE else f"nothing of it came for {SILENCE:.0f} seconds"
            ) from None
        if event["type"] == "http.disconnect":
            raise _unreadable("its sender went away")
        if event.get("body"):
            came += len(event["body"])
            yield event["body"]
        if not event.get("more_body"):
            return


def _object(text: bytes) -> Answer:
    """Parse a JSON object; raise PrecisionError if it is none, or is nested too deeply."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(error)) from None
    if not isinstance(found, dict):
        raise _unreadable("it is no JSON object")
    if _is_deeper(found, DEEPEST):
        raise _unreadable(f"it has more than {DEEPEST} lists in one another")
    return found


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for several in inside for one in several if isinstance(one, (list, dict))]
    return bool(level)


def _has_key(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_has_key(one, key) for one in value.values())
    return isinstance(value, list) and any(_has_key(one, key) for one in value)


def _unreadable(why: str) -> PrecisionError:
    return PrecisionError(
        "The body of a push cannot be read.", f"{why[0].upper()}{why[1:]}.", "Push with nemo_fp8.rollout.Refit(url)."
    )


async def _reply(send: Send, status: int, answer: Any, kind: str = "http") -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status != 200:
        headers.append((b"connection", b"close"))  # the rest of the request's body is not read
    await send({"type": f"{kind}.response.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})
