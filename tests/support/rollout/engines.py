"""Starting, asking and ending real vLLM engines."""

import os
import tempfile
from unittest import mock

import torch

from support.rollout.models import VOCABULARY

# What makes an engine small, quick to start and the same each time.
SMALL = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "seed": 0,
    "disable_log_stats": True,
    "max_logprobs": -1,
}

if torch.cuda.is_available():  # several engines beside one another, without attention that is compiled for one GPU
    SMALL |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30, "attention_backend": "TRITON_ATTN"}

ASLEEP = 1.1
"""Seconds after which processes of vLLM that have nothing to do sleep: for a second they ask their queues."""


def start(folder, *, apart=True, **arguments):
    """A small engine on this checkpoint, in processes of its own as vLLM has it by default; not ``apart``, in this one,
    which answers the same and starts in a second and not in fifteen."""
    from vllm import LLM, envs

    from nemo_fp8.rollout.arguments import EXECUTOR

    if not apart:
        one_worker()
        if arguments.get("distributed_executor_backend") == EXECUTOR:
            del arguments["distributed_executor_backend"]
    elif "quantization" in arguments:  # as engine_args has it
        arguments.setdefault("distributed_executor_backend", EXECUTOR)
    envs.disable_envs_cache()  # an engine in this process keeps the variables as they were for it
    with mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart))}):
        return LLM(model=str(folder), **(SMALL | arguments))


def stop(llm):
    """End an engine, every process of it, and its threads here."""
    from nemo_fp8.vllm_ending import end

    assert end(llm), "Python's exit could meet a thread in C++"


def one_worker():
    """Make the groups of a single worker in this process, once: of a config without a model, so that models with
    experts and without find theirs."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(VllmConfig()):
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/meeting", 0, backend=backend)
        parallel_state.initialize_model_parallel(1, 1)


def prompts(count=8, length=24, seed=123):
    """Random token ids, the same for each test."""
    draws = torch.Generator().manual_seed(seed)
    return [{"prompt_token_ids": torch.randint(0, 480, (length,), generator=draws).tolist()} for _ in range(count)]


def log_probs(llm, count=8, length=24, **request):
    """The log-probabilities of every token of the vocabulary at every place of the prompts, [count, length - 1,
    vocabulary].

    One prompt after the other: of several at once, the engine begins with those that have arrived, and sums of another
    batch round differently. ``request`` is what ``generate`` takes more, such as an adapter.
    """
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    answers = [llm.generate(prompt, asked, use_tqdm=False, **request)[0] for prompt in prompts(count, length)]
    rows = [
        [[place[token].logprob for token in range(VOCABULARY)] for place in answer.prompt_logprobs[1:]]
        for answer in answers
    ]
    return torch.tensor(rows)


MX = {"rollout_block": "1x32", "weight_scale": "pow2", "activation_scale": "pow2"}
"""The fields of a contract of MXFP8."""


def fp8(**fields):
    """Engine arguments for an FP8 rollout under this contract."""
    from nemo_fp8.contract import Precision
    from nemo_fp8.render.vllm import to_plugin

    options = {name: fields.pop(name) for name in ("activations", "kernel", "unquantized") if name in fields}
    return {
        "quantization": "nemo_fp8",
        "hf_overrides": {"quantization_config": to_plugin(Precision(**{"rollout": "fp8"} | fields)) | options},
        "worker_extension_cls": "nemo_fp8.rollout.engine.worker.NemoFp8Worker",
    }
