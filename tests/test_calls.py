"""One API for sync and async callers; and the functions users write never hold up the loop for long."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifiers import calls
from verifiers.foreign import MAX_STUCK

runs: list[int] = []


@calls.both
async def double(x: int) -> int:
    runs.append(x)
    await asyncio.sleep(0)
    return 2 * x


@calls.both
async def pair() -> tuple[str, dict[str, int]]:
    return "said", {"turn": 1}


@calls.both
async def column() -> dict[str, list[float]]:
    return {"rewards": [1.0, 0.5]}


@calls.both
async def fail() -> None:
    raise LookupError("no such row")


@pytest.fixture(autouse=True)
def _forget_runs() -> None:
    runs.clear()


# --- one name, called from anywhere -------------------------------------------------------------------------------


def test_plain_code_gets_the_result() -> None:
    assert double(2) == 4
    with pytest.raises(LookupError, match="no such row"):
        fail()


def test_async_code_awaits_it_as_a_coroutine_a_task_and_in_a_gather() -> None:
    async def main() -> list[int]:
        task = asyncio.create_task(double(3))
        async with asyncio.TaskGroup() as group:
            grouped = group.create_task(double(4))
        both = await asyncio.gather(double(5), double(6))
        return [await double(1), await asyncio.wait_for(double(2), 5), await task, grouped.result(), *both]

    assert asyncio.run(main()) == [2, 4, 6, 8, 10, 12]
    assert sorted(runs) == [1, 2, 3, 4, 5, 6]


def test_an_exception_comes_out_where_it_is_awaited_and_where_it_is_touched() -> None:
    async def main() -> None:
        with pytest.raises(LookupError):
            await fail()
        with pytest.raises(LookupError):
            fail()["x"]

    asyncio.run(main())


def test_a_cell_copied_from_the_docs_works_inside_a_running_loop() -> None:
    async def cell() -> None:
        said, state = pair()
        assert (said, state) == ("said", {"turn": 1})
        results = column()
        assert sum(results["rewards"]) / len(results["rewards"]) == 0.75
        assert "rewards" in results
        assert len(column()) == 1
        assert list(column().keys()) == ["rewards"]
        assert dict(column()) == {"rewards": [1.0, 0.5]}
        assert str(double(2)) == f"{double(2)}" == "4"
        assert float(double(2)) == 4.0
        changed = column()
        assert "column: not awaited" in repr(changed)
        changed["extra"] = [1.0]
        assert repr(changed) == "{'rewards': [1.0, 0.5], 'extra': [1.0]}"

    asyncio.run(cell())


def test_touching_and_then_awaiting_runs_it_once() -> None:
    async def main() -> None:
        touched = double(7)
        assert str(touched) == "14"
        assert await touched == await touched == 14
        awaited = double(8)
        assert await awaited == 16
        assert float(awaited) == 16.0

    asyncio.run(main())
    assert runs == [7, 8]


def test_touching_what_another_task_is_running_is_refused_and_not_run_twice() -> None:
    async def main() -> None:
        handle = double(9)
        task = asyncio.create_task(handle)
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"double .*is already running"):
            len(handle)
        assert await task == 18

    asyncio.run(main())
    assert runs == [9]


def test_a_handle_that_nobody_awaits_says_so() -> None:
    async def main() -> None:
        with pytest.warns(RuntimeWarning, match=r"double was called inside a running loop and never awaited"):
            double(1)

    asyncio.run(main())
    assert runs == []


def test_a_task_of_a_handle_can_be_shown_and_cancelled() -> None:
    @calls.both
    async def forever() -> None:
        await asyncio.sleep(1000)

    async def main() -> None:
        task = asyncio.create_task(forever())
        assert "forever" in repr(task) or "Deferred" in repr(task)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(forever(), 0.01)

    asyncio.run(main())


def test_the_sync_name_gives_the_result_inside_a_running_loop() -> None:
    double_sync = calls.blocking(double)

    async def main() -> int:
        value: int = double_sync(5)
        return value

    assert asyncio.run(main()) == double_sync(5) == 10


def test_the_async_name_is_a_coroutine_function_everywhere() -> None:
    double_async = calls.asynchronous(double)
    assert inspect.iscoroutinefunction(double_async)
    assert asyncio.run(double_async(5)) == 10  # type: ignore[arg-type]


def test_context_variables_reach_the_work_whichever_way_it_is_called() -> None:
    who = contextvars.ContextVar("who", default="nobody")

    @calls.both
    async def ask() -> str:
        return who.get()

    async def main() -> list[str]:
        who.set("me")
        return [await ask(), str(ask()), calls.blocking(ask)()]

    assert asyncio.run(main()) == ["me"] * 3


def test_ctrl_c_in_a_notebook_cell_stops_the_work_behind_the_handle() -> None:
    stopped = threading.Event()

    @calls.both
    async def forever() -> dict[str, int]:
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()
        return {}

    async def cell() -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        forever()["x"]

    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
        assert stopped.wait(5)
    finally:
        loop.close()


def test_many_threads_may_call_at_once() -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda i=i: results.append(double(i))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [2 * i for i in range(20)]


# --- calling what users write -------------------------------------------------------------------------------------


async def longest_pause(work: Awaitable[Any], every_s: float = 0.005) -> float:
    """The longest time the loop did not come round while something was awaited."""
    longest = 0.0
    is_done = False

    async def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not is_done:
            await asyncio.sleep(every_s)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    await work
    is_done = True
    await ticking
    return longest


def test_blocking_functions_do_not_stall_the_loop_and_overlap() -> None:
    hook = calls.Hook(lambda: time.sleep(0.3))

    async def main() -> tuple[float, float]:
        began = time.perf_counter()
        pause = await longest_pause(asyncio.gather(*(hook() for _ in range(50))))
        return pause, time.perf_counter() - began

    pause, took = asyncio.run(main())
    assert pause < 0.25
    assert took < 3.0  # one after the other it would be 15 s


def test_quick_functions_share_a_thread_and_a_slow_call_sends_one_back_to_its_own_for_good() -> None:
    naps = iter([0, 0, 0, 0.2, 0, 0, 0, 0])
    hook = calls.Hook(lambda: time.sleep(next(naps)))
    shares: list[bool] = []

    async def main() -> None:
        for _ in range(8):
            shares.append(hook.is_quick)
            await hook()

    asyncio.run(main())
    assert shares[0] is False
    assert shares[3] is True
    assert shares[4:] == [False] * 4


def test_no_sync_function_ever_runs_on_the_loops_own_thread() -> None:
    """It may have been quick a thousand times: the next call of it may never return."""
    seen: set[int] = set()
    hook = calls.Hook(lambda: seen.add(threading.get_ident()))

    async def main() -> None:
        for _ in range(50):
            await hook()
        assert hook.is_quick
        assert threading.get_ident() not in seen

    asyncio.run(main())


def test_a_quick_function_that_deadlocks_holds_up_neither_the_loop_nor_the_other_functions() -> None:
    never = threading.Event()
    quick, stuck = calls.Hook(lambda: 7), calls.Hook(lambda: never.wait() if is_deadlocked else 0, timeout_s=3.0)
    is_deadlocked = False

    async def main() -> float:
        nonlocal is_deadlocked
        for _ in range(4):
            assert (await stuck(), await quick()) == (0, 7)
        assert stuck.is_quick
        is_deadlocked = True
        hanging = asyncio.create_task(stuck())
        await asyncio.sleep(0)
        began = time.perf_counter()
        pause = await longest_pause(asyncio.gather(*(quick() for _ in range(200))))
        assert time.perf_counter() - began < 2.5
        with pytest.raises(calls.TimeLimitError, match="did not return within 3 s"):
            await hanging
        assert not stuck.is_quick
        assert quick.is_quick
        return pause

    try:
        assert asyncio.run(main()) < 0.25
    finally:
        never.set()


def test_calls_that_never_return_are_bounded_and_then_refused_at_once() -> None:
    """Each holds a thread: a function that always hangs must not eat them all, nor a limit of time for every row."""
    never = threading.Event()
    hook = calls.Hook(never.wait, timeout_s=0.05)

    async def main() -> list[str]:
        outcomes = await asyncio.gather(*(hook() for _ in range(MAX_STUCK)), return_exceptions=True)
        assert all(isinstance(error, calls.TimeLimitError) for error in outcomes)
        began = time.perf_counter()
        with pytest.raises(calls.TimeLimitError, match=r"64 earlier calls have not returned"):
            await hook()
        assert time.perf_counter() - began < 0.05
        never.set()
        while hook.stuck:
            await asyncio.sleep(0.01)
        assert await hook() is True  # the threads came back after all
        return []

    asyncio.run(main())


def test_a_thread_that_to_thread_left_hanging_does_not_keep_a_call_from_returning() -> None:
    never = threading.Event()

    @calls.both
    async def leave_one_behind() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(never.wait), 0.05)
        return await asyncio.to_thread(lambda: "done")

    began = time.perf_counter()
    assert leave_one_behind() == "done"
    assert time.perf_counter() - began < 5
    never.set()


@pytest.mark.parametrize("is_quick", [False, True])
def test_sync_functions_see_no_running_loop(is_quick: bool) -> None:
    async def three() -> int:
        return 3

    hook = calls.Hook(lambda: asyncio.run(three()) + double(1))
    hook.is_quick = is_quick

    async def main() -> list[int]:
        return [await hook() for _ in range(5)]

    assert asyncio.run(main()) == [5] * 5


def test_the_loop_is_back_in_sight_after_a_function_for_the_main_thread_raised() -> None:
    def bad() -> None:
        raise ValueError("x")

    hook = calls.Hook(bad)
    hook.is_main_only = True

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(ValueError, match="x"):
            await hook()
        assert asyncio.get_running_loop() is loop

    asyncio.run(main())


def test_a_function_with_its_own_alarm_runs_in_the_main_thread() -> None:
    def with_alarm() -> str:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        try:
            return threading.current_thread().name
        finally:
            signal.signal(signal.SIGALRM, before)

    hook = calls.Hook(with_alarm)

    async def main() -> list[str]:
        return list(await asyncio.gather(*(hook() for _ in range(5))))

    assert asyncio.run(main()) == [threading.main_thread().name] * 5


async def _coroutine(x: int) -> int:
    return x


class AsyncObject:
    async def __call__(self, x: int) -> int:
        return x

    async def method(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    "function",
    [
        _coroutine,
        lambda x: _coroutine(x),
        functools.partial(_coroutine),
        AsyncObject(),
        AsyncObject().method,
        functools.partial(AsyncObject().method),
        lambda x: x,
        functools.partial(lambda x: x),
        SimpleNamespace(f=lambda x: x).f,
    ],
)
def test_every_kind_of_callable_is_called_and_awaited_if_need_be(function: Callable[[int], Any]) -> None:
    hook = calls.Hook(function, timeout_s=10)

    async def main() -> list[int]:
        return [await hook(i) for i in range(5)]

    assert asyncio.run(main()) == list(range(5))


class OwnOutcome(BaseException):
    """As ``pytest.fail()`` raises it."""


ESCAPES = [SystemExit(3), OwnOutcome("failed"), GeneratorExit(), asyncio.CancelledError(), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ESCAPES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["thread", "shared", "async", "async later"])
def test_whatever_a_function_raises_is_an_ordinary_error_with_its_cause(where: str, error: BaseException) -> None:
    async def awaited() -> None:
        if where == "async later":
            await asyncio.sleep(0.001)
        raise error

    def plain() -> None:
        raise error

    hook = calls.Hook(awaited if where.startswith("async") else plain, timeout_s=10)
    hook.is_quick = where == "shared"

    async def main() -> None:
        with pytest.raises(RuntimeError) as caught:
            await hook()
        assert caught.value.__cause__ is error
        assert ("exit(3)" in str(caught.value)) == isinstance(error, SystemExit)

    if isinstance(error, KeyboardInterrupt) and where.startswith("async"):
        with pytest.raises(KeyboardInterrupt):  # outside of a run nothing tells it from a real one
            asyncio.run(main())
    else:
        asyncio.run(main())


def test_a_coroutine_that_is_closed_from_outside_is_closed() -> None:
    hook = calls.Hook(lambda: asyncio.sleep(1000))

    async def main() -> None:
        calling = hook()
        loop = asyncio.get_running_loop()
        task = loop.create_task(calling)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_cancellation_from_within_is_an_ordinary_error_and_one_from_outside_is_not() -> None:
    async def cancels_its_own() -> None:
        task = asyncio.create_task(asyncio.sleep(1000))
        task.cancel()
        await task

    async def main() -> None:
        with pytest.raises(RuntimeError, match="cancelled"):
            await calls.Hook(cancels_its_own, timeout_s=5)()
        outer = asyncio.create_task(calls.Hook(asyncio.sleep)(1000))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer

    asyncio.run(main())


def test_stop_iteration_from_a_function_does_not_hang_the_caller() -> None:
    def empty() -> Any:
        return next(iter(()))

    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(calls.Hook(empty)(), 5)

    asyncio.run(main())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hook_that_hangs_ends_at_its_limit(is_async: bool) -> None:
    release = threading.Event()
    hook = calls.Hook((lambda: asyncio.sleep(1000)) if is_async else release.wait, timeout_s=0.1)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await hook()

    began = time.perf_counter()
    asyncio.run(main())
    release.set()
    assert time.perf_counter() - began < 5


def test_more_blocking_hooks_than_slots_that_call_themselves_do_not_deadlock() -> None:
    def descend(depth: int) -> int:
        time.sleep(0.01)
        return 1 + nested(depth - 1) if depth else 1

    hook = calls.Hook(descend, may_share=False)

    @calls.both
    async def nested(depth: int) -> int:
        value: int = await hook(depth)
        return value

    n = calls.MAX_BLOCKED + 60

    async def main() -> int:
        return sum(await asyncio.wait_for(asyncio.gather(*(hook(1) for _ in range(n))), 60))

    assert asyncio.run(main()) == 2 * n


def test_threads_are_used_again() -> None:
    seen: set[int] = set()
    hook = calls.Hook(lambda: seen.add(threading.get_ident()), may_share=False)

    async def main() -> None:
        for _ in range(50):
            await hook()
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert len(seen) <= 5


def test_what_was_learned_about_a_function_does_not_travel_in_a_pickle() -> None:
    hook = calls.Hook(time.time, timeout_s=5)
    hook.is_quick = True
    there = pickle.loads(pickle.dumps(hook))
    assert (there.function, there.timeout_s, there.is_quick) == (time.time, 5, False)


def test_hooks_work_in_a_forked_process(repo: Path) -> None:
    code = """
import asyncio, os, sys, time
from verifiers import calls
hook = calls.Hook(lambda: 7, may_share=False)
async def main(): return await asyncio.wait_for(hook(), 10)
assert asyncio.run(main()) == 7      # leaves an idle thread behind, which no child has
child = os.fork()
if child == 0:
    os._exit(asyncio.run(main()))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True, cwd=repo)
    assert done.returncode == 7, done.stderr


def test_a_hanging_hook_does_not_keep_the_interpreter_from_ending(repo: Path) -> None:
    code = """
import asyncio, time
from verifiers import calls
async def main():
    try: await calls.Hook(lambda: time.sleep(1000), timeout_s=0.05)()
    except TimeoutError: print("limit")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60, text=True, check=True, cwd=repo
    )
    assert done.stdout == "limit\n"


# --- resources that belong to a loop ------------------------------------------------------------------------------


def test_a_resource_is_made_once_a_loop_and_closed_with_it() -> None:
    made: list[object] = []
    closed: list[object] = []

    def make() -> object:
        made.append(object())
        return made[-1]

    async def close(resource: object) -> None:
        closed.append(resource)

    resource = calls.PerLoop(make, close)

    async def main() -> None:
        found = await asyncio.gather(*(resource.get() for _ in range(5)))
        assert len({id(f) for f in found}) == 1

    asyncio.run(main())
    asyncio.run(main())
    assert len(made) == 2
    assert closed == made


def test_a_handle_that_nobody_awaited_is_compared_as_its_result_and_not_as_another_object() -> None:
    @calls.both
    async def reply() -> str:
        return "yes"

    async def main() -> list[bool]:
        first, second, third = reply(), reply(), reply()
        assert len({first, second, third}) == 3
        return [first == "yes", second != "yes", third == "yes", first == "no", first == second]

    assert asyncio.run(main()) == [True, False, True, False, False]


def test_asking_whether_there_is_a_handle_does_not_run_it() -> None:
    ran = []

    @calls.both
    async def note() -> list[int]:
        ran.append(1)
        return []

    async def main() -> None:
        handle = note()
        assert bool(handle)
        assert not ran
        assert await handle == []

    asyncio.run(main())


# --- async functions that block ------------------------------------------------------------------------------------


def test_an_async_function_that_awaits_nothing_and_held_the_loop_runs_in_threads_from_then_on() -> None:
    async def blocks() -> int:
        time.sleep(0.3)
        return threading.get_ident()

    async def waits() -> int:
        await asyncio.sleep(0.3)
        return threading.get_ident()

    async def main() -> None:
        here = threading.get_ident()
        blocking, waiting = calls.Hook(blocks), calls.Hook(waits)
        assert [await blocking(), await waiting()] == [here, here]
        assert await blocking() != here
        assert await longest_pause(asyncio.gather(*(blocking() for _ in range(10)))) < 0.25
        assert await waiting() == here  # it took as long, but left the loop to others

    asyncio.run(main())
