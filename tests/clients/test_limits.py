"""The adaptive limit: slots are neither lost nor invented, complaints halve it once, and it finds the capacity."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.clients.limits import CAP, Limit, open_files_cap
from verifiers.errors import DeadlineError


class Jump(selectors.DefaultSelector):
    """A selector that never waits: it moves its loop's clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.now += timeout
        return super().select(0)


def simulate(main: Coroutine[Any, Any, Any]) -> Any:
    """Run hours of waiting in no time."""
    selector = Jump()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(asyncio.wait_for(main, None))
    finally:
        loop.close()


# --- slots --------------------------------------------------------------------------------------------------------


def test_those_in_line_enter_in_the_order_in_which_they_came() -> None:
    async def go() -> list[int]:
        limit, order = Limit(start=2, cap=2), []

        async def work(i: int) -> None:
            await limit.enter()
            order.append(i)
            await asyncio.sleep(1)
            limit.leave()

        await asyncio.gather(*(work(i) for i in range(50)))
        return order

    assert simulate(go()) == list(range(50))


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 6), jobs=st.integers(1, 40))
def test_cancelling_anyone_at_any_moment_neither_loses_nor_invents_a_slot(seed: int, size: int, jobs: int) -> None:
    rng = random.Random(seed)

    async def go() -> tuple[int, int]:
        limit, most = Limit(start=size, cap=size), 0

        async def work() -> None:
            nonlocal most
            await asyncio.sleep(rng.choice([0, 0, 1, 2]))
            await limit.enter(patience_s=rng.choice([3, 1000]))
            try:
                most = max(most, limit.in_flight)
                await asyncio.sleep(rng.choice([0, 1, 3]))
            finally:
                limit.leave()

        async def kill(task: asyncio.Task[None]) -> None:
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(rng.choice([0, 0, 0, 1]))
            task.cancel()

        tasks = [asyncio.ensure_future(work()) for _ in range(jobs)]
        killers = [kill(task) for task in tasks if rng.random() < 0.5]
        if rng.random() < 0.3:
            limit.pause(rng.choice([0.5, 2.0]))
        await asyncio.gather(*tasks, *killers, return_exceptions=True)
        assert limit.in_flight == 0
        for _ in range(size):  # and every slot can still be had
            await asyncio.wait_for(limit.enter(), 10)
        assert not limit.try_enter()
        return most, size

    most, size = simulate(go())
    assert most <= size


def test_one_cancelled_in_the_moment_of_being_admitted_passes_the_slot_on() -> None:
    async def go() -> bool:
        limit = Limit(start=1, cap=1)
        await limit.enter()
        first, second = (asyncio.ensure_future(limit.enter()) for _ in range(2))
        await asyncio.sleep(0)
        limit.leave()  # admits the first ...
        first.cancel()  # ... which is cancelled before it runs again
        await asyncio.wait_for(second, 1)
        return first.cancelled()

    assert simulate(go())


def test_a_line_of_those_who_gave_up_does_not_hold_up_the_next() -> None:
    async def go() -> None:
        limit = Limit(start=1, cap=1)
        await limit.enter()
        waiting = [asyncio.ensure_future(limit.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        limit.pause(5)
        limit.leave()
        for task in waiting:
            task.cancel()
        await asyncio.sleep(10)
        await asyncio.wait_for(limit.enter(), 1)

    simulate(go())


def test_waiting_ends_when_nothing_succeeds_but_not_while_the_line_moves() -> None:
    async def go(success_every_s: float | None) -> float:
        loop = asyncio.get_running_loop()
        limit = Limit(start=1, cap=1)
        await limit.enter()
        waiting = asyncio.ensure_future(limit.enter(patience_s=100))
        for _ in range(20):
            await asyncio.sleep(success_every_s or 50)
            if success_every_s:
                limit.succeeded(loop.time())
            if waiting.done():
                break
        if not success_every_s:
            with pytest.raises(DeadlineError, match="waited 100 s"):
                await waiting
        else:
            assert not waiting.done()
            waiting.cancel()
        return loop.time()

    assert simulate(go(None)) == pytest.approx(100)
    assert simulate(go(90)) == pytest.approx(1800)


def test_nobody_enters_during_a_pause_and_pauses_do_not_add_up() -> None:
    async def go() -> list[float]:
        loop, limit, entered = asyncio.get_running_loop(), Limit(start=4), []

        async def work() -> None:
            await limit.enter()
            entered.append(loop.time())
            limit.leave()

        limit.pause(10)
        limit.pause(3)
        limit.pause(12)
        await asyncio.gather(*(work() for _ in range(6)))
        return entered

    assert simulate(go()) == [pytest.approx(12)] * 6


# --- signals ------------------------------------------------------------------------------------------------------


def test_five_hundred_complaints_about_one_burst_halve_the_limit_once() -> None:
    limit = Limit(start=500)
    epochs = []
    for _ in range(500):
        assert limit.try_enter()
        epochs.append(limit.epoch)
    for epoch in epochs:
        limit.overloaded(epoch)
        limit.leave()
    assert limit.size == 250
    for _ in range(20):
        limit.try_enter()
    limit.overloaded(limit.epoch)
    assert limit.size == 10  # half of what was under way, not of what would have been allowed


def test_the_limit_doubles_until_the_first_complaint_and_only_while_it_is_in_the_way() -> None:
    limit = Limit(start=8, cap=30)
    limit.succeeded(0.0)
    assert limit.size == 8
    for _ in range(8):
        limit.try_enter()
    for _ in range(8):
        limit.succeeded(0.0)
    assert limit.size == 16
    for _ in range(100):
        limit.try_enter()
        limit.succeeded(0.0)
    assert limit.size == 30


@pytest.mark.parametrize(("retry_after_s", "longest_s"), [(None, 30.0), (0.1, 1.0), (2.0, 8.0), (60.0, 30.0)])
def test_the_time_left_between_requests_is_of_the_order_of_what_the_endpoint_asked_for(
    retry_after_s: float | None, longest_s: float
) -> None:
    async def go() -> float:
        limit = Limit(start=1)
        for _ in range(12):
            limit.overloaded(limit.epoch, retry_after_s)
        return limit._spacing_s

    assert simulate(go()) == longest_s


def test_a_client_that_announces_more_gets_it_at_once_unless_there_were_complaints() -> None:
    limit = Limit(start=8, cap=100)
    limit.expect(50)
    assert limit.size == 50
    for _ in range(50):
        limit.try_enter()
    limit.overloaded(limit.epoch)
    limit.expect(1000)
    assert limit.size == 25


class Endpoint:
    """Serves so many at once, and so many a second; complains about the rest."""

    def __init__(
        self, *, at_once: int = 10**9, per_s: float = 1e9, burst: float = 10.0, latency_s: float = 1.0
    ) -> None:
        self.at_once, self.per_s, self.burst, self.latency_s = at_once, per_s, burst, latency_s
        self.busy, self.tokens, self.last = 0, burst, 0.0
        self.served = self.refused = 0

    async def __call__(self) -> bool:
        now = asyncio.get_running_loop().time()
        self.tokens = min(self.burst, self.tokens + (now - self.last) * self.per_s)
        self.last = now
        if self.busy >= self.at_once or self.tokens < 1:
            self.refused += 1
            await asyncio.sleep(0.02)
            return False
        self.tokens -= 1
        self.busy += 1
        try:
            await asyncio.sleep(self.latency_s * random.uniform(0.7, 1.3))
        finally:
            self.busy -= 1
        self.served += 1
        return True


async def drive(endpoint: Endpoint, limit: Limit, requests: int, attempts: int = 9) -> tuple[int, float]:
    """How many requests failed for good, and how long all took, with the retries that clients make."""
    loop = asyncio.get_running_loop()

    async def request() -> bool:
        for attempt in range(attempts):
            await limit.enter(patience_s=1e6)
            epoch = limit.epoch
            try:
                if await endpoint():
                    limit.succeeded(loop.time())
                    return True
                limit.overloaded(epoch)
            finally:
                limit.leave()
            await asyncio.sleep(min(30, 0.5 * 2**attempt) * random.random())
        return False

    random.seed(0)
    done = await asyncio.gather(*(request() for _ in range(requests)))
    return done.count(False), loop.time()


def test_an_endpoint_that_serves_fifty_at_once_is_kept_busy_and_loses_nobody() -> None:
    endpoint = Endpoint(at_once=50)
    failed, took_s = simulate(drive(endpoint, Limit(), 3000))
    assert failed == 0
    assert took_s < 2.5 * 3000 / 50  # at full capacity it would take 60 s
    assert endpoint.refused < 2 * endpoint.served  # most of them of the burst that it starts with


def test_an_endpoint_that_allows_two_a_second_serves_everyone_in_the_end() -> None:
    endpoint = Endpoint(per_s=2, latency_s=0.3)
    failed, took_s = simulate(drive(endpoint, Limit(), 400))
    assert failed == 0
    assert took_s < 3 * 400 / 2


def test_an_endpoint_that_never_complains_gets_all_it_can_be_given() -> None:
    failed, took_s = simulate(drive(Endpoint(burst=1e9), Limit(start=64), 5000))
    assert failed == 0
    assert took_s < 12  # 64, 128, 256 ... at once: seven round trips


def test_the_cap_stays_below_what_the_system_lets_a_process_open() -> None:
    assert 16 <= open_files_cap() <= CAP
