"""Which rollout a request is made for: a record of requests keeps it, to give each rollout its own replies again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_rollout: ContextVar[str | None] = ContextVar("asked_for", default=None)


def asked_for() -> str | None:
    """The rollout whose turn or score asks now, as `name_rollout` names it; None outside of one."""
    return _rollout.get()


def name_rollout(example_id: Any, rollout: int | None) -> str:
    """One rollout of an example, or (None) its whole group.

    >>> name_rollout(3, 0), name_rollout("a", None)
    ('3#0', 'a#group')
    """
    return f"{example_id}#{'group' if rollout is None else rollout}"


def ask_for(name: str) -> None:
    """From now on requests of this task are made for this rollout."""
    _rollout.set(name)


@contextmanager
def asking_for(name: str) -> Iterator[None]:
    """While this lasts, and in tasks and threads begun in it, requests are made for this rollout."""
    token = _rollout.set(name)
    try:
        yield
    finally:
        _rollout.reset(token)
