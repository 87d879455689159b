"""TRL: write and read the arguments of ``GRPOConfig`` and the flags of ``trl vllm-serve``.

TRL trains in the compute dtype and generates with vLLM, in a server of its own or in the trainer's process. The source
that was read passes neither a quantization nor arguments of the user's to vLLM (``vllm_llm_kwargs`` was a pull
request), so FP8 cannot be expressed, except for the KV cache of a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import frameworks, nemo, nemo_script
from nemo_fp8.render.rendering import Rendering, python_call
from nemo_fp8.render.settings import Setting, same, write

# GRPOConfig's two switches for the compute dtype, and what both off mean.
_COMPUTE = {("bf16",): "bf16", ("fp16",): "fp16", (): "fp32"}
CONFIG: dict[str, Setting] = {
    "vllm_importance_sampling_correction": Setting("importance_sampling", True, same(True, False))
}
SERVER: dict[str, Setting] = {
    "dtype": Setting("compute", "auto", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}),
    "kv_cache_dtype": frameworks.KV_CACHE,
}
# Accelerate scales an FP16 loss by torch's GradScaler, with torch's defaults; there is no key for them in GRPOConfig.
_GRAD_SCALER = {"initial_loss_scale": 65536.0, "loss_scale_window": 2000, "hysteresis": 1}

_ROLLOUT = (
    "TRL hands vLLM no quantization: its pull requests 6816 and 7085 (vllm_llm_kwargs), in no release up to 1.16.0, "
    "would hand it vLLM's own 'fp8'. Push with nemo_fp8's Refit into an engine of its own."
)
_TRAINING = "TRL trains in the compute dtype. Train FP8 by NeMo, Megatron-Bridge, verl, SkyRL or slime."
_REASONS = {
    **frameworks.rollout_reasons(_ROLLOUT),
    **dict.fromkeys((*nemo_script.REASONS, *(setting.field for setting in nemo.SETTINGS.values())), _TRAINING),
    **dict.fromkeys(("rollout", "rollout_block", "activation_scheme", "deep_gemm"), _ROLLOUT),
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "Accelerate scales the loss by torch's GradScaler, with torch's defaults.",
    ),
    "grad_reduce": "TRL keeps FP32 weights, whose gradients are FP32.",
    "strict": "Nothing runs in FP8 there.",
}


def to_trl(precision: Precision) -> dict[str, dict[str, Any]]:
    """Return the arguments of ``GRPOConfig`` and the flags of the server, under TRL's names."""
    on = next(switches for switches, compute in _COMPUTE.items() if compute == precision.compute)
    switches = {name: name in on for name in ("bf16", "fp16")}
    served = {"use_vllm": True, "vllm_mode": "server"}
    return {"config": switches | served | write(CONFIG, precision), "server": write(SERVER, precision)}


def read_trl(config: Mapping[str, Any], server: Mapping[str, Any]) -> tuple[Precision, Precision]:
    """Return the training side and the rollout side of these arguments and flags, each as a contract.

    Raises PrecisionError for settings that no contract says, and for two dtypes.
    """
    others = ("bf16", "fp16", "use_vllm", "vllm_mode")
    fields = frameworks.read_settings("GRPOConfig", CONFIG, config, others)
    on = tuple(name for name in ("bf16", "fp16") if config.get(name))
    if on not in _COMPUTE:
        raise PrecisionError(
            "bf16=True and fp16=True in GRPOConfig.", "Layers compute in exactly one dtype.", "Set one of them."
        )
    compute = _COMPUTE[on]
    train: dict[str, Any] = {"compute": compute} | (_GRAD_SCALER if compute == "fp16" else {})
    served = frameworks.read_settings("trl vllm-serve", SERVER, server)
    return Precision(**train), Precision(**{"compute": compute, "rollout": "compute"} | served | fields)


def render(precision: Precision) -> Rendering:
    """Render the config as a Python call, and the server's flags as a command in a comment."""
    data = to_trl(precision)
    flags = " ".join(f"--{name} {value}" for name, value in data["server"].items())
    call = python_call("GRPOConfig", data["config"])
    text = f"from trl import GRPOConfig\n\n# trl vllm-serve --model MODEL {flags}\ntraining_args = {call}"
    return frameworks.rendering_of("trl", "TRL", precision, text, data, read_trl(**data), _REASONS)
