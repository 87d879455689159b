"""The command: tables that fit 80 columns, JSON, a page that stands alone, errors before the work."""

import json

import pytest
import typer
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
    (pasted,) = [line for line in lines if "keep=[" in line]
    assert pasted.startswith('first_layers=1, last_layers=1, keep=[r"re:')
    assert r"layers\.2\." in pasted


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


def test_the_page_stands_alone_and_shows_every_section(checkpoint, tmp_path, monkeypatch):
    _run(checkpoint, "--html", tmp_path / "report.html", monkeypatch=monkeypatch)
    text = (tmp_path / "report.html").read_text()
    parsed = Parsed(text)
    assert sum(tag == "svg" for tag, _ in parsed.tags) == 5  # four grids and the worst ten
    words = "".join(parsed.text)
    for title in (
        "Overview",
        "What to keep above 20 dB",
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
    assert {p["scaling"] for p in found.values()} == {"delayed", "tensorwise", "blockwise", "mxfp8"}


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
