"""The command line beside vLLM, where the light core's dependencies are newer than NeMo lets them be."""

import subprocess
import sys

import omegaconf
import pytest
from cli.test_cli import COMMANDS
from packaging.version import Version


def test_omegaconf_is_newer_than_nemo_s():
    assert Version(omegaconf.__version__) >= Version("2.4")


def _said_under_errors(*command):
    """What a command says where every warning of a library is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "nemo_fp8.cli", *command], capture_output=True, text=True
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    "command", [words for words, _, _ in COMMANDS if words[0] in ("render", "check", "list")], ids=" ".join
)
def test_no_library_warns(command):
    (code, words), (found, said) = next(row[1:] for row in COMMANDS if row[0] == command), _said_under_errors(*command)
    assert found == code, said
    assert all(word in said for word in words)
