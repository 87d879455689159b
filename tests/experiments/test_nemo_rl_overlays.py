"""The overlays for NeMo RL: up to date, read back as the contract they came from, and fit for the models they are
for."""

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

from nemo_fp8.preflight.agreement import check
from nemo_fp8.preflight.lint import lint
from nemo_fp8.render.nemo_rl import from_nemo_rl, ignored_by_nemo_rl, read_nemo_rl
from nemo_fp8.render.nemo_rl_fp4 import missing

FOLDER = Path(__file__).parents[2] / "recipes" / "nemo_rl"
_spec = importlib.util.spec_from_file_location("nemo_rl_overlays", FOLDER / "make.py")
make = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = make
_spec.loader.exec_module(make)

NAMES = list(make.OVERLAYS)
# Hugging Face's config.json and the parallelism of NeMo RL's file below the overlay.
MODELS = {
    "8B": ("llama-3-8b.json", "pp2,rollout-tp1"),
    "qwen30ba3b": ("qwen3-30b-a3b.json", "tp2,ep8,etp1,sp,rollout-tp{tp}"),
}


def test_nothing_else_lies_there():
    assert sorted(p.name for p in FOLDER.glob("*.yaml")) == sorted(make.files())


@pytest.mark.parametrize("name", make.files())
def test_overlays_are_up_to_date(name):
    assert (FOLDER / name).read_text() == make.files()[name], "run: python recipes/nemo_rl/make.py"


@pytest.mark.parametrize("name", [n for n in NAMES if not make.OVERLAYS[n].plugin])
def test_an_overlay_says_its_contract(name):
    overlay = make.OVERLAYS[name]
    text = (FOLDER / name).read_text()
    # Copied beside NeMo RL's files, Megatron's file of recipes lies where the overlay says.
    text = text.replace(f"examples/configs/{make.RECIPES}", str(FOLDER / make.RECIPES))
    # `keep` is said to the rollout alone; training keeps routers out of FP8 by itself.
    keep = overlay.contract.keep
    back = (
        from_nemo_rl(text)
        if not keep
        else from_nemo_rl(yaml.safe_dump(without_ignored(yaml.safe_load(text)))).replace(keep=keep)
    )
    assert back == overlay.contract
    assert ignored_by_nemo_rl(text) == []


def without_ignored(data):
    vllm_cfg = data["policy"]["generation"]["vllm_cfg"]
    # The key of NeMo RL 0.8 for MX rollouts, the older one where the newer raises: never both.
    del vllm_cfg[f"quantization_{'ignore_patterns' if vllm_cfg['is_mx'] else 'ignored_layer_kws'}"]
    assert not [name for name in vllm_cfg if name.startswith("quantization_")]
    return data


def test_the_plugin_takes_the_place_of_the_patches():
    data = yaml.safe_load((FOLDER / "grpo_math_8B_megatron_fp8_plugin.yaml").read_text())
    generation = data["policy"]["generation"]
    assert generation["vllm_cfg"]["precision"] == "bfloat16", "fp8 would call NeMo RL's init_fp8"
    assert generation["vllm_kwargs"]["quantization"] == "nemo_fp8"
    assert generation["vllm_kwargs"]["hf_overrides"]["quantization_config"]["weight_scale"] == "fp32"
    # Its reload API is for engines on GPUs of their own.
    assert generation["vllm_cfg"]["refit_with_reload_api"] is True
    assert generation["colocated"]["enabled"] is False


@pytest.mark.parametrize(("name", "model"), [(n, m) for n in NAMES for m in MODELS if m in n])
def test_shapes_fit(name, model):
    overlay = make.OVERLAYS[name]
    config, words = MODELS[model]
    tp = overlay.data()["policy"]["generation"]["vllm_cfg"].get("tensor_parallel_size", 1)
    path = Path(__file__).parents[1] / "models" / "data" / config
    errors = [f for f in lint(overlay.contract, model=path, parallel=words.format(tp=tp)) if f.severity == "error"]
    assert errors == []


def test_the_experts_would_not_fit_over_the_base_files_four_ranks():
    """Why the MoE overlay changes vLLM's tensor parallelism."""
    path = Path(__file__).parents[1] / "models" / "data" / "qwen3-30b-a3b.json"
    found = lint(
        make.OVERLAYS["grpo_math_qwen30ba3b_megatron_fp8_e2e.yaml"].contract,
        model=path,
        parallel="tp2,ep8,etp1,sp,rollout-tp4",
    )
    assert any("192" in f.what or "192" in f.why for f in found)


def test_the_nvfp4_overlay_lacks_none_of_the_five_places():
    text = (FOLDER / "grpo_math_qwen30ba3b_megatron_nvfp4_e2e.yaml").read_text()
    train, rollout = read_nemo_rl(text.replace(f"examples/configs/{make.RECIPES}", str(FOLDER / make.RECIPES)))
    assert missing(train, rollout) == []
    assert check(train=train, rollout=rollout).agrees
