"""SkyRL: write and read the overrides of its command line, for training by Megatron and rollout by vLLM.

There are two ways to an FP8 rollout. ``fp8_weight_sync_mode`` quantizes in the trainer and sends codes, for the model
families that SkyRL has a table of, all linears but its own exceptions; it is written if the contract asks for no more.
For everything else SkyRL sends BF16 through vLLM's own reload, where our plugin quantizes every layer again, so
``engine_init_kwargs`` names it. The scales of training and those of the first way's weights come from one variable that
SkyRL hands to its workers; stock vLLM scales the activations beside them in FP32.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import FP32_BLOCK_SCALES, te_environment
from nemo_fp8.render import frameworks, overrides, vllm
from nemo_fp8.render.env import fields_from_environment
from nemo_fp8.render.rendering import Rendering
from nemo_fp8.render.settings import Setting, same, write

TRAINER = "trainer.strategy"
_MEGATRON, _ENGINE = "trainer.policy.megatron_config", "generator.inference_engine"
_DTYPES = {"bfloat16": "bf16"}

SECTIONS: dict[str, str] = {
    "TransformerConfig": f"{_MEGATRON}.transformer_config_kwargs",
    "OptimizerConfig": f"{_MEGATRON}.optimizer_config_kwargs",
    "DistributedDataParallelConfig": f"{_MEGATRON}.ddp_config",
}
SETTINGS: dict[str, Setting] = {
    f"{_ENGINE}.model_dtype": Setting("compute", "bfloat16", _DTYPES),
    f"{_ENGINE}.engine_init_kwargs.kv_cache_dtype": frameworks.KV_CACHE,
    f"{_ENGINE}.engine_init_kwargs.linear_backend": frameworks.LINEAR_BACKEND,
    "trainer.algorithm.off_policy_correction.tis_ratio_type": frameworks.IMPORTANCE,
}
MODE = f"{_ENGINE}.fp8_weight_sync_mode"
QUANTIZATION = f"{_ENGINE}.engine_init_kwargs.quantization"
PLUGIN = f"{_ENGINE}.engine_init_kwargs.hf_overrides.quantization_config"
# The correction needs the rollout's own log-probabilities: 0 of them beside the token's.
LOG_PROBS = "generator.sampling_params.logprobs"
_BACKEND = f"{_ENGINE}.engine_init_kwargs.linear_backend"
# What each of SkyRL's own ways implies, the first with FP32 scales asked for by its variable.
MODES: dict[str, dict[str, Any]] = {
    "blockwise": frameworks.BLOCKS_OF_128,
    "mxfp8": frameworks.BLOCKS_OF_128 | {"rollout_block": "1x32", "weight_scale": "pow2", "activation_scale": "pow2"},
}

_REASONS = {
    **frameworks.rollout_reasons("Said of quantized operands, and SkyRL has none to say it of here."),
    **frameworks.COMMON_REASONS,
    "modules": "Its training has no key for Megatron's file of recipes (render to te-precision). Its rollout obeys "
    "them where nemo_fp8's plugin quantizes it, and then holds other values than training does.",
    "fp8_param": "SkyRL takes FP8 primary weights with blockwise scaling and FP32 scales only.",
}


def to_skyrl(precision: Precision) -> dict[str, Any]:
    """Return ``{dotted key: value}`` for a contract. Raises PrecisionError for a dtype that SkyRL does not train in."""
    p = precision
    frameworks.require_compute("SkyRL", p, _DTYPES, "Its Megatron optimizer is built for BF16 and for nothing else.")
    trained = p if _has_fp8_weights(p) else p.replace(fp8_param=False)
    said = write(SETTINGS, p)
    if not p.deep_gemm:
        del said[_BACKEND]
    said[LOG_PROBS] = 0 if p.importance_sampling else None
    return {TRAINER: frameworks.MEGATRON} | overrides.to_overrides(trained, SECTIONS) | said | _rollout(p)


def environment(precision: Precision) -> dict[str, str]:
    """Return the variables to export before SkyRL starts."""
    wire = {FP32_BLOCK_SCALES: "1"} if _rollout(precision)[MODE] == "blockwise" else {}
    return wire | te_environment(precision)


def _has_fp8_weights(p: Precision) -> bool:
    return p.scaling == "blockwise" and p.weight_scale == p.activation_scale == "fp32"


def _rollout(p: Precision) -> dict[str, Any]:
    if p.rollout != "fp8":
        return {MODE: None}
    mode = next((mode for mode, implied in MODES.items() if not frameworks.differing(p, implied)), None)
    if mode is not None:
        return {MODE: mode}
    plugin = {f"{PLUGIN}.{name}": value for name, value in vllm.to_plugin(p).items()}
    return {MODE: None, QUANTIZATION: vllm.PLUGIN} | plugin


def read_skyrl(given: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[Precision, Precision]:
    """Return the training side and the rollout side of these overrides and variables, each as a contract.

    Raises PrecisionError for settings that no contract says, and for another trainer than Megatron.
    """
    plugin = {key.removeprefix(f"{PLUGIN}."): value for key, value in given.items() if key.startswith(f"{PLUGIN}.")}
    frameworks.require_megatron("SkyRL", TRAINER, given)
    ours = (TRAINER, MODE, QUANTIZATION, LOG_PROBS, *(f"{PLUGIN}.{name}" for name in plugin))
    known = (*overrides.keys(SECTIONS), *ours)
    modes = {
        MODE: Setting("rollout", None, same(None, *MODES)),
        QUANTIZATION: Setting("rollout", None, same(None, vllm.PLUGIN)),
    }
    fields = frameworks.read_settings("SkyRL", SETTINGS, given, known)
    frameworks.read_settings("SkyRL", modes, {key: given[key] for key in modes if given.get(key) is not None})
    train = overrides.from_overrides(given, SECTIONS, fields.get("compute", "bf16"))
    train = train.replace(**fields_from_environment(train.scaling, variables))
    rollout: dict[str, Any] = {"rollout": "compute"}
    if (mode := given.get(MODE)) is not None:
        rollout = {"rollout": "fp8"} | MODES[mode]
        if mode == "blockwise":
            rollout["weight_scale"] = fields_from_environment("blockwise", variables).get("weight_scale", "fp32")
    elif given.get(QUANTIZATION) == vllm.PLUGIN:
        rollout = {"rollout": "fp8"} | vllm.from_plugin(plugin)
    return train, Precision(**rollout | fields)


def render(precision: Precision) -> Rendering:
    """Render the variables as ``export`` lines, and the overrides as lines of a command."""
    values, variables = to_skyrl(precision), environment(precision)
    notes = []
    if values[MODE] is not None:
        notes.append("fp8_weight_sync_mode takes the models of SkyRL's own table (Qwen3.5 and others), and no other.")
    elif precision.rollout == "fp8":
        notes.append("Needs nemo_fp8 installed beside SkyRL's vLLM, whose reload has it quantize each layer of a sync.")
    if precision.is_quantized:
        notes.append("Give trainer.ref.megatron_config the same keys if the loss has a reference model.")
    exports = [f"export {name}={value}" for name, value in variables.items()]
    words = [shlex.quote(f"{name}={overrides.hydra(value)}") for name, value in values.items()]
    text = "\n".join([*exports, " \\\n".join(words)])
    data = {"overrides": values, "environment": variables}
    back = read_skyrl(values, variables)
    return frameworks.rendering_of("skyrl", "SkyRL", precision, text, data, back, _REASONS, notes)
