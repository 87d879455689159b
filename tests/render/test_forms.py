"""A contract's own forms are lossless: every valid contract, through dict, YAML, pickle and replace."""

import json
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.strategies import contracts, ruled_contracts

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import RENDERERS, render


@given(contracts() | ruled_contracts())
def test_dict_yaml_json_and_pickle_are_lossless(contract):
    assert Precision.from_dict(contract.to_dict()) == contract
    assert Precision.from_dict(json.loads(json.dumps(contract.to_dict()))) == contract
    assert Precision.from_yaml(contract.to_yaml()) == contract
    assert pickle.loads(pickle.dumps(contract)) == contract
    assert contract.diff(contract) == {}


@given(contracts() | ruled_contracts())
def test_replacing_nothing_changes_nothing(contract):
    assert contract.replace() == contract


@given(contracts() | ruled_contracts())
def test_every_rendering_is_whole_or_says_what_it_is_not(contract):
    """For every format: plain data for ``--json``, text to paste, and a note for each field that is lost."""
    for to in RENDERERS:
        try:
            rendering = render(contract, to)
        except PrecisionError as error:
            assert all(p.what and p.why and p.remedy for p in error.problems)  # noqa: PT017
            continue
        assert json.loads(json.dumps(rendering.data)) == rendering.data
        assert rendering.to == to
        assert rendering.text
        assert all(any(field in note for note in rendering.notes) for field in rendering.lost)


# Those of a whole contract: the others say its scales, its rules, or the modules of a model.
WHOLE = [to for to in RENDERERS if to not in ("env", "te-precision", "modelopt")]


@given(contracts() | ruled_contracts(), contracts() | ruled_contracts(), st.sampled_from(sorted(Precision().to_dict())))
@example(Precision(), Precision(keep=("*.linear_proj",)), "keep")
@example(Precision(rollout="fp8"), Precision(kv_cache="fp8"), "kv_cache")
def test_no_field_changes_without_a_trace(contract, other, name):
    """Two contracts that differ have two texts, or the field by which they differ is lost and named."""
    try:
        changed = contract.replace(**{name: getattr(other, name)})
    except PrecisionError:
        return
    for to in WHOLE if changed != contract else ():
        try:
            one, two = render(contract, to), render(changed, to)
        except PrecisionError:
            continue
        if (one.text, one.data) == (two.text, two.data):
            assert {*contract.diff(changed)} & {*one.lost, *two.lost}, to


def test_the_table_holds_the_formats_of_the_command_line():
    ours = {"nemo", "bridge", "megatron", "te", "nemo-rl", "vllm", "env", "te-precision", "modelopt"}
    assert set(RENDERERS) == ours | {"verl", "skyrl", "slime", "trl"}
    with pytest.raises(PrecisionError, match="Did you mean 'nemo-rl'"):
        render(preset("bf16_mixed"), "nemo_rl")
