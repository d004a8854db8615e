"""A call on hostile text → its result, or that it went past its processor time or memory. Only worker processes use it.

The calls are made in a child that is forked from the worker, with everything imported, and answers one after another.
The kernel ends a child that computes for too long, whatever it is doing; the next call has a new one, some milliseconds
later. Time on the clock plays no part: a machine that is busy makes no difference to what is found out.
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
"""What a call may allocate beyond what the worker holds."""
OWN_ENDS = frozenset(
    {signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGXCPU}
)
"""What ends a child because of what it computes; any other signal came from outside."""

Steps = Callable[..., Iterator[Any]]


class ExhaustedError(Exception):
    """A call used up its time or memory, raised or crashed; ``steps`` are those that it had finished."""

    def __init__(self, steps: list[Any], why: str) -> None:
        super().__init__(why)
        self.steps = steps


class ChildEndedError(Exception):
    """The child was ended by something that is not its own doing."""


class Bounded:
    """A generator function whose steps run in a child process, each within its own processor time.

    The function yields the seconds that its next step may take, or the result of a step as ``{"step": …}``; what the
    last one held is the result. Everything that is sent is JSON.
    """

    def __init__(self, steps: Steps, memory_bytes: int = MEMORY_BYTES) -> None:
        self._steps = steps
        self._memory_bytes = memory_bytes
        self._room_bytes = 0
        self._pid = 0
        self._requests: BinaryIO | None = None
        self._replies: BinaryIO | None = None

    def __call__(self, *arguments: Any) -> list[Any]:
        """What the steps gave; raises `ExhaustedError` where they did not come to an end."""
        if not self._pid:
            self._fork()
        assert self._requests is not None
        assert self._replies is not None
        steps: list[Any] = []
        try:
            self._requests.write(json.dumps(arguments).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:  # it was ended between two calls
            self._end()
            raise ChildEndedError("the child process was gone") from None
        while line := self._replies.readline():
            reply = json.loads(line)
            if reply == "last":  # it has grown too large for another call
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
        gc.freeze()  # what is shared with the child is not touched by its collector
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the worker's other thread only reads its pipe
            pid = os.fork()
        if pid == 0:
            try:
                self._live(inward[0], outward[1])
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

    def _live(self, inward: int, outward: int) -> NoReturn:
        self._close_others(inward, outward)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # the worker's is for one call, this would be for all
        self._limit_memory()
        with os.fdopen(inward, "rb") as requests, os.fdopen(outward, "wb", buffering=0) as replies:
            while line := requests.readline():
                self._answer(json.loads(line), replies)
        os._exit(0)

    def _close_others(self, *kept: int) -> None:
        """The worker's pipes are not the child's: whoever waits for their end shall see it."""
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
            # What a library keeps of earlier calls must not take the memory of the next one.
            said: Any = "last" if _held_bytes() > self._room_bytes - self._memory_bytes / 2 else "done"
        except Exception as error:  # foreign code: a text that it cannot cope with
            said = {"raised": f"{type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(said).encode() + b"\n")


def _held_bytes() -> int:
    """The address space of this process; 0 where there is no way to tell, and then there is no limit on it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0
