"""A session runs cells of code one after another and keeps state between them."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from verifiers.errors import ToolError
from verifiers.sandbox.drive import Gate, Steps, either
from verifiers.sandbox.inside.wire import PIECE_BYTES
from verifiers.sandbox.process import EndedError, Process
from verifiers.sandbox.replies import FILE_READ, FILE_WRITTEN, FILES_LISTED, Shape
from verifiers.sandbox.result import Result

if TYPE_CHECKING:
    from verifiers.sandbox.sandbox import Sandbox

GRACE_S, GRACE_SHARE = 0.5, 0.1
"""A cell has this many seconds, plus a tenth of its timeout, to react to its alarm before its process is ended."""
FILES_S = 30.0


class SessionLostError(ToolError, TimeoutError):
    """Because of its code, the session's process no longer answers requests for its files, or answers invalidly."""


class Session:
    """One process that keeps state between cells; create it with ``Sandbox.session()``.

    If a cell ends the process, its state is lost, but the session continues: the next cell runs in a new process, and
    its result has ``is_fresh``.

    >>> from verifiers.sandbox import Sandbox
    >>> with Sandbox() as sandbox, sandbox.session() as session:
    ...     _ = session.run("x = 20")
    ...     session.run("x + 1").value
    '21'
    """

    def __init__(self, sandbox: Sandbox, *, memory_mb: int | None = None) -> None:
        self.sandbox = sandbox
        self._memory_mb = memory_mb
        self._process: Process | None = None
        self._turn = Gate(1)
        self._is_closed = False

    @either
    def run(self, code: str, *, timeout_s: float | None = None) -> Steps[Result]:
        """Run a cell and return its result; concurrent calls run one after another."""
        check_code(code)
        return self.steps({"do": "run", "code": code}, timeout_s, self.sandbox.cell_ran)

    @either
    def call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Steps[Result]:
        """Call a function that a cell defined; the result's ``value`` is its return value, converted to JSON data.

        Pass only the inputs. Keep the expected value outside the sandbox, where the code cannot see it.

        >>> from verifiers.sandbox import Sandbox
        >>> with Sandbox() as sandbox, sandbox.session() as session:
        ...     _ = session.run("def double(x): return 2 * x")
        ...     session.call("double", [21]).value == 42
        True
        """
        if self.sandbox.language != "python":
            raise ValueError(f"only a python session can call a function; this one is {self.sandbox.language}")
        request = {"do": "call", "name": name, "args": list(args), "kwargs": dict(kwargs or {})}
        try:
            json.dumps(request)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the arguments of {name!r} must be plain JSON values: {error}") from None
        return self.steps(request, timeout_s, self.sandbox.function_returned)

    @either
    def write(self, name: str, content: bytes | str) -> Steps[None]:
        """Write a file in the session's folder."""
        check_name(name)
        yield from self._files({"do": "write", "files": {name: encode(content)}}, FILE_WRITTEN)

    @either
    def read(self, name: str) -> Steps[bytes]:
        """The bytes of a file in the session's folder.

        An OSError (the file does not exist, or the session did not answer) is caused by the code, not by the sandbox.
        """
        check_name(name)
        ends = time.monotonic() + FILES_S
        yield from self._turn.enter()
        try:
            content = bytearray()
            while True:
                request = {"do": "read", "name": name, "offset": len(content), "bytes": PIECE_BYTES}
                reply = yield from self._exchange(request, FILE_READ, ends - time.monotonic())
                piece = reply.get("content", b"")
                content += piece
                if len(piece) < PIECE_BYTES:
                    return bytes(content)
                if len(content) > self.sandbox.disk_bytes:
                    raise OSError(errno.EFBIG, f"longer than the disk limit of {self.sandbox.disk_mb} MiB", name)
        finally:
            self._done()

    @either
    def files(self) -> Steps[list[str]]:
        """The names of all files in the session's folder, as ``folder/name`` inside folders.

        The list has at most 10,000 names and at most one mebibyte.
        """
        reply = yield from self._files({"do": "files"}, FILES_LISTED)
        names: list[str] = reply.get("names", [])
        return names

    def close(self) -> None:
        """End the session's process and everything it started; a running cell is killed."""
        self._is_closed = True
        if self._turn.is_busy() and self._process is not None:
            self._process.kill()  # the call that waits for the cell closes it
        else:
            self._drop()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def steps(self, request: dict[str, Any], timeout_s: float | None, shape: Shape) -> Steps[Result]:
        """Run one request when its turn comes, and return the result."""
        seconds = self.sandbox.timeout_s if timeout_s is None else timeout_s
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"timeout_s must be a positive number of seconds; got {timeout_s!r}")
        if not self._turn.try_enter():
            yield from self._turn.enter()
        try:
            return (yield from self._cell({**request, "timeout_s": seconds}, seconds, shape))
        finally:
            self._done()

    def _cell(self, request: dict[str, Any], seconds: float, shape: Shape) -> Steps[Result]:
        process = self._process
        if process is None or process.is_killed or self._is_closed:
            process = yield from self._ready()
        is_fresh, process.is_used = not process.is_used, True
        process.rewind()
        try:
            reply = yield from process.request(request, seconds * (1 + GRACE_SHARE) + GRACE_S, shape)
        except EndedError as error:
            result = _ended(process, error, is_fresh)
            self._drop()
            self.sandbox.check_host(error)
            return result
        except BaseException:  # cancelled: the state of the cell is unknown, so the process cannot be reused
            self._drop()
            raise
        return _result(process, reply, is_fresh)

    def _files(self, request: dict[str, Any], shape: Shape) -> Steps[dict[str, Any]]:
        yield from self._turn.enter()
        try:
            return (yield from self._exchange(request, shape, FILES_S))
        finally:
            self._done()

    def _exchange(self, request: dict[str, Any], shape: Shape, seconds: float) -> Steps[dict[str, Any]]:
        process = yield from self._ready()
        try:
            reply = yield from process.request(request, seconds, shape)
        except BaseException as error:
            self._drop()
            if not isinstance(error, EndedError):
                raise
            self.sandbox.check_host(error)
            raise SessionLostError(f"the session's files are not accessible: {error}") from None
        if (number := reply.get("errno")) is not None:
            raise OSError(number, os.strerror(number), request.get("name"))
        return reply

    def _ready(self) -> Steps[Process]:
        if self._is_closed:
            raise ValueError("the session is closed; open another with sandbox.session()")
        if self._process is not None and self._process.is_killed:  # the sandbox was closed meanwhile
            self._drop()
        if self._process is None:
            self._process = yield from self.sandbox.take(self._memory_mb)
        return self._process

    def _done(self) -> None:
        if self._is_closed:
            self._drop()
        else:
            self.sandbox.refill()
        self._turn.leave()

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


def check_code(code: str) -> None:
    """Raise TypeError unless the code is a string, before a process is taken for it."""
    if not isinstance(code, str):
        raise TypeError(f"code must be a string; got {type(code).__name__}")


def check_name(name: Any) -> None:
    """Raise ValueError unless this can be the name of a file, before the session is asked for it."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"the name of a file must be a non-empty string without null characters; got {name!r}")
    try:
        name.encode(errors="surrogateescape")  # the form in which Python writes names that are not UTF-8
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the name of a file must be text that can be encoded; got {name!r} ({error.reason})"
        ) from None


def encode(content: bytes | str) -> str:
    """A file's content as base64, for JSON."""
    return base64.b64encode(content.encode() if isinstance(content, str) else content).decode()


def _result(process: Process, reply: Mapping[str, Any], is_fresh: bool) -> Result:
    out, err, is_full = process.output()
    status = reply.get("status", "killed")
    return Result(
        status="output" if is_full and status in ("ok", "error") else status,
        stdout=out,
        stderr=err,
        value=reply.get("value"),
        error=reply.get("error"),
        exit_code=reply.get("exit_code"),
        time_s=process.time_s(),
        is_fresh=is_fresh or reply.get("is_fresh", False),
    )


def _ended(process: Process, error: EndedError, is_fresh: bool) -> Result:
    out, err, _ = process.output()
    return Result(
        status=error.status, stdout=out, stderr=err, error=str(error), time_s=process.time_s(), is_fresh=is_fresh
    )
