"""A cell of Python → its status, the repr of its last expression, and the traceback of what it raised."""

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
from types import FrameType, TracebackType
from typing import Any

from verifiers.sandbox.inside.wire import DEEPEST, MAX_LISTS, depth, outline

Reply = dict[str, Any]

MAX_FRAMES = 50


class OutOfTimeError(BaseException):
    """The alarm went off; not an Exception, so that a cell's own handlers rarely catch it."""


class OutOfOutputError(BaseException):
    """The output file is full."""


class CappedOutput(io.FileIO):
    """Standard output or error; stops the cell once the file it goes to is full."""

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


class PythonCells:
    """One namespace, and the cells that ran in it."""

    def __init__(self) -> None:
        self.output_bytes = 0
        self.count = 0
        self.is_running = False
        self.names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        self.files = [CappedOutput(fd, "wb", closefd=False) for fd in (1, 2)]
        self.streams = [_text(file) for file in self.files]
        vars(sys).update(__stdout__=self.streams[0], __stderr__=self.streams[1])

    def rehearse(self) -> None:
        """Run a cell for nothing: what Python makes and settles on the way is there before the first one comes."""
        self.reply({"do": "run", "code": "0", "timeout_s": 1.0})
        self.count = 0

    def wait(self, fd: int) -> None:
        """Nothing is to be done between cells."""

    def reply(self, request: Mapping[str, Any]) -> Reply:
        """Do what is asked, under the alarm."""
        sys.stdout, sys.stderr = self.streams
        reply: Reply = {}
        try:
            self.is_running = True
            # Each time: an earlier cell may have put its own in place. The public function goes the long way, by enums.
            _signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
            reply = self._call(request) if request["do"] == "call" else self._run(request["code"])
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
            return {"status": "output", "error": f"the value is {size} bytes long; {4 * self.output_bytes} are allowed"}
        lists = signs.count(b"[") + signs.count(b"{")
        if lists >= MAX_LISTS or (lists > DEEPEST and depth(signs) > DEEPEST):
            why = f"the value has more than {MAX_LISTS} lists and dicts, or more than {DEEPEST} in one another"
            return {"status": "output", "error": why}
        return {"status": "ok", "value": value}

    def _failure(self, error: BaseException) -> Reply:
        """What a cell that raised has to say."""
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
        except BaseException:  # an exception can have code of its own
            return {"status": status, "error": type(error).__name__}

    def _flush(self) -> None:
        """Write out what a cell left in the buffers; what does not fit must not turn up in the next cell's output."""
        for file, stream in zip(self.files, self.streams, strict=True):
            try:
                stream.flush()
            except OutOfOutputError:
                file.is_muted = True
                stream.flush()
                file.is_muted = False
            except (OSError, ValueError):  # the cell has closed it
                continue

    def _short(self, text: str) -> str:
        """At most as much as may be printed; whatever is not text, with all that JSON cannot say, made so."""
        text = str.__str__(text)
        if len(text) > self.output_bytes:
            text = f"{text[: self.output_bytes]}... ({len(text)} characters)"
        return text.encode(errors="backslashreplace").decode()

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.is_running:
            raise OutOfTimeError


def _text(raw: io.FileIO) -> io.TextIOWrapper:
    """Whole lines are written at once, so that they are there even if the process ends in the middle of the next."""
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _describe(error: BaseException) -> str:
    """The traceback, without the frames that are not the cell's."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell"):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES)).rstrip()


def plain(value: Any) -> Any:
    """A value as JSON can say it: sets and arrays become lists, and what JSON has no word for its repr.

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
