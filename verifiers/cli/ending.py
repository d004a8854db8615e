"""How a command ends before its time: signals that mean Ctrl-C, a reader of stderr that left, no disk, no memory."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from verifiers.errors import Interrupted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
SHOWN_CHARS = 500  # of a path
_NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc")  # of torch, which raises RuntimeError


@contextmanager
def told_by_signals(receive: Any = None) -> Iterator[None]:
    """While this lasts, SIGTERM and SIGHUP are what Ctrl-C is, unless they are ignored (``nohup``)."""
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
    """Streams that a caller closed (``>&-``) lead nowhere, and no file of a run is opened in the place of one."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


@contextmanager
def steady_stderr() -> Iterator[None]:
    """While this lasts, a reader of stderr that goes away costs what it would have read, and not the run."""
    from verifiers.progress import Enduring

    before = sys.stderr
    sys.stderr = Enduring(before)
    try:
        yield
    finally:
        sys.stderr = before


@contextmanager
def said_in_one_sentence() -> Iterator[None]:
    """Errors of the machine rather than of a program: which file, and what the system says of it; or no memory."""
    from verifiers.logs import printable

    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE or error.strerror is None:
            raise
        name = "" if error.filename is None else str(error.filename)
        what = ": ".join([*([name if len(name) <= SHOWN_CHARS else f"{name[:60]}…"] if name else []), error.strerror])
        raise click.ClickException(printable(what)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise click.ClickException(out_of_memory(error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Did the machine have too little memory, as Python or as torch says it?"""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in _NO_MEMORY)


def out_of_memory(error: BaseException) -> str:
    from verifiers.logs import printable

    said = printable(str(error).strip().splitlines()[0][:200]) if str(error).strip() else ""
    return f"there is too little memory{': ' + said if said else ''}; ask for less at once, or use a smaller model"
