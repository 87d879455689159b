"""Which names of Megatron do we touch, and which versions have them? docs/stacks.md.

    python tools/stack_versions.py --write                        the versions below: installed, or fetched from PyPI
    python tools/stack_versions.py --source 0.7.0=FOLDER --write  and a Megatron-Bridge (or core) that lies in a folder
    python tools/stack_versions.py --offline                      what is installed here, and nothing else

The names are found by reading our own source: imports from ``megatron``, attributes of what was imported, rows of
``Patch``, and the config fields of the renderers' tables. Each version is asked in up to three ways:

    names     its Python source is parsed: is the name bound there, or a member of its class or of a base of that? Does
              a function that we replace take the same parameters? That needs no installation, so it also speaks of
              versions that want another Python
    imports   every name is imported in a process of its own, over ``te_cpu``; installed versions only
    trains    Megatron's GPT on TransformerEngine's layers takes four steps under each recipe; installed versions only

A name in the source is no promise that it means the same: only ``trains`` has seen that.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "stacks.md"
RECIPES = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
PACKAGES = {"megatron-core": "megatron.core", "megatron-bridge": "megatron.bridge"}
# What is on PyPI beside what is installed: the last of each line, all for Python 3.12 but the first.
FETCHED = {
    "megatron-core": ("0.14.0", "0.17.1", "0.18.2", "0.19.2"),
    "megatron-bridge": ("0.4.2", "0.5.1", "0.6.2"),
}
PYTHON = "3.12"
# Where the classes live whose fields the renderers write.
_CONFIGS = {
    "TransformerConfig": "megatron.core.transformer.transformer_config.TransformerConfig",
    "OptimizerConfig": "megatron.core.optimizer.OptimizerConfig",
    "DistributedDataParallelConfig": "megatron.core.distributed.DistributedDataParallelConfig",
}
_MIXED_PRECISION = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
_NO_NODE = ast.Pass()  # a module, or a name that comes from another package
_DOTTED = re.compile(r"megatron(\.\w+)+(:\w+(\.\w+)*)?")


# ---------------------------------------------------------------------- the names that we touch


def touched() -> dict[str, set[str]]:
    """Return every name of Megatron that our source mentions, as ``{dotted name: files}``."""
    from nemo_fp8.render import bridge, overrides

    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "nemo_fp8").rglob("*.py")):
        for name in names_in(path.read_text()):
            found.setdefault(name, set()).add(path.relative_to(ROOT / "nemo_fp8").as_posix())
    for core in overrides.FIELDS.values():
        for config, _, field in (name.partition(".") for name in core):
            found.setdefault(f"{_CONFIGS[config]}.{field}", set()).add("render/overrides.py")
    for field in (*bridge.FIELDS, "bf16", "fp16", "fp32"):
        found.setdefault(f"{_MIXED_PRECISION}.{field}", set()).add("render/bridge.py")
    return dict(sorted(found.items()))


def names_in(source: str) -> set[str]:
    """Return the names of Megatron that one file imports, reaches through what it imported, patches or spells out."""
    tree = ast.parse(source)
    found: set[str] = set()
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_megatron(node.module):
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if _is_megatron(alias.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            found.add(node.value.replace(":", "."))
    found |= {f"{target}.{name}" for target, name, _ in _patches(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            found.add(f"{bound[node.value.id]}.{node.attr}")
    return found


def replacements() -> dict[str, list[str]]:
    """Return the functions of Megatron that we replace, with the parameters that our replacements take."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "nemo_fp8" / "train").glob("*.py")):
        found |= replaced_in(path.read_text())
    return found


def replaced_in(source: str) -> dict[str, list[str]]:
    """Return what one file's rows of ``Patch`` replace, but for replacements that take ``*args``."""
    tree = ast.parse(source)
    functions = {node.name: parameters(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found: dict[str, list[str]] = {}
    for target, name, replacement in _patches(tree):
        ours = functions.get(replacement)
        if ours is not None:
            found[f"{target}.{name}"] = ours
    return found


def _patches(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield target, name and replacement of each ``Patch`` of Megatron in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Patch":
            target, name = (getattr(argument, "value", None) for argument in node.args[:2])
            if isinstance(target, str) and isinstance(name, str) and _is_megatron(target):
                yield target.replace(":", "."), name, ast.unparse(node.args[2])


def _is_megatron(module: str) -> bool:
    return module.startswith("megatron.")


# ---------------------------------------------------------------------- does a source have them?


class Sources:
    """The Python files below a folder, parsed when they are asked for and never imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bindings: dict[str, dict[str, ast.AST | str]] = {}

    def has(self, name: str) -> bool:
        """Return whether a dotted name is a module there, or bound in one, or a member of a class that is."""
        return self._find(name, frozenset()) is not None

    def parameters(self, name: str) -> list[str] | None:
        """Return the parameters of a function that is there; None if it takes ``*args``, or is no function."""
        node = self._find(name, frozenset())
        return parameters(node) if isinstance(node, ast.FunctionDef) else None

    def _find(self, name: str, seen: frozenset[str]) -> ast.AST | None:
        if name in seen:
            return None
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if self._file(module) is not None:
                whole = length == len(parts)
                return _NO_NODE if whole else self._member(module, parts[length:], seen | {name})
        return None

    def _file(self, module: str) -> Path | None:
        path = self.folder.joinpath(*module.split("."))
        candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"), *path.parent.glob(f"{path.name}.*.so"))
        return next((c for c in candidates if c.is_file()), path if path.is_dir() else None)

    def _member(self, module: str, rest: list[str], seen: frozenset[str]) -> ast.AST | None:
        bound = self._bound(module).get(rest[0])
        if bound is None:
            stars = [origin for key, origin in self._bound(module).items() if key.startswith("*")]
            return self._first((".".join([str(star), *rest]) for star in stars), seen)
        if isinstance(bound, str):
            outside = self._file(bound.split(".")[0]) is None
            return _NO_NODE if outside else self._find(".".join([bound, *rest[1:]]), seen)
        if len(rest) == 1 or not isinstance(bound, ast.ClassDef):
            return bound
        member = dict(_bindings(bound.body, "")).get(rest[1])
        if isinstance(member, ast.AST):
            return member
        return self._first((f"{module}.{ast.unparse(base)}.{rest[1]}" for base in bound.bases), seen)

    def _first(self, names: Iterable[str], seen: frozenset[str]) -> ast.AST | None:
        return next((node for name in names if (node := self._find(name, seen)) is not None), None)

    def _bound(self, module: str) -> dict[str, ast.AST | str]:
        if module not in self._bindings:
            path = self._file(module)
            text = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
            package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
            self._bindings[module] = dict(_bindings(ast.parse(text).body, package))
        return self._bindings[module]


def parameters(node: ast.FunctionDef) -> list[str] | None:
    """Return a function's parameters by name, in order; None if it takes ``*args``."""
    a = node.args
    return None if a.vararg else [argument.arg for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


def _bindings(body: Iterable[ast.stmt], package: str) -> Iterator[tuple[str, ast.AST | str]]:
    """Yield what a module binds: a name and its node, or a name and where it was imported from."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (above, node.module)))
            for alias in node.names:
                if alias.name == "*":
                    yield f"*{origin}", origin
                else:
                    yield alias.asname or alias.name, f"{origin}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                yield name, alias.name if alias.asname else name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from ((n.id, node) for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            inner = [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
            handlers = [s for handler in getattr(node, "handlers", ()) for s in handler.body]
            # What the body binds counts more than what stands in for it where an import fails.
            yield from _bindings([*handlers, *reversed(inner)], package)


# ---------------------------------------------------------------------- versions


@dataclass(frozen=True)
class Version:
    """One version of a package, and the folder that holds its ``megatron``."""

    package: str
    number: str
    folder: Path
    origin: str
    """How it came here: ``installed``, ``PyPI`` or ``source``."""
    python: str = ""
    """What its metadata wants of Python."""


def installed() -> list[Version]:
    """Return the versions of the environments beside this file: what NeMo trains with, and those that lie apart."""
    import sysconfig

    places = (Path(sysconfig.get_paths()["purelib"]), *ROOT.glob(".venv-bridge/lib/python*/site-packages"))
    return [
        Version(package, _metadata(info, "Version"), place, "installed", _metadata(info, "Requires-Python"))
        for place in places
        for package in PACKAGES
        for info in sorted(place.glob(f"{package.replace('-', '_')}-*.dist-info"))
    ]


def fetched(folder: Path) -> Iterator[Version]:
    """Download the wheels of ``FETCHED`` and unpack them; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:"]
    for package, numbers in FETCHED.items():
        for number in numbers:
            place = folder / f"{package}-{number}"
            wanted = ["--python-version", PYTHON, "--dest", str(place), f"{package}=={number}"]
            subprocess.run([*command, *wanted], check=True)
            (wheel,) = place.glob("*.whl")
            zipfile.ZipFile(wheel).extractall(place)
            (info,) = place.glob("*.dist-info")
            yield Version(package, number, place, "PyPI", _metadata(info, "Requires-Python"))


def of_folder(said: str) -> Version:
    """Read ``NUMBER=FOLDER``; the folder holds ``megatron``, or ``src/megatron`` as Megatron-Bridge's repository does."""
    number, _, path = said.partition("=")
    folder = Path(path) / "src" if (Path(path) / "src" / "megatron").is_dir() else Path(path)
    package = next((p for p, module in PACKAGES.items() if folder.joinpath(*module.split(".")).is_dir()), None)
    if package is None:
        raise SystemExit(f"{said}: no megatron/core or megatron/bridge lies in {folder}. Give NUMBER=FOLDER.")
    return Version(package, number, folder, "source")


def _metadata(info: Path, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", (info / "METADATA").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def asked_of(version: Version, names: Iterable[str]) -> list[str]:
    """Return those of the names that this version's package could have."""
    prefix = PACKAGES[version.package]
    return [name for name in names if name == prefix or name.startswith(f"{prefix}.")]


def missing(version: Version, names: Iterable[str]) -> list[str]:
    """Return the names that the version's source has not, or has with other parameters than our replacement."""
    sources, ours = Sources(version.folder), replacements()
    return [
        name
        for name in asked_of(version, names)
        if not sources.has(name) or (name in ours and sources.parameters(name) not in (None, ours[name]))
    ]


# ---------------------------------------------------------------------- what runs

_PROBE = """
import importlib, json, sys
from nemo_fp8 import te_cpu
te_cpu.install()
def there(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        fields = parts[length:]
        for part in fields:
            if part in getattr(found, "__dataclass_fields__", {}):
                return True
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
print(json.dumps([name for name in json.loads(sys.argv[1]) if not there(name)]))
"""


def not_imported(version: Version, names: Iterable[str]) -> list[str]:
    """Import every name in a process of its own; return those that are not there."""
    path = os.pathsep.join([str(version.folder), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-c", _PROBE, json.dumps(asked_of(version, names))]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"megatron-core {version.number} is not importable: {done.stderr.strip().splitlines()[-1]}")
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def trained(version: Version) -> list[str]:
    """Return the recipes under which Megatron's GPT takes steps with this version, and its loss falls."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.train.megatron_alone import run_alone

    found = run_alone([{"recipe": recipe} for recipe in RECIPES], {}, str(version.folder))
    assert found["version"] == version.number, found["version"]
    runs = zip(RECIPES, found["runs"], strict=True)
    return [recipe for recipe, run in runs if run["losses"] and run["losses"][-1] < run["losses"][0]]


# ---------------------------------------------------------------------- the page

_HEAD = """# Versions of Megatron-Core and Megatron-Bridge

NeMo 2.7.3 trains with megatron-core 0.15.3, Megatron-Bridge 0.3.1 with 0.16.1. Both lie here. What is newer wants Python 3.12, and
does not install beside NeMo; its source can be read all the same. A name that is there is no promise that it means the same: what is
said to train has trained, and the rest has been read. A function that we replace counts as there if it takes the same parameters.
A row from a source has its commit behind the number, and what is on PyPI was downloaded and not installed.

`nemo_fp8` touches {count} names of Megatron, each found in its own source: what it imports, reaches, replaces, or writes as a config's field.

| package | version | from | Python | names of ours that it has | and has not |
|---|---|---|---|---|---|
"""
_RUNS = """
## What runs here

Every name imported, and Megatron's GPT on TransformerEngine's layers for four steps of Adam, on a CPU over `te_cpu`:

| megatron-core | names not importable | trains under |
|---|---|---|
"""
_NAMES = """
## The names

| name | touched by | not in |
|---|---|---|
"""
_TAIL = """
Written by `tools/stack_versions.py --write`; `--source NUMBER+COMMIT=FOLDER` adds one that is not on PyPI, from a checkout of its repository.
"""


def row(version: Version, names: Iterable[str]) -> str:
    """Return one line of the page's first table."""
    asked, gone = asked_of(version, names), missing(version, names)
    has = f"{len(asked) - len(gone)} of {len(asked)}"
    return (
        f"| {version.package} | {version.number} | {version.origin} | {version.python} | {has} | "
        f"{', '.join(f'`{_short(name)}`' for name in gone)} |"
    )


def run_row(version: Version, names: Iterable[str], recipes: Iterable[str]) -> str:
    """Return one line of the page's second table."""
    gone = ", ".join(f"`{_short(name)}`" for name in not_imported(version, names)) or "none"
    return f"| {version.number} | {gone} | {', '.join(recipes)} |"


def name_rows(names: dict[str, set[str]], versions: Iterable[Version]) -> list[str]:
    """Return the lines of the page's third table."""
    lacking: dict[str, list[str]] = {}
    for version in versions:
        for name in missing(version, names):
            lacking.setdefault(name, []).append(f"{version.package.removeprefix('megatron-')} {version.number}")
    return [
        f"| `{name}` | {', '.join(sorted(files))} | {', '.join(lacking.get(name, []))} |"
        for name, files in names.items()
    ]


def page(names: dict[str, set[str]], versions: list[Version], runs: list[str]) -> str:
    """Return the page."""
    rows = "\n".join(row(version, names) for version in versions)
    table = "\n".join(name_rows(names, versions))
    return f"{_HEAD.format(count=len(names))}{rows}\n{_RUNS}" + "\n".join(runs) + f"\n{_NAMES}{table}\n{_TAIL}"


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def main() -> int:
    """Ask every version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", default=[], metavar="NUMBER=FOLDER")
    parser.add_argument("--offline", action="store_true", help="fetch nothing from PyPI")
    parser.add_argument("--write", action="store_true", help="write docs/stacks.md")
    options = parser.parse_args()
    names = touched()
    here = installed()
    cores = [version for version in here if version.package == "megatron-core"]
    with tempfile.TemporaryDirectory() as folder:
        more = [] if options.offline else [*fetched(Path(folder))]
        versions = sorted([*here, *more, *map(of_folder, options.source)], key=lambda v: (v.package, _order(v.number)))
        text = page(names, versions, [run_row(version, names, trained(version)) for version in cores])
    sys.stdout.write(text)
    if options.write:
        if lost := lost_sources(PAGE.read_text(), text):
            raise SystemExit(f"{PAGE} would lose its rows of sources: {', '.join(lost)}. Give each as --source.")
        PAGE.write_text(text)
    return 0


def lost_sources(old: str, new: str) -> list[str]:
    """Return the packages of which the old page has a row from a source and the new one has none."""
    of_page = [set(re.findall(r"^\| ([\w-]+) \| [^|]+ \| source \|", page, re.MULTILINE)) for page in (old, new)]
    return sorted(of_page[0] - of_page[1])


def _order(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", number))


if __name__ == "__main__":
    sys.exit(main())
