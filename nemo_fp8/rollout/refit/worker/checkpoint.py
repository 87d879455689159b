"""Read from an engine's own checkpoint what a push must bring, and, at start, whether the model takes pushes at all.

A loader that computes with a tensor on the way cannot be followed (:mod:`nemo_fp8.rollout.refit.worker.routes`), and a
user wants to know that when the engine starts, not at the first push. So once the model is loaded, its loader is run
with one tensor of each kind. Names that differ in their numbers only (layers, experts) are one kind, so that this takes
milliseconds. The trade-off: with dummy weights there is no checkpoint, and the first push has to find out.
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
    """Return the manifest of a checkpoint; None if its files are not on this machine, or are not safetensors.

    ``model`` is a folder or a name on the Hugging Face hub; nothing is downloaded.
    """
    folder = Path(model)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        found = Checkpoint.open(folder).entries.values()
    except (OSError, ValueError):  # an engine that starts from dummy weights has no checkpoint
        return None
    return Manifest(Entry(e.name, _torch_word(e.dtype), e.shape) for e in found if _torch_word(e.dtype) in DTYPES)


def warn_if_unpushable(layer: torch.nn.Module) -> None:
    """Log a warning, once, if the model that this layer belongs to takes no push. The model must be loaded."""
    config: Any = get_current_vllm_config()
    if not config.parallel_config.worker_extension_cls:
        return  # the worker has no methods of a push
    own = of_checkpoint(config.model_config.model, config.model_config.revision)
    if own is None:
        return
    kinds = {re.sub(r"\d+", "N", entry.name): entry for entry in reversed(own.entries)}
    if problem := unpushable(record(_model_of(layer), [*kinds.values()][::-1])):
        logger.warning_once("nemo_fp8: %s %s %s", problem.what, problem.why, problem.remedy)


def _model_of(layer: torch.nn.Module) -> torch.nn.Module:
    """Return the model that a layer belongs to: its topmost parent among the modules that vLLM has recorded."""
    parents = {id(child): module for module in [*LAYERWISE_INFO] for child in module.children()}
    while id(layer) in parents:
        layer = parents[id(layer)]
    return layer


def _torch_word(dtype: str) -> str:
    return str(SAFETENSORS.get(dtype)).removeprefix("torch.")
