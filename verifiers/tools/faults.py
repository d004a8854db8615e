"""The kinds of errors of tool calls. The model reads the message, and each kind is counted."""

from __future__ import annotations

from typing import ClassVar

from verifiers.errors import Error, ToolCallError, ToolParseError


class NoCallError(ToolParseError):
    """The reply has neither a call nor an answer, or an incomplete call."""

    kind: ClassVar[str] = "no_call"


class BadJSONError(ToolParseError):
    """A call, or its arguments, cannot be parsed as JSON."""

    kind: ClassVar[str] = "bad_json"


class UnknownToolError(ToolCallError):
    """There is no tool with that name."""

    kind: ClassVar[str] = "unknown_tool"


class MissingArgumentError(ToolCallError):
    """A required argument is missing."""

    kind: ClassVar[str] = "missing_argument"


class UnknownArgumentError(ToolCallError):
    """The tool has no argument with that name."""

    kind: ClassVar[str] = "unknown_argument"


class WrongTypeError(ToolCallError):
    """An argument has the wrong type."""

    kind: ClassVar[str] = "wrong_type"


class ToolTimeoutError(ToolCallError):
    """The tool did not return within its time limit."""

    kind: ClassVar[str] = "timeout"


class ToolFailedError(ToolCallError):
    """A tool raised one of ``stop_errors``: this says nothing about the model, so the rollout fails."""

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
    """Which of `KINDS` an error is; anything else that a tool raises is ``exception``.

    >>> kind_of(BadJSONError("…")), kind_of(ZeroDivisionError())
    ('bad_json', 'exception')
    """
    kind = getattr(error, "kind", "exception")
    return kind if kind in KINDS else "exception"


def is_the_models(error: BaseException) -> bool:
    """Is this error shown to the model, and the rollout continues? Not if the infrastructure is to blame."""
    return not isinstance(error, Error) or error.blame == "policy"
