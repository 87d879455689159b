"""Reading torch_dist checkpoints: what torch's own writer wrote comes back, and nothing that lies in one runs or leads
elsewhere."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8 import PrecisionError
from nemo_fp8.experiments.stories import ByteTokenizer
from nemo_fp8.storage.torch_dist import INDEX, TorchDist, layers_of
from nemo_fp8.train import byte_tokenizer

STACK = "module.decoder.layers.mlp.linear_fc2.weight"
EXPERTS = "module.decoder.layers.mlp.experts.experts.linear_fc2.weight"


@pytest.fixture
def written(tmp_path):
    """A checkpoint by torch's own writer, and what is in it."""
    draws = torch.Generator().manual_seed(0)
    tensors = {
        "module.embedding.word_embeddings.weight": torch.randn(16, 8, generator=draws).bfloat16(),
        STACK: torch.randn(3, 8, 4, generator=draws).bfloat16(),
        EXPERTS: torch.randn(3, 2, 8, 4, generator=draws),
        "optimizer.state": torch.randn(5, generator=draws),
    }
    dcp.save(tensors, checkpoint_id=tmp_path / "weights", no_dist=True)
    return tmp_path / "weights", tensors


def test_what_torch_wrote_comes_back(written):
    folder, tensors = written
    found = TorchDist.open(folder, "module.")
    assert "optimizer.state" not in found.tensors
    for name in tensors.keys() - {"optimizer.state"}:
        assert torch.equal(found.read(name.removeprefix("module.")), tensors[name])
    assert torch.equal(found.read(STACK.removeprefix("module."), (2,)), tensors[STACK][2])
    assert torch.equal(found.read(EXPERTS.removeprefix("module."), (1, 1)), tensors[EXPERTS][1, 1])


def test_stacks_have_the_names_of_their_layers_and_experts(written):
    places = dict(layers_of(TorchDist.open(written[0], "module.").tensors))
    assert places["decoder.layers.2.mlp.linear_fc2.weight"] == (2,)
    assert places["decoder.layers.1.mlp.experts.0.linear_fc2.weight"] == (1, 0)
    assert places["embedding.word_embeddings.weight"] == ()


class Bomb:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("inside", [False, True])
def test_a_pickle_in_the_index_does_not_run(written, tmp_path, monkeypatch, inside):
    folder, tensors = written
    monkeypatch.chdir(tmp_path)
    index = pickle.loads((folder / INDEX).read_bytes())
    index.planner_data = Bomb()
    (folder / INDEX).write_bytes(pickle.dumps(index if inside else Bomb()))
    if inside:
        assert torch.equal(TorchDist.open(folder).read(STACK), tensors[STACK])
    else:
        with pytest.raises(PrecisionError, match="cannot be read"):
            TorchDist.open(folder)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / INDEX).read_bytes())  # the bomb is one
    assert (tmp_path / "ran").exists()


def change(folder, how):
    """The index, with one thing changed about every place where bytes lie."""
    index = pickle.loads((folder / INDEX).read_bytes())
    for place in index.storage_data.values():
        how(place)
    (folder / INDEX).write_bytes(pickle.dumps(index))


@pytest.mark.parametrize("path", ["../elsewhere/x.distcp", "/etc/passwd", "a/../../x", "..\\x", "link/x.distcp"])
def test_an_index_cannot_leave_its_folder(written, tmp_path, path):
    folder, _ = written
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.distcp").write_bytes(bytes(10**5))
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    change(folder, lambda place: setattr(place, "relative_path", path))
    with pytest.raises(PrecisionError, match="outside of its folder"):
        TorchDist.open(folder)


WRONG = {
    "beyond the end": lambda place: setattr(place, "offset", 10**9),
    "before the beginning": lambda place: setattr(place, "offset", -5),
    "too few bytes": lambda place: setattr(place, "length", 3),
    "too many": lambda place: setattr(place, "length", 10**12),
    "another file": lambda place: setattr(place, "relative_path", "missing.distcp"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_places_are_not_believed(written, kind):
    change(written[0], WRONG[kind])
    with pytest.raises(PrecisionError, match="does not hold the part"):
        TorchDist.open(written[0])


def test_damaged_bytes_are_said(written):
    folder, _ = written
    (file,) = folder.glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(PrecisionError, match="are damaged"):
        TorchDist.open(folder).read(STACK)


# ---------------------------------------------------------------------- the byte tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in byte_tokenizer.files().items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_hugging_faces_byte_tokenizer_is_ours(tokenizer, text):
    ours = ByteTokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == ours.text_to_ids(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == ours.ids_to_text(ids)


def test_its_special_tokens_are_ours(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == ByteTokenizer.vocab_size
