"""Put the CPU implementation where TE looks for its extension, in a process that has no GPU, before TE is imported.

TE finds its extension as a file and loads CUDA's libraries beside it. Here both are skipped with TE's own switch for
builds (``NVTE_PROJECT_BUILDING``), and the extension lies in ``sys.modules`` before TE is imported. A few names of TE
itself cannot do without a CUDA build of torch; each is a row of :data:`_AMENDMENTS`, replaced when its module has been
loaded and before anything imports it from there. TE's files are not touched.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.preflight.attention import EMULATE_ATTENTION
from nemo_fp8.preflight.support import TE_ON_CPU
from nemo_fp8.te_cpu import triton_kernels
from nemo_fp8_hook import ARCHITECTURES, HOPPER, OFF, VARIABLE

_PACKAGES = {"triton": "triton", "onnxscript": "onnxscript", "onnx_ir": "onnx-ir"}
"""What TE imports besides torch, by module. Where one is missing TE swallows the ImportError, and has no ``pytorch``
part."""

_BUILDING = "NVTE_PROJECT_BUILDING"
FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""TE's variable, which it reads at its import too."""

KNOWN = ", ".join(f"{number} ({name})" for number, name in ARCHITECTURES.items())


_FOR_THE_PROCESS = ExitStack()
"""Contexts that stay open until the process ends, and close while torch is still whole."""


def is_installed() -> bool:
    """Return whether TE stands on this implementation in this process."""
    from nemo_fp8.te_cpu.extension import NAME

    return NAME in sys.modules and any(isinstance(finder, _Amend) for finder in sys.meta_path)


def has_gpu() -> bool:
    """Return whether torch has a GPU, and not the CPU in the place of one."""
    import torch

    return torch.cuda.is_available() and not is_installed()


def install(arch: int | None = None, *, versions: Sequence[str] = TE_ON_CPU) -> None:
    """Let TE run on this CPU, which stands for a GPU of ``arch`` (90 Hopper, 100 Blackwell), until the process ends.

    Where no architecture is given it is the one that NEMO_FP8_TE_CPU names; or Hopper where FP32 scales of blocks are
    asked for by TE's variable, since only Hopper has them; or Blackwell. Raises PrecisionError where a
    GPU or TE's compiled extension is there, where TE was imported before, where it is none of ``versions``, or where
    TE, or what it imports, is missing. Called again, with the same architecture or with none, it does nothing.
    """
    import torch

    from nemo_fp8.numerics.bf16 import bf16_products
    from nemo_fp8.te_cpu import collectives, device, extension

    if is_installed():
        if arch not in (None, device.standing_for()):
            raise PrecisionError(
                f"te_cpu.install(arch={arch}) in a process that stands for {device.standing_for()} already.",
                "TE has asked for the architecture, and keeps copies of tensors for it.",
                "Start another process for another architecture.",
            )
        return
    arch = asked_for(os.environ) if arch is None else arch
    version = _check(arch, versions)
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")  # compiling takes a minute for what runs in a millisecond
    os.environ.setdefault(EMULATE_ATTENTION, "1")  # FP8 attention by TE's own rounding: cuDNN has GPUs only
    device.stand_in(arch)
    torch.compiler.set_stance(
        "force_eager"
    )  # torch.compile knows torch's functions by their identity, and the stand-in's are others
    collectives.take_nccls_place()
    _FOR_THE_PROCESS.enter_context(bf16_products())
    atexit.register(_FOR_THE_PROCESS.close)  # left to the interpreter it may close after torch's own modules are gone
    sys.modules[extension.NAME] = extension.build(version)
    sys.meta_path.insert(0, _Amend())


def install_for_import() -> None:
    """Install for :mod:`nemo_fp8_hook`, before TE is imported.

    Raises PrecisionError as :func:`install` does; its words say who asked, and how to do without.
    """
    import torch

    if torch.cuda.is_available():  # by a driver that the hook does not know
        return
    try:
        install()
    except PrecisionError as error:
        asked = (
            "nemo_fp8_hook asks for it, since TransformerEngine was imported where there is neither a GPU nor its "
            "extension."
        )
        off = f"or set {VARIABLE}={OFF}, which leaves TransformerEngine to itself"
        raise PrecisionError(
            Problem(p.what, f"{p.why} {asked}", f"{p.remedy.rstrip('.')}; {off}.") for p in error.problems
        ) from None


def asked_for(variables: Mapping[str, str]) -> int:
    """Return the architecture that an environment asks for.

    ``NEMO_FP8_TE_CPU=0`` turns off the hook alone: whoever calls ``install`` has the default. Raises PrecisionError for
    a value that names no architecture.
    """
    name = variables.get(VARIABLE) or OFF
    if name == OFF:
        return HOPPER if variables.get(FP32_SCALES) == "1" else next(iter(ARCHITECTURES))
    if name not in map(str, ARCHITECTURES):
        raise PrecisionError(
            f"{VARIABLE}={name!r}.",
            "It names the GPU that the CPU stands for.",
            f"Give one of {KNOWN}, or {OFF} for none.",
        )
    return int(name)


def _check(arch: int, versions: Sequence[str]) -> str:
    """Return the version of TE that is there. Raises PrecisionError if this package cannot stand beneath it."""
    import importlib.metadata
    import importlib.util

    import torch

    from nemo_fp8.te_cpu import extension

    if arch not in ARCHITECTURES:
        raise PrecisionError(
            f"te_cpu.install(arch={arch!r}).", "No GPU of that architecture can be stood for.", f"Give one of {KNOWN}."
        )
    if torch.cuda.is_available():
        raise PrecisionError(
            "te_cpu.install() on a machine with a GPU.",
            "TransformerEngine's own kernels run here.",
            "Leave it out: nothing is needed.",
        )
    if "transformer_engine" in sys.modules or extension.NAME in sys.modules:
        raise PrecisionError(
            "te_cpu.install() after TransformerEngine was imported.",
            "TE binds the functions of its extension when it is imported, and Megatron decides then whether TE is "
            "there.",
            "Call it first, before anything imports transformer_engine, megatron or nemo.",
        )
    missing = [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    try:
        found = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        missing.insert(0, f"transformer-engine=={TE_ON_CPU[0]}")
    else:
        if found not in versions:
            raise PrecisionError(
                f"te_cpu is made for TransformerEngine {', '.join(versions)}, and {found} is installed.",
                "The compiled extension that it stands for is a private interface, which changes with every version.",
                f"pip install --no-deps transformer-engine=={TE_ON_CPU[0]}",
            )
    if missing:
        raise PrecisionError(
            f"te_cpu.install() without {', '.join(missing)}.",
            "It runs TransformerEngine's own Python, and TE imports these; without one it comes up without its "
            "PyTorch part, in silence.",
            f"pip install --no-deps {' '.join(missing)}",
        )
    return found


# ---------------------------------------------------------------------- names of TE


def _without_files(common: Any) -> None:
    common.load_framework_extension = lambda framework: None


def _picklable_dtype(constants: Any) -> None:
    if hasattr(constants, "DType"):  # before 2.17 TE takes the extension's
        constants.DType.__reduce_ex__ = lambda self, protocol: (type(self), (int(self),))


def _canonical_cpu(utils: Any) -> None:
    import torch

    def canonicalize_device(device: Any) -> torch.device:
        kept = isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"
        return torch.device("meta" if kept else "cpu")

    utils.canonicalize_device = canonicalize_device


def _dequantize_in_place(name: str, *buffers: str) -> Callable[[Any], None]:
    def amend(module: Any) -> None:
        function = getattr(module, name)
        forward = function.forward

        def on_cpu(ctx: Any, tensor: Any, dtype: Any) -> Any:
            data = [d for d in (getattr(tensor, buffer) for buffer in buffers) if d is not None]
            if not data or any(d.numel() == 0 for d in data):
                return forward(ctx, tensor, dtype)
            return module.tex.dequantize(tensor, dtype)

        function.forward = staticmethod(on_cpu)

    return amend


def _cache_on_cpu(custom_ops: Any) -> None:
    for name in ("copy_to_kv_cache", "convert_bshd_to_thd", "convert_thd_to_bshd"):
        operator = getattr(custom_ops, name)
        operator.register_kernel("cpu")(operator._init_fn)


def _rounded_once(jit: Any) -> None:
    import torch

    def once(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def compiled(*tensors: torch.Tensor) -> torch.Tensor:
            dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
            return function(*(tensor.float() for tensor in tensors)).to(dtype)

        return compiled

    for name in ("bias_gelu_fused_", "gelu_fused_", "dgelu_fused_"):
        setattr(jit, name, once(getattr(jit, name)))
    step_by_step = jit.bgrad_dgelu_fused_
    gradient = once(lambda *tensors: step_by_step(*tensors)[1])

    def bgrad_dgelu_fused_(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = gradient(*tensors)
        return rounded.sum(0), rounded  # as TE's other path adds them up, to which its tests hold this one

    jit.bgrad_dgelu_fused_ = bgrad_dgelu_fused_


def _fetched_by_name(quantized_tensor: Any) -> None:
    import torch

    def cpu(self: Any, memory_format: Any = torch.preserve_format) -> Any:
        return self.to("cpu", memory_format=memory_format)

    quantized_tensor.QuantizedTensor.cpu = cpu


def _divides_as_a_gpu(reference: Any) -> None:
    import torch

    def div(dividend: Any, divisor: Any, **named: Any) -> Any:
        if isinstance(divisor, float) and not named:
            return dividend * torch.tensor(divisor, dtype=dividend.dtype).reciprocal()
        return torch.div(dividend, divisor, **named)

    as_torch: Any = types.ModuleType("torch")
    as_torch.__getattr__ = functools.partial(getattr, torch)
    as_torch.div = div
    reference.torch = as_torch


def _offloads_by_another_name(cpu_offload: Any) -> None:
    import torch

    class OnCuda:
        """A tensor as TE asks about it: all is the tensor's, its class too, but for the device."""

        device = torch.device("cuda", 0)

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            return type(self.tensor)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tensor, name)

    state = getattr(cpu_offload, "OffloadableLayerState", None)
    if state is not None:  # the older way (NVTE_CPU_OFFLOAD_V1) asks for no name
        decide = state._check_if_offload
        state._check_if_offload = lambda self, t: decide(self, OnCuda(t))


_STORAGE = "transformer_engine.pytorch.tensor.storage."
_TWO_SIDES = ("_rowwise_data", "_columnwise_data")
_MOVED = "it moves what is not on a device of type cuda to one, and calls itself, without end"
_AMENDMENTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "transformer_engine.common": (_without_files, "load_framework_extension looks for a compiled file"),
    "transformer_engine.pytorch.constants": (
        _picklable_dtype,
        "Python 3.11 pickles a member of DType as getattr(DType, name), which torch.load(weights_only=True) refuses",
    ),
    "transformer_engine.pytorch.utils": (
        _canonical_cpu,
        "canonicalize_device makes torch.device(0), which a CPU build of torch refuses",
    ),
    "transformer_engine.pytorch.cpu_offload": (
        _offloads_by_another_name,
        "it offloads what lies on a device of type cuda, and passes over all else without a word",
    ),
    "transformer_engine.pytorch.jit": (
        _rounded_once,
        "torch.compile, which is left out, computes its GELUs in FP32 and rounds their result; step by step each step "
        "would be rounded",
    ),
    "transformer_engine.pytorch.quantized_tensor": (
        _fetched_by_name,
        "its cpu() asks for a torch.device, by which a GPU's tensor is asked to stay where it is here: it was no copy",
    ),
    _STORAGE + "float8_tensor_storage": (
        _dequantize_in_place("_FromFloat8Func", "_data"),
        "what lies on a CPU it dequantizes without the extension, and makes a vector of a scalar",
    ),
    _STORAGE + "mxfp8_tensor_storage": (_dequantize_in_place("_FromMXFP8Func", *_TWO_SIDES), _MOVED),
    _STORAGE + "nvfp4_tensor_storage": (_dequantize_in_place("_FromNVFP4Func", *_TWO_SIDES), _MOVED),
    "transformer_engine.pytorch.custom_recipes.reference_nvfp4": (
        _divides_as_a_gpu,
        "torch divides by a number as TE's kernels do on a GPU alone: by its reciprocal",
    ),
    "transformer_engine.pytorch.attention.custom_ops": (
        _cache_on_cpu,
        "its operators are registered for tensors of type cuda alone",
    ),
    **dict.fromkeys(triton_kernels.MODULES, (triton_kernels.replace, "its functions launch Triton kernels")),
}


@contextmanager
def _as_in_a_build() -> Iterator[None]:
    """Set TE's switch for builds while a module of it loads, and not longer: other processes inherit the
    environment."""
    before = os.environ.get(_BUILDING)
    os.environ[_BUILDING] = "1"
    try:
        yield
    finally:
        os.environ.pop(_BUILDING)
        if before is not None:
            os.environ[_BUILDING] = before


class _Amend(importlib.abc.MetaPathFinder):
    """Finds the modules of the table as everybody does, and amends them when they have been loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        row = _AMENDMENTS.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if row else None
        if row is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_amend(module: types.ModuleType) -> None:
            with _as_in_a_build():
                load(module)
            row[0](module)

        spec.loader.exec_module = load_and_amend  # type: ignore[method-assign]
        return spec
