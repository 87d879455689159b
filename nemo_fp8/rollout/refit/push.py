"""Push a trainer's weights into a running engine, and return a receipt: ``Refit(engine).push(named_tensors)``.

    check    every worker compares the manifest (all names, shapes and dtypes) with its model
    hold     the engine stops computing requests
    stream   tensors are cut into buffers, and the workers write every buffer as it comes
    finish   every worker makes sure that all tensors came, and packs what had to wait for others
    forget   the engine drops its prefix cache, which holds keys and values of the old weights, and serves again

A push that the check refuses has changed nothing. A push that dies later leaves old and new weights in the engine, so
the engine refuses requests, with the reason, until the next push ends well. That one repairs it completely, since every
push writes every weight.

A push needs a few buffers beside the model, whatever the model's size: one is filled while the workers read another,
and the first of them while the engine still checks. The trainer keeps them for the next push.
The trade-off: it cannot be rolled back. Keeping the old weights until the end would need memory for a second model.

A push of changes (``delta=True``) sends differences to what a ledger of the last push has, and can be rolled back.
Where it does not fit the engine a push of everything follows, and the receipt says why.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.numerics.kernels.patches import packs
from nemo_fp8.rollout.refit.alive import LOOK, in_thread
from nemo_fp8.rollout.refit.casting import Casts
from nemo_fp8.rollout.refit.control import RUNNING, Answer, control_of, is_held, why_mixed
from nemo_fp8.rollout.refit.fingerprint import fingerprint
from nemo_fp8.rollout.refit.ledger import Filled, Ledger
from nemo_fp8.rollout.refit.manifest import LONGEST_NAME, Entry, Manifest, is_version, pairs
from nemo_fp8.rollout.refit.memory import Shared, SharedWeights
from nemo_fp8.rollout.refit.receipt import Delta, Receipt, receipt
from nemo_fp8.rollout.refit.wire import WAYS, Memory, Refused, Transport, cut, raise_problems, transport_of, way_of

TRANSPORTS = ("auto", "memory", "http")
_KEEPING = (dict, OrderedDict, SharedWeights)
"""Mappings whose tensors stay as they are while others are asked for. Another one may make each when it is asked for,
in memory that it uses again."""
DELTAS = (False, True, "auto")
CHUNK = 256 * 2**20  # bytes of all buffers of a push together, at most


class Refit:
    """Pushes weights into one engine: a ``vllm.LLM``, an ``AsyncLLM``, or the URL of a server.

    ``chunk`` bounds the bytes of all buffers of a push together; a single tensor that cannot be cut may need more.
    ``transport`` is ``memory`` (the workers map a buffer; same host only), ``http``, or ``auto``: memory if the engine
    may be on this host, else HTTP. ``running`` says what happens to unfinished requests: they end with the old weights
    first (``wait``), are aborted (``abort``), or go on with the new weights (``keep``). ``token`` is the server's
    secret; one that ``nemo-fp8 serve`` drew on this machine is found without it.

    Raises PrecisionError if an argument is not one of these, or ``chunk`` is below 1 MiB.
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
        if type(chunk) is not int or chunk < 2**20:
            raise PrecisionError(
                f"chunk={chunk!r}.",
                "A chunk is a whole number of bytes, and enough of them for a row of blocks.",
                f"Give {2**20} (1 MiB) or more.",
            )
        self.control = control_of(engine, token)
        self._alone = _alone(getattr(self.control, "owner", engine))
        self.chunk, self.transport, self.running = chunk, transport, running
        self.ledger: Ledger | None = None
        """What the engine holds since the last push with ``delta``; None if the last one had no ``delta``, or died. One
        that was refused before the first byte changes nothing."""
        self._buffers: Memory | None = None
        """The buffers of the last push, for the next one."""
        self._mapped = WeakSet[Shared]()
        """What the workers have mapped of this process's memory."""
        self._checked: _Check | None = None
        """What the engine answered to the last push of everything."""

    def push(
        self,
        named_tensors: Any,
        *,
        manifest: Any = None,
        verify: bool = False,
        delta: bool | Literal["auto"] = False,
        weight_version: str | None = None,
    ) -> Receipt:
        """Write tensors into the engine, and return the receipt.

        ``named_tensors`` is a mapping of Hugging Face names to tensors, or an iterable of such pairs, in any order.
        ``manifest`` announces the tensors of an iterator, which cannot be looked at in advance: a mapping of names to
        tensors (on the meta device, too) or a :class:`Manifest`. Without it an iterator must bring what the engine's
        own checkpoint holds. ``verify`` compares every code and scale with the reference cast, and reads the engine's
        memory back. ``delta`` sends only what has changed since the last push with ``delta`` through this object
        (:mod:`nemo_fp8.rollout.refit.ledger`). The first one sends everything, and so does one that does not fit the
        engine: ``receipt.delta.instead`` says why. ``delta="auto"`` does so where bytes travel, over HTTP, and sends
        everything through shared memory, where they cost next to nothing. ``weight_version`` is what vLLM calls the
        weights from now on, in ``get_weight_version()`` and in the ``weight_versions`` of completions; without it the
        push's number.

        Raises PrecisionError if the engine refuses the manifest, a tensor is not as announced, or the push dies.
        """
        if weight_version is not None and not is_version(weight_version):
            raise PrecisionError(
                f"weight_version={weight_version!r}.",
                f"vLLM names weights by a text, and a push takes one of {LONGEST_NAME} printable characters at most.",
                "Give a text, such as 'step 7'.",
            )
        if delta not in DELTAS:
            raise PrecisionError([unknown("delta", delta, DELTAS)])
        changes = self._travels if delta == "auto" else bool(delta)
        with self._alone:
            return self._push(named_tensors, manifest, verify, changes, weight_version)

    def _push(
        self, named_tensors: Any, manifest: Any, verify: bool, delta: bool, weight_version: str | None
    ) -> Receipt:
        if not delta:
            return self._push_all(named_tensors, manifest, verify, weight_version)
        instead = "No ledger of this engine: this Refit has pushed nothing yet, its last push died, or had no delta."
        if self.ledger is not None:
            try:
                return self._push_changes(self.ledger, named_tensors, manifest, verify, weight_version)
            except Refused as error:
                instead = f"{error.problems[0].what} {error.problems[0].why}"
        return self._push_all(named_tensors, manifest, verify, weight_version, Delta(instead=instead))

    def _push_all(
        self, named_tensors: Any, manifest: Any, verify: bool, weight_version: str | None, delta: Delta | None = None
    ) -> Receipt:
        """Push every tensor; with ``delta``, begin a ledger."""
        start = time.perf_counter()
        announced = self._announced(named_tensors, manifest)
        push = uuid.uuid4().hex[:12]
        begin = {"push": push, "tensors": announced.to_plain(), "verify": verify}
        # An engine nearly always answers as it did the last time, and the first buffers can be filled while it does.
        asked = in_thread(lambda: self._begin(announced, begin))
        ahead = isinstance(named_tensors, Mapping) and not (verify or delta or isinstance(named_tensors, SharedWeights))
        last, sending, filled, ledger = self._checked, None, list[Filled](), None
        try:
            if ahead and last is not None and last.manifest == announced:
                sending = self._sending(last, named_tensors)
                filled = _filled(sending.buffers, asked, sending.transport.buffers)
            check, mixed = asked.result()
            if last is not None and check == last:
                check = last  # with the jobs of its casts
            if delta is not None:
                ledger = Ledger.of(announced, {*check.passed_over}, self._ask("stored", {"push": push}))
            if sending is None or check is not last:
                if sending is not None:
                    sending.transport.close()
                sending, filled = self._sending(check, named_tensors, ledger), []
            checked = time.perf_counter()
            self._checked = None if verify else check
            self.ledger = None  # the engine will hold other weights, or those of two pushes
            if mixed:
                self.control.refuse(mixed)  # also what was left by another way
            # After a push that died the engine computes no request, so waiting for the last one would never end.
            self.control.hold("keep" if mixed else self.running)
            transport, buffers = sending.transport, itertools.chain(filled, sending.buffers)
            chunks, sent = self._stream(push, transport, check.workers, announced, buffers)
            streamed = time.perf_counter()
            done = self._ask("finish", {"push": push, "weight_version": weight_version or push})
        except BaseException as error:
            self._end_dead(push, weight_version, asked, None if sending is None else sending.transport, error)
            raise
        about = {"after_failure": mixed, "delta": delta, "casts": sending.casts.told()}
        times = (start, checked, streamed)
        told = self._end(announced, done, push, sending.skipped, transport, (chunks, sent), times, **about)
        if ledger is not None:
            ledger.settle(push, told.tensors)
            self.ledger = ledger
        return told

    def _begin(self, announced: Manifest, message: Answer) -> tuple[_Check, str]:
        """Begin a push of everything; return what the engine answers, and why it holds weights of two pushes, if it
        does."""
        begun = self._ask("begin", message)
        return _Check.of(announced, begun), why_mixed(begun)

    def _push_changes(
        self, ledger: Ledger, named_tensors: Any, manifest: Any, verify: bool, weight_version: str | None
    ) -> Receipt:
        """Push what differs from the ledger; raise ``Refused`` if the engine does not take it."""
        start, push = time.perf_counter(), uuid.uuid4().hex[:12]
        once = iter(pairs(named_tensors)) is named_tensors
        announced = ledger.manifest if once and manifest is None else self._announced(named_tensors, manifest)
        if {*announced} == {*ledger.manifest}:
            announced = ledger.manifest  # tensors may come in another order than before
        begin = {"push": push, "manifest": announced.digest, "base": ledger.version}
        # An engine nearly always takes it, and what changed can be looked for while it answers; but an iterator that it
        # refuses must not have begun, and other tensors do not fit the ledger.
        asked = in_thread(lambda: self._ask("delta", begin))
        if once or announced is not ledger.manifest:
            asked.result()
        skipped = {announced[i].name for i in ledger.passed_over}
        transport = self._transport(announced, ledger.whole)
        try:
            heads = _TiedHeads(announced, ledger.passed_over, named_tensors)
            checked = time.perf_counter()
            ledger.verify = verify
            self.ledger = None  # it notes what it finds, whether or not that reaches the engine
            to_send = (pair for pair in heads.compare(pairs(named_tensors)) if pair[0] not in skipped)
            stay, quick = type(named_tensors) in _KEEPING, not transport.travels and packs()
            changes = ledger.changes(to_send, transport.buffer, transport.size, transport.patches, stay, quick)
            filled = _filled(changes, asked, transport.buffers)  # meanwhile requests are computed
            begun = asked.result()
            self.control.hold(self.running)
            buffers = itertools.chain(filled, changes)
            chunks, sent = self._stream(push, transport, len(begun), announced, buffers)
            streamed = time.perf_counter()
            message = {"push": push, "expected": ledger.expected, "weight_version": weight_version or push}
            done = self._ask("finish", message)
        except BaseException as error:
            self._end_dead(push, weight_version, asked, transport, error)
            if once and isinstance(error, Refused):
                raise PrecisionError([*error.problems, _PUSH_AGAIN]) from error
            raise
        told = self._end(announced, done, push, skipped, transport, (chunks, sent), (start, checked, streamed))
        tensors, delta = ledger.settle_changes(push, told.tensors)
        self.ledger = ledger
        return replace(told, tensors=tensors, delta=delta)

    def _end(
        self, announced: Manifest, done: Sequence[Answer], push: str, skipped: set[str], transport: Transport,
        sent: tuple[int, int], times: tuple[float, float, float], **about: Any,
    ) -> Receipt:  # fmt: skip
        """Let the engine serve again after a push that ended well, and return the receipt.

        ``sent`` is the number of buffers and the bytes, ``times`` are when the push began, was checked and was sent.
        """
        reset = self._serve_again()
        start, checked, streamed = times
        end = time.perf_counter()
        return receipt(
            announced,
            done,
            push=push,
            passed_over=tuple(sorted(skipped)),
            chunks=sent[0],
            bytes=sent[1],
            chunk_bytes=transport.size * transport.buffers,
            seconds=end - start,
            prefix_cache_reset=reset,
            weight_version=str(done[0].get("weight_version") or ""),
            parts={"check": checked - start, "stream": streamed - checked, "finish": end - streamed},
            **about,
        )

    def _end_dead(
        self, push: str, weight_version: str | None, asked: Future[Any], transport: Transport | None,
        error: BaseException,
    ) -> None:  # fmt: skip
        """End a push that died of an error, in whatever step; ``asked`` is how the engine answers to its begin."""
        try:
            if transport is not None:
                transport.close()
            wait([asked], LOOK)  # else the engine may hear of the push after its end
        finally:  # also if a second Ctrl-C ends the waiting: an engine that stands still is to be let go, or to refuse
            if not (asked.done() and asked.exception() is error):  # else the engine has refused it, and nothing began
                self._abandon(push, weight_version, error)

    def _serve_again(self) -> bool:
        """Drop the prefix cache, and let requests in again; return whether vLLM says that it dropped the cache.

        Requests are refused if nobody can say: all weights are the new ones, and the cache may be of the old ones.
        """
        try:
            forgotten = self.control.forget()
        except BaseException as error:  # such as Ctrl-C, after which it may well be dropped
            try:
                self.control.forget()
            except BaseException:
                self.control.refuse(f"it ended, but the prefix cache was not dropped ({type(error).__name__})")
                self.control.free()  # no request is held for what nobody may answer
            else:
                self._let_in()
            raise
        self._let_in()
        return forgotten

    def _let_in(self) -> None:
        self.control.allow()
        self.control.free()

    def expected(self) -> Manifest:
        """Return the manifest of the checkpoint that the engine was started from, in the dtypes that the engine keeps.

        Raises PrecisionError if the engine was started without one.
        """
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

    def _announced(self, named_tensors: Any, manifest: Any) -> Manifest:
        """Return what the push will bring: the given manifest, else that of the tensors, else that of the engine."""
        if manifest is None:
            return Manifest.of(named_tensors, to_send=True) or self.expected()
        if isinstance(named_tensors, dict):  # looking at it costs nothing, and raises if a tensor cannot be sent
            Manifest.of(named_tensors, to_send=True)
        return Manifest.of(manifest) or self.expected()

    def _sending(self, check: _Check, named_tensors: Any, ledger: Ledger | None = None) -> _Sending:
        """Return what sends the tensors of a push as the engine wants them. Raises PrecisionError for a mapping in
        which an output head is not the embedding that the engine has tied it to."""
        heads = _TiedHeads(check.manifest, check.passed_over, named_tensors)
        skipped = {check.manifest[i].name for i in check.passed_over}
        to_send: Iterable[tuple[str, torch.Tensor]] = (
            pair for pair in heads.compare(pairs(named_tensors)) if pair[0] not in skipped
        )
        if ledger is not None:
            to_send = ledger.noting(to_send)
        weights = getattr(named_tensors, "shared", None)
        transport = self._transport(check.manifest, check.whole, weights)
        check.casts.begin()
        buffers = cut(to_send, check.manifest, transport.buffer, check.whole, weights, check.casts)
        return _Sending(transport, buffers, check.casts, skipped)

    @property
    def _travels(self) -> bool:
        return WAYS[way_of(self.transport, self.control)].travels

    def _transport(self, manifest: Manifest, whole: Collection[int], weights: Shared | None = None) -> Transport:
        """Return the way to the workers, with the buffers of the last push if they fit."""
        known = (self._buffers, self._mapped)
        transport = transport_of(self.transport, self.control, manifest, self.chunk, whole, weights, *known)
        self._buffers = transport.memory
        return transport

    def _stream(
        self, push: str, transport: Transport, workers: int, manifest: Manifest, buffers: Iterator[Filled]
    ) -> tuple[int, int]:
        """Send full buffers; return their number, and the bytes of all tensors in them."""
        count, sent = 0, 0
        try:
            transport.open(push, workers)
            for pieces, used in buffers:
                transport.send(pieces, used)
                count += used > 0
                sent += used or sum(piece[2] * manifest[piece[0]].row_bytes for piece in pieces)
            transport.end()
        finally:
            transport.close()
        return count, sent

    def _ask(self, method: str, message: Answer) -> list[Answer]:
        """Call a method of every worker; return their answers, or raise what they found wrong."""
        return raise_problems(self.control.call(method, message))

    def _abandon(self, push: str, weight_version: str | None, error: BaseException) -> None:
        """End a push that died: serve requests if nothing was written yet, else refuse them with the reason.

        One that was interrupted while the workers ended it has ended.
        """
        answers: list[Answer] = []
        try:
            answers = self.control.call("abandon", {"push": push, "weight_version": weight_version or push})
            mixed = why_mixed(answers)
        except BaseException as more:  # nobody can say what was written, so the worst is assumed
            mixed = f"push {push} died, and so did asking the engine about it ({type(more).__name__}: {more})"
        if mixed:
            self.control.refuse(f"{mixed} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
        elif is_held(push, answers):
            self._serve_again()
        else:
            self.control.free()


def _filled(buffers: Iterator[Filled], asked: Future[Any], most: int) -> list[Filled]:
    """Return the buffers that are filled until the engine has answered: ``most`` at most, and one at least, if there is
    one."""
    filled = [*itertools.islice(buffers, 1)]
    while filled and len(filled) < most and not asked.done() and (more := next(buffers, None)) is not None:
        filled.append(more)
    return filled


_PUSH_AGAIN = Problem(
    "The changes did not fit the engine, and their iterator is used up.",
    "A push of everything would have followed, and has no tensors.",
    "Push again: it will be one of everything. Or push a mapping, from which that follows by itself.",
)


_PUSHES: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
_TO_SERVERS: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()


def _alone(engine: Any) -> threading.RLock:
    """Return the lock of an engine, or of a server's URL, which all pushes of this process into it take.

    Two at once would pause and resume an engine for one another. Of two processes that push into one server the later
    one goes on, and the other is told.
    """
    if isinstance(engine, str):
        return _TO_SERVERS.setdefault(engine.rstrip("/"), threading.RLock())
    try:
        return _PUSHES.setdefault(engine, threading.RLock())
    except TypeError:  # what cannot be a key
        return threading.RLock()


# ---------------------------------------------------------------------- the workers' answers to a manifest


@dataclass(frozen=True)
class _Check:
    """What the workers' answers to ``begin`` say of a push."""

    manifest: Manifest
    workers: int
    passed_over: frozenset[int]
    """The numbers of the tensors that are not sent."""
    whole: frozenset[int]
    """Those of the tensors that are not cut."""
    castable: list[Any]
    """What each worker lets the trainer cast."""

    @functools.cached_property
    def casts(self) -> Casts:
        """The tensors that the trainer may cast, with the jobs of their casts."""
        return Casts(self.manifest, self.castable)

    @classmethod
    def of(cls, manifest: Manifest, begun: Sequence[Answer]) -> _Check:
        """Return what the answers say; raise PrecisionError if they accept no such push."""
        return cls(
            manifest,
            len(begun),
            frozenset(_accepted(manifest, begun)),
            frozenset(i for answer in begun for i in answer["whole"]),
            [answer.get("castable", ()) for answer in begun],
        )


@dataclass(frozen=True)
class _Sending:
    """The tensors of a push on their way: buffers as they are filled, and what was cast into them."""

    transport: Transport
    buffers: Iterator[Filled]
    casts: Casts
    skipped: set[str]
    """The names of the tensors that are not sent."""


def _accepted(manifest: Manifest, begun: Sequence[Answer]) -> set[int]:
    """Return the numbers of the tensors that need not be sent, since vLLM's loader passes over them at load, too.

    These are tensors of the engine's own checkpoint that its loader skips, and the second name of a tied weight.
    Raises PrecisionError with everything that any worker refuses, does not know or lacks.
    """
    # One worker alone may lack a place for a tensor, such as an expert of another worker.
    unrouted = set.intersection(*(set(answer["unrouted"]) for answer in begun))
    known = {i for answer in begun for i in answer["known"]}
    tied = {name for answer in begun for name in answer["tied"]}
    passed_over = {i for i in unrouted if i in known or _names_one_of(manifest[i].name, tied)}
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


def _names_one_of(name: str, parameters: set[str]) -> bool:
    """Return whether a pushed name is that of a parameter; vLLM may keep it below one more module
    (``language_model.``)."""
    return any(name == parameter or parameter.endswith(f".{name}") for parameter in parameters)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


class _TiedHeads:
    """Makes sure that an output head that is not sent equals the embedding that is.

    An engine with tied embeddings keeps one weight for both and passes over ``lm_head.weight``. A trainer that has
    untied them would lose its head without a word, so both tensors are compared, by fingerprint.
    """

    def __init__(self, manifest: Manifest, passed_over: Collection[int], tensors: Any) -> None:
        heads = [manifest[i] for i in passed_over if manifest[i].name.endswith("lm_head.weight")]
        self.twin_of = {head.name: twin for head in heads for twin in _embeddings(manifest, head)}
        if alone := [head.name for head in heads if head.name not in self.twin_of]:
            raise PrecisionError(
                f"{alone[0]} is no tensor of the engine, and nothing here could be it.",
                "The engine has tied its head to the embeddings, and the push has none of this shape to compare with.",
                "Leave it out if it is the embeddings' own; else start the engine from a checkpoint with "
                "tie_word_embeddings=False and both tensors.",
            )
        self.compared = {*self.twin_of, *self.twin_of.values()}
        self.prints: dict[str, str] = {}
        if isinstance(tensors, Mapping):  # then a difference is found before the first byte is written
            for name in self.compared:
                self._see(name, tensors[name])

    def compare(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors unchanged; raise PrecisionError at the second of two that differ."""
        for name, tensor in tensors:
            if name in self.compared and name not in self.prints:
                self._see(name, tensor)
            yield name, tensor

    def _see(self, name: str, tensor: torch.Tensor) -> None:
        self.prints[name] = fingerprint(tensor)
        for head, twin in self.twin_of.items():
            if {head, twin} <= self.prints.keys() and self.prints[head] != self.prints[twin]:
                raise PrecisionError(
                    f"{head} is not {twin}.",
                    "The engine has tied them into one weight, as its configuration says; the trainer has two.",
                    "Start the engine from a checkpoint with tie_word_embeddings=False and both tensors.",
                )


def _embeddings(manifest: Manifest, head: Entry) -> list[str]:
    """Return the names of the input embeddings that a head can be tied to."""
    endings = ("embed_tokens.weight", "wte.weight", "embeddings.weight", "embedding.weight", "embed_in.weight")
    return [e.name for e in manifest if e.name.endswith(endings) and e.shape == head.shape]
