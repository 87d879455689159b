"""A ledger, without an engine: how it quantizes, what it tells, and how long its messages are."""

import json

import pytest
import torch

from nemo_fp8.contract import Operand
from nemo_fp8.numerics import quantize
from nemo_fp8.rollout.refit import fingerprint
from nemo_fp8.rollout.refit.channel import LARGEST
from nemo_fp8.rollout.refit.ledger import FIRST, Ledger, Patchable
from nemo_fp8.rollout.refit.manifest import Entry, Manifest
from nemo_fp8.rollout.refit.memory import Shared, SharedWeights
from nemo_fp8.rollout.refit.patch import LONGEST, SCALES, VALUES
from nemo_fp8.rollout.refit.planes import Room
from nemo_fp8.rollout.refit.wire import AT_ONCE, cut


def test_a_scalar_is_told_of_and_changes():
    """Such as a scale of logits, which lies in memory as it was loaded."""
    tensors = {"scale": torch.tensor(2.0)}
    ledger = Ledger.of(Manifest.of(tensors), set(), [{"kept": {0: [None, ["whole"], ""]}, "together": []}])
    plane, memory = ledger.kept[0].planes[VALUES], Shared(1 << 12)
    assert [*ledger.noting(tensors.items())]
    assert (plane.largest(), plane.nonfinite()) == (2.0, 0)
    for value, sent in ((2.0, 0), (float("-inf"), 1)):
        changed = {"scale": torch.tensor(value)}
        assert len([*ledger.changes(changed.items(), lambda: memory.tensor, 1 << 12)]) == sent
        assert plane.digest("whole") == fingerprint(changed["scale"])
    assert (plane.largest(), plane.nonfinite()) == (float("inf"), 1)
    memory.close()


@pytest.mark.parametrize(
    "operand",
    [Operand("e4m3", (128, 128), "fp32"), Operand("e4m3", (128, 128), "pow2"), Operand("e4m3", (1, 32), "e8m0")],
)
@pytest.mark.parametrize("shape", [(300, 256), (3, 128, 320), (2, 100, 96)], ids=str)
def test_a_ledger_quantizes_as_the_reference_does(operand, shape):
    """Strip by strip, and each matrix of a stack by itself."""
    draws = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=draws).bfloat16()
    kept = Patchable(Entry("w", "bfloat16", shape), operand, [",".join(f"0:{n}" for n in shape)])
    for strip in kept.strips(tensor, True, Room()):
        kept.put(strip)
    assert kept.as_reference
    stack = [quantize(matrix, operand) for matrix in tensor.reshape(-1, *shape[-2:])]
    codes, scales = (
        torch.stack([getattr(one, name).view(torch.uint8) for one in stack]) for name in ("data", "scale_inv")
    )
    for what, expected in ((VALUES, codes), (SCALES, scales)):
        assert torch.equal(kept.planes[what].values.view(torch.uint8).reshape(-1), expected.reshape(-1))


def test_a_cast_that_once_was_not_the_reference_s_is_held_against_it_again(monkeypatch):
    """A trainer that wrote its weights during one push: ``verified`` of the next ones is no answer about that one."""
    kept = Patchable(Entry("w", "bfloat16", (128, 128)), Operand("e4m3", (128, 128), "fp32"), ["0:128,0:128"])

    def as_reference():
        [*kept.strips(torch.ones(128, 128).bfloat16(), True, Room())]
        return kept.as_reference

    with monkeypatch.context() as patch:
        patch.setattr(kept, "_compare", lambda *made: setattr(kept, "as_reference", False))
        assert not as_reference()
    assert as_reference()


# ---------------------------------------------------------------------- messages


MANY = 2 * AT_ONCE + 7


def _many():
    return {f"model.layers.{i}.input_layernorm.weight": torch.full((8,), float(i)).bfloat16() for i in range(MANY)}


def test_no_message_of_a_push_has_more_pieces_than_a_socket_takes():
    tensors = _many()
    memory = Shared(1 << 20)
    sent = [pieces for pieces, _ in cut(tensors.items(), Manifest.of(tensors), lambda: memory.tensor)]
    assert [len(pieces) for pieces in sent] == [AT_ONCE, AT_ONCE, 7]
    weights = SharedWeights(tensors)  # pieces of the trainer's own memory
    placed = [pieces for pieces, _ in cut(weights.items(), Manifest.of(tensors), memory, shared=weights.shared)]
    assert [len(pieces) for pieces in placed] == [AT_ONCE, AT_ONCE, 7]
    assert max(len(_message(memory, pieces)) for pieces in [*sent, *placed]) < LARGEST
    memory.close()


def test_no_message_of_changes_has_more_patches_than_a_socket_takes():
    tensors = _many()
    manifest = Manifest.of(tensors)
    ledger = Ledger.of(manifest, set(), [{"kept": {i: [None, ["0:8"], ""] for i in range(MANY)}, "together": []}])
    memory = Shared(1 << 20)
    assert [*ledger.noting(tensors.items())]
    changed = {name: 2 * tensor + 1 for name, tensor in tensors.items()}
    sent = [patches for patches, _ in ledger.changes(changed.items(), lambda: memory.tensor, 1 << 20)]
    rising = [FIRST * 2**n for n in range(7)]  # the first is short: workers can begin
    assert [len(patches) for patches in sent] == [*rising, MANY - sum(rising)]
    assert max(map(len, sent)) <= AT_ONCE
    few = [patches for patches, _ in ledger.changes(tensors.items(), lambda: memory.tensor, 1 << 20, 100)]
    assert [len(patches) for patches in few] == [*rising[:5], *[100] * 8, MANY - sum(rising[:5]) - 800]
    # As long as they can be: of a million tensors, each with as many rows and changes as may come.
    longest = (10**6, SCALES, 10**7, LONGEST, LONGEST, LONGEST, 10**10)
    assert len(_message(memory, [longest] * AT_ONCE)) < LARGEST
    memory.close()


def _message(memory, pieces):
    return json.dumps({"memory": memory.handle, "pieces": [*pieces]})
