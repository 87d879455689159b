"""FP8 rollout in vLLM: an engine starts from one set of weights and takes another by a push.

    .venv-rollout/bin/python examples/rollout_push.py

You see what the engine answers before and after, and the receipt: what was written, in which time, read back and compared.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_fp8.rollout import Refit, engine_args, environment
from nemo_fp8.vllm_ending import end

PRECISION = "bf16_with_fp8_blockwise_mixed"


def weights(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.2)).bfloat16()


def main() -> None:
    os.environ.update(environment(PRECISION))  # before vLLM starts: its workers choose their kernels by it
    from vllm import LLM, SamplingParams

    with TemporaryDirectory() as folder:
        weights(0).save_pretrained(Path(folder))
        small = {"max_model_len": 128, "enforce_eager": True, "gpu_memory_utilization": 0.2}  # of a CPU's memory too, whatever it is called
        llm = LLM(folder, skip_tokenizer_init=True, **small, **engine_args(PRECISION))
    asked = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)

    def answer() -> list[int]:
        return llm.generate({"prompt_token_ids": [1, 2, 3, 4, 5]}, asked, use_tqdm=False)[0].outputs[0].token_ids

    print("before the push:", answer())
    receipt = Refit(llm).push(weights(1).state_dict(), verify=True).require()
    print("after the push: ", answer(), f"\n{receipt}")
    end(llm)


if __name__ == "__main__":
    main()
