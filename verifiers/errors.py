"""What went wrong, and who is to blame: the policy, the environment, the grader or the infrastructure."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

Blame = Literal["policy", "environment", "grader", "infrastructure"]


class Error(Exception):
    """Base of every error a rollout can carry in ``state["error"]``.

    Only the policy's own faults are scored; any other blame makes the rollout *failed*, which is not a reward of 0.
    """

    blame: ClassVar[Blame] = "infrastructure"
    described: dict[str, Any] | None = None  # by the process that it was raised in, where that is another one


class Interrupted(KeyboardInterrupt):
    """The process was told to stop: by Ctrl-C (SIGINT), or by SIGTERM or SIGHUP, which mean the same here."""

    def __init__(self, message: str = "", signum: int = signal.SIGINT) -> None:
        super().__init__(*([message] if message else []))
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """As a shell reports a program that this signal ended."""
        return 128 + self.signum

    @property
    def cause(self) -> str:
        """Who said so, in words."""
        return "Ctrl-C" if self.signum == signal.SIGINT else signal.Signals(self.signum).name


class ModelError(Error):
    """The model's endpoint did not give a usable reply."""


class InvalidModelResponseError(ModelError):
    """The endpoint answered, and what it sent is no usable reply."""


class EmptyModelResponseError(InvalidModelResponseError):
    """The endpoint answered, but with no choices."""


class BadReplyError(InvalidModelResponseError):
    """The endpoint answered with something that is not a completion (broken JSON, a web page)."""


class RequestRefusedError(ModelError):
    """The endpoint refused the request for good (bad key, unknown model, malformed arguments)."""


class RateLimitError(ModelError):
    """The endpoint kept asking for fewer requests until the retries ran out."""


class ServerError(ModelError):
    """The endpoint kept failing on its side until the retries ran out."""


class ConnectionFailedError(ModelError):
    """The endpoint could not be reached, or dropped the connection, until the retries ran out."""


class DeadlineError(ModelError):
    """The reply did not come within the deadline."""


class AccessRefusedError(RequestRefusedError):
    """The endpoint refused one request after the other for its key or its model: nothing else will be answered."""


class EndpointDownError(ModelError):
    """The endpoint refused everything for so long that it is taken for down, for every rollout at once."""


class OverlongPromptError(Error):
    """The conversation no longer fits into the model's context."""

    blame = "policy"


class ToolError(Error):
    """A tool was called in a way that did not work."""

    blame = "policy"


class ToolParseError(ToolError):
    """The arguments of a tool call could not be read."""


class ToolCallError(ToolError):
    """A tool raised while it ran."""


class InfraError(Error):
    """Something the rollout stands on is down."""


class SandboxError(InfraError):
    """A sandbox is down or could not be made."""


class WorkerError(InfraError):
    """A worker process could not be started or died again and again."""


class HookError(Error):
    """An environment hook raised; the exception it raised is the cause."""

    blame = "environment"


class GraderError(Error):
    """A reward function raised, hung, or gave something that is not a finite number."""

    blame = "grader"


class JudgeError(GraderError):
    """A judge model was unreachable or gave a reply without a score."""


class RunDeadlineError(InfraError):
    """The time of the whole run was over before this rollout was done."""


def ending_cause(error: BaseException | None) -> Error | None:
    """The error behind this one that no other rollout of the run will escape, if there is one.

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
    """The record of an error that goes into a result: its type, blame, message, cause and traceback.

    >>> describe(GraderError("no score"))["blame"]
    'grader'
    """
    if isinstance(error, Error) and error.described is not None:
        return dict(error.described)
    cause = error.__cause__ or error.__context__
    return {
        "type": type(error).__name__,
        "blame": getattr(error, "blame", "environment"),
        "message": said(error),
        "cause": None if cause is None else f"{type(cause).__name__}: {said(cause)}",
        "traceback": _traceback(error),
    }


def said(error: BaseException) -> str:
    """An error's message, even where the class of someone else cannot say it."""
    try:
        return str(error)
    except BaseException:  # foreign __str__
        return "(it cannot be shown)"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # foreign __str__ of an error on the way
        return "".join(traceback.format_tb(error.__traceback__))


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of what an exception says; the name of its class, where it says nothing.

    >>> first_line(ValueError("no\\nway")), first_line(TimeoutError())
    ('no', 'TimeoutError')
    """
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause or what was handled when it was raised, the cause of that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def wrap(error: Exception, into: type[Error], what: str) -> Error:
    """Our own errors stay as they are; a foreign one becomes ``into``, with the foreign one as its cause.

    >>> wrap(KeyError("x"), HookError, "env_response")
    HookError("env_response raised KeyError: 'x'")
    """
    if isinstance(error, Error):
        return error
    wrapped = into(f"{what} raised {type(error).__name__}: {said(error)}")
    wrapped.__cause__ = error
    return wrapped
