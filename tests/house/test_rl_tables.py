"""Pages hold the tables of GRPO that their records give: a row for each pair of training and rollout."""

import copy
import json
from pathlib import Path
from statistics import mean

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CORRECTED, UNCORRECTED = "rl.json", "rl_uncorrected.json"
BASE, WITHOUT = "bf16-bf16", "-uncorrected"
SHOWN = {
    "bf16-bf16": "BF16-BF16",
    "bf16-fp8": "BF16-FP8",
    "fp8-fp8": "FP8-FP8",
    "bf16-nvfp4": "BF16-NVFP4 (W4A16)",
}
FOUR_BITS = {"bf16-bf16": "BF16", "bf16-nvfp4": "NVFP4, W4A16"}


@pytest.fixture
def records():
    return {
        name: json.loads((DOCS / "benchmarks" / name).read_text(encoding="utf-8")) for name in (CORRECTED, UNCORRECTED)
    }


def accuracies(record, arm):
    """Step -> the accuracy of each seed."""
    by_seed = record["validation_accuracy"][arm].values()
    return {int(step): [seed[step] for seed in by_seed] for step in next(iter(by_seed))}


def gaps(record, arm, to):
    """The points between the last accuracies of an arm and of another, ``to`` (a record and its arm): mean, seeds."""
    mine, theirs = ([*accuracies(*at).values()][-1] for at in ((record, arm), to))
    points = [100 * (a - b) for a, b in zip(mine, theirs, strict=True)]
    return f"{mean(points):+.1f}: {', '.join(f'{p:+.1f}' for p in points)}"


def errors(record, arm, name, form):
    """A mismatch metric's mean over the seeds, and its largest."""
    by_seed = [seed[name] for seed in record["mismatch"][arm].values()]
    return form(mean(seed["mean"] for seed in by_seed)), form(max(seed["largest"] for seed in by_seed))


def row(record, arm, *to):
    """A row of docs/rl.md; ``to`` are the arms that it is compared with."""
    of_steps = [f"{100 * mean(seeds):.1f} %" for seeds in accuracies(record, arm).values()]
    prob = ", ".join(errors(record, arm, "token_mult_prob_error", "{:.4f}".format))
    kl = ", ".join(errors(record, arm, "gen_kl_error", lambda x: f"{x:.1e}".replace("e-0", "e-")))
    points = [gaps(record, arm, other) if other[1] != arm else "" for other in to]
    cells = [SHOWN[arm.removesuffix(WITHOUT)], *of_steps, *points, prob, kl]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def four_bits_row(record, arm):
    """A row of docs/nvfp4.md."""
    first, *_, last = (f"{100 * mean(seeds):.1f}%" for seeds in accuracies(record, arm).values())
    prob, _ = errors(record, arm, "token_mult_prob_error", "{:.4f}".format)
    kl, _ = errors(record, arm, "gen_kl_error", "{:.1e}".format)
    points = "" if arm == BASE else gaps(record, arm, (record, BASE))
    return f"| {' | '.join([FOUR_BITS[arm], first, last, points, prob, kl])} |".replace("|  |", "| |")


def tables(records):
    """Page -> the rows that it holds."""
    corrected, without = records[CORRECTED], records[UNCORRECTED]
    base = (corrected, BASE)
    rows = [row(corrected, arm, base) for arm in corrected["validation_accuracy"]]
    rows += [row(without, arm, base, (corrected, arm.removesuffix(WITHOUT))) for arm in without["validation_accuracy"]]
    return {"rl.md": rows, "nvfp4.md": [four_bits_row(corrected, arm) for arm in FOUR_BITS]}


def missing(records):
    """The rows that are not as their records say."""
    found = []
    for page, rows in tables(records).items():
        text = (DOCS / page).read_text(encoding="utf-8").splitlines()
        found += [row for row in rows if text.count(row) != 1]
    return found


def test_the_tables_hold_what_the_records_say(records):
    assert missing(records) == []
    page = (DOCS / "rl.md").read_text(encoding="utf-8")
    held = [line for line in page.splitlines() if line.startswith(("| BF16-", "| FP8-"))]
    assert sorted(held) == sorted(tables(records)["rl.md"])
    fired = [count for record in records.values() for arm in record["gate_fired"].values() for count in arm.values()]
    steps = len(fired) * records[CORRECTED]["settings"]["steps"]
    assert f"The gate fired in none of these {steps} steps" in page
    assert not any(fired)


@pytest.mark.parametrize("record", [CORRECTED, UNCORRECTED])
def test_a_number_that_is_another_one_is_seen(records, record):
    other = copy.deepcopy(records)
    for arm in other[record]["validation_accuracy"].values():
        arm["2"]["40"] += 0.01
    assert len(missing(other)) >= 2
    other = copy.deepcopy(records)
    for arm in other[record]["mismatch"].values():
        arm["3"]["gen_kl_error"]["largest"] *= 10
    assert len(missing(other)) >= 2
