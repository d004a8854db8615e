"""The Host header of a request → whether the server accepts it. This prevents DNS rebinding attacks."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit


def is_own_host(header: str, bound: str, names: Collection[str] = ()) -> bool:
    """Does this server accept this Host header? A name that an attacker's DNS points here is refused.

    Accepted are ``localhost``, the name that the server is bound to, ``names``, and loopback addresses; if the server
    listens beyond this machine, also any IP address (DNS cannot forge one) and this machine's host name.

    >>> is_own_host("127.0.0.1:8000", "127.0.0.1"), is_own_host("evil.example:8000", "127.0.0.1")
    (True, False)
    >>> is_own_host("gpu.lab:8000", "0.0.0.0"), is_own_host("gpu.lab:8000", "0.0.0.0", ["gpu.lab"])
    (False, True)
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    name = name.lower().rstrip(".")
    if name == "localhost" or name == bound.lower() or name in {one.lower().rstrip(".") for one in names}:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return not is_loopback(bound) and name == socket.gethostname().lower()
    return address.is_loopback or not is_loopback(bound)


def is_loopback(host: str) -> bool:
    """Does a server that is bound to this address listen to its own machine only?

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_guarded(host: str, api_key: str | None, insecure: bool, *, can: str) -> None:
    """Raise if a server would listen beyond this machine without a key; ``can``: what anybody could then do."""
    if not is_loopback(host) and api_key is None and not insecure:
        raise ValueError(
            f"on {host or 'every address'} without an API key, anyone who can reach this machine can {can}: set a key, "
            "or allow this with --insecure (insecure=True)"
        )
