"""Lint: every kind of finding, from settings that a person could write."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.contract.te_variables import TE_RECIPES
from nemo_fp8.errors import SEVERITIES, Problem
from nemo_fp8.findings import RULES, worst
from nemo_fp8.preflight.lint import lint
from nemo_fp8.preflight.machine import Machine

DATA = Path(__file__).parents[1] / "models/data"
LLAMA, QWEN, QWEN_MOE, MIXTRAL = (
    str(DATA / f"{name}.json") for name in ("llama-3-8b", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b")
)
BLOCKWISE: dict[str, Any] = {"format": "e4m3", "scaling": "blockwise"}
TENSORWISE: dict[str, Any] = {"format": "hybrid", "scaling": "tensorwise"}
MXFP8: dict[str, Any] = {"format": "e4m3", "scaling": "mxfp8", "fp8_param": True}
DELAYED: dict[str, Any] = {"format": "hybrid", "scaling": "delayed"}
BF16: dict[str, Any] = {"rollout": "compute"}
FP32_SCALES = {"weight_scale": "fp32", "activation_scale": "fp32"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "intermediate_size": 512,
    **HEADS,
}
FP32_BLOCKS = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
NVFP4: dict[str, Any] = {"format": "e2m1", "scaling": "nvfp4"}


@dataclass
class _Float8BlockScaling:
    """What a TransformerEngine has of the class that was imported without its variable."""

    use_f32_scales: bool = False


TE_WITHOUT_FP32 = {TE_RECIPES: SimpleNamespace(Float8BlockScaling=_Float8BlockScaling)}

# code -> settings and arguments that it must come from. Codes of what is installed are in test_doctor and test_machine.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("contract-attention-blockwise", {**BLOCKWISE, "attention": True}, {}),
    ("contract-layers-delayed", {**DELAYED, "first_layers": 1}, {}),
    ("contract", {"scalling": "blockwise"}, {}),
    ("unsupported", BLOCKWISE, {"machine": "h200,cuda12.8,te2.9"}),
    ("emulated", BLOCKWISE, {"machine": "cpu"}),
    ("unknown-support", BLOCKWISE, {"machine": "h200"}),
    ("ignored-delayed", {**TENSORWISE, "margin": 1}, {}),
    ("ignored-delayed", {**BF16, "amax_history_len": 32}, {}),
    ("ignored-loss-scale", {**BLOCKWISE, "initial_loss_scale": 65536.0}, {}),
    ("ignored-rollout", {**BF16, "rollout_block": "tensor"}, {}),
    ("ignored-nvfp4", {**BLOCKWISE, "weight_block": "1x16"}, {}),
    ("fp4-backward-1x16", {**NVFP4, "weight_block": "1x16"}, {}),
    ("fp4-backward-1x16", {**MXFP8, "weight_block": "1x16", "modules": [["*.linear_fc1", "nvfp4"]]}, {}),
    ("nvfp4-rollout-activations", NVFP4, {}),
    ("nvfp4-rollout-fixed-scale", {**NVFP4, "row_scaled": True}, {}),
    ("ignored-scales", {**DELAYED, "weight_scale": "pow2"}, {}),
    ("ignored-scales-without-fp8", {**BF16, "weight_scale": "pow2"}, {}),
    ("ignored-layers", {**BF16, "first_layers": 1}, {}),
    ("ignored-layers", {**BF16, "keep": ["*.linear_proj"]}, {}),
    ("ignored-dynamic-loss-scale", {"compute": "fp16", "loss_scale": 1024.0, "hysteresis": 3}, {}),
    ("ignored-setting", {**BF16, "wgrad": False}, {}),
    ("ignored-setting", {"rollout": "fp8", "wgrad": False}, {}),
    ("ignored-setting", {**NVFP4, "weight_scale": "pow2"}, {}),
    ("ignored-setting", {"rollout": "nvfp4", "activation_scale": "pow2"}, {}),
    ("ignored-setting", {**NVFP4, "four_over_six_error": "mse"}, {}),
    ("ignored-setting", {**NVFP4, "four_over_six_bound_256": "weights"}, {}),
    ("ignored-setting", {**NVFP4, "backward": "dequantized", "stochastic_rounding": False}, {}),
    ("ignored-setting", {**NVFP4, "weight_block": "1x16", "modules": [["*", "mxfp8"]]}, {}),
    ("ignored-setting", {**NVFP4, "backward_scaling": "mxfp8", "modules": [["*", "blockwise"]]}, {}),
    ("ignored-wgrad", {**BLOCKWISE, "wgrad": False}, {}),
    ("ignored-attention", {**MXFP8, "attention": True}, {}),
    ("ignored-attention", {**TENSORWISE, "attention": True, "multi_head_attention": True}, {}),
    ("e5m2-gradients-mxfp8", {**MXFP8, "format": "hybrid"}, {}),
    ("e5m2-gradients-blockwise", {**BLOCKWISE, "format": "hybrid"}, {}),
    ("fp16-delayed-freeze", {**DELAYED, "compute": "fp16", "amax_history_len": 1024, "amax_compute_algo": "max"}, {}),
    ("rollout-without-correction", {**BLOCKWISE, "importance_sampling": False}, {}),
    ("bf16-train-fp8-rollout", {"rollout": "fp8"}, {}),
    ("mxfp8-overlap-param-gather", MXFP8, {"parallel": "overlap,distopt"}),
    ("fp8-param-needs-distributed-optimizer", {**TENSORWISE, "fp8_param": True}, {"parallel": "no-distopt"}),
    ("fp8-param-needs-distributed-optimizer", MXFP8, {"parallel": "no-distopt"}),
    ("mxfp8-param-needs-reuse", MXFP8, {"parallel": "no-reuse-grad-buf"}),
    ("reuse-without-mxfp8-param", BLOCKWISE, {"parallel": "reuse-grad-buf"}),
    ("fp8-param-saves-nothing", MXFP8, {}),
    ("sequence-parallel-without-tensor-parallel", BLOCKWISE, {"model": LLAMA, "parallel": "sp"}),
    ("experts-need-sequence-parallel", BLOCKWISE, {"parallel": "tp2,ep4"}),
    ("layers-all-kept", {**TENSORWISE, "first_layers": 1, "last_layers": 1}, {"model": {**TINY,
    "num_hidden_layers": 2}}),
    ("layers-all-kept", {**TENSORWISE, "first_layers": 7}, {"model": {**TINY, "num_hidden_layers": 2}}),
    ("layers-all-matched", {**BLOCKWISE, "keep": ["*"]}, {"model": LLAMA}),
    ("keep-matches-nothing", {**BLOCKWISE, "keep": ["*.linear_fc3"]}, {"model": LLAMA}),
    ("keep-matches-nothing", {**BLOCKWISE, "modules": [["*.linear_fc3", "bf16"]]}, {"model": LLAMA}),
    ("rule-overruled", {**NVFP4, "modules": [["*.linear_qkv", "bf16"], ["*.k_proj", "mxfp8"]]}, {"model": LLAMA}),
    ("rule-overruled", {**NVFP4, "modules": [["*.linear_qkv", "bf16"], ["*.qkv_proj", "mxfp8"]]}, {}),
    ("rule-overruled", {**NVFP4, "keep": ["*.mlp.*"], "modules": [["*.experts.*", "mxfp8"]]}, {}),
    ("rule-overruled", {"rollout": "nvfp4", "modules": [["*", "mxfp8"], ["*.in_proj", "bf16"]]}, {}),
    ("not-divisible", BLOCKWISE, {"model": LLAMA, "parallel": "tp3"}),
    ("not-divisible", BLOCKWISE, {"model": LLAMA, "parallel": "tp16"}),  # 8 key-value heads
    ("not-divisible", BLOCKWISE, {"model": LLAMA, "parallel": "pp5"}),
    ("not-divisible", BLOCKWISE, {"model": MIXTRAL, "parallel": "ep3"}),
    ("not-divisible", BLOCKWISE, {"model": LLAMA, "parallel": "cp3,seq4096"}),
    ("not-divisible", BLOCKWISE, {"model": LLAMA, "parallel": "rollout-tp3"}),
    ("gqa-replicated", BLOCKWISE, {"model": QWEN_MOE, "parallel": "rollout-tp8,rollout-ep"}),
    ("shape", TENSORWISE, {"model": {**TINY, "intermediate_size": 520}}),
    ("shape", MXFP8, {"model": {**TINY, "intermediate_size": 528}}),
    # 96 / 4 = 24 columns
    ("shape", BLOCKWISE, {"model": {**TINY, "intermediate_size": 96}, "parallel": "tp4,rollout-tp1"}),
    ("param-shape", {**BLOCKWISE, "fp8_param": True}, {"model": QWEN_MOE, "parallel": "tp4"}),
    ("block-straddles-ranks", BLOCKWISE, {"model": QWEN_MOE, "parallel": "tp4"}),
    ("grids-differ", BLOCKWISE, {"model": QWEN_MOE, "parallel": "tp4,rollout-tp1"}),
    ("grids-differ", BLOCKWISE, {"model": TINY}),  # heads of 64 rows
    ("tokens", BLOCKWISE, {"model": LLAMA, "parallel": "seq1000"}),
    ("tokens", MXFP8, {"model": LLAMA, "parallel": "seq4112"}),
    ("padding", BLOCKWISE, {"model": LLAMA, "parallel": "packed"}),
    ("padding-too-small", BLOCKWISE, {"model": LLAMA, "parallel": "packed,pad64"}),
    ("does-not-fit", BLOCKWISE, {"model": MIXTRAL, "parallel": "tp2", "machine": "h200"}),
    ("expert-tokens", BLOCKWISE, {"model": MIXTRAL}),
    ("router-kept", BLOCKWISE, {"model": MIXTRAL}),
    ("vocab-padding", BLOCKWISE, {"model": LLAMA, "parallel": "tp4"}),
    ("rollout-shape", BLOCKWISE, {"model": QWEN_MOE, "parallel": "tp4"}),
    ("rollout-kv-shard", BLOCKWISE, {"model": TINY, "parallel": "rollout-tp2"}),
    ("kept-on-one-side", {**BLOCKWISE, "keep": ["*.experts.linear_fc2"]}, {"model": MIXTRAL}),
    ("rollout-kept", BLOCKWISE, {"model": {**TINY, "hidden_size": 272, "head_dim": 128}}),
    ("rollout-kept", {**BLOCKWISE, "strict": True}, {"model": {**TINY, "intermediate_size": 384},
    "parallel": "rollout-tp2"}),
    ("deepgemm-shape", {**BLOCKWISE, "deep_gemm": True}, {"model": {**TINY, "hidden_size": 288, "head_dim": 128}}),
    ("environment-late", BLOCKWISE, {"environment": {FP32_BLOCKS: "1"}, "modules": TE_WITHOUT_FP32}),
    ("environment-against-contract", BLOCKWISE, {"environment": {FP32_BLOCKS: "1"}}),
    ("environment-missing", {**BLOCKWISE, **FP32_SCALES}, {"environment": {}}),
    ("environment-missing", {**NVFP4, "backward": "dequantized"}, {"environment": {}}),
    ("environment-missing", {**MXFP8, "weight_block": "1x16", "modules": [["*.linear_fc1", "nvfp4"]]},
    {"environment": {}}),
    ("environment-against-contract", NVFP4, {"environment": {"NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1"}}),
    ("environment-against-contract", BLOCKWISE, {"environment": {"NVTE_BACKWARD_OVERRIDE": "dequantized"}}),
    ("bridge-loads-into-fp8", {**BLOCKWISE, "fp8_param": True}, {"machine": "h200,bridge0.3.1,mcore0.16.1"}),
    ("environment-set", BLOCKWISE, {"environment": {"NVTE_BACKWARD_OVERRIDE": "bf16"}}),
]  # fmt: skip
INSTALLED = {
    "cpu-initialization",
    "nemo-mcore",
    "bridge-mcore",
    "nemo-3",
    "te-library-missing",
    "te-not-stood-for",
    "te-delayed-resume",
    "attention-resume",
    "te-dtype-pickle",
    "te-absent",
    "te-newer",
    "numpy-mcore",
    "torchvision-vllm-cpu",
    "extension-lock",
    "onednn-kept-from-amx",
    "driver",
    "mock-data",
}


def codes(settings: Any, **arguments: Any) -> list[str]:
    return [f.code for f in lint(settings, **arguments)]


@pytest.mark.parametrize(("code", "settings", "arguments"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_every_finding_can_be_found(code: str, settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    found = [f for f in lint(settings, **arguments) if f.code == code]
    assert found
    for f in found:
        assert f.severity in SEVERITIES
        assert all((f.what, f.why, f.remedy))
        assert "{" not in f.what + f.why + f.remedy


# Who finds what lint does not; tests/render, tests/mismatch, this folder and tests/train hold each to its rows.
OTHERS = ("contract-", "sides-", "nemo-rl-", "gate-", "weight-", "run-", "start-", "refused", "no-torch")


def test_every_rule_has_a_case() -> None:
    own = {code for code, *_ in CASES if not code.startswith(OTHERS)}
    assert own | INSTALLED == {code for code in RULES if not code.startswith(OTHERS)}


# What each finding's remedy says, done. A finding that its own remedy does not cure would be no use.
CURES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ignored-delayed", {**TENSORWISE}, {}),
    ("ignored-delayed", {**DELAYED, "margin": 1}, {}),
    ("ignored-loss-scale", {"compute": "fp16", "initial_loss_scale": 65536.0}, {}),
    ("ignored-rollout", {"rollout": "fp8", "rollout_block": "tensor"}, {}),
    ("ignored-dynamic-loss-scale", {"compute": "fp16", "hysteresis": 3}, {}),
    ("ignored-setting", {**NVFP4, "hadamard": False, "four_over_six": "weights", "four_over_six_error": "mse"}, {}),
    ("ignored-setting", {**NVFP4, "rollout": "fp8", "rollout_block": "128x128", "weight_scale": "pow2"}, {}),
    ("ignored-setting", {**NVFP4, "weight_block": "1x16", "modules": [["*.linear_fc1", "mxfp8"]]}, {}),
    ("ignored-wgrad", {**BLOCKWISE, "wgrad": True}, {}),
    ("ignored-attention", {**TENSORWISE, "attention": True}, {}),
    ("ignored-attention", {**DELAYED, "attention": True, "multi_head_attention": True}, {}),
    ("ignored-nvfp4", {**BLOCKWISE, "weight_block": "1x16", "modules": [["*.linear_fc1", "nvfp4"]]}, {}),
    ("fp4-backward-1x16", {**NVFP4, "weight_block": "16x16"}, {}),
    ("fp4-backward-1x16", {**NVFP4, "weight_block": "1x16", "backward": "dequantized"}, {}),
    ("fp4-backward-1x16", {**NVFP4, "weight_block": "1x16", "backward_scaling": "mxfp8"}, {}),
    ("nvfp4-rollout-activations", {**NVFP4, "activation_scheme": "none"}, {}),
    ("nvfp4-rollout-fixed-scale", {**NVFP4, "row_scaled": True, "activation_scheme": "none"}, {}),
    ("environment-against-contract", {**NVFP4, "weight_block": "1x16"},
    {"environment": {"NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1"}}),
    ("e5m2-gradients-mxfp8", MXFP8, {}),
    ("fp16-delayed-freeze", {**DELAYED, "compute": "fp16", "amax_history_len": 1024, "initial_loss_scale": 65536.0},
    {}), ("fp16-delayed-freeze", {**DELAYED, "compute": "fp16"}, {}),
    ("mxfp8-overlap-param-gather", MXFP8, {"parallel": "no-overlap,distopt"}),
    ("fp8-param-needs-distributed-optimizer", MXFP8, {"parallel": "distopt"}),
    ("experts-need-sequence-parallel", BLOCKWISE, {"parallel": "tp2,ep4,sp"}),
    ("layers-all-kept", {**TENSORWISE, "first_layers": 1, "last_layers": 1}, {"model": {**TINY,
    "num_hidden_layers": 3}}),
    ("keep-matches-nothing", {**BLOCKWISE, "keep": ["*.linear_fc1", "model.layers.3.*", "*router", "lm_head"]},
    {"model": MIXTRAL}), ("rollout-shape", BLOCKWISE, {"model": QWEN_MOE, "parallel": "tp4,rollout-tp2"}),
    ("rule-overruled", {**NVFP4, "modules": [["*.layers.0.*.k_proj", "mxfp8"], ["*.qkv_proj", "bf16"]]},
    {"model": LLAMA}),
    ("rule-overruled", {**NVFP4, "modules": [["*.layers.0.*", "bf16"], ["*.linear_qkv", "mxfp8"]]}, {}),
    ("rule-overruled", {**NVFP4, "modules": [["*.linear_qkv", "bf16"], ["*.qkv_proj", "bf16"]]}, {}),  # no difference
    ("rollout-shape", BLOCKWISE, {"model": QWEN_MOE, "parallel": "tp4,rollout-ep"}),
    ("rollout-shape", {**BLOCKWISE, "rollout": "compute"}, {"model": QWEN_MOE, "parallel": "tp4"}),
    ("rollout-shape", {**BLOCKWISE, "keep": ["*.mlp.experts.*"]}, {"model": QWEN_MOE, "parallel": "tp4"}),
    ("rollout-kv-shard", BLOCKWISE, {"model": TINY, "parallel": "rollout-tp1"}),
    ("kept-on-one-side", {**BLOCKWISE, "keep": ["*.experts.linear_fc?"]}, {"model": MIXTRAL}),
    ("rollout-kept", BLOCKWISE, {"model": {**TINY, "hidden_size": 384, "head_dim": 128}}),
    ("rollout-kept", {**BLOCKWISE, "keep": ["*"]}, {"model": {**TINY, "hidden_size": 272, "head_dim": 128}}),
    ("shape", {**TENSORWISE, "keep": ["*.mlp.*"]}, {"model": {**TINY, "intermediate_size": 520}}),
    ("padding-too-small", BLOCKWISE, {"model": LLAMA, "parallel": "packed,pad256"}),
    ("does-not-fit", BLOCKWISE, {"model": MIXTRAL, "parallel": "tp4,dp8,sp,ep8,etp1", "machine": "h200"}),
    ("does-not-fit", BLOCKWISE, {"model": MIXTRAL, "machine": "h200"}),  # no layout was given
    ("tokens", BLOCKWISE, {"model": LLAMA, "parallel": "seq1008"}),
    ("environment-against-contract", {**BLOCKWISE, **FP32_SCALES}, {"environment": {FP32_BLOCKS: "1"}}),
    ("unsupported", BLOCKWISE, {"machine": "h200,cuda12.9,te2.9"}),
    ("unsupported", TENSORWISE, {"machine": "h200,cuda12.8,te2.9"}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "settings", "arguments"), CURES, ids=lambda v: v if isinstance(v, str) else "")
def test_the_remedy_cures(code: str, settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert code not in codes(settings, **arguments)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_no_error_on_a_common_model(name: str) -> None:
    found = lint(preset(name), model=LLAMA, parallel="tp2,dp4,sp,seq8192,distopt")
    assert worst(found) != "error", [f for f in found if f.severity == "error"]


def test_nemo_mxfp8_preset_on_its_llama_recipe_destroys_weights() -> None:
    # llm.llama3_8b.pretrain_recipe overlaps the gather.
    assert codes(preset("bf16_with_mxfp8_mixed"), parallel="distopt,overlap")[0] == "mxfp8-overlap-param-gather"


def test_a_contract_and_its_fields_give_the_same(tmp_path: Path) -> None:
    for contract in PRESETS.values():
        assert lint(contract, model=LLAMA) == lint(contract.to_dict(), model=LLAMA)


def test_errors_come_first() -> None:
    found = lint(
        preset("bf16_with_mxfp8_mixed"), model=QWEN_MOE, parallel="tp4,overlap,no-distopt,packed", machine="h200,te2.9"
    )
    assert [SEVERITIES.index(f.severity) for f in found] == sorted(SEVERITIES.index(f.severity) for f in found)
    assert worst(found) == "error"
    assert worst([]) is None


def test_on_a_cpu_the_emulation_keeps_what_te_would_refuse() -> None:
    model = {**TINY, "intermediate_size": 520}
    severity = {f.severity for f in lint({**TENSORWISE}, model=model, machine="cpu") if f.code == "shape"}
    assert severity == {"warning"}
    severity = {
        f.severity for f in lint({**TENSORWISE, "strict": True}, model=model, machine="cpu") if f.code == "shape"
    }
    assert severity == {"error"}


def test_findings_become_json() -> None:
    import json

    found = lint({**BLOCKWISE, "margin": 1})
    assert [Problem(**row) for row in json.loads(json.dumps([f.to_dict() for f in found]))] == found


@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from([LLAMA, QWEN, QWEN_MOE, MIXTRAL, TINY]),
    st.sampled_from(
        [
            "",
            "tp2",
            "tp3,sp",
            "tp8,pp2,ep8,sp,packed",
            "tp16,cp2,seq100",
            "rollout-tp16",
            "rollout-ep,no-distopt,overlap",
        ]
    ),
    st.sampled_from([None, "cpu", "h200", "h200,cuda12.8,te2.9", "rtx5090,cuda13.0,te2.20.2"]),
)
def test_lint_always_answers(name: str, model: Any, parallel: str, machine: str | None) -> None:
    for f in lint(preset(name), model=model, parallel=parallel, machine=machine, environment={}):
        assert f.code in RULES


def test_lint_imports_nothing_heavy() -> None:
    import subprocess

    code = "import sys; from nemo_fp8.preflight.lint import lint; "
    code += f"lint({{'format': 'e4m3', 'scaling': 'blockwise'}}, model={LLAMA!r}, parallel='tp4'); "
    code += "print([m for m in ('torch', 'transformers', 'nemo', 'megatron', 'numpy', 'yaml') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_the_machine_s_own_findings_come_too() -> None:
    assert "nemo-mcore" in codes(BLOCKWISE, machine=Machine(nemo="2.7.3", mcore="0.16.1"))
