"""The page of the quantizer's benchmark: one part for this processor's kernels, one for each other set of
instructions."""

from __future__ import annotations

import sys

import pytest
from support import ROOT

from nemo_fp8.numerics.kernels import build


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import quantize

    yield quantize
    for name in ("quantize", "pairs", "peers"):
        sys.modules.pop(name, None)


def test_a_part_is_replaced_and_the_others_stay(bench):
    about = {"command": "python benchmarks/quantize.py"}
    page = ""
    for isa in ("avx2", "", "plain", "avx2"):
        page = bench.merged(page, bench.page(about | {"date": f"of {isa or 'this'}"}, [], {}, isa), isa)
    titles = [line for line in page.splitlines() if line.startswith("# ")]
    assert titles == ["# Quantizing at memory speed", "# The kernels built for avx2", "# The kernels built for plain"]
    assert [page.count(f"- date: of {isa}") for isa in ("this", "avx2", "plain")] == [1, 1, 1]
    again = bench.merged(page, bench.page(about | {"date": "later"}, [], {}, ""), "")
    assert "of this" not in again
    assert again.count("- date: later") == 1
    assert again.partition("# The kernels built for avx2")[2] == page.partition("# The kernels built for avx2")[2]


def test_the_kernels_are_built_for_what_was_asked(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "MACHINE_FLAGS", build.MACHINE_FLAGS)
    names = {build._identity("cc")}
    for isa in build.OTHERS:
        bench.build_for(isa)
        assert (build.OTHERS[isa],) == build.MACHINE_FLAGS
        names.add(build._identity("cc"))
    assert len(names) == 1 + len(build.OTHERS)
