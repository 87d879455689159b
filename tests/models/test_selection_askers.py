"""Whoever asks which linears run in FP8 gets one answer: training, ``autocast``, inspect, lint, memory, the exporter,
the engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.inspection.measure import Row, _kept
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.names import place
from nemo_fp8.models.selection import KEEP, SHAPE, Kept, why_kept
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.stored import stored
from nemo_fp8.models.units import part_names, select
from nemo_fp8.numerics.selection import linear_weights
from nemo_fp8.preflight.memory import memory
from nemo_fp8.preflight.shapes import audit

LAYERS = 3
UNITS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
PATTERNS = [
    (),
    ("*.q_proj",),
    ("*.linear_qkv",),
    ("model.layers.1.self_attn.v_proj",),
    ("decoder.layers.2.*",),
    ("*layers.0.mlp*",),
    ("*.linear_fc1", "*.o_proj"),
    ("re:down_proj$",),
    ("re:layers\\.[12]\\.mlp\\.linear_fc2$",),
    ("*.router", "lm_head"),
]
ENDS = [(0, 0), (1, 0), (0, 1), (1, 1)]


def config(**sizes: Any) -> dict[str, Any]:
    usual = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return {"model_type": "llama", "vocab_size": 1024, "num_hidden_layers": LAYERS, **usual, **sizes}


def plain_model() -> torch.nn.Module:
    """A decoder's linears in plain torch, under Hugging Face's names, without memory."""

    def module(**parts: torch.nn.Module) -> torch.nn.Module:
        made = torch.nn.Module()
        for name, part in parts.items():
            made.add_module(name, part)
        return made

    def layer() -> torch.nn.Module:
        attention = {f"{n}_proj": torch.nn.Linear(256, 256) for n in "qkvo"}
        mlp = {
            "gate_proj": torch.nn.Linear(256, 512),
            "up_proj": torch.nn.Linear(256, 512),
            "down_proj": torch.nn.Linear(512, 256),
        }
        return module(self_attn=module(**attention), mlp=module(**mlp, gate=torch.nn.Linear(256, 32)))

    with torch.device("meta"):
        layers = torch.nn.ModuleList(layer() for _ in range(LAYERS))
        return module(model=module(layers=layers), lm_head=torch.nn.Linear(256, 1024))


def hugging_face() -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in plain_model().named_modules()
        if hasattr(module, "weight")
    }


@pytest.mark.parametrize("keep", PATTERNS, ids=" ".join)
@pytest.mark.parametrize("ends", ENDS)
def test_names_mean_the_same_to_everybody(keep: tuple[str, ...], ends: tuple[int, int]) -> None:
    """Under whatever name a pattern knows a linear, in Megatron, in Hugging Face or in vLLM."""
    fields = {"keep": keep, "first_layers": ends[0], "last_layers": ends[1]}
    p = preset("bf16_with_fp8_blockwise_mixed").replace(**fields)
    model, linears = Model.read(config()), [(layer, unit) for layer in range(LAYERS) for unit in UNITS]

    def kept_in(side: str) -> set[tuple[int, str]]:
        return {at for at, fate in stored(model, p, Parallel(), side).items() if isinstance(fate, Kept)}

    expected = kept_in("train")
    megatron = {
        at: why_kept(p, (f"decoder.layers.{at[0]}.{at[1]}",), [((256,), 256)], LAYERS, side="train") for at in linears
    }
    ran = {(place(name).layer, place(name).unit) for name in linear_weights(plain_model(), p)}
    tensors = hugging_face()
    rows = {
        name: Row(name, "weight", place(name), shape, "BF16") for name, shape in tensors.items() if not place(name).kept
    }
    inspected = {(row.place.layer, row.place.unit) for row in rows.values() if _kept(p, row, LAYERS, 0)}
    exported = {(place(name).layer, place(name).unit) for name in select(tensors, p, layers=LAYERS).quantized}
    fused = {"linear_qkv": "self_attn.qkv_proj", "linear_proj": "self_attn.o_proj"}
    fused |= {"linear_fc1": "mlp.gate_up_proj", "linear_fc2": "mlp.down_proj"}
    vllm = {
        (layer, unit): why_kept(
            p, part_names(f"model.layers.{layer}.{fused[unit.split('.')[1]]}"), [((256,), 256)], LAYERS
        )
        for layer, unit in linears
    }
    assert {at for at, kept in megatron.items() if kept} == expected
    assert set(linears) - ran == expected
    assert inspected == expected
    assert kept_in("rollout") == set(linears) - exported == {at for at, kept in vllm.items() if kept} == expected
    if not keep and ends == (0, 0):
        assert expected == set()
    elif keep not in ((), ("*.router", "lm_head")):
        assert any(kept.rule == KEEP for kept in megatron.values() if kept) or ends != (0, 0)


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shapes_of_training_mean_the_same_to_everybody(scaling: str, tp: int) -> None:
    """What a rank's GEMMs take, written down here once more, against the table, the memory estimate, and what the
    plugin asks."""
    p, kept, linears, multiple = Precision(format="e4m3", scaling=scaling), 0, 0, 32 if scaling == "mxfp8" else 16
    for hidden, ffn, head_dim, (heads, kv) in itertools.product(
        (128, 336, 344, 448, 512, 2880), (352, 512, 1000, 1048, 1408), (56, 64, 80, 128), ((4, 4), (8, 4), (12, 4))
    ):
        across = heads * head_dim
        shapes = {
            "self_attention.linear_qkv": ((across + 2 * kv * head_dim) // tp, hidden),
            "self_attention.linear_proj": (hidden, across // tp),
            "mlp.linear_fc1": (2 * (ffn // tp), hidden),
            "mlp.linear_fc2": (hidden, ffn // tp),
        }
        fits = {name: rows % multiple == 0 and columns % multiple == 0 for name, (rows, columns) in shapes.items()}
        sizes = {"hidden_size": hidden, "intermediate_size": ffn, "head_dim": head_dim}
        model = Model.read(config(**sizes, num_attention_heads=heads, num_key_value_heads=kv, num_hidden_layers=1))
        layout = Parallel(tensor=tp)
        assert {row.name: row.train == "FP8" for row in audit(model, p, layout)} == fits
        asked = {
            name: why_kept(p, (f"decoder.layers.0.{name}",), [((rows,), columns)], side="train")
            for name, (rows, columns) in shapes.items()
        }
        assert {name: held is None for name, held in asked.items()} == fits
        assert {held.rule for held in asked.values() if held} <= {SHAPE}
        in_fp8 = sum(rows * columns for name, (rows, columns) in shapes.items() if fits[name])
        assert {item.name: item.bytes for item in memory(model, p, layout).items}.get(
            "FP8 weights by rows", 0
        ) == in_fp8
        linears, kept = linears + 4, kept + sum(not fit for fit in fits.values())
    assert linears / 20 < kept < linears, "a sweep in which everything fares alike shows nothing"


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "data").glob("*.json")), ids=lambda f: f.stem)
def test_real_models_fare_alike_in_lint_and_in_a_checkpoint(file: Path, name: str) -> None:
    model, p = Model.read(file), preset(name)
    tensors = {
        f"model.layers.{layer}.{part.replace('*', '0')}.weight": (rows, linear.columns)
        for layer, linear in model.all_linears()
        for part, rows in zip(linear.hugging_face, linear.parts, strict=True)
    }
    chosen = select(tensors, p, layers=model.layers)
    fates = stored(model, p, Parallel(), "rollout")
    for layer, linear in model.all_linears():
        parts = {f"model.layers.{layer}.{part.replace('*', '0')}.weight" for part in linear.hugging_face}
        assert parts <= (chosen.kept.keys() if isinstance(fates[layer, linear.name], Kept) else chosen.quantized)
    assert p.rollout != "fp8" or chosen.quantized
