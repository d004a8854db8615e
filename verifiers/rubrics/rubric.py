"""Rollouts → scores: named functions, their weights, and a reward that is their weighted sum."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

from verifiers import calls
from verifiers.errors import Error, GraderError, wrap
from verifiers.parsers import Parser
from verifiers.rubrics.batch import Batch, from_columns, score_batch
from verifiers.rubrics.score import (
    Score,
    grader_error,
    hand_back,
    note_scoring_time,
    one_each,
    score_of,
    state_from,
    write_advantages,
    write_score,
)
from verifiers.rubrics.signature import Plan, as_score, as_weight, field, knows_all_arguments
from verifiers.signatures import signature_of
from verifiers.types import RewardFunc, State

OnFunction = Callable[[str, float], None]  # called with a reward function's name and its seconds
_on_function: contextvars.ContextVar[OnFunction | None] = contextvars.ContextVar("on_function", default=None)
# Rubrics whose overridden ``score_rollout`` is running: a ``super()`` call in it scores by functions and weights.
_scoring_own_way: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("scoring_own_way", default=())
# Those of them whose group rewards the run adds later, once the group is complete.
_group_follows: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("group_follows", default=())


class Rubric:
    """Weighted reward functions whose arguments are injected by name.

    >>> def exact(completion, answer): return completion[-1]["content"] == answer
    >>> rubric = Rubric(funcs=[exact])
    >>> rubric.score_rollout_sync("2+2?", [{"role": "assistant", "content": "4"}], "4", {})
    {'exact': 1.0, 'reward': 1.0}
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        class_objects: Mapping[str, Any] | None = None,
        *,
        parallelize_scoring: bool | None = None,
    ) -> None:
        if parallelize_scoring is not None:
            warnings.warn("parallelize_scoring has no effect: rollouts are always scored concurrently", stacklevel=2)
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser, **(class_objects or {})}
        if callable(funcs):
            raise TypeError(f"funcs={funcs!r:.100} is a function; funcs must be a list of functions")
        self.funcs: list[RewardFunc] = list(funcs or [])
        self.weights: list[float] = [1.0] * len(self.funcs) if not weights else [as_weight(w) for w in weights]
        if len(self.weights) != len(self.funcs):
            raise ValueError(f"{len(self.funcs)} reward functions but {len(self.weights)} weights; pass one for each")
        self._plans: dict[int, Plan] = {}
        for function in self.funcs:
            self._plan_if_known(function)

    def __getstate__(self) -> dict[str, Any]:
        """Plans are not pickled; they are created again when needed."""
        return {**vars(self), "_plans": {}}

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger named for the rubric's class, for subclasses."""
        return logging.getLogger(f"verifiers.rubrics.{type(self).__name__}")

    # --- functions and weights ------------------------------------------------------------------------------------

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        return self.funcs

    @reward_funcs.setter
    def reward_funcs(self, funcs: Sequence[RewardFunc]) -> None:
        self.funcs = list(funcs)
        if len(self.weights) != len(self.funcs):
            self.weights = [1.0] * len(self.funcs)
        for function in self.funcs:
            self._plan_if_known(function)

    @property
    def reward_weights(self) -> list[float]:
        return self.weights

    @reward_weights.setter
    def reward_weights(self, weights: Sequence[float]) -> None:
        self.weights = [as_weight(weight) for weight in weights]

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function that counts towards the reward."""
        self._plan_if_known(func)
        self.weights.append(as_weight(weight))
        self.funcs.append(func)

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """Add a function that is reported but does not count towards the reward."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, obj: Any) -> None:
        """Make an object available to reward functions as an argument of this name."""
        self.class_objects[name] = obj

    def check_arguments(self) -> None:
        """Raise a TypeError for a function with an argument that does not exist. Environments call it on creation."""
        self._all_plans()

    @property
    def has_group_rewards(self) -> bool:
        return any(plan.is_group for plan in self._all_plans()) or self._own_group_scoring() is not None

    @property
    def is_empty(self) -> bool:
        """Whether there are no reward functions, and no subclass that overrides the scoring."""
        return not self.funcs and not self.scores_its_own_way

    @property
    def scores_its_own_way(self) -> bool:
        """Whether a subclass scores rollouts by other means than this class's functions and weights."""
        cls = type(self)
        is_plain = (cls.score_alone, cls._score_by_functions) == (Rubric.score_alone, Rubric._score_by_functions)
        return not is_plain or self._own_scoring() is not None or self._own_group_scoring() is not None

    def get_reward_func_names(self) -> list[str]:
        """The names under which scores are reported."""
        return self._get_reward_func_names()

    def get_reward_funcs(self) -> list[RewardFunc]:
        """The functions, in order; for a RubricGroup, those of all its rubrics."""
        return self._get_reward_funcs()

    def get_reward_weights(self) -> list[float]:
        """The weights of the functions, in the same order."""
        return self._get_reward_weights()

    def _get_reward_func_names(self) -> list[str]:
        return [name for name, _, _ in self._named()]

    def _get_reward_funcs(self) -> list[RewardFunc]:
        return list(self.funcs)

    def reward_shares(self) -> dict[str, float]:
        """The weight of each reward function in the reward, by name; empty if it depends on the row."""
        names, weights = self._get_reward_func_names(), self._get_reward_weights()
        shares: dict[str, float] = {}
        for name, weight in zip(names, weights, strict=True) if len(names) == len(weights) else ():
            shares[name] = shares.get(name, 0.0) + weight
        return shares

    def weights_by_name(self) -> dict[str, Any]:
        """The weights, for a run's metadata: by function, or for an EnvGroup by member and function."""
        return self.reward_shares()

    def _get_reward_weights(self) -> list[float]:
        """One weight per function. A subclass that sets both lists itself may have set more weights than functions."""
        n_funcs, n_weights = len(self.funcs), len(self.weights)
        if n_weights < n_funcs:
            raise ValueError(f"{n_funcs} reward functions but {n_weights} weights; give one for each")
        if n_weights > n_funcs:
            warnings.warn(
                f"{n_weights} weights for {n_funcs} reward functions: the last ones have no effect", stacklevel=2
            )
        return self.weights if n_weights == n_funcs else self.weights[:n_funcs]

    def _plan(self, function: Any) -> Plan:
        plan = self._plans.get(id(function))
        if plan is None or plan.function is not function or plan.objects != self.class_objects.keys():
            plan = self._plans[id(function)] = Plan(function, self.class_objects)
        return plan

    def _plan_if_known(self, function: Any) -> None:
        """Check a function now, unless it asks for an object that may be added later."""
        if knows_all_arguments(function, self.class_objects):
            self._plan(function)

    def _all_plans(self) -> list[Plan]:
        return [self._plan(function) for function in self.funcs]

    def _named(self) -> list[tuple[str, Plan, float]]:
        """Each function with the name under which it is reported; a second one of the same name gets a number."""
        seen: dict[str, int] = {}
        named = []
        for function, weight in zip(self.funcs, self._get_reward_weights(), strict=True):
            plan = self._plan(function)
            seen[plan.name] = count = seen.get(plan.name, 0) + 1
            named.append((plan.name if count == 1 else f"{plan.name}_{count}", plan, weight))
        return named

    # --- scoring inside a run -------------------------------------------------------------------------------------

    async def score_alone(self, state: State) -> Score:
        """The score of one rollout by all functions that do not need its group."""
        if self._own_group_scoring() is not None:
            return Score()  # the overridden score_group gives the whole score, once the group is complete
        own = self._own_scoring()
        if own is not None and not self._is_scoring_own_way():
            return await self._score_own_way(own, state)
        return await self._score_by_functions(state)

    async def _score_by_functions(self, state: State) -> Score:
        score = Score()
        for name, plan, weight in self._named():
            if plan.is_group:
                continue
            try:
                value = as_score(await self._invoke(plan, plan.arguments(state, self.class_objects)), plan.name)
            except BaseException as error:  # foreign code
                score.error = grader_error(calls.contained(error), plan)
                return score
            score.metrics[name] = value
            score.reward += weight * value
        return score

    async def score_together(self, states: Sequence[State]) -> list[Score]:
        """The score of each rollout of a group by the group reward functions."""
        own = self._own_group_scoring()
        if own is not None:
            return await self._score_group_own_way(own, states)
        return await self._score_group_by_functions(states)

    async def _score_group_by_functions(self, states: Sequence[State]) -> list[Score]:
        scores = [Score() for _ in states]
        for name, plan, weight in self._named():
            if not plan.is_group:
                continue
            try:
                values = await self._invoke(plan, plan.group_arguments(states, self.class_objects))
                checked = one_each(values, len(states), plan)
            except BaseException as error:  # foreign code
                failure = grader_error(calls.contained(error), plan)
                return [Score(error=failure) for _ in states]
            for score, value in zip(scores, checked, strict=True):
                if isinstance(value, Error):
                    score.error = score.error or value
                    continue
                score.metrics[name] = value
                score.reward += weight * value
        return scores

    async def _invoke(self, plan: Plan, kwargs: dict[str, Any]) -> Any:
        tell = _on_function.get()
        if tell is None:
            return await self._called(plan, kwargs)
        began = time.perf_counter()
        try:
            return await self._called(plan, kwargs)
        finally:
            tell(plan.name, time.perf_counter() - began)

    def _called(self, plan: Plan, kwargs: dict[str, Any]) -> Awaitable[Any]:
        if plan.is_cpu_bound:
            from verifiers.rubrics.workers import call_in_worker

            return call_in_worker(plan.function, kwargs, timeout_s=plan.hook.limit_s)
        return plan.hook(**kwargs)

    def _own_scoring(self) -> Callable[..., Any] | None:
        """An override of ``score_rollout_sync`` or ``score_rollout``, by a subclass or set on the object, if any."""
        cls = type(self)
        if cls.score_rollout_sync is not Rubric.score_rollout_sync:
            return self.score_rollout_sync
        if "score_rollout" in vars(self) or cls.score_rollout is not Rubric.score_rollout:
            return self.score_rollout
        return None

    async def _score_own_way(self, own: Callable[..., Any], state: State) -> Score:
        try:
            with _unscored([state]), _by_functions(self), _entered(_group_follows, self):
                result = await calls.Hook(own, kind="reward")(*_call_form(own, state))
                return score_of(result, state, own.__name__)
        except BaseException as error:  # foreign code
            return Score(error=wrap(calls.contained(error), GraderError, f"{type(self).__name__}.{own.__name__}"))

    def _own_group_scoring(self) -> Callable[..., Any] | None:
        """An override of ``score_group``, by a subclass or (by a host) on the object, if any."""
        is_own = "score_group" in vars(self) or type(self).score_group is not Rubric.score_group
        return self.score_group if is_own and not self._is_scoring_own_way() else None

    async def _score_group_own_way(self, own: Callable[..., Any], states: Sequence[State]) -> list[Score]:
        try:
            with _unscored(states), _by_functions(self):
                await calls.Hook(own, kind="reward")(*_group_call_form(own, list(states)))
                return [_written_score(state) for state in states]
        except BaseException as error:  # foreign code
            failure = wrap(calls.contained(error), GraderError, f"{type(self).__name__}.score_group")
            return [Score(error=failure) for _ in states]

    def _is_scoring_own_way(self) -> bool:
        return any(rubric is self for rubric in _scoring_own_way.get())

    # --- scoring by hand ------------------------------------------------------------------------------------------

    async def score_states(self, states: Sequence[State], score_sem: Any = None) -> None:
        """Score the rollouts of one group, and write rewards, metrics, advantages and errors into their states."""
        began = time.perf_counter()
        valid = [state for state in states if state.get("error") is None]
        async with score_sem or nullcontext():
            scores = list(await asyncio.gather(*(self.score_alone(state) for state in valid)))
            await self.add_group_scores(valid, scores)
        for state, score in zip(valid, scores, strict=True):
            write_score(state, score, is_whole=not _scoring_own_way.get())  # an override may still change it
        note_scoring_time(states, (time.perf_counter() - began) * 1000)
        write_advantages(states)

    async def add_group_scores(self, states: Sequence[State], scores: Sequence[Score]) -> None:
        """Add the group rewards to the scores of a group, without rollouts that have already failed."""
        live = [i for i, score in enumerate(scores) if score.error is None]
        if not live or not self.has_group_rewards or any(rubric is self for rubric in _group_follows.get()):
            return
        together = await self.score_together([states[i] for i in live])
        for i, score in zip(live, together, strict=True):
            scores[i].add(score)

    async def _score_rollout(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        score_sem = kwargs.pop("score_sem", None)
        if not args and kwargs.keys() == {"state"}:
            args = (kwargs.pop("state"),)
        if args and isinstance(args[0], State) and len(args) <= 2 and not kwargs:
            state = args[0]
            score_sem = args[1] if len(args) == 2 else score_sem
            await self.score_states([state], score_sem)
            if score_sem is not None and state.get("error") is not None:  # an outer trainer reads the reward next
                raise state["error"]
            return {**(state.get("metrics") or {}), "reward": state.get("reward")}
        state = state_from(*args, **kwargs)
        async with score_sem or nullcontext():
            score = await self.score_alone(state)
            await self.add_group_scores([state], [score])
        score.check()
        hand_back(state, args[3] if len(args) > 3 else kwargs.get("state"))
        if score.error is not None:
            raise score.error
        return score.flat()

    async def _score_rollout_as(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        """If a subclass overrides ``name``, this is its ``super()`` call, which scores by functions and weights."""
        is_super_call = getattr(type(self), name) is not getattr(Rubric, name)
        with _by_functions(self) if is_super_call else nullcontext():
            return await self._score_rollout(*args, **kwargs)

    @calls.both
    async def score_rollout(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """``score_rollout(state)`` writes into it; ``score_rollout(prompt, completion, answer, state)`` returns.

        If the rollout failed or cannot be scored, its error is in the state. If an outer trainer passes its semaphore,
        ``score_rollout(state, score_sem)``, the error is raised, because the trainer then needs a reward.
        """
        return await self._score_rollout_as("score_rollout", args, kwargs)

    @calls.blocking
    @calls.both
    async def score_rollout_sync(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The same, always synchronous."""
        return await self._score_rollout_as("score_rollout_sync", args, kwargs)

    async def _score_rollouts(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any] | None = None,
        answers: Sequence[Any] | None = None,
        states: Sequence[Mapping[str, Any]] | None = None,
        tasks: Sequence[Any] | None = None,
        infos: Sequence[Any] | None = None,
        **_: Any,
    ) -> dict[str, list[float | None]]:
        if completions is not None:
            batch = from_columns(prompts, completions, answers, states, tasks, infos)
            return (await score_batch(self, batch)).columns()
        scores = await score_batch(self, Batch(list(prompts)))
        for i, state in enumerate(prompts):
            write_score(state, scores.one(i), is_whole=not _scoring_own_way.get())
        return scores.columns()

    score_rollouts = calls.both(_score_rollouts)
    """Score columns or a list of states; returns columns, with None where scoring failed, whose cause is logged."""

    score_rollouts_sync = calls.blocking(score_rollouts)

    async def _score_group(
        self, states: Sequence[State], score_sem: AbstractAsyncContextManager[Any] | None = None
    ) -> None:
        is_super_call = type(self).score_group is not Rubric.score_group
        with _by_functions(self) if is_super_call else nullcontext():
            await self.score_states(states, score_sem)

    score_group = calls.both(_score_group)

    def _call_reward_func(self, func: RewardFunc, *args: Any, **kwargs: Any) -> float:
        """Call one reward function with fields by name; returns a float or raises `GraderError`."""
        plan = self._plan(func)
        state = state_from(*args, **kwargs)
        try:
            return as_score(calls.run(lambda: self._invoke(plan, plan.arguments(state, self.class_objects))), plan.name)
        except BaseException as error:  # foreign code
            raise grader_error(calls.contained(error), plan) from error


@contextmanager
def timing(tell: OnFunction | None) -> Iterator[None]:
    """Within the block, ``tell`` is called with the name and the seconds of each reward function call."""
    token = _on_function.set(tell)
    try:
        yield
    finally:
        _on_function.reset(token)


@contextmanager
def _entered(rubrics: contextvars.ContextVar[tuple[Any, ...]], rubric: Rubric) -> Iterator[None]:
    """Within the block, the context variable includes this rubric."""
    token = rubrics.set((*rubrics.get(), rubric))
    try:
        yield
    finally:
        rubrics.reset(token)


_by_functions = partial(_entered, _scoring_own_way)


@contextmanager
def _unscored(states: Sequence[State]) -> Iterator[None]:
    """Hide the scores of other rubrics from an override that writes into the states, and restore them afterwards."""
    before = [{name: state[name] for name in ("reward", "metrics") if name in state} for state in states]
    for state in states:
        state.update(reward=None, metrics={})
    try:
        yield
    finally:
        for state, known in zip(states, before, strict=True):
            for name in ("reward", "metrics"):
                state.pop(name, None)
            state.update(known)


def _call_form(own: Callable[..., Any], state: State) -> tuple[Any, ...]:
    """Arguments of an override: ``(state)``, ``(state, score_sem)`` or ``(prompt, completion, answer, state)``."""
    names = list(signature_of(own).parameters)
    if not names or names[0] == "state":
        return (state, nullcontext()) if "score_sem" in names else (state,)
    return tuple(field(state, name) for name in ("prompt", "completion", "answer", "state"))


def _written_score(state: State) -> Score:
    """The score that an overridden ``score_group`` wrote into a state; an unusable one fails only that rollout."""
    try:
        return score_of(None, state, "score_group")
    except GraderError as error:
        return Score(error=error)


def _group_call_form(own: Callable[..., Any], states: list[State]) -> tuple[Any, ...]:
    """Arguments of an overridden ``score_group``: ``(states, score_sem)``, or as in 0.1.10 ``(states)``."""
    try:
        signature_of(own).bind(states, nullcontext())
    except TypeError:
        return (states,)
    return states, nullcontext()
