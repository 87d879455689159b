"""The environment: write ``NVTE_*`` variables as ``export`` lines, to be set before TransformerEngine is imported, and
read what they say.

Software that makes its TE recipe itself (NeMo, Megatron) offers no other way to choose the kind of scales of block and
current scaling, what NVFP4 does beside its blocks, and what the backward multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import SCALE_FIELDS, te_environment, variables_of
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.rendering import Rendering


def render(precision: Precision) -> Rendering:
    """Render the variables as lines for a shell."""
    try:
        variables = te_environment(precision)
    except PrecisionError as error:
        notes = tuple(f"Not said here: {p.what} {p.why} {p.remedy}" for p in error.problems)
        return Rendering("env", "# nothing that the environment can say", {}, notes, SCALE_FIELDS)
    notes = (
        ("To be set before TransformerEngine is imported: it reads them then and never again.",) if variables else ()
    )
    if not variables:
        notes = ("TransformerEngine needs no variable for this contract.",)
    text = "\n".join(f"export {name}={value}" for name, value in variables.items()) or "# nothing to set"
    return Rendering("env", text, dict(variables), notes)


def fields_from_environment(
    scaling: str | None, environment: Mapping[str, str], by_rule: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the contract fields that variables set for a recipe; those that are not set are left out.

    ``by_rule`` are the other recipes, those that rules give to single modules. Their scales follow from the recipe.
    Raises PrecisionError for a value that TransformerEngine would refuse, or take for off without a word, and for
    scales that no rule can say.
    """
    fields: dict[str, Any] = {}
    own = variables_of(scaling)
    others = {name: (variable, recipe) for recipe in by_rule for name, variable in variables_of(recipe).items()}
    for name, variable in (own | {name: variable for name, (variable, _) in others.items()}).items():
        if name not in environment:
            continue
        value = str(environment[name])
        meanings = {word: meaning for meaning, word in variable.words.items() if word is not None}
        if value not in meanings:
            raise PrecisionError(
                f"{name}={value!r}.",
                "TransformerEngine takes '1' for on and everything else for off."
                if "1" in meanings
                else "TransformerEngine refuses every other word.",
                f"Set {name} to {' or '.join(map(repr, sorted(meanings)))}.",
            )
        if name in own or variable.contract != SCALE_FIELDS:
            fields |= dict.fromkeys(variable.contract, meanings[value])
        elif value != variable.default:
            raise PrecisionError(
                f"{name}={value!r} with {others[name][1]} scaling by a rule for modules.",
                f"A rule names a recipe alone, and the scales of this one are {next(iter(variable.words))} then.",
                f"Set {name} to {variable.default!r}, or make {others[name][1]} the scaling of the whole model.",
            )
    return fields
