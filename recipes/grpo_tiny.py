"""GRPO on two cores: a small Llama learns to sort digits, trained by NeMo and Megatron, sampled by vLLM, both in FP8.

    .venv/bin/python recipes/grpo_tiny.py --precision bf16_with_fp8_blockwise_mixed --folder /tmp/grpo

Start it again after it was killed, and it goes on from the last step.
"""

import argparse
import json
import sys
from typing import Any

from nemo_fp8.contract.naming import load
from nemo_fp8.experiments.rl.driver import ray_session, run_grpo
from nemo_fp8.experiments.rl.settings import GrpoSettings


def grpo_tiny(
    folder: str = "grpo_tiny", precision: str = "bf16_with_fp8_blockwise_mixed", **changes: Any
) -> GrpoSettings:
    """The run, with whatever of its settings is changed."""
    return GrpoSettings(**{"folder": folder, "base": f"{folder}/base", "precision": load(precision), **changes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="grpo_tiny")
    parser.add_argument("--precision", default="bf16_with_fp8_blockwise_mixed", help="a preset, or a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=JSON", help="any other field of GrpoSettings"
    )
    parser.add_argument("--address", help="a running Ray cluster (HOST:PORT); one of its own where not given")
    given = parser.parse_args()
    changes = {name: json.loads(value) for name, _, value in (change.partition("=") for change in given.set)}
    settings = grpo_tiny(given.folder, given.precision, **changes)
    with ray_session(settings.ranks + settings.engines + 1, given.address):
        run_grpo(settings, on_step=lambda row: sys.stderr.write(line(row) + "\n"))


def line(row: dict[str, Any]) -> str:
    """What a person wants to see of a step."""
    numbers = {name: row[name] for name in ("reward", "kl", "validation_accuracy") if name in row}
    numbers |= {name: row["mismatch"][name] for name in ("token_mult_prob_error", "gen_kl_error") if "mismatch" in row}
    return f"step {row['step']:4}  " + "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


if __name__ == "__main__":
    main()
