"""The wheel, and environments that hold it and what it declares, without the checkout and without a download."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def source(folder):
    """A copy of what builds, since setuptools writes into its sources."""
    for name in ("nemo_fp8", "nemo_fp8_hook"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build_wheel(folder):
    """Without isolation: what builds is pinned with the rest."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        folder / "dist",
        source(folder / "source"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = (folder / "dist").iterdir()
    return wheel


class Environment:
    """A virtual environment with a wheel and the distributions that it asks for under some extras, and nothing else.

    They are those of this environment, by links: a copy of torch would take a minute.
    """

    def __init__(self, folder, wheel, *extras):
        self.home = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin/python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        for distribution in _closure(requirements(wheel), extras):
            _link(distribution, self.site)
        self.pip("install", "--no-index", "--no-deps", wheel)
        self.pip("check")

    def pip(self, *words):
        subprocess.run([sys.executable, "-m", "pip", "--python", self.python, *words], check=True, capture_output=True)

    def run(self, *words, **variables):
        """A command of the environment, away from the checkout."""
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {
            "PATH": f"{self.home / 'bin'}:{env['PATH']}",
            "COLUMNS": "80",
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        }
        return subprocess.run(
            list(map(str, words)), capture_output=True, text=True, env=env, cwd=self.home, timeout=120
        )

    def nemo_fp8(self, *words, **variables):
        return self.run(self.home / "bin/nemo-fp8", *words, **variables)

    def code(self, text, *arguments, **variables):
        return self.run(self.python, "-c", text, *arguments, **variables)


def requirements(wheel):
    """What the wheel asks for, line by line, with its extras."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().partition("\n\n")[0].splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]


def _closure(requirements, extras):
    """What is asked for, and what that asks for."""
    found, wanted = {}, [(text, extras) for text in requirements]
    while wanted:
        text, asked = wanted.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *asked)):
            continue
        if (name, tuple(requirement.extras)) not in found:
            found[name, tuple(requirement.extras)] = importlib.metadata.distribution(name)
            wanted += [(text, tuple(requirement.extras)) for text in importlib.metadata.requires(name) or []]
    return found.values()


def _link(distribution, site):
    for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(distribution.locate_file(top))
