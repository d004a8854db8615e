"""Rollouts with turns: the model replies and the environment responds until a stop condition is met."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from numbers import Number, Real
from types import SimpleNamespace
from typing import Any, cast

from verifiers import calls
from verifiers.clients.openai_objects import Step, with_ending
from verifiers.clients.protocol import Completion
from verifiers.envs.calling import ask_arguments
from verifiers.envs.environment import Environment
from verifiers.envs.hooks import as_verdict, only_reads, takes_messages
from verifiers.errors import HookError
from verifiers.escapes import raise_if_escaped
from verifiers.message_types import readable
from verifiers.messages import as_messages, concat_messages, readable_messages, text_of
from verifiers.parsers import Parser
from verifiers.rollout import merge_state, run_episode, split_response, step_tokens, stop
from verifiers.types import ChatMessage, Messages, State, TrajectoryStep, TurnCount


class MultiTurnEnv(Environment):
    """An environment that responds to the model. Define ``env_response``, and ``is_completed`` or a ``@vf.stop``."""

    def __init__(self, max_turns: int = 10, **kwargs: Any) -> None:
        if type(self) is MultiTurnEnv and max_turns != 1:  # checked first, before an error about missing rows
            raise TypeError("MultiTurnEnv must be subclassed: define env_response(messages, state)")
        super().__init__(**kwargs)
        given: object = max_turns
        if not isinstance(given, Real):
            raise TypeError(f"max_turns={max_turns!r} must be a number, or -1 for no limit")
        self.max_turns = max_turns
        is_silent = type(self)._env_response is MultiTurnEnv._env_response and self._hook("env_response") is None
        if max_turns != 1 and is_silent and self._hook("get_prompt_messages") is None:
            raise TypeError(f"{type(self).__name__} must define env_response(messages, state)")
        is_completed = self._hook("is_completed")
        self._reads_messages = is_completed is not None and takes_messages(is_completed.function)
        answers_itself = is_completed is not None and self._hook("env_response") is not None
        self._replaced = _stops_replaced_in(type(self)) if answers_itself else frozenset()

    # --- stop conditions ------------------------------------------------------------------------------------------

    @stop(priority=100)
    @only_reads
    def has_error(self, state: State) -> bool:
        return state.get("error") is not None

    @stop
    @only_reads
    def prompt_too_long(self, state: State) -> bool:
        return bool(state.get("prompt_too_long"))

    @stop
    @only_reads
    def max_turns_reached(self, state: State) -> bool:
        return 0 < self.max_turns <= len(state["trajectory"])

    @stop
    @only_reads
    def has_final_env_response(self, state: State) -> bool:
        return state.get("final_env_response") is not None

    async def ask_completed(self, state: State) -> bool:
        """Check the stop conditions first, then a subclass's ``is_completed``, which may replace some of them."""
        if await self.meets_a_stop(state, replaced=self._replaced):
            return True
        hook = self._hook("is_completed")
        if hook is None or (self._reads_messages and not state["trajectory"]):
            return False
        return await self._ask_own(hook, self.conversation(state), state)

    async def _ask_own(self, hook: calls.Hook, messages: Messages, state: State) -> bool:
        answer = await hook(*((messages, state) if self._reads_messages else (state,)))
        if not as_verdict(answer, "is_completed"):
            return False
        state["stop_condition"] = state.get("stop_condition") or "is_completed"
        return True

    # --- the steps of a turn, which subclasses may override -------------------------------------------------------

    async def _setup_state(self, state: State) -> State:
        """Override to add to the state what a rollout needs."""
        return state

    setup_state = calls.both(_setup_state)

    async def _env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Override: the environment's response to the model's last message."""
        raise NotImplementedError(f"{type(self).__name__} has no env_response")

    env_response = calls.both(_env_response)

    def _foreign(self, name: str) -> calls.Hook:
        """A method of a built-in environment that runs foreign code, as a hook with its time limit."""
        hook = self._hook(name)
        if hook is None:
            raise NotImplementedError(f"{type(self).__name__} has no {name}")
        return hook

    async def _get_prompt_messages(self, state: State) -> Messages:
        """The next prompt: that of the row, or the conversation with the environment's response."""
        messages = self.conversation(state)
        if not state["trajectory"]:
            return messages
        hook = self._hook("env_response")
        shown = list(messages) if isinstance(messages, list) else messages
        result = await (self._env_response(shown, state) if hook is None else hook(shown, state))
        reply: Messages
        response, update = split_response(result)
        merge_state(state, update)
        reply = _as_reply(response, messages)
        if isinstance(messages, str):
            reply = "".join(map(text_of, reply))
        after = concat_messages([messages, reply])
        if await self._is_over(after, state):
            state["final_env_response"] = reply
        return after

    get_prompt_messages = calls.both(_get_prompt_messages)

    async def _is_over(self, messages: Messages, state: State) -> bool:
        """Whether the environment's response has ended the rollout."""
        if state.get("completed") is True:
            return True
        if await self.meets_a_stop(state, messages, is_after_answer=True, replaced=self._replaced):
            return True
        own = self._hook("is_completed") if self._reads_messages else None
        return own is not None and await self._ask_own(own, messages, state)

    async def _add_trajectory_step(self, state: State, trajectory_step: TrajectoryStep) -> None:
        """Override to set rewards or extras of a single turn."""
        state["trajectory"].append(trajectory_step)

    add_trajectory_step = calls.both(_add_trajectory_step)

    async def _add_model_response(self, state: State, prompt_messages: Messages, response: Any) -> None:
        """Add a reply to the trajectory as a step."""
        await self.keep_step(state, self.make_step(state, prompt_messages, response))

    def make_step(self, state: State, prompt_messages: Messages, response: Any) -> Step:
        reply = self.read_reply(response)
        tokens = step_tokens(reply.tokens, self.max_seq_len)
        return Step(
            prompt=prompt_messages,
            completion=[readable(reply.message)] if self.message_type == "chat" else reply.text,
            response=response,
            tokens=tokens,
            reward=None,
            advantage=None,
            is_truncated=reply.is_truncated or (tokens is not None and tokens["is_truncated"]),
            trajectory_id=state["trajectory_id"],
            extras={},
        )

    async def keep_step(self, state: State, step: Step) -> None:
        if isinstance(turns := dict.get(state, "turn"), TurnCount):
            state["turn"] = turns + 1
        hook = self._hook("add_trajectory_step")
        kept = cast(TrajectoryStep, step)
        await (self._add_trajectory_step(state, kept) if hook is None else hook(state, kept))

    add_model_response = calls.both(_add_model_response)

    async def _render_completion(self, state: State) -> None:
        """Write the conversation after the prompt into ``state["completion"]``."""
        if not state["trajectory"]:
            state["completion"] = [] if self.message_type == "chat" else ""
            return
        whole = self.conversation(state)
        final = state.get("final_env_response")
        if final:
            whole = concat_messages([whole, readable_messages(final)])
        # The last prompt may be shorter than the row's, by a prompt hook; the model's reply must still be included.
        state["completion"] = whole[min(len(state["prompt"]), len(state["trajectory"][-1]["prompt"])) :]

    render_completion = calls.both(_render_completion)

    # --- the interface for the episode loop -----------------------------------------------------------------------

    async def play(self, state: State) -> State:
        self.tear_down_at_exit()
        return await run_episode(self, state)

    async def start(self, state: State) -> State:
        """Call ``initial_state(row)`` and ``setup_state(state)``, if a subclass has them."""
        initial = self._hook("initial_state")
        if initial is not None:
            merge_state(state, await initial(state["input"]))
        setup = self._hook("setup_state")
        if setup is not None:
            returned = await setup(state)
            if isinstance(returned, State) and "trajectory" in returned:
                state = returned
            else:
                merge_state(state, returned)
        if self.message_type == "chat" and not isinstance(state["prompt"], list):
            state["prompt"] = as_messages(state["prompt"])
        prompt = state["prompt"]
        if (shown := readable_messages(prompt)) is not prompt:  # a hook wrote it
            state["prompt"] = shown
        return state

    async def next_prompt(self, state: State) -> Messages:
        hook = self._hook("get_prompt_messages")
        if hook is None:
            return await self._get_prompt_messages(state)
        given = await hook(state)
        if given is None or isinstance(given, Mapping | Number):
            raise HookError(f"get_prompt_messages returned {given!r:.100}; it returns a list of messages, or a text")
        prompt: Messages = readable_messages(given)
        return prompt

    async def ask_model(self, state: State, prompt: Messages) -> None:
        """One turn of the model. Retries up to ``max_retries`` times if the parser finds nothing in the reply."""
        ask = self._hook("get_model_response")
        for left in range(self.max_retries, -1, -1):
            if ask is None:
                response: Any = await self._get_model_response(state, prompt)
            else:
                args, kwargs = ask_arguments(ask.function, state, prompt, self.message_type)
                response = await ask(*args, **kwargs)
            if not left or is_parsable(self.parser, self.read_reply(response)):
                break
            state["parse_retries"] = state.get("parse_retries", 0) + 1
        add = self._hook("add_model_response")
        if add is None:
            await self._add_model_response(state, prompt, response)
        else:
            await add(state, prompt, with_ending(response))
        if not state["trajectory"]:  # no limit of turns would ever be reached
            raise HookError("the turn was not kept: add_trajectory_step appends it to state['trajectory']")

    async def finish(self, state: State) -> None:
        """Render the completion, then clean up even if that fails."""
        render = self._hook("render_completion")
        try:
            await (self._render_completion if render is None else render)(state)
        finally:
            await self.clean_up(state)

    def own_metrics(self, state: State) -> dict[str, float]:
        return {**super().own_metrics(state), "num_turns": float(len(state.get("trajectory") or ()))}


def _stops_replaced_in(cls: type) -> frozenset[str]:
    """The stop conditions that a subclass's ``is_completed`` replaces: those of the classes between it and ours.

    As in 0.1.x, the subclass calls ``super().is_completed(…)`` to check them. The limits of every episode (errors,
    turns, length) stay in force.
    """
    line = cls.__mro__
    home = next(position for position, one in enumerate(line) if "is_completed" in vars(one))
    nearer, between = line[: home + 1], line[home + 1 : line.index(MultiTurnEnv)]
    names = {name for one in between for name, value in vars(one).items() if getattr(value, "stop", False) is True}
    return frozenset(name for name in names if not any(name in vars(one) for one in nearer))


def _as_reply(response: Any, messages: Messages) -> list[ChatMessage]:
    """What ``env_response`` returned besides the state, as messages with roles."""
    try:
        reply = as_messages(response if response is not None else [])
        is_reply = all("role" in message for message in reply)
    except TypeError:
        is_reply = False
    if not is_reply:
        raise HookError(
            f"env_response returned {response!r:.200}; it must return a text, a message with a role, a list of "
            "messages, or one of these and a state"
        )
    if messages and type(response) is type(messages) and response[: len(messages)] == messages:
        raise HookError("env_response returned the whole conversation; it must return only the environment's response")
    made: list[ChatMessage] = readable_messages(reply)
    return made


def turn_limit(limit: int | None, max_turns: int | None, *, name: str, default: int) -> int:
    """The largest number of turns of a game, from its own argument or ``max_turns``, where less than 1 is no limit.

    >>> turn_limit(None, 8, name="max_moves", default=100), turn_limit(None, None, name="max_moves", default=100)
    (8, 100)
    """
    if max_turns is None:
        return default if limit is None else limit
    if limit is not None and limit != max_turns:
        raise ValueError(f"{name}={limit} and max_turns={max_turns} are two names for the same argument; pass one")
    return max_turns if max_turns > 0 else sys.maxsize


def is_parsable(parser: Parser, reply: Completion) -> bool:
    """Whether the parser finds anything in this reply. A tool call needs no parsing."""
    if reply.message.get("tool_calls"):
        return True
    try:
        parsed = parser.parse(reply.text)
    except BaseException as error:  # a user's own parser
        raise_if_escaped(error)
        return False
    if isinstance(parsed, SimpleNamespace):
        return any(value is not None for value in vars(parsed).values())
    return parsed is not None and parsed != ""
