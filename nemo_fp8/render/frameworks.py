"""Hold what the renderers of verl, SkyRL, slime and TRL share: the sources that were read, one rendering of two sides.

None of the four was run here: their keys were read from their sources, which ``SOURCES`` names, and verl's, SkyRL's and
TRL's own classes read what is rendered for them in ``tests/render/test_peers.py``. Each has FP8 rollouts
of its own, described by the contract fields that they imply. An FP8 rollout is written if the contract's is one of
them; else it is left out and named as lost, since a rollout with other blocks or scales is no better than one in BF16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_fp8.contract import ROLLOUT_FIELDS, Precision
from nemo_fp8.contract.te_variables import variables_of
from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.preflight import agreement
from nemo_fp8.render import nemo_script
from nemo_fp8.render.rendering import Rendering, lost_fields
from nemo_fp8.render.settings import Setting, read

# Settings of vLLM, and of the importance weights of an RL loop, for which frameworks have keys of their own.
KV_CACHE = Setting("kv_cache", "auto", {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"})
LINEAR_BACKEND = Setting("deep_gemm", "auto", {"auto": False, "deep_gemm": True})
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
"""The dtypes that verl and slime train in: their word -> the contract's."""
IMPORTANCE = Setting("importance_sampling", None, {None: False, "token": True, "sequence": True})


@dataclass(frozen=True)
class Commit:
    """The state of a repository from which a framework's keys were read."""

    repository: str
    commit: str
    date: str
    release: str = ""
    """A release on PyPI that has the same keys."""


SOURCES: dict[str, Commit] = {
    "verl": Commit("verl-project/verl", "1dda039b", "2026-08-22", "0.9.1"),
    "skyrl": Commit("NovaSky-AI/SkyRL", "00127619", "after 2026-08-21", "0.4.0"),
    "slime": Commit("THUDM/slime", "624b824a", "2026-08-21"),
    "trl": Commit("huggingface/trl", "f2cd5771", "2026-07-24", "1.16.0"),
}

# An FP8 rollout as DeepSeek's checkpoints have it: all linears of all layers but routers, activations by 1x128.
BLOCKS_OF_128: dict[str, Any] = {
    "rollout_block": "128x128",
    "weight_scale": "fp32",
    "activation_scale": "fp32",
    "activation_scheme": "dynamic",
    "first_layers": 0,
    "last_layers": 0,
    "keep": (),
    "modules": (),
}
MEGATRON = "megatron"
"""The trainer that verl and SkyRL have to be told to take: by themselves they train with FSDP."""
COMMON_REASONS = {
    "strict": "It fails in the first step on a shape that FP8 cannot hold.",
    "keep": "Its training keeps whole layers at the ends only, and no modules by name.",
    "modules": "It has no key for Megatron's file of recipes (render to te-precision), and its own FP8 rollout is one "
    "for every linear.",
    "backward_scaling": "Megatron has one recipe for both directions.",
    **dict.fromkeys(
        (name for variable in variables_of("nvfp4").values() for name in variable.contract if name != "backward"),
        "Said of NVFP4, which only the rules that are not said here give to a module.",
    ),
}


def differing(precision: Precision, rollout: Mapping[str, Any]) -> list[str]:
    """Return the contract's settings that a framework's own FP8 rollout does not have."""
    return [f"{name}={getattr(precision, name)!r}" for name, has in rollout.items() if getattr(precision, name) != has]


def rollout_reasons(why: str) -> dict[str, str]:
    """Return one reason for every field of the rollout's weights and activations."""
    return dict.fromkeys((*(f for f in ROLLOUT_FIELDS if f != "importance_sampling"), *BLOCKS_OF_128), why)


def why_not_blocks_of_128(side: str, precision: Precision) -> dict[str, str]:
    """Return reasons for what is lost of a rollout where a framework has ``BLOCKS_OF_128`` and nothing else in FP8."""
    other = differing(precision, BLOCKS_OF_128)
    if precision.rollout != "fp8" or not other:
        return rollout_reasons(f"Said of quantized operands, and {side} has none to say it of here.")
    return rollout_reasons(
        f"{side}'s FP8 rollout has 128x128 blocks with FP32 scales for every linear but routers; here it would need "
        f"{', '.join(other)}. Change that, or push with nemo_fp8's Refit into an engine of its own."
    )


def require_compute(framework: str, precision: Precision, dtypes: Mapping[str, str], why: str) -> None:
    """Raise PrecisionError if a framework cannot compute in the contract's dtype at all."""
    if precision.compute not in dtypes.values():
        raise PrecisionError(
            f"compute={precision.compute!r} in {framework}.",
            why,
            f"Set compute={next(iter(dtypes.values()))!r}, or render to nemo or bridge.",
        )


def require_megatron(framework: str, key: str, given: Mapping[str, Any]) -> None:
    """Raise PrecisionError if settings choose another trainer than Megatron, which takes none of Megatron's keys."""
    if (chosen := given.get(key, MEGATRON)) != MEGATRON:
        raise PrecisionError(
            f"{key}={chosen!r} in {framework}.",
            f"Megatron's settings are for its Megatron trainer: {framework}'s others train in the compute dtype.",
            f"Set {key}={MEGATRON}, or check the rollout alone.",
        )


def read_settings(
    framework: str, settings: Mapping[str, Setting], given: Mapping[str, Any], others: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the contract fields that given settings set. Raises PrecisionError for unknown keys and values."""
    known = (*settings, *others)
    problems = [unknown(f"{framework} setting", name, known) for name in given if name not in known]
    fields, wrong = read(settings, {name: value for name, value in given.items() if name in settings})
    if problems or wrong:
        raise PrecisionError([*problems, *wrong])
    return fields


def rendering_of(
    to: str,
    side: str,
    precision: Precision,
    text: str,
    data: dict[str, Any],
    back: tuple[Precision, Precision],
    reasons: Mapping[str, str],
    notes: Iterable[str] = (),
) -> Rendering:
    """Make the rendering of a text whose two sides were read back as ``back``: training, and rollout."""
    lost, found = lost_fields(precision, agreement.merge(*back), reasons, side)
    return Rendering(to, text, data, (*found, *notes, *nemo_script.core_defects(precision)), lost)
