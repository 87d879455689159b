"""Pushes into memory that this processor cannot reach, as a GPU's: pieces are brought there before anything is made of
them, and what is told of them is fetched.

``test_far.py`` runs these in a process of its own: torch takes the device for the machine's accelerator, and so would
vLLM in whatever comes later.
"""

import pytest
import torch
from rollout.test_reload import BLOCK
from support.rollout import far
from support.rollout.engines import MX
from support.rollout.held import differing, held
from support.rollout.in_process import Worker, build
from support.rollout.models import K_PROJ, stacked, weights_of

from nemo_fp8.contract import Operand
from nemo_fp8.mismatch.engine import read_back
from nemo_fp8.numerics import kernels, quantize
from nemo_fp8.rollout import Refit
from nemo_fp8.rollout.refit import Manifest, SharedWeights, casting
from nemo_fp8.rollout.refit.fingerprint import Fingerprint
from nemo_fp8.rollout.refit.manifest import Entry
from nemo_fp8.rollout.refit.worker import session
from nemo_fp8.rollout.refit.worker.transfer import Receiver

PLAIN = {"kernel": "decode", "unquantized": "rows"}  # what GPUs have: nothing is packed


def model_of(folder, **contract):
    return build(folder, **PLAIN | contract)


def bits(model):
    return far.brought_back(held(model))


def told(receipt):
    """What a receipt says of every tensor; an SNR to the digits in which sums of another order agree."""
    return {
        t.name: vars(t) | {"snr_db": pytest.approx(t.snr_db, abs=1e-3), "experts": experts_of(t)}
        for t in receipt.tensors
    }


def experts_of(tensor):
    """The counts of a stack's experts, likewise."""
    return {name: pytest.approx(numbers, abs=1e-3) for name, numbers in tensor.experts.items()}


@pytest.mark.parametrize(
    ("kind", "contract"),
    [("qwen3", {}), ("qwen3_moe", {}), ("llama_tied", {"weight_scale": "pow2"}), ("qwen3", MX), ("qwen3_odd", {})],
    ids=str,
)
def test_a_push_there_leaves_every_bit_as_a_fresh_load_does(checkpoint, kind, contract):
    worker = Worker(far.moved(model_of(checkpoint(kind, 0), **contract)))
    model = worker.model_runner.get_model()
    assert not any(p.is_cpu for p in model.parameters())
    new = weights_of(checkpoint(kind, 1))
    waits = far.RUNTIME.waits
    receipt = Refit(worker, chunk=2**20).push(new, verify=True).require()
    assert receipt.verified
    assert far.RUNTIME.waits == waits + 1  # at its end, since the engine may compute on another stream
    fresh = model_of(checkpoint(kind, 1), **contract)
    assert differing(bits(model), held(fresh)) == []
    here = Refit(Worker(model_of(checkpoint(kind, 0), **contract)), chunk=2**20).push(new, verify=True)
    assert receipt.fingerprint == here.fingerprint
    assert told(receipt) == told(here)
    assert read_back(worker) == read_back(Worker(fresh))


@pytest.mark.parametrize(
    ("kind", "contract"), [("qwen3", {}), ("qwen3_moe", {"last_layers": 1}), ("qwen3", MX)], ids=str
)
def test_codes_that_a_trainer_casts_on_the_way_go_there(checkpoint, kind, contract, monkeypatch):
    new, fresh = stacked(weights_of(checkpoint(kind, 1))), model_of(checkpoint(kind, 1), **contract)
    as_values = Refit(Worker(far.moved(model_of(checkpoint(kind, 0), **contract)))).push(new).require()
    monkeypatch.setattr(casting, "LEAST", 0)
    worker, waits = Worker(far.moved(model_of(checkpoint(kind, 0), **contract))), far.RUNTIME.waits
    receipt = Refit(worker, chunk=2**20).push(new).require()
    assert receipt.bytes < as_values.bytes
    assert far.RUNTIME.waits == waits + 1
    assert differing(bits(worker.model_runner.get_model()), held(fresh)) == []
    assert told(receipt) == {t.name: vars(t) for t in as_values.tensors}


@pytest.mark.parametrize("operand", [BLOCK, Operand("e4m3", (1, 32), "e8m0")], ids=["blocks", "mxfp8"])
def test_a_trainer_whose_tensors_lie_there_casts_them_there(operand):
    """What comes back is codes and scales, and in the end what was counted."""
    values = torch.randn(384, 256).bfloat16()
    values[3, 5] = 1e4
    room, casts = torch.zeros(1 << 17, dtype=torch.uint8), []
    for one in (far.Far(values.clone()), values):
        cast = casting.Cast.of(Entry("a", "bfloat16", (384, 256)), operand)
        room.zero_()
        cast.put(0, one[:256], room, 64, None)
        cast.put(256, one[256:], room, 1 << 16 | 64, None)
        casts.append((room.clone(), cast.totals().cpu()))
    assert torch.equal(casts[0][0], casts[1][0])
    assert casts[0][1].tolist()[0] == pytest.approx(casts[1][1].tolist()[0], rel=1e-5)
    assert casts[0][1][0, -1] == values[3, 5]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_what_lies_in_shared_memory_is_brought_there_some_rows_at_a_time(checkpoint, kind, monkeypatch):
    """A device has little room beside a model and its cache."""
    worker, new = Worker(far.moved(model_of(checkpoint(kind, 0)))), weights_of(checkpoint(kind, 1))
    monkeypatch.setattr(session, "BROUGHT", 1 << 17)
    far.RUNTIME.largest = 0
    assert Refit(worker).push(SharedWeights(new), verify=True).require().chunks == 0
    assert 0 < far.RUNTIME.largest <= 1 << 17 < max(t.nbytes for t in new.values())
    assert differing(bits(worker.model_runner.get_model()), held(model_of(checkpoint(kind, 1)))) == []


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_changes_are_written_there(checkpoint, kind):
    worker = Worker(far.moved(model_of(checkpoint(kind, 0))))
    refit = Refit(worker, chunk=2**20)
    refit.push(weights_of(checkpoint(kind, 0)), delta=True).require()
    told = refit.push(weights_of(checkpoint(kind, 1)), delta=True).require()
    assert told.delta.base
    assert differing(bits(worker.model_runner.get_model()), held(model_of(checkpoint(kind, 1)))) == []


def test_codes_of_the_trainer_go_there(checkpoint):
    worker = Worker(far.moved(model_of(checkpoint("qwen3", 0))))
    new = weights_of(checkpoint("qwen3", 1))
    coded = quantize(new[K_PROJ], BLOCK)
    Refit(worker).push(new | {K_PROJ: coded.data, f"{K_PROJ}_scale_inv": coded.scale_inv}, verify=True).require()
    assert differing(bits(worker.model_runner.get_model()), held(model_of(checkpoint("qwen3", 1)))) == []


def test_vllm_s_own_transports_bring_tensors_that_lie_there(checkpoint):
    model = far.moved(model_of(checkpoint("qwen3_moe", 0)))
    new = weights_of(checkpoint("qwen3_moe", 1))
    receiver = Receiver(model, model.vllm_config)
    for names in ([*new][:20], [*new][20:]):
        receiver.announce(Manifest.of({name: new[name] for name in names}))
        receiver.load_weights([(name, far.Far(new[name].clone())) for name in names])
    waits = far.RUNTIME.waits
    receiver.finish()
    assert far.RUNTIME.waits == waits + 1
    assert differing(bits(model), held(model_of(checkpoint("qwen3_moe", 1)))) == []


@pytest.mark.parametrize("delta", [False, True])
def test_a_trainer_s_tensors_may_lie_there(checkpoint, delta):
    worker = Worker(model_of(checkpoint("qwen3_moe", 0)))
    refit = Refit(worker, chunk=2**20)
    for seed in (0, 1):
        weights = {name: far.Far(t) for name, t in weights_of(checkpoint("qwen3_moe", seed)).items()}
        refit.push(weights, delta=delta, verify=True).require()
    assert differing(held(worker.model_runner.get_model()), held(model_of(checkpoint("qwen3_moe", 1)))) == []


def test_the_device_is_one():
    """What the tests above stand on."""
    there = far.Far(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    assert torch.equal(torch.ones(4, 4).to(there.device).cpu(), torch.ones(4, 4))


def test_no_kernel_of_this_processor_is_given_its_addresses():
    """They would end the process."""
    here, there = torch.ones(64, 64, dtype=torch.bfloat16), far.Far(torch.zeros(64, 64, dtype=torch.bfloat16))
    assert kernels.sums(here, there) is None
    assert not kernels.turn(here, there)
    Fingerprint().copy(here, there)  # which copies by itself then
    assert torch.equal(there.cpu(), here)
