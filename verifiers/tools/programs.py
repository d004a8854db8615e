"""Programs that a model wrote → their output and value; they only run in the sandbox."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from verifiers import calls
from verifiers.sandbox import Result, Sandbox

Language = Literal["python", "bash"]
QUEUE_S = 3600.0


@functools.cache
def _shared(language: Language) -> Sandbox:
    """One sandbox for all calls of the plain tools; each call has its own process."""
    return Sandbox(language=language)


async def _python_executor(code: str) -> str:
    """Run a Python program and return what it prints. Each call starts from nothing.

    Args:
        code: The program.

    Returns:
        What it printed (or the value of its last line, if it printed nothing), and its error if it failed.

    Examples:
        python_executor("print(sum(range(10)))") -> "45"
    """
    result = await _shared("python").run(code)
    return report(result, with_value=not result.stdout.strip())


async def _python(code: str) -> str:
    """Run a cell of Python, as in a notebook, and return what it prints and the value of its last line.

    Args:
        code: The cell.

    Returns:
        What it printed, then the value of its last expression, and its error if it failed.

    Examples:
        python("x = 20\\nx + 1") -> "21"
    """
    return report(await _shared("python").run(code))


async def _bash(command: str) -> str:
    """Run a bash command and return its output. Each call starts in an empty folder.

    Args:
        command: The command, or a script of several lines.

    Returns:
        What it wrote, and its exit code if that is not 0.

    Examples:
        bash("echo $((6 * 7))") -> "42"
    """
    return report(await _shared("bash").run(command))


def _as_function(name: str, coroutine: Any) -> Callable[[str], Any]:
    """A function that sync code calls and async code awaits. The sandbox has its own limit; calls may queue for it."""
    function = calls.both(coroutine)
    function.__name__ = function.__qualname__ = name
    function.timeout_s = QUEUE_S  # type: ignore[attr-defined]
    return function


python_executor = _as_function("python_executor", _python_executor)
python = _as_function("python", _python)
bash = _as_function("bash", _bash)


def report(result: Result, *, with_value: bool = True) -> str:
    """What a model reads of a cell: output, value and error, or ``(no output)``.

    >>> report(Result(status="ok", stdout="working\\n", value="4"))
    'working\\n4'
    >>> report(Result(status="timeout", error="it ran longer than 2 s"))
    'Error: timeout: it ran longer than 2 s'
    """
    parts = [result.stdout.rstrip(), result.stderr.rstrip()]
    if with_value and result.value is not None:
        parts.append(str(result.value))
    if not result.is_ok:
        parts.append(_failure(result))
    return "\n".join(part for part in parts if part) or "(no output)"


def _failure(result: Result) -> str:
    if result.status == "error":
        if result.error:
            return result.error.rstrip()
        return f"Error: exit code {result.exit_code}" if result.exit_code is not None else "Error: it failed"
    return f"Error: {result.status}: {result.error}" if result.error else f"Error: {result.status}"
