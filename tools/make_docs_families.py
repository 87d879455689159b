"""The page of families, drawn from the record that ``tools/families.py`` writes; ``make_docs.py`` puts it in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "docs/benchmarks/families.json"
HEAD = """# Families

Every architecture for text that vLLM's CPU build loads here in BF16, of which transformers has the configuration: a tiny model of each
(hidden size 256, two layers or as many as it needs, random weights of two seeds) was loaded in FP8 and pushed other weights, which then
were read back. {versions}; {count} architectures.

- **in FP8**: the linears that are stored in FP8, by vLLM's names.
- **in BF16**: what stays there by name, and why, besides routers, embeddings and the head. The log says it when the engine starts, and
  `collective_rpc("nemo_fp8_report")` when asked.
- **computed**: tensors of which vLLM's loader makes other values on the way. A push
  [makes them again](refit.md#what-a-loader-computes), and the receipt has the fingerprint of what came and of what was made.
- **push**: every bit of the model in memory is that of a fresh load of the pushed weights, every tensor was verified, and the receipt has
  no problem. **engine**: log-probabilities too, of two real engines: one was started from the weights, the other one was pushed them.
  `none` means that vLLM's own engine does not answer here in BF16 either, as said below; `-` that only memory was compared in this record.

| family | architecture | in FP8 | in BF16 | computed | push | engine |
|---|---|---|---|---|---|---|
"""
NOT = """
## Not started

vLLM itself did not load these here in BF16 from a checkpoint that transformers makes, or without torchvision, so nothing was tried:

| family | what vLLM says |
|---|---|
"""
ENGINELESS = """
## Without an engine

vLLM's own engines of these end so on this processor, in BF16 too; a model in memory loads and takes a push:

| family | what vLLM says |
|---|---|
"""
FOOT = """
```text
.venv-rollout/bin/python tools/families.py                # in memory: writes docs/benchmarks/families.json
.venv-rollout/bin/python tools/families.py --engines      # in engines, too: twenty minutes
.venv/bin/python tools/make_docs.py                       # writes this page
```

`tests/rollout/test_families.py` has the same trials as tests: a few families always, all of them under `make test-long`.
"""


def families() -> str:
    """Return docs/families.md: every family that was tried, and what was seen."""
    record = json.loads(RECORD.read_text())
    rows = {name: found for name, found in record["families"].items() if "in_memory" in found}
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    text = HEAD.format(versions=versions, count=len({found["architecture"] for found in rows.values()}))
    text += "".join(_row(name, found) for name, found in rows.items())
    ends = {name: why for name, found in record["families"].items() if (why := _why_no_engine(found))}
    for head, loads in ((ENGINELESS, True), (NOT, False)):
        reasons = {name: why for name, why in ends.items() if (name in rows) is loads}
        if reasons:
            text += head + "".join(f"| {n} | {_cell(why.partition(' [type=')[0])} |\n" for n, why in reasons.items())
    return text + FOOT


def _why_no_engine(found: dict[str, Any]) -> str:
    return str(found.get("no engine") or found.get("not in BF16") or "")


def _row(name: str, found: dict[str, Any]) -> str:
    memory, engines = found["in_memory"], found.get("in_engines")
    kept = {why: _last([n for n, w in memory["kept"].items() if w == why]) for why in memory["kept"].values()}
    good = not memory["differing"] and not memory["problems"] and memory["verified"]
    cells = (
        name,
        found["architecture"],
        _last(memory["fp8"]),
        "; ".join(f"{names}: {why}" for why, names in kept.items()),
        "; ".join(f"{_last([tensor])}: {made}" for tensor, made in memory["computed"].items()),
        "bitwise" if good else "NO",
        "none" if _why_no_engine(found) else "-" if engines is None else "bitwise" if all(engines.values()) else "NO",
    )
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _last(names: list[str]) -> str:
    """Return the last words of modules' or tensors' names, each once."""
    whole = (name.removesuffix(".weight").removesuffix(".*") for name in names)
    short = (name.rsplit(".", 2 if name.endswith(".bias") else 1)[1:] for name in whole)
    return ", ".join(dict.fromkeys(".".join(words) for words in short))


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;")
