"""An OpenEnv server or package → an environment: actions are tools, observations are replies, rewards are a score."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.envs.tool_env import ToolEnv
from verifiers.errors import HookError, InfraError
from verifiers.integrations.openenv.actions import action_tools, as_text, is_mcp, mcp_tools
from verifiers.integrations.openenv.connection import ActionRefusedError, Connection
from verifiers.integrations.openenv.server import PackageServer
from verifiers.messages import as_messages
from verifiers.rollout import cleanup, teardown
from verifiers.rubrics import Rubric
from verifiers.tools.calling import ToolBox
from verifiers.tools.tool import Tool
from verifiers.types import Messages, State

NUM_EPISODES = 100
TIMEOUT_S = 60.0
WAIT_S = 600.0
SYSTEM_PROMPT = "You act in an environment by calling tools. Go on until it says that you are done."
_SESSION = "_openenv_session"  # a hidden argument of the tools; no action has an argument with this name


def episode_return(state: State) -> float:
    """The sum of the server's rewards."""
    rewards = [reward for reward in state.get("env_rewards") or () if reward is not None]
    if not rewards and state.get("env_steps"):
        raise ValueError("the server gave no reward for any step; score the rollouts with your own rubric")
    return float(sum(rewards))


class OpenEnv(ToolEnv):
    """The environments of an OpenEnv server, one session for each rollout: ``OpenEnv("http://127.0.0.1:8000")``.

    ``source`` is a server's URL, or the name of an installed package, whose server (``package.server.app:app``, or the
    given ``module:app``) is then started here. A row is an episode: ``info["reset"]`` has the arguments of ``reset``.
    Without rows there is one for each of ``num_episodes`` seeds. The first observation is appended to the row's prompt.
    """

    def __init__(
        self,
        source: str,
        dataset: Any = None,
        *,
        num_episodes: int = NUM_EPISODES,
        max_turns: int = 20,
        system_prompt: str | None = SYSTEM_PROMPT,
        rubric: Rubric | None = None,
        headers: Mapping[str, str] | None = None,
        message_timeout_s: float = TIMEOUT_S,
        wait_s: float = WAIT_S,
        show: Callable[[Any], str] = as_text,
        **kwargs: Any,
    ) -> None:
        if not message_timeout_s > 0 or not wait_s >= 0:
            raise ValueError(f"{message_timeout_s=} must be above 0, and {wait_s=} 0 or more (both in seconds)")
        self.source = source.rstrip("/")
        self.headers, self.message_timeout_s, self.wait_s, self.show = headers, message_timeout_s, wait_s, show
        self._server = None if "://" in source else PackageServer(source)
        self._connections: dict[str, Connection] = {}
        self._is_known = False
        if dataset is None and kwargs.get("eval_dataset") is None:
            dataset = [{"prompt": [], "info": {"reset": {"seed": seed}}} for seed in range(num_episodes)]
        rubric = rubric if rubric is not None else Rubric([episode_return])
        super().__init__(
            dataset=dataset, max_turns=max_turns, system_prompt=system_prompt, rubric=rubric, sequential=True, **kwargs
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the sessions and the server process, which belong to this process."""
        away = ("_connections", "_server")
        return {key: value for key, value in super().__getstate__().items() if key not in away}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._server = None if "://" in self.source else PackageServer(self.source)
        self._connections = {}

    # --- a rollout ------------------------------------------------------------------------------------------------

    async def start(self, state: State) -> State:
        connection = self._connections[state["trajectory_id"]] = self._connect()
        try:
            await self._learn_tools(connection)
            shown = await connection.begin("reset", self._reset_args(state), wait_s=self.wait_s)
        except ActionRefusedError as error:  # the model has not acted yet, so the server is to blame
            raise InfraError(f"the OpenEnv server at {self.source} could not start an episode: {error}") from error
        except InfraError as error:
            raise self._explained(error) from error
        state["env_rewards"], state["env_steps"] = [], 0
        first = {"role": "user", "content": self.show(shown.get("observation")) or "The episode has begun."}
        state["prompt"] = [*as_messages(state["prompt"] or []), first]
        self.tell(state)
        return await super().start(state)

    def tell(self, state: State) -> None:
        if self._is_known:
            super().tell(state)

    def _reset_args(self, state: State) -> Mapping[str, Any]:
        args = (state.get("info") or {}).get("reset", {"seed": state["example_id"]})
        if not isinstance(args, Mapping):
            raise HookError(f"a row's info['reset'] must be a dict of arguments of reset, not {args!r:.100}")
        return args

    def _connect(self) -> Connection:
        url = self.source if self._server is None else self._server.url
        return Connection(url, headers=self.headers, timeout_s=self.message_timeout_s)

    def _explained(self, error: InfraError) -> InfraError:
        why = None if self._server is None else self._server.why_ended()
        return error if why is None else InfraError(why)

    async def _learn_tools(self, connection: Connection) -> None:
        """Get the actions from the server, once per environment."""
        if self._is_known:
            return
        action, listed = (await connection.schema())["action"], dict[str, Any]()
        try:
            if is_mcp(action):
                listed = await connection.begin("step", {"type": "list_tools"}, wait_s=self.wait_s)
                tools = mcp_tools((listed.get("observation") or {}).get("tools") or (), self._action)
            else:
                tools = action_tools(action, self._action)
            if not self._is_known:  # another rollout may have done this in the meantime
                ToolBox([*self.toolbox, *tools])  # raises before any is added
                self._is_known = True
                for tool in tools:
                    self.toolbox.add(tool)
                self._tell_endpoint()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InfraError(
                f"the actions of the OpenEnv server at {self.source} cannot be made into tools: {error!r:.200} in "
                f"{listed or action!r:.200}"
            ) from error

    def _action(self, fixed: dict[str, Any]) -> Callable[..., Any]:
        return functools.partial(_act, fixed)

    async def fill_in(self, tool: Tool, arguments: dict[str, Any], messages: Messages, state: State) -> dict[str, Any]:
        arguments = await super().fill_in(tool, arguments, messages, state)
        own = isinstance(tool.function, functools.partial) and tool.function.func is _act
        return {**arguments, _SESSION: (self, state)} if own else arguments

    async def take(self, action: Mapping[str, Any], state: State) -> str:
        """Take one step in a rollout's episode; returns the observation as the model reads it."""
        if state.get("completed"):
            return "The episode is over."
        answer = await self._connections[state["trajectory_id"]].ask("step", action)
        reward, is_done = answer.get("reward"), answer.get("done")
        if not isinstance(reward, (int, float, type(None))) or not isinstance(is_done, (bool, type(None))):
            raise InfraError(
                f"the OpenEnv server at {self.source} answered a step with reward {reward!r:.80} and done "
                f"{is_done!r:.80}: these must be a number and a boolean"
            )
        state["env_steps"] += 1
        state["env_rewards"].append(reward)
        if is_done:
            state["completed"], state["stop_condition"] = True, "episode_done"
        return self.show(answer.get("observation")) or "(nothing to see)"

    # --- clean-up -------------------------------------------------------------------------------------------------

    @cleanup
    async def end_session(self, state: State) -> None:
        """Close the rollout's session on the server."""
        connection = self._connections.pop(state["trajectory_id"], None)
        if connection is not None:
            await connection.close()

    @teardown
    async def stop_server(self) -> None:
        """Stop the server that was started for a package."""
        if self._server is not None:
            self._server.stop()


async def _act(fixed: Mapping[str, Any], /, **arguments: Any) -> str:
    env, state = arguments.pop(_SESSION)
    action = {**fixed, "arguments": arguments} if "tool_name" in fixed else {**fixed, **arguments}
    shown: str = await env.take(action, state)
    return shown
