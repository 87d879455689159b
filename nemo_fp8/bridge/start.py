"""What is wrong with how a run of Megatron-Bridge gets its first weights, read from its ``ConfigContainer`` alone."""

from __future__ import annotations

from typing import Any

from nemo_fp8.extras import require

__needs__ = require("bridge")

from megatron.bridge.training.mixed_precision import get_mixed_precision_config

from nemo_fp8.bridge.config import ContractPrecision
from nemo_fp8.bridge.loading import loads_into_fp8
from nemo_fp8.errors import Problem
from nemo_fp8.findings import finding


def start_findings(config: Any) -> list[Problem]:
    """Return the findings, errors first; call it before ``pretrain``, which resolves a name of the registry."""
    precision, checkpoint = config.mixed_precision, config.checkpoint
    if precision is None:
        return []
    precision = get_mixed_precision_config(precision) if isinstance(precision, str) else precision
    if not (precision.fp8 and precision.fp8_param_gather):
        return []
    found = []
    if not isinstance(precision, ContractPrecision) and loads_into_fp8(config.model):
        found.append(finding("bridge-loads-into-fp8", "model", bridge=""))
    exact = checkpoint.load_main_params_from_ckpt and not checkpoint.load_optim
    if checkpoint.pretrained_checkpoint and not exact:
        found.append(finding("run-masters-from-fp8", "checkpoint.load_main_params_from_ckpt"))
    return found
