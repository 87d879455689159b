"""Packed, padded and cached sequences: the same tokens, and attention that gives the same results on each."""

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch import InferenceParams

LENS = [5, 1, 7]


def test_packed_and_padded_hold_the_same_tokens():
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    packed = torch.randn(16, 2, 8)  # three rows behind the last sequence
    padded = tex.convert_thd_to_bshd(packed, ends, 3, 9)
    for row, part in zip(padded, packed[:13].split(LENS), strict=True):
        assert torch.equal(row[: len(part)], part)
        assert not row[len(part) :].any()
    back = tex.convert_bshd_to_thd(padded, ends, 16)
    assert torch.equal(back[:13], packed[:13])
    assert not back[13:].any()


def test_lengths_that_tell_of_more_tokens_than_there_are_say_so():
    with pytest.raises(ValueError, match="cu_seqlens tells of 13 tokens, and the tensor has 12"):
        tex.convert_thd_to_bshd(torch.randn(12, 2, 8), torch.tensor([0, 5, 6, 13], dtype=torch.int32), 3, 9)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_new_tokens_are_appended_to_their_sequences(qkv_format, paged):
    """Two steps: the first fills the cache, the second appends one token each; without pages a finished sequence's row
    is taken over."""
    longest, pages = 8, 4 if paged else 1
    format = tex.NVTE_QKV_Format[f"NVTE_{qkv_format.upper()}"]
    caches = [torch.zeros(3 * pages, longest // pages, 2, 4) for _ in range(2)]
    table = torch.randperm(12).view(3, 4).int() if paged else torch.tensor([[0], [1], [2]]).int()
    kept = [torch.zeros(0, 2, 4) for _ in range(3)]
    for lens, rows in (([5, 1, 7], [0, 1, 2]), ([1, 1], [0, 2])):
        kept, table = [kept[row] for row in rows], table[rows]
        new = [torch.randn(n, 2, 4) for n in lens]
        padded = torch.nn.utils.rnn.pad_sequence(new, batch_first=True)
        given = {"bshd": padded, "sbhd": padded.transpose(0, 1).contiguous(), "thd": torch.cat(new)}[qkv_format]
        kept = [torch.cat(parts) for parts in zip(kept, new, strict=True)]
        cu_new, cu_all = (torch.tensor([0, *n]).cumsum(0).int() for n in (lens, [len(part) for part in kept]))
        tex.copy_to_kv_cache(
            given, -given, *caches, table, cu_new, cu_all, format, len(lens), max(lens), longest, pages, not paged
        )
        for i, part in enumerate(kept):
            for cache, sign in zip(caches, (1, -1), strict=True):
                held = cache[table[i].long()].flatten(0, 1) if paged else cache[i]
                assert torch.equal(held[: len(part)], sign * part)


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
def test_lengths_beyond_the_batch_are_not_read(qkv_format):
    """As when the last of several sequences is generated, and TE's lengths are still those of them all."""
    caches = torch.zeros(3, 8, 2, 4), torch.zeros(3, 8, 2, 4)
    new = torch.randn(1, 2, 2, 4)
    given = new if qkv_format == "bshd" else new.transpose(0, 1).contiguous()
    lens, table = torch.tensor([0, 2, 2, 2]).int(), torch.zeros(3, 1).int()
    format = getattr(tex.NVTE_QKV_Format, f"NVTE_{qkv_format.upper()}")
    tex.copy_to_kv_cache(given, -given, *caches, table, lens, lens, format, 1, 2, 8, 1, True)
    for cache, sign in zip(caches, (1, -1), strict=True):
        assert torch.equal(cache[0, :2], sign * new[0])
        assert not cache[1:].any()


def test_attention_over_a_cache_is_that_over_the_whole():
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        64, 64, 4, layer_number=1, self_attn_mask_type="causal", attn_input_format="bshd"
    ).eval()
    x = torch.randn(2, 6, 64, device="cuda")
    cache = InferenceParams(2, 16, num_heads_kv=4, head_dim_k=16, dtype=torch.float32)
    with torch.no_grad():
        whole = layer(x)
        parts = []
        for a, b in ((0, 4), (4, 5), (5, 6)):
            cache.pre_step({0: b - a, 1: b - a})
            parts.append(layer(x[:, a:b].contiguous(), self_attn_mask_type="padding_causal", inference_params=cache))
    torch.testing.assert_close(torch.cat([part.view(2, -1, 64) for part in parts], 1), whole, rtol=1e-4, atol=1e-5)


def test_the_orders_that_fused_kernels_read():
    q, k, v = (torch.randn(6, 2, 4, 8).bfloat16() for _ in range(3))  # [s, b, heads, width]
    packed = torch.cat((q, k, v), -1)
    apart = tex.fa_prepare_fwd(packed[..., :8])
    assert torch.equal(apart, torch.stack([part.transpose(0, 1) for part in (q, k, v)]))
    assert torch.equal(tex.fa_prepare_bwd(*apart), packed)
    with pytest.raises(RuntimeError, match="Wrong stride"):
        tex.fa_prepare_fwd(q)
    wide = torch.ones(2, 4, 6, 12).bfloat16()
    found = tex.multi_tensor_transpose_to_bhsd([q, None, k], "sbhd", [None, None, wide])
    assert torch.equal(found[0], q.permute(1, 2, 0, 3))
    assert found[1] is None
    assert found[2] is wide
    assert torch.equal(wide, torch.nn.functional.pad(k.permute(1, 2, 0, 3), (0, 4)))
    assert torch.equal(tex.multi_tensor_transpose_to_bhsd([v], "bshd")[0], v.transpose(1, 2))
    with pytest.raises(RuntimeError, match="only BSHD/SBHD"):
        tex.multi_tensor_transpose_to_bhsd([q], "thd")
    padded, same = tex.multi_tensor_pad_last_dim([torch.ones(3, 5), torch.ones(2, 4)], 4)
    assert torch.equal(padded, torch.nn.functional.pad(torch.ones(3, 5), (0, 3)))
    assert same.shape == (2, 4)
