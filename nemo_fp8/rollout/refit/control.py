"""Control an engine during a push: in this process, on an asyncio loop, or over HTTP, by one small interface.

    call(method, message)    call a method of every worker; return all answers
    hold(running) / free()   compute no request while weights change; ``running`` says what happens to unfinished ones.
                             An engine that its owner had paused, or put to sleep, stays so
    refuse(why) / allow()    refuse requests, with the reason, after a push that died, until a push ends well
    forget()                 drop what was computed with old weights (the prefix cache, a KV connector's store, what
                             encoders made); return whether vLLM did

An ``LLM`` can have unfinished requests, too: of a ``generate`` that was interrupted, of a loop around ``step()``, of
another thread. Its EngineCore is another process, which computes them whether or not anybody waits, and to which one
thread at a time may send. A server holds its requests itself (:mod:`nemo_fp8.rollout.refit.door`).

A control that can reach another host is a :class:`Carrier`: it sends the bytes with the message, since memory cannot be
mapped there. If an engine dies, every call that waits for it raises (:mod:`nemo_fp8.rollout.refit.alive`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.rollout.access import is_loopback, reply_of
from nemo_fp8.rollout.refit.alive import answered, in_thread
from nemo_fp8.rollout.token_file import token_of

Answer = dict[str, Any]
PREFIX = "nemo_fp8_refit_"
RUNNING = ("wait", "abort", "keep")
"""What becomes of requests that an engine computes when a push begins."""
log = logging.getLogger(__name__)
ROUTE = "/nemo_fp8/refit"
PATIENCE = 600.0  # seconds that a server may take for an answer
LENGTH = 8  # bytes at the head of a body that say how long the message behind them is
LARGEST_BODY = 1 << 31  # bytes that a server takes at once


class Control(Protocol):
    """What a push needs of an engine. Any object with these methods will do, such as a handle of a Ray actor.

    One that has an ``owner`` says by it whose engine that is (the ``LLM``, or the URL): pushes into it take turns,
    whatever their way.
    """

    def call(self, method: str, message: Answer) -> list[Answer]:
        """Call ``nemo_fp8_refit_<method>`` of every worker with a message of plain values; return their answers.

        What a worker found wrong is in its answer. A push of changes begins with a call in a thread of its own. Raises
        PrecisionError if the engine does not answer, or is dead.
        """

    def hold(self, running: str) -> None:
        """Compute no request until ``free``. ``running`` is ``wait``, ``abort`` or ``keep``, as for ``Refit``."""

    def free(self) -> None:
        """Compute requests again, unless the engine was paused before ``hold``."""

    def refuse(self, why: str) -> None:
        """Answer every request with an error that gives the reason ``why``, until ``allow``."""

    def allow(self) -> None:
        """Take requests again; does nothing if they were not refused."""

    def forget(self) -> bool:
        """Drop what :func:`forgotten` does; return whether vLLM says that it did. If not, the receipt is not ``ok``."""


@runtime_checkable
class Carrier(Protocol):
    """A :class:`Control` that can send bytes with a message."""

    local: bool
    """Whether the workers may be on this host, and map this process's memory."""

    def carry(self, message: Answer, body: memoryview) -> list[Answer]:
        """Send the bytes of a buffer, and have every worker write the pieces that ``message`` lists.

        Raises PrecisionError as :meth:`Control.call` does.
        """


def control_of(engine: Any, token: str | None = None) -> Control:
    """Return the control of an engine: a ``vllm.LLM``, an ``AsyncLLM``, a server's URL, or a control itself.

    Raises PrecisionError for anything else.
    """
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


def version_to_set(method: str, message: Answer, answers: list[Answer]) -> str | None:
    """Return what the engine shall call its weights after a call: those of a push that ended well. None: as before."""
    ended = method == "finish" and not any(answer.get("problems") for answer in answers)
    had_ended = method == "abandon" and is_held(message.get("push"), answers)
    return message.get("weight_version") if ended or had_ended else None


def is_held(push: str | None, answers: Sequence[Answer]) -> bool:
    """Return whether all workers hold the weights of this push, by their answers to ``abandon``: it had ended."""
    return bool(push and answers) and all(answer.get("version") == push for answer in answers)


def why_mixed(answers: Sequence[Answer]) -> str:
    """Return why an engine holds weights of two pushes, by its workers' answers, or ``""`` if it does not.

    One worker may have ended a push of changes that another took back. A worker that cannot say counts as mixed.
    """
    for answer in answers:
        if answer.get("mixed"):
            return str(answer["mixed"])
        if "mixed" not in answer:
            return f"a worker cannot say what it holds ({answer.get('problems') or 'it does not answer'})"
    versions = {str(answer.get("version") or "none") for answer in answers}
    return f"workers hold different pushes ({', '.join(sorted(versions))})" if len(versions) > 1 else ""


def _tell(answers: list[Answer], version: Any) -> None:
    for answer in answers:
        answer["weight_version"] = version


class Offline:
    """Controls a ``vllm.LLM`` that lives in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.resumes = llm, False
        _let_one_thread_send(llm.llm_engine.engine_core)

    def call(self, method: str, message: Answer) -> list[Answer]:
        engine = self.llm.llm_engine
        answers = list(self.answered(lambda: engine.collective_rpc(PREFIX + method, args=(message,))))
        if version := version_to_set(method, message, answers):
            self.answered(lambda: engine.set_weight_version(version))
            _tell(answers, self.answered(engine.get_weight_version))
        return answers

    def hold(self, running: str) -> None:
        engine, core = self.llm.llm_engine, self.llm.llm_engine.engine_core
        unfinished = [*engine.output_processor.request_states]
        if unfinished:
            log.warning(
                "A push finds unfinished requests in this engine: %d. %s", len(unfinished), _UNFINISHED[running]
            )
        if hasattr(core, "call_utility"):
            paused = self.answered(lambda: core.call_utility("is_scheduler_paused"))
            self.resumes = self.resumes or _resumes(engine, paused)  # a push that was interrupted has left it paused
            self.answered(lambda: core.call_utility("pause_scheduler", running, False))
        elif running == "wait":
            _Finished(core)
        if running == "abort":  # else vLLM returns them, aborted, among the answers of the next generate
            engine.abort_request(unfinished, internal=True)

    def free(self) -> None:
        if self.resumes:
            self.answered(lambda: self.llm.llm_engine.engine_core.call_utility("resume_scheduler"))
            self.resumes = False

    def refuse(self, why: str) -> None:
        if not self._is_dead():  # a dead engine refuses requests by itself
            vars(self.llm.llm_engine).update(dict.fromkeys(_ANSWERING, _Refusal(why)))

    def allow(self) -> None:
        for name in _ANSWERING:
            vars(self.llm.llm_engine).pop(name, None)

    def forget(self) -> bool:
        done = self.answered(lambda: self.llm.reset_prefix_cache(**EVERYTHING))
        self.answered(self.llm.llm_engine.reset_encoder_cache)
        return bool(done)

    def answered(self, ask: Callable[[], Any]) -> Any:
        """Return what ``ask()`` does; raise PrecisionError if the engine dies meanwhile."""
        if not hasattr(self.llm.llm_engine.engine_core, "resources"):  # EngineCore is in this process
            return ask()
        return answered(in_thread(ask), self._is_dead)

    def _is_dead(self) -> bool:
        resources = getattr(self.llm.llm_engine.engine_core, "resources", None)
        return resources is not None and bool(resources.engine_dead)


EVERYTHING = {"reset_running_requests": True, "reset_connector": True}
"""What vLLM is asked to drop. Without the first it keeps its whole cache if any request is unfinished, without the
second what a KV connector keeps elsewhere."""


async def forgotten(engine: Any) -> bool:
    """Have an AsyncLLM drop all keys and values, and what encoders made of images; return whether it did.

    An encoder's outputs lie in workers, which drop them at the end of a push, and the scheduler counts on them.
    """
    done = await engine.reset_prefix_cache(**EVERYTHING)
    await engine.reset_encoder_cache()
    return bool(done)


COVERED = {
    "add_request": "an engine that holds old and new weights takes no request, and vLLM has no switch for that",
    "step": "such an engine answers no request of before, either",
    "generate": "an AsyncLLM's own replaces any error of add_request by one without its message",
    "encode": "an AsyncLLM's own does so, too",
    "_send_input": "it writes a message frame by frame to a socket that is not made for two threads, and a push has "
    "another thread than generate",
    "get_output": "an engine in this process has to finish its requests before a push, and keep their answers for who "
    "asks next",
}
"""Methods of vLLM's objects in whose place others stand for a while, on one object and never on its class, and why."""
_ANSWERING, _ANSWERING_ON_LOOP = ("add_request", "step"), ("add_request", "generate", "encode")
"""The methods of an ``LLMEngine``, and of an ``AsyncLLM``, that take requests and return answers."""
_UNFINISHED = {
    "wait": "They end with the old weights first, and vLLM gives their answers back with the next ones; "
    "running='abort' drops them.",
    "abort": "They are dropped.",
    "keep": "They go on with the new weights afterwards, and vLLM gives their answers back with the next ones; "
    "running='abort' drops them.",
}


def _let_one_thread_send(core: Any) -> None:
    """Let the client of an EngineCore in another process send one message after the other, whichever threads ask.

    A message goes to the client's socket frame by frame, and neither that socket nor the encoder before it is made for
    two threads: where a push met the ``generate`` of another thread in the midst of a message, ZeroMQ aborted the
    process, or an answer never came.
    """
    send = getattr(type(core), "_send_input", None)
    if send is None or "_send_input" in vars(core):  # EngineCore is in this process, or another Refit was here before
        return
    lock, client = threading.Lock(), weakref.proxy(core)  # no cycle: an engine ends with the last name of its LLM

    def one_at_a_time(*arguments: Any) -> None:
        with lock:
            send(client, *arguments)

    vars(core).setdefault("_send_input", one_at_a_time)
    while any(_runs(thread, send.__code__) for thread in sys._current_frames().values()):
        time.sleep(0.001)  # a message that was begun without the lock


def _runs(frame: FrameType | None, code: CodeType) -> bool:
    """Return whether a thread, given its innermost frame, is in this function."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


class _Finished:
    """Runs an EngineCore in this process until no request is unfinished, and keeps its outputs.

    It then stands in for ``get_output`` and returns the kept outputs step by step, as if they came just now. When all
    are returned it removes itself.
    """

    def __init__(self, core: Any) -> None:
        self.core = core
        # An earlier push may have left outputs that nobody has asked for yet.
        self.outputs: deque[Any] = getattr(vars(core).get("get_output"), "outputs", deque())
        core.get_output = self
        while core.engine_core.scheduler.has_unfinished_requests():
            self.outputs.append(type(core).get_output(core))

    def __call__(self) -> Any:
        if self.outputs:
            return self.outputs.popleft()
        vars(self.core).pop("get_output", None)
        return self.core.get_output()


class _Refusal:
    """Stands in for a method of an engine, and raises."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise refusal(self.why)


def _resumes(engine: Any, paused: bool) -> bool:
    """Return whether the end of a push resumes an engine: not if its owner paused it.

    A push that died left it paused, too, and refusing.
    """
    return not paused or isinstance(vars(engine).get("add_request"), _Refusal)


def refusal(why: str) -> PrecisionError:
    """Return the error for a request to an engine that holds old and new weights; ``why`` is the push's end."""
    return PrecisionError(
        "The engine holds old and new weights, and answers no request.",
        f"A push of weights died half-way: {why.removesuffix('.')}.",
        "Push again; a push that ends well restores it.",
    )


class OnLoop:
    """Controls an ``AsyncLLM`` from another thread than its loop's.

    Make it in a coroutine, and push with ``await asyncio.to_thread(refit.push, tensors)``. Raises PrecisionError
    outside of one.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self.resumes = engine, False
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            raise PrecisionError(
                "A Refit for an AsyncLLM, made outside of its loop.",
                "The engine's answers come on the loop that it runs on, and a push waits for them in another thread.",
                "Make it in a coroutine, and push with: await asyncio.to_thread(refit.push, tensors).",
            ) from None

    def call(self, method: str, message: Answer) -> list[Answer]:
        answers = list(self._wait(self.engine.collective_rpc(PREFIX + method, args=(message,))))
        if version := version_to_set(method, message, answers):
            self._wait(self.engine.update_weight_version(version))
            _tell(answers, self._wait(self.engine.get_weight_version()))
        return answers

    def hold(self, running: str) -> None:
        self.resumes = self.resumes or _resumes(self.engine, self._wait(self.engine.is_paused()))
        self._wait(self.engine.pause_generation(mode=running))

    def free(self) -> None:
        if self.resumes:
            self._wait(self.engine.resume_generation())
            self.resumes = False

    def refuse(self, why: str) -> None:
        if self.engine.errored:
            return  # a dead engine refuses requests by itself
        answers = _AsyncRefusal(why)
        vars(self.engine).update(add_request=answers, generate=answers.stream, encode=answers.stream)

    def allow(self) -> None:
        for name in _ANSWERING_ON_LOOP:
            vars(self.engine).pop(name, None)

    def forget(self) -> bool:
        return bool(self._wait(forgotten(self.engine)))

    def _wait(self, what: Coroutine[Any, Any, Any]) -> Any:
        return answered(asyncio.run_coroutine_threadsafe(what, self.loop), lambda: bool(self.engine.errored))


class _AsyncRefusal(_Refusal):
    """Stands in for a coroutine (``add_request``), or with ``stream`` for an async generator, and raises."""

    async def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        raise refusal(self.why)

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise refusal(self.why)
        yield  # makes it a generator


class Server:
    """Controls an OpenAI server with our endpoints (:mod:`nemo_fp8.rollout.refit.door`).

    The server holds and refuses requests by itself, so those methods have nothing to do here. Raises PrecisionError if
    ``url`` is none.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = PATIENCE) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise PrecisionError(
                f"Cannot push to {url!r}.",
                "An engine that is given by a text is a server, and this is no URL of one.",
                "Give http://HOST:PORT, or the vllm.LLM itself.",
            )
        self.url, self.token, self.timeout = url.rstrip("/"), token, timeout
        self.local = is_loopback(urlsplit(self.url).hostname or "")
        self.running, self.forgotten = "wait", False

    def call(self, method: str, message: Answer) -> list[Answer]:
        said = self._post(method, [self._text(message)], "application/json")
        answers = list(said["answers"])
        if method == "finish":
            self.forgotten = said.get("forgotten") is True
            _tell(answers, said.get("weight_version"))
        return answers

    def carry(self, message: Answer, body: memoryview) -> list[Answer]:
        head = self._text(message)
        return list(
            self._post("bytes", [len(head).to_bytes(LENGTH, "little") + head, body], "application/octet-stream")[
                "answers"
            ]
        )

    def _text(self, message: Answer) -> bytes:
        return json.dumps(message | {"running": self.running}).encode()

    def _post(self, method: str, parts: list[Any], kind: str) -> Answer:
        """Post a body, given in parts, and return the server's reply, with the workers' answers in ``answers``.

        Raises PrecisionError with the server's problems, or if it does not reply as our endpoints do.
        """
        headers = {"Content-Type": kind, "Content-Length": str(sum(map(len, parts)))}
        token = self.token or token_of(self.url)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(f"{self.url}{ROUTE}/{method}", parts, headers, method="POST")
        try:
            # The call of a stream lasts as long as the whole push. If the server dies, the connection ends.
            with reply_of(request, timeout=None if method == "stream" else self.timeout) as reply:
                said: Answer = json.loads(reply.read())
                return said | {"answers": said["answers"]}
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
        return self.forgotten  # the server dropped its cache before it let the first request in again


def _from_server(error: urllib.error.HTTPError) -> PrecisionError:
    """Return the error for a reply that is not 200: the problems in it, or else its text."""
    text = error.read(1 << 20)
    try:
        return PrecisionError([Problem(*row) for row in json.loads(text)["problems"]])
    except (ValueError, KeyError, TypeError):
        remedy = "Check the URL; start the server with nemo-fp8 serve, or give vllm serve the flags that it prints."
        return PrecisionError(
            f"The server answers a push with {error.code}.", text.decode(errors="replace")[:300] or error.reason, remedy
        )
