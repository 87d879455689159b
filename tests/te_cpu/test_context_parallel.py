"""Packed sequences over ranks: who holds which tokens, halves, and partial attention put together again, beside plain
loops."""

import pytest
import torch
import transformer_engine_torch as tex

BEGINS = torch.tensor([0, 8, 8, 24], dtype=torch.int32)  # three sequences; the second is empty
PAIRS = list(zip(BEGINS.tolist(), BEGINS[1:].tolist(), strict=False))


def _halves(tensor, second):
    return torch.cat([tensor[(a + b) // 2 if second else a : b if second else (a + b) // 2] for a, b in PAIRS])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_holds_a_chunk_from_the_front_and_one_from_the_end(ranks):
    x = torch.randn(24, 2, 8)
    parts = []
    for rank in range(ranks):
        expected = []
        for a, b in PAIRS:
            chunks = torch.arange(a, b).chunk(2 * ranks) if b > a else [torch.arange(0)] * 2 * ranks
            expected += [chunks[rank], chunks[-1 - rank]]
        parts.append(tex.thd_get_partitioned_indices(BEGINS, 24, ranks, rank))
        assert parts[-1].dtype == torch.int32
        assert torch.equal(parts[-1].long(), torch.cat(expected))
    by_rank = tex.thd_sequence_order_to_cp_rank_order(x, BEGINS, ranks, 24)
    assert torch.equal(by_rank, x[torch.cat(parts).long()])
    assert torch.equal(tex.thd_cp_rank_order_to_sequence_order(by_rank, BEGINS, ranks, 24), x)


def test_what_cannot_be_divided_is_refused():
    for tokens, ranks, rank in ((24, 5, 0), (24, 2, 2), (0, 2, 0)):
        with pytest.raises(RuntimeError, match="cannot be divided"):
            tex.thd_get_partitioned_indices(BEGINS, tokens, ranks, rank)


def test_padding_is_not_copied():
    begins, lengths = torch.tensor([2, 6, 6, 12]).int(), torch.tensor([0, 3, 3, 7]).int()
    x, out = torch.randn(14, 2, 8), torch.full((14, 2, 8), -1.0)
    tex.thd_copy_valid_tokens_from_per_split_to_rank_local(out, x, begins, lengths)
    expected = torch.full_like(out, -1.0)
    expected[2:5], expected[6:10] = x[2:5], x[6:10]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("leading", [(), (2,)])
def test_halves_are_read_and_corrected(leading):
    x = torch.randn(*leading, 24, 2, 8)
    tokens = x.movedim(-3, 0)
    halves = [tex.thd_read_half_tensor(x, BEGINS, half) for half in (0, 1)]
    for half in (0, 1):
        assert torch.equal(halves[half].movedim(-3, 0), _halves(tokens, half))
    for changes in (
        ("add", "none"),
        ("copy", "none"),
        ("none", "add"),
        ("none", "copy"),
        ("add", "copy"),
        ("copy", "add"),
    ):
        grad, step = torch.randn_like(x), torch.randn_like(halves[0] if "none" in changes else x)
        found = grad.clone()
        tex.thd_grad_correction(found, step, BEGINS, *changes)
        for half, change in enumerate(changes):
            before = tex.thd_read_half_tensor(grad, BEGINS, half)
            more = step if "none" in changes else tex.thd_read_half_tensor(step, BEGINS, half)
            expected = {"none": before, "copy": more, "add": before + more}[change]
            assert torch.equal(tex.thd_read_half_tensor(found, BEGINS, half), expected)
    with pytest.raises(RuntimeError, match="Unsupported Functor"):
        tex.thd_grad_correction(x, x, BEGINS, "zero", "copy")


def _attention(q, k, v):
    """Output and log of the sum of exponentials, per head, of plain attention."""
    scores = torch.einsum("qhd,khd->hqk", q, k)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _spread(parts, packed, longest):
    """Log-sums of each sequence as one packed tensor, or padded."""
    if packed:
        return torch.cat(parts, 1)
    return torch.stack([torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("second_half", [False, True])
def test_attention_in_two_steps_is_that_in_one(packed, second_half):
    """A ring's two steps: all keys seen at first, then further keys, by all queries or by those of the second
    halves."""
    torch.manual_seed(0)
    q, keys, values = (torch.randn(24, 2, 16, dtype=torch.float64) for _ in range(3))
    whole, outs, more_outs, lses, more_lses, expected_lses = [], [], [], [], [], []
    for a, b in PAIRS:
        seen, late = slice(a, (a + b) // 2), slice((a + b) // 2, b)
        start = (b - a) // 2 if second_half else 0
        first, lse = _attention(q[a:b], keys[seen], values[seen])
        more, more_lse = _attention(q[a:b][start:], keys[late], values[late])
        together, lse_together = _attention(q[a:b], keys[a:b], values[a:b])
        whole.append(torch.cat([first[:start], together[start:]]))
        expected_lses.append(torch.cat([lse[:, :start], lse_together[:, start:]], 1))
        outs.append(first), more_outs.append(more), lses.append(lse), more_lses.append(more_lse)
    lse, expected = _spread(lses, packed, 16).float(), _spread(expected_lses, packed, 16).float()
    more_lse = _spread(more_lses, packed, 8 if second_half else 16).float()
    if second_half:
        halves = _spread([part[:, part.shape[1] // 2 :] for part in expected_lses], packed, 8).float()
        assert torch.equal(tex.thd_read_second_half_lse(expected, BEGINS, packed, halves.shape[-1]), halves)
        assert not torch.allclose(lse, expected)
        tex.thd_second_half_lse_correction(lse, more_lse, BEGINS, packed)
        torch.testing.assert_close(lse, expected)
    first_share = torch.exp(torch.cat(lses, 1) - torch.cat(expected_lses, 1)).t()[:, :, None]
    out = (torch.cat(outs) * first_share).float()
    tex.thd_out_correction(out, torch.cat(more_outs).float(), expected, more_lse, BEGINS, second_half, packed)
    torch.testing.assert_close(out, torch.cat(whole).float(), rtol=1e-4, atol=1e-5)
