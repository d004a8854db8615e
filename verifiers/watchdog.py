"""An event loop that something holds → who holds it, and, once that one's time is over, an error inside of it.

Sync functions never hold the loop; async ones that block instead of awaiting do, and so do those that work in the main
thread only. Only a signal gets through to them, and so only where the main thread runs the loop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from types import FrameType

from verifiers.deadlines import HELD_S
from verifiers.escapes import TimeLimitError
from verifiers.foreign import Hook, TimeLimits, limits, on_loop

logger = logging.getLogger("verifiers.calls")


class Watchdog:
    """Watches the main thread's loop from a thread of its own, between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits: TimeLimits = limits.get()
        self._thread_id = threading.get_ident()
        self._seen_at = time.monotonic()
        self._over: Hook | None = None
        self._told: set[int] = set()
        self._is_over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="verifiers-watchdog").start()

    def stop(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(HELD_S):
            held_s = time.monotonic() - self._seen_at
            if held_s > 2 * HELD_S:
                self._look(held_s)
            try:
                self._loop.call_soon_threadsafe(self._beat)
            except RuntimeError:  # the loop was closed
                return

    def _beat(self) -> None:
        self._seen_at = time.monotonic()
        self._over = None

    def _look(self, held_s: float) -> None:
        hook = _holder(sys._current_frames().get(self._thread_id))
        if hook is None:
            return
        if id(hook) not in self._told:
            self._told.add(id(hook))
            name = getattr(hook.function, "__qualname__", repr(hook.function))
            logger.warning(
                "%s has held the event loop for %.1f s: it blocks where it should await; as a plain def it would run "
                "in a thread",
                name,
                held_s,
            )
        if held_s > self._limit_of(hook) and threading.main_thread().ident == self._thread_id:
            self._over = hook
            signal.pthread_kill(self._thread_id, signal.SIGINT)

    def _limit_of(self, hook: Hook) -> float:
        if hook.timeout_s is not None:
            return hook.timeout_s
        return self._limits.reward_s if hook.kind == "reward" else self._limits.hook_s

    def receives(self, frame: FrameType | None) -> bool:
        """Was a signal meant for what holds the loop? Then this raises inside of it, if it still does."""
        hook, self._over = self._over, None
        if hook is None:
            return False
        if _holder(frame) is hook:
            raise TimeLimitError(
                f"it did not return within {self._limit_of(hook):g} s, and held the event loop meanwhile"
            )
        return True


def _holder(frame: FrameType | None) -> Hook | None:
    """The innermost function of someone else's that is on its way in this stack."""
    while frame is not None:
        hook = on_loop.get(frame.f_code)
        if hook is not None:
            return hook
        frame = frame.f_back
    return None
