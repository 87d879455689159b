"""Measure a road through the package: the files whose functions run between a call of a user's and its result.

    .venv/bin/python tools/road.py factory           bf16_with_fp8_blockwise_mixed(fp8_margin=1), its Config built, two steps
    .venv/bin/python tools/road.py inspect           nemo-fp8 inspect CHECKPOINT
    .venv/bin/python tools/road.py doctor            nemo-fp8 doctor
    .venv-rollout/bin/python tools/road.py push      Refit(llm).push(weights), into an engine in this process

The files stand in the order of their first call, with the lines of the functions that ran and the lines of the whole
file: what a reader has to read, and what is to be opened for it. ``sys.setprofile`` sees the functions. What runs only
while a module is imported builds a table and is left out. So are files that are no part of the road elsewhere, a row of
``ROADS`` each with its reason; ``--all`` prints these as well, and ``--functions`` names the functions.

What it does not see: functions that C++ threads call, and those that ``dataclass`` writes.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nemo_fp8"
FUNCTIONS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
for _path in (ROOT / "tests", ROOT):  # whose small checkpoints and engines it takes
    sys.path.insert(0, str(_path))


# ---------------------------------------------------------------------- what ran


@dataclass
class Seen:
    """The functions below a folder that ran, in the order of their first call."""

    folder: Path = PACKAGE
    functions: dict[types.CodeType, None] = field(default_factory=dict)
    importing: dict[int, int] = field(default_factory=dict)
    """Thread -> the number of modules below the folder that it is importing now."""

    def __call__(self, frame: types.FrameType, event: str, _: Any) -> None:
        """Take note of a call; this is the function for ``sys.setprofile``."""
        code, thread = frame.f_code, threading.get_ident()
        if not code.co_filename.startswith(f"{self.folder}/"):
            return
        if code.co_name == "<module>":
            step = {"call": 1, "return": -1}.get(event, 0)
            self.importing[thread] = self.importing.get(thread, 0) + step
        elif event == "call" and not self.importing.get(thread):
            self.functions.setdefault(code)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every call until the context closes, of threads that start meanwhile, too."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def files(self) -> dict[str, list[types.CodeType]]:
        """Return the functions by their file, whose name is relative to the folder."""
        found: dict[str, list[types.CodeType]] = {}
        for code in self.functions:
            found.setdefault(os.path.relpath(code.co_filename, self.folder), []).append(code)
        return found


def lines_of(codes: list[types.CodeType]) -> int:
    """Return how many lines these functions of one file have, from their decorators to their last brackets."""
    ends = _ends(Path(codes[0].co_filename))
    spans = (range(code.co_firstlineno, ends.get(code.co_firstlineno, code.co_firstlineno) + 1) for code in codes)
    return len(set().union(*spans))


@cache
def _ends(file: Path) -> dict[int, int]:
    """Return the last line of everything in a file that is a function, a lambda or a comprehension, by its first."""
    ends: dict[int, int] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, FUNCTIONS):
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            ends[first] = max(ends.get(first, 0), node.end_lineno or 0)
    return ends


# ---------------------------------------------------------------------- the roads


def factory(seen: Seen, folder: Path) -> None:
    """Make a Config with a factory, build it into a run of a tiny Llama, and train two steps in this process."""
    import fiddle as fdl

    import nemo_fp8
    from nemo_fp8.experiments import tiny_llama

    with seen.watching():
        config = nemo_fp8.bf16_with_fp8_blockwise_mixed(fp8_margin=1)
        recipe = tiny_llama(config, ranks=1, steps=2)
        recipe.trainer.enable_checkpointing = recipe.trainer.enable_progress_bar = False
        recipe.log.ckpt = recipe.log.tensorboard = recipe.resume = None
        recipe.log.log_dir = str(folder)
        fdl.build(recipe)()


def inspect(seen: Seen, folder: Path) -> None:
    """Say what FP8 costs each tensor of a small checkpoint."""
    from support.rollout.models import write

    _command(seen, "inspect", str(write(folder / "checkpoint", "qwen3")))


def doctor(seen: Seen, folder: Path) -> None:
    """Say what this machine can run."""
    _command(seen, "doctor")


def push(seen: Seen, folder: Path) -> None:
    """Push the weights of one small checkpoint into an engine that runs in this process on another's."""
    from support.rollout import settings

    settings.put_in_place()  # before vLLM is imported
    from safetensors.torch import load_file
    from support.rollout.engines import fp8, start, stop
    from support.rollout.models import write

    from nemo_fp8.rollout import Refit

    weights = load_file(write(folder / "new", "qwen3", seed=1) / "model.safetensors")
    llm = start(write(folder / "old", "qwen3"), apart=False, **fp8())
    try:
        with seen.watching():
            Refit(llm).push(weights).require()
    finally:
        stop(llm)


def _command(seen: Seen, *words: str) -> None:
    import nemo_fp8.cli

    sys.argv = ["nemo-fp8", *words]
    with suppress(SystemExit), seen.watching():
        nemo_fp8.cli.main()


_ON_A_CPU = "stands for TransformerEngine's kernels on a machine without a GPU"
_NO_GPU = "lets Megatron run on a machine without a GPU"
_TINY = "is the tiny run that this road ends in"
_OLD = "finds modules under their old names"

# The road, and the files that are no part of it elsewhere: their name or folder -> what they do.
ROADS: dict[str, tuple[Callable[[Seen, Path], None], dict[str, str]]] = {
    "factory": (
        factory,
        {
            **dict.fromkeys(("te_cpu", "numerics", "own_folder.py"), _ON_A_CPU),
            **dict.fromkeys(("train/accelerator.py", "train/megatron_cpu.py", "train/patching.py"), _NO_GPU),
            "train/first_weights.py": "keeps the first values of FP8 weights; on a CPU it is in place for BF16, too",
            **dict.fromkeys(("experiments", "recipes"), _TINY),
            "moved.py": _OLD,
        },
    ),
    "inspect": (inspect, {"moved.py": _OLD}),
    "doctor": (doctor, {"moved.py": _OLD}),
    "push": (push, {"moved.py": _OLD}),
}


def measure(road: str) -> Seen:
    """Run a road and return the functions of the package that ran. What the road prints goes to stderr."""
    seen, (run, _) = Seen(), ROADS[road]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        run(seen, Path(folder))
    return seen


def beside(road: str, file: str) -> str:
    """Return why a file is no part of the road elsewhere; empty if it is."""
    return next((why for name, why in ROADS[road][1].items() if f"{file}/".startswith(f"{name}/")), "")


def report(road: str, seen: Seen, *, every: bool = False, functions: bool = False) -> str:
    """Return the table of a road."""
    files = seen.files()
    rows, out = [], [f"{'file':<32}{'lines called':>14}{'lines in all':>14}"]

    def row(file: str, codes: list[types.CodeType], more: str = "") -> tuple[int, int]:
        counted = lines_of(codes), len((seen.folder / file).read_text().splitlines())
        out.append(f"{file:<32}{counted[0]:>14,}{counted[1]:>14,}{more}")
        if functions:
            out.append("    " + ", ".join(dict.fromkeys(code.co_name for code in codes if code.co_name[0] != "<")))
        return counted

    for file, codes in files.items():
        if not beside(road, file):
            rows.append(row(file, codes))
    called, whole = (sum(column) for column in zip(*rows, strict=True))
    out.append(f"{f'{len(rows)} files':<32}{called:>14,}{whole:>14,}")
    aside = {file: codes for file, codes in files.items() if beside(road, file)}
    if aside and every:
        out.append("")
        for file, codes in aside.items():
            row(file, codes, f"  {beside(road, file)}")
    elif aside:
        out.append(f"{len(aside)} more files run here that are no part of this road elsewhere: --all")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("road", choices=ROADS)
    parser.add_argument("--all", action="store_true", help="print the files, too, that are no part of it elsewhere")
    parser.add_argument("--functions", action="store_true", help="name the functions that ran")
    options = parser.parse_args()
    seen = measure(options.road)
    print(report(options.road, seen, every=options.all, functions=options.functions))


if __name__ == "__main__":
    main()
