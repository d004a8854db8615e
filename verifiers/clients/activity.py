"""What happens between two finished rollouts: replies, retries and refused requests."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class Activity:
    """Counts of one run, updated by the clients that its rollouts use."""

    replies: int = 0
    tokens: int = 0  # of complete replies
    retries: int = 0
    refusals: int = 0  # 429 and the like: the endpoint is overloaded
    under_way: set[Callable[[], int]] = field(default_factory=set)  # token counts of unfinished replies of local models

    @property
    def tokens_so_far(self) -> int:
        """Tokens of all complete replies, and of the unfinished replies of models in this process."""
        return self.tokens + sum(count() for count in tuple(self.under_way))


_current: ContextVar[Activity | None] = ContextVar("activity", default=None)


def count_here(activity: Activity) -> None:
    """Count the requests of this task, and of tasks started by it, in ``activity`` from now on."""
    _current.set(activity)


def note_reply(tokens: int) -> None:
    if (activity := _current.get()) is not None:
        activity.replies += 1
        activity.tokens += tokens


def note_under_way(count: Callable[[], int]) -> None:
    """Register a function that counts the tokens of a local model's unfinished replies."""
    if (activity := _current.get()) is not None:
        activity.under_way.add(count)


def note_retry(*, is_refusal: bool) -> None:
    if (activity := _current.get()) is not None:
        activity.retries += 1
        activity.refusals += is_refusal
