"""A contract is given by itself, or by the name of a preset or of a YAML file, to whatever asks for one."""

import pytest
import torch
from safetensors.torch import save_file

import nemo_fp8
from nemo_fp8 import PrecisionError, check, preset
from nemo_fp8.inspection.measure import inspect_checkpoint
from nemo_fp8.mismatch import Run, sides_apart
from nemo_fp8.mismatch.weights import compare_weights, reference
from nemo_fp8.render import render
from nemo_fp8.render.vllm import to_vllm
from nemo_fp8.rollout import engine_args, environment

NAME = "bf16_with_fp8_blockwise_mixed"
WEIGHTS = {"model.layers.0.mlp.up_proj.weight": torch.linspace(-1, 1, 128 * 128).view(128, 128).bfloat16()}


def _codes(weights):
    return [(name, q.data.view(torch.uint8).tolist(), q.scale_inv.tolist()) for name, q in weights]


ASKERS = {
    "check": lambda given, folder: check(train=given, rollout=given),
    "autocast": lambda given, folder: nemo_fp8.autocast(given).precision,
    "render": lambda given, folder: render(given, "nemo"),
    "to_vllm": lambda given, folder: to_vllm(given),
    "engine_args": lambda given, folder: engine_args(given),
    "environment": lambda given, folder: environment(given),
    "sides_apart": lambda given, folder: list(sides_apart(WEIGHTS, given)),
    "reference": lambda given, folder: _codes(reference(WEIGHTS, given)),
    "compare_weights": lambda given, folder: compare_weights(WEIGHTS, {}, given),
    "a forward": lambda given, folder: Run(given),
    "inspect": lambda given, folder: inspect_checkpoint(folder, given).recipes,
}


@pytest.fixture
def folder(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("asker", ASKERS)
def test_a_name_stands_for_its_contract(asker, folder):
    ask = ASKERS[asker]
    assert ask(NAME, folder) == ask(preset(NAME), folder)
    for wrong, words in (
        ("bf16_with_fp8_blokwise_mixed", f"Did you mean '{NAME}'"),
        ("nowhere.yaml", "There is no file nowhere.yaml"),
        (5, "5 is no contract"),
    ):
        with pytest.raises(PrecisionError, match=words) as caught:
            ask(wrong, folder)
        assert all(problem.why and problem.remedy for problem in caught.value.problems)
