"""Which rollout a request is made for. A cassette records it, so that a replay gives each rollout its own replies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_rollout: ContextVar[str | None] = ContextVar("asked_for", default=None)


def asked_for() -> str | None:
    """The name (see `name_rollout`) of the rollout that is being run or scored in this context; None outside of one."""
    return _rollout.get()


def name_rollout(example_id: Any, rollout: int | None) -> str:
    """The name of one rollout of an example, or of its whole group (``rollout=None``).

    >>> name_rollout(3, 0), name_rollout("a", None)
    ('3#0', 'a#group')
    """
    return f"{example_id}#{'group' if rollout is None else rollout}"


def ask_for(name: str) -> None:
    """Attribute the requests of the current task to this rollout from now on."""
    _rollout.set(name)


@contextmanager
def asking_for(name: str) -> Iterator[None]:
    """Attribute requests within this block, and in tasks and threads started in it, to this rollout."""
    token = _rollout.set(name)
    try:
        yield
    finally:
        _rollout.reset(token)
