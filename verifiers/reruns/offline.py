"""A stretch of a program → the same stretch without a network: what it would reach beyond this machine is refused."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_HUB_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # data sets then come from their cache, without retries
_ADDRESS_AT = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1, "socket.getaddrinfo": 0}
_LOCAL_NAMES = ("", "localhost", "ip6-localhost")

_refusing = 0
_is_hooked = False


class NoNetworkError(OSError):
    """Something asked for the network while there is none to be had."""


@contextmanager
def no_network() -> Iterator[None]:
    """While this lasts, this process reaches nothing but itself and its machine.

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
    """See every connection that Python makes; such a hook cannot be taken back, so it is added only when needed."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_refuse)
        _is_hooked = True


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _refusing or event not in _ADDRESS_AT:
        return
    address = arguments[_ADDRESS_AT[event]]
    host = address[0] if isinstance(address, tuple) else address
    if event == "socket.getaddrinfo" or isinstance(address, tuple):  # else a path on this machine
        name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host or "")
        if not _is_here(name):
            raise NoNetworkError(errno.ENETUNREACH, f"{name} was not reached: there is no network here")


def _is_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host in _LOCAL_NAMES or host == socket.gethostname()
    return address.is_loopback or address.is_unspecified
