"""Exported checkpoints in real vLLM: they load, hold the layers that the plugin holds, and give the same bits as
quantizing on the fly."""

import json
import pickle
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.rollout.engines import fp8, log_probs
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

from nemo_fp8 import Precision, PrecisionError
from nemo_fp8.export import HuggingFace, export, verify
from nemo_fp8.export.logprobs import reads_codes
from nemo_fp8.models.units import Selection
from nemo_fp8.preflight.machine import Machine

FP32 = Precision(rollout="fp8")
POW2 = FP32.replace(weight_scale="pow2", activation_scale="pow2")
WORKER = {"worker_extension_cls": "nemo_fp8.rollout.engine.worker.NemoFp8Worker"}


def exported(source, folder, precision, **how):
    done = export(HuggingFace.open(source), folder, precision, **how)
    assert verify(done.plan, folder).holds
    return done.plan.selection


NVFP4 = Precision(rollout="nvfp4")
MXFP8 = Precision(rollout="fp8", rollout_block="1x32", weight_scale="pow2", activation_scale="pow2")


def fields(precision):
    return {name: value for name, (_, value) in Precision(rollout="fp8").diff(precision).items()}


def chosen(selection: Selection):
    """The selection as vLLM's layers: parts under the name of what they are fused into."""
    return {unit.names[0] for unit in selection.units}


def in_fp8(llm):
    (layers,) = llm.collective_rpc("nemo_fp8_report")
    return {
        name.removesuffix(".routed_experts") for name, about in layers.items() if about["stored"] in ("fp8", "nvfp4")
    }


@pytest.mark.parametrize("read", ["by vLLM itself", "decoded again"])
def test_an_export_and_the_source_on_the_fly_are_bitwise_equal(engine, checkpoint, tmp_path, here, read):
    """With power-of-two scales, whose canonical codes are not those that the plugin holds; their values are.

    Decoded to BF16 and quantized on the fly once more, as ``nemo-fp8 export --verify`` does where vLLM cannot read it.
    """
    if read == "by vLLM itself":
        here.needs("rollout-checkpoint")
    precision = POW2.replace(first_layers=1, keep=("*.layers.2.*q_proj", "*.layers.3.mlp.down_proj"))
    selection = exported(checkpoint("qwen3"), tmp_path / "out", precision)
    fly = engine(checkpoint("qwen3"), **fp8(**fields(precision)))
    assert in_fp8(fly) == chosen(selection)
    right = log_probs(fly)
    assert right.isfinite().all()
    loaded = engine(tmp_path / "out") if read == "by vLLM itself" else decoded(engine, tmp_path / "out", precision)
    assert torch.equal(log_probs(loaded), right)


def decoded(engine, folder, precision):
    """The engine of an export in BF16 once more, quantized on the fly."""
    return engine(
        export(HuggingFace.open(folder), folder.parent / "bf16", Precision()).folder, **fp8(**fields(precision))
    )


def read_here(engine, folder, precision, here):
    """The engine of an export: as vLLM reads it by itself, or decoded where it has no kernel for that."""
    return engine(folder) if here.can("rollout-checkpoint") else decoded(engine, folder, precision)


def loaded_as_on_the_fly(engine, source, folder, precision):
    """Export, and return log-probs and the engine of the export, which quantizing on the fly gives to the bit."""
    done = export(HuggingFace.open(source), folder, precision, layout="modelopt")
    assert verify(done.plan, folder).holds
    assert reads_codes(sys.executable, done.plan)
    fly = engine(source, **fp8(**fields(precision)))
    assert in_fp8(fly) == chosen(done.plan.selection)
    right, loaded = log_probs(fly), engine(folder)
    assert right.isfinite().all()
    assert torch.equal(log_probs(loaded), right)
    return right, loaded


W4A16 = NVFP4.replace(activation_scheme="none")
IN_MODELOPTS_LAYOUTS = {
    "nvfp4": ("llama", NVFP4.replace(first_layers=1)),
    "mxfp8": ("llama", MXFP8.replace(first_layers=1)),
    "experts in nvfp4": ("qwen3_moe", NVFP4),
    "experts in mxfp8": ("qwen3_moe", MXFP8),
    "w4a16": ("llama", W4A16.replace(first_layers=1)),
    "experts in w4a16": ("qwen3_moe", W4A16),
    "128x128": ("llama", FP32.replace(first_layers=1)),
    "128x128 in nvfp4": ("llama", NVFP4.replace(modules=(("*.linear_fc1", "tensorwise"),))),
}


ALWAYS = ("nvfp4", "mxfp8", "experts in nvfp4", "128x128")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how in ALWAYS else pytest.mark.long) for how in IN_MODELOPTS_LAYOUTS]
)
def test_vllm_itself_loads_modelopts_layouts_and_gives_the_same_bits(engine, checkpoint, tmp_path, how):
    """Without a word about us: config.json says it all. A scale that is another one is seen in what it answers."""
    kind, precision = IN_MODELOPTS_LAYOUTS[how]
    precision = precision.replace(keep=(*precision.keep, "*.layers.2.*q_proj"))
    right, loaded = loaded_as_on_the_fly(engine, checkpoint(kind), tmp_path / "out", precision)
    loaded.collective_rpc("reload_weights")
    assert torch.equal(log_probs(loaded), right)
    tensors = load_file(tmp_path / "out/model.safetensors")
    damaged = f"model.layers.1.mlp.{'experts.0.' if kind == 'qwen3_moe' else ''}down_proj.weight_scale"
    tensors[damaged].view(torch.uint8)[0, 0] ^= 8  # an exponent, or half of one
    save_file(tensors, tmp_path / "out/model.safetensors", metadata={"format": "pt"})
    loaded.collective_rpc("reload_weights")
    assert not torch.equal(log_probs(loaded), right)


@pytest.mark.parametrize("method", ["modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"])
def test_an_engine_gives_its_configuration_to_other_processes(method):
    """As it does unless it runs in its caller's process, as most engines of these tests do."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config(method)
    assert config.__module__ == "nemo_fp8.rollout.engine.modelopt_experts"
    assert pickle.loads(pickle.dumps(config)) is config


def experts_of(folder, layer):
    """vLLM's own model, built on this checkpoint: a layer's experts."""
    from support.rollout.in_process import build

    block = build(folder, quantized=False).get_submodule(f"model.layers.{layer}.mlp")
    return next(module for module in block.modules() if hasattr(module, "w13_weight"))


def test_experts_of_a_mixed_checkpoint_have_each_layers_own_method(checkpoint, tmp_path):
    from nemo_fp8.rollout.engine.modelopt_experts import METHODS

    rules = (("*.layers.0.*experts*", "mxfp8"), ("*.layers.1.*experts*", "bf16"))
    exported(checkpoint("qwen3_moe"), tmp_path / "out", NVFP4.replace(modules=rules))
    methods = [type(experts_of(tmp_path / "out", layer).quant_method) for layer in (0, 1, 2)]
    assert methods == [METHODS["MXFP8"], UnquantizedFusedMoEMethod, METHODS["NVFP4"]]


def test_experts_take_a_checkpoints_scales(checkpoint, tmp_path):
    """A calibrated scale of their inputs, of which vLLM takes the largest of a layer, and one beneath gate and up."""
    exported(checkpoint("qwen3_moe"), tmp_path / "out", NVFP4)
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 3]] * 8)

    def answer(scale, *numbers):
        for number in numbers:
            for part in ("gate", "up", "down"):
                tensors[f"model.layers.1.mlp.experts.{number}.{part}_proj.input_scale"].fill_(scale)
        save_file(tensors, file, metadata={"format": "pt"})
        experts = experts_of(tmp_path / "out", 1)
        return experts.quant_method.apply(experts, x, torch.full((8, 2), 0.5), ids, None, None)

    small = 2.0**-9
    one, of_some, of_all = answer(1.0), answer(small, 3), answer(small, *range(8))
    assert one.isfinite().all()
    assert torch.equal(one, of_some)
    assert not torch.equal(one, of_all)
    experts = experts_of(tmp_path / "out", 1)
    experts.apply_router_weight_on_input = True
    with pytest.raises(PrecisionError, match="experts in NVFP4 with the router's weight on their input"):
        experts.quant_method.quant_config.get_quant_method(experts, "model.layers.1.mlp.experts")
    tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_2"] *= 2
    with pytest.raises(PrecisionError, match="gate and up have two weight_scale_2"):
        answer(1.0)


RULES = (
    ("*.layers.0.*", "mxfp8"),  # before the next one: the first rule that matches wins
    ("*.linear_proj", "bf16"),
    ("*.layers.2.*k_proj", "mxfp8"),  # q, k and v have one recipe
    ("*.down_proj", "mxfp8"),
)
"""Two formats and BF16 in NVFP4's contract, by Megatron's names and by Hugging Face's."""


def test_vllm_itself_loads_a_mixed_checkpoint_and_gives_the_same_bits(engine, checkpoint, tmp_path):
    """Two formats and BF16 in one model, layer by layer, as the plugin has them. A rule that is another one is seen."""
    precision = NVFP4.replace(modules=RULES)
    right, _ = loaded_as_on_the_fly(engine, checkpoint("llama"), tmp_path / "out", precision)
    other = precision.replace(modules=(("*.layers.2.*q_proj", "nvfp4"), *RULES))  # an earlier rule wins, in one layer
    exported(checkpoint("llama"), tmp_path / "other", other)
    assert not torch.equal(log_probs(engine(tmp_path / "other")), right)


def test_vllm_holds_a_mixed_checkpoint_as_the_rules_say(checkpoint, tmp_path):
    """vLLM's own classes on the export, and ours on the source: the same bytes under the same names."""
    from support.rollout.in_process import build, same_bits

    exported(checkpoint("qwen3"), tmp_path / "out", NVFP4.replace(modules=RULES))
    theirs = build(tmp_path / "out", quantized=False)
    ours = build(checkpoint("qwen3"), rollout="nvfp4", modules=[list(rule) for rule in RULES])
    stored = {}
    for name, layer in ours.named_modules():
        if hasattr(layer, "quant_method") and "_proj" in name:
            same = theirs.get_submodule(name)
            parts = {part: held for part, held in layer.named_parameters() if part.startswith("weight")}
            for part, held in parts.items():
                in_theirs = getattr(same, "weight_scale" if part == "weight_scale_inv" else part)
                assert same_bits(in_theirs.data.view(-1), held.data.view(-1)), (name, part)
            stored.setdefault(len(parts), set()).add(name.removeprefix("model.layers."))
    modules = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    mxfp8 = {f"0.{module}" for module in modules} | {"2.self_attn.qkv_proj"} | {f"{i}.mlp.down_proj" for i in (1, 2, 3)}
    bf16 = {f"{i}.self_attn.o_proj" for i in (1, 2, 3)}
    assert (stored[2], stored[1]) == (mxfp8, bf16)
    assert stored[3] == {f"{i}.{module}" for i in range(4) for module in modules} - mxfp8 - bf16


@pytest.mark.parametrize("version", ["0.29.0", "0.30.0", "0.31.0"])
def test_what_older_cpu_builds_have_no_place_for_is_compared_decoded(checkpoint, tmp_path, version, monkeypatch):
    """Before 0.30 vLLM has no table of linears' methods that the plugin could add to; its kernels serve the others."""
    machine = replace(Machine.here(sys.executable), vllm=version, vllm_cpu=True)
    monkeypatch.setattr(Machine, "here", lambda python: machine)
    told = {}
    for name, changes in {"a4": {}, "a16": {"activation_scheme": "none"}}.items():
        plan = export(HuggingFace.open(checkpoint("qwen3")), tmp_path / name, NVFP4.replace(**changes)).plan
        told[name] = reads_codes(sys.executable, plan)
    assert told == {"a4": True, "a16": version != "0.29.0"}


def test_vllm_reads_every_list_and_the_shapes_of_128x128_blocks(checkpoint, tmp_path):
    """Its config's answers and its parameters, before any product."""
    from support.rollout.in_process import build
    from vllm.model_executor.layers.quantization import modelopt

    precision = NVFP4.replace(modules=(*RULES[:3], ("*.linear_fc2", "tensorwise"), ("*.experts.*", "mxfp8")))
    done = export(HuggingFace.open(checkpoint("qwen3")), tmp_path / "out", precision)
    assert reads_codes(sys.executable, done.plan)
    for file in ("config.json", "hf_quant_config.json"):
        said = json.loads((tmp_path / "out" / file).read_text())
        read = modelopt.ModelOptMixedPrecisionConfig.from_config(said.get("quantization_config", said))
        read.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        for i in range(4):
            at = f"model.layers.{i}."
            assert read.is_layer_excluded(f"{at}self_attn.o_proj") == (i > 0)
            names = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
            right = ["NVFP4", "NVFP4", "FP8_PB_WO"] if i else ["MXFP8"] * 3
            right[0] = "MXFP8" if i in (0, 2) else "NVFP4"
            assert [read._resolve_quant_algo(at + name) for name in names] == right
    tensors = load_file(tmp_path / "out/model.safetensors")
    weight, scale = (tensors[f"model.layers.1.mlp.down_proj.{part}"] for part in ("weight", "weight_scale"))
    layer, shapes = torch.nn.Module(), modelopt.Shapes([weight.shape[0]], weight.shape[1], torch.bfloat16)
    build(checkpoint("qwen3"), quantized=False)  # parameters ask for the number of workers
    modelopt.KFp8Block128().create_weights(layer, modelopt.WEIGHT, modelopt.CkptCtx(), shapes, None)
    for stored, parameter in ((weight, layer.weight), (scale, layer.weight_scale)):
        assert (stored.shape, stored.dtype) == (parameter.shape, parameter.dtype)


def test_vllm_keeps_in_memory_what_the_file_holds(checkpoint, tmp_path):
    """vLLM's own classes on the export, and ours on the source: the same bytes under the same names."""
    from support.rollout.in_process import build, same_bits

    exported(checkpoint("qwen3"), tmp_path / "out", NVFP4)
    theirs, ours = build(tmp_path / "out", quantized=False), build(checkpoint("qwen3"), rollout="nvfp4")
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        a, b = (model.get_submodule(f"model.layers.1.{name}") for model in (theirs, ours))
        assert type(a.quant_method.kernel) is type(b.quant_method.fp8_linear)
        for parameter in ("weight", "weight_scale", "weight_global_scale", "input_global_scale_inv", "alpha"):
            assert same_bits(getattr(a, parameter).data.view(-1), getattr(b, parameter).data.view(-1))


def test_the_real_compressed_tensors_reads_the_config(checkpoint, tmp_path):
    """The library's own classes accept it, and mean by it what the contract means."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy

    precision = FP32.replace(first_layers=1)
    exported(checkpoint("qwen3"), tmp_path / "out", precision, layout="compressed-tensors")
    written = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(written)
    (scheme,) = read.config_groups.values()
    assert (scheme.weights.num_bits, scheme.weights.type, scheme.weights.symmetric) == (8, "float", True)
    assert (scheme.weights.strategy, scheme.weights.block_structure) == (QuantizationStrategy.BLOCK, [128, 128])
    assert (scheme.input_activations.strategy, scheme.input_activations.group_size) == (QuantizationStrategy.GROUP, 128)
    assert scheme.input_activations.dynamic is True
    assert scheme.targets == ["Linear"]
    assert set(read.ignore) == {
        n.removesuffix(".weight") for n, t in load_file(tmp_path / "out/model.safetensors").items() if kept(n, t)
    }
    assert read.format == "float-quantized"


def kept(name, tensor):
    return tensor.dtype == torch.bfloat16 and tensor.dim() == 2 and "embed" not in name


def test_the_real_compressed_tensors_decodes_what_we_encoded(checkpoint, tmp_path):
    """Its own dequantization, under its own reading of our config: every weight to the bit."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    exported(checkpoint("qwen3"), tmp_path / "fp8", FP32.replace(weight_scale="pow2"), layout="compressed-tensors")
    back = export(HuggingFace.open(tmp_path / "fp8"), tmp_path / "bf16", Precision()).folder
    config = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"].weights
    written, ours = (load_file(folder / "model.safetensors") for folder in (tmp_path / "fp8", back))
    codes = {name: value for name, value in written.items() if value.dtype == torch.float8_e4m3fn}
    assert len(codes) == 4 * 7
    for name, value in codes.items():
        theirs = dequantize(value, written[f"{name}_scale"], args=scheme, dtype=torch.bfloat16)
        assert torch.equal(theirs, ours[name])


# ---------------------------------------------------------------------- many engines


@pytest.mark.long
@pytest.mark.parametrize("layout", ["deepseek", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama_tied", "qwen3_moe"])
def test_every_model_in_every_layout(engine, checkpoint, tmp_path, here, kind, layout):
    selection = exported(checkpoint(kind), tmp_path / "out", FP32, layout=layout)
    fly = engine(checkpoint(kind), **fp8())
    assert in_fp8(fly) == chosen(selection)
    right = log_probs(fly)
    assert torch.equal(log_probs(read_here(engine, tmp_path / "out", FP32, here)), right)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_power_of_two_scales(engine, checkpoint, tmp_path, here, kind):
    exported(checkpoint(kind), tmp_path / "out", POW2)
    fly = log_probs(engine(checkpoint(kind), **fp8(**fields(POW2))))
    assert torch.equal(log_probs(read_here(engine, tmp_path / "out", POW2, here)), fly)


@pytest.mark.long
def test_odd_shapes_stay_in_bf16_on_both_sides(engine, checkpoint, tmp_path, here):
    """K of 64 rows, and an MLP of 320: nothing that vLLM would refuse to load, and nothing that differs."""
    selection = exported(checkpoint("qwen3_odd"), tmp_path / "out", FP32)
    assert len(selection.misaligned) == 4 * 3
    fly = engine(checkpoint("qwen3_odd"), **fp8())
    assert in_fp8(fly) == chosen(selection)
    right = log_probs(fly)
    assert torch.equal(log_probs(read_here(engine, tmp_path / "out", FP32, here)), right)


@pytest.mark.long
def test_the_command_verifies_with_vllm(checkpoint, tmp_path, monkeypatch, capsys, here):
    """Where vLLM has no kernel that reads it, on the export decoded, which is said; it needs no tokenizer."""
    from nemo_fp8.cli import main

    source = shutil.copytree(checkpoint("qwen3"), tmp_path / "source", ignore=shutil.ignore_patterns("*token*"))
    words = [
        "export",
        str(source),
        str(tmp_path / "out"),
        "--precision",
        "bf16_with_fp8_blockwise_mixed",
        "--verify",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["nemo-fp8", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert found["certificate"]["holds"]
    assert found["vllm"]["bitwise_equal"]
    assert found["vllm"]["decoded"] is not here.can("rollout-checkpoint")
    assert found["vllm"]["compared"] > 2000
