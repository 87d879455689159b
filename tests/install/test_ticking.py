"""tools/ticking.py runs a command, says that it is still at work, and lets nothing outlive it."""

import importlib.util
import signal
import subprocess
import sys
import time

import psutil
from support import ROOT

TOOL = ROOT / "tools" / "ticking.py"


def test_it_speaks_while_the_command_says_nothing(capfd, monkeypatch):
    spec = importlib.util.spec_from_file_location("ticking", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "EVERY", 0.3)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert tool.main("at it", [sys.executable, "-c", "import time; time.sleep(1.2); raise SystemExit(3)"]) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert lines[0] == "at it: 0 s"


def test_the_command_ends_with_it():
    process = subprocess.Popen([sys.executable, TOOL, "at it", sys.executable, "-c", "import time; time.sleep(60)"])
    while not (below := psutil.Process(process.pid).children()):
        time.sleep(0.05)
    time.sleep(0.3)  # its handler is set right after
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM
    assert not below[0].is_running()
