"""What went wrong, and who is to blame: the policy, the environment, the grader or the infrastructure."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

Blame = Literal["policy", "environment", "grader", "infrastructure"]


class Error(Exception):
    """Base class of every error in ``state["error"]``.

    Only errors of the policy are scored; any other blame makes the rollout *failed*, which is not a reward of 0.
    """

    blame: ClassVar[Blame] = "infrastructure"
    described: dict[str, Any] | None = None  # the record that another process made of it, if it was raised there


class Interrupted(KeyboardInterrupt):
    """The process was told to stop, by Ctrl-C (SIGINT), SIGTERM or SIGHUP; all three are handled alike."""

    def __init__(self, message: str = "", signum: int = signal.SIGINT) -> None:
        super().__init__(*([message] if message else []))
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a program ended by this signal."""
        return 128 + self.signum

    @property
    def cause(self) -> str:
        """What stopped the process: "Ctrl-C" or the name of the signal."""
        return "Ctrl-C" if self.signum == signal.SIGINT else signal.Signals(self.signum).name


class ModelError(Error):
    """The model's endpoint did not give a usable reply."""


class InvalidModelResponseError(ModelError):
    """The endpoint answered, but the reply is not usable."""


class EmptyModelResponseError(InvalidModelResponseError):
    """The endpoint answered, but with no choices."""


class BadReplyError(InvalidModelResponseError):
    """The endpoint answered with something that is not a completion (broken JSON, a web page)."""


class RequestRefusedError(ModelError):
    """The endpoint refused the request, and a retry would not help (bad key, unknown model, malformed arguments)."""


class RateLimitError(ModelError):
    """The endpoint limited the rate of requests until the retries ran out."""


class ServerError(ModelError):
    """The endpoint reported server errors until the retries ran out."""


class ConnectionFailedError(ModelError):
    """The endpoint could not be reached, or dropped the connection, until the retries ran out."""


class DeadlineError(ModelError):
    """The reply did not come within the deadline."""


class AccessRefusedError(RequestRefusedError):
    """The endpoint refused several requests in a row because of the key or the model, so it will refuse all others."""


class EndpointDownError(ModelError):
    """The endpoint failed every request for so long that it is considered down, for all rollouts."""


class OverlongPromptError(Error):
    """The conversation no longer fits into the model's context."""

    blame = "policy"


class ToolError(Error):
    """A tool was called in a way that did not work."""

    blame = "policy"


class ToolParseError(ToolError):
    """The arguments of a tool call could not be parsed."""


class ToolCallError(ToolError):
    """A tool raised while it ran."""


class InfraError(Error):
    """A service or resource that the rollout needs is not available."""


class SandboxError(InfraError):
    """A sandbox is not available or could not be created."""


class WorkerError(InfraError):
    """A worker process could not be started or died repeatedly."""


class HookError(Error):
    """An environment hook raised; the exception it raised is the cause."""

    blame = "environment"


class GraderError(Error):
    """A reward function raised, timed out, or returned something that is not a finite number."""

    blame = "grader"


class JudgeError(GraderError):
    """A judge model was unreachable or replied without a score."""


class RunDeadlineError(InfraError):
    """The time limit of the whole run passed before this rollout was done."""


def ending_cause(error: BaseException | None) -> Error | None:
    """The error in this chain of causes that will hit all other rollouts of the run too, or None.

    >>> ending_cause(JudgeError("no reply")), ending_cause(EndpointDownError("gone"))
    (None, EndpointDownError('gone'))
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, AccessRefusedError | EndpointDownError):
            return error
        seen.append(error)
        error = error.__cause__
    return None


def describe(error: BaseException) -> dict[str, Any]:
    """The record of an error for a result: its type, blame, message, cause and traceback.

    >>> describe(GraderError("no score"))["blame"]
    'grader'
    """
    if isinstance(error, Error) and error.described is not None:
        return dict(error.described)
    cause = error.__cause__ or error.__context__
    return {
        "type": type(error).__name__,
        "blame": getattr(error, "blame", "environment"),
        "message": message_of(error),
        "cause": None if cause is None else f"{type(cause).__name__}: {message_of(cause)}",
        "traceback": _traceback(error),
    }


def message_of(error: BaseException) -> str:
    """The message of an error, or a placeholder if its ``__str__`` raises."""
    try:
        return str(error)
    except BaseException:  # foreign __str__
        return "(it cannot be shown)"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # foreign __str__ of an error in the chain
        return "".join(traceback.format_tb(error.__traceback__))


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of an exception's message, or the name of its class if the message is empty.

    >>> first_line(ValueError("no\\nway")), first_line(TimeoutError())
    ('no', 'TimeoutError')
    """
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, then its cause (or context), then the cause of that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def wrap(error: Exception, into: type[Error], what: str) -> Error:
    """Return our own errors unchanged; wrap a foreign one in ``into``, with the foreign one as its cause.

    >>> wrap(KeyError("x"), HookError, "env_response")
    HookError("env_response raised KeyError: 'x'")
    """
    if isinstance(error, Error):
        return error
    wrapped = into(f"{what} raised {type(error).__name__}: {message_of(error)}")
    wrapped.__cause__ = error
    return wrapped
