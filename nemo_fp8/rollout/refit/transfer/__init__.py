"""Push through vLLM's weight-transfer API, as its own trainers do; the engine takes it by the name ``nemo_fp8``.

    llm = LLM(model, **engine_args(precision), weight_transfer_config={"backend": "nemo_fp8"})

    about, source = NemoFp8TrainerInit(rank=0), ModuleSource(model)
    trainer = WeightTransferTrainerFactory.trainer_init(about, client=llm, source=source)
    receipt = trainer.send_weights()             # every step; the receipt of Refit.push, made by the same calls

``client`` is what vLLM's trainers take: an object with ``init_weight_transfer_engine``, ``start_weight_update``,
``update_weights`` and ``finish_weight_update``, such as vLLM's own for HTTP and a framework's for its actors. A
``vllm.LLM`` and a server's URL will do, too. These calls neither pause an engine nor drop its prefix cache:

    client                              who does that
    a ``vllm.LLM``                      the push, as for ``Refit(llm)``
    a URL, vLLM's client for HTTP       the push, by the server's ``/pause``, ``/resume``, ``/is_paused`` ...
    any other                           its methods ``pause_generation(mode)``, ``resume_generation()``, ``is_paused()``
                                        and ``reset_prefix_cache()`` if it has them; else you, and ``caller_pauses``
                                        says so

Such methods return when they have done it (a coroutine is refused), ``is_paused`` and ``reset_prefix_cache`` whether it
is so. A client calls one engine: a trainer of several has a client, and a ``trainer_init``, for each.

Weights and answers travel through the trainer's memory, so trainer and workers share a host and a user. To another host
push with ``Refit(url)``.
"""

from __future__ import annotations

import inspect
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from nemo_fp8.extras import require

__needs__ = require("rollout")

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.access import reply_of
from nemo_fp8.rollout.refit.alive import SILENCE
from nemo_fp8.rollout.refit.control import PATIENCE, Answer, Offline, version_to_set
from nemo_fp8.rollout.refit.mailbox import Mailbox
from nemo_fp8.rollout.refit.manifest import Manifest
from nemo_fp8.rollout.refit.push import CHUNK, Refit
from nemo_fp8.rollout.refit.receipt import Receipt
from nemo_fp8.rollout.refit.wire import raise_problems
from nemo_fp8.rollout.token_file import token_of

LONGEST_REPLY = 1 << 20
log = logging.getLogger(__name__)


@dataclass
class NemoFp8TrainerInit(TrainerInitInfo):
    """What ``trainer_init`` takes: ``rank`` of vLLM, and arguments of :class:`Refit` and its ``push``."""

    backend: ClassVar[str] = "nemo_fp8"

    running: str = "wait"
    verify: bool = False
    delta: bool = False
    """Whether every push after the first one sends what has changed since, as ``Refit.push(delta=True)`` does."""
    chunk: int = CHUNK
    token: str | None = None
    """The secret of a server that is given by its URL."""
    caller_pauses: bool = False
    """Whether the caller pauses the engine before a push, and drops its prefix cache before it resumes. The receipt
    takes its word for the cache."""


class NemoFp8TrainerEngine(TrainerWeightTransferEngine[NemoFp8TrainerInit]):
    """vLLM's backend ``nemo_fp8``, in the trainer. All ranks go through the source; rank 0 sends."""

    init_info_cls = NemoFp8TrainerInit

    def __init__(self, about: NemoFp8TrainerInit, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=about.is_sender)
        self.about, self.control = about, Calls(client, about) if about.is_sender else None
        self.refit = None
        if self.control is not None:
            self.refit = Refit(self.control, chunk=about.chunk, running=about.running)

    @classmethod
    def trainer_init(cls, init_info: NemoFp8TrainerInit, *, client: Any, source: Any = None) -> NemoFp8TrainerEngine:
        """Return a trainer whose workers have answered. Raises PrecisionError without a source, or if they cannot."""
        if source is None:
            raise PrecisionError(
                "A trainer without a source of weights.",
                "Every push sends all of them.",
                "Give source=, such as vLLM's ModuleSource(model).",
            )
        trainer = cls(init_info, client, source)
        if trainer.control is not None:
            trainer.control.meet()
        return trainer

    def send_weights(self, weight_version: str | None = None) -> Receipt | None:
        """Push the source's weights; return the receipt, or None on a rank that does not send.

        ``weight_version`` is what the engine calls them from now on; the push's number, if it is not given.
        Raises PrecisionError as :meth:`Refit.push` does.
        """
        tensors = iter(self.source)
        try:
            if self.refit is None:
                return None
            return self.refit.push(
                tensors,
                manifest=Manifest.of(self.source),
                verify=self.about.verify,
                delta=self.about.delta,
                weight_version=weight_version,
            )
        finally:
            for _ in tensors:  # which other ranks gather together with this one
                pass

    def shutdown(self) -> None:
        """Free the memory that the workers answer in."""
        if self.control is not None:
            self.control.mailbox.close()


class Calls:
    """A :class:`~nemo_fp8.rollout.refit.control.Control` of an engine that is reached by vLLM's four calls."""

    def __init__(self, client: Any, about: NemoFp8TrainerInit) -> None:
        self.client, self.mailbox = _client_of(client, about.token), Mailbox()
        self.scheduler = _Caller() if about.caller_pauses else _scheduler_of(self.client, about.token)
        self.push: Any = None
        """The number of the push that began last."""
        for name in ("free", "refuse", "allow", "forget"):
            setattr(self, name, getattr(self.scheduler, name))

    @property
    def owner(self) -> Any:
        """Return what other ways into the same engine take it by: the ``LLM``, or the URL."""
        return getattr(self.client, "llm", None) or getattr(self.client, "url", self.client)

    def meet(self) -> None:
        """Have every worker answer once. Raises PrecisionError if one does not, or those of two engines do."""
        _done(self.client.init_weight_transfer_engine, {"mailbox": self.mailbox.address()})
        raise_problems(self.mailbox.answers())

    def call(self, method: str, message: Answer) -> list[Answer]:
        """Have every worker do one call of a push; return their answers."""
        if method in ("begin", "delta"):
            self._start()
            self.push = message["push"]
        if method == "stream":
            message = message | {"silence": SILENCE}  # a trainer that hangs does not hold the engine for ever
        _done(self.client.update_weights, {"call": method, "message": message, "mailbox": self.mailbox.address()})
        answers = self.mailbox.answers()
        if any(answer.get("interrupted") for answer in answers):
            self.scheduler.resumes = True  # whoever paused the engine for that push is gone
        version = version_to_set(method, message, answers)
        if version is not None:
            _done(self.client.finish_weight_update, version)
            for answer in answers:
                answer["weight_version"] = self._version()
        elif method == "abandon":
            _done(self.client.finish_weight_update)
        return answers

    def hold(self, running: str) -> None:
        """Have the workers note whose pause it is, which a trainer that is killed leaves, and pause the engine."""
        raise_problems(self.call("hold", {"push": self.push}))
        self.scheduler.hold(running)

    def _start(self) -> None:
        try:
            _done(self.client.start_weight_update)
        except PrecisionError:
            raise
        except Exception:  # an update that nobody finished, of a trainer that died
            _done(self.client.finish_weight_update)
            _done(self.client.start_weight_update)

    def _version(self) -> str:
        ask = getattr(self.client, "get_weight_version", None)
        return "" if ask is None else str(_done(ask))


class _Llm:
    """The calls of an ``LLM``, whose own take a request around their argument, and wait for ever if the engine dies."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.control = llm, Offline(llm)

    def init_weight_transfer_engine(self, init_info: Answer) -> None:
        self.control.answered(lambda: self.llm.init_weight_transfer_engine({"init_info": init_info}))

    def start_weight_update(self) -> None:
        self.control.answered(self.llm.start_weight_update)

    def update_weights(self, update_info: Answer) -> None:
        self.control.answered(lambda: self.llm.update_weights({"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.control.answered(lambda: self.llm.finish_weight_update(weight_version))

    def get_weight_version(self) -> str:
        return str(self.control.answered(self.llm.get_weight_version))


class _Http:
    """The calls of a server in developer mode, with a token; vLLM's own client sends none."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url, self.token = url.rstrip("/"), token

    def init_weight_transfer_engine(self, init_info: Answer) -> None:
        self._ask("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._ask("start_weight_update", {})

    def update_weights(self, update_info: Answer) -> None:
        self._ask("update_weights", {"update_info": update_info}, None)  # of which one lasts as long as the push

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})

    def get_weight_version(self) -> str:
        return str(self._ask("weight_info").get("weight_version", ""))

    def pause_generation(self, mode: str) -> None:
        self._ask(f"pause?mode={mode}", {}, None)  # requests may have to end first

    def resume_generation(self) -> None:
        self._ask("resume", {})

    def is_paused(self) -> bool:
        return self._ask("is_paused").get("is_paused") is True

    def reset_prefix_cache(self) -> bool:
        everything = "reset_prefix_cache?reset_running_requests=true&reset_external=true"
        done = self._ask(everything, {}).get("success", True) is True
        self._ask("reset_encoder_cache", {})
        return done

    def _ask(self, path: str, body: Answer | None = None, patience: float | None = PATIENCE) -> Answer:
        """Return a server's reply. Raises PrecisionError if it does not reply with 200 and, at most, a JSON object, or
        not within ``patience`` seconds; None waits as long as it lives."""
        token = self.token or token_of(self.url)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, headers)
        try:
            with reply_of(request, timeout=patience) as reply:
                said = json.loads(reply.read(LONGEST_REPLY) or b"{}")
                return said if isinstance(said, dict) else {}
        except (OSError, ValueError) as error:
            with suppress(AttributeError, OSError):
                told = error.read(LONGEST_REPLY).decode(errors="replace")[:300]  # type: ignore[union-attr]
                error = OSError(f"{error}: {told}")
            raise PrecisionError(
                f"{self.url} does not answer {path.partition('?')[0]!r}.",
                f"{type(error).__name__}: {error}",
                'Start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nemo_fp8"}\', or '
                "push with Refit(url), which needs neither.",
            ) from None


class _OwnMethods:
    """Pauses an engine by methods of its client, if it has them; one that its owner has paused stays so."""

    def __init__(self, client: Any) -> None:
        self.client, self.resumes = client, False

    def hold(self, running: str) -> None:
        if not self.resumes:
            self.resumes = not self._call("is_paused")
            if not self.resumes:
                log.info("The engine was paused before this push, and stays so after it: resume it when you want.")
        self._call("pause_generation", running)

    def free(self) -> None:
        if self.resumes:
            self._call("resume_generation")
            self.resumes = False

    def refuse(self, why: str) -> None:
        """Leave the engine paused: it holds old and new weights. The push that repairs it resumes it."""
        self.resumes = True

    def allow(self) -> None:
        """Do nothing: ``free`` resumes."""

    def forget(self) -> bool:
        return bool(self._call("reset_prefix_cache"))

    def _call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self.client, name, None)
        return None if method is None else _done(method, *arguments)


class _Caller(_OwnMethods):
    """Leaves all of it to the caller, who said so."""

    def __init__(self) -> None:
        super().__init__(None)

    def forget(self) -> bool:
        return True


def _done(method: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a client's method does. Raises PrecisionError if that is still to be awaited: it would not happen."""
    found = method(*arguments)
    if not inspect.isawaitable(found):
        return found
    if inspect.iscoroutine(found):
        found.close()
    name = getattr(method, "__name__", str(method))
    raise PrecisionError(
        f"{name} of the client is a coroutine.",
        "A push calls it from a thread that has no loop, so the engine would never be asked.",
        "Give a client whose methods return when the engine has done it, such as "
        "asyncio.run_coroutine_threadsafe(coroutine, loop).result().",
    )


def _client_of(client: Any, token: str | None) -> Any:
    if isinstance(client, str):
        return _Http(client, token)
    if hasattr(client, "llm_engine"):
        return _Llm(client)
    if type(client).__module__.startswith("vllm.") and isinstance(getattr(client, "base_url", None), str):
        return _Http(client.base_url, token)  # vLLM's own sends no token, and waits five minutes for a push at most
    missing = [
        name
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
        if not callable(getattr(client, name, None))
    ]
    if missing:
        raise PrecisionError(
            f"{type(client).__name__} is no client of a weight transfer.",
            f"It has no {', '.join(missing)}.",
            "Give a vllm.LLM, a server's URL, or what vLLM calls a VLLMWeightSyncClient.",
        )
    return client


def _scheduler_of(client: Any, token: str | None) -> Any:
    """Return who pauses the engine of a client."""
    if isinstance(client, _Llm):
        return client.control
    url = getattr(client, "base_url", None)  # a client for HTTP that is made as vLLM's own
    return _OwnMethods(_Http(url, token) if isinstance(url, str) and not isinstance(client, Mapping) else client)
