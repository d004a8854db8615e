"""Runs Python cells: returns the status, the repr of the last expression, and the traceback of an exception."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ast
import errno
import io
import json
import linecache
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from verifiers.sandbox.inside.wire import DEEPEST, MAX_LISTS, depth, outline

Reply = dict[str, Any]

MAX_FRAMES = 50


class OutOfTimeError(BaseException):
    """The cell's alarm went off; not an Exception, so that handlers in the cell rarely catch it."""


class OutOfOutputError(BaseException):
    """The output file is full."""


class CappedOutput(io.FileIO):
    """Standard output or error of a cell; stops the cell once the file is full."""

    is_muted = False

    def write(self, data: Any) -> int:
        if self.is_muted:
            return len(data)
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno == errno.EPERM:  # the file is sealed against growing
                raise OutOfOutputError from None
            raise


class KeptBuffer(io.BufferedWriter):
    """The buffer of an output stream. Closing it only flushes it, because a cell may wrap it in another stream, which
    closes it when that stream is collected.
    """

    def close(self) -> None:
        self.flush()


class KeptStream(io.TextIOWrapper):
    """Standard output or error of the cells, which all of a session's cells use; no cell can close or detach it."""

    def close(self) -> None:
        self.flush()

    def detach(self) -> Any:
        self.flush()
        return self.buffer


class PythonCells:
    """One namespace in which cells run."""

    def __init__(self) -> None:
        self.output_bytes = 0
        self.count = 0
        self.is_running = False
        self.names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        self.files = [CappedOutput(fd, "wb", closefd=False) for fd in (1, 2)]
        self.streams = [_text(file) for file in self.files]
        vars(sys).update(__stdout__=self.streams[0], __stderr__=self.streams[1])

    def rehearse(self) -> None:
        """Run an empty cell, so that Python's lazy initialisation happens before the first real one."""
        self.reply({"do": "run", "code": "0", "timeout_s": 1.0})
        self.count = 0

    def wait(self, fd: int) -> None:
        """Python needs nothing done between cells."""

    def reply(self, request: Mapping[str, Any]) -> Reply:
        """Run a cell or call a function, with an alarm for its timeout."""
        sys.stdout, sys.stderr = self.streams
        reply: Reply = {}
        try:
            self.is_running = True
            # Set it each time, because a cell may have replaced the handler; `signal.signal` is slower (it uses enums).
            _signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
            reply = self._call(request) if request["do"] == "call" else self._run(request["code"])
            self._flush_replaced()
            for stream in self.streams:
                stream.flush()
        except BaseException as error:  # foreign code: whatever it raised is its result
            self.is_running = False
            reply = self._failure(error)
        finally:
            self.is_running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return reply

    def _run(self, code: str) -> Reply:
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            exec(compile(tree, name, "exec", dont_inherit=True), self.names)  # noqa: S102 - what the process is for
        if not isinstance(last, ast.Expr):
            return {"status": "ok"}
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self.names)  # noqa: S307
        return {"status": "ok", "value": None if value is None else self._short(repr(value))}

    def _call(self, request: Mapping[str, Any]) -> Reply:
        name = request["name"]
        if name not in self.names:
            return {"status": "error", "error": f"NameError: name {name!r} is not defined"}
        value = plain(self.names[name](*request["args"], **request["kwargs"]))
        text = json.dumps(value).encode()
        size, signs = len(text), outline(text)
        if size > 4 * self.output_bytes:
            return {"status": "output", "error": f"the value has {size} bytes, more than {4 * self.output_bytes}"}
        lists = signs.count(b"[") + signs.count(b"{")
        if lists >= MAX_LISTS or (lists > DEEPEST and depth(signs) > DEEPEST):
            why = f"the value has more than {MAX_LISTS} lists and dicts, or is nested more than {DEEPEST} deep"
            return {"status": "output", "error": why}
        return {"status": "ok", "value": value}

    def _failure(self, error: BaseException) -> Reply:
        """The reply for a cell that raised."""
        self._flush()
        if isinstance(error, OutOfTimeError):
            return {"status": "timeout", "error": "it ran out of time"}
        if isinstance(error, OutOfOutputError):
            return {"status": "output", "error": f"it wrote more than {self.output_bytes} bytes"}
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return {"status": "ok"}
        status = "memory" if isinstance(error, MemoryError) else "error"
        try:
            return {"status": status, "error": self._short(_describe(error))}
        except BaseException:  # foreign code: an exception's own __str__
            return {"status": status, "error": type(error).__name__}

    def _flush_replaced(self) -> None:
        """Flush what a cell has put in place of standard output and error; as when Python exits, errors are ignored."""
        for name in ("stdout", "stderr"):
            with suppress(Exception):  # foreign code, or the cell has closed it
                getattr(sys, name).flush()

    def _flush(self) -> None:
        """Flush the buffers; what does not fit is dropped, so that it does not appear in the next cell's output."""
        for is_muted in (False, True):
            for file in self.files:
                file.is_muted = is_muted
            for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None), *self.streams):
                with suppress(BaseException):  # foreign code, or the cell has closed or removed it
                    stream.flush()  # type: ignore[union-attr]
        for file in self.files:
            file.is_muted = False

    def _short(self, text: str) -> str:
        """The text cut to the output limit, as a plain `str` without surrogates."""
        text = str.__str__(text)
        if len(text) > self.output_bytes:
            text = f"{text[: self.output_bytes]}... ({len(text)} characters)"
        return text.encode(errors="backslashreplace").decode()

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.is_running:
            raise OutOfTimeError


def _text(raw: io.FileIO) -> io.TextIOWrapper:
    """A line-buffered stream, so that complete lines are written even if the process ends during the next."""
    return KeptStream(KeptBuffer(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _describe(error: BaseException) -> str:
    """The traceback, starting at the cell's first frame."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell"):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES)).rstrip()


def plain(value: Any) -> Any:
    """A value as JSON data: sets and arrays become lists, and other objects their repr.

    >>> plain({"a": (1, 2.5), 3: {4}, "c": 1j})
    {'a': [1, 2.5], '3': [4], 'c': '1j'}
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return repr(value)
