"""Checkpoints that were damaged, half-written or met a full disk: refused with an error, and the one before stays
usable."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.train.faulty import SMALL, checkpoints, fails
from support.train.harness import train_tiny

from nemo_fp8.errors import PrecisionError


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

    return Resume(
        resume_from_directory=str(checkpoints(folder)), resume_if_exists=True, **settings
    ).get_trainer_ckpt_path()


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
    words = (
        rf"{re.escape(str(newest / name))}: the file {says}(.|\n)*Resume from {re.escape(str(usable))} \(after step 4\)"
    )
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
    with pytest.raises(
        PrecisionError, match=rf"{re.escape(str(shard))}: the bytes of .+ are not those that were written"
    ):
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
    log = fails("bf16_mixed", before="support.train.faulty:ours", **settings)
    assert "PrecisionError" in log
    assert "__0_0.distcp: the file has" in log
    after = train_tiny("bf16_mixed", before="support.train.faulty:ours_falling_back", **settings, **SMALL)
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
    assert "exit code -9" in fails("bf16_mixed", before="train.test_fault_checkpoints:kill_in_save", **settings)
    saved = checkpoints(tmp_path)
    assert (saved / "step=3-last-unfinished").exists()
    assert (saved / "step=3-last" / "weights" / "__0_0.distcp").exists()
    after = train_tiny("bf16_mixed", before="support.train.faulty:ours", **settings, **SMALL)
    assert after.losses == run[1][4:]
    assert "Passed over" in after.log
    assert not list(saved.glob("*-unfinished"))


# ---------------------------------------------------------------------- a full disk


def mount(folder, room, run, *options):
    """A disk of its own for a folder, with room for so many checkpoints; tells what went wrong."""
    size = sum(
        path.stat().st_size // 4096 * 4096 + 4096
        for path in (checkpoints(run[0]) / "step=3").rglob("*")
        if path.is_file()
    )
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
    log = fails("bf16_mixed", folder=str(disk), save_every=2, steps=6, ranks=ranks, before="support.train.faulty:ours")
    assert re.search(
        rf"Step 3: the checkpoint could not be written to {checkpoints(disk)}, where \S+ \w+ of \S+ MiB are free", log
    )
    assert re.search(r"The run goes on from \S+step=1-last \(after 2 steps\)", log)
    assert "others were still running" not in log


def test_a_full_disk_says_so_and_the_run_goes_on_when_there_is_room(run, disk):
    mount(disk, 2.5, run)
    full(disk, ranks=1)
    mount(disk, 20, run, "remount")
    settings = {"folder": str(disk), "save_every": 2, "steps": 6}
    assert train_tiny("bf16_mixed", before="support.train.faulty:ours", **settings, **SMALL).losses == run[1][2:]


def test_a_disk_that_holds_nothing_more_says_so_on_every_rank(run, disk):
    mount(disk, 2.02, run)
    full(disk, ranks=2)
