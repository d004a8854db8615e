"""A failed attempt → its error class, whether to retry, and when."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import msgspec

from verifiers.clients.reading import is_overlong
from verifiers.errors import (
    BadReplyError,
    ConnectionFailedError,
    Error,
    ModelError,
    OverlongPromptError,
    RateLimitError,
    RequestRefusedError,
    ServerError,
)

LONGEST_PAUSE_S = 60.0
COSTLY_RETRIES = 1  # a request that was too slow or a reply that was too long usually is so again
_ASK_AGAIN = frozenset((408, 409, 425))
_OVERLOAD = frozenset((429, 503, 529))
_MAYBE_OVERLONG = frozenset((400, 413, 422, 500))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One attempt without a completion. ``text`` may contain API keys: redact it before showing it."""

    error: type[Error]
    text: str
    is_final: bool = False
    is_overload: bool = False
    is_access: bool = False  # the key or the model is refused, so every other request will be too
    is_unauthorized: bool = False  # 401: the key is wrong, or none was sent
    is_costly: bool = False  # the attempt took the whole timeout or reply size, so retry rarely
    retry_after_s: float | None = None

    @property
    def is_refusal(self) -> bool:
        """Did the endpoint refuse the request because it is overloaded, broken or unreachable?"""
        return self.error in (RateLimitError, ServerError, ConnectionFailedError)

    def ends_after(self, attempts: int, *, max_retries: int) -> bool:
        """Is this failure final after this many attempts?"""
        if self.is_costly:
            max_retries = min(max_retries, COSTLY_RETRIES)
        return self.is_final or attempts > max_retries


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """How long to wait before a retry: exponential with full jitter, and never less than the endpoint's Retry-After.

    >>> Backoff(rng=lambda: 1.0).delay_s(3, None), Backoff(rng=lambda: 0.0).delay_s(3, 2.0)
    (2.0, 2.0)
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    rng: Callable[[], float] | None = None
    sleep: Callable[[float], Awaitable[Any]] | None = None

    def delay_s(self, attempts: int, retry_after_s: float | None) -> float:
        ceiling = min(self.longest_s, self.first_s * 2.0 ** min(attempts - 1, 32))
        jitter = ceiling * (self.rng or random.random)()
        return jitter if retry_after_s is None else retry_after_s + min(jitter, 1.0)

    async def wait(self, delay_s: float) -> None:
        await (self.sleep or asyncio.sleep)(delay_s)


def status_failure(status: int, headers: Mapping[str, str], body: str) -> Failure:
    """The failure that an HTTP error status means.

    >>> status_failure(404, {}, "no such model").error.__name__
    'RequestRefusedError'
    """
    text = f"{status} {_phrase(status)}: {said_in(body) or '(empty body)'}"
    if status in _MAYBE_OVERLONG and is_overlong(body):
        return Failure(error=OverlongPromptError, text=text, is_final=True)
    if 300 <= status < 400:
        text = f"{text} (redirects to {headers.get('Location', 'nowhere')}; redirects are not followed, fix base_url)"
        return Failure(error=RequestRefusedError, text=text, is_final=True)
    if status == 429 and "insufficient_quota" not in body:
        error: type[ModelError] = RateLimitError
    elif status >= 500 or status in _ASK_AGAIN or headers.get("x-should-retry") == "true":
        error = ServerError
    else:
        return Failure(
            error=RequestRefusedError,
            text=text,
            is_final=True,
            is_access=is_access(status, body),
            is_unauthorized=status == 401,
        )
    return Failure(
        error=error,
        text=text,
        is_final=headers.get("x-should-retry") == "false",
        is_overload=status in _OVERLOAD,
        retry_after_s=retry_after(headers),
    )


def said_in(body: str) -> str:
    """The message of a JSON error body, or the body itself.

    >>> said_in('{"error": {"message": "You exceeded your quota.", "code": "insufficient_quota"}}')
    'You exceeded your quota. (insufficient_quota)'
    >>> said_in("upstream is away"), said_in('{"detail": [{"loc": ["n"], "msg": "too large"}]}')
    ('upstream is away', 'n: too large')
    """
    text = body.strip()
    try:
        found = msgspec.json.decode(text) if text.startswith("{") else None
    except (msgspec.DecodeError, RecursionError):
        return text
    return words_of(found) or text


def words_of(found: Any) -> str:
    """The message in a decoded JSON error; empty if it has none."""
    if isinstance(found, str):
        return found.strip()
    if isinstance(found, list):  # FastAPI's list of validation errors
        return "; ".join(filter(None, map(words_of, found)))
    if not isinstance(found, Mapping):
        return ""
    for key in ("error", "message", "detail", "msg", "error_message"):
        if said := words_of(found.get(key)):
            place = ".".join(str(part) for part in found.get("loc") or ()) if key == "msg" else ""
            code = found.get("code") if key == "message" else None
            return f"{place + ': ' * bool(place)}{said}{f' ({code})' if isinstance(code, str) and code else ''}"
    return ""


_NO_MODEL = re.compile(
    r"model_not_found|not a valid model|invalid model|unknown model|model [^\n]{0,200}(?:does not exist|not found)",
    re.I,
)


def is_access(status: int, body: str) -> bool:
    """Does this refuse the key, the account or the model, and so every request instead of only this one?"""
    if status == 403:
        return not re.search("moderation|flagged", body, re.I)  # gateways' refusals of a single prompt
    if status in (400, 422):
        return _NO_MODEL.search(body) is not None
    return status in (401, 402, 404) or "insufficient_quota" in body


def reported_failure(reply: Mapping[str, Any], body: str) -> Failure:
    """The failure that an error inside a reply with status 200 means; the error's own code decides, if it has one."""
    error = reply.get("error") or reply
    code = error.get("code") if isinstance(error, Mapping) else None
    if isinstance(code, int) and 400 <= code < 600:
        return status_failure(code, {}, body)
    if is_overlong(body):
        return Failure(error=OverlongPromptError, text=f"200 with an error: {said_in(body)}", is_final=True)
    return Failure(error=ServerError, text=f"200 with an error: {said_in(body)}")


def bad_reply(status: int, body: str) -> Failure:
    """The reply is not JSON, or JSON of the wrong shape."""
    return Failure(error=BadReplyError, text=f"{status} with a body that is not a completion: {body or '(empty body)'}")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds to wait, from ``retry-after-ms`` or ``Retry-After`` (seconds or a date), at most 60.

    >>> retry_after({"retry-after-ms": "250"}), retry_after({"Retry-After": "7200"}), retry_after({})
    (0.25, 60.0, None)
    """
    seconds = _number(headers.get("retry-after-ms"), 1e-3)
    if seconds is None:
        seconds = _number(headers.get("Retry-After"), 1.0)
    if seconds is None:
        seconds = _until(headers.get("Retry-After"))
    return None if seconds is None else min(max(seconds, 0.0), LONGEST_PAUSE_S)


def _number(text: str | None, unit: float) -> float | None:
    try:
        seconds = float(text or "") * unit
    except ValueError:
        return None
    return None if seconds != seconds else seconds


def _until(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date or "").timestamp() - time.time()
    except (ValueError, OverflowError):
        return None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Overloaded" if status == 529 else "(unknown status)"
