"""Functions of a user's own (estimators, losses, callbacks, overridden methods) become calls with what they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, cast

from verifiers.rubrics.signature import name_of


class Named:
    """A function that is called with those of the known arguments that it asks for by name; checked when it is made.

    ``first`` is an argument that a first parameter of any other name gets.

    >>> Named(lambda r, states: (r, states), ["rewards", "states", "groups"], what="advantage", first="rewards")(
    ...     rewards=1, states=2, groups=3
    ... )
    (1, 2)
    """

    def __init__(
        self, function: Callable[..., Any], known: Collection[str], *, what: str, first: str | None = None
    ) -> None:
        if not callable(function):
            raise TypeError(f"{what} is a function or a name, not a {type(function).__name__}")
        self.function, self._first = function, None
        name, can_have = name_of(function), ", ".join(known)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            raise TypeError(f"{what} {name!r} does not say which arguments it takes; wrap it in a def") from None
        self.wanted: set[str] = set()
        for place, one in enumerate(parameters):
            is_placed = one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
            if one.kind is one.VAR_KEYWORD:
                self.wanted |= set(known)
            elif one.name in known and one.kind is not one.POSITIONAL_ONLY:
                self.wanted.add(one.name)
            elif place == 0 and first is not None and is_placed:
                self._first = first
            elif one.default is one.empty and one.kind is not one.VAR_POSITIONAL:
                raise TypeError(f"{what} {name!r} asks for {one.name!r}; it can have {can_have}")
        if self._first is not None:
            self.wanted.discard(self._first)
        if not self.wanted and self._first is None:
            raise TypeError(f"{what} {name!r} asks for nothing; it can have {can_have}")

    def __call__(self, **given: Any) -> Any:
        named = {name: given[name] for name in given if name in self.wanted}
        return self.function(**named) if self._first is None else self.function(given[self._first], **named)


def own_function(config: Any, argument: str, field: str, given: Any) -> Callable[..., Any] | None:
    """A function that was given; a name is put into a configuration instead, unless that says something else."""
    if given is None or not isinstance(given, str):
        return cast("Callable[..., Any] | None", given)
    said = getattr(config, field)
    if config.is_set(field) and said != given:
        raise TypeError(f"{argument}={given!r} and {field}={said!r} of the configuration differ; pass one of them")
    setattr(config, field, given)
    return None


def is_overridden(given: Any, base: type, name: str) -> bool:
    """Is a method another one than that of ``base``, by a subclass or by assignment?"""
    return getattr(type(given), name) is not getattr(base, name) or name in vars(given)


def call_fitting(function: Callable[..., Any], *args: Any) -> Any:
    """Call a method with as many of these arguments as it takes: ``get_batch()`` and ``get_batch(epoch, step)``.

    >>> call_fitting(lambda epoch: epoch, 1, 2)
    1
    """
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return function(*args)
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return function(*args[: len(places)])


def call_callbacks(trainer: Any, event: str, *what: Any) -> None:
    """Call the method of this name of each of a trainer's callbacks; a plain function is called after each step."""
    for callback in trainer.callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(trainer, *what)
        elif event == "on_step_end" and callable(callback):
            callback(trainer, *what)
