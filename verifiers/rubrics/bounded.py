"""A call on hostile text → its result, or an error if it exceeds its CPU time or memory. Only worker processes use it.

Calls run one after the other in a child forked from the worker, which has everything imported. The kernel kills a child
that exceeds its CPU time, whatever it is doing; the next call gets a new child within milliseconds. Wall-clock time
does not count, so the results do not depend on how busy the machine is.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

MEMORY_BYTES = 512 * 2**20
"""How much a call may allocate beyond the memory of the worker."""
OWN_ENDS = frozenset(
    {signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGXCPU}
)
"""Signals that a child gets because of its computation; any other signal was sent from outside."""

Steps = Callable[..., Iterator[Any]]


class ExhaustedError(Exception):
    """A call used up its time or memory, raised or crashed. ``steps`` are the results of its finished steps."""

    def __init__(self, steps: list[Any], why: str) -> None:
        super().__init__(why)
        self.steps = steps


class ChildEndedError(Exception):
    """The child was killed from outside."""


class Bounded:
    """A generator function that runs in a child process. Each of its steps has its own CPU time limit.

    The function yields the limit of its next step in seconds, or the result of a step as ``{"step": …}``. Arguments
    and results are sent as JSON.
    """

    def __init__(self, steps: Steps, memory_bytes: int = MEMORY_BYTES) -> None:
        self._steps = steps
        self._memory_bytes = memory_bytes
        self._room_bytes = 0
        self._pid = 0
        self._requests: BinaryIO | None = None
        self._replies: BinaryIO | None = None

    def __call__(self, *arguments: Any) -> list[Any]:
        """The results of the steps; raises `ExhaustedError` if they did not finish."""
        if not self._pid:
            self._fork()
        assert self._requests is not None
        assert self._replies is not None
        steps: list[Any] = []
        try:
            self._requests.write(json.dumps(arguments).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:  # the child ended between two calls
            self._end()
            raise ChildEndedError("the child process was gone") from None
        while line := self._replies.readline():
            reply = json.loads(line)
            if reply == "last":  # the child has too little memory left for another call
                self._end()
                return steps
            if reply == "done":
                return steps
            if "raised" in reply:
                self._end()
                raise ExhaustedError(steps, reply["raised"])
            steps.append(reply["step"])
        status = self._end()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in OWN_ENDS:
            raise ChildEndedError(f"the child process was ended by signal {os.WTERMSIG(status)}")
        raise ExhaustedError(steps, f"it used up its time or memory (status {status})")

    def close(self) -> None:
        """End the child."""
        if self._pid:
            self._end()

    def _fork(self) -> None:
        inward, outward = os.pipe(), os.pipe()
        gc.freeze()  # so that the child's garbage collector does not write to shared pages
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the worker's other thread only reads its pipe
            pid = os.fork()
        if pid == 0:
            try:
                self._serve(inward[0], outward[1])
            finally:
                os._exit(1)
        os.close(inward[0])
        os.close(outward[1])
        self._pid, self._requests, self._replies = pid, os.fdopen(inward[1], "wb"), os.fdopen(outward[0], "rb")

    def _end(self) -> int:
        for pipe in (self._requests, self._replies):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        pid, self._pid = self._pid, 0
        return os.waitpid(pid, 0)[1]

    # --- in the child ---------------------------------------------------------------------------------------------

    def _serve(self, inward: int, outward: int) -> NoReturn:
        self._close_others(inward, outward)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # lift the worker's limit, which is for one call
        self._limit_memory()
        with os.fdopen(inward, "rb") as requests, os.fdopen(outward, "wb", buffering=0) as replies:
            while line := requests.readline():
                self._answer(json.loads(line), replies)
        os._exit(0)

    def _close_others(self, *kept: int) -> None:
        """Close inherited pipes of the worker, so that their readers see the end when the worker closes them."""
        for start, end in zip((2, *sorted(kept)), (*sorted(kept), 4096), strict=True):
            os.closerange(start + 1, end)

    def _limit_memory(self) -> None:
        held = _held_bytes()
        self._room_bytes = held + self._memory_bytes
        if held:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (self._room_bytes, hard))

    def _answer(self, arguments: list[Any], replies: BinaryIO) -> None:
        try:
            for given in self._steps(*arguments):
                if isinstance(given, dict):
                    replies.write(json.dumps(given).encode() + b"\n")
                else:
                    signal.setitimer(signal.ITIMER_PROF, given)
            # Caches that a library fills in earlier calls must not use up the memory of the next one.
            reply: Any = "last" if _held_bytes() > self._room_bytes - self._memory_bytes / 2 else "done"
        except Exception as error:  # foreign code: a text on which it raises
            reply = {"raised": f"{type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply).encode() + b"\n")


def _held_bytes() -> int:
    """The size of this process's address space, or 0 if it is unknown, in which case there is no limit."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0
