"""``nemo-fp8 run``: every Python below it has the hook, its exit code is the command's, and beside a GPU it changes
nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_fp8_hook
from nemo_fp8.errors import PrecisionError
from nemo_fp8.te_cpu import launch

ROOT = Path(__file__).parents[2]
AT_START = str(ROOT / "nemo_fp8_hook" / "path")
HOOKED = "import sys; print(sum(type(finder).__module__ == 'nemo_fp8_hook' for finder in sys.meta_path))"


def _run(*words, **variables):
    command = [sys.executable, "-m", "nemo_fp8.cli", "run", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"} | variables)


RANK = """
import sys
import torch.distributed as dist
import transformer_engine.pytorch as te, torch
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
linear = te.Linear(32, 32)
for _ in range(2):
    with te.autocast(enabled=True, amax_reduction_group=dist.group.WORLD):
        linear(torch.randn(32, 32)).sum().backward()
scales = [torch.empty(3) for _ in range(2)]
dist.all_gather(scales, linear.fp8_meta["scaling_fwd"].scale)
equal = torch.equal(*scales) and scales[0][0].item() != 1
sys.stdout.write(f"rank {dist.get_rank()} {torch.cuda.get_device_capability()} {equal}\\n")
dist.destroy_process_group()
"""


def test_the_ranks_of_torchrun_stand_on_it(tmp_path):
    """And their scales come from the amaxes of both."""
    (tmp_path / "train.py").write_text(RANK)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, tmp_path / "train.py"]
    done = _run("--arch", 90, "--", sys.executable, *torchrun)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} (9, 0) True" for rank in (0, 1)]


SPAWN = """
import multiprocessing, sys
def hooked():
    print(sum(type(finder).__module__ == "nemo_fp8_hook" for finder in sys.meta_path))
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=hooked)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    "words", [["-c", HOOKED], ["spawn.py"], ["-m", "IPython", "-c", HOOKED]], ids=["-c", "spawn", "IPython"]
)
def test_every_python_has_the_hook_and_the_next_sitecustomize(tmp_path, words):
    (tmp_path / "spawn.py").write_text(SPAWN)
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    words = [str(tmp_path / word) if word.endswith(".py") else word for word in words]
    done = _run(
        "--",
        sys.executable,
        *words,
        PYTHONPATH=os.pathsep.join([os.environ.get("PYTHONPATH", str(ROOT)), str(tmp_path)]),
    )
    assert "theirs" in done.stdout, done.stderr
    assert "1" in done.stdout.splitlines(), done.stdout + done.stderr  # one, and no more


def test_a_python_that_lacks_the_package_says_so_and_runs_as_it_is(tmp_path):
    """That of the system, where an environment is not activated; and it keeps a sitecustomize of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    path = os.pathsep.join([AT_START, str(tmp_path)])
    python = tmp_path / "bare/bin/python"
    done = subprocess.run(
        [python, "-c", "print('ours')"], capture_output=True, text=True, env={"PYTHONPATH": path}, cwd=tmp_path
    )
    assert done.stdout == "theirs\nours\n"
    assert done.stderr == (f"nemo-fp8 run: {python} has no nemo_fp8, and TransformerEngine is left as it is there.\n")


def test_one_before_it_that_goes_on_with_ours_is_not_called_again(tmp_path):
    ours = f"{AT_START}/sitecustomize.py"
    (tmp_path / "sitecustomize.py").write_text(
        f"print('theirs')\n__file__ = {ours!r}\nexec(compile(open({ours!r}).read(), {ours!r}, 'exec'))"
    )
    path = os.pathsep.join([str(tmp_path), AT_START, str(ROOT)])
    done = subprocess.run([sys.executable, "-c", HOOKED], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert (done.stdout, done.stderr) == ("theirs\n1\n", "")


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_its_exit_code_is_the_command_s(command, code):
    assert _run("--", "bash", "-c", command).returncode == code


def test_options_after_the_command_are_the_command_s():
    said = json.loads(_run("--dry-run", "--json", "torchrun", "--nproc-per-node", 2, "train.py", "--json").stdout)
    assert said["command"] == ["torchrun", "--nproc-per-node", "2", "train.py", "--json"]
    assert said["environment"]["PYTHONPATH"].startswith(AT_START)
    assert said["note"] is None


def test_what_it_sets():
    assert launch.variables_for(None, {}) == {"PYTHONPATH": f"{AT_START}:{ROOT}"}
    again = launch.variables_for(90, {"PYTHONPATH": f"{AT_START}:/theirs::{ROOT}"})
    assert again == {"PYTHONPATH": f"{AT_START}:/theirs:{ROOT}", "NEMO_FP8_TE_CPU": "90"}
    with pytest.raises(PrecisionError, match="No GPU of that architecture"):
        launch.variables_for(80, {})


def test_beside_a_gpu_it_runs_the_command_as_it_is(monkeypatch, tmp_path):
    assert launch.nothing_to_do(100, {}) is None
    assert "NEMO_FP8_TE_CPU=0" in launch.nothing_to_do(None, {"NEMO_FP8_TE_CPU": "0"})
    assert launch.nothing_to_do(90, {"NEMO_FP8_TE_CPU": "0"}) is None
    monkeypatch.setattr(nemo_fp8_hook, "DRIVERS", (str(tmp_path),))
    assert launch.nothing_to_do(100, {}) == "There is a GPU: nothing is stood in for."


def test_turned_off_it_says_so():
    done = _run(
        "--", sys.executable, "-S", "-c", HOOKED, NEMO_FP8_TE_CPU="0", PYTHONPATH=str(ROOT)
    )  # without the one that is installed
    assert done.stdout == "0\n"
    assert done.stderr == "note: NEMO_FP8_TE_CPU=0: nothing is stood in for.\n"
