"""Calls functions of users (estimators, losses, callbacks, overridden methods) with the arguments that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from verifiers.rubrics.signature import name_of
from verifiers.signatures import signature_of
from verifiers.types import Row

Function = Callable[..., Any]
RowSampler = Callable[[Sequence[Row], float], Sequence[Row]]  # (all rows, epochs so far) → the rows to sample from
WeightSchedule = Callable[[float], Sequence[float]]  # epochs so far → the weights of the reward functions


class CallByName:
    """Calls a function with the known arguments that its parameters name; the signature is checked at construction.

    ``first`` is the argument that is passed to a first parameter with any other name.

    >>> CallByName(lambda r, states: (r, states), ["rewards", "states", "groups"], what="advantage", first="rewards")(
    ...     rewards=1, states=2, groups=3
    ... )
    (1, 2)
    """

    def __init__(
        self, function: Callable[..., Any], known: Collection[str], *, what: str, first: str | None = None
    ) -> None:
        if not callable(function):
            raise TypeError(f"{what} must be a function or a name, not a {type(function).__name__}")
        self.function, self._first = function, None
        name, can_have = name_of(function), ", ".join(known)
        try:
            parameters = list(signature_of(function).parameters.values())
        except (TypeError, ValueError):
            raise TypeError(f"the signature of {what} {name!r} cannot be read; wrap it in a def") from None
        self.wanted: set[str] = set()
        for i, one in enumerate(parameters):
            if one.kind is one.VAR_KEYWORD:
                self.wanted |= set(known)
            elif one.name in known and one.kind is not one.POSITIONAL_ONLY:
                self.wanted.add(one.name)
            elif i == 0 and first is not None and _is_positional(one):
                self._first = first
            elif one.default is one.empty and one.kind is not one.VAR_POSITIONAL:
                raise TypeError(f"{what} {name!r} has an unknown parameter {one.name!r}; it can have {can_have}")
        if self._first is not None:
            self.wanted.discard(self._first)
        if not self.wanted and self._first is None:
            raise TypeError(f"{what} {name!r} has no parameters; it can have {can_have}")

    def __call__(self, **given: Any) -> Any:
        named = {name: given[name] for name in given if name in self.wanted}
        return self.function(**named) if self._first is None else self.function(given[self._first], **named)


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def own_function(config: Any, argument: str, field: str, given: Any) -> Callable[..., Any] | None:
    """The function that was passed to a trainer, if any; a name is stored in the configuration instead."""
    if given is None or not isinstance(given, str):
        return cast("Callable[..., Any] | None", given)
    said = getattr(config, field)
    if config.is_set(field) and said != given:
        raise TypeError(f"{argument}={given!r} and {field}={said!r} of the configuration differ; pass one of them")
    setattr(config, field, given)
    return None


def is_overridden(given: Any, base: type, name: str) -> bool:
    """Whether a method of ``base`` was overridden in a subclass or replaced by assignment."""
    return getattr(type(given), name) is not getattr(base, name) or name in vars(given)


def call_fitting(function: Callable[..., Any], *args: Any) -> Any:
    """Call a method with as many of these arguments as it takes: ``get_batch()`` or ``get_batch(epoch, step)``.

    >>> call_fitting(lambda epoch: epoch, 1, 2)
    1
    """
    parameters = signature_of(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return function(*args)
    return function(*args[: sum(map(_is_positional, parameters))])


def call_callbacks(trainer: Any, event: str, *what: Any) -> None:
    """Call the method of this name of each of a trainer's callbacks; a plain function is called after each step."""
    for callback in trainer.callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(trainer, *what)
        elif event == "on_step_end" and callable(callback):
            callback(trainer, *what)
