"""Take weights that arrive by vLLM's own weight transfer, NCCL or CUDA IPC, into the engine as a push does.

    LLM(..., weight_transfer_config={"backend": "nemo_fp8_nccl"})      # or "nemo_fp8_ipc"

vLLM's backends know how bytes travel between GPUs, and end in one call: ``self.model.load_weights(pairs)``. Here that
model is a :class:`Receiver`. Its ``load_weights`` writes into a :class:`Session`, as every push does, checked against
the same plan. The trainer's side is vLLM's own (``NCCLTrainerWeightTransferEngine`` and its like), unchanged.
The trade-off is vLLM's protocol: an error is an exception in the worker, and the caller must pause the engine and reset
the prefix cache.

The receiver was run on a CPU, behind a backend that brings tensors from files
(``tests/support/rollout/refit_door.py``), and was given tensors of a device that the CPU cannot reach
(``tests/rollout/far_cases.py``); the model then equals a fresh one bit for bit. vLLM's two backends need GPUs and have
not been run.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.rollout.engine.compatibility import GPU_TRANSFER, error_of, misfits
from nemo_fp8.rollout.refit.manifest import DTYPES, Entry, Manifest
from nemo_fp8.rollout.refit.worker.checkpoint import of_checkpoint
from nemo_fp8.rollout.refit.worker.plan import Plan
from nemo_fp8.rollout.refit.worker.routes import Routes, record
from nemo_fp8.rollout.refit.worker.session import Session, names_of, process_attention, wait_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKENDS = {"nemo_fp8_nccl": "NemoFp8NCCL", "nemo_fp8_ipc": "NemoFp8IPC"}


BY_NAME = "nemo_fp8"
"""The backend of our own, which ends with a receipt: its sides are in ``transfer_engine`` and ``refit.transfer``."""


def register() -> None:
    """Register the backends with vLLM, in this process. A second call changes nothing."""
    workers = {name: (__name__, class_name) for name, class_name in BACKENDS.items()}
    workers[BY_NAME] = (f"{__package__}.transfer_engine", "NemoFp8WeightTransferEngine")
    for name, (module, class_name) in workers.items():
        with suppress(ValueError):  # it is known already
            WeightTransferEngineFactory.register_engine(name, module, class_name)
    with suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(BY_NAME, "nemo_fp8.rollout.refit.transfer", "NemoFp8TrainerEngine")


class Receiver:
    """Stands in for the model while a backend delivers weights."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self.real, self.config = model, config
        self.session: Session | None = None

    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Return none, so that vLLM's own layerwise reload, which a backend begins and ends, has nothing to do."""
        return ()

    def announce(self, manifest: Manifest) -> None:
        """Check what the next ``load_weights`` will bring. The first announcement opens the push.

        The push has the manifest of the engine's own checkpoint, if there is one, so that a trainer may send all
        tensors in one call or in many. Raises PrecisionError if a tensor is unknown or not as in that manifest.
        """
        if self.session is None:
            own = of_checkpoint(self.config.model_config.model, self.config.model_config.revision)
            known = None if own is None else (own, record(self.real, own))
            plan = Plan(self.real, manifest if known is None else _as_announced(known, manifest))
            _refuse(plan, known)
            self.session = Session(plan, "weight transfer", verify=False)
        expected = self.session.plan.manifest
        for entry in manifest:
            place = expected.places.get(entry.name)
            if place is None or expected[place] != entry:
                told = (
                    "is not in the manifest"
                    if place is None
                    else f"is {list(expected[place].shape)} in {expected[place].dtype} there"
                )
                raise PrecisionError(
                    f"{entry.name} is announced as {list(entry.shape)} in {entry.dtype}.",
                    f"It {told} that this push began with.",
                    "Push every tensor of the model, once, in the engine's dtype.",
                )

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write whole tensors. None of them is kept, so the backend may use its buffer again.

        Raises PrecisionError if a tensor comes a second time.
        """
        assert self.session is not None
        for name, tensor in weights:
            place = self.session.plan.manifest.places[name]
            if self.session.rows[place]:
                raise PrecisionError(f"{name} came twice.", "A push writes every tensor once.", "Send it once.")
            self.session.write_rows(place, 0, tensor)

    def finish(self) -> None:
        """End the push. Raises PrecisionError if a tensor is missing, or none came."""
        if self.session is None:
            raise PrecisionError(
                "A push without a tensor.",
                "It ended before anything came.",
                "Send the weights between start and finish.",
            )
        self.session.finish()
        process_attention(self.real.modules(), self.config)
        wait_for(self.session.device)


class _Pushing:
    """Changes a backend of vLLM so that its weights go to a :class:`Receiver`."""

    model: Any
    vllm_config: Any
    _default_model: Any

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """Raise PrecisionError for pickled handles, which may run any code."""
        if "ipc_handles_pickled" in update_dict:
            raise PrecisionError(
                "A push with pickled handles.",
                "To unpickle what comes over HTTP is to run whatever the sender put there.",
                "Push through Ray or in one process, or with Refit(url), which sends no pickles.",
            )
        return super().parse_update_info(update_dict)  # type: ignore[misc]

    def start_weight_update(self) -> None:
        """Put the receiver in the model's place, and begin."""
        self.model = Receiver(self.model, self.vllm_config)
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        """Check what will come against the manifest, and receive it."""
        about = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        self.model.announce(Manifest.from_plain([[name, dtype, list(shape)] for name, dtype, shape in about]))
        super().receive_weights(update_info)  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        """End the push."""
        super().finish_weight_update()  # type: ignore[misc]
        self.model.finish()


def __getattr__(name: str) -> type:
    """Make a backend's class when vLLM asks for it: importing vLLM's own earlier would fail without GPUs."""
    if name in BACKENDS.values() and (wrong := misfits(GPU_TRANSFER)):
        raise error_of(wrong)
    if name == "NemoFp8NCCL":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        return type(name, (_Pushing, NCCLWeightTransferEngine), {})
    if name == "NemoFp8IPC":
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        return type(name, (_Pushing, IPCWeightTransferEngine), {})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _as_announced(own: tuple[Manifest, Routes], manifest: Manifest) -> Manifest:
    """Return the engine's own manifest, in the dtypes that it keeps, with what is announced beyond it."""
    entries = {}
    for i, routes in own[1].by_entry.items():
        dtype = str(routes[0].target.dtype).removeprefix("torch.")
        if dtype in DTYPES:
            entries[own[0][i].name] = Entry(own[0][i].name, dtype, own[0][i].shape)
    return Manifest({**{e.name: e for e in manifest}, **entries}.values())


def _refuse(plan: Plan, own: tuple[Manifest, Routes] | None) -> None:
    """Raise PrecisionError with everything that is wrong with the plan's manifest, if anything is."""
    missing = list(names_of(plan.missing(own[1] if own else None), own, plan.manifest))
    strange = [entry.name for i, entry in enumerate(plan.manifest) if i not in plan.needed]
    problems = list(plan.problems)
    if missing:
        problems.append(
            Problem(
                f"The push lacks {', '.join(missing[:5])}.",
                "Old values would stay there.",
                "Push every tensor of the model.",
            )
        )
    if strange:
        problems.append(
            Problem(
                f"The engine has no place for {', '.join(strange[:5])}.",
                "vLLM would pass over them.",
                "Leave them out.",
            )
        )
    if problems:
        raise PrecisionError(problems)
