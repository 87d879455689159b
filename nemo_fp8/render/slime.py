"""slime: write and read the flags of its command line, for training by Megatron and rollout by SGLang.

Megatron-LM's flags are slime's own. SGLang's have the prefix ``--sglang-``. The rollout's FP8 is no flag: it is the
``quantization_config`` of the checkpoint behind ``--hf-checkpoint``, by which slime quantizes every push. Two things
differ from Megatron-LM: block scales of training are FP32 unless ``--train-env-vars`` says otherwise, and a push obeys
``weight_block_size`` and nothing else of the config, neither ``scale_fmt`` nor ``modules_to_not_convert``.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import FP32_BLOCK_SCALES, te_environment
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import frameworks, megatron, vllm
from nemo_fp8.render.env import fields_from_environment
from nemo_fp8.render.rendering import Rendering
from nemo_fp8.render.settings import Setting, write

SETTINGS: dict[str, Setting] = {
    "--sglang-dtype": Setting("compute", "auto", frameworks.DTYPES),
    "--sglang-kv-cache-dtype": Setting("kv_cache", "auto", {"auto": "auto", "fp8_e4m3": "fp8"}),
    "--sglang-fp8-gemm-backend": frameworks.LINEAR_BACKEND,
}
CORRECTION = "--use-tis"
VARIABLES = "--train-env-vars"
CHECKPOINT = "--hf-checkpoint"
# What slime gives to the training's processes unless --train-env-vars gives another.
_VARIABLES = {FP32_BLOCK_SCALES: "1"}
_BACKEND = "--sglang-fp8-gemm-backend"

_REASONS = frameworks.COMMON_REASONS | dict.fromkeys(
    ("attention", "multi_head_attention"), "Megatron-LM has no flag for FP8 attention, and slime none of its own."
)


def to_slime(precision: Precision) -> list[str]:
    """Return the flags, one word to an entry. Raises PrecisionError for a dtype that slime does not train in."""
    p = precision
    frameworks.require_compute("slime", p, frameworks.DTYPES, "It trains in BF16 wherever --fp16 is not given.")
    said = write(SETTINGS, p)
    if not p.deep_gemm:
        del said[_BACKEND]  # older SGLangs know no such flag
    words = [*megatron.to_megatron(p), *(word for pair in said.items() for word in pair)]
    if variables := te_environment(p):
        words += [VARIABLES, json.dumps(variables)]
    return [*words, CORRECTION] if p.importance_sampling else words


def checkpoint_config(precision: Precision) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of the rollout's checkpoint; None for one that is not quantized."""
    if precision.rollout != "fp8" or frameworks.differing(precision, frameworks.BLOCKS_OF_128):
        return None
    return vllm.to_hugging_face(precision)


def read_slime(command_line: str | Sequence[str], checkpoint: Mapping[str, Any] | None) -> tuple[Precision, Precision]:
    """Return the training side and the rollout side of slime's flags and of the checkpoint's quantization_config.

    Flags that are not about precision are skipped. Raises PrecisionError for values that no contract says.
    """
    if isinstance(command_line, str):
        command_line = shlex.split(command_line.replace("\\\n", " "), comments=True)
    words = list(command_line)
    train = megatron.from_megatron(words)
    values = dict(itertools.pairwise(words))
    given = {name: values.get(name, "") for name in words if name in SETTINGS}
    fields = frameworks.read_settings("slime", SETTINGS, given)
    environment = _VARIABLES | _variables(values.get(VARIABLES, "{}"))
    train = train.replace(**fields_from_environment(train.scaling, environment))
    rollout: dict[str, Any] = {"rollout": "compute", "compute": train.compute}
    if checkpoint is not None:
        vllm.from_hugging_face(checkpoint)
        rollout |= {"rollout": "fp8"} | frameworks.BLOCKS_OF_128
    return train, Precision(**rollout | fields | {"importance_sampling": CORRECTION in words})


def _variables(text: str) -> dict[str, str]:
    try:
        variables = json.loads(text)
    except json.JSONDecodeError as error:
        raise PrecisionError(f"{VARIABLES} {text!r} cannot be read.", f"{error}.", "Give it a JSON object.") from error
    return {str(name): str(value) for name, value in variables.items()}


def render(precision: Precision) -> Rendering:
    """Render the flags as lines of a shell command, with the checkpoint's config in a comment above them."""
    words, checkpoint = to_slime(precision), checkpoint_config(precision)
    lines: list[str] = []
    for word in words:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    text = " \\\n".join(lines)
    notes = []
    if checkpoint is not None:
        text = f"# {CHECKPOINT} is a checkpoint with quantization_config {json.dumps(checkpoint)}\n{text}"
        notes.append(f"The rollout's FP8 is in the checkpoint behind {CHECKPOINT}: nemo-fp8 export writes one.")
    if precision.fp8_param:
        notes.append("--fp8-param-gather does not go with slime's Adam on the CPU.")
    data = {"flags": words, "quantization_config": checkpoint}
    back = read_slime(words, checkpoint)
    reasons = frameworks.why_not_blocks_of_128("slime", precision) | _REASONS
    return frameworks.rendering_of("slime", "slime", precision, text, data, back, reasons, notes)
