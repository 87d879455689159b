"""Find out beneath which versions of TransformerEngine our extension fits: docs/te_versions.md.

    python tools/te_versions.py [--versions V ...] [--write]

Each version's pure-Python wheel comes from PyPI into a folder of its own. With it, in processes of their own:

    imports     ``te_cpu.install()`` and ``import transformer_engine.pytorch``, or the error
    missing     names of the extension that TE's sources ask for and ours has not
    steps       te.Linear, forward and backward, under BF16 and each recipe
    checks      our tests of te_cpu: codes, scales and results to the bit on both architectures' layouts, modules,
                NVFP4, optimizers

A version fits where nothing is missing, every recipe steps and every check passes. ``support.TE_ON_CPU`` names those
that do, and a test holds the two to each other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "te_versions.md"
OLDEST = (2, 9)
CHECKS = [
    f"tests/te_cpu/{name}.py"
    for name in ("test_bits", "test_modules", "test_nvfp4", "test_optimizer", "test_extension")
]
RECIPES = {
    "BF16": None,
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "MXFP8": "MXFP8BlockScaling",
    "NVFP4": "NVFP4BlockScaling",
}

_IMPORTS = """
from nemo_fp8 import te_cpu
te_cpu.install(versions=[{version!r}])
from test_extension import asked_for
import transformer_engine_torch as tex
print("missing:", *sorted(name for name in asked_for() if not hasattr(tex, name)))
import transformer_engine.pytorch as te
"""
_STEPS = """
import torch
from transformer_engine.common import recipe
torch.manual_seed(0)
layer = te.Linear(128, 256, params_dtype=torch.bfloat16)
x = torch.randn(64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
with te.autocast(enabled={enabled}, recipe={recipe}):
    y = layer(x)
y.float().square().mean().backward()
assert all(t.isfinite().all() for t in (y, x.grad, layer.weight.grad)) and layer.weight.grad.any()
"""


def versions() -> list[str]:
    """Return every version on the index from the oldest on, newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "transformer-engine"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Available versions: (.*)", done.stdout)
    assert found is not None, done.stdout
    return [v for v in found[1].split(", ") if tuple(map(int, v.split(".")[:2])) >= OLDEST]


def unpack(version: str, folder: Path) -> Path:
    """Unpack that version's Python into a folder of its own."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-qq",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    subprocess.run([*command, f"transformer-engine=={version}"], check=True)
    (wheel,) = folder.glob(f"transformer_engine-{version}-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / version)
    return folder / version


def examine(version: str, package: Path) -> dict[str, Any]:
    """Return what fits of this version and what does not."""
    imports = _IMPORTS.format(version=version)
    done = _run(["-c", imports], version, package)
    row: dict[str, Any] = {"version": version, "imports": _error(done), "missing": [], "steps": {}, "checks": ""}
    if found := re.search(r"^missing:(.*)$", done.stdout, re.M):
        row["missing"] = found[1].split()
    if not done.returncode:
        for name, recipe in RECIPES.items():
            code = imports + _STEPS.format(enabled=bool(recipe), recipe=f"recipe.{recipe}()" if recipe else None)
            row["steps"][name] = _error(_run(["-c", code], version, package))
        row["checks"] = (
            _run(["-m", "pytest", "-p", "no:cacheprovider", *CHECKS], version, package).stdout.strip().splitlines()[-1]
        )
    row["fits"] = not (row["imports"] or row["missing"] or any(row["steps"].values())) and bool(
        re.match(r"\d+ passed[^a-z]", row["checks"])
    )
    return row


def _run(arguments: list[str], version: str, package: Path) -> subprocess.CompletedProcess[str]:
    path = [package, ROOT, ROOT / "tests", ROOT / "tests" / "te_cpu"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", "NEMO_FP8_TE_TESTS_VERSIONS": version,
    }  # fmt: skip
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def _error(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [_HEAD, "| TE | fits | te.Linear steps under | our tests | why not |", "|---|---|---|---|---|"]
    for row in rows:
        steps = ", ".join(name for name, error in row["steps"].items() if not error)
        missing = [f"asks for `{name}`" for name in row["missing"]]
        errors = [f"`{error}`" for error in dict.fromkeys([row["imports"], *row["steps"].values()]) if error]
        checks = "" if errors else re.sub(r" in .*|, \d+ warnings?", "", row["checks"])
        lines.append(
            f"| {row['version']} | {'**yes**' if row['fits'] else 'no'} | {steps} | {checks} | "
            f"{'; '.join(missing + errors)} |"
        )
    return "\n".join(lines) + "\n"


_HEAD = """# The versions of TransformerEngine that te_cpu fits

Written by `tools/te_versions.py --write`, which takes each version's Python from PyPI and asks in processes of its own: does it import,
which names of the extension does it ask for that ours has not, does `te.Linear` step under each recipe, and do our tests of codes, scales,
modules, NVFP4 and optimizers pass, to the bit and on both architectures' layouts. `te_cpu.install()` takes those that fit, and no other.
"""


def main() -> int:
    """Examine the versions that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", nargs="+", metavar="V")
    parser.add_argument("--write", action="store_true", help="write docs/te_versions.md")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for version in arguments.versions or versions():
            rows.append(examine(version, unpack(version, Path(folder))))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(page(rows), end="")
    if arguments.write:
        PAGE.write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
