"""Compute vLLM's log-probabilities of prompts and of what it generates, to compare two checkpoints bit by bit.

    log_probs(exported, {"dtype": "bfloat16"}, python)             the export, as any vLLM loads it
    log_probs(source, {"quantization": "nemo_fp8", ...}, python)   the source, quantized when it is loaded

On a CPU without AMX vLLM has no kernel for FP8 in 128x128 blocks, but in ModelOpt's layout, for which nemo_fp8's plugin
names one (:func:`reads_codes`). The export is then decoded to BF16 and quantized when it is loaded, too, and its
certificate proves that this gives the same codes.

vLLM and NeMo cannot share an environment, so each engine runs in a process of vLLM's own Python, on this same file.
Both get the same prompts in the same order and the same settings, so that a deterministic kernel gives the same bits
for the same values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_fp8 import lifetime
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.export.plan import Plan
from nemo_fp8.models.names import place
from nemo_fp8.moved import renamed
from nemo_fp8.preflight.answers import answer
from nemo_fp8.preflight.machine import Machine, vllm_pythons
from nemo_fp8.preflight.support import UNSUPPORTED
from nemo_fp8.render.vllm import PLUGIN, SMALL_ENGINE, to_plugin, to_vllm

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"ENVIRONMENT": "nemo_fp8.render.vllm.SMALL_ENGINE"})

PROMPTS, LENGTH, GENERATED, TOP = 4, 24, 8, 20
# Settings for a small engine that starts quickly; arguments override them.
SETTINGS: dict[str, Any] = {
    "max_model_len": LENGTH + GENERATED,
    "max_num_seqs": PROMPTS,
    "enforce_eager": True,
    "skip_tokenizer_init": True,  # prompts are numbers of tokens, and a checkpoint may have no tokenizer beside it
    "seed": 0,
}
_ASK = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') and u.find_spec('nemo_fp8') else 3)"


@dataclass(frozen=True)
class Comparison:
    """Log-probs of two engines on the same prompts, compared."""

    positions: int
    compared: int
    """The number of log-probabilities."""
    differing: int
    largest: float
    """The largest difference; infinite if one side lists a token that the other does not."""
    decoded: bool = False
    """Whether the export was decoded and quantized again, since this vLLM has no kernel that reads its codes."""

    @property
    def equal(self) -> bool:
        """Whether all log-probabilities are equal bit for bit, and there are any."""
        return self.compared > 0 and self.differing == 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"bitwise_equal": self.equal, **asdict(self)}


def vllm_python(given: str | Path | None = None) -> Path:
    """Return a Python that has vLLM and this package: the given one, this one, or that of ``.venv-rollout``.

    Raises PrecisionError if there is none.
    """
    tried = vllm_pythons(given)
    for python in tried:
        if (
            python.is_file()
            and subprocess.run([str(python), "-c", _ASK], capture_output=True, cwd="/", check=False).returncode == 0
        ):
            return python
    raise PrecisionError(
        f"No Python with vLLM and nemo_fp8 in it{f' at {given}' if given else ''}.",
        f"Looked at {', '.join(map(str, tried))}.",
        "Run `make setup`, or pip install nemo-fp8[rollout] where vLLM is and name it with --vllm-python PATH; "
        "--no-vllm leaves this out.",
    )


def on_the_fly(precision: Precision) -> dict[str, Any]:
    """Return engine arguments under which vLLM quantizes a BF16 checkpoint with our numerics."""
    arguments = to_vllm(precision)
    if not precision.rolls_out_quantized:
        return arguments
    plugin = {"quantization": PLUGIN, "hf_overrides": {"quantization_config": to_plugin(precision)}}
    return {name: value for name, value in arguments.items() if name != "quantization_config"} | plugin


def as_it_is(precision: Precision) -> dict[str, Any]:
    """Return the same engine arguments for a checkpoint whose config.json says how it is quantized."""
    return {
        name: value
        for name, value in to_vllm(precision).items()
        if name not in ("quantization", "quantization_config", "hf_overrides")
    }


def log_probs(folder: str | Path, arguments: Mapping[str, Any], python: str | Path) -> list[dict[str, float]]:
    """Return the most likely tokens and their log-probabilities for every position, of prompts and generated tokens.

    Raises PrecisionError if vLLM does not run the checkpoint.
    """
    vocabulary = _vocabulary(Path(folder))
    with tempfile.TemporaryDirectory() as work:
        out, log = Path(work, "out.json"), Path(work, "log.txt")
        task = {
            "model": str(Path(folder).resolve()),
            "arguments": SETTINGS | dict(arguments),
            "vocabulary": vocabulary,
            "out": str(out),
        }
        command = [str(Path(python).absolute()), "-m", __name__, json.dumps(task)]
        # In another folder, so that no module of the current one is imported.
        settings: dict[str, Any] = {"env": SMALL_ENGINE | os.environ, "cwd": work}
        with (
            log.open("w") as file,
            lifetime.running(command, stdout=file, stderr=subprocess.STDOUT, **settings) as process,
        ):
            code = process.wait()
        if code or not out.exists():
            raise PrecisionError(
                f"vLLM did not run {folder}.",
                f"Its process ended with exit code {code}. Its last words:\n{log.read_text(errors='replace')[-3000:]}",
                "Correct what the log names; --no-vllm verifies the files alone.",
            )
        found: list[dict[str, float]] = json.loads(out.read_text())
    return found


def reads_codes(python: str | Path, plan: Plan) -> bool:
    """Return whether the vLLM of a Python has a kernel on this machine for what a plan writes.

    For ModelOpt's layout nemo_fp8's plugin names kernels and methods to its CPU build; those for linears in 128x128
    blocks, or under BF16 activations, go into a table that vLLM has from 0.30 on.
    """
    from packaging.version import Version

    machine = Machine.here(python)
    kernel = answer("rollout-checkpoint", machine).verdict != UNSUPPORTED
    if plan.layout.name != "modelopt":
        return kernel
    blocks = any(p.rollout_block == "128x128" for p in plan.forms.values())
    weights_only = any(p.activation_scheme == "none" and place(n).role != "experts" for n, p in plan.forms.items())
    if machine.vllm_cpu and (blocks or weights_only):
        return Version(machine.vllm or "0") >= Version("0.30")
    return kernel or not blocks


def compare(a: list[dict[str, float]], b: list[dict[str, float]]) -> Comparison:
    """Compare the log-probabilities of two engines; a token that only one lists counts as an infinite difference."""
    compared = differing = 0
    largest = 0.0
    for mine, theirs in zip(a, b, strict=True):
        for token in mine.keys() | theirs.keys():
            compared += 1
            if mine.get(token) != theirs.get(token):
                differing += 1
                both = token in mine and token in theirs
                largest = max(largest, abs(mine[token] - theirs[token]) if both else float("inf"))
    return Comparison(len(a), compared, differing, largest)


def _vocabulary(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int((config.get("text_config") or config)["vocab_size"])


# ---------------------------------------------------------------------- in vLLM's own Python


def main(task: Mapping[str, Any]) -> None:
    """Start an engine, compute its log-probabilities, and write them to a file."""
    import random

    from vllm import LLM, SamplingParams

    from nemo_fp8.vllm_ending import end

    llm = LLM(model=task["model"], **task["arguments"])
    draws = random.Random(0)
    prompts = [
        {"prompt_token_ids": [draws.randrange(task["vocabulary"]) for _ in range(LENGTH)]} for _ in range(PROMPTS)
    ]
    asked = SamplingParams(
        max_tokens=GENERATED, temperature=0.0, ignore_eos=True, prompt_logprobs=TOP, logprobs=TOP, detokenize=False
    )
    rows = []
    for given in llm.generate(prompts, asked, use_tqdm=False):
        for position in [*given.prompt_logprobs[1:], *given.outputs[0].logprobs]:
            rows.append({str(token): found.logprob for token, found in position.items()})
    Path(task["out"]).write_text(json.dumps(rows))
    end(llm)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
