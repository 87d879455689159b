"""How much of the package runs between a call of a user's and its result, by ``tools/road.py``."""

import importlib.util
import re
import subprocess
import sys

import pytest
from support import ROOT

TOOL = ROOT / "tools" / "road.py"
_SPEC = importlib.util.spec_from_file_location("road", TOOL)
road = importlib.util.module_from_spec(_SPEC)
sys.modules["road"] = road  # where dataclasses look for it
_SPEC.loader.exec_module(road)


def _table(name):
    """The rows of a road: file -> (lines called, lines in all), and the total as the last."""
    done = subprocess.run([sys.executable, TOOL, name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^(\S.*?)\s+([\d,]+)\s+([\d,]+)$", done.stdout, re.MULTILINE)
    return {file: tuple(int(number.replace(",", "")) for number in numbers) for file, *numbers in rows}


def test_only_what_was_called_counts(tmp_path, monkeypatch):
    (tmp_path / "used.py").write_text(
        "def table():\n    return {}\n\n\nROWS = table()\n\n\n"
        "def called(n):\n    return [\n        double(i)\n        for i in range(n)\n    ]\n\n\n"
        "def double(i):\n    return 2 * i\n\n\ndef never():\n    raise AssertionError\n"
    )
    (tmp_path / "unused.py").write_text("def other():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = road.Seen(tmp_path)
    with seen.watching():
        import unused  # noqa: F401
        import used

        used.called(3)
    found = seen.files()
    assert {file: {code.co_name for code in codes} - {"<listcomp>"} for file, codes in found.items()} == {
        "used.py": {"called", "double"}
    }
    assert road.lines_of(found["used.py"]) == 5 + 2


def test_the_road_of_a_command():
    rows = _table("doctor")
    *files, total = rows
    assert files[0] == "cli/__init__.py"
    assert "preflight/answers.py" in files
    assert "moved.py" not in files
    assert total == f"{len(files)} files"
    for column in (0, 1):
        assert rows[total][column] == sum(rows[file][column] for file in files)
    assert all(0 < called < whole for called, whole in rows.values())


@pytest.mark.slow
def test_the_road_from_a_factory_to_a_gemm():
    """Another file is a decision: raise the numbers where it is an idea apart.

    Commit d1494c8 had 36 files of 5,336 lines on it, by the same tool, of which 12 files of 2,281 lines would have run
    on a GPU, too. Such files are counted here. NVFP4, recipes by module and backward, and TransformerEngine's variables
    came since; what stands for its kernels on a CPU is 36 more files, of 5,592 lines with the tiny run that they train.
    On a GPU one file more answers whether its kernels run there, ``preflight/answers.py`` of 211 lines.
    """
    rows = _table("factory")
    *files, total = rows
    assert files[:2] == ["__init__.py", "factories.py"]
    assert {"contract/precision.py", "train/plugin.py", "train/checks.py", "models/selection.py"} <= {*files}
    assert len(files) <= 16, files
    called, whole = rows[total]
    assert called <= 1_110
    assert whole <= 2_690
