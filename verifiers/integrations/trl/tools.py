"""An environment with tools → ``environment_factory``: TRL samples and calls the tools, the environment scores."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.calls import both
from verifiers.clients.fake import FakeClient
from verifiers.envs.tool_env import ToolEnv
from verifiers.messages import as_messages
from verifiers.types import State

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


class ToolEnvironments:
    """Makes one TRL environment per rollout, with the tools as methods and its own state.

    ``GRPOTrainer(model, reward_funcs=tools.reward, environment_factory=tools, train_dataset=tools.dataset())``

    TRL keeps the sampled tokens across turns; the rubric scores the conversation that TRL passes to `reward`.
    """

    def __init__(self, env: ToolEnv) -> None:
        if not isinstance(env, ToolEnv):
            raise TypeError(f"a {type(env).__name__} has no tools; use verifiers.integrations.trl.Rollouts")
        self.env = env
        methods = {schema["function"]["name"]: _method(schema["function"]) for schema in env.oai_tools or ()}
        if not methods:
            raise ValueError("the environment has no tools")
        if taken := methods.keys() & {"reset", "get_reward"}:
            raise ValueError(f"TRL reserves the method name {min(taken)}; rename that tool")
        self._class = type(type(env).__name__, (_Played,), methods)

    def __call__(self) -> Any:
        """A TRL environment for one rollout."""
        return self._class(self.env)

    def dataset(self, n: int = -1, *, evaluation: bool = False) -> Any:
        """The rows as a Hugging Face ``Dataset``, whose columns TRL passes to ``reset``."""
        from datasets import Dataset

        rows = self.env.get_eval_dataset(n) if evaluation else self.env.get_dataset(n)
        return Dataset.from_list([{"prompt": row["prompt"], "row": json.dumps(dict(row), default=str)} for row in rows])

    def reward(self, completions: Sequence[Any], environments: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """The rubric's rewards; None for a rollout that could not be scored, which TRL ignores."""
        return [
            environment._score(completion) for environment, completion in zip(environments, completions, strict=True)
        ]


class _Played:
    """The environment of one running rollout."""

    def __init__(self, env: ToolEnv) -> None:
        self._env = env
        self._state: State = State()

    def reset(self, row: str, **kwargs: Any) -> None:
        """Start the rollout of a row."""
        state = self._env.new_state(json.loads(row), FakeClient(""), "policy", None)
        self._state = _begin(self._env, state)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        reply = _answer(self._env, [*self._state["prompt"], asked], self._state)
        return "\n".join(str(message.get("content") or "") for message in as_messages(reply))

    def _score(self, completion: Sequence[Any]) -> float | None:
        return _score(self._env, self._state, list(completion))  # type: ignore[no-any-return]


@both
async def _begin(env: ToolEnv, state: State) -> State:
    return await env.start(state)


@both
async def _answer(env: ToolEnv, messages: Any, state: State) -> Any:
    hook = env._hook("env_response")
    return await (env._env_response(messages, state) if hook is None else hook(messages, state))


@both
async def _score(env: ToolEnv, state: State, completion: list[Any]) -> float | None:
    state["completion"], state["is_completed"] = completion, True
    for i, message in enumerate(completion):
        if message.get("role") == "assistant":
            before = [*state["prompt"], *completion[:i]]
            state["trajectory"].append(_step(before, message))
    await env.clean_up(state)
    score = await env.score_alone(state)
    state["reward"], state["metrics"] = score.reward, score.metrics
    return None if score.error is not None else score.reward


def _step(before: list[Any], message: Any) -> Any:
    return {"prompt": before, "completion": [message], "response": None, "tokens": None, "reward": None}


def _method(function: Mapping[str, Any]) -> Callable[..., Any]:
    """A tool as a method with the signature and docstring that TRL reads."""
    name, parameters = function["name"], function["parameters"]
    required = set(parameters.get("required") or ())

    def method(self: _Played, **arguments: Any) -> Any:
        return self._call(name, arguments)

    arguments = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=_TYPES.get(schema.get("type", ""), Any),
            default=inspect.Parameter.empty if key in required else schema.get("default"),
        )
        for key, schema in parameters.get("properties", {}).items()
    ]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([this, *arguments], return_annotation=str)  # type: ignore[attr-defined]
    method.__annotations__ = {one.name: one.annotation for one in arguments} | {"return": str}
    told = [f"    {key}: {_told(key, schema)}" for key, schema in parameters.get("properties", {}).items()]
    summary = function.get("description") or name
    method.__doc__ = "\n".join([summary, "", "Args:", *told]) if told else summary
    method.__name__ = method.__qualname__ = name
    return method


def _told(key: str, schema: Mapping[str, Any]) -> str:
    return " ".join(str(schema.get("description") or key).split())
