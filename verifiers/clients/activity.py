"""What happens between two finished rollouts: replies that came, requests repeated, requests refused."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    """Counts of one run, kept by the clients that its rollouts ask."""

    replies: int = 0
    tokens: int = 0
    retries: int = 0
    refusals: int = 0  # 429 and the like: the endpoint was asked for too much


_current: ContextVar[Activity | None] = ContextVar("activity", default=None)


def count_here(activity: Activity) -> None:
    """From now on this task, and those that it begins, count here."""
    _current.set(activity)


def note_reply(tokens: int) -> None:
    if (activity := _current.get()) is not None:
        activity.replies += 1
        activity.tokens += tokens


def note_retry(*, is_refusal: bool) -> None:
    if (activity := _current.get()) is not None:
        activity.retries += 1
        activity.refusals += is_refusal
