"""Read weights out of training under Hugging Face's names, one tensor at a time, from a checkpoint or a live model.

    named_tensors(trainer.model)             every rank calls it and gets every tensor
    named_tensors("checkpoints/step=99")     one process, no ranks

A live model is spread over ranks. Each tensor is assembled when it is asked for, and released when the next one is:

    tensor parallel    its shards are gathered; of a fused gate and up, every shard holds a part of both, so the parts
                       are put in order
    expert parallel    the rank that has the expert sends it
    pipeline parallel  the stage that has the layer sends it

So every rank holds one whole tensor beside the model. FP8 primary weights are decoded. The order is that of the model,
the same for every layout. The trade-off: one collective after the other, each with the latency of the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("numerics")

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.families import nemo_classes
from nemo_fp8.train.hf_names import Names, in_order, plain_config
from nemo_fp8.train.nemo_checkpoint import NemoCheckpoint


def named_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) from a checkpoint's folder, or from a live NeMo model on all of its ranks.

    Raises PrecisionError if the folder holds no whole checkpoint, or the model none of the known families.
    """
    if isinstance(source, (str, Path)):
        checkpoint = NemoCheckpoint.open(source)
        for name in checkpoint.tensors:
            yield from ((name, matrix) for matrix in checkpoint.matrices(name))
        return
    yield from Live.of(source).named_tensors()


def config_of(source: Any) -> dict[str, Any]:
    """Return the config.json for the exported weights of a checkpoint's folder, or of a live model.

    Raises PrecisionError as :func:`named_tensors` does.
    """
    if isinstance(source, (str, Path)):
        return NemoCheckpoint.open(source).config
    live = Live.of(source)
    weights = next(iter(live.local.values()))
    return live.names.config(live.config, str(weights.dtype).removeprefix("torch."), {})


@dataclass(frozen=True)
class _Owner:
    """Which ranks of the pipeline group and of the expert group hold a tensor."""

    name: str
    stage: int
    expert_rank: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of one tensor-parallel shard."""
    dimension: int | None
    """The dimension that tensor parallelism cuts; None if every rank has the whole."""


class Live:
    """A model that is spread over ranks, seen from this rank."""

    def __init__(self, names: Names, config: dict[str, Any], chunks: list[Any]) -> None:
        self.names, self.config = names, config
        self.local: dict[str, torch.nn.Parameter] = {}
        self._experts_here = _expert_groups()[0]
        for chunk in chunks:
            self.local |= dict(self._named(chunk))
        if config.get("share_embeddings_and_output_weights"):
            self.local.pop("output_layer.weight", None)  # the last stage's copy of the embedding

    @classmethod
    def of(cls, model: Any) -> Live:
        """Make the view of a NeMo model, of a trainer that has one, or of Megatron's own module with NeMo's config.

        Raises PrecisionError if it is none of the known families, or computes something else than its family does.
        """
        model = getattr(model, "model", None) if hasattr(model, "strategy") and hasattr(model, "model") else model
        chunks = [
            _unwrapped(chunk)
            for chunk in (model if isinstance(model, (list, torch.nn.ModuleList)) else _chunks_of(model))
        ]
        config = plain_config(chunks[0].config)
        classes = [type(model).__name__, *(base.__name__ for base in type(chunks[0].config).__mro__)]
        family = next((f for c in classes for f in _families(c)), classes[0])
        tokens = getattr(getattr(model, "tokenizer", None), "vocab_size", None) or config.get("vocab_size")
        names = Names.of(family, config, tokens if isinstance(tokens, int) else None)
        return cls(names, config, chunks)

    @torch.no_grad()
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor under its Hugging Face name, whole, on every rank."""
        for owner in self._owners():
            whole = self._whole(owner)
            for part in self.names.parts(owner.name):
                yield part.name, self.names.take(part, whole)
            del whole  # before the next one is gathered

    # ------------------------------------------------------------------ names

    def _named(self, chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters with the numbers that layers and experts have in the whole model."""
        layers = getattr(chunk.decoder, "layers", ())
        for name, parameter in chunk.named_parameters():
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(layers[int(words[2])].layer_number - 1)
            yield _expert(".".join(words), self._experts_of_rank(), self._experts_here), parameter

    def _experts_of_rank(self) -> int:
        total = int(self.config.get("num_moe_experts") or 0)
        return total // _expert_groups()[1]

    def _owners(self) -> list[_Owner]:
        """List every tensor of the model once; every rank makes the same list in the same order."""
        mine = [
            _Owner(
                name,
                _pipeline()[0],
                self._experts_here if ".experts." in name else None,
                parameter.dtype,
                tuple(parameter.shape),
                int(vars(parameter)["partition_dim"]) if getattr(parameter, "tensor_model_parallel", False) else None,
            )
            for name, parameter in self.local.items()
            if any(True for _ in self.names.parts(name))
        ]
        found = {owner.name: owner for owners in _all(_pipeline()[2], mine) for owner in owners}
        if any(".experts." in name for name in found):
            found = {owner.name: owner for owners in _all(_expert_groups()[2], [*found.values()]) for owner in owners}
        return sorted(found.values(), key=lambda owner: in_order(owner.name))

    # ------------------------------------------------------------------ tensors

    def _whole(self, owner: _Owner) -> torch.Tensor:
        """Assemble a tensor of the whole model from the ranks that hold parts of it."""
        parameter = self.local.get(owner.name)
        shard = _plain(parameter) if parameter is not None else None
        is_expert = owner.expert_rank is not None
        _, ranks, group = _expert_tensor() if is_expert else _tensor()
        cut = owner.dimension is not None and ranks > 1
        shape = tuple(n * ranks if cut and i == owner.dimension else n for i, n in enumerate(owner.shape))
        whole = None
        if shard is not None:
            whole = _gathered(shard, owner, ranks, group) if cut else shard
        if is_expert:
            whole = (
                _sent(whole, shape, owner, owner.expert_rank or 0, *_expert_groups()[1:]) if _is_stage(owner) else whole
            )
        return _sent(whole, shape, owner, owner.stage, *_pipeline()[1:])


def _gathered(shard: torch.Tensor, owner: _Owner, ranks: int, group: Any) -> torch.Tensor:
    shards = [torch.empty_like(shard) for _ in range(ranks)]
    torch.distributed.all_gather(shards, shard.contiguous(), group=group)
    assert owner.dimension is not None
    if owner.name.endswith("linear_fc1.weight"):  # each shard holds its part of gate above its part of up
        halves = [half for i in range(2) for half in (s.chunk(2, 0)[i] for s in shards)]
        return torch.cat(halves, 0)
    return torch.cat(shards, owner.dimension)


def _sent(
    whole: torch.Tensor | None, shape: tuple[int, ...], owner: _Owner, source: int, ranks: int, group: Any
) -> torch.Tensor:
    """Send the tensor from the rank that has it to every rank of the group, and return it."""
    if ranks == 1:
        assert whole is not None
        return whole
    if whole is None:
        whole = torch.empty(shape, dtype=owner.dtype, device=_device())
    whole = whole.contiguous()
    torch.distributed.broadcast(whole, torch.distributed.get_global_rank(group, source), group=group)
    return whole


def _plain(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's values; FP8 weights, ours and TransformerEngine's, are decoded."""
    dequantize = getattr(parameter, "dequantize", None)
    held = hasattr(parameter, "_held") or type(parameter).__module__.startswith("transformer_engine")
    return dequantize().to(parameter.dtype) if held and dequantize else parameter.detach()


# ---------------------------------------------------------------------- Megatron's groups


def _pipeline() -> tuple[int, int, Any]:
    """Return this rank's pipeline stage, the number of stages, and their group; 0 of 1 without ranks."""
    return _group("pipeline_model_parallel")


def _tensor() -> tuple[int, int, Any]:
    return _group("tensor_model_parallel")


def _expert_tensor() -> tuple[int, int, Any]:
    return _group("expert_tensor_parallel")


def _expert_groups() -> tuple[int, int, Any]:
    return _group("expert_model_parallel")


def _group(name: str) -> tuple[int, int, Any]:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return 0, 1, None
    group = getattr(parallel_state, f"get_{name}_group")()
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group


def _is_stage(owner: _Owner) -> bool:
    return _pipeline()[0] == owner.stage


def _all(group: Any, mine: Any) -> list[Any]:
    """Gather a value from every rank of a group."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return [mine]
    said: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(said, mine, group=group)
    return said


def _device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.distributed.get_backend() == "nccl"
        else torch.device("cpu")
    )


# ---------------------------------------------------------------------- Megatron's modules


def _chunks_of(model: Any) -> list[Any]:
    """Return the model's modules on this rank: one, or several under virtual pipeline parallelism."""
    if isinstance(model, torch.nn.Module) and hasattr(model, "decoder"):
        return [model]
    inside = getattr(model, "module", None)
    if inside is None:
        raise PrecisionError(
            f"A {type(model).__name__} has no Megatron model in it.",
            "Weights are taken from a NeMo model while a trainer has it, or from its Megatron modules.",
            "Give trainer.model, or the folder of a checkpoint.",
        )
    return [inside]


def _unwrapped(chunk: Any) -> Any:
    """Return Megatron's model without its wrappers: Float16Module, DDP, NeMo's."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def _families(name: str) -> Iterator[str]:
    """Yield NeMo's model class from its own name or a config's: Llama31Config8B belongs to LlamaModel."""
    if name in nemo_classes():
        yield name
    for family in sorted(nemo_classes(), key=len, reverse=True):
        if "Config" in name and name.startswith(family.removesuffix("Model")):
            yield family


def _expert(name: str, experts: int, rank: int) -> str:
    """Return the name of an expert's tensor with its number in the whole model: ``local_experts.3``, ``weight3``."""
    words = name.split(".")
    if "local_experts" in words:
        at = words.index("local_experts")
        return ".".join([*words[:at], str(int(words[at + 1]) + rank * experts), *words[at + 2 :]])
    if ".mlp.experts." in name and words[-1].startswith("weight") and words[-1] != "weight":
        number = int(words[-1].removeprefix("weight")) + rank * experts
        return ".".join([*words[:-2], str(number), words[-2], "weight"])
    return name
