"""Choose what runs the FP8 GEMMs of a contract on a machine, and refuse before the run what would not run.

    te         TE's kernels on a GPU; raises before anything is built if the machine cannot run them
    emulated   ``nemo_fp8.te_cpu`` on a machine without a GPU: the same code of TE and Megatron, the same codes and
               scales
    auto       ``te`` if there is a GPU, else ``emulated``

The choice is made once, before the model is built, and logged with its reason; it never falls back to BF16. ``require``
asks the table in ``support.py`` about one contract and raises one clear error, so that "FP8 block scaled GEMM requires
Hopper and CUDA >= 12.9" appears at the start and not as an assertion inside of the first step, after the model was
built and the data was read. A trainer chooses an engine. A rollout calls ``require`` for its side, since vLLM chooses
its kernels itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import late_variables, te_environment, unread_variables, variables_of
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.findings import finding
from nemo_fp8.moved import renamed
from nemo_fp8.preflight.answers import Answer, answer
from nemo_fp8.preflight.attention import require_attention
from nemo_fp8.preflight.machine import ABSENT, Machine
from nemo_fp8.preflight.support import EMULATED, EMULATION_SAYS, NATIVE, RECIPES, TRAINING, UNKNOWN

ENGINES = ("auto", "te", "emulated")
ALLOW_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
logger = logging.getLogger("nemo_fp8")

if not TYPE_CHECKING:  # see nemo_fp8.moved
    _TO_LINT = ("bridge_findings", "first_weight_findings", "support_findings")
    __getattr__ = renamed(
        __name__,
        {name: f"nemo_fp8.train.megatron_cpu.{name}" for name in ("hold_cpu", "hold_products")}
        | {name: f"nemo_fp8.preflight.lint.{name}" for name in _TO_LINT},
    )


def choose_engine(precision: Precision, requested: str = "auto", machine: Machine | None = None) -> str | None:
    """Return ``te`` or ``emulated``, or None for a contract without FP8.

    Raises PrecisionError if the requested engine cannot run the contract on this machine.
    """
    if requested not in ENGINES:
        raise PrecisionError([unknown("engine", requested, ENGINES)])
    if not precision.is_quantized:
        return None
    machine = machine or Machine.here(sides=("train",))
    engine = requested if requested != "auto" else "emulated" if machine.has_gpu is False else "te"
    if engine == "emulated" and machine.has_gpu:
        raise PrecisionError(
            f"engine='emulated' on {machine.source}, which has a GPU.",
            "The emulation is TransformerEngine on a CPU that stands in for its GPU, for the whole process.",
            "Leave engine out, or train on a machine without a GPU.",
        )
    reasons = require(precision, machine, sides=("train",), emulate=engine == "emulated")
    _require_te_obeys(precision)
    for recipe, reason in reasons.items():
        why = reason if requested == "auto" else "It was asked for."
        logger.info("FP8 engine for %s: %s. %s", RECIPES[recipe], engine, why)
    if precision.attention or precision.multi_head_attention:
        require_attention(precision, engine, os.environ)
    for warning in (*resume_findings(precision, os.environ), *backward_findings(precision)):
        logger.warning("%s %s %s", warning.what, warning.why, warning.remedy)
    return engine


# ---------------------------------------------------------------------- a contract on a machine


def recipes_of(precision: Precision, sides: Sequence[str] = ("train", "rollout")) -> list[str]:
    """Return the rows of the support table that a contract needs; none for a side in the compute dtype."""
    if precision.modules:
        return list(dict.fromkeys(recipe for p in precision.variants() for recipe in recipes_of(p, sides)))
    found = []
    if "train" in sides and precision.backward_scaling is not None:
        found.append(precision.backward_scaling)
    if "train" in sides and precision.scaling is not None:
        fp32 = precision.scaling == "blockwise" and "fp32" in (precision.weight_scale, precision.activation_scale)
        found.append("blockwise-fp32" if fp32 else precision.scaling)
    if "rollout" in sides:
        if precision.rolls_out_quantized:
            rows = {"1x32": "rollout-mxfp8", "1x16": "rollout-nvfp4", "tensor": "rollout-tensor"}
            found.append(rows.get(precision.rollout_block, "rollout-fp8"))
        if precision.deep_gemm:
            found.append("rollout-deepgemm")
        if precision.kv_cache == "fp8":
            found.append("kv-cache-fp8")
    return found


def require(
    precision: Precision, machine: Machine, *, sides: Sequence[str] = ("train",), emulate: bool = False
) -> dict[str, str]:
    """Return the recipes that the contract needs, each with the reason for which it runs on the machine.

    Raises PrecisionError unless all of them run, natively or, with ``emulate``, by emulation, which has every recipe
    of a training and asks for torch alone. What is unknown is logged and does not stop a run.
    """
    reasons: dict[str, str] = {}
    problems = []
    for recipe in recipes_of(precision, sides):
        if emulate and recipe in TRAINING:
            reasons[recipe] = f"There is no GPU. {EMULATION_SAYS}"
            if machine.torch == ABSENT:
                problems.append(finding("no-torch", "torch"))
            continue
        found = answer(recipe, machine)
        reasons[recipe] = found.reason
        if found.verdict == UNKNOWN:
            logger.warning("%s on %s: %s %s", RECIPES[recipe], machine.source, found.reason, found.remedy)
        elif found.verdict != NATIVE and not (found.verdict == EMULATED and recipe not in TRAINING):
            problems.append(as_finding("refused", found, machine, RECIPES[recipe], precision=precision.name))
    if problems:
        raise PrecisionError(problems)
    return reasons


def as_finding(code: str, found: Answer, machine: Machine, recipe: str, **gaps: str) -> Problem:
    """Return the finding of a code that says an answer; ``recipe`` is its recipe in words, ``gaps`` are the code's."""
    return finding(
        code, found.recipe, recipe=recipe, machine=machine.source, why=found.reason, remedy=found.remedy, **gaps
    )


# ---------------------------------------------------------------------- a contract on TransformerEngine and Megatron


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
            fields = read[name].in_words(precision)
            problems.append(
                Problem(
                    f"{fields}, and this TransformerEngine has no such setting.",
                    f"It does not read {name}, and would train without it.",
                    f"Install a TransformerEngine that reads it (2.20.2 does), or leave {fields} out of the contract.",
                )
            )
    for late in late_variables(wanted, sys.modules):
        if late.where in read:
            value = f"{late.where}={wanted[late.where]}" if late.where in wanted else f"{late.where} unset"
            fields = read[late.where].in_words(precision)
            problems.append(
                Problem(
                    f"{value} is needed for {fields}, and TransformerEngine has another value.",
                    "Megatron makes TE's recipe from defaults that TE read from the environment when it was imported.",
                    f"Have {value} before Python starts, for instance by the executor's env_vars.",
                )
            )
    if problems:
        raise PrecisionError(problems)


def resume_findings(precision: Precision, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what prevents a run under this contract from being resumed."""
    if precision.scaling == "delayed" and environment.get(ALLOW_PICKLE) != "1":
        yield finding("te-delayed-resume", ALLOW_PICKLE)
    if precision.scaling == "delayed" and (precision.attention or precision.multi_head_attention):
        yield finding("attention-resume", "attention")


_BIASED = ("e2m1", (1, 16))  # a weight in a backward whose codes are not the forward's


def backward_findings(precision: Precision) -> Iterator[Problem]:
    """Yield what harms the backward of a run under this contract, or under one of its rules."""
    for p in precision.variants():
        weight = p.in_backward.operand("weight")
        if p.backward == "quantized" and weight is not None and (weight.format, weight.block) == _BIASED:
            yield finding("fp4-backward-1x16", "weight_block")
            return
