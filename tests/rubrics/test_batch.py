"""Many rollouts at once: columns in, columns out, the same scores as one by one."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.rubrics import Rubric, cpu_bound
from verifiers.types import State


def exact(completion, answer):
    return completion == answer


async def half(completion):
    await asyncio.sleep(0)
    return 0.5


def columns(n: int) -> dict[str, list[Any]]:
    return {
        "prompts": ["2+2?"] * n,
        "completions": [str(i) for i in range(n)],
        "answers": ["1"] * n,
        "states": [{} for _ in range(n)],
    }


def test_columns_in_columns_out() -> None:
    scores = Rubric([exact, half], weights=[1.0, 0.0]).score_rollouts(**columns(3))
    assert scores == {"exact": [0.0, 1.0, 0.0], "half": [0.5, 0.5, 0.5], "reward": [0.0, 1.0, 0.0]}
    assert Rubric([exact]).score_rollouts([], [], [], []) == {"exact": [], "reward": []}


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 prompts but 2 completions"):
        Rubric([exact]).score_rollouts(["", "", ""], ["", ""])


def test_states_can_be_given_instead_and_are_written_into() -> None:
    states = [State(input={"prompt": "", "answer": "1"}, completion=text, trajectory=[]) for text in "12"]
    assert Rubric([exact]).score_rollouts(states)["reward"] == [1.0, 0.0]
    assert [state["reward"] for state in states] == [1.0, 0.0]


@given(st.lists(st.sampled_from(["1", "2", "?"]), max_size=20))
def test_a_batch_and_single_rollouts_agree(completions: list[str]) -> None:
    def strict(completion):
        if completion == "?":
            raise ValueError("unreadable")
        return float(completion)

    rubric = Rubric([strict, exact])
    logging.disable(logging.CRITICAL)
    try:
        batch = rubric.score_rollouts([""] * len(completions), completions, ["1"] * len(completions))["reward"]
    finally:
        logging.disable(logging.NOTSET)
    for completion, reward in zip(completions, batch, strict=True):
        state = State(input={"prompt": "", "answer": "1"}, completion=completion, trajectory=[])
        rubric.score_rollout(state)
        assert state["reward"] == reward


def test_a_failure_is_none_in_its_place_and_the_cause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def strict(completion):
        return 1 / int(completion)

    assert Rubric([strict]).score_rollouts(**columns(3))["reward"] == [None, 1.0, 0.5]
    assert "rollout 0 of the batch could not be scored: reward 'strict' raised ZeroDivisionError" in caplog.text


def test_a_vectorized_function_is_called_once_with_whole_columns() -> None:
    seen = []

    def reward(completion, answer):
        raise AssertionError("not one by one")

    def vectorized(prompts, completions, answers, states):
        seen.append(len(prompts))
        return [len(completion) for completion in completions]

    reward.vectorized = vectorized  # type: ignore[attr-defined]
    assert Rubric([reward]).score_rollouts(**columns(3))["reward"] == [1.0, 1.0, 1.0]
    assert seen == [3]


def test_a_vectorized_function_that_returns_too_few_scores_fails_them_all() -> None:
    def reward(completion): ...

    reward.vectorized = lambda prompts, completions, answers, states: [1.0]  # type: ignore[attr-defined]
    assert Rubric([reward]).score_rollouts(**columns(2))["reward"] == [None, None]


def test_a_group_reward_sees_the_whole_batch() -> None:
    def share(completions):
        return [1 / len(completions)] * len(completions)

    assert Rubric([share]).score_rollouts(**columns(4))["reward"] == [0.25] * 4


def test_cpu_bound_functions_run_side_by_side() -> None:
    @cpu_bound
    def squared(completion):
        return int(completion) ** 2

    assert Rubric([squared]).score_rollouts(**columns(4))["reward"] == [0.0, 1.0, 4.0, 9.0]


def test_a_function_that_blocks_is_not_called_one_after_the_other() -> None:
    def blocks(completion):
        time.sleep(0.1)
        return float(completion)

    began = time.perf_counter()
    assert Rubric([blocks]).score_rollouts(**columns(40))["reward"] == [float(i) for i in range(40)]
    assert time.perf_counter() - began < 2.0


def test_a_plain_function_that_returns_an_awaitable_is_awaited() -> None:
    assert Rubric([lambda completion: half(completion)]).score_rollouts(**columns(5))["reward"] == [0.5] * 5


def test_a_function_with_an_alarm_of_its_own_gets_the_main_thread() -> None:
    def with_alarm(completion):
        try:
            before = signal.signal(signal.SIGALRM, lambda *_: None)
        except ValueError as error:
            raise ValueError("this library does not work in threads") from error
        signal.signal(signal.SIGALRM, before)
        return 1.0

    assert Rubric([with_alarm]).score_rollouts(**columns(5))["reward"] == [1.0] * 5


def test_functions_that_ask_for_states_tasks_or_infos_get_them() -> None:
    def noting(completion, state, task, info):
        state["seen"] = f"{task}:{state['answer']}:{info.get('level')}"
        return 1.0

    given = columns(2) | {"tasks": ["sums", None], "infos": [{"level": 3}, None]}
    assert Rubric([noting]).score_rollouts(**given)["reward"] == [1.0, 1.0]
    assert given["states"] == [{"seen": "sums:1:3"}, {"seen": "default:1:None"}]


def test_what_the_columns_do_not_say_is_read_from_rollouts_own_states() -> None:
    states = [State(input={"prompt": "", "answer": "1"}, completion=text, trajectory=[]) for text in "12"]
    assert Rubric([exact]).score_rollouts(["", ""], ["1", "1"], states=states)["reward"] == [1.0, 1.0]
    assert Rubric([exact]).score_rollouts(["", ""], ["2", "2"], states=states)["reward"] == [0.0, 0.0]
    assert [state["completion"] for state in states] == ["1", "2"]


def test_keyword_only_and_skipped_arguments_arrive_where_they_belong() -> None:
    def keyword_only(*, answer, completion):
        return (completion, answer) == ("0", "1")

    def with_a_gap(completion, threshold=0.5, answer=None):
        return (completion, threshold, answer) == ("0", 0.5, "1")

    def without_any():
        return 1.0

    assert Rubric([keyword_only, with_a_gap, without_any]).score_rollouts(**columns(1))["reward"] == [3.0]
