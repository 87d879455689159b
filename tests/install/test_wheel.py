"""The wheel as a user gets it: checked, installed where only its dependencies are, and what it says of those that are
not."""

import json
import re
import subprocess
import sys
import zipfile

import pytest
import torch
from cli.test_cli import COMMANDS
from packaging.requirements import Requirement
from support.environments import ROOT, Environment, build_wheel, requirements

import nemo_fp8

LIGHT = [(words, code, said) for words, code, said in COMMANDS if code != 2]
# A command that needs more than the core -> what must be said of it.
HEAVY = {
    "inspect {here}/model.safetensors": "pip install 'nemo-fp8[numerics]'",
    "inspect {here}/model.safetensors --html page.html": "pip install 'nemo-fp8[report]'",
    "export {here} out --precision bf16_mixed": "pip install 'nemo-fp8[numerics]'",
    "export {here} out --precision bf16_mixed --from-nemo": "pip install 'nemo-fp8[numerics]'",
    "mismatch {here}/pair.safetensors": "pip install 'nemo-fp8[numerics]'",
    "compare --steps 2": "make setup",
    "compare --steps 2 --html page.html": "pip install 'nemo-fp8[report]'",
    "rl-compare --steps 2": "make setup",
    "serve model --precision bf16_with_fp8_blockwise_mixed": ".venv-rollout",
}
ERROR = re.compile(r"\Aerror: .+ needs .+, which (is|are) not installed\.\n  why:    .+\n  remedy: .+\n\Z")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("core"), wheel)


@pytest.fixture(scope="module")
def numerics(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("numerics"), wheel, "numerics")


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [
        path for package in ("nemo_fp8", "nemo_fp8_hook") for path in (ROOT / package).rglob("*") if path.is_file()
    ]
    assert {
        str(path.relative_to(ROOT)) for path in files if path.suffix in (".py", ".pyi", ".c", ".h", ".typed")
    } <= names
    assert "nemo_fp8/py.typed" in names
    tops = {"nemo_fp8", "nemo_fp8_hook", "nemo_fp8_hook.pth", f"nemo_fp8-{nemo_fp8.__version__}.dist-info"}
    assert {name.split("/")[0] for name in names} == tops
    assert wheel.name == f"nemo_fp8-{nemo_fp8.__version__}-py3-none-any.whl"


def test_the_index_would_take_it(wheel, tmp_path):
    check = [sys.executable, "-m", "twine", "check", "--strict"]
    done = subprocess.run([*check, wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # And it does say no: the same wheel without its description.
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / wheel.name, "w") as other:
        for name in whole.namelist():
            content = whole.read(name)
            other.writestr(name, content.partition(b"\n\n")[0] + b"\n\n" if name.endswith("METADATA") else content)
    assert subprocess.run([*check, tmp_path / wheel.name], capture_output=True).returncode != 0


def test_no_extra_wants_another_triton_than_torch_does(wheel):
    """Every torch for GPUs pins the triton that it was built with (2.13.0: 3.7.1): pip would find no set of both."""
    (triton,) = (one for line in requirements(wheel) if (one := Requirement(line)).name == "triton")
    assert not triton.specifier


# ---------------------------------------------------------------------- the core alone


def test_the_core_is_the_wheel_s_and_has_no_torch(core):
    done = core.code(
        "import nemo_fp8, importlib.util as u; print(nemo_fp8.__file__, u.find_spec('torch'), u.find_spec('numpy'))"
    )
    assert done.stdout == f"{core.site}/nemo_fp8/__init__.py None None\n"


@pytest.mark.parametrize(
    ("command", "code", "words"), LIGHT, ids=lambda v: " ".join(v) if isinstance(v, list) else None
)
def test_core_commands_need_the_core_alone(core, command, code, words):
    done = core.nemo_fp8(*command)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, said
    assert all(word in said for word in words)


@pytest.mark.parametrize("command", HEAVY)
def test_a_command_without_its_extra_says_what_to_install(core, command):
    words = command.format(here=core.home).split()
    done = core.nemo_fp8(*words)
    assert done.returncode == 2, done.stderr
    assert ERROR.match(done.stderr), done.stderr  # and nothing before it: no work is said to start
    assert HEAVY[command] in done.stderr
    (error,) = json.loads(core.nemo_fp8(*words, "--json").stdout)["error"]
    assert HEAVY[command] in error["remedy"]


IMPORTS = """
import importlib, json, sys
from nemo_fp8.errors import PrecisionError
said = {}
for line in sys.argv[1:]:
    try:
        exec(line, {})
        said[line] = None
    except PrecisionError as error:
        assert isinstance(error, ImportError)
        said[line] = error.problems[0].remedy
print(json.dumps(said))
"""


def shown():
    """What the documents import, and the modules that they name, but for what lies beneath TransformerEngine."""
    pages = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    named = [name.split(".") for page in pages for name in re.findall(r"`(nemo_fp8(?:\.\w+)+)", page)]
    modules = {".".join(words[:n]) for words in named for n in range(1, len(words) + 1)}
    lines = {line.strip() for page in pages for line in re.findall(r"^\s*from nemo_fp8.* import .*", page, re.M)}
    paths = {n: ROOT.joinpath(*n.split(".")) for n in modules if not n.startswith("nemo_fp8.te_cpu.")}
    return lines | {f"import {n}" for n, path in paths.items() if path.is_dir() or path.with_suffix(".py").is_file()}


def test_what_the_documents_name_is_there_or_says_what_to_install_where_torch_is(numerics):
    done = numerics.code(IMPORTS, *sorted(shown()))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "rollout" in said["from nemo_fp8.rollout.refit.transfer import NemoFp8TrainerInit"]
    assert said["import nemo_fp8.rollout.kv_scales"] is None


def test_every_public_name_is_there_or_says_what_to_install(core):
    """Names of the package, of its public parts, and whatever the documents import."""
    names = [f"from nemo_fp8 import {name}" for name in nemo_fp8.__dir__() if not name.startswith("__")]
    calls = [f"import nemo_fp8; nemo_fp8.{name}()" for name in nemo_fp8.PRESETS]
    done = core.code(IMPORTS, *names, *sorted(shown()), *calls)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) > 60
    for line in calls:
        assert "nemo-fp8[train]" in said[line]
    for name in ("Precision", "PrecisionError", "PRESETS", "preset", "check"):
        assert said[f"from nemo_fp8 import {name}"] is None
    for name in ("autocast", "capture"):
        assert "nemo-fp8[numerics]" in said[f"from nemo_fp8 import {name}"]
    assert "nemo-fp8[train]" in said["from nemo_fp8 import MixedPrecision"]
    assert "nemo-fp8[train]" in said["from nemo_fp8 import lightning as nl"]
    assert said["from nemo_fp8.rollout import engine_args, environment"] is None


def test_an_import_that_fails_within_a_package_is_its_own_error(core, tmp_path):
    """Torch is there and lacks something: nobody is told to install torch."""
    for name in ("torch", "numpy", "safetensors"):
        (tmp_path / f"{name}.py").write_text("import what_torch_needs\n" if name == "torch" else "")
    done = core.code("import nemo_fp8; nemo_fp8.autocast", PYTHONPATH=str(tmp_path))
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'what_torch_needs'"


# ---------------------------------------------------------------------- with numerics

BITS = """
import hashlib, torch
import nemo_fp8
from nemo_fp8 import preset
from nemo_fp8.numerics import quantize
from nemo_fp8.numerics.kernels import build
torch.manual_seed(0)
found = hashlib.sha256()
for name in ("bf16_with_fp8_blockwise_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_mxfp8_mixed"):
    for role in ("weight", "input", "grad"):
        x = torch.randn(256, 512).mul(torch.logspace(-6, 4, 512)).bfloat16()
        q = quantize(x, preset(name).operand(role))
        for part in (q.data, q.scale_inv, q.dequantize()):
            found.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
print(nemo_fp8.__file__, build.library() is not None, found.hexdigest())
"""


def test_kernels_compile_from_the_wheel_and_torch_gives_the_same_bits(numerics, tmp_path):
    made = numerics.run(
        numerics.python, "-m", "nemo_fp8.numerics.kernels.build", XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert made.returncode == 0, made.stderr
    assert len(list((tmp_path / "cache/nemo_fp8").glob("fp8-*.so"))) == 1
    compiled = numerics.code(BITS, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert compiled.returncode == 0, compiled.stderr
    plain = numerics.code(BITS, XDG_CACHE_HOME=str(tmp_path / "none"), PATH=str(numerics.home / "bin"))
    assert plain.returncode == 0, plain.stderr
    (place, fast, bits), (_, slow, same) = compiled.stdout.split(), plain.stdout.split()
    assert place == f"{numerics.site}/nemo_fp8/__init__.py"
    assert (fast, slow) == ("True", "False")
    assert bits == same
    assert compiled.stderr == ""
    (line,) = plain.stderr.splitlines()
    assert line.startswith(
        "FP8 casts run in torch on this CPU, with the same bits but more slowly: there is no C compiler"
    )


def test_inspect_runs_where_numerics_is_all_there_is(numerics, tmp_path):
    from safetensors.torch import save_file

    save_file({"model.layers.0.mlp.up_proj.weight": torch.randn(128, 128)}, tmp_path / "model.safetensors")
    done = numerics.nemo_fp8("inspect", tmp_path / "model.safetensors", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "SNR dB" in done.stdout
