"""Is the mismatch of trainer and rollout the noise of FP8, or does the engine run other weights?

    .venv/bin/python examples/mismatch.py

You see the gate calm over an engine that holds the trainer's weights, and fire, naming the layer, over one in which a
down projection's scales were lost. The engine is emulated here; in a run its log-probs come from vLLM, and what it
holds from a push's receipt.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_fp8 import Precision
from nemo_fp8.mismatch import Gate, LogProbs, Run, log_probs, metrics, predict
from nemo_fp8.mismatch.weights import reference

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=256)
)
config, policy = model.config.to_dict(), {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
precision, tokens = Precision(rollout="fp8"), torch.randint(0, 256, (16, 32))
prediction = predict(config, policy, tokens, precision)

broken = "model.layers.1.mlp.down_proj.weight"
for words, weights in (
    ("the trainer's weights", policy),
    ("zeros in a layer", policy | {broken: torch.zeros_like(policy[broken])}),
):
    rolled_out = log_probs(config, weights, tokens, Run(precision, dtype=torch.float16))
    pair = LogProbs(prediction.trainer, rolled_out, prediction.mask)
    verdict = Gate().judge(prediction, pair, tokens, weights=policy, held=dict(reference(weights, precision)))
    print(f"== an engine with {words}: token_mult_prob_error {metrics(pair)['token_mult_prob_error']:.4f}\n{verdict}\n")
