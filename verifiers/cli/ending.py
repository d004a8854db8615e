"""Early ends of a command: signals, a closed stderr, a full disk, too little memory, an exit by other code."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from verifiers.errors import Interrupted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
FAILED = 1  # exit code
SHOWN_CHARS = 500  # of a path
_NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc")  # in torch's RuntimeErrors


@contextmanager
def told_by_signals(receive: Any = None) -> Iterator[None]:
    """Within this context, SIGTERM and SIGHUP act like Ctrl-C, unless they are ignored (``nohup``)."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in SIGNALS if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, receive or _interrupt)) for number in taken]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _interrupt(signum: int, _: object) -> None:
    raise Interrupted(signum=signum)


def open_closed_streams() -> None:
    """Open standard streams that the caller closed (``>&-``) on /dev/null, so that no run file gets their number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


@contextmanager
def steady_stderr() -> Iterator[None]:
    """Within this context, a closed stderr loses output but does not end the run."""
    from verifiers.progress import Enduring

    before = sys.stderr
    sys.stderr = Enduring(before)
    try:
        yield
    finally:
        sys.stderr = before


@contextmanager
def said_in_one_sentence() -> Iterator[None]:
    """Turn operating system errors and out-of-memory errors into messages of one sentence."""
    from verifiers.logs import printable

    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE or error.strerror is None:
            raise
        name = str(error.filename or "")
        if not name and _is_of_echo(error):
            name = "the output cannot be written"
            _drop_output()
        what = ": ".join([*([name if len(name) <= SHOWN_CHARS else f"{name[:60]}…"] if name else []), error.strerror])
        raise click.ClickException(printable(what)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise click.ClickException(out_of_memory(error)) from error


@contextmanager
def exits_reported() -> Iterator[None]:
    """Within this context, an ``os._exit`` in this process by other code is reported, and its exit code is not 0.

    Otherwise a reward function could end a command as if it had succeeded.
    """
    leave, own = os._exit, os.getpid()

    def reported(status: int) -> None:
        caller = sys._getframe(1)
        if os.getpid() == own and not str(caller.f_globals.get("__name__")).startswith("verifiers."):
            place = f"{caller.f_code.co_filename}:{caller.f_lineno} (in {caller.f_code.co_name})"
            os.write(2, f"Error: os._exit({status!r}) at {place} ended the command before it was done\n".encode())
            status = status or FAILED
        leave(status)

    vars(os)["_exit"] = reported
    try:
        yield
    finally:
        vars(os)["_exit"] = leave


def _is_of_echo(error: BaseException) -> bool:
    """Whether an error was raised while a command wrote its output; such an error has no filename."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is click.echo.__code__


def _drop_output() -> None:
    """Let go of the output that is still buffered: Python would try to write it at exit, and print that it failed."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch means that memory ran out."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(words in message for words in _NO_MEMORY)


def out_of_memory(error: BaseException) -> str:
    from verifiers.logs import printable

    message = printable(str(error).strip().splitlines()[0][:200]) if str(error).strip() else ""
    reason = f": {message}" if message else ""
    return f"there is too little memory{reason}; run less at once, or use a smaller model"
