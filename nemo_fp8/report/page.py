"""Write an HTML file that contains everything it shows: no style sheet, script, font or image from elsewhere.

    page = Page("FP8 inspect", "llama-3-8b")
    page.section("Overview").text("Four recipes.").table(("recipe", Column("SNR dB", ".1f")), [("blockwise", 31.6)])
    page.figure(figure, "SNR by layer.").code("keep=['*.router']").write("report.html")

Every call appends to the page and returns it. All text is escaped. A click on a heading sorts a table. The page follows
the reader's light or dark setting, can be printed, and scrolls wide tables and figures sideways on a narrow screen. A
content security policy in the file forbids it to load anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from nemo_fp8.errors import PrecisionError

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --muted: #57606a; --rule: #d5dae0; --paper: #ffffff; --shade: #f3f5f7;
  --link: #0063a0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --muted: #a3acb6; --rule: #3a4048; --paper: #14171b; --shade: #1e2227; --link: #6cb6f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .5rem 0; max-width: 75ch; } a { color: var(--link); }
.subtitle, nav, figcaption, caption { color: var(--muted); }
nav a { margin-right: 1.2em; white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
caption { caption-side: bottom; text-align: left; padding: .4rem .6rem; font-size: .9em; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { background: var(--shade); font-weight: 600; vertical-align: bottom; }
th[data-sort] { cursor: pointer; }
th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td.long { overflow-wrap: anywhere; min-width: 14em; } td.short { white-space: nowrap; }
figure { margin: 1rem 0; } figcaption { font-size: .9em; max-width: 85ch; margin-top: .3rem; }
svg { display: block; height: auto; } svg text { font-family: inherit; }
pre { background: var(--shade); padding: .7rem .9rem; border-radius: 6px; font-size: .88em;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.chip { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--link); }
@media print { body { max-width: none; } .wide { overflow: visible; } }
"""

SCRIPT = """
document.querySelectorAll("th[data-sort]").forEach(head => head.onclick = () => {
  const body = head.closest("table").tBodies[0], down = head.ariaSort === "ascending" ? -1 : 1;
  const value = row => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
  const compare = (a, b) => {
    if (head.dataset.sort === "text") return down * a.localeCompare(b, "en", {numeric: true});
    if (a === "" || b === "") return (a === "") - (b === "");  // what is missing comes last
    return a === b ? 0 : down * (a - b);
  };
  [...body.rows].sort((a, b) => compare(value(a), value(b))).forEach(row => body.append(row));
  head.parentNode.querySelectorAll("th").forEach(
      h => h.ariaSort = h === head ? (down > 0 ? "ascending" : "descending") : null);
});
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, the format of its numbers, and a tooltip for the heading."""

    title: str
    format: str = "g"
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table with a patch of colour, or with a text other than its number."""

    text: str
    color: str = ""
    value: float | None = None


class Page:
    """A page. If it has more than two sections, they are listed at its top."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self._sections: list[str] = []
        self._body: list[str] = []

    def section(self, title: str) -> Page:
        """Start a section."""
        self._sections.append(title)
        return self._add(f'<h2 id="s{len(self._sections)}">{escape(title)}</h2>')

    def heading(self, title: str) -> Page:
        """Append a heading inside of a section."""
        return self._add(f"<h3>{escape(title)}</h3>")

    def text(self, text: str) -> Page:
        """Append a paragraph."""
        return self._add(f"<p>{escape(text)}</p>")

    def code(self, text: str) -> Page:
        """Append a block of text to copy and paste."""
        return self._add(f"<pre>{escape(text)}</pre>")

    def table(
        self, columns: Sequence[str | Column], rows: Iterable[Sequence[Any]], caption: str = "", fold: str = ""
    ) -> Page:
        """Append a table that a click on a heading sorts.

        Cells are texts, numbers, ``Cell`` or None. With ``fold`` the table is folded behind a line of that text.
        """
        heads = [c if isinstance(c, Column) else Column(c) for c in columns]
        body = [list(row) for row in rows]
        numeric = [any(_number(row[i]) is not None for row in body) for i in range(len(heads))]
        parts = ["<table>", f"<caption>{escape(caption)}</caption>" if caption else "", "<thead><tr>"]
        for head, number in zip(heads, numeric, strict=True):
            hint = f' title="{escape(head.hint)}"' if head.hint else ""
            kind = ("number", ' class="number"') if number else ("text", "")
            parts.append(f'<th scope="col" data-sort="{kind[0]}"{kind[1]}{hint}>{escape(head.title)}</th>')
        parts.append("</tr></thead><tbody>")
        for row in body:
            parts.append(
                "<tr>" + "".join(_cell(v, h, n) for v, h, n in zip(row, heads, numeric, strict=True)) + "</tr>"
            )
        table = f'<div class="wide">{"".join(parts)}</tbody></table></div>'
        return self._add(f"<details><summary>{escape(fold)}</summary>{table}</details>" if fold else table)

    def figure(self, figure: Any, caption: str = "") -> Page:
        """Append a matplotlib figure (see :func:`nemo_fp8.report.figures.drawing`) as inline SVG."""
        from nemo_fp8.report.figures import to_svg

        label = f'<div class="wide" role="img" aria-label="{escape(caption)}">' if caption else '<div class="wide">'
        under = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        return self._add(f"<figure>{label}{to_svg(figure, str(len(self._body)))}</div>{under}</figure>")

    def html(self) -> str:
        """Return the page as HTML."""
        links = "".join(f'<a href="#s{i}">{escape(title)}</a> ' for i, title in enumerate(self._sections, 1))
        return "\n".join(
            (
                '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                f"<title>{escape(self.title)}</title><style>{STYLE}</style></head><body>",
                f"<header><h1>{escape(self.title)}</h1>",
                f'<p class="subtitle">{escape(self.subtitle)}</p>' if self.subtitle else "",
                f"<nav>{links}</nav>" if len(self._sections) > 2 else "",
                "</header><main>",
                *self._body,
                f"</main><script>{SCRIPT}</script></body></html>\n",
            )
        )

    def write(self, path: str | Path) -> Path:
        """Write the page to a file; return its path. Raises PrecisionError if it cannot be written."""
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise PrecisionError(
                f"Cannot write {path}.", f"{error}.", "Give a path in a folder that exists and can be written."
            ) from error
        return Path(path)

    def _add(self, html: str) -> Page:
        self._body.append(html)
        return self


def _number(value: Any) -> float | None:
    value = value.value if isinstance(value, Cell) else value
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _cell(value: Any, column: Column, numeric: bool) -> str:
    number = _number(value)
    if isinstance(value, Cell):
        chip = f'<span class="chip" style="background:{escape(value.color)}"></span>' if value.color else ""
        text = chip + _breakable(value.text)
    elif value is None:
        text = "–"
    elif number is not None:
        text = f"{'−' * (number < 0)}∞" if math.isinf(number) else _plain(format(value, column.format))
    else:
        text = _breakable(str(value))
    kind = "long" if len(value.text if isinstance(value, Cell) else str(value)) > 24 else "short"
    if number is not None:
        return f'<td class="number" data-value="{str(number).replace("inf", "Infinity")}">{text}</td>'
    return f'<td class="number" data-value="">{text}</td>' if numeric else f'<td class="{kind}">{text}</td>'


def _plain(number: str) -> str:
    """Remove the sign of a number that was rounded to zero."""
    return number.removeprefix("-") if not number.strip("-0.") else number


def _breakable(text: str) -> str:
    """Return a name, escaped, that browsers may break after a dot."""
    return escape(text).replace(".", ".<wbr>")
