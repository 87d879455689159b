"""What a push needs to know of GPUs, asked without one: memory that this processor cannot reach, and how vLLM's kernels
for them keep codes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rollout.test_reload import BLOCK
from support.rollout.held import differing, held
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, convert_to_fp8_moe_kernel_format

from nemo_fp8.numerics import quantize
from nemo_fp8.rollout.refit.worker.layouts import LAYOUTS, ROWS, layout_of


def test_pushes_into_memory_that_this_processor_cannot_reach():
    cases = Path(__file__).with_name("far_cases.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


KERNELS_OF_GPUS = sorted(name for name, layout in LAYOUTS.items() if layout is ROWS and hasattr(linear, name))
BACKENDS_OF_GPUS = sorted(name for name in LAYOUTS if name in Fp8MoeBackend.__members__ and LAYOUTS[name] is ROWS)


def test_vllm_has_the_kernels_of_gpus_that_we_know():
    assert (KERNELS_OF_GPUS, BACKENDS_OF_GPUS) == (
        ["CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"],
        ["TRITON"],
    )


@pytest.mark.parametrize("name", KERNELS_OF_GPUS)
def test_kernels_of_gpus_take_codes_and_scales_as_they_lie(name):
    """By vLLM's own function, which needs no GPU; the kernel it belongs to does."""
    coded = quantize(torch.randn(384, 256, dtype=torch.bfloat16), BLOCK)
    layer = torch.nn.Module()
    for parameter, tensor in (("weight", coded.data), ("weight_scale_inv", coded.scale_inv)):
        layer.register_parameter(parameter, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    kernel = object.__new__(getattr(linear, name))
    kernel.process_weights_after_loading(layer)
    assert differing(held(layer), {"weight": raw(coded.data), "weight_scale_inv": raw(coded.scale_inv)}) == []
    assert layer.weight.is_contiguous()
    layer.quant_method = SimpleNamespace(operand=BLOCK, fp8_linear=kernel)
    assert layout_of(layer) is ROWS


@pytest.mark.parametrize("name", BACKENDS_OF_GPUS)
def test_so_do_kernels_of_experts(name):
    stacks = [torch.randn(4, 256, 128).to(torch.float8_e4m3fn), torch.randn(4, 128, 128).to(torch.float8_e4m3fn)]
    scales = [torch.rand(4, 2, 1), torch.rand(4, 1, 1)]
    layer = SimpleNamespace(weight_block_size=[128, 128])
    made = convert_to_fp8_moe_kernel_format(Fp8MoeBackend[name], layer, *stacks, *scales, None, None)
    assert all(a is b for a, b in zip(made, (*stacks, *scales), strict=True))


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)
