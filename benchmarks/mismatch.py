"""How often the mismatch gate fires: on sound engines, and on broken ones, over many models with random weights.

    .venv/bin/python benchmarks/mismatch.py --seeds 60 --write     into docs/benchmarks/mismatch.md and mismatch.json

Each seed is a model of its own, with prompts of its own. The engine is the emulation in a third arithmetic (FP16),
which neither side of the prediction uses. ``others`` judges other prompts than the predicted ones, by the distance
alone; ``same`` judges the predicted ones, by distance and residual. Faults are put into the weights before they are
quantized.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import tiny

from nemo_fp8.contract import Precision
from nemo_fp8.mismatch import Gate, LogProbs, Run, log_probs, predict

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks/mismatch.md"
LAYER = "model.layers.1."
SOUND = "none"
WHICH = ("others", "same")
# The band alone, without room for what emulation may miss, and the gate as it is.
GATES = {"band at 1%": Gate(false_positives=1e-2, factor=1.0, residual_factor=1.0), "gate": Gate()}


def faults(weights: dict[str, torch.Tensor], family: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return what an engine could hold in place of the trainer's weights."""
    mlp = f"{LAYER}mlp.experts.0." if family == "qwen3_moe" else f"{LAYER}mlp."
    gate, up, down = (f"{mlp}{name}_proj.weight" for name in ("gate", "up", "down"))
    return {
        SOUND: weights,
        "scales of a down_proj zeroed": tiny.zeroed(weights, down),
        "scales of a k_proj zeroed": tiny.zeroed(weights, f"{LAYER}self_attn.k_proj.weight"),
        "gate and up of a layer swapped": tiny.swapped(weights, gate, up),
        **{f"a layer stale, step of {size:.1%}": tiny.noisy(weights, LAYER, size) for size in (0.1, 0.03, 0.01, 0.003)},
    }


def measure(family: str, activations: bool, seeds: int, sequences: int, length: int) -> dict[str, dict[str, float]]:
    """Count how often each gate fired, by fault."""
    precision, config = Precision(rollout="fp8"), tiny.config(family)
    fired: dict[str, dict[str, int]] = {}
    for seed in range(seeds):
        weights = tiny.state_dict(config, seed)
        predicted, others = tiny.tokens(sequences, length, 2 * seed), tiny.tokens(sequences, length, 2 * seed + 1)
        prediction = predict(config, weights, predicted, precision, activations=activations)
        for tokens, which in zip((others, predicted), WHICH, strict=True):
            trainer = log_probs(config, weights, tokens)
            for fault, held in faults(weights, family).items():
                engine = log_probs(config, held, tokens, Run(precision, activations=activations, dtype=torch.float16))
                pair = LogProbs(trainer, engine, prediction.mask)
                for name, gate in GATES.items():
                    verdict = gate.judge(prediction, pair, tokens if which == "same" else None)
                    row = fired.setdefault(fault, {})
                    row[f"{name}, {which}"] = row.get(f"{name}, {which}", 0) + verdict.fired
    return {fault: {name: count / seeds for name, count in row.items()} for fault, row in fired.items()}


def page(record: dict[str, Any]) -> str:
    """Return the page of a record."""
    given, kinds = record["settings"], record["fired"]
    verdicts = given["seeds"] * 2 * len(kinds)
    left = sum(kind[SOUND][f"band at 1%, {which}"] for kind in kinds.values() for which in WHICH)
    rows = []
    for fault in next(iter(kinds.values())):
        cells = [" / ".join(f"{100 * kind[fault][f'gate, {which}']:.0f}" for which in WHICH) for kind in kinds.values()]
        rows.append(f"| {fault} | {' | '.join(cells)} |")
    return f"""# How often the mismatch gate fires

Written by `benchmarks/mismatch.py --write`; do not edit. The gate: [the mismatch](../mismatch.md#how-sure-it-is).

Over {given["seeds"]} tiny models with random weights of each kind, each with {given["sequences"]} sequences of
{given["length"]} tokens and an engine in FP16 arithmetic, in %; first by the distance on other tokens, then by both
checks on the predicted ones. A fault lies in one layer of three, and with experts in one expert of four.

| fault | {" | ".join(kinds)} |
|---|{"---|" * len(kinds)}
{chr(10).join(rows)}

The band alone, without the factors and at 1%, was left by {round(left * given["seeds"])} of {verdicts} sound verdicts.

```text
{record["about"]["command"]}
```

{record["about"]["date"]}, {record["about"]["versions"]}. The record: [mismatch.json](mismatch.json).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} and the JSON beside it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    fired = {
        f"{family}, {'W8A8' if activations else 'W8A16'}": measure(
            family, activations, given.seeds, given.sequences, given.length
        )
        for family in ("qwen3", "qwen3_moe")
        for activations in (False, True)
    }
    about = {
        "date": datetime.date.today().isoformat(),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": f"python benchmarks/mismatch.py {' '.join(sys.argv[1:])}",
    }
    settings = {name: getattr(given, name) for name in ("seeds", "sequences", "length")}
    record = {"about": about, "settings": settings, "fired": fired}
    text = page(record)
    if given.write:
        PAGE.write_text(text)
        PAGE.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
