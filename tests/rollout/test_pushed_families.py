"""Families whose loaders do more than copy boxes of tensors: a verified push is a fresh load, and where no push can
follow, it is said."""

import pytest
import torch
from rollout.test_reload import differing, held
from support.rollout import families
from support.rollout.in_process import Worker, build, weights_of

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch.engine import read_back
from nemo_fp8.mismatch.weights import compare_weights, told_by
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import fingerprint
from nemo_fp8.rollout.refit.worker.held import NemoFp8Held

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
C_ATTN = "transformer.h.1.attn.c_attn"
# family -> tensors that its loader changes on the way, as it says at the start.
UNPUSHABLE = {
    "nemotron_h": ["mixer.A_log into model.layers.0.mixer.A by exp, neg"],
    "mamba2": ["mixer.A_log into backbone.layers.0.mixer.A by exp, neg"],
    "falcon_h1": ["mamba.A_log into model.layers.0.mamba.mamba.A by exp, neg"],
    "gpt_neox": ["layers.0.attention.query_key_value.weight into", "by a copy in another order"],
    "llama4": [
        "layers.0.self_attn.q_proj.weight into",
        "layers.0.self_attn.k_proj.weight into",
        "by a copy in another order",
    ],
    "gpt_oss": [
        "layers.0.mlp.experts.down_proj into",
        "layers.0.mlp.experts.gate_up_proj into",
        "by a copy in another order",
    ],
}
IN_BF16 = {
    "gpt_oss": ("*.mlp.experts",),
    "llama4": ("*.feed_forward.experts",),
}  # without a fused kernel these experts run in no FP8


class HeldWorker(Worker, NemoFp8Held):
    """A worker that can be asked what it holds."""


class Disturbed(Worker):
    """A worker in whose memory a bit turns over, after it was written and before it is verified."""

    def __init__(self, model, parameter, place):
        super().__init__(model)
        self.live, self.place = model.get_parameter(parameter).data.view(torch.uint8).view(-1), place

    def call(self, method, message):
        if method == "finish":
            self.live[self.place] ^= 1
        return super().call(method, message)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("families"), {}

    def give(name, seed=0):
        if (name, seed) not in made:
            made[name, seed] = families.write(root / f"{name}-{seed}", name, seed)
        return made[name, seed]

    return give


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "gpt2"])
def test_a_verified_push_is_a_fresh_load(family, name, said):
    """A bias that is kept wider than it comes; three parts of one transposed tensor. GPT-2's biases are zeros, as when
    it is made."""
    worker, weights = HeldWorker(build(family(name, 0))), weights_of(family(name, 1))
    receipt = Refit(worker, chunk=2**20).push(weights, verify=True).require()
    assert receipt.verified is True
    assert differing(held(worker.model_runner.get_model()), held(build(family(name, 1)))) == []
    prints = {tensor.name: dict(tensor.fingerprints) for tensor in receipt.tensors}
    back = read_back(worker)
    told = {
        tensor: {part: one for part, one in back[tensor].items() if prints[tensor].get(part) != one}
        for tensor in prints
    }
    assert {tensor for tensor, wrong in told.items() if wrong} == set()
    assert (
        {len(prints[f"{C_ATTN}.weight"])} == {3}
        if name == "gpt2"
        else prints[BIAS] == {"0:8": fingerprint(weights[BIAS])}
    )
    assert not [line for line in said if "cannot be pushed" in line]
    in_bf16 = {
        name: parts
        for name, parts in told_by(receipt).items()
        if name in {t.name for t in receipt.tensors if t.kind != "fp8"}
    }
    assert compare_weights({name: weights[name] for name in in_bf16}, in_bf16, Precision()) == []


@pytest.mark.parametrize(
    ("name", "parameter", "place"),
    [
        ("glm4_moe", BIAS, 4),  # the least bit of an FP32 value, which BF16 has not
        ("glm4_moe", BIAS, 6),
        *[("gpt2", f"{C_ATTN}.weight", third * 256 * 256 + 5) for third in range(3)],
        ("gpt2", "transformer.h.0.attn.c_attn.bias", 600),
    ],
)
def test_verify_says_no_where_a_bit_is_wrong(family, name, parameter, place):
    receipt = Refit(Disturbed(build(family(name, 0)), parameter, place)).push(weights_of(family(name, 1)), verify=True)
    assert receipt.verified is False
    assert [t.name for t in receipt.tensors if t.verified is False] == [parameter]
    with pytest.raises(PrecisionError, match="Bits that are not those of the reference"):
        receipt.require()


@pytest.mark.parametrize("name", UNPUSHABLE)
def test_a_model_that_takes_no_push_says_so_at_its_start_and_why(family, name, said):
    model = build(family(name), **({"keep": IN_BF16[name]} if name in IN_BF16 else {}))
    warnings = [line for line in said if "cannot be pushed" in line]
    assert len(warnings) == 1
    before = held(model)
    with pytest.raises(PrecisionError, match="cannot be pushed") as refused:
        Refit(Worker(model)).push(weights_of(family(name)))
    for words in (*UNPUSHABLE[name], "start another engine"):
        assert words in warnings[0]
        assert words in str(refused.value)
    assert len(refused.value.problems) == 1
    assert "that the engine was started with" not in str(refused.value)  # those were pushed
    assert differing(held(model), before) == []


def test_nobody_is_told_where_nobody_can_push(family, said, monkeypatch):
    """An engine without our worker's methods takes no pushes of any model."""
    monkeypatch.setattr("support.rollout.in_process.fp8", lambda **contract: _without_worker(contract))
    build(family("mamba2"))
    assert not [line for line in said if "cannot be pushed" in line]


def _without_worker(contract):
    from support.rollout.engines import fp8

    return {name: value for name, value in fp8(**contract).items() if name != "worker_extension_cls"}
