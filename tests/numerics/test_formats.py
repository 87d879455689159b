"""The bits: every code and every cast, against ml_dtypes and torch."""

import ml_dtypes
import numpy as np
import pytest
import torch
from support import oracles

from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.formats import FORMATS, cast, decode, decode_e8m0, format_of

ELEMENTS = ("e4m3", "e5m2")
CODES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_is_what_ml_dtypes_says(name):
    ours, theirs = FORMATS[name], ml_dtypes.finfo(oracles.ML_DTYPES[name])
    assert (ours.max, ours.mantissa_bits, ours.bits, ours.exponent_bits) == (
        float(theirs.max),
        theirs.nmant,
        theirs.bits,
        theirs.nexp,
    )
    assert ours.smallest == float(theirs.smallest_subnormal)
    values = CODES[: 1 << ours.bits].numpy().view(oracles.ML_DTYPES[name]).astype(np.float64)
    positive = values[: 256 if name == "e8m0" else 1 << (ours.bits - 1)]
    finite = ours.magnitudes.numpy()
    assert np.array_equal(finite, positive[: len(finite)])
    assert not np.isfinite(positive[len(finite) :]).any()
    assert np.isnan(positive[ours.first_nan :]).all()
    assert not np.isnan(positive[: ours.first_nan]).any()
    assert [int(c) for c in np.flatnonzero(np.isinf(positive))] == ([] if ours.infinity is None else [ours.infinity])


@pytest.mark.parametrize("name", ELEMENTS)
def test_saturates_above_is_the_last_value_that_only_rounds(name):
    format = FORMATS[name]
    step = format.max - float(
        decode(
            torch.tensor([format.first_nan if format.infinity is None else format.infinity])
            .sub(2)
            .to(torch.uint8)
            .view(format.dtype)
        )
    )
    assert format.saturates_above == format.max + step / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ELEMENTS)
def test_decode_every_code(name, dtype):
    values = decode(CODES.view(FORMATS[name].dtype), dtype)
    theirs = CODES.numpy().view(oracles.ML_DTYPES[name]).astype(np.float32)
    assert values.dtype == dtype
    assert oracles.differences(values.float().numpy(), theirs) == 0


def test_decode_every_e8m0_code():
    theirs = CODES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert oracles.differences(decode_e8m0(CODES).numpy(), theirs) == 0
    assert oracles.differences(decode_e8m0(CODES.view(torch.float8_e8m0fnu)).numpy(), theirs) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ELEMENTS)
def test_cast_every_16_bit_value(name, dtype):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    assert oracles.differences(oracles.as_codes(cast(every, FORMATS[name])), oracles.cast(every.numpy(), name)) == 0


@pytest.mark.parametrize("name", ELEMENTS)
def test_cast_of_fp32_bit_patterns_and_ties(name):
    format = FORMATS[name]
    values = decode(CODES.view(format.dtype), torch.float32)
    finite = values[values.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    up, down = (torch.nextafter(ties, torch.full_like(ties, way)) for way in (float("inf"), -float("inf")))
    anything = (
        torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0))
        .to(torch.int32)
        .view(torch.float32)
    )
    for x in (ties, up, down, anything):
        assert oracles.differences(oracles.as_codes(cast(x, format)), oracles.cast(x.numpy(), name)) == 0


@pytest.mark.parametrize("name", ELEMENTS)
def test_cast_agrees_with_torch_inside_the_range(name):
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) * FORMATS[name].max / 5
    x = x[x.abs() <= FORMATS[name].max]
    assert torch.equal(cast(x, FORMATS[name]).view(torch.uint8), x.to(FORMATS[name].dtype).view(torch.uint8))


def test_infinity_saturates_and_nan_stays():
    x = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert cast(x, FORMATS["e4m3"]).view(torch.uint8).tolist() == [0x7E, 0xFE, 0x7F]
    assert cast(x, FORMATS["e5m2"]).view(torch.uint8).tolist() == [0x7B, 0xFB, 0x7F]


def test_unknown_formats_are_refused():
    with pytest.raises(PrecisionError, match="e4m3"):
        format_of("e4m4")
    with pytest.raises(PrecisionError, match="Cannot decode"):
        decode(torch.zeros(2))
