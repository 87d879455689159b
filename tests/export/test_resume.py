"""A killed export goes on, what it left is never taken for more than it is, and another export is never mixed in."""

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from support import SUPPORT
from support.small_models import content, tensors, write

from nemo_fp8 import PrecisionError, preset
from nemo_fp8.export import HuggingFace, export

PRECISION = preset("bf16_with_fp8_blockwise_mixed")
RECEIPT, STATE = "nemo_fp8_export.json", ".nemo_fp8_export.json"


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source")


def to(folder, source, precision=PRECISION, **how):
    return export(HuggingFace.open(source), folder, precision, **how)


def test_killed_anywhere_it_goes_on_to_the_same_files(tmp_path):
    """SIGKILL before and after every write that counts; one more run, and the folder is that of an export that was not
    killed."""
    source = write(tmp_path / "source", tensors(layers=1), shards=3, layers=1)
    script = SUPPORT / "kill_everywhere.py"
    command = [sys.executable, "-W", "ignore", script, source, tmp_path / "exports"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *kills, total = map(json.loads, done.stdout.splitlines())
    assert total["killed"] == total["events"] > 50
    # Before the last weights are there nothing can be loaded, and at the first of these kills nothing was there at all.
    assert all(kill["weights"] == 3 for kill in kills if kill["loadable"])
    assert [kill for kill in kills if kill["weights"] == 1]
    assert [kill for kill in kills if kill["loadable"] and not kill["done"]]
    right = content(tmp_path / "exports/whole")
    assert STATE not in right
    for folder in (tmp_path / "exports").iterdir():
        assert content(folder) == right, folder.name


class Killed(BaseException):
    pass


def half(folder, source, precision=PRECISION, after=2):
    """An export that ends after some files of weights."""
    seen = []

    def start(total):
        def step(count, name):
            if len([*folder.glob("*.safetensors")]) == after:
                raise Killed
            seen.append(name)

        return step

    with pytest.raises(Killed):
        to(folder, source, precision, progress=start)


def test_files_that_are_there_are_not_written_again(source, tmp_path):
    half(tmp_path / "out", source)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(before) == 2
    exported = to(tmp_path / "out", source)
    assert exported.resumed == 2
    assert before == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before}


def test_progress_counts_to_the_total_also_when_it_goes_on(source, tmp_path):
    half(tmp_path / "out", source)
    counted = []

    def start(total):
        counted.append(total)
        return lambda count, name: counted.append(count)

    to(tmp_path / "out", source, progress=start)
    assert sum(counted[1:]) == counted[0]


@pytest.mark.parametrize("harm", ["cut", "other header", "link"])
def test_what_looks_like_a_finished_file_is_written_again(source, tmp_path, harm):
    half(tmp_path / "out", source)
    file = tmp_path / "out/model-00001-of-00003.safetensors"
    whole = file.read_bytes()
    if harm == "cut":
        file.write_bytes(whole[:-1])
    elif harm == "other header":
        file.write_bytes(whole.replace(b"q_proj", b"Q_proj", 1))
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    assert to(tmp_path / "out", source).resumed == 1
    assert file.read_bytes() == whole
    assert not file.is_symlink()


def test_a_finished_export_is_left_alone(source, tmp_path):
    to(tmp_path / "out", source)
    before = content(tmp_path / "out")
    again = to(tmp_path / "out", source)
    assert again.done_before
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("harm", ["cut", "gone", "no config"])
def test_a_finished_export_that_lost_a_file_gets_it_again(source, tmp_path, harm):
    to(tmp_path / "out", source)
    before = content(tmp_path / "out")
    file = tmp_path / "out" / ("config.json" if harm == "no config" else "model-00002-of-00003.safetensors")
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    again = to(tmp_path / "out", source)
    assert (again.done_before, again.resumed) == (False, 3 if harm == "no config" else 2)
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("changed", ["source", "precision", "layout"])
def test_another_export_is_refused_and_restart_begins_anew(source, tmp_path, finished, changed):
    (to if finished else half)(tmp_path / "out", source)
    precision, how = PRECISION, {}
    if changed == "source":
        file = source / "model-00002-of-00003.safetensors"
        os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
        words = "the source has changed since"
    elif changed == "precision":
        precision, words = PRECISION.replace(first_layers=1), "first_layers=0 was, 1 is"
    else:
        precision, how, words = (
            PRECISION.replace(activation_scale="fp32"),
            {"layout": "compressed-tensors"},
            "layout was 'deepseek'",
        )
    with pytest.raises(PrecisionError, match=words) as error:
        to(tmp_path / "out", source, precision, **how)
    assert "--restart" in error.value.problems[0].remedy
    (tmp_path / "out/mine.txt").write_text("not the exporter's")
    to(tmp_path / "out", source, precision, restart=True, **how)
    right = to(tmp_path / "right", source, precision, **how).folder
    assert content(tmp_path / "out") == content(right) | {"mine.txt": b"not the exporter's"}


def test_files_of_one_name_in_two_folders_are_two_files(tmp_path):
    names = {}
    for folder in "ab":
        (tmp_path / "in" / folder).mkdir(parents=True)
        name = f"model.layers.{'ab'.index(folder)}.mlp.down_proj.weight"
        save_file({name: torch.ones(128, 128, dtype=torch.bfloat16)}, tmp_path / "in" / folder / "model.safetensors")
        names[name] = f"{folder}/model.safetensors"
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    to(tmp_path / "out", tmp_path / "in")
    for folder in "ab":
        os.utime(tmp_path / "in" / folder / "model.safetensors", ns=(1, 1))
        with pytest.raises(PrecisionError, match="the source has changed since"):
            to(tmp_path / "out", tmp_path / "in")
        to(tmp_path / "out", tmp_path / "in", restart=True)


def test_a_folder_that_cannot_be_made_is_said(source, tmp_path):
    (tmp_path / "a file").write_text("")
    with pytest.raises(PrecisionError, match="Cannot write into"):
        to(tmp_path / "a file/out", source)


def test_a_folder_with_something_else_in_it_is_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(PrecisionError, match=r"thesis.tex"):
            to(tmp_path / "out", source, restart=restart)
    assert content(tmp_path / "out") == {"thesis.tex": b"years of work"}


def test_restart_deletes_nothing_outside_of_the_folder(source, tmp_path):
    half(tmp_path / "out", source)
    (tmp_path / "precious").write_text("")
    state = json.loads((tmp_path / "out" / STATE).read_text())
    state["files"] += ["../precious", str(tmp_path / "precious")]
    (tmp_path / "out" / STATE).write_text(json.dumps(state))
    to(tmp_path / "out", source, restart=True)
    assert (tmp_path / "precious").exists()


def test_two_exports_at_once(source, tmp_path):
    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(PrecisionError, match="Another export"):
        to(tmp_path / "out", source)
    os.close(handle)
    to(tmp_path / "out", source)


def test_a_source_that_changes_while_it_is_read(source, tmp_path):
    def start(total):
        def step(count, name):
            os.utime(source / "model-00003-of-00003.safetensors")

        return step

    with pytest.raises(PrecisionError, match="changed while it was read"):
        to(tmp_path / "out", source, progress=start)
    assert not (tmp_path / "out" / RECEIPT).exists()


def test_a_disk_that_is_full(source, tmp_path, monkeypatch):
    """Said before it begins; and where it happens in the middle, said with a remedy, and gone on with."""
    few = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: few)
        with pytest.raises(PrecisionError, match=r"room for 0\.0 MB, and (?!0\.0)[\d.]+ MB are still to be written"):
            to(tmp_path / "early", source)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(PrecisionError, match="Cannot write") as error:
            to(tmp_path / "out", source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "goes on from here" in error.value.problems[0].remedy
    assert not [*(tmp_path / "out").glob("*.part")]
    to(tmp_path / "out", source)


def test_the_source_is_never_written_over(source, tmp_path):
    before = content(source)
    for folder in (source, tmp_path / "x/../source"):
        with pytest.raises(PrecisionError, match="the source itself"):
            to(folder, source)
    with pytest.raises(PrecisionError, match="no folder"):
        to(source / "config.json", source)
    assert content(source) == before
