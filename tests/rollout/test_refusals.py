"""A machine without a kernel, weights and scales that cannot be right, and a vLLM that does not fit: said, or refused
by name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.rollout import models
from support.rollout.in_process import build
from support.rollout.models import weights_of
from vllm import envs

from nemo_fp8.contract import Operand, Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout.engine import compatibility
from nemo_fp8.rollout.engine.config import NemoFp8Config
from nemo_fp8.rollout.engine.kernels import choose
from nemo_fp8.rollout.engine.report import grid_report
from nemo_fp8.rollout.engine.storage import storage_of

LAYER = "model.layers.1"


# ---------------------------------------------------------------------- kernels, and what is refused


def test_a_cpu_without_the_kernel_decodes_and_says_so_once(checkpoint, said, monkeypatch):
    """vLLM's own switch takes the AMX kernel away, as a CPU without AMX does."""
    envs.disable_envs_cache()  # an engine that ran in this process before has vLLM read no environment any more
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CPUFp8BlockScaledMMKernel")
    report = grid_report(build(checkpoint("qwen3")))
    assert {row.kernel for row in report.values()} == {"DecodeKernel"}
    assert len([line for line in said if "products with FP8 weights are summed in FP32 on this CPU" in line]) == 1


def test_a_variable_that_keeps_onednn_from_amx_is_told_before_it_ends_a_worker(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    with pytest.raises(PrecisionError, match=r"ONEDNN_MAX_CPU_ISA=AVX512_CORE on a processor with AMX"):
        NemoFp8Config()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # vLLM asks this, and takes other kernels
    NemoFp8Config()


def test_experts_without_amx_decode(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    report = grid_report(build(checkpoint("qwen3_moe")))
    assert {row.kernel for row in report.values() if row.stored == "fp8"} == {"DecodeKernel", "DecodedMoEMethod"}


@pytest.mark.parametrize(
    ("family", "reasons", "pattern"),
    [
        ("Llama4ForCausalLM", ["the router's weight on their input"], "model.layers.*.feed_forward.experts"),
        ("GptOssForCausalLM", ["biases", "swigluoai"], "model.layers.*.mlp.experts"),
    ],
)
def test_experts_that_nothing_decodes_stay_or_are_refused_by_the_true_reason_with_a_pattern_for_all_layers(
    tmp_path, family, reasons, pattern
):
    folder = models.write(tmp_path / "model", "qwen3")
    (folder / "config.json").write_text(json.dumps(of_family(family)))
    dummy = {"load_format": "dummy"}
    with pytest.raises(PrecisionError) as caught:
        build(folder, dummy, kernel="decode", strict=True)
    (problem,) = caught.value.problems
    assert all(reason in problem.what for reason in reasons)
    assert ("biases" in problem.what, "router" in problem.what, "silu" in problem.what) == (
        "GptOss" in family,
        "Llama4" in family,
        False,
    )
    assert f"Add {pattern!r} to keep" in problem.remedy
    for keep, why in (((), "fused FP8 kernel only"), ((pattern,), "keep patterns match")):
        report = grid_report(build(folder, dummy, kernel="decode", keep=keep))
        experts = [row for name, row in report.items() if "experts" in name]
        assert len(experts) == 2
        assert {(row.stored, why in row.why) for row in experts} == {("bfloat16", True)}
        assert "fp8" in {row.stored for row in report.values()}


def of_family(architecture):
    """The config.json of two layers of it."""
    from transformers import GptOssConfig, Llama4TextConfig

    config = GptOssConfig if "GptOss" in architecture else Llama4TextConfig
    made = config(
        hidden_size=256, num_hidden_layers=2, intermediate_size=256, vocab_size=models.VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=1, max_position_embeddings=2048,
        **({"intermediate_size_mlp": 512, "interleave_moe_layer_step": 1} if config is Llama4TextConfig else {}),
    ).to_dict()  # fmt: skip
    made.pop("dtype", None)
    return made | {"architectures": [architecture], "torch_dtype": "bfloat16"}


# ---------------------------------------------------------------------- what a processor lacks


def test_vllm_s_library_is_that_of_the_processor_also_of_one_that_tests_stand_in_for(here):
    import vllm._custom_ops  # noqa: F401

    as_avx2 = os.environ.get("NEMO_FP8_TESTS_AS") == "avx2"
    newest = (
        "avx512_bf16"
        if torch.cpu._is_avx512_bf16_supported()
        else "avx512"
        if torch.cpu._is_avx512_supported()
        else "avx2"
    )
    maps = Path("/proc/self/maps").read_text()
    loaded = {Path(line.split()[-1]).name for line in maps.splitlines() if "/vllm/_C" in line}
    assert loaded == {{"avx512_bf16": "_C.abi3.so", "avx512": "_C_AVX512.abi3.so", "avx2": "_C_AVX2.abi3.so"}[newest]}
    assert newest in (here.machine.cpu or ("avx2",))
    if as_avx2:
        assert (newest, torch.backends.cpu.get_cpu_capability(), here.machine.cpu) == ("avx2", "AVX2", ())


def test_the_table_says_what_vllm_itself_answers_on_this_processor(here, model):
    """Its attention, asked for an FP8 cache; and its choice of a kernel for weights in 128x128 blocks."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    caches_fp8 = True
    try:
        _get_attn_isa(torch.bfloat16, 128, 64, "fp8")
    except NotImplementedError:
        caches_fp8 = False
    assert here.caches_fp8 == caches_fp8
    with set_current_vllm_config(model("qwen3").vllm_config):
        chosen = choose(storage_of(Precision(rollout="fp8")), "auto", (512, 256), torch.bfloat16)
    assert here.can("rollout-checkpoint") == (type(chosen).__name__ != "DecodeKernel")


def test_an_fp8_cache_that_vllm_does_not_have_is_refused_in_the_worker(here, checkpoint):
    """Whoever wrote the arguments: without this the worker dies after its weights are loaded."""
    cache = {"kv_cache_dtype": "fp8"}
    if here.caches_fp8:
        build(checkpoint("qwen3"), cache)
    else:
        with pytest.raises(PrecisionError, match="kv_cache_dtype='fp8' on this machine") as caught:
            build(checkpoint("qwen3"), cache)
        assert "kv_cache='auto'" in caught.value.problems[0].remedy


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="this processor is one with AVX2 alone, and the tests above ran on it"
)
def test_the_same_on_a_processor_with_avx2_alone():
    """vLLM's AVX2 library, with everything newer hidden from the processes: see tests/support/as_avx2."""
    tests = ["library", "table", "in_the_worker", "decode", "linear_holds", "experts_hold", "this_machine_is_asked"]
    files = [str(Path(__file__).parent / f"test_{name}.py") for name in ("refusals", "plugin", "arguments")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-k", " or ".join(tests), *files]
    done = subprocess.run(
        command, env={**os.environ, "NEMO_FP8_TESTS_AS": "avx2"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
    assert "skipped" not in done.stdout


# ---------------------------------------------------------------------- weights and scales that cannot be right


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
    with pytest.raises(PrecisionError, match=r"o_proj: the checkpoint is quantized already"):
        build(folder)


def test_static_activations_are_refused(checkpoint):
    with pytest.raises(Exception, match="activation_scheme='static' in a rollout of BF16 weights"):
        build(checkpoint("qwen3"), rollout_block="tensor", activation_scheme="static")


def test_scales_that_deep_gemm_would_quantize_again_are_refused():
    from nemo_fp8.rollout.engine.kernels import refuse_second_quantization

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


def test_a_vllm_without_nvfp4_refuses_that_alone(checkpoint, monkeypatch):
    from vllm.model_executor.kernels import linear

    from nemo_fp8.rollout.engine import cpu_kernels
    from nemo_fp8.rollout.plugin import register

    gone = compatibility.Internal("vllm.model_executor.kernels.linear", "no_such_emulation")
    with monkeypatch.context() as patch:
        patch.setattr(compatibility, "FOUR_BITS", (*compatibility.FOUR_BITS, gone))
        patch.setattr(cpu_kernels, "register", lambda: pytest.fail("no kernel is named to such a vLLM"))
        register()
        build(checkpoint("qwen3"))
        with pytest.raises(Exception, match="no_such_emulation"):
            build(checkpoint("qwen3"), rollout="nvfp4")
    before = {platform: [*kernels] for platform, kernels in linear._POSSIBLE_NVFP4_KERNELS.items()}
    register()
    assert before == linear._POSSIBLE_NVFP4_KERNELS  # a second call adds nothing


def test_every_method_that_is_covered_is_there():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import InprocClient, SyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine

    from nemo_fp8.rollout.engine import kv
    from nemo_fp8.rollout.refit import control

    owners = (
        (LLMEngine, control._ANSWERING),
        (AsyncLLM, control._ANSWERING_ON_LOOP),
        (SyncMPClient, ("_send_input",)),
        (InprocClient, ("get_output",)),
        (CPUAttentionBackendImpl, (*kv.COVERED,)),
    )
    rows = [(owner, name) for owner, names in owners for name in names]
    assert [row for row in rows if not callable(getattr(*row, None))] == []
    assert {name for _, name in rows} == {*control.COVERED, *kv.COVERED}


def test_every_import_from_vllm_is_in_the_table():
    import ast
    from pathlib import Path

    rows = (
        *compatibility.INTERNALS,
        *compatibility.GPU_TRANSFER,
        *compatibility.FOUR_BITS,
        *compatibility.MODELOPT_EXPERTS,
        *compatibility.MODELOPT_LINEARS,
    )
    folder, listed = Path(compatibility.__file__).parents[1], {(row.module, row.name.split(".")[0]) for row in rows}
    taken = {
        (node.module, alias.name)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }
    assert taken - listed == set()
