"""The page of the quantizer's benchmark: one part for this processor's kernels, one for each other set of
instructions."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

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


def test_runs_of_several_processes_are_one(bench):
    """What two processes wrote is read as the pairs of one run, and as medians of what peers took."""
    first, second = (
        {"a/there": [bench.Pair(2.0, 1.0, disturbed), bench.Pair(3.0, 1.0, False)]} for disturbed in (False, True)
    )
    texts = [
        bench.record({}, [{"shape": (2, 3), "pairs": pairs, "peers": {"cast": {"ours": time}}}], {})
        for pairs, time in ((first, 1.0), (second, 2.0))
    ]
    ways = [json.loads(text)["2 x 3"] for text in texts]
    together = bench.read_back("2 x 3", {name: [told[name] for told in ways] for name in ways[0]})
    assert together["shape"] == (2, 3)
    assert together["pairs"] == {"a/there": first["a/there"] + second["a/there"]}
    assert together["peers"] == {"cast": {"ours": 1.5}}
    assert bench.share(together["pairs"]["a/there"]) == 3.0  # of 2, 3 and 3: one of the four was disturbed


def test_several_processes_measure_what_one_does(bench, capsys, monkeypatch, tmp_path):
    path, what = tmp_path / "found.json", "NVFP4 1x16, given amax"
    options = ["--quick", "--rounds", "1", "--only", what, "--processes", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["quantize.py", *options])
    bench.main()
    found = json.loads(path.read_text())
    assert len(found["4096 x 4096"][f"{what}/there"]) == 2
    assert f"| {what} |" in capsys.readouterr().out


def test_the_kernels_are_built_for_what_was_asked(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "MACHINE_FLAGS", build.MACHINE_FLAGS)
    names = {build._identity("cc")}
    for isa in build.OTHERS:
        bench.build_for(isa)
        assert (build.OTHERS[isa],) == build.MACHINE_FLAGS
        names.add(build._identity("cc"))
    assert len(names) == 1 + len(build.OTHERS)


def test_the_page_holds_the_memory_of_every_way_and_of_nvfp4_what_its_bytes_are(bench, monkeypatch, tmp_path):
    written = json.loads(bench.RECORD.read_text())["memory"]
    assert list(written) == list(bench.MEMORY)
    assert "\n".join(bench.memory_table(written)) in bench.PAGE.read_text()
    assert written["kernel"] == pytest.approx(1 / 2, abs=0.001)
    assert written["NVFP4 kernel"] == pytest.approx((1 / 2 + 1 / 16) / 2, abs=0.001)
    for name in ("PAGE", "RECORD"):
        monkeypatch.setattr(bench, name, Path(shutil.copy(getattr(bench, name), tmp_path)))
    before = bench.PAGE.read_text(), json.loads(bench.RECORD.read_text())
    bench.write_memory(written | {"kernel": 0.75})
    assert bench.PAGE.read_text() == before[0].replace("| kernel | 0.50 |", "| kernel | 0.75 |")
    assert json.loads(bench.RECORD.read_text()) == before[1] | {"memory": written | {"kernel": 0.75}}
    measured = bench.peak_memory((2048, 2048), ["NVFP4 kernel"])
    assert measured == {"NVFP4 kernel": pytest.approx(0.28125, abs=0.05)}
