"""Compare trainer and rollout: metrics, importance-sampling weights, and a gate that tells noise from broken weights.

pair = LogProbs(trainer, rollout, mask)                  the same tokens' log-probs from both sides
metrics(pair)                                            NeMo RL's names: token_mult_prob_error, gen_kl_error, ...
ImportanceSampling(truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=2.0).weights(pair)

prediction = predict(config, weights, tokens, precision) the difference that rounding alone makes, by emulation
Gate().judge(prediction, pair).require()                 raises, with the names of the layers, if there is more
"""

from typing import TYPE_CHECKING

from nemo_fp8.extras import require
from nemo_fp8.moved import renamed

__needs__ = require("numerics")

from nemo_fp8.mismatch.forward import Run, log_probs, pad
from nemo_fp8.mismatch.gate import Gate, Prediction, Verdict, predict
from nemo_fp8.mismatch.importance import ImportanceSampling, Weights
from nemo_fp8.mismatch.logprobs import LogProbs
from nemo_fp8.mismatch.metrics import metrics, token_errors
from nemo_fp8.mismatch.weights import compare_weights, kind_of, sides_apart

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"Difference": "nemo_fp8.errors.Problem"})

__all__ = [
    "Gate",
    "ImportanceSampling",
    "LogProbs",
    "Prediction",
    "Run",
    "Verdict",
    "Weights",
    "compare_weights",
    "kind_of",
    "log_probs",
    "metrics",
    "pad",
    "predict",
    "sides_apart",
    "token_errors",
]
