"""Pages hold the tables of losses that their records give, row by row."""

import json
from pathlib import Path

import pytest

from benchmarks.train import CONTROLS, loss_table

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(record):
    return json.loads((DOCS / "benchmarks" / record).read_text(encoding="utf-8"))


def test_nvfp4s_page_holds_the_tables_of_its_record():
    rows, page = rows_of("nvfp4.json"), (DOCS / "nvfp4.md").read_text(encoding="utf-8")
    controls = [row for row in rows if row["precision"] in CONTROLS]
    for table in (loss_table(rows), loss_table(controls, base=CONTROLS[0])):
        assert table in page
    worse = [row | {"loss": 1.01 * row["loss"]} if row["precision"] == "control" else row for row in rows]
    assert loss_table(worse) not in page


def test_a_gap_is_to_the_same_seed_and_has_an_interval_from_five_seeds_on():
    rows = [
        {"seed": seed, "precision": name, "loss": loss}
        for name, losses in (("a", (1.0, 2.0, 4.0, 8.0, 10.0)), ("b", (1.1, 2.2, 4.0, 8.8, 11.0)))
        for seed, loss in enumerate(losses)
    ]
    *_, last = loss_table(rows, base="a").splitlines()
    assert last.startswith("| `b` | 1.1000 (+10.00%) | 2.2000 (+10.00%) | 4.0000 (+0.00%) |")
    assert last.endswith("| +8.00% ± 5.55 |")  # 2.776 * 4.472 / sqrt(5)
    assert "±" not in loss_table([row for row in rows if row["seed"] < 4], base="a")
    with pytest.raises(KeyError):
        loss_table([row for row in rows if row["precision"] == "b"], base="a")
