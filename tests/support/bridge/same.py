"""One run on both stacks: the tiny Llama with a constant learning rate, and weights drawn as on a GPU.

    PYTHONPATH=tests:. .venv/bin/python -m support.bridge.same                the table of docs/bridge.md
    PYTHONPATH=tests:. .venv/bin/python -m support.bridge.same nemo mxfp8     the losses of one stack, as JSON; Bridge's
                                                                              in .venv-bridge

What the recipes of the two stacks differ in is set here: NeMo's draws weights whole and cuts them, which Bridge
cannot, and their warm-ups begin one step apart.
"""

import json
import os
import subprocess
import sys

from support import ROOT, TESTS

STEPS = 5
PYTHON = {"nemo": ROOT / ".venv/bin/python", "bridge": ROOT / ".venv-bridge/bin/python"}
PRECISIONS = {
    "bf16": "bf16_mixed",
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_blockwise_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""Row of the table -> the preset."""


def nemo(precision):
    from nemo_fp8.experiments import tiny_llama

    recipe = tiny_llama(precision)
    recipe.model.config.use_cpu_initialization = False
    recipe.optim.lr_scheduler = None
    return recipe


def bridge(**settings):
    from nemo_fp8.experiments.on_bridge import tiny_llama

    config = tiny_llama(**settings)
    config.scheduler.lr_decay_style, config.scheduler.lr_warmup_iters = "constant", 0
    return config


def losses(stack, name):
    """The losses of a precision on a stack, from a process of the stack's environment."""
    env = os.environ | {"PYTHONPATH": f"{TESTS}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    words = [PYTHON[stack], "-m", "support.bridge.same", stack, name]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def row(name):
    """A row of the table: a cell for each step, with both losses where they differ."""
    pairs = zip(losses("nemo", name), losses("bridge", name), strict=True)
    cells = [f"{a:.6f}" if a == b else f"{a:.6f} / {b:.6f}" for a, b in pairs]
    return f"| {name} | {' | '.join(cells)} | {'no' if any('/' in cell for cell in cells) else 'yes'} |"


def main(stack=None, name=None):
    if stack is None:
        head = f"| | {' | '.join(f'step {i + 1}' for i in range(STEPS))} | to the bit |\n|---|{'---|' * (STEPS + 1)}"
        for line in (head, *map(row, PRECISIONS)):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        return
    from nemo_fp8 import preset
    from nemo_fp8.experiments.trial import Trial, run_trial

    trial = Trial(f"support.bridge.same.{stack}", preset(PRECISIONS[name]), steps=STEPS, ranks=1, stack=stack)
    sys.stdout.write(json.dumps(run_trial(trial).losses) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
