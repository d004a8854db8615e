"""What can be wrong with a tool call, each by its own name: the model is told, and it is counted."""

from __future__ import annotations

from typing import ClassVar

from verifiers.errors import Error, ToolCallError, ToolParseError


class NoCallError(ToolParseError):
    """The reply has neither a call nor an answer, or a call that was cut off."""

    kind: ClassVar[str] = "no_call"


class BadJSONError(ToolParseError):
    """A call, or its arguments, cannot be read as JSON."""

    kind: ClassVar[str] = "bad_json"


class UnknownToolError(ToolCallError):
    """There is no tool of that name."""

    kind: ClassVar[str] = "unknown_tool"


class MissingArgumentError(ToolCallError):
    """An argument that the tool needs is not there."""

    kind: ClassVar[str] = "missing_argument"


class UnknownArgumentError(ToolCallError):
    """The tool has no argument of that name."""

    kind: ClassVar[str] = "unknown_argument"


class WrongTypeError(ToolCallError):
    """An argument is not of the type that the tool takes."""

    kind: ClassVar[str] = "wrong_type"


class ToolTimeoutError(ToolCallError):
    """The tool did not come back within its limit."""

    kind: ClassVar[str] = "timeout"


class ToolFailedError(ToolCallError):
    """A tool raised one of ``stop_errors``: nothing was found out about the model, so the rollout is failed."""

    blame = "infrastructure"  # type: ignore[assignment]
    kind: ClassVar[str] = "exception"


OVERSIZED = "oversized"
KINDS = (
    "no_call",
    "bad_json",
    "unknown_tool",
    "missing_argument",
    "unknown_argument",
    "wrong_type",
    "exception",
    "timeout",
    OVERSIZED,
)


def kind_of(error: BaseException) -> str:
    """Which of `KINDS` an error is; whatever a tool raised by itself is an exception.

    >>> kind_of(BadJSONError("…")), kind_of(ZeroDivisionError())
    ('bad_json', 'exception')
    """
    kind = getattr(error, "kind", "exception")
    return kind if kind in KINDS else "exception"


def is_the_models(error: BaseException) -> bool:
    """Is the model told of this error, and the rollout goes on? Not where something below the rollout is down."""
    return not isinstance(error, Error) or error.blame == "policy"
