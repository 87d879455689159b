"""A model that a trainer trains, validates, and trains on: ``before`` watches the delayed scales, ``after`` goes on."""

from lightning.pytorch import Callback

from nemo_fp8.train.linears import is_linear

TRAINER, SCALES = [], []


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
    """The scales of a run that was not interrupted."""
    extra["scales"] = SCALES


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
