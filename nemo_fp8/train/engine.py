"""Who runs the FP8 GEMMs of a run: TransformerEngine, or the emulation. Never BF16 in silence.

    te         TE runs them; a machine that cannot is refused before anything is built
    emulated   ``nemo_fp8.numerics`` computes the same codes and scales, with GEMMs in BF16 or FP32
    auto       TE where this machine supports the recipe. Emulation where its hardware never could. Where the hardware could and
               the installed software cannot (CUDA too old, TE missing), the run is refused: a person who has such a GPU wants
               to know, and did not ask for a run several times slower.

The choice is made once, before the model is built, and said in the log with its reason.
"""

from __future__ import annotations

import logging

from nemo_fp8.contract import Precision
from nemo_fp8.doctor import recipes_of, require
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.machine import Machine
from nemo_fp8.support import EMULATED, RECIPES, answer

ENGINES = ("auto", "te", "emulated")
logger = logging.getLogger("nemo_fp8")


def choose_engine(precision: Precision, requested: str = "auto", machine: Machine | None = None) -> str | None:
    """``te`` or ``emulated``; None for a contract without FP8. Raises where the contract cannot be carried out as asked."""
    if requested not in ENGINES:
        raise PrecisionError([unknown("engine", requested, ENGINES)])
    if not precision.is_fp8:
        return None
    machine = machine or Machine.here()
    answers = [answer(recipe, machine) for recipe in recipes_of(precision, sides=("train",))]
    hardware_cannot = any(found.verdict == EMULATED for found in answers)
    engine = requested if requested != "auto" else "emulated" if hardware_cannot else "te"
    require(precision, machine, sides=("train",), emulate=engine == "emulated")
    if engine == "te":
        _require_te_obeys(precision)
    reasons = " ".join(found.reason for found in answers) if requested == "auto" else "It was asked for."
    recipes = " and ".join(RECIPES[found.recipe] for found in answers)
    logger.info("FP8 engine for %s: %s. %s", recipes, engine, reasons)
    return engine


def _require_te_obeys(precision: Precision) -> None:
    """Refuse what TransformerEngine would take and not do."""
    ignored = (
        (
            not precision.wgrad,
            "wgrad=False (fp8_wgrad=False) on TransformerEngine.",
            "TE 2.0 and newer run the weight-gradient GEMM in FP8 whatever Megatron asks for.",
            "Set fp8_wgrad=True, or engine='emulated'.",
        ),
        (
            bool(precision.keep),
            f"keep={list(precision.keep)} on TransformerEngine.",
            "Megatron opens TE's autocast around whole layers and knows no names, so these modules would run in FP8.",
            "Keep whole layers (num_layers_at_start_in_bf16, num_layers_at_end_in_bf16), or set engine='emulated'.",
        ),
    )
    problems = [Problem(*texts) for wrong, *texts in ignored if wrong]
    if problems:
        raise PrecisionError(problems)
