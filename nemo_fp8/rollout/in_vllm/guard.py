"""A token before every path of a server. vLLM's own key guards ``/v1`` and three others; ``/invocations``, ``/tokenize``
and whatever a plugin adds stay open beside it. This stands in front of all of them, ``/health`` excepted.

Named on vLLM's command line (``--middleware``), which makes it where the server runs; the token comes through
``VLLM_API_KEY``, where no process list shows it. Plain ASGI: it needs nothing but the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from nemo_fp8.rollout.access import TOKEN, brings, path_of

OPEN = ("/health", "/ping")
REFUSAL = b'{"error": "Unauthorized"}'
Scope = dict[str, Any]
Channel = Callable[..., Awaitable[Any]]


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
