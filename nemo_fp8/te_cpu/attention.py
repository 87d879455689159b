"""What attention needs besides its GEMMs: fused softmaxes and the rotary embedding.

    softmax     p = softmax(scale * x), masked        dx = scale * p * (dp - sum(dp * p))
    rotary      y = x * cos(f) + rotate(x) * sin(f)   backward: the rotation by -f

All in FP32, rounded once. TE chooses its unfused attention by itself here, since the extension knows no fused one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASKED = (
    -10000.0
)  # TE's, which leaves a row that is masked everywhere finite; such a row's probabilities are then zero


@torch.no_grad()
def scaled_softmax_forward(input: torch.Tensor, scale: float) -> torch.Tensor:
    """Scale and take the softmax, without a mask."""
    return torch.softmax(input.float() * scale, -1).to(input.dtype)


@torch.no_grad()
def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax of scaled scores; where ``mask`` is true, nothing is attended to."""
    hidden = mask.bool()
    p = torch.softmax((input.float() * scale).masked_fill_(hidden, _MASKED), -1)
    everywhere = hidden.all(-1, keepdim=True)
    return (p.masked_fill_(everywhere, 0.0) if everywhere.any() else p).to(input.dtype)


def _causal(input: torch.Tensor, scale: float, bottom_right: bool) -> torch.Tensor:
    queries, keys = input.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu((keys - queries if bottom_right else 0) + 1)
    return torch.softmax((input.float() * scale).masked_fill_(later, float("-inf")), -1).to(input.dtype)


@torch.no_grad()
def scaled_upper_triang_masked_softmax_forward(input: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax of scaled scores, where a query attends to the keys up to its own place."""
    return _causal(input, scale, bottom_right=False)


@torch.no_grad()
def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax of scaled scores under a causal mask that ends with the last query and the last key."""
    return _causal(input, scale, bottom_right=True)


@torch.no_grad()
def scaled_softmax_backward(output_grad: torch.Tensor, softmax_results: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the gradient of a softmax's input, for every kind of mask: what was masked has probability zero."""
    g, p = output_grad.float(), softmax_results.float()
    return (g - (g * p).sum(-1, keepdim=True)).mul_(scale * p).to(output_grad.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward


# ---------------------------------------------------------------------- rotary embedding


def _rotate(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return (-b, a) of (a, b), which are the two halves of a head, or neighbours (``interleaved``)."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((-b, a), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _in_sequence(tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return the place of each of a rank's tokens in their sequence. Of 2 n equal chunks rank r of n holds the r-th and
    the r-th from the end."""
    places, half = torch.arange(tokens), tokens // 2
    if cp_size == 1:
        return places
    return places + torch.where(places < half, cp_rank * half, tokens * cp_size - (cp_rank + 2) * half)


def _angles(
    input: torch.Tensor, freqs: torch.Tensor, qkv_format: object, cu_seqlens: torch.Tensor | None,
    starts: torch.Tensor | None, cp_size: int, cp_rank: int,
) -> torch.Tensor:  # fmt: skip
    """Return the angles of each token, in a shape that broadcasts over heads."""
    name = getattr(qkv_format, "name", str(qkv_format))
    angles = freqs.float().reshape(freqs.shape[0], -1)
    if "THD" in name:
        assert cu_seqlens is not None
        ends = [end // cp_size for end in cu_seqlens.tolist()]
        first = [0] * (len(ends) - 1) if starts is None else starts.tolist()
        parts = [s + _in_sequence(b - a, cp_size, cp_rank) for s, a, b in zip(first, ends, ends[1:], strict=False)]
        behind = torch.zeros(input.shape[0] - ends[-1], dtype=torch.int64)  # rows of no sequence
        return angles[torch.cat([*parts, behind])][:, None, :]
    tokens = input.shape[1] if "BSHD" in name else input.shape[0]
    places = _in_sequence(tokens, cp_size, cp_rank)[None] + (0 if starts is None else starts[:, None])
    found = angles[places][:, :, None, :]  # [batch or 1, tokens, 1, width]
    return found if "BSHD" in name else found.transpose(0, 1)


def _turn(x: torch.Tensor, angles: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    """Rotate the first dimensions of every head, as many as there are angles for."""
    width = angles.shape[-1]
    part = x[..., :width].float()
    # Backward is the transposed rotation: rotate(.)^T = -rotate(.), and the sine is multiplied before it.
    crossed = -_rotate(part * angles.sin(), interleaved) if backward else _rotate(part, interleaved) * angles.sin()
    return torch.cat(((part * angles.cos() + crossed).to(x.dtype), x[..., width:]), -1)


@torch.no_grad()
def fused_rope_forward(
    input: torch.Tensor, freqs: torch.Tensor, start_positions: torch.Tensor | None, qkv_format: object, interleaved:
    bool, cu_seqlens: torch.Tensor | None, cp_size: int, cp_rank: int, *more: object, ) -> torch.Tensor:  # fmt: skip
    """Rotate every head by its token's place."""
    return _turn(
        input, _angles(input, freqs, qkv_format, cu_seqlens, start_positions, cp_size, cp_rank), interleaved, False
    )


@torch.no_grad()
def fused_rope_backward(
    output_grads: torch.Tensor, freqs: torch.Tensor, start_positions: torch.Tensor | None, qkv_format: object,
    interleaved: bool, cu_seqlens: torch.Tensor | None, cp_size: int, cp_rank: int, *more: object,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of what ``fused_rope_forward`` rotated: the output's, turned back by the same angles."""
    return _turn(
        output_grads,
        _angles(output_grads, freqs, qkv_format, cu_seqlens, start_positions, cp_size, cp_rank),
        interleaved,
        True,
    )


@torch.no_grad()
def fused_qkv_rope_forward(
    qkv_input: torch.Tensor, q_freqs: torch.Tensor, k_freqs: torch.Tensor, start_positions: torch.Tensor | None,
    qkv_split_arg_list: Sequence[int], qkv_format: object, interleaved: bool, cp_size: int, cp_rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return rotated queries, rotated keys, and values, of rows that hold a group's queries, its key and its value one
    after the other."""
    starts = start_positions if cp_size == 1 else None
    q, k, v = torch.split(qkv_input, list(qkv_split_arg_list), -1)
    q = q.reshape(*q.shape[:2], -1, k.shape[-1])
    turned = [
        _turn(x, _angles(x, freqs, qkv_format, None, starts, cp_size, cp_rank), interleaved, False)
        for x, freqs in ((q, q_freqs), (k, k_freqs))
    ]
    return turned[0], turned[1], v.contiguous()


@torch.no_grad()
def fused_qkv_rope_backward(
    q_grad_out: torch.Tensor, k_grad_out: torch.Tensor, v_grad_out: torch.Tensor, q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int], qkv_format: object, interleaved: bool, cp_size: int, cp_rank: int,
) -> torch.Tensor:  # fmt: skip
    """Return the gradients of queries, keys and values in one row again. It takes no start positions, as TE gives it
    none."""
    turned = [
        _turn(g, _angles(g, freqs, qkv_format, None, None, cp_size, cp_rank), interleaved, True).reshape(
            *v_grad_out.shape[:3], -1
        )
        for g, freqs in ((q_grad_out, q_freqs), (k_grad_out, k_freqs))
    ]
    return torch.cat([*turned, v_grad_out], -1)
