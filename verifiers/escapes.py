"""What foreign code raised → an Exception that fails its own row; only what really stops the program gets through."""

from __future__ import annotations

import asyncio
import signal
import threading

from verifiers.errors import Interrupted


class EscapedError(RuntimeError):
    """Foreign code raised what is no Exception, such as ``pytest.fail()``, ``sys.exit()`` or GeneratorExit."""


class TimeLimitError(TimeoutError):
    """A call did not return within its limit."""


hurry = threading.Event()
"""Set by a second Ctrl-C: whoever cleans up now has seconds for it."""


def is_cancelled() -> bool:
    """Was the current task told to stop, or did a CancelledError come from within what it awaits?"""
    if asyncio._get_running_loop() is None:
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def contained(error: BaseException) -> Exception:
    """What foreign code raised, as an Exception; only what really stops this task or this program is raised again.

    >>> contained(SystemExit(3)), contained(KeyError("x"))
    (EscapedError('it called exit(3)'), KeyError('x'))
    """
    if isinstance(error, Exception):
        return error
    if _is_stop(error):
        raise error
    if isinstance(error, SystemExit):
        made = EscapedError(f"it called exit({error.code!r})")
    elif isinstance(error, asyncio.CancelledError):
        made = EscapedError("something it awaited was cancelled")
    else:
        made = EscapedError(f"it raised {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def has_escaped(error: Exception) -> bool:
    """Is this something that was no Exception, alone or in the group that a task group makes of it?"""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(EscapedError) is not None
    return isinstance(error, EscapedError)


def raise_if_escaped(error: BaseException) -> None:
    """Where an exception means that there is no answer: what is none, such as ``sys.exit()``, still fails the row."""
    failure = contained(error)
    if has_escaped(failure):
        raise failure from error


def _is_stop(error: BaseException) -> bool:
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    if isinstance(error, GeneratorExit):  # thrown in from outside it was raised nowhere deeper than where it is caught
        return error.__traceback__ is not None and error.__traceback__.tb_next is None
    if not isinstance(error, KeyboardInterrupt) or isinstance(error, Interrupted):
        return isinstance(error, Interrupted)
    if threading.current_thread() is not threading.main_thread():
        return False
    return not getattr(signal.getsignal(signal.SIGINT), "is_ours", False)  # ours raises `Interrupted`
