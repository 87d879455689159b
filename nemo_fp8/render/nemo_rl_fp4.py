"""NVFP4 in NeMo RL: one precision, said in five places that nothing there compares.

    policy.megatron_cfg.fp4_cfg                    that training quantizes
    policy.megatron_cfg.te_precision_config_file   which modules do not: attention
    policy.megatron_cfg.first_last_layers_bf16     which layers do not, by their count
    policy.megatron_cfg.env_vars                   how: five variables of TransformerEngine
    policy.generation.nvfp4_pertoken_rollout       that the rollout quantizes experts, and which not, by their names

With one of them missing a run starts and trains something else. A contract says them once (``render``), and
:func:`missing` names what a configuration lacks to have the same weights and activations on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import VARIABLES
from nemo_fp8.contract.yaml import load_mapping
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.findings import finding
from nemo_fp8.render import nemo_rl_keys as keys
from nemo_fp8.render.nemo_rl_keys import section
from nemo_fp8.render.nemo_rl_lists import line_of_name

if TYPE_CHECKING:
    from nemo_fp8.render.nemo_rl_file import Source

# What training has to do so that a forward multiplies what the rollout multiplies, and a backward the forward's codes.
ALIKE: dict[str, Any] = {
    "weight_block": "1x16",
    "row_scaled": True,
    "hadamard": False,
    "stochastic_rounding": False,
    "backward": "dequantized",
}


def is_trained(document: Mapping[str, Any], eight: bool) -> tuple[bool, list[Problem]]:
    """Return whether training runs in NVFP4, and problems with its section; ``eight`` is whether it runs in FP8."""
    said = section(document, "policy", "megatron_cfg", "fp4_cfg")
    known = ("enabled", *keys.FP4_CFG)
    problems = [unknown(f"key in {keys.FP4_TRAINING}:", name, known) for name in said if name not in known]
    if not said.get("enabled"):
        return False, problems
    for name, only in keys.FP4_CFG.items():
        if said.get(name, only) != only:
            problems.append(unknown(f"value for {keys.FP4_TRAINING}.{name}:", said[name], [str(only)]))
    if eight:
        problems.append(
            Problem(
                "policy.megatron_cfg.fp8_cfg and fp4_cfg are both enabled.",
                "Megatron runs one or the other for a model, and NeMo RL refuses both.",
                "Set enabled: false in one; single modules get another recipe by te_precision_config_file.",
            )
        )
    return True, problems


def recipes_beside(source: Source, document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return Megatron's file of recipes that a configuration names; None if it names none.

    NeMo RL looks for it from its own folder. Here it is looked for from the current folder and from those above the
    configuration. Raises PrecisionError if it is in none of them.
    """
    name = section(document, "policy", "megatron_cfg").get(keys.TE_PRECISION)
    if not name:
        return None
    folders = [Path(), *(source.resolve().parents if isinstance(source, Path) else ())]
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        raise PrecisionError(
            f"policy.megatron_cfg.{keys.TE_PRECISION}: there is no file {name}.",
            "It says which modules train by another recipe, so nobody can compare the two sides without it.",
            "Call from the folder that the name starts at, or write the whole path.",
        )
    return load_mapping(path.read_text(encoding="utf-8"), str(path))


def ignored_experts(p: Precision, layers: int | None) -> list[str]:
    """Return the patterns of the experts that stay in BF16: of the first and last layers, and those that are kept.

    Raises PrecisionError if the contract keeps last layers and the number of ``layers`` is unknown.
    """
    if p.last_layers and layers is None:
        raise PrecisionError(
            f"last_layers={p.last_layers} in NeMo RL's NVFP4 rollout.",
            "It takes the numbers of layers, and the last ones depend on the model.",
            "Give the number of decoder layers: render(precision, layers=48), or --layers 48.",
        )
    last = range(layers - p.last_layers, layers) if layers is not None else ()
    numbers = [*range(p.first_layers), *last]
    kept = [pattern for pattern in p.keep if line_of_name(pattern, mx=True, experts=True)]
    return [*(keys.EXPERTS_OF.format(n) for n in numbers), *kept]


def kept_experts(patterns: Sequence[str], layers: int | None = None) -> dict[str, Any]:
    """Return the contract fields of these patterns: layers that are counted from the start and the end, and others.

    Without the number of the model's ``layers`` the highest one of a list is taken for the model's last.
    """
    found = {int(n[1]): pattern for pattern in patterns if (n := keys.EXPERTS_OF_READ.fullmatch(pattern))}
    first = next(n for n in range(len(found) + 1) if n not in found)
    last = len(found) - first
    ending = range(max(found) - last + 1, max(found) + 1) if last else range(0)
    if {*found} != {*range(first), *ending} or (last and layers is not None and ending.stop != layers):
        first, last, found = 0, 0, {}  # no run at the start and at the end: they are names like others
    return {
        "first_layers": first,
        "last_layers": last,
        "keep": tuple(pattern for pattern in patterns if pattern not in found.values()),
    }


def of_model(rollout: Precision) -> Precision:
    """Return the rollout of a model that is known: it leaves every linear in the compute dtype that is no routed
    expert's, also where a list without a model cannot say so."""
    rules = tuple((pattern, rollout.compute) for pattern in keys.NO_EXPERTS)
    return rollout.replace(modules=(*rules, *rollout.modules)) if rollout.rollout == "nvfp4" else rollout


def missing(train: Precision, rollout: Precision) -> list[Problem]:
    """Return a finding for each of the five places that lacks what the others ask for; none without any NVFP4.

    ``train`` and ``rollout`` are the two sides of a configuration, as ``read_nemo_rl`` returns them.
    """
    if "nvfp4" not in (train.scaling, rollout.rollout):
        return []
    return [finding("nemo-rl-nvfp4-missing", key, key=key, wanted=wanted) for key, wanted in _lacks(train, rollout)]


def _lacks(train: Precision, rollout: Precision) -> Iterator[tuple[str, str]]:
    if train.scaling != "nvfp4":
        yield (
            keys.FP4_TRAINING,
            ", ".join(f"{name}: {value}" for name, value in ({"enabled": True} | keys.FP4_CFG).items()),
        )
        return
    if rollout.rollout != "nvfp4":
        yield keys.FP4_ROLLOUT, "enabled: true"
        return
    for name, variable in VARIABLES.items():
        field = variable.contract[0]
        if field in ALIKE and getattr(train, field) != ALIKE[field]:
            yield f"policy.megatron_cfg.env_vars.{name}", str(variable.words[ALIKE[field]])
    if not any(recipe == train.compute for _, recipe in train.modules):
        yield f"policy.megatron_cfg.{keys.TE_PRECISION}", "a file that keeps *.linear_qkv and *.linear_proj in BF16"
    if (train.first_layers, train.last_layers) != (rollout.first_layers, rollout.last_layers):
        if train.first_layers + train.last_layers < rollout.first_layers + rollout.last_layers:
            counts = f"{rollout.first_layers} at the start and {rollout.last_layers} at the end"
            yield "policy.megatron_cfg.first_last_layers_bf16", f"true, with {counts}"
        else:
            ends = {"first": train.first_layers, "last": train.last_layers}
            named = " and ".join(f"the {end} {count}" for end, count in ends.items() if count)
            yield f"{keys.FP4_ROLLOUT}.additional_ignore", f"the experts of {named} layers"
