"""The result of a cell, and the isolation level of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "error", "timeout", "memory", "output", "killed"]
LevelName = Literal["full", "reduced", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one cell. The code controls all of its content, so treat it like text from the model.

    ``status`` is ``ok``; ``error`` (it raised, or a command failed); ``timeout``; ``memory``; ``output`` (it wrote more
    than allowed); or ``killed`` (the code ended its own process). ``value`` is the ``repr`` of a cell's last
    expression, or the JSON value that a called function returned.

    >>> Result(status="ok", value="4").is_ok
    True
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    """The exit code of a bash cell that completed."""
    time_s: float = 0.0
    is_fresh: bool = True
    """Whether the cell started without earlier state: the first cell of a session, or after the process ended."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How well this machine isolates code; ``reasons`` says what is missing.

    >>> str(Level(name="reduced", reasons=("user namespaces are forbidden",)))
    'reduced: user namespaces are forbidden'
    """

    name: LevelName
    reasons: tuple[str, ...] = ()
    landlock: int = 0
    """The kernel's Landlock version; 0 if there is none."""

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.reasons)}" if self.reasons else self.name
