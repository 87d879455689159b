"""Megatron's file of recipes by module: write and read the YAML behind ``--te-precision-config-file``.

    configs     a name -> the arguments of TransformerEngine's autocast around a module
    matchers    in order, pattern -> config; the first that matches a module's name wins

Megatron-core 0.16 and newer read it (Bridge and NeMo RL hand it over as ``quant_recipe``); 0.15 ignores it. A module
that no pattern matches runs by the recipe of the whole model, and so does one in a layer that stays in the compute
dtype, since a matcher overrides only what is quantized already. The trade-offs are Megatron's: it knows globs alone,
and a recipe by its name alone, so that its fields come from the environment (render to env).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import variables_for
from nemo_fp8.contract.yaml import load_mapping
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.models.one_naming import apart_in_megatron
from nemo_fp8.render.rendering import Rendering, lost_fields

TYPE = "TEQuantizationParams"
_OVERRIDE = {"override_quantized_autocast": True, "override_nonquantized_autocast": False}
_RECIPES = ("tensorwise", "blockwise", "mxfp8")
_CONFIG = ("transformer_engine_config_type", "training_recipe", "evaluation_recipe")
# Settings of Megatron's that a contract has no word for, with what they are by themselves.
_SELDOM = {"custom_recipe_factory": None, "tp_only_amax_red": False}
_REASONS = {
    "backward_scaling": "A module has one recipe for both directions in Megatron; nemo_fp8's own plugin and "
    "bridge_config give the backward its own."
}


def to_te_precision(precision: Precision) -> dict[str, Any]:
    """Return the file's two sections.

    Raises PrecisionError for patterns that Megatron cannot match, or would match with fewer names than the contract.
    """
    refused = [
        Problem(
            f"{pattern!r} in Megatron's file of recipes.",
            "It matches globs and no regular expressions.",
            "Write a glob, such as '*.linear_qkv'.",
        )
        for pattern in (*precision.keep, *(pattern for pattern, _ in precision.modules))
        if pattern.startswith("re:")
    ]
    if not refused and (at := next(apart_in_megatron(precision), None)):
        refused = [
            Problem(
                f"A pattern of keep or modules means {at}, by another name, in Megatron's file of recipes.",
                "Megatron matches its own names alone, and what nothing matches runs by the recipe of the whole model.",
                "Write Megatron's name, such as '*.linear_qkv' for '*.k_proj'.",
            )
        ]
    if refused:
        raise PrecisionError(refused)
    # What ``keep`` names comes first, as it does in the contract.
    rules = [*((pattern, precision.compute) for pattern in precision.keep), *precision.modules]
    return {
        "configs": {recipe: _config(precision, recipe) for recipe in dict.fromkeys(recipe for _, recipe in rules)},
        "matchers": {
            f"rule_{i}": {"config": recipe, "type": "glob", "pattern": pattern, "enabled": True}
            for i, (pattern, recipe) in enumerate(rules)
        },
    }


def _config(p: Precision, recipe: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if recipe == "nvfp4":
        chosen = {"fp4_quantization_recipe": recipe} | _OVERRIDE
    elif recipe != p.compute:
        eight = p.format if p.is_fp8 else "e4m3"
        chosen = {"fp8_quantization_recipe": recipe, "fp8_format": eight} | _OVERRIDE
    return {"transformer_engine_config_type": TYPE, "training_recipe": chosen}


def from_te_precision(
    document: Mapping[str, Any], compute: str = "bf16", element: str | None = None
) -> tuple[tuple[str, str], ...]:
    """Return the rules of a file, as ``modules`` holds them.

    compute    what an empty recipe means
    element    the format of the whole model, which rules for FP8 have, too (``hybrid``); E4M3 if it is none of FP8

    Raises PrecisionError for what Megatron refuses, and for recipes that a contract cannot describe.
    """
    problems = [
        unknown("section of Megatron's file of recipes:", name, ("configs", "matchers"))
        for name in document
        if name not in ("configs", "matchers")
    ]
    eight = element if element in ("hybrid", "e4m3") else "e4m3"
    recipes: dict[str, str] = {}
    for name, config in _entries(document, "configs", problems):
        recipes[name], wrong = _recipe(name, config, compute, eight)
        problems += wrong
    rules = []
    for name, matcher in _entries(document, "matchers", problems):
        if not matcher.get("enabled", False):
            continue
        pattern, chosen = matcher.get("pattern"), str(matcher.get("config"))
        if matcher.get("type") != "glob":
            problems.append(unknown(f"type of the matcher {name}:", matcher.get("type"), ("glob",)))
        elif chosen not in recipes:
            problems.append(unknown(f"config of the matcher {name}:", chosen, recipes))
        elif not isinstance(pattern, str) or not pattern or pattern.startswith("re:"):
            problems.append(
                Problem(
                    f"The matcher {name} has the pattern {pattern!r}.",
                    "Megatron matches names with globs, and with nothing else.",
                    "Write a glob, such as '*.linear_qkv'.",
                )
            )
        else:
            rules.append((pattern, recipes[chosen]))
    if problems:
        raise PrecisionError(problems)
    return tuple(rules)


def _entries(document: Mapping[str, Any], section: str, problems: list[Problem]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the named mappings of a section; what is no mapping becomes a problem."""
    held = document.get(section) or {}
    found = held.items() if isinstance(held, Mapping) else [(section, held)]
    problems += [
        Problem(
            f"{name} in Megatron's file of recipes holds {entry!r}.",
            "Each of its configs and matchers is a name with settings below it.",
            "Write the settings as 'key: value' lines below the name.",
        )
        for name, entry in found
        if not isinstance(entry, Mapping)
    ]
    return [(str(name), entry) for name, entry in found if isinstance(entry, Mapping)]


def _recipe(name: str, config: Mapping[str, Any], compute: str, eight: str) -> tuple[str, list[Problem]]:
    problems: list[Problem] = []
    if config.get("transformer_engine_config_type") != TYPE:
        problems.append(unknown(f"type of the config {name}:", config.get("transformer_engine_config_type"), (TYPE,)))
    problems += [unknown(f"key of the config {name}:", key, _CONFIG) for key in config if key not in _CONFIG]
    chosen = config.get("training_recipe")
    if not isinstance(chosen, Mapping):
        what = f"The config {name} has training_recipe={chosen!r}, and Megatron stops without settings there."
        why = "An empty one, {}, is the compute dtype; so nothing else may stand for it."
        return compute, [*problems, Problem(what, why, "Write training_recipe: {}, or a recipe's settings.")]
    if config.get("evaluation_recipe", chosen) != chosen:
        problems.append(
            Problem(
                f"The config {name} has another recipe for evaluation.",
                "A contract has one precision for training, in training and in evaluation.",
                "Leave evaluation_recipe out.",
            )
        )
    four, eights = chosen.get("fp4_quantization_recipe"), chosen.get("fp8_quantization_recipe")
    problems += _not_obeyed(name, chosen, eight if eights else None)
    if four not in (None, "nvfp4") or eights not in (None, *_RECIPES):
        problems.append(unknown(f"recipe of the config {name}:", four or eights, (*_RECIPES, "nvfp4")))
    return str(four or eights or compute), problems


def _not_obeyed(name: str, chosen: Mapping[str, Any], eight: str | None) -> Iterator[Problem]:
    """Yield settings with which Megatron stops, or a rule would do something else than a contract's; ``eight`` is the
    format of the contract's rules for FP8, None for a rule for something else."""
    known = (*_SELDOM, *_OVERRIDE, "fp4_quantization_recipe", "fp8_quantization_recipe", "fp8_format")
    yield from (unknown(f"setting of the config {name}:", key, known) for key in chosen if key not in known)
    for switch, usual in _OVERRIDE.items():
        if chosen.get(switch, usual) != usual:
            yield Problem(
                f"{switch}={chosen[switch]} in the config {name}.",
                "A contract's rules hold where a layer is quantized, and nowhere else.",
                f"Set {switch}: {str(usual).lower()}; count first and last layers by "
                "num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16.",
            )
    for setting, off in _SELDOM.items():
        if chosen.get(setting, off) != off:
            yield Problem(
                f"{setting}={chosen[setting]!r} in the config {name}.",
                "A contract has no word for it, and its rules would do without.",
                "Leave it out.",
            )
    if chosen.get("fp4_quantization_recipe") and chosen.get("fp8_quantization_recipe"):
        yield Problem(
            f"The config {name} has a recipe for FP4 and one for FP8.",
            "Megatron stops at two.",
            "Leave one of them out.",
        )
    format_ = chosen.get("fp8_format", "e4m3")
    if eight is not None and format_ != eight:
        yield Problem(
            f"fp8_format={format_!r} in the config {name}, in a model whose FP8 is {eight!r}.",
            "A contract has one format for all that is in FP8, and E4M3 beside NVFP4; Megatron takes 'e4m3' where "
            "fp8_format is not given.",
            f"Set fp8_format: {eight}.",
        )


def render(precision: Precision) -> Rendering:
    """Render the file. ``keep`` comes back as rules for the compute dtype, which mean the same."""
    data = to_te_precision(precision)
    text = yaml.safe_dump(data, sort_keys=False)
    rules = from_te_precision(load_mapping(text, "Megatron's file of recipes"), precision.compute, precision.format)
    back = precision.replace(modules=rules[len(precision.keep) :], backward_scaling=None)
    lost, notes = lost_fields(precision, back, _REASONS, "Megatron's file of recipes")
    if variables := [*_beyond_defaults(precision)]:
        notes.append(
            f"TransformerEngine takes {', '.join(variables)} from the environment, which `nemo-fp8 render ... "
            "--to env` writes."
        )
    notes.append("Megatron-core 0.15 (NeMo 2.7.3) ignores the file; nemo_fp8's own plugin obeys the rules there, too.")
    return Rendering("te-precision", text, data, tuple(notes), lost)


def _beyond_defaults(p: Precision) -> Iterator[str]:
    """Yield the settings of the contract's recipes that TransformerEngine does not have by itself."""
    for variable, own in variables_for(p).values():
        for name in variable.contract:
            if variable.words[value := getattr(own, name)] != variable.default:
                yield f"{name}={value!r}"
