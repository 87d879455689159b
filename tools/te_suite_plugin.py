"""What pytest does within ``te_suite``: take a sample, leave out what was run before but for what is to be run again,
and write down every test as it begins and ends. The one Triton kernel of a reference is computed without Triton
(:func:`fused_fma`).

Ranks that a test leaves behind are ended with it: each has a session of its own, so that they outlive a launcher that
was stopped.

The record is a file of JSON lines, written as things happen, so that a process that is killed or dies loses nothing:

    {"begins": id}    {"ends": id, "outcome": "passed" | "failed" | "skipped", "line": why}    {"collected": n}
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import random
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

RECORD, SAMPLE, SEED, AFTER, AGAIN = (f"TE_SUITE_{name}" for name in ("RECORD", "SAMPLE", "SEED", "AFTER", "AGAIN"))
LONGEST_LINE = 400
IMPORTED_FOR_ONE_TEST = {"test_onnx_export": "tensorrt"}
"""Modules that a file imports at its head for one test alone. Where one is missing, an empty one lets the others
run."""
WITH_KERNEL = "references.blockwise_fp8_gemm_reference"
_PR_SET_CHILD_SUBREAPER = 36


def _write(**event: Any) -> None:
    if os.environ.get("RANK", "0") != "0" and event.get("outcome") != "failed":  # ranks run the same tests
        return
    with Path(os.environ[RECORD]).open("a") as file:
        file.write(json.dumps(event) + "\n")


def events(record: Path) -> list[dict[str, Any]]:
    """Return what was written down; a line that a killed process left unfinished is passed over."""
    lines = record.read_text().splitlines(keepends=True) if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def name_of(test: str) -> str:
    """Return a test's name within its file."""
    return test.partition("::")[2] or test


def fused_fma(y: torch.Tensor, x: torch.Tensor, s: torch.Tensor, BLOCK: int = 128) -> torch.Tensor:
    """Set ``y`` to ``x * s + y``, rounded once, and return it: what :data:`WITH_KERNEL` has a Triton kernel for.

    The arithmetic is that of Triton's interpreter, which would call this function for 128 numbers at a time, in half an
    hour for a matrix of 4096 by 4096.
    """
    return y.copy_(torch.from_numpy(interpreter._interpreter.fma_fp32(x.numpy(), s.numpy(), y.numpy())))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to judge anything else than the CPU implementation: an error in a sitecustomize stops nobody."""
    from nemo_fp8 import te_cpu

    if not te_cpu.is_installed():
        raise pytest.UsageError("the CPU implementation of TransformerEngine's extension is not in place")
    for file, module in IMPORTED_FOR_ONE_TEST.items():
        if any(file in argument for argument in config.args) and importlib.util.find_spec(module) is None:
            sys.modules[module] = types.ModuleType(module)
    take_orphans()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a sample of the tests, the same one every time, and of it what has not been run."""
    if WITH_KERNEL in sys.modules:
        vars(sys.modules[WITH_KERNEL])["fused_fma"] = fused_fma
    wanted = int(os.environ[SAMPLE])
    if wanted and len(items) > wanted:
        kept = set(random.Random(int(os.environ[SEED])).sample(range(len(items)), wanted))
        items[:] = [item for i, item in enumerate(items) if i in kept]
    again = json.loads(os.environ[AGAIN])
    items[:] = [item for item in items if name_of(item.nodeid) in again] + items[int(os.environ[AFTER]) :]
    _write(collected=len(items))
    done = {event["ends"] for event in events(Path(os.environ[RECORD])) if "ends" in event}
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be collected as failed, and one that leaves itself out as skipped."""
    if report.outcome != "passed":
        _write(ends=f"{report.nodeid} (collection)", outcome=report.outcome, line=_line(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record that a test begins."""
    _write(begins=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record that a test has ended, or that what comes before or after it has gone wrong."""
    if report.when == "call" or report.outcome != "passed":
        _write(ends=report.nodeid, outcome=report.outcome, line=_line(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """End what a test has started in another session."""
    end_children()


def take_orphans() -> None:
    """Adopt the processes below this one whose parent has died."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """End the children of this process that have another session, such as ranks whose launcher has died."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if os.getsid(child) != os.getsid(0):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let no rank be ended because another has failed: the record says what did."""
    if "RANK" in os.environ:
        session.exitstatus = 0


def _line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return where and why a test failed, in one line."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        text = report.longrepr[2]
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = (
            f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"
            if crash
            else str(report.longrepr)[-LONGEST_LINE:]
        )
        if re.search(
            "CompletedProcess|CalledProcessError|exited with code", text
        ):  # a test that starts ranks knows only that one failed; what they print says why
            told = re.findall(
                r"^(?:\[\w+\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", report.capstdout + report.capstderr, re.M
            )
            text = "; ".join(
                [*dict.fromkeys(line for line in told if "ChildFailed" not in line)][-2:] or ["no error printed"]
            )
    return re.sub(r"\s+", " ", text)[:LONGEST_LINE]
