"""Families whose loaders do more than copy boxes of tensors: what they compute is computed again, and proven; where no
push can follow, it is said."""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.rollout import families
from support.rollout.family_trial import HeldWorker, as_taken
from support.rollout.held import differing, held
from support.rollout.in_process import Worker, build
from support.rollout.models import weights_of

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch.engine import read_back
from nemo_fp8.mismatch.weights import compare_weights, told_by
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.engine.report import grid_report
from nemo_fp8.rollout.refit import fingerprint
from nemo_fp8.rollout.refit.worker.tape import Computation

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
C_ATTN = "transformer.h.1.attn.c_attn"


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
    "contract",
    [
        {"rollout_block": "tensor"},
        {"rollout_block": "1x32", "weight_scale": "pow2", "activation_scale": "pow2"},
        {"activations": "emulated"},
        {"kernel": "decode"},
        {"rollout": "nvfp4"},
        {"unquantized": "rows", "keep": ("model.layers.*.self_attn.kv_b_proj",)},
        {"quantized": False},
    ],
    ids=str,
)
def test_latent_attention_is_that_of_a_fresh_load_in_every_storage(family, contract):
    """What attention makes of ``kv_b_proj`` follows each push, also where vLLM lets go of the weight (with AMX)."""
    worker = HeldWorker(build(family("deepseek_v3", 0), **contract))
    refit = Refit(worker, chunk=2**20)
    for seed, delta in ((1, False), (0, True), (1, True)):
        refit.push(weights_of(family("deepseek_v3", seed)), delta=delta, verify=not delta).require()
        fresh = held(build(family("deepseek_v3", seed), **contract))
        assert differing(held(worker.model_runner.get_model()), fresh) == []


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


@pytest.mark.parametrize(("name", "tensor", "made"), [
    ("mamba2", "backbone.layers.0.mixer.A_log", "exp, neg"),
    ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", "a copy in another order"),
    ("llama4", "model.layers.0.self_attn.q_proj.weight", "a copy in another order"),
    ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", "a copy in another order"),
])  # fmt: skip
def test_what_a_loader_computes_is_in_the_receipt(family, name, tensor, made):
    """The fingerprint of what was pushed, and that of what the loader made of it, which the engine reads back."""
    worker, weights = HeldWorker(build(family(name, 0))), weights_of(family(name, 1))
    receipt = Refit(worker, chunk=2**20).push(weights, verify=True).require()
    assert tensor in receipt.computed
    assert "computed" in str(receipt)
    (told,) = [dict(one.fingerprints) for one in receipt.tensors if one.name == tensor]
    whole = ",".join(f"0:{n}" for n in weights[tensor].shape)
    assert told.pop(whole) == fingerprint(weights[tensor])
    back = read_back(worker)[tensor]  # of blocks that are not the trainer's, and of packed weights, nothing
    assert back == (told if name == "mamba2" else {})
    assert all(f" by {made} (" in part for part in told)
    kept = {one.name for one in receipt.tensors if one.kind != "fp8"}
    expected = {key: held for key, held in told_by(receipt).items() if key in kept}
    assert compare_weights({key: weights[key] for key in kept}, expected, Precision()) == []


@pytest.mark.parametrize("head", ["last", "between two layers"])
def test_what_a_loader_multiplies_once_is_multiplied_in_every_push(family, said, head):
    """LongCat's notes on each layer that its norms' weights were multiplied, and leaves that out the next time: in the
    next push, and where vLLM calls it again within one, since the names of the model do not come together."""
    worker = HeldWorker(build(family("longcat_flash", 0)))
    assert not [line for line in said if "cannot be pushed" in line]
    weights = weights_of(family("longcat_flash", 1))
    if head == "between two layers":
        weights = dict(sorted(weights.items(), key=lambda one: (".layers.1." in one[0], "lm_head" in one[0])))
    receipt = Refit(worker, chunk=2**20).push(weights, verify=True).require()
    assert receipt.verified is True
    assert len(receipt.computed) == 8
    assert all(name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight")) for name in receipt.computed)
    assert differing(held(worker.model_runner.get_model()), held(build(family("longcat_flash", 1)))) == []


def stepped(tensors):
    """Weights after a step that moves all of them."""
    draws = torch.Generator().manual_seed(0)
    return {
        name: (t.float() + 1e-2 * torch.randn(t.shape, generator=draws)).to(t.dtype) if t.is_floating_point() else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("name", ["nemotron_h", "gpt_neox", "mamba2", "longcat_flash"])
def test_changes_of_what_a_loader_computes_are_a_fresh_load(family, tmp_path, name):
    """They come whole, with all that the loader makes them from, and what it did not make is patched."""
    worker = HeldWorker(build(family(name, 0)))
    weights = as_taken(weights_of(family(name, 1)), worker.call("expected", {}))
    refit = Refit(worker, chunk=2**20)
    refit.push(weights, delta=True).require()
    after = stepped(weights)
    receipt = refit.push(after, delta=True).require()
    assert receipt.delta.instead == ""
    assert set(receipt.computed) <= set(receipt.delta.whole) < set(after)
    assert receipt.computed
    there = shutil.copytree(family(name, 0), tmp_path / name)
    save_file(after, there / "model.safetensors", {"format": "pt"})
    assert differing(held(worker.model_runner.get_model()), held(build(there))) == []
    again = refit.push(after, delta=True, verify=True).require()
    assert (again.delta.instead, again.bytes, again.delta.whole) == ("", 0, {})


def test_a_change_of_one_tensor_brings_all_that_the_loader_makes_it_with(family):
    worker, weights = HeldWorker(build(family("gpt_oss", 0))), weights_of(family("gpt_oss", 1))
    refit = Refit(worker)
    refit.push(weights, delta=True).require()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    receipt = refit.push(weights | {name: stepped(weights)[name]}, delta=True).require()
    assert receipt.delta.instead == ""
    assert name in receipt.delta.whole
    assert {one for one in receipt.delta.whole if ".layers.0.mlp.experts" not in one} == set()


def test_verify_says_no_where_a_computed_bit_is_wrong(family):
    A, A_log = "backbone.layers.0.mixer.A", "backbone.layers.0.mixer.A_log"
    receipt = Refit(Disturbed(build(family("mamba2", 0)), A, 5)).push(weights_of(family("mamba2", 1)), verify=True)
    assert [t.name for t in receipt.tensors if t.verified is False] == [A_log]


def test_the_old_value_is_seen_where_a_loader_is_not_followed(family, monkeypatch):
    """The proof says no: a push that copies A_log, as if the loader did, leaves another A than a load."""
    monkeypatch.setattr(Computation, "run", lambda self, pushed, device: next(iter(pushed.values())).float())
    worker = HeldWorker(build(family("mamba2", 0)))
    Refit(worker).push(weights_of(family("mamba2", 1)), verify=True)
    wrong = differing(held(worker.model_runner.get_model()), held(build(family("mamba2", 1))))
    assert wrong == [f"backbone.layers.{layer}.mixer.A" for layer in (0, 1)]


def test_experts_that_cannot_be_decoded_stay_in_bf16_by_name(family, said):
    """With AMX, too: vLLM's kernel there has no such experts either, and would end the engine at the first token."""
    model = build(family("llama4"))
    (line,) = [one for one in said if "stays in the compute dtype" in one]
    assert "model.layers.*.feed_forward.experts" in line
    assert "the router's weight on their input" in line
    layers = grid_report(model)
    kept = [name for name, layer in layers.items() if "fused FP8 kernel only" in (layer.why or "")]
    assert len(kept) == 2
    assert layers["model.layers.0.self_attn.qkv_proj"].stored == "fp8"
    with pytest.raises(PrecisionError, match="the contract is strict") as refused:
        build(family("llama4"), strict=True)
    assert "feed_forward" in refused.value.problems[0].remedy


@pytest.fixture
def arithmetic_in_python(monkeypatch):
    """Loaders that take a value out of a tensor and compute with it, which no operation of torch shows."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    def load(param, loaded):
        param.data.fill_(-abs(loaded[0].item()))

    monkeypatch.setattr(mamba_mixer2, "composed_weight_loader", lambda loader, change: load)


def test_a_model_that_takes_no_push_says_so_at_its_start_and_why(family, said, arithmetic_in_python):
    model = build(family("mamba2"))
    warnings = [line for line in said if "cannot be pushed" in line]
    assert len(warnings) == 1
    before = held(model)
    with pytest.raises(PrecisionError, match="cannot be pushed") as refused:
        Refit(Worker(model)).push(weights_of(family("mamba2")))
    for words in ("mixer.A_log into backbone.layers.0.mixer.A by arithmetic in Python", "start another engine"):
        assert words in warnings[0]
        assert words in str(refused.value)
    assert len(refused.value.problems) == 1
    assert "that the engine was started with" not in str(refused.value)  # those were pushed
    assert differing(held(model), before) == []


def test_nobody_is_told_where_nobody_can_push(family, said, arithmetic_in_python, monkeypatch):
    """An engine without our worker's methods takes no pushes of any model."""
    monkeypatch.setattr("support.rollout.in_process.fp8", lambda **contract: _without_worker(contract))
    build(family("mamba2"))
    assert not [line for line in said if "cannot be pushed" in line]


def _without_worker(contract):
    from support.rollout.engines import fp8

    return {name: value for name, value in fp8(**contract).items() if name != "worker_extension_cls"}
