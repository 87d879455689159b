"""The demo's last part, in the rollout environment: FP8 vLLM takes the trained weights by a push, and is held against
the trainer.

    .venv-rollout/bin/python demo/rollout.py CHECKPOINT LOG_PROBS PRECISION

The engine starts from random weights, so that whatever it can tell afterwards came through the push.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nemo_fp8.mismatch import LogProbs, metrics
from nemo_fp8.rollout import Refit, engine_args, environment
from nemo_fp8.vllm_ending import end

PROMPTS = ("Anna has 7", "Ben has 4 apples. ", "Emma has 9 coins.")


def weights(folder):
    """Yield the checkpoint's tensors, one after the other."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dictionary
                yield name, file.get_tensor(name)


def tell(llm):
    """Print what the engine goes on with after a few words."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=100)
    for prompt, answer in zip(PROMPTS, llm.generate(list(PROMPTS), asked, use_tqdm=False), strict=True):
        print(f"  {prompt}|{answer.outputs[0].text.splitlines()[0] if answer.outputs[0].text.strip() else ''}")


def log_probs(llm, tokens):
    """Return the engine's log-prob of every token but the first."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    answers = llm.generate([{"prompt_token_ids": row} for row in tokens.tolist()], asked, use_tqdm=False)
    rows = [
        [place[token].logprob for place, token in zip(a.prompt_logprobs[1:], a.prompt_token_ids[1:], strict=True)]
        for a in answers
    ]
    return torch.tensor(rows)


def main(folder, file, precision):
    from vllm import LLM

    os.environ.update(environment(precision))
    llm = LLM(folder, load_format="dummy", max_num_seqs=16, enforce_eager=True, seed=0, **engine_args(precision))
    print("\nBefore the push, from random weights:")
    tell(llm)
    receipt = Refit(llm).push(dict(weights(folder)), verify=True).require()
    print(f"\n{receipt}\n\nAfter the push:")
    tell(llm)
    trainer = load_file(file)
    tokens = trainer["tokens"][:, : llm.llm_engine.model_config.max_model_len - 1]  # it wants room for one token more
    pair = LogProbs(trainer["log_probs"][:, : tokens.shape[1] - 1], log_probs(llm, tokens))
    print(
        "\nMismatch between the trainer's log-probs (Megatron) and the rollout's (vLLM), on stories that neither has "
        "learned:"
    )
    for name, value in metrics(pair).items():
        print(f"  {name:<28} {value:.5f}")
    end(llm)


if __name__ == "__main__":
    main(*sys.argv[1:])
