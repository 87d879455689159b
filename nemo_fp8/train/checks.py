"""Check a run's configs against its contract, after NeMo has written the plugin's settings into them.

NeMo copies the settings into the model, optimizer and DDP configs field by field. Megatron checked those configs when
they were constructed, and nothing checks the result: a field that a config lacks is dropped, and a combination that
Megatron refuses passes. So Megatron's own checks run again here, on a copy of the result. Rules that Megatron does not
have are rows: a code of :data:`nemo_fp8.findings.RULES`, which holds the text, and the condition under which it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nemo_fp8 import te_cpu
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.findings import finding
from nemo_fp8.render.nemo import to_nemo
from nemo_fp8.render.overrides import FIELDS

# The plugin's arguments that end in a field of the model's config, under the name that they have there.
_MODEL_FIELDS = {
    name: field
    for name, core in FIELDS.items()
    for config, _, field in (place.partition(".") for place in core)
    if config == "TransformerConfig"
}


@dataclass(frozen=True)
class Run:
    """The three configs of a run after NeMo's overrides; None for one that the run does not have."""

    model: Any
    ddp: Any = None
    optimizer: Any = None

    @classmethod
    def of(cls, module: Any) -> Run:
        """Return the configs of a model chunk and of the strategy that trains it."""
        try:
            strategy = module.trainer.strategy
        except (AttributeError, RuntimeError):  # Lightning's way to say that no trainer is attached
            strategy = None
        optimizer = getattr(getattr(module, "optim", None), "config", None)
        return cls(module.config, getattr(strategy, "ddp_config", None), optimizer)


def require_agreement(precision: Precision, run: Run) -> None:
    """Raise PrecisionError, with every problem, if the configs of a run differ from the contract."""
    problems = [*_dropped(precision, run), *_against_the_rules(precision, run), *_refused_by_megatron(run)]
    if problems:
        raise PrecisionError(problems)


def _dropped(precision: Precision, run: Run) -> Iterator[Problem]:
    """Yield settings that NeMo dropped because a config has no such field."""
    if not precision.is_quantized:
        return
    for name, value in to_nemo(precision).items():
        field = _MODEL_FIELDS.get(name)
        if field and getattr(run.model, field, None) != value:
            has = f"has {field}={getattr(run.model, field)!r}" if hasattr(run.model, field) else "has no such field"
            yield finding("run-setting-dropped", name, name=name, value=value, config=type(run.model).__name__, has=has)


# Code of a rule -> whether a contract and a run break it.
_RULES: dict[str, Callable[[Precision, Run], bool]] = {
    "run-model-asks-for-fp8": lambda p, run: not p.is_fp8 and bool(getattr(run.model, "fp8", None)),
    "run-model-asks-for-fp4": lambda p, run: p.scaling != "nvfp4" and bool(getattr(run.model, "fp4", None)),
    "layers-all-kept": lambda p, run: p.is_quantized and p.first_layers + p.last_layers >= run.model.num_layers,
    "fp8-param-needs-distributed-optimizer": lambda p, run: (
        p.fp8_param and run.ddp is not None and not _shards_optimizer(run)
    ),
    "run-offloaded-optimizer": lambda p, run: (
        p.fp8_param and p.scaling != "delayed" and bool(getattr(run.optimizer, "optimizer_cpu_offload", False))
    ),
    "run-context-parallel-on-cpu": lambda p, run: (
        (getattr(run.model, "context_parallel_size", 1) or 1) > 1 and not te_cpu.has_gpu()
    ),
    "run-recomputes-bias": lambda p, run: _recomputes(run.model, "mlp") and bool(run.model.add_bias_linear),
    "run-recomputes-attention": lambda p, run: (
        p.scaling == "delayed" and (p.attention or p.multi_head_attention) and _recomputes(run.model, "core_attn")
    ),
    "run-gathers-no-fp8": lambda p, run: bool(getattr(run.ddp, "fp8_param_gather", False)) and not p.fp8_param,
}


def _recomputes(model: Any, part: str) -> bool:
    """Return whether Megatron recomputes this part of every layer by itself; MLPs that are experts it does not."""
    asked = getattr(model, "recompute_granularity", None) == "selective" and part in (model.recompute_modules or ())
    return asked and not (part == "mlp" and getattr(model, "num_moe_experts", None))


def _shards_optimizer(run: Run) -> bool:
    fsdp = any(getattr(run.ddp, name, False) for name in ("use_megatron_fsdp", "use_custom_fsdp"))
    return fsdp or bool(getattr(run.ddp, "use_distributed_optimizer", False))


def _against_the_rules(p: Precision, run: Run) -> Iterator[Problem]:
    said = ("fp8", "fp4", "num_layers", "recompute_modules", "context_parallel_size")
    gaps = {name: getattr(run.model, name, None) for name in said}
    gaps |= {"first": p.first_layers, "last": p.last_layers, "kept": p.first_layers + p.last_layers}
    gaps |= {"compute": p.compute.upper(), "scaling": p.scaling}
    for code, wrong in _RULES.items():
        if wrong(p, run):
            yield finding(code, **gaps)


def _refused_by_megatron(run: Run) -> Iterator[Problem]:
    """Run Megatron's own checks on a copy, since they also fill in defaults, and yield what they refuse."""
    for config in (run.model, run.ddp, run.optimizer):
        again = getattr(config, "__post_init__", None)
        if again is None:
            continue
        try:
            copy.copy(config).__post_init__()
        except (AssertionError, ValueError, NotImplementedError) as error:
            name = type(config).__name__
            yield finding("run-refused-by-megatron", name, config=name, error=str(error) or type(error).__name__)
