"""StatefulToolEnv: hidden arguments, filled in from the state of the rollout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import verifiers as vf
from tests.support.tool_calls import call, calling, tool_texts

ROW = {"question": "Buy milk.", "answer": ""}


def put(item: str, cart: list[str], count: int = 1) -> str:
    """Put something into the cart.

    Args:
        item: What.
        cart: Where.
    """
    cart.extend([item] * count)
    return f"{len(cart)} in the cart"


class Shop(vf.StatefulToolEnv):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dataset=[ROW], **kwargs)
        self.add_tool(put, args_to_skip=["cart"])

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        state["cart"] = []
        return state

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: vf.Messages, state: vf.State, **kwargs: Any
    ) -> dict[str, Any]:
        return {**tool_args, "cart": state["cart"]}


def roll_out(env: vf.Environment, *replies: Any) -> vf.State:
    state: vf.State = env.rollout(ROW, vf.FakeClient(list(replies)), "fake")
    return state


def test_the_model_sees_only_its_own_arguments_and_each_rollout_has_its_own_state() -> None:
    env = Shop()
    assert env.oai_tools is not None
    assert set(env.oai_tools[0]["function"]["parameters"]["properties"]) == {"item", "count"}
    for _ in range(2):
        state = roll_out(
            env, calling(call("put", {"item": "milk", "count": "2"})), calling(call("put", {"item": "tea"})), ""
        )
        assert tool_texts(state) == ["2 in the cart", "3 in the cart"]
        assert state["cart"] == ["milk", "milk", "tea"]


def test_a_model_cannot_give_a_hidden_argument() -> None:
    state = roll_out(Shop(), calling(call("put", {"item": "milk", "cart": ["gold"]})), "")
    assert tool_texts(state) == ["Error: put has no argument 'cart'; it takes item, count (optional)"]
    assert state["cart"] == []


def test_the_calls_of_a_turn_run_one_after_another() -> None:
    order: list[str] = []

    async def step(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(name)

    env = vf.StatefulToolEnv(tools=[step], dataset=[ROW])
    roll_out(env, calling(call("step", {"name": "a", "seconds": 0.05}), call("step", {"name": "b", "seconds": 0})), "")
    assert order == ["a", "b"]


def test_a_hidden_state_is_filled_in_by_itself() -> None:
    def note(text: str, state: vf.State) -> str:
        state.setdefault("notes", []).append(text)
        return str(len(state["notes"]))

    env = vf.StatefulToolEnv(dataset=[ROW])
    env.add_tool(note, args_to_skip=["state"])
    state = roll_out(env, calling(call("note", {"text": "a"}), call("note", {"text": "b"})), "")
    assert (tool_texts(state), state["notes"]) == (["1", "2"], ["a", "b"])


def test_update_tool_args_may_be_async_and_may_blame_the_model() -> None:
    class Strict(Shop):
        async def update_tool_args(self, tool_name: str, tool_args: dict[str, Any], *rest: Any, **kwargs: Any) -> Any:
            if tool_args["item"] == "gold":
                raise vf.ToolCallError("gold is not sold here")
            return super().update_tool_args(tool_name, tool_args, *rest, **kwargs)

    state = roll_out(Strict(), calling(call("put", {"item": "gold"}), call("put", {"item": "tea"})), "")
    assert tool_texts(state) == ["Error: gold is not sold here", "1 in the cart"]


class Broken(Shop):
    def update_tool_args(self, *args: Any, **kwargs: Any) -> Any:
        return self.outcome()


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (lambda: {}["cart"], "update_tool_args raised KeyError: 'cart'"),
        (lambda: None, "update_tool_args returned None for put; it must return a dict"),
        (lambda: {"item": "milk"}, "update_tool_args returned invalid arguments for put: missing a required argument"),
        (lambda: {"item": "milk", "cart": [], "x": 1}, "got an unexpected keyword argument 'x'"),
    ],
)
def test_what_the_environment_does_wrong_fails_the_rollout_and_is_not_shown_to_the_model(
    outcome: Any, message: str
) -> None:
    env = Broken()
    env.outcome = outcome
    state = roll_out(env, calling(call("put", {"item": "milk"})), "")
    assert isinstance(state["error"], vf.HookError)
    assert message in str(state["error"])
    assert tool_texts(state) == []


def test_a_tool_that_fails_before_the_model_was_asked_is_a_failure_and_no_zero() -> None:
    class Opening(Shop):
        async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
            await self.toolbox.call("put", {"article": "milk"})  # it has no argument of this name
            return state

    state = roll_out(Opening(rubric=vf.Rubric([lambda completion: 0.0])), "hello")
    assert isinstance(state["error"], vf.HookError)
    assert "before the first request to the model, " in str(state["error"])
    assert "article" in str(state["error"])
    assert state["reward"] is None
