"""``explain`` says what the contract says, and what a reader would not expect."""

import pytest

from nemo_fp8.contract import Precision
from nemo_fp8.contract.explain import explain_rows
from nemo_fp8.contract.operands import SCALES
from nemo_fp8.contract.presets import PRESETS, preset


def _row(p, heading):
    return next(sentence for h, sentence in explain_rows(p) if h == heading)


@pytest.mark.parametrize("name", PRESETS)
def test_every_gemm_is_explained_with_format_and_scale(name):
    p = preset(name)
    for gemm, operands in p.gemms().items():
        sentence = _row(p, gemm)
        for operand in operands:
            if operand is None:
                assert p.compute.upper() in sentence
            else:
                assert operand.format.upper() in sentence
                assert SCALES[operand.scale] in sentence


def test_a_name_that_contradicts_its_value_is_said_and_only_then():
    speaks = {name for name, p in PRESETS.items() if "The name says" in p.explain()}
    assert speaks == {"nanov2_bf16_with_fp8_current_scaling_mixed"}


def test_what_is_kept_in_high_precision_is_named():
    p = preset("bf16_with_fp8_tensorwise_mixed").replace(keep=("*.gate",))
    assert "the first 1 and the last 1 decoder layers" in _row(p, "kept")
    assert "*.gate" in _row(p, "kept")


def test_rules_are_said_in_their_order():
    rules = (("*.linear_fc1", "mxfp8"), ("*.mlp.*", "bf16"))
    p = preset("bf16_with_fp8_blockwise_mixed").replace(modules=rules)
    assert _row(p, "rules").endswith("the first rule that matches the name: *.linear_fc1 by mxfp8; *.mlp.* in BF16.")
    assert "*.mlp.*" not in _row(p, "kept"), "of these, linear_fc1 is not in BF16"
    assert "*.mlp.* in BF16; *.linear_fc1 by mxfp8" in _row(p.replace(modules=rules[::-1]), "rules")
    assert "rules" not in {heading for heading, _ in explain_rows(p.replace(modules=()))}


def test_a_rollout_without_training_in_fp8_says_what_it_keeps():
    p = Precision(rollout="fp8", keep=("*.o_proj",), modules=(("*.linear_fc1", "mxfp8"),), last_layers=1)
    assert "In BF16: the last 1 decoder layers; modules named *.o_proj" in _row(p, "kept")
    assert "*.linear_fc1 by mxfp8" in _row(p, "rules")
    assert "kept" not in {heading for heading, _ in explain_rows(Precision(keep=("*.o_proj",)))}


def test_the_scales_of_tokens_of_an_nvfp4_rollout_are_said():
    p = preset("bf16_with_nvfp4_mixed")
    assert "input in E2M1" in _row(p, "rollout")
    assert "along the contracted dimension, beneath an FP32 scale for each token" in _row(p, "rollout")
    assert "token" not in _row(p.replace(activation_scheme="none"), "rollout")


def test_wgrad_in_the_compute_dtype_is_said():
    assert "BF16" in _row(preset("bf16_with_fp8_blockwise_mixed").replace(wgrad=False), "wgrad")


def test_delayed_scaling_says_where_scales_come_from():
    p = preset("bf16_with_fp8_mixed")
    assert "the largest of the last 1024 amaxes" in _row(p, "scales")
    assert "2**3" in _row(p.replace(margin=3), "scales")
    assert "the amax of the last step" in _row(p.replace(amax_history_len=1), "scales")
