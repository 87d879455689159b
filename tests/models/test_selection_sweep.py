"""Lint's word on which layers roll out in FP8, against the rule that the vLLM plugin and the exporter obey, over a
sweep of shapes.

The shares of vLLM's workers are written down here from its linear layers, so that lint is held to an engine and not to
itself. With real engines the same is asked in tests/rollout/test_selection.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.findings import worst
from nemo_fp8.models.layout import Parallel
from nemo_fp8.models.selection import misfit, share_misfit, why_kept
from nemo_fp8.models.shapes import Model
from nemo_fp8.models.units import part_names, select
from nemo_fp8.preflight.lint import lint
from nemo_fp8.preflight.shapes import audit

CONTRACTS = {
    block: preset("bf16_with_mxfp8_mixed" if block == "1x32" else "bf16_with_fp8_blockwise_mixed").replace(
        rollout_block=block
    )
    for block in ("128x128", "tensor", "1x32")
}
LAYERS = 2


def llama(hidden: int, ffn: int, head_dim: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "head_dim": head_dim,
        "vocab_size": 1024,
        "num_hidden_layers": LAYERS,
    }
    return {"model_type": "llama", **sizes, "num_attention_heads": heads, "num_key_value_heads": kv, **more}


def said(config: dict[str, Any], p: Precision, parallel: str = "") -> dict[str, set[str]]:
    """What lint's table says of each linear's rollout."""
    found: dict[str, set[str]] = {}
    for row in audit(Model.read(config), p, Parallel.of(parallel)):
        found.setdefault(row.name, set()).add(row.rollout)
    return found


def done(p: Precision, whole: tuple[int, ...], columns: int, rows: int, share: int) -> set[str]:
    """What the plugin does with a linear: its parts and columns unsharded, and the rows and columns of one worker's
    share."""
    return {"BF16" if misfit(p, whole, columns) or share_misfit(p, rows, share) else "FP8"}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("block", CONTRACTS)
def test_dense_layers_on_every_rank(block: str, tp: int) -> None:
    p, linears, kept = CONTRACTS[block], 0, 0
    for hidden, ffn, head_dim, (heads, kv) in itertools.product(
        (128, 256, 320, 336, 448, 512, 640, 2880),
        (352, 512, 1000, 1024, 1408, 2880),
        (64, 80, 128),
        ((4, 1), (4, 4), (8, 2), (12, 4)),
    ):
        q, one, across = heads * head_dim // tp, max(kv // tp, 1) * head_dim, heads * head_dim
        expected = {
            "self_attention.linear_qkv": done(p, (across, kv * head_dim, kv * head_dim), hidden, q + 2 * one, hidden),
            "self_attention.linear_proj": done(p, (hidden,), across, hidden, q),
            "mlp.linear_fc1": done(p, (ffn, ffn), hidden, 2 * (ffn // tp), hidden),
            "mlp.linear_fc2": done(p, (hidden,), ffn, hidden, ffn // tp),
        }
        config = llama(hidden, ffn, head_dim, heads, kv)
        assert said(config, p, f"rollout-tp{tp}") == expected, config
        linears, kept = linears + 4, kept + sum("BF16" in fate for fate in expected.values())
    assert linears / 20 < kept < linears, "a sweep in which everything fares alike shows nothing"


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("block", "rule", "scaling"), [("128x128", "1x32", "mxfp8"), ("1x32", "128x128", "blockwise")])
def test_a_linear_with_a_rule_of_its_own_fits_by_that_rule(block: str, rule: str, scaling: str, tp: int) -> None:
    """An engine asks what the linear's own recipe takes of a worker's share; lint asked what the contract's takes."""
    p, apart = CONTRACTS[block].replace(modules=(("*.linear_fc2", scaling),)), 0
    for hidden, ffn in itertools.product((256, 384, 640), (256, 352, 384, 512, 768)):
        whole, share = (hidden,), (hidden, ffn // tp)
        found = said(llama(hidden, ffn, 64, 4, 4), p, f"rollout-tp{tp}")
        assert found["mlp.linear_fc2"] == done(CONTRACTS[rule], whole, ffn, *share), (hidden, ffn)
        assert found["mlp.linear_fc1"] == done(CONTRACTS[block], (ffn, ffn), hidden, 2 * (ffn // tp), hidden)
        apart += found["mlp.linear_fc2"] != done(CONTRACTS[block], whole, ffn, *share)
    assert apart


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("block", CONTRACTS)
def test_experts_are_one_unit_and_their_shares_are_padded(block: str, tp: int) -> None:
    p = CONTRACTS[block]
    for hidden, inner, words in itertools.product((256, 320), (128, 192, 256, 320, 768), ("", f",rollout-tp{tp}")):
        config = llama(hidden, 512, 64, 4, 4, model_type="qwen3_moe", num_experts=8, moe_intermediate_size=inner)
        experts = why_kept(
            p,
            part_names("model.layers.0.mlp.experts", experts=8),
            [((inner, inner), hidden), ((hidden,), inner)],
            2,
            experts=8,
        )
        found = said(config, p, f"ep2{words}")
        assert (
            found["mlp.experts.linear_fc1"] == found["mlp.experts.linear_fc2"] == {"FP8" if experts is None else "BF16"}
        ), config


@pytest.mark.parametrize("rank", [128, 192, 1536])
def test_latent_attention_is_fused_as_vllm_fuses_it(rank: int) -> None:
    p = CONTRACTS["128x128"]
    ranks = {
        "q_lora_rank": rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    config = llama(256, 512, 64, 4, 4, model_type="deepseek_v3", **ranks)
    found = said(config, p)
    down = why_kept(p, part_names("model.layers.0.self_attn.fused_qkv_a_proj"), [((rank, 512 + 64), 256)], LAYERS)
    fate = {"FP8" if down is None else "BF16"}
    assert found["self_attention.linear_q_down_proj"] == found["self_attention.linear_kv_down_proj"] == fate
    kept = said(config, p.replace(keep=("*.kv_a_proj_with_mqa",)))
    assert kept["self_attention.linear_q_down_proj"] == kept["self_attention.linear_kv_down_proj"] == {"BF16"}


@pytest.mark.parametrize(
    "keep", [(), ("*.q_proj",), ("*layers.0.mlp*",), ("*.linear_fc2",), ("*.experts.7.up_proj",), ("re:experts",)]
)
@pytest.mark.parametrize("ends", [(0, 0), (1, 0), (1, 1)])
def test_whatever_is_kept_is_what_the_exporter_keeps(keep: tuple[str, ...], ends: tuple[int, int]) -> None:
    p = CONTRACTS["128x128"].replace(keep=keep, first_layers=ends[0], last_layers=ends[1])
    config = llama(
        256, 512, 64, 4, 4, model_type="qwen3_moe", num_experts=8, moe_intermediate_size=128, num_hidden_layers=3
    )
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(3):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{n}_proj.weight": (256, 256) for n in "qkvo"}
        for e in range(8):
            names = {"gate": (128, 256), "up": (128, 256), "down": (256, 128)}
            shapes |= {f"{at}mlp.experts.{e}.{n}_proj.weight": shape for n, shape in names.items()}
    written = select(shapes, p, layers=3).quantized
    of = {"self_attention.linear_qkv": "q_proj", "self_attention.linear_proj": "o_proj"}
    of |= {"mlp.experts.linear_fc1": "0.up_proj", "mlp.experts.linear_fc2": "0.down_proj"}
    for name, fates in said(config, p).items():
        assert fates == {
            "FP8" if tensor in written else "BF16" for tensor in shapes if tensor.endswith(f"{of[name]}.weight")
        }, name


def test_a_layer_that_stays_is_a_warning_and_an_error_where_the_contract_is_strict() -> None:
    """As gpt-oss: hidden 2880 is no multiple of 128, and the plugin keeps such a layer without an error."""
    config = llama(2880, 7680, 64, 45, 9)
    for strict, severity, word in ((False, "warning", "BF16"), (True, "error", "refused")):
        p = CONTRACTS["128x128"].replace(strict=strict)
        found = [f for f in lint(p, model=config, machine="h100") if f.code == "rollout-kept"]
        assert {f.severity for f in found} == {severity}
        assert "2880 columns are not a multiple of 128" in " ".join(f.what for f in found)
        assert said(config, p)["mlp.linear_fc1"] == {word}
        assert worst(found) == severity
