"""Find which engine generates in NeMo RL, and which of its settings are compared with the training.

    policy.generation.backend: vllm        quantizes for itself, by vllm_cfg: this is compared
                               megatron    generates with the trained model: the same values, whatever the recipe
                               sglang, ... have settings of their own, which are not read

Megatron generates with ``megatron_cfg``, over which ``mcore_generation_config`` is laid. A precision that this section
changes is not compared. A finding names what cannot be compared; it is not a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_fp8.errors import Problem
from nemo_fp8.findings import finding
from nemo_fp8.render import nemo_rl_keys as keys
from nemo_fp8.render.nemo_rl_keys import section


def of(document: Mapping[str, Any]) -> str:
    """Return the backend that generates; that of NeMo RL's base files if none is named."""
    return section(document, "policy", "generation").get("backend") or next(iter(keys.BACKENDS))


def not_compared(document: Mapping[str, Any]) -> Problem | None:
    """Return the finding that the rollout's precision is not read, or None if it is."""
    name = of(document)
    if name == "vllm":
        return None
    if name != "megatron":
        return _not_compared("policy.generation.backend", f"is {name}")
    trained, again = section(document, "policy", "megatron_cfg"), section(document, *keys.MEGATRON_GENERATION)
    other = [key for key in keys.SAID_AGAIN if again.get(key) is not None and again.get(key) != trained.get(key)]
    if not other:
        return None
    return _not_compared(".".join(keys.MEGATRON_GENERATION), f"has another {' and '.join(other)} than megatron_cfg")


def _not_compared(key: str, says: str) -> Problem:
    return finding("nemo-rl-rollout-not-compared", key, key=key, says=says)


def as_trained(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rollout that Megatron generates, from those of its training."""
    block = {"rollout_block": "tensor"} if train.get("scaling") in ("delayed", "tensorwise") else {}
    return {field: value for field, value in train.items() if field != "rollout"} | block


def beside(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield findings for settings of generation that a contract cannot express."""
    name = of(document)
    uncompared = not_compared(document)
    if uncompared:
        yield uncompared
    unread = {settings for backend, settings in keys.BACKENDS.items() if backend != name}
    found = [
        f"{'.'.join((*path, key))}={value}"
        for path, names in keys.CHANGE_NUMBERS.items()
        for key in names
        if path[-1] not in unread and (value := section(document, *path).get(key))
    ]
    if found:
        yield finding("nemo-rl-changes-numbers", names=", ".join(found))
    key = "policy.generation.vllm_cfg.kv_cache_dtype"
    if name == "vllm" and section(document, "policy", "generation", "vllm_cfg").get("kv_cache_dtype") == keys.KV_LAYOUT:
        yield finding("nemo-rl-kv-layout", key, key=key, layout=keys.KV_LAYOUT)


def zero_mismatch(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each setting that NeMo RL (from its pull request 3208) refuses with zero mismatch."""
    if not section(document, "policy", "megatron_cfg").get("zero_train_gen_mismatch"):
        return
    key = "policy.megatron_cfg.zero_train_gen_mismatch"
    why = "NeMo RL refuses it: Megatron trains and generates on the same kernels then, and has these for BF16 alone."
    precision = section(document, "policy").get("precision") or "bfloat16"
    if precision != "bfloat16":
        yield Problem(f"{key} with policy.precision: {precision}.", why, "Set policy.precision: bfloat16.")
    if of(document) != "megatron":
        remedy = "Set policy.generation.backend: megatron, or leave zero_train_gen_mismatch out."
        yield Problem(f"{key} with policy.generation.backend: {of(document)}.", why, remedy)
    for path in (("policy", "megatron_cfg"), keys.MEGATRON_GENERATION):
        if section(document, *path, "fp8_cfg").get("enabled"):
            remedy = "Set its enabled: false, or leave zero_train_gen_mismatch out."
            yield Problem(f"{key} with {'.'.join(path)}.fp8_cfg.", why, remedy)
