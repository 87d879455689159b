"""``tools/te_suite.py`` counts what passes, fails, skips, hangs, dies and cannot be collected, and loses nothing of a
file it stops."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
FILES = {
    "test_mixed.py": """
        import os, pytest, time, torch

        def test_passes(): assert torch.empty(1).is_cuda  # the implementation is in place
        def test_fails(): assert 1 == 2
        def test_skips(): pytest.skip("no reason")
        def test_hangs(): time.sleep(600)
        def test_dies(): os._exit(7)
        def test_passes_and_fails_after(request): request.addfinalizer(lambda: 1 / 0)
        def test_comes_last(): pass
        def test_too_large_8192(): assert False
    """,
    "test_broken.py": "import nothing_of_this_name",
    "test_absent.py": "import pytest; pytest.skip('not here', allow_module_level=True)",
    "test_ranks.py": """
        import subprocess, sys, time
        from pathlib import Path

        RANK = "import os, time; open('rank', 'w').write(str(os.getpid())); time.sleep(600)"
        RUN = f"subprocess.run([sys.executable, '-S', '-c', {RANK!r}], start_new_session=True)"
        LAUNCHER = f"import subprocess, sys; {RUN}"

        def test_leaves_a_rank():
            launcher = subprocess.Popen([sys.executable, "-S", "-c", LAUNCHER])
            while not Path("rank").exists(): time.sleep(0.1)
            launcher.kill()
            launcher.wait()

        def test_comes_after(): assert not Path("/proc", Path("rank").read_text()).exists()
    """,
    "distributed/fsdp2_tests/run_both.py": """
        import torch.distributed as dist

        def test_ranks_meet():
            dist.init_process_group("gloo")
            assert dist.get_world_size() == 2
            dist.barrier()

        def test_only_the_second_fails(): assert dist.get_rank() == 0
        def test_comes_last(): dist.barrier()
    """,
    "test_sanity.py": """
        import os

        def test_variable(): assert os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] == "1"
    """,
    "test_checkpoint.py": """
        import os, sys
        from pathlib import Path

        FOLDER = Path(os.environ["NVTE_TEST_CHECKPOINT_ARTIFACT_PATH"])

        def test_what_was_saved_before(): assert FOLDER.joinpath("arguments").read_text() == "--save-checkpoint all"

        if __name__ == "__main__":
            FOLDER.mkdir()
            FOLDER.joinpath("arguments").write_text(" ".join(sys.argv[1:]))
    """,
    "references/blockwise_fp8_gemm_reference.py": """
        def fused_fma(y, x, s, BLOCK=128): raise RuntimeError("Triton has no GPU")
        def product(*operands): return fused_fma(*operands)
    """,
    "test_float8_blockwise_gemm_exact.py": """
        import torch
        from references.blockwise_fp8_gemm_reference import product

        def test_the_reference_rounds_once_and_in_place():
            x, s, y = torch.randn(3, 32, 128)
            whole = y.new_zeros(300, 300)
            tile = whole[100:132, 100:228].copy_(y)
            assert product(tile, x, s).data_ptr() == tile.data_ptr()
            assert torch.equal(whole[100:132, 100:228], (x.double() * s.double() + y.double()).float())
            assert not torch.equal(tile, x * s + y)
    """,
    "debug/conftest.py": """
        def pytest_addoption(parser):
            parser.addoption("--feature_dirs", nargs="+")
            parser.addoption("--configs_dir")
    """,
    "debug/test_log.py": """
        from pathlib import Path

        def test_options(request):
            (features,) = request.config.getoption("--feature_dirs")
            assert Path(features, "fake_quant.py").exists()
            assert request.config.getoption("--configs_dir") == f"{Path(__file__).parent}/test_configs/"
    """,
    "test_numerics.py": """
        import os
        from pathlib import Path

        LOOKS_ON = os.environ.get("NVTE_TEST_NVINSPECT_ENABLED")

        def test_debug_tool():
            assert LOOKS_ON is None or Path(os.environ["NVTE_TEST_NVINSPECT_FEATURE_DIRS"], "fake_quant.py").exists()

        def test_fails_without_it(): assert LOOKS_ON
    """,
    "test_onnx_export.py": """
        import tensorrt

        def test_needs_none(): pass
        def test_needs_it(): tensorrt.Logger
    """,
    "test_many.py": """
        import pytest

        @pytest.mark.parametrize("i", range(30))
        def test_fails(i): assert i < 0
    """,
    "test_sometimes.py": """
        import time
        from pathlib import Path

        SEEN = Path("seen")

        def test_passes(): SEEN.open("a").write("once ")
        def test_hangs_at_first():
            if SEEN.read_text().count("hangs") == 0:
                SEEN.open("a").write("hangs ")
                time.sleep(600)
        def test_fails(): assert 1 == 2
    """,
    "test_slow.py": """
        import time, pytest

        @pytest.mark.parametrize("i", range(50))
        def test_one(i): time.sleep(0 if i < 3 else 3)
    """,
}


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Run the tool on tiny files; what it prints, and what it writes down."""
    folder = tmp_path / "tests" / "pytorch"
    for name, text in FILES.items():
        folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(name).write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()))

    docs = tmp_path / "new" / "docs"

    def run(*arguments):
        command = [
            sys.executable,
            TOOLS / "te_suite.py",
            tmp_path,
            "--arch",
            "90",
            "--json",
            "--docs",
            docs,  # which is not there yet
            *arguments,
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["files"], json.loads((docs / "te_suite.json").read_text())["90"]

    return run


def test_what_passes_fails_skips_hangs_and_dies(suite, tmp_path):
    printed, written = suite("--only", "test_mixed.py", "--test-limit", "3")
    assert printed == {"test_mixed.py": {"passed": 2, "failed": 4, "skipped": 1}}
    failures = written["test_mixed.py"]["failures"]
    assert set(failures) == {"test_fails", "test_hangs", "test_dies", "test_passes_and_fails_after"}
    assert "assert 1 == 2" in failures["test_fails"]
    assert "Timeout" in failures["test_hangs"]
    assert "ended with 7" in failures["test_dies"]
    assert written["test_mixed.py"]["skips"] == {"Skipped: no reason": 1}
    page = (tmp_path / "new" / "docs" / "te_suite.md").read_text()
    assert "| test_mixed | sm90 | 2 | 4 | 1 |" in page
    assert "`test_mixed.py::test_fails` (sm90)" in page  # no row explains it


@pytest.mark.long
def test_what_cannot_be_collected_has_failed_and_joins_the_results(suite):
    """Also a file that is not there; one that leaves itself out is skipped."""
    printed, written = suite("--only", "test_broken", "test_absent", "test_no_such_file")
    assert printed["test_broken"] == {"passed": 0, "failed": 1, "skipped": 0}
    assert printed["test_absent"] == {"passed": 0, "failed": 0, "skipped": 1}
    assert printed["test_no_such_file"] == {"passed": 0, "failed": 1, "skipped": 0}
    assert "nothing_of_this_name" in next(iter(written["test_broken.py"]["failures"].values()))


@pytest.mark.long
def test_a_file_that_is_stopped_reports_what_it_got_through(suite):
    printed, written = suite("--only", "test_slow", "--limit", "20")
    assert 1 <= printed["test_slow"]["passed"] < 50
    assert printed["test_slow"]["failed"] == 0
    assert written["test_slow.py"]["not_reached"] == 50 - printed["test_slow"]["passed"]


@pytest.mark.long
def test_a_file_that_was_stopped_goes_on_where_it_was(suite, tmp_path):
    """The sample is the row's; a row that is whole stays as it is, and none is added to with another tree's tests."""
    _, written = suite("--only", "test_many", "--sample", "9", "--seed", "1", "--limit", "400")
    whole = written["test_many.py"]
    cut = whole | {"failed": 4, "not_reached": 5, "failures": dict([*whole["failures"].items()][:4])}
    path = tmp_path / "new" / "docs" / "te_suite.json"
    path.write_text(json.dumps({"90": {"test_many.py": cut}}))

    rest = ("--rest", "--only", "test_many", "--limit", "500")
    printed, written = suite(*rest)
    assert printed == {"test_many": {"passed": 0, "failed": 9, "skipped": 0}}
    assert written["test_many.py"] == whole | {"limit": 900}
    assert suite(*rest)[0] == {}

    path.write_text(json.dumps({"90": {"test_many.py": cut | {"tree": {"version": "9.8.7", "commit": None}}}}))
    with pytest.raises(AssertionError, match="its row is of another tree"):
        suite(*rest)


@pytest.mark.long
def test_what_a_limit_of_its_own_stopped_is_run_again(suite, tmp_path):
    """Alone, and in the place of what it was; a run that does not get through it changes nothing."""
    _, written = suite("--only", "test_sometimes", "--test-limit", "3")
    stopped = written["test_sometimes.py"]
    assert list(stopped["failures"]) == ["test_hangs_at_first", "test_fails"]
    assert suite("--rest", "--only", "test_sometimes", "--limit", "0")[1]["test_sometimes.py"] == stopped
    printed, written = suite("--rest", "--only", "test_sometimes")
    assert printed == {"test_sometimes": {"passed": 2, "failed": 1, "skipped": 0}}
    assert list(written["test_sometimes.py"]["failures"]) == ["test_fails"]
    assert (tmp_path / "tests" / "pytorch" / "seen").read_text() == "once hangs "
    assert suite("--rest", "--only", "test_sometimes")[0] == {}


def test_what_is_added_to_a_row(monkeypatch):
    """Counts, failures and reasons of both; that nothing had ended is no failure any more."""
    monkeypatch.syspath_prepend(TOOLS)
    import te_suite

    row = {"passed": 0, "failed": 1, "skipped": 0, "limit": 9, "test_limit": 5, "skips": {}, "not_reached": 3}
    row |= {
        "failures": {te_suite.NOTHING: "nothing ended within 9 s"},
        "tree": {},
        "without": [],
        "sample": 4,
        "seed": 1,
    }
    assert te_suite.Limits(0, 20, 8).rest_of(row, "test_x.py", {}).after == 0
    of_before = {key: value for key, value in row.items() if key != "seed"}  # when there was none but 0
    assert te_suite.Limits(0, 20, 8, seed=3).rest_of(of_before, "test_x.py", {}).seed == 0
    found = {"passed": 1, "failed": 1, "skipped": 1, "limit": 20, "test_limit": 8, "skips": {"no": 1}, "not_reached": 1}
    row = te_suite.added(
        row, found | {"failures": {"test_one": "1 / 0"}} | {k: row[k] for k in ("tree", "without", "sample", "seed")}
    )
    assert [row[key] for key in (*te_suite.OUTCOMES, "limit", "not_reached")] == [1, 1, 1, 29, 1]
    limits = te_suite.Limits(0, 20, 8).rest_of(row, "test_x.py", {})
    assert (limits.after, limits.sample, limits.seed, limits.without) == (3, 4, 1, ())
    row = te_suite.added(row, found | {"failures": {"test_two": "2 / 0"}, "not_reached": 0})
    assert (row["failed"], row["skips"], list(row["failures"])) == (2, {"no": 2}, ["test_one", "test_two"])
    assert te_suite.Limits(0, 20, 8).rest_of(row, "test_x.py", {}) is None


@pytest.mark.long
def test_ranks_that_a_test_leaves_behind_end_with_it(suite):
    printed, written = suite("--only", "test_ranks.py")
    assert printed == {"test_ranks.py": {"passed": 2, "failed": 0, "skipped": 0}}, written


def test_ranks_of_a_test_that_is_cut_off_end_with_the_file(tmp_path):
    """They have a session of their own, and their launcher dies with pytest."""
    rank = "import os, time; open('rank', 'w').write(str(os.getpid())); time.sleep(600)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {rank!r}], start_new_session=True)"
    tool = f"""
import os, sys, time
from pathlib import Path
import te_suite
te_suite.take_orphans()
with te_suite._running([sys.executable, "-S", "-c", {launcher!r}], Path(), dict(os.environ), Path("log")):
    while not (Path("rank").exists() and Path("rank").read_text()): time.sleep(0.1)
assert not Path("/proc", Path("rank").read_text()).exists()
"""
    subprocess.run([sys.executable, "-c", tool], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TOOLS)}, check=True)


@pytest.mark.long
def test_ranks_run_a_file_together(suite, tmp_path):
    """A test has failed where a rank says so; both are gone when the tool ends."""
    printed, written = suite("--only", "distributed/fsdp2_tests/run_both")
    assert printed == {"distributed/fsdp2_tests/run_both": {"passed": 2, "failed": 1, "skipped": 0}}, written
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            assert str(tmp_path) not in process.read_text(errors="replace")


@pytest.mark.long
def test_a_reference_has_no_need_of_triton(suite):
    printed, written = suite("--only", "test_float8_blockwise_gemm_exact")
    assert printed == {"test_float8_blockwise_gemm_exact": {"passed": 1, "failed": 0, "skipped": 0}}, written


@pytest.mark.long
def test_a_file_has_what_tes_scripts_give_it(suite, tmp_path):
    """Variables, and what is written before; and the page says when, and of which tree."""
    version = tmp_path / "build_tools" / "VERSION.txt"
    version.parent.mkdir()
    version.write_text("9.8.7\n")
    printed, written = suite("--only", "test_sanity", "test_checkpoint", "--commit", "0123456789abcdef")
    assert printed == {file: {"passed": 1, "failed": 0, "skipped": 0} for file in ("test_sanity", "test_checkpoint")}
    row = written["test_sanity.py"]
    assert row["tree"] == {"version": "9.8.7", "commit": "0123456789abcdef"}
    page = (tmp_path / "new" / "docs" / "te_suite.md").read_text()
    assert f"| 9.8.7 012345678 | {row['date']} |" in page
    assert "| test_float8tensor | is `test_quantized_tensor` since" in page


@pytest.mark.long
def test_tes_debug_tool_finds_its_features_and_looks_on_where_asked(suite):
    _, written = suite("--only", "debug/test_log", "test_numerics", "test_numerics+debug")
    failures = {file: list(row["failures"]) for file, row in written.items()}
    assert failures == {
        "debug/test_log.py": [],
        "test_numerics.py": ["test_fails_without_it"],
        "test_numerics+debug.py": [],
    }


@pytest.mark.long
def test_a_module_that_one_test_needs_keeps_no_other_from_running(suite):
    printed, _ = suite("--only", "test_onnx_export")
    assert printed == {"test_onnx_export": {"passed": 1, "failed": 1, "skipped": 0}}


@pytest.mark.long
def test_a_seed_chooses_the_sample_and_is_told(suite, tmp_path):
    chosen = []
    for seed in "0", "1", "1":
        _, written = suite("--only", "test_many", "--sample", "5", "--seed", seed)
        chosen.append(written["test_many.py"]["failures"].keys())
    assert len(chosen[0]) == len(chosen[1]) == 5
    assert chosen[0] != chosen[1] == chosen[2]
    assert "| 5, seed 1 |" in (tmp_path / "new" / "docs" / "te_suite.md").read_text()


def test_a_cause_explains_only_what_it_names(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import te_suite_page

    assert te_suite_page.cause_of("test_x.py", "test_y", "AssertionError: a code is wrong") is None
    assert "not known" in te_suite_page.cause_of("test_x.py", "test_y", "Failed: Timeout (>60.0s) from pytest-timeout.")
    for cause in te_suite_page.CAUSES:
        assert cause.test or cause.error
