"""No process outlives the command that started it, whatever ends the command. Real processes, real signals."""

import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import SUPPORT
from support.processes import below, left_of, wait_for

ROOT = Path(__file__).parents[2]
STUBBORN = SUPPORT / "stubborn.sh"
# What ends a command -> its exit code.
SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGKILL: -9}
# One start of NeMo in every suite, the others where there is time.
TRAININGS = [pytest.param(n, id=n.name, marks=[pytest.mark.long] if n != signal.SIGTERM else []) for n in SIGNALS]
COMMAND = f"""
import sys, tempfile
from nemo_fp8.lifetime import orderly, running
with orderly(), tempfile.TemporaryDirectory(), running(["sh", {str(STUBBORN)!r}], patience=1.0) as process:
    try:
        sys.exit(process.wait() % 256)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.fixture
def stand_in(tmp_path):
    """A command with a keeper, a child, and below it what is hard to end. Gives the command and all below it."""
    for folder in ("pids", "temporary"):
        (tmp_path / folder).mkdir()
    env = os.environ | {"PIDS": str(tmp_path / "pids"), "TMPDIR": str(tmp_path / "temporary")}
    command = subprocess.Popen([sys.executable, "-c", COMMAND], env=env)
    wait_for(lambda: (tmp_path / "pids/grandchild").exists())
    found = wait_for(lambda: len(tree := below(command)) >= 4 and tree)
    assert list((tmp_path / "temporary").iterdir())
    yield command, found
    _end([*found, psutil.Process(command.pid)] if command.poll() is None else found)
    command.wait()


def _end(processes):
    for process in processes:
        if process.is_running():
            process.kill()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_nothing_is_left_of_a_command(stand_in, tmp_path, number):
    command, found = stand_in
    command.send_signal(number)
    assert command.wait(15) == SIGNALS[number]
    assert left_of(found) == []
    assert number == signal.SIGKILL or list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGTERM)])
def test_a_second_signal_does_not_cut_short_what_the_first_one_began(stand_in, tmp_path, numbers):
    command, found = stand_in
    for number in numbers:
        command.send_signal(number)
        left_of([], 0)
    assert command.wait(15) in [SIGNALS[number] for number in numbers]
    assert left_of(found) == []
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("which", ["keeper", "child"])
def test_nothing_is_left_when_one_in_between_is_killed(stand_in, tmp_path, which):
    """The kernel ends the child of a killed keeper; the keeper ends what a killed child leaves, wherever that has moved
    to."""
    command, found = stand_in
    keeper, child = found[0], psutil.Process(int((tmp_path / "pids/child").read_text()))
    assert child.parent() == keeper
    (keeper if which == "keeper" else child).kill()
    assert command.wait(15) == 247  # -9 in a byte: that is what its command ended by
    assert left_of([keeper, child] if which == "keeper" else found) == []


WATCHED = f"""
import subprocess, time
from nemo_fp8.lifetime import watched
with watched():
    subprocess.Popen(["sh", {str(STUBBORN)!r}])
    time.sleep(600)
"""


def test_what_somebody_else_started_ends_with_a_watched_command(tmp_path):
    command = subprocess.Popen([sys.executable, "-c", WATCHED], env=os.environ | {"PIDS": str(tmp_path)})
    wait_for(lambda: (tmp_path / "grandchild").exists())
    found = wait_for(lambda: len(tree := below(command)) >= 5 and tree)
    try:
        left_of(found, 1.5)  # long enough to have been seen
        command.kill()
        command.wait()
        assert left_of(found) == []
    finally:
        _end(found)


# It shares memory, and must be killed: then only Python's resource tracker, below it, can remove the memory.
SHARES = """
import signal, sys, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
shared = SharedMemory(create=True, size=1)
print(shared.name, flush=True)
time.sleep(600)
"""
WATCHES_ONE_THAT_SHARES = f"""
import subprocess, sys, time
from nemo_fp8.lifetime import watched
with watched():
    subprocess.Popen([sys.executable, "-c", {SHARES!r}])
    time.sleep(600)
"""


def test_no_shared_memory_is_left_of_what_a_keeper_had_to_kill():
    from nemo_fp8.lifetime import running

    with running([sys.executable, "-c", SHARES], patience=0.5, stdout=subprocess.PIPE, text=True) as process:
        shared = Path("/dev/shm", process.stdout.readline().strip())
        assert shared.is_file()
    assert not shared.exists()


def test_no_shared_memory_is_left_of_what_ends_with_a_watched_command():
    command = subprocess.Popen([sys.executable, "-c", WATCHES_ONE_THAT_SHARES], stdout=subprocess.PIPE, text=True)
    found = []
    try:
        shared = Path("/dev/shm", command.stdout.readline().strip())
        assert shared.is_file()
        found = wait_for(lambda: len(tree := below(command)) >= 3 and tree)
        left_of(found, 1.5)  # long enough to have been seen
        command.kill()
        command.wait()
        assert left_of(found) == []
        assert not shared.exists()
    finally:
        _end(found)


def test_what_a_shell_told_to_be_ignored_stays_ignored(tmp_path):
    code = (
        "import os, signal\nfrom nemo_fp8.lifetime import orderly\nwith orderly(): os.kill(os.getpid(), 1); "
        "print('goes on')"
    )
    done = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "goes on\n"


def test_a_command_s_end_is_its_own():
    from nemo_fp8.lifetime import running

    for words, code in (
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -SEGV $$"], -11),
        (["sh", "-c", "kill -PIPE $$"], -13),  # which Python has ignored, and hands on as ignored
        (["no-such-program"], 127),
    ):
        with running(words, stderr=subprocess.DEVNULL) as process:
            assert process.wait(15) == code


def test_processes_are_started_in_one_place():
    """Elsewhere the package only asks short questions: of a compiler, of another Python."""
    for path in sorted((ROOT / "nemo_fp8").rglob("*.py")):
        if path.name == "lifetime.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in ("subprocess.Popen", "os.fork", "os.system", "os.killpg"), f"{path}: {called}"
                if called == "subprocess.run":
                    assert path.name in ("build.py", "logprobs.py"), f"{path}: {called}"


# ---------------------------------------------------------------------- real commands


def _compare(folder, *words, **settings):
    for name in ("ranks", "temporary"):
        (folder / name).mkdir(parents=True)
    env = os.environ | {"RANKS": str(folder / "ranks"), "TMPDIR": str(folder / "temporary"), "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(
        [sys.executable, "-m", "nemo_fp8.cli", "compare", "--precisions", "bf16_mixed", *words], env=env, **settings
    )


@pytest.mark.slow
def test_nothing_is_left_of_a_comparison(tmp_path):
    """Torchrun and two ranks below each of four commands, which end by a signal each."""
    commands = {
        n: _compare(tmp_path / n.name, "--recipe", "waiting.recipe", stderr=subprocess.DEVNULL) for n in SIGNALS
    }
    found = {}
    try:
        for number in commands:
            wait_for(lambda: len(list((tmp_path / number.name / "ranks").iterdir())) == 2, 120)  # noqa: B023, at once
        found = {number: below(command) for number, command in commands.items()}
        for number, command in commands.items():
            assert {int(path.name) for path in (tmp_path / number.name / "ranks").iterdir()} <= {
                p.pid for p in found[number]
            }
            command.send_signal(number)
        for number, command in commands.items():
            assert command.wait(30) == SIGNALS[number]
            assert left_of(found[number]) == []
            if number != signal.SIGKILL:
                assert list((tmp_path / number.name / "temporary").iterdir()) == []
    finally:
        for command in commands.values():
            command.kill()
            command.wait()
        _end([process for tree in found.values() for process in tree])


@pytest.mark.train
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.long) for n in SIGNALS if n != signal.SIGTERM)],
    ids=lambda n: n.name,
)
def test_nothing_is_left_of_a_training(tmp_path, number):
    """The ranks really train when the signal comes."""
    command = _compare(tmp_path, "--recipe", "tiny_llama", "--steps", "100000", stderr=subprocess.PIPE)
    found = []
    try:
        while b"loss" not in (line := command.stderr.readline()):
            assert line, "it ended by itself"
        found = below(command)
        assert len(found) >= 4  # the keeper, torchrun, two ranks
        command.send_signal(number)
        assert command.wait(30) == SIGNALS[number]
        assert left_of(found) == []
        assert number == signal.SIGKILL or list((tmp_path / "temporary").iterdir()) == []
    finally:
        command.kill()
        command.wait()
        _end(found)


SLEEPS = f"""
import subprocess, pytest
def test_sleeps():
    subprocess.run(["sh", {str(STUBBORN)!r}])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
@pytest.mark.parametrize("target", ["demo", "test"])
def test_nothing_is_left_of_make(tmp_path, target, number):
    """``make demo`` and ``make test`` themselves, with another demo and another test below them."""
    for name in ("Makefile", ".venv", "nemo_fp8/lifetime.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(Path(sys.prefix) if name == ".venv" else ROOT / name)
    (tmp_path / "demo").mkdir()
    shutil.copy(STUBBORN, tmp_path / "demo/run.sh")
    (tmp_path / "test_sleeps.py").write_text(SLEEPS)
    (tmp_path / "pids").mkdir()
    env = os.environ | {"PIDS": str(tmp_path / "pids")}
    make = subprocess.Popen(
        ["make", "-o", "setup", "-o", "environments", target],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    found = []
    try:
        wait_for(lambda: (tmp_path / "pids/grandchild").exists())
        found = below(make)
        assert int((tmp_path / "pids/grandchild").read_text()) in {p.pid for p in found}
        make.send_signal(number)
        make.wait(30)
        assert left_of(found) == []
    finally:
        make.kill()
        make.wait()
        _end(found)
