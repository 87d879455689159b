"""Megatron-LM: write and read command-line flags.

Flags as in ``megatron/training/arguments.py`` of the core_v0.15 line. Each row of ``FLAGS`` says which of NeMo's
names a flag stands for, so that NeMo's reader checks both, and which field of megatron-core it ends in. Megatron-LM
differs in three ways that this file holds: gradients of BF16 are reduced in FP32 unless ``--grad-reduce-in-bf16``,
the two layer counts are 1 and not 0 by default, and FP8 attention has no flag at all.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.render import nemo, nemo_script
from nemo_fp8.render.rendering import Rendering, lost_fields


@dataclass(frozen=True)
class Flag:
    """One command-line flag: a switch that sets ``value``, or a name whose next word ``parse`` reads."""

    nemo: str
    core: tuple[str, ...]
    """The ``Config.field`` of megatron-core that it sets."""
    value: Any = None
    parse: Callable[[str], Any] | None = None


def _whole(text: str) -> int | float:
    """Read a whole number as int: Megatron reads its window as a float, and a contract counts steps."""
    number = float(text)
    return int(number) if number.is_integer() else number


_MODEL, _OPTIMIZER, _DDP = "TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"

FLAGS: dict[str, Flag] = {
    "--bf16": Flag("precision", (f"{_MODEL}.bf16", f"{_OPTIMIZER}.bf16"), "bf16-mixed"),
    "--fp16": Flag("precision", (f"{_MODEL}.fp16", f"{_OPTIMIZER}.fp16"), "16-mixed"),
    "--accumulate-allreduce-grads-in-fp32": Flag("grad_reduce_in_fp32", (f"{_DDP}.grad_reduce_in_fp32",), True),
    "--grad-reduce-in-bf16": Flag("grad_reduce_in_fp32", (f"{_DDP}.grad_reduce_in_fp32",), False),
    "--fp8-format": Flag("fp8", (f"{_MODEL}.fp8",), parse=str),
    "--fp8-recipe": Flag("fp8_recipe", (f"{_MODEL}.fp8_recipe", f"{_OPTIMIZER}.fp8_recipe"), parse=str),
    "--fp8-margin": Flag("fp8_margin", (f"{_MODEL}.fp8_margin",), parse=int),
    "--fp8-amax-history-len": Flag("fp8_amax_history_len", (f"{_MODEL}.fp8_amax_history_len",), parse=int),
    "--fp8-amax-compute-algo": Flag("fp8_amax_compute_algo", (f"{_MODEL}.fp8_amax_compute_algo",), parse=str),
    "--no-fp8-wgrad": Flag("fp8_wgrad", (f"{_MODEL}.fp8_wgrad",), False),
    "--fp8-param-gather": Flag("fp8_param_gather", (f"{_MODEL}.fp8_param", f"{_DDP}.fp8_param_gather"), True),
    "--reuse-grad-buf-for-mxfp8-param-ag": Flag(
        "reuse_grad_buf_for_mxfp8_param_ag",
        (f"{_OPTIMIZER}.reuse_grad_buf_for_mxfp8_param_ag", f"{_DDP}.reuse_grad_buf_for_mxfp8_param_ag"),
        True,
    ),
    "--first-last-layers-bf16": Flag("first_last_layers_bf16", (f"{_MODEL}.first_last_layers_bf16",), True),
    "--num-layers-at-start-in-bf16": Flag(
        "num_layers_at_start_in_bf16", (f"{_MODEL}.num_layers_at_start_in_bf16",), parse=int
    ),
    "--num-layers-at-end-in-bf16": Flag(
        "num_layers_at_end_in_bf16", (f"{_MODEL}.num_layers_at_end_in_bf16",), parse=int
    ),
    "--loss-scale": Flag("fp16_loss_scale", (f"{_OPTIMIZER}.loss_scale",), parse=float),
    "--initial-loss-scale": Flag("fp16_initial_loss_scale", (f"{_OPTIMIZER}.initial_loss_scale",), parse=float),
    "--min-loss-scale": Flag("fp16_min_loss_scale", (f"{_OPTIMIZER}.min_loss_scale",), parse=float),
    "--loss-scale-window": Flag("fp16_loss_scale_window", (f"{_OPTIMIZER}.loss_scale_window",), parse=_whole),
    "--hysteresis": Flag("fp16_hysteresis", (f"{_OPTIMIZER}.hysteresis",), parse=int),
    "--fp4-format": Flag("fp4", (f"{_MODEL}.fp4",), parse=str),
    "--fp4-recipe": Flag("fp4_recipe", (f"{_MODEL}.fp4_recipe",), parse=str),
}
COUNTS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""NeMo's names for how many layers stay in BF16, of which Megatron itself counts 1 on each side and NeMo 0."""
# An unknown flag with one of these beginnings is misspelt, and not a flag of another part of Megatron.
_OURS = (
    "--fp8",
    "--fp4",
    "--no-fp8",
    "--first-last-layers",
    "--num-layers-at",
    "--reuse-grad-buf",
    "--grad-reduce-in",
    "--accumulate-allreduce",
)
_FOREIGN = ("--fp8-interval", "--fp8-quantizer-factory", "--fp4-quantizer-factory", "--fp4-param-gather")

_REASONS = nemo_script.REASONS | dict.fromkeys(
    ("attention", "multi_head_attention"),
    "Megatron-LM has no flag for FP8 attention; set the field on its TransformerConfig.",
)


def to_megatron(precision: Precision) -> list[str]:
    """Return the flags, one word to an entry."""
    p = precision
    arguments = nemo.to_nemo(p)
    if p.first_layers or p.last_layers:
        arguments |= {"num_layers_at_start_in_bf16": p.first_layers, "num_layers_at_end_in_bf16": p.last_layers}
    if p.grad_reduce == "compute" and p.compute != "bf16":
        del arguments["grad_reduce_in_fp32"]  # Megatron's default for these dtypes
    words: list[str] = []
    for name, flag in FLAGS.items():
        if flag.nemo not in arguments:
            continue
        value = arguments[flag.nemo]
        if flag.parse is not None:
            words += [name, str(value)]
        elif value == flag.value:
            words.append(name)
    return words


def from_megatron(command_line: str | Sequence[str]) -> Precision:
    """Return the contract of a Megatron-LM command line. Flags that are not about precision are skipped.

    Raises PrecisionError for a misspelt flag, or one that Megatron would accept and not obey.
    """
    if isinstance(command_line, str):
        command_line = shlex.split(command_line.replace("\\\n", " "), comments=True)
    words = list(command_line)
    problems = [
        unknown("Megatron-LM flag", name, FLAGS)
        for name in (word.split("=")[0] for word in words)
        if name.startswith(_OURS) and name not in FLAGS and name not in _FOREIGN
    ]
    if problems:
        raise PrecisionError(problems)
    given = dict(_read(words))
    both = {"--bf16", "--fp16"} <= given.keys() or {
        "--accumulate-allreduce-grads-in-fp32",
        "--grad-reduce-in-bf16",
    } <= given.keys()
    if both:
        raise PrecisionError(
            "Two flags that exclude each other.",
            "Megatron-LM computes in one dtype, and reduces gradients in one dtype.",
            "Drop one.",
        )
    arguments = {FLAGS[name].nemo: value for name, value in given.items()}
    arguments.setdefault("precision", "32")
    # Megatron-LM switches FP32 reduction on for BF16.
    arguments.setdefault("grad_reduce_in_fp32", arguments["precision"] == "bf16-mixed")
    if arguments.get("first_last_layers_bf16"):
        arguments = dict.fromkeys(COUNTS, 1) | arguments
    return nemo.from_nemo(arguments)


def _read(words: Sequence[str]) -> Iterable[tuple[str, Any]]:
    ahead = iter(words)
    for word in ahead:
        name, equals, value = word.partition("=")
        flag = FLAGS.get(name)
        if flag is None:
            continue
        if flag.parse is None:
            yield name, flag.value
            continue
        text = value if equals else next(ahead, "")
        try:
            yield name, flag.parse(text)
        except ValueError as error:
            raise PrecisionError(f"{name} {text!r} cannot be read.", f"{error}.", f"Give {name} a number.") from error


def render(precision: Precision) -> Rendering:
    """Render the flags as lines of a shell command."""
    words = to_megatron(precision)
    lost, notes = lost_fields(precision, from_megatron(words), _REASONS, "Megatron-LM")
    if precision.fp8_param:
        notes.append("--fp8-param-gather works with --use-distributed-optimizer (or FSDP) only.")
    lines: list[str] = []
    for word in words:
        if word in FLAGS:
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return Rendering(
        "megatron", " \\\n".join(lines), {"flags": words}, (*notes, *nemo_script.core_defects(precision)), lost
    )
