"""A blocked event loop → a warning that names the function that blocks it, and an error in it after its time limit.

Async functions that block instead of awaiting block the loop, and so do sync functions that work only in the main
thread; all other sync functions do not. Only a signal can interrupt them, and only if the main thread runs the loop.
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
    """Watches the main thread's loop from another thread, between ``start`` and ``stop``."""

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
                "%s has blocked the event loop for %.1f s: it blocks where it should await; if it were a plain def, it "
                "would run in a thread",
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
        """Whether the watchdog sent this signal. If its target still blocks the loop, raises TimeLimitError in it."""
        hook, self._over = self._over, None
        if hook is None:
            return False
        if _holder(frame) is hook:
            raise TimeLimitError(f"it did not return within {self._limit_of(hook):g} s, and blocked the event loop")
        return True


def _holder(frame: FrameType | None) -> Hook | None:
    """The innermost user function in this stack."""
    while frame is not None:
        hook = on_loop.get(frame.f_code)
        if hook is not None:
            return hook
        frame = frame.f_back
    return None
