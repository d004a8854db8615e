"""A run that stops as soon as its mean reward is known."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest

import verifiers as vf


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def sums(n: int, share: float = 0.8, seed: int = 0, **settings: Any) -> vf.SingleTurnEnv:
    """Examples of which a share is right, in the order of their ids: the first are all right."""
    rows = [{"question": f"q{i}", "answer": "yes" if i < share * n else "no"} for i in range(n)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]), **settings)


def test_a_run_stops_when_its_mean_is_known_and_says_so(tmp_path: Path) -> None:
    client = vf.FakeClient("yes")
    env = sums(3000)
    results = env.evaluate(client=client, model="m", until=0.1, results_path=tmp_path / "run", use_tqdm=False)
    assert 60 < len(client.requests) == len(results.rollouts) < 400
    about = results.metadata["until"]
    assert about is not None
    assert about["is_reached"]
    found = results.interval()
    assert (found.low, found.high) == (about["low"], about["high"])
    assert found.high - found.low <= 0.2  # type: ignore[operator]
    assert found.low <= 0.8 <= found.high  # type: ignore[operator]
    assert "stopped early: the mean reward is known to ±0.1 after " in str(results)
    assert f"of {3000:,} examples" in str(results)


def test_examples_are_taken_in_a_random_order_that_repeats() -> None:
    asked = []
    for _ in range(2):
        client = vf.FakeClient("yes")
        results = sums(1000).evaluate(client=client, model="m", until=0.15, max_concurrent=1, use_tqdm=False)
        ids = [state["example_id"] for state in results.rollouts]
        assert ids == sorted(ids), "results keep the order of the rows"
        assert max(ids) > 800
        asked.append(ids)
    assert asked[0] == asked[1]


def test_slow_examples_are_waited_for_before_later_ones_count() -> None:
    """Wrong answers take longer; a run that looked at what ends first would stop with too good a mean."""

    class Slow(vf.SingleTurnEnv):
        async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
            if state["answer"] == "no":
                await asyncio.sleep(0.02)
            return state

    rows = [{"question": f"q{i}", "answer": "yes" if i % 5 else "no"} for i in range(600)]
    env = Slow(dataset=rows, rubric=vf.Rubric([right]))
    results = env.evaluate(client=vf.FakeClient("yes"), model="m", until=0.12, max_concurrent=32, use_tqdm=False)
    found = results.interval()
    assert found.low is not None
    assert found.high is not None
    assert len(results.rollouts) < 600
    assert found.low <= 0.8 <= found.high


def test_one_example_that_never_ends_does_not_let_the_others_run_far_ahead() -> None:
    begun: list[int] = []

    class Stuck(vf.SingleTurnEnv):
        async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
            begun.append(state["example_id"])
            if len(begun) == 1:
                for _ in range(2000):
                    await asyncio.sleep(0)
                assert len(begun) < 100
            return state

    rows = [{"question": f"q{i}", "answer": "yes" if i % 2 else "no"} for i in range(1000)]
    env = Stuck(dataset=rows, rubric=vf.Rubric([right]))
    results = env.evaluate(client=vf.FakeClient("yes"), model="m", until=0.15, max_concurrent=8, use_tqdm=False)
    assert not results.failed
    assert len(begun) < 300


def test_begun_examples_are_completed_and_each_has_all_its_rollouts() -> None:
    results = sums(800).evaluate(
        client=vf.FakeClient("yes"), model="m", until=0.15, rollouts_per_example=3, use_tqdm=False
    )
    ids = results["example_id"]
    assert {ids.count(example) for example in set(ids)} == {3}
    assert len(set(ids)) < 800


def test_a_stopped_run_that_is_resumed_begins_nothing_new_until_it_is_asked_for_more(tmp_path: Path) -> None:
    env, client = sums(2000), vf.FakeClient("yes")
    settings: dict[str, Any] = {"client": client, "model": "m", "results_path": tmp_path / "run", "use_tqdm": False}
    first = env.evaluate(until=0.1, **settings)
    asked = len(client.requests)
    again = env.evaluate(until=0.1, resume=True, **settings)
    assert len(client.requests) == asked
    assert str(again) == str(first)
    finer = env.evaluate(until=0.08, resume=True, **settings)
    assert asked < len(client.requests) == len(finer.rollouts) < 2000
    whole = env.evaluate(resume=True, **settings)
    assert len(whole.rollouts) == len(client.requests) == 2000
    assert whole.metadata["until"] is None
    assert "stopped early" not in str(whole)


def test_a_stopped_run_that_is_resumed_tries_what_failed_and_nothing_else(tmp_path: Path) -> None:
    is_down = [True]

    def sometimes(completion: Any, answer: str, state: Any) -> float:
        if is_down[0] and state["example_id"] % 10 == 0:
            raise RuntimeError("the grader is down")
        return right(completion, answer)

    rows = [{"question": f"q{i}", "answer": "yes" if i % 5 else "no"} for i in range(1000)]
    env, client = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([sometimes])), vf.FakeClient("yes")
    settings: dict[str, Any] = {"client": client, "model": "m", "results_path": tmp_path / "run", "use_tqdm": False}
    first = env.evaluate(until=0.1, **settings)
    assert first.failed
    asked, is_down[0] = len(client.requests), False
    again = env.evaluate(until=0.1, resume=True, **settings)
    assert len(client.requests) - asked == len(first.failed)
    assert not again.failed
    assert len(again.rollouts) == len(first.rollouts)


def test_rewards_beyond_their_bounds_stop_the_run_with_a_sentence_and_it_goes_on_with_the_right_ones(
    tmp_path: Path,
) -> None:
    random = Random(0)
    points = {f"q{i}": random.choice([0.0, 3.0]) for i in range(2000)}

    def score(prompt: Any) -> float:
        return points[prompt[-1]["content"]]

    env = vf.SingleTurnEnv(dataset=[{"question": q} for q in points], rubric=vf.Rubric([score]))
    settings: dict[str, Any] = {"client": vf.FakeClient("x"), "model": "m", "results_path": tmp_path / "run"}
    first = env.evaluate(until=0.3, use_tqdm=False, **settings)
    assert len(first.rollouts) < 200
    assert "stopped early: the reward of example " in str(first)
    assert "which were assumed to be 0 and 1; set them with reward_range=(least, most)" in str(first)
    again = env.evaluate(until=0.3, reward_range=(0, 3), resume=True, use_tqdm=False, **settings)
    assert "the mean reward is known to ±0.3 after" in str(again)


def test_a_reward_beyond_its_bounds_is_noticed_though_the_mean_of_its_example_is_not() -> None:
    def points(completion: Any) -> float:
        return float(completion[-1]["content"])

    env = vf.SingleTurnEnv(dataset=[{"question": f"q{i}"} for i in range(300)], rubric=vf.Rubric([points]))
    client = vf.FakeClient(["2", "-1"] * 300)
    results = env.evaluate(
        client=client, model="m", rollouts_per_example=2, until=0.1, max_concurrent=1, use_tqdm=False
    )
    assert "is 2, but early stopping needs rewards within bounds" in str(results)


def test_bounds_come_from_the_weights_of_the_rubric() -> None:
    def polite(completion: Any) -> float:
        return 1.0

    env = sums(3000)
    env.rubric = vf.Rubric([right, polite], weights=[1.0, 0.1])
    results = env.evaluate(client=vf.FakeClient("yes"), model="m", until=0.1, use_tqdm=False)
    assert results.metadata["until"]["bounds"] == [0.0, 1.1]  # type: ignore[index]


def test_few_examples_may_not_be_enough_and_the_report_says_so() -> None:
    results = sums(20).evaluate(client=vf.FakeClient("yes"), model="m", until=0.02, use_tqdm=False)
    assert len(results.rollouts) == 20
    assert "the mean reward is not known to ±0.02 after 20 of 20 examples" in str(results)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"until": -1}, "until=-1 must be a positive number"),
        ({"until": 0.1, "reward_range": (1, 0)}, "the smaller first"),
        ({"reward_range": (0, 1)}, "reward_range needs until"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_asked(
    settings: dict[str, Any], message: str
) -> None:
    client = vf.FakeClient("yes")
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        sums(5).evaluate(client=client, model="m", use_tqdm=False, **settings)
    assert not client.requests
