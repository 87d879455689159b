"""What verl's, SkyRL's and TRL's own classes make of settings that were rendered for them.

    python -m support.peers verl|skyrl|trl < JSON > JSON

In: name -> ``words`` of a command, or ``config`` and ``server`` for TRL. Out: name -> what their configuration says
then, or ``refused``. They lie in ``.peers``, which this script alone puts on its path. SkyRL wants Python 3.12 for one
class of typing's, which typing_extensions has for older ones.
"""

import functools
import json
import sys
import typing
from pathlib import Path

import typing_extensions

from support import ROOT

PEERS = ROOT / ".peers"
# What verl asks for whatever the precision is.
NEEDED = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.model.path=none",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)
# Mappings that hold something from the start and take any key.
FREE = ("actor_rollout_ref.actor.megatron.override_transformer_config", "ray_kwargs.ray_init.runtime_env")


def of_verl(words):
    """Compose verl's own files with these words, and construct its own classes from the result."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    made, own = _composed(*words), _composed("model_engine=megatron")
    actor = omega_conf_to_dataclass(made.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(made.actor_rollout_ref.rollout)
    keys = [word.removeprefix("++").partition("=")[0] for word in words if word.startswith("++")]
    known = {*_leaves(OmegaConf.to_container(own, resolve=False)), *FREE}
    return {
        "class": type(actor).__name__,
        "strategy": actor.strategy,
        "dtype": [actor.megatron.dtype, rollout.dtype],
        "TransformerConfig": _plain(actor.megatron.override_transformer_config),
        "OptimizerConfig": _plain(actor.optim.override_optimizer_config),
        "DistributedDataParallelConfig": _plain(actor.megatron.override_ddp_config),
        "quantization": rollout.quantization,
        "engine": _plain(rollout.engine_kwargs)["vllm"],
        "calculate_log_probs": rollout.calculate_log_probs,
        "rollout_is": made.algorithm.rollout_correction.rollout_is,
        "variables": _plain(made.ray_kwargs.ray_init.get("runtime_env", {})).get("env_vars", {}),
        "unknown": [key for key in keys if not any(key == name or key.startswith(f"{name}.") for name in known)],
    }


@functools.cache  # several names of one precision are the same words, and each composition takes a second
def _composed(*words):
    import verl
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=[*NEEDED, *words])


def of_skyrl(words):
    """Construct SkyRL's own configuration from these words of a command."""
    typing.TypedDict = typing_extensions.TypedDict
    from skyrl.train.config import SkyRLTrainConfig

    made = SkyRLTrainConfig.from_cli_overrides(words)
    megatron, engine = made.trainer.policy.megatron_config, made.generator.inference_engine
    return {
        "strategy": made.trainer.strategy,
        "TransformerConfig": _plain(megatron.transformer_config_kwargs),
        "OptimizerConfig": _plain(megatron.optimizer_config_kwargs),
        "grad_reduce_in_fp32": megatron.ddp_config.grad_reduce_in_fp32,
        "model_dtype": engine.model_dtype,
        "fp8_weight_sync_mode": engine.fp8_weight_sync_mode,
        "engine": _plain(engine.engine_init_kwargs),
        "tis_ratio_type": made.trainer.algorithm.off_policy_correction.tis_ratio_type,
        "logprobs": made.generator.sampling_params.logprobs,
    }


def of_trl(config, server):
    """Construct TRL's own classes: of a training, and of its server's command line."""
    from transformers import HfArgumentParser
    from trl import GRPOConfig
    from trl.scripts.vllm_serve import ScriptArguments

    made = GRPOConfig(**config, use_cpu=True)
    words = ["--model", "none", *(word for key, value in server.items() for word in (f"--{key}", value))]
    (served,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(words)
    return {
        "config": {key: getattr(made, key) for key in config},
        "server": {key: getattr(served, key) for key in server},
    }


def _leaves(tree, above=""):
    """The dotted names of a tree's leaves; an empty mapping, which takes any key, is one."""
    if not isinstance(tree, dict) or not tree:
        yield above
        return
    for key, below in tree.items():
        yield from _leaves(below, f"{above}.{key}" if above else str(key))


def _plain(config):
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)


def main():
    framework, out = sys.argv[1], sys.stdout
    sys.stdout = sys.stderr  # theirs to write to
    sys.path[:0] = [str(PEERS), str(PEERS / "skyrl-gym")]
    found = {}
    for name, given in json.load(sys.stdin).items():
        try:
            found[name] = {"verl": of_verl, "skyrl": of_skyrl, "trl": of_trl}[framework](**given)
        except Exception as error:  # whatever a class of theirs refuses by
            found[name] = {"refused": f"{type(error).__name__}: {error}"}
    json.dump(found, out)


if __name__ == "__main__":
    main()
