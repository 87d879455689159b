"""Checkpoints that a run would load wrongly: those of Megatron's own layers, and any without its optimizer's state."""

import re
from pathlib import Path

import pytest
from support.train.harness import RunFailed, train_tiny

DELAYED = {"plugin": "bf16_with_fp8_mixed", "settings": {"fp8_param_gather": False}}
STEPS, SAVED = 5, 3
# Megatron's own layers need it on a CPU, and TransformerEngine's do not mind.
LOCAL = {"before": "train.test_loading:local_layers", "config": {"masked_softmax_fusion": False}}


def remedy(checkpoint):
    """What the refusal says, and NeMo's message lacks; it names what RestoreConfig takes."""
    start = f"Start a run from its weights: nl.AutoResume(restore_config=nl.RestoreConfig(path={checkpoint!r}))"
    return re.escape(start)


def saved(folder, **settings):
    """A run's losses, and a checkpoint from the middle of it."""
    losses = train_tiny(steps=STEPS, save_every=SAVED, folder=str(folder), stock=False, **settings).losses
    return losses, str(Path(folder, "tiny/run/checkpoints", f"step={SAVED - 1}"))


def local_layers(trainer, tiny):
    """Megatron's own layers as where there is no TransformerEngine, with the state that an emulation of delayed scaling
    had."""
    import nemo.collections.llm.gpt.model.base as nemo
    import torch
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    state = {"forward.scale": torch.full((2,), 8.0), "forward.history": torch.zeros(16, 2)}
    nemo.HAVE_TE = False
    transformer_block.LayerNormImpl = WrappedTorchNorm
    for kind, linear in (("column", ColumnParallelLinear), ("row", RowParallelLinear)):
        emulated = type(f"Fp8{linear.__name__}", (linear,), {"get_extra_state": lambda self: state})
        setattr(LocalSpecProvider, f"{kind}_parallel_linear", lambda self, emulated=emulated: emulated)


def local_layers_beside_te(trainer, tiny):
    """Megatron's own layers where TransformerEngine is installed: the norm after the last layer is TransformerEngine's
    all the same."""
    import nemo.collections.llm.gpt.model.base as nemo

    nemo.HAVE_TE = False


@pytest.fixture(scope="module")
def of_local_layers(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("local"), **LOCAL)


@pytest.fixture(scope="module")
def of_te(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("te"), **DELAYED)


@pytest.mark.parametrize("precision", [{}, DELAYED], ids=["bf16", "delayed"])
def test_a_checkpoint_of_megatrons_own_layers_is_refused_with_the_remedy(of_local_layers, precision):
    with pytest.raises(RunFailed, match=f"written by Megatron's own layers(.|\n)*{remedy(of_local_layers[1])}"):
        train_tiny(stock=False, steps=STEPS, resume=of_local_layers[1], **precision)


def test_so_is_one_that_was_written_beside_transformer_engine(tmp_path):
    _, checkpoint = saved(tmp_path, **LOCAL | {"before": "test_loading:local_layers_beside_te"})
    with pytest.raises(RunFailed, match=f"written by Megatron's own layers(.|\n)*{remedy(checkpoint)}"):
        train_tiny(stock=False, steps=STEPS, resume=checkpoint)


def test_nor_does_nemos_advice_load_it(of_local_layers):
    """Without strictness NeMo would end in ``KeyError: 'optimizer'``, or take Adam's moments in another order."""
    with pytest.raises(RunFailed, match="written by Megatron's own layers"):
        train_tiny(stock=False, steps=STEPS, resume=of_local_layers[1], strategy={"ckpt_load_strictness": False})


def test_the_remedy_starts_a_run_from_the_weights(of_local_layers, of_te):
    start = {"stock": False, "steps": 2, **DELAYED}
    loose = {"ckpt_load_strictness": False}
    losses = train_tiny(restore=of_local_layers[1], strategy=loose, **start).losses
    assert losses == pytest.approx(train_tiny(restore=of_te[1], **start).losses, rel=0.01)
    assert losses[0] < of_local_layers[0][0] - 0.5
    with pytest.raises(RunFailed, match=remedy(of_local_layers[1])):
        train_tiny(restore=of_local_layers[1], **start)


def test_megatrons_own_layers_load_their_own_checkpoints(of_local_layers):
    losses, checkpoint = of_local_layers
    assert train_tiny(stock=False, steps=STEPS, resume=checkpoint, **LOCAL).losses == losses[SAVED:]


def test_weights_without_the_optimizer_are_loaded_by_restoring(of_te):
    """NeMo's plugin shows the bug: the second step is one of the weights that the model was initialized with."""
    losses, checkpoint = of_te
    without = {"steps": STEPS, "resume": checkpoint, "strategy": {"ckpt_load_optimizer": False}, **DELAYED}
    assert train_tiny(stock=True, **without).losses[-1] > losses[-1] + 0.5, "NeMo has repaired it: drop the refusal"
    with pytest.raises(RunFailed, match=f"ckpt_load_optimizer=False(.|\n)*{remedy(checkpoint)}"):
        train_tiny(stock=False, **without)
