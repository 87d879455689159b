"""What holds ``make gpu`` together: a measure that fails takes nothing with it, what is missing is named, the page says
what it knows."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.gpu import measuring, parts, report

gpu = importlib.import_module("benchmarks.gpu.__main__")
ROOT = Path(__file__).parents[2]
KEEP = "import json, os, sys, time; open(sys.argv[1], 'w').write(json.dumps({'result': 1})); "


def outcome(code: str, limit: float = 60.0) -> dict:
    found = gpu.outcome([sys.executable, "-I", "-S", "-c", code], limit)
    assert found.pop("seconds") >= 0
    return found


def test_what_a_measure_found():
    assert outcome(KEEP) == {"result": 1}


def test_a_measure_that_dies_keeps_what_it_had_found():
    assert outcome(KEEP + "os._exit(11)") == {"result": 1, "error": "the process ended with 11"}


def test_a_measure_that_hangs_is_ended_with_all_below_it(tmp_path):
    file = tmp_path / "pid"
    sleeper = "import subprocess; p = subprocess.Popen(['sleep', '600']); "
    sleeper += f"open({str(file)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    assert outcome(KEEP + sleeper, 3.0) == {"result": 1, "error": "ended after 3 s"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_a_measure_that_finds_nothing_has_its_last_words_for_a_reason():
    assert "it wrote nothing | bye" in outcome("print('bye')")["error"]
    assert "ZeroDivisionError" in outcome("1 / 0")["error"]


def test_one_failure_is_told_and_the_others_run(tmp_path, monkeypatch, capsys):
    asked = []

    def measured(part, name, folder, cpu, limit):
        asked.append((part, name))
        return (
            {"error": "no such kernel", "seconds": 0.1} if name == "gemms" else {"skipped": "not here", "seconds": 0.1}
        )

    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["gpu", "kernels", "refit", "--cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == "1 measures failed."
    assert asked == [(part, name) for part in ("kernels", "refit") for name in parts.PARTS[part].measures]
    assert "kernels, gemms: no such kernel" in capsys.readouterr().out
    record = json.loads((tmp_path / "gpu_kernels.json").read_text())
    assert list(record["measures"]) == list(parts.PARTS["kernels"].measures)
    assert record["about"]["dry_run"] is True
    assert "transformer-engine 2.20.2" in record["about"]["versions"]
    page = (tmp_path / "gpu.md").read_text()
    assert "1 failed, 3 not for this GPU" in page
    assert "- gemms: no such kernel" in page
    assert page.count("A DRY RUN") == 2


def test_a_name_that_is_none_is_told_with_those_that_are(monkeypatch, capsys):
    for arguments, told in (
        (["kernel"], "conformance, kernels, refit, train"),
        (["kernels", "--only", "cast"], "casts; gemms; linear; layer"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
        with pytest.raises(SystemExit):
            gpu.main()
        assert told in capsys.readouterr().err


def test_what_is_missing_is_named_with_the_line_that_installs_it(monkeypatch):
    torch = importlib.import_module("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = {"torch": "2.11.0", "megatron-core": "0.12.0"}

    def version(name):
        if name not in here:
            raise metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    said = str(ended.value.code)
    for lacking in ("transformer-engine 2.20.2", "megatron-core 0.15.3 (here is 0.12.0)", "a GPU that torch sees"):
        assert lacking in said
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]==2.20.2' megatron-core==0.15.3" in said
    assert "torch," not in said


def test_only_a_whole_part_on_a_gpu_goes_into_the_documents(tmp_path, monkeypatch):
    went = []
    for name, value in (("DOCS", tmp_path / "docs"), ("GOLDEN", tmp_path / "golden"), ("ROOT", tmp_path)):
        monkeypatch.setattr(parts, name, value)
    monkeypatch.setattr(parts, "missing", list)
    about = dict.fromkeys(("date", "machine", "versions", "command"), "") | {"dry_run": False}
    monkeypatch.setattr(parts, "about", lambda command, dry_run: about)
    monkeypatch.setattr(
        gpu, "measured", lambda part, name, folder, cpu, limit: went.append(folder) or {"skipped": "", "seconds": 0}
    )
    for arguments, golden, docs in (
        ([], "golden", "docs"),
        (["--only", "8B"], "out/gpu", "out/gpu"),
        (["--cpu"], "out/gpu", "out/gpu"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu", "refit", *arguments])
        with pytest.raises(SystemExit):
            gpu.main()
        assert went.pop() == tmp_path / golden
        assert (tmp_path / docs / "gpu_refit.json").exists()
        (tmp_path / docs / "gpu_refit.json").unlink()


def test_a_way_that_fails_leaves_the_race(tmp_path):
    def bad():
        raise RuntimeError("no such kernel")

    run = measuring.Run(tmp_path, True, tmp_path / "found.json", {"bytes": 3})
    run.race({"good": lambda: None, "bad": bad}, 1.0)
    found = json.loads(run.file.read_text())["result"]
    assert found["bytes"] == 3
    assert found["ways"]["bad"] == {"error": "RuntimeError: no such kernel"}
    assert found["ways"]["good"]["ms"] >= 0


def test_the_contracts_are_the_recipes_that_are_named():
    assert tuple(measuring.CONTRACTS) == parts.RECIPES


def test_a_refit_that_wrote_other_codes_is_told():
    ways = {"copy": {"ms": 1.0}, "straight": {"ms": 2.0, "graph_ms": 1.5}, "eager": {"ms": 9.0}}
    found = {"bytes": 16_000_000_000, "ways": ways, "fingerprints": {"straight": "a", "eager": "a"}}

    def page(*names):
        return "\n".join(report.refit(dict.fromkeys(names, found)))

    assert "straight, eager wrote the same codes" in page("8B")
    assert "| straight | 2.00 | 8,000 | 50% | 1.50 |" in page("8B")
    both = page("8B", "8B in NVFP4")
    assert both.count("| straight |") == 2
    assert "pushed into NVFP4, in ModelOpt's layout" in both
    found["fingerprints"]["eager"] = "b"
    assert "Other codes or scales: eager" in page("8B")


def trained(ms: float, loss: float) -> dict:
    """What a case of training leaves, of four steps."""
    sizes = {"parameters": 1, "tokens": 1, "flops": 1, "fp8_weights": 0, "memory_built": 0, "memory_peak": 0}
    return sizes | {"ms": [ms] * 4, "losses": [loss] * 4}


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of every row of a page's tables."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in "\n".join(lines).splitlines() if "|" in row]


def test_a_case_is_compared_with_the_bf16_of_its_own_run():
    first = {"moe: bf16": trained(100, 2.0), "moe: delayed": trained(80, 2.5)}
    later = {"moe: bf16": trained(200, 1.0), "moe: tensorwise": trained(400, 1.25)}
    head, _, *rows = cells(report.train(first, later))
    column = {name: at for at, name in enumerate(head)}
    shown = {(row[column["run"]], row[column["case"]]): row for row in rows}
    ratios = {key: row[column["faster than BF16"]] for key, row in shown.items()}
    assert ratios == {
        ("1", "bf16"): "1.00x",
        ("1", "delayed"): "1.25x",
        ("2", "bf16"): "1.00x",
        ("2", "tensorwise"): "0.50x",
    }
    assert [row[column["from BF16's, mean"]] for row in rows] == ["0.0000", "0.5000", "0.0000", "0.2500"]
    assert cells(report.train(first))[0] == head[1:], "one run needs no number"


def test_every_run_of_a_record_has_its_bf16_and_is_told():
    record = parts.read(parts.DOCS / "gpu_train.json")
    runs = parts.runs(record)
    page = (ROOT / "docs/benchmarks/gpu.md").read_text()
    for number, run in enumerate(runs, 1):
        for shape in {name.partition(": ")[0] for name in run["measures"]}:
            assert "result" in run["measures"][f"{shape}: bf16"]
        assert f"- run {number}, date: {run['about']['date']}" in page
    assert parts.measured(record).keys() == set().union(*(run["measures"] for run in runs))


def test_tables():
    text = report.table("way | ms", [["a\nb", "1,234.5"], ["c", None]])
    assert text.splitlines() == ["| way | ms |", "|---|---:|", "| a b | 1,234.5 |", "| c |  |"]
    assert [report.number(x) for x in (1234.5, 0.01234, 0, None)] == ["1,234", "0.0123", "0", ""]


def test_the_page_is_up_to_date_and_says_what_is_missing():
    page = (ROOT / "docs/benchmarks/gpu.md").read_text()
    assert page == report.page(parts.DOCS, parts.GOLDEN), "out of date: .venv/bin/python -m benchmarks.gpu.report"
    for name, part in parts.PARTS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        measured = parts.measured(parts.read(parts.DOCS / f"gpu_{name}.json"))
        assert ("**missing**" in row) == (len(measured) < len(part.measures))


def test_make_gpu_takes_the_python_that_is_given_and_sets_nothing_up():
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "gpu", "PYTHON=some-python", "PART=kernels"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout.strip().endswith("some-python -m benchmarks.gpu kernels")
    assert "venv" not in done.stdout


def test_a_cast_that_moves_other_bytes_is_held_to_a_copy_of_its_own():
    ways = {"copy": 1.0, "weight 128x128, FP32 scales": 2.0, "copy, for NVFP4": 0.5, "NVFP4 1x16, given amax": 1.0}
    others = {name: {"bytes": 10**6, "copy": "copy, for NVFP4"} for name in ways if "NVFP4" in name}
    found = {"shape": [1, 1], "bytes": 3 * 10**6, "ways": {name: {"ms": ms} for name, ms in ways.items()}}
    lines = "\n".join(report.kernels({"casts": found | {"others": others}})).splitlines()
    rows = [line.split("|") for line in lines]
    told = {row[1].strip(): [cell.strip() for cell in row[2:4]] for row in rows if len(row) > 4}
    assert told["weight 128x128, FP32 scales"] == ["1.50", "50%"]
    assert told["NVFP4 1x16, given amax"] == ["1.00", "50%"]
