"""tools/stack_versions.py finds the names of Megatron that we touch, says no where a source has them not, and its page
is what it would print for the versions that are installed."""

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("stack_versions", ROOT / "tools" / "stack_versions.py")
tool = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = tool
_spec.loader.exec_module(tool)


def test_a_file_s_names_are_what_it_imports_reaches_patches_and_spells_out():
    source = """
        import megatron.core.utils
        from megatron.core import parallel_state as state
        from megatron.core.tensor_parallel import layers

        def ours(a, b, *, c=1):
            return state.get_data_parallel_group(), layers.Linear.forward

        def any_number(*args):
            "megatron.core.in_words is no name, as there is more than a name here"

        TABLE = (
            Patch("megatron.core.timers:Timers", "start", ours, "why"),
            Patch("megatron.core.timers", "stop", any_number, "why"),
            Patch("nemo.lightning", "fit", ours, "why"),
        )
        loaded = "megatron.core.fp8_utils" in modules
    """
    assert tool.names_in(textwrap.dedent(source)) == {
        "megatron.core.utils",
        "megatron.core.parallel_state",
        "megatron.core.parallel_state.get_data_parallel_group",
        "megatron.core.tensor_parallel.layers",
        "megatron.core.tensor_parallel.layers.Linear",
        "megatron.core.timers.Timers",
        "megatron.core.timers.Timers.start",
        "megatron.core.timers",
        "megatron.core.timers.stop",
        "megatron.core.fp8_utils",
    }
    assert tool.replaced_in(textwrap.dedent(source)) == {"megatron.core.timers.Timers.start": ["a", "b", "c"]}


@pytest.fixture
def sources(tmp_path):
    files = {
        "megatron/core/__init__.py": "from .optimizer import *\nfrom megatron.core import utils as tools\n",
        "megatron/core/optimizer/__init__.py": "from .config import OptimizerConfig as OptimizerConfig\n",
        "megatron/core/optimizer/config.py": """
            from torch import Tensor
            from ..base import Base

            class OptimizerConfig(Base):
                lr: float = 0.1
                def step(self, x, /, y, *, z): ...
        """,
        "megatron/core/base.py": "class Base:\n    inherited = 1\n    def many(self, *args): ...\n",
        "megatron/core/utils.py": """
            try:
                import te
                HAVE = True
            except ImportError:
                def stand_in(): ...
            if HAVE:
                from megatron.core.base import Base as Other
        """,
        "megatron/core/loop.py": "from megatron.core.loop import round_and_round\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tool.Sources(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "megatron.core",
        "megatron.core.optimizer",
        "megatron.core.OptimizerConfig",
        "megatron.core.optimizer.OptimizerConfig.lr",
        "megatron.core.optimizer.config.OptimizerConfig.inherited",
        "megatron.core.optimizer.config.Tensor",
        "megatron.core.tools.stand_in",
        "megatron.core.utils.HAVE",
        "megatron.core.utils.Other.inherited",
    ],
)
def test_what_is_there_is_found(sources, name):
    assert sources.has(name)


@pytest.mark.parametrize(
    "name",
    [
        "megatron.bridge",
        "megatron.core.gone",
        "megatron.core.gone.deeper",
        "megatron.core.optimizer.OptimizerConfig.gone",
        "megatron.core.optimizer.config.Gone",
        "megatron.core.base.Base.lr",
        "megatron.core.loop.round_and_round",
    ],
)
def test_what_is_not_there_is_said_to_be_missing(sources, name):
    assert not sources.has(name)


def test_parameters_of_a_function_and_none_where_there_is_no_telling(sources):
    assert sources.parameters("megatron.core.OptimizerConfig.step") == ["self", "x", "y", "z"]
    assert sources.parameters("megatron.core.OptimizerConfig.many") is None
    assert sources.parameters("megatron.core.OptimizerConfig") is None


def test_a_version_without_a_name_or_with_other_parameters_says_so(tmp_path, monkeypatch):
    folder = tmp_path / "megatron" / "core"
    folder.mkdir(parents=True)
    (folder / "timers.py").write_text("def start(name): ...\ndef stop(name): ...\n")
    version = tool.of_folder(f"9.9={tmp_path}")
    names = [f"megatron.core.timers.{name}" for name in ("start", "stop", "gone")]
    ours = {names[0]: ["name"], names[1]: ["name", "barrier"]}
    monkeypatch.setattr(tool, "replacements", lambda: ours)
    assert tool.missing(version, [*names, "megatron.bridge.not_asked"]) == names[1:]
    assert tool.row(version, names) == "| megatron-core | 9.9 | source |  | 1 of 3 | `timers.stop`, `timers.gone` |"


def test_a_folder_without_megatron_is_one_clear_error(tmp_path):
    with pytest.raises(SystemExit, match="no megatron/core or megatron/bridge"):
        tool.of_folder(f"1.0={tmp_path}")


def test_the_page_is_what_the_tool_would_print_for_the_installed_versions():
    page, names = tool.PAGE.read_text().splitlines(), tool.touched()
    versions = tool.installed()
    if not any(version.package == "megatron-core" for version in versions):
        pytest.skip("megatron-core is not installed: make setup")
    remedy = "run: python tools/stack_versions.py --write"
    for version in versions:
        assert tool.row(version, names) in page, remedy
    assert f"touches {len(names)} names of Megatron" in "\n".join(page), remedy
    for name, files in names.items():
        assert any(line.startswith(f"| `{name}` | {', '.join(sorted(files))} |") for line in page), f"{name}; {remedy}"


def test_the_page_speaks_of_what_does_not_install_here():
    page = tool.PAGE.read_text()
    for row in ("megatron-bridge | 0.6.", "megatron-bridge | 0.7.", "megatron-core | 0.19."):
        assert f"| {row}" in page


def test_a_page_that_would_lose_the_row_of_a_source_is_not_written():
    old = "| megatron-bridge | 0.7.0+067f987d | source | | 1 of 1 | |\n| megatron-core | 0.19.2 | PyPI | | 1 of 1 | |\n"
    assert tool.lost_sources(old, old.replace("0.7.0+067f987d", "0.7.1+1")) == []
    assert tool.lost_sources(old, old.replace("source", "PyPI")) == ["megatron-bridge"]


@pytest.mark.slow
def test_every_name_is_imported_from_the_installed_versions():
    names = tool.touched()
    cores = [version for version in tool.installed() if version.package == "megatron-core"]
    if not cores:
        pytest.skip("megatron-core is not installed: make setup")
    for version in cores:
        assert tool.not_imported(version, names) == []
    assert tool.not_imported(cores[0], ["megatron.core.parallel_state.gone", "megatron.core.gone"]) == [
        "megatron.core.parallel_state.gone",
        "megatron.core.gone",
    ]
