"""Imports run one way: errors <- contract <- models <- {preflight, render} <- numerics <- {storage, te_cpu} <- {train,
rollout, export, inspection} <- mismatch <- recipes <- experiments <- report <- command line.

The light core must import without torch, the training side never needs vLLM, and the rollout side never needs NeMo.
"""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nemo_fp8"
STANDARD_OR_LIGHT = {"packaging", "rich", "typer", "yaml"}

# layer -> (its floor, what its modules may import at their top besides the standard library)
LAYERS = {
    "core": (0, STANDARD_OR_LIGHT),  # the files beside the folders, but for front doors
    "contract": (1, STANDARD_OR_LIGHT),
    "models": (2, STANDARD_OR_LIGHT),
    "preflight": (3, STANDARD_OR_LIGHT),
    "render": (4, STANDARD_OR_LIGHT | {"omegaconf"}),
    "numerics": (5, {"torch", "numpy", "safetensors", "triton"}),
    "storage": (6, {"torch", "numpy", "safetensors"}),
    "te_cpu": (6, {"torch"}),  # TransformerEngine is imported inside of functions: it may not be there
    "train": (7, {"torch", "numpy", "safetensors", "yaml", "nemo", "nemo_run", "lightning", "megatron", "fiddle"}),
    "rollout": (7, {"torch", "numpy", "safetensors"}),
    "rollout/engine": (7, {"torch", "numpy", "safetensors", "vllm"}),  # runs in vLLM's processes only
    "rollout/refit/worker": (7, {"torch", "numpy", "safetensors", "vllm"}),  # as that
    "rollout/refit/transfer": (7, {"torch", "vllm"}),  # a trainer's side of vLLM's own API: its classes are vLLM's
    "export": (7, {"torch", "numpy", "safetensors"}),
    "inspection": (7, {"torch", "numpy"}),
    "bridge": (8, {"torch", "megatron"}),
    "front": (8, STANDARD_OR_LIGHT | {"lightning", "nemo", "nemo_run"}),  # files beside the folders that need an extra
    "mismatch": (8, {"torch", "numpy", "safetensors"}),  # belongs to neither side
    "recipes": (9, {"nemo_run", "nemo"}),
    "experiments": (10, {"torch", "numpy", "safetensors", "nemo_run", "nemo", "lightning", "megatron"}),
    "experiments/rl": (10, {"torch", "ray", "nemo", "lightning", "megatron"}),  # each process takes its side from here
    "report": (11, STANDARD_OR_LIGHT | {"numpy", "matplotlib", "torch", "safetensors"}),
    "cli": (12, STANDARD_OR_LIGHT),
}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def _layer(parts: tuple[str, ...]) -> str:
    head = parts[0].removesuffix(".py")
    for depth in (3, 2):
        if "/".join(parts[:depth]) in LAYERS:
            return "/".join(parts[:depth])
    if head in LAYERS:
        return head
    return "front" if _needs_an_extra(PACKAGE / f"{head}.py") else "core"


def _needs_an_extra(path: Path) -> bool:
    """Whether a file beside the folders says ``__needs__ = require(...)``, which makes it a front door."""
    return path.exists() and any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__needs__"
        for node in ast.parse(path.read_text()).body
    )


def _imports(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole module, so that a reader sees the layer"
            if node.module == "nemo_fp8":  # from nemo_fp8 import te_cpu
                yield from ((node, f"nemo_fp8.{alias.name}") for alias in node.names)
            else:
                yield node, node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    layer = _layer(path.relative_to(PACKAGE).parts)
    place, _ = LAYERS[layer]
    for _, name in _imports(ast.parse(path.read_text())):
        if name.startswith("nemo_fp8."):
            other = _layer(tuple(name.split(".")[1:]))
            same_room = other.split("/")[0] == layer.split("/")[0]
            assert same_room or LAYERS[other][0] < place, f"{layer} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_heavy_is_imported_at_the_top(path):
    layer = _layer(path.relative_to(PACKAGE).parts)
    allowed = LAYERS[layer][1] | {"nemo_fp8", "nemo_fp8_hook"} | set(sys.stdlib_module_names)
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for _, name in _imports(ast.Module(top, [])):
        assert name.split(".")[0] in allowed, f"{layer} imports {name} at its top"


def test_a_module_taken_from_the_package_itself_counts():
    tree = ast.parse("from nemo_fp8 import te_cpu, lifetime\nfrom nemo_fp8.errors import Problem\nimport nemo_fp8.cli")
    assert [name for _, name in _imports(tree)] == [
        "nemo_fp8.te_cpu",
        "nemo_fp8.lifetime",
        "nemo_fp8.errors",
        "nemo_fp8.cli",
    ]


def test_training_and_rollout_never_meet():
    for path in MODULES:
        layer = _layer(path.relative_to(PACKAGE).parts).split("/")[0]
        strangers = {
            "train": ("vllm", "nemo_fp8.rollout"),
            "bridge": ("vllm", "nemo_fp8.rollout", "nemo.", "lightning", "nemo_run"),
            "rollout": ("nemo.", "megatron", "lightning", "nemo_run", "nemo_fp8.train"),
        }.get(layer, ())
        for _, name in _imports(ast.parse(path.read_text())):
            assert not f"{name}.".startswith(tuple(f"{s.rstrip('.')}." for s in strangers)), (
                f"{path.name} imports {name}"
            )


def test_no_file_waits_for_itself():
    """No circle between files, imports inside of functions included; what only a type checker reads is none."""
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in MODULES
    }
    waits = {name: _files_imported(path, names) - {name} for name, path in names.items()}
    while free := waits.keys() - set().union(*waits.values()) | {
        name for name, others in waits.items() if not others & waits.keys()
    }:
        for name in free:
            del waits[name]
    assert {name: others & waits.keys() for name, others in waits.items()} == {}


def _files_imported(path: Path, names) -> set[str]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node, module in _imports(tree):
        parts = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        found |= {part for part in parts if part in names} or {module} & names.keys()
    return found


def test_a_file_beside_the_folders_is_a_front_door_if_it_needs_an_extra():
    beside = {path.stem: _layer((path.stem,)) for path in MODULES if path.parent == PACKAGE}
    assert (beside["factories"], beside["errors"]) == ("front", "core")
    assert {*beside.values()} == {"core", "front"}
