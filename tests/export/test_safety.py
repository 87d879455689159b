"""A checkpoint from anywhere is only data: nothing of it runs, leads elsewhere, or is believed for its size."""

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file
from support.small_models import content, tensors, write

from nemo_fp8 import PrecisionError, preset
from nemo_fp8.export import HuggingFace, export

PRECISION = preset("bf16_with_fp8_blockwise_mixed")
SHARD, INDEX = "model-00001-of-00003.safetensors", "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path):
    write(tmp_path / "elsewhere", tensors(layers=1), layers=1)
    return write(tmp_path / "source", tensors(layers=1), layers=1)


def refused(tmp_path, source, words):
    with pytest.raises(PrecisionError, match=words) as error:
        export(HuggingFace.open(source), tmp_path / "out", PRECISION)
    assert all(problem.remedy for problem in error.value.problems)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".safetensors"]


@pytest.mark.parametrize(
    "shard", ["../elsewhere/" + SHARD, "{elsewhere}/" + SHARD, "x/../../elsewhere/" + SHARD, "..\\elsewhere\\" + SHARD]
)
def test_an_index_cannot_leave_its_folder(tmp_path, source, shard):
    index = json.loads((source / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = shard.format(elsewhere=tmp_path / "elsewhere")
    (source / INDEX).write_text(json.dumps(index))
    refused(tmp_path, source, "outside of its folder")


@pytest.mark.parametrize("name", [SHARD, "config.json", "tokenizer.json"])
def test_a_link_cannot_leave_the_folder(tmp_path, source, name):
    """What a link leads to would be published: think of tokenizer.json -> ~/.ssh/id_rsa."""
    (source / name).unlink()
    (source / name).symlink_to(tmp_path / "elsewhere" / name)
    refused(tmp_path, source, r"is a link to .*, outside of the folder")


def test_a_folder_of_links_cannot_either(tmp_path, source):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/secret").write_text("")
    (source / "additional_chat_templates").symlink_to(tmp_path / "templates")
    refused(tmp_path, source, "outside of the folder")


def test_links_inside_and_those_of_hugging_faces_cache_may(tmp_path, source):
    """hub/models--x/snapshots/REVISION/file -> ../../blobs/HASH."""
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(source.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    export(HuggingFace.open(snapshot), tmp_path / "out", PRECISION)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert content(tmp_path / "out")["tokenizer.json"] == b"{}"
    (tmp_path / "link").symlink_to(snapshot)  # a folder that is called by a link is the user's own
    export(HuggingFace.open(tmp_path / "link"), tmp_path / "again", PRECISION)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickles_are_refused(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(pickle.dumps(Bomb()))
    for path in (tmp_path / "model", tmp_path / "model" / name):
        with pytest.raises(PrecisionError, match="pickled weights") as error:
            HuggingFace.open(path)
        assert "save_pretrained" in error.value.problems[0].remedy
    assert not (tmp_path / "ran").exists()


def header_of(file):
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def forge(file, change):
    header, data = header_of(file)
    change(header, next(name for name in header if name.endswith("weight")))
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


FORGED = {
    "a shape that is larger than its bytes": lambda h, n: h[n].update(shape=[2**20, 2**20]),
    "a shape that overflows": lambda h, n: h[n].update(shape=[2**62, 8]),
    "a negative shape": lambda h, n: h[n].update(shape=[-1, 256]),
    "bytes behind the end": lambda h, n: h[n].update(data_offsets=[h[n]["data_offsets"][0], 10**12]),
    "bytes before the beginning": lambda h, n: h[n].update(data_offsets=[-8, h[n]["data_offsets"][1]]),
    "bytes of another tensor": lambda h, n: h.update({"twin": h[n]}),
    "a hole": lambda h, n: h.pop(n),
    "no type": lambda h, n: h[n].update(dtype="F13"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_headers_are_not_believed(tmp_path, source, kind):
    forge(source / SHARD, FORGED[kind])
    refused(tmp_path, source, "damaged|does not hold")


@pytest.mark.parametrize("length", [2**63, 10**11, 200 * 2**20, 0])
def test_nor_is_the_length_of_a_header(tmp_path, source, length):
    raw = (source / SHARD).read_bytes()
    (source / SHARD).write_bytes(struct.pack("<Q", length) + raw[8:])
    refused(tmp_path, source, "damaged")


@pytest.mark.parametrize("text", ["{", "[1]", "null", "\x00\x01"])
def test_a_config_that_is_none(tmp_path, source, text):
    (source / "config.json").write_text(text)
    refused(tmp_path, source, "cannot be read|holds no mapping")


def test_what_is_quantized_in_another_way(tmp_path, source):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    refused(tmp_path, source, "quantized already, with 'gptq'")


@pytest.mark.parametrize(("said", "word"), [
    ({"quantization_config": "gptq"}, "quantized already, with 'gptq'"),
    ({"quantization_config": ["fp8"]}, "quantized already, with"),
    ({"num_attention_heads": "four"}, "num_attention_heads in config.json is 'four'"),
    ({"num_hidden_layers": "3"}, "num_hidden_layers in config.json is '3'"),
    ({"num_key_value_heads": [2, 2, 2]}, "num_key_value_heads in config.json"),
])  # fmt: skip
def test_a_config_that_says_something_else_in_place_of_a_size(tmp_path, source, said, word):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | said))
    refused(tmp_path, source, word)


def test_what_the_index_leaves_out_is_said(tmp_path, source):
    """A tensor that a shard holds and no index lists is no part of the checkpoint, and does not vanish in silence."""
    index = source / INDEX
    listed = json.loads(index.read_text())
    name = "model.layers.0.mlp.down_proj.weight"
    index.write_text(json.dumps(listed | {"weight_map": {n: f for n, f in listed["weight_map"].items() if n != name}}))
    opened = HuggingFace.open(source)
    assert name not in opened.tensors
    assert f"1 tensors in its files are left out, {name} among them" in " ".join(opened.notes)


def test_a_layer_of_any_number_ends(tmp_path):
    for number in (10**20, "9" * 5000):
        name = f"model.layers.{number}.mlp.up_proj.weight"
        save_file({name: torch.ones(128, 128, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
        with pytest.raises(PrecisionError, match="would be quantized"):
            export(HuggingFace.open(tmp_path), tmp_path / "out", PRECISION)


def test_weights_that_are_no_numbers(tmp_path):
    weights = tensors(layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = torch.zeros(weights[name].shape, dtype=torch.int32)
    refused(tmp_path, write(tmp_path / "in", weights, layers=1), "has elements of type I32")
