"""An environment and rows → finished, scored rollouts, with limited concurrency, for a caller in another process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verifiers.clients.asking_for import ask_for
from verifiers.clients.openai_looks import OpenAILooks
from verifiers.clients.protocol import Client, Completion, Request
from verifiers.envs.calling import Answerer
from verifiers.envs.run_steps import score_alone, score_group
from verifiers.escapes import contained
from verifiers.foreign import time_limits
from verifiers.rubrics.score import Score, note_scoring_time
from verifiers.types import Row, SamplingArgs, State

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment

Ask = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The settings that all rollouts of a run share. Without a ``client``, the caller calls the model."""

    model: str
    client: Client | None = None
    sampling: SamplingArgs = field(default_factory=dict)
    is_scored: bool = True
    reward_timeout_s: float | None = None
    hook_timeout_s: float | None = None


class CallersClient(OpenAILooks):
    """A client that sends each request back to the caller, who has the real client."""

    def __init__(self, ask: Ask, model: str) -> None:
        self._ask, self.model = ask, model

    async def complete(self, request: Request) -> Completion:
        return await self._ask(request)


class Host:
    """One environment, and limits on its concurrent rollouts, generations and scorings (None: no limit)."""

    def __init__(
        self, env: Environment, *, at_once: int | None = None, generation: int | None = None, scoring: int | None = None
    ) -> None:
        self.env = env
        self._slots, self._generation, self._scoring = _gate(at_once), _gate(generation), _gate(scoring)

    async def play(
        self, row: Row, name: str | None, terms: Terms, ask: Ask, on_begin: Callable[[], None]
    ) -> tuple[State, Score | None]:
        """Run one rollout, and score it if required and it did not fail. Raises only cancellation."""
        client: Any = terms.client or CallersClient(ask, terms.model)
        answerer = Answerer(client, client, terms.model)
        async with self._slots:
            on_begin()
            with self._limits(terms):
                if name is not None:
                    ask_for(name)
                async with self._generation:
                    state = await self._generate(row, answerer, terms)
                if not terms.is_scored or state.get("error") is not None:
                    return state, None
                async with self._scoring:
                    return state, await self._score(state)

    def _limits(self, terms: Terms) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(time_limits(reward_s=terms.reward_timeout_s, hook_s=terms.hook_timeout_s, for_all=True))
        stack.enter_context(self.env._time_limits())
        return stack

    async def _generate(self, row: Row, answerer: Answerer, terms: Terms) -> State:
        try:
            return await self.env.run_row(row, answerer, terms.sampling)
        except BaseException as error:  # foreign code
            return self.env.failed_state(row, answerer, terms.sampling, contained(error))

    async def _score(self, state: State) -> Score:
        began = time.perf_counter()
        score = await score_alone(self.env, state)
        score.check()
        note_scoring_time((state,), (time.perf_counter() - began) * 1000)
        return score

    async def score(self, state: State, terms: Terms) -> Score:
        """Score a rollout that ran elsewhere."""
        async with self._scoring:
            with self._limits(terms):
                return await self._score(state)

    async def score_together(self, states: Sequence[State], scores: Sequence[Score], terms: Terms) -> None:
        """Add the group rewards to the scores."""
        async with self._scoring:
            with self._limits(terms):
                await score_group(self.env, states, scores)


def _gate(limit: int | None) -> AbstractAsyncContextManager[Any]:
    return asyncio.Semaphore(limit) if limit is not None and limit > 0 else nullcontext()
