"""A rollout engine: vLLM under the contract, in one Ray actor in the rollout environment.

The actor is a single process with vLLM inside of it, so that no worker and no shared memory is left when it ends, even
if it is killed. It starts without weights. It answers only after a push, and only if it holds the version of the
weights that the caller names; a restarted engine is empty again. So no answer comes from stale weights.

Requests and answers are token ids; there is no tokenizer on this side.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from nemo_fp8 import te_cpu
from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.rl.settings import GrpoSettings
from nemo_fp8.render.vllm import SMALL_ENGINE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENVIRONMENT = SMALL_ENGINE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""For the process, before it starts."""

END = 2
"""The token behind an answer, which is part of it."""
Answers = list[tuple[list[int], list[float]]]
"""Tokens of each answer, the end mark included, and their log-probs."""


class RolloutEngine:
    """A vLLM engine that generates; the driver makes it an actor."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        from nemo_fp8.rollout import engine_args
        from nemo_fp8.rollout.refit.memory import Spare

        self.spare = Spare()
        s = self.settings = GrpoSettings.from_dict(settings)
        self.version: int | None = None
        gpu = te_cpu.has_gpu()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(s.policy.hugging_face(s.seq_length + 1)))
            self.llm = LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=s.seq_length + 1,
                max_num_seqs=256,
                distributed_executor_backend="uni",
                enforce_eager=True,
                disable_log_stats=True,
                seed=s.seed,
                # A CPU's kernels take BF16 activations: quantize them before, so that its log-probs are those of a
                # GPU's W8A8.
                **engine_args(s.precision, activations="kernel" if gpu else "emulated"),
                **({"gpu_memory_utilization": 0.8 * _share_of_a_gpu()} if gpu else {}),
            )

    @ray.method(max_task_retries=-1)
    def ready(self) -> tuple[str, int]:
        """Return the identity of its process, and its Ray node, once the engine has started (again)."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def control(self, what: str, *args: Any) -> Any:
        """Call the engine, as one of the ways of :class:`nemo_fp8.rollout.refit.Control`."""
        from nemo_fp8.rollout.refit.control import Offline

        self.version = None
        return getattr(Offline(self.llm), what)(*args)

    def carry(self, message: dict[str, Any], body: NDArray[np.uint8]) -> list[dict[str, Any]]:
        """Write the bytes that came with a message from another machine."""
        with self.spare.holding(body) as there:
            answers: list[dict[str, Any]] = self.control("call", "write", message | there)
            return answers

    def pushed(self, version: int) -> None:
        """Note that the weights are those of this step now."""
        self.version = version

    def generate(
        self, prompts: Sequence[list[int]], version: int, *, answers: int, temperature: float, seed: int
    ) -> list[Answers]:
        """Return ``answers`` answers to each prompt. The seed of a prompt follows from ``seed`` and its index.

        Raises PrecisionError unless the engine holds the weights of step ``version``.
        """
        from vllm import SamplingParams

        if self.version != version:
            raise PrecisionError(
                f"Answers of step {version}'s weights from an engine with those of "
                f"{'no step' if self.version is None else self.version}.",
                "It was started again, or a push to it failed.",
                "Push the weights first.",
            )
        parameters = [
            SamplingParams(
                n=answers,
                temperature=temperature,
                seed=None if temperature == 0 else seed + i * answers,
                max_tokens=self.settings.digits + 1,
                stop_token_ids=[END],
                logprobs=0,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        found = self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        return [[_answer(output) for output in request.outputs] for request in found]


def _share_of_a_gpu() -> float:
    return float(ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0))  # type: ignore[no-untyped-call]


def _answer(output: Any) -> tuple[list[int], list[float]]:
    tokens = list(output.token_ids)
    return tokens, [logprobs[token].logprob for token, logprobs in zip(tokens, output.logprobs, strict=True)]
