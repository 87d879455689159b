"""One self-contained file: nothing loaded from elsewhere, everything escaped, colours that can be seen on both
grounds."""

import math
import re

import pytest
from support.pages import Parsed

from nemo_fp8.contract import SCALINGS
from nemo_fp8.contract.presets import PRESETS
from nemo_fp8.errors import PrecisionError
from nemo_fp8.report import figures, page
from nemo_fp8.report.page import Cell, Column, Page

EVIL = "<script>alert('&')</script>"


def _figure():
    with figures.drawing(6, 2) as (figure, axes):
        for line in figures.lines([("a", "blockwise"), ("b", "blockwise"), ("c", "mxfp8")]):
            axes[0, 0].plot([0, 1], [1, 2], **line.style)
        axes[0, 0].set_title(EVIL)
        figures.legend(figure, axes)
    return figure


def test_a_page_loads_nothing_and_every_text_is_escaped():
    built = Page(EVIL, EVIL)
    for _ in range(3):
        built.section(EVIL).heading(EVIL).text(EVIL).code(EVIL).figure(_figure(), EVIL)
    built.table((EVIL, Column(EVIL, hint=EVIL)), [(EVIL, Cell(EVIL, EVIL))], EVIL).table(("x",), [(1,)], fold=EVIL)
    parsed = Parsed(built.html())
    scripts = [tag for tag, _ in parsed.tags if tag == "script"]
    assert len(scripts) == 1
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert not attributes.keys() & {"src", "srcset", "action", "onclick"}
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", built.html())
    assert EVIL in "".join(parsed.text)


def test_numbers_are_formatted_sorted_by_value_and_missing_ones_marked():
    table = Page("t").table(
        ("name", Column("SNR", ".1f")), [("a", 31.66), ("b", math.inf), ("c", None), ("d", Cell("many", value=9))]
    )
    parsed = Parsed(table.html())
    assert parsed.cells == ["a", "31.7", "b", "∞", "c", "–", "d", "many"]
    values = [attributes.get("data-value") for tag, attributes in parsed.tags if tag == "td"][1::2]
    assert values == ["31.66", "Infinity", "", "9.0"]
    kinds = [attributes["data-sort"] for tag, attributes in parsed.tags if tag == "th"]
    assert kinds == ["text", "number"]


def test_what_is_lost_does_not_look_like_what_is_whole():
    """An SNR of minus infinity is a weight that is gone, and of infinity one that lost nothing."""
    parsed = Parsed(Page("t").table(("SNR",), [(-math.inf,), (math.inf,)]).html())
    assert parsed.cells == ["−∞", "∞"]
    values = [attributes.get("data-value") for tag, attributes in parsed.tags if tag == "td"]
    assert values == ["-Infinity", "Infinity"]


def test_figures_take_the_pages_colours_and_share_no_names():
    first, second = (f"<svg{part}" for part in Page("t").figure(_figure()).figure(_figure()).html().split("<svg")[1:])
    for svg in (first, second):
        assert not any(placeholder in svg for placeholder in (figures.INK, figures.MUTED, figures.RULE))
        assert "var(--ink)" in svg
        assert "var(--muted)" in svg
        assert "<text" in svg
    clips = [set(re.findall(r'clipPath id="([^"]+)"', svg)) for svg in (first, second)]
    assert clips[0]
    assert not clips[0] & clips[1]


def test_drawing_leaves_matplotlib_as_it_was():
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.to_svg(_figure())
    assert dict(matplotlib.rcParams) == before


def _luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(a, b):
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_on_the_light_and_on_the_dark_page():
    """WCAG: 3 for graphics, 4.5 for text."""
    papers = re.findall(r"--paper: (#\w{6})", page.STYLE)
    assert len(papers) == 2
    for recipe in ("bf16", *SCALINGS):
        assert all(_contrast(figures.color(recipe), paper) >= 3 for paper in papers), recipe
    for name in ("ink", "muted", "link"):
        for color, paper in zip(re.findall(rf"--{name}: (#\w{{6}})", page.STYLE), papers, strict=True):
            assert _contrast(color, paper) >= 4.5, name


def test_every_preset_has_a_colour_and_lines_of_one_recipe_differ():
    assert {figures.recipe_of(p) for p in PRESETS.values()} == set(figures.COLORS)
    styles = [line.style for line in figures.lines([("a", "mxfp8"), ("b", "mxfp8"), ("c", "bf16")])]
    assert styles[0]["color"] == styles[1]["color"] != styles[2]["color"]
    assert styles[0]["linestyle"] != styles[1]["linestyle"]
    assert styles[0]["marker"] != styles[1]["marker"]
    with pytest.raises(PrecisionError, match="blockwise"):
        figures.color("blokwise")


def test_without_matplotlib_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(PrecisionError, match=r"nemo-fp8\[report\]"), figures.drawing(1, 1):
        pass


def test_a_path_that_cannot_be_written(tmp_path):
    assert Page("t").write(tmp_path / "t.html").read_text().startswith("<!doctype html>")
    with pytest.raises(PrecisionError, match="Cannot write"):
        Page("t").write(tmp_path / "none" / "t.html")
