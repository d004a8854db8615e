"""The main loop of a confined process: answers requests to run cells, call functions, and read and write files.

From the first cell on, it shares its interpreter with untrusted code. Nothing here protects against that code: the
isolation is around the process.
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
"""The size of the first read, enough for most requests, and the maximum of later reads."""
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
    """Send the ready message, and answer requests until the socket closes."""
    _settle_in(home)
    python.output_bytes = order["output"]
    cells: Cells = BashCells(order) if order["language"] == "bash" else python
    os.write(conn, b"R")
    if cells is python and not select.select([conn], [], [], 0)[0]:
        python.rehearse()  # no request yet: use the time to copy the pages that a cell modifies
    while True:
        cells.wait(conn)
        request = unframed(_receive(conn))
        reply = _files(request, home) if request["do"] in FILE_REQUESTS else cells.reply(request)
        _send(conn, framed({**reply, "number": request["number"]}))


def prepare(home: str, programs: str) -> None:
    """Set up what all sessions share before they are forked, because each page that they modify is copied."""
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
        del sys.modules[name]  # so that cells cannot import it


def rehearse(python: PythonCells) -> None:
    """Run cells many times before forking: Python specialises bytecode as it runs, which would copy shared pages."""
    for _ in range(UNTIL_SETTLED):
        for request in REHEARSAL:
            asked = unframed(framed(request)[HEADER.size :])
            HEADER.unpack_from(framed({**python.reply(asked), "number": 0}))
        python.rehearse()


def _settle_in(home: str) -> None:
    """Set the session's home folder if it differs from the common one, and give it its own random numbers."""
    if os.environ["HOME"] != home:
        os.environ.update(HOME=home, TMPDIR=home, MPLCONFIGDIR=home)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # otherwise all forks would draw the same numbers
    gc.enable()


def _receive(conn: int) -> bytes | bytearray:
    """One message without its header; the application sends the next only after the reply."""
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
    # O_NONBLOCK, so that opening a FIFO of that name does not wait for a writer.
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
    """The names of the files, as many as the limits allow."""
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
