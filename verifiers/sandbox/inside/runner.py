"""Requests on a socket → cells run, functions called, files in and out: what a confined process does all its life.

From the first cell on, this shares its interpreter with code that nobody trusts. Nothing here guards against that code:
the walls are around the process.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import select
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from verifiers.sandbox.inside.cells import PythonCells, rehearse
from verifiers.sandbox.inside.shell import BashCells

HEADER = struct.Struct("<I")
MAX_FILES = 10_000


class Cells(Protocol):
    """One language: requests to replies."""

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]: ...

    def wait(self, fd: int) -> None: ...


def serve_session(conn: int, order: Mapping[str, Any], home: str) -> NoReturn:
    """Say that this process is ready, and answer requests until there are no more."""
    _settle_in(home)
    cells: Cells = BashCells(order) if order["language"] == "bash" else PythonCells(order["output"])
    with socket.socket(fileno=conn) as near:
        near.sendall(b"R")
        if order["language"] == "python" and not select.select([near], [], [], 0)[0]:
            rehearse()  # nobody waits yet: the pages that a cell changes are copied now, and not then
        while True:
            cells.wait(conn)
            header = _receive(near, HEADER.size)
            request = json.loads(_receive(near, HEADER.unpack(header)[0]))
            reply = _files(request, home) if request["do"] in FILE_REQUESTS else cells.reply(request)
            message = json.dumps({**reply, "number": request["number"]}).encode()
            near.sendall(HEADER.pack(len(message)) + message)


def prepare(home: str, programs: str) -> None:
    """What all sessions have in common, done before they are forked, for each page of memory they change is copied."""
    os.environ.clear()
    os.environ.update(
        PATH=f"{programs}:/usr/local/bin:/usr/bin:/bin",
        HOME=home,
        TMPDIR=f"{home}/.tmp",
        LANG="C.UTF-8",
        MPLCONFIGDIR=home,
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        del sys.modules[name]  # nothing of this is a cell's to import
    rehearse()


def _settle_in(home: str) -> None:
    """Numbers of its own, and a home of its own where not all have theirs in the same place."""
    if os.environ["HOME"] != home:
        os.environ.update(HOME=home, TMPDIR=home, MPLCONFIGDIR=home)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # forks would all draw the same numbers
    gc.enable()


def _receive(near: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        chunk = near.recv(min(length - len(received), 1 << 20))
        if not chunk:
            os._exit(0)
        received += chunk
    return bytes(received)


# --- files --------------------------------------------------------------------------------------------------------


def _files(request: Mapping[str, Any], home: str) -> dict[str, Any]:
    try:
        return FILE_REQUESTS[request["do"]](request, home)
    except OSError as error:
        return {"errno": error.errno}


def _write(request: Mapping[str, Any], home: str) -> dict[str, Any]:
    for name, content in request["files"].items():
        path = os.path.join(home, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    return {}


def _read(request: Mapping[str, Any], home: str) -> dict[str, Any]:
    with open(os.path.join(home, request["name"]), "rb") as file:
        return {"content": base64.b64encode(file.read()).decode()}


def _list(request: Mapping[str, Any], home: str) -> dict[str, Any]:
    names: list[str] = []
    for folder, folders, files in os.walk(home):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += (os.path.relpath(os.path.join(folder, name), home) for name in files if not name.startswith("."))
        if len(names) > MAX_FILES:
            break
    return {"names": names[:MAX_FILES]}


FILE_REQUESTS = {"write": _write, "read": _read, "files": _list}
