"""A token before every path of a server. vLLM's own key guards ``/v1`` and three others; ``/invocations``, ``/tokenize``
and whatever a plugin adds stay open beside it. This stands in front of all of them, ``/health`` excepted.

Named on vLLM's command line (``--middleware``), which makes it where the server runs; the token comes through
``VLLM_API_KEY``, where no process list shows it. Plain ASGI: it needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN = ("/health", "/ping")
REFUSAL = b'{"error": "Unauthorized"}'
Scope = dict[str, Any]
Channel = Callable[..., Awaitable[Any]]


class TokenGuard:
    """Lets a request through that brings ``Authorization: Bearer <token>``."""

    def __init__(self, app: Callable[[Scope, Channel, Channel], Awaitable[None]]) -> None:
        self.app = app
        self.token = _digest(os.environ["VLLM_API_KEY"].encode())

    async def __call__(self, scope: Scope, receive: Channel, send: Channel) -> None:
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
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

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN:
            return True
        brought = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = brought.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token), self.token)


def _digest(token: bytes) -> bytes:
    """Of one length whatever the token's, so that comparing tells nothing."""
    return hashlib.sha256(token).digest()
