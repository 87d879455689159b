"""Lint: contract x model x split x machine -> findings, before the run.

A contract refuses contradictions itself; lint reports what is *allowed but probably not meant*: fields that the chosen
recipe ignores, layers that will not run in FP8, settings of Megatron that undo it without a word. Model, split, machine
and environment are optional; without one, its findings are left out and nothing is assumed in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.contract.te_variables import SCALE_FIELDS, variables_for
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.findings import finding, sort
from nemo_fp8.models.governed import overruled, scales_tokens
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.spellings import all_names
from nemo_fp8.preflight.answers import answer
from nemo_fp8.preflight.attention import attention_findings
from nemo_fp8.preflight.doctor import sanity
from nemo_fp8.preflight.engine import as_finding, backward_findings, recipes_of
from nemo_fp8.preflight.machine import ABSENT, Machine
from nemo_fp8.preflight.memory import memory
from nemo_fp8.preflight.shapes import shape_findings
from nemo_fp8.preflight.support import EMULATED, RECIPES, UNKNOWN, UNSUPPORTED

_DELAYED_FIELDS = ("margin", "amax_history_len", "amax_compute_algo")
_LOSS_SCALE_FIELDS = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_ROLLOUT_FIELDS = ("rollout_block", "activation_scheme")
_KEEPING_FIELDS = ("first_layers", "last_layers", "keep")
_NVFP4_FIELDS = (
    *("weight_block", "hadamard", "stochastic_rounding", "row_scaled"),
    *("four_over_six", "four_over_six_error", "four_over_six_bound_256"),
)


def lint(
    settings: Precision | Mapping[str, Any] | str,
    *,
    model: Model | Mapping[str, Any] | str | Path | None = None,
    parallel: Parallel | Mapping[str, Any] | str | None = None,
    machine: Machine | str | None = None,
    environment: Mapping[str, str] | None = None,
    modules: Mapping[str, ModuleType] | None = None,
) -> list[Problem]:
    """Return every finding, errors first. Problems of settings that are no valid contract become findings, too.

    ``settings`` is a contract, its fields, or the name of a preset or of a YAML file. ``model`` is a config.json: its
    path, its folder or its content. ``parallel`` is the layout of ranks (``"tp2,pp2"``), and ``machine`` where it runs
    (``"h100,te2.20.2"``); what is not given is not checked.

    ``environment`` is a mapping such as ``os.environ``, read only if given. With ``modules=sys.modules``, variables
    that were set after TransformerEngine's import are found, too.

    Raises PrecisionError if there is no such model, or a word of ``parallel`` or ``machine`` is unknown.
    """
    try:
        precision = Precision.from_dict(settings) if isinstance(settings, Mapping) else given(settings)
    except PrecisionError as error:
        problems = error.problems
        return [p if p.code else finding("contract", what=p.what, why=p.why, remedy=p.remedy) for p in problems]
    said = Parallel.of(parallel)
    found = Machine.parse(machine) if isinstance(machine, str) else machine
    shapes = model if isinstance(model, Model) or model is None else Model.read(model)
    findings = [*_ignored(precision), *_doubtful(precision, found), *_layout(precision, said)]
    findings += _overruled(precision, shapes)
    if shapes is not None:
        findings += shape_findings(shapes, precision, said, found)
        if parallel is not None and found is not None:
            findings += _fit(shapes, precision, said, found)
    if found is not None:
        findings += support_findings(precision, found)
        findings += sanity(found)
    if environment is not None:
        findings += _environment(precision, environment)
        findings += sanity(Machine(), environment, modules)
    return sort(findings)


# ---------------------------------------------------------------------- the contract


def _ignored(p: Precision) -> Iterator[Problem]:
    """Yield findings for fields that differ from their default although nothing reads them."""
    untouched = Precision(format=p.format, scaling=p.scaling, rollout=p.rollout)
    defaults = {name: default for name, (_, default) in p.diff(untouched).items()}

    def ignored(code: str, names: Iterable[str], **gaps: Any) -> Iterator[Problem]:
        return (finding(code, name, field=name, value=getattr(p, name), **gaps) for name in names if name in defaults)

    def idle(names: Iterable[str]) -> Iterator[Problem]:
        set_in_vain = [n for n in names if n in defaults and _stores_alike(p, {n: defaults[n]})]
        return ignored("ignored-setting", set_in_vain)

    if p.scaling != "delayed":
        yield from ignored("ignored-delayed", _DELAYED_FIELDS, scaling=p.scaling or "no FP8 in training")
    if "nvfp4" not in (p.scaling, p.backward_scaling, *(recipe for _, recipe in p.modules)):
        yield from ignored("ignored-nvfp4", _NVFP4_FIELDS, scaling=p.scaling or "no NVFP4 in training")
    else:
        yield from idle(_NVFP4_FIELDS)
    if p.compute != "fp16":
        yield from ignored("ignored-loss-scale", _LOSS_SCALE_FIELDS, compute=p.compute)
    elif p.loss_scale is not None:
        yield from ignored("ignored-dynamic-loss-scale", _LOSS_SCALE_FIELDS[1:], loss_scale=p.loss_scale)
    if p.rollout == "compute":
        yield from ignored("ignored-rollout", _ROLLOUT_FIELDS)
    if p.scaling == "delayed":
        for name in SCALE_FIELDS:
            if getattr(p, name) == "pow2":
                yield finding("ignored-scales", name, field=name)
    if not p.is_quantized:
        yield from ignored("ignored-setting", ("wgrad",))
    if p.is_quantized or p.rolls_out_quantized:
        yield from idle((*SCALE_FIELDS, "backward_scaling"))
        return
    yield from ignored("ignored-scales-without-fp8", SCALE_FIELDS)
    if kept := [name for name in _KEEPING_FIELDS if name in defaults]:
        yield finding("ignored-layers", kept[0], kept=", ".join(f"{name}={getattr(p, name)!r}" for name in kept))


def _stores_alike(p: Precision, changes: Mapping[str, Any]) -> bool:
    """Return whether a contract stores every operand as it would with other settings, on both sides and by any rule."""

    def stored(p: Precision) -> list[Any]:
        return [
            (one.gemms(), one.operand("weight", "rollout"), one.operand("input", "rollout")) for one in p.variants()
        ]

    try:
        return stored(p.replace(**changes)) == stored(p)
    except PrecisionError:  # it cannot be otherwise
        return False


def _doubtful(p: Precision, machine: Machine | None) -> Iterator[Problem]:
    """Yield findings for settings that are obeyed and do harm."""
    if p.is_quantized and not p.wgrad and not (machine is not None and machine.has_gpu is False):
        yield finding("ignored-wgrad", "wgrad")
    yield from attention_findings(p)
    yield from backward_findings(p)
    if p.rollout == "nvfp4" and p.activation_scheme == "dynamic" and not p.row_scaled:
        yield finding("nvfp4-rollout-activations", "activation_scheme")
    elif scales_tokens(p):
        yield finding("nvfp4-rollout-fixed-scale", "activation_scheme")
    if p.format == "hybrid" and p.scaling in ("mxfp8", "blockwise"):
        yield finding(f"e5m2-gradients-{p.scaling}", "format")
    freezes = p.amax_compute_algo == "max" or p.amax_history_len > 1
    if (
        p.compute == "fp16"
        and p.scaling == "delayed"
        and freezes
        and p.loss_scale is None
        and p.initial_loss_scale > 65536
    ):
        history, algo = p.amax_history_len, p.amax_compute_algo
        yield finding(
            "fp16-delayed-freeze", "initial_loss_scale", scale=p.initial_loss_scale, history=history, algo=algo
        )
    if machine is not None:
        yield from bridge_findings(p, machine)
    if p.rolls_out_quantized and not p.importance_sampling:
        yield finding("rollout-without-correction", "importance_sampling")
    if p.rolls_out_quantized and not p.is_quantized:
        yield finding("bf16-train-fp8-rollout", "rollout", compute=p.compute.upper())


def _overruled(p: Precision, model: Model | None) -> Iterator[Problem]:
    """Yield the rules that decide nothing: of a model's linears, or of any model's."""
    every = None
    if model is not None:
        every = (all_names((f"decoder.layers.{n}.{linear.name}",), linear.experts) for n, linear in model.all_linears())
    for pattern, recipe, before in overruled(p, every):
        yield finding("rule-overruled", "modules", pattern=pattern, recipe=recipe, before=", ".join(before))


# ---------------------------------------------------------------------- the layout, as Megatron takes it


def _layout(p: Precision, parallel: Parallel) -> Iterator[Problem]:
    is_mxfp8_param = p.fp8_param and p.scaling == "mxfp8"
    if is_mxfp8_param and parallel.overlap_param_gather:
        yield finding("mxfp8-overlap-param-gather", "overlap_param_gather")
    if p.fp8_param and parallel.distributed_optimizer is False:
        yield finding("fp8-param-needs-distributed-optimizer", "distributed_optimizer")
    elif is_mxfp8_param and parallel.reuse_grad_buf is False:
        yield finding("mxfp8-param-needs-reuse", "reuse_grad_buf")
    if parallel.reuse_grad_buf and not is_mxfp8_param:
        yield finding("reuse-without-mxfp8-param", "reuse_grad_buf")
    if parallel.expert > 1 and parallel.tensor > 1 and not parallel.sequence_parallel:
        yield finding("experts-need-sequence-parallel", "sequence_parallel")
    if is_mxfp8_param:
        yield finding("fp8-param-saves-nothing", "fp8_param")


def _fit(model: Model, p: Precision, parallel: Parallel, machine: Machine) -> Iterator[Problem]:
    estimate = memory(model, p, parallel, machine)
    if machine.memory and estimate.total > machine.memory:
        need, have = (f"{n / 2**30:.0f} GiB" for n in (estimate.total, machine.memory))
        yield finding("does-not-fit", "memory", need=need, have=have, stage=estimate.stage)


# ---------------------------------------------------------------------- the machine


# Verdict -> the code of its finding; ``native`` has none.
_CODES = {EMULATED: "emulated", UNSUPPORTED: "unsupported", UNKNOWN: "unknown-support"}


def support_findings(precision: Precision, machine: Machine) -> Iterator[Problem]:
    """Yield what a machine makes of the recipes that a contract needs, where it is not all of it."""
    for found in (answer(recipe, machine) for recipe in recipes_of(precision)):
        if found.verdict in _CODES:
            name = RECIPES[found.recipe]
            yield as_finding(_CODES[found.verdict], found, machine, name[0].upper() + name[1:])


def first_weight_findings(precision: Precision) -> Iterator[Problem]:
    """Yield what Megatron does to the first values of weights in FP8."""
    if precision.fp8_param:
        yield finding("cpu-initialization", "use_cpu_initialization")


def bridge_findings(precision: Precision, machine: Machine) -> Iterator[Problem]:
    """Yield what Megatron-Bridge, where it is installed, does to a run under this contract."""
    if precision.fp8_param and machine.bridge not in (None, ABSENT):
        yield finding("bridge-loads-into-fp8", "fp8_param", severity="warning", bridge=f"{machine.bridge} ")


# ---------------------------------------------------------------------- the environment


def _environment(p: Precision, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield findings for variables that make TransformerEngine take other recipes than the contract and its rules."""
    for name, (variable, own) in variables_for(p).items():
        wanted = {variable.words[getattr(own, field)] for field in variable.contract}
        contract = variable.in_words(own)
        if name in environment and wanted != {environment[name]}:
            means = [value for value, word in variable.words.items() if word == environment[name]]
            instead = "".join(f", or set {field}={value!r}" for value in means for field in variable.contract)
            yield finding(
                "environment-against-contract",
                name,
                name=name,
                value=environment[name],
                says=" and ".join(f"{field}={value!r}" for value in means for field in variable.contract) or "no value",
                contract=contract,
                remedy=f"Unset {name}{instead}.",
            )
        elif name not in environment and wanted != {variable.default}:
            value = next(word for word in wanted if word != variable.default)
            yield finding("environment-missing", name, name=name, contract=contract, value=value)
