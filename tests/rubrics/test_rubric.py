"""A rubric turns a rollout into a weighted sum of its functions; what fails is a failure and never a zero."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from verifiers.errors import GraderError, OverlongPromptError, describe
from verifiers.parsers import XMLParser
from verifiers.rubrics import Rubric, cpu_bound
from verifiers.types import State


def step() -> dict[str, Any]:
    return {"prompt": "p", "completion": "c", "reward": None, "advantage": None}


def rollout(completion: Any = "4", answer: str = "4", **fields: Any) -> State:
    row = {"prompt": "2+2?", "answer": answer, "task": "sums", "info": {}, "example_id": 0}
    return State({"input": row, "completion": completion, "trajectory": [step()], "timing": {}, **fields})


def exact(completion, answer):
    return completion == answer


def length(completion):
    return len(completion)


async def later(completion):
    await asyncio.sleep(0)
    return 0.5


def broken(completion):
    raise KeyError("colour")


# --- what the score is made of ------------------------------------------------------------------------------------


def test_the_reward_is_the_weighted_sum_and_weight_zero_is_a_metric() -> None:
    rubric = Rubric(funcs=[exact, length], weights=[1.0, 0.0])
    rubric.add_reward_func(later, weight=0.5)
    rubric.add_metric(functools.partial(length))
    scores = rubric.score_rollout_sync("2+2?", "4", "4", {})
    assert scores == {"exact": 1.0, "length": 1.0, "later": 0.5, "length_2": 1.0, "reward": 1.25}


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-100, 100)), min_size=1, max_size=6))
def test_any_weights_and_scores_add_up(parts: list[tuple[float, float]]) -> None:
    def constant(value: float) -> Any:
        return lambda completion: value

    rubric = Rubric(funcs=[constant(value) for value, _ in parts], weights=[weight for _, weight in parts])
    reward = asyncio.run(rubric.score_alone(rollout())).reward
    assert reward == pytest.approx(sum(value * weight for value, weight in parts), abs=1e-6)


def test_funcs_and_weights_are_the_same_lists_under_both_names() -> None:
    rubric = Rubric(funcs=[exact])
    assert rubric.reward_funcs is rubric.funcs
    assert rubric.reward_weights is rubric.weights
    rubric.add_reward_func(length, 2)
    assert rubric.reward_weights == [1.0, 2.0]
    assert rubric._get_reward_func_names() == ["exact", "length"]


def test_weights_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="2 reward functions but 1 weights"):
        Rubric(funcs=[exact, length], weights=[1.0])


def test_a_parser_and_other_objects_are_injected() -> None:
    def parsed(parser, completion, answer, bonus):
        return bonus if parser.parse_answer(completion) == answer else 0.0

    rubric = Rubric(funcs=[parsed], parser=XMLParser(["answer"]), class_objects={"bonus": 3})
    assert rubric.score_rollout_sync("2+2?", "<answer>4</answer>", "4", {})["reward"] == 3.0


def test_an_object_that_becomes_known_later_reaches_a_function_that_had_a_default() -> None:
    def reward(completion, bonus=1.0):
        return bonus

    rubric = Rubric(funcs=[reward])
    assert rubric.score_rollout_sync("", "x", "", {})["reward"] == 1.0
    rubric.add_class_object("bonus", 2.0)
    assert rubric.score_rollout_sync("", "x", "", {})["reward"] == 2.0


# --- a failure is not a reward ------------------------------------------------------------------------------------


def test_an_exception_is_a_failure_with_its_cause_and_not_zero() -> None:
    state = rollout()
    Rubric(funcs=[length, broken]).score_rollout(state)
    assert state["reward"] is None
    record = describe(state["error"])
    assert record["blame"] == "grader"
    assert record["message"] == "reward 'broken' raised KeyError: 'colour'"
    assert "in broken" in record["traceback"]


@pytest.mark.parametrize("value", [None, float("nan"), "good"])
def test_a_score_that_is_no_finite_number_is_a_failure(value: Any) -> None:
    def odd(completion):
        return value

    with pytest.raises(GraderError, match="'odd' returned"):
        Rubric(funcs=[odd]).score_rollout_sync("", "x", "", {})


def test_an_error_that_would_blame_the_policy_blames_the_grader_when_a_reward_raises_it() -> None:
    def confused(completion):
        raise OverlongPromptError("too long")

    state = rollout()
    Rubric(funcs=[confused]).score_rollout(state)
    assert isinstance(state["error"], GraderError)


def test_a_time_out_that_the_function_raised_itself_keeps_its_message() -> None:
    def asks_a_server(completion):
        raise TimeoutError("grading server: no answer in 3 s")

    with pytest.raises(GraderError, match="no answer in 3 s"):
        Rubric(funcs=[asks_a_server]).score_rollout_sync("", "x", "", {})


def test_a_rollout_that_failed_before_is_left_alone() -> None:
    error = GraderError("down")
    state = rollout(error=error)
    Rubric(funcs=[exact]).score_rollout(state)
    assert state["error"] is error
    assert state.get("reward") is None


# --- where it is written ------------------------------------------------------------------------------------------


def test_a_state_gets_reward_metrics_timing_and_a_reward_for_each_step() -> None:
    state = rollout()
    result = Rubric(funcs=[exact]).score_rollout(state)
    assert result == {"exact": 1.0, "reward": 1.0}
    assert state["reward"] == 1.0
    assert state["metrics"] == {"exact": 1.0}
    assert state["trajectory"][0]["reward"] == 1.0
    assert state["timing"]["scoring_ms"] >= 0.0


def test_a_group_gets_advantages_and_failed_rollouts_neither_count_nor_get_one() -> None:
    def strict(completion):
        if completion == "?":
            raise ValueError("unreadable")
        return float(completion)

    states = [rollout("1"), rollout("0"), rollout("?")]
    Rubric(funcs=[strict]).score_group(states)
    assert [state.get("advantage") for state in states] == [0.5, -0.5, None]
    assert [state["trajectory"][0]["advantage"] for state in states] == [0.5, -0.5, None]


def test_a_group_reward_sees_the_whole_group_and_adds_to_the_others() -> None:
    def longest(completions):
        best = max(map(len, completions))
        return [len(completion) == best for completion in completions]

    states = [rollout("4"), rollout("four")]
    Rubric(funcs=[exact, longest], weights=[1.0, 0.5]).score_group(states)
    assert [state["reward"] for state in states] == [1.0, 0.5]
    assert states[1]["metrics"] == {"exact": 0.0, "longest": 1.0}


class NoNumber:
    """Like a tensor of several elements, it raises an error of its own."""

    def __repr__(self) -> str:
        return "NoNumber"

    def __float__(self) -> float:
        raise RuntimeError("no scalar")


@pytest.mark.parametrize("bad", [1e101, float("nan"), "1.0", None, NoNumber()])
def test_a_group_reward_that_gives_one_rollout_no_score_fails_that_one_only(bad: Any) -> None:
    def ranked(completions: Any) -> list[Any]:
        return [1.0, bad, 0.5]

    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=Rubric(funcs=[ranked]))
    results = env.evaluate(client=vf.FakeClient("x"), model="m", rollouts_per_example=3, use_tqdm=False)
    assert [state["reward"] for state in results.rollouts] == [1.0, None, 0.5]
    told = "raised RuntimeError: no scalar" if isinstance(bad, NoNumber) else "returned"
    assert f"reward 'ranked' {told}" in str(results.failed[0]["error"])


@pytest.mark.parametrize("returned", [{0: 0.7, 1: 0.2}, {0.7, 0.2}, b"\x01\x00"])
def test_a_group_reward_that_returns_a_dict_or_a_set_is_not_scored_by_its_keys_in_any_order(returned: Any) -> None:
    def ranked(completions):
        return returned

    states = [rollout("4"), rollout("5")]
    Rubric([ranked]).score_group(states)
    assert [state["reward"] for state in states] == [None, None]
    assert f"returned a {type(returned).__name__}; it must return a list" in str(states[0]["error"])


def test_a_group_reward_that_never_stops_giving_scores_fails_its_group_and_ends() -> None:
    def same(completions):
        return itertools.repeat(1.0)

    states = [rollout("4"), rollout("5")]
    Rubric([same]).score_group(states)
    assert "returned 2+ scores for 2 rollouts" in str(states[0]["error"])


def test_a_group_reward_of_the_wrong_length_fails_the_group() -> None:
    def forgetful(completions):
        return [1.0]

    states = [rollout(), rollout()]
    Rubric(funcs=[forgetful]).score_group(states)
    assert ["1 scores for 2 rollouts" in str(state["error"]) for state in states] == [True, True]


# --- ways to call it ----------------------------------------------------------------------------------------------


def test_every_form_of_the_call_works_with_and_without_a_loop() -> None:
    rubric = Rubric(funcs=[exact])
    flat = {"exact": 1.0, "reward": 1.0}
    assert rubric.score_rollout("2+2?", "4", "4", {}) == flat
    assert rubric.score_rollout(prompt="2+2?", completion="4", answer="4", state={}) == flat
    assert rubric.score_rollout(rollout(), asyncio.Semaphore(1)) == flat
    state = rollout()
    assert rubric.score_rollout(state=state) == flat
    assert state["reward"] == 1.0

    async def inside() -> None:
        assert await rubric.score_rollout("2+2?", "4", "4", {}) == flat
        assert rubric.score_rollout_sync("2+2?", "4", "4", {}) == flat
        assert rubric.score_rollout("2+2?", "4", "4", {})["reward"] == 1.0
        state = rollout()
        await rubric.score_rollout(state, score_sem=asyncio.Semaphore(1))
        assert state["reward"] == 1.0

    asyncio.run(inside())


def test_loose_fields_win_over_the_state_they_come_with() -> None:
    rubric = Rubric(funcs=[exact])
    state = rollout("5", "4")
    assert rubric.score_rollout_sync(state["prompt"], "4", "4", state)["reward"] == 1.0
    assert rubric.score_rollout_sync(state["prompt"], "5", "4", state)["reward"] == 0.0
    assert state["completion"] == "5"


def test_what_a_function_notes_in_the_state_is_there_afterwards() -> None:
    def noting(completion, state):
        state["seen"] = state.get("seen", 0) + 1
        return 1.0

    rubric = Rubric(funcs=[noting])
    mine: dict[str, Any] = {"turn": 3}
    rubric.score_rollout_sync("p", "c", "a", mine)
    assert mine == {"turn": 3, "seen": 1}
    state = rollout()
    rubric.score_rollout_sync("2+2?", "4", "4", state)
    assert state["seen"] == 1


def test_what_a_function_changes_in_its_arguments_is_neither_scored_by_others_nor_saved(tmp_path: Path) -> None:
    def pops(prompt: Any, completion: Any, answer: Any) -> float:
        prompt.clear(), answer.clear()
        return float(len(completion.pop()["content"]))

    def rewrites(completions: Any, answers: Any) -> list[float]:
        for completion, answer in zip(completions, answers, strict=True):
            completion[-1]["content"] = answer[0]["x"] = "changed"
        return [0.0 for _ in completions]

    def sees(prompt: Any, completion: Any, answer: Any) -> float:
        return float(prompt[-1]["content"] == "q" and completion[-1]["content"] == "long" and answer == [{"x": 1}])

    env = vf.SingleTurnEnv(
        dataset=[{"question": "q", "answer": [{"x": 1}]}], rubric=Rubric([pops, sees, rewrites, sees], [0, 1, 0, 1])
    )
    results = env.evaluate(client=vf.FakeClient("long"), model="m", rollouts_per_example=2, results_path=tmp_path)
    assert results.rewards == [2.0, 2.0]
    saved = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [one["completion"] for one in saved] == [[{"role": "assistant", "content": "long"}]] * 2
    assert [one["answer"] for one in saved] == [[{"x": 1}]] * 2
    assert saved[0]["pops"] == 4.0


def test_one_function_can_be_called_by_hand() -> None:
    rubric = Rubric(funcs=[exact])
    assert rubric._call_reward_func(exact, "2+2?", "4", "4") == 1.0
    assert rubric._call_reward_func(later, completion="x") == 0.5
    with pytest.raises(GraderError, match="broken"):
        rubric._call_reward_func(broken, completion="x")


def test_a_blocking_function_does_not_hold_up_the_loop() -> None:
    def blocks(completion):
        time.sleep(0.2)
        return 1.0

    async def inside() -> None:
        began = time.perf_counter()
        scored = asyncio.gather(*(Rubric(funcs=[blocks]).score_alone(rollout()) for _ in range(10)))
        await asyncio.sleep(0.01)
        assert time.perf_counter() - began < 0.15
        assert [score.reward for score in await scored] == [1.0] * 10
        assert time.perf_counter() - began < 1.5

    asyncio.run(inside())


def test_a_plain_function_that_returns_an_awaitable_is_awaited_every_time() -> None:
    rubric = Rubric(funcs=[lambda completion: later(completion)])

    async def inside() -> list[float]:
        return [(await rubric.score_alone(rollout())).reward for _ in range(6)]

    assert asyncio.run(inside()) == [0.5] * 6


def test_a_cpu_bound_function_runs_in_another_process() -> None:
    import os

    @cpu_bound
    def where(completion):
        import os

        return os.getpid()

    score = Rubric(funcs=[where]).score_rollout_sync("", "x", "", {})
    assert score["reward"] != os.getpid()


# --- subclasses ---------------------------------------------------------------------------------------------------


class Doubling(Rubric):
    async def score_rollout(self, state, score_sem=None):
        await super().score_rollout(state, score_sem)
        state["reward"] *= 2


class Halving(Rubric):
    def score_rollout_sync(self, prompt, completion, answer, state, **kwargs):
        scores = super().score_rollout_sync(prompt, completion, answer, state, **kwargs)
        return {**scores, "reward": scores["reward"] / 2}


def test_a_subclass_may_score_in_its_own_way_and_call_super() -> None:
    state = rollout()
    asyncio.run(Doubling(funcs=[exact]).score_rollout(state))
    assert state["reward"] == 2.0
    assert asyncio.run(Doubling(funcs=[exact]).score_alone(rollout())).reward == 2.0
    states = [rollout(), rollout("5")]
    Doubling(funcs=[exact]).score_group(states)
    assert [state["reward"] for state in states] == [2.0, 0.0]


def test_a_subclass_may_override_the_sync_name_and_the_other_name_follows() -> None:
    rubric = Halving(funcs=[exact])
    assert rubric.score_rollout_sync("2+2?", "4", "4", {})["reward"] == 0.5
    assert rubric.score_rollout("2+2?", "4", "4", {})["reward"] == 0.5
    assert asyncio.run(rubric.score_alone(rollout())).reward == 0.5
    assert rubric.scores_its_own_way
    assert not Rubric(funcs=[exact]).scores_its_own_way


def test_turns_have_the_reward_that_a_subclass_makes_of_what_super_gave() -> None:
    class Doubled(vf.Rubric):
        async def score_rollout(self, state: vf.State) -> None:
            await super().score_rollout(state)
            state["reward"] *= 2

    class Raised(vf.Rubric):
        async def score_group(self, states: list[vf.State], score_sem: Any = None) -> None:
            await super().score_group(states, score_sem)
            for state in states:
                state["reward"] += 1

    def one(completion: Any) -> float:
        return 1.0

    for rubric, reward in ((Doubled([one]), 2.0), (vf.RubricGroup([Doubled([one]), Raised([one])]), 4.0)):
        env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=rubric)
        results = env.evaluate(vf.FakeClient("x"), "m", rollouts_per_example=2, use_tqdm=False)
        assert results["reward"] == [reward, reward]
        assert [step["reward"] for state in results["state"] for step in state["trajectory"]] == [reward, reward]


def test_a_subclass_composes_other_rubrics_with_its_own_logic() -> None:
    class Compositional(Rubric):
        def __init__(self, base_rubrics, logic, **kwargs):
            super().__init__(**kwargs)
            self.base_rubrics, self.logic = base_rubrics, logic

        def score_rollout_sync(self, prompt, completion, answer, state, **kwargs):
            scores = {
                name: rubric.score_rollout_sync(prompt, completion, answer, state, **kwargs)
                for name, rubric in self.base_rubrics.items()
            }
            return self.logic(scores, state)

    def logic(scores, state):
        return {"reward": scores["right"]["reward"] * scores["long"]["length"], "long_length": scores["long"]["length"]}

    rubric = Compositional({"right": Rubric([exact]), "long": Rubric([length])}, logic)
    score = asyncio.run(rubric.score_alone(rollout("four", "four")))
    assert (score.reward, score.metrics) == (4.0, {"long_length": 4.0})
    assert not rubric.is_empty
    assert Rubric().is_empty


def test_a_subclass_may_return_the_state_or_the_score_of_older_releases() -> None:
    class Rewarded(Rubric):
        async def score_rollout(self, state, score_sem=None):
            state["reward"], state["metrics"] = 0.5, {"style": 1}
            return state

    class Scored(Rubric):
        async def score_rollout(self, prompt, completion, answer, state, **kwargs):
            return vf.RolloutScore(reward=0.5, metrics={"style": 1})

    for rubric in (Rewarded(), Scored()):
        score = asyncio.run(rubric.score_alone(rollout()))
        assert (score.error, score.reward, score.metrics) == (None, 0.5, {"style": 1.0})


def test_the_failure_that_super_wrote_into_the_state_stays_the_cause_of_what_a_subclass_returns() -> None:
    def broken(completion: Any) -> float:
        raise RuntimeError("no disk")

    class Returning(Rubric):
        async def score_rollout(self, state):
            return await super().score_rollout(state)

    assert "no disk" in str(asyncio.run(Returning([broken]).score_alone(rollout())).error)


@pytest.mark.parametrize("written", ["judge is down", {"code": 503}, ValueError("judge is down"), vf.ToolError("down")])
def test_whatever_a_subclass_writes_as_the_error_of_a_rollout_fails_that_rollout_alone(written: Any) -> None:
    class Telling(Rubric):
        async def score_rollout(self, state):
            state["reward"], state["error"] = 1.0, written if state["answer"] == "5" else None

    env = vf.SingleTurnEnv(dataset=[{"question": "?", "answer": one} for one in "45"], rubric=Telling())
    results = env.evaluate(vf.FakeClient("x"), "m", use_tqdm=False)
    assert results["reward"] == [1.0]
    error = results.failed[0]["error"]
    assert isinstance(error, vf.GraderError)
    assert str(written) in str(error)


@pytest.mark.parametrize("written", ["judge is down", ValueError("judge is down")])
def test_an_error_that_a_reward_function_writes_into_the_state_fails_that_rollout_alone(written: Any) -> None:
    def telling(state: vf.State) -> float:
        state["error"] = written if state["answer"] == "5" else None
        return 1.0

    env = vf.SingleTurnEnv(dataset=[{"question": "?", "answer": one} for one in "45"], rubric=Rubric([telling]))
    results = env.evaluate(vf.FakeClient("x"), "m", use_tqdm=False)
    assert results["reward"] == [1.0]
    error = results.failed[0]["error"]
    assert isinstance(error, vf.GraderError)
    assert str(written) in str(error)


def test_a_subclass_may_score_a_group_without_a_semaphore_as_in_0_1_10() -> None:
    class Ranked(Rubric):
        async def score_group(self, states):
            await super().score_group(states)
            for rank, state in enumerate(states):
                state["reward"] += rank

    env = vf.SingleTurnEnv(dataset=[{"question": "?", "answer": "x"}], rubric=Ranked([lambda completion: 1.0]))
    results = env.evaluate(vf.FakeClient("x"), "m", rollouts_per_example=2, use_tqdm=False)
    assert results["reward"] == [1.0, 2.0]


@pytest.mark.parametrize("independent_scoring", [False, True])
def test_a_group_reward_beside_a_scoring_of_ones_own_counts_once(independent_scoring: bool) -> None:
    class Doubled(Rubric):
        async def score_rollout(self, state):
            await super().score_rollout(state)
            state["reward"] *= 2

    def together(completions: Any) -> list[float]:
        return [0.5] * len(completions)

    rubric = Doubled([lambda completion: 1.0, together])
    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=rubric)
    options = {"rollouts_per_example": 2, "independent_scoring": independent_scoring, "use_tqdm": False}
    results = env.evaluate(vf.FakeClient("x"), "m", **options)
    assert results["reward"] == [2.5, 2.5]
    assert results["together"] == [0.5, 0.5]
    states = [rollout(), rollout()]
    rubric.score_group(states)
    assert [state["reward"] for state in states] == [2.5, 2.5]


def test_a_subclass_that_scores_a_group_and_gives_one_rollout_no_score_fails_that_one_only() -> None:
    class Ranked(Rubric):
        async def score_group(self, states, score_sem=None):
            for state, reward in zip(states, [1.0, float("nan"), 0.5], strict=True):
                state["reward"] = reward

    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=Ranked())
    results = env.evaluate(vf.FakeClient("x"), "m", rollouts_per_example=3, use_tqdm=False)
    assert [state["reward"] for state in results.rollouts] == [1.0, None, 0.5]


def test_a_subclass_that_raises_fails_the_rollout_and_leaves_no_reward() -> None:
    class Broken(Rubric):
        def score_rollout_sync(self, prompt, completion, answer, state):
            raise RuntimeError("no disk")

    state = rollout()
    Broken().score_group([state])
    assert state["reward"] is None
    assert "Broken.score_rollout_sync raised RuntimeError: no disk" in str(state["error"])


def test_a_subclass_may_set_its_functions_and_weights_by_the_names_of_0_1_5() -> None:
    class Own(Rubric):
        def __init__(self):
            super().__init__()
            self.reward_funcs = [self.one, self.two]

        def one(self, completion):
            return 1.0

        def two(self, completion):
            return 2.0

    rubric = Own()
    assert rubric.score_rollout_sync("", "x", "", {}) == {"one": 1.0, "two": 2.0, "reward": 3.0}
    rubric.reward_weights = [1, 0.5]
    assert rubric.score_rollout_sync("", "x", "", {})["reward"] == 2.0
    with pytest.raises(TypeError, match="anwser"):
        rubric.reward_funcs = [lambda anwser: 1.0]


def test_a_subclass_has_a_logger_of_its_own() -> None:
    assert Doubling().logger.name == "verifiers.rubrics.Doubling"


def test_a_rubric_can_score_from_many_threads_at_once() -> None:
    rubric = Rubric(funcs=[exact, later])
    rewards: list[float] = []
    threads = [
        threading.Thread(target=lambda: rewards.append(rubric.score_rollout_sync("", "4", "4", {})["reward"]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == [1.5] * 8


@pytest.mark.parametrize("number", [0.75, np.float32(0.75), np.float64(0.75)])
@pytest.mark.parametrize("name", ["score_rollout", "score_rollout_sync"])
def test_a_rubric_that_returns_its_reward_as_a_number_scores_by_it_and_its_metrics_are_floats(
    name: str, number: Any
) -> None:
    def score(self: Any, state: State) -> float:
        state["metrics"] = {"is_right": True, "length": 3}
        return number  # type: ignore[no-any-return]

    state = rollout("4")
    made = type("Own", (Rubric,), {name: score})()
    found = asyncio.run(made.score_alone(state))
    assert (found.error, found.reward) == (None, 0.75)
    assert [type(value) for value in found.metrics.values()] == [float, float]
