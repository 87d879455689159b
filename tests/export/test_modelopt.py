"""Checkpoints in ModelOpt's layouts: the names, the bytes, the scales that parts share, and that verify sees a bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import tensors, write

from nemo_fp8 import Precision, PrecisionError, preset
from nemo_fp8.contract import Operand
from nemo_fp8.export import HuggingFace, Plan, export, verify
from nemo_fp8.numerics import quantize

NVFP4 = Precision(rollout="nvfp4")
WEIGHTS_ONLY = NVFP4.replace(activation_scheme="none")
MXFP8 = preset("bf16_with_mxfp8_mixed")


def to(folder, source, precision, **how):
    return export(HuggingFace.open(source), folder, precision, **how)


def loaded(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def bits(a):
    return a.contiguous().view(-1).view(torch.uint8)


def groups(weights):
    """The parts that vLLM holds as one matrix, said once more."""
    fused = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))
    for name in weights:
        module, _, word = name.removesuffix(".weight").rpartition(".")
        parts = next((parts for parts in fused if parts[0] == word), ())
        if parts:
            yield [f"{module}.{part}.weight" for part in parts]


@pytest.mark.parametrize("precision", [NVFP4, WEIGHTS_ONLY], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("kind", [{}, {"experts": 3}], ids=["dense", "experts"])
def test_nvfp4(tmp_path, kind, precision):
    """Codes and scales beneath the amax of all fused parts: of an expert's gate and up, and of no other expert."""
    weights = tensors(**kind)
    to(tmp_path / "out", write(tmp_path / "in", weights), precision)
    written = loaded(tmp_path / "out")
    seen = set()
    for names in groups(weights):
        amax = max(weights[name].float().abs().max() for name in names)
        for name in names:
            module, w = name.removesuffix(".weight"), weights[name]
            codes, scale, scale_2 = (
                written.pop(f"{module}.{end}") for end in ("weight", "weight_scale", "weight_scale_2")
            )
            assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (w.shape[0], w.shape[1] // 2))
            assert (scale.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, (w.shape[0], w.shape[1] // 16))
            assert (scale_2.dtype, scale_2.dim()) == (torch.float32, 0)
            assert scale_2 == amax / 2688
            right = quantize(w, Operand("e2m1", (1, 16), "e4m3"), amax=amax)
            assert torch.equal(codes, right.data)
            assert torch.equal(bits(scale), bits(right.scale_inv))
            if precision is NVFP4:
                assert written.pop(f"{module}.input_scale") == 1.0
            seen.add(name)
    assert len(seen) == sum("_proj" in name for name in weights)
    assert written.keys() == weights.keys() - seen
    assert all(torch.equal(bits(written[name]), bits(weights[name])) for name in written)


def test_the_config_says_the_same_in_both_files(tmp_path):
    to(tmp_path / "out", write(tmp_path / "in", tensors(experts=3)), NVFP4.replace(keep=("*.o_proj",)))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"], config["group_size"]) == ("modelopt", "NVFP4", 16)
    assert "model.layers.1.self_attn.o_proj" in config["ignore"]
    assert "model.layers.1.mlp.gate" in config["ignore"]
    assert "lm_head" in config["ignore"]
    beside = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert beside == {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": config["ignore"]
    }  # fmt: skip
    for precision, algorithm in ((WEIGHTS_ONLY, "W4A16_NVFP4"), (MXFP8, "MXFP8")):
        plan = Plan.of(HuggingFace.open(tmp_path / "in"), precision)
        assert plan.quantization["quant_algo"] == algorithm
        inputs = plan.quantization["config_groups"]["group_0"]["input_activations"]
        assert (inputs is None) == (precision is WEIGHTS_ONLY)


def test_mxfp8(tmp_path):
    weights = tensors()
    to(tmp_path / "out", write(tmp_path / "in", weights), MXFP8)
    written = loaded(tmp_path / "out")
    for name in (name for name in weights if "_proj" in name):
        codes, scale = written[name], written[f"{name}_scale"]
        right = quantize(weights[name], Operand("e4m3", (1, 32), "e8m0"))
        assert (scale.dtype, codes.dtype) == (torch.uint8, torch.float8_e4m3fn)
        assert torch.equal(bits(codes), bits(right.data))
        assert torch.equal(scale, right.scale_inv.view(torch.uint8))


@pytest.mark.parametrize("precision", [NVFP4, MXFP8], ids=["nvfp4", "mxfp8"])
def test_verify_sees_a_single_bit_of_every_part(tmp_path, precision):
    done = to(tmp_path / "out", write(tmp_path / "in", tensors(layers=1), shards=1, layers=1), precision)
    good = verify(done.plan, done.folder)
    assert good.holds
    assert good.weights == 7
    assert not good.idempotent
    file = tmp_path / "out/model.safetensors"
    whole = file.read_bytes()
    shard = done.plan.shards[0]
    outputs = [o for o in shard.outputs if o.source == "model.layers.0.mlp.up_proj.weight"]
    assert len(outputs) == (4 if precision is NVFP4 else 2)
    for output in outputs:
        changed = bytearray(whole)
        changed[shard.starts[output.name] + output.about.bytes // 2] ^= 1
        file.write_bytes(changed)
        bad = verify(done.plan, done.folder)
        assert bad.names == ["model.layers.0.mlp.up_proj.weight"]
        assert bad.codes_wrong + bad.scales_wrong == 1
        assert bad.problems()


@pytest.mark.parametrize("precision", [NVFP4, MXFP8], ids=["nvfp4", "mxfp8"])
def test_an_export_is_a_source_again(tmp_path, precision):
    """Decoded to BF16, and quantized once more: the same values, but in blocks whose E4M3 scale is subnormal."""
    source = write(tmp_path / "in", tensors(experts=2))
    once = to(tmp_path / "once", source, precision).folder
    back = to(tmp_path / "back", once, preset("bf16_mixed"))
    assert not (back.folder / "hf_quant_config.json").exists()
    values = loaded(back.folder)
    assert values.keys() == tensors(experts=2).keys()
    lost = [
        (values[n].float() - w.float()).norm() / w.float().norm() for n, w in tensors(experts=2).items() if "_proj" in n
    ]
    assert all(0.01 < one < (0.15 if precision is NVFP4 else 0.05) for one in lost)
    again = to(tmp_path / "again", back.folder, precision).folder
    twice = loaded(to(tmp_path / "twice", again, preset("bf16_mixed")).folder)
    scales = {n.removesuffix("_scale"): s.float() for n, s in loaded(once).items() if n.endswith("weight_scale")}
    for name, value in values.items():
        differs = value != twice[name]
        if precision is NVFP4 and name in scales:
            differs = differs.view(*scales[name].shape, 16).any(-1) & (scales[name] >= 2.0**-6)
        assert not differs.any()


def test_a_killed_export_resumes_with_the_amax_of_parts_in_other_files(tmp_path):
    """Gate lies in one file and up in another: the second run reads both for their amax, and writes as one run does."""
    source = write(tmp_path / "in", tensors(layers=1), layers=1)
    whole = to(tmp_path / "whole", source, NVFP4)
    part = to(tmp_path / "part", source, NVFP4)
    (part.folder / "nemo_fp8_export.json").rename(part.folder / ".nemo_fp8_export.json")
    for shard in part.plan.shards[1:]:
        (part.folder / shard.file).unlink()
    resumed = to(tmp_path / "part", source, NVFP4)
    assert (resumed.resumed, len(resumed.plan.shards)) == (1, 3)
    for shard in whole.plan.shards:
        assert (whole.folder / shard.file).read_bytes() == (part.folder / shard.file).read_bytes()


def test_stacks_of_experts_have_no_names_in_that_layout(tmp_path):
    with pytest.raises(PrecisionError, match="in the modelopt layout"):
        to(tmp_path / "out", write(tmp_path / "in", tensors(experts=3, stacked=True)), NVFP4)


def test_rules_for_modules_leave_modules_out_of_a_checkpoint_and_no_more(tmp_path):
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    (tmp_path / "in").mkdir()
    save_file({name: weight.clone() for name in names}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    kept = Precision(rollout="nvfp4", modules=(("*.linear_qkv", "bf16"),))
    export(HuggingFace.open(tmp_path / "in"), tmp_path / "out", kept)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: written[name].dtype for name in names} == {
        name: torch.uint8 if "o_proj" in name else torch.bfloat16 for name in names
    }
    with pytest.raises(PrecisionError, match="several formats"):
        export(
            HuggingFace.open(tmp_path / "in"), tmp_path / "other", kept.replace(modules=(("*.linear_qkv", "mxfp8"),))
        )
