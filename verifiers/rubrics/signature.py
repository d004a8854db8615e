"""A reward function → a plan: which arguments it gets, and whether it scores a rollout, a group or a batch."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from verifiers.calls import Hook
from verifiers.errors import GraderError
from verifiers.signatures import signature_of
from verifiers.types import LARGEST_SCORE, State
from verifiers.views import copied

F = TypeVar("F", bound=Callable[..., Any])

ONE = ("prompt", "completion", "answer", "state", "task", "info")
MANY = ("prompts", "completions", "answers", "states", "tasks", "infos")
COPIED = frozenset(("prompt", "completion", "answer"))
"""Each function gets its own copy of these, so that its changes are not seen by other functions, and not saved."""
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

    __slots__ = ("args", "function", "hook", "is_cpu_bound", "is_group", "name", "objects", "takes_all", "vectorized")

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
        self.objects = frozenset(class_objects)
        self.args = self._check(parameters)
        self.hook = Hook(function, kind="reward")
        if self.is_cpu_bound:
            from verifiers.rubrics.workers import check_shippable

            check_shippable(function)
            self.hook.timeout_s = getattr(function, "timeout_s", None)

    def _check(self, parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
        fields = (*(MANY if self.is_group else ONE), *sorted(self.objects))
        if unknown := _unknown(parameters, fields):
            raise _unknown_error(self.name, unknown, fields)
        if self.takes_all:
            return fields
        return tuple(p.name for p in parameters if p.kind in _BY_NAME and p.name in fields)

    def arguments(self, state: State, class_objects: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for one rollout."""
        return {name: class_objects[name] if name in class_objects else field(state, name) for name in self.args}

    def group_arguments(self, states: Sequence[State], class_objects: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for a whole group."""
        return {
            name: class_objects[name] if name in class_objects else _own_column(states, _SINGULAR[name])
            for name in self.args
        }


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ALIKE = 0.8  # similarity (difflib) above which one word counts as a misspelling of the other


def _unknown(parameters: Sequence[inspect.Parameter], fields: Sequence[str]) -> list[str]:
    """The parameters that are neither fields nor have a default."""
    required = [p for p in parameters if p.default is p.empty]
    unknown = [p.name for p in required if p.kind in _BY_NAME and p.name not in fields]
    return unknown + [p.name for p in required if p.kind is p.POSITIONAL_ONLY]


def _unknown_error(name: str, unknown: Sequence[str], fields: Sequence[str]) -> TypeError:
    return TypeError(
        f"reward {name!r} has unknown arguments {sorted(unknown)}; it may have {', '.join(fields)}. To pass other "
        "objects, use class_objects={name: object} or add_class_object(name, object) before the environment is created"
    )


def knows_all_arguments(function: Any, class_objects: Mapping[str, Any]) -> bool:
    """Whether every argument of a function exists. One that is a misspelled field is refused.

    Any other unknown argument may be the name of an object that is added later. It is refused when the rubric is used.
    """
    if not callable(function):
        raise TypeError(f"a reward function must be callable, got {function!r}")
    fields = (*ONE, *MANY, *class_objects)
    unknown = _unknown(_parameters(function), fields)
    if any(difflib.get_close_matches(name, fields, n=1, cutoff=_ALIKE) for name in unknown):
        raise _unknown_error(name_of(function), unknown, fields)
    return not unknown


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
    if value is None:
        return default_of(name)
    return copied(value) if name in COPIED else value


def _own_column(states: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    values = column(states, name)
    return list(map(copied, values)) if name in COPIED else values


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
