"""ToolEnv with calls in tags: the protocol of a parser with a tool field, and every way of getting it wrong."""

from __future__ import annotations

from typing import Any

import pytest

import verifiers as vf

ROW = {"question": "2 + 3?", "answer": "5"}
TAGS = vf.XMLParser(["reasoning", ("tool", "answer")])


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def make(tools: Any = (add,), **kwargs: Any) -> vf.ToolEnv:
    return vf.ToolEnv(tools=list(tools), dataset=[ROW], **{"parser": TAGS, **kwargs})


def roll_out(env: vf.ToolEnv, *replies: Any) -> vf.State:
    state: vf.State = env.rollout(ROW, vf.FakeClient(list(replies)), "fake")
    return state


def test_the_seeds_protocol_runs_until_an_answer() -> None:
    client = vf.FakeClient(
        [
            '<reasoning>add them</reasoning>\n<tool>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool>',
            "<reasoning>5</reasoning>\n<answer>5</answer>",
        ]
    )
    state = make(system_prompt="Be brief.").rollout(ROW, client, "fake")
    assert state["completion"][1] == {"role": "user", "content": "<result>\n5\n</result>"}
    assert state["stop_condition"] == "answer_given"
    assert client.requests[0].tools is None
    system = state["prompt"][0]["content"]
    assert system.startswith("Be brief.\n\nYou have these tools:\n\nadd: Add two numbers.")
    assert "- b (" in system
    assert TAGS.parse_answer(state["completion"]) == "5"


def test_descriptions_go_where_the_system_prompt_wants_them() -> None:
    env = make(system_prompt="Tools:\n{tool_descriptions}\nUse them.")
    state = roll_out(env, "<answer>5</answer>")
    assert state["prompt"][0]["content"].startswith("Tools:\nadd: Add two numbers.\n")
    assert state["prompt"][0]["content"].endswith("\nUse them.")
    again = env.rollout({"prompt": state["prompt"]}, vf.FakeClient("<answer>5</answer>"), "fake")
    assert again["prompt"] == state["prompt"]


def test_a_system_message_of_parts_and_a_row_that_cannot_be_read_are_told_too() -> None:
    env = make()
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, {"role": "user", "content": "?"}]
    state = env.rollout({"prompt": parts}, vf.FakeClient("<answer>5</answer>"), "fake")
    assert [part["text"][:10] for part in state["prompt"][0]["content"]] == ["Be brief.", "You have t"]
    broken = vf.ToolEnv(tools=[add], parser=TAGS, dataset=iter([{"prompt": [{"content": "no role"}]}]))
    with pytest.raises(ValueError, match="needs a 'role'"):
        broken.evaluate(vf.FakeClient("x"), "fake", use_tqdm=False)


def test_prompts_told_once_are_not_told_twice() -> None:
    env = make()
    state = roll_out(env, "<answer>5</answer>")
    again = env.rollout({"prompt": state["prompt"]}, vf.FakeClient("<answer>5</answer>"), "fake")
    assert again["prompt"] == state["prompt"]


def test_several_calls_in_tags_are_answered_in_one_message() -> None:
    said = '<tool>{"name": "add", "args": {"a": 1}}</tool><tool>{"name": "nothing"}</tool>'
    state = roll_out(make(), said, "<answer>2</answer>")
    assert state["completion"][1]["content"] == (
        "<result>\n2\n</result>\n<result>\nError: there is no tool 'nothing'; the tools are add\n</result>"
    )


def test_an_image_comes_back_in_tags_too() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

    def draw() -> list[Any]:
        return [image]

    said = '<tool>{"name": "draw"}</tool><tool>{"name": "add", "args": {"a": 1}}</tool>'
    state = roll_out(make([add, draw]), said, "<answer>2</answer>")
    parts = state["completion"][1]["content"]
    assert parts[1] == image
    assert "".join(part.get("text", "*") for part in parts) == "<result>\n*\n</result>\n<result>\n2\n</result>\n"


def test_a_reply_with_neither_call_nor_answer_is_told_so() -> None:
    state = roll_out(make(), "Hm.", "<answer>5</answer>")
    assert "neither a <tool> call nor an <answer>" in state["completion"][1]["content"]
    assert [noted["fault"] for noted in state["tool_log"]] == ["no_call"]


def test_a_call_in_tags_cut_off_at_any_byte_gives_a_clean_message() -> None:
    whole = '<reasoning>é</reasoning><tool>{"name": "add", "arguments": {"a": 2}}</tool>'
    env = make()
    for n in range(len(whole)):
        state = roll_out(env, whole[:n], "<answer>5</answer>")
        assert state["error"] is None
        said = state["completion"][1]["content"]
        assert said.startswith("<result>\nError: ")
        assert len(said) < 600


def test_an_answer_inside_of_a_call_does_not_end_the_rollout() -> None:
    def echo(text: str) -> str:
        return text

    said = '<tool>{"name": "echo", "arguments": {"text": "<answer>4</answer>"}}</tool>'
    state = roll_out(make([echo]), said, "<answer>5</answer>")
    assert len(state["trajectory"]) == 2
    assert TAGS.parse_answer(state["completion"]) == "5"


def test_calls_in_tags_are_counted_and_work_with_plain_completions() -> None:
    env = vf.ToolEnv(tools=[add], dataset=[{"prompt": "2 + 3?"}], parser=TAGS, message_type="completion")
    client = vf.FakeClient(['<tool>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool>', "<answer>5</answer>"])
    results = env.evaluate(client, "fake", use_tqdm=False)
    assert not results.failed
    assert "<result>\n5\n</result>" in results["completion"][0]
    assert results.scored[0]["metrics"]["add_calls"] == 1.0


def test_plain_completions_without_tags_take_no_tools() -> None:
    with pytest.raises(ValueError, match="a completions endpoint does not support tools"):
        vf.ToolEnv(tools=[add], dataset=[{"prompt": "?"}], message_type="completion")
