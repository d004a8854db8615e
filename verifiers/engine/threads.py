"""Threads that run torch: each comes to its end before Python does."""

from __future__ import annotations

import atexit
import threading
from typing import Any
from weakref import WeakSet

_owners: WeakSet[Any] = WeakSet()
_threads: set[threading.Thread] = set()


@atexit.register
def _end_threads() -> None:
    """A thread that Python cuts off within torch aborts the process: let each come to its end."""
    for owner in list(_owners):
        owner.stop()
    for thread in list(_threads):
        thread.join()


def remember(owner: Any, thread: threading.Thread) -> None:
    """At exit the owner is stopped (`stop`), and the thread is joined."""
    _threads.difference_update([other for other in _threads if other.ident is not None and not other.is_alive()])
    _owners.add(owner)
    _threads.add(thread)
