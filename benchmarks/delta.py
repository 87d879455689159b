"""How many bytes a push of changes takes: by encoding and share, and in steps of GRPO.

The first table is of codes of which a share changes, at random places, nearly all by one, which is what steps of an
optimizer do. Each encoding has the places and the new codes: a bit mask or the gaps between places (a byte, 255 for
"further"), with the changed bytes as XOR, as they are or through zstd; and the one of a push
(nemo_fp8/rollout/refit/patch.py). zstd is measured where the package zstandard is there; nothing else uses it.

The other tables are of GRPO on sorting digits (docs/rl.md), 1.4 million weights, BF16 training and an FP8 rollout, step
by step. "Everything" is the least that a push of all weights takes: codes, scales, and BF16 of what is not in FP8. A
push of BF16 values, which the engine casts, is about twice that. The engine is on the trainer's host: on a processor
that packs elements of vectors, patches of which more than one element in 256 changes are QUICK, and larger than those
that would travel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks/delta.md"
ELEMENTS = 1 << 22
SHARES = (0.001, 0.01, 0.1)
STEPS = 0.98  # the share of changes that are by one
RUNS = (("fp32", 3e-6), ("pow2", 3e-6), ("fp32", 1e-6), ("fp32", 1e-4))
"""The kind of scales, and the learning rate."""


def changed(share: float) -> tuple[Any, Any, Any]:
    """Return codes, and the places of those that change, and by how much."""
    draws = np.random.default_rng(0)
    codes = draws.normal(0, 20, ELEMENTS).astype(np.int8).view(np.uint8)
    places = np.flatnonzero(draws.random(ELEMENTS) < share)
    steps = np.where(draws.random(len(places)) < 0.5, 1, 255)
    by = np.where(draws.random(len(places)) < STEPS, steps, draws.integers(2, 254, len(places)))
    return codes, places, by.astype(np.uint8)


def encodings() -> dict[str, list[float]]:
    """Return bytes for each code of the tensor, by encoding, at each of SHARES."""
    from nemo_fp8.rollout.refit.patch import encode

    try:
        import zstandard

        packed: Callable[[Any], int] | None = lambda raw: len(zstandard.ZstdCompressor(3).compress(bytes(raw)))  # noqa: E731
    except ImportError:
        packed = None
    found: dict[str, list[float]] = {}
    for share in SHARES:
        codes, places, by = changed(share)
        mask = np.zeros(ELEMENTS, np.uint8)
        mask[places] = 1
        further, left = np.divmod(np.diff(places, prepend=-1) - 1, 255)
        gaps = np.concatenate(
            [np.append(np.full(n, 255, np.uint8), np.uint8(gap)) for n, gap in zip(further, left, strict=True)]
        )
        xor = codes[places] ^ (codes[places] + by)
        all_ = np.zeros(ELEMENTS, np.uint8)
        all_[places] = xor
        ways = {"bit mask": (np.packbits(mask), xor), "gaps": (gaps, xor), "XOR of all codes": (all_,)}
        for name, parts in ways.items():
            found.setdefault(name, []).append(sum(map(len, parts)) / ELEMENTS)
            if packed is not None:
                found.setdefault(f"{name}, zstd", []).append(sum(map(packed, parts)) / ELEMENTS)
        *_, raw = encode(ELEMENTS, places, by)
        found.setdefault("a push", []).append(len(raw) / ELEMENTS)
        if packed is not None:
            found.setdefault("a push, zstd", []).append(packed(raw) / ELEMENTS)
    return found


def steps_of_grpo(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Return what every push of a few runs sent, by run."""
    from nemo_fp8.contract.presets import preset
    from nemo_fp8.experiments.rl.driver import ray_session, run_grpo
    from nemo_fp8.experiments.rl.settings import GrpoSettings

    found, plain = {}, preset("bf16_mixed").replace(rollout="fp8")
    with ray_session(3):
        for scale, lr in RUNS:
            name = f"{scale}-{lr:g}"
            settings = GrpoSettings(
                folder=f"{folder}/{name}", base=f"{folder}/base", lr=lr, steps=10, delta=True, base_steps=60,
                precision=plain.replace(weight_scale=scale, activation_scale=scale), problems=16, answers=8,
                validation=64, validate_every=100, save_every=100, gate_samples=8, gate_stops=False,
            )  # fmt: skip
            found[name] = [
                {"step": row["step"], "bytes": row["push"][0]["bytes"], **row["push"][0]["delta"]}
                for row in run_grpo(settings)
            ]
    return found


def page(result: dict[str, Any]) -> str:
    """Return the page."""
    out = ["# What a push of changes sends", "", "Written by `benchmarks/delta.py`; do not edit.", ""]
    out += [f"- {key}: {value}" for key, value in result["about"].items()]
    out += ["", *(__doc__ or "").split("\n\n", 1)[-1].strip().split("\n"), "", "## By encoding", ""]
    out += [
        f"| bytes for each code | {' | '.join(f'{share:.1%} change' for share in SHARES)} |",
        "|---|---:|---:|---:|",
    ]
    out += [f"| {name} | {' | '.join(f'{one:.4f}' for one in row)} |" for name, row in result["encodings"].items()]
    for name, rows in result["steps"].items():
        scale, _, lr = name.partition("-")
        rows = [row for row in rows if not row["instead"]]
        least = min(row["full_bytes"] / row["bytes"] for row in rows)
        share = mean(row["share"] for row in rows)
        out += ["", f"## GRPO at a learning rate of {lr}, {scale.upper()} scales", ""]
        out += [
            f"{share:.3%} of codes and values change in a step; at least {least:.0f} times less than everything.",
            "",
        ]
        out += ["| step | changed | bytes | everything | times less |", "|---:|---:|---:|---:|---:|"]
        out += [
            f"| {row['step']} | {row['share']:.3%} | {row['bytes']} | {row['full_bytes']} | "
            f"{row['full_bytes'] / row['bytes']:.0f} |"
            for row in rows
        ]
    return "\n".join([*out, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and the JSON beside it")
    parser.add_argument(
        "--steps", type=Path, metavar="JSON", help="take the steps from an earlier record, and run none"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = json.loads(options.steps.read_text())["steps"] if options.steps else steps_of_grpo(folder)
    result = {
        "about": {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} processors, {platform.machine()}",
            "versions": f"numpy {np.__version__}, Python {platform.python_version()}",
            "command": "python benchmarks/delta.py --write",
        },
        "encodings": encodings(),
        "steps": steps,
    }
    text = page(result)
    print(text)
    if options.write:
        PAGE.write_text(text)
        PAGE.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
