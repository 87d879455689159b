"""What vLLM makes of a checkpoint, to compare two of them bit by bit: log-probabilities of prompts and of what it
generates.

    right = log_probs(exported, {"dtype": "bfloat16"}, python)                          the checkpoint, as any vLLM
    loads it fly   = log_probs(source, {"quantization": "nemo_fp8", ...}, python)                the source, quantized
    when it is loaded

A CPU without AMX has no kernel of vLLM's for the first (:func:`reads_codes`). The export is then decoded to BF16 and
goes the second way: its certificate says that quantizing again gives the same codes, and the engine what follows from
them.

vLLM and NeMo cannot share an environment, so each engine runs in a process of vLLM's own Python, on this same file.
Both get the same prompts in the same order and the same settings, so that a kernel that is deterministic gives the same
bits for the same values.
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
from typing import Any

from nemo_fp8 import lifetime
from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.machine import Machine, vllm_pythons
from nemo_fp8.preflight.support import UNSUPPORTED, answer
from nemo_fp8.render.vllm import PLUGIN, to_plugin, to_vllm

PROMPTS, LENGTH, GENERATED, TOP = 4, 24, 8, 20
# Small and quick to start; only where nothing else is said.
SETTINGS: dict[str, Any] = {
    "max_model_len": LENGTH + GENERATED,
    "max_num_seqs": PROMPTS,
    "enforce_eager": True,
    "seed": 0,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_ASK = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') and u.find_spec('nemo_fp8') else 3)"


@dataclass(frozen=True)
class Comparison:
    """Log-probs of two engines on the same prompts, compared."""

    positions: int
    compared: int
    """Log-probabilities."""
    differing: int
    largest: float
    """The largest difference; infinite where the two name different tokens."""
    decoded: bool = False
    """Whether the first was decoded to BF16 and quantized on the fly again, since this vLLM has no kernel that reads
    its codes."""

    @property
    def equal(self) -> bool:
        return self.differing == 0

    def to_dict(self) -> dict[str, Any]:
        return {"bitwise_equal": self.equal, **asdict(self)}


def vllm_python(given: str | Path | None = None) -> Path:
    """A Python that has vLLM and this package: the one given, this one, or ``.venv-rollout`` beside this
    environment."""
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
    """Engine arguments under which vLLM quantizes a BF16 checkpoint as the contract says, with our numerics whatever
    the scales."""
    arguments = to_vllm(precision)
    if precision.rollout != "fp8":
        return arguments
    plugin = {"quantization": PLUGIN, "hf_overrides": {"quantization_config": to_plugin(precision)}}
    return {name: value for name, value in arguments.items() if name != "quantization_config"} | plugin


def as_it_is(precision: Precision) -> dict[str, Any]:
    """Engine arguments for a checkpoint that says itself how it is quantized; everything else the same."""
    return {
        name: value
        for name, value in to_vllm(precision).items()
        if name not in ("quantization", "quantization_config", "hf_overrides")
    }


def log_probs(folder: str | Path, arguments: Mapping[str, Any], python: str | Path) -> list[dict[str, float]]:
    """For every position of the prompts and of what follows them, the most likely tokens and their
    log-probabilities."""
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
        # From a folder of its own: whatever lies in the current one must not be imported.
        settings: dict[str, Any] = {"env": ENVIRONMENT | os.environ, "cwd": work}
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


def reads_codes(python: str | Path) -> bool:
    """Whether that Python's vLLM has a kernel on this machine that reads a checkpoint in FP8 blocks."""
    return answer("rollout-checkpoint", Machine.here(python)).verdict != UNSUPPORTED


def compare(a: list[dict[str, float]], b: list[dict[str, float]]) -> Comparison:
    """How far apart two engines are; tokens that only one of them names are infinitely far."""
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
    """One engine: start, ask, write down."""
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
        for place in [*given.prompt_logprobs[1:], *given.outputs[0].logprobs]:
            rows.append({str(token): found.logprob for token, found in place.items()})
    Path(task["out"]).write_text(json.dumps(rows))
    end(llm)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
