"""An address → a connection to a Ray cluster, or an error that says why there is none."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
from typing import Any

OLDEST = (2, 40)
ANSWER_S = 5.0


class ClusterError(ValueError):
    """No Ray cluster can be used."""


def import_ray() -> Any:
    """Import Ray; raises if it is missing or too old."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("workers='ray' needs Ray: pip install 'verifiers[ray]'") from error
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ClusterError(
            f"Ray {ray.__version__} is too old; {oldest} or newer is needed: pip install 'verifiers[ray]'"
        )
    return ray


def connect(ray: Any, address: str | None) -> bool:
    """Connect this process unless it is connected; returns whether this call connected it.

    Without an address: the cluster in RAY_ADDRESS, one that runs on this machine, or a new one here.
    """
    if address is not None:
        check_address(address)
    if ray.is_initialized():
        _check_same(ray, address)
        return False
    if address is None and (named := os.environ.get("RAY_ADDRESS")):
        check_address(named)
    before = _sigterm()
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, include_dashboard=_dashboard(address))
    except (ConnectionError, RuntimeError, TimeoutError, ValueError, OSError) as error:
        ray.shutdown()
        said = " ".join(str(error).split())
        where = "a new cluster on this machine" if address is None else f"the Ray cluster at {address}"
        raise ClusterError(f"{where} cannot be used: {said:.600}") from error
    finally:
        if before is not None:  # Ray's handler would end the process before running rollouts are saved
            signal.signal(signal.SIGTERM, before)
    return True


def _dashboard(address: str | None) -> bool | None:
    return False if address is None and not os.environ.get("RAY_ADDRESS") else None


def _sigterm() -> Any:
    is_main = threading.current_thread() is threading.main_thread()
    return signal.getsignal(signal.SIGTERM) if is_main else None


def check_address(address: str) -> None:
    """Raise if no cluster answers at an address: Ray itself would wait for a minute, and may end the process."""
    if address in ("auto", "local"):
        return
    if "://" in address:
        raise ClusterError(
            f"{address} is the address of a Ray client or a job server; pass that of the cluster itself, HOST:6379, "
            "and run this on one of its machines (ray job submit does)"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(f"{address!r} is not an address of a Ray cluster; pass one like HOST:6379, or none")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as connection:
            is_grpc = os.environ.get("RAY_USE_TLS") == "1" or _speaks_http2(connection)
    except OSError as error:
        raise ClusterError(f"no Ray cluster answers at {address} ({error}); start one with ray start --head") from error
    if not is_grpc:
        raise ClusterError(f"the server at {address} is not a Ray cluster; ray start --head prints the address of one")


def _speaks_http2(connection: socket.socket) -> bool:
    """Does the server answer the start of a gRPC connection with an HTTP/2 settings frame?"""
    empty_settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    connection.settimeout(ANSWER_S)
    try:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + empty_settings)
        head = connection.recv(9)
    except OSError:  # no answer, or the connection was closed
        return False
    return len(head) >= 4 and head[3] == 4


def _check_same(ray: Any, address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", "local", here):
        raise ClusterError(f"this process is already connected to the Ray cluster at {here}, not to {address}")
