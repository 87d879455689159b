"""Other people's ways to make FP8 blocks and to read them, each as its authors write it, for benchmarks to run beside
ours.

NeMo RL's algorithm is written anew after what its code does; torchao is called, where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize_reference

E4M3 = torch.float8_e4m3fn
Ways = dict[str, Callable[[], Any]]


def padded_eager(x: torch.Tensor, power_of_2: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize by NeMo RL's algorithm, written anew: pad with the last element, bring each block together, scale it,
    put it back."""
    rows, cols = x.shape
    down, right = -rows % 128, -cols % 128
    if down or right:
        x = torch.nn.functional.pad(x, (0, right, 0, down), value=float(x[-1, -1]))
    high, wide = x.shape[0] // 128, x.shape[1] // 128
    blocks = x.reshape(high, 128, wide, 128).permute(0, 2, 1, 3).to(torch.float32).contiguous().flatten(2)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    scale = torch.div(448.0, amax)
    scale = torch.where(amax == 0, 1.0, scale)
    scale = torch.where(amax == torch.inf, 1.0, scale)
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    codes = (blocks * scale).clamp(-448, 448).to(E4M3)
    codes = codes.reshape(high, wide, 128, 128).permute(0, 2, 1, 3).reshape(high * 128, wide * 128)
    return codes[:rows, :cols].contiguous(), torch.reciprocal(scale).reshape(high, wide)


def two_pass(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize in the shortest way in torch: one pass for amaxes, one for codes."""
    tiles = x.view(x.shape[0] // 128, 128, x.shape[1] // 128, 128)
    scale = 448.0 / tiles.abs().amax((1, 3)).float()
    return (tiles * scale[:, None, :, None]).clamp(-448, 448).to(E4M3).view(x.shape), 1 / scale


def two_pass_back(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    tiles = codes.view(scale_inv.shape[0], 128, scale_inv.shape[1], 128)
    return (tiles.float() * scale_inv[:, None, :, None]).to(torch.bfloat16).view(codes.shape)


def peers(x: torch.Tensor, compiled: bool) -> tuple[Ways, Ways, Ways]:
    """Return the ways of others to quantize weights in 128x128 blocks, to decode them, and to quantize to MX."""
    codes, scale_inv = two_pass(x)
    there: Ways = {"NeMo RL's algorithm, eager": lambda: padded_eager(x), "two passes, eager": lambda: two_pass(x)}
    back: Ways = {"eager": lambda: two_pass_back(codes, scale_inv)}
    mx: Ways = {}
    there["our specification, eager"] = lambda: quantize_reference(x, (128, 128), format_of("e4m3"), "fp32")
    if compiled:
        fused, fused_back = torch.compile(two_pass), torch.compile(two_pass_back)
        there["two passes, torch.compile"] = lambda: fused(x)
        back["torch.compile"] = lambda: fused_back(codes, scale_inv)
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.quantization import quant_primitives as ao
    except ImportError as error:
        print(f"torchao is left out: {error}", file=sys.stderr)
        return there, back, mx

    def torchao_blocks() -> Any:
        scale = ao._choose_scale_float8(x, (128, 128), E4M3)
        return ao._quantize_affine_float8(x, scale, E4M3), scale

    there["torchao, eager"] = torchao_blocks
    back["torchao, eager"] = lambda: ao._dequantize_affine_float8(codes, scale_inv, torch.bfloat16)
    mx["torchao to_mx, eager"] = lambda: to_mx(x, E4M3, 32)
    if compiled:
        fused_blocks = torch.compile(torchao_blocks)
        there["torchao, torch.compile"] = lambda: fused_blocks()
    return there, back, mx
