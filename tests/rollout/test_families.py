"""Every family on real vLLM: what starts in BF16 starts in FP8, and a push leaves what a fresh start leaves.

In memory every bit is compared, in engines every log-probability. A few families, of each kind of loader, are tried
always; all of them in the long run.
"""

import json

import pytest
from support import ROOT
from support.rollout import families, family_trial
from support.rollout.engines import MX

# A plain loader; experts that stay in BF16; rows in another order; A = -exp(A_log) beside attention; a partial; one
# that multiplies weights once and notes that it has.
SOME = ("llama", "gpt_oss", "llama4", "gpt_neox", "nemotron_h", "minimax_m2", "longcat_flash")
ROWS = {"rollout": "compute", "unquantized": "rows"}
CONTRACTS = {
    "MXFP8": MX,
    "powers of 2": {"weight_scale": "pow2"},
    "one scale": {"rollout_block": "tensor"},
    "BF16 by rows": ROWS,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


def _some_always(names):
    return [name if name in SOME else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("family", _some_always(families.FAMILIES))
def test_a_push_is_a_fresh_load_to_the_bit(root, family):
    found = family_trial.tried(root, family, family_trial.in_memory)
    if "not in BF16" in found:
        pytest.skip(found["not in BF16"])
    as_a_load(found["in_memory"])


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
@pytest.mark.parametrize("family", ["nemotron_h", "gpt_neox"])
def test_so_it_is_in_other_blocks_and_scales(root, family, contract):
    """On a CPU without AMX as with it; and in BF16, multiplied as it lies in a checkpoint."""
    as_a_load(family_trial.in_memory(root, family, **contract))


@pytest.mark.long
@pytest.mark.parametrize("family", families.FAMILIES)
def test_so_it_is_in_bf16_by_rows(root, family):
    def by_rows(root, family):
        return family_trial.in_memory(root, family, **ROWS)

    found = family_trial.tried(root, family, by_rows)
    if "not in BF16" in found:
        pytest.skip(found["not in BF16"])
    as_a_load(found["by_rows"])


def as_a_load(found):
    assert found["problems"] == []
    assert found["verified"] is True
    assert found["read back otherwise"] == []
    assert found["differing"] == []


@pytest.mark.long
@pytest.mark.parametrize("family", families.FAMILIES)
def test_an_engine_answers_as_a_fresh_one_after_a_push(root, family):
    found = family_trial.tried(root, family, family_trial.in_engines)
    for reason in ("not in BF16", "no engine"):
        if reason in found:
            pytest.skip(found[reason])
    assert all(found["in_engines"].values()), found


def test_the_page_has_every_family_and_no_failure():
    """docs/families.md is drawn from this record; ``tools/families.py`` makes it."""
    record = json.loads((ROOT / "docs/benchmarks/families.json").read_text())["families"]
    assert list(record) == list(families.FAMILIES)
    for name, found in record.items():
        assert "error" not in found, (name, found)
        if "not in BF16" not in found:
            as_a_load(found["in_memory"])
            assert "no engine" in found or (found["in_engines"] and all(found["in_engines"].values())), name
