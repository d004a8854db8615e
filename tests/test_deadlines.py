"""Deadlines: they end what takes too long, and only that."""

from __future__ import annotations

import asyncio
import time

import pytest

from verifiers.deadlines import Deadlines, within


def test_each_ends_at_its_own_time_whatever_the_others_do() -> None:
    async def go() -> list[str]:
        deadlines = Deadlines()

        async def work(seconds: float, limit_s: float, after_s: float) -> str:
            await asyncio.sleep(after_s)
            began = time.monotonic()
            try:
                with deadlines.within(limit_s):
                    await asyncio.sleep(seconds)
            except TimeoutError:
                return "late" if abs(time.monotonic() - began - limit_s) < 0.08 else "wrong time"
            return "done"

        cases = [(5, 0.1, 0), (0.01, 0.1, 0), (5, 0.1, 0.05), (5, 0.2, 0), (0.05, 10, 0), (5, 0.05, 0.12)]
        outcomes = await asyncio.gather(*(work(*case) for case in cases))
        assert deadlines._queues == {}
        return outcomes

    assert asyncio.run(go()) == ["late", "done", "late", "late", "done", "late"]


def test_a_task_cancelled_from_outside_stays_cancelled() -> None:
    async def go() -> None:
        deadlines = Deadlines()

        async def work() -> None:
            with deadlines.within(0.05):
                await asyncio.sleep(5)

        early = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early

        both = asyncio.create_task(work())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, both.cancel)
        with pytest.raises((asyncio.CancelledError, TimeoutError)):
            await both
        assert deadlines._queues == {}

    asyncio.run(go())


def test_work_that_ends_with_its_own_error_keeps_it() -> None:
    async def go() -> None:
        deadlines = Deadlines()
        with pytest.raises(KeyError), deadlines.within(1):
            raise KeyError("mine")

    asyncio.run(go())


def test_a_deadline_inside_another_one_ends_the_inner_work_only() -> None:
    async def go() -> str:
        deadlines = Deadlines()
        with deadlines.within(1):
            try:
                with deadlines.within(0.02):
                    await asyncio.sleep(5)
            except TimeoutError:
                await asyncio.sleep(0.01)
                return "outer goes on"
        return "never"

    assert asyncio.run(go()) == "outer goes on"


def test_thousands_that_are_late_together_all_end() -> None:
    async def go() -> int:
        deadlines = Deadlines()

        async def work() -> bool:
            try:
                with deadlines.within(0.1):
                    await asyncio.sleep(60)
            except TimeoutError:
                return True
            return False

        return sum(await asyncio.gather(*(work() for _ in range(3000))))

    assert asyncio.run(go()) == 3000


def test_time_in_which_something_held_the_loop_does_not_count() -> None:
    """A reply that lay there all the time was not late only because nobody could look at it."""

    async def go() -> tuple[str, float]:
        deadlines = Deadlines()
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, time.sleep, 1.0)
        with deadlines.within(0.5):
            await asyncio.sleep(0.3)
        began = loop.time()
        loop.call_later(0.05, time.sleep, 0.8)
        try:
            with deadlines.within(0.4):
                await asyncio.sleep(60)
        except TimeoutError:
            return "late", loop.time() - began
        return "never", 0.0

    outcome, took_s = asyncio.run(go())
    assert outcome == "late"
    assert 1.1 < took_s < 5


def test_a_limit_of_none_is_no_limit() -> None:
    async def go() -> str:
        with within(None):
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError), within(0.01):
            await asyncio.sleep(60)
        return "done"

    assert asyncio.run(go()) == "done"
