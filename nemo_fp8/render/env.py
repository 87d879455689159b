"""The environment: write ``NVTE_*`` variables as ``export`` lines, to be set before TransformerEngine is imported.

They choose the kind of scales of TE's block and current scaling, and nothing else. Software that builds its TE recipe
itself (NeMo, Megatron) offers no other way to choose it.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.rendering import Rendering
from nemo_fp8.render.te import VARIABLES, te_environment

_SCALES = ("weight_scale", "activation_scale")


def scale_from_environment(scaling: str | None, variables: Mapping[str, str]) -> str | None:
    """Return ``fp32`` or ``pow2`` if the variables choose TE's scales for ``scaling``, else None."""
    if scaling not in VARIABLES:
        return None
    variable, means = VARIABLES[scaling]
    other = {"fp32": "pow2", "pow2": "fp32"}[means]
    if variable not in variables:
        return None
    value = str(variables[variable])
    if value not in ("0", "1"):
        raise PrecisionError(
            f"{variable}={value!r}.",
            "TransformerEngine takes '1' for on and everything else for off.",
            f"Set {variable} to '0' or '1'.",
        )
    return means if value == "1" else other


def render(precision: Precision) -> Rendering:
    """Render the variables as lines for a shell."""
    try:
        variables = te_environment(precision)
    except PrecisionError as error:
        notes = tuple(f"Not said here: {p.what} {p.why} {p.remedy}" for p in error.problems)
        return Rendering("env", "# nothing that the environment can say", {}, notes, _SCALES)
    notes = (
        ("To be set before TransformerEngine is imported: it reads them then and never again.",) if variables else ()
    )
    if not variables:
        notes = ("TransformerEngine needs no variable for this contract.",)
    text = "\n".join(f"export {name}={value}" for name, value in variables.items()) or "# nothing to set"
    return Rendering("env", text, dict(variables), notes)
