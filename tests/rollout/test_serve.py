"""The server: where it listens, who may ask, what is left of it; and real ones, by the command and by the flags to paste."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rollout import servers
from rollout.models import tensors_of

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.presets import preset
from nemo_fp8.render import render
from nemo_fp8.rollout import Refit, environment, serve
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


# ---------------------------------------------------------------------- real ones


@pytest.mark.long
def test_the_command_serves_a_model_to_who_brings_the_token_and_ends_when_told(checkpoint, tmp_path):
    url, log = f"http://127.0.0.1:{servers.free_port()}", tmp_path / "log"
    words = [sys.executable, "-m", "nemo_fp8.cli", "serve", str(checkpoint("qwen3")), "--precision", "bf16_with_fp8_blockwise_mixed"]
    words += ["--port", url.rsplit(":")[-1], "--json", *servers.MORE]
    with log.open("w") as file:
        process = subprocess.Popen(words, env={**os.environ, "VLLM_API_KEY": "secret"}, stdout=file, stderr=file)
        try:
            serve.wait_until_ready(serve.Server((), {}, url), process, 300)
            assert servers.complete(url)[0] == 401
            assert servers.ask(url, "/invocations", {})[0] == 401  # vLLM's own key leaves it open
            status, old = servers.complete(url, "secret")
            assert status == 200, log.read_text()[-6000:]
            receipt = Refit(url, token="secret").push(dict(tensors_of(checkpoint("qwen3", 1)))).require()
            assert len(receipt.fp8) == 4 * 7
            assert servers.complete(url, "secret")[1] != old
            below = children_of(process.pid)
            assert len(below) >= 3  # the server, its engine, its worker
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert [pid for pid in below if is_running(pid)] == []
    assert "secret" not in log.read_text()


@pytest.mark.long
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
@pytest.mark.parametrize("asks", [True, False])
def test_a_worker_must_ask_for_amx(checkpoint, tmp_path, monkeypatch, capfd, asks):
    """Linux grants AMX to a process that asks, and vLLM's does not: its attention dies at a first prompt of four tokens."""
    if not asks:
        (tmp_path / "sitecustomize.py").write_text("import torch.cpu\ntorch.cpu._init_amx = lambda: False\n")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    server = servers.Served(checkpoint("qwen3"), FP8)
    try:
        status, _ = servers.complete(server.url)
    finally:
        server.stop()
    said = capfd.readouterr()
    assert status == (200 if asks else 500)
    assert ("Worker proc VllmWorker-0 died unexpectedly" in said.out + said.err) is not asks  # of SIGILL, where its exit code is told


@pytest.mark.long
def test_plain_vllm_with_the_flags_to_paste(checkpoint):
    """Those of ``nemo-fp8 render --to vllm`` and of docs/refit.md. On every address and without a token, only this machine may push."""
    name = "bf16_with_fp8_blockwise_mixed"
    page = (Path(__file__).parents[2] / "docs/refit.md").read_text()
    (two,) = re.findall(r"^(--worker-extension-cls .*\n--middleware .*)$", page, re.M)
    flags = shlex.split(render(preset(name), "vllm").text.replace("\\\n", " ")) + shlex.split(two)
    port = servers.free_port()
    words = (sys.executable, "-m", serve.MODULE, "--model", str(checkpoint("qwen3")), "--host", "0.0.0.0", "--port", str(port))
    server = serve.Server((*words, *flags, *servers.MORE), environment(name), f"http://127.0.0.1:{port}")
    with serve.running(server) as process:
        serve.wait_until_ready(server, process)
        status, old = servers.complete(server.url)
        assert status == 200
        others = servers.beyond_loopback()
        if others:
            with pytest.raises(PrecisionError, match="answers a push with 403"):
                Refit(f"http://{others}:{port}").push(dict(tensors_of(checkpoint("qwen3", 1))))
            assert servers.complete(server.url) == (200, old)
        Refit(server.url).push(dict(tensors_of(checkpoint("qwen3", 1)))).require()
        assert servers.complete(server.url)[1] != old


def children_of(pid):
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def is_running(pid):
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
