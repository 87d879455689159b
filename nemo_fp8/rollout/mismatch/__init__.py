"""Trainer against rollout: metrics, importance-sampling weights, and a gate that tells noise from broken weights.

pair = LogProbs(trainer, rollout, mask)                  the same tokens' log-probs from both sides
metrics(pair)                                            NeMo RL's names: token_mult_prob_error, gen_kl_error, ...
ImportanceSampling(truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=2.0).weights(pair)
"""

from nemo_fp8.rollout.mismatch.importance import ImportanceSampling, Weights
from nemo_fp8.rollout.mismatch.logprobs import LogProbs
from nemo_fp8.rollout.mismatch.metrics import metrics, token_errors

__all__ = ["ImportanceSampling", "LogProbs", "Weights", "metrics", "token_errors"]
