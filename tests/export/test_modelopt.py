"""Checkpoints in ModelOpt's layouts: the names, the bytes, the scales that parts share, and that verify sees a bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import oracles
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


DOWN = "model.layers.1.mlp.down_proj"
EDGES = {
    "all zero": torch.zeros_like,
    "a scale of the tensor that is subnormal": lambda x: (x.float() * 2.0**-125).bfloat16(),
    "subnormal values": lambda x: (x.float() * 2.0**-132).bfloat16(),
    "the smallest value alone": lambda x: torch.zeros_like(x).index_fill_(1, torch.tensor(3), 2.0**-133),
    "every magnitude": lambda x: (x.float() * torch.logspace(-38, 30, x.shape[1])).bfloat16(),
}


@pytest.mark.parametrize("of", EDGES.values(), ids=EDGES)
def test_nvfp4_of_hard_weights_is_tes_own_and_comes_back_as_it_decodes(tmp_path, of):
    weights = tensors()
    x = weights[f"{DOWN}.weight"] = of(weights[f"{DOWN}.weight"])
    done = to(tmp_path / "out", write(tmp_path / "in", weights), NVFP4)
    assert verify(done.plan, tmp_path / "out").holds
    written = loaded(tmp_path / "out")
    reference = oracles.te_nvfp4().NVFP4QuantizerRef(None, rowwise=True, columnwise=False, quant_tile_shape=(1, 16))
    codes, scale, _, _, amax, _ = reference._quantize(x)
    assert torch.equal(written[f"{DOWN}.weight"], codes.view(torch.uint8))
    assert torch.equal(bits(written[f"{DOWN}.weight_scale"]), bits(scale))
    assert written[f"{DOWN}.weight_scale_2"] == amax / 2688
    back = loaded(to(tmp_path / "back", tmp_path / "out", Precision()).folder)[f"{DOWN}.weight"]
    held = quantize(x, Operand("e2m1", (1, 16), "e4m3")).dequantize(torch.bfloat16)
    assert back.isfinite().all()
    assert torch.equal(bits(back), bits(held))


BROKEN = {
    "no number": {"weight_scale_2": torch.tensor(float("nan"))},
    "infinite": {"weight_scale_2": torch.tensor(float("inf"))},
    "a block's no number": {"weight_scale": torch.tensor(float("nan"))},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("precision", [Precision(), NVFP4], ids=["bf16", "nvfp4"])
def test_a_checkpoint_with_a_broken_scale_is_no_source(tmp_path, broken, precision):
    """NaN or infinity, which would be written as weights."""
    to(tmp_path / "four", write(tmp_path / "in", tensors()), NVFP4)
    for part, value in broken.items():
        files = {file: load_file(file) for file in (tmp_path / "four").glob("*.safetensors")}
        (file,) = (file for file, held in files.items() if f"{DOWN}.{part}" in held)
        files[file][f"{DOWN}.{part}"].view(-1)[0] = value
        save_file(files[file], file, metadata={"format": "pt"})
    with pytest.raises(PrecisionError, match=f"{DOWN}.weight holds values that are not finite"):
        to(tmp_path / "out", tmp_path / "four", precision)


def test_columns_that_16_does_not_divide_stay_as_they_are_or_are_refused(tmp_path):
    weights = tensors()
    weights[f"{DOWN}.weight"] = weights[f"{DOWN}.weight"][:, :-8].contiguous()
    source = write(tmp_path / "in", weights)
    done = to(tmp_path / "out", source, NVFP4)
    assert torch.equal(loaded(tmp_path / "out")[f"{DOWN}.weight"], weights[f"{DOWN}.weight"])
    assert [DOWN in problem.what for problem in done.plan.selection.misaligned] == [True]
    with pytest.raises(PrecisionError, match="376 columns are not a multiple of 16"):
        to(tmp_path / "strict", source, NVFP4.replace(strict=True))


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


RULES = (
    ("*.layers.0.*", "mxfp8"),  # before the next one: the first rule that matches wins
    ("*.linear_proj", "bf16"),
    ("*.layers.2.*k_proj", "mxfp8"),  # q, k and v have one recipe
    ("*.down_proj", "tensorwise"),  # in a rollout: 128x128 blocks with FP32 scales
)
OPERANDS = {
    "NVFP4": Operand("e2m1", (1, 16), "e4m3"),
    "MXFP8": Operand("e4m3", (1, 32), "e8m0"),
    "FP8_PB_WO": Operand("e4m3", (128, 128), "fp32"),
}


def named(name):
    """ModelOpt's name of what the rules give a weight, said once more; None for BF16."""
    _, _, layer, *_, word, _ = name.split(".")
    if layer == "0":
        return "MXFP8"
    if word == "o_proj":
        return None
    if layer == "2" and word in ("q_proj", "k_proj", "v_proj"):
        return "MXFP8"
    return "FP8_PB_WO" if word == "down_proj" else "NVFP4"


def mixed(tmp_path, precision=NVFP4, **settings):
    weights = tensors(**settings)
    return to(tmp_path / "out", write(tmp_path / "in", weights), precision.replace(modules=RULES)), weights


def test_rules_give_each_module_its_format(tmp_path):
    """Names, shapes, codes and scales of three formats and BF16 in one checkpoint, each as it has them alone."""
    done, weights = mixed(tmp_path)
    assert done.plan.layout.name == "modelopt"
    assert verify(done.plan, done.folder).holds
    written = loaded(done.folder)
    for names in groups(weights):
        amax = max(weights[name].float().abs().max() for name in names)
        for name in names:
            algorithm, module = named(name), name.removesuffix(".weight")
            codes = written.pop(name)
            if algorithm is None:
                assert torch.equal(bits(codes), bits(weights[name]))
                continue
            right = quantize(weights[name], OPERANDS[algorithm], amax=amax if algorithm == "NVFP4" else None)
            scale = written.pop(f"{module}.weight_scale")
            assert torch.equal(bits(codes), bits(right.data)), name
            assert torch.equal(bits(scale), bits(right.scale_inv)), name
            if algorithm == "FP8_PB_WO":  # [n, 1, k, 1], as vLLM's parameter of that format
                assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (2, 1, 3, 1))
            if algorithm == "NVFP4":
                assert written.pop(f"{module}.weight_scale_2") == amax / 2688
                assert written.pop(f"{module}.input_scale") == 1.0
    assert written.keys() == {name for name in weights if "_proj" not in name}


def test_the_lists_of_a_mixed_checkpoint(tmp_path):
    done, weights = mixed(tmp_path)
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    beside = json.loads((done.folder / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "MIXED_PRECISION")
    sizes = {"NVFP4": 16, "MXFP8": 32, "FP8_PB_WO": 128}
    right = {
        name.removesuffix(".weight"): {"quant_algo": named(name), "group_size": sizes[named(name)]}
        for name in weights
        if "_proj" in name and named(name)
    }
    assert config["quantized_layers"] == beside["quantized_layers"] == right
    assert config["ignore"] == beside["exclude_modules"]
    assert set(config["ignore"]) == {"lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in (1, 2))}
    by_size = {
        module: group["weights"]["group_size"]
        for group in config["config_groups"].values()
        for module in group["targets"]
    }
    assert by_size == {module: about["group_size"] for module, about in right.items()}
    assert done.to_dict()["formats"] == {"MXFP8": 10, "NVFP4": 7, "FP8": 2}


def test_verify_sees_a_single_bit_in_every_format(tmp_path):
    done, _ = mixed(tmp_path)
    for name in ("1.mlp.up_proj", "0.mlp.up_proj", "2.mlp.down_proj"):  # NVFP4, MXFP8, 128x128
        source = f"model.layers.{name}.weight"
        (shard,) = [s for s in done.plan.shards if any(o.source == source for o in s.outputs)]
        file = done.folder / shard.file
        whole = file.read_bytes()
        for output in (o for o in shard.outputs if o.source == source):
            changed = bytearray(whole)
            changed[shard.starts[output.name] + output.about.bytes // 2] ^= 1
            file.write_bytes(changed)
            assert verify(done.plan, done.folder).names == [source]
        file.write_bytes(whole)


def test_a_mixed_export_is_a_source_again(tmp_path):
    done, weights = mixed(tmp_path)
    values = loaded(to(tmp_path / "back", done.folder, preset("bf16_mixed")).folder)
    assert values.keys() == weights.keys()
    for name, weight in weights.items():
        lost = (values[name].float() - weight.float()).norm() / weight.float().norm()
        assert lost < (0.15 if "_proj" in name and named(name) == "NVFP4" else 0.05), name


def test_one_format_by_rules_is_a_checkpoint_of_that_format(tmp_path):
    """A rule for every module, or for modules that the model has not: nothing is mixed, and the layout is the usual."""
    source = write(tmp_path / "in", tensors())
    for rules, algorithm in (((("*", "mxfp8"),), "MXFP8"), ((("*.mamba.*", "mxfp8"),), "NVFP4")):
        plan = Plan.of(HuggingFace.open(source), NVFP4.replace(modules=rules))
        assert plan.quantization["quant_algo"] == algorithm
        assert "quantized_layers" not in plan.quantization
    plan = Plan.of(HuggingFace.open(source), NVFP4.replace(modules=(("*", "tensorwise"),)))
    assert plan.layout.name == "deepseek"


@pytest.mark.parametrize(("rules", "how", "word"), [
    ((("*.down_proj", "blockwise"),), {}, "FP8_PB_WO has no word for it"),
    ((("*.down_proj", "mxfp8"),), {"layout": "deepseek"}, "in the deepseek layout"),
    ((("*.down_proj", "mxfp8"),), {"layout": "compressed-tensors"}, "in the compressed-tensors layout"),
    ((("*.layers.0.*", "blockwise"), ("*", "tensorwise")), {}, "one scale_fmt for the whole checkpoint"),
    ((("*.layers.0.*", "blockwise"), ("*", "tensorwise")), {"layout": "compressed-tensors"}, "activation_scale='pow2'"),
])  # fmt: skip
def test_what_a_layout_cannot_hold_is_refused(tmp_path, rules, how, word):
    source = write(tmp_path / "in", tensors())
    with pytest.raises(PrecisionError, match=word):
        to(tmp_path / "out", source, NVFP4.replace(modules=rules), **how)
    assert not (tmp_path / "out").exists()


def test_experts_in_128x128_blocks_are_refused_in_that_layout(tmp_path):
    source = write(tmp_path / "in", tensors(experts=3))
    with pytest.raises(PrecisionError, match="reads their scales under DeepSeek's names"):
        to(tmp_path / "out", source, NVFP4.replace(modules=(("*.experts.*", "tensorwise"),)))
    mixed = NVFP4.replace(modules=(("*.experts.*", "mxfp8"),))
    assert to(tmp_path / "mx", source, mixed).to_dict()["formats"] == {"NVFP4": 12, "MXFP8": 27}


def test_compressed_tensors_holds_blocks_by_rules_and_what_stays_out_of_them(tmp_path):
    fp32 = Precision(rollout="fp8", modules=(("*.linear_proj", "bf16"), ("*.down_proj", "tensorwise")))
    done = to(tmp_path / "out", write(tmp_path / "in", tensors()), fp32, layout="compressed-tensors")
    (group,) = done.plan.quantization["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert {n for n in done.plan.quantization["ignore"] if "_proj" in n} == {
        f"model.layers.{i}.self_attn.o_proj" for i in range(3)
    }
    assert verify(done.plan, done.folder).holds
