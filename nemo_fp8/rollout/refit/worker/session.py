"""A push, inside a worker: begin, write and write again, finish. vLLM calls these methods through ``collective_rpc``.

    begin     the manifest is held against the model (reload_plan); nothing has changed yet
    write     pieces of tensors, in shared memory: each goes to where it lives (reload_layers)
    finish    everything came? then the last weights are packed, and every tensor is told of

From the first piece to the end of ``finish`` the model is *mixed*, and stays so if a push dies. Every push writes every
weight, so the next one that ends well leaves nothing of it behind. No method lets an exception out: what an executor
makes of one differs, and an engine must not die of a bad push.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.refit.manifest import BLOCK, SCALES, Manifest
from nemo_fp8.rollout.refit.memory import BUFFERS, Opened
from nemo_fp8.rollout.refit.worker.checkpoint import of_checkpoint
from nemo_fp8.rollout.refit.worker.layouts import Ledger
from nemo_fp8.rollout.refit.worker.plan import Plan
from nemo_fp8.rollout.refit.worker.routes import Box, Routes, Target, record, unpushable
from nemo_fp8.rollout.refit.worker.sinks import Blocks, Staged, release

Answer = dict[str, Any]
log = logging.getLogger(__name__)


def answering(method: Callable[[Any, Answer], Answer]) -> Callable[[Any, Answer], Answer]:
    """Every answer says whose it is, and an error is an answer."""

    @functools.wraps(method)
    def run(self: Any, message: Answer) -> Answer:
        try:
            with set_current_vllm_config(self.vllm_config):
                return {"rank": self.rank, **method(self, message)}
        except PrecisionError as error:
            return {"rank": self.rank, "problems": [[p.what, p.why, p.remedy] for p in error.problems]}
        except Exception as error:
            log.exception("%s failed", method.__name__)
            what = f"{method.__name__} failed in worker {self.rank}."
            return {
                "rank": self.rank,
                "problems": [
                    [what, f"{type(error).__name__}: {error}", "The worker's log has the traceback; report it."]
                ],
            }

    return run


class Session:
    """One push. What comes from outside is checked against its manifest, piece by piece."""

    def __init__(self, plan: Plan, number: str, verify: bool) -> None:
        self.plan, self.number, self.verify = plan, number, verify
        self.ledger = Ledger()
        self.sinks = plan.sinks(self.ledger, verify)
        self.rows = [0] * len(plan.manifest)
        self.written = False
        """Whether anything has been; before that, the engine is what it was."""
        self.staged = [sink for sink in dict.fromkeys(self.sinks.values()) if isinstance(sink, Staged)]
        self.memory: dict[str, Opened] = {}

    def write(self, handle: Any, pieces: Any) -> None:
        """Pieces of tensors, each (number, first row, rows, offset in the memory behind ``handle``)."""
        if not isinstance(pieces, list):
            raise _bad_piece(pieces, "It is no list of pieces")
        memory = self.memory.get(repr(handle))
        if memory is None:
            while len(self.memory) >= BUFFERS:  # a server makes new memory for every body
                del self.memory[next(iter(self.memory))]
            memory = self.memory[repr(handle)] = Opened(handle)
        for piece in pieces:
            i, row, rows, offset = self._checked(piece)
            entry = self.plan.manifest[i]
            tensor = memory.read(offset, entry.torch_dtype, (rows, *entry.shape[1:]) if entry.shape else ())
            self.write_rows(i, row, tensor)

    def _checked(self, piece: Any) -> tuple[int, int, int, int]:
        if not isinstance(piece, (list, tuple)) or len(piece) != 4 or not all(type(n) is int for n in piece):
            raise _bad_piece(piece, "It is no four whole numbers")
        i, row, rows, offset = piece
        if not 0 <= i < len(self.rows):
            raise _bad_piece(piece, f"The manifest has {len(self.rows)} tensors")
        entry = self.plan.manifest[i]
        if row != self.rows[i] or not 0 < rows <= entry.rows - row:
            raise _bad_piece(piece, f"{entry.name} has {entry.rows} rows, of which {self.rows[i]} have come")
        at_end = row + rows == entry.rows
        if rows < entry.rows and (i in self.plan.whole or row % entry.step or (rows % entry.step and not at_end)):
            raise _bad_piece(piece, f"{entry.name} cannot be cut there")
        return i, row, rows, offset

    @torch.no_grad()
    def write_rows(self, i: int, row: int, tensor: torch.Tensor) -> None:
        """Write rows [row, row+n) of tensor ``i`` to every local parameter that holds a part of them."""
        self.written = True
        self.rows[i] += len(tensor) if tensor.dim() else 1
        for route in self.plan.routes.by_entry.get(i, ()):
            sink = self.sinks[route.target]
            if route.source is None:
                sizes, strides, offset = route.view
                sink.write(route, 0, tensor.as_strided(sizes, strides, tensor.storage_offset() + offset))
            elif not route.source:
                sink.write(route, 0, tensor)
            else:
                (start, stop), *rest = route.source
                first, last = max(start, row), min(stop, row + len(tensor))
                if first < last:
                    sink.write(
                        route, first - start, tensor[(slice(first - row, last - row), *(slice(*one) for one in rest))]
                    )
        if i in self.plan.scales:
            self._write_scales(i, tensor)
        if self.rows[i] == self.plan.manifest[i].rows:
            for staged in self.staged:
                if i in staged.awaited:
                    staged.complete(i)

    def _write_scales(self, i: int, scales: torch.Tensor) -> None:
        codes = self.plan.manifest.places[self.plan.manifest[i].name.removesuffix(SCALES)]
        for route in self.plan.routes.by_entry.get(codes, ()):
            sink = self.sinks[route.target]
            assert isinstance(sink, Blocks)
            assert route.source is not None
            sink.write_scales(
                route, _in_blocks(route.to), scales[tuple(slice(*one) for one in _in_blocks(route.source))]
            )

    @torch.no_grad()
    def finish(self) -> None:
        """Pack what waited for the end, and tell of every tensor that this worker holds a part of."""
        manifest = self.plan.manifest
        left = [manifest[i].name for i in sorted(self.plan.needed) if self.rows[i] < manifest[i].rows]
        if left:
            raise PrecisionError(
                f"{len(left)} of {len(manifest)} tensors did not come: "
                f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''}.",
                "They were announced in the manifest, and the push ended without them.",
                "Push again; the engine holds old and new weights until a push ends well."
                if self.written
                else "Push again; nothing was written.",
            )
        sinks = list(dict.fromkeys(self.sinks.values()))
        for sink in sinks:
            sink.finish()
        for layer in self.plan.packed_beside():
            release(layer)
            layer.quant_method.process_weights_after_loading(layer)
        if self.verify:
            for sink in sinks:
                sink.verify()
        self.ledger.settle()
        self.memory.clear()


class NemoFp8Refit:
    """The methods of a push, mixed into vLLM's worker. Each takes one message of plain values and gives one back."""

    vllm_config: Any
    model_runner: Any
    rank: int
    _refit_plan: Plan | None = None
    _refit_session: Session | None = None
    _refit_mixed = ""

    @answering
    def nemo_fp8_refit_begin(self, message: Answer) -> Answer:
        """Hold a manifest against the model. Nothing is written; what is wrong is in the answer."""
        _refuse_replicas(self.vllm_config.parallel_config)
        manifest = Manifest.from_plain(message.get("tensors"))
        plan = self._refit_plan
        if plan is None or plan.manifest != manifest:
            plan = self._refit_plan = Plan(self.model_runner.get_model(), manifest)
        if problem := unpushable(plan.routes):  # nothing else that is wrong could be mended
            raise PrecisionError([problem])
        refused = {name for name, _ in plan.routes.problems}
        unrouted = [i for i, entry in enumerate(manifest) if i not in plan.needed and entry.name not in refused]
        own = self._refit_checkpoint() if unrouted or plan.missing(None) else None
        missing = plan.missing(own[1] if own else None)
        answer = {
            "refused": [[p.what, p.why, p.remedy] for p in plan.problems],
            "unrouted": unrouted,
            "known": [i for i in unrouted if own and manifest[i].name in own[0].places],
            "missing": [*names_of(missing, own, manifest)],
            "whole": sorted(plan.whole),
            "tied": [*plan.routes.aliases],
            "mixed": self._refit_mixed,
            "accepted": not plan.problems and not missing,
        }
        if answer["accepted"]:
            self._refit_session = Session(plan, str(message.get("push")), bool(message.get("verify")))
        return answer

    @answering
    def nemo_fp8_refit_write(self, message: Answer) -> Answer:
        """Write pieces of tensors that lie in shared memory."""
        session = self._refit_open(message)
        try:
            session.write(message.get("memory"), message.get("pieces"))
        finally:
            if session.written:
                self._refit_mixed = f"push {session.number} has begun and has not ended"
        return {}

    @answering
    def nemo_fp8_refit_finish(self, message: Answer) -> Answer:
        """End a push; only now are all weights the new ones."""
        session = self._refit_open(message)
        session.finish()
        process_attention(session.plan.model, self.vllm_config)
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if hasattr(self.model_runner, reset):
                getattr(self.model_runner, reset)()
        self._refit_session, self._refit_mixed = None, ""
        unwritten = [
            t.name for t in session.plan.routes.parameters if t not in session.sinks and session.plan.way(t) != "scales"
        ]
        told = {str(i): facts.to_plain() for i, facts in session.ledger.facts.items()}
        return {"facts": told, "held": session.ledger.most_held, "unwritten": unwritten}

    @answering
    def nemo_fp8_refit_abandon(self, message: Answer) -> Answer:
        """A push has died; what it wrote stays until the next."""
        session = self._refit_session
        if session is not None and session.number == message.get("push"):
            session.memory.clear()  # the kernel frees a sender's buffers when nobody maps them any longer
            self._refit_session = None
            if self._refit_mixed:
                self._refit_mixed = f"push {session.number} died half-way"
        return {"mixed": self._refit_mixed}

    @answering
    def nemo_fp8_refit_expected(self, message: Answer) -> Answer:
        """The manifest that this worker expects, from the checkpoint that the engine was started from."""
        found = self._refit_checkpoint()
        if found is None:
            return {"tensors": None}
        manifest, routes = found
        dtypes = {i: str(to[0].target.dtype).removeprefix("torch.") for i, to in routes.by_entry.items()}
        return {"tensors": [[manifest[i].name, dtype, list(manifest[i].shape)] for i, dtype in dtypes.items()]}

    def _refit_open(self, message: Answer) -> Session:
        session = self._refit_session
        if session is None or session.number != message.get("push"):
            raise PrecisionError(
                f"Push {str(message.get('push'))[:40]!r} is not open in this engine.",
                "It ended, was given up, or another one has begun since.",
                "Begin a push, and let only one run at a time.",
            )
        return session

    def _refit_checkpoint(self) -> tuple[Manifest, Routes] | None:
        config = self.vllm_config.model_config
        manifest = of_checkpoint(config.model, config.revision)
        return None if manifest is None else (manifest, record(self.model_runner.get_model(), manifest))


def process_attention(model: torch.nn.Module, config: Any) -> None:
    """What attention derives from weights at load, it derives again."""
    layers: list[Any] = [*model.modules()]
    for layer in layers:
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(config.model_config.dtype)


def names_of(
    missing: list[tuple[Target, int]], own: tuple[Manifest, Routes] | None, manifest: Manifest
) -> Iterator[str]:
    """What a push lacks, as the trainer calls it where that is known."""
    for target, elements in missing:
        if own is None:
            yield f"{elements} elements of vLLM's {target.name}"
        else:
            names = (own[0][route.entry].name for route in own[1] if route.target == target)
            yield from (
                name for name in names if name not in manifest.places
            )  # what is there, and refused, does not lack


def _refuse_replicas(parallel: Any) -> None:
    """Where one push would reach a part of an engine only, or hold up a part of its requests only."""
    if parallel.data_parallel_size > 1:
        raise PrecisionError(
            "A push to an engine with data parallelism.",
            "vLLM gives back the answers of its first replica only, so nobody would know of the others.",
            "Start one engine for each replica, and push to every one of them.",
        )
    if getattr(parallel, "_api_process_count", 1) > 1:
        raise PrecisionError(
            "A push to a server of several processes.",
            "Requests that another process takes would not wait for its end, nor be refused if it dies.",
            "Start the server with --api-server-count 1.",
        )


def _in_blocks(box: Box) -> Box:
    """The scales of a box of codes, in its last two dimensions."""
    return (*box[:-2], *((start // BLOCK, -(-stop // BLOCK)) for start, stop in box[-2:]))


def _bad_piece(piece: Any, why: str) -> PrecisionError:
    return PrecisionError(f"Piece {str(piece)[:80]} is refused.", f"{why}.", "Push with nemo_fp8.rollout.Refit.")
