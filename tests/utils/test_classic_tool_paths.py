"""Tools as classic 0.1.x packages import and write them, and as the documents do."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import verifiers as vf
from tests.support.tool_calls import call, calling, tool_texts

PATHS = {
    "envs.tool_env": "ToolEnv",
    "envs.stateful_tool_env": "StatefulToolEnv",
    "envs.sandbox_env": "SandboxEnv",
    "envs.python_env": "PythonEnv",
    "envs.experimental.mcp_env": "MCPEnv MCPServerConfig",
    "envs": "ToolEnv StatefulToolEnv SandboxEnv PythonEnv CodeMathEnv SmolToolEnv MCPEnv",
    "rubrics": "ToolRubric",
    "rubrics.tool_rubric": "ToolRubric",
    "tools": "calculator python_executor python bash search ask",
    "utils.tool_utils": "convert_func_to_oai_tool",
    "utils.tools": "python",
}


@pytest.mark.parametrize("path", PATHS)
def test_the_paths_lead_to_the_names(path: str) -> None:
    module = importlib.import_module(f"verifiers.{path}")
    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []


def test_an_unknown_name_of_these_packages_is_an_attribute_error() -> None:
    for module in (vf.tools, vf.envs):
        with pytest.raises(AttributeError, match="has no attribute 'calcualtor'"):
            module.calcualtor  # noqa: B018


def test_the_documents_tool_environment_works_as_written() -> None:
    from verifiers.envs import ToolEnv
    from verifiers.parsers import XMLParser
    from verifiers.tools import calculator, python_executor

    class ToolMathEnv(ToolEnv):
        def __init__(self, dataset: Any) -> None:
            super().__init__(
                dataset=dataset,
                tools=[calculator, python_executor],
                system_prompt="Use tools.",
                parser=XMLParser(["reasoning", ("tool", "answer")]),
            )

    env = ToolMathEnv([{"prompt": "What is 2+2?", "answer": "4", "task": "arithmetic"}])
    replies = ['<tool>{"name": "calculator", "args": {"expression": "2 + 2"}}</tool>', "<answer>4</answer>"]
    completion, _ = env.rollout(vf.FakeClient(replies), "gpt-4", "What is 2+2?", "4", task="arithmetic")
    assert completion[1]["content"] == "<result>\n4\n</result>"
    assert env.max_turns == 10


CLASSIC = '''
import verifiers as vf
from datasets import Dataset


async def tool_a(x: int) -> int:
    """Tool for adding 1 to an integer.

    Args:
        x: The integer to add 1 to.

    Returns:
        The integer plus 1.
    """
    return x + 1


class Counting(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(tools=[], max_turns=3, error_formatter=lambda e: f"Error: {e}", **kwargs)
        self.add_tool(self.count, args_to_skip=["counter"])

    async def count(self, step: int, counter: dict) -> str:
        """Count.

        Args:
            step: How far.
        """
        counter["n"] += step
        return str(counter["n"])

    async def setup_state(self, state: vf.State, **kwargs) -> vf.State:
        state = await super().setup_state(state, **kwargs)
        state["counter"] = {"n": 0}
        return state

    def update_tool_args(self, tool_name: str, tool_args: dict, messages, state, **kwargs) -> dict:
        tool_args = dict(tool_args)
        tool_args["counter"] = state["counter"]
        return tool_args


def load_environment(**kwargs) -> vf.Environment:
    dataset = Dataset.from_list([{"question": "Call it.", "answer": "", "info": {"tool_names": ["tool_a"]}}])

    def called(completion, info) -> float:
        names = [c["function"]["name"] for c in completion[0].get("tool_calls") or []]
        return 1.0 if names == info["tool_names"] else 0.0

    rubric = vf.Rubric(funcs=[called])
    return vf.ToolEnv(dataset=dataset, rubric=rubric, tools=[tool_a], max_turns=2, **kwargs)
'''


def test_a_classic_package_with_tools_runs_unmodified() -> None:
    names: dict[str, Any] = {"__name__": "classic_tools"}
    exec(compile(CLASSIC, "classic_tools.py", "exec"), names)
    env = names["load_environment"]()
    results = env.evaluate_sync(vf.FakeClient([calling(call("tool_a", {"x": 1})), "done"]), "m", use_tqdm=False)
    assert results["reward"] == [1.0]
    assert (results["total_tool_calls"], results["tool_a_calls"]) == ([1.0], [1.0])
    counting = names["Counting"](dataset=[{"question": "?"}])
    client = vf.FakeClient([calling(call("count", {"step": 2})), calling(call("count", {"step": 3})), "5"])
    assert tool_texts(counting.rollout({"question": "?"}, client, "m")) == ["2", "5"]
