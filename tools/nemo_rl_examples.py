"""Read every example configuration of NeMo RL that speaks of FP8, MXFP8 or FP4, and say what becomes of each.

    python tools/nemo_rl_examples.py CHECKOUT        CHECKOUT is a copy of NVIDIA-NeMo/RL; nothing of it belongs to us

The table has one row a file: the training's recipe, the rollout's format, and whether both multiply with the same values.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.nemo_rl import beside_the_contract, check_nemo_rl, read_nemo_rl


def verdict(path: Path) -> tuple[str, str, str]:
    """Return the training's recipe, the rollout's format and the verdict of one file."""
    try:
        train, rollout = read_nemo_rl(path)
    except PrecisionError as error:
        return "", "", f"not read: {error.problems[0].what}"
    agreement = check_nemo_rl(path)
    told = "not compared" if agreement is None else "agrees" if agreement.agrees else "differs"
    beside = ", ModelOpt beside it" if any("modelopt" in f.code for f in beside_the_contract(path)) else ""
    blocks = f"fp8 {rollout.rollout_block}" if rollout.rollout == "fp8" else rollout.compute
    return train.scaling if train.is_fp8 else train.compute, blocks, told + beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    folder = parser.parse_args().checkout / "examples"
    files = [path for path in sorted(folder.rglob("*.yaml")) if re.search("fp8|fp4", path.read_text(), re.IGNORECASE)]
    print("| file | training | rollout | |\n|---|---|---|---|")
    verdicts = Counter[str]()
    for path in files:
        train, rollout, told = verdict(path)
        verdicts[told.partition(":")[0]] += 1
        print(f"| {path.relative_to(folder)} | {train} | {rollout} | {told} |")
    print(f"\n{len(files)} files: {', '.join(f'{n} {told}' for told, n in verdicts.most_common())}")


if __name__ == "__main__":
    main()
