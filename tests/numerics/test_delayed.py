"""Delayed scaling over several steps, against a slot written down in plain Python, and over processes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.delayed import DelayedState, update
from nemo_fp8.numerics.linear import linear, operands


def contract(**fields):
    return Precision(
        **{"format": "hybrid", "scaling": "delayed", "amax_history_len": 4, "amax_compute_algo": "max", **fields}
    )


class Slot:
    """What the rules say of one tensor, in a list."""

    def __init__(self, length, algo, largest, margin):
        self.history, self.scale, self.algo, self.largest = [0.0] * length, 1.0, algo, largest * 2.0**-margin

    def step(self, amax):
        if amax == 0:
            return
        recent = [*self.history[1:], amax]
        chosen = max(recent) if self.algo == "max" else amax
        if math.isfinite(chosen):
            self.scale = float(torch.div(self.largest, torch.tensor(chosen)).clamp_max(torch.finfo(torch.float32).max))
        self.history = [0.0, *recent[1:]]


amaxes = st.lists(
    st.sampled_from([0.0, 1.0, 3.5, 1e-42, 1e30, math.inf]) | st.floats(2.0**-20, 2.0**20, width=32), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(steps=amaxes, length=st.integers(1, 5), algo=st.sampled_from(["max", "most_recent"]), margin=st.integers(-2, 3))
def test_history_and_scale_over_steps(steps, length, algo, margin):
    p = contract(amax_history_len=length, amax_compute_algo=algo, margin=margin)
    state, slot = DelayedState(p), Slot(length, algo, 448.0, margin)
    for amax in torch.tensor(steps).tolist():  # as FP32 holds them
        x = torch.tensor([[amax, -amax / 3]])
        q = state.forward.quantize(x, "input", operands(p)["input"])
        assert (
            q.scale_inv.item() == (1 / torch.tensor(slot.scale)).item()
        )  # this step still uses the scale of earlier ones
        update([state.forward])
        slot.step(amax)
        assert state.forward.history[:, 0].tolist() == slot.history
        assert state.forward.scale[0].item() == slot.scale
    assert state.forward.scale[1].item() == 1.0  # the weight's slot saw nothing


def test_several_tensors_in_a_step_keep_the_largest_amax():
    p = contract()
    state = DelayedState(p)
    for value in (2.0, 7.0, 3.0):
        state.forward.quantize(torch.full((2, 2), value), "weight", operands(p)["weight"])
    update([state.forward])
    assert state.forward.scale.tolist() == [1.0, 64.0]


def test_nan_is_passed_over():
    p = contract()
    state = DelayedState(p)
    state.backward.quantize(torch.tensor([[float("nan"), 2.0]]), "grad", operands(p)["grad"])
    update([state.backward])
    assert state.backward.scale.item() == 57344.0 / 2


def test_an_infinity_blocks_the_maximum_until_it_rolls_out():
    """As in TE; it is why fp16 with a long history freezes its gradient scales after an overflow."""
    p = contract(amax_history_len=3)
    state = DelayedState(p)
    scales = []
    for amax in (2.0, math.inf, 4.0, 4.0, 4.0):
        state.forward.quantize(torch.tensor([[amax]]), "input", operands(p)["input"])
        update([state.forward])
        scales.append(state.forward.scale[0].item())
    assert scales == [224.0, 224.0, 224.0, 224.0, 112.0]


def test_state_travels_and_misfits_are_refused():
    p = contract()
    one, two = DelayedState(p), DelayedState(p)
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    for _ in range(3):
        linear(x, w, precision=p, delayed=one).sum().backward()
        update([one.forward, one.backward])
    two.load_state_dict(one.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert torch.equal(linear(x, w, precision=p, delayed=one), linear(x, w, precision=p, delayed=two))
    with pytest.raises(PrecisionError, match="history"):
        DelayedState(contract(amax_history_len=8)).load_state_dict(one.state_dict())
    for name in one.state_dict():
        part = {other: tensor for other, tensor in one.state_dict().items() if other != name}
        with pytest.raises(PrecisionError, match=f"without its {name.rpartition('.')[2]}"):
            DelayedState(p).load_state_dict(part)
    saved = one.state_dict()
    update([one.forward])
    linear(x, w, precision=p, delayed=one)
    assert torch.equal(saved["forward.history"], two.state_dict()["forward.history"])  # a copy, not a view


def test_replay_repeats_a_quantization_and_remembers_nothing():
    p = contract()
    state = DelayedState(p)
    x = torch.randn(4, 16)
    before = state.forward.scale
    first = state.forward.quantize(x, "input", operands(p)["input"])
    update([state.forward])
    history = state.forward.history.clone()
    with state.forward.replay(before):
        again = state.forward.quantize(x, "input", operands(p)["input"])
    assert torch.equal(first.data.view(torch.uint8), again.data.view(torch.uint8))
    assert torch.equal(history, state.forward.history)


def test_only_delayed_contracts_have_state():
    with pytest.raises(PrecisionError, match="delayed"):
        DelayedState(Precision(format="e4m3", scaling="tensorwise"))


def _rank(rank, folder):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    p = contract()
    states = [DelayedState(p), DelayedState(p)]
    found = []
    for step in range(3):
        for i, state in enumerate(states):
            amax = float(1 + rank * 3 + i + step)
            if not (rank == 1 and i == 1):  # the second state sees nothing on rank 1
                state.forward.quantize(torch.tensor([[amax]]), "input", operands(p)["input"])
        update([s.forward for s in states], torch.distributed.group.WORLD)
        found.append([s.forward.scale[0].item() for s in states])
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_amaxes_are_reduced_over_a_group(tmp_path):
    # Forked, not spawned: importing torch twice takes longer than everything else in this file.
    torch.multiprocessing.start_processes(_rank, (tmp_path,), nprocs=2, start_method="fork")
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    largest = [[4.0 + step, 2.0 + step] for step in range(3)]  # rank 1's for the first state, rank 0's for the second
    assert one == two == [[float(torch.div(448.0, torch.tensor(a))) for a in amaxes] for amaxes in largest]
