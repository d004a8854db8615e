"""Messages, tools and replies as environments for releases 0.1.11 to 0.1.14 construct and read them."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from typing import Any

import msgspec
import pytest

import verifiers as vf
from tests.support.classic import quiet
from tests.support.tool_calls import call, calling
from verifiers.reruns.rescore import rescore
from verifiers.rubrics.shipping import pack_arguments
from verifiers.utils.message_utils import maybe_normalize_messages, normalize_messages
from verifiers.utils.response_utils import parse_response_message, parse_response_tokens
from verifiers.utils.tool_utils import convert_func_to_tool_def

ROWS = [{"question": "2 + 2?", "answer": "4"}]
KINDS = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage, "tool": vf.ToolMessage}


def play(env: vf.Environment, *replies: Any, **kwargs: Any) -> vf.State:
    (state,) = env.evaluate(vf.FakeClient(list(replies) or "4", **kwargs), **quiet()).rollouts
    assert state["error"] is None, state["error"]
    return state


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Guessing(vf.MultiTurnEnv):
    """An environment as it is written for 0.1.12."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        assert isinstance(messages[-1], vf.AssistantMessage)
        is_right = messages[-1].content == state["answer"]
        reply = [vf.UserMessage(content="Correct!" if is_right else "Again.")]
        if is_right:
            state["final_env_response"] = reply
        return reply


# --- what hooks and reward functions are handed -------------------------------------------------------------------


def test_a_reward_that_reads_attributes_of_messages_does_not_score_zero() -> None:
    def exact(completion, answer, **kwargs) -> float:
        text = getattr(completion[-1], "content", "")
        return float(text == answer)

    def said(prompt, state, **kwargs) -> float:
        steps = [step["completion"][0].content for step in state["trajectory"]]
        return float([message.role for message in prompt] == ["system", "user"] and steps == ["4"])

    rubric = vf.Rubric(funcs=[exact, said])
    state = play(vf.SingleTurnEnv(dataset=ROWS, rubric=rubric, system_prompt="Add."), "4")
    assert state["metrics"]["exact"] == state["metrics"]["said"] == 1.0


def test_messages_that_the_environment_and_the_model_make_are_objects_of_their_roles() -> None:
    state = play(Guessing(dataset=ROWS, system_prompt="Guess.", max_turns=5), "3", "4")
    whole = [*state["prompt"], *state["completion"]]
    assert [message.role for message in whole] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert all(type(message) is KINDS[message["role"]] and isinstance(message, dict) for message in whole)
    assert state["completion"][-1].content == "Correct!"
    assert all(type(message) is KINDS[message.role] for message in state["trajectory"][1]["prompt"])


def test_messages_that_hooks_write_as_plain_dicts_are_readable_by_attribute_too() -> None:
    class Rewriting(Guessing):
        async def setup_state(self, state: vf.State) -> None:
            state["prompt"] = [{"role": "user", "content": "1 + 1?"}]
            state["answer"] = "2"

        async def get_prompt_messages(self, state: vf.State) -> Any:
            return [{"role": "user", "content": state["prompt"][0].content}]

        @vf.stop
        async def is_right(self, state: vf.State) -> bool:
            steps = state["trajectory"]
            return bool(steps) and steps[-1]["completion"][0].content == state["answer"]

    state = play(Rewriting(dataset=ROWS, max_turns=5), "2")
    assert state["stop_condition"] == "is_right"
    assert isinstance(state["trajectory"][0]["prompt"][0], vf.UserMessage)


def test_an_own_rollout_that_writes_plain_dicts_is_scored_by_attributes() -> None:
    class Own(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return []

        async def rollout(self, client, model, prompt, answer="", **kwargs):
            response = await self.get_model_response(client, model, prompt)
            return [{"role": "assistant", "content": response.choices[0].message.content}], {}

    def exact(completion, answer) -> float:
        return float(completion[0].content == answer)

    assert play(Own(dataset=ROWS, rubric=vf.Rubric(funcs=[exact])))["reward"] == 1.0


def test_a_saved_rollout_is_scored_again_by_attributes(tmp_path) -> None:
    def exact(completion, answer, state) -> float:
        return float(completion[0].content == state["trajectory"][0]["completion"][0].content == answer)

    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[lambda completion: 0.0]))
    env.evaluate(vf.FakeClient("4"), results_path=tmp_path / "run", **quiet())
    again = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[exact]))
    (record,) = asyncio.run(rescore(again, vf.RunDir.open(tmp_path / "run"))).records()
    assert record["reward"] == 1.0


def test_what_is_saved_and_what_is_sent_are_the_same_plain_messages(tmp_path) -> None:
    seen: list[Any] = []

    def reply(request: Any) -> str:
        seen.append(request.prompt)
        return "4"

    env = Guessing(dataset=ROWS, system_prompt="Guess.", max_turns=5)
    env.evaluate(vf.FakeClient(reply), results_path=tmp_path / "run", **quiet(state_columns=["trajectory"]))
    (line,) = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    saved = json.loads(line)
    assert saved["prompt"] == [{"role": "system", "content": "Guess."}, {"role": "user", "content": "2 + 2?"}]
    assert saved["completion"] == [{"role": "assistant", "content": "4"}, {"role": "user", "content": "Correct!"}]
    assert [type(message) for message in seen[0]] == [dict, dict]  # a chat template sees None as a defined attribute


def test_rows_stay_plain_and_two_rollouts_of_a_row_share_no_message() -> None:
    class Spoiling(Guessing):
        async def setup_state(self, state: vf.State) -> None:
            state["prompt"][0].content += "!"

    rows = [{"prompt": [vf.UserMessage(content=[{"type": "text", "text": "2 + 2?"}])], "answer": "4"}]
    env = vf.SingleTurnEnv(dataset=rows)
    assert type(env.get_dataset()[0]["prompt"][0]) is dict
    spoiling = Spoiling(dataset=ROWS, max_turns=1)
    states = spoiling.evaluate(vf.FakeClient("4"), **quiet(rollouts_per_example=2)).rollouts
    assert [state["prompt"][0].content for state in states] == ["2 + 2?!", "2 + 2?!"]
    assert ROWS == [{"question": "2 + 2?", "answer": "4"}]


# --- the objects themselves ---------------------------------------------------------------------------------------


MESSAGES = [
    vf.SystemMessage(content="Be brief."),
    vf.UserMessage(content=[vf.TextContentPart(text="2 + 2?")]),
    vf.AssistantMessage(tool_calls=[vf.ToolCall(id="call_0", name="add", arguments='{"a": 2, "b": 2}')]),
    vf.ToolMessage(tool_call_id="call_0", content="4", name="add"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.role)
def test_a_message_is_a_dict_that_is_equal_to_a_plain_one_and_survives_copies(message: Any) -> None:
    raw = json.loads(json.dumps(message))
    assert message == raw
    assert raw == message
    assert isinstance(message, dict)
    assert msgspec.json.decode(msgspec.json.encode(message)) == raw == msgspec.to_builtins(message)
    for twin in (pickle.loads(pickle.dumps(message)), copy.deepcopy(message), message.model_copy(deep=True)):
        assert twin == message
        assert type(twin) is type(message)
        assert twin is not message
    assert type(message).model_validate(raw) == message
    assert json.loads(message.model_dump_json(exclude_none=True)) == {k: v for k, v in raw.items() if v is not None}
    assert message.get("role") == message["role"] == message.role


def test_attributes_and_keys_of_a_message_are_the_same() -> None:
    message = vf.UserMessage(content="a")
    message.content = "b"
    message["name"] = "Ada"
    message.extra = [1]
    assert message == {"role": "user", "content": "b", "name": "Ada", "extra": [1]}
    assert message.name == "Ada"
    assert getattr(message, "tool_calls", "none") == "none"
    with pytest.raises(AttributeError, match="tool_calls"):
        message.tool_calls  # noqa: B018
    del message.extra
    assert "extra" not in message
    reply = vf.AssistantMessage(content="4", reasoning_content=None)
    assert reply == {"role": "assistant", "content": "4"}
    assert reply.tool_calls is None
    assert reply.reasoning_content is None
    assert reply.model_dump()["tool_calls"] is None
    assert "tool_calls" not in reply.model_dump(exclude_none=True)
    with pytest.raises(TypeError, match="content"):
        vf.UserMessage()


def test_a_change_of_what_an_attribute_returned_is_a_change_of_the_message() -> None:
    message = vf.UserMessage(content=[{"type": "image_url", "image_url": {"url": "a"}}])
    message.content[0].image_url.url = "b"
    message.content.append({"type": "text", "text": "?"})
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "b"}}, {"type": "text", "text": "?"}]


def test_a_tool_call_is_read_in_the_ways_of_all_releases() -> None:
    state = play(vf.ToolEnv(tools=[add], dataset=ROWS), calling(call("add", {"a": 2, "b": 2})), "4")
    reply, result = state["completion"][:2]
    (made,) = reply.tool_calls
    assert isinstance(made, vf.ToolCall)
    assert isinstance(result, vf.ToolMessage)
    assert made.name == made["name"] == made.get("name") == made.function.name == made["function"]["name"] == "add"
    assert json.loads(made.arguments) == json.loads(made.function.arguments) == {"a": 2, "b": 2}
    assert "name" in made
    assert made.model_dump()["name"] == "add"
    assert made.get("none", 3) == 3
    assert (result.tool_call_id, result.content) == (made.id, "4")
    made.arguments = "{}"
    assert made["function"]["arguments"] == "{}"
    assert json.loads(json.dumps(made)).keys() == {"id", "type", "function"}
    assert reply.model_dump()["tool_calls"][0]["name"] == "add"


def test_tool_calls_that_an_environment_writes_into_a_prompt_are_sent_in_the_form_of_endpoints() -> None:
    seen: list[Any] = []

    class Shown(vf.MultiTurnEnv):
        async def setup_state(self, state: vf.State) -> None:
            asked = vf.AssistantMessage(content=None, tool_calls=[vf.ToolCall(id="1", name="add", arguments="{}")])
            flat = {"role": "assistant", "content": "", "tool_calls": [{"id": "2", "name": "add", "arguments": "{}"}]}
            state["prompt"] = [*state["prompt"], asked, vf.ToolMessage(tool_call_id="1", content="0"), flat]

        async def env_response(self, messages, state, **kwargs):
            return []

    def reply(request: Any) -> str:
        seen.extend(request.prompt)
        return "4"

    env = Shown(dataset=ROWS, max_turns=1)
    env.evaluate(vf.FakeClient(reply), **quiet())
    function = {"name": "add", "arguments": "{}"}
    assert seen[1]["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert seen[3]["tool_calls"] == [{"id": "2", "type": "function", "function": function}]


def test_a_message_can_be_sent_to_a_worker_process_without_what_cannot_be_pickled() -> None:
    message = vf.UserMessage(content="hi", open=lambda: None, gate=(one for one in ()))
    assert "gate" in pack_arguments({"completion": [message]}).left_out[0]


# --- tools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "attribute", "state", "info", "extend", "call"])
def test_tools_of_0_1_11_are_offered_to_the_model(how: str) -> None:
    tool = convert_func_to_tool_def(add)
    flat = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    offered: list[Any] = []

    class Acting(vf.MultiTurnEnv):
        async def setup_state(self, state: vf.State) -> None:
            if how == "state":
                state["tool_defs"] = [tool]
            if how == "extend":
                assert state["tool_defs"] == []
                assert "tool_defs" in state
                state["tool_defs"].extend([tool])

        async def get_model_response(self, state, prompt, client=None, model=None, tool_defs=None, sampling_args=None):
            if how != "call":
                assert (
                    [one.name for one in state["tool_defs"]] == ["add"] == [one.name for one in state.get("tool_defs")]
                )
            return await super().get_model_response(state, prompt, tool_defs=[tool] if how == "call" else tool_defs)

        async def env_response(self, messages, state, **kwargs):
            return []

    def reply(request: Any) -> str:
        offered.append(request.tools)
        return "4"

    rows = [{**ROWS[0], "info": {"tool_defs": [flat]}}] if how == "info" else ROWS
    given: dict[str, Any] = {"tool_defs": [flat]} if how == "argument" else {"tool_defs": []} if how == "extend" else {}
    env = Acting(dataset=rows, max_turns=1, **given)
    if how == "attribute":
        env.tool_defs = [tool]
    (state,) = env.evaluate(vf.FakeClient(reply), **quiet()).rollouts
    assert state["error"] is None, state["error"]
    assert offered == [[{"type": "function", "function": flat}]]
    assert type(offered[0][0]) is dict


def test_tools_that_one_rollout_adds_are_not_those_of_the_next() -> None:
    class Growing(vf.ToolEnv):
        async def setup_state(self, state: vf.State) -> None:
            state["tool_defs"].append(vf.Tool(name="more", description="", parameters={"type": "object"}))

    env = Growing(tools=[add], dataset=ROWS)
    states = env.evaluate(vf.FakeClient("4"), **quiet(rollouts_per_example=2)).rollouts
    assert [[tool.name for tool in state["tool_defs"]] for state in states] == [["add", "more"]] * 2
    assert [tool.name for tool in env.tool_defs] == ["add"]


# --- replies ------------------------------------------------------------------------------------------------------


def test_the_reply_has_a_message_as_from_0_1_11_on() -> None:
    noted: list[Any] = []

    class Reading(Guessing):
        async def add_model_response(self, state, prompt_messages, response) -> None:
            assert response.message.is_truncated is False
            assert response.message.finish_reason == "stop"
            (message,) = await parse_response_message(response)
            tokens = await parse_response_tokens(response, 1)
            noted.append((message, tokens["completion_ids"], len(response.message.tokens.completion_ids) > 0))
            await super().add_model_response(state, prompt_messages, response)

    env = Reading(dataset=ROWS, max_turns=1, rubric=vf.Rubric(funcs=[lambda completion: 0.0]))
    state = play(env, "4", tokens=True)
    assert noted == [({"role": "assistant", "content": "4"}, [], True)]
    assert isinstance(noted[0][0], vf.AssistantMessage)
    assert state["trajectory"][0]["completion"] == [{"role": "assistant", "content": "4"}]
    response = state["trajectory"][0]["response"]
    assert response.message.content == response.choices[0].message.content == "4"
    assert pickle.loads(pickle.dumps(response)).message.content == "4"


def test_a_message_with_fields_of_a_reply_is_kept_as_it_is() -> None:
    class Reading(Guessing):
        async def add_model_response(self, state, prompt_messages, response) -> None:
            assert response.message.finish_reason == "stop"
            await super().add_model_response(state, prompt_messages, response)

    said = {"role": "assistant", "content": "4", "finish_reason": "odd", "refusal": None}
    state = play(Reading(dataset=ROWS, max_turns=1), vf.Completion(message=said, finish_reason="stop"))
    assert state["completion"] == [said]
    message = vf.ResponseMessage(content="4", finish_reason="stop", is_truncated=False)
    twin = pickle.loads(pickle.dumps(message))
    assert (twin, twin.finish_reason, twin.is_truncated) == (message, "stop", False)


def test_a_reply_of_an_overridden_get_model_response_may_be_one_of_0_1_11() -> None:
    class Canned(vf.SingleTurnEnv):
        async def get_model_response(self, state, prompt, **kwargs):
            tokens = vf.ResponseTokens(
                prompt_ids=[1], prompt_mask=[0], completion_ids=[2, 3], completion_mask=[1, 1],
                completion_logprobs=[-0.1, -0.2],
            )  # fmt: skip
            made = vf.ResponseMessage(content="4", finish_reason="length", is_truncated=True, tokens=tokens)
            return vf.Response(id="1", created=0, model="canned", message=made)

    state = play(Canned(dataset=ROWS))
    step = state["trajectory"][0]
    assert state["completion"] == [{"role": "assistant", "content": "4"}]
    assert state["is_truncated"]
    assert step["tokens"]["completion_ids"] == [2, 3]
    assert step["response"].message.content == "4"


def test_messages_are_normalized_as_in_0_1_12() -> None:
    raw = [{"role": "user", "content": "hi"}, vf.AssistantMessage(content="hello")]
    made = maybe_normalize_messages(raw, field_name="prompt")
    assert [type(message) for message in made] == [vf.UserMessage, vf.AssistantMessage]
    assert made == raw
    assert normalize_messages("hi") == [vf.TextMessage(content="hi")]
    with pytest.raises(TypeError, match="prompt has 3"):
        normalize_messages([3], field_name="prompt")  # type: ignore[list-item]


# --- environments and their results -------------------------------------------------------------------------------


def test_the_rollouts_of_a_run_are_its_outputs_too() -> None:
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[lambda completion, answer: 1.0]))
    results = env.evaluate(vf.FakeClient("4"), **quiet(rollouts_per_example=2))
    assert [output["reward"] for output in results["outputs"]] == [1.0, 1.0]
    assert results["outputs"][0]["completion"][0].content == "4"
    assert results["outputs"][0]["example_id"] == 0


def test_a_time_limit_for_rollouts_is_not_ignored_silently() -> None:
    with pytest.warns(UserWarning, match="timeout_seconds does not limit a rollout here"):
        Guessing(dataset=ROWS, timeout_seconds=60.0)


def test_clean_up_methods_of_a_rubric_are_not_ignored_silently() -> None:
    class Holding(vf.Rubric):
        @vf.cleanup
        async def put_away(self, state: vf.State) -> None: ...

    with pytest.warns(UserWarning, match=r"Holding\.put_away is not called"):
        vf.SingleTurnEnv(dataset=ROWS, rubric=vf.RubricGroup([Holding()]))
