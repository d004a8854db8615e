"""Finished rollouts → whether the mean reward is known precisely enough to stop the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from verifiers.rubrics import Rubric, RubricGroup
from verifiers.runner import Job
from verifiers.stats import ConfidenceSequence
from verifiers.stats.scores import TOLERANCE
from verifiers.types import State

LEVEL = 0.95
AT_ONCE = 64  # concurrent rollouts if no limit is set; those that run when the goal is reached are wasted
_LOOKED_AGAIN_AFTER = 1.01  # check again after so many times as many examples
_ORDER_SEED = 0
_AHEAD = 4  # examples may start ahead of the first unfinished one by _AHEAD * at_once, or by counted / _AHEAD


class EarlyStop:
    """Stops a run when the mean reward over examples is known to ± ``until``, by an always-valid confidence interval.

    Examples start in a seeded random order, and are counted in that order too, whichever ends first, because long
    rollouts differ from short ones. An example counts when all of its rollouts have ended; if all have failed, it does
    not count.
    """

    def __init__(
        self, jobs: Sequence[Job], until: float, bounds: tuple[float, float], *, at_once: int = AT_ONCE
    ) -> None:
        self.at_once = AT_ONCE if at_once == -1 else at_once
        self.sequence = ConfidenceSequence(until=until, bounds=bounds, level=LEVEL)
        self.order = list(dict.fromkeys(job.row["example_id"] for job in jobs))
        Random(_ORDER_SEED).shuffle(self.order)
        self.ranks = {example: rank for rank, example in enumerate(self.order)}
        self.missing = Counter(job.row["example_id"] for job in jobs)
        self.rewards: dict[Any, list[float]] = {}
        self.counted = 0  # examples counted so far, in order
        self.next_look = 2
        self.is_reached = False
        self.fault: str | None = None
        self._moved: asyncio.Event | None = None

    @property
    def is_over(self) -> bool:
        return self.is_reached or self.fault is not None

    def arranged(self, jobs: Iterable[Job]) -> list[Job]:
        """Jobs in the order in which they start."""
        return sorted(jobs, key=lambda job: (self.ranks[job.row["example_id"]], job.repeat))

    async def turn(self, job: Job) -> None:
        """Wait if this job is far ahead of an unfinished example, because it may turn out not to be needed."""
        rank = self.ranks[job.row["example_id"]]
        while not self.is_over and rank >= self.counted + max(_AHEAD * self.at_once, self.counted // _AHEAD):
            self._moved = self._moved or asyncio.Event()
            await self._moved.wait()
        await asyncio.sleep(0)  # rollouts that never wait must not run ahead of those that do

    def take(self, example: Any, reward: float | None) -> bool:
        """Count a finished rollout, with reward None if it failed. Returns whether the run is over."""
        self.missing[example] -= 1
        if reward is not None:
            self.rewards.setdefault(example, []).append(reward)
        while self.counted < len(self.order) and not self.missing[self.order[self.counted]] and self.fault is None:
            self._count(self.order[self.counted])
            self.counted += 1
        if self._moved is not None:
            self._moved.set()
            self._moved = None
        return self.is_over

    def take_state(self, state: State) -> bool:
        """Count a finished rollout of this run."""
        reward = None if state.get("error") is not None else state.get("reward")
        return self.take(state.get("example_id"), reward)

    def _count(self, example: Any) -> None:
        rewards = self.rewards.get(example)
        if not rewards:
            return
        least, most = self.sequence.bounds
        if outside := [reward for reward in rewards if not least - TOLERANCE <= reward <= most + TOLERANCE]:
            self.fault = (
                f"the reward of example {example} is {outside[0]:g}, but early stopping needs rewards within bounds, "
                f"which were assumed to be {least:g} and {most:g}; "
                "set them with reward_range=(least, most) or --reward-range LEAST,MOST, and resume"
            )
            return
        self.sequence.add(sum(rewards) / len(rewards))
        if not self.is_reached and self.sequence.n >= self.next_look:
            self.next_look = max(self.sequence.n + 1, int(self.sequence.n * _LOOKED_AGAIN_AFTER))
            self.is_reached = self.sequence.is_reached

    def without_more(self, jobs: Sequence[Job], kept: set[tuple[Any, int]], failed: Iterable[Any] = ()) -> list[Job]:
        """The remaining jobs of a resumed run: if it had stopped early, only the missing ones of started examples.

        ``failed`` are started examples with a failed rollout. If the saved rollouts are not enough yet, all jobs
        remain.
        """
        seen = {example for example, _ in kept} | set(failed)
        end = max((self.ranks[example] for example in seen if example in self.ranks), default=-1)
        trial = EarlyStop((), self.sequence.until, self.sequence.bounds)
        trial.order = [example for example in self.order[: end + 1] if example in self.rewards]
        trial.missing, trial.rewards, trial.next_look = Counter(), self.rewards, len(trial.order)
        for example in trial.order:
            trial._count(example)
        todo = [job for job in jobs if job.key not in kept]
        return [job for job in todo if self.ranks[job.row["example_id"]] <= end] if trial.is_over else todo

    def outcome(self) -> dict[str, Any]:
        """The outcome, for the metadata of the run."""
        until, (least, most) = self.sequence.until, self.sequence.bounds
        of = f"{self.counted:,} of {len(self.order):,} examples"
        low, high = self.sequence.range() if self.sequence.n and self.fault is None else (None, None)
        if self.fault is not None:
            reason = f"stopped early: {self.fault}"
        elif self.is_reached and self.counted < len(self.order):
            reason = f"stopped early: the mean reward is known to ±{until:g} after {of}, by an always-valid interval"
        elif self.is_reached:
            reason = f"the mean reward is known to ±{until:g}, by an always-valid interval"
        else:
            reason = f"the mean reward is not known to ±{until:g} after {of}; its interval is an always-valid one"
        return {
            "half_width": until,
            "is_reached": self.is_reached,
            "reason": reason,
            "examples": self.counted,
            "of": len(self.order),
            "low": low,
            "high": high,
            "level": LEVEL,
            "bounds": [least, most],
            "fault": self.fault,
        }


def bounds_of(rubric: Any) -> tuple[float, float]:
    """The smallest and the largest reward if each reward function is between 0 and 1; (0, 1) without known weights.

    >>> bounds_of(Rubric([lambda completion: 1.0, lambda completion: 0.5], weights=[1.0, 0.1]))
    (0.0, 1.1)
    """
    weights = _weights(rubric)
    least, most = sum(weight for weight in weights if weight < 0), sum(weight for weight in weights if weight > 0)
    return (float(least), float(most)) if least < most else (0.0, 1.0)


def _weights(rubric: Any) -> list[float]:
    if isinstance(rubric, RubricGroup):
        pairs = zip(rubric.rubrics, rubric.get_group_weights(), strict=True)
        return [weight * own for inner, weight in pairs for own in _weights(inner)]
    return list(rubric.reward_weights) if isinstance(rubric, Rubric) else []
