"""What is wrong with what a run of Megatron-Bridge starts from, read from its ``ConfigContainer`` alone: the tokenizer,
and the first weights. The first is asked before a checkpoint is imported, too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_fp8.extras import require

__needs__ = require("bridge")

from megatron.bridge.training.mixed_precision import get_mixed_precision_config

from nemo_fp8.bridge.config import ContractPrecision
from nemo_fp8.bridge.loading import loads_into_fp8
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.findings import finding

log = logging.getLogger(__name__)

# One of these is in every folder from which transformers can load a tokenizer.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def start_findings(config: Any) -> list[Problem]:
    """Return the findings, errors first; call it before ``pretrain``, which resolves a name of the registry."""
    return [*_tokenizer(config.tokenizer), *_first_weights(config)]


def require_start(config: Any) -> None:
    """Raise PrecisionError for the findings that are errors, and log the others; call it before ``pretrain``."""
    findings = start_findings(config)
    if any(found.severity == "error" for found in findings):
        raise PrecisionError([found for found in findings if found.severity == "error"])
    for found in findings:
        log.warning("%s %s %s", found.what, found.why, found.remedy)


def require_tokenizer(hf_model_id: str | Path) -> None:
    """Raise PrecisionError for a folder without a tokenizer; call it before ``AutoBridge.import_ckpt``, which would
    write all weights first."""
    if _lacks_tokenizer(hf_model_id):
        raise PrecisionError([finding("start-import-no-tokenizer", "hf_model_id", folder=hf_model_id)])


def _tokenizer(said: Any) -> Iterator[Problem]:
    if said.tokenizer_type == "HuggingFaceTokenizer" and _lacks_tokenizer(said.tokenizer_model or ""):
        yield finding("start-no-tokenizer", "tokenizer.tokenizer_model", folder=said.tokenizer_model)


def _lacks_tokenizer(named: str | Path) -> bool:
    """Return whether this is a folder without a tokenizer; a name of Hugging Face's hub is none."""
    folder = Path(named)
    return named != "" and folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZERS)


def _first_weights(config: Any) -> Iterator[Problem]:
    precision, checkpoint = config.mixed_precision, config.checkpoint
    precision = get_mixed_precision_config(precision) if isinstance(precision, str) else precision
    if precision is None or not (precision.fp8 and precision.fp8_param_gather):
        return
    if config.peft is not None:  # adapters have masters; the weights under them are frozen and have none
        return
    if not isinstance(precision, ContractPrecision) and loads_into_fp8(config.model):
        yield finding("bridge-loads-into-fp8", "model", bridge="")
    exact = checkpoint.load_main_params_from_ckpt and not checkpoint.load_optim
    if checkpoint.pretrained_checkpoint and not exact:
        yield finding("start-masters-from-fp8", "checkpoint.load_main_params_from_ckpt")
