"""Engine arguments: what a contract and NeMo RL's keys become, what is refused, and that vLLM's own parser takes every
word."""

import shlex
from functools import partial

import pytest
from support.rollout import models

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.render import render
from nemo_fp8.render.vllm import flags, from_vllm
from nemo_fp8.rollout import engine_args, environment, init_fp8, serve
from nemo_fp8.rollout.arguments import EXECUTOR, check_model, engine_machine

ROLLOUTS = {name: p for name, p in PRESETS.items() if p.rollout == "fp8"} | {
    "bf16": Precision(),
    "nvfp4": Precision(rollout="nvfp4", first_layers=1),
    "fp32_scales": Precision(rollout="fp8"),
    "kept": Precision(
        rollout="fp8", keep=("*.gate", r"re:layers\.3\."), first_layers=1, kv_cache="fp8", deep_gemm=True
    ),
}


@pytest.fixture
def elsewhere(monkeypatch):
    """The engine runs on another machine, of which nothing is known: no contract is refused for what this one lacks."""
    monkeypatch.setattr("nemo_fp8.rollout.arguments.engine_machine", lambda: None)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_engine_args_say_the_contract(name, monkeypatch, elsewhere):
    for variable, value in environment(ROLLOUTS[name]).items():
        monkeypatch.setenv(variable, value)
    arguments = engine_args(ROLLOUTS[name])
    back, wanted = from_vllm(arguments), ROLLOUTS[name]
    fields = (
        "rollout",
        "rollout_block",
        "weight_scale",
        "activation_scale",
        "first_layers",
        "last_layers",
        "keep",
        "kv_cache",
        "deep_gemm",
    )
    assert {f: getattr(back, f) for f in fields if wanted.rolls_out_quantized} == {
        f: getattr(wanted, f) for f in fields if wanted.rolls_out_quantized
    }
    assert arguments["worker_extension_cls"].endswith("NemoFp8Worker")


def parsed(words):
    """Words of a command line as the real server reads them: what it is started with, and its engine's arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    return server, AsyncEngineArgs.from_cli_args(server)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_vllm_s_own_parser_takes_the_flags_to_paste_and_those_of_our_server(name, tmp_path, monkeypatch, elsewhere):
    for variable, value in environment(ROLLOUTS[name]).items():
        monkeypatch.setenv(variable, value)
    rendering, arguments = render(ROLLOUTS[name], "vllm"), engine_args(ROLLOUTS[name])
    pasted = shlex.split(rendering.text.replace("\\\n", " "))
    for words, wanted in ((pasted, rendering.data["engine"]), (flags(arguments), arguments)):
        _, read = parsed(["--model", str(tmp_path), *words])
        assert {argument: getattr(read, argument) for argument in wanted} == wanted
    server, read = parsed(serve.server_for(str(tmp_path), ROLLOUTS[name], port=8123).words[3:])
    assert (server.host, server.port, server.middleware) == ("127.0.0.1", 8123, [serve.PUSHES])
    assert {argument: getattr(read, argument) for argument in arguments} == arguments


def test_no_word_for_vllm_moves_the_server(tmp_path):
    """vLLM takes shortened options, and the last of several."""
    assert parsed(["--model", str(tmp_path), "--host", "127.0.0.1", "--hos=0.0.0.0"])[0].host == "0.0.0.0"
    for word in ("--host", "--host=0.0.0.0", "--hos=0.0.0.0", "--port"):
        with pytest.raises(PrecisionError, match="among the words for vLLM"):
            serve.server_for("m", Precision(rollout="fp8"), more=[word, "0.0.0.0"])


def test_options_are_checked():
    assert (
        engine_args(Precision(rollout="fp8"), activations="emulated")["hf_overrides"]["quantization_config"][
            "activations"
        ]
        == "emulated"
    )
    with pytest.raises(PrecisionError, match="Did you mean 'emulated'"):
        engine_args(Precision(rollout="fp8"), activations="emulate")


# ---------------------------------------------------------------------- what vLLM cannot do on a machine


def test_what_the_machine_cannot_is_refused_before_an_engine_starts():
    """By its name, with the remedy; and only that."""
    with pytest.raises(PrecisionError, match="kv_cache='fp8' with generation in the compute dtype") as caught:
        engine_args(Precision(kv_cache="fp8"), machine="cpu,avx2")
    (problem,) = caught.value.problems
    assert "no FP8 cache" in problem.why
    assert "kv_cache='auto'" in problem.remedy
    for block in ("128x128", "tensor"):
        engine_args(Precision(rollout="fp8", rollout_block=block, deep_gemm=block == "128x128"), machine="cpu,avx2")
    engine_args("bf16_with_mxfp8_mixed", machine="cpu,avx2")


def test_a_cache_that_vllm_has_not_is_rounded():
    """A CPU without AVX-512 keeps BF16, and the plugin is told to round; the arguments still say the contract."""
    cached = Precision(rollout="fp8", kv_cache="fp8")
    rounded = engine_args(cached, machine="cpu,avx2,vllm0.31")
    assert rounded["kv_cache_dtype"] == "auto"
    assert rounded["hf_overrides"]["quantization_config"]["cache"] == "rounded"
    assert from_vllm(rounded).kv_cache == "fp8"
    native = engine_args(cached, machine="cpu,avx512")
    assert native["kv_cache_dtype"] == "fp8"
    assert native["hf_overrides"]["quantization_config"]["cache"] == "auto"


def test_this_machine_is_asked_where_nothing_is_said(here):
    """With vLLM's CPU build beside us, the engine runs here."""
    assert engine_machine() == here.machine
    cached = Precision(rollout="fp8", kv_cache="fp8")
    like = "cpu,avx512" if here.caches_fp8 else "cpu,avx2"
    assert engine_args(cached) == engine_args(cached, machine=like)
    assert init_fp8({"precision": "fp8", "kv_cache_dtype": "fp8"}, "Qwen/Qwen3-8B", 1) == engine_args(cached)
    assert ('"cache": "rounded"' in " ".join(serve.server_for("Qwen/Qwen3-8B", cached).words)) != here.caches_fp8


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"type": "float", "strategy": "block"}}},
        },
    ],
)
def test_a_checkpoint_in_fp8_blocks_is_refused_where_vllm_has_no_kernel(tmp_path, monkeypatch, said):
    """In BF16 vLLM would read it by itself, and under FP8 it is refused everywhere; what to do instead follows from the
    machine."""
    import json

    folder = models.write(tmp_path / "model", "qwen3")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    for words, reads in (("cpu,avx2,vllm0.31", False), ("cpu,amx,vllm0.31", True)):
        monkeypatch.setattr("nemo_fp8.rollout.arguments.engine_machine", partial(Machine.parse, words))
        with pytest.raises(PrecisionError, match="is a quantized checkpoint") as caught:
            serve.server_for(str(folder), Precision(rollout="fp8"))
        assert ("Start vLLM on it" in caught.value.problems[0].remedy) is reads
        assert ("Give the BF16 checkpoint" in caught.value.problems[0].remedy) is not reads
        if reads:
            serve.server_for(str(folder), Precision())
        else:
            with pytest.raises(
                PrecisionError, match="is a checkpoint in FP8, which vLLM cannot run on this machine"
            ) as caught:
                serve.server_for(str(folder), Precision())
            assert "needs AMX" in caught.value.problems[0].why
            assert "export" in caught.value.problems[0].remedy


# ---------------------------------------------------------------------- the environment


def test_deep_gemm_never_sees_scales_that_it_would_change():
    assert environment(Precision(rollout="fp8")) == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    pow2 = Precision(rollout="fp8", weight_scale="pow2", activation_scale="pow2", deep_gemm=True)
    assert environment(pow2) == {"VLLM_USE_DEEP_GEMM_E8M0": "1", "VLLM_USE_DEEP_GEMM": "1"}
    assert engine_args(pow2)["linear_backend"] == "deep_gemm"
    assert environment(Precision()) == {}


def test_an_environment_that_contradicts_is_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    with pytest.raises(PrecisionError, match=r"VLLM_USE_DEEP_GEMM_E8M0=1 in the environment"):
        engine_args(Precision(rollout="fp8"))
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    engine_args(Precision(rollout="fp8"))


# ---------------------------------------------------------------------- NeMo RL


def config_of(arguments):
    return arguments["hf_overrides"]["quantization_config"]


@pytest.mark.parametrize(
    ("key", "value", "field", "becomes"),
    [
        ("num_first_layers_in_bf16", 2, "first_layers", 2),
        ("num_last_layers_in_bf16", 1, "last_layers", 1),
        ("pow2_weight_scaling_factors", True, "weight_scale", "pow2"),
        ("pow2_activation_scaling_factors", True, "activation_scale", "pow2"),
        ("use_weight_pow2_scale", True, "weight_scale", "pow2"),
        ("use_activation_pow2_scale", True, "activation_scale", "pow2"),
        ("quantization_ignored_layer_kws", ["o_proj"], "keep", ["*o_proj*"]),
        ("is_mx", True, "rollout_block", "1x32"),
    ],
)
def test_each_key_of_nemo_rl_becomes_a_field(key, value, field, becomes):
    arguments = init_fp8({"precision": "fp8", "tensor_parallel_size": 2, key: value}, "Qwen/Qwen3-8B", 2)
    assert config_of(arguments)[field] == becomes
    assert arguments["quantization"] == "nemo_fp8"


def test_the_kv_cache_and_deep_gemm_are_arguments_of_the_engine(elsewhere):
    arguments = init_fp8({"precision": "fp8", "use_deep_gemm": True, "kv_cache_dtype": "fp8"}, "Qwen/Qwen3-8B", 1)
    assert (arguments["linear_backend"], arguments["kv_cache_dtype"]) == ("deep_gemm", "fp8")


def test_init_fp8_changes_nothing_in_this_process():
    import os

    before, config = dict(os.environ), {"precision": "fp8", "use_deep_gemm": True}
    init_fp8(config, "Qwen/Qwen3-8B", 1)
    assert dict(os.environ) == before
    assert config == {"precision": "fp8", "use_deep_gemm": True}


def test_what_init_fp8_refuses(tmp_path):
    import json

    with pytest.raises(PrecisionError, match="Did you mean 'num_first_layers_in_bf16'"):
        init_fp8({"precision": "fp8", "num_first_layer_in_bf16": 1}, "m", 1)
    with pytest.raises(PrecisionError, match="init_fp8 with precision='bfloat16'"):
        init_fp8({"precision": "bfloat16"}, "m", 1)
    with pytest.raises(PrecisionError, match="model_parallel_size=0"):
        init_fp8({"precision": "fp8"}, "m", 0)
    folder = models.write(tmp_path / "model", "qwen3")
    for first, last in ((3, 2), (2, 2), (4, 0), (0, 4)):
        with pytest.raises(PrecisionError, match=f"{first} first and {last} last layers in BF16, of 4"):
            init_fp8(
                {"precision": "fp8", "num_first_layers_in_bf16": first, "num_last_layers_in_bf16": last}, str(folder), 1
            )
    init_fp8({"precision": "fp8", "num_first_layers_in_bf16": 2, "num_last_layers_in_bf16": 1}, str(folder), 1)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(PrecisionError, match="is a quantized checkpoint"):
        init_fp8({"precision": "fp8"}, str(folder), 1)


def test_a_config_that_is_no_json_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PrecisionError, match=r"config\.json cannot be read"):
        check_model(tmp_path, ROLLOUTS["bf16"])


@pytest.mark.parametrize(
    "path", ["/no_such_path", "no/such/path", "./no_such_path", "../no_such_path", "~/no_such_path"]
)
def test_a_path_where_nothing_is_is_no_name_on_the_hub(path):
    with pytest.raises(PrecisionError, match="There is no folder"):
        serve.server_for(path, Precision(rollout="fp8"))
    assert "Qwen/Qwen3-8B" in serve.server_for("Qwen/Qwen3-8B", Precision(rollout="fp8")).words


@pytest.mark.parametrize("name", ["0", "1"])
def test_an_engine_on_a_cpu_sleeps_where_it_has_workers(name, monkeypatch):
    """In one process there is nobody to wait for, and on a GPU the executor is vLLM's choice."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", name)
    for machine, sleeps in (("cpu,avx2", name == "1"), ("h100", False), (None, name == "1")):
        found = engine_args(Precision(rollout="fp8"), machine=machine).get("distributed_executor_backend")
        assert found == (EXECUTOR if sleeps else None)
