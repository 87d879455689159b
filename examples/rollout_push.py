"""FP8 rollout in vLLM: an engine starts from one set of weights and takes another by a push.

    .venv-rollout/bin/python examples/rollout_push.py

You see what the engine answers before and after, and the receipt: what was written, in which time, and that all of it
was read back and compared.
"""

import os
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_fp8.rollout import Refit, engine_args, environment
from nemo_fp8.vllm_ending import end

PRECISION = "bf16_with_fp8_blockwise_mixed"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {"skip_tokenizer_init": True, "max_model_len": 128, "enforce_eager": True, "gpu_memory_utilization": 0.2}


def weights(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=512, initializer_range=0.2)).bfloat16()


if __name__ == "__main__":  # vLLM starts its processes by importing this file again
    os.environ.update(environment(PRECISION))  # before vLLM: its workers choose their kernels by it
    from vllm import LLM, SamplingParams

    with TemporaryDirectory() as folder:
        weights(seed=0).save_pretrained(folder)
        llm = LLM(folder, **SMALL, **engine_args(PRECISION))
    prompt, asked = {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    print("before the push:", llm.generate(prompt, asked, use_tqdm=False)[0].outputs[0].token_ids)
    receipt = Refit(llm).push(weights(seed=1).state_dict(), verify=True).require()
    print("after the push: ", llm.generate(prompt, asked, use_tqdm=False)[0].outputs[0].token_ids)
    print(receipt)
    end(llm)
