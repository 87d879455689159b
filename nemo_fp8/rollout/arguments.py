"""The arguments that start an engine under a contract, and the environment that must be there before it.

    os.environ.update(environment(precision))
    llm = vllm.LLM(model, **engine_args(precision))

:func:`init_fp8` is the same for those who come from NeMo RL: its signature and its keys, without its patches. It
returns arguments and changes nothing, neither in vLLM nor in this process.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.named import load
from nemo_fp8.render.vllm import options_of_plugin, to_vllm

log = logging.getLogger(__name__)

WORKER = "nemo_fp8.rollout.in_vllm.worker.NemoFp8Worker"


def engine_args(precision: Precision | str, *, activations: str = "kernel", kernel: str = "auto") -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` on a BF16 checkpoint: a contract, or the name of a preset or of a YAML file.

    ``activations="emulated"`` quantizes activations before a kernel that takes BF16 (a CPU's), so that log-probabilities
    show W8A8; ``kernel="decode"`` multiplies with decoded weights, as a CPU without AMX does by itself.
    """
    p = load(precision) if isinstance(precision, str) else precision
    options = options_of_plugin({"activations": activations, "kernel": kernel})
    arguments = to_vllm(p, plugin=True) | {"worker_extension_cls": WORKER}
    if p.rollout == "fp8":
        contradictions = [*_contradicted(environment(p))]
        if contradictions:
            raise PrecisionError(contradictions)
        arguments["hf_overrides"]["quantization_config"] |= options
    return arguments


def environment(precision: Precision | str) -> dict[str, str]:
    """vLLM's variables for this contract, to be set before an engine starts: workers read them when they choose kernels."""
    p = load(precision) if isinstance(precision, str) else precision
    if p.rollout != "fp8":
        return {}
    # With E8M0 scales DeepGEMM would quantize FP32-scaled codes a second time.
    pow2 = p.weight_scale == p.activation_scale == "pow2"
    return {"VLLM_USE_DEEP_GEMM_E8M0": str(int(pow2))} | ({"VLLM_USE_DEEP_GEMM": "1"} if p.deep_gemm else {})


def init_fp8(vllm_cfg: Mapping[str, Any], model_name: str, model_parallel_size: int) -> dict[str, Any]:
    """NeMo RL's ``init_fp8``: its ``vllm_cfg`` as engine arguments. Unknown keys are errors, its older ones are read.

    ``model_name`` is looked at where it is a folder: a checkpoint in FP8 already, or fewer layers than are to stay in
    BF16, are refused here and not minutes later. ``model_parallel_size`` is NeMo RL's; blocks under tensor parallelism
    need no setting, since each worker cuts its own.
    """
    import yaml

    from nemo_fp8.render.nemo_rl import ignored_by_nemo_rl, read_nemo_rl

    text = yaml.safe_dump({"policy": {"generation": {"vllm_cfg": _plain(vllm_cfg)}}})
    _, rollout = read_nemo_rl(text)
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
    for problem in ignored_by_nemo_rl(text):
        log.warning("%s Here it is read as it was meant; NeMo RL itself would ignore it.", problem.what)
    _check_model(Path(model_name), rollout)
    return engine_args(rollout)


def _contradicted(wanted: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(
            f"{name}={os.environ[name]} in the environment.",
            f"This contract needs {name}={value}, and vLLM's workers will read what is there.",
            "os.environ.update(nemo_fp8.rollout.environment(precision)) before the engine starts, or unset it.",
        )
        for name, value in wanted.items()
        if os.environ.get(name, value) != value
    ]


def _check_model(folder: Path, p: Precision) -> None:
    config = folder / "config.json"
    if not config.is_file():
        return  # a name on the Hub: vLLM will fetch it
    said = json.loads(config.read_text())
    if "quantization_config" in said:
        raise PrecisionError(
            f"{folder} is a quantized checkpoint.",
            f"Its config.json names quant_method={said['quantization_config'].get('quant_method')!r}; FP8 is made from BF16 weights here.",
            "Start vLLM on it without further arguments, or give the BF16 checkpoint.",
        )
    layers = (said.get("text_config") or said).get("num_hidden_layers")
    if layers is not None and p.first_layers + p.last_layers > layers:
        raise PrecisionError(
            f"{p.first_layers} first and {p.last_layers} last layers in BF16, of {layers}.",
            f"{folder} has no more, so nothing would be in FP8.",
            "Lower num_first_layers_in_bf16 or num_last_layers_in_bf16.",
        )


def _plain(value: Any) -> Any:
    """Mappings and lists of any kind (OmegaConf's) as dict and list, which YAML can write."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return [_plain(inner) for inner in value] if listed else value
