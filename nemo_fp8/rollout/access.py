"""Who may reach a server: this machine alone, unless there is a token.

Two variables hold one. ``VLLM_API_KEY`` is vLLM's own, for generating and for pushing; ``NEMO_FP8_REFIT_TOKEN`` is for
pushing alone. What is said of a request here is read from its ASGI scope, with the standard library alone.

vLLM's own key guards ``/v1`` and three other paths; ``/invocations``, ``/tokenize`` and whatever a plugin adds stay
open beside it. :class:`TokenGuard` stands in front of all of them, ``/health`` excepted. It is named on vLLM's command
line (``--middleware``), which makes it where the server runs; the token comes through ``VLLM_API_KEY``, where no
process list shows it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

TOKEN = "VLLM_API_KEY"
PUSH_TOKEN = "NEMO_FP8_REFIT_TOKEN"
LOOPBACK = "127.0.0.1"
# Headers that a proxy adds, besides every x-forwarded-...
PROXIED = {b"forwarded", b"via", b"x-real-ip"}
OPEN = ("/health", "/ping")
REFUSAL = b'{"error": "Unauthorized"}'
Scope = dict[str, Any]
Channel = Callable[..., Awaitable[Any]]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. A name that is no number is trusted to be none, but for
    localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def path_of(scope: Mapping[str, Any]) -> str:
    """The path that was asked for, without the prefix (``--root-path``) that a proxy puts before all of them."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def brings(scope: Mapping[str, Any], token: str) -> bool:
    """Whether a request has ``Authorization: Bearer <token>``. How the scheme is written says nothing, as in HTTP."""
    scheme, _, brought = _headers(scope).get(b"authorization", b"").partition(b" ")
    return (
        bool(token) and scheme.lower() == b"bearer" and hmac.compare_digest(_digest(brought), _digest(token.encode()))
    )


def is_local(scope: Mapping[str, Any]) -> bool:
    """Whether a request was made on this machine, and came straight from there.

    uvicorn puts what a proxy's header says in the place of the connection's address, and told to trust everybody
    (``FORWARDED_ALLOW_IPS=*``) it takes anybody's word: so whatever has such a header comes from elsewhere. A page in a
    browser can reach this machine under a name of its own (DNS rebinding): so Host must be a name of this machine.
    """
    headers, client = _headers(scope), scope.get("client")
    if any(name in PROXIED or name.startswith(b"x-forwarded-") for name in headers):
        return False
    if (
        client is None
    ):  # a socket in the file system, which has permissions of its own; or a connection that is gone already
        server = scope.get("server")
        return server is not None and server[1] is None
    return is_loopback(client[0]) and _is_here(headers.get(b"host", LOOPBACK.encode()))


def comes_from_a_page(scope: Mapping[str, Any]) -> bool:
    """Whether a page in somebody's browser asks: browsers say of which site it is."""
    return b"origin" in _headers(scope)


class TokenGuard:
    """Lets a request through that brings ``Authorization: Bearer <token>``."""

    def __init__(self, app: Callable[[Scope, Channel, Channel], Awaitable[None]]) -> None:
        self.app = app
        self.token = os.environ[TOKEN]

    async def __call__(self, scope: Scope, receive: Channel, send: Channel) -> None:
        if scope["type"] not in ("http", "websocket") or path_of(scope) in OPEN or brings(scope, self.token):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(REFUSAL)).encode()),
                (b"www-authenticate", b"Bearer"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})


def _is_here(host: bytes) -> bool:
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name == socket.gethostname().lower()


def _headers(scope: Mapping[str, Any]) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in scope["headers"]}


def _digest(token: bytes) -> bytes:
    """Of one length whatever the token's, so that comparing tells nothing."""
    return hashlib.sha256(token).digest()
