"""For the tests of Megatron-Bridge, in its own environment: every run of the suite, by one process and by two."""

import importlib.util
from pathlib import Path

import pytest
from support.scheduling import one_worker_for

SHARING = (
    "test_adapters.py",
    "test_both_versions.py",
    "test_config.py",
    "test_loading.py",
    "test_monitor.py",
    "test_training.py",
)
"""Whose tests ask for the runs below. Under xdist one worker has them all, and makes the runs once."""

HAS_BRIDGE = (
    importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.bridge") is not None
)
collect_ignore_glob = [] if HAS_BRIDGE else ["test_*.py"]  # these run in .venv-bridge


def pytest_collection_modifyitems(items):
    """Refuse a file that asks for the runs and is not named above: two workers would make them."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    asking = {item.path.name for item in here if {"alone", "pair"}.intersection(getattr(item, "fixturenames", ()))}
    if asking - {*SHARING}:
        raise pytest.UsageError(f"Name {', '.join(sorted(asking - {*SHARING}))} in SHARING of {__file__}.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return one_worker_for(SHARING, config, log)


@pytest.fixture(autouse=True)
def nobody_elses_port(monkeypatch):
    """Bridge's own is 29500, on which a run of another test may still listen; 0 is any that is free."""
    monkeypatch.setenv("MASTER_PORT", "0")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with two tiny checkpoints of Hugging Face's, Llama's with a tokenizer, and their tensors."""
    from safetensors.torch import save_file
    from support.bridge.tiny import hugging_face, tokenizer

    root = tmp_path_factory.mktemp("bridge")
    for kind in ("llama", "qwen3"):
        save_file(hugging_face(kind, root / kind), root / f"{kind}.safetensors")
    tokenizer(root / "llama")
    return root


@pytest.fixture(scope="session")
def alone(folder):
    """Name -> what one process saw of the run."""
    from support.bridge.jobs import ALONE, in_folder
    from support.bridge.runs import run_all

    return dict(zip(ALONE, run_all(in_folder(ALONE, folder), folder), strict=True))


@pytest.fixture(scope="session")
def pair(folder):
    """Name -> what two processes saw of the run."""
    from support.bridge.jobs import PAIR, in_folder
    from support.bridge.runs import run_all

    return dict(zip(PAIR, run_all(in_folder(PAIR, folder), folder, ranks=2), strict=True))
