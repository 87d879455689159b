"""What a contract demands of a run's configs, checked after NeMo has written over them.

NeMo copies a plugin's settings into the model, optimizer and DDP configs field by field. Megatron's own checks ran when those
configs were made, so nothing looks at the result: a field that a config lacks is dropped, a combination that Megatron refuses
goes through. Here every one of Megatron's checks is run again on a copy of the result, and the rules that Megatron has not got
are rows of a table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.render.nemo import SETTINGS, to_nemo

# The plugin's FP8 arguments under the names that Megatron's model config has for them.
_MODEL_FIELDS = {name: "fp8_param" if name == "fp8_param_gather" else name for name in SETTINGS if name.startswith("fp8")}


@dataclass(frozen=True)
class Run:
    """The three configs of a run, as NeMo's overrides left them; what a run has not got is None."""

    model: Any
    ddp: Any = None
    optimizer: Any = None

    @classmethod
    def of(cls, module: Any) -> Run:
        """The configs of a model chunk and of the strategy that trains it."""
        try:
            strategy = module.trainer.strategy
        except (AttributeError, RuntimeError):  # Lightning's way to say that no trainer is attached
            strategy = None
        return cls(module.config, getattr(strategy, "ddp_config", None), getattr(getattr(module, "optim", None), "config", None))


def require_agreement(precision: Precision, run: Run) -> None:
    """Raise every problem of a run whose configs do not say what the contract says."""
    problems = [*_dropped(precision, run), *_against_the_rules(precision, run), *_refused_by_megatron(run)]
    if problems:
        raise PrecisionError(problems)


def _dropped(precision: Precision, run: Run) -> Iterator[Problem]:
    """Settings that did not arrive: NeMo skips a field that a config has not got."""
    if not precision.is_fp8:
        return
    for name, value in to_nemo(precision).items():
        field = _MODEL_FIELDS.get(name)
        if field and getattr(run.model, field, None) != value:
            has = f"has {field}={getattr(run.model, field)!r}" if hasattr(run.model, field) else "has no such field"
            yield Problem(
                f"{name}={value!r} did not reach the model: {type(run.model).__name__} {has}.",
                "NeMo drops a setting that a config has no field for, and somebody may write over it later.",
                "Use a Megatron-core model config, and do not set FP8 fields on it after the trainer is built.",
            )


# (which contracts and runs are wrong, what, why, remedy)
_Rule = tuple[Callable[[Precision, Run], bool], str, str, str]
_RULES: tuple[_Rule, ...] = (
    (
        lambda p, run: not p.is_fp8 and bool(getattr(run.model, "fp8", None)),
        "The model's config asks for FP8 (fp8={run.model.fp8!r}), and the precision plugin for none.",
        "NeMo's plugin would erase the model's setting, and the run would go on without FP8.",
        "Give an FP8 plugin, such as trainer.plugins=bf16_with_fp8_blockwise_mixed(), and leave fp8 off the model's config.",
    ),
    (
        lambda p, run: bool(getattr(run.model, "fp4", None)),
        "The model's config asks for FP4 (fp4={run.model.fp4!r}).",
        "Megatron runs FP4 or FP8 and drops the other, and this plugin describes no FP4.",
        "Leave fp4 off the model's config, or use NeMo's own plugin for FP4.",
    ),
    (
        lambda p, run: p.is_fp8 and p.first_layers + p.last_layers >= run.model.num_layers,
        "{p.first_layers} + {p.last_layers} layers stay in {p.compute}, and the model has {run.model.num_layers}: none would run in FP8.",
        "Megatron takes the counts as they are, so this run would be {p.compute} under the name of FP8.",
        "Lower num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16, or use a precision without FP8.",
    ),
    (
        lambda p, run: p.fp8_param and run.ddp is not None and not _shards_optimizer(run),
        "FP8 primary weights without the distributed optimizer.",
        "Only Megatron's distributed optimizer (or Megatron FSDP) keeps the FP32 master weights that FP8 weights are cast from.",
        "Set use_distributed_optimizer=True on the optimizer and DDP configs, or fp8_param_gather=False.",
    ),
    (
        lambda p, run: p.fp8_param and p.scaling != "delayed" and bool(getattr(run.optimizer, "optimizer_cpu_offload", False)),
        "FP8 primary weights with {p.scaling} scaling and optimizer_cpu_offload.",
        "Megatron's offloaded optimizer casts FP8 weights for delayed scaling only.",
        "Set optimizer_cpu_offload=False, fp8_param_gather=False, or fp8_recipe='delayed'.",
    ),
    (
        lambda p, run: bool(getattr(run.ddp, "fp8_param_gather", False)) and not p.fp8_param,
        "The DDP config gathers FP8 parameters, and the contract has none.",
        "The gather would carry bytes that nobody wrote.",
        "Leave fp8_param_gather off the DDP config: the plugin sets it.",
    ),
)


def _shards_optimizer(run: Run) -> bool:
    fsdp = any(getattr(run.ddp, name, False) for name in ("use_megatron_fsdp", "use_custom_fsdp"))
    return fsdp or bool(getattr(run.ddp, "use_distributed_optimizer", False))


def _against_the_rules(p: Precision, run: Run) -> Iterator[Problem]:
    for wrong, *texts in _RULES:
        if wrong(p, run):
            yield Problem(*(text.format(p=p, run=run) for text in texts))


def _refused_by_megatron(run: Run) -> Iterator[Problem]:
    """Megatron's own checks, on a copy: they also fill in defaults, which the run's configs have already."""
    for config in (run.model, run.ddp, run.optimizer):
        again = getattr(config, "__post_init__", None)
        if again is None:
            continue
        try:
            copy.copy(config).__post_init__()
        except (AssertionError, ValueError, NotImplementedError) as error:
            yield Problem(
                f"Megatron refuses {type(config).__name__} as the plugin left it.",
                str(error) or type(error).__name__,
                "Change the setting that Megatron names, in the precision factory or in the config.",
            )
