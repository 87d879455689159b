"""The command: tables that fit 80 columns, JSON, a page that stands alone, errors before the work."""

import json
import re

import pytest
import torch
import typer
from safetensors.torch import save_file
from support.pages import Parsed
from support.tiny_llama import LAYERS
from typer.testing import CliRunner

from nemo_fp8.cli.inspect import DEFAULT, SHORT, inspect
from nemo_fp8.errors import PrecisionError

app = typer.Typer()
app.command()(inspect)


def _run(*arguments, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(done.exception, PrecisionError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def test_tables_fit_80_columns_and_say_what_to_keep(checkpoint, monkeypatch):
    done = _run(checkpoint, monkeypatch=monkeypatch)
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines if "keep=[" not in line)
    for label in DEFAULT:
        assert any(line.startswith(label) for line in lines)
    of_tensorwise, of_nvfp4 = [line for line in lines if "keep=[" in line]
    assert of_tensorwise.startswith('first_layers=1, last_layers=1, keep=[r"re:')
    assert r"layers\.2\." in of_tensorwise
    assert of_nvfp4.startswith('keep=[r"re:')
    assert "10 dB (nvfp4)" in done.stdout
    (turned,) = [line for line in lines if line.startswith("mxfp8") and "a cast by rows" in line]
    assert 0 < float(turned.split()[-3]) < 0.01
    assert sum("the forward's codes" in line for line in lines) == 3


def test_json_is_json_and_holds_every_tensor(checkpoint, monkeypatch):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    done = _run(
        checkpoint, "--json", "--precision", "blockwise", "--precision", "mxfp8", "--snr", "25", monkeypatch=monkeypatch
    )
    found = json.loads(done.stdout, parse_constant=refuse)
    assert found["precisions"].keys() == {"blockwise", "mxfp8"}
    measured = [tensor for tensor in found["tensors"] if tensor["precisions"]]
    assert len(measured) == 7 * LAYERS
    assert found["keep"]["blockwise"]["keep"] == []
    assert found["snr"] == 25


def test_json_is_json_where_a_weight_is_not_finite(tmp_path, monkeypatch):
    """jq and browsers refuse the NaN that Python's json writes."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    weights = {"model.layers.0.mlp.up_proj.weight": torch.full((128, 128), torch.nan).bfloat16()}
    save_file(weights | {"model.layers.0.mlp.down_proj.weight": torch.zeros(128, 128)}, tmp_path / "model.safetensors")
    done = _run(tmp_path / "model.safetensors", "--json", monkeypatch=monkeypatch)
    json.loads(done.stdout, parse_constant=refuse)


def test_the_page_stands_alone_and_shows_every_section(checkpoint, tmp_path, monkeypatch):
    _run(checkpoint, "--html", tmp_path / "report.html", monkeypatch=monkeypatch)
    text = (tmp_path / "report.html").read_text()
    parsed = Parsed(text)
    assert sum(tag == "svg" for tag, _ in parsed.tags) == 6  # four grids, the distances and the worst ten
    words = "".join(parsed.text)
    for title in (
        "Overview",
        "What to keep above 20 dB (tensorwise, blockwise, mxfp8), 10 dB (nvfp4)",
        "What the backward multiplies by",
        "The worst ten tensors",
        "Weights by layer and role",
        "Not quantized",
    ):
        assert title in words
    assert r"layers\.2\.(mlp\.down_proj|mlp\.linear_fc2)" in words
    assert not any(attributes.get("src") for _, attributes in parsed.tags)
    assert "://" not in text.replace("http://www.w3.org/", "")  # names of XML, not addresses


def test_every_short_name_and_yaml_files(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("format: e4m3\nscaling: blockwise\nkeep: ['*.q_proj']\n")
    names = [*SHORT, tmp_path / "mine.yaml", "bf16-with-fp8-blockwise-mixed"]
    done = _run(checkpoint, "--json", *(a for n in names for a in ("--precision", n)), monkeypatch=monkeypatch)
    found = json.loads(done.stdout)["precisions"]
    assert found.keys() == {*SHORT, "mine", "bf16-with-fp8-blockwise-mixed"}
    assert found["mine"]["keep"] == ["*.q_proj"]
    assert {p["scaling"] for p in found.values()} == {"delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"}


def test_the_distance_of_the_backward_is_in_table_json_and_page(checkpoint, tmp_path, monkeypatch):
    chosen = ("--precision", "nvfp4", "--precision", "nvfp4-1x16")
    page = tmp_path / "page.html"
    text = _run(checkpoint, *chosen, "--html", page, monkeypatch=monkeypatch).stdout
    found = json.loads(_run(checkpoint, *chosen, "--json", monkeypatch=monkeypatch).stdout)
    turned = [t["precisions"]["nvfp4-1x16"]["transposition"] for t in found["tensors"] if t["precisions"]]
    square = [t["precisions"]["nvfp4"]["transposition"] for t in found["tensors"] if t["precisions"]]
    assert len(turned) == 7 * LAYERS
    # Gaussian weights, but for the down projection that was damaged.
    assert sum(0.128 < t["distance"] < 0.133 and 75 < t["differ_percent"] < 81 for t in turned) == 7 * LAYERS - 1
    assert all((t["distance"], t["gain"], t["differ_percent"], t["cosine"]) == (0, 0, 0, 1) for t in square)
    (line,) = [line for line in text.splitlines() if "a cast by rows" in line]
    assert line.startswith("nvfp4-1x16")
    assert "13." in line
    assert "All distances, by layer and role" in "".join(Parsed(page.read_text()).text)


def test_the_distance_that_a_rule_makes_is_in_table_and_page(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "ruled.yaml").write_text(
        "{format: e4m3, scaling: blockwise, weight_block: 1x16, modules: [['*.linear_fc1', nvfp4]]}"
    )
    (tmp_path / "square.yaml").write_text(
        "{format: e4m3, scaling: blockwise, modules: [['*.linear_fc1', nvfp4], ['*.linear_fc2', tensorwise]]}"
    )
    chosen = ("--precision", tmp_path / "ruled.yaml")
    page, words = tmp_path / "page.html", "by rules: a cast by rows or the forward's codes"
    text = _run(checkpoint, *chosen, "--html", page, monkeypatch=monkeypatch).stdout
    assert "backward multiplies by" in text
    (line,) = [line for line in text.splitlines() if "by rules: a cast by rows" in line]  # a narrow table breaks it
    assert 2 < float(line.split()[-3]) < 8  # the distance in % of all weights together, of which some have none
    shown = "".join(Parsed(page.read_text()).text)
    assert words in shown
    assert re.search("by rules: E2M1 with E4M3 scales, .* or E4M3 with power-of-2 scales", shown), "how it is stored"
    text = _run(checkpoint, "--precision", tmp_path / "square.yaml", monkeypatch=monkeypatch).stdout
    assert "backward multiplies by" not in text, "rules whose backward reads the forward's codes have no distance"


def test_recipes_whose_backward_reads_the_forwards_codes_have_no_picture_of_distances(
    checkpoint, tmp_path, monkeypatch
):
    page = tmp_path / "page.html"
    text = _run(checkpoint, "--precision", "blockwise", "--html", page, monkeypatch=monkeypatch).stdout
    assert "backward multiplies by" not in text
    words = "".join(Parsed(page.read_text()).text)
    assert "What the backward multiplies by" in words
    assert "All distances" not in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--precision", "blokwise"), "Did you mean 'blockwise'"),
        (("--precision", "none.yaml"), "no file"),
        (("--precision", "bf16_mixed"), "no FP8"),
        (("--html", "/nowhere/report.html"), "Cannot write"),
    ],
)
def test_a_wrong_question_is_refused_with_a_remedy(checkpoint, monkeypatch, arguments, words):
    with pytest.raises(PrecisionError, match=words):
        _run(checkpoint, *arguments, monkeypatch=monkeypatch)
