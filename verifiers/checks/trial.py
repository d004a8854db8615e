"""Replies → how an environment scores them: concurrent rollouts with scripted models, within a time limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verifiers import calls
from verifiers.clients import FakeClient
from verifiers.clients.protocol import Completion, Request
from verifiers.envs.environment import Environment
from verifiers.errors import ModelError
from verifiers.reruns.judges import judges_answer
from verifiers.reruns.play import play
from verifiers.rubrics.judge_template import read_scale
from verifiers.types import Row, State

TRIAL_S = 120.0
MOST_TURNS = 200
ReplyTo = Callable[[Row, int], Any]  # a row and its number → a reply for a `FakeClient`


class EndlessError(ModelError):
    """A rollout asked for more replies than any task needs."""


class Scripted(FakeClient):
    """A model with scripted replies, which yields to other tasks and limits the number of replies."""

    async def complete(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        if len(self.requests) >= MOST_TURNS:
            raise EndlessError(f"it asked for more than {MOST_TURNS} replies")
        return await super().complete(request)


class FunctionTime(NamedTuple):
    """How long one reward function took over one rollout."""

    seconds: float
    function: str
    state: State


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The rollouts with one kind of reply."""

    states: list[State]
    name: str = ""
    times: list[FunctionTime] = field(default_factory=list)

    @property
    def failed(self) -> list[State]:
        return [state for state in self.states if state.get("error") is not None]

    @property
    def rewards(self) -> list[float]:
        return [float(state["reward"]) for state in self.states if state.get("reward") is not None]

    @property
    def mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def causes(self) -> str:
        """Why rollouts failed, most frequent cause first."""
        counts = Counter(
            f"{type(state['error']).__name__}: {str(state['error']).strip().splitlines()[0][:160]}"
            if str(state["error"]).strip()
            else type(state["error"]).__name__
            for state in self.failed
        )
        return "; ".join(f"{count} × {cause}" for cause, count in counts.most_common(2))

    @property
    def scoring_s(self) -> list[float]:
        return [float((state.get("timing") or {}).get("scoring_ms") or 0) / 1000 for state in self.states]


def try_replies(
    env: Environment,
    rows: Sequence[Row],
    reply_to: ReplyTo,
    *,
    judge_says: bool = False,
    judge_quotes: bool = False,
    name: str = "",
) -> Trial:
    """Run rows with a scripted reply and verdict for each. Raises TimeoutError if they do not end."""
    judge = FakeClient(lambda request: (quoting if judge_quotes else verdict)(request, judge_says))

    times: list[FunctionTime] = []

    def note(state: State, function: str, seconds: float) -> None:
        times.append(FunctionTime(seconds, function, state))

    async def run() -> list[State]:
        pairs = [(row, Scripted(reply_to(row, number))) for number, row in enumerate(rows)]
        with judges_answer(env, lambda server: judge):
            async with asyncio.timeout(TRIAL_S):
                states = await play(env, pairs, model="check", on_function=note)
        if any(isinstance(state.get("error"), EndlessError) for state in states):
            raise TimeoutError
        return states

    return Trial(states=calls.run(run), name=name, times=times)


def verdict(request: Request, is_good: bool) -> str:
    """A judge's verdict in the form that its prompt asks for."""
    text = request.prompt if isinstance(request.prompt, str) else str(request.prompt[-1].get("content", ""))
    scale = read_scale(text)
    if scale is None:
        return "yes" if is_good else "no"
    return f"<score>{scale[1] if is_good else scale[0]:g}</score>"


def quoting(request: Request, is_good: bool) -> str:
    """The same verdict, with an explanation that quotes the opposite one from the reply."""
    own, quoted = verdict(request, is_good), verdict(request, not is_good)
    if own.startswith("<score>"):
        return f"The reply says {quoted} of itself, which I ignore. {own}"
    return f'{own}. The reply tells me to say "{quoted}", which I ignore.'
