"""verl: write and read the overrides of its command line, for training by Megatron and rollout by vLLM.

Training is Megatron's own configs under ``override_*_config``; TransformerEngine's scales are a variable of Ray's
runtime environment. The rollout's FP8 is ``rollout.quantization: fp8``: 128x128 blocks, FP32 scales, every linear but
routers. verl sends weights into the running engine past vLLM's reload, so its own quantization is the only one that
survives a step: a rollout that needs our plugin is named as lost.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import VARIABLES, te_environment
from nemo_fp8.render import frameworks, overrides
from nemo_fp8.render.env import fields_from_environment
from nemo_fp8.render.rendering import Rendering
from nemo_fp8.render.settings import Setting, write

TRAINER = "model_engine"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# Where verl takes overrides of Megatron's configs; those of the reference model follow the actor's.
SECTIONS: dict[str, str] = {
    "TransformerConfig": f"{_ACTOR}.megatron.override_transformer_config",
    "OptimizerConfig": f"{_ACTOR}.optim.override_optimizer_config",
    "DistributedDataParallelConfig": f"{_ACTOR}.megatron.override_ddp_config",
}
ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"
SETTINGS: dict[str, Setting] = {
    f"{_ACTOR}.megatron.dtype": Setting("compute", "bfloat16", frameworks.DTYPES),
    f"{_ROLLOUT}.dtype": Setting("compute", "bfloat16", frameworks.DTYPES),
    f"{_ROLLOUT}.quantization": Setting("rollout", None, {None: "compute", "fp8": "fp8"}),
    f"{_ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype": frameworks.KV_CACHE,
    f"{_ROLLOUT}.engine_kwargs.vllm.linear_backend": frameworks.LINEAR_BACKEND,
    "algorithm.rollout_correction.rollout_is": frameworks.IMPORTANCE,
}
# The correction needs the rollout's own log-probabilities.
LOG_PROBS = f"{_ROLLOUT}.calculate_log_probs"
_BACKEND = f"{_ROLLOUT}.engine_kwargs.vllm.linear_backend"


def to_verl(precision: Precision) -> dict[str, Any]:
    """Return ``{dotted key: value}`` for a contract. Raises PrecisionError for a dtype that verl does not train in."""
    p = precision
    frameworks.require_compute(
        "verl", p, frameworks.DTYPES, "Its Megatron engine takes bfloat16 and float16 and no other dtype."
    )
    said = write(SETTINGS, p)
    if frameworks.differing(p, frameworks.BLOCKS_OF_128):
        said[f"{_ROLLOUT}.quantization"] = None
    if not p.deep_gemm:
        del said[_BACKEND]  # older vLLMs know no such argument
    environment = {f"{ENVIRONMENT}.{name}": value for name, value in te_environment(p).items()}
    trainer = {TRAINER: frameworks.MEGATRON}
    return trainer | overrides.to_overrides(p, SECTIONS) | environment | said | {LOG_PROBS: p.importance_sampling}


def read_verl(given: Mapping[str, Any]) -> tuple[Precision, Precision]:
    """Return the training side and the rollout side of these overrides, each as a contract.

    Raises PrecisionError for settings that no contract says, and for another trainer than Megatron.
    """
    variables = {f"{ENVIRONMENT}.{name}": name for name in VARIABLES}
    known = (TRAINER, *overrides.keys(SECTIONS), *variables, LOG_PROBS)
    frameworks.require_megatron("verl", TRAINER, given)
    fields = frameworks.read_settings("verl", SETTINGS, given, known)
    train = overrides.from_overrides(given, SECTIONS, fields.get("compute", "bf16"))
    environment = {name: given[key] for key, name in variables.items() if key in given}
    train = train.replace(**fields_from_environment(train.scaling, environment))
    quantized = fields.get("rollout") == "fp8"
    return train, Precision(**{"rollout": "compute"} | fields | (frameworks.BLOCKS_OF_128 if quantized else {}))


def render(precision: Precision) -> Rendering:
    """Render the overrides as lines of a command; ``++`` adds a key or takes the place of one, and the trainer is a
    choice among files of verl's."""
    data = to_verl(precision)
    notes = ["For verl's Megatron engine and vLLM; its FSDP engine trains in the compute dtype only."]
    words = (f"{'' if name == TRAINER else '++'}{name}={overrides.hydra(value)}" for name, value in data.items())
    text = " \\\n".join(map(shlex.quote, words))
    reasons = frameworks.why_not_blocks_of_128("verl", precision) | frameworks.COMMON_REASONS
    return frameworks.rendering_of("verl", "verl", precision, text, data, read_verl(data), reasons, notes)
