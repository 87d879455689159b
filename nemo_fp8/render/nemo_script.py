"""NeMo 2.7.3: show the plugin of a contract as a script has it, and say what stock NeMo and Megatron do not do of it.

The arguments are ``nemo.py``'s, which our own plugin takes, too. This file holds what somebody is told who gives them
to NeMo's plugin: the fields that it has no word for, and the settings that it accepts and does not obey.
"""

from __future__ import annotations

from collections.abc import Iterable

from nemo_fp8.contract import ROLLOUT_FIELDS, Precision
from nemo_fp8.contract.te_variables import VARIABLES
from nemo_fp8.preflight.attention import ignored_attention
from nemo_fp8.render.nemo import from_nemo, to_nemo
from nemo_fp8.render.rendering import Rendering, lost_fields, python_call

REASONS = {
    **dict.fromkeys(
        ROLLOUT_FIELDS, "NeMo's plugin speaks of training only; render to nemo-rl or vllm for the rollout."
    ),
    **dict.fromkeys(
        tuple(dict.fromkeys(name for variable in VARIABLES.values() for name in variable.contract)),
        "NeMo leaves it to TransformerEngine: set the environment (render to env) before it starts.",
    ),
    "modules": "Megatron takes recipes by module from a file (render to te-precision).",
    "backward_scaling": "Megatron has one recipe for both directions; nemo_fp8's own plugin has two.",
    "keep": "Stock NeMo keeps whole layers at the ends only; nemo_fp8's own plugin keeps modules by name.",
    "strict": "Stock NeMo fails in the first step on a shape that FP8 cannot hold; nemo_fp8's own plugin checks "
    "before it.",
}


def render(precision: Precision) -> Rendering:
    """Render the plugin as a ``run.Config`` to paste into a NeMo 2 script."""
    arguments = to_nemo(precision)
    lost, notes = lost_fields(precision, from_nemo(arguments), REASONS, "NeMo's plugin")
    imports = "import nemo_run as run\nimport torch\nfrom nemo.lightning import MegatronMixedPrecision\n\n"
    text = imports + "plugin = " + python_call("run.Config", arguments, first=["MegatronMixedPrecision"])
    return Rendering("nemo", text, arguments, (*notes, *_defects(precision)), lost)


def _defects(p: Precision) -> Iterable[str]:
    """Yield what stock NeMo 2.7.3 does differently from what its own arguments say."""
    if p.compute == "fp16":
        yield (
            "Stock NeMo 2.7.3 never multiplies the FP16 loss by its scale, so FP16 does not train; nemo_fp8's own "
            "plugin does."
        )
    if p.scaling == "mxfp8" and p.fp8_param:
        yield "Stock NeMo 2.7.3 destroys these weights under overlap_param_gather; nemo_fp8's own plugin repairs it."
    yield from core_defects(p)


def core_defects(p: Precision) -> Iterable[str]:
    """Yield what megatron-core 0.15.3 does differently from what its own configs say."""
    if p.is_quantized and not p.wgrad:
        yield "fp8_wgrad=False is ignored by Megatron with TransformerEngine 2.0 and newer."
    if ignored_attention(p):
        yield (
            f"megatron-core does not hand this FP8 attention to TransformerEngine's {p.scaling} recipe, and it "
            "stays off."
        )
