"""A machine without a kernel, weights and scales that cannot be right, and a vLLM that does not fit: said, or refused by name."""

import pytest
import torch
from rollout.in_process import build, weights_of

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.in_vllm import compatibility
from nemo_fp8.rollout.in_vllm.report import grid_report

LAYER = "model.layers.1"


# ---------------------------------------------------------------------- kernels, and what is refused


def test_a_cpu_without_the_kernel_decodes_and_says_so_once(checkpoint, said, monkeypatch):
    """vLLM's own switch takes the AMX kernel away, as a CPU without AMX does."""
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CPUFp8BlockScaledMMKernel")
    report = grid_report(build(checkpoint("qwen3")))
    assert {row.kernel for row in report.values()} == {"DecodeKernel"}
    assert len([line for line in said if "decoded before each GEMM on this CPU" in line]) == 1


def test_experts_without_amx_decode(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    report = grid_report(build(checkpoint("qwen3_moe")))
    assert {row.kernel for row in report.values() if row.stored == "fp8"} == {"DecodeKernel", "DecodedMoEMethod"}


def test_codes_are_no_weights(checkpoint, tmp_path):
    """A checkpoint in FP8 under nemo_fp8 would be loaded as values without their scales."""
    import shutil

    from safetensors.torch import save_file

    folder = tmp_path / "codes"
    shutil.copytree(checkpoint("qwen3"), folder)
    tensors = weights_of(folder)
    name = f"{LAYER}.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PrecisionError, match=r"o_proj: the checkpoint is in FP8 already"):
        build(folder)


def test_static_activations_are_refused(checkpoint):
    with pytest.raises(Exception, match="activation_scheme='static' in a rollout of BF16 weights"):
        build(checkpoint("qwen3"), rollout_block="tensor", activation_scheme="static")


def test_scales_that_deep_gemm_would_quantize_again_are_refused():
    from nemo_fp8.rollout.in_vllm.kernels import refuse_second_quantization

    with pytest.raises(PrecisionError, match="VLLM_USE_DEEP_GEMM_E8M0"):
        refuse_second_quantization("DeepGemmFp8BlockScaledMMKernel", Operand("e4m3", (128, 128), "fp32"), e8m0=True)
    refuse_second_quantization("DeepGemmFp8BlockScaledMMKernel", Operand("e4m3", (128, 128), "pow2"), e8m0=True)
    refuse_second_quantization("DeepGemmFp8BlockScaledMMKernel", Operand("e4m3", (128, 128), "fp32"), e8m0=False)
    refuse_second_quantization("TritonFp8BlockScaledMMKernel", Operand("e4m3", (128, 128), "fp32"), e8m0=True)


# ---------------------------------------------------------------------- vLLM's internals


def test_a_vllm_that_does_not_fit_is_refused_with_one_error_and_only_where_it_is_asked_for(checkpoint, monkeypatch):
    from nemo_fp8.rollout.plugin import register

    gone = compatibility.Internal("vllm.config", "no_such_thing")
    other = compatibility.Internal("vllm.model_executor.utils", "replace_parameter", ("layer", "no_such_argument"))
    moved = compatibility.Internal("vllm.no_such_module", "anything")
    monkeypatch.setattr(compatibility, "INTERNALS", (*compatibility.INTERNALS, gone, other, moved))
    register()
    try:
        with pytest.raises(Exception, match="does not fit nemo_fp8") as caught:
            build(checkpoint("qwen3"))
        for part in ("no_such_thing", "replace_parameter does not take no_such_argument", "vllm.no_such_module"):
            assert part in str(caught.value)
    finally:
        monkeypatch.undo()
        register()
    build(checkpoint("qwen3"))


def test_every_import_from_vllm_is_in_the_table():
    import ast
    from pathlib import Path

    rows = (*compatibility.INTERNALS, *compatibility.GPU_TRANSFER)
    folder, listed = Path(compatibility.__file__).parent, {(row.module, row.name.split(".")[0]) for row in rows}
    taken = {
        (node.module, alias.name)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }
    assert taken - listed == set()
