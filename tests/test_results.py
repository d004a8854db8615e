"""Finished rollouts as columns, honest means and a report; and from disk they come back as they were."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from verifiers.envs.states import restored_state
from verifiers.store import RunDir, encode, to_record
from verifiers.store.comparing import COLUMNS, Side


def scored(example: int, reward: float | None, **metrics: float) -> vf.State:
    row = {"prompt": f"q{example}", "answer": "a", "task": "t", "info": {"n": example}, "example_id": example}
    return vf.State(input=row, completion=f"c{example}", reward=reward, metrics=metrics, error=None, trajectory=[])


def failed(example: int, error: Exception) -> vf.State:
    state = scored(example, None)
    state["error"] = error
    return state


def test_results_unpack_index_and_have_attributes_that_are_the_same_thing() -> None:
    results = vf.Results([scored(0, 1.0, exact=1.0), scored(1, 0.0, exact=0.0)], {"model": "m"})
    prompts, completions, rewards = results
    assert prompts == results["prompts"] == results["prompt"] == results.prompt == results.prompts == ["q0", "q1"]
    assert completions == results["completion"] == results.completions == ["c0", "c1"]
    assert rewards == results["reward"] == results.rewards == [1.0, 0.0]
    assert results["states"] == results.state == results.scored
    assert results["answers"] == results.answer == ["a", "a"]
    assert results["infos"] == results.info == [{"n": 0}, {"n": 1}]
    assert results["task"] == results.tasks == ["t", "t"]
    assert results["metrics"] == results.metrics == {"exact": [1.0, 0.0]}
    assert results["exact"] == results.exact == [1.0, 0.0]
    assert results["metadata"] == results.metadata == {"model": "m"}
    assert len(results) == 2
    assert set(results.keys()) >= {"prompt", "exact", "metadata"}
    assert dict(results.items())["reward"] == [1.0, 0.0]


@pytest.mark.parametrize(
    "name", ["reward", "rewards", "answer", "task", "state", "metrics", "metadata", "is_truncated"]
)
def test_a_reward_function_that_is_called_like_a_column_is_a_metric_all_the_same(name: str, tmp_path: Path) -> None:
    def function(completion: Any) -> float:
        return 1.0

    function.__name__ = name
    rubric = vf.Rubric([function, exact], weights=[2.0, 1.0])
    env = vf.SingleTurnEnv(dataset=[{"question": "?", "answer": "x"}] * 3, rubric=rubric)
    settings = {"client": vf.FakeClient("x"), "model": "m", "results_path": tmp_path / "run", "use_tqdm": False}
    for results in (env.evaluate(**settings), env.evaluate(**settings, resume=True)):
        assert results.mean_reward == 3.0
        assert results[f"{name}()"] == results["metrics"][name] == [1.0] * 3
        assert results.metadata["avg_metrics"] == {f"{name}()": 1.0, "exact": 1.0, "num_turns": 1.0}
        assert len(set(results.keys())) == len(results.keys())
        assert f"\n{name}()" in str(results)
        assert f">{name}()<" in results._repr_html_()
    side = Side.of(RunDir.open(tmp_path / "run").records(COLUMNS))
    assert side.scores["reward"] == {key: [3.0] for key in range(3)}
    assert side.scores[f"{name}()"] == {key: [1.0] for key in range(3)}


def exact(completion: Any, answer: str) -> bool:
    return bool(completion[-1]["content"] == answer)


def test_a_column_that_is_not_there_is_an_error_that_names_the_ones_that_are() -> None:
    results = vf.Results([scored(0, 1.0)])
    with pytest.raises(KeyError, match=r"'rewrd'.*prompt, completion"):
        results["rewrd"]
    with pytest.raises(AttributeError, match="rewrd"):
        _ = results.rewrd
    with pytest.raises(TypeError, match="by column"):
        results[0]  # type: ignore[index]
    assert results.get("rewrd", 7) == 7
    assert "reward" in results
    assert "rewards" in results
    assert "rewrd" not in results


def test_failed_rollouts_are_counted_and_are_in_no_column_and_no_mean() -> None:
    results = vf.Results([scored(0, 1.0), failed(1, vf.JudgeError("no score")), scored(2, 0.5)])
    assert results["rewards"] == [1.0, 0.5]
    assert results["example_id"] == [0, 2]
    assert results.mean_reward == 0.75
    assert [s["example_id"] for s in results.rollouts] == [0, 1, 2]
    assert [s["example_id"] for s in results.failed] == [1]
    assert results.causes == {"JudgeError: no score": 1}
    assert sum(results["rewards"]) / len(results["rewards"]) == results.mean_reward


def test_errors_are_listed_with_their_cause_and_traceback() -> None:
    error = vf.GraderError("reward 'f' raised KeyError: 'x'")
    error.__cause__ = KeyError("x")
    (record,) = vf.Results([failed(3, error)]).errors()
    assert (record["example_id"], record["type"], record["blame"]) == (3, "GraderError", "grader")
    assert record["cause"] == "KeyError: 'x'"
    assert "KeyError: 'x'" in record["traceback"]


def test_the_report_says_how_many_how_good_how_sure_and_at_what_cost() -> None:
    states = [scored(i, float(i % 2), exact=float(i % 2)) for i in range(20)]
    for state in states:
        state["usage"] = vf.Usage(prompt_tokens=1000, completion_tokens=10, cost_usd=0.25)
    states.append(failed(20, vf.ServerError("down\nwith a second line")))
    text = str(vf.Results(states, {"path_to_save": "/tmp/run"}))
    assert "21 rollouts of 21 examples, 1 failed" in text
    assert "1 × ServerError: down" in text
    assert "second line" not in text
    assert "reward  0.500  [" in text
    assert "exact   0.500  [" in text
    assert "20,000 prompt + 200 completion, $5.0000" in text
    assert "/tmp/run" in text


@pytest.mark.parametrize("states", [[], [failed(0, vf.ServerError(""))], [scored(0, None)], [scored(0, 1.0)]])
def test_a_report_of_little_or_nothing_does_not_break(states: list[vf.State]) -> None:
    results = vf.Results(states)
    assert f"{len(states)} rollout" in str(results)
    assert results.mean_reward in (None, 1.0)
    assert repr(results).startswith("Results(")


def test_metrics_that_only_some_rollouts_have_are_missing_for_the_others_and_not_zero() -> None:
    results = vf.Results([scored(0, 1.0, a=1.0), scored(1, 1.0, b=0.5)])
    assert results.metrics == {"a": [1.0, None], "b": [None, 0.5]}
    assert results.interval("a").mean == 1.0


def test_tokens_of_failed_rollouts_were_paid_for_too() -> None:
    one, two = scored(0, 1.0), failed(1, vf.ServerError("x"))
    one["usage"] = two["usage"] = vf.Usage(prompt_tokens=3, completion_tokens=2)
    assert vf.Results([one, two]).usage == vf.Usage(prompt_tokens=6, completion_tokens=4)


def test_the_report_says_what_failed_rollouts_could_make_of_the_mean() -> None:
    results = vf.Results(
        [scored(0, 1.0), failed(0, vf.ServerError("x")), scored(1, 0.0), failed(2, vf.ServerError("x"))]
    )
    assert results.mean_reward == 0.5
    assert results.mean_with_failures == pytest.approx((0.5 / 3, 2 / 3))
    assert "had these been scored, the mean reward could be anything from 0.167 to 0.667" in str(results)
    assert "had these" not in str(vf.Results([scored(0, 1.0)]))


def test_every_example_weighs_the_same_in_the_mean() -> None:
    assert vf.Results([scored(0, 1.0), scored(0, 1.0), scored(0, 1.0), scored(1, 0.0)]).mean_reward == 0.5


# --- the state ----------------------------------------------------------------------------------------------------


def test_a_state_forwards_its_input_fields_both_ways() -> None:
    state = scored(4, None)
    assert (state["prompt"], state.get("answer"), "info" in state, state["example_id"]) == ("q4", "a", True, 4)
    state["answer"] = "b"
    assert state["input"]["answer"] == "b"
    assert state.get("nothing", 1) == 1
    with pytest.raises(KeyError):
        state["nothing"]
    bare = vf.State(answer="x")
    assert bare["answer"] == "x"
    assert "prompt" not in bare


# --- to disk and back ---------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
finite = st.floats(-1e6, 1e6)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}), max_size=3
)


@st.composite
def states(draw: st.DrawFn) -> vf.State:
    row = {
        "prompt": draw(messages | st.text()),
        "answer": draw(st.text()),
        "task": draw(st.text()),
        "info": draw(st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
        "example_id": draw(st.integers(0, 10**9) | st.text(min_size=1)),
    }
    usage = st.builds(vf.Usage, prompt_tokens=st.integers(0, 10**6), completion_tokens=st.integers(0, 10**6))
    return vf.State(
        input=row,
        completion=draw(messages | st.text()),
        reward=draw(finite),
        metrics=draw(st.dictionaries(st.sampled_from(["exact", "num_turns", "style"]), finite, max_size=3)),
        timing={name: draw(st.floats(1e-6, 1e6)) for name in ("generation_ms", "scoring_ms", "total_ms")},
        stop_condition=draw(st.none() | st.text()),
        is_truncated=draw(st.booleans()),
        error=None,
        usage=draw(st.none() | usage),
        trajectory=[],
        hints=draw(json_values),
    )


@given(states(), st.integers(0, 100))
def test_a_rollout_read_back_from_disk_makes_the_same_record_again(state: vf.State, rollout: int) -> None:
    import msgspec

    record = to_record(state, rollout=rollout, state_columns=("hints",))
    line = encode(record)
    back = restored_state(msgspec.json.decode(line), dict(state["input"]))
    again = to_record(back, rollout=rollout, state_columns=("hints",))
    assert encode(again) == line
    assert back.get("example_id") == state.get("example_id")
    assert back["usage"] == state["usage"]
    assert (back["reward"], back["metrics"], back["stop_condition"]) == (
        state["reward"],
        state["metrics"],
        state["stop_condition"],
    )


def test_a_saved_run_read_back_reports_the_same(tmp_path: Any) -> None:
    def reward(completion: Any) -> float:
        return float(completion[-1]["content"])

    env = vf.SingleTurnEnv(dataset=[{"question": q} for q in ("1", "0.5", "bad")], rubric=vf.Rubric([reward]))
    client = vf.FakeClient(lambda messages: messages[-1]["content"])
    first = env.evaluate(client=client, model="m", results_path=tmp_path / "run", use_tqdm=False)
    asked = len(client.requests)
    second = env.evaluate(client=client, model="m", results_path=tmp_path / "run", resume=True, use_tqdm=False)
    assert len(client.requests) == asked + 1  # the failed one only
    assert first["rewards"] == second["rewards"] == [1.0, 0.5]
    reports = [[line for line in str(one).splitlines() if not line.startswith("tokens:")] for one in (first, second)]
    assert reports[0] == reports[1]
    assert second.usage.total_tokens > first.usage.total_tokens  # the failed one was paid for twice
    assert first.causes == second.causes


def test_results_warn_of_nothing_when_shown() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "2 rollouts of 2 examples, 0 failed" in str(vf.Results([scored(0, 1.0), scored(1, 1.0)]))


def test_a_cost_is_shown_only_where_the_price_of_all_tokens_is_known() -> None:
    priced = vf.Usage(prompt_tokens=10, completion_tokens=1, cost_usd=0.25)
    unpriced = vf.Usage(prompt_tokens=10, completion_tokens=1)
    assert (priced + priced + vf.Usage()).cost_usd == 0.5
    assert (vf.Usage() + vf.Usage()).cost_usd is None
    assert (priced + unpriced).cost_usd is None
    assert (unpriced + priced + priced).cost_usd is None


def test_the_tokens_of_rollouts_that_report_none_are_not_shown_as_zero() -> None:
    def reply(request: Any) -> vf.Completion:
        usage = vf.Usage(prompt_tokens=10, completion_tokens=2) if request.prompt[-1]["content"] == "a" else None
        return vf.Completion(message={"role": "assistant", "content": "x"}, usage=usage)

    class Silent:
        async def complete(self, request: Any) -> vf.Completion:
            return reply(request)

    rows = [{"question": question, "answer": ""} for question in "aab"]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
    shown = str(env.evaluate(client=Silent(), model="m", use_tqdm=False))
    assert "tokens: 20 prompt + 4 completion, without 1 of the rollouts, whose tokens were not reported" in shown
