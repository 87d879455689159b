"""The server: where it listens, who may ask, what is left of it; and real ones, by the command and by the flags to
paste."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from cli.test_lifetime import SIGNALS
from support.processes import below, left_of, shared_memory, wait_for
from support.rollout import servers
from support.rollout.models import tensors_of

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render import render
from nemo_fp8.rollout import Refit, environment, serve
from nemo_fp8.rollout.access import TokenGuard
from nemo_fp8.rollout.refit import Manifest
from nemo_fp8.rollout.refit.control import Server
from nemo_fp8.rollout.refit.memory import Shared
from nemo_fp8.rollout.token_file import drawn_token, token_of

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
    assert str(server).startswith(
        "VLLM_USE_DEEP_GEMM_E8M0=0 python -m vllm.entrypoints.openai.api_server --model m --host 127.0.0.1"
    )


# ---------------------------------------------------------------------- the guard


def knock(path, token=None, kind="http", given="secret", root_path=""):
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
    asyncio.run(guard({"type": kind, "path": path, "root_path": root_path, "headers": headers}, None, send))
    return bool(passed), [
        message.get("status", message.get("code")) for message in sent if "status" in message or "code" in message
    ]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/invocations", "/tokenize", "/collective_rpc", "/update_weights", "/metrics"]
)
def test_every_path_wants_the_token(path):
    assert knock(path) == (False, [401])
    assert knock(path, "Bearer wrong") == (False, [401])
    assert knock(path, "secret") == (False, [401])
    assert knock(path, "Bearer secret") == knock(path, "bearer secret") == (True, [])
    assert knock(path, kind="websocket") == (False, [1008])


def test_health_is_open():
    assert knock("/health") == knock("/ping") == knock("/api/health", root_path="/api") == (True, [])
    assert knock("/v1/health", root_path="/v") == (False, [401])


def test_an_empty_token_opens_nothing():
    assert knock("/v1/completions", "Bearer ", given="") == (False, [401])


# ---------------------------------------------------------------------- the token that is drawn


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nemo_fp8"


def test_a_drawn_token_is_found_by_its_url_while_its_server_lives(cache):
    with drawn_token("127.0.0.1", 8000) as (token, file), drawn_token("::1", 8000) as (another, _):
        assert len(token) > 40
        assert token != another
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert {
            token_of(f"http://{name}:8000{path}") for name in ("127.0.0.1", "localhost") for path in ("", "/api")
        } == {token}
        assert token_of("http://[::1]:8000") == another
        for url in (
            "http://127.0.0.1:8001",
            "http://127.0.0.1",
            "http://node7:8000",
            "http://127.0.0.2:8000",
            "http://127.0.0.1:x",
        ):
            assert token_of(url) is None
        with pytest.raises(PrecisionError, match="another server of yours"), drawn_token("localhost", 8000):
            pass
        assert token_of("http://127.0.0.1:8000") == token
    assert token_of("http://127.0.0.1:8000") is None
    assert [*file.parent.iterdir()] == []


def test_a_leaving_is_not_believed_and_is_written_anew(cache):
    with drawn_token("127.0.0.1", 8000) as (_, file):
        pass
    file.write_text("of a server that was killed, and longer than what comes after it: " + "x" * 100)
    file.chmod(0o600)
    assert token_of("http://127.0.0.1:8000") is None
    with drawn_token("127.0.0.1", 8000) as (token, again):
        assert again == file
        assert file.read_text() == token == token_of("http://127.0.0.1:8000")


def test_no_token_is_put_where_others_can_read_or_have_put_something(cache, tmp_path, monkeypatch):
    with drawn_token("127.0.0.1", 8000) as (_, file):
        pass

    def refused(words):
        with pytest.raises(PrecisionError, match=words), drawn_token("127.0.0.1", 8000):
            pass

    target = tmp_path / "target"
    target.write_text("mine")
    file.symlink_to(target)
    refused("symbolic link")
    assert target.read_text() == "mine"
    assert token_of("http://127.0.0.1:8000") is None
    file.unlink()
    file.write_text("open to all")
    file.chmod(0o644)
    refused("closed to others")
    file.chmod(0o600)
    real = os.fstat

    def of_another_user(handle):
        about = real(handle)
        return os.stat_result((*about[:4], about.st_uid + 1, *about[5:]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", of_another_user)
        refused("no file of your own")
    file.unlink()
    file.parent.chmod(0o777)
    refused("written by others")
    assert token_of("http://127.0.0.1:8000") is None


def serving(model, *words):
    """The words of a command that serves a model in blockwise FP8."""
    command = [sys.executable, "-m", "nemo_fp8.cli", "serve", str(model)]
    return [*command, "--precision", "bf16_with_fp8_blockwise_mixed", *words]


def said_by_the_command(*words, **variables):
    words = serving("m", "--dry-run", *words)
    done = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_no_token_and_a_token_contradict_each_other(cache):
    assert said_by_the_command("--no-token")[0] == 0
    assert said_by_the_command("--no-token", VLLM_API_KEY="secret")[0] == 2
    assert not (cache / "servers").exists()  # a dry run draws nothing


# ---------------------------------------------------------------------- processes

STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
    "time.sleep(600)"
)
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"


def test_nothing_is_left_of_a_server_even_if_it_will_not_listen(monkeypatch):
    monkeypatch.setattr(serve, "PATIENCE", 1.0)
    server = serve.Server((sys.executable, "-c", PARENT), {}, "http://127.0.0.1:1")
    with serve.running(server) as process:
        time.sleep(1.0)
        below = children_of(process.pid)
        assert len(below) == 2  # it, and what it started
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
    words = serving(checkpoint("qwen3"), "--port", url.rsplit(":")[-1], "--json", *servers.MORE)
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


@pytest.fixture(scope="module")
def drawing(checkpoint, tmp_path_factory):
    """A server that the command started, with a token that it drew: its process, URL and log."""
    # Below a folder that every user may enter, so that nothing but the file itself keeps its token.
    home, log = Path(tempfile.mkdtemp()), tmp_path_factory.mktemp("drawing") / "log"
    home.chmod(0o755)
    url = f"http://127.0.0.1:{servers.free_port()}"
    words = serving(checkpoint("qwen3"), "--port", url.rsplit(":")[-1], *servers.MORE)
    with pytest.MonkeyPatch.context() as patch, log.open("w") as file:
        patch.setenv("XDG_CACHE_HOME", str(home))
        for name in ("VLLM_API_KEY", "NEMO_FP8_REFIT_TOKEN"):
            patch.delenv(name, raising=False)
        process = subprocess.Popen(words, stdout=file, stderr=file)
        try:
            serve.wait_until_ready(serve.Server((), {}, url), process, 300)
            yield process, url, log
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            shutil.rmtree(home)


def test_only_the_same_user_pushes_into_a_server_of_the_command_and_everybody_generates(drawing, checkpoint):
    process, url, log = drawing
    status, old = servers.complete(url)
    assert status == 200
    for token in (None, "wrong", ""):
        assert servers.ask(url, "/nemo_fp8/refit/expected", token=token)[0] == 403
    receipt = Refit(url).push(dict(tensors_of(checkpoint("qwen3", 1)))).require()
    assert receipt.prefix_cache_reset is True
    assert servers.complete(url)[1] != old
    token = token_of(url)
    assert token not in log.read_text()
    assert not [
        pid
        for pid in [process.pid, *children_of(process.pid)]
        if token.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_cannot_push_and_cannot_read_the_token(drawing):
    _, url, _ = drawing
    (file,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("*-127.0.0.1-*")

    def read():
        try:
            return file.read_text()
        except PermissionError:
            return "refused"

    assert as_another_user(os.getuid) == 65534
    assert as_another_user(read) == "refused"
    assert as_another_user(lambda: token_of(url)) is None
    assert as_another_user(lambda: servers.ask(url, "/nemo_fp8/refit/expected")[0]) == 403
    assert as_another_user(lambda: servers.ask(url, "/nemo_fp8/refit/begin", {"push": "a", "tensors": []})[0]) == 403


def test_a_sender_that_dies_before_its_first_tensor_leaves_the_server_answering(drawing, checkpoint):
    _, url, _ = drawing
    status, before = servers.complete(url)
    assert status == 200
    control = Server(url)
    shared = Shared(2**20)
    begun = control.call(
        "begin", {"push": "a", "tensors": Manifest.of(dict(tensors_of(checkpoint("qwen3", 1)))).to_plain()}
    )
    assert all(answer["accepted"] for answer in begun)
    control.call("write", {"push": "a", "memory": shared.handle, "pieces": []})  # and here it dies
    shared.close()
    start = time.monotonic()
    assert servers.complete(url) == (200, before)
    assert time.monotonic() - start < 30


def test_a_worker_that_dies_ends_the_push_and_the_command(drawing, checkpoint):
    """The last that is asked of that server."""
    import psutil

    process, url, log = drawing
    (keeper,) = psutil.Process(process.pid).children()
    (server,) = keeper.children()
    (worker,) = [child for core in server.children() for child in core.children()]  # titles are not set everywhere
    tensors = dict(tensors_of(checkpoint("qwen3", 1)))
    died = []

    def dying():
        for i, pair in enumerate(tensors.items()):
            if i == len(tensors) // 2:
                worker.send_signal(signal.SIGKILL)
                died.append(time.monotonic())
            yield pair

    with pytest.raises(PrecisionError, match="The engine is dead"):
        Refit(url, chunk=2**20).push(dying(), manifest=tensors)
    assert time.monotonic() - died[0] < 30
    assert process.wait(60) == 1
    assert "nobody had told it to" in log.read_text()
    assert token_of(url) is None


@pytest.mark.long
@pytest.mark.parametrize("asked", [False, True], ids=["idle", "asked"])
def test_an_engine_core_that_dies_ends_the_command_with_an_error(checkpoint, tmp_path, asked):
    """So that who watches over the command starts it again, whether somebody asks for an answer or nobody does."""
    import psutil

    url, log = f"http://127.0.0.1:{servers.free_port()}", tmp_path / "log"
    words = serving(checkpoint("qwen3"), "--port", url.rsplit(":")[-1], *servers.MORE)
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    found = []
    try:
        serve.wait_until_ready(serve.Server((), {}, url), process, 300)
        found = below(process)
        memory = shared_memory(found)
        (keeper,) = psutil.Process(process.pid).children()
        (server,) = keeper.children()
        (core,) = [child for child in server.children() if child.children()]  # the other is Python's resource tracker
        core.send_signal(signal.SIGKILL)
        if asked:
            with suppress(OSError):  # it may have ended already
                assert servers.complete(url)[0] >= 500
        assert process.wait(120) == 1
        assert "nobody had told it to" in log.read_text()
        assert left_of(found, 30) == []
        assert not memory & set(os.listdir("/dev/shm"))
    finally:
        process.kill()
        process.wait()
        for left in left_of(found, 0):
            left.kill()


def as_another_user(ask):
    """What ``ask()`` returns in a process of nobody's."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(write, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said)


def _processes(count):
    return lambda url, process: wait_for(lambda: len(below(process)) >= count, 120)


def _memory_of_an_engine(url, process):
    wait_for(lambda: shared_memory(below(process)), 120)


def _an_answer(url, process):
    serve.wait_until_ready(serve.Server((), {}, url), process, 300)
    assert shared_memory(below(process))


# What is there when the signal comes. A server that starts its engine does not heed SIGTERM, and costs all of its
# patience; what it and its engine share is then left to Python's resource tracker.
@pytest.mark.parametrize(
    ("number", "there"),
    [
        pytest.param(signal.SIGTERM, _processes(2), id="SIGTERM-early"),
        pytest.param(signal.SIGKILL, _processes(3), id="SIGKILL-early", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, _memory_of_an_engine, id="SIGTERM-at-start", marks=pytest.mark.long),
        *(pytest.param(n, _an_answer, id=n.name, marks=pytest.mark.long) for n in SIGNALS),
    ],
)
def test_nothing_is_left_of_a_server_whatever_ends_the_command(checkpoint, tmp_path, number, there):
    url = f"http://127.0.0.1:{servers.free_port()}"
    words = serving(checkpoint("qwen3"), "--port", url.rsplit(":")[-1], *servers.MORE)
    found, memory = [], set()
    with (tmp_path / "log").open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        there(url, process)
        found = below(process)
        memory = shared_memory(found)
        process.send_signal(number)
        assert process.wait(60) == SIGNALS[number]
        assert left_of(found, 30) == []
        assert not memory & set(os.listdir("/dev/shm"))
    finally:
        process.kill()
        process.wait()
        for left in left_of(found, 0):
            left.kill()


@pytest.mark.long
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
@pytest.mark.parametrize("asks", [True, False])
def test_a_worker_must_ask_for_amx(checkpoint, tmp_path, monkeypatch, capfd, asks):
    """Linux grants AMX to a process that asks, and vLLM's does not: its attention dies at a first prompt of four
    tokens."""
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
    assert (
        "Worker proc VllmWorker-0 died unexpectedly" in said.out + said.err
    ) is not asks  # of SIGILL, where its exit code is told


@pytest.mark.long
def test_plain_vllm_with_the_flags_to_paste(checkpoint, capfd):
    """Those of ``nemo-fp8 render --to vllm`` and of docs/refit.md. On every address and without a token, only this
    machine may push,

    and nobody becomes local by what a header says, even where uvicorn believes every proxy.
    """
    name = "bf16_with_fp8_blockwise_mixed"
    page = (Path(__file__).parents[2] / "docs/refit.md").read_text()
    (two,) = re.findall(r"^(--worker-extension-cls .*\n--middleware .*)$", page, re.M)
    flags = shlex.split(render(preset(name), "vllm").text.replace("\\\n", " ")) + shlex.split(two)
    port = servers.free_port()
    words = (
        sys.executable,
        "-m",
        serve.MODULE,
        "--model",
        str(checkpoint("qwen3")),
        "--host",
        "0.0.0.0",
        "--port",
        str(port),
    )
    variables = environment(name) | {"FORWARDED_ALLOW_IPS": "*"}
    server = serve.Server((*words, *flags, *servers.MORE), variables, f"http://127.0.0.1:{port}")
    with serve.running(server) as process:
        serve.wait_until_ready(server, process)
        status, old = servers.complete(server.url)
        assert status == 200
        others = servers.beyond_loopback()
        if others:
            with pytest.raises(PrecisionError, match="answers a push with 403"):
                Refit(f"http://{others}:{port}").push(dict(tensors_of(checkpoint("qwen3", 1))))
            for url in (f"http://{others}:{port}", server.url):
                assert servers.ask(url, "/nemo_fp8/refit/expected", **{"X-Forwarded-For": "127.0.0.1"})[0] == 403
            assert servers.complete(server.url) == (200, old)
        assert servers.ask(server.url, "/nemo_fp8/refit/expected", Host="evil.example")[0] == 403
        Refit(server.url).push(dict(tensors_of(checkpoint("qwen3", 1)))).require()
        assert servers.complete(server.url)[1] != old
    assert "Without a token every user and every program of this machine" in "".join(capfd.readouterr())


def children_of(pid):
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def is_running(pid):
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
