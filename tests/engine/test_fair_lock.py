"""A lock that goes to whoever has waited longest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from verifiers.engine.fair_lock import FairLock


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(5000):
        if is_so():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come to that")


def test_one_who_takes_it_again_at_once_comes_after_those_who_wait() -> None:
    lock, order = FairLock(), []

    def work() -> None:
        with lock:
            order.append("waited")

    with lock:
        thread = in_thread(work)
        wait_until(lambda: len(lock._line) == 1)
    with lock:
        order.append("again")
    thread.join()
    assert order == ["waited", "again"]


def test_those_who_wait_get_it_in_order_and_one_at_a_time() -> None:
    lock, order, inside = FairLock(), [], [0]

    def work(number: int) -> None:
        with lock:
            inside[0] += 1
            assert inside[0] == 1
            time.sleep(0.001)
            inside[0] -= 1
            order.append(number)

    threads = []
    with lock:
        for number in range(8):
            threads.append(in_thread(lambda number=number: work(number)))  # type: ignore[misc]
            wait_until(lambda number=number: len(lock._line) == number + 1)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert order == list(range(8))
    assert not lock.is_held


def test_the_holder_may_take_it_again_and_an_error_gives_it_back() -> None:
    lock = FairLock()
    with pytest.raises(ZeroDivisionError), lock, lock:
        1 / 0  # noqa: B018
    assert not lock.is_held
    taken = []
    in_thread(lambda: taken.append(lock.__enter__())).join()
    assert taken == [None]
    assert lock.is_held


@pytest.mark.parametrize("was_handed_over", [False, True])
def test_one_that_gives_up_waiting_leaves_it_to_the_next(was_handed_over: bool) -> None:
    lock, got = FairLock(), []

    def work() -> None:
        with lock:
            got.append(1)

    ticket = threading.Lock()
    ticket.acquire()
    with lock:
        lock._line.append(ticket)
        thread = in_thread(work)
        wait_until(lambda: len(lock._line) == 2)
        if not was_handed_over:
            lock._give_up(ticket)
    if was_handed_over:
        lock._give_up(ticket)
    thread.join(5)
    assert got == [1]
    assert not lock.is_held
