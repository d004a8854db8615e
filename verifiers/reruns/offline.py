"""A context in which Python connections to other machines are refused."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_HUB_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # make data sets load from their cache, without retries
_ADDRESS_AT = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1, "socket.getaddrinfo": 0}
_LOCAL_NAMES = ("", "localhost", "ip6-localhost")

_refusing = 0
_is_hooked = False


class NoNetworkError(OSError):
    """A connection to another machine was attempted within `no_network`."""


@contextmanager
def no_network() -> Iterator[None]:
    """Within this context, Python code in this process can connect only to this machine.

    >>> with no_network(), socket.socket(type=socket.SOCK_DGRAM) as datagrams:
    ...     datagrams.sendto(b"hello", ("192.0.2.1", 53))
    Traceback (most recent call last):
    verifiers.reruns.offline.NoNetworkError: [Errno 101] 192.0.2.1 was not reached: there is no network here
    """
    global _refusing
    _hook_once()
    before = {name: os.environ.get(name) for name in _HUB_VARIABLES}
    os.environ.update(dict.fromkeys(_HUB_VARIABLES, "1"))
    _refusing += 1
    try:
        yield
    finally:
        _refusing -= 1
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _hook_once() -> None:
    """Install an audit hook for connections, only when first needed, because audit hooks cannot be removed."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_refuse)
        _is_hooked = True


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _refusing or event not in _ADDRESS_AT:
        return
    address = arguments[_ADDRESS_AT[event]]
    host = address[0] if isinstance(address, tuple) else address
    if event == "socket.getaddrinfo" or isinstance(address, tuple):  # else a Unix socket
        name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host or "")
        if not _is_here(name):
            raise NoNetworkError(errno.ENETUNREACH, f"{name} was not reached: there is no network here")


def _is_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host in _LOCAL_NAMES or host == socket.gethostname()
    return address.is_loopback or address.is_unspecified
