"""The memory estimate against megatron-core's own allocations, and against the arithmetic of FP8."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import SUPPORT

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.shapes import Model
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.preflight.memory import Estimate, alternatives, memory, savings

DATA = Path(__file__).parents[1] / "models/data"
LLAMA = Model.read(DATA / "llama-3-8b.json")
HOPPER, BLACKWELL = Machine.parse("h200"), Machine.parse("b200")

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "intermediate_size": 512,
    **HEADS,
}
NORMED = {**DENSE, "model_type": "qwen3"}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128}
# model, Megatron's layout, and the same in words
LAYOUTS: list[tuple[dict[str, Any], dict[str, int], str]] = [
    (DENSE, {"world": 1}, ""),
    (DENSE, {"world": 8, "tp": 2}, "tp2,dp4"),
    ({**DENSE, "tie_word_embeddings": True}, {"world": 4, "tp": 4}, "tp4"),
    (NORMED, {"world": 4}, "dp4"),
    (NORMED, {"world": 8, "pp": 2, "rank": 4}, "pp2,dp4"),
    (MOE, {"world": 8, "ep": 4}, "ep4,dp8"),
    (MOE, {"world": 8, "tp": 2, "ep": 4, "etp": 1}, "tp2,ep4,etp1,dp4"),
    (MOE, {"world": 8, "tp": 2, "ep": 2}, "tp2,ep2,dp4"),
]


@pytest.fixture(scope="module")
def real() -> list[dict[str, int]]:
    script, jobs = SUPPORT / "megatron_sizes.py", json.dumps([(config, layout) for config, layout, _ in LAYOUTS])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), jobs], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: list[dict[str, int]] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.train
@pytest.mark.parametrize(
    "number", range(len(LAYOUTS)), ids=lambda n: f"{LAYOUTS[n][0]['model_type']}-{LAYOUTS[n][2] or 'alone'}"
)
def test_bytes_equal_megatron_core(real: list[dict[str, int]], number: int) -> None:
    config, _, words = LAYOUTS[number]
    estimate, found = memory(Model.read(config), preset("bf16_mixed"), Parallel.of(words)), real[number]
    items = {item.name: item.bytes for item in estimate.items}
    assert estimate.parameters == found["parameters"]
    # Megatron pads its buffers so that they divide by the ranks: a few hundred elements.
    assert items["parameters"] == pytest.approx(found["parameter bytes"], rel=1e-3)
    assert items["gradients"] == pytest.approx(found["gradients"], rel=1e-3)
    assert items["master parameters"] == pytest.approx(found["master parameters"], rel=5e-3)
    assert items["optimizer state"] == 2 * items["master parameters"]


def items(estimate: Estimate) -> dict[str, int]:
    return {item.name: item.bytes for item in estimate.items}


def linear_weights(model: Model) -> int:
    return sum(linear.weights for _, linear in model.all_linears())


def test_bf16_is_sixteen_bytes_a_parameter_and_two_more() -> None:
    estimate = memory(LLAMA, preset("bf16_mixed"))
    assert estimate.parameters == LLAMA.parameters  # 128256 needs no padding for one rank
    assert estimate.total == 18 * LLAMA.parameters
    spread = memory(LLAMA, preset("bf16_mixed"), Parallel(data=8))
    assert spread.total == pytest.approx((6 + 12 / 8) * LLAMA.parameters)
    whole = memory(LLAMA, preset("bf16_mixed"), Parallel(data=8, distributed_optimizer=False))
    assert whole.total == 18 * LLAMA.parameters
    assert memory(LLAMA, preset("fp16_mixed")).total == 16 * LLAMA.parameters  # gradients in FP16


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_fp8_adds_two_bytes_and_primary_weights_take_them_back(scaling: str) -> None:
    p = Precision(format="e4m3", scaling=scaling)
    weights = linear_weights(LLAMA)
    bf16, cast, primary = alternatives(LLAMA, p, machine=HOPPER)
    scales = items(cast)["FP8 scales"] + items(cast).get("amax histories", 0)
    assert cast.total - bf16.total == 2 * weights + scales
    assert cast.total - primary.total == 2 * weights
    assert primary.total - bf16.total == scales  # memory does not fall: TE#1261
    assert scales < 0.08 * weights


@pytest.mark.parametrize(("scaling", "copies"), [("delayed", 1), ("tensorwise", 1), ("blockwise", 2), ("mxfp8", 2)])
def test_blackwell_needs_no_transpose_of_per_tensor_weights(scaling: str, copies: int) -> None:
    bf16, cast, _ = alternatives(LLAMA, Precision(format="e4m3", scaling=scaling), machine=BLACKWELL)
    found = items(cast)
    assert found["FP8 weights by rows"] + found.get("FP8 weights by columns", 0) == copies * linear_weights(LLAMA)
    assert cast.total > bf16.total


def test_the_gather_halves_and_with_mxfp8_does_not() -> None:
    weights = linear_weights(LLAMA)
    for scaling, less in (("tensorwise", weights), ("blockwise", weights), ("mxfp8", 0)):
        _, cast, primary = alternatives(LLAMA, Precision(format="e4m3", scaling=scaling), Parallel(data=8))
        assert cast.gather - primary.gather == less
    assert memory(LLAMA, preset("bf16_mixed"), Parallel(distributed_optimizer=False)).gather == 0


def test_mxfp8_gathers_into_a_buffer_of_its_own_without_reuse() -> None:
    p = Precision(format="e4m3", scaling="mxfp8", fp8_param=True)
    reuse, own = (memory(LLAMA, p, Parallel(data=8, reuse_grad_buf=on)) for on in (True, False))
    assert own.total - reuse.total == 2 * linear_weights(LLAMA)


def test_kept_layers_and_odd_shapes_stay_in_bf16() -> None:
    kept = Precision(format="hybrid", scaling="tensorwise", first_layers=1, last_layers=1)
    assert items(memory(LLAMA, kept))["FP8 weights by rows"] == linear_weights(LLAMA) * 30 // 32
    moe = Model.read(DATA / "qwen3-30b-a3b.json")
    p = Precision(format="e4m3", scaling="blockwise", fp8_param=True)
    whole, cut = (items(memory(moe, p, Parallel.of(words))) for words in ("", "tp4"))
    assert whole["FP8 weights by rows"] == linear_weights(moe)
    # 768 / 4 = 192 columns have blocks that are cut short, and are FP8 parameters all the same; a kept linear has BF16
    # ones.
    fc2 = 48 * 128 * 2048 * 192
    assert cut["FP8 weights by rows"] * 4 == linear_weights(moe)
    kept_fc2 = memory(moe, p.replace(keep=("*.mlp.experts.linear_fc2",)), Parallel.of("tp4")).items[0].bytes
    assert kept_fc2 - cut["parameters"] == 2 * fc2


def test_amax_histories() -> None:
    p = preset("bf16_with_fp8_mixed")
    assert items(memory(LLAMA, p))["amax histories"] == 1024 * 5 * 4 * 32 * 4


def test_scales() -> None:
    blockwise, mx = (
        items(memory(LLAMA, Precision(format="e4m3", scaling=s)))["FP8 scales"] for s in ("blockwise", "mxfp8")
    )
    assert blockwise == 2 * 4 * linear_weights(LLAMA) // 128**2
    assert mx == 2 * linear_weights(LLAMA) // 32


def test_the_fullest_stage_is_told() -> None:
    stages = memory(LLAMA, preset("bf16_mixed"), Parallel(pipeline=4))
    assert stages.stage == 3  # the output head, and the final norm beside it
    assert LLAMA.parameters / 4 < stages.parameters < LLAMA.parameters / 2


def test_what_it_says() -> None:
    p = preset("bf16_with_fp8_blockwise_mixed")
    assert "as much as BF16" in savings(LLAMA, p, Parallel(data=8), HOPPER)
    assert "less than BF16" in savings(LLAMA, preset("bf16_with_fp8_mixed"), Parallel(data=8), BLACKWELL)
    assert savings(LLAMA, preset("bf16_mixed")) == ""
    assert any("sm100" in sentence for sentence in memory(LLAMA, preset("bf16_with_fp8_mixed")).assumptions)
    assert memory(LLAMA, p, machine=HOPPER).capacity == 140 * 2**30


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_an_estimate(name: str) -> None:
    for machine in (None, HOPPER, BLACKWELL, Machine.parse("cpu")):
        estimate = memory(LLAMA, preset(name), Parallel.of("tp2,pp2,dp4"), machine)
        assert json.loads(json.dumps(estimate.to_dict()))["total"] == estimate.total > 0


# ---------------------------------------------------------------------- four bits, and recipes by module


def _bytes(precision: Precision, machine: Machine = BLACKWELL) -> dict[str, int]:
    return {item.name: item.bytes for item in memory(LLAMA, precision, Parallel(), machine).items}


LINEARS = sum(sum(linear.parts) * linear.columns for _, linear in LLAMA.all_linears())


def test_nvfp4_takes_half_a_byte_for_a_code_and_one_for_sixteen() -> None:
    found = _bytes(preset("bf16_with_nvfp4_mixed"))
    count = len(list(LLAMA.all_linears()))
    assert found["NVFP4 weights by rows"] == found["NVFP4 weights by columns"] == LINEARS // 2
    assert found["NVFP4 scales"] == 2 * (LINEARS // 16 + 4 * count)
    kept = _bytes(preset("nemotron_3_super_bf16_with_nvfp4_mixed"))
    assert kept["NVFP4 weights by rows"] == LINEARS // 2 * 18 // 32


def test_a_backward_in_bf16_keeps_no_second_copy() -> None:
    for scaling, format in (("nvfp4", "e2m1"), ("blockwise", "e4m3")):
        p = Precision(format=format, scaling=scaling)
        for backward in ("dequantized", "high_precision"):
            assert not any("columns" in name for name in _bytes(p.replace(backward=backward), HOPPER))
        assert any("columns" in name for name in _bytes(p, HOPPER))


def test_rules_by_module_count_each_module_under_its_own_recipe() -> None:
    p = preset("bf16_with_nvfp4_mixed").replace(modules=(("*.linear_qkv", "bf16"), ("*.linear_fc*", "mxfp8")))
    by_name: dict[str, int] = {}
    for _, linear in LLAMA.all_linears():
        name = linear.name.rpartition("_")[2]
        by_name[name] = by_name.get(name, 0) + sum(linear.parts) * linear.columns
    found, fp8 = _bytes(p), by_name["fc1"] + by_name["fc2"]
    for side in ("rows", "columns"):
        assert (found[f"NVFP4 weights by {side}"], found[f"FP8 weights by {side}"]) == (by_name["proj"] // 2, fp8)
    assert (found["NVFP4 scales"], found["FP8 scales"]) == (2 * (by_name["proj"] // 16 + 4 * 32), 2 * fp8 // 32)
    assert not savings(LLAMA, p)


def test_a_label_says_every_recipe_that_it_counts() -> None:
    p = Precision(format="e4m3", scaling="blockwise", modules=(("*.linear_fc1", "mxfp8"), ("*.linear_fc2", "nvfp4")))
    items = {item.name: item for item in memory(LLAMA, p, Parallel(), BLACKWELL).items}
    assert items["FP8 scales"].why == "4 bytes for 128x128 values; 1 byte for 32 values"
    assert items["NVFP4 scales"].why == "1 byte for 16 values"
    tensorwise = p.replace(modules=(("*.linear_fc1", "tensorwise"),))
    assert any("sm100" in sentence for sentence in memory(LLAMA, tensorwise).assumptions)


def test_a_backward_of_its_own_reads_columns_of_its_own_kind() -> None:
    found = _bytes(preset("bf16_with_nvfp4_mixed").replace(weight_block="1x16", backward_scaling="mxfp8"))
    assert "NVFP4 weights by columns" not in found
    assert (found["NVFP4 weights by rows"], found["FP8 weights by columns"]) == (LINEARS // 2, LINEARS)
