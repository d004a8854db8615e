"""A reward function → a plan: which arguments it gets, and whether it scores a rollout, a group or a batch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from verifiers.calls import Hook
from verifiers.errors import GraderError
from verifiers.signatures import signature_of
from verifiers.types import LARGEST_SCORE, State

F = TypeVar("F", bound=Callable[..., Any])

ONE = ("prompt", "completion", "answer", "state", "task", "info")
MANY = ("prompts", "completions", "answers", "states", "tasks", "infos")
_SINGULAR = dict(zip(MANY, ONE, strict=True))
_DEFAULTS: dict[str, Any] = {"answer": "", "task": "default", "completion": None, "prompt": None}


def group_reward(function: F) -> F:
    """Declare that a reward function scores all rollouts of one example at once.

    It takes ``completions``, ``answers``, ``states``, … and returns one number per rollout.
    """
    function.is_group_reward = True  # type: ignore[attr-defined]
    return function


@overload
def cpu_bound(function: F) -> F: ...
@overload
def cpu_bound(*, timeout_s: float) -> Callable[[F], F]: ...
def cpu_bound(function: Any = None, *, timeout_s: float | None = None) -> Any:
    """Declare that a reward function computes for long: it then runs in a worker process that can be killed.

    ``@cpu_bound`` or ``@cpu_bound(timeout_s=10)``. If a call exceeds its limit (``timeout_s``, or else that of the
    run), the process is killed and the rollout fails.
    """
    if function is None:
        return functools.partial(cpu_bound, timeout_s=timeout_s)
    function.is_cpu_bound = True
    function.timeout_s = timeout_s
    return function


def name_of(function: Any) -> str:
    """The name under which a function's score is reported.

    >>> name_of(functools.partial(max, 0))
    'max'
    """
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", None) or type(function).__name__)


class Plan:
    """How one reward function is called."""

    __slots__ = ("args", "function", "hook", "is_cpu_bound", "is_group", "name", "takes_all", "vectorized")

    def __init__(self, function: Callable[..., Any], class_objects: Mapping[str, Any]) -> None:
        if not callable(function):
            raise TypeError(f"a reward function must be callable, got {function!r}")
        self.function = function
        self.name = name_of(function)
        parameters = _parameters(function)
        self.is_group = bool(getattr(function, "is_group_reward", False)) or any(p.name in MANY for p in parameters)
        self.is_cpu_bound = bool(getattr(function, "is_cpu_bound", False))
        vectorized = getattr(function, "vectorized", None)
        self.vectorized = vectorized if callable(vectorized) else None
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.args = self._check(parameters, class_objects)
        self.hook = Hook(function, kind="reward")
        if self.is_cpu_bound:
            from verifiers.rubrics.workers import check_shippable

            check_shippable(function)
            self.hook.timeout_s = getattr(function, "timeout_s", None)

    def _check(self, parameters: Sequence[inspect.Parameter], class_objects: Mapping[str, Any]) -> tuple[str, ...]:
        fields = (*(MANY if self.is_group else ONE), *class_objects)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        unknown = [p.name for p in named if p.name not in fields and p.default is p.empty]
        unknown += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if unknown:
            raise TypeError(
                f"reward {self.name!r} has unknown arguments {sorted(unknown)}; it may have {', '.join(fields)}. "
                f"To pass other objects, use class_objects={{name: object}} or add_class_object(name, object) "
                f"before the function is added"
            )
        if self.takes_all:
            return fields
        return tuple(p.name for p in named if p.name in fields)

    def arguments(self, state: State, class_objects: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for one rollout."""
        return {name: class_objects[name] if name in class_objects else field(state, name) for name in self.args}

    def group_arguments(self, states: Sequence[State], class_objects: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for a whole group."""
        return {
            name: class_objects[name] if name in class_objects else column(states, _SINGULAR[name])
            for name in self.args
        }


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        # For a partial, do not follow __wrapped__: the wrapped function still has the arguments that are bound.
        is_partial = isinstance(function, functools.partial)
        return list(signature_of(function, follow_wrapped=not is_partial).parameters.values())
    except (TypeError, ValueError):  # builtins without a signature
        raise TypeError(
            f"the signature of reward {name_of(function)!r} cannot be read; wrap it in a Python function"
        ) from None


def field(state: Mapping[str, Any], name: str) -> Any:
    """One field of a rollout, as reward functions get it."""
    if name == "state":
        return state
    value = state.get(name)
    return default_of(name) if value is None else value


def default_of(name: str) -> Any:
    """The value that reward functions get for a missing field."""
    return {} if name == "info" else _DEFAULTS[name]


def column(states: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """One field of many rollouts."""
    if name == "state":
        return list(states)
    return [default_of(name) if (value := state.get(name)) is None else value for state in states]


def as_score(value: Any, name: str) -> float:
    """Convert what a reward function returned into a float that can be averaged. Texts are refused.

    >>> as_score(True, "is_right")
    1.0
    >>> as_score("1.0", "is_right")
    Traceback (most recent call last):
    verifiers.errors.GraderError: reward 'is_right' returned '1.0', which is not a number
    """
    if isinstance(value, (str, bytes, bytearray)):
        raise GraderError(f"reward {name!r} returned {value!r:.100}, which is not a number")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    except (TypeError, ValueError) as error:
        raise GraderError(f"reward {name!r} returned {value!r:.100}, which is not a number") from error
    if not math.isfinite(score):
        raise GraderError(f"reward {name!r} returned {score}, which is not finite")
    if abs(score) > LARGEST_SCORE:
        raise GraderError(f"reward {name!r} returned {score:g}, which is beyond the limit of {LARGEST_SCORE:g}")
    return score


def as_weight(weight: Any) -> float:
    """A weight, which must be a finite number."""
    try:
        value = float(weight)
    except (TypeError, ValueError):
        value = math.nan
    if not abs(value) <= LARGEST_SCORE:
        raise ValueError(f"a weight must be a finite number, not {weight!r}")
    return value
