"""Tensors that find mistakes: ragged, of any magnitude, with zeros, subnormals, NaN and infinities where it hurts."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from nemo_fp8.contract import Operand

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Every operand that a contract can ask for.
OPERANDS = [
    Operand(format, block, scale)
    for format in ("e4m3", "e5m2")
    for block, scales in (
        (None, ("fp32", "pow2")),
        ((128, 128), ("fp32", "pow2")),
        ((1, 128), ("fp32", "pow2")),
        ((1, 32), ("e8m0",)),
    )
    for scale in scales
]


def name(operand: Operand) -> str:
    return f"{operand.format}-{'x'.join(map(str, operand.block)) if operand.block else 'tensor'}-{operand.scale}"


@st.composite
def tensors(draw, dims=(2, 3), nonfinite=True, dtypes=DTYPES):
    """A tensor whose rows differ in magnitude, from where scales overflow to where values do."""
    dtype = draw(st.sampled_from(dtypes))
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.sampled_from(dims)) - 2)]
    shape += [draw(st.integers(1, 140)), draw(st.integers(1, 300))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    low, high = {torch.float16: (-24, 15)}.get(dtype, (-149, 126))
    first, last = sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
    exponents = torch.randint(first, last + 1, (*shape[:-1], 1), generator=generator)
    x = torch.ldexp(torch.randn(shape, generator=generator), exponents).to(dtype)
    specials = [0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 8]
    specials += [float("nan"), -float("nan"), float("inf"), -float("inf")] if nonfinite else []
    for special in draw(st.lists(st.sampled_from(specials), max_size=4)):
        x[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.001, 0.3]))] = special
    if draw(st.booleans()):
        x[..., : shape[-1] // 2] = 0  # whole tiles of zeros
    if not nonfinite:
        x = x.nan_to_num(nan=0.0, posinf=torch.finfo(dtype).max, neginf=torch.finfo(dtype).min)
    return x


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bits of codes or scales, comparable with torch.equal."""
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.uint8)
