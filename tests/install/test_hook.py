"""The hook on the import of TransformerEngine is in every Python process of an environment that has the package, wheel or editable."""

import subprocess
import sys
import sysconfig

import pytest
from install.environments import ROOT, Environment, build_wheel, source

HOOKED = "import sys; print(sum(type(finder).__module__ == 'nemo_fp8_hook' for finder in sys.meta_path), 'nemo_fp8' in sys.modules)"
TE = ROOT / ".te_cpu"


class Beside(Environment):
    """An environment with the package, and on its path what the tests' own has: a copy of Ray or NeMo-Run would take a minute."""

    def __init__(self, folder, package, *options):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.home, self.python = folder, folder / "bin/python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        (self.site / "zz_beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n{TE}\n")
        self.pip("install", "--no-index", "--no-deps", "--no-build-isolation", *options, package)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return Beside(tmp_path_factory.mktemp("beside"), build_wheel(tmp_path_factory.mktemp("wheel")))


SPAWN = f"""
import multiprocessing
def hooked():
    {HOOKED}
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=hooked)
    child.start()
    child.join()
"""
RAY = f"""
import ray
@ray.remote
class Actor:
    def hooked(self):
        import sys
        return sum(type(finder).__module__ == 'nemo_fp8_hook' for finder in sys.meta_path), 'nemo_fp8' in sys.modules
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
print(*ray.get(Actor.remote().hooked.remote()))
"""
NEMO_RUN = """
import nemo_run as run, sys
with run.Experiment("hook", base_dir=sys.argv[1]) as experiment:
    experiment.add(run.Script(path=sys.argv[2], entrypoint="python"), executor=run.LocalExecutor(), tail_logs=True)
    experiment.run(sequential=True, detach=False)
"""
XDIST = f"""
def test_hooked():
    import sys
    assert sum(type(finder).__module__ == 'nemo_fp8_hook' for finder in sys.meta_path) == 1
    assert "nemo_fp8" not in sys.modules
"""
