"""Choose what runs the FP8 GEMMs of a run, below TransformerEngine's Python; never fall back to BF16.

    te         TE's kernels on a GPU; raises before anything is built if the machine cannot run them
    emulated   ``nemo_fp8.te_cpu`` on a machine without a GPU: the same code of TE and Megatron, the same codes and
               scales
    auto       ``te`` if there is a GPU, else ``emulated``

The choice is made once, before the model is built, and logged with its reason.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import te_environment, variables_of
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.findings import finding
from nemo_fp8.preflight.doctor import (
    backward_findings,
    late_variables,
    recipes_of,
    require,
    resume_findings,
    unread_variables,
)
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.preflight.support import RECIPES, answer

ENGINES = ("auto", "te", "emulated")
logger = logging.getLogger("nemo_fp8")


def choose_engine(precision: Precision, requested: str = "auto", machine: Machine | None = None) -> str | None:
    """Return ``te`` or ``emulated``, or None for a contract without FP8.

    Raises PrecisionError if the requested engine cannot run the contract on this machine.
    """
    if requested not in ENGINES:
        raise PrecisionError([unknown("engine", requested, ENGINES)])
    if not precision.is_quantized:
        return None
    machine = machine or Machine.here()
    engine = requested if requested != "auto" else "emulated" if machine.has_gpu is False else "te"
    if engine == "emulated" and machine.has_gpu:
        raise PrecisionError(
            f"engine='emulated' on {machine.source}, which has a GPU.",
            "The emulation is TransformerEngine on a CPU that stands in for its GPU, for the whole process.",
            "Leave engine out, or train on a machine without a GPU.",
        )
    require(precision, machine, sides=("train",), emulate=engine == "emulated")
    _require_te_obeys(precision)
    if engine == "emulated" and (precision.attention or precision.multi_head_attention):
        raise PrecisionError(
            "FP8 attention on a machine without a GPU.",
            "TransformerEngine computes attention scores in FP8 inside cuDNN's fused kernel, which has no counterpart "
            "on a CPU.",
            "Set fp8_dot_product_attention=False and fp8_multi_head_attention=False, or train on a GPU.",
        )
    for answered in (answer(recipe, machine) for recipe in recipes_of(precision, sides=("train",))):
        reason = answered.reason if requested == "auto" else "It was asked for."
        logger.info("FP8 engine for %s: %s. %s", RECIPES[answered.recipe], engine, reason)
    for found in (*resume_findings(precision, os.environ), *backward_findings(precision)):
        logger.warning("%s %s %s", found.what, found.why, found.remedy)
    return engine


def hold_cpu(contexts: ExitStack, precision: Precision) -> None:
    """Without a GPU, let Megatron run on the CPU until ``contexts`` close, whichever accelerator the Trainer has."""
    from nemo_fp8 import te_cpu

    if not te_cpu.has_gpu():
        from nemo_fp8.train.megatron_cpu import megatron_on_cpu

        contexts.enter_context(megatron_on_cpu())
    hold_products(contexts, precision)


def hold_products(contexts: ExitStack, precision: Precision) -> None:
    """Without a GPU, let products of a contract in FP16 run on what is fastest here, until ``contexts`` close."""
    from nemo_fp8 import te_cpu

    if precision.compute == "fp16" and not te_cpu.has_gpu():
        from nemo_fp8.numerics.bf16 import fp16_products

        contexts.enter_context(fp16_products())


def _require_te_obeys(precision: Precision) -> None:
    """Raise PrecisionError for a setting that TransformerEngine would accept and ignore."""
    problems = []
    if not precision.wgrad:
        problems.append(finding("ignored-wgrad", "wgrad", severity="error"))
    wanted = te_environment(precision)
    # With a backward of its own, and by a rule for modules, a linear is given its recipe, which needs no variable.
    read = {} if precision.backward_scaling else variables_of(precision.scaling)
    for name in unread_variables(wanted, sys.modules):
        if name in read:
            fields = " and ".join(f"{field}={getattr(precision, field)!r}" for field in read[name].contract)
            problems.append(
                Problem(
                    f"{fields}, and this TransformerEngine has no such setting.",
                    f"It does not read {name}, and would train without it.",
                    f"Install a TransformerEngine that reads it (2.20.2 does), or leave {fields} out of the contract.",
                )
            )
    for late in late_variables(wanted, sys.modules):
        if late.where in read:
            fields = " and ".join(f"{name}={getattr(precision, name)!r}" for name in read[late.where].contract)
            value = f"{late.where}={wanted[late.where]}" if late.where in wanted else f"{late.where} unset"
            problems.append(
                Problem(
                    f"{value} is needed for {fields}, and TransformerEngine has another value.",
                    "Megatron makes TE's recipe from defaults that TE read from the environment when it was imported.",
                    f"Have {value} before Python starts, for instance by the executor's env_vars.",
                )
            )
    if problems:
        raise PrecisionError(problems)
