"""Who runs the FP8 GEMMs of a run: TransformerEngine, or the emulation. Never BF16 in silence.

    te         TE runs them; a machine that cannot is refused before anything is built
    emulated   ``nemo_fp8.numerics`` computes the same codes and scales, with GEMMs in BF16 or FP32
    auto       TE where this machine supports the recipe, else emulation. Where the hardware could and the installed software
               cannot (CUDA too old, TE missing), that is a warning with the remedy: such a run is several times slower.

The choice is made once, before the model is built, and said in the log with its reason.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.doctor import late_variables, recipes_of, require
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.machine import Machine
from nemo_fp8.render.te import te_environment
from nemo_fp8.support import EMULATED, RECIPES, UNSUPPORTED, answer

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
    te_can = not any(found.verdict in (EMULATED, UNSUPPORTED) for found in answers)
    engine = requested if requested != "auto" else "te" if te_can else "emulated"
    require(precision, machine, sides=("train",), emulate=engine == "emulated")
    if engine == "te":
        _require_te_obeys(precision)
    for found in answers:
        could = requested == "auto" and found.verdict == UNSUPPORTED
        reason = found.reason if requested == "auto" else "It was asked for."
        remedy = f" {found.remedy}" if could else ""
        logger.log(logging.WARNING if could else logging.INFO, "FP8 engine for %s: %s. %s%s", RECIPES[found.recipe], engine, reason, remedy)
    return engine


def hold_engine(contexts: ExitStack, precision: Precision, engine: str | None) -> None:
    """Enter what a run needs for as long as it lasts: the CPU in place of a GPU where there is none, and the emulation."""
    import torch

    if not torch.cuda.is_available():
        _hold_cpu(contexts)
        if precision.compute == "fp16":
            from nemo_fp8.numerics.bf16 import fp16_products

            contexts.enter_context(fp16_products())
    if engine == "emulated":
        from nemo_fp8.train.emulated import emulated_fp8

        contexts.enter_context(emulated_fp8(precision))


def _hold_cpu(contexts: ExitStack) -> None:
    """Megatron on the CPU, for a Trainer whose accelerator has not seen to it (``accelerator="cpu"``)."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from nemo_fp8.train.megatron_cpu import is_megatron_on_cpu, megatron_on_cpu

    if is_megatron_on_cpu():
        return
    contexts.enter_context(megatron_on_cpu())
    if parallel_state.model_parallel_is_initialized():
        # NeMo seeds Megatron's random streams before the model is built, and only where it sees a device.
        tensor_parallel.model_parallel_cuda_manual_seed(torch.initial_seed())


def require_emulated(model: Any) -> None:
    """Refuse a model that holds linears of TransformerEngine's: they would compute in BF16, whatever was asked for."""
    from nemo_fp8.numerics.selection import is_te

    chunks = model if isinstance(model, (list, tuple)) else [model]
    theirs = [name for chunk in chunks for name, module in chunk.named_modules() if is_te(module) and "Linear" in type(module).__name__]
    if theirs:
        raise PrecisionError(
            f"FP8 is emulated, and {theirs[0]} is TransformerEngine's.",
            "The emulation changes Megatron's own linears; those of TE would compute in BF16 without a word.",
            "Build the model from Megatron's local layer spec, or set engine='te' on a machine that supports the recipe.",
        )


def keep_modules(model: Any, precision: Precision) -> None:
    """Tell the emulated linears that the contract keeps by name to stay in the compute dtype."""
    if not (precision.is_fp8 and precision.keep):
        return
    from megatron.core import parallel_state

    from nemo_fp8.train.emulated import Fp8ColumnParallelLinear, Fp8RowParallelLinear
    from nemo_fp8.train.monitor import linear_names

    named = linear_names(model)  # layers are counted over all pipeline stages, as a person counts them
    linears = {name: module for name, module in named.items() if isinstance(module, (Fp8ColumnParallelLinear, Fp8RowParallelLinear))}
    kept = [name for name in linears if precision.keeps(name)]
    for name in kept:
        linears[name].keep = True
    alone = not parallel_state.model_parallel_is_initialized() or parallel_state.get_pipeline_model_parallel_world_size() == 1
    if not kept and alone:  # another pipeline stage may hold what is meant
        raise PrecisionError(
            f"keep={list(precision.keep)} names no linear of this model.",
            "A pattern that matches nothing is a typing error, or is meant for another model.",
            f"Its linears have names such as {', '.join(list(linears)[:3])!r}.",
        )


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
    wanted = te_environment(precision)
    problems += [
        Problem(
            f"{late.where}={wanted[late.where]} is needed for {precision.weight_scale} scales, and TransformerEngine has another value.",
            "Megatron makes TE's recipe from defaults that TE read from the environment when it was imported.",
            f"Set {late.where}={wanted[late.where]} before Python starts, for instance in the executor's env_vars.",
        )
        for late in late_variables(wanted, sys.modules)
        if late.where in wanted
    ]
    if problems:
        raise PrecisionError(problems)
