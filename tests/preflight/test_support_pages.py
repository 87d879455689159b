"""The pages on support and findings say what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from nemo_fp8.findings import RULES
from nemo_fp8.preflight.support import NEEDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "maker"), [("support.md", "support"), ("lint.md", "lint")])
def test_pages_are_what_the_code_makes(page: str, maker: str) -> None:
    spec = importlib.util.spec_from_file_location("make_docs_support", ROOT / "tools/make_docs_support.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / page).read_text() == getattr(module, maker)(), "run tools/make_docs.py"


def test_nothing_is_left_out() -> None:
    support, lint = ((ROOT / "docs" / page).read_text() for page in ("support.md", "lint.md"))
    assert all(f"### `{code}`" in lint for code in RULES)
    assert all(need.why.replace("|", "\\|") in support for need in NEEDS if need.way != "nemo_fp8's emulation")
