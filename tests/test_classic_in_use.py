"""What environments and programs of other people, found in public repositories, use of classic 0.1.x."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import verifiers as vf
from tests.support.classic import quiet
from tests.support.tool_calls import call, calling

ROWS = Dataset.from_list([{"question": "2 + 2?", "answer": "4"}])


def play(env: vf.Environment, *replies: Any) -> vf.State:
    (state,) = env.evaluate(vf.FakeClient(list(replies)), **quiet()).rollouts
    return state


def shift(x: int, offset: int) -> int:
    """Add an offset."""
    return x + offset


def test_a_judge_of_ones_own_has_a_client_to_ask_where_none_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByHand(vf.JudgeRubric):
        async def judge(self, prompt, completion, answer, state=None, **kwargs) -> str:
            asked = [{"role": "user", "content": f"Is {completion[-1]['content']} right?"}]
            reply = await self.judge_client.chat.completions.create(model=self.judge_model, messages=asked)
            return reply.choices[0].message.content

    async def judged(judge, prompt, completion, answer, state) -> float:
        return float(await judge(prompt, completion, answer, state) == "yes")

    monkeypatch.setattr("openai.AsyncOpenAI", lambda: vf.FakeClient("yes"))
    assert play(vf.SingleTurnEnv(dataset=ROWS, rubric=ByHand(funcs=[judged])), "4")["reward"] == 1.0
    with vf.FakeServer("yes") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        rubric = vf.JudgeRubric(funcs=[judged])
        assert rubric.judge_client.base_url == server.url
        assert play(vf.SingleTurnEnv(dataset=ROWS, rubric=rubric), "4")["reward"] == 1.0
        assert len(server.requests) == 1


def test_tool_calls_are_read_by_attribute_too_as_before_0_1_9() -> None:
    def called(completion, **kwargs) -> float:
        (made,) = completion[0]["tool_calls"]
        assert made.id == made["id"]
        assert made.model_dump() == made
        return float(made.function.name == made["function"]["name"] == "shift")

    class Watching(vf.ToolEnv):
        def is_completed(self, messages, state, **kwargs):
            said = messages[-1].get("tool_calls") or []
            return any(one.function.name == "shift" for one in said) and "offset" in said[0].function.arguments

    asked = calling(call("shift", {"x": 1, "offset": 2}))
    env = vf.ToolEnv(tools=[shift], dataset=ROWS, rubric=vf.Rubric(funcs=[called]))
    assert play(env, asked, "3")["reward"] == 1.0
    assert len(play(Watching(tools=[shift], dataset=ROWS, rubric=vf.Rubric(funcs=[called])), asked)["trajectory"]) == 1


def test_weights_that_a_rubric_sets_beyond_its_functions_count_for_nothing() -> None:
    class Spare(vf.Rubric):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.reward_funcs = [self.same]
            self.reward_weights = [1.0, 0.2]

        def same(self, completion, answer) -> float:
            return float(completion[-1]["content"] == answer)

    with pytest.warns(UserWarning, match="2 weights for 1 reward functions"):
        assert play(vf.SingleTurnEnv(dataset=ROWS, rubric=Spare()), "4")["reward"] == 1.0


def test_fewer_weights_than_functions_are_refused_in_a_sentence() -> None:
    rubric = vf.Rubric(funcs=[lambda completion: 1.0, lambda answer: 1.0])
    rubric.reward_weights = [1.0]
    with pytest.raises(ValueError, match="2 reward functions but 1 weights; give one for each"):
        play(vf.SingleTurnEnv(dataset=ROWS, rubric=rubric), "4")


def test_names_that_environments_take_from_the_modules_of_0_1_x_are_there() -> None:
    from verifiers.envs.python_env import PythonWorkerState
    from verifiers.envs.sandbox_env import SandboxState
    from verifiers.utils.message_utils import ChatCompletionMessage

    assert SandboxState.__annotations__.keys() == {"ready", "ready_wait_time", "command_execution_times"}
    assert PythonWorkerState.__annotations__.keys() == {"ready", "execution_count", "ready_wait_time"}
    assert ChatCompletionMessage(role="assistant", content="4").content == "4"


@pytest.mark.parametrize(
    "taken", ["import verifiers.v1 as vf", "from verifiers.types import TimeSpan", "from verifiers import Taskset"]
)
def test_an_environment_of_a_later_release_is_told_from_one_whose_package_is_missing(
    tmp_path: Path, taken: str
) -> None:
    folder = tmp_path / "of_later"
    folder.mkdir()
    (folder / "of_later.py").write_text(f"{taken}\ndef load_environment(): ...\n")
    with pytest.raises(ImportError, match=r"'of-later' imports something that verifiers .* 0\.1\.11 or newer"):
        vf.load_environment("of-later", environments_dir=tmp_path)


def test_a_name_of_a_later_release_says_that_it_is_one() -> None:
    with pytest.raises(AttributeError, match=r"'Taskset', which is of the classic package's releases 0\.1\.11"):
        vf.Taskset  # noqa: B018


def test_an_is_completed_of_ones_own_replaces_the_stop_of_a_tool_env() -> None:
    """A puzzle is answered in plain text, in a class that also has tools: a reply without a call does not end it."""

    class Puzzle(vf.ToolEnv):
        async def is_completed(self, state, **kwargs) -> bool:
            return bool(state.get("solved")) or await self.max_turns_reached(state)

        async def env_response(self, messages, state, **kwargs):
            state["solved"] = messages[-1]["content"] == state["answer"]
            return [{"role": "user", "content": "no"}]

    class Asking(Puzzle):
        async def is_completed(self, state, **kwargs) -> bool:
            return await super(Puzzle, self).is_completed(state)

    class Older(Puzzle):
        async def is_completed(self, messages, state, **kwargs) -> bool:
            return bool(state.get("solved"))

        @vf.stop
        async def gave_up(self, state) -> bool:
            return any(step["completion"][-1]["content"] == "never" for step in state["trajectory"])

    def turns(kind: type[vf.ToolEnv], *replies: str, **kwargs: Any) -> tuple[int, str]:
        state = play(kind(tools=[shift], dataset=ROWS, **kwargs), *replies)
        return len(state["trajectory"]), state["stop_condition"]

    assert turns(Puzzle, "1", "4", "so") == (3, "is_completed")  # asked before a turn of the model, as in 0.1.9
    assert turns(Puzzle, "1", max_turns=2) == (2, "max_turns_reached")
    assert turns(Asking, "1", "2", "4") == (1, "no_tools_called")
    assert turns(Older, "1", "2", "4") == (3, "is_completed")
    assert turns(Older, "1", "never") == (2, "gave_up")
    assert turns(Older, "1", max_turns=2) == (2, "max_turns_reached")


def test_scoring_that_a_host_puts_on_the_rubric_of_an_environment_is_used() -> None:
    """A monitor of 0.1.5 wraps both methods, calls the originals by position, and reads reward and metrics."""

    def same(completion, answer, **kwargs) -> float:
        return float(completion[-1]["content"] == answer)

    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[same], weights=[2.0]))
    play_one, score_one, seen = env.rollout, env.rubric.score_rollout, []

    async def rollout(client, model, prompt, answer="", task="default", info=None, sampling_args=None, **kwargs):
        completion, state = await play_one(client, model, prompt, answer, task, info, sampling_args, **kwargs)
        return completion, state

    async def score_rollout(prompt, completion, answer, state, task="default", info=None, **kwargs):
        score = await score_one(prompt, completion, answer, state, task, info, **kwargs)
        seen.append((score.reward, score.metrics))
        return score

    env.rollout, env.rubric.score_rollout = rollout, score_rollout
    state = play(env, "4")
    assert state["error"] is None
    assert (state["reward"], state["metrics"]["same"]) == (2.0, 1.0)
    assert seen == [(2.0, {"same": 1.0})]
