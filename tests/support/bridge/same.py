"""One run on both stacks: the tiny Llama with a constant learning rate, and weights drawn as on a GPU.

    python -m support.bridge.same STACK PRECISION STEPS          in the stack's environment; prints the losses as JSON

What the recipes of the two stacks differ in is set here: NeMo's draws weights whole and cuts them, which Bridge
cannot, and their warm-ups begin one step apart.
"""

import json
import sys


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


def main(stack, precision, steps):
    from nemo_fp8 import preset
    from nemo_fp8.experiments.trial import Trial, run_trial

    trial = Trial(f"support.bridge.same.{stack}", preset(precision), steps=int(steps), ranks=1, stack=stack)
    sys.stdout.write(json.dumps(run_trial(trial).losses) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
