"""What happens between two finished rollouts: replies that came, requests repeated, requests refused."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class Activity:
    """Counts of one run, kept by the clients that its rollouts ask."""

    replies: int = 0
    tokens: int = 0  # of replies that came
    retries: int = 0
    refusals: int = 0  # 429 and the like: the endpoint was asked for too much
    under_way: set[Callable[[], int]] = field(default_factory=set)  # tokens that replies of local models have so far

    @property
    def tokens_so_far(self) -> int:
        """Of every reply that came, and of those under way as far as a model in this process is with them."""
        return self.tokens + sum(count() for count in tuple(self.under_way))


_current: ContextVar[Activity | None] = ContextVar("activity", default=None)


def count_here(activity: Activity) -> None:
    """From now on this task, and those that it begins, count here."""
    _current.set(activity)


def note_reply(tokens: int) -> None:
    if (activity := _current.get()) is not None:
        activity.replies += 1
        activity.tokens += tokens


def note_under_way(count: Callable[[], int]) -> None:
    """A model in this process says how many tokens its replies under way have."""
    if (activity := _current.get()) is not None:
        activity.under_way.add(count)


def note_retry(*, is_refusal: bool) -> None:
    if (activity := _current.get()) is not None:
        activity.retries += 1
        activity.refusals += is_refusal
