"""Starting, asking and ending real vLLM engines."""

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


def start(folder, **arguments):
    """A small engine on this checkpoint."""
    from vllm import LLM

    return LLM(model=str(folder), **(SMALL | arguments))


def stop(llm):
    """End an engine, every process of it, and its threads here."""
    from nemo_fp8.vllm_ending import alive, end

    before = alive()
    end(llm)
    assert all(alive()[name] < count for name, count in before.items()), "Python's exit could meet a thread in C++"


def prompts(count=8, length=24, seed=123):
    """Random token ids, the same for each test."""
    draws = torch.Generator().manual_seed(seed)
    return [{"prompt_token_ids": torch.randint(0, 480, (length,), generator=draws).tolist()} for _ in range(count)]


def log_probs(llm, count=8, length=24):
    """The log-probabilities of every token of the vocabulary at every place of the prompts, [count, length - 1,
    vocabulary].

    One prompt after the other: of several at once, the engine begins with those that have arrived, and sums of another
    batch round differently.
    """
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    answers = [llm.generate(prompt, asked, use_tqdm=False)[0] for prompt in prompts(count, length)]
    rows = [
        [[place[token].logprob for token in range(VOCABULARY)] for place in answer.prompt_logprobs[1:]]
        for answer in answers
    ]
    return torch.tensor(rows)


def fp8(**fields):
    """Engine arguments for an FP8 rollout under this contract."""
    from nemo_fp8.contract import Precision
    from nemo_fp8.render.vllm import to_plugin

    options = {name: fields.pop(name) for name in ("activations", "kernel") if name in fields}
    return {
        "quantization": "nemo_fp8",
        "hf_overrides": {"quantization_config": to_plugin(Precision(**{"rollout": "fp8"} | fields)) | options},
        "worker_extension_cls": "nemo_fp8.rollout.engine.worker.NemoFp8Worker",
    }
