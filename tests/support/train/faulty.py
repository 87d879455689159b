"""What the tests of faults share: small runs, and what is put into their ranks."""

import functools
import os
from pathlib import Path

import pytest

from support.train.harness import RunFailed, train_tiny

SMALL = {"config": {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128}, "seq_length": 32}
DELAYED = {"stock": False, "settings": {"fp8_param_gather": False}}


def fails(*args, **settings):
    """The log of a run that must fail."""
    with pytest.raises(RunFailed) as error:
        train_tiny(*args, **SMALL, **settings)
    return str(error.value)


def checkpoints(folder):
    return Path(folder) / "tiny" / "run" / "checkpoints"


# ---------------------------------------------------------------------- in the ranks


def ours(trainer, tiny):
    """The classes that a script takes from nemo_fp8 instead of from NeMo."""
    from nemo import lightning as nl

    from nemo_fp8.train.checkpoints import Resume
    from nemo_fp8.train.faults import Faults

    nl.AutoResume = Resume
    trainer.callbacks.append(Faults(timeout=float(os.environ["TIMEOUT"]) if "TIMEOUT" in os.environ else None))


def ours_falling_back(trainer, tiny):
    from nemo import lightning as nl

    ours(trainer, tiny)
    nl.AutoResume = functools.partial(nl.AutoResume, fall_back=True)


def at_step(trainer, step, do, layer=1):
    """Call ``do(output of a linear)`` in the middle of the forward of a step."""
    from lightning.pytorch.callbacks import Callback

    class Hook(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == step:
                linears = [
                    module for name, module in trainer.strategy.model.named_modules() if name.endswith("linear_fc1")
                ]
                self.handle = linears[layer % len(linears)].register_forward_hook(
                    lambda module, _, output: do(output[0])
                )

        def on_train_batch_end(self, *_):
            if hasattr(self, "handle"):
                self.handle.remove()

    trainer.callbacks.append(Hook())
