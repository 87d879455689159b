"""NeMo's checkpoints and live models as Hugging Face's: the same tensors from every layout, and logits that
transformers computes too."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.train.harness import train_tiny
from support.train.named_tensors_probe import SAMPLE

from nemo_fp8 import PrecisionError, preset
from nemo_fp8.export import export, verify
from nemo_fp8.train.nemo_checkpoint import NemoCheckpoint
from nemo_fp8.train.to_hugging_face import config_of, named_tensors

# Weights large enough that every layer has its say in the logits: with NeMo's 0.02 the heads of Q could be shuffled
# unnoticed.
SIZES = {"hidden_size": 256, "ffn_hidden_size": 512, "init_method_std": 0.1}
FP8 = {"plugin": "bf16_with_fp8_subchannel_scaling_mixed", "settings": {"fp8_param_gather": True}, "stock": False}
RUNS = {
    "llama": {"model": "llama"},
    "llama-tp2": {"model": "llama", "ranks": 2, "tp": 2, "sequence_parallel": True},
    "llama-pp2": {"model": "llama", "ranks": 2, "pp": 2},
    "llama-tied-pp2": {"model": "llama", "ranks": 2, "pp": 2, "config": {"share_embeddings_and_output_weights": True}},
    "llama-fp8-weights": {"model": "llama", "ranks": 2, **FP8},
    "mixtral-ep2": {"model": "mixtral", "ranks": 2, "ep": 2},
    "qwen": {"model": "qwen"},
}
STEPS = 3


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """``trained(name)`` is the folder of a short run, with its checkpoint, its live tensors and its logits."""
    made = {}

    def give(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            run = {"steps": STEPS, "save_every": STEPS, "folder": str(folder), **RUNS[name]}
            run["config"] = SIZES | run.get("config", {})
            env = {"NEMO_FP8_TEST_FOLDER": str(folder)}
            train_tiny(
                run.pop("plugin", "bf16_mixed"),
                probe="support.train.named_tensors_probe:save",
                env=env,
                timeout=180,
                **run,
            )
            made[name] = folder
        return made[name]

    return give


def checkpoint(folder):
    return folder / f"tiny/run/checkpoints/step={STEPS - 1}"


def logits_of_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16, attn_implementation="eager")
    ids = AutoTokenizer.from_pretrained(folder)(SAMPLE, return_tensors="pt").input_ids
    with torch.no_grad():
        return model(ids[:, : ids.shape[1] // 16 * 16]).logits[0].float()


# Two orders of the same BF16 sums are a few steps of 2**-8 apart, and here and there a router takes another expert. FP8
# training rounds activations too, which the BF16 model of transformers does not.
ROUNDING, FP8_ROUNDING = 0.02, 0.12


def distance(a, b):
    """How far apart logits are, against how much they vary."""
    return float((a - b).abs().mean() / b.std())


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_and_live_model_give_the_same_tensors(trained, name):
    """On every rank, whatever the layout: gathered over tensor, expert and pipeline parallel ranks, or read from the
    disk."""
    folder = trained(name)
    stored = dict(named_tensors(checkpoint(folder)))
    for rank in range(RUNS[name].get("ranks", 1)):
        live = load_file(folder / f"live-{rank}.safetensors")
        assert live.keys() == stored.keys()
        wrong = [key for key in live if not torch.equal(live[key], stored[key])]
        assert not wrong


@pytest.mark.parametrize("name", ["llama", "llama-tp2", "llama-fp8-weights", "mixtral-ep2", "qwen"])
def test_transformers_computes_the_logits_of_megatron(trained, name, tmp_path):
    folder = trained(name)
    source = NemoCheckpoint.open(checkpoint(folder))
    export(source, tmp_path / "hf", preset("bf16_mixed"))
    ours = load_file(folder / "logits.safetensors")["logits"]
    right = distance(logits_of_transformers(tmp_path / "hf"), ours)
    assert right < (FP8_ROUNDING if "fp8" in name else ROUNDING)
    # The same bound tells when parts were mixed up.
    weights = load_file(tmp_path / "hf/model.safetensors")
    for wrong in mixed_up(weights):
        save_file(weights | wrong, tmp_path / "hf/model.safetensors", {"format": "pt"})
        assert distance(logits_of_transformers(tmp_path / "hf"), ours) > 1.5 * right


def mixed_up(weights):
    """What an exporter may get wrong in one layer: the order of heads, gate for up, K for V."""
    at = "model.layers.2."
    q, k, v = (f"{at}self_attn.{n}_proj.weight" for n in "qkv")
    heads = weights[q].shape[0] // 4
    yield {q: weights[q].view(4, heads, -1)[[2, 3, 0, 1]].flatten(0, 1)}
    yield {k: weights[v], v: weights[k]}
    names = ("mlp.gate_proj", "mlp.up_proj") if f"{at}mlp.gate_proj.weight" in weights else None
    gate, up = (f"{at}{n}.weight" for n in names or ("block_sparse_moe.experts.1.w1", "block_sparse_moe.experts.1.w3"))
    yield {gate: weights[up], up: weights[gate]}


def test_all_layouts_name_the_same_tensors_in_the_same_order(trained):
    names = {
        name: [*NemoCheckpoint.open(checkpoint(trained(name))).tensors] for name in RUNS if name.startswith("llama")
    }
    assert names["llama"] == names["llama-tp2"] == names["llama-pp2"] == names["llama-fp8-weights"]
    assert names["llama-tied-pp2"] == [name for name in names["llama"] if name != "lm_head.weight"]


@pytest.mark.parametrize("name", ["llama-tp2", "mixtral-ep2"])
def test_an_fp8_export_of_a_nemo_checkpoint(trained, name, tmp_path):
    source = NemoCheckpoint.open(checkpoint(trained(name)))
    exported = export(source, tmp_path / "fp8", preset("bf16_with_fp8_blockwise_mixed"))
    assert verify(exported.plan, tmp_path / "fp8").holds
    files = {path.name for path in (tmp_path / "fp8").iterdir()}
    assert {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "nemo_fp8_export.json",
    } <= files
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    assert config["architectures"] == config_of(checkpoint(trained(name)))["architectures"]


def test_a_live_config_says_what_the_checkpoint_says(trained):
    folder = trained("qwen")
    live, stored = json.loads((folder / "live.json").read_text()), config_of(checkpoint(folder))
    assert {key: live[key] for key in stored if not key.endswith("_token_id")} == {
        key: value for key, value in stored.items() if not key.endswith("_token_id")
    }


def test_what_is_no_checkpoint(tmp_path, trained):
    with pytest.raises(PrecisionError, match="no NeMo checkpoint"):
        NemoCheckpoint.open(tmp_path)
    folder = checkpoint(trained("llama"))
    marker = folder.with_name(folder.name + "-unfinished")
    marker.touch()
    try:
        with pytest.raises(PrecisionError, match="half-written"):
            NemoCheckpoint.open(folder)
    finally:
        marker.unlink()
