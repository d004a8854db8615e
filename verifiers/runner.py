"""Rows × repeats → results: many concurrent rollouts, in a stable order, each saved as soon as it is done."""

from __future__ import annotations

import _thread
import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import length_hint
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from verifiers import deadlines
from verifiers.calls import contained, is_cancelled
from verifiers.errors import Error, Interrupted, RunDeadlineError, ending_cause
from verifiers.escapes import hurry
from verifiers.foreign import guarded_tasks
from verifiers.progress import Progress, Tally
from verifiers.rubrics.score import Score, note_scoring_time, write_score
from verifiers.threads import leave_threads_behind
from verifiers.types import Row, State
from verifiers.watchdog import Watchdog

DEFAULT_CONCURRENCY = 4096
STARTED_AT_ONCE = 16
YOUNG = 100_000  # new objects between two garbage collections
SWEPT_AFTER = 32_768  # rollouts between two garbage collections over all objects
ENDING_S = 10.0  # how long cancelled rollouts have to clean up before they are abandoned
STOPPING_S = 3.0  # the same, after a second Ctrl-C

T = TypeVar("T")

Generate = Callable[["Job"], Awaitable[State]]
ScoreAlone = Callable[[State], Awaitable[Score]]
ScoreGroup = Callable[[Sequence[State], Sequence[Score]], Awaitable[None]]
Sink = Callable[["Job", State], None]
Fail = Callable[["Job", Error], State]


class RunInterruptedError(Interrupted):
    """The run was stopped by Ctrl-C, SIGTERM or SIGHUP. ``results`` has the finished rollouts; it can be resumed."""

    def __init__(self, message: str, results: Any = None, signum: int = signal.SIGINT) -> None:
        super().__init__(message, signum)
        self.results = results


class NotBegunError(Exception):
    """A job was withdrawn before it started; it runs when the run is resumed."""


class Job(NamedTuple):
    """One rollout to run: its row, its index among the row's repeats, and an error if the row cannot be read."""

    position: int
    row: Row
    repeat: int
    error: Exception | None = None

    @property
    def key(self) -> tuple[Any, int]:
        return self.row["example_id"], self.repeat


@dataclass(kw_only=True)
class Limits:
    """How many rollouts run at once. Generation and scoring may have separate limits."""

    max_concurrent: int = -1
    generation: int | None = None
    scoring: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "generation", "scoring"):
            value = getattr(self, name)
            is_unset = value is None and name != "max_concurrent"
            if not is_unset and (not isinstance(value, int) or value == 0 or value < -1):
                raise ValueError(f"{name} must be a positive number, or -1 for no limit; got {value!r}")

    def workers(self, jobs: int) -> int:
        """How many rollouts run at once."""
        wanted = self.max_concurrent if self.max_concurrent > 0 else DEFAULT_CONCURRENCY
        if self.generation or self.scoring:
            wanted = max(wanted, (self.generation or 0) + (self.scoring or 0)) if self.max_concurrent < 0 else wanted
        return min(wanted, jobs)


class Stop(Protocol):
    """Decides when a run has enough rollouts; then no further example is started."""

    async def turn(self, job: Job) -> None:
        """Wait until this job may start."""

    def take_state(self, state: State) -> bool:
        """Record a finished rollout. Returns whether the run has enough."""


@dataclass
class _Group:
    """The rollouts of one example, kept until all are generated."""

    missing: int
    members: list[tuple[Job, State, Score]] = field(default_factory=list)
    has_begun: bool = False


class Run:
    """One pass over a list of jobs."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        generate: Generate,
        score_alone: ScoreAlone | None = None,
        score_group: ScoreGroup | None = None,
        limits: Limits | None = None,
        sink: Sink | None = None,
        progress: Progress | None = None,
        deadline_s: float | None = None,
        fail: Fail | None = None,
        stop: Stop | None = None,
        withdraw: Callable[[], None] | None = None,
    ) -> None:
        self.jobs = jobs
        self.withdraw = withdraw  # withdraws jobs queued elsewhere: `generate` raises NotBegunError for them
        self.stop = stop
        self.has_enough = False
        self._begun: set[Any] = set()
        self.generate = generate
        self.score_alone = score_alone
        self.score_group = score_group
        self.limits = limits or Limits()
        self.sink = sink
        self.progress = progress or Tally()
        self.done: list[tuple[Job, State]] = []
        self.deadline_s = deadline_s
        self.fail = fail
        self.is_stopping = False
        self.is_interrupted = False
        self.signum: int = signal.SIGINT  # the signal that interrupted the run, if one did
        self.ended_by: Error | None = None
        self._next = iter(jobs)
        self._groups: dict[Any, _Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._working = 0
        self._failure: Exception | None = None
        if score_group is not None:
            for job in jobs:
                self._groups.setdefault(job.row["example_id"], _Group(0)).missing += 1

    async def finish(self) -> list[tuple[Job, State]]:
        """Run every job. Returns the finished ones, in the order of the jobs."""
        self._generation = _gate(self.limits.generation)
        self._scoring = _gate(self.limits.scoring)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leave_threads_behind()
        with long_lived, interruptible(self._interrupt), guarded_tasks():
            timer = self._time_the_end()
            try:
                await self._start_workers()
                if self._tasks:
                    await self._ended
                if self._failure is not None:
                    raise self._failure
            except asyncio.CancelledError:
                if not self.is_stopping or is_cancelled():
                    raise
            finally:
                if timer is not None:
                    timer.cancel()
                await _cancel(self._tasks, STOPPING_S if self.is_interrupted else ENDING_S)
                long_lived.rollouts += len(self.done)
            if self.ended_by is not None:
                await self._fail_the_rest(self.ended_by)
        self.done.sort(key=lambda item: item[0].position)
        return self.done

    # --- an early end ---------------------------------------------------------------------------------------------

    def _time_the_end(self) -> asyncio.TimerHandle | None:
        if self.deadline_s is None:
            return None
        late = RunDeadlineError(f"the run's deadline of {self.deadline_s:g} s passed before this rollout was done")
        return asyncio.get_running_loop().call_later(self.deadline_s, self.end, late)

    def end(self, cause: Error) -> None:
        """End now: finished rollouts stay, all others fail with this cause."""
        if self.ended_by is not None:
            return
        self.ended_by, self.is_stopping = cause, True
        self.progress.note(f"the run ends early: {cause}")
        self._cut_short()

    def _cut_short(self) -> None:
        """Cancel all rollouts; `finish` gives them a little time to clean up."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if not self._ended.done():
            self._ended.set_result(None)

    async def _fail_the_rest(self, cause: Error) -> None:
        """Score incomplete groups as they are, so that their rollouts are not lost; all other jobs fail."""
        with suppress(TimeoutError), deadlines.within(ENDING_S):
            for group in [group for group in self._groups.values() if group.members]:
                await self._score_group(group)
        if self.fail is not None:
            settled = {job.position for job, _ in self.done}
            for job in self.jobs:
                if job.position not in settled:
                    self._settle(job, self.fail(job, cause))

    async def _start_workers(self) -> None:
        """Start a few at a time, because thousands of rollouts that start at once would block the loop."""
        for started in range(self.limits.workers(len(self.jobs))):
            if started and started % STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)
                if not length_hint(self._next, 1):  # the running workers have taken all jobs
                    break
            self._working += 1
            self._tasks.add(asyncio.create_task(self._work()))

    async def _work(self) -> None:
        try:
            for job in self._next:
                if self.stop is not None and not self.has_enough:
                    await self.stop.turn(job)
                if self._is_wanted(job):
                    await self._run_job(job)
        except BaseException as error:
            try:
                failure = contained(error)
            except BaseException:
                self._ended.cancel()
                raise
            self.is_stopping = True  # saving failed, so further rollouts would be lost too
            self._failure = self._failure or failure
        self._working -= 1
        if (self._failure or not self._working) and not self._ended.done():
            self._ended.set_result(None)

    def _is_wanted(self, job: Job) -> bool:
        """When the run is stopping, complete only started groups, whose rollouts have no score without the others."""
        if self.ended_by is not None:
            return False
        example = job.row["example_id"]
        if self.stop is not None and not self.is_stopping:
            if self.has_enough and example not in self._begun:
                return False
            self._begun.add(example)
        group = self._groups.get(example)
        if group is None:
            return not self.is_stopping
        group.has_begun = group.has_begun or not self.is_stopping
        return group.has_begun

    async def _run_job(self, job: Job) -> None:
        try:
            state = await _through(self._generation, self.generate, job)
        except NotBegunError:
            return
        if self.score_alone is None or state.get("error") is not None:
            score = Score()
        else:
            began = time.perf_counter()
            score = await _through(self._scoring, self.score_alone, state)
            write_score(state, score, is_whole=self.score_group is None)
            note_scoring_time((state,), (time.perf_counter() - began) * 1000)
        if self.score_group is None:
            self._settle(job, state)
        else:
            await self._join_group(job, state, score)

    async def _join_group(self, job: Job, state: State, score: Score) -> None:
        group = self._groups[job.row["example_id"]]
        if state.get("error") is None:
            state["score_alone"] = {"reward": score.reward, "metrics": dict(score.metrics)}
        group.members.append((job, state, score))
        group.missing -= 1
        if group.missing:
            return
        del self._groups[job.row["example_id"]]
        await self._score_group(group)

    async def _score_group(self, group: _Group) -> None:
        assert self.score_group is not None
        group.members.sort(key=lambda member: member[0].position)  # else scores could depend on which finished first
        live = [(state, score) for _, state, score in group.members if state.get("error") is None]
        began = time.perf_counter()
        states, scores = [state for state, _ in live], [score for _, score in live]
        await _through(self._scoring, self.score_group, states, scores)
        for state, score in live:
            write_score(state, score)
            state["group_size"] = len(live)  # if incomplete, the group is scored again when a resumed run adds the rest
        note_scoring_time(states, (time.perf_counter() - began) * 1000)
        for job, state, _ in group.members:
            self._settle(job, state)

    def _settle(self, job: Job, state: State) -> None:
        if (cause := ending_cause(state.get("error"))) is not None:
            self.end(cause)
        if self.sink is not None:
            self.sink(job, state)
        self.done.append((job, state))
        self.progress.update(state)
        if self.stop is not None and self.stop.take_state(state):
            self.has_enough = True

    def _interrupt(self) -> None:
        if not self.is_interrupted:
            self.is_stopping = self.is_interrupted = True
            self.signum = _heard.get(asyncio.get_running_loop(), signal.SIGINT)
            self.progress.note(
                "stopping: rollouts in progress are finished and saved; press Ctrl-C again to stop at once"
            )
            if self.withdraw is not None:
                self.withdraw()
            return
        self._cut_short()


def _gate(limit: int | None) -> asyncio.Semaphore | None:
    return asyncio.Semaphore(limit) if limit is not None and limit > 0 else None


def _through(gate: asyncio.Semaphore | None, work: Callable[..., Awaitable[T]], *args: Any) -> Awaitable[T]:
    """Call ``work``, limited by ``gate`` if there is one."""
    return work(*args) if gate is None else _limited(gate, work, *args)


async def _limited(gate: asyncio.Semaphore, work: Callable[..., Awaitable[T]], *args: Any) -> T:
    async with gate:
        return await work(*args)


async def _cancel(tasks: set[asyncio.Task[None]], limit_s: float) -> None:
    under_way = [task for task in tasks if not task.done()]
    for task in under_way:
        if not task.cancelling():  # cancelling twice would interrupt its clean-up
            task.cancel()
    if under_way:
        await asyncio.wait(under_way, timeout=limit_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # otherwise asyncio logs that the exception was never retrieved


class _LongLived:
    """During runs, the garbage collector skips objects that existed before or survived a full collection.

    Thousands of waiting rollouts are live objects, and so are the modules of a training program. Scanning all of them
    repeatedly costs as much as running the rollouts, and blocks the loop for half a second at a time. So objects are
    frozen (``gc.freeze``) at the start and after each full collection. The young generation is larger, since nearly all
    new objects are kept; full collections are more frequent, and scan only new objects. When the last run ends,
    everything is unfrozen into the oldest generation, including its results. Python then no longer knows how much of
    that is new, so a collection over all objects follows every `SWEPT_AFTER` rollouts.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.rollouts = 0
        self.threshold = (0, 0, 0)
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.runs += 1
            if self.runs == 1:
                self.threshold = gc.get_threshold()
                young, middle, old = self.threshold
                gc.set_threshold(max(young, YOUNG) if young else 0, middle, min(old, 3))
                gc.callbacks.append(self._after_collection)
                gc.freeze()

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.runs -= 1
            if self.runs == 0:
                gc.callbacks.remove(self._after_collection)
                gc.freeze()
                gc.unfreeze()
                gc.set_threshold(*self.threshold)
                if self.rollouts >= SWEPT_AFTER and self.threshold[0] and gc.isenabled():
                    self.rollouts = 0
                    gc.collect()

    def _after_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()


long_lived = _LongLived()


OnInterrupt = Callable[[], None]
_Listening = tuple[list[OnInterrupt], dict[int, Any], Watchdog]
_heard: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()  # the last signal
_listening: WeakKeyDictionary[asyncio.AbstractEventLoop, _Listening] = WeakKeyDictionary()


@contextmanager
def interruptible(on_interrupt: OnInterrupt) -> Iterator[None]:
    """Within the block, Ctrl-C, SIGTERM and SIGHUP call a function. Works only if the main thread runs the loop.

    If several runs share a loop, all are notified, and the last to end restores the signal handlers. If the runs have
    not ended a few seconds after a second Ctrl-C, the process exits, because something in it never returns.
    """
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread() or not _listen(loop):
        yield
        return
    listeners, before, watchdog = _listening[loop]
    listeners.append(on_interrupt)
    try:
        yield
    finally:
        listeners.remove(on_interrupt)
        if not listeners:
            watchdog.stop()
            del _listening[loop]
            for number, handler in before.items():
                signal.signal(number, handler)


def _listen(loop: asyncio.AbstractEventLoop) -> bool:
    if loop in _listening:
        return True
    listeners: list[OnInterrupt] = []
    before: dict[int, Any] = {}

    watchdog = Watchdog()
    received = unheard = 0
    is_told = False

    def tell(signum: int) -> None:
        nonlocal unheard
        unheard = 0
        _heard[loop] = signum
        for on_interrupt in tuple(listeners):
            on_interrupt()

    def receive(signum: int, frame: FrameType | None) -> None:
        nonlocal received, unheard, is_told
        if signum == signal.SIGINT and watchdog.receives(frame):
            return
        if signum == HANGUP and is_told:
            return  # a closing terminal may send it several times
        is_told = True
        received += 1
        unheard += 1
        if received == 2:
            hurry.set()
            # Not `threading.Thread`: the interrupted code may hold its locks.
            _thread.start_new_thread(_exit_unless_ended, (listeners, 128 + signum))
        if unheard > 1:  # something blocks the loop: only an exception can interrupt it
            raise Interrupted(signum=signum)
        loop.call_soon_threadsafe(tell, signum)

    receive.is_ours = True  # type: ignore[attr-defined]

    try:
        for number in _free_signals():
            before[number] = signal.signal(number, receive)
    except ValueError:  # a subinterpreter
        return False
    _listening[loop] = listeners, before, watchdog
    watchdog.start()
    return True


HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows


def _free_signals() -> list[int]:
    """SIGINT, and those of SIGTERM and SIGHUP that no other code handles or ignores (as ``nohup`` does)."""
    others = [signal.SIGTERM] if HANGUP is None else [signal.SIGTERM, HANGUP]
    return [signal.SIGINT, *(number for number in others if is_ours(signal.getsignal(number)))]


def is_ours(handler: Any) -> bool:
    """Whether a signal handler is the default one or one of this library."""
    return handler == signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("verifiers.")


def _exit_unless_ended(listeners: list[OnInterrupt], exit_code: int) -> None:
    """Exit the process as a last resort. No saved rollout is lost, because each is on disk as soon as it is done."""
    end = time.monotonic() + 2 * STOPPING_S
    while listeners and time.monotonic() < end:
        time.sleep(0.05)
    if listeners:
        os.write(2, b"\nstopped, although something did not return; the run can be resumed from its saved rollouts\n")
        os._exit(exit_code)
