"""The three configs of megatron-core, as verl and SkyRL take them: one section of overrides for each config.

    section of TransformerConfig               fp8, fp8_recipe, fp8_margin, first_last_layers_bf16, ...
    section of OptimizerConfig                 fp8_recipe, loss_scale, ...
    section of DistributedDataParallelConfig   grad_reduce_in_fp32, fp8_param_gather, ...

The table of Megatron-LM's flags says which field belongs to which config; FP8 attention has a field and no flag.
NeMo's reader checks what is read. The trade-off: a setting that two configs hold is written twice, as Megatron has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.render import nemo
from nemo_fp8.render.megatron import COUNTS, FLAGS

_WITHOUT_A_FLAG = {
    name: (f"TransformerConfig.{name}",) for name in ("fp8_dot_product_attention", "fp8_multi_head_attention")
}
# NeMo's name -> the fields that it ends in. The compute dtype has another key in each framework.
FIELDS: dict[str, tuple[str, ...]] = {
    flag.nemo: flag.core for flag in FLAGS.values() if flag.core and flag.nemo != "precision"
} | _WITHOUT_A_FLAG
# Frameworks set another loss scale than Megatron, so an FP16 contract says all of it.
_LOSS_SCALE = tuple(name for name in FIELDS if name.startswith("fp16_"))


def to_overrides(precision: Precision, sections: Mapping[str, str]) -> dict[str, Any]:
    """Return ``{section.field: value}`` for a contract's training; ``sections`` names one for each config."""
    p = precision
    arguments = nemo.to_nemo(p)
    if p.compute == "fp16":
        said = {name: getattr(p, nemo.SETTINGS[name].field) for name in _LOSS_SCALE}
        arguments |= {name: value for name, value in said.items() if value is not None}
    if p.first_layers or p.last_layers:  # Megatron's own counts are 1, NeMo's 0
        arguments |= {name: getattr(p, nemo.SETTINGS[name].field) for name in COUNTS}
    return {key: arguments[name] for name, core in FIELDS.items() if name in arguments for key in _keys(core, sections)}


def from_overrides(given: Mapping[str, Any], sections: Mapping[str, str], compute: str) -> Precision:
    """Return the contract of a training with these overrides; a field that is not given has NeMo's default.

    ``given`` may hold other keys, which are skipped. Raises PrecisionError if two configs say one setting differently,
    and for what Megatron would accept and not obey.
    """
    arguments: dict[str, Any] = {"precision": nemo.SETTINGS["precision"].write(compute)}
    problems = []
    for name, core in FIELDS.items():
        said = {key: given[key] for key in _keys(core, sections) if key in given}
        if not said:
            continue
        arguments[name], *others = said.values()
        if any(value != arguments[name] for value in others):
            problems.append(
                Problem(
                    f"{' and '.join(f'{key}={value!r}' for key, value in said.items())} contradict each other.",
                    "Megatron keeps this setting in two of its configs, and obeys each in its own place.",
                    "Give both the same value.",
                )
            )
    if problems:
        raise PrecisionError(problems)
    return nemo.from_nemo(arguments)


def keys(sections: Mapping[str, str]) -> tuple[str, ...]:
    """Return every key that these sections can hold."""
    return tuple(dict.fromkeys(key for core in FIELDS.values() for key in _keys(core, sections)))


def _keys(core: tuple[str, ...], sections: Mapping[str, str]) -> list[str]:
    return [f"{sections[config]}.{field}" for config, _, field in (name.partition(".") for name in core)]


def hydra(value: Any) -> str:
    """Write a value as an override of Hydra's, or of another reader of YAML: a text of digits stays a text."""
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
