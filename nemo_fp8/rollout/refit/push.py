"""``Refit(engine).push(named_tensors)``: a trainer's weights into a running engine, and a receipt.

    manifest -> every worker checks it -> requests are held -> chunks, written as they come -> finish -> old caches
    forgotten

A push that is refused by the check has changed nothing. One that dies later leaves the engine refusing requests with
the reason, since it holds weights of two pushes, and the next push restores it exactly: every push writes every weight.
Two buffers are all that it needs beside the model; one is filled while the workers read the other.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.rollout.refit.control import Answer, control_of
from nemo_fp8.rollout.refit.fingerprint import fingerprint
from nemo_fp8.rollout.refit.manifest import Entry, Manifest
from nemo_fp8.rollout.refit.memory import BUFFERS
from nemo_fp8.rollout.refit.receipt import Receipt, receipt
from nemo_fp8.rollout.refit.wire import Piece, Transport, capacity, cut, pairs, transport_of

RUNNING = ("wait", "abort", "keep")
TRANSPORTS = ("auto", "memory", "http")
CHUNK = 256 * 2**20
# Of a buffer, within the chunk. A larger one costs more pages, which are new memory in every push, than it spares
# messages: a push of 323 MB took 0.28 to 0.30 s with buffers of 16 to 64 MiB, 0.69 s with 128 and 0.42 s with 4
# (medians).
BUFFER = 32 * 2**20


class Refit:
    """The way of weights into one engine: a ``vllm.LLM``, an ``AsyncLLM``, or the URL of a server.

    ``chunk`` bounds the memory of a push, buffers of all kinds together. ``running`` says what becomes of requests that
    are unfinished: they end with the old weights first (``wait``), are aborted (``abort``), or go on with the new ones
    (``keep``). ``token`` is the server's, where it asks for one.
    """

    def __init__(
        self,
        engine: Any,
        *,
        chunk: int = CHUNK,
        transport: str = "auto",
        running: str = "wait",
        token: str | None = None,
    ) -> None:
        for kind, given, known in (("transport", transport, TRANSPORTS), ("running", running, RUNNING)):
            if given not in known:
                raise PrecisionError([unknown(kind, given, known)])
        if chunk < 2**20:
            raise PrecisionError(
                f"chunk={chunk}.", "It is a number of bytes, and too few for a row of blocks.", "Give 1 MiB or more."
            )
        self.control = control_of(engine, token)
        self.chunk, self.transport, self.running = chunk, transport, running

    def push(self, named_tensors: Any, *, manifest: Any = None, verify: bool = False) -> Receipt:
        """Write these tensors, by their Hugging Face names, into the engine.

        ``named_tensors`` is a mapping, or anything that gives pairs of a name and a tensor, in any order. An iterator
        cannot tell what it will bring: give ``manifest`` (a mapping of names to tensors, which may be on the meta
        device, or a :class:`Manifest`), or it is taken to bring what the engine's own checkpoint holds.
        ``verify`` compares every code and scale with the reference, and reads the engine's memory back.
        """
        start = time.perf_counter()
        if manifest is None or isinstance(
            named_tensors, dict
        ):  # a dict costs nothing to look at, whatever its manifest says
            known = Manifest.of(named_tensors, to_send=True)
        announced = (known if manifest is None else Manifest.of(manifest)) or self.expected()
        push = uuid.uuid4().hex[:12]
        begun = self._ask("begin", {"push": push, "tensors": announced.to_plain(), "verify": verify})
        passed_over = _accepted(announced, begun)
        twins = _Twins(announced, passed_over, begun, named_tensors)
        skipped = {announced[i].name for i in passed_over}
        whole = {i for answer in begun for i in answer["whole"]}
        mixed = next((a["mixed"] for a in begun if a["mixed"]), "")
        checked = time.perf_counter()
        try:
            self.control.hold("keep" if mixed else self.running)  # a mixed engine ends no request
            wanted = (pair for pair in twins.watch(pairs(named_tensors)) if pair[0] not in skipped)
            size = capacity(announced, min(self.chunk // BUFFERS, BUFFER), whole)
            chunks, sent = self._stream(push, wanted, announced, size, whole)
            streamed = time.perf_counter()
            done = self._ask("finish", {"push": push})
        except BaseException as error:
            self._abandon(push, error)
            raise
        try:
            reset = self.control.forget()
        finally:  # the weights are whole, whatever became of the cache
            self.control.allow()
            self.control.free()
        end = time.perf_counter()
        return receipt(
            announced, done, push=push, passed_over=tuple(sorted(skipped)), bytes=sent, chunks=chunks, chunk_bytes=size
            * BUFFERS, seconds=end - start, prefix_cache_reset=reset, after_failure=mixed, parts={"check": checked -
            start, "stream": streamed - checked, "finish": end - streamed}, )  # fmt: skip

    def expected(self) -> Manifest:
        """What the engine takes for a checkpoint's worth of weights: that of the checkpoint it was started from."""
        answers = self._ask("expected", {})
        rows = {row[0]: row for answer in answers for row in answer["tensors"] or ()}
        if not rows:
            raise PrecisionError(
                "An iterator without a manifest, for an engine without a checkpoint.",
                "The engine was started from dummy weights or from files that are not safetensors, so nobody knows "
                "what is to come.",
                "Give manifest=, such as {name: tensor on the meta device}, or push a mapping.",
            )
        return Manifest.from_plain(list(rows.values()))

    def _stream(
        self, push: str, tensors: Iterable[tuple[str, torch.Tensor]], manifest: Manifest, size: int, whole: set[int]
    ) -> tuple[int, int]:
        """Fill, deliver, and fill the other one meanwhile. How many chunks, and how many bytes."""
        transport = transport_of(self.transport, self.control, size)
        try:
            _good(transport.open(push))
            return self._deliver(push, cut(tensors, manifest, _turns(transport), whole), transport)
        finally:
            transport.close()

    def _deliver(self, push: str, chunks: Iterator[tuple[list[Piece], int]], transport: Transport) -> tuple[int, int]:
        count, sent, on_its_way = 0, 0, None
        with ThreadPoolExecutor(1, "nemo_fp8-refit") as courier:
            try:
                for pieces, used in chunks:
                    _arrived(on_its_way)
                    on_its_way = courier.submit(transport.deliver, count % BUFFERS, pieces, used, push)
                    count, sent = count + 1, sent + used
            finally:
                _arrived(on_its_way)
        return count, sent

    def _ask(self, method: str, message: Answer) -> list[Answer]:
        return _good(self.control.call(method, message))

    def _abandon(self, push: str, error: BaseException) -> None:
        """The push has died: the engine answers again if nothing was written, and refuses if something was."""
        try:
            mixed = next((a["mixed"] for a in self.control.call("abandon", {"push": push}) if a["mixed"]), "")
        except Exception as more:
            mixed = f"push {push} died, and so did asking the engine about it ({more})"
        if mixed:
            self.control.refuse(f"{mixed} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
        else:
            self.control.free()


def _turns(transport: Transport) -> Callable[[], torch.Tensor]:
    turn = -1

    def give() -> torch.Tensor:
        nonlocal turn
        turn += 1
        return transport.buffer(turn % BUFFERS)

    return give


def _arrived(delivery: Future[list[Answer]] | None) -> None:
    if delivery is not None:
        _good(delivery.result())


def _good(answers: list[Answer]) -> list[Answer]:
    """The answers, or everything that workers found wrong, once."""
    problems = dict.fromkeys(Problem(*row) for answer in answers for row in answer.get("problems", ()))
    if problems:
        raise PrecisionError(problems)
    return answers


# ---------------------------------------------------------------------- what the workers say to a manifest


def _accepted(manifest: Manifest, begun: Sequence[Answer]) -> set[int]:
    """The tensors that are not sent, since the engine's loader passes over them; or an error with all that is wrong."""
    unrouted = set.intersection(*(set(answer["unrouted"]) for answer in begun))
    known = {i for answer in begun for i in answer["known"]}
    tied = {name for answer in begun for name in answer["tied"]}
    passed_over = {i for i in unrouted if i in known or _is_one_of(manifest[i].name, tied)}
    problems = list({row[0]: Problem(*row) for answer in begun for row in answer["refused"]}.values())
    strange = [manifest[i].name for i in sorted(unrouted - passed_over)]
    if strange:
        what = f"The engine has no place for {_listed(strange)}."
        why = (
            "vLLM's loader would pass over them in silence, and so the engine would be another model than the "
            "trainer's."
        )
        problems.append(
            Problem(what, why, "Leave them out if they are no weights; else start the engine with the trainer's model.")
        )
    missing = list(dict.fromkeys(name for answer in begun for name in answer["missing"]))
    if missing:
        why = "vLLM would keep old values there in silence, or wait for what is missing with the layer half written."
        problems.append(
            Problem(f"The push lacks {_listed(missing)}.", why, "Push every tensor of the model, every time.")
        )
    if problems:
        raise PrecisionError(problems)
    return passed_over


def _is_one_of(name: str, parameters: set[str]) -> bool:
    """Whether a pushed name is that of a parameter, which vLLM may have put below another module."""
    return any(name == parameter or parameter.endswith(f".{name}") for parameter in parameters)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


class _Twins:
    """Tensors that the engine has tied: the one that is passed over must be the one that is written."""

    def __init__(self, manifest: Manifest, passed_over: set[int], begun: Sequence[Answer], tensors: Any) -> None:
        heads = {manifest[i].name for i in passed_over} & {
            e.name for e in manifest if e.name.endswith("lm_head.weight")
        }
        self.names = {name: twin for name in heads for twin in _embeddings(manifest, manifest[manifest.places[name]])}
        self.prints: dict[str, str] = {}
        if isinstance(tensors, Mapping):
            for name in {*self.names, *self.names.values()}:
                self._see(name, tensors[name])

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors; an error where two that must be one are not."""
        watched = {*self.names, *self.names.values()}
        for name, tensor in tensors:
            if name in watched and name not in self.prints:
                self._see(name, tensor)
            yield name, tensor

    def _see(self, name: str, tensor: torch.Tensor) -> None:
        self.prints[name] = fingerprint(tensor)
        for head, twin in self.names.items():
            if self.prints.get(head, "") != self.prints.get(twin, "") and head in self.prints and twin in self.prints:
                raise PrecisionError(
                    f"{head} is not {twin}.",
                    "The engine has tied them into one weight, as its configuration says; the trainer has two.",
                    "Start the engine from a checkpoint with tie_word_embeddings=False and both tensors.",
                )


def _embeddings(manifest: Manifest, head: Entry) -> list[str]:
    return [
        e.name
        for e in manifest
        if e.name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight")) and e.shape == head.shape
    ]
