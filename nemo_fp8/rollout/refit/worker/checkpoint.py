"""The checkpoint that an engine was started from: what a push must bring, and, at the start, whether this model takes
pushes at all.

A loader that computes with a tensor on the way cannot be followed (:mod:`nemo_fp8.rollout.refit.worker.routes`). Who
trains wants to know that when the engine starts, and not at the first push. So once the model is loaded its loader is
asked about one tensor of each kind: names that differ in their numbers only (layers, experts) are one kind, which keeps
it to milliseconds. The trade-off: an engine started from dummy weights is told at its first push.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

from nemo_fp8.rollout.refit.manifest import DTYPES, Entry, Manifest
from nemo_fp8.rollout.refit.worker.routes import record, unpushable
from nemo_fp8.storage.safetensors import DTYPES as SAFETENSORS
from nemo_fp8.storage.safetensors import Checkpoint

logger = init_logger("vllm.nemo_fp8")


def of_checkpoint(model: str, revision: str | None = None) -> Manifest | None:
    """What the checkpoint that an engine was started from holds; None where its files are not on this machine."""
    folder = Path(model)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        found = Checkpoint.open(folder).entries.values()
    except (OSError, ValueError):  # an engine may start from dummy weights, and then there is none
        return None
    return Manifest(Entry(e.name, _torch_word(e.dtype), e.shape) for e in found if _torch_word(e.dtype) in DTYPES)


def warn_if_unpushable(layer: torch.nn.Module) -> None:
    """Say so where the model of this layer, which was loaded just now, takes no push."""
    config: Any = get_current_vllm_config()
    if not config.parallel_config.worker_extension_cls:
        return  # nobody can push
    own = of_checkpoint(config.model_config.model, config.model_config.revision)
    if own is None:
        return
    kinds = {re.sub(r"\d+", "N", entry.name): entry for entry in reversed(own.entries)}
    if problem := unpushable(record(_model_of(layer), [*kinds.values()][::-1])):
        logger.warning_once("nemo_fp8: %s %s %s", problem.what, problem.why, problem.remedy)


def _model_of(layer: torch.nn.Module) -> torch.nn.Module:
    """The model that a layer belongs to. vLLM remembers every module of a model as it was before it was loaded."""
    parents = {id(child): module for module in [*LAYERWISE_INFO] for child in module.children()}
    while id(layer) in parents:
        layer = parents[id(layer)]
    return layer


def _torch_word(dtype: str) -> str:
    return str(SAFETENSORS.get(dtype)).removeprefix("torch.")
