"""Every forward with every backward that a contract may have: refused with a reason, or TransformerEngine's own linear
computes what ours does, to the bit, in all three GEMMs."""

import itertools

import pytest
import torch
import transformer_engine.pytorch as te
from support.te_cases import ARCH

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics.linear import linear
from nemo_fp8.preflight.engine import _require_te_obeys, backward_findings
from nemo_fp8.preflight.lint import lint
from nemo_fp8.train.own_recipe import recipe_for

pytestmark = pytest.mark.skipif(ARCH < 100, reason="MXFP8 and NVFP4 are Blackwell's")
SCALINGS = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
BACKWARDS = [*itertools.product(("quantized", "dequantized", "high_precision"), (None, "mxfp8", "nvfp4"))]
# Rounding by chance has another chance in TE, so it is left out here.
FOUR_BITS = [
    {"weight_block": block, "row_scaled": rows, "hadamard": turned, "four_over_six": six, "stochastic_rounding": False}
    for block, rows, turned, six in itertools.product(
        ("16x16", "1x16"), (False, True), (False, True), ("none", "weights", "all")
    )
]


def _contracts(scaling, backward, behind):
    """Yield contracts of these three settings; the error of those that are refused."""
    for format_ in ("e2m1",) if scaling == "nvfp4" else ("e4m3", "hybrid"):
        for more in FOUR_BITS if "nvfp4" in (scaling, behind) else [{}]:
            try:
                yield Precision(format=format_, scaling=scaling, backward=backward, backward_scaling=behind, **more)
            except PrecisionError as error:
                yield error


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("backward", "behind"), BACKWARDS)
def test_a_backward_is_carried_out_or_refused(scaling, backward, behind):
    torch.manual_seed(0)
    x, weight, dy = torch.randn(64, 128).bfloat16(), torch.randn(96, 128).bfloat16(), torch.randn(64, 96).bfloat16()

    found = [*_contracts(scaling, backward, behind)]
    ran = [p for p in found if isinstance(p, Precision)]
    assert bool(ran) == (
        _is_possible(backward, behind) and (scaling != "delayed" or (backward, behind) == ("quantized", None))
    )
    for error in found:
        if not isinstance(error, Precision):
            assert all(problem.what and problem.why and problem.remedy for problem in error.problems)
    for p in ran if scaling != "delayed" else ():  # whose scales are those of earlier steps
        for name, here, there in zip(
            ("y", "dx", "dw"), _ours(p, x, weight, dy), _theirs(p, x, weight, dy), strict=True
        ):
            assert there.isfinite().all()
            if name == "dw" and p.row_scaled:  # the amaxes of rows on both sides: TE multiplies with them one by one
                assert (here != there).float().mean() < 1e-3
                assert torch.allclose(here, there, rtol=2**-7)
                continue
            assert torch.equal(here, there), (name, p)
        biased = backward == "quantized" and (behind or scaling) == "nvfp4" and p.weight_block == "1x16"
        assert [f.code for f in backward_findings(p)] == ["fp4-backward-1x16"] * biased


@pytest.mark.parametrize("behind", [None, "mxfp8"])
def test_a_weight_gradient_in_the_compute_dtype_is_refused_beside_any_backward(behind):
    """TE drops the argument for it, and a recipe of two formats has a quantizer for every operand."""
    p = Precision(format="e4m3", scaling="blockwise", wgrad=False, backward_scaling=behind)
    with pytest.raises(PrecisionError, match="wgrad=False"):
        recipe_for(p)


def _with(value):
    def put(t):
        t = t.clone()
        t[3, 5] = value
        return t

    return put


BAD = {
    "zero": lambda t: t * 0,
    "NaN": _with(float("nan")),
    "inf": _with(float("inf")),
    "-inf": _with(-float("inf")),
    "a tiny amax": lambda t: (t.float() * 2.0**-120).bfloat16(),  # whose scale beneath is subnormal, or overflows
    "subnormal": lambda t: (t.float() * 2.0**-130).bfloat16(),
    "huge": lambda t: torch.full_like(t, 3e38),
}


@pytest.mark.parametrize("operand", ["x", "weight", "dy"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_becomes_in_nvfp4_what_te_makes_of_it(bad, operand):
    """One operand of the three that has no number, or none of a usual size."""
    torch.manual_seed(1)
    given = {"x": torch.randn(32, 128), "weight": torch.randn(96, 128), "dy": torch.randn(32, 96)}
    given = {name: t.bfloat16() for name, t in given.items()}
    given[operand] = BAD[bad](given[operand])
    for more in ({}, {"weight_block": "1x16"}, {"hadamard": False}, {"backward": "dequantized"}):
        p = Precision(format="e2m1", scaling="nvfp4", stochastic_rounding=False, **more)
        for here, there in zip(_ours(p, **given), _theirs(p, **given), strict=True):
            assert torch.equal(here.isnan(), there.isnan())
            assert torch.equal(here.nan_to_num(0.0, 1.0, -1.0), there.nan_to_num(0.0, 1.0, -1.0))


def test_no_tokens_at_all():
    """An expert that a batch sends none to."""
    p = Precision(format="e2m1", scaling="nvfp4")
    x, weight, dy = (torch.empty(shape).bfloat16() for shape in ((0, 128), (96, 128), (0, 96)))
    for run in (_ours, _theirs):
        y, dx, dw = run(p, x, weight.fill_(1.0), dy)
        assert (y.shape, dx.shape) == ((0, 96), (0, 128))
        assert torch.equal(dw, torch.zeros(96, 128).bfloat16())


NVFP4 = {"format": "e2m1", "scaling": "nvfp4"}
BLOCKWISE = {"format": "e4m3", "scaling": "blockwise"}


@pytest.mark.parametrize(("fields", "variable", "refused"), [
    ({**NVFP4, "backward": "dequantized"}, "NVTE_BACKWARD_OVERRIDE", True),
    ({**NVFP4, "weight_block": "1x16"}, "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", True),
    ({**BLOCKWISE, "weight_scale": "fp32", "activation_scale": "fp32"}, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", True),
    ({**NVFP4, "weight_block": "1x16", "backward_scaling": "mxfp8"}, "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", False),
    ({**BLOCKWISE, "weight_block": "1x16", "modules": (("*.linear_fc1", "nvfp4"),)},
     "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", False),
])  # fmt: skip
def test_lint_says_of_a_missing_variable_what_a_run_does(fields, variable, refused):
    """This process's TE has read none: what Megatron makes without arguments is refused, what we hand out is not."""
    p = Precision(**fields)
    (found,) = [f for f in lint(p, environment={}) if f.code == "environment-missing"]
    assert found.where == variable
    assert "refuse the run if others" in found.why
    try:
        _require_te_obeys(p)
    except PrecisionError as error:
        assert refused
        assert variable in str(error)  # noqa: PT017
    else:
        assert not refused


def _is_possible(backward, behind):
    return backward == "quantized" or behind is None


def _theirs(p, x, weight, dy):
    module = te.Linear(128, 96, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(weight)
    return _run(x, dy, module.weight, lambda a: _quantized(module, recipe_for(p), a))


def _ours(p, x, weight, dy):
    w = weight.clone().requires_grad_()
    return _run(x, dy, w, lambda a: linear(a, w, precision=p))


def _run(x, dy, weight, call):
    a = x.clone().requires_grad_()
    y = call(a)
    y.backward(dy)
    return y.detach(), a.grad, weight.grad


def _quantized(module, recipe, x):
    with te.autocast(enabled=True, recipe=recipe):
        return module(x)
