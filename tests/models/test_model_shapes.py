"""Models from a config.json: every parameter that transformers builds, no more and no less."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_fp8.errors import PrecisionError
from nemo_fp8.models.layout import WORDS, Parallel
from nemo_fp8.models.shapes import Model

DATA = Path(__file__).parent / "data"
SHIPPED = sorted(path.name for path in DATA.glob("*.json"))
# The published totals, which the models are named after.
BILLIONS = {"llama-3-8b.json": 8.03, "qwen3-8b.json": 8.19, "qwen3-30b-a3b.json": 30.5, "mixtral-8x7b.json": 46.7}

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 96,
    "intermediate_size": 128,
}
VARIANTS = [
    {"model_type": "llama", **SMALL},
    {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", **SMALL, "tie_word_embeddings": True, "head_dim": 32},
    {"model_type": "mistral", **SMALL, "num_key_value_heads": 1},
    {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2},
    {"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True},
    {"model_type": "mixtral", **SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    {"model_type": "qwen3_moe", **SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6,
    "moe_intermediate_size": 32}, {"model_type": "qwen3_moe", **SMALL, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 6, "moe_intermediate_size": 32, "decoder_sparse_step": 2}, {"model_type": "qwen3_moe", **SMALL,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "moe_intermediate_size": 32, "mlp_only_layers": [0, 2]},
    *( {"model_type": "deepseek_v3", **SMALL, "num_key_value_heads": 4, "q_lora_rank": rank, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "n_routed_experts": 8, "n_shared_experts": shared,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "attention_bias": bias} for
    rank, shared, bias in ((None, 1, False), (32, 2, True)) ), {"model_type": "gpt2", "n_embd": 64, "n_head": 4,
    "n_layer": 3, "n_positions": 32, "vocab_size": 96}, {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3,
    "n_positions": 32, "vocab_size": 96, "n_inner": 192}, ]  # fmt: skip


def built(config: dict[str, object]) -> dict[str, int]:
    """Every parameter of the real model, built without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = str(config["model_type"])
    real = AutoConfig.for_model(
        kind, **{k: v for k, v in config.items() if k not in ("model_type", "architectures", "torch_dtype")}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(real)
    return {name: p.numel() for name, p in model.named_parameters()}  # a tied head is named once


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c['model_type']}-{len(c)}")
def test_parameters_equal_transformers(config: dict[str, object]) -> None:
    assert Model.read(config).parameters == sum(built(config).values())


@pytest.mark.parametrize("name", ["llama-3-8b.json", "qwen3-8b.json"])
def test_shipped_models_equal_transformers(name: str) -> None:
    assert Model.read(DATA / name).parameters == sum(built(json.loads((DATA / name).read_text())).values())


@pytest.mark.parametrize("name", ["qwen3-30b-a3b.json", "mixtral-8x7b.json"])
def test_shipped_moe_models_equal_transformers(name: str) -> None:
    # A full MoE model has 18,000 modules; two of its layers tell what each further layer adds.
    config = json.loads((DATA / name).read_text())
    one, two = (sum(built({**config, "num_hidden_layers": n}).values()) for n in (1, 2))
    assert Model.read(DATA / name).parameters == one + (two - one) * (config["num_hidden_layers"] - 1)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_are_what_they_are_called(name: str) -> None:
    assert Model.read(DATA / name).parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.003)


# GPT-2 names its modules otherwise; its shapes are what count.
@pytest.mark.parametrize(
    "config", [c for c in VARIANTS if c["model_type"] != "gpt2"], ids=lambda c: f"{c['model_type']}-{len(c)}"
)
def test_hugging_face_names_are_real(config: dict[str, object]) -> None:
    real, model = built(config), Model.read(config)
    for layer, linear in model.all_linears():
        for name, part in zip(linear.hugging_face, linear.parts, strict=True):
            assert real[f"model.layers.{layer}.{name.replace('*', '0')}.weight"] == part * linear.columns


def test_a_folder_and_a_wrapped_text_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": VARIANTS[0]}))
    assert Model.read(tmp_path) == Model.read(VARIANTS[0])


MOE = {"num_experts": 4, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama", **SMALL}, "Did you mean 'llama'"),
        ({**SMALL}, "model_type"),
        ({"model_type": "llama", "hidden_size": 64}, "num_attention_heads"),
        ({"model_type": "gpt2", "n_embd": "64"}, "n_embd"),
        ({"model_type": ["llama"], **SMALL}, "model_type"),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": True}, "num_hidden_layers"),
        ({"text_config": "llama"}, "text_config"),
        ({"model_type": "qwen3_moe", **SMALL, **MOE, "decoder_sparse_step": "2"}, "of the wrong kind"),
        ({"model_type": "qwen3_moe", **SMALL, **MOE, "mlp_only_layers": 5}, "of the wrong kind"),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused(config: dict[str, object], says: str) -> None:
    with pytest.raises(PrecisionError, match=says):
        Model.read(config)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match=r"config\.json"):
        Model.read(tmp_path)


def test_tensor_parallelism_cuts_one_side() -> None:
    qkv, proj, fc1, fc2 = Model.read(DATA / "llama-3-8b.json").dense
    assert qkv.on_rank(4) == ((1024, 256, 256), 4096)
    assert proj.on_rank(4) == ((4096,), 1024)
    assert fc1.on_rank(4) == ((3584, 3584), 4096)
    assert fc2.on_rank(4) == ((4096,), 3584)


def test_parallel_words() -> None:
    p = Parallel.of("tp4,pp2,ep=8,sp,seq4096,no-distopt,rollout-tp2,reuse-grad-buf")
    split = Parallel(tensor=4, pipeline=2, expert=8, sequence_parallel=True, seq_length=4096)
    assert p == replace(split, distributed_optimizer=False, rollout_tensor=2, reuse_grad_buf=True)
    assert (p.experts_cut, p.rollout_cut, Parallel(tensor=4).rollout_cut) == (4, 2, 4)
    assert set(WORDS.values()) == set(Parallel.__dataclass_fields__)
    assert Parallel.of({"tensor": 4}) == Parallel.of(Parallel(tensor=4)) == Parallel.parse("tp4")


@pytest.mark.parametrize("words", ["tpp4", "tp", "sp4", "no-tp4", "tp-4", "tp0", "tp1,tp2", "sp,no-sp"])
def test_a_parallel_word_that_means_nothing_is_refused(words: str) -> None:
    with pytest.raises(PrecisionError):
        Parallel.parse(words)


def test_the_number_of_experts_under_the_name_that_transformers_5_writes() -> None:
    config = {"model_type": "qwen3_moe", **SMALL, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32}
    assert Model.read({**config, "num_local_experts": 6}) == Model.read({**config, "num_experts": 6})
    assert Model.read({**config, "num_local_experts": 6}).experts == 6


@pytest.mark.parametrize("wrong", [None, 3, [], b"config.json"])
def test_what_is_no_model_and_no_layout_is_said(wrong):
    with pytest.raises(PrecisionError, match="is no model"):
        Model.read(wrong)
    if wrong is not None:  # no layout is that of one rank
        with pytest.raises(PrecisionError, match="is no layout of ranks"):
            Parallel.of(wrong)
