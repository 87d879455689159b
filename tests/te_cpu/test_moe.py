"""MoE's kernels, in both directions, beside plain torch: permutation in both maps, chunks, router, balancing losses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.pytorch import permutation, router

from nemo_fp8.te_cpu.permutation import make_row_id_map, unpermute_with_mask_map_bwd_with_merging_probs

TOKENS, EXPERTS, K, WIDTH = 48, 8, 3, 32


def _routing(seed=0):
    """[map of 0 and 1, probabilities of the chosen, zero elsewhere]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32).scatter_(1, scores.topk(K).indices, 1)
    return routing_map, scores * routing_map


def _gradients(outputs, inputs):
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs]
    return torch.autograd.grad(outputs, inputs, grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("align", [0, 16])
def test_mask_map_there_and_back(dtype, align):
    routing_map, probs = _routing()
    x = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    weights = probs.clone().requires_grad_()
    experts, tokens = routing_map.t().nonzero(as_tuple=True)  # expert by expert, tokens in their order
    per_expert = routing_map.sum(0)
    if align:
        rows, row_probs, row_map, offsets, padded = permutation.moe_permute_and_pad_with_probs(
            x, weights, routing_map, per_expert, align
        )
        places = torch.arange(len(tokens)) + offsets[experts]
    else:
        rows, row_probs, row_map = permutation.moe_permute_with_probs(x, weights, routing_map, TOKENS * K)
        offsets, padded, places = None, per_expert, torch.arange(len(tokens))
    expected = torch.zeros(int(padded.sum()), WIDTH, dtype=dtype).index_copy(0, places, x[tokens])
    expected_probs = torch.zeros(int(padded.sum())).index_copy(0, places, weights[tokens, experts])
    assert torch.equal(rows, expected)
    assert torch.equal(row_probs, expected_probs)
    merged = permutation.moe_unpermute(rows, row_map, weights, x.shape, pad_offsets=offsets)
    terms = expected[places].float() * weights[tokens, experts][:, None]
    reference = torch.zeros(TOKENS, WIDTH).index_add(0, tokens, terms).to(dtype)
    exact = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-7}
    torch.testing.assert_close(merged, reference, **exact)
    grads = _gradients([reference, expected_probs], [x, weights])
    for mine, theirs in zip(_gradients([merged, row_probs], [x, weights]), grads, strict=True):
        torch.testing.assert_close(mine, theirs, **exact)


class _Largest(TorchDispatchMode):
    """How many elements the largest FP32 tensor had that an operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_backward_of_merging_makes_no_fp32_copy_of_every_row():
    """Of a token's rows there are as many as experts, so that one takes several times the memory of all tokens."""
    routing_map, probs = _routing()
    row_map = make_row_id_map(routing_map, TOKENS, EXPERTS)
    grad, rows = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(TOKENS * K, WIDTH).bfloat16()
    with _Largest() as seen:  # called directly: a mode does not look into an operator of TE's
        unpermute_with_mask_map_bwd_with_merging_probs(
            grad, row_map, rows, probs, None, TOKENS, EXPERTS, TOKENS * K, WIDTH
        )
    assert TOKENS * WIDTH <= seen.elements < TOKENS * WIDTH * K


@pytest.mark.parametrize("kept", [0, TOKENS * K - 20])
def test_index_map_there_and_back(kept):
    indices = _routing()[1].topk(K).indices.int()
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    probs = torch.rand(TOKENS, K, requires_grad=True)
    rows, row_map = permutation.moe_permute(x, indices, kept, map_type="index")
    merged = permutation.moe_unpermute(rows, row_map, probs, map_type="index")
    order = indices.flatten().sort(stable=True).indices[: kept or TOKENS * K]
    assert torch.equal(rows, x[order // K])
    reference = torch.zeros(TOKENS, WIDTH).index_add(0, order // K, x[order // K] * probs.flatten()[order][:, None])
    torch.testing.assert_close(merged, reference)
    for mine, theirs in zip(_gradients([merged], [x, probs]), _gradients([reference], [x, probs]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_fp8_rows_are_moved_with_their_scales():
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine_torch import DType

    x = torch.randn(TOKENS, WIDTH).bfloat16()
    quantized = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cuda", columnwise=False)(x)
    routing_map, _ = _routing()
    rows, _ = permutation.moe_permute(quantized, routing_map, TOKENS * K, map_type="mask")
    assert torch.equal(rows.dequantize(), quantized.dequantize()[routing_map.t().nonzero()[:, 1]])


def test_chunks_are_sorted_and_rows_behind_them_stay():
    sizes, order = torch.tensor([5, 0, 20, 16]), torch.tensor([2, 0, 3, 1])
    x, probs = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.rand(TOKENS, requires_grad=True)
    rows, row_probs = permutation.moe_sort_chunks_by_index_with_probs(x, probs, sizes.int(), order.int())
    *chunks, behind = torch.arange(TOKENS).split([*sizes.tolist(), TOKENS - 41])
    moved = torch.cat([*(chunks[i] for i in order), behind])
    assert torch.equal(rows, x[moved])
    assert torch.equal(row_probs, probs[moved])
    for mine, theirs in zip(
        _gradients([rows, row_probs], [x, probs]), _gradients([x[moved], probs[moved]], [x, probs]), strict=True
    ):
        assert torch.equal(mine, theirs)


def _plain_router(logits, topk, score_function, pre_softmax, factor, bias):
    if score_function == "softmax":
        scores = logits.softmax(-1) if pre_softmax else logits
        chosen = scores.topk(topk).indices
        kept = scores.gather(1, chosen)
        kept = kept if pre_softmax else kept.softmax(-1)
    else:
        scores = logits.sigmoid() if score_function == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
        chosen = (scores + bias).topk(topk).indices
        kept = scores.gather(1, chosen)
        kept = kept / kept.sum(-1, keepdim=True) if topk > 1 else kept
    return torch.zeros_like(logits).scatter(1, chosen, kept * factor), chosen


@pytest.mark.parametrize("topk", [1, K])
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_router(score_function, pre_softmax, topk):
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    bias = None if score_function == "softmax" else torch.randn(EXPERTS)
    probs, routing_map = router.fused_topk_with_score_function(
        logits, topk, pre_softmax, None, None, 2.5, score_function, bias
    )
    expected, chosen = _plain_router(logits, topk, score_function, pre_softmax, 2.5, bias)
    assert torch.equal(routing_map, torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True))
    torch.testing.assert_close(probs, expected)
    (grad,) = _gradients([probs], [logits])
    torch.testing.assert_close(grad, _gradients([expected], [logits])[0])
    for arguments in (
        {"routing_map_format": "bitmap_u8"},
        {"topk_indices": torch.empty(TOKENS, topk, dtype=torch.int32)},
    ):
        again, _ = router.fused_topk_with_score_function(
            logits, topk, pre_softmax, None, None, 2.5, score_function, bias, **arguments
        )
        assert torch.equal(again, probs)
        assert torch.equal(_gradients([again], [logits])[0], grad)


def test_groups_of_experts_are_chosen_first():
    logits = torch.tensor(
        [[9.0, -9.0, 5.0, 4.9, 0.0, 0.0, 8.0, -8.0]]
    )  # the largest expert, 0, lies in a group that is worth less
    _, routing_map = router.fused_topk_with_score_function(logits, 2, False, 4, 1, None, "softmax", None)
    assert routing_map.nonzero()[:, 1].tolist() == [2, 3]


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_balancing_loss(score_function):
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    routing_map, scores = router.fused_compute_score_for_moe_aux_loss(logits, K, score_function)
    plain = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }
    expected = plain[score_function](logits)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(scores, expected)
    assert torch.equal(routing_map.sum(1), torch.full((TOKENS,), K))
    per_expert = routing_map.sum(0)
    loss = router.fused_moe_aux_loss(scores, per_expert, TOKENS, EXPERTS, K, 0.01)
    reference = (expected.sum(0) * per_expert).sum() * EXPERTS * 0.01 / (K * TOKENS * TOKENS)
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(_gradients([loss], [logits])[0], _gradients([reference], [logits])[0])


def test_what_the_router_refuses():
    with pytest.raises(RuntimeError, match="score_function must be"):
        router.fused_topk_with_score_function(torch.randn(4, 4), 2, False, None, None, None, "tanh", None)
    with pytest.raises(RuntimeError, match=r"topk must be in \[1, num_experts\]"):
        router.fused_topk_with_score_function(torch.randn(4, 4), 5, False, None, None, None, "softmax", None)


def test_megatrons_fused_path_is_its_plain_one():
    """Megatron's router, permutation, unpermutation and sort, with TE's kernels and without."""
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    x, logits = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(TOKENS, EXPERTS, requires_grad=True)
    results = []
    for fused in (False, True):
        probs, routing_map = moe_utils.topk_routing_with_score_function(
            logits, K, score_function="sigmoid", expert_bias=torch.zeros(EXPERTS), fused=fused
        )[:2]
        rows, row_probs, row_map = moe_utils.permute(
            x, routing_map, probs=probs, num_out_tokens=TOKENS * K, fused=fused
        )[:3]
        y = moe_utils.unpermute(rows * row_probs[:, None], row_map, x.shape, routing_map=routing_map, fused=fused)
        sizes, order = torch.tensor([TOKENS, 0, TOKENS * (K - 1)]), torch.tensor([2, 0, 1])
        z, z_probs = moe_utils.sort_chunks_by_idxs(rows, sizes, order, probs=row_probs, fused=fused)
        results.append([y, z, z_probs, *_gradients([y, z * z_probs[:, None]], [x, logits])])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
