"""Write the documents that are generated from the code, or with ``--check`` say which are out of date.

A generated document is a function that returns its text, and a row in ``DOCUMENTS``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from make_docs_families import families
from make_docs_support import lint, support
from make_docs_types import front_door

from nemo_fp8.contract.explain import explain
from nemo_fp8.contract.presets import PRESETS

ROOT = Path(__file__).parents[1]
MADE_BY = "\nThis page is generated: `.venv/bin/python tools/make_docs.py` writes it, and `make check` holds it to the code.\n"

RECIPES_HEAD = """# Recipes

The named precisions: the same names and values as NeMo 2.7.3, Megatron-Bridge's names for delayed scaling, and honest aliases.
Hyphens and underscores are the same. Each one is a factory (`nemo_fp8.bf16_with_fp8_mixed()`), a nemo-run argument
(`trainer.plugins=bf16_with_fp8_mixed`), and a row of the table in `nemo_fp8/contract/presets.py`.

"""


def recipes() -> str:
    """Return docs/recipes.md: every preset, what it sets, and in plain words what it does."""
    columns = (
        "preset",
        "compute",
        "FP8",
        "scaling",
        "FP8 weights",
        "kept layers",
        "weight / activation scale",
        "rollout",
    )
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    rows = "".join(
        f"| `{name}` | {p.compute} | {p.format or '-'} | {p.scaling or '-'} | {'yes' if p.fp8_param else '-'} | "
        f"{f'{p.first_layers}+{p.last_layers}' if p.scaling else '-'} | "
        f"{f'{p.weight_scale} / {p.activation_scale}' if p.is_fp8 else '-'} | "
        f"{p.compute if p.rollout == 'compute' else f'{p.rollout} {p.rollout_block}'} |\n"
        for name, p in PRESETS.items()
    )
    distinct: dict[object, list[str]] = {}
    for name, p in PRESETS.items():
        distinct.setdefault(p, []).append(name)
    words = "".join(
        f"\n### {' = '.join(f'`{name}`' for name in names)}\n\n```text\n{explain(PRESETS[names[0]])}\n```\n"
        for names in distinct.values()
    )
    return f"{RECIPES_HEAD}{head}{rows}{MADE_BY}\n## In plain words\n\nPresets with equal values share a paragraph.\n{words}"


DOCUMENTS: dict[str, Callable[[], str]] = {
    "docs/recipes.md": recipes,
    "docs/support.md": support,
    "docs/lint.md": lint,
    "docs/families.md": families,
    "nemo_fp8/__init__.pyi": front_door,
}


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, make in DOCUMENTS.items():
        path, text = ROOT / name, make()
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if check and stale:
        sys.exit(f"Out of date: {', '.join(stale)}. The code they are made from has changed. Run: make docs")
    print(f"{len(DOCUMENTS)} generated documents are up to date" if not stale else f"wrote {', '.join(stale)}")


if __name__ == "__main__":
    main()
