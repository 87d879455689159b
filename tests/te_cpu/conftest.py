"""TransformerEngine's real Python over our extension.

The CPU stands in for CUDA in the whole process, as it does wherever Megatron is imported. NEMO_FP8_TE_TESTS_ARCH=90
runs these tests for another architecture, in a process of their own.
"""

import pytest
import torch
from support.te_cases import ARCH, VERSIONS

from nemo_fp8 import te_cpu
from nemo_fp8.preflight.support import TE_ON_CPU

te_cpu.install(ARCH, versions=VERSIONS or TE_ON_CPU)


@pytest.fixture
def arch():
    """The architecture that this process stands for."""
    return ARCH


@pytest.fixture
def products(monkeypatch):
    """How the two operands of each of TE's matrix products are stored, as they run: ``Tensor`` for what is not
    quantized."""
    import transformer_engine_torch as tex

    seen, multiply = [], tex.generic_gemm

    def looked_at(a, trans_a, b, *rest, **named):
        seen.append(tuple(_storage(operand) for operand in (a, b)))
        return multiply(a, trans_a, b, *rest, **named)

    monkeypatch.setattr(tex, "generic_gemm", looked_at)
    return seen


def _storage(operand):
    kind = next(
        cls.__name__
        for cls in type(operand).__mro__
        if cls.__name__.endswith("Storage") or cls.__name__ in ("Tensor", "object")
    )
    if kind != "Tensor":
        data = [getattr(operand, name, None) for name in ("_data", "_transpose", "_rowwise_data", "_columnwise_data")]
        assert any(codes is not None and codes.dtype == torch.uint8 and codes.unique().numel() > 4 for codes in data)
    return kind
