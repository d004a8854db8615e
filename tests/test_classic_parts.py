"""Parts of 0.1.9 that its own tests reach for, and that code of users may reach for too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import verifiers as vf
from verifiers.utils.eval_utils import print_results
from verifiers.utils.tool_utils import convert_func_to_oai_tool

ROWS = [{"question": "?", "answer": "!"}]


class Ranked(vf.MultiTurnEnv):
    """Marked methods whose names are in another order than their priorities."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dataset=ROWS, rubric=vf.Rubric(), **kwargs)
        self.done: list[str] = []

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [{"role": "user", "content": "on"}]

    @vf.stop(priority=-1)
    async def a_late_stop(self, state: vf.State) -> bool:
        return False

    @vf.stop(priority=5)
    async def z_early_stop(self, state: vf.State) -> bool:
        return False

    @vf.cleanup
    async def z_cleanup(self, state: vf.State) -> None:
        self.done.append("z_cleanup")

    @vf.cleanup(priority=3)
    async def early_cleanup(self, state: vf.State) -> None:
        self.done.append("early_cleanup")

    @vf.cleanup
    async def b_cleanup(self, state: vf.State) -> None:
        self.done.append("b_cleanup")

    @vf.teardown(priority=-2)
    async def late_teardown(self) -> None:
        self.done.append("late_teardown")

    @vf.teardown
    async def default_teardown(self) -> None:
        self.done.append("default_teardown")


def names(methods: Any) -> list[str]:
    return [method.__name__ for method in methods]


def test_marked_methods_are_listed_by_priority_and_then_by_name_as_0_1_9_lists_them() -> None:
    env = Ranked()
    own = [name for name in names(env._stop_conditions) if name.endswith("_stop")]
    assert own == ["z_early_stop", "a_late_stop"]
    assert names(env._cleanup_handlers) == ["early_cleanup", "b_cleanup", "z_cleanup"]
    assert names(env._teardown_handlers) == ["default_teardown", "late_teardown"]


async def _reach(env: Ranked) -> None:
    state = await env.init_state(env.get_dataset()[0], client=None, model="m")
    await env._cleanup(state)
    await env._cleanup(state)
    await env._teardown()


def test_a_rollout_of_ones_own_cleans_up_once_and_tears_down_in_order() -> None:
    env = Ranked()
    asyncio.run(_reach(env))
    assert env.done == ["early_cleanup", "b_cleanup", "z_cleanup", "default_teardown", "late_teardown"]


def test_what_would_be_added_to_the_list_of_stop_conditions_is_refused_and_not_lost() -> None:
    with pytest.raises(AttributeError):
        Ranked()._stop_conditions.append(print)  # type: ignore[attr-defined]


def test_a_bare_multi_turn_environment_says_that_it_must_be_subclassed_before_it_asks_for_rows() -> None:
    with pytest.raises(TypeError, match="env_response"):
        vf.MultiTurnEnv(model="m")


def test_print_results_shows_the_scores_of_each_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    def length(completion: vf.Messages) -> float:
        return len(completion[-1]["content"]) / 10  # type: ignore[index, typeddict-item]

    env = vf.SingleTurnEnv(dataset=[*ROWS, {"question": "??", "answer": "!"}], rubric=vf.Rubric([length]))
    client = vf.FakeClient(["a", "bb", "ccc", "dddd"])
    results = env.evaluate(client, "m", rollouts_per_example=2, max_concurrent=1, use_tqdm=False)
    print_results(results)
    shown = capsys.readouterr().out
    assert "length:\nr1: [0.1, 0.3]\nr2: [0.2, 0.4]\n" in shown


def test_the_schema_of_0_1_9_tells_what_a_function_does_and_not_what_comes_back() -> None:
    def square(x: int) -> int:
        """Square a number.

        Args:
            x: The number.

        Returns:
            Its square.
        """
        return x * x

    function = convert_func_to_oai_tool(square)["function"]
    assert function["description"] == "Square a number."
    assert function["parameters"]["properties"]["x"]["description"] == "The number."
