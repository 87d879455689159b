"""Faults that really happen: each ends with an error that says what to do, or is recovered from, and the run goes on after it."""

import functools
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import harness
import pytest
import torch
from harness import RunFailed, train_tiny

from nemo_fp8.errors import PrecisionError

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


def _at_step(trainer, step, do, layer=1):
    """Call ``do(output of a linear)`` in the middle of the forward of a step."""
    from lightning.pytorch.callbacks import Callback

    class Hook(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == step:
                linears = [module for name, module in trainer.strategy.model.named_modules() if name.endswith("linear_fc1")]
                self.handle = linears[layer % len(linears)].register_forward_hook(lambda module, _, output: do(output[0]))

        def on_train_batch_end(self, *_):
            if hasattr(self, "handle"):
                self.handle.remove()

    trainer.callbacks.append(Hook())


def _signal_in_step(trainer, number):
    ours(trainer, None)
    if os.environ["RANK"] == "1":
        _at_step(trainer, 5, lambda output: os.kill(os.getpid(), number))


def kill_in_step(trainer, tiny):
    _signal_in_step(trainer, signal.SIGKILL)


def stop_in_step(trainer, tiny):
    _signal_in_step(trainer, signal.SIGSTOP)


# ---------------------------------------------------------------------- ranks that end, or stop


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_a_killed_rank_ends_the_others(layout):
    log = fails("bf16_mixed", before="test_faults:kill_in_step", ranks=2, **layout)
    assert "exit code -9" in log
    assert "others were still running" not in log
    assert "Step 5: another rank ended" in log
    assert "There is no complete checkpoint to go on from." in log


def test_after_a_killed_rank_the_run_goes_on_from_its_last_checkpoint(tmp_path):
    whole = train_tiny("bf16_mixed", ranks=2, **SMALL).losses
    log = fails("bf16_mixed", folder=str(tmp_path), before="test_faults:kill_in_step", ranks=2)
    assert "others were still running" not in log
    assert re.search(r"The run goes on from \S+step=3-last \(after 4 steps\)", log)
    after = train_tiny("bf16_mixed", folder=str(tmp_path), before="test_faults:ours", ranks=2, **SMALL).losses
    assert after == whole[4:]


def test_a_rank_that_stops_answering_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(harness, "GRACE", 0.5)  # nothing but the harness ends a rank that is stopped
    start = time.monotonic()
    log = fails("bf16_mixed", ranks=2, before="test_faults:stop_in_step", env={"TIMEOUT": "2"})
    assert time.monotonic() - start < 60, "torch would wait for 30 minutes"
    assert "Step 5: another rank ended, or has not answered in time" in log


# ---------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of six steps with a checkpoint after every second, and its losses."""
    folder = tmp_path_factory.mktemp("run")
    losses = train_tiny("bf16_mixed", folder=str(folder), save_every=2, steps=6, **SMALL).losses
    assert sorted(path.name for path in checkpoints(folder).iterdir()) == ["step=1", "step=3", "step=5", "step=5-last"]
    return folder, losses


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run without the twin of its last checkpoint, so that damage to that one costs steps."""
    shutil.copytree(run[0], tmp_path / "copy")
    shutil.rmtree(checkpoints(tmp_path / "copy") / "step=5")
    return tmp_path / "copy"


def shorten(path):
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def mark(path):
    path.parent.with_name(path.parent.name + "-unfinished").touch()


# what is done, to which file of the newest checkpoint, and what the error says of it
DAMAGE = {
    "shard cut short": (shorten, "weights/__0_0.distcp", r"has [\d,]+ of [\d,]+ bytes"),
    "shard missing": (Path.unlink, "weights/__0_1.distcp", "is missing"),
    "no index": (Path.unlink, "weights/.metadata", "is missing"),
    "index cut short": (shorten, "weights/.metadata", r"of [\d,]+ bytes cannot be read"),
    "no common state": (Path.unlink, "weights/common.pt", "is missing"),
    "common state changed": (flip_a_bit, "weights/common.pt", r"of [\d,]+ bytes cannot be read"),
    "no end": (Path.unlink, "weights/metadata.json", "is missing"),
    "empty end": (lambda path: path.write_text(""), "weights/metadata.json", r"of [\d,]+ bytes cannot be read"),
}


def resume(folder, **settings):
    from nemo_fp8.train.checkpoints import Resume

    return Resume(resume_from_directory=str(checkpoints(folder)), resume_if_exists=True, **settings).get_trainer_ckpt_path()


def test_an_undamaged_run_resumes_where_nemo_would(copy):
    from nemo.lightning import AutoResume

    theirs = AutoResume(resume_from_directory=str(checkpoints(copy)), resume_if_exists=True).get_trainer_ckpt_path()
    assert resume(copy) == resume(copy, contents=True) == theirs == checkpoints(copy) / "step=5-last" / "weights"


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_stays_usable(case, copy):
    do, name, says = DAMAGE[case]
    newest = checkpoints(copy) / "step=5-last"
    do(newest / name)
    usable = checkpoints(copy) / "step=3"
    words = rf"{re.escape(str(newest / name))}: the file {says}(.|\n)*Resume from {re.escape(str(usable))} \(after step 4\)"
    with pytest.raises(PrecisionError, match=words):
        resume(copy)
    with pytest.raises(PrecisionError, match=words):
        resume_from(newest)
    assert resume(copy, fall_back=True) == usable / "weights"
    assert resume_from(usable) == usable / "weights"


def resume_from(path):
    from nemo_fp8.train.checkpoints import Resume

    return Resume(resume_from_path=str(path)).get_trainer_ckpt_path()


def test_a_changed_byte_is_found_by_its_checksum_where_torch_finds_nothing(copy):
    shard = checkpoints(copy) / "step=5-last" / "weights" / "__0_0.distcp"
    flip_a_bit(shard)
    assert resume(copy) == shard.parent, "only reading tells"
    with pytest.raises(PrecisionError, match=rf"{re.escape(str(shard))}: the bytes of .+ are not those that were written"):
        resume(copy, contents=True)
    train_tiny("bf16_mixed", resume=str(shard.parents[1]), steps=7, **SMALL)


def test_a_twin_of_the_same_step_costs_nothing_and_is_taken(run, tmp_path, caplog):
    shutil.copytree(run[0], tmp_path / "copy")
    shorten(checkpoints(tmp_path / "copy") / "step=5-last" / "weights" / "__0_0.distcp")
    assert resume(tmp_path / "copy") == checkpoints(tmp_path / "copy") / "step=5" / "weights"
    assert "Passed over" in caplog.text
    assert "__0_0.distcp" in caplog.text


def test_half_written_checkpoints_are_passed_over(copy, caplog):
    mark(checkpoints(copy) / "step=5-last" / "weights")
    assert resume(copy) == checkpoints(copy) / "step=3" / "weights"
    assert "step=5-last-unfinished" in caplog.text
    for step in (1, 3):
        mark(checkpoints(copy) / f"step={step}" / "weights")
    with pytest.raises(PrecisionError, match="no complete checkpoint"):
        resume(copy)
    assert resume(copy, resume_ignore_no_checkpoint=True) is None


def test_damage_everywhere_never_starts_from_the_beginning(copy):
    for path in checkpoints(copy).iterdir():
        shorten(path / "weights" / "__0_0.distcp")
    for settings in ({}, {"fall_back": True}, {"resume_ignore_no_checkpoint": True}):
        with pytest.raises(PrecisionError, match="no complete checkpoint") as error:
            resume(copy, **settings)
        assert len(error.value.problems) == 3


def test_a_run_refuses_a_damaged_checkpoint_and_goes_on_from_the_one_before(run, copy):
    shorten(checkpoints(copy) / "step=5-last" / "weights" / "__0_0.distcp")
    settings = {"folder": str(copy), "save_every": 2, "steps": 6}
    log = fails("bf16_mixed", before="test_faults:ours", **settings)
    assert "PrecisionError" in log
    assert "__0_0.distcp: the file has" in log
    after = train_tiny("bf16_mixed", before="test_faults:ours_falling_back", **settings, **SMALL)
    assert after.losses == run[1][4:]
    assert "Passed over" in after.log


def kill_in_save(trainer, tiny):
    """SIGKILL when the shards are written and nothing says yet where in them the tensors lie."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    finish = FileSystemWriterAsync.finish
    saves = []

    def killed(self, *args, **kwargs):
        saves.append(1)
        if len(saves) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return finish(self, *args, **kwargs)

    FileSystemWriterAsync.finish = killed


def test_a_save_that_was_killed_leaves_the_checkpoint_before_it(run, tmp_path):
    settings = {"folder": str(tmp_path), "save_every": 2, "steps": 6}
    assert "exit code -9" in fails("bf16_mixed", before="test_faults:kill_in_save", **settings)
    saved = checkpoints(tmp_path)
    assert (saved / "step=3-last-unfinished").exists()
    assert (saved / "step=3-last" / "weights" / "__0_0.distcp").exists()
    after = train_tiny("bf16_mixed", before="test_faults:ours", **settings, **SMALL)
    assert after.losses == run[1][4:]
    assert "Passed over" in after.log
    assert not list(saved.glob("*-unfinished"))


# ---------------------------------------------------------------------- a full disk


def mount(folder, room, run, *options):
    """A disk of its own for a folder, with room for so many checkpoints; tells what went wrong."""
    size = sum(path.stat().st_size // 4096 * 4096 + 4096 for path in (checkpoints(run[0]) / "step=3").rglob("*") if path.is_file())
    options = ",".join([*options, f"size={int(room * size)}"])
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path):
    yield tmp_path
    if tmp_path.is_mount():
        subprocess.run(["umount", "-l", tmp_path], check=True)


def full(disk, ranks):
    """The log of a run that fills the disk with its third checkpoint."""
    log = fails("bf16_mixed", folder=str(disk), save_every=2, steps=6, ranks=ranks, before="test_faults:ours")
    assert re.search(rf"Step 3: the checkpoint could not be written to {checkpoints(disk)}, where \S+ \w+ of \S+ MiB are free", log)
    assert re.search(r"The run goes on from \S+step=1-last \(after 2 steps\)", log)
    assert "others were still running" not in log


def test_a_full_disk_says_so_and_the_run_goes_on_when_there_is_room(run, disk):
    mount(disk, 2.5, run)
    full(disk, ranks=1)
    mount(disk, 20, run, "remount")
    settings = {"folder": str(disk), "save_every": 2, "steps": 6}
    assert train_tiny("bf16_mixed", before="test_faults:ours", **settings, **SMALL).losses == run[1][2:]


def test_a_disk_that_holds_nothing_more_says_so_on_every_rank(run, disk):
    mount(disk, 2.02, run)
    full(disk, ranks=2)


# ---------------------------------------------------------------------- numbers that are not finite


def data_with_nan(tiny):
    """One sample of step 5 carries a NaN."""
    from nemo_fp8.train.data import Stories, StoryData

    class Broken(Stories):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            if index == 5 * tiny.global_batch + 1:
                sample["loss_mask"][3] = torch.nan
            return sample

    class BrokenData(StoryData):
        def setup(self, stage=""):
            super().setup(stage)
            self._stories["train"] = Broken("train", self.samples["train"], self.seq_length, self.seed)

    return BrokenData(tiny.seq_length, tiny.micro_batch, tiny.global_batch, num_train_samples=100_000, num_val_samples=64)


def put_nan(output):
    output.data.view(-1)[0] = torch.nan


def nan_in_forward(trainer, tiny):
    ours(trainer, tiny)
    _at_step(trainer, 5, put_nan)


def histories(trainer, extra):
    from nemo_fp8.train.repairs import amax_histories

    found = list(amax_histories(trainer.strategy.model))
    extra["finite"] = [bool(torch.isfinite(history).all()) for history in found]


@pytest.mark.parametrize("check", [True, False], ids=["megatron checks gradients", "nobody checks gradients"])
def test_nan_in_the_data_ends_a_bf16_run_at_its_step_and_before_a_checkpoint(check, tmp_path):
    log = fails(
        "bf16_mixed",
        folder=str(tmp_path),
        data="test_faults:data_with_nan",
        before="test_faults:ours",
        ddp={"check_for_nan_in_grad": check},
    )
    assert re.search(r"Step 5: the gradients are not finite" if check else r"Step 5: .*grad_norm is nan", log)
    assert re.search(r"The run goes on from \S+step=3-last \(after 4 steps\)", log)
    assert {path.name for path in checkpoints(tmp_path).iterdir()} == {"step=3", "step=3-last"}


def test_nan_in_an_fp8_layer_is_not_hidden_by_the_cast():
    assert "Step 5: the gradients are not finite" in fails("bf16_with_fp8_mixed", before="test_faults:nan_in_forward", **DELAYED)


@pytest.mark.parametrize("before", ["nan_in_forward", "ours"])
def test_the_loss_scaler_skips_a_step_with_nan_and_no_amax_history_remembers_it(before):
    data = "test_faults:data_with_nan" if before == "ours" else None
    settings = DELAYED["settings"] | {"fp16_hysteresis": 1, "fp16_initial_loss_scale": 1024.0}
    found = train_tiny(
        "fp16_with_fp8_mixed",
        stock=False,
        settings=settings,
        data=data,
        before=f"test_faults:{before}",
        probe="test_faults:histories",
        **SMALL,
    )
    assert found.loss_scales == [1024.0] * 5 + [512.0] * 3
    assert "Step 5 was skipped" in found.log
    assert found.losses[-1] < found.losses[4]
    assert found.extra["finite"]
    assert all(found.extra["finite"])


def always_nan(trainer, tiny):
    from nemo_fp8.train.faults import Faults

    trainer.callbacks.append(Faults(patience=3))
    for step in range(2, 8):
        _at_step(trainer, step, put_nan)


def test_a_loss_that_no_scale_mends_ends_an_fp16_run():
    log = fails("fp16_mixed", stock=False, settings={"fp16_initial_loss_scale": 1024.0}, before="test_faults:always_nan")
    assert "Step 4: the loss was not finite in 3 steps in a row" in log


# ---------------------------------------------------------------------- amaxes that are not finite

SCALES = []


def overflow(trainer, tiny):
    """At step 2 an input and a gradient of one linear hold infinity; from step 4 on its inputs are 16 times as large."""
    from lightning.pytorch.callbacks import Callback

    def overflowed(x):
        return x.clone().index_fill(0, torch.tensor([0]), torch.inf)

    def before_linear(module, args):
        step = trainer.global_step
        return (overflowed(args[0]) if step == 2 else args[0] * 16 if step >= 4 else args[0], *args[1:])

    def after_linear(module, args, output):
        if trainer.global_step == 2:
            output[0].register_hook(overflowed)

    class Hook(Callback):
        def on_train_start(self, trainer, *_):
            self.linear = next(m for name, m in trainer.strategy.model.named_modules() if name.endswith("layers.1.mlp.linear_fc1"))
            self.linear.register_forward_pre_hook(before_linear)
            self.linear.register_forward_hook(after_linear)

        def on_train_batch_end(self, *_):
            state = self.linear._delayed
            SCALES.append([float(state.forward.scale[0]), bool(torch.isfinite(state.forward.history).all())])

    trainer.callbacks.append(Hook())


def scales(trainer, extra):
    extra["scales"] = SCALES


@pytest.mark.parametrize("history", [16, 1024])
def test_after_an_amax_overflow_the_scales_come_back(history):
    settings = DELAYED["settings"] | {"fp8_amax_history_len": history}
    found = train_tiny(
        "bf16_with_fp8_mixed", stock=False, settings=settings, steps=9, before="test_faults:overflow", probe="test_faults:scales", **SMALL
    )
    scale, finite = zip(*found.extra["scales"], strict=True)
    assert all(loss == loss and loss < 6 for loss in found.losses), "the cast saturates"
    assert finite[-1]
    assert scale[-1] < scale[1] / 8, "the scale follows what the linear sees"


# ---------------------------------------------------------------------- as part of a recipe


def test_nemo_records_the_callback_with_the_run_and_reads_it_back(tmp_path):
    import fiddle as fdl
    import nemo_run as run
    from nemo import lightning as nl
    from nemo.lightning import io

    from nemo_fp8.train.faults import Faults

    config = run.Config(nl.Trainer, accelerator="cpu", devices=1, logger=False, callbacks=[run.Config(Faults, timeout=600)])
    fdl.build(config).io_dump(tmp_path, yaml_attrs=[])
    callback = io.load(tmp_path).callbacks[0]
    assert (type(callback), callback.timeout, callback.patience) == (Faults, 600, 10)
