"""ToolRubric: how often each tool was called, however the calls were written."""

from __future__ import annotations

import verifiers as vf
from tests.support.tool_calls import call, calling


def add(a: int, b: int) -> int:
    return a + b


def look(where: str) -> str:
    return where


TURNS = [
    calling(call("add"), call("look")),
    {"role": "tool", "content": "3", "tool_call_id": "x"},
    calling(call("add", "not json"), call("nothing")),
    {"role": "assistant", "content": "done"},
]


def test_calls_are_counted_by_tool_and_count_for_nothing() -> None:
    rubric = vf.ToolRubric(tools=[add, look])
    assert rubric.tool_names == ["add", "look"]
    score = rubric.score_rollout_sync("", TURNS, "", {})
    assert score == {"total_tool_calls": 4.0, "add_calls": 2.0, "look_calls": 1.0, "reward": 0.0}


def test_calls_in_tags_are_counted_where_the_parser_has_a_tool_field() -> None:
    rubric = vf.ToolRubric([add], parser=vf.XMLParser(["reasoning", ("tool", "answer")]))
    turns = [{"role": "assistant", "content": '<tool>{"name": "add"}</tool><tool>{"name": "add"}</tool><tool>{'}]
    assert rubric.score_rollout_sync("", turns, "", {})["add_calls"] == 2.0


def test_a_count_can_be_a_reward_and_completions_without_calls_count_zero() -> None:
    counts = vf.ToolRubric([add])
    rubric = vf.Rubric([counts.get_tool_call_count_func("add")], [-0.1])
    assert rubric.score_rollout_sync("", TURNS, "", {}) == {"add_calls": 2.0, "reward": -0.2}
    for completion in ("text", [], None):
        assert counts.score_rollout_sync("", completion, "", {})["total_tool_calls"] == 0.0


def test_it_is_found_where_classic_code_looks() -> None:
    from verifiers.rubrics.tool_rubric import ToolRubric
    from verifiers.utils.tool_utils import convert_func_to_oai_tool

    assert ToolRubric is vf.ToolRubric
    assert convert_func_to_oai_tool(add)["function"]["name"] == "add"
