"""The hook on the import of TransformerEngine is in every Python process of an environment that has the package, wheel
or editable."""

import subprocess
import sys
import sysconfig

import pytest
from support.environments import Environment, build_wheel, source

# One finder of ours, and nothing else of ours loaded. A command that is shown does not hold the word that it writes.
HOOKED = """import sys
hooks = sum(type(finder).__module__ == "nemo_fp8_hook" for finder in sys.meta_path)
assert (hooks, "nemo_fp8" in sys.modules) == (1, False)
sys.stdout.write("".join(("hook", "ed\\n")))
"""


class Beside(Environment):
    """An environment with the package, and on its path what the tests' own has: a copy of Ray or NeMo-Run would take a
    minute."""

    def __init__(self, folder, package, *options):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.home, self.python = folder, folder / "bin/python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        (self.site / "zz_beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        self.pip("install", "--no-index", "--no-deps", "--no-build-isolation", *options, package)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return Beside(tmp_path_factory.mktemp("beside"), build_wheel(tmp_path_factory.mktemp("wheel")))


# What is written to x.py -> how it is run.
SPAWN = """
import multiprocessing
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=exec, args=({hooked!r}, {{}}))
    child.start()
    child.join()
"""
RAY = """
import ray
@ray.remote
class Actor:
    def run(self):
        exec({hooked!r}.replace("sys.stdout.write", "str"), {{}})
        return "hooked"
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20)
print(ray.get(Actor.remote().run.remote()))
"""
NEMO_RUN = """
import nemo_run as run
with run.Experiment("hook", base_dir="runs") as experiment:
    script = run.Script(inline="python <<'E'\\n" + {hooked!r} + "E")
    experiment.add(script, executor=run.LocalExecutor(), tail_logs=True)
    experiment.run(sequential=True)
"""
XDIST = """
def test_hooked():
    exec({hooked!r}, {{}})
"""
KINDS = {
    "-c": ("", ["-c", HOOKED]),
    "isolated": ("", ["-I", "-c", HOOKED]),
    "spawn": (SPAWN, ["x.py"]),
    "torchrun": (HOOKED, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "x.py"]),
    "IPython": ("", ["-m", "IPython", "-c", HOOKED]),
    "xdist": (XDIST, ["-m", "pytest", "-s", "-n", "1", "-p", "no:cacheprovider", "x.py"]),
    "ray": (RAY, ["x.py"]),
    "nemo-run": (NEMO_RUN, ["x.py"]),
}
LONG = ("ray", "nemo-run")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind in LONG else []) for kind in KINDS]
)
def test_every_process_of_an_environment_has_it(wheel, kind):
    program, words = KINDS[kind]
    (wheel.home / "x.py").write_text(program.format(hooked=HOOKED) if program is not HOOKED else HOOKED)
    done = wheel.run(wheel.python, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    # xdist's workers have no stdout to write to: that test ran, and passed.
    assert ("1 passed" if kind == "xdist" else "hooked") in done.stdout + done.stderr, done.stdout + done.stderr


def test_transformer_engine_works_there(wheel):
    done = wheel.code(
        "import transformer_engine.pytorch as te, torch; print(te.Linear(32, 32)(torch.ones(16, 32, "
        "device='cuda')).is_cuda)"
    )
    assert done.stdout == "True\n", done.stderr
    off = wheel.code("import transformer_engine", NEMO_FP8_TE_CPU="0")
    assert (
        "RuntimeError: Found empty `transformer-engine` meta package installed" in off.stderr
    )  # TransformerEngine's own


@pytest.mark.parametrize("mode", [(), ("--config-settings", "editable_mode=strict")], ids=["lenient", "strict"])
def test_an_editable_install_has_it_and_takes_it_along(tmp_path, mode):
    environment = Beside(tmp_path / "venv", source(tmp_path / "source"), *mode, "--editable")
    done = environment.code(HOOKED)
    assert done.stdout == "hooked\n", done.stderr
    environment.pip("uninstall", "--yes", "nemo-fp8")
    assert not list(environment.site.glob("*nemo_fp8*"))
    assert environment.code(HOOKED).returncode == 1
