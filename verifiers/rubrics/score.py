"""The score of one rollout: its parts, how it is written into the state, and the error if scoring failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from verifiers.errors import Error, GraderError, wrap
from verifiers.escapes import TimeLimitError
from verifiers.messages import make_readable
from verifiers.rubrics.signature import Plan, as_score
from verifiers.stats.scores import centered
from verifiers.types import LARGEST_REWARD, LARGEST_SCORE, State


@dataclass(slots=True)
class Score:
    """The reward and metrics of one rollout, or the error if it could not be scored."""

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    error: Error | None = None

    def add(self, other: Score, weight: float = 1.0) -> None:
        """Add another rubric's score; metrics of the same name add up."""
        self.reward += weight * other.reward
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.error = self.error or other.error

    def flat(self) -> FlatScore:
        """``{"reward": …, name: …}``, with a reward of None if scoring failed."""
        return FlatScore({**self.metrics, "reward": None if self.error else self.reward})

    def check(self) -> None:
        """Replace a score that is too large or not finite by an error."""
        if self.error is None:
            self.error = _unusable(self.reward, self.metrics)


class FlatScore(dict[str, Any]):
    """A reward and its metrics in one dict; the attributes are those of 0.1.5's `RolloutScore`.

    >>> score = FlatScore(exact=1.0, reward=0.5)
    >>> score.reward, score.metrics
    (0.5, {'exact': 1.0})
    """

    @property
    def reward(self) -> Any:
        return self["reward"]

    @property
    def metrics(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if name != "reward"}


def _unusable(reward: Any, metrics: Mapping[str, Any]) -> Error | None:
    if not isinstance(reward, (int, float)) or not abs(reward) <= LARGEST_REWARD:
        return GraderError(
            f"the weighted rewards add up to {reward!r:.100}; a reward must be a number within ±{LARGEST_REWARD:g}, "
            "so that it can be averaged and trained on"
        )
    try:
        for name, value in metrics.items():
            if type(value) is not float or not -LARGEST_SCORE <= value <= LARGEST_SCORE:
                as_score(value, str(name))
    except Error as error:
        return error
    return None


def score_of(result: Any, state: State, name: str) -> Score:
    """The score that an overridden ``score_rollout`` returned, or else wrote into the state.

    It may return a number, a dict of reward and metrics, a `RolloutScore`, the state, or None.
    """
    if (error := state.get("error")) is not None:  # its own, or that of a rubric that it called
        return Score(error=_as_error(error, name))
    if isinstance(result, State):
        result, state = None, result
    reward, metrics = result, state.get("metrics") or {}
    if isinstance(result, Mapping) and "reward" in result:
        flat = {key: value for key, value in result.items() if key not in ("reward", "metrics")}
        reward, metrics = result["reward"], {**flat, **(result.get("metrics") or {})}
    elif result is None or isinstance(result, Mapping):
        reward = state.get("reward")
    found = {str(key): as_score(value, str(key)) for key, value in metrics.items()}
    return Score(reward=as_score(reward, name), metrics=found)


def _as_error(written: Any, name: str) -> Error:
    """An error that foreign scoring code wrote into ``state["error"]``, as a failure of the grader."""
    if isinstance(written, Error) and written.blame != "policy":
        return written
    error = GraderError(f"{name} wrote the error {written!r:.300} into the state")
    error.__cause__ = written if isinstance(written, BaseException) else None
    return error


def grader_error(error: Exception, plan: Plan) -> Error:
    if isinstance(error, TimeLimitError):
        return GraderError(f"reward {plan.name!r}: {error}")
    wrapped = wrap(error, GraderError, f"reward {plan.name!r}")
    return wrapped if wrapped.blame != "policy" else GraderError(f"reward {plan.name!r} raised {error!r}")


def one_each(values: Any, n: int, plan: Plan) -> list[float | Error]:
    """The scores of a whole group. An invalid score is an error for its rollout only."""
    if isinstance(values, (Mapping, Set, str, bytes, bytearray)):
        kind = type(values).__name__
        raise GraderError(f"group reward {plan.name!r} returned a {kind}; it must return a list, one score per rollout")
    checked = [_score_or_error(value, plan) for value in islice(values, n + 1)]
    if len(checked) != n:
        found = len(values) if hasattr(values, "__len__") else f"{n}+" if len(checked) > n else len(checked)
        raise GraderError(f"group reward {plan.name!r} returned {found} scores for {n} rollouts")
    return checked


def _score_or_error(value: Any, plan: Plan) -> float | Error:
    try:
        return as_score(value, plan.name)
    except Exception as error:  # a foreign object may say how it becomes a number
        return grader_error(error, plan)


def state_from(
    prompt: Any = None,
    completion: Any = None,
    answer: Any = "",
    state: Mapping[str, Any] | None = None,
    task: str = "default",
    info: Mapping[str, Any] | None = None,
    **extra: Any,
) -> State:
    """A state to score, from separate fields. A rollout's state is used as it is unless the fields differ from it."""
    if isinstance(state, State) and "input" in state:
        given = {"prompt": prompt, "completion": completion, "answer": answer or None}
        changed = {
            name: value for name, value in given.items() if value is not None and _differ(value, state.get(name))
        }
        if not changed:
            return state
        copy = State(state)
        copy["input"] = {**state["input"], **{name: value for name, value in changed.items() if name != "completion"}}
        copy["completion"] = changed.get("completion", state.get("completion"))
        return copy
    fields = {"prompt": prompt, "answer": answer, "task": task, "info": dict(info or {}), "example_id": 0}
    merged = State(state or {})
    merged.update({**extra, "input": fields, "completion": completion})
    merged.setdefault("trajectory", [])
    make_readable(merged)
    return merged


def _differ(a: Any, b: Any) -> bool:
    if a is b:
        return False
    return not (isinstance(a, (str, list, dict)) and isinstance(b, (str, list, dict)) and a == b)


_OURS = ("input", "completion", "trajectory")


def hand_back(scored: State, given: Mapping[str, Any] | None) -> None:
    """Copy keys that reward functions added to the copy of a caller's state into that state, so that caches persist."""
    if isinstance(given, dict) and given is not scored:
        noted = [name for name in scored if name not in given and name not in _OURS]
        given.update({name: dict.__getitem__(scored, name) for name in noted})


def write_score(state: State, score: Score, *, is_whole: bool = True) -> None:
    """Write a score into the state; a failed one leaves no reward.

    Turns without a reward get that of the rollout once it ``is_whole``, that is, when no group reward is missing.
    """
    score.check()
    if score.error is None and (written := state.get("error")) is not None:
        score.error = _as_error(written, "a reward function")
    if score.error is not None:
        state["error"] = score.error
        state["reward"] = None
        state["metrics"] = score.metrics
        return
    state["reward"] = score.reward
    state["metrics"] = score.metrics
    before = getattr(state, "forgotten_reward", None)
    for step in (state.get("trajectory") or ()) if is_whole else ():
        if step.get("reward") in (None, before):
            step["reward"] = score.reward


def forget_score(state: State) -> None:
    """Remove the score. Turns whose reward came from it get that of the next score."""
    reward, steps = state.get("reward"), state.get("trajectory") or ()
    if all(step.get("reward") == reward for step in steps):
        state.forgotten_reward = reward
    for step in steps:
        step["advantage"] = None
    state.update(error=None, reward=None, advantage=None, metrics=None)


def note_scoring_time(states: Sequence[State], took_ms: float) -> None:
    """Add the time of scoring to each rollout's timing."""
    for state in states:
        timing = state.get("timing")
        if timing is not None:
            timing["scoring_ms"] = timing.get("scoring_ms", 0.0) + took_ms
            timing["total_ms"] = timing.get("generation_ms", 0.0) + timing["scoring_ms"]


def write_advantages(states: Sequence[State]) -> None:
    """Set advantages: reward minus the mean of the group's valid rewards; failed rollouts neither count nor get one.

    A trainer replaces them by its own, so that ``state["advantage"]`` is the one that is trained with.
    """
    valid = [(state, reward) for state in states if (reward := state.get("reward")) is not None]
    for (state, _), advantage in zip(valid, centered([reward for _, reward in valid]), strict=True):
        state.note_advantage(advantage)
