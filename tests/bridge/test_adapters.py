"""Bridge's LoRA on FP8 weights: adapters in BF16 are trained, and the weights under them stay what they were."""

import pytest
from support.bridge.jobs import ADAPTED, MXFP8
from support.bridge.tiny import config, provider

from nemo_fp8 import bridge

UNDER = ".to_wrap"


@pytest.fixture
def run(alone):
    found = alone["adapted"]
    assert "refused" not in found, found["refused"]
    return found


def test_adapters_change_and_nothing_else(run):
    adapters = {name for name in run["kinds"] if ".adapter." in name}
    assert len(adapters) == 2 * 4 * 4  # the two factors, in each linear of each layer
    assert set(run["changed"]) == adapters
    assert {run["kinds"][name] for name in adapters} == {"Parameter"}, "in BF16"


def test_the_weights_under_them_are_hugging_faces(run, alone):
    """The second factor begins at zero, so the first loss is the checkpoint's own."""
    assert run["losses"][0] == pytest.approx(alone["bf16-loaded"]["losses"][0], rel=5e-4)
    assert run["losses"][-1] < run["losses"][0]


def test_frozen_weights_have_the_scale_of_their_own_amax(run, alone):
    """Delayed scaling starts with a scale of 1, and quantizes again after a step what it trains, and only that."""
    assert len(run["largest"]) == 14
    assert list(run["largest"].values()) == pytest.approx([448] * 14, rel=1e-5)
    assert max(alone["delayed-loaded"]["largest"].values()) < 1


def test_what_the_contract_keeps_stays_in_bf16_under_an_adapter(run):
    kept = {f"decoder.layers.1.mlp.linear_fc{i}{UNDER}" for i in (1, 2)}
    assert {name for name, recipe in run["quantizers"].items() if recipe is None} == kept
    assert {run["kinds"][f"{name}.weight"] for name in kept} == {"Parameter"}


def test_the_monitor_names_linears_as_a_contract_does(run):
    assert not any(UNDER in row["layer"] for row in run["rows"])
    assert {"decoder.layers.0.mlp.linear_fc1", "decoder.layers.3.self_attention.linear_proj"} <= {
        row["layer"] for row in run["rows"]
    }


def test_nothing_is_found_wrong_with_a_start_from_a_checkpoint(run):
    """Weights that are frozen have no masters to be made of FP8 codes."""
    assert run["findings"] == []
    start = {"base": "somewhere"}
    made = [config(provider(), bridge.bridge_config(MXFP8), **start, adapters=a) for a in (None, ADAPTED["adapters"])]
    assert [[found.code for found in bridge.start_findings(each)] for each in made] == [["start-masters-from-fp8"], []]


def test_a_copy_of_a_provider_is_looked_after_once():
    """Hooks that are registered later are wrapped; in a copy of the list they stay as they are."""
    import copy

    from nemo_fp8 import preset
    from nemo_fp8.bridge.loading import look_after_weights

    one = provider()
    look_after_weights(one, preset(MXFP8))
    one.register_pre_wrap_hook(list)
    other = copy.deepcopy(one._pre_wrap_hooks)
    look_after_weights(one, preset(MXFP8))
    assert [type(hook) for hook in other] == [type(hook) for hook in one._pre_wrap_hooks]
    assert other[-1].hook is list
