"""A model that a trainer trains, validates, and trains on: ``before`` watches the delayed scales, ``after`` goes on."""

import torch
from lightning.pytorch import Callback

from nemo_fp8.train.linears import is_linear

TRAINER, SCALES, WEIGHTS = [], [], []


def watch_scales(trainer, tiny):
    """Note every delayed linear's scales after each optimizer step."""

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            states = [m.fp8_meta for m in module.modules() if is_linear(m)]
            SCALES.append(
                [[*s["scaling_fwd"].scale[:2].tolist(), *s["scaling_bwd"].scale[:1].tolist()] for s in states]
            )

    trainer.callbacks.append(Watch())
    TRAINER.append(trainer)


def report(extra):
    """What was watched, of a run that may not have been interrupted."""
    extra["scales"], extra["weights"] = SCALES, WEIGHTS


def fit_again(extra):
    """A second fit of the same model by the same trainer, for as many steps as the first one had."""
    (trainer,) = TRAINER
    trainer.fit_loop.epoch_loop.max_steps = 2 * trainer.max_steps
    trainer.fit(trainer.lightning_module, datamodule=trainer.datamodule)
    report(extra)


def validate_and_fit_again(extra):
    """The same with a validation between."""
    (trainer,) = TRAINER
    trainer.validate(trainer.lightning_module, datamodule=trainer.datamodule)
    fit_again(extra)


def watch_weights_as_on_a_gpu(trainer, tiny):
    """Note every matrix after each optimizer step, where ``module.cpu()`` moves parameters to other memory."""
    torch.nn.Module.cpu = lambda self: self._apply(lambda t: t.detach().clone())

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            WEIGHTS.append([float(p.detach().double().sum()) for p in module.parameters() if p.dim() > 1])

    trainer.callbacks.append(Watch())
    TRAINER.append(trainer)


def validate_again(extra):
    """A validation of the trained model, whose loss is kept."""
    (trainer,) = TRAINER
    (found,) = trainer.validate(trainer.lightning_module, datamodule=trainer.datamodule)
    extra["validated"] = found["val_loss"]
