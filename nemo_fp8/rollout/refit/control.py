"""How a push speaks to an engine: in this process, on a loop, or over HTTP. One small interface, three ways.

    call(method, message)    ask every worker, and have all their answers
    hold() / free()          no request may be computed while weights change
    refuse(why) / allow()    after a push that died: requests are refused, with the reason, until one ends well
    forget()                 what was computed with the old weights (the prefix cache)

An ``LLM`` runs requests only when it is called, so there is nothing to hold. Requests of a server wait at its door.

A way that leads to another host is a :class:`Carrier`: bytes go along with a message, since memory cannot be mapped there.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Coroutine
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.rollout.access import is_loopback

Answer = dict[str, Any]
PREFIX = "nemo_fp8_refit_"
ROUTE = "/nemo_fp8/refit"
LENGTH = 8  # bytes of the number before a message in a body


class Control(Protocol):
    """What a push needs of an engine. Anything with these methods will do, such as a handle of a Ray actor."""

    def call(self, method: str, message: Answer) -> list[Answer]: ...

    def hold(self, running: str) -> None: ...

    def free(self) -> None: ...

    def refuse(self, why: str) -> None: ...

    def allow(self) -> None: ...

    def forget(self) -> bool: ...


@runtime_checkable
class Carrier(Protocol):
    """A :class:`Control` that can take bytes along."""

    local: bool
    """Whether the workers may be on this host, and map this process's memory."""

    def carry(self, message: Answer, body: memoryview) -> list[Answer]:
        """Have every worker write what ``message`` says of ``body``."""


def control_of(engine: Any, token: str | None = None) -> Control:
    """The way to an engine: a ``vllm.LLM``, an ``AsyncLLM``, the URL of a server, or something that is a way already."""
    if isinstance(engine, str):
        return Server(engine, token)
    if hasattr(engine, "llm_engine"):
        return Offline(engine)
    if asyncio.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
        return OnLoop(engine)
    if all(hasattr(engine, name) for name in ("call", "hold", "free", "refuse", "allow", "forget")):
        return engine  # type: ignore[no-any-return]
    raise PrecisionError(
        f"Cannot push to {type(engine).__name__}.",
        "It is no vllm.LLM, no AsyncLLM, no URL, and has not the methods of nemo_fp8.rollout.refit.Control.",
        "Give one of them.",
    )


class Offline:
    """A ``vllm.LLM`` of this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def call(self, method: str, message: Answer) -> list[Answer]:
        return list(self.llm.llm_engine.collective_rpc(PREFIX + method, args=(message,)))

    def hold(self, running: str) -> None:
        pass

    def free(self) -> None:
        pass

    def refuse(self, why: str) -> None:
        # On this one object, and gone with the next push: vLLM has no switch for it, and a mixed model must not answer.
        self.llm.llm_engine.add_request = _Refusal(why)

    def allow(self) -> None:
        vars(self.llm.llm_engine).pop("add_request", None)

    def forget(self) -> bool:
        return bool(self.llm.reset_prefix_cache())


class _Refusal:
    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise refusal(self.why)


def refusal(why: str) -> PrecisionError:
    """What a request is answered with while an engine holds old and new weights."""
    return PrecisionError(
        "The engine holds old and new weights, and answers no request.",
        f"A push of weights died half-way: {why}",
        "Push again; a push that ends well restores it.",
    )


class OnLoop:
    """An ``AsyncLLM``, from another thread than its loop's: ``await asyncio.to_thread(refit.push, tensors)``."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            raise PrecisionError(
                "A Refit for an AsyncLLM, made outside of its loop.",
                "The engine's answers come on the loop that it runs on, and a push waits for them in another thread.",
                "Make it in a coroutine, and push with: await asyncio.to_thread(refit.push, tensors).",
            ) from None

    def call(self, method: str, message: Answer) -> list[Answer]:
        return list(self._wait(self.engine.collective_rpc(PREFIX + method, args=(message,))))

    def hold(self, running: str) -> None:
        self._wait(self.engine.pause_generation(mode=running))

    def free(self) -> None:
        self._wait(self.engine.resume_generation())

    def refuse(self, why: str) -> None:
        self.engine.add_request = _AsyncRefusal(why)

    def allow(self) -> None:
        vars(self.engine).pop("add_request", None)

    def forget(self) -> bool:
        return bool(self._wait(self.engine.reset_prefix_cache(reset_running_requests=True)))

    def _wait(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result()


class _AsyncRefusal(_Refusal):
    async def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        raise refusal(self.why)


class Server:
    """An OpenAI server with our endpoints (:mod:`nemo_fp8.rollout.refit.endpoints`). It holds and refuses by itself."""

    def __init__(self, url: str, token: str | None = None, timeout: float = 600.0) -> None:
        self.url, self.token, self.timeout = url.rstrip("/"), token, timeout
        self.local = is_loopback(urlsplit(self.url).hostname or "")
        self.running = "wait"

    def call(self, method: str, message: Answer) -> list[Answer]:
        return self._post(method, [self._text(message)], "application/json")

    def carry(self, message: Answer, body: memoryview) -> list[Answer]:
        head = self._text(message)
        return self._post("bytes", [len(head).to_bytes(LENGTH, "little") + head, body], "application/octet-stream")

    def _text(self, message: Answer) -> bytes:
        return json.dumps(message | {"running": self.running}).encode()

    def _post(self, method: str, parts: list[Any], kind: str) -> list[Answer]:
        """Send a body, which may lie in several places, and have the workers' answers."""
        headers = {"Content-Type": kind, "Content-Length": str(sum(map(len, parts)))}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(f"{self.url}{ROUTE}/{method}", parts, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                answers: list[Answer] = json.loads(reply.read())["answers"]
                return answers
        except urllib.error.HTTPError as error:
            raise _from_server(error) from None
        except (OSError, ValueError, KeyError) as error:
            raise PrecisionError(
                f"{self.url} does not answer a push.",
                f"{type(error).__name__}: {error}",
                "Check the URL; start the server with nemo-fp8 serve, or give vllm serve the flags that it prints.",
            ) from error

    def hold(self, running: str) -> None:
        self.running = running

    def free(self) -> None:
        pass

    def refuse(self, why: str) -> None:
        pass

    def allow(self) -> None:
        pass

    def forget(self) -> bool:
        return True


def _from_server(error: urllib.error.HTTPError) -> PrecisionError:
    """What the server said, in its own words if they are ours."""
    text = error.read(1 << 20)
    try:
        return PrecisionError([Problem(*row) for row in json.loads(text)["problems"]])
    except (ValueError, KeyError, TypeError):
        remedy = "Check the URL; start the server with nemo-fp8 serve, or give vllm serve the flags that it prints."
        return PrecisionError(f"The server answers a push with {error.code}.", text.decode(errors="replace")[:300] or error.reason, remedy)
