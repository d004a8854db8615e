"""Threads that run torch: how many a model wants, and that they come to their end before Python does."""

from __future__ import annotations

import atexit
import threading
from typing import Any, Protocol
from weakref import WeakSet

ONE_THREAD_BELOW = 4_000_000  # parameters: threads would wait for one another longer than they compute


class Stoppable(Protocol):
    def stop(self) -> None: ...


_owners: WeakSet[Stoppable] = WeakSet()
_threads: set[threading.Thread] = set()


@atexit.register
def _end_threads() -> None:
    """A thread that Python cuts off within torch aborts the process: let each come to its end."""
    for owner in list(_owners):
        owner.stop()
    for thread in list(_threads):
        thread.join()


def remember(owner: Stoppable, thread: threading.Thread) -> None:
    """At exit the owner is told to stop, and the thread is waited for."""
    _threads.difference_update([other for other in _threads if other.ident is not None and not other.is_alive()])
    _owners.add(owner)
    _threads.add(thread)


def wants_one(model: Any) -> bool:
    """Is the model so small that it is run quickest by one thread?"""
    return bool(sum(one.numel() for one in model.parameters()) < ONE_THREAD_BELOW)
