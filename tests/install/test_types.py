"""What a user's type checker and editor make of the wheel, installed without torch and NeMo: every name has a type, and
no other name has.

mypy reads the package as it reads any installed one: by its ``py.typed``, its stub and its sources, with its own
defaults.
"""

import ast
import importlib
import os
import re
import subprocess
import sys

import jedi
import pytest
from support.environments import ROOT, Environment, build_wheel

import nemo_fp8
from nemo_fp8 import PRESETS

PARTS = ("rollout", "rollout.refit", "mismatch", "recipes", "numerics", "te_cpu")
# Decorated by torch.no_grad, which has a type where torch is installed.
TYPED_BY_TORCH = {"nemo_fp8.numerics.quantize", "nemo_fp8.numerics.quantize_into"}
# What NeMo has, handed on by a module __getattr__: it is Any, which shows that the tests would see one.
UNTYPED = "nemo_fp8.lightning.Callback"

FINE = """
import nemo_fp8
from nemo_fp8 import Precision, bf16_with_fp8_mixed, preset
from nemo_fp8.rollout import Refit, engine_args
contract: Precision = preset("bf16_mixed").replace(format="hybrid", scaling="delayed")
plugin = bf16_with_fp8_mixed(fp8_margin=1, fp8_params=True, fp8_recipe="tensorwise", keep=["*.router"])
plugin = bf16_with_fp8_mixed(weight_scale=None)
plugin.fp8_margin = 2
"""
WRONG = {
    "from nemo_fp8 import bf16_with_fp8_blockwise_mixd": 'maybe "bf16_with_fp8_blockwise_mixed"',
    "import nemo_fp8; nemo_fp8.bf17_mixed": 'has no attribute "bf17_mixed"',
    "from nemo_fp8.rollout import Refitt": 'has no attribute "Refitt"',
    "from nemo_fp8.recipes import llama3_9b": 'has no attribute "llama3_9b"',
    "from nemo_fp8.numerics import quantise": 'has no attribute "quantise"',
    "from nemo_fp8.te_cpu import instal": 'has no attribute "instal"',
    "nemo_fp8.bf16_mixed(fp8_margn=1)": 'Unexpected keyword argument "fp8_margn"',
    "nemo_fp8.bf16_mixed(fp8_recipe='current')": "incompatible type \"Literal['current']\"",
    "nemo_fp8.bf16_mixed(rollout_block=128)": 'incompatible type "Literal[128]"',
    "nemo_fp8.bf16_mixed('hybrid')": "Too many positional arguments",
    "nemo_fp8.preset(nemo_fp8.Precision())": 'incompatible type "Precision"; expected "str"',
    "nemo_fp8.preset('bf16_mixed').formt": 'has no attribute "formt"',
}


def _names():
    """Every public name: of the front door, and of the parts that have one of their own."""
    yield from (f"nemo_fp8.{name}" for name in sorted({*nemo_fp8._HOMES, *PRESETS, "__version__"}))
    for part in PARTS:
        yield from (f"nemo_fp8.{part}.{name}" for name in importlib.import_module(f"nemo_fp8.{part}").__all__)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("core"), build_wheel(tmp_path_factory.mktemp("wheel")))


def check(environment, folder, **texts):
    """What mypy says of some files: file -> line -> its messages."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    options = ["--config-file=", f"--python-executable={environment.python}", f"--cache-dir={folder / 'cache'}"]
    command = [sys.executable, "-m", "mypy", *options, *(f"{name}.py" for name in texts)]
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # it would lead to the checkout
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.stderr == ""
    said = {name: {} for name in texts}
    for name, line, message in re.findall(r"^(\w+)\.py:(\d+): (.*)$", done.stdout, re.M):
        said[name].setdefault(int(line), []).append(message)
    return said


def reveal(names):
    modules = {f"import {name.rpartition('.')[0]}" for name in names}
    return "; ".join(sorted(modules)) + "\n" + "\n".join(f"reveal_type({name})" for name in names)


def any_of(names, said):
    """Those of the names, revealed one to a line after the imports, whose type is Any."""
    assert set(said) == set(range(2, len(names) + 2))
    return {name for line, name in enumerate(names, 2) if said[line] == ['note: Revealed type is "Any"']}


@pytest.fixture(scope="module")
def said(core, tmp_path_factory):
    return check(
        core, tmp_path_factory.mktemp("user"), names=reveal([*_names(), UNTYPED]), fine=FINE, wrong="\n".join(WRONG)
    )


def test_every_public_name_has_a_type(said):
    assert any_of([*_names(), UNTYPED], said["names"]) == {*TYPED_BY_TORCH, UNTYPED}


def test_types_are_those_of_the_code(said):
    types = dict(zip(_names(), said["names"].values(), strict=False))
    assert types["nemo_fp8.preset"] == [
        'note: Revealed type is "def (name: str) -> nemo_fp8.contract.precision.Precision"'
    ]
    assert types["nemo_fp8.PRESETS"] == ['note: Revealed type is "dict[str, nemo_fp8.contract.precision.Precision]"']
    assert types["nemo_fp8.bf16_mixed"][0].endswith('-> nemo_fp8._PluginConfig"')


def test_a_right_program_is_right(said):
    assert said["fine"] == {}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_an_error(said, line):
    messages = said["wrong"].get(list(WRONG).index(line) + 1, ["nothing"])
    assert any(message.startswith("error: ") and WRONG[line] in message for message in messages), messages


@pytest.mark.long
def test_with_torch_every_name_of_numerics_has_a_type(tmp_path):
    environment = Environment(tmp_path / "numerics", build_wheel(tmp_path), "numerics")
    names = sorted(TYPED_BY_TORCH)
    assert any_of(names, check(environment, tmp_path, names=reveal(names))["names"]) == set()


# ---------------------------------------------------------------------- the stub beside the module


def _of_the_stub():
    """Its public names: what it defines, and what it imports under the same name again."""
    for node in ast.parse((ROOT / "nemo_fp8/__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname)
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def test_dir_has_the_names_of_the_stub(core):
    """And those of modules that are loaded, as any package has."""
    done = core.code(
        "import nemo_fp8, sys; print(*(name for name in dir(nemo_fp8) if f'nemo_fp8.{name}' not in sys.modules))"
    )
    public = [name for name in done.stdout.split() if name == "__version__" or not name.startswith("_")]
    assert sorted(public) == sorted(_of_the_stub())


def test_dir_has_what_a_part_loads_later(core):
    parts = ("rollout", "recipes")
    done = core.code(
        "; ".join(f"import nemo_fp8.{part} as part; print(set(part.__all__) - set(dir(part)))" for part in parts)
    )
    assert done.stdout == "set()\n" * len(parts), done.stderr


def test_an_editor_completes_every_name():
    """jedi, which IPython and Jupyter ask."""
    script = jedi.Script("import nemo_fp8\nnemo_fp8.", project=jedi.Project(ROOT))
    found = {item.name for item in script.complete()}
    assert {*_of_the_stub()} <= found
