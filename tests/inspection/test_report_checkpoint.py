"""Checkpoints are streamed, FP8 ones are dequantized, and damage is said, never measured."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_llama import llama, write_shards

from nemo_fp8.contract import Operand
from nemo_fp8.errors import PrecisionError
from nemo_fp8.numerics import quantize
from nemo_fp8.storage.safetensors import INDEX, Checkpoint

TENSORS = llama()


def _read(path):
    found = Checkpoint.open(path)
    return {
        name: torch.stack(list(found.matrices(name))).squeeze(0)
        for name, entry in found.entries.items()
        if len(entry.shape) > 1
    }


@pytest.mark.parametrize("index", [True, False])
def test_shards_and_a_single_file_give_every_tensor_bit_for_bit(tmp_path, index):
    save_file(TENSORS, tmp_path / "one.safetensors")
    for path in (write_shards(tmp_path / "shards", TENSORS, index=index), tmp_path / "one.safetensors"):
        read = _read(path)
        assert read.keys() == {name for name, x in TENSORS.items() if x.dim() > 1}
        assert all(torch.equal(x, TENSORS[name]) for name, x in read.items())


def test_a_stack_of_experts_comes_matrix_by_matrix(tmp_path):
    stack = torch.randn(3, 64, 128)
    save_file({"model.layers.0.mlp.experts.down_proj": stack}, tmp_path / "moe.safetensors")
    matrices = list(Checkpoint.open(tmp_path / "moe.safetensors").matrices("model.layers.0.mlp.experts.down_proj"))
    assert [m.shape for m in matrices] == [(64, 128)] * 3
    assert torch.equal(torch.stack(matrices), stack)


CASTS = {
    "128x128": (Operand("e4m3", (128, 128), "fp32"), "weight_scale_inv"),
    "MX": (Operand("e4m3", (1, 32), "e8m0"), "weight_scale"),
    "tensor": (Operand("e5m2", None, "fp32"), "weight_scale"),
}


@pytest.mark.parametrize("kind", CASTS)
def test_fp8_weights_come_back_as_the_values_they_stand_for(tmp_path, kind):
    """Ragged shape; the scales lie in another shard than the codes."""
    operand, name = CASTS[kind]
    q = quantize(torch.randn(200, 320), operand)
    scale = q.scale_inv.view(torch.uint8) if kind == "MX" else q.scale_inv
    folder = write_shards(tmp_path / "fp8", {"a.weight": q.data, f"a.{name}": scale}, count=2)
    (found,) = Checkpoint.open(folder).matrices("a.weight")
    assert torch.equal(found, q.dequantize_reference())


def test_scales_of_rows(tmp_path):
    codes, scale = torch.randn(48, 64).to(torch.float8_e4m3fn), torch.rand(48, 1) + 0.5
    save_file({"a.weight": codes, "a.weight_scale": scale}, tmp_path / "rows.safetensors")
    (found,) = Checkpoint.open(tmp_path / "rows.safetensors").matrices("a.weight")
    assert torch.equal(found, codes.float() * scale)


def test_codes_without_scales_or_with_strange_ones_are_refused(tmp_path):
    codes = torch.randn(128, 256).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes}, tmp_path / "none.safetensors")
    save_file({"a.weight": codes, "a.weight_scale": torch.ones(3, 5)}, tmp_path / "odd.safetensors")
    for file, words in (("none", "has no scale"), ("odd", r"scales of shape \(3, 5\)")):
        with pytest.raises(PrecisionError, match=words):
            list(Checkpoint.open(tmp_path / f"{file}.safetensors").matrices("a.weight"))


UNCLEAR = {
    "two scales": ({"a.weight_scale_inv": torch.ones(1, 2), "a.weight_scale": torch.ones(1, 2)}, "has two scales"),
    "codes read as numbers": ({"a.weight": torch.ones(128, 256), "a.weight_scale": torch.ones(1, 2)}, "is F32 and has"),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_a_weight_of_which_no_file_says_how_it_is_scaled_is_refused(tmp_path, kind):
    changed, words = UNCLEAR[kind]
    codes = torch.randn(128, 256).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale_inv": torch.ones(1, 2)}, tmp_path / "good.safetensors")
    assert len([*Checkpoint.open(tmp_path / "good.safetensors").matrices("a.weight")]) == 1
    save_file({"a.weight": codes} | changed, tmp_path / "unclear.safetensors")
    with pytest.raises(PrecisionError, match=words):
        Checkpoint.open(tmp_path / "unclear.safetensors")


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2"])
@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_four_bit_codes_whose_scale_was_never_written_are_refused(tmp_path, part, factor):
    """Times zero they are a weight of zeros, and exports and measurements of it are flawless. Codes of zero, whose sign
    is a bit, may have any scale."""
    codes = torch.randint(0, 256, (4, 32), dtype=torch.uint8)
    codes[0] = 0x80
    whole = {
        "a.weight": codes,
        "a.weight_scale": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.tensor(0.5),
    }
    scale = whole[f"a.{part}"].float()
    if scale.dim():
        scale[0] *= factor
    for harmless in (whole, whole | {f"a.{part}": scale.to(whole[f"a.{part}"].dtype)}):
        save_file(harmless, tmp_path / "fp4.safetensors")
        assert len([*Checkpoint.open(tmp_path / "fp4.safetensors").matrices("a.weight")]) == 1
    save_file(whole | {f"a.{part}": (scale * factor).to(whole[f"a.{part}"].dtype)}, tmp_path / "fp4.safetensors")
    with pytest.raises(PrecisionError, match=r"12 of the 16 scales of a\.weight are zero or negative"):
        list(Checkpoint.open(tmp_path / "fp4.safetensors").matrices("a.weight"))


def _index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b.safetensors"]
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, shard):
    save_file({"x.weight": torch.ones(2, 2)}, tmp_path / "secret.safetensors")
    folder = write_shards(tmp_path / "model", TENSORS)
    _index(folder, lambda names: names.update({"x.weight": shard}))
    with pytest.raises(PrecisionError, match="outside of its folder"):
        Checkpoint.open(folder)


def test_links_inside_the_folder_may(tmp_path):
    """Hugging Face's cache is made of links to another folder."""
    folder = write_shards(tmp_path / "blobs", TENSORS)
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert _read(linked).keys() == _read(folder).keys()


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-1000])


def _garbage(file):
    file.write_bytes(bytes(range(256)) * 8)


def _twice(folder):
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    held = load_file(second)
    save_file(held | {name: x + 1 for name, x in load_file(first).items()}, second)


def _named_twice(folder):
    text = (folder / INDEX).read_text()
    (name, shard), *_ = json.loads(text)["weight_map"].items()
    (folder / INDEX).write_text(text.replace(f'"{name}"', f'"{name}": "{shard}", "{name}"'))


DAMAGE = {
    "truncated": (lambda folder: _truncate(sorted(folder.glob("*.safetensors"))[1]), "damaged"),
    "garbage": (lambda folder: _garbage(sorted(folder.glob("*.safetensors"))[1]), "damaged"),
    "empty": (lambda folder: sorted(folder.glob("*.safetensors"))[1].write_bytes(b""), "damaged"),
    "missing shard": (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "is missing"),
    "missing tensor": (
        lambda folder: _index(folder, lambda n: n.update({"more.weight": next(iter(n.values()))})),
        "does not hold more",
    ),
    "a tensor in two shards": (lambda folder: _twice(folder), "keep the one that comes last"),
    "a name twice in the index": (lambda folder: _named_twice(folder), "is in it twice"),
    "index is no JSON": (lambda folder: (folder / INDEX).write_text("{"), "cannot be read"),
    "index is a list": (lambda folder: (folder / INDEX).write_text("[1]"), "cannot be read"),
    "index without a map": (lambda folder: (folder / INDEX).write_text('{"weight_map": 3}'), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_said_with_a_remedy(tmp_path, kind):
    folder = write_shards(tmp_path / "model", TENSORS)
    harm, words = DAMAGE[kind]
    harm(folder)
    with pytest.raises(PrecisionError, match=words) as error:
        Checkpoint.open(folder)
    assert error.value.problems[0].remedy


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"PK")
    for path, words in (
        (tmp_path / "none", "no checkpoint"),
        (tmp_path / "empty", "no safetensors"),
        (tmp_path / "model.bin", "damaged"),
    ):
        with pytest.raises(PrecisionError, match=words):
            Checkpoint.open(path)
    write_shards(tmp_path / "two", TENSORS, index=False)
    save_file(TENSORS, tmp_path / "two" / "consolidated.safetensors")
    with pytest.raises(PrecisionError, match=r"is in .* and in"):
        Checkpoint.open(tmp_path / "two")


PEAK = """
import re, sys
from nemo_fp8.contract.presets import preset
from nemo_fp8.inspection.measure import inspect_checkpoint

def memory(name):
    return int(re.search(name + r":\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024

recipes = {"b": preset("bf16_with_fp8_blockwise_mixed"), "t": preset("bf16_with_fp8_tensorwise_mixed")}
inspect_checkpoint(sys.argv[1], recipes)  # whatever is loaded on first use is loaded now
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
inspect_checkpoint(sys.argv[2], recipes)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Peak memory, mapped pages included, of a checkpoint of 24 matrices: some matrices, not all of them."""
    one = torch.randn(2048, 2048).bfloat16()
    save_file({f"layers.{i}.fc1.weight": one.clone() for i in range(24)}, tmp_path / "large.safetensors")
    save_file({"layers.0.fc1.weight": one}, tmp_path / "small.safetensors")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        PEAK,
        tmp_path / "small.safetensors",
        tmp_path / "large.safetensors",
    ]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    matrix = one.numel() * 2
    assert grown < 64 * 2**20 + 8 * matrix < 24 * matrix
