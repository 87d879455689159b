# ruff: noqa: E402
"""The Triton kernels against the specification in torch: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys

import pytest
import torch
from support.kernel_cases import compare_statistics, same, values

from nemo_fp8.te_cpu import has_gpu

DEVICE = "cuda" if has_gpu() else "cpu"
if DEVICE == "cpu" and importlib.util.find_spec("transformer_engine"):
    pytest.skip(
        "TransformerEngine is here, and has Triton compile: the rollout environment runs these", allow_module_level=True
    )
if DEVICE == "cpu":
    if "triton" in sys.modules:
        pytest.skip("triton is imported already, and cannot be told any more to interpret", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it while functions are being defined, its own among them
try:
    pytest.importorskip(
        "triton", reason="no triton (`pip install --no-deps --target DIR triton==3.5.1` and PYTHONPATH=DIR will do)"
    )
    from nemo_fp8.numerics.kernels import triton_kernels  # noqa: F401
finally:
    os.environ.pop("TRITON_INTERPRET", None)

from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.kernels import cuda
from nemo_fp8.numerics.quantize import quantize_reference
from nemo_fp8.numerics.quantized import Quantized

RULES = [("te", "fp32"), ("te", "pow2"), ("deepgemm", "fp32"), ("deepgemm", "pow2"), ("te", "e8m0")]
TILES = [(128, 128), (1, 128), (128, 1), (1, 32), (32, 1)]
FP8 = ["e4m3", "e5m2"]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids="-".join)
def test_codes_scales_and_statistics_equal_the_reference(tile, rule):
    convention, kind = rule
    kinds = ["gaussian", "magnitudes", "specials", "zero"]
    for number, (dtype, element) in enumerate(itertools.product([torch.bfloat16, torch.float16, torch.float32], FP8)):
        values_kind = kinds[
            (number + TILES.index(tile) + RULES.index(rule)) % 4
        ]  # all of them for every tile and every rule
        x = values((tile[0] + 5, tile[1] + 12), dtype, number, values_kind).to(DEVICE)
        slow = quantize_reference(x, tile, FORMATS[element], kind, convention, True)
        fast = cuda.quantize(x, tile, element, kind, convention, True, None, None)
        assert fast is not None
        same(fast[0].cpu(), slow[0].cpu())
        same(fast[1].cpu(), slow[1].cpu())
        compare_statistics(fast[2], slow[2], sums=values_kind == "gaussian")
        plain = cuda.quantize(
            x, tile, element, kind, convention, False, None, None
        )  # a program of its own, that reads once
        same(plain[0].cpu(), slow[0].cpu())
        same(plain[1].cpu(), slow[1].cpu())


@pytest.mark.parametrize("element", FP8)
def test_whole_tensors(element):
    for scale in (None, torch.tensor(37.0, device=DEVICE)):
        for kind in ("gaussian", "specials"):
            x = values((70, 300), torch.bfloat16, 3, kind).to(DEVICE)
            fast = cuda.quantize(x, None, element, "fp32", "te", True, scale, None)
            slow = quantize_reference(x, None, FORMATS[element], "fp32", "te", True, scale=scale)
            assert fast is not None
            same(fast[0].cpu(), slow[0].cpu())
            same(fast[1].cpu(), slow[1].cpu())
            compare_statistics(fast[2], slow[2], sums=kind == "gaussian")
            same(cuda.quantize(x, None, element, "fp32", "te", False, scale, None)[0].cpu(), slow[0].cpu())


def test_aligned_tensors_take_other_programs_with_the_same_bits():
    dtypes = itertools.cycle([torch.bfloat16, torch.float16, torch.float32, torch.bfloat16])
    for number, (tile, dtype) in enumerate(zip([*TILES, None], dtypes, strict=False)):
        x = values((40, 160), dtype, number, "specials").to(DEVICE)
        for statistics in (False, True):
            fast = cuda.quantize(x, tile, "e4m3", "fp32", "te", statistics, None, None)
            slow = quantize_reference(x, tile, FORMATS["e4m3"], "fp32", "te", statistics)
            same(fast[0].cpu(), slow[0].cpu())
            same(fast[1].cpu(), slow[1].cpu())
            if statistics:
                compare_statistics(fast[2], slow[2], sums=False)
        decoded = cuda.decode(fast[0], fast[1], tile, torch.float32, None)
        expected = Quantized(slow[0], slow[1], tile).dequantize(torch.float32)
        torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(DEVICE != "cpu", reason="memory that is reserved and not touched")
def test_places_beyond_32_bits():
    """Rows and scales that lie so far apart that their places need more than 32 bits: source, codes and scales."""
    far = 1 << 30
    x = torch.empty(3 * far + 128, dtype=torch.bfloat16).as_strided((4, 128), (far, 1))
    codes = torch.empty(3 * far + 128, dtype=torch.float8_e4m3fn).as_strided((4, 128), (far, 1))
    scales = torch.empty(3 * far + 4, dtype=torch.float8_e8m0fnu).as_strided((4, 4), (1, far))
    x.copy_(values((4, 128), torch.bfloat16, 7, "gaussian"))
    cuda.quantize(x, (1, 32), "e4m3", "e8m0", "te", False, None, (codes, scales))
    slow = quantize_reference(x.contiguous(), (1, 32), FORMATS["e4m3"], "e8m0")
    same(codes, slow[0])
    same(scales, slow[1])
    decoded = cuda.decode(codes.contiguous(), scales, (1, 32), torch.float32, None)
    torch.testing.assert_close(decoded, Quantized(*slow[:2], (1, 32)).dequantize(torch.float32), rtol=0, atol=0)


@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("tile", [*TILES, None], ids=str)
def test_decode_equals_dequantize(element, tile):
    codes = (
        torch.arange(256, dtype=torch.uint8)
        .repeat(80)[: 130 * 140]
        .view(130, 140)
        .view(FORMATS[element].dtype)
        .to(DEVICE)
    )
    for kind in ("fp32", "e8m0"):
        x = values((130, 140), torch.float32, 4, "magnitudes").to(DEVICE)
        scale_inv = quantize_reference(x, tile, FORMATS[element], kind)[1]
        for dtype in (
            (torch.float32,) if DEVICE == "cpu" else (torch.float32, torch.bfloat16)
        ):  # the interpreter truncates to BF16
            fast = cuda.decode(codes, scale_inv, tile, dtype, None)
            torch.testing.assert_close(
                fast, Quantized(codes, scale_inv, tile).dequantize(dtype), rtol=0, atol=0, equal_nan=True
            )


def test_rows_that_lie_apart():
    x = values((64, 300), torch.bfloat16, 5, "gaussian").to(DEVICE)[:, 10:200]
    same(
        cuda.quantize(x, (1, 128), "e4m3", "fp32", "te", False, None, None)[0].cpu(),
        quantize_reference(x, (1, 128), FORMATS["e4m3"], "fp32")[0].cpu(),
    )


@pytest.mark.parametrize("shape", [(128, 128), (130, 259), (1, 64), (64, 1), (257, 48)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_matrix_is_turned(shape, dtype):
    x = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0].to(DEVICE)
    wide = torch.zeros(shape[1], shape[0] + 3, dtype=dtype, device=DEVICE)
    for into in (torch.empty(shape[::-1], dtype=dtype, device=DEVICE), wide[:, : shape[0]]):
        assert cuda.turn(x, into)
        same(into.cpu(), x.t().cpu())
    assert not wide.cpu().view(torch.uint8).view(shape[1], -1)[:, shape[0] * dtype.itemsize :].any()  # behind the rows


def test_what_cannot_be_turned_is_left_or_refused():
    x = torch.zeros(16, 32, dtype=torch.uint8, device=DEVICE)
    assert not cuda.turn(x.float(), x.float().t().contiguous())  # four bytes an element
    assert not cuda.turn(x.t(), torch.empty_like(x))  # rows that are columns
    with pytest.raises(ValueError, match="turned into memory of"):
        cuda.turn(x, torch.empty_like(x))
