"""An agent's model calls in one rollout → its turns with exact tokens, within limits."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from verifiers import calls
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.recording import recorded_calls, replies_of
from verifiers.dialects.completions import Completions, wants_ids
from verifiers.dialects.messages import Messages
from verifiers.dialects.replies import WholeReply, with_openai_fields
from verifiers.dialects.responses import Responses
from verifiers.envs.agent_branches import Branches
from verifiers.errors import Error, HookError, OverlongPromptError, RequestRefusedError, wrap
from verifiers.types import MessageType, SamplingArgs, State

if TYPE_CHECKING:
    from verifiers.envs.agent_env import AgentEnv

_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_HIDDEN = ("prompt_token_ids", "sampling", "prompt_logprobs")  # removed from replies unless the agent asks for ids
_HIDDEN_OF_CHOICE = ("token_ids", "prompt_token_ids", "raw_logprobs", "weights")


class RolloutOverError(RequestRefusedError):
    """A limit or a stop condition has ended the rollout, so the model answers no further calls."""

    def __init__(self, condition: str) -> None:
        super().__init__(f"this rollout has ended ({condition}): the model answers no further calls")
        self.condition = condition


class AgentCalls:
    """Answers an agent's calls with the rollout's client, whatever model the agent names.

    The error of a failed call is kept until the same call succeeds; that of a call which no longer fits into the
    model's context, until any call succeeds.
    """

    def __init__(
        self, env: AgentEnv, state: State, *, max_total_tokens: int | None, max_concurrent_calls: int | None
    ) -> None:
        self.name: str = state["model"]
        self.failures: dict[str, Error] = {}
        self.overlong: OverlongPromptError | None = None
        self.was_refused: str | None = None  # the condition for which the agent was refused a call
        self.completions, self.responses, self.messages = Completions(self), Responses(self), Messages(self)
        self._env, self._state = env, state
        self._context = contextvars.copy_context()
        self._max_total_tokens = max_total_tokens
        self._places = asyncio.Semaphore(max_concurrent_calls) if max_concurrent_calls else None
        self._branches = Branches(state["trajectory_id"])
        self._under_way: set[asyncio.Task[Any]] = set()
        self._begun = self._sampled = 0
        self._condition: str | None = None

    # --- the interface for the endpoints --------------------------------------------------------------------------

    def check_model(self, name: Any) -> None:
        """Accepts any name, because the rollout's model answers."""

    def count(self, usage: Mapping[str, Any]) -> None:
        """Does nothing: tokens are counted in `_answer`."""

    def request(
        self, prompt: Any, sampling: Mapping[str, Any], *, tools: Any = None, message_type: MessageType = "chat"
    ) -> Request:
        return Request(
            model=self.name, prompt=prompt, tools=tools or None, sampling=sampling, message_type=message_type
        )

    @asynccontextmanager
    async def turn(self, http: web.Request, replies: int = 1) -> AsyncIterator[None]:
        if self._places is None:
            yield
            return
        async with self._places:
            yield

    async def stream(self, http: web.Request, request: Request) -> WholeReply:
        return WholeReply(await self.complete(http, request))

    async def prompt_ids(self, request: Request) -> list[int]:
        count = getattr(self._state.answerer.client, "prompt_ids", None)
        if count is None:
            raise RequestRefusedError("the model behind this endpoint cannot count tokens without a completion")
        ids: list[int] = await count(request)
        return ids

    async def complete(self, http: web.Request, request: Request) -> Completion:
        # Run in the rollout's context, not in that of the server's creator.
        task = asyncio.get_running_loop().create_task(self._answer(request), context=self._context)
        self._under_way.add(task)
        try:
            return await task
        finally:
            self._under_way.discard(task)
            task.cancel()

    async def close(self) -> None:
        """Cancel the remaining calls, since the agent is done."""
        self._condition = self._condition or "agent_done"
        waiting = list(self._under_way)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    # --- a call ---------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Completion:
        await self._check_limits()
        asked = {name: value for name, value in request.sampling.items() if value is not None}
        sampling = call_sampling(asked, self._state["sampling_args"] or {}, self._left())
        key = repr((request.prompt, request.tools))
        with recorded_calls() as made:
            try:
                completion = await self._ask(request, sampling)
            except BaseException as error:  # also a cancellation, if the agent closed the connection
                self._begun -= 1
                if isinstance(error, OverlongPromptError):
                    self.overlong = error
                elif isinstance(error, Error):
                    self.failures[key] = error
                raise
        self.failures.pop(key, None)
        self.overlong = None
        self._sampled += 0 if completion.usage is None else completion.usage.completion_tokens
        replies = made[-1].replies if made else replies_of(request, completion)
        others = [
            Completion(message=one.message, tokens=one.tokens, finish_reason="length" if one.is_truncated else "stop")
            for one in replies[1:]
        ]
        for reply in (completion, *others):
            await self._keep(request, reply)
        return replace(completion, raw=_shown(completion, request, self.name, asked))

    async def _check_limits(self) -> None:
        if self._condition is None:
            env, state = self._env, self._state
            if 0 < env.max_turns <= self._begun:
                self._condition = "max_turns_reached"
            elif self._left() == 0:
                self._condition = "max_total_tokens_reached"
            elif await env.meets_a_stop(state):
                self._condition = state["stop_condition"]
        if self._condition is not None:
            self.was_refused = self._condition
            raise RolloutOverError(self._condition)
        self._begun += 1

    def _left(self) -> int | None:
        return None if self._max_total_tokens is None else max(self._max_total_tokens - self._sampled, 0)

    async def _ask(self, request: Request, sampling: SamplingArgs) -> Completion:
        env, hook = self._env, self._env._hook("get_model_response")
        given: dict[str, Any] = {
            "oai_tools": request.tools or [],
            "sampling_args": sampling,
            "message_type": request.message_type,
        }
        ask = env._get_model_response if hook is None else hook
        try:
            return env.read_reply(await ask(self._state, request.prompt, **given))
        except BaseException as error:  # a user's override
            raise wrap(calls.contained(error), HookError, "get_model_response") from error

    async def _keep(self, request: Request, reply: Completion) -> None:
        step = self._env.make_step(self._state, request.prompt, reply)
        number, branch_id = self._branches.place(request.prompt, reply.message)
        step["trajectory_id"], step["extras"] = branch_id, {"branch": number}
        if request.tools:
            step["extras"]["tools"] = request.tools
        await self._env.keep_step(self._state, step)


def call_sampling(asked: Mapping[str, Any], own: Mapping[str, Any], left: int | None = None) -> SamplingArgs:
    """An agent's sampling arguments, overridden by those of the run; the smallest limit on a reply's length applies.

    >>> call_sampling({"temperature": 0, "max_tokens": 9, "stop": "."}, {"temperature": 1.0, "max_tokens": 64}, left=7)
    {'stop': '.', 'temperature': 1.0, 'max_tokens': 7}
    """
    in_body = own.get("extra_body") or {}
    taken = {*own, *in_body, *_LIMITS}
    merged = {name: value for name, value in asked.items() if name not in taken}
    theirs = asked.get("extra_body")
    if isinstance(theirs, Mapping) and "extra_body" in own:
        merged |= {name: value for name, value in theirs.items() if name not in taken}
    merged |= {name: value for name, value in own.items() if name not in _LIMITS}
    given = [(name, args[name]) for args in (asked, own) for name in _LIMITS if args.get(name) is not None]
    if odd := [f"{name} must be an integer, not {value!r:.80}" for name, value in given if type(value) is not int]:
        raise RequestRefusedError(odd[0])
    limits = [value for _, value in given]
    limits += [] if left is None else [left]
    if limits:
        merged[next((name for name in _LIMITS if name in own), "max_tokens")] = min(limits)
    return merged


def _shown(completion: Completion, request: Request, name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The reply that the agent gets, in OpenAI's format, with no more than it asked for."""
    body = with_openai_fields(completion, request, name)
    if wants_ids(asked.get):
        return body
    kept = {key: value for key, value in body.items() if key not in _HIDDEN}
    kept["choices"] = [
        {key: value for key, value in choice.items() if key not in _HIDDEN_OF_CHOICE}
        | ({} if asked.get("logprobs") else {"logprobs": None})
        for choice in cast(list[dict[str, Any]], body["choices"])
    ]
    return kept
