"""The episode loop: whatever happens in it ends up in the state, and every rollout is cleaned up once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import verifiers as vf
from verifiers.rollout import merge_state, split_response

ROWS = [{"question": "2+2?", "answer": "4"}]


def exact(completion: Any, answer: str) -> bool:
    return bool(completion and completion[-1]["content"] == answer)


class Talk(vf.MultiTurnEnv):
    """Says “again” until told to stop, and notes every clean-up."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"dataset": ROWS, "rubric": vf.Rubric([exact]), **kwargs})
        self.cleaned: list[str] = []

    def env_response(self, messages: Any, state: Any) -> Any:
        return "again"

    @vf.cleanup
    def note(self, state: vf.State) -> None:
        self.cleaned.append(state["trajectory_id"])


def play(env: vf.Environment, reply: Any = "4", **kwargs: Any) -> vf.State:
    results = env.evaluate(client=vf.FakeClient(reply), model="m", use_tqdm=False, **kwargs)
    (state,) = results.rollouts
    assert isinstance(state, vf.State)
    return state


# --- an exception in every hook -----------------------------------------------------------------------------------


def raising(name: str, is_async: bool) -> type[Talk]:
    def bad(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(f"in {name}")

    async def bad_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(f"in {name}")

    hook = bad_async if is_async else bad
    hook.__name__ = name
    mark = {"a_stop": vf.stop, "a_cleanup": vf.cleanup}.get(name)
    return type("Bad", (Talk,), {name: mark(hook) if mark else hook})


HOOKS = [
    "initial_state",
    "setup_state",
    "is_completed",
    "a_stop",
    "get_prompt_messages",
    "env_response",
    "get_model_response",
    "add_model_response",
    "add_trajectory_step",
    "render_completion",
    "a_cleanup",
    "rollout",
]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_raises_fails_its_rollout_and_says_where(name: str, is_async: bool) -> None:
    env = raising(name, is_async)(max_turns=2)
    state = play(env)
    error = state["error"]
    assert isinstance(error, vf.HookError)
    assert error.blame == "environment"
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert (state["reward"], state["stop_condition"]) == (None, "has_error")
    assert state["is_completed"] is True
    assert len(env.cleaned) == 1
    (record,) = vf.Results([state]).errors()
    assert f"in {name}" in record["traceback"]
    assert f", in {name}" in record["traceback"] or "raise ZeroDivisionError" in record["traceback"]


def test_a_score_rollout_that_raises_is_the_graders_fault() -> None:
    class Bad(Talk):
        def score_rollout(self, state: vf.State) -> float:
            raise ZeroDivisionError("no score")

    state = play(Bad(max_turns=1))
    assert isinstance(state["error"], vf.GraderError)
    assert state["reward"] is None
    assert state["stop_condition"] == "max_turns_reached"


def test_an_error_of_our_own_keeps_its_class_and_blame() -> None:
    class Down(Talk):
        def env_response(self, messages: Any, state: Any) -> Any:
            raise vf.SandboxError("no sandbox")

    state = play(Down())
    assert type(state["error"]) is vf.SandboxError
    assert state["reward"] is None


def test_what_the_policy_did_wrong_is_scored_and_the_stop_reason_says_so() -> None:
    class Strict(Talk):
        def env_response(self, messages: Any, state: Any) -> Any:
            raise vf.ToolParseError("that is no JSON")

    env = Strict()
    state = play(env)
    assert (state["error"], state["reward"], state["stop_condition"]) == (None, 1.0, "ToolParseError")
    assert len(env.cleaned) == 1


def test_a_policy_error_that_a_hook_wrote_into_the_state_is_scored_too() -> None:
    class Strict(Talk):
        def env_response(self, messages: Any, state: Any) -> Any:
            state["error"] = vf.ToolCallError("misused")
            return "that did not work"

    state = play(Strict())
    assert (state["error"], state["reward"], state["stop_condition"]) == (None, 1.0, "ToolCallError")


@pytest.mark.parametrize("written", [vf.InfraError("down"), ValueError("down"), "down"])
def test_any_other_error_that_a_hook_wrote_into_the_state_fails_the_rollout(written: Any) -> None:
    class Reports(Talk):
        def env_response(self, messages: Any, state: Any) -> Any:
            state["error"] = written
            return "sorry"

    state = play(Reports())
    assert isinstance(state["error"], vf.Error)
    assert "down" in str(state["error"])
    assert state["reward"] is None
    assert "down" in vf.Results([state]).errors()[0]["message"]


def test_an_overflowing_context_truncates_and_is_scored() -> None:
    state = play(Talk(), reply=["4", vf.OverlongPromptError("too long")])
    assert (state["error"], state["stop_condition"], state["is_truncated"]) == (None, "prompt_too_long", True)
    assert state["completion"] == [{"role": "assistant", "content": "4"}]
    assert state["reward"] == 1.0


@pytest.mark.parametrize("error", [vf.RateLimitError("slow down"), vf.DeadlineError("late"), RuntimeError("?")])
def test_an_endpoint_that_fails_fails_the_rollout_and_keeps_what_was_said(error: Exception) -> None:
    env = Talk()
    state = play(env, reply=["4", error])
    assert isinstance(state["error"], vf.ModelError)
    assert state["reward"] is None
    assert state["completion"] == [{"role": "assistant", "content": "4"}]
    assert len(env.cleaned) == 1


def test_the_first_error_is_the_one_that_is_kept() -> None:
    class Twice(Talk):
        def env_response(self, messages: Any, state: Any) -> Any:
            raise KeyError("first")

        @vf.cleanup
        def also(self, state: vf.State) -> None:
            raise KeyError("second")

    state = play(Twice())
    assert "first" in str(state["error"])


def test_every_cleanup_runs_though_one_raises_highest_priority_first() -> None:
    order: list[str] = []

    class Messy(Talk):
        @vf.cleanup(priority=5)
        def early(self, state: vf.State) -> None:
            order.append("early")
            raise OSError("disk")

        @vf.cleanup(priority=-5)
        async def late(self, state: vf.State) -> None:
            order.append("late")

    env = Messy(max_turns=1)
    state = play(env)
    assert order == ["early", "late"]
    assert len(env.cleaned) == 1
    assert "early" in str(state["error"])


# --- cancellation -------------------------------------------------------------------------------------------------


def test_a_cancelled_run_cleans_up_every_rollout_under_way() -> None:
    env = Talk(dataset=[{"question": str(i)} for i in range(20)])

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.evaluate(vf.FakeClient("4", latency_s=60), "m", use_tqdm=False), 0.3)
        assert len(env.cleaned) == 20
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []

    asyncio.run(main())


def test_cancellation_stays_a_cancellation_when_cleaning_up_raises(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Talk):
        @vf.cleanup
        async def broken(self, state: vf.State) -> None:
            raise OSError("sandbox is gone")

    env = Bad()

    async def main() -> None:
        task = asyncio.create_task(env.rollout(env.dataset[0], vf.FakeClient("4", latency_s=60), "m"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(env.cleaned) == 1
    assert "sandbox is gone" in caplog.text


def test_a_rollout_cancelled_inside_a_blocking_hook_does_not_wait_for_it() -> None:
    release = threading.Event()

    class Blocks(Talk):
        def env_response(self, messages: Any, state: Any) -> str:
            release.wait(60)
            return "x"

    env = Blocks()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.rollout(env.dataset[0], vf.FakeClient("4"), "m"), 0.2)

    began = time.perf_counter()
    asyncio.run(main())
    release.set()
    assert time.perf_counter() - began < 10
    assert len(env.cleaned) == 1


# --- what hooks return --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "messages", "update"),
    [
        ("hi", "hi", None),
        (("hi", {"done": True}), "hi", {"done": True}),
        (({"role": "user", "content": "a"}, {"x": 1}), {"role": "user", "content": "a"}, {"x": 1}),
        (
            ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
            ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
            None,
        ),
        (("a", "b"), ("a", "b"), None),
        (None, None, None),
    ],
)
def test_an_answer_is_told_apart_from_the_state_that_comes_with_it(returned: Any, messages: Any, update: Any) -> None:
    assert split_response(returned) == (messages, update)


def test_a_partial_state_is_merged_and_reaches_the_input_fields() -> None:
    state = vf.State(input={"prompt": "p", "answer": "4", "task": "t", "example_id": 0}, turn=1)
    merge_state(state, {"answer": "5", "hints": 2})
    merge_state(state, None)
    merge_state(state, state)
    assert (state["answer"], state["input"]["answer"], state["hints"], state["turn"]) == ("5", "5", 2, 1)


# --- marks --------------------------------------------------------------------------------------------------------


def test_stops_are_asked_by_priority_and_the_first_names_the_reason() -> None:
    asked: list[str] = []

    class Stops(Talk):
        @vf.stop
        def second(self, state: vf.State) -> bool:
            asked.append("second")
            return True

        @vf.stop(priority=10)
        async def first(self, state: vf.State) -> bool:
            asked.append("first")
            return len(state["trajectory"]) >= 1

        @vf.stop(priority=20)
        def never(self, state: vf.State) -> bool:
            return False

    state = play(Stops())
    assert state["stop_condition"] == "second"
    assert asked == ["first", "second"]


def test_a_stop_overridden_without_the_mark_is_none() -> None:
    class Plain(Talk):
        def max_turns_reached(self, state: vf.State) -> bool:  # type: ignore[override]
            raise AssertionError("never asked")

        @vf.stop
        def three(self, state: vf.State) -> bool:
            return len(state["trajectory"]) == 3

    assert play(Plain(max_turns=1))["stop_condition"] == "three"


def test_timing_counts_generation_and_scoring() -> None:
    def slow(completion: Any) -> float:
        time.sleep(0.05)
        return 1.0

    env = Talk(max_turns=1, rubric=vf.Rubric([slow]))
    results = env.evaluate(client=vf.FakeClient("4", latency_s=0.05), model="m", use_tqdm=False)
    timing = results.states[0]["timing"]
    assert timing["generation_ms"] >= 45
    assert timing["scoring_ms"] >= 45
    assert timing["total_ms"] == pytest.approx(timing["generation_ms"] + timing["scoring_ms"])
