"""An agent that uses a ``base_url`` → rollouts: each of its model calls is a turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verifiers import calls
from verifiers.envs.agent_branches import last_conversation
from verifiers.envs.agent_calls import AgentCalls
from verifiers.envs.agent_endpoint import Address, AgentEndpoint
from verifiers.envs.agent_programs import Output, Program, check_ended
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.errors import HookError, wrap
from verifiers.messages import as_messages, last_reply, role_of, text_of
from verifiers.rollout import merge_state, note_error, run_episode, split_response
from verifiers.signatures import signature_of
from verifiers.types import Messages, State

MAX_TURNS = 50
AGENT_TIMEOUT_S = 3600.0
FIELDS = (
    *("base_url", "anthropic_base_url", "api_key", "model"),
    *("prompt", "answer", "info", "task", "example_id", "row"),
)


class AgentEnv(MultiTurnEnv):
    """Runs any agent on each row, and records all its model calls.

    ``run`` is a function, sync or async, with any of the arguments ``base_url, anthropic_base_url, api_key, model,
    prompt, answer, info, task, example_id, row, state``; or a command line, whose words may contain these (except
    ``state``) as ``{placeholders}``. What it returns (a text, messages) or prints is the completion. If that is empty,
    the completion is the conversation of its last call.

    >>> def run(base_url, api_key, prompt):
    ...     return "4"  # OpenAI(base_url=base_url, api_key=api_key)…
    >>> AgentEnv(run=run, dataset=[{"question": "2+2?", "answer": "4"}]).max_turns
    50
    """

    def __init__(
        self,
        run: Callable[..., Any] | str | Sequence[str],
        *,
        max_turns: int = MAX_TURNS,
        max_total_tokens: int | None = None,
        max_concurrent_calls: int | None = None,
        agent_timeout_s: float = AGENT_TIMEOUT_S,
        cwd: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        for name, value in (("max_total_tokens", max_total_tokens), ("max_concurrent_calls", max_concurrent_calls)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} must be at least 1, or None for no limit")
        if not agent_timeout_s > 0:
            raise ValueError(f"agent_timeout_s={agent_timeout_s!r} must be a number of seconds above 0")
        self.max_total_tokens = max_total_tokens
        self.max_concurrent_calls = max_concurrent_calls
        self.agent_timeout_s = agent_timeout_s
        self.run = run
        self._program: Program | None = None
        if callable(run):
            if cwd is not None or environment is not None:
                raise TypeError("cwd and environment are for a command line; a function runs in this process")
            self._wanted = _wanted_by(run)
        else:
            self._program = Program(run, names=FIELDS, cwd=cwd, environment=environment)
        called: Any = run if callable(run) else self._run_program
        self._agent = calls.Hook(called, timeout_s=agent_timeout_s, may_share=False)
        self._endpoints = calls.PerLoop(AgentEndpoint, AgentEndpoint.close)

    # --- a rollout ------------------------------------------------------------------------------------------------

    async def play(self, state: State) -> State:
        self.tear_down_at_exit()
        return await run_episode(self, state, turns=AgentEnv._let_agent_play)

    async def _let_agent_play(self, state: State) -> None:
        limits = {"max_total_tokens": self.max_total_tokens, "max_concurrent_calls": self.max_concurrent_calls}
        answering = AgentCalls(self, state, **limits)
        failure: Exception | None = None
        returned: Any = None
        async with (await self._endpoints.get()).opened(answering) as address:
            try:
                returned = await self._call(state, address)
            except BaseException as error:  # foreign code
                failure = calls.contained(error)
        if answering.failures:  # the agent's result does not count if a model call failed
            raise next(iter(answering.failures.values()))
        if failure is None:
            self._take(state, returned)
            if answering.overlong is not None:
                note_error(state, answering.overlong)
        elif answering.overlong is not None:
            note_error(state, answering.overlong)
        elif answering.was_refused is None:
            raise wrap(failure, HookError, "the agent")
        state["stop_condition"] = state.get("stop_condition") or answering.was_refused or "agent_done"

    async def _call(self, state: State, address: Address) -> Any:
        fields = {
            "base_url": address.base_url,
            "anthropic_base_url": address.anthropic_base_url,
            "api_key": address.api_key,
            "model": state["model"],
            **{name: state.get(name) for name in ("prompt", "answer", "info", "task", "example_id")},
            "row": dict(state["input"]),
            "state": state,
        }
        if self._program is None:
            return await self._agent(**{name: fields[name] for name in self._wanted})
        output: Output = await self._agent(fields)
        state["agent_output"] = msgspec.to_builtins(output)
        check_ended(output)
        return output.stdout.strip() or None

    async def _run_program(self, fields: Mapping[str, Any]) -> Output:
        assert self._program is not None
        values = {name: _as_text(name, fields[name]) for name in FIELDS}
        return await self._program.run(values, stdin=values["prompt"], environment=_environment(fields))

    def _take(self, state: State, returned: Any) -> None:
        """Store what the agent returned: a completion, an update of the state, or both."""
        if isinstance(returned, Mapping) and "role" not in returned:
            merge_state(state, returned)
            returned = returned.get("completion")
        completion, update = split_response(returned)
        merge_state(state, update)
        if completion is not None:
            state["agent_completion"] = _as_completion(completion)

    # --- the hooks of turns ---------------------------------------------------------------------------------------

    async def _env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        raise NotImplementedError("an AgentEnv has no env_response: the agent decides what the model gets next")

    async def _render_completion(self, state: State) -> None:
        """What the agent returned, or else all messages after the first prompt of its last conversation."""
        completion = state.pop("agent_completion", None)
        steps = state["trajectory"]
        if completion is None:
            completion = last_conversation(steps)[1] if steps else []
        if steps and not state.get("oai_tools"):
            state["oai_tools"] = steps[-1]["extras"].get("tools")
        state["completion"] = completion if self.message_type == "chat" else last_reply(completion)

    render_completion = calls.both(_render_completion)  # type: ignore[arg-type]

    def own_metrics(self, state: State) -> dict[str, float]:
        branches = {step.get("trajectory_id") for step in state.get("trajectory") or ()}
        return {**super().own_metrics(state), "num_branches": float(len(branches))}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_endpoints"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._endpoints = calls.PerLoop(AgentEndpoint, AgentEndpoint.close)


def _wanted_by(run: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments that an agent's function takes."""
    known = (*FIELDS, "state")
    parameters = signature_of(run).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return known
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    unknown = [name for name in required if name not in known]
    unknown += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if unknown:
        raise TypeError(
            f"run has unknown arguments {sorted(set(unknown))}; it may have {', '.join(known)} "
            f"(other columns are in row)"
        )
    return tuple(p.name for p in parameters if p.name in known)


def _as_completion(returned: Any) -> list[Any]:
    messages = as_messages(returned, role="assistant") if isinstance(returned, (str, Mapping, list, tuple)) else None
    if messages is None or any(role_of(message) is None for message in messages):
        raise TypeError(f"the agent returned {returned!r:.200}; it must return a text, a message, messages or None")
    return messages


# --- a command line -----------------------------------------------------------------------------------------------


def _as_text(name: str, value: Any) -> str:
    if name == "prompt":
        return _prompt_text(value)
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value, enc_hook=str).decode()


def _prompt_text(prompt: Any) -> str:
    """The text of all messages of a prompt, including the system message."""
    return (
        prompt if isinstance(prompt, str) else "\n\n".join(text for text in map(text_of, as_messages(prompt)) if text)
    )


def _environment(fields: Mapping[str, Any]) -> dict[str, str]:
    """The variables that SDKs and programs read. Requests to this machine must not use a proxy."""
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1")))
    return {
        "OPENAI_BASE_URL": fields["base_url"],
        "OPENAI_API_BASE": fields["base_url"],
        "OPENAI_API_KEY": fields["api_key"],
        "OPENAI_MODEL": fields["model"],
        "ANTHROPIC_BASE_URL": fields["anthropic_base_url"],
        "ANTHROPIC_API_KEY": fields["api_key"],
        "ANTHROPIC_MODEL": fields["model"],
        "NO_PROXY": direct,
        "no_proxy": direct,
    }
