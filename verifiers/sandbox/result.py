"""What a cell did, and what a machine can isolate: the data that comes out of the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "error", "timeout", "memory", "output", "killed"]
LevelName = Literal["full", "reduced", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one cell did. All of it was said by the code itself, so it is to be judged like the model's text.

    ``status`` is ``ok``; ``error`` (it raised, or a command failed); ``timeout``; ``memory``; ``output`` (it wrote more
    than it may); or ``killed`` (its process ended, by its own doing). ``value`` is the ``repr`` of a cell's last
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
    """Of a bash cell that came to its end."""
    time_s: float = 0.0
    is_fresh: bool = True
    """Did the cell start from nothing? True for the first cell of a session, and after one that ended the process."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How well code is held here; ``reasons`` say what is missing, and is empty where nothing is.

    >>> str(Level(name="reduced", reasons=("user namespaces are forbidden",)))
    'reduced: user namespaces are forbidden'
    """

    name: LevelName
    reasons: tuple[str, ...] = ()
    landlock: int = 0
    """The version of Landlock in the kernel; 0 where there is none."""

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.reasons)}" if self.reasons else self.name
