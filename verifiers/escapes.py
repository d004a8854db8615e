"""Whatever user code raised → an Exception that fails one row; only what really stops the program passes through."""

from __future__ import annotations

import asyncio
import signal
import threading

from verifiers.errors import Interrupted


class EscapedError(RuntimeError):
    """User code raised a BaseException, such as that of ``pytest.fail()`` or ``sys.exit()``, or GeneratorExit."""


class TimeLimitError(TimeoutError):
    """A call did not return within its time limit."""


hurry = threading.Event()
"""Set by a second Ctrl-C: clean-up code then has only seconds left."""


def is_cancelled() -> bool:
    """Whether the current task was cancelled; if not, a CancelledError came from something that it awaits."""
    if asyncio._get_running_loop() is None:
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def contained(error: BaseException) -> Exception:
    """Turn what user code raised into an Exception; raise it again only if it stops this task or the program.

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
    """Whether this is an EscapedError, or an ExceptionGroup (of a task group) that contains one."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(EscapedError) is not None
    return isinstance(error, EscapedError)


def raise_if_escaped(error: BaseException) -> None:
    """For code that takes an exception for "no answer": a BaseException such as ``sys.exit()`` still fails the row."""
    failure = contained(error)
    if has_escaped(failure):
        raise failure from error


def _is_stop(error: BaseException) -> bool:
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    if isinstance(error, GeneratorExit):  # thrown in from outside, its traceback has only the frame that catches it
        return error.__traceback__ is not None and error.__traceback__.tb_next is None
    if not isinstance(error, KeyboardInterrupt) or isinstance(error, Interrupted):
        return isinstance(error, Interrupted)
    if threading.current_thread() is not threading.main_thread():
        return False
    return not getattr(signal.getsignal(signal.SIGINT), "is_ours", False)  # ours raises `Interrupted`
