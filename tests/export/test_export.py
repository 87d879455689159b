"""What an export writes: codes and scales to the bit, everything else as it was, one tensor in memory, and a config
that says so."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.small_models import FFN, HIDDEN, config, content, tensors, write

from nemo_fp8 import Precision, PrecisionError, preset
from nemo_fp8.contract import Operand
from nemo_fp8.export import HuggingFace, export, verify
from nemo_fp8.export.canonical import canonical
from nemo_fp8.numerics import quantize
from nemo_fp8.storage.safetensors import Checkpoint

POW2 = preset("bf16_with_fp8_blockwise_mixed")
FP32 = POW2.replace(weight_scale="fp32", activation_scale="fp32")
BF16 = preset("bf16_mixed")
NVFP4 = Precision(rollout="nvfp4")
MXFP8 = preset("bf16_with_mxfp8_mixed")


def loaded(folder):
    """Every tensor of a folder, through the safetensors library."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= load_file(file)
    return out


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def to(folder, source, precision=POW2, **how):
    return export(HuggingFace.open(source), folder, precision, **how)


# ---------------------------------------------------------------------- codes and scales


def decoded(codes, scale):
    """Codes times scales, in numpy, with a table of E4M3's values: no code of ours."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    table = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)) * np.where(
        bits & 128, -1, 1
    )
    table[[127, 255]] = np.nan
    values, scale = table[codes.view(torch.uint8).numpy()], scale.numpy().astype(np.float64)
    return values * scale.repeat(128, -2).repeat(128, -1)[..., : values.shape[-2], : values.shape[-1]]


@pytest.mark.parametrize("precision", [POW2, FP32], ids=["pow2", "fp32"])
@pytest.mark.parametrize("kind", ["dense", "experts", "stack"])
def test_codes_and_scales(tmp_path, kind, precision):
    """Those of the numerics, in canonical form; and, by an oracle of a few lines, within half a step of the source."""
    weights = tensors(**{"dense": {}, "experts": {"experts": 3}, "stack": {"experts": 3, "stacked": True}}[kind])
    to(tmp_path / "out", write(tmp_path / "in", weights), precision)
    written, operand = loaded(tmp_path / "out"), Operand("e4m3", (128, 128), precision.weight_scale)
    quantized = [name for name in weights if "_proj" in name]
    assert quantized
    for name in quantized:
        codes, scale, w = written.pop(name), written.pop(f"{name}_scale_inv"), weights[name]
        assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert scale.shape == (*w.shape[:-2], -(-w.shape[-2] // 128), -(-w.shape[-1] // 128))
        for i in range(w.shape[0]) if w.dim() == 3 else (...,):
            right = canonical(quantize(w[i], operand))
            assert same(codes[i], right.data)
            assert same(scale[i], right.scale_inv)
        error = np.abs(decoded(codes, scale) - w.double().numpy())
        spread = scale.numpy().repeat(128, -2).repeat(128, -1)[..., : w.shape[-2], : w.shape[-1]]
        # Half a step of a normal code; of a subnormal one, whose scale may have been halved after the cast.
        step = np.maximum(np.abs(w.double().numpy()) * 2.0**-4, spread * 2.0**-9) * (1 + 2.0**-20)
        assert (error <= step).all()
        if precision.weight_scale == "pow2":
            assert (np.exp2(np.round(np.log2(scale.numpy()))) == scale.numpy()).all()
    assert written.keys() == weights.keys() - set(quantized)
    assert all(same(written[name], weights[name]) for name in written)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 260),
    columns=st.integers(1, 260),
    exponent=st.integers(-40, 40),
    peak=st.sampled_from([1.0, 224.0, 225.0, 231.9, 232.0, 233.0, 448.0]),
    seed=st.integers(0, 2**16),
)
def test_canonical_form_keeps_values_and_comes_back_to_itself(rows, columns, exponent, peak, seed):
    """Tiles whose largest value rounds down to half of the largest code, and just not; subnormals; ragged edges."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draws) * torch.randn(rows, 1, generator=draws).exp2()
    x = (x / x.abs().max().clamp_min(1e-30) * peak * 2.0**exponent).bfloat16()
    for scale in ("pow2", "fp32"):
        operand = Operand("e4m3", (128, 128), scale)
        plain, ours = quantize(x, operand), canonical(quantize(x, operand))
        assert same(ours.dequantize(), plain.dequantize())
        again = canonical(quantize(ours.dequantize(torch.bfloat16), operand))
        assert same(again.data, ours.data)
        assert same(again.scale_inv, ours.scale_inv)
        # Without it, too, once it is canonical.
        assert same(quantize(ours.dequantize(torch.bfloat16), operand).data, ours.data)


def test_the_example_that_shows_that_a_canonical_form_is_needed():
    x = torch.ones(128, 128).bfloat16()
    x[0, 0] = 225.0 / 128
    plain = quantize(x, Operand("e4m3", (128, 128), "pow2"))
    again = quantize(plain.dequantize(torch.bfloat16), Operand("e4m3", (128, 128), "pow2"))
    assert not same(again.data, plain.data)
    assert torch.equal(again.dequantize(), plain.dequantize())
    assert same(canonical(plain).data, again.data)
    assert same(canonical(plain).scale_inv, again.scale_inv)


@pytest.mark.parametrize("precision", [POW2, FP32], ids=["pow2", "fp32"])
def test_dequantized_and_exported_again_it_is_the_same(tmp_path, precision):
    """The certificate, done by hand: FP8 -> BF16 -> FP8, three exports, not a bit of a tensor differs."""
    source = write(tmp_path / "source", tensors(experts=2))
    first = to(tmp_path / "fp8", source, precision).folder
    back = to(tmp_path / "bf16", first, BF16).folder
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    again = to(tmp_path / "again", back, precision).folder
    one, two = loaded(first), loaded(again)
    assert one.keys() == two.keys()
    assert all(same(one[name], two[name]) for name in one)
    assert loaded(back).keys() == loaded(source).keys()
    assert not all(same(loaded(back)[name], value) for name, value in loaded(source).items())  # it was rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_rounded_to_the_compute_dtype_first(tmp_path, dtype):
    """An engine loads them into BF16, and then quantizes."""
    weights = tensors(layers=1, dtype=dtype)
    to(tmp_path / "out", write(tmp_path / "in", weights, layers=1))
    name = "model.layers.0.mlp.up_proj.weight"
    right = canonical(quantize(weights[name].bfloat16(), Operand("e4m3", (128, 128), "pow2")))
    assert same(loaded(tmp_path / "out")[name], right.data)
    assert loaded(tmp_path / "out")["model.norm.weight"].dtype == dtype  # as it was


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    weights = tensors(layers=1)
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    with pytest.raises(PrecisionError, match=r"up_proj.weight holds values that are not finite"):
        to(tmp_path / "out", write(tmp_path / "in", weights, layers=1))


# ---------------------------------------------------------------------- files


def test_files_that_belong_to_the_model_come_along(tmp_path):
    source = write(tmp_path / "in")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool.jinja").write_text("{{ x }}")
    folder = to(tmp_path / "out", source).folder
    files = content(folder)
    assert files["tokenizer.json"] == b"{}"
    assert files["additional_chat_templates/tool.jinja"] == b"{{ x }}"
    assert "pytorch_model.bin" not in files
    assert ".gitattributes" not in files
    written = json.loads(files["config.json"])
    assert written.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": ["lm_head"],
    }
    assert written == config()
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in loaded(folder).values())
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    receipt = json.loads(files["nemo_fp8_export.json"])
    assert receipt["precision"]["weight_scale"] == "pow2"
    assert str(tmp_path) not in files["nemo_fp8_export.json"].decode()  # it will be published


def test_tensors_lie_where_their_type_wants_them(tmp_path):
    """Readers that map a file want every tensor at a multiple of its element's size, whatever odd sizes lie before
    it."""
    weights = tensors(layers=1) | {
        "a.odd": torch.ones(3, dtype=torch.uint8),
        "z.wide": torch.ones(5, dtype=torch.float64),
    }
    to(tmp_path / "out", write(tmp_path / "in", weights, shards=1, layers=1))
    raw = (tmp_path / "out/model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
    for name, about in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + about["data_offsets"][0]) % sizes[about["dtype"]] == 0, name
    assert same(loaded(tmp_path / "out")["z.wide"], weights["z.wide"])


def test_a_single_file_is_a_checkpoint_too(tmp_path):
    save_file(tensors(), tmp_path / "weights.safetensors")
    exported = to(tmp_path / "out", tmp_path / "weights.safetensors")
    assert {*content(tmp_path / "out")} == {"model.safetensors", "nemo_fp8_export.json"}
    assert any("no config.json" in note for note in exported.plan.source.notes)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    to(tmp_path / "with", tmp_path / "weights.safetensors")
    assert {"config.json", "model.safetensors"} <= {*content(tmp_path / "with")}


def test_without_fp8_everything_is_copied(tmp_path):
    source = write(tmp_path / "in")
    to(tmp_path / "out", source, BF16)
    assert json.loads((tmp_path / "out/config.json").read_text()) == config()
    one, two = loaded(source), loaded(tmp_path / "out")
    assert one.keys() == two.keys()
    assert all(same(one[name], two[name]) for name in one)


# ---------------------------------------------------------------------- which layers


def test_the_contract_chooses(tmp_path):
    precision = POW2.replace(first_layers=1, keep=("*.layers.2.*k_proj",))
    exported = to(tmp_path / "out", write(tmp_path / "in"), precision)
    written = loaded(tmp_path / "out")
    fp8 = {name for name, value in written.items() if value.dtype == torch.float8_e4m3fn}
    kept = [f"model.layers.2.self_attn.{n}_proj.weight" for n in "qkv"]
    assert fp8 == {n for n in tensors() if "_proj" in n and ".layers.0." not in n and n not in kept}
    listed = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {f"{name}.weight" for name in listed} == {
        n for n in tensors() if n not in fp8 and ("_proj" in n or n == "lm_head.weight")
    }
    assert exported.plan.selection.by_rule("keep").keys() == set(kept)


def test_routers_and_experts(tmp_path):
    to(tmp_path / "out", write(tmp_path / "in", tensors(experts=2)), POW2.replace(first_layers=1))
    written = loaded(tmp_path / "out")
    assert written["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert written["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    listed = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"model.layers.0.mlp.experts", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"} <= set(
        listed
    )
    assert "model.layers.1.mlp.experts" not in listed


def test_misaligned_layers_are_named_or_refused(tmp_path):
    source = write(tmp_path / "in", tensors(kv=64))
    exported = to(tmp_path / "out", source)
    assert [problem.what.split(":")[0] for problem in exported.plan.selection.misaligned] == [
        f"model.layers.{i}.self_attn.q_proj (and 2 with it)" for i in range(3)
    ]
    assert loaded(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    with pytest.raises(PrecisionError) as error:
        to(tmp_path / "strict", source, POW2.replace(strict=True))
    assert len(error.value.problems) == 3
    assert not (tmp_path / "strict").exists()


REFUSED = {
    "blocks": (POW2.replace(rollout_block="tensor"), {}, "rollout_block='tensor' as a checkpoint"),
    "mx": (preset("bf16_with_mxfp8_mixed"), {"layout": "deepseek"}, "rollout_block='1x32' in the deepseek layout"),
    "four bits": (NVFP4, {"layout": "compressed-tensors"}, "Write the modelopt layout"),
    "modelopt": (POW2, {"layout": "modelopt"}, "no word for it"),
    "static": (POW2.replace(rollout_block="tensor", activation_scheme="static"), {}, "as a checkpoint"),
    "two kinds of scales": (POW2.replace(activation_scale="fp32"), {}, "one scale_fmt for both"),
    "nothing left": (POW2.replace(first_layers=3), {}, "Nothing of .* would be quantized"),
    "layout": (POW2, {"layout": "gguf"}, "Unknown layout"),
    "no word for it": (POW2, {"layout": "compressed-tensors"}, "activation_scale='pow2' in a compressed-tensors"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, kind):
    precision, how, words = REFUSED[kind]
    with pytest.raises(PrecisionError, match=words) as error:
        to(tmp_path / "out", write(tmp_path / "in"), precision, **how)
    assert all(problem.remedy for problem in error.value.problems)
    assert not (tmp_path / "out").exists()


def test_compressed_tensors(tmp_path):
    precision = POW2.replace(activation_scale="fp32")
    to(tmp_path / "out", write(tmp_path / "in"), precision, layout="compressed-tensors")
    to(tmp_path / "deepseek", tmp_path / "in", POW2)
    ours, theirs = loaded(tmp_path / "out"), loaded(tmp_path / "deepseek")
    renamed = {name.replace("weight_scale_inv", "weight_scale"): value for name, value in theirs.items()}
    assert ours.keys() == renamed.keys()
    assert all(same(ours[name], renamed[name]) for name in ours)
    with pytest.raises(PrecisionError, match="stack of experts"):
        to(
            tmp_path / "no",
            write(tmp_path / "moe", tensors(experts=2, stacked=True)),
            precision,
            layout="compressed-tensors",
        )
    # And it is a source like any other.
    back = to(tmp_path / "bf16", tmp_path / "out", BF16).folder
    assert loaded(back).keys() == tensors().keys()


# ---------------------------------------------------------------------- the certificate


@pytest.mark.parametrize("precision", [POW2, FP32], ids=["pow2", "fp32"])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_certificate_holds(tmp_path, precision, stacked):
    exported = to(tmp_path / "out", write(tmp_path / "in", tensors(experts=2, stacked=stacked)), precision)
    found = verify(exported.plan, tmp_path / "out")
    assert found.holds
    assert not found.problems()
    assert found.weights == len(exported.plan.selection.quantized)
    assert found.codes == sum(t.numel() for t in loaded(tmp_path / "out").values() if t.dtype == torch.float8_e4m3fn)
    assert (found.tiles_moved > 0) == (precision.weight_scale == "pow2")
    assert found.copied == len(exported.plan.source.tensors) - found.weights


@pytest.mark.parametrize("chunk", [1000, 16 * 2**20])
def test_the_certificate_holds_for_what_was_dequantized(tmp_path, monkeypatch, chunk):
    """Wherever the two streams of bytes are cut: a file's in chunks, decoded matrices one by one."""
    first = to(tmp_path / "fp8", write(tmp_path / "in", tensors(experts=2, stacked=True))).folder
    exported = to(tmp_path / "back", first, BF16)
    whole = Checkpoint.chunks
    monkeypatch.setattr(Checkpoint, "chunks", lambda self, name: whole(self, name, chunk))
    found = verify(exported.plan, tmp_path / "back")
    assert found.holds, found
    assert found.copied == len(exported.plan.source.tensors)
    assert found.copied_bytes == exported.plan.bytes_in
    file = tmp_path / "back" / exported.plan.shards[0].file
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert verify(exported.plan, tmp_path / "back").bytes_wrong == 1


TAMPERED = {
    "a code": ("model.layers.1.mlp.up_proj.weight", "codes_wrong"),
    "a scale": ("model.layers.1.mlp.up_proj.weight_scale_inv", "scales_wrong"),
    "a kept byte": ("model.norm.weight", "bytes_wrong"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_the_certificate_finds_one_changed_bit(tmp_path, kind):
    name, count = TAMPERED[kind]
    exported = to(tmp_path / "out", write(tmp_path / "in", shards=1))
    file = tmp_path / "out/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[exported.plan.shards[0].starts[name] + 2] ^= 0x20
    file.write_bytes(raw)
    found = verify(exported.plan, tmp_path / "out")
    assert not found.holds
    assert getattr(found, count) >= 1
    assert found.names == [name.removesuffix("_scale_inv")]
    assert all(problem.remedy for problem in found.problems())


@pytest.mark.parametrize("precision", [POW2, NVFP4], ids=["deepseek", "modelopt"])
def test_the_certificate_finds_what_another_config_says(tmp_path, precision):
    """An engine reads codes as the config says: who changes a word there has another model of the same bytes."""
    exported = to(tmp_path / "out", write(tmp_path / "in", shards=2), precision)
    for name in exported.plan.texts:
        file = tmp_path / "out" / name
        text, said = file.read_text(), json.loads(file.read_text())
        file.write_text(json.dumps(said))  # the same in one line
        assert verify(exported.plan, tmp_path / "out").holds
        edits = [("ignore", "ignored"), ("weight_block", "weight_blocks"), ("total", "Total")]
        damaged = [*(text.replace(*edit) for edit in edits if edit[0] in text), text[:-9], "[]"]
        for other in damaged[:1] if "index" in name else damaged:  # without its index a folder cannot be opened
            file.write_text(other)
            found = verify(exported.plan, tmp_path / "out")
            assert (found.holds, found.files_wrong, found.names) == (False, 1, [name])
            assert found.problems()[0].what.endswith(f"{name}.")
        file.write_text(text)
    assert verify(exported.plan, tmp_path / "out").described == len(exported.plan.texts) > 1


def test_the_certificate_finds_a_file_that_takes_values_for_codes(tmp_path):
    """vLLM reads ModelOpt's own file where config.json says nothing."""
    exported = to(tmp_path / "out", write(tmp_path / "in"), preset("bf16_mixed"))
    assert verify(exported.plan, tmp_path / "out").holds
    (tmp_path / "out" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert verify(exported.plan, tmp_path / "out").names == ["hf_quant_config.json"]


def test_weights_without_values_are_copied(tmp_path):
    """Such as the experts of a rank that has none."""
    empty = {
        "model.layers.0.mlp.down_proj.weight": torch.empty(256, 0).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.empty(0, 256).bfloat16(),
        "model.layers.1.mlp.experts.down_proj": torch.empty(0, 256, 256).bfloat16(),
    }
    whole = {"model.layers.2.mlp.down_proj.weight": torch.randn(256, 256).bfloat16()}
    (tmp_path / "in").mkdir()
    save_file(empty | whole, tmp_path / "in" / "model.safetensors")
    exported = to(tmp_path / "out", tmp_path / "in")
    assert {*exported.plan.selection.quantized} == {*whole}
    assert verify(exported.plan, tmp_path / "out").holds
    assert {name: x.shape for name, x in load_file(tmp_path / "out/model.safetensors").items() if name in empty} == {
        name: x.shape for name, x in empty.items()
    }


def test_the_certificate_is_of_one_source_and_one_contract(tmp_path):
    exported = to(tmp_path / "out", write(tmp_path / "in"))
    other = to(tmp_path / "other", tmp_path / "in", FP32)
    with pytest.raises(PrecisionError, match="not an export of this source"):
        verify(other.plan, tmp_path / "out")
    (tmp_path / "out/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(PrecisionError, match="is missing"):
        verify(exported.plan, tmp_path / "out")
    (tmp_path / "fresh").mkdir()
    with pytest.raises(PrecisionError, match="no finished export"):
        verify(exported.plan, tmp_path / "fresh")


# ---------------------------------------------------------------------- memory

PEAK = """
import re, sys
from pathlib import Path
from nemo_fp8.export import HuggingFace, export, verify
from nemo_fp8.contract.presets import preset

def memory(name):
    return int(re.search(name + r":\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024

def go(source):
    p = preset("bf16_with_fp8_blockwise_mixed")
    exported = export(HuggingFace.open(source), source + "-fp8", p)
    assert verify(exported.plan, source + "-fp8").holds

go(sys.argv[1])  # whatever is loaded on first use is loaded now
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
go(sys.argv[2])
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """24 matrices of 8 MB: one of them, its codes and what quantizing and verifying hold, not all.

    glibc keeps large memory that was freed once it has seen some, so 6 to 12 matrices were measured of the same code.
    With its threshold set it keeps none, and 7 are measured, which is what is held.
    """
    one = torch.randn(2048, 2048).bfloat16()
    for name, count in (("small", 1), ("large", 24)):
        (tmp_path / name).mkdir()
        weights = {f"model.layers.{i}.mlp.down_proj.weight": one.clone() for i in range(count)}
        save_file(weights | {"lm_head.weight": one.clone()}, tmp_path / name / "model.safetensors")
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    held = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, env=held).stdout)
    matrix = one.numel() * 2
    assert grown < 8 * matrix < 24 * matrix


def test_sizes_of_the_source_are_those_of_the_test():
    assert FFN % 128 == HIDDEN % 128 == 0  # what the other tests take for granted
    assert Precision(rollout="fp8").weight_scale == "fp32"
