"""The extension has every name that TE's sources ask for, and says by name what it cannot do."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformer_engine
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from support import ROOT
from support.te_cases import ARCH

from nemo_fp8.te_cpu import extension

# A word of a docstring (of the operators of torch.ops.tex, which are none of the extension, the pattern knows).
_NOT_OF_THE_EXTENSION = {"LayerNorm"}


def asked_for():
    """Every attribute of the extension that TE's PyTorch sources name."""
    names = set()
    for path in Path(transformer_engine.__file__).parent.joinpath("pytorch").rglob("*.py"):
        names |= set(re.findall(r"(?<![.\w])tex\.([A-Za-z_]\w*)", path.read_text()))
        for block in re.findall(r"from transformer_engine_torch import (\([^)]*\)|[\w, ]+)", path.read_text()):
            names |= set(re.findall(r"\w+", block))
    return names - _NOT_OF_THE_EXTENSION


def test_every_name_that_te_asks_for_is_there():
    assert sorted(name for name in asked_for() if not hasattr(tex, name)) == []


def test_what_is_missing_says_its_name():
    assert sorted(set(extension.MISSING) & set(dir(tex))) == sorted(extension.MISSING)
    page = (ROOT / "docs/te_cpu.md").read_text()  # which its message names
    for name in (*extension.MISSING, *(name for name in extension._CLASSES if name.startswith("Comm"))):
        with pytest.raises(NotImplementedError, match=rf"transformer_engine_torch\.{name} has no CPU implementation"):
            getattr(tex, name)()
        assert f"`{name}`" in page


def test_so_does_what_te_exports_and_never_calls():
    """Functions that pybind.cpp defines (2.20) and no Python of TE's names."""
    never_called = """
    create_nvshmem_tensor init_nvshmem_backend nvshmem_finalize nvshmem_send_on_current_stream
    nvshmem_wait_on_current_stream
    nvfp4_2d_compute_partial_amax nvfp4_2d_partial_cast nvfp4_compute_per_block_scale nvfp4_expand_scale_to_fp8
    nvfp4_fused_scale
    """.split()
    assert set(never_called) <= set(extension.MISSING)
    assert not set(never_called) & asked_for()


def test_every_function_of_a_submodule_that_te_asks_for_is_there():
    for path in Path(transformer_engine.__file__).parent.joinpath("pytorch").rglob("*.py"):
        for home, name in re.findall(r"(?<![.\w])tex\.([a-z_]+)\.([a-z_]\w*)\(", path.read_text()):
            if isinstance(getattr(tex, home), type(tex)):
                assert hasattr(getattr(tex, home), name), f"{home}.{name}"


def test_each_name_has_one_home():
    names = [name for functions in extension._MODULES.values() for name in functions.split()]
    names += [
        *extension.MISSING,
        *extension._SUBMODULES,
        *extension._FACTS,
        *extension._CLASSES,
        *extension.ENUMERATIONS,
    ]
    assert len(names) == len(set(names))


def test_every_function_is_documented():
    for module, names in (
        row for homes in (extension._MODULES, *extension._SUBMODULES.values()) for row in homes.items()
    ):
        for name in names.split():
            assert inspect.getdoc(getattr(module, name)), f"{module.__name__}.{name}"


def test_te_stands_on_it():
    from nemo_fp8 import te_cpu

    assert te_cpu.is_installed()
    assert torch.empty(2, device="cuda").is_cuda
    te_cpu.install(int(torch.cuda.get_device_capability()[0]) * 10)  # again: nothing happens


def test_another_architecture_is_refused():
    from nemo_fp8 import te_cpu
    from nemo_fp8.errors import PrecisionError

    with pytest.raises(PrecisionError, match="in a process that stands for"):
        te_cpu.install(90 if torch.cuda.get_device_capability()[0] == 10 else 100)


@pytest.mark.skipif(ARCH != 90, reason="rules of Hopper's cuBLAS")
@pytest.mark.parametrize(
    ("shapes", "square", "arguments", "words"),
    [
        (((256, 128), (256, 128)), (True, False), {}, None),
        (((256, 128), (255, 128)), (False, True), {}, None),
        (((256, 128), (256, 128)), (True, True), {}, "Only 1D by 1D"),
        (((256, 120), (256, 120)), (True, False), {}, "Inner dimension"),
        (((252, 128), (256, 128)), (True, False), {}, "Outer dimension requirement on A"),
        (((256, 128), (255, 128)), (True, False), {}, "Outer dimension requirement on B"),
        (((256, 128), (256, 128)), (True, False), {"split": False}, "split accumulator"),
        (((256, 128), (256, 128)), (True, False), {"gelu": True}, "Epilogue requested outside of the available"),
        (
            ((256, 128), (256, 128)),
            (True, False),
            {"bias": True, "grad": True},
            "Epilogue requested outside of the available",
        ),
    ],
)
def test_hopper_multiplies_blockwise_operands_only_as_its_gemm_can(shapes, square, arguments, words):
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    a, b = (
        Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2 if two else 1)(
            torch.randn(shape)
        )
        for shape, two in zip(shapes, square, strict=True)
    )
    bias = torch.zeros(shapes[0][0], dtype=torch.bfloat16) if arguments.get("bias") else None

    def product():
        return tex.generic_gemm(
            a, True, b, False, None, None, tex.DType.kBFloat16, bias, tex.DType.kBFloat16, arguments.get("gelu", False),
            None, arguments.get("grad", False), None, 0, False, arguments.get("split", True), )[0]  # fmt: skip

    if words is None:
        assert product().shape == (shapes[1][0], shapes[0][0])
    else:
        with pytest.raises(RuntimeError, match=words):
            product()


@pytest.mark.skipif(ARCH != 90, reason="the GEMM of Hopper's cuBLAS")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("square", [(True, False), (False, True), (False, False)])
def test_hopper_scales_the_partial_sums_of_blockwise_operands(square, pow2, accumulate):
    """Of 128 products each, in FP32, with one rounding for a scale and the addition; BF16 results are rounded before
    they accumulate."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    torch.manual_seed(0)
    a, b = (
        Float8BlockQuantizer(
            tex.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=True,
            block_scaling_dim=2 if two else 1,
            force_pow_2_scales=pow2,
        )(torch.randn(rows, 512))
        for rows, two in zip((256, 128), square, strict=True)
    )
    (codes_a, scales_a), (codes_b, scales_b) = (_by_rows(tensor) for tensor in (a, b))
    expected = torch.zeros(128, 256)
    for k in range(4):
        block = slice(128 * k, 128 * k + 128)
        partial = codes_b[:, block] @ codes_a[:, block].t()
        first, last = (
            (scales_b[:, k, None], scales_a[:, k])
            if square != (False, True)
            else (scales_a[:, k], scales_b[:, k, None])
        )
        expected = ((partial * first).double() * last.double() + expected.double()).float()
    before = torch.randn(128, 256).bfloat16()
    found = tex.generic_gemm(
        a, True, b, False, before.clone() if accumulate else None, None,
        tex.DType.kBFloat16 if accumulate else tex.DType.kFloat32,
        None, tex.DType.kBFloat16, False, None, False, None, 0, accumulate, True,
    )[0]  # fmt: skip
    assert torch.equal(found, before + expected.bfloat16() if accumulate else expected)


def _by_rows(tensor):
    """The codes of a blockwise tensor as numbers, and the scales of every row."""
    codes, scales = tensor._rowwise_data.view(torch.float8_e4m3fn).float(), tensor._rowwise_scale_inv
    scales = scales.repeat_interleave(128, 0) if tensor._is_2D_scaled else scales.t()
    return codes, scales[: codes.shape[0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [64, 1024])
def test_a_factor_that_is_a_power_of_two_changes_no_bit_of_a_product(k, dtype):
    """TE's fused linear and scale against the two one by one."""
    torch.manual_seed(0)
    a, b = torch.randn(96, k).to(dtype), torch.randn(256, k).to(dtype)
    kind = {torch.float16: tex.DType.kFloat16, torch.bfloat16: tex.DType.kBFloat16}[dtype]

    def product(alpha):
        return tex.generic_gemm(
            a, True, b, False, None, None, kind, None, kind, False, None, False, None, 0, False, True, alpha=alpha
        )[0]

    assert torch.equal(product(0.5), 0.5 * product(1.0))
    assert torch.allclose(product(1.0).double(), b.double() @ a.double().t(), rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True])
def test_gelu_is_of_the_sum_with_what_was_there(grad):
    """An epilogue of cuBLAS comes after its addition, as TE's test of Hopper's blockwise GEMM asks."""
    torch.manual_seed(0)
    a, b, before, saved = torch.randn(32, 64), torch.randn(16, 64), torch.randn(16, 32), torch.randn(16, 32)
    kind = tex.DType.kFloat32
    found, _, of_gelu, _ = tex.generic_gemm(
        a, True, b, False, before.clone(), None, kind, None, kind, True, saved.clone(), grad, None, 0, True, True
    )
    total = b @ a.t() + before
    of = (saved if grad else total).clone().requires_grad_()
    out = torch.nn.functional.gelu(of, approximate="tanh")
    if grad:
        out.backward(total)
    else:
        torch.testing.assert_close(of_gelu, total)
    torch.testing.assert_close(found, of.grad if grad else out.detach())


@pytest.mark.skipif(ARCH < 100, reason="NVFP4 begins with Blackwell")
def test_operands_of_two_kinds_are_refused():
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    x = torch.randn(32, 32).bfloat16()
    a, b = NVFP4Quantizer()(x), Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device="cuda")(x)
    for left, right in ((a, b), (b, a), (a, x)):
        with pytest.raises(
            RuntimeError, match=r"compatible scaling modes, but got A.scaling_mode = \w+, B.scaling_mode = \w+"
        ):
            tex.generic_gemm(
                left,
                True,
                right,
                False,
                None,
                None,
                tex.DType.kBFloat16,
                None,
                None,
                False,
                None,
                False,
                None,
                0,
                False,
                False,
            )


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_hopper_writes_no_transposed_copy_alone(scaling):
    """Its kernel writes both; where any layout is multiplied, one serves both usages."""
    sides = {"rowwise": False, "columnwise": True}
    if scaling == "delayed":
        quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3, **sides)
    else:
        quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=torch.device("cpu"), **sides)
    x = torch.randn(32, 64).bfloat16()
    if ARCH == 90:
        with pytest.raises(NotImplementedError, match="Columnwise-only per-tensor FP8 quantization"):
            quantizer(x)
    else:
        assert quantizer(x).dequantize().shape == x.shape
