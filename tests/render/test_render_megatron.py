"""Megatron-LM's flags: both ways, and against the configs of the installed megatron-core that they end in."""

import dataclasses
import shlex

import pytest
from hypothesis import given
from support.strategies import contracts, ruled_contracts

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS, preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import megatron, render


@pytest.fixture(scope="module")
def core_fields():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    return {f"{c.__name__}.{f.name}" for c in classes for f in dataclasses.fields(c)}


def test_every_flag_ends_in_a_field_of_the_installed_megatron_core(core_fields):
    for name, flag in megatron.FLAGS.items():
        assert set(flag.core) <= core_fields, name
        assert flag.core or name == "--fp4-format"


@given(contracts() | ruled_contracts())
def test_every_contract_reads_back_but_for_what_the_notes_name(contract):
    rendering = render(contract, "megatron")
    back = megatron.from_megatron(rendering.data["flags"])
    assert set(contract.diff(back)) == set(rendering.lost)
    assert all(any(field in note for note in rendering.notes) for field in rendering.lost)
    assert megatron.from_megatron(rendering.text) == back, "the text and the words say the same"
    assert shlex.split(rendering.text.replace("\\\n", " ")) == rendering.data["flags"]


def test_only_fp8_attention_and_what_no_trainer_has_is_lost_of_a_preset():
    for p in PRESETS.values():
        assert render(p, "megatron").lost == (), p.name
    lost = render(preset("bf16_with_fp8_mixed").replace(attention=True), "megatron")
    assert lost.lost == ("attention",)
    assert "no flag" in lost.notes[0]


def test_a_whole_command_line_is_read():
    p = megatron.from_megatron(
        "torchrun pretrain_gpt.py --num-layers 32 --bf16 --fp8-format=e4m3 --fp8-recipe blockwise --lr 3e-4 "
        "--seq-length 4096"
    )
    assert p == Precision(format="e4m3", scaling="blockwise")


def test_megatrons_own_defaults():
    assert megatron.from_megatron("--bf16").grad_reduce == "fp32"
    assert megatron.from_megatron("--bf16 --grad-reduce-in-bf16").grad_reduce == "compute"
    assert megatron.from_megatron("--fp16").grad_reduce == "compute"
    assert megatron.from_megatron("").compute == "fp32"
    kept = megatron.from_megatron("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16")
    assert (kept.first_layers, kept.last_layers) == (1, 1)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--bf16 --fp8-fromat hybrid", "Did you mean '--fp8-format'"),
        ("--bf16 --fp8-format e5m2", "hybrid"),
        ("--bf16 --fp8-format hybrid --fp8-margin", "cannot be read"),
        ("--bf16 --fp16", "exclude"),
        ("--bf16 --fp4-format e2m2", "e2m1"),
        ("--bf16 --fp4-format e2m1 --fp8-format hybrid", "one or the other"),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --num-layers-at-start-in-bf16 2",
            "first_last_layers_bf16",
        ),
        ("--bf16 --fp8-recipe blockwise", "format"),
    ],
)
def test_slips_are_refused(line, word):
    with pytest.raises(PrecisionError, match=word):
        megatron.from_megatron(line)
