"""Answers that end together: each event loop that waits is woken once, and everyone hears of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from verifiers.engine.sequence import Answer, Generated, Seeds, check_tokens, delivery, results_of


def generated(number: int) -> Generated:
    return Generated(prompt_ids=[1], ids=[number], logprobs=[0.0], raw_logprobs=[0.0], finish_reason="stop")


def in_another_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


async def wait_for(answers: Sequence[Answer], give: Callable[[], None]) -> list[Any]:
    """What each of those who wait gets, when another thread gives the answers."""
    waiting = [asyncio.create_task(results_of([answer])) for answer in answers]
    await asyncio.sleep(0)
    in_another_thread(give)
    return await asyncio.gather(*waiting, return_exceptions=True)


def test_a_burst_of_answers_wakes_the_loop_once() -> None:
    answers = [Answer() for _ in range(50)]
    wakes = 0

    def give() -> None:
        with delivery():
            for i, answer in enumerate(answers):
                answer.set_result(generated(i))

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return wake(*args, **kwargs)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        return await wait_for(answers, give)

    assert [one.ids for (one,) in asyncio.run(main())] == [[i] for i in range(50)]
    assert wakes == 1


def test_an_answer_outside_of_a_burst_and_one_that_was_there_already_are_heard_of_too() -> None:
    late, early = Answer(), Answer()
    early.set_result(generated(1))
    got = asyncio.run(wait_for([late, early], lambda: late.set_result(generated(2))))
    assert [one.ids for (one,) in got] == [[2], [1]]


def test_a_failure_reaches_the_one_it_belongs_to() -> None:
    good, bad, gone = Answer(), Answer(), Answer()

    def give() -> None:
        with delivery():
            bad.set_exception(ValueError("no such thing"))
            gone.cancel()
            good.set_result(generated(3))

    (one,), failed, cancelled = asyncio.run(wait_for([good, bad, gone], give))
    assert one.ids == [3]
    assert isinstance(failed, ValueError)
    assert isinstance(cancelled, asyncio.CancelledError)


def test_a_loop_that_is_gone_holds_nobody_up() -> None:
    left, kept = Answer(), Answer()

    async def leave() -> None:
        task = asyncio.create_task(results_of([left]))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())

    def give() -> None:
        with delivery():
            left.set_result(generated(0))
            kept.set_result(generated(1))

    ((one,),) = asyncio.run(wait_for([kept], give))
    assert one.ids == [1]


def test_a_token_that_the_model_does_not_have_is_named_each_time() -> None:
    check_tokens((0, 9), 10)
    for _ in range(2):
        with pytest.raises(ValueError, match="token 10 does not exist: the vocabulary has 10 tokens"):
            check_tokens((0, 10), 10)
    with pytest.raises(ValueError, match="token -1 does not exist"):
        check_tokens((3, -1), 10)


def test_a_prompt_gets_the_same_seeds_whatever_was_asked_between() -> None:
    alone, mixed = Seeds(5), Seeds(5)
    expected = [alone.draw([1, 2, 3]) for _ in range(4)]
    drawn = []
    for i in range(4):
        drawn.append(mixed.draw([1, 2, 3]))
        mixed.draw([4, i])
    assert drawn == expected
    assert len(set(expected)) == 4
