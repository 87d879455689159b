"""Who may reach a server: this machine alone, unless there is a token. vLLM's own variable holds it."""

from __future__ import annotations

import ipaddress

TOKEN = "VLLM_API_KEY"
LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. A name that is no number is trusted to be none, but for localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
