"""How an environment scores its rollouts: by its rubric, or by its own ``score_rollout``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers import calls
from verifiers.errors import GraderError, wrap
from verifiers.parsers import Parser
from verifiers.rubrics import Rubric
from verifiers.rubrics.score import Score, score_of
from verifiers.rubrics.signature import Plan
from verifiers.types import State


class EnvScoring:
    """The scoring part of an environment."""

    parser: Parser
    rubric: Rubric
    max_retries: int

    def _hook(self, name: str) -> calls.Hook | None:
        raise NotImplementedError

    @property
    def parsers(self) -> dict[str | None, Parser]:
        """The parser of each task; None: of all other tasks."""
        return {None: self.parser}

    @property
    def has_group_rewards(self) -> bool:
        return self.rubric.has_group_rewards and self._hook("score_rollout") is None

    @property
    def scores_nothing(self) -> bool:
        """Whether there is no reward function and no overridden scoring, so that every reward is 0."""
        return self.rubric.is_empty and self._hook("score_rollout") is None

    async def score_alone(self, state: State) -> Score:
        """Score one finished rollout, by a subclass's ``score_rollout`` if it has one."""
        hook = self._hook("score_rollout")
        score = await (self.rubric.score_alone(state) if hook is None else self._score_by_hook(hook, state))
        if score.error is None:
            score.metrics.update(self._counted(state))
        return score

    def _counted(self, state: State) -> dict[str, float]:
        """The environment's own metrics. For a saved rollout, the saved ones, because its state is incomplete."""
        own, saved = self.own_metrics(state), getattr(state, "saved_metrics", {})
        return {**own, **{name: saved[name] for name in own if saved.get(name) is not None}}

    async def _score_by_hook(self, hook: calls.Hook, state: State) -> Score:
        try:
            objects = {"parser": self.parser, "rubric": self.rubric, "messages": state["completion"]}
            plan = Plan(hook.function, objects)
            return score_of(await hook(**plan.arguments(state, objects)), state, "score_rollout")
        except BaseException as error:  # foreign code
            return Score(error=wrap(calls.contained(error), GraderError, f"{type(self).__name__}.score_rollout"))

    def own_metrics(self, state: State) -> dict[str, float]:
        """The metrics that the environment itself reports, besides the rubric's scores."""
        return {} if not self.max_retries else {"parse_retries": float(state.get("parse_retries", 0))}

    async def add_group_scores(self, states: Sequence[State], scores: Sequence[Score]) -> None:
        """Add the scores of group reward functions."""
        await self.rubric.add_group_scores(states, scores)

    async def _score_rollout(self, state: State) -> dict[str, Any]:
        """Score one rollout with the rubric and write the score into it."""
        return await Rubric._score_rollout(self.rubric, state)

    score_rollout = calls.both(_score_rollout)
