"""Run vLLM's OpenAI server under a contract: its command line, its environment, and a process that ends completely.

    server = server_for("Qwen/Qwen3-8B", precision)      # what would run; prints as a command to paste
    with running(server): ...                            # runs it, and ends every process that it started

The server listens on loopback. To listen elsewhere it needs a token, which then guards every path, while vLLM's own key
guards only some (:mod:`nemo_fp8.rollout.access`). Other users of the machine reach loopback, too, so ``nemo-fp8 serve``
draws a ``push_token`` (:mod:`nemo_fp8.rollout.token_file`), without which nobody may push. vLLM is started as a module,
since CPU builds do not have the ``vllm`` command.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from nemo_fp8 import lifetime
from nemo_fp8.contract import Precision
from nemo_fp8.contract.naming import given
from nemo_fp8.errors import PrecisionError
from nemo_fp8.extras import require
from nemo_fp8.render.vllm import flags
from nemo_fp8.rollout.access import LOOPBACK, PUSH_TOKEN, TOKEN, is_loopback, reply_of
from nemo_fp8.rollout.arguments import check_model, engine_args, environment

MODULE = "vllm.entrypoints.openai.api_server"
GUARD = "nemo_fp8.rollout.access.TokenGuard"
PUSHES = "nemo_fp8.rollout.refit.door.RefitEndpoints"
PATIENCE = 20.0  # seconds that a server has to end by itself


@dataclass(frozen=True)
class Server:
    """A server's command line and environment. The secrets are apart, and are never printed."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    url: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Return the command line with its variables, quoted for a shell."""
        said = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*said, "python", *map(shlex.quote, self.words[1:])])


def server_for(
    model: str,
    precision: Precision | str,
    *,
    host: str = LOOPBACK,
    port: int = 8000,
    token: str | None = None,
    push_token: str | None = None,
    activations: str = "kernel",
    kernel: str = "auto",
    unquantized: str = "packed",
    more: Sequence[str] = (),
) -> Server:
    """Return the server of a model under a contract; nothing is started.

    ``token`` guards all paths, ``push_token`` pushes. ``activations``, ``kernel`` and ``unquantized`` are those of
    :func:`engine_args`. ``more`` are words for vLLM, such as ``--max-model-len 4096``.

    Raises PrecisionError if other machines could reach the server without a token, or the contract, the model and this
    machine do not fit together.
    """
    if token is None and not is_loopback(host):
        raise PrecisionError(
            f"A server on {host} without a token.",
            "Whoever reaches that address could use the model, and push weights into it.",
            f"Set {TOKEN} to a secret, or listen on {LOOPBACK} (and come through ssh -L).",
        )
    hidden = [
        word
        for word in more
        if len(word) > 3 and any(own.startswith(word.split("=")[0]) for own in ("--host", "--port"))
    ]
    if hidden:
        raise PrecisionError(
            f"{hidden[0]} among the words for vLLM.",
            "vLLM takes the last address that is given, and shortened options too, so the server could listen there "
            "without a token.",
            "Say where to listen with --host and --port themselves.",
        )
    require("rollout")
    contract = given(precision)
    check_model(model, contract)
    arguments = engine_args(contract, activations=activations, kernel=kernel, unquantized=unquantized)
    words = [sys.executable, "-m", MODULE, "--model", model, "--host", host, "--port", str(port), *flags(arguments)]
    words += ["--middleware", PUSHES]
    if token is not None:
        words += ["--middleware", GUARD]
    reached = LOOPBACK if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
    secrets = {name: secret for name, secret in ((TOKEN, token), (PUSH_TOKEN, push_token)) if secret is not None}
    return Server((*words, *more), environment(contract), url, secrets)


def run(server: Server) -> int:
    """Run a server until it ends; return its exit code."""
    with running(server) as process:
        return process.wait()


@contextmanager
def running(server: Server) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server while the context lasts; it also ends if this process dies."""
    environment = {**os.environ, **server.variables, **server.secrets}
    with lifetime.running(server.words, patience=PATIENCE, env=environment) as process:
        yield process


def wait_until_ready(server: Server, process: subprocess.Popen[bytes], patience: float = 600.0) -> None:
    """Wait until the server answers. Raises PrecisionError if it ends, or needs more than ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PrecisionError(
                f"The server ended with code {process.returncode} before it answered.",
                "vLLM said why in its output above.",
                "Mend that, and start it again.",
            )
        try:
            with reply_of(urllib.request.Request(f"{server.url}/health"), timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    waited = f"No answer from {server.url} in {patience:.0f} seconds."
    raise PrecisionError(waited, "The model may be large, or the machine busy.", "Wait longer, or look at its output.")
