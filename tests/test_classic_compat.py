"""Environments written for classic 0.1.x run here as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from datasets import Dataset
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion

import verifiers as vf
from tests.support.classic import HostClient, chat_completion, load_arithmetic, openai_mock, quiet

# --- environments in the style of the packages --------------------------------------------------------------------


class HighLow(vf.MultiTurnEnv):
    """Guess a number; the environment says higher or lower, and ends the game on a hit."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cleaned: list[int] = []

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        state["secret"] = int(state["answer"])
        state["guesses"] = []
        return await super().setup_state(state, **kwargs)

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        assert isinstance(messages, list)
        guess = int(messages[-1]["content"])
        state["guesses"].append(guess)
        hint = "higher" if guess < state["secret"] else "lower"
        return [{"role": "user", "content": hint}]

    @vf.stop
    async def found(self, state: vf.State) -> bool:
        if not state["trajectory"]:
            return False
        return int(state["trajectory"][-1]["completion"][-1]["content"]) == state["secret"]

    @vf.stop(priority=10)
    async def gave_up(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and "quit" in state["trajectory"][-1]["completion"][0]["content"]

    @vf.cleanup
    async def put_away(self, state: vf.State) -> None:
        self.cleaned.append(state["example_id"])


def few_turns(completion: vf.Messages, state: vf.State) -> float:
    return 1.0 / len(state["trajectory"])


def high_low(**kwargs: Any) -> HighLow:
    dataset = Dataset.from_list([{"question": "Between 1 and 9.", "answer": "7", "info": {"level": "easy"}}])
    return HighLow(dataset=dataset, rubric=vf.Rubric(funcs=[few_turns]), max_turns=5, **kwargs)


# --- single turn --------------------------------------------------------------------------------------------------


def test_an_environment_of_28_lines_evaluates_awaited_and_plain() -> None:
    env = load_arithmetic()
    client = openai_mock("\\boxed{0}", "\\boxed{2}", "\\boxed{4}", "\\boxed{7}")

    async def main() -> vf.GenerateOutputs:
        return await env.evaluate(client=client, num_examples=-1, rollouts_per_example=1, **quiet())

    results = asyncio.run(main())
    assert results["reward"] == results.reward == results["rewards"] == [1.0, 1.0, 1.0, 0.0]
    assert results["metadata"]["avg_reward"] == 0.75
    assert results["metadata"]["num_examples"] == 4
    assert results["prompt"][1] == [
        {"role": "system", "content": "Put the answer into \\boxed{}."},
        {"role": "user", "content": "1 + 1?"},
    ]
    assert results["completion"][1] == [{"role": "assistant", "content": "\\boxed{2}"}]
    assert results["metrics"]["num_turns"] == [1.0] * 4
    assert results["stop_conditions"] == ["max_turns_reached"] * 4

    assert env.evaluate(openai_mock("\\boxed{2}"), **quiet(num_examples=2))["reward"] == [0.0, 1.0]
    assert asyncio.run(env.evaluate(openai_mock("\\boxed{2}"), **quiet(num_examples=2)))["reward"] == [0.0, 1.0]
    assert env.evaluate_sync(client=openai_mock("\\boxed{2}"), **quiet(num_examples=2))["reward"] == [0.0, 1.0]


def test_every_column_of_classic_is_there() -> None:
    results = load_arithmetic().evaluate(openai_mock("\\boxed{2}"), **quiet(rollouts_per_example=2))
    columns = [
        "prompt",
        "completion",
        "answer",
        "state",
        "task",
        "info",
        "example_id",
        "reward",
        "stop_conditions",
        "is_truncated",
    ]
    assert {name: len(results[name]) for name in columns} == dict.fromkeys(columns, 8)
    assert results["example_id"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert set(results["metrics"]) == {"correct", "format_reward_func", "num_turns"}
    wanted = "env_id env_args model base_url num_examples rollouts_per_example sampling_args date time_ms avg_reward"
    assert set(wanted.split()) <= set(results["metadata"])


def test_rows_without_an_answer_or_info_have_empty_ones_in_the_columns_live_and_saved(tmp_path: Path) -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "?"}])
    for resume in (False, True):  # made, then read from disk
        results = env.evaluate(vf.FakeClient("4"), results_path=tmp_path / "run", resume=resume, **quiet())
        assert (results["answer"], results["info"]) == ([""], [{}])


def test_rows_keep_a_system_prompt_of_their_own_and_few_shot_examples_come_after_it() -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    env = vf.SingleTurnEnv(dataset=Dataset.from_list([{"prompt": own, "answer": ""}]), system_prompt="theirs")
    assert env.get_dataset()[0]["prompt"] == own
    shots = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    env = vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "q", "answer": ""}]), system_prompt="s", few_shot=shots
    )
    assert [message["role"] for message in env.get_dataset()[0]["prompt"]] == ["system", "user", "assistant", "user"]


def test_get_dataset_gives_n_rows_and_shuffles_nothing_in_place() -> None:
    env = load_arithmetic()
    before = [row["question"] for row in env.get_dataset()]
    shuffled = [row["question"] for row in env.get_dataset(seed=7)]
    assert sorted(shuffled) == sorted(before)
    assert shuffled != before
    assert [row["question"] for row in env.get_dataset()] == before
    assert [row["question"] for row in env.get_eval_dataset(n=2)] == before[:2]
    assert len(env.get_dataset(n=100)) == 4
    assert {"prompt", "example_id", "task", "answer"} <= set(env.get_dataset().column_names)
    assert env.get_dataset(n=2)["example_id"] == [0, 1]
    assert env.get_dataset().select(range(2)).to_list()[1]["answer"] == "2"


def test_an_id_that_is_no_number_becomes_src_id() -> None:
    env = vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "q", "answer": "a", "example_id": "x-1"}]))
    row = env.get_dataset()[0]
    assert (row["example_id"], row["src_id"]) == (0, "x-1")


def test_sampling_arguments_reach_the_endpoint_and_the_callers_dict_is_left_alone() -> None:
    client = openai_mock("\\boxed{0}")
    given = {"max_tokens": 16, "temperature": 0.5, "top_p": None, "extra_body": {"min_p": 0.1}}
    before = json.dumps(given)
    load_arithmetic(sampling_args={"seed": 3}).evaluate(client, sampling_args=given, **quiet(num_examples=1))
    request = client.chat.completions.create.call_args.kwargs
    assert request["max_completion_tokens"] == 16
    assert request["temperature"] == 0.5
    assert request["seed"] == 3
    assert request["extra_body"] == {"min_p": 0.1}
    assert "max_tokens" not in request
    assert "top_p" not in request
    assert json.dumps(given) == before


@pytest.mark.parametrize("make", [MagicMock, AsyncMock])
def test_a_bare_mock_is_a_client_too(make: Any) -> None:
    client = make()
    client.chat.completions.create = AsyncMock(return_value=chat_completion("\\boxed{0}"))
    assert load_arithmetic().evaluate(client, **quiet(num_examples=1))["reward"] == [1.0]


def test_a_synchronous_client_object_is_as_good() -> None:
    client = MagicMock(spec=OpenAI)
    client.chat.completions.create = MagicMock(return_value=chat_completion("\\boxed{0}"))
    assert load_arithmetic().evaluate(client, **quiet(num_examples=1))["reward"] == [1.0]


def test_what_the_endpoint_said_comes_back_whole_as_plain_data() -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "?"}])
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    said = chat_completion("4", usage=usage)
    state = env.init_state(env.dataset[0], HostClient(said), "m")
    dumped = env.get_model_response(state, state["prompt"]).model_dump(exclude_none=True)
    assert dumped == said.model_dump(exclude_none=True)
    assert dumped["usage"] == usage
    of_ours = env.get_model_response(state, state["prompt"], client=vf.FakeClient("4")).model_dump()
    assert of_ours["usage"]["total_tokens"] > 0


def test_completions_endpoints_take_and_give_text() -> None:
    client = MagicMock(spec=AsyncOpenAI)
    choice = CompletionChoice(index=0, finish_reason="length", text=" 4", logprobs=None)
    answer = Completion(id="0", created=0, model="m", object="text_completion", choices=[choice])
    client.completions.create = AsyncMock(return_value=answer)

    def exact(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

    dataset = Dataset.from_list([{"prompt": "2+2=", "answer": "4"}])
    env = vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[exact]), message_type="completion")
    results = env.evaluate(client, sampling_args={"max_tokens": 2}, **quiet())
    assert (results["reward"], results["completion"], results["is_truncated"]) == ([1.0], [" 4"], [True])
    assert client.completions.create.call_args.kwargs == {"model": "m", "prompt": "2+2=", "max_tokens": 2}


def test_a_completions_endpoint_takes_no_tools() -> None:
    env = vf.SingleTurnEnv(dataset=[{"prompt": "2+2="}], message_type="completion", oai_tools=[{"type": "function"}])
    (failed,) = env.evaluate(openai_mock("4"), **quiet()).failed
    assert isinstance(failed["error"], vf.ModelError)


def test_info_may_be_json_and_reaches_rewards_and_state() -> None:
    def level(info: dict[str, Any], task: str, state: vf.State) -> float:
        return float(info["level"] == state["info"]["level"] == 3 and task == "sums")

    rows = [{"question": "q", "answer": "", "task": "sums", "info": json.dumps({"level": 3})}]
    env = vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[level]))
    assert env.evaluate(openai_mock("a"), **quiet())["reward"] == [1.0]


def test_multimodal_content_loses_only_the_keys_that_the_data_set_filled_with_none() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:…"}}
    parts = [{"type": "text", "text": "what is this?"}, picture]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": parts}], "answer": "a cat"}])
    client = openai_mock("a cat")
    vf.SingleTurnEnv(dataset=dataset).evaluate(client, **quiet())
    assert client.chat.completions.create.call_args.kwargs["messages"] == [{"role": "user", "content": parts}]


# --- several turns ------------------------------------------------------------------------------------------------


def test_a_game_with_stops_and_cleanup_plays_to_its_end() -> None:
    env = high_low()
    results = env.evaluate(openai_mock("3", "8", "7"), **quiet())
    state = results["state"][0]
    assert state["guesses"] == [3, 8]
    assert [message["content"] for message in state["completion"]] == ["3", "higher", "8", "lower", "7"]
    assert (state["stop_condition"], state["is_completed"], state["error"]) == ("found", True, None)
    assert results["reward"] == [pytest.approx(1 / 3)]
    assert results["metrics"]["num_turns"] == [3.0]
    assert [step["reward"] for step in state["trajectory"]] == [results["reward"][0]] * 3
    assert state["trajectory"][1]["prompt"] == [*state["prompt"], *state["completion"][:2]]
    assert state["info"] == state["input"]["info"] == {"level": "easy"}
    assert env.cleaned == [0]


def test_a_stop_of_higher_priority_is_asked_first() -> None:
    results = high_low().evaluate(openai_mock("quit"), **quiet())
    assert results["stop_conditions"] == ["gave_up"]


def test_the_turn_limit_ends_a_rollout_which_is_scored() -> None:
    results = high_low().evaluate(openai_mock("1"), **quiet())
    assert results["stop_conditions"] == ["max_turns_reached"]
    assert results["reward"] == [0.2]


def test_final_env_response_ends_the_rollout_and_is_part_of_the_completion() -> None:
    class Teacher(vf.MultiTurnEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            done = [{"role": "user", "content": "Right."}]
            state["final_env_response"] = done
            return done

    env = Teacher(dataset=Dataset.from_list([{"question": "q", "answer": ""}]), max_turns=-1)
    state = env.evaluate(openai_mock("a"), **quiet())["state"][0]
    assert state["stop_condition"] == "has_final_env_response"
    assert [message["content"] for message in state["completion"]] == ["a", "Right."]


def test_the_older_form_of_is_completed_may_ask_its_super() -> None:
    class Older(vf.MultiTurnEnv):
        async def is_completed(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> bool:
            if await super().is_completed(messages, state, **kwargs):
                return True
            return "done" in messages[-1]["content"]

        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "and?"}], state

    env = Older(dataset=Dataset.from_list([{"question": "q", "answer": ""}]), max_turns=3)
    assert env.evaluate(openai_mock("a", "b", "done"), **quiet())["state"][0]["turn"] == 3
    assert env.evaluate(openai_mock("a", "done"), **quiet())["state"][0]["turn"] == 2
    assert env.evaluate(openai_mock("a"), **quiet())["stop_conditions"] == ["max_turns_reached"]


def test_hooks_of_a_turn_can_be_overridden_and_call_their_super() -> None:
    class Stepwise(HighLow):
        async def add_trajectory_step(self, state: vf.State, trajectory_step: vf.TrajectoryStep) -> None:
            trajectory_step["reward"] = 0.25
            trajectory_step["extras"]["seen"] = len(state["trajectory"])
            await super().add_trajectory_step(state, trajectory_step)

        async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
            messages = await super().get_prompt_messages(state)
            return [*messages, {"role": "user", "content": "(hurry)"}] if state["trajectory"] else messages

        async def get_model_response(self, state: vf.State, prompt: vf.Messages, **kwargs: Any) -> Any:
            response = await super().get_model_response(state, prompt, **kwargs)
            state.setdefault("ids", []).append(response.id)
            assert response.choices[0].message.content
            return response

        async def render_completion(self, state: vf.State) -> None:
            await super().render_completion(state)
            state["rendered"] = True

    dataset = Dataset.from_list([{"question": "q", "answer": "7"}])
    env = Stepwise(dataset=dataset, rubric=vf.Rubric(funcs=[few_turns]), max_turns=5)
    state = env.evaluate(openai_mock("3", "7"), **quiet())["state"][0]
    assert [step["reward"] for step in state["trajectory"]] == [0.25, 0.25]
    assert [step["extras"] for step in state["trajectory"]] == [{"seen": 0}, {"seen": 1}]
    assert [message["content"] for message in state["completion"]] == ["3", "higher", "(hurry)", "7"]
    assert state["ids"] == ["0", "0"]
    assert state["rendered"] is True


def test_an_environment_with_a_rollout_of_its_own_runs_its_stops_and_its_cleanup_once() -> None:
    class Own(vf.Environment):
        cleaned = 0

        @vf.stop
        async def one_turn(self, state: vf.State) -> bool:
            return len(state["trajectory"]) > 0

        @vf.cleanup
        async def count(self, state: vf.State) -> None:
            type(self).cleaned += 1

        async def rollout(self, input, client, model, sampling_args=None) -> vf.State:
            state = await self.init_state(input, client, model, sampling_args)
            while not await self.is_completed(state):
                response = await self.get_model_response(state, state["prompt"])
                completion = [{"role": "assistant", "content": response.choices[0].message.content}]
                state["trajectory"].append({"prompt": state["prompt"], "completion": completion, "reward": None})
            state["completion"] = completion
            return state

    def said(completion: vf.Messages) -> float:
        return float(completion[-1]["content"] == "hi")

    env = Own(dataset=Dataset.from_list([{"question": "q", "answer": ""}]), rubric=vf.Rubric(funcs=[said]))
    results = env.evaluate(openai_mock("hi"), **quiet(rollouts_per_example=2))
    assert results.failed == []
    assert results["reward"] == [1.0, 1.0]
    assert results["stop_conditions"] == ["one_turn"] * 2
    assert Own.cleaned == 2


def test_teardown_runs_once_when_the_environment_is_closed() -> None:
    class Held(HighLow):
        closed = 0

        @vf.teardown
        async def let_go(self) -> None:
            type(self).closed += 1

    Held(dataset=Dataset.from_list([{"question": "q", "answer": "7"}])).close()
    assert Held.closed == 1


def test_what_the_prompt_overflows_is_scored_and_says_why_it_ended() -> None:
    client = openai_mock("1")
    error = RuntimeError("This model's maximum context length is 10 tokens")
    client.chat.completions.create.side_effect = [chat_completion("1"), error]
    results = high_low().evaluate(client, **quiet())
    assert results["stop_conditions"] == ["prompt_too_long"]
    assert results["is_truncated"] == [True]
    assert results["reward"] == [1.0]


# --- rubrics ------------------------------------------------------------------------------------------------------


def state_with(text: str, answer: str = "4", **fields: Any) -> vf.State:
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": answer, "task": "t", "example_id": 0}
    completion = [{"role": "assistant", "content": text}]
    step = {"prompt": row["prompt"], "completion": completion, "reward": None, "advantage": None}
    timing = {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0}
    return vf.State(input=row, completion=completion, trajectory=[step], timing=timing, **fields)


def exact(completion: vf.Messages, answer: str) -> float:
    return 1.0 if completion[-1]["content"] == answer else 0.0


async def length(completion: vf.Messages, **kwargs: Any) -> int:
    return len(completion[-1]["content"])


def rank(completions: list[vf.Messages], answers: list[str]) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [sorted(lengths).index(n) / 10 for n in lengths]


@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_host_scores_one_state_or_a_group_with_a_semaphore_of_its_own(as_keyword: bool) -> None:
    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.0])

    async def main() -> None:
        sem = asyncio.Semaphore(2)
        one, two, three = state_with("4"), state_with("5"), state_with("6")
        if as_keyword:
            await rubric.score_rollout(state=one, score_sem=sem)
            await rubric.score_group(states=[two, three], score_sem=sem)
        else:
            await rubric.score_rollout(one, sem)
            await rubric.score_group([two, three], sem)
        assert (one["reward"], one["metrics"]) == (1.0, {"exact": 1.0, "length": 1.0})
        assert (two["reward"], two["advantage"]) == (0.0, 0.0)
        assert one["trajectory"][0]["reward"] == 1.0

    asyncio.run(main())


def test_a_rubric_with_a_score_rollout_of_its_own_may_call_its_super() -> None:
    class Generous(vf.Rubric):
        async def score_rollout(self, state: vf.State, score_sem: Any) -> None:
            await super().score_rollout(state, score_sem)
            state["reward"] += 0.5
            state["metrics"]["bonus"] = 0.5

    env = vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "q", "answer": "4"}]), rubric=Generous(funcs=[exact])
    )
    results = env.evaluate(openai_mock("4"), **quiet())
    assert results.failed == []
    assert results["reward"] == [1.5]
    assert results["metrics"]["bonus"] == [0.5]
    assert results["metrics"]["exact"] == [1.0]


def test_a_rubric_with_a_score_group_of_its_own_is_asked_with_the_whole_group() -> None:
    class Winner(vf.Rubric):
        async def score_group(self, states: list[vf.State], score_sem: Any) -> None:
            await super().score_group(states, score_sem)
            best = max(states, key=lambda state: state["metrics"]["length"])
            for state in states:
                state["reward"] = float(state is best)

    dataset = Dataset.from_list([{"question": "q", "answer": "4"}])
    env = vf.SingleTurnEnv(dataset=dataset, rubric=Winner(funcs=[length]))
    results = env.evaluate(openai_mock("a", "bbb", "cc"), **quiet(rollouts_per_example=3))
    assert results.failed == []
    assert sorted(results["reward"]) == [0.0, 0.0, 1.0]
    assert results["metrics"]["length"][results["reward"].index(1.0)] == 3.0


def test_a_host_may_put_a_score_group_of_its_own_on_the_rubric() -> None:
    async def all_right(states: list[vf.State], score_sem: Any = None) -> None:
        for state in states:
            state["reward"], state["metrics"] = 1.0, {}

    env = load_arithmetic()
    env.rubric.score_group = all_right
    assert env.evaluate(openai_mock("?"), **quiet())["reward"] == [1.0] * 4


def test_group_rewards_are_told_by_their_plural_names() -> None:
    env = vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "q", "answer": "4"}]), rubric=vf.Rubric(funcs=[exact, rank])
    )
    results = env.evaluate(openai_mock("4", "aa", "bbb"), **quiet(rollouts_per_example=3))
    assert sorted(results["reward"]) == [pytest.approx(0.1), pytest.approx(0.2), 1.0]
    advantages = [state["advantage"] for state in results["state"]]
    assert sum(advantages) == pytest.approx(0.0)
    assert max(advantages) > 0


def test_a_rubric_group_adds_up_and_lists_its_functions() -> None:
    parser = vf.XMLParser(["think", "answer"], answer_field="answer")

    def solved(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
        return float(parser.parse_answer(completion) == answer)

    group = vf.RubricGroup(
        rubrics=[
            vf.Rubric(funcs=[solved], parser=parser),
            vf.Rubric(funcs=[parser.get_format_reward_func()], weights=[0.5], parser=parser),
        ]
    )
    assert group._get_reward_func_names() == ["solved", "format_reward_func"]
    assert group._get_reward_weights() == [1.0, 0.5]
    env = vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "q", "answer": "4"}]), parser=parser, rubric=group)
    results = env.evaluate(openai_mock("<think>\nhm\n</think>\n<answer>\n4\n</answer>"), **quiet())
    assert results["reward"] == [1.5]
    assert results["metrics"]["solved"] == [1.0]


def test_a_rubric_that_an_environment_adds_scores_as_well() -> None:
    env = load_arithmetic()
    env.add_rubric(vf.Rubric(funcs=[length], weights=[0.0]))
    results = env.evaluate(openai_mock("\\boxed{0}"), **quiet(num_examples=1))
    assert results["reward"] == [1.0]
    assert results["metrics"]["length"] == [9.0]


def test_a_judge_answers_once_for_a_rollout() -> None:
    judge_client = MagicMock(spec=AsyncOpenAI)
    judge_client.chat.completions.create = AsyncMock(return_value=chat_completion("yes"))
    rubric = vf.JudgeRubric(
        judge_client=judge_client, judge_model="judge", judge_sampling_args={"max_tokens": 3, "temperature": None}
    )

    async def judged(judge, prompt, completion, answer, state, **kwargs) -> float:
        return 1.0 if "yes" in (await judge(prompt, completion, answer, state)).lower() else 0.0

    async def judged_again(judge, prompt, completion, answer, state) -> float:
        return float(await judge(prompt, completion, answer, state) == "yes")

    rubric.add_reward_func(judged, weight=1.0)
    rubric.add_reward_func(judged_again, weight=0.0)
    env = vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "2+2?", "answer": "4"}]), rubric=rubric)
    results = env.evaluate(openai_mock("four"), **quiet())
    assert results.failed == []
    assert results["reward"] == [1.0]
    assert judge_client.chat.completions.create.await_count == 1
    request = judge_client.chat.completions.create.call_args.kwargs
    assert request["model"] == "judge"
    assert request["max_completion_tokens"] == 3
    assert "temperature" not in request
    assert all(word in request["messages"][0]["content"] for word in ("2+2?", "four", "4"))
    assert list(results["state"][0]["judge_response"].values()) == ["yes"]


def test_a_reward_that_raises_is_a_failure_and_no_zero() -> None:
    def broken(completion: vf.Messages, answer: str) -> float:
        if answer == "2":
            raise KeyError("no such thing")
        return 1.0

    env = vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "q", "answer": str(i)} for i in range(4)]),
        rubric=vf.Rubric(funcs=[broken]),
    )
    results = env.evaluate(openai_mock("x"), **quiet())
    assert results["reward"] == [1.0, 1.0, 1.0]
    assert results["metadata"]["avg_reward"] == 1.0
    assert results["example_id"] == [0, 1, 3]
    (failed,) = results.failed
    assert failed["example_id"] == 2
    assert failed["reward"] is None
    assert isinstance(failed["error"], vf.GraderError)


# --- groups of environments ---------------------------------------------------------------------------------------


def test_an_env_group_routes_by_task_and_numbers_its_rows_anew() -> None:
    group = vf.EnvGroup(envs=[load_arithmetic(), high_low()], env_names=["sums", "game"])
    rows = group.get_dataset()
    assert rows["task"] == ["sums"] * 4 + ["game"]
    assert rows["example_id"] == [0, 1, 2, 3, 4]
    assert group.get_env_for_task("game") is group.env_map["game"]

    def answer(request: dict[str, Any]) -> ChatCompletion:
        return chat_completion("7" if "Between" in request["messages"][0]["content"] else "\\boxed{0}")

    results = group.evaluate(HostClient(answer), **quiet())
    assert results["task"] == ["sums"] * 4 + ["game"]
    assert results["reward"] == [1.0, 0.0, 0.0, 0.0, 1.0]


# --- packages -----------------------------------------------------------------------------------------------------

PACKAGE = """
import verifiers as vf
from datasets import Dataset


def load_environment(n: int = 2, **kwargs) -> vf.Environment:
    dataset = Dataset.from_list([{"question": f"{i}?", "answer": str(i)} for i in range(n)])

    def same(completion, answer, **kwargs) -> float:
        return 1.0 if completion[-1]["content"] == answer else 0.0

    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[same]), **kwargs)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "environments" / "echo_env"
    folder.mkdir(parents=True)
    (folder / "echo_env.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_package_loads_by_its_id_with_its_arguments(package: Path) -> None:
    env = vf.load_environment("someone/echo-env", n=3)
    assert (env.env_id, env.env_args, len(env.get_dataset())) == ("echo-env", {"n": 3}, 3)
    assert env.evaluate(openai_mock("1"), **quiet())["reward"] == [0.0, 1.0, 0.0]
