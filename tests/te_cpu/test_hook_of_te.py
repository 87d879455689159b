"""The hook is never in the way of what runs without us, and where TransformerEngine could not run it comes first, or
says why not."""

import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AT_START = str(ROOT / "nemo_fp8_hook" / "path")
TE = Path(next(folder for folder in sys.path if Path(folder, "transformer_engine").is_dir()))
SO = "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so"


def _run(code, *folders, flags=(), timeout=None, **variables):
    """A program in a process that starts as every process of an environment with our wheel does."""
    paths = os.pathsep.join(map(str, (AT_START, ROOT, *folders)))
    env = {name: value for name, value in os.environ.items() if not name.startswith("NVTE")}
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=env | {"PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def site(tmp_path):
    """A folder with a TransformerEngine that can be imported anywhere, and no driver of CUDA."""
    (tmp_path / "transformer_engine/wheel_lib").mkdir(parents=True)
    (tmp_path / "transformer_engine/__init__.py").touch()
    return tmp_path


# ---------------------------------------------------------------------- nothing of ours

UNTOUCHED = """
import sys
import nemo_fp8_hook
with_hook = list(sys.meta_path)
nemo_fp8_hook.DRIVERS = ({driver!r},)
{before}
import transformer_engine
assert sys.meta_path == [finder for finder in with_hook if type(finder) is not nemo_fp8_hook.Hook], sys.meta_path
assert len(sys.meta_path) == len(with_hook) - 1
assert not {{"nemo_fp8", "torch"}} & set(sys.modules)
"""


def _build(*places):
    def make(site):
        for place in places:
            (site / place).touch()

    return make


@pytest.mark.parametrize(
    ("make", "before", "flags", "variables"),
    [
        pytest.param(_build("nvidiactl"), "", (), {}, id="a driver"),
        pytest.param(_build(f"transformer_engine/wheel_lib/{SO}"), "", (), {}, id="the extension, from a wheel"),
        pytest.param(_build(f"transformer_engine/{SO}"), "", (), {}, id="the extension, built"),
        pytest.param(_build(SO), "", (), {}, id="the extension, built in place"),
        pytest.param(_build("transformer_engine_torch.py"), "", (), {}, id="the extension, as a module"),
        pytest.param(_build(), "sys.modules['transformer_engine_torch'] = sys", (), {}, id="the extension, loaded"),
        pytest.param(_build(), "", (), {"NEMO_FP8_TE_CPU": "0"}, id="turned off"),
        pytest.param(_build(), "nemo_fp8_hook.register()", ("-S",), {}, id="no torch"),
    ],
)
def test_what_runs_without_us_is_left_alone(site, make, before, flags, variables):
    make(site)
    before = f"{before}; with_hook = list(sys.meta_path)" if flags else before
    done = _run(UNTOUCHED.format(driver=str(site / "nvidiactl"), before=before), site, flags=flags, **variables)
    assert done.returncode == 0, done.stderr


def test_torch_stays_what_it_is_beside_a_gpu(site):
    """With torch imported before: a driver, the compiled extension, and every name of torch.cuda and of tensors as it
    was."""
    (site / f"transformer_engine/wheel_lib/{SO}").touch()
    (site / "nvidiactl").touch()
    done = _run(
        "import sys, torch, nemo_fp8_hook\n"
        f"nemo_fp8_hook.DRIVERS = ({str(site / 'nvidiactl')!r},)\n"
        "owners = (torch, torch.cuda, torch.Tensor, torch.version, torch.distributed, torch.autocast)\n"
        "before = [dict(vars(owner)) for owner in owners]\n"
        "import transformer_engine\n"
        "assert [dict(vars(owner)) for owner in owners] == before\n"
        "assert not {'nemo_fp8', 'transformer_engine_torch'} & set(sys.modules)\n",
        site,
    )
    assert done.returncode == 0, done.stderr


def test_looking_for_it_is_no_import(site):
    code = (
        "import sys, importlib.util as u; assert u.find_spec('transformer_engine'); assert not {'nemo_fp8', 'torch'} "
        "& set(sys.modules)"
    )
    done = _run(code, site)
    assert done.returncode == 0, done.stderr


def test_it_waits_until_there_is_one(site, tmp_path_factory):
    """No TransformerEngine, or only a folder of that name, and later a path that has one."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "transformer_engine").mkdir()
    code = (
        "import sys, nemo_fp8_hook; nemo_fp8_hook.register()\n"
        f"nemo_fp8_hook.DRIVERS = ({str(site)!r},)\n"
        "import transformer_engine; assert transformer_engine.__file__ is None; del sys.modules['transformer_engine']\n"
        "assert isinstance(sys.meta_path[0], nemo_fp8_hook.Hook)\n"
        f"sys.path.insert(0, {str(site)!r}); import transformer_engine; assert transformer_engine.__file__\n"
        "assert not isinstance(sys.meta_path[0], nemo_fp8_hook.Hook)\n"
    )
    done = _run(code, folder, flags=("-S",))  # without this environment's own TransformerEngine
    assert done.returncode == 0, done.stderr


def test_it_imports_next_to_nothing():
    code = "import sys, os; before = set(sys.modules); import nemo_fp8_hook; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["nemo_fp8_hook"], done.stderr


def test_registering_twice_is_registering_once():
    done = _run(
        "import sys, nemo_fp8_hook as h; h.register(); print(sum(isinstance(f, h.Hook) for f in sys.meta_path))"
    )
    assert done.stdout == "1\n", done.stderr


# ---------------------------------------------------------------------- TransformerEngine, on a CPU

AT_WORK = """
import sys, nemo_fp8_hook
import transformer_engine.pytorch as te, torch
assert not any(isinstance(finder, nemo_fp8_hook.Hook) for finder in sys.meta_path)
assert torch.cuda.get_device_capability() == (9, 0)
from nemo_fp8 import te_cpu
te_cpu.install()
te_cpu.install(90)
with te.autocast(enabled=True):
    te.Linear(32, 32)(torch.randn(32, 32, device="cuda")).sum().backward()
try:
    te_cpu.install(100)
except te_cpu.switch.PrecisionError as error:
    assert "in a process that stands for" in str(error)
else:
    raise AssertionError
"""


def test_an_import_is_enough():
    """And installing by hand what is installed does nothing; another architecture is refused, as ever."""
    done = _run(AT_WORK, TE, NEMO_FP8_TE_CPU="90")
    assert done.returncode == 0, done.stderr[-2000:]


def test_megatron_finds_te_there():
    code = "from megatron.core.extensions import transformer_engine as mine; import transformer_engine.pytorch as te\n"
    done = _run(code + "assert mine.HAVE_TE; assert issubclass(mine.TELinear, te.Linear)", TE)
    assert done.returncode == 0, done.stderr[-2000:]


def test_megatron_waits_for_no_lock_of_an_extension(tmp_path):
    """It compiles a pool of unified memory at its import, and waits for ever for who was killed while compiling it."""
    lock = tmp_path / "managed_alloc_runtime" / "lock"
    lock.parent.mkdir()
    lock.touch()
    code = "from megatron.core.inference import unified_memory; print(unified_memory.has_unified_memory)"
    done = _run(code, TE, timeout=300, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.stdout == "False\n", done.stderr[-2000:]
    assert [path.name for path in lock.parent.iterdir()] == ["lock"]


# ---------------------------------------------------------------------- refusals


def _another_version(site):
    (site / "transformer_engine-2.9.0.dist-info").mkdir()
    (site / "transformer_engine-2.9.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.9.0\n"
    )
    return {}


def _without_triton(site):
    for path in TE.glob("transformer_engine*"):
        if path.suffix:
            (site / path.name).symlink_to(path)
    return {"WITHOUT": "triton onnxscript onnx_ir"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_another_version, "made for TransformerEngine 2.20.2, 2.19.0, and 2.9.0 is installed"),
        (_without_triton, "pip install --no-deps triton onnxscript onnx-ir"),
        (lambda site: {"NEMO_FP8_TE_CPU": "h100"}, "Give one of 100 (Blackwell), 90 (Hopper), or 0 for none"),
    ],
)
def test_a_refusal_is_said_at_the_import_each_time(site, make, words):
    """As no ImportError, which Megatron takes for "there is no TransformerEngine", and trains on without FP8. None of
    the conditions above holds here, so this is also what they look like when they say no."""
    code = (
        "import os, sys; sys.modules.update(dict.fromkeys(os.environ.get('WITHOUT', '').split()))\n"
        "for _ in range(2):\n"
        "    try:\n        import transformer_engine\n"
        "    except ImportError:\n        print('swallowed')\n"
        "    except Exception as error:\n        print(type(error).__name__, error, '\\n---')"
    )
    said = _run(code, site, **make(site)).stdout.split("---")
    assert len(said) == 3
    assert said[0].strip() == said[1].strip()
    assert said[0].startswith("PrecisionError")
    assert words in said[0]
    assert "nemo_fp8_hook asks for it" in said[0]
    assert "or set NEMO_FP8_TE_CPU=0" in said[0]


# ---------------------------------------------------------------------- what it costs

COST = """
import os, sys, time
import empty
start = time.process_time()
import nemo_fp8_hook
nemo_fp8_hook.register()
registered = time.process_time()
for _ in range(1000):
    sys.meta_path[0].find_spec("torch.nn", None, None)
print(registered - start, time.process_time() - registered)
"""


def test_it_costs_less_than_a_millisecond(tmp_path):
    """Of processor time: to register, beside an empty module of the same folder, and for the next thousand of modules;
    torch has 1,136."""
    shutil.copytree(ROOT / "nemo_fp8_hook", tmp_path / "nemo_fp8_hook")
    (tmp_path / "empty.py").touch()
    for file in ("empty.py", "nemo_fp8_hook/__init__.py"):  # as pip does; the rest is for who imports TE
        py_compile.compile(str(tmp_path / file))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", COST]
    runs = [
        subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(10)
    ]
    registered, asked = (min(float(run[i]) for run in runs) for i in (0, 1))
    assert registered < 1e-3
    assert asked < 1e-3
