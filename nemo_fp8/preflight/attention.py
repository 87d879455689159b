"""FP8 attention of a contract: what Megatron hands on of it, and who computes it on a machine without a GPU.

TransformerEngine computes it in cuDNN's kernel on a GPU. On a CPU its unfused attention rounds what that kernel holds
in FP8, where a variable of TransformerEngine's allows it, as ``nemo_fp8.te_cpu`` does unless it is set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.findings import finding

EMULATE_ATTENTION = "NVTE_UnfusedDPA_Emulate_FP8"
ATTENTION_SAYS = (
    "TransformerEngine's unfused attention rounds to FP8 what cuDNN's kernel holds in it on a GPU; where that kernel "
    "rounds while it adds up is not known."
)
_ATTENTION_OF = {"delayed": ("attention", "multi_head_attention"), "tensorwise": ("attention",)}
"""Which fields of FP8 attention Megatron hands to TransformerEngine's recipe. Its configs have both for every one."""
logger = logging.getLogger("nemo_fp8")


def ignored_attention(precision: Precision) -> tuple[str, ...]:
    """Return the fields of FP8 attention that Megatron keeps from TransformerEngine's recipe (0.15.3 and 0.16.1)."""
    wanted = [name for name in ("attention", "multi_head_attention") if getattr(precision, name)]
    return tuple(name for name in wanted if name not in _ATTENTION_OF.get(precision.scaling or "", ()))


def attention_findings(precision: Precision, **changes: str) -> Iterator[Problem]:
    """Yield what a contract says of attention that Megatron ignores."""
    if names := ignored_attention(precision):
        yield finding(
            "ignored-attention",
            names[0],
            on=" and ".join(f"{name}=True" for name in names),
            off=", ".join(f"{name}=False" for name in names),
            scaling=precision.scaling,
            **changes,
        )


def require_attention(precision: Precision, engine: str, environment: Mapping[str, str]) -> None:
    """Say who computes the FP8 attention of a contract. Raises PrecisionError where Megatron would not ask for it, and
    on a CPU where TransformerEngine was told not to round it itself."""
    problems = [*attention_findings(precision, severity="error")]
    if engine == "emulated" and environment.get(EMULATE_ATTENTION, "1") != "1":
        problems.append(
            Problem(
                f"FP8 attention without a GPU, and {EMULATE_ATTENTION}={environment[EMULATE_ATTENTION]}.",
                "On a CPU TransformerEngine's own rounding is the only FP8 attention there is: the first forward would "
                "end in 'No dot product attention backend is available'.",
                f"Set {EMULATE_ATTENTION}=1, or leave it unset; or set fp8_dot_product_attention=False and "
                "fp8_multi_head_attention=False.",
            )
        )
    if problems:
        raise PrecisionError(problems)
    if engine == "emulated":
        logger.info("FP8 attention: emulated. %s", ATTENTION_SAYS)
