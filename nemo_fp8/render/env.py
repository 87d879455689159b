"""The environment: write ``NVTE_*`` variables as ``export`` lines, to be set before TransformerEngine is imported.

Software that makes its TE recipe itself (NeMo, Megatron) offers no other way to choose the kind of scales of block and
current scaling, what NVFP4 does beside its blocks, and what the backward multiplies.
"""

from __future__ import annotations

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import SCALE_FIELDS, te_environment
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
