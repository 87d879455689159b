"""Measure how far trainer and rollout are apart, under NeMo RL's names and by NeMo RL's formulas.

With t and g the trainer's and the rollout's (generation's) log-prob of a sampled token, d = t - g, and means over the
tokens of the mask (``ClippedPGLossFn`` of NVIDIA-NeMo/RL, ``nemo_rl/algorithms/loss/loss_functions.py``):

    token_mult_prob_error      mean exp(|d|)                       1 where both agree; its gates are at 1.05 to 1.1
    gen_kl_error               mean KL(g || t):  k1 -d,  k2 d**2 / 2,  k3 exp(d) - 1 - d
    policy_kl_error            mean KL(t || g):  the same of -d
    js_divergence_error        mean (k3(t || m) + k3(g || m)) / 2,  m = log((exp(t) + exp(g)) / 2)
    sampling_importance_ratio  mean exp(d), or mean exp(sum d) of sequences if the correction is one of sequences
    is_oob_ratio               the share of tokens or sequences whose ratio is out of the correction's bounds

``kl_type`` is ``reference_policy_kl_type`` in NeMo RL, k3 by default. The terms of the JS divergence add up to
log cosh(d / 2), which is used here: it does not underflow for improbable tokens (NeMo RL's FP32 mixture is log 0 below
-104), and does not lose digits near d = 0. It is a sampled estimate, so a single token may exceed log 2; it is at most
|d| / 2. The ratio is the raw one, even if the correction truncates, as NeMo RL documents it now; older releases
averaged the truncated weights. A ratio that FP32 cannot hold counts as 0, as in NeMo RL.

NeMo RL divides by the count plus 1e-8, which FP32 rounds away if there is any token. For no tokens NeMo RL returns
zero; here that is an error, unless a global count says that this is one micro-batch of several, whose results add up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nemo_fp8.errors import PrecisionError, unknown
from nemo_fp8.mismatch.importance import ImportanceSampling, ratios
from nemo_fp8.mismatch.logprobs import LogProbs

# Estimators of KL(p || q) from samples of p, as functions of r = log q - log p (Schulman 2020).
KL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r.square() / 2,
    "k3": lambda r: torch.expm1(r) - r,
}
_LOG2 = 0.6931471805599453


def js_divergence(d: torch.Tensor) -> torch.Tensor:
    """Return log cosh(d / 2), without overflow."""
    half = d.abs() / 2
    # Near zero, half**2 / 2 - half**4 / 12; elsewhere the logarithms do not cancel.
    return torch.where(
        half < 1e-3, half.square() / 2 - half.pow(4) / 12, half + torch.log1p(torch.exp(-2 * half)) - _LOG2
    )


def token_errors(pair: LogProbs, kl_type: str = "k3") -> dict[str, torch.Tensor]:
    """Return each token's part of the four error metrics, [sequences, tokens]; meaningless outside of the mask.

    Raises PrecisionError if ``kl_type`` is not k1, k2 or k3.
    """
    if kl_type not in KL:
        raise PrecisionError([unknown("kl_type", kl_type, KL)])
    d = pair.log_ratio
    return {
        "token_mult_prob_error": d.abs().exp(),
        "gen_kl_error": KL[kl_type](d),
        "policy_kl_error": KL[kl_type](-d),
        "js_divergence_error": js_divergence(d),
    }


def metrics(
    pair: LogProbs,
    importance: ImportanceSampling | None = None,
    *,
    kl_type: str = "k3",
    global_tokens: int | None = None,
    global_sequences: int | None = None,
) -> dict[str, float]:
    """Return the metrics as plain numbers, under the names that NeMo RL logs.

    ``is_oob_ratio`` is among them only if ``importance`` truncates. If ``pair`` is a part of a batch, give
    ``global_tokens`` and ``global_sequences``, the counts of the whole: the metrics of the parts then add up, and a
    part without tokens adds nothing.

    Raises PrecisionError if there are no tokens, or a global count is less than that of the part.
    """
    importance = importance or ImportanceSampling()
    if pair.tokens == 0 and global_tokens is None:
        raise PrecisionError(
            "There is no token to compare.",
            "The mask is empty, and the mean over nothing is no number.",
            "Mark the sampled tokens in the mask; for an empty micro-batch pass global_tokens and global_sequences of "
            "the batch.",
        )
    tokens = _count(global_tokens, pair.tokens, "global_tokens")
    sequences = _count(global_sequences, pair.sequences, "global_sequences")
    found = {name: float((error * pair.mask).sum() / tokens) for name, error in token_errors(pair, kl_type).items()}
    weights = importance.weights(pair)
    raw = ratios(pair, sequence_level=importance.sequence_level_importance_ratios)
    whole = importance.sequence_level_importance_ratios
    found["sampling_importance_ratio"] = float(
        raw[pair.sample_mask].sum() / sequences if whole else raw[pair.mask].sum() / tokens
    )
    if weights.out_of_bounds is not None:
        of_sequences = weights.out_of_bounds.dim() == 1
        found["is_oob_ratio"] = int(weights.out_of_bounds.sum()) / (sequences if of_sequences else tokens)
    return found


def _count(given: int | None, own: int, name: str) -> int:
    if given is None:
        return max(own, 1)
    if given < max(own, 1):
        raise PrecisionError(
            f"{name}={given}, and {own} are here.", "A part is never larger than the whole.", "Pass the batch's count."
        )
    return given
