"""Threads that run torch are joined before Python exits."""

from __future__ import annotations

import atexit
import threading
from typing import Any
from weakref import WeakSet

_owners: WeakSet[Any] = WeakSet()
_threads: set[threading.Thread] = set()


@atexit.register
def _end_threads() -> None:
    """A thread that is killed within torch at exit aborts the process."""
    for owner in list(_owners):
        owner.stop()
    for thread in list(_threads):
        thread.join()


def remember(owner: Any, thread: threading.Thread) -> None:
    """At exit, call ``owner.stop()`` and join the thread."""
    _threads.difference_update([other for other in _threads if other.ident is not None and not other.is_alive()])
    _owners.add(owner)
    _threads.add(thread)
