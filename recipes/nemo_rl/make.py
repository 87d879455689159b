"""Write the NeMo RL overlays in this folder from contracts, or with ``--check`` say which are out of date.

An overlay is one row of ``OVERLAYS``: the file of NeMo RL that it goes on top of, the contract, and what NeMo RL needs
beside it that is no precision. ``docs/nemo_rl.md`` says how to use them.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.render import nemo_rl, nemo_rl_fp4, nemo_rl_keys, te_precision, vllm

HERE = Path(__file__).parent
RECIPES = "te_precision_attention_bf16.yaml"
_HEAD = """\
# {what}
# Rendered from the contract
#   {contract}
# by recipes/nemo_rl/make.py of nemo_fp8: do not edit, change the row there.
"""

# FP32 scales on both sides and gradients reduced in BF16, as in NeMo RL's own grpo_math_8B_megatron_fp8.yaml and its
# base files.
SCALES = {"weight_scale": "fp32", "activation_scale": "fp32", "grad_reduce": "compute", "deep_gemm": True}
E2E = ("bf16_with_fp8_blockwise_mixed", {"format": "e4m3", **SCALES})
ROLLOUT = ("bf16_mixed", {"rollout": "fp8", **SCALES})
# Megatron never puts a router in FP8; vLLM does unless it is told. A line is a word of parameters' names: with its dots
# it is in those of routers, and in no gate_proj's.
MOE = (E2E[0], E2E[1] | {"keep": ("*.mlp.gate.*",)})
# Blocks of 32 on both sides, for Blackwell. Here NeMo RL takes patterns of whole names: gates, and not gate_proj.
MX = ("bf16_with_mxfp8_mixed", {"fp8_param": False, "grad_reduce": "compute", "keep": ("*mlp.gate",)})
# Experts in NVFP4 whose forward and rollout multiply the same codes, and whose backward reads them; attention and six
# layers in BF16.
FP4: tuple[str, dict[str, Any]] = (
    "bf16_with_nvfp4_mixed",
    {"grad_reduce": "compute", "first_layers": 2, "last_layers": 4, "modules": nemo_rl_keys.EXPERTS_ALONE}
    | nemo_rl_fp4.ALIKE,
)

# The precision-aware optimizer of NeMo RL's base files does not go with FP8; a colocated FP8 engine needs room for the
# refit.
_BESIDE_TRAINING: dict[str, Any] = {"policy": {"megatron_cfg": {"optimizer": {"use_precision_aware_optimizer": False}}}}
_BESIDE_ROLLOUT: dict[str, Any] = {"policy": {"generation": {"vllm_cfg": {"gpu_memory_utilization": 0.5}}}}


@dataclass(frozen=True)
class Overlay:
    """One file."""

    what: str
    defaults: str
    """NeMo RL's file under ``examples/configs``."""
    said: tuple[str, dict[str, Any]]
    """The contract: a preset, and what is changed of it."""
    beside: tuple[dict[str, Any], ...] = ()
    layers: int | None = None
    """The model's decoder layers, where an overlay names the last ones."""
    plugin: bool = False
    """Quantize with this package's vLLM plugin in place of NeMo RL's patches."""

    @property
    def contract(self) -> Precision:
        """The contract itself."""
        return preset(self.said[0]).replace(**self.said[1])

    def data(self) -> dict[str, Any]:
        """The whole file as plain values."""
        data = merged({"defaults": self.defaults}, nemo_rl.to_nemo_rl(self.contract, self.layers))
        for more in self.beside:
            data = merged(data, more)
        return with_plugin(data, self.contract) if self.plugin else data

    def text(self) -> str:
        """The file."""
        changes = ", ".join(f"{name}={value!r}" for name, value in self.said[1].items())
        return _HEAD.format(what=self.what, contract=f'preset("{self.said[0]}").replace({changes})') + yaml.safe_dump(
            self.data(), sort_keys=False
        )


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """``a`` with ``b`` on top, section by section."""
    found = copy.deepcopy(a)
    for key, value in b.items():
        found[key] = (
            merged(found[key], value) if isinstance(value, dict) and isinstance(found.get(key), dict) else value
        )
    return found


def with_plugin(data: dict[str, Any], contract: Precision) -> dict[str, Any]:
    """The same file for an engine that quantizes by itself: NeMo RL believes it to be BF16, applies no patch and sends
    BF16."""
    found = copy.deepcopy(data)
    generation = found["policy"]["generation"]
    generation["vllm_cfg"] = {
        "precision": "bfloat16",
        "refit_with_reload_api": True,
        **{k: v for k, v in generation["vllm_cfg"].items() if k == "gpu_memory_utilization"},
    }
    generation["vllm_kwargs"] = {
        "quantization": vllm.PLUGIN,
        "hf_overrides": {"quantization_config": vllm.to_plugin(contract)},
        **({"linear_backend": "deep_gemm"} if contract.deep_gemm else {}),
    }
    generation["refit_transport"] = None
    generation["colocated"] = {"enabled": False, "resources": {"num_nodes": 1, "gpus_per_node": 8}}
    return found


OVERLAYS: dict[str, Overlay] = {
    "grpo_math_8B_megatron_fp8_e2e.yaml": Overlay(
        "Llama 3.1 8B: blockwise FP8 training and rollout.",
        "grpo_math_8B_megatron.yaml",
        E2E,
        (_BESIDE_TRAINING, _BESIDE_ROLLOUT),
    ),
    "grpo_math_8B_megatron_fp8_rollout.yaml": Overlay(
        "Llama 3.1 8B: BF16 training, FP8 rollout.", "grpo_math_8B_megatron.yaml", ROLLOUT, (_BESIDE_ROLLOUT,)
    ),
    "grpo_math_8B_megatron_fp8_plugin.yaml": Overlay(
        "Llama 3.1 8B: blockwise FP8 training, FP8 rollout by nemo_fp8's vLLM plugin in place of NeMo RL's patches.",
        "grpo_math_8B_megatron.yaml",
        E2E,
        (_BESIDE_TRAINING, {"cluster": {"num_nodes": 2}}),
        plugin=True,
    ),
    "grpo_math_70B_megatron_fp8_e2e.yaml": Overlay(
        "Llama 3.3 70B: blockwise FP8 training and rollout.",
        "grpo_math_70B_megatron.yaml",
        E2E,
        (_BESIDE_TRAINING, _BESIDE_ROLLOUT),
    ),
    "grpo_math_qwen30ba3b_megatron_mxfp8_e2e.yaml": Overlay(
        "Qwen3 30B-A3B, a mixture of experts: MXFP8 training and rollout, on Blackwell.",
        "grpo_math_qwen30ba3b_megatron.yaml",
        MX,
        # 768 over the four ranks of the file below is 192, a multiple of 32.
        (_BESIDE_TRAINING, _BESIDE_ROLLOUT),
    ),
    "grpo_math_qwen30ba3b_megatron_nvfp4_e2e.yaml": Overlay(
        "Qwen3 30B-A3B, a mixture of experts: NVFP4 training and rollout of the experts, on Blackwell.",
        "grpo_math_qwen30ba3b_megatron.yaml",
        FP4,
        (
            _BESIDE_TRAINING,
            _BESIDE_ROLLOUT,
            {
                "policy": {
                    "megatron_cfg": {
                        "moe_router_dtype": "fp32",
                        nemo_rl_keys.TE_PRECISION: f"examples/configs/{RECIPES}",
                    }
                }
            },
            {"policy": {"generation": {"vllm_cfg": {"expert_parallel_size": 1}}}},
        ),
        layers=48,
    ),
    "grpo_math_qwen30ba3b_megatron_fp8_e2e.yaml": Overlay(
        "Qwen3 30B-A3B, a mixture of experts: blockwise FP8 training and rollout.",
        "grpo_math_qwen30ba3b_megatron.yaml",
        MOE,
        # Experts are 768 wide: over four ranks that is 192, and vLLM's blocks are 128.
        (_BESIDE_TRAINING, _BESIDE_ROLLOUT, {"policy": {"generation": {"vllm_cfg": {"tensor_parallel_size": 2}}}}),
    ),
}


def files() -> dict[str, str]:
    """Name -> text of every file in this folder: the overlays, and the file of recipes that one of them names."""
    recipes = te_precision.render(preset(FP4[0]).replace(**FP4[1])).text
    head = _HEAD.format(what="Megatron's recipes by module: attention in BF16.", contract="of the NVFP4 overlay")
    return {name: overlay.text() for name, overlay in OVERLAYS.items()} | {RECIPES: head + recipes}


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = [name for name, text in files().items() if not (HERE / name).is_file() or (HERE / name).read_text() != text]
    if check and stale:
        sys.exit(f"Out of date: {', '.join(stale)}. Run: python recipes/nemo_rl/make.py")
    for name in stale:
        (HERE / name).write_text(files()[name])
    sys.stdout.write(f"wrote {', '.join(stale)}\n" if stale else f"{len(OVERLAYS)} overlays are up to date\n")


if __name__ == "__main__":
    main()
