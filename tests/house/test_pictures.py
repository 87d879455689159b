"""Pictures are drawn from the records that lie beside the documents, and a record that changed asks for its picture
again."""

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "tools/make_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_of_its_record_as_it_is(pictures):
    stale = [
        name
        for name, (record, _) in pictures.PICTURES.items()
        if pictures.drawn_from(name) != pictures.fingerprint(record)
    ]
    assert not stale, "run: make docs"
    assert {path.stem for path in pictures.TARGET.glob("*.svg")} == {*pictures.PICTURES, "contract"}, (
        "contract.svg alone is drawn by hand"
    )


def test_a_record_that_changed_makes_its_picture_stale(pictures, tmp_path, monkeypatch):
    record, other = json.loads((pictures.RECORDS / "refit.json").read_text()), tmp_path / "refit.json"
    monkeypatch.setattr(pictures, "RECORDS", tmp_path)
    other.write_text(json.dumps(record | {"about": "another day"}))
    assert pictures.drawn_from("push") == pictures.fingerprint("refit.json"), "the figures are the same"
    other.write_text(json.dumps(record | {"copy_seconds": record["copy_seconds"] + 1e-6}))
    assert pictures.drawn_from("push") != pictures.fingerprint("refit.json")


def test_drawing_again_says_the_same_and_needs_nothing_from_elsewhere(pictures):
    for name in pictures.PICTURES:
        drawn, committed = (
            ElementTree.fromstring(svg) for svg in (pictures.draw(name), (pictures.TARGET / f"{name}.svg").read_text())
        )
        words = [[node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")] for tree in (drawn, committed)]
        assert words[0] == words[1], f"{name}: run make docs"
        assert "@import" not in pictures.draw(name)
        assert "url(http" not in pictures.draw(name)


def test_curves_and_accuracies_are_drawn_with_all_seeds(pictures):
    names = (
        "bf16_mixed",
        "bf16_with_fp8_mixed",
        "bf16_with_fp8_current_scaling_mixed",
        "bf16_with_fp8_blockwise_mixed",
        "bf16_with_mxfp8_mixed",
    )
    rows = [
        {"precision": name, "seed": seed, "losses": [5.0 / step + seed for step in range(1, 31)]}
        for name in names
        for seed in (1, 2)
    ]
    figure = pictures.loss(rows)
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["delayed", "tensorwise", "blockwise", "mxfp8"]
    # The end is the mean of the last ten steps, over both seeds; the band reaches from one seed's curve to the other's.
    end = sum(5.0 / step for step in range(21, 31)) / 10 + 1.5
    assert f"ends at {end:.3f}" in [text.get_text() for text in figure.axes[0].texts]
    high = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (high.max(), high.min()) == (pytest.approx(7.0), pytest.approx(end - 0.5))

    accuracy = {
        arm: {seed: {"0": 0.5, "10": end} for seed, end in ends.items()}
        for arm, ends in {"bf16-bf16": {"1": 0.7, "2": 0.8}, "fp8-fp8": {"1": 0.6, "2": 0.8}}.items()
    }
    words = [text.get_text() for text in pictures.rl({"validation_accuracy": accuracy}).axes[0].texts]
    assert words == ["BF16 on both sides, 75.0 %", "FP8 on both sides, 70.0 %"]
