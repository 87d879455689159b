"""Make the arguments that start an engine under a contract, and the environment that it needs.

    os.environ.update(environment(precision))
    llm = vllm.LLM(model, **engine_args(precision))

:func:`init_fp8` does the same for NeMo RL, with the signature and the keys of NeMo RL's function and without its
patches. It returns arguments and changes nothing, neither in vLLM nor in this process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.preflight.answers import answer
from nemo_fp8.preflight.engine import require
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.preflight.support import ROUNDED, UNSUPPORTED
from nemo_fp8.render.vllm import PLUGIN, options_of_plugin, to_plugin, to_vllm

log = logging.getLogger(__name__)

WORKER = "nemo_fp8.rollout.engine.worker.NemoFp8Worker"
EXECUTOR = "nemo_fp8.rollout.engine.executor.SleepingExecutor"


def engine_args(
    precision: Precision | str,
    *,
    activations: str = "kernel",
    kernel: str = "auto",
    unquantized: str = "packed",
    machine: Machine | str | None = None,
) -> dict[str, Any]:
    """Return keyword arguments for ``vllm.LLM`` on a BF16 checkpoint.

    ``precision`` is a contract, or the name of a preset or of a YAML file. ``activations="emulated"`` quantizes
    activations before a kernel that takes BF16 (a CPU's), so that log-probabilities are those of W8A8.
    ``kernel="codes"`` multiplies in FP32, with the codes themselves for a few tokens, as a CPU without AMX does anyway;
    ``"decode"`` decodes a weight for any number of tokens. ``unquantized="rows"`` multiplies with weights in BF16 as
    they lie in a checkpoint, where vLLM packs them for a CPU: a push then writes them in place. ``machine`` is where
    the engine will run, a :class:`Machine` or its words; if not given, :func:`engine_machine` finds it if it can.

    A CPU for which vLLM has no FP8 KV cache gets one in BF16, with keys and values rounded to FP8. On a CPU the engine
    sleeps while its workers compute (``distributed_executor_backend``).

    Raises PrecisionError if vLLM cannot do this on ``machine``, or the environment contradicts the contract.
    """
    p = given(precision)
    where = Machine.parse(machine) if isinstance(machine, str) else machine or engine_machine()
    if where is not None:
        # Without DeepGEMM vLLM takes another kernel, and logs it: no reason to refuse.
        require(p.replace(deep_gemm=False), where, sides=("rollout",))
    rounded = p.kv_cache == "fp8" and where is not None and answer("kv-cache-fp8", where).way == ROUNDED
    if rounded and not p.rolls_out_quantized:
        raise PrecisionError(
            "kv_cache='fp8' with generation in the compute dtype, on a CPU without AVX-512.",
            "vLLM has no FP8 cache there, and it is nemo_fp8's quantization that rounds keys and values instead.",
            "Set kv_cache='auto', or rollout='fp8'.",
        )
    options = options_of_plugin(
        {
            "activations": activations,
            "kernel": kernel,
            "unquantized": unquantized,
            "cache": "rounded" if rounded else "auto",
        }
    )
    arguments = to_vllm(p.replace(kv_cache="auto") if rounded else p, plugin=True) | {"worker_extension_cls": WORKER}
    if unquantized == "rows" and not p.rolls_out_quantized:
        arguments |= {"quantization": PLUGIN, "hf_overrides": {"quantization_config": to_plugin(p)}}
    if "hf_overrides" in arguments:
        contradictions = [*_contradicted(environment(p))]
        if contradictions:
            raise PrecisionError(contradictions)
        arguments["hf_overrides"]["quantization_config"] |= options
    if where is not None and where.has_gpu is False and _has_workers():
        arguments["distributed_executor_backend"] = EXECUTOR
    return arguments


def _has_workers() -> bool:
    """Return whether engines of this process compute in worker processes; with this variable of vLLM's they do it
    here."""
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"


def engine_machine() -> Machine | None:
    """Return this machine if vLLM's CPU build is installed here; else None, as the engine may run elsewhere."""
    here = Machine.here(sys.executable)
    return here.without_gpu() if here.vllm_cpu else None


def environment(precision: Precision | str) -> dict[str, str]:
    """Return vLLM's environment variables for a contract. Set them before an engine starts.

    Workers read them when they choose kernels. Raises PrecisionError if there is no such preset or file.
    """
    p = given(precision)
    if p.rollout != "fp8":
        return {}
    # With E8M0 scales DeepGEMM would quantize FP32-scaled codes a second time.
    pow2 = p.weight_scale == p.activation_scale == "pow2"
    return {"VLLM_USE_DEEP_GEMM_E8M0": str(int(pow2))} | ({"VLLM_USE_DEEP_GEMM": "1"} if p.deep_gemm else {})


def init_fp8(vllm_cfg: Mapping[str, Any], model_name: str, model_parallel_size: int) -> dict[str, Any]:
    """Return engine arguments for NeMo RL's ``vllm_cfg``, its older keys included.

    ``model_name`` is checked if it is a folder, so that a wrong checkpoint fails here and not minutes later.
    ``model_parallel_size`` is there for NeMo RL's signature; no setting depends on it.

    Raises PrecisionError for unknown keys, a precision other than FP8, or what :func:`check_model` refuses.
    """
    from nemo_fp8.render.nemo_rl import ignored_by_nemo_rl, read_nemo_rl

    document = {"policy": {"generation": {"vllm_cfg": _plain(vllm_cfg)}}}
    _, rollout = read_nemo_rl(document)
    if rollout.rollout != "fp8":
        raise PrecisionError(
            f"init_fp8 with precision={vllm_cfg.get('precision')!r}.",
            "NeMo RL calls it for an FP8 rollout only.",
            "Set policy.generation.vllm_cfg.precision to 'fp8', or leave init_fp8 out.",
        )
    if model_parallel_size < 1:
        raise PrecisionError(
            f"model_parallel_size={model_parallel_size}.",
            "It counts the workers of one engine.",
            "Give tensor times pipeline parallel size.",
        )
    for problem in ignored_by_nemo_rl(document):
        log.warning("%s Here it is read as it was meant; NeMo RL itself would ignore it.", problem.what)
    check_model(model_name, rollout)
    return engine_args(rollout)


def _contradicted(wanted: Mapping[str, str]) -> list[Problem]:
    """Return a problem for every variable that the environment sets to another value."""
    return [
        Problem(
            f"{name}={os.environ[name]} in the environment.",
            f"This contract needs {name}={value}, and vLLM's workers will read what is there.",
            "os.environ.update(nemo_fp8.rollout.environment(precision)) before the engine starts, or unset it.",
        )
        for name, value in wanted.items()
        if os.environ.get(name, value) != value
    ]


def check_model(model: Path | str, p: Precision) -> None:
    """Raise PrecisionError if the config.json of a checkpoint shows that it cannot run under a contract, or here.

    It is quantized already, vLLM has no kernel for its FP8 on this machine, or all its layers would stay in BF16. So it
    does for a path where nothing is, which vLLM would take for a name on the Hub.
    """
    folder = Path(model)
    if not folder.exists() and (len(folder.parts) > 2 or str(model).startswith(("/", ".", "~"))):
        raise PrecisionError(
            f"There is no folder {folder}.",
            "A name on the Hub is an owner and a model, and this is a path.",
            "Check the path; a shell writes out ~ if it is not quoted.",
        )
    config = folder / "config.json"
    if not config.is_file():
        return  # a name on the Hub, which vLLM will download
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrecisionError(f"{config} cannot be read.", f"{error}.", "Copy or download the folder again.") from error
    quantized = said.get("quantization_config")
    if quantized and p.rolls_out_quantized:
        raise PrecisionError(
            f"{folder} is a quantized checkpoint.",
            f"Its config.json names quant_method={quantized.get('quant_method')!r}; codes are made from BF16 "
            "weights here.",
            instead_of_codes(),
        )
    if quantized and _in_fp8_blocks(quantized) and (why := _unread()):
        raise PrecisionError(f"{folder} is a checkpoint in FP8, which vLLM cannot run on this machine.", *why)
    layers = (said.get("text_config") or said).get("num_hidden_layers")
    if p.rolls_out_quantized and layers is not None and p.first_layers + p.last_layers >= layers:
        raise PrecisionError(
            f"{p.first_layers} first and {p.last_layers} last layers in BF16, of {layers}.",
            f"{folder} has no more, so nothing would be quantized.",
            "Lower num_first_layers_in_bf16 or num_last_layers_in_bf16.",
        )


def instead_of_codes() -> str:
    """Return the remedy for a checkpoint with FP8 codes where BF16 weights are wanted."""
    unread = _unread()
    return (
        unread[1]
        if unread
        else "Start vLLM on it without quantization= and hf_overrides=, or give the BF16 checkpoint."
    )


def _unread() -> tuple[str, str] | None:
    """Return why vLLM cannot run a checkpoint in FP8 blocks on this machine, and the remedy.

    None if it can, or if nobody knows where the engine will run.
    """
    machine = engine_machine()
    found = answer("rollout-checkpoint", machine) if machine else None
    return (found.reason, found.remedy) if found and found.verdict == UNSUPPORTED else None


def _in_fp8_blocks(said: Mapping[str, Any]) -> bool:
    """Return whether a ``quantization_config`` says FP8 in blocks, as DeepSeek or compressed-tensors write it."""
    groups = (said.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    return bool(said.get("weight_block_size")) or any(
        w.get("type") == "float" and w.get("strategy") == "block" for w in weights
    )


def _plain(value: Any) -> Any:
    """Return mappings and lists of any kind (OmegaConf's) as dicts and lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return [_plain(inner) for inner in value] if listed else value
