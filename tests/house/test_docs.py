"""Documents tell the truth: Python snippets run, commands run, generated pages are what the code generates, links lead
somewhere."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BIN = Path(sys.executable).parent
# Python that another environment runs: tests/bridge/test_page.py.
APART = {"bridge.md", "bridge_fp8_load.md"}
# Commands that are tested elsewhere, or by CI itself.
ELSEWHERE = ("make ", "git ", "pip ", "python3 ", ".venv/bin/pre-commit", "nemo ", "cd ")


def _blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def _ids(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_snippets_run(page, tmp_path, monkeypatch):
    """All of a page, top to bottom, in one folder: Python first, then the commands, which may read what it wrote."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    for snippet in _blocks(page, "python") if page.name not in APART else ():
        exec(compile(snippet, page.name, "exec"), namespace)
    for snippet in _blocks(page, "bash"):
        for line in snippet.splitlines():
            command = line.partition("  #")[0].strip()
            if command and not command.startswith(("#", *ELSEWHERE)):
                assert command.startswith("nemo-fp8 "), f"{page.name} shows {command!r}, which nothing tests"
                env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "80"}
                done = subprocess.run(shlex.split(command), capture_output=True, text=True, env=env, timeout=300)
                # 1 is an answer of "no", which a page may show; 2 is a wrong question.
                assert done.returncode in (0, 1), f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_site_shows_snippets_as_snippets():
    """mkdocs reads a fence with two words behind it as text, and what stands between two snippets as one."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools/site_pages.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    two_words = re.compile(r"^ *```\w+ .*$", re.MULTILINE)
    sources = {page: page.read_text() for page in PAGES}
    assert any(map(two_words.findall, sources.values()))  # else this test holds nothing
    left = {_ids(page): two_words.findall(site.on_page_markdown(text)) for page, text in sources.items()}
    assert not any(left.values()), left
    with pytest.raises(ValueError, match="left as text"):
        site.on_page_content("<p>```python te import torch</p>", SimpleNamespace(file=SimpleNamespace(src_uri="a.md")))


def test_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/make_docs.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
