"""Requests on a socket → cells run, functions called, files in and out: what a confined process does all its life.

From the first cell on, this shares its interpreter with code that nobody trusts. Nothing here guards against that code:
the walls are around the process.
"""

from __future__ import annotations

import base64
import errno
import gc
import json
import os
import select
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from verifiers.sandbox.inside.cells import PythonCells
from verifiers.sandbox.inside.shell import BashCells
from verifiers.sandbox.inside.wire import HEADER, LIST_BYTES, MAX_FILES, framed, unframed

FIRST_BYTES, CHUNK_BYTES = 4096, 1 << 20
"""A request is read in one go where it is short, as most are."""
UNTIL_SETTLED = 32
REHEARSAL: tuple[dict[str, Any], ...] = (
    {"do": "run", "code": "def f(x): return x", "timeout_s": 1.0},
    {"do": "call", "name": "f", "args": [[0, 0.5, "", None]], "kwargs": {}, "timeout_s": 1.0},
    {"do": "run", "code": "del f\nf", "timeout_s": 1.0},
)


class Cells(Protocol):
    """One language: requests to replies."""

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]: ...

    def wait(self, fd: int) -> None: ...


def serve_session(conn: int, order: Mapping[str, Any], home: str, python: PythonCells) -> NoReturn:
    """Say that this process is ready, and answer requests until there are no more."""
    _settle_in(home)
    python.output_bytes = order["output"]
    cells: Cells = BashCells(order) if order["language"] == "bash" else python
    os.write(conn, b"R")
    if cells is python and not select.select([conn], [], [], 0)[0]:
        python.rehearse()  # nobody waits yet: the pages that a cell changes are copied now, and not then
    while True:
        cells.wait(conn)
        request = unframed(_receive(conn))
        reply = _files(request, home) if request["do"] in FILE_REQUESTS else cells.reply(request)
        _send(conn, framed({**reply, "number": request["number"]}))


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


def rehearse(python: PythonCells) -> None:
    """Do many times what sessions do once: Python rewrites code as it runs, and what it changes is shared no more."""
    for _ in range(UNTIL_SETTLED):
        for request in REHEARSAL:
            asked = unframed(framed(request)[HEADER.size :])
            HEADER.unpack_from(framed({**python.reply(asked), "number": 0}))
        python.rehearse()


def _settle_in(home: str) -> None:
    """Numbers of its own, and a home of its own where not all have theirs in the same place."""
    if os.environ["HOME"] != home:
        os.environ.update(HOME=home, TMPDIR=home, MPLCONFIGDIR=home)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # forks would all draw the same numbers
    gc.enable()


def _receive(conn: int) -> bytes | bytearray:
    """One message without its header; the next is sent only when this one is answered."""
    received = os.read(conn, FIRST_BYTES)
    while len(received) < HEADER.size:
        received += _more(conn, HEADER.size - len(received))
    missing = HEADER.unpack_from(received)[0] + HEADER.size - len(received)
    if not missing:
        return received[HEADER.size :]
    whole = bytearray(received)
    while missing:
        whole += (chunk := _more(conn, min(missing, CHUNK_BYTES)))
        missing -= len(chunk)
    del whole[: HEADER.size]
    return whole


def _more(conn: int, length: int) -> bytes:
    return os.read(conn, length) or os._exit(0)


def _send(conn: int, message: bytes) -> None:
    while message:
        message = message[os.write(conn, message) :]


# --- files --------------------------------------------------------------------------------------------------------


def _files(request: Mapping[str, Any], home: str) -> dict[str, Any]:
    try:
        return FILE_REQUESTS[request["do"]](request, home)
    except OSError as error:
        return {"errno": error.errno or errno.EIO}


def _write(request: Mapping[str, Any], home: str) -> dict[str, Any]:
    for name, content in request["files"].items():
        path = os.path.join(home, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    return {}


def _read(request: Mapping[str, Any], home: str) -> dict[str, Any]:
    # Not to wait for whoever may write to a pipe of that name.
    fd = os.open(os.path.join(home, request["name"]), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if request["offset"]:
            os.lseek(fd, request["offset"], os.SEEK_SET)
        content = b""
        while chunk := os.read(fd, request["bytes"] - len(content)):
            content += chunk
    finally:
        os.close(fd)
    return {"content": base64.b64encode(content).decode()}


def _list(request: Mapping[str, Any], home: str) -> dict[str, Any]:
    """As many names as fit."""
    names: list[str] = []
    left = LIST_BYTES
    for folder, folders, files in os.walk(home):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = os.path.relpath(os.path.join(folder, name), home)
            left -= len(json.dumps(path)) + 2
            if left < 0 or len(names) == MAX_FILES:
                return {"names": names}
            if not name.startswith("."):
                names.append(path)
    return {"names": names}


FILE_REQUESTS = {"write": _write, "read": _read, "files": _list}
