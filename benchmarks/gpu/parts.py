"""What is measured on a GPU, what that needs, and how a record is kept. Standard library only.

A record is docs/benchmarks/gpu_<part>.json: ``about`` says where its numbers come from, ``measures`` maps each measure
to one of

    {"result": ...}                   what it found
    {"result": ..., "error": why}     what it had found when it failed, died, or was ended
    {"error": why}                    it had found nothing by then
    {"skipped": why}                  it does not apply here

``later`` lists further runs, each with its ``about`` and ``measures``; training alone has some. A run has a BF16 of its
own, so that a ratio never compares two machines.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8.preflight.machine import ABSENT, Machine

ROOT = Path(__file__).resolve().parents[2]
DOCS, GOLDEN = ROOT / "docs" / "benchmarks", ROOT / "tests" / "golden"

# Distribution -> the version that is asked for; None for any.
NEEDED = {
    "torch": None, "triton": None, "numpy": None, "safetensors": None, "packaging": None, "pyyaml": None,
    "transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2", "megatron-core": "0.15.3",
}  # fmt: skip
PIP = (
    "-m pip install --no-build-isolation 'transformer-engine[pytorch]==2.20.2' megatron-core==0.15.3 "
    "safetensors packaging pyyaml"
)
ABOUT = ("torch", "triton", "transformer-engine", "megatron-core", "numpy")


@dataclass(frozen=True)
class Part:
    """A module of this folder, which has a function ``measure(run, name)`` for each of these names."""

    title: str
    shows: str
    measures: tuple[str, ...]


RECIPES = ("delayed", "tensorwise", "blockwise pow2", "blockwise fp32", "mxfp8")
_WEIGHTS = tuple(f"{recipe}, FP8 weights" for recipe in RECIPES if recipe != "blockwise fp32")
_CASES = ("bf16", *RECIPES, *_WEIGHTS)
VECTORS = ("tensorwise", "blockwise_fp32", "blockwise_pow2", "mxfp8", "delayed")
PARTS = {
    "conformance": Part(
        "The same bits",
        "golden vectors of TE's kernels into `tests/golden`, our Triton kernels, TE live beside us",
        (*(f"golden {name}" for name in VECTORS), "our kernels", "TE beside us"),
    ),
    "kernels": Part(
        "Kernels",
        "casts against the copy limit and TE's, FP8 GEMMs, a linear, a Llama layer",
        ("casts", "gemms", "linear", "layer"),
    ),
    "refit": Part(
        "Refit", "an 8B model quantized on the device, into memory laid out as an engine's", ("8B", "8B in NVFP4")
    ),
    "train": Part(
        "Training",
        "steps of four layers of Llama-3.1-8B and two of Qwen3-30B-A3B under each recipe: time, memory, loss",
        (*(f"llama: {case}" for case in _CASES), *(f"moe: {case}" for case in _CASES)),
    ),
}


def missing() -> list[str]:
    """Return what this environment lacks, in words; empty where all is there."""
    found = []
    for name, wanted in NEEDED.items():
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(name if wanted is None else f"{name} {wanted}")
            continue
        if wanted not in (None, here):
            found.append(f"{name} {wanted} (here is {here})")
    if "torch" not in found:
        import torch

        if not torch.cuda.is_available():
            found.append("a GPU that torch sees")
        elif torch.cuda.get_device_capability() < (9, 0):
            found.append(f"a GPU of sm_90 or newer (here is {torch.cuda.get_device_name()})")
    return found


def about(command: str, dry_run: bool) -> dict[str, Any]:
    """Return when, where, with what and how: everything that a number needs beside it."""
    here = Machine.here(sides=("train",))
    ours = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    versions = {"nemo_fp8": ours.stdout.strip(), "Python": here.python, "CUDA": here.cuda, "cuBLAS": here.cublas}
    versions |= {"driver": here.driver} | {name: importlib.metadata.version(name) for name in ABOUT}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "machine": dict(here.facts())["GPU"] if here.has_gpu else platform.processor() or platform.machine(),
        "versions": ", ".join(f"{name} {said}" for name, said in versions.items() if said and said != ABSENT),
        "command": command,
        "dry_run": dry_run,
    }


def read(file: Path) -> dict[str, Any]:
    """Return what a file of JSON holds; empty where there is none."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def runs(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of a record, the first before later ones; none of an empty one."""
    return [record, *record.get("later", [])] if record else []


def measured(record: dict[str, Any]) -> dict[str, Any]:
    """Return the measures of all runs; of one that several runs have, the last run's."""
    return {name: found for run in runs(record) for name, found in run["measures"].items()}


def write(file: Path, record: dict[str, Any]) -> None:
    """Write the record in one piece, so that a reader finds a whole one at any time."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(file)
