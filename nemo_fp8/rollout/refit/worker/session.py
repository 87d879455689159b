"""Take part in a push as a worker: begin, write or stream, finish. vLLM calls these through ``collective_rpc``.

    begin     compare the manifest with the model (plan.py); nothing changes
    write     write pieces of tensors from shared memory into the model (sinks.py)
    stream    write whatever a sender on this host tells of, until it ends (channel.py)
    finish    make sure that all tensors came, pack what waited for others, and report on every tensor

From the first piece to the end of ``finish`` the model is *mixed*: it holds weights of two pushes. It stays mixed if
the push dies, and the next push that ends well repairs it, since every push writes every weight. The methods return
errors as answers and raise none: vLLM's executors treat exceptions differently, and a bad push must not end the engine.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from nemo_fp8.contract import Operand
from nemo_fp8.contract.operands import BLOCK
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.engine import released
from nemo_fp8.rollout.refit import casting
from nemo_fp8.rollout.refit.channel import Line
from nemo_fp8.rollout.refit.manifest import SCALES, Box, Manifest, is_version
from nemo_fp8.rollout.refit.memory import Mappings, Opened
from nemo_fp8.rollout.refit.patch import blocks_of, grid_of
from nemo_fp8.rollout.refit.worker.arrived import Arrived, Copied
from nemo_fp8.rollout.refit.worker.blocks import Blocks
from nemo_fp8.rollout.refit.worker.checkpoint import of_checkpoint
from nemo_fp8.rollout.refit.worker.keeping import plain_castable
from nemo_fp8.rollout.refit.worker.layouts import Tally
from nemo_fp8.rollout.refit.worker.packing import keep_freed, pack, packed
from nemo_fp8.rollout.refit.worker.plan import Plan
from nemo_fp8.rollout.refit.worker.routes import Route, Routes, Target, record, unpushable
from nemo_fp8.rollout.refit.worker.sinks import InPlace, count_rows, inside
from nemo_fp8.rollout.refit.worker.staged import Staged
from nemo_fp8.rollout.refit.worker.whole import Place, Table

Answer = dict[str, Any]
log = logging.getLogger(__name__)
BROUGHT = 64 << 20
"""The bytes of a tensor that are brought to a device at a time, where it can be cut."""


def answering(method: Callable[[Any, Answer], Answer]) -> Callable[[Any, Answer], Answer]:
    """Decorate a method of a worker: its answer names the worker's rank, and an error becomes an answer."""

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
    """One push that is under way in this worker. Every piece is checked against the manifest before it is written."""

    tabled = True
    """Whether tensors take the ways that a plan keeps, where it has some."""

    def __init__(self, plan: Plan, number: str, verify: bool) -> None:
        self.plan, self.number, self.verify = plan, number, verify
        self.device = next(plan.model.parameters()).device
        """Where the parameters lie; pieces are brought there before anything is made of them."""
        self.tally = Tally()
        for i, experts in plan.stacks.items():
            self.tally.facts[i].experts = experts
        self.sinks = plan.sinks(self.tally, verify)
        keep_freed(plan.largest_packed)
        self.rows = [0] * len(plan.manifest)
        """How many rows of each tensor have come."""
        self.written = False
        """Whether any weight was written. Until then the engine is unchanged."""
        self.staged = [sink for sink in dict.fromkeys(self.sinks.values()) if isinstance(sink, Staged)]
        self.awaited: dict[int, list[Staged]] = defaultdict(list)
        """The layers that wait for a tensor, by its number."""
        for sink in self.staged:
            for i in sink.awaited:
                self.awaited[i].append(sink)
        self.waiting: dict[Route, dict[int, torch.Tensor]] = {}
        """Tensors that came of which the loader makes values together with others."""
        self.table: Table | None = None
        """How tensors are written that come whole; None where they take their sinks."""
        self.arrivals: dict[int, Arrived | Copied] = {}
        """How tensors are written that come in pieces; those that are not here take their sinks."""
        if self.tabled and not verify:
            self.table, self.arrivals = plan.kept_ways(self.sinks)
        self.packed = set[str]()
        """The layers whose packed copy is of the weight as it is now."""
        self.sealing = False
        """Whether a push of changes may follow, which has to find out what others wrote in between."""

    @functools.cached_property
    def castable(self) -> Mapping[int, Operand | None]:
        """The operands by which large tensors may be cast before they come, by their numbers; None for values only."""
        return {} if self.verify else self.plan.castable(self.sinks)

    @torch.no_grad()
    def write(self, memory: Opened, pieces: Any, stays: bool = False) -> None:
        """Write pieces, each (number of the tensor, first row, rows, offset in ``memory``), or of codes (number, first
        row, rows, bytes from the codes to their scales, offset). ``stays`` says that nobody writes there before the
        push ends.

        Raises PrecisionError if a piece is not the next one of its tensor, or does not lie in the memory.
        """
        if not isinstance(pieces, list):
            raise bad_piece(pieces, "It is no list of pieces")
        whole: list[Place] = []
        try:
            for piece in pieces:
                i, row, rows, *gap, offset = self._checked(piece)
                entry = self.plan.manifest[i]
                if gap:
                    self._write_codes(memory, i, row, rows, offset, offset + gap[0])
                elif self.table is not None and i in self.table.entries and rows == entry.rows:
                    whole.append((i, memory.address(offset, entry.bytes, entry.torch_dtype.itemsize)))
                    self.rows[i] += rows
                elif isinstance(copied := self.arrivals.get(i), Copied):
                    at = memory.address(offset, rows * entry.row_bytes, entry.torch_dtype.itemsize)
                    self._write_arrived(copied, i, row, rows, at)
                else:
                    tensor = memory.read(offset, entry.torch_dtype, (rows, *entry.shape[1:]) if entry.shape else ())
                    self._bring(i, row, tensor, stays)
        finally:
            self._write_whole(whole)

    def _write_whole(self, places: list[Place]) -> None:
        """Write tensors that came whole."""
        if self.table is not None and places:
            self.written = True
            self.table.write(places)
            self.table.tell([i for i, _ in places], self.tally)
            for i, _ in places:
                self._pack_what_waits_for(i)

    def _checked(self, piece: Any) -> Sequence[int]:
        """Return a piece that came from outside; raise PrecisionError if it does not fit the manifest."""
        if not isinstance(piece, (list, tuple)) or [*map(type, piece)] not in ([int] * 4, [int] * 5):
            raise bad_piece(piece, "It is no four whole numbers, nor five")
        i, row, rows, *_ = piece
        if not 0 <= i < len(self.rows):
            raise bad_piece(piece, f"The manifest has {len(self.rows)} tensors")
        entry = self.plan.manifest[i]
        if row != self.rows[i] or not 0 < rows <= entry.rows - row:
            raise bad_piece(piece, f"{entry.name} has {entry.rows} rows, of which {self.rows[i]} have come")
        at_end = row + rows == entry.rows
        if rows < entry.rows and (i in self.plan.whole or row % entry.step or (rows % entry.step and not at_end)):
            raise bad_piece(piece, f"{entry.name} cannot be cut there")
        if len(piece) == 5 and self.castable.get(i) is None and i in self.plan.routes.by_entry:
            raise bad_piece(piece, f"{entry.name} does not come as codes")
        return piece

    def _write_codes(self, memory: Opened, i: int, row: int, rows: int, offset: int, scales_at: int) -> None:
        """Write rows [row, row+n) of tensor ``i``, as the sender has cast them, to every local parameter that holds a
        part of them."""
        if isinstance(arrived := self.arrivals.get(i), Arrived):
            self._write_arrived(arrived, i, row, rows, *arrived.places(memory, rows, offset, scales_at))
            return
        operand, shape = self.castable.get(i), (rows, *self.plan.manifest[i].shape[1:])
        if operand is None or operand.block is None:  # no part of it is here
            self.rows[i] += rows
            return
        codes = memory.read(offset, casting.CODES, shape).to(self.device)
        scales = memory.read(scales_at, casting.scales_type(operand), grid_of(shape, operand.block)).to(self.device)
        self.written = True
        self.rows[i] += rows
        for route in self.plan.routes.by_entry[i]:
            sink = self.sinks[route.target]
            assert isinstance(sink, Blocks)
            assert route.source is not None
            (start, stop), *rest = route.source
            first, last = max(start, row), min(stop, row + rows)
            if first < last:
                box = ((first - row, last - row), *rest)
                sink.write_cast(route, first - start, inside(codes, box), inside(scales, blocks_of(box, operand.block)))

    def _write_arrived(self, way: Arrived | Copied, i: int, row: int, rows: int, *places: int) -> None:
        """Write rows [row, row+n) of tensor ``i``, which lie at these addresses, by the way that the plan keeps."""
        self.written = True
        self.rows[i] += rows
        way.write(row, rows, *places)
        if self.rows[i] == self.plan.manifest[i].rows:
            way.tell(self.tally.facts[i])
            self._pack_what_waits_for(i)

    def _bring(self, i: int, row: int, tensor: torch.Tensor, stays: bool) -> None:
        """Bring rows to where the parameters lie, and write them: some at a time, since a device may have little room
        beside a model and its cache."""
        entry, rows = self.plan.manifest[i], count_rows(tensor)
        if self.device.type == "cpu":
            self.write_rows(i, row, tensor, stays)
            return
        if i in self.plan.whole or tensor.nbytes <= BROUGHT:
            self.write_rows(i, row, tensor.to(self.device))
            return
        step = max(1, BROUGHT // entry.row_bytes // entry.step) * entry.step
        for first in range(0, rows, step):
            self.write_rows(i, row + first, tensor[first : first + step].to(self.device))

    def write_rows(self, i: int, row: int, tensor: torch.Tensor, stays: bool = False) -> None:
        """Write rows [row, row+n) of tensor ``i`` to every local parameter that holds a part of them; ``stays`` as in
        ``write``.

        The caller has gradients off, once for all of its pieces.
        """
        self.written = True
        rows = count_rows(tensor)
        self.rows[i] += rows
        for route in self.plan.routes.by_entry.get(i, ()):
            sink = self.sinks[route.target]
            if route.made is not None:
                self._make(route, i, tensor)
            elif route.source is None:  # no box, so the tensor was sent whole
                sizes, strides, offset = route.view
                sink.write(route, 0, tensor.as_strided(sizes, strides, tensor.storage_offset() + offset))
            elif not route.source:  # a scalar
                sink.write(route, 0, tensor)
            else:  # of rows 128:256, say, that come as 0:192 and 192:384: first 128:192 and then 192:256
                (start, stop), *rest = route.source
                first, last = max(start, row), min(stop, row + rows)
                if first < last:
                    write = sink.write_staying if stays else sink.write
                    write(route, first - start, inside(tensor, ((first - row, last - row), *rest)))
        if i in self.plan.scales:
            self._write_scales(i, tensor)
        if self.rows[i] == self.plan.manifest[i].rows:
            # Only now, even if this worker's part came earlier: all workers must process a layer at the same time.
            for staged in self.awaited.get(i, ()):
                staged.complete(i)
            self._pack_what_waits_for(i)

    def _pack_what_waits_for(self, i: int) -> None:
        """Pack the copies for which tensor ``i`` was the last to come: an output head's while the sender looks for what
        follows it, and not when all wait for the end. Only a CPU's kernels have such copies."""
        for name, numbers in self.plan.packed_from.items() if self.device.type == "cpu" else ():
            if i in numbers and all(self.rows[n] == self.plan.manifest[n].rows for n in numbers):
                self.pack(name)

    def pack(self, name: str) -> None:
        """Pack the copy beside a layer's weight, all of which has come."""
        for sink in {self.sinks[route.target] for i in self.plan.packed_from[name] for route in self._routes(i)}:
            if isinstance(sink, InPlace):
                sink.fill()
        pack(self.plan.all_packed_beside[name])
        self.packed.add(name)

    def _routes(self, i: int) -> list[Route]:
        return self.plan.routes.by_entry.get(i, [])

    def _make(self, route: Route, i: int, tensor: torch.Tensor) -> None:
        """Take tensor ``i``, of which the loader makes values, and write these once all tensors for them have come."""
        assert route.made is not None
        came = self.waiting.setdefault(route, {})
        came[i] = tensor
        self.tally.take(i, tensor)
        if len(came) < len(route.made.inputs):
            came[i] = tensor.clone()  # the buffer is used again
            self.tally.hold(tensor.nbytes)
            return
        values = route.made.run(came, self.device).to(route.target.dtype)
        self.sinks[route.target].write(route, 0, values.reshape(route.view[0]))
        self.tally.hold(-sum(other.nbytes for number, other in self.waiting.pop(route).items() if number != i))

    def _write_scales(self, i: int, scales: torch.Tensor) -> None:
        """Write the scales of tensor ``i``: they take the routes of their codes, in units of blocks."""
        codes = self.plan.manifest.places[self.plan.manifest[i].name.removesuffix(SCALES)]
        for route in self.plan.routes.by_entry.get(codes, ()):
            sink = self.sinks[route.target]
            assert isinstance(sink, Blocks)
            assert route.source is not None
            sink.write_scales(
                route, _in_blocks(route.to), scales[tuple(slice(*one) for one in _in_blocks(route.source))]
            )

    @torch.no_grad()
    def finish(self, expected: Any = None) -> None:
        """Pack what waited for the end, and complete the facts of every tensor that this worker holds a part of.

        ``expected`` are the fingerprints that the trainer computed; only a push of patches has them. Raises
        PrecisionError if a tensor that this worker needs did not come.
        """
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
        for name in self.plan.all_packed_beside:
            if name not in self.packed:
                self.pack(name)
        if self.verify:
            for sink in sinks:
                sink.verify()
        self.tally.settle()

    def seals(self) -> dict[str, Any]:
        """Return the seal of every layer whose memory, or packed copy, cannot be read, by vLLM's name of the layer."""
        layers = {sink: target.layer for target, sink in self.sinks.items()}
        seals = {layer: seal for sink, layer in layers.items() if (seal := sink.seal()) is not None}
        return seals | {name: packed(layer) for name, layer in self.plan.all_packed_beside.items()}

    @property
    def way_back(self) -> str:
        """The version of the weights that ``take_back`` would leave; empty if it cannot."""
        return ""

    def take_back(self) -> str | None:
        """Undo what was written, and return the version of the weights that are there again; None if that cannot be."""
        return None

    def give_up_way_back(self) -> None:
        """Let ``take_back`` undo nothing from now on: what follows is made of the new weights."""


class NemoFp8Refit:
    """The methods of a push, mixed into vLLM's worker. Each takes a message of plain values and returns another."""

    vllm_config: Any
    model_runner: Any
    rank: int
    _refit_plan: Plan | None = None
    _refit_session: Session | None = None
    _refit_mixed = ""
    _refit_held = False
    """Whether a sender was about to pause the engine for a push, and has neither ended that nor given it up."""
    _refit_version = ""
    """The number of the push whose weights these are; empty before the first push, and while they are mixed."""
    _refit_seals: Mapping[str, Any] = MappingProxyType({})
    """The seals of the layers that nobody can read, as that push left them, if a push of changes may follow it."""

    @functools.cached_property
    def _refit_mapped(self) -> Mappings:
        """The memory of senders, mapped between their pushes too."""
        return Mappings()

    @answering
    def nemo_fp8_refit_begin(self, message: Answer) -> Answer:
        """Compare a manifest with the model, and open a session if all is right. The answer says what is wrong.

        Raises PrecisionError for what is no manifest, and for a model or an engine that no push can reach.
        """
        refuse_replicas(self.vllm_config.parallel_config)
        refuse_stores(self.vllm_config)
        number = number_of(message)
        manifest = Manifest.from_plain(message.get("tensors"))
        plan = self._refit_plan
        if plan is None or plan.manifest != manifest:
            plan = Plan(self.model_runner.get_model(), manifest)
        if problem := unpushable(plan.routes):  # other problems do not matter where no push can work
            raise PrecisionError([problem])
        refused = {name for name, _ in plan.routes.problems}
        unrouted = [i for i, entry in enumerate(manifest) if i not in plan.needed and entry.name not in refused]
        missing = plan.lacking
        own = self._refit_checkpoint() if unrouted or missing else None
        if own is not None:
            missing = plan.missing(own[1])
        accepted = not plan.problems and not missing
        if accepted:
            self._refit_give_up()
            self._refit_plan = plan  # of a push that is refused nothing stays: a push of changes goes by the last one's
        answer = {
            "refused": [[p.what, p.why, p.remedy] for p in plan.problems],
            "unrouted": unrouted,
            "known": [i for i in unrouted if own and manifest[i].name in own[0].places],
            "missing": [*names_of(missing, own, manifest)],
            "whole": sorted(plan.whole),
            "tied": [*plan.routes.aliases],
            "mixed": self._refit_mixed,
            "version": self._refit_version,
            "interrupted": self._refit_held,
            "accepted": accepted,
        }
        if accepted:
            session = self._refit_session = Session(plan, number, bool(message.get("verify")))
            answer["castable"] = plain_castable(session.castable)
        return answer

    @answering
    def nemo_fp8_refit_hold(self, message: Answer) -> Answer:
        """Note that the sender pauses the engine now, whose pause is nobody's if it is killed."""
        self._refit_open(message)
        self._refit_held = True
        return {}

    @answering
    def nemo_fp8_refit_write(self, message: Answer) -> Answer:
        """Write pieces of tensors that lie in shared memory, which ends with the call."""
        self._refit_write(self._refit_open(message), message | {"stays": False})
        return {}

    @answering
    def nemo_fp8_refit_stream(self, message: Answer) -> Answer:
        """Write pieces that a sender on this host tells of through its socket, until it ends.

        A sender that goes away leaves a push that ``finish`` will refuse, since tensors did not come.
        """
        session = self._refit_open(message)
        line = Line(message.get("socket"), message.get("silence"))
        try:
            for told in line.messages():
                self._refit_write(session, told)
        except BaseException:
            line.fail()
            raise
        finally:
            line.close()
        return {}

    def _refit_write(self, session: Session, message: Answer) -> None:
        memory, stays = self._refit_mapped.opened(message.get("memory")), message.get("stays") is True
        if "used" in message:
            memory = memory.first(message["used"])
        try:
            session.write(memory, message.get("pieces"), stays)
        finally:
            if session.written:
                self._refit_mixed = f"push {session.number} has begun and has not ended"
                self._refit_version = ""

    @answering
    def nemo_fp8_refit_finish(self, message: Answer) -> Answer:
        """End a push. Only now are all weights the new ones; the answer holds the facts for the receipt."""
        session = self._refit_open(message)
        session.finish(message.get("expected"))
        session.give_up_way_back()
        process_attention(session.plan.layers.values(), self.vllm_config)
        wait_for(session.device)
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if hasattr(self.model_runner, reset):
                getattr(self.model_runner, reset)()
        self._refit_seals = session.seals() if session.sealing else {}
        self._refit_session, self._refit_mixed, self._refit_version = None, "", session.number
        self._refit_held = False
        unwritten = [
            t.name for t in session.plan.routes.parameters if t not in session.sinks and session.plan.way(t) != "scales"
        ]
        told = {str(i): facts.to_plain() for i, facts in session.tally.facts.items()}
        return {"facts": told, "held": session.tally.most_held, "unwritten": unwritten}

    @answering
    def nemo_fp8_refit_abandon(self, message: Answer) -> Answer:
        """Close the session of a push that died. Patches are taken back; whole tensors stay until the next push."""
        if self._refit_session is not None and self._refit_session.number == message.get("push"):
            self._refit_give_up()
            self._refit_held = False
        return {"mixed": self._refit_mixed, "version": self._refit_version}

    @answering
    def nemo_fp8_refit_expected(self, message: Answer) -> Answer:
        """Answer with the tensors of the engine's own checkpoint that this worker holds, in its dtypes; or None."""
        found = self._refit_checkpoint()
        if found is None:
            return {"tensors": None}
        manifest, routes = found
        dtypes = {i: str(to[0].target.dtype).removeprefix("torch.") for i, to in routes.by_entry.items()}
        return {"tensors": [[manifest[i].name, dtype, list(manifest[i].shape)] for i, dtype in dtypes.items()]}

    def _refit_give_up(self) -> None:
        """Close the open session, if there is one, and take back what it wrote, if that is possible."""
        session, self._refit_session = self._refit_session, None
        if session is None:
            return
        if session.written:
            version = session.take_back()
            self._refit_mixed = f"push {session.number} died half-way" if version is None else ""
            self._refit_version = version or ""

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


def process_attention(layers: Iterable[Any], config: Any) -> None:
    """Have attention layers derive again what they derive from weights at load, such as MLA's absorbed matrices."""
    for layer in layers:
        if is_deferred_attention_layer(layer) and released.put_back(layer):
            layer.process_weights_after_loading(config.model_config.dtype)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all it was asked for, once a push: a push into an engine of the same process runs in
    another thread than the engine, hence on another stream."""
    torch.get_device_module(device).synchronize()


def names_of(
    missing: list[tuple[Target, int]], own: tuple[Manifest, Routes] | None, manifest: Manifest
) -> Iterator[str]:
    """Yield the Hugging Face names of what a push lacks, or, without the engine's checkpoint, vLLM's names."""
    for target, elements in missing:
        if own is None:
            yield f"{elements} elements of vLLM's {target.name}"
        else:
            names = (own[0][route.entry].name for route in own[1] if route.target == target)
            # A tensor that came and was refused is reported as refused.
            yield from (name for name in names if name not in manifest.places)


def refuse_replicas(parallel: Any) -> None:
    """Raise PrecisionError if a push would reach only some replicas of an engine, or hold only some requests."""
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


# Connectors of vLLM that hand what a request has computed to another engine, or to its own next step, and keep nothing.
PASSING_ON = (
    "DecodeBenchConnector", "ExampleHiddenStatesConnector", "HiSparseConnector", "MoRIIOConnector", "MooncakeConnector",
    "NixlConnector", "NixlPullConnector", "NixlPushConnector",
)  # fmt: skip


def refuse_stores(config: Any) -> None:
    """Raise PrecisionError if what old weights computed lies in a store that vLLM cannot empty after a push."""
    stores = []
    if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector:
        stores = [one.kv_connector for one in _connectors(config.kv_transfer_config) if not _can_be_emptied(one)]
    encoders = config.ec_transfer_config
    if encoders is not None and encoders.ec_connector:
        stores.append(encoders.ec_connector)  # there is no call to empty one
    if stores:
        raise PrecisionError(
            f"A push to an engine with {', '.join(stores)}.",
            "It keeps what old weights computed outside of the engine, and vLLM has no way to empty it: the same "
            "prompt, or image, would be answered from there.",
            "Start the engine without it, or with a connector that has reset_cache(), such as OffloadingConnector.",
        )


def _connectors(config: Any) -> list[Any]:
    """Return the configuration of a KV connector; of several as one, those of all."""
    several = config.kv_connector_extra_config.get("connectors") if config.kv_connector == "MultiConnector" else None
    return [config] if several is None else [KVTransferConfig(**one) for one in several]


def _can_be_emptied(config: Any) -> bool:
    """Return whether a connector keeps nothing, or has a call of its own that empties it; vLLM takes any for the
    latter."""
    if config.kv_connector in PASSING_ON:
        return True
    return KVConnectorFactory.get_connector_class(config).reset_cache is not KVConnectorBase_V1.reset_cache


def _in_blocks(box: Box) -> Box:
    """Return the box of scales for a box of codes: its last two dimensions, in units of blocks."""
    return (*box[:-2], *((start // BLOCK, -(-stop // BLOCK)) for start, stop in box[-2:]))


def number_of(message: Answer) -> str:
    """Return the number of a push, which came from outside; raise PrecisionError if it is no short text."""
    if not is_version(number := message.get("push")):
        raise PrecisionError(
            f"{str(number)[:40]!r} is no number of a push.",
            "It is a short text of printable characters.",
            "Push with nemo_fp8.rollout.Refit.",
        )
    return str(number)


def bad_piece(piece: Any, why: str) -> PrecisionError:
    """Return the error for a piece from outside that does not fit the push."""
    return PrecisionError(f"Piece {str(piece)[:80]} is refused.", f"{why}.", "Push with nemo_fp8.rollout.Refit.")
