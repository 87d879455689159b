"""The server: where it listens, who may ask, and what is left of it."""

import asyncio
import os
import sys
import time

import pytest

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import serve
from nemo_fp8.rollout.in_vllm.guard import TokenGuard

FP8 = Precision(rollout="fp8")


def test_it_listens_on_loopback_and_asks_for_a_token_elsewhere():
    assert serve.server_for("m", FP8).words[5:9] == ("--host", "127.0.0.1", "--port", "8000")
    for host in ("0.0.0.0", "::", "10.0.0.1", "node7"):
        with pytest.raises(PrecisionError, match="without a token"):
            serve.server_for("m", FP8, host=host)
        guarded = serve.server_for("m", FP8, host=host, token="secret")
        assert serve.GUARD in guarded.words
        assert guarded.secrets == {"VLLM_API_KEY": "secret"}
        assert "secret" not in " ".join(guarded.words) + str(guarded) + repr(guarded)
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        serve.server_for("m", FP8, host=host)


def test_vllm_s_own_options_pass_through():
    server = serve.server_for("m", FP8, more=["--max-model-len", "64"])
    assert server.words[-2:] == ("--max-model-len", "64")
    assert str(server).startswith("VLLM_USE_DEEP_GEMM_E8M0=0 python -m vllm.entrypoints.openai.api_server --model m --host 127.0.0.1")


# ---------------------------------------------------------------------- the guard


def knock(path, token=None, kind="http", given="secret"):
    """What the guard lets through to the app behind it, or answers by itself."""
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    os.environ["VLLM_API_KEY"] = given
    try:
        guard = TokenGuard(app)
    finally:
        del os.environ["VLLM_API_KEY"]
    headers = [] if token is None else [(b"authorization", token.encode())]
    asyncio.run(guard({"type": kind, "path": path, "headers": headers}, None, send))
    return bool(passed), [message.get("status", message.get("code")) for message in sent if "status" in message or "code" in message]


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/collective_rpc", "/update_weights", "/metrics"])
def test_every_path_wants_the_token(path):
    assert knock(path) == (False, [401])
    assert knock(path, "Bearer wrong") == (False, [401])
    assert knock(path, "secret") == (False, [401])
    assert knock(path, "Bearer secret") == (True, [])
    assert knock(path, kind="websocket") == (False, [1008])


def test_health_is_open():
    assert knock("/health") == knock("/ping") == (True, [])


# ---------------------------------------------------------------------- processes

STUBBORN = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"


def test_nothing_is_left_of_a_server_even_if_it_will_not_listen(monkeypatch):
    monkeypatch.setattr(serve, "PATIENCE", 1.0)
    server = serve.Server((sys.executable, "-c", PARENT), {}, "http://127.0.0.1:1")
    with serve.running(server) as process:
        time.sleep(1.0)
        below = children_of(process.pid)
        assert len(below) == 1
    deadline = time.monotonic() + 10
    while any(map(is_running, below)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, [process.pid, *below]))


def test_a_server_that_died_is_said_so():
    server = serve.Server((sys.executable, "-c", "raise SystemExit(3)"), {}, "http://127.0.0.1:1")
    with serve.running(server) as process, pytest.raises(PrecisionError, match="ended with code 3"):
        serve.wait_until_ready(server, process)


def children_of(pid):
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def is_running(pid):
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
