"""Multiply in BF16 on a CPU: on its BF16 units if it has some, else with the same operand values in FP32, rounded once.

    bf16(a @ b)  =  bf16(fp32(a) @ fp32(b))        exact operands, FP32 sums, one rounding: on every processor

AMX, AVX512_BF16 and ARM's BFDOT multiply BF16 numbers. On any other processor torch emulates BF16 products: 2 times
slower than FP32 with AVX-512, 5 to 40 times with AVX2 (Zen 2 and 3, most laptops). So code that multiplies in BF16
calls this module:

    multiplies_bf16()          whether this processor has BF16 units
    scales_sums()              whether their products can be scaled before they are rounded
    mm(a, b), linear(x, w)     one product, forward and backward
    bf16_products()            a context for whole models: every BF16 product on the CPU
    fp16_products()            the same for FP16, for which hardly any processor has units: 20 to 40 times faster

The context replaces torch's CPU kernels in the dispatcher, below autograd. Backward and its threads, tensor subclasses
and compiled graphs all go through there, and nothing is replaced by name. The trade-off: it affects the whole process,
and every product costs 10 microseconds more. So only code that owns the process (a trainer) opens it, and only where
there are no such units. Operands are copied to FP32 on each call; for one row (a token) that takes longer than the
product. CUDA tensors and other types are not affected.
"""

from __future__ import annotations

import platform
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from nemo_fp8.errors import PrecisionError

_BF16 = torch.bfloat16

# torch's operators that multiply -> how many of their first arguments are operands.
_OPERANDS = {
    "mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3, "addmv": 3, "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
    "convolution": 2, "convolution_backward": 3,
}  # fmt: skip
_VARIANTS = {
    "addmm": (".out", "_"),
    "baddbmm": (".out", "_"),
    "addmv": (".out", "_"),
    "mm": (".out",),
    "bmm": (".out",),
}


# ---------------------------------------------------------------------- BF16 units


@cache
def multiplies_bf16() -> bool:
    """Return whether products of BF16 tensors on the CPU run on BF16 units.

    A test product decides, not the name of the processor: BF16 units flush subnormal numbers to zero (by the manuals of
    VDPBF16PS, TDPBF16PS and BFDOT), and FP32 arithmetic does not. So the answer is about the kernel that torch really
    runs, whatever the processor, the build of torch and ``ONEDNN_MAX_CPU_ISA`` are, and it is the same in every run.
    """
    subnormal = torch.ones((32, 32), dtype=torch.int16).view(
        _BF16
    )  # compare bits: a conversion would flush the subnormal, too
    large = torch.eye(32, dtype=_BF16) * 2.0**100
    flushes = bool(
        subnormal[0, 0] * 2.0**100 == 0
    )  # torch.set_flush_denormal(True) is on, and FP32 arithmetic flushes, too
    torch.set_flush_denormal(False)
    try:
        return not bool((subnormal @ large).any())
    finally:
        torch.set_flush_denormal(flushes)


@cache
def scales_sums() -> bool:
    """Return whether a BF16 product on this CPU multiplies its FP32 sums with ``alpha``, and adds a bias, before it
    rounds.

    torch promises the formula of ``addmm`` and not where it rounds, so test products decide: sums of 257 times 1.001,
    of which BF16 holds neither, in oneDNN and, for the smallest, in torch itself. Asked on x86 only: there oneDNN
    scales in its fastest kernels; what it does on ARM has not been seen.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    one = torch.ones((), dtype=_BF16)
    return all(
        bool((torch.addmm(bias * one, left, right, beta=beta, alpha=1.001) == expected).all())
        for ones in (one.expand(size, 257).contiguous() for size in (1, 32))
        for left in (ones, ones.t().contiguous().t())
        for right in (ones.t(), ones.t().contiguous())
        for beta, bias, expected in ((0, 0, 258), (1, 0, 258), (1, -0.5, 256))
    )


@cache
def multiplies_fp16() -> bool:
    """Return whether products of FP16 tensors on the CPU run on FP16 units: oneDNN, which runs them there, knows."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


# ---------------------------------------------------------------------- one product


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b`` of two matrices."""
    return _product(torch.mm, a, b)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``F.linear`` with its gradients, also under ``torch.autocast``."""
    return _product(F.linear, x, weight, bias)


def _product(function: Callable[..., torch.Tensor], *given: torch.Tensor | None) -> torch.Tensor:
    tensors = [t for t in given if t is not None]
    if any(t.device.type != "cpu" for t in tensors):
        return function(*given)
    mixed = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is _BF16
    if multiplies_bf16() or not (mixed or all(t.dtype is _BF16 for t in tensors)):
        return function(*given)
    with torch.autocast("cpu", enabled=False):
        return function(*(None if t is None else t.to(_BF16).float() for t in given)).to(_BF16)


@contextmanager
def fp32_matmul(precision: str) -> Iterator[None]:
    """Multiply FP32 tensors on the CPU in ``ieee`` FP32 or on ``bf16`` multipliers; restore the setting at the end."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:  # torch before 2.9 multiplies in FP32: exact as well, and slower
        yield
        return
    previous, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = previous


# ---------------------------------------------------------------------- every product


def bf16_products() -> AbstractContextManager[None]:
    """Run every BF16 product on the CPU, in the whole process, on what is fastest here, until the context closes."""
    return nullcontext() if multiplies_bf16() else products_in_fp32()


def fp16_products() -> AbstractContextManager[None]:
    """Run every FP16 product on the CPU in the same way."""
    return nullcontext() if multiplies_fp16() else products_in_fp32(torch.float16)


@contextmanager
def products_in_fp32(dtype: torch.dtype = _BF16) -> Iterator[None]:
    """Run every product of one dtype on the CPU in IEEE FP32, rounded once, on any processor. Contexts may overlap."""
    with fp32_matmul("ieee"):
        _replaced.enter(dtype)
        try:
            yield
        finally:
            _replaced.leave(dtype)


class _Replaced:
    """Replacements of torch's kernels in the dispatcher; they last while any context is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: Any = None
        self.open = Counter[torch.dtype]()

    def enter(self, dtype: torch.dtype = _BF16) -> None:
        with self._lock:
            if not self.open.total():
                self._library = _replace_kernels()
            self.open[dtype] += 1

    def leave(self, dtype: torch.dtype = _BF16) -> None:
        with self._lock:
            self.open[dtype] -= 1
            if not self.open.total():
                self._library._destroy()
                self._library = None


_replaced = _Replaced()


def _replace_kernels() -> Any:
    if not hasattr(torch.library, "get_kernel"):
        raise PrecisionError(
            f"torch {torch.__version__} cannot hand out its own kernels.",
            "BF16 products on a CPU without BF16 units are computed in FP32, and torch's kernels still compute the "
            "FP32 ones.",
            "Use the torch that nemo_fp8 was tested with (constraints/training.txt).",
        )
    names = [(name, name + variant) for name in _OPERANDS for variant in ("", *_VARIANTS.get(name, ()))]
    kernels = {full: torch.library.get_kernel(f"aten::{full}", "CPU") for _, full in names}
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch warns that its kernels are replaced, which is the purpose
        warnings.filterwarnings("ignore", message=".*only once for all operators")
        for name, full in names:
            library.impl(
                full,
                _in_fp32(_OPERANDS[name], kernels[name], kernels[full], full.endswith("_")),
                "CPU",
                with_keyset=True,
            )
    return library


def _in_fp32(operands: int, product: Any, itself: Any, in_place: bool) -> Callable[..., Any]:
    """Return a kernel that computes ``product`` in FP32 if all operands have one replaced dtype, else ``itself``."""

    def kernel(keys: Any, *args: Any, out: torch.Tensor | None = None, **options: Any) -> Any:
        given = args[:operands] if out is None else (*args[:operands], out)
        dtype = given[0].dtype
        if not _replaced.open[dtype] or any(t.dtype is not dtype for t in given):
            return itself.call_boxed(keys, *args, **options, **({} if out is None else {"out": out}))

        def widened(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype is dtype else value

        with torch._C.DisableTorchFunction():  # below the dispatcher there are no tensor subclasses
            if options.get("beta", 1) == 0:  # only the shape of the first operand counts
                args = (args[0].new_empty((), dtype=torch.float32).expand(args[0].shape), *args[1:])
            result = product.call_boxed(
                keys, *map(widened, args), **{name: widened(value) for name, value in options.items()}
            )
            if in_place:
                return given[0].copy_(result)
            if out is not None:
                return torch.mul(
                    result, 1, out=out
                )  # copy_ rounds; resizing and errors are those of any torch operator
            several = isinstance(result, tuple)  # a gradient that was not asked for is None
            return tuple(r if r is None else r.to(dtype) for r in result) if several else result.to(dtype)

    return kernel
