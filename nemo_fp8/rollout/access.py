"""Decide who may reach a server: callers on this machine alone, unless there is a token.

Two environment variables hold a token. ``VLLM_API_KEY`` is vLLM's own, for generating and for pushing;
``NEMO_FP8_REFIT_TOKEN`` is for pushing alone. The functions here read a request's ASGI scope, with the standard
library alone.

vLLM's own key guards ``/v1`` and three other paths, and leaves ``/invocations``, ``/tokenize`` and the paths of plugins
open. :class:`TokenGuard` guards all paths but ``/health`` and ``/ping``. vLLM makes it in the server's process, by its
name on the command line (``--middleware``). It reads the token from ``VLLM_API_KEY``, since everybody can read a
process's command line.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import urllib.request
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
    """Return whether an address is reached from this machine alone. Of names only ``localhost`` counts; none is looked
    up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reply_of(request: urllib.request.Request, timeout: float | None) -> Any:
    """Send a request, and return the reply; to an address of this machine past any proxy of the environment.

    A proxy would have the weights and the token, and from another machine it does not reach this one.
    """
    if is_loopback(urlsplit(request.full_url).hostname or ""):
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout)
    return urllib.request.urlopen(request, timeout=timeout)


def path_of(scope: Mapping[str, Any]) -> str:
    """Return a request's path without the prefix (``--root-path``) that a proxy puts before every path."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def brings(scope: Mapping[str, Any], token: str) -> bool:
    """Return whether a request has ``Authorization: Bearer <token>``. The case of the scheme does not matter, as in
    HTTP."""
    scheme, _, brought = _headers(scope).get(b"authorization", b"").partition(b" ")
    return (
        bool(token) and scheme.lower() == b"bearer" and hmac.compare_digest(_digest(brought), _digest(token.encode()))
    )


def is_local(scope: Mapping[str, Any]) -> bool:
    """Return whether a request was made on this machine, and did not come through a proxy.

    uvicorn replaces the connection's address by the one in a proxy's header, and believes any sender if
    ``FORWARDED_ALLOW_IPS=*``. So a request with such a header counts as one from elsewhere. A page in a browser can
    reach this machine under a name of the page's site (DNS rebinding). So Host must be a name of this machine.
    """
    headers, client = _headers(scope), scope.get("client")
    if any(name in PROXIED or name.startswith(b"x-forwarded-") for name in headers):
        return False
    if client is None:  # a socket in the file system, guarded by its permissions; or a connection that is gone
        server = scope.get("server")
        return server is not None and server[1] is None
    return is_loopback(client[0]) and _is_here(headers.get(b"host", LOOPBACK.encode()))


def comes_from_a_page(scope: Mapping[str, Any]) -> bool:
    """Return whether a page in a browser made the request: browsers then send its site as Origin."""
    return b"origin" in _headers(scope)


class TokenGuard:
    """ASGI middleware that answers 401 to requests without ``Authorization: Bearer <token>``.

    The token is that of ``VLLM_API_KEY`` when vLLM makes the object; a KeyError then, if it is not set.
    """

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
    """Return whether a Host header names this machine."""
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name == socket.gethostname().lower()


def _headers(scope: Mapping[str, Any]) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in scope["headers"]}


def _digest(token: bytes) -> bytes:
    """Hash a token to a fixed length, so that the time of a comparison does not tell the token's length."""
    return hashlib.sha256(token).digest()
