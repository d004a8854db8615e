"""The tool-test environment: the right calls and no others are rewarded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs: Any) -> Any:
    return vf.load_environment("tool-test", environments_dir=FOLDER, **kwargs)


def reply(calls: list[dict[str, Any]]) -> dict[str, Any]:
    listed = [
        {"id": str(i), "type": "function", "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}}
        for i, c in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def score(env: Any, change: Any) -> tuple[list[float], list[float]]:
    wanted = {row["question"]: row["info"]["wanted"] for row in env.eval_dataset}

    def answer(messages: Any) -> Any:
        return reply(change(wanted[messages[-1]["content"]])) if messages[-1]["role"] == "user" else "done"

    results = env.evaluate(vf.FakeClient(answer), "fake", use_tqdm=False)
    assert not results.failed
    assert not any(fault["fault"] for state in results.scored for fault in state["tool_log"])
    return results["rewards"], results["share_made"]


def test_exactly_the_wanted_calls_score_one_in_any_order():
    env = load(num_eval_examples=30)
    assert score(env, lambda wanted: wanted)[0] == [1.0] * 30
    assert score(env, lambda wanted: wanted[::-1])[0] == [1.0] * 30


def test_what_the_module_shows_as_a_perfect_reply_is_one():
    env = load(num_eval_examples=10)
    module = sys.modules["tool_test"]
    for row in env.eval_dataset:
        state = env.rollout(row, vf.FakeClient(lambda messages, row=row: module.solve(messages, row)), "fake")
        assert env.score_rollout(state)["reward"] == 1.0


def test_a_call_too_many_or_too_few_scores_nothing():
    env = load(num_eval_examples=30)
    rewards, shares = score(env, lambda wanted: [*wanted, {"name": "wait", "arguments": {"minutes": 999}}])
    assert (set(rewards), set(shares)) == ({0.0}, {1.0})
    rewards, shares = score(env, lambda wanted: wanted[1:] or [{"name": "wait", "arguments": {"minutes": 999}}])
    assert set(rewards) == {0.0}
    assert all(share < 1 for share in shares)


def test_what_is_no_call_scores_nothing_and_fails_nothing():
    env = load(num_eval_examples=3)
    broken = reply([])
    broken["tool_calls"] = [{"id": "0", "type": "function", "function": {"name": "wait", "arguments": "{"}}]
    for said in ("no", broken):
        results = env.evaluate(vf.FakeClient(said), "fake", use_tqdm=False)
        assert results["rewards"] == [0.0] * 3


def test_seeds_repeat_and_bad_settings_are_refused():
    assert load(seed=1).dataset["question"] == load(seed=1).dataset["question"]
    assert load(seed=1).dataset["question"] != load(seed=2).dataset["question"]
    env = load(max_calls=1)
    assert set(env.dataset["question"]).isdisjoint(env.eval_dataset["question"])
    with pytest.raises(ValueError, match="max_calls must be at least 1, got 0"):
        load(max_calls=0)


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"minutes": 1' + "0" * 400 + "}", "9" * 5000, "no JSON", "null"])
def test_arguments_that_cannot_be_read_are_wrong_and_no_failure(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": arguments}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}, "done"]
    results = load(num_eval_examples=1).evaluate(vf.FakeClient(said), "fake", use_tqdm=False)
    assert not results.failed
    assert results["rewards"] == [0.0]
